"""Saves a run, checks its replicas, and handles divergence and preemption."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jax
from rich.console import Console

import jaxshard
from jaxshard.apps.records.display import say
from jaxshard.apps.runs import snapshot as snapshots
from jaxshard.apps.runs.place import Place
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.apps.runs.snapshot import Snapshot, reshaped
from jaxshard.apps.trainer.build import Run
from jaxshard.checkpoint import Checkpointer
from jaxshard.system.text import printable, shell_command

_TIMES_BACK = 3


class MovedError(OSError):
    """The run can no longer be saved at --out. The message says where the model is saved."""


def resumed(run: Run, saves: Checkpointer, console: Console) -> Snapshot:
    """Restores the newest intact save into this run."""
    snapshot = reshaped(snapshots.restore(saves, run.saved_template), run.template)
    position, now = snapshot.position, run.template.position
    if position.text != now.text and run.text.older_fingerprint and position.text == run.text.older_fingerprint():
        say(console, "an older jaxshard saved this run: its checksum of the text, which covers samples only, matches")
        position = dataclasses.replace(position, text=now.text)
    if position.text != now.text:
        say(console, "the text differs: it is read from its beginning")
    return dataclasses.replace(snapshot, position=position.carried_over(now))


class Safekeeping:
    """The loop's hooks to save, check, go back and end.

    Args:
      run, saves, console: of the run.
      place: the run's folder; None except in process 0.
      preemption: tells when to end the run.
      saved: the step that is already saved, or None.

    Attributes:
      was_ended: whether a signal has ended the run.
    """

    def __init__(
        self,
        run: Run,
        saves: Checkpointer,
        console: Console,
        place: Place | None,
        preemption: jaxshard.guards.Preemption,
        saved: int | None,
    ):
        self._run, self._saves, self._console, self._preemption = run, saves, console, preemption
        self._place, self._times_back, self._saved = place, 0, saved
        self.was_ended = False

    def save(self, snapshot: Snapshot, heldout_loss: float | None) -> None:
        """Starts to save, once per step.

        Raises:
          MovedError: the run's folder was moved or replaced; the snapshot is saved elsewhere, if possible.
        """
        if snapshot.step != self._saved:
            self._attempt(snapshot, lambda: self._begin(snapshot, heldout_loss), heldout_loss)
            self._saved = snapshot.step

    def save_last(self, snapshot: Snapshot) -> None:
        """Saves, and waits until it is written; first repairs differing copies, if the run repairs them.

        Raises:
          MovedError: as `save`.
        """
        if self._run.config.train.mend_copies and snapshot.step != self._saved:
            snapshot = self.checked(snapshot)
        self.save(snapshot, None)
        self._attempt(snapshot, self._saves.wait)
        if snapshot.step not in jaxshard.processes.from_first("save", self._saves.steps):
            self._again(snapshot, f"step {snapshot.step} is no longer in {self._saves.path}")
        self._check_place(snapshot)

    def save_alone(self, snapshot: Snapshot) -> None:
        """`save_last` after an error that other processes may lack: with several processes, nothing can be saved."""
        if jax.process_count() == 1:
            self.save_last(snapshot)

    def _begin(self, snapshot: Snapshot, heldout_loss: float | None) -> None:
        snapshots.save(self._saves, reshaped(snapshot, self._run.saved_template), heldout_loss)

    def _attempt(self, snapshot: Snapshot, act: Callable[[], None], heldout_loss: float | None = None) -> None:
        """Runs a part of a save; if it fails, saves `snapshot` again, once: the folder may have been moved."""
        self._check_place(snapshot)
        try:
            act()
        except (OSError, jaxshard.processes.ProcessError) as error:
            self._again(snapshot, str(error), heldout_loss)

    def _again(self, snapshot: Snapshot, why: str, heldout_loss: float | None = None) -> None:
        self._check_place(snapshot)
        say(self._console, f"{printable(why)}; step {snapshot.step} is saved again")
        try:
            self._begin(snapshot, heldout_loss)
            self._saves.wait()
        except (OSError, jaxshard.processes.ProcessError) as error:
            self._save_elsewhere(snapshot, printable(str(error)), None)

    def _check_place(self, snapshot: Snapshot) -> None:
        """If the run can no longer be saved in its folder, saves the snapshot elsewhere and raises MovedError."""
        moved, notes = jaxshard.processes.from_first("save", self._looked_at)
        for note in notes:
            say(self._console, note)
        if moved:
            self._save_elsewhere(snapshot, *moved)

    def _looked_at(self) -> tuple[tuple[str, str | None] | None, list[str]]:
        assert self._place is not None  # this is process 0
        moved = self._place.moved()
        return moved, [] if moved else self._place.completed()

    def _save_elsewhere(self, snapshot: Snapshot, why: str, where: str | None) -> NoReturn:
        """Saves in a different folder and raises MovedError, or OSError if that fails, too."""
        with contextlib.suppress(OSError, jaxshard.processes.ProcessError):
            self._saves.close()  # a pending save may be lost with the folder
        place = self._place
        try:
            path = jaxshard.processes.from_first("save", lambda: place.made_elsewhere(where) if place else "")
            with snapshots.open_saves(RunFolder(Path(path)), self._run.config.train) as saves:
                snapshots.save(saves, reshaped(snapshot, self._run.saved_template))
        except (OSError, ValueError, jaxshard.processes.ProcessError) as error:
            raise OSError(f"{why}; step {snapshot.step} could not be saved elsewhere either: {error}") from error
        command = shell_command("jaxshard", "train", "--resume", "--out", path)
        raise MovedError(f"{why}; step {snapshot.step} is saved in {printable(path)}; to resume: {command}")

    def ended(self, step: int) -> bool:
        """Whether a signal asks the run to end before this step."""
        self.was_ended = self._preemption.reached(step)
        return self.was_ended

    def checked(self, snapshot: Snapshot) -> Snapshot:
        """Checks that all copies agree, and returns the snapshot; repairs differing copies, if the run repairs them.

        Raises:
          ReplicaError: copies differ, and the run does not repair them.
        """
        try:
            jaxshard.digest.digests((snapshot.params, snapshot.state))
            return snapshot
        except jaxshard.digest.ReplicaError as error:
            if not self._run.config.train.mend_copies:
                raise
            say(self._console, f"step {snapshot.step}: {error}. All copies are now equal to the first")
        params, state = (self._run.opt.synchronize(tree) for tree in (snapshot.params, snapshot.state))
        return dataclasses.replace(snapshot, params=params, state=state)

    def back(self, snapshot: Snapshot, why: str, is_finite: bool) -> Snapshot | None:
        """The last save, to go on from with new rows; None if the run must end.

        Raises:
          FloatingPointError: the snapshot's params are not finite; it is not saved, as a run would resume from it.
        """
        self._saves.wait()
        saved, finite = jaxshard.processes.from_first("back", self._saves.steps), self._saves.latest_finite()
        if not is_finite:
            raise FloatingPointError(f"{why}; {_way_back(saved, finite)}")
        ends = self._run.config.train.on_divergence == "end" or self._times_back >= _TIMES_BACK
        if ends or not saved or finite not in (None, saved[-1]):  # an older step cannot be saved after a newer one
            self.save_last(snapshot)
            return None
        self._times_back += 1
        for leaf in jax.tree.leaves((snapshot.params, snapshot.state)):
            leaf.delete()  # there may not be memory for both
        found = resumed(self._run, self._saves, self._console)
        self._saved = found.step
        say(self._console, f"{why}; the run returns to step {found.step}, and continues with different rows")
        return dataclasses.replace(found, position=snapshot.position)


def _way_back(saved: list[int], finite: int | None) -> str:
    if finite is None:
        return "no save is recorded as finite: start a new run"
    later = ", ".join(str(step) for step in saved if step > finite)
    where = f"move {later} out of model/, and " if later else ""
    return f"the newest finite save is step {finite}: {where}resume with --resume"
