"""Saves of a run, checks that its copies agree, and its ways to go back and to end."""

from __future__ import annotations

import dataclasses

import jax
from rich.console import Console

import jaxshard
from jaxshard.checkpoint import Checkpointer
from jaxshard.processes import agreement
from jaxshard.trainer import run_folder
from jaxshard.trainer.build import Run
from jaxshard.trainer.display import say
from jaxshard.trainer.layer_stack import reshaped
from jaxshard.trainer.run_folder import Snapshot

_TIMES_BACK = 3


def resumed(run: Run, saves: Checkpointer, console: Console) -> Snapshot:
    """The newest save that is whole, as this run has it."""
    snapshot = reshaped(run_folder.restore(saves, run.saved_template), run.template)
    if snapshot.position.text != run.template.position.text:
        say(console, "the text is another one: it is read from its beginning")
    return dataclasses.replace(snapshot, position=snapshot.position.carried_over(run.template.position))


class Safekeeping:
    """What the loop calls to save, to check, to go back and to end.

    Args:
      run, saves, console: of the run.
      preemption: says when the run is to end.
      saved: the step that is saved already; None: nothing is.

    Attributes:
      was_ended: whether a signal has ended the run.
    """

    def __init__(
        self, run: Run, saves: Checkpointer, console: Console, preemption: jaxshard.guards.Preemption, saved: int | None
    ):
        self._run, self._saves, self._console, self._preemption = run, saves, console, preemption
        self._times_back, self._saved = 0, saved
        self.was_ended = False

    def save(self, snapshot: Snapshot, heldout_loss: float | None) -> None:
        """Begins to save, once for each step."""
        if snapshot.step != self._saved:
            run_folder.save(self._saves, reshaped(snapshot, self._run.saved_template), heldout_loss)
            self._saved = snapshot.step

    def save_last(self, snapshot: Snapshot) -> None:
        """Saves, and waits until it is written; first mends copies that differ, where the run does that."""
        if self._run.config.train.mend_copies and snapshot.step != self._saved:
            snapshot = self.checked(snapshot)
        self.save(snapshot, None)
        self._saves.wait()

    def ended(self, step: int) -> bool:
        """Whether a signal asks the run to end before this step."""
        self.was_ended = self._preemption.reached(step)
        return self.was_ended

    def checked(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot, once all its copies are the same; copies that differ are mended, where the run does that.

        Raises:
          ReplicaError: copies differ, and the run does not mend them.
        """
        try:
            jaxshard.digest.digests((snapshot.params, snapshot.state))
            return snapshot
        except jaxshard.digest.ReplicaError as error:
            if not self._run.config.train.mend_copies:
                raise
            say(self._console, f"step {snapshot.step}: {error}. All copies are now as the first")
        params, state = (self._run.opt.synchronize(tree) for tree in (snapshot.params, snapshot.state))
        return dataclasses.replace(snapshot, params=params, state=state)

    def back(self, snapshot: Snapshot, why: str) -> Snapshot | None:
        """The last save, to go on from with rows that were not tried yet; None where the run has to end."""
        self._saves.wait()
        saved = agreement.from_first("back", self._saves.steps)
        if self._run.config.train.on_divergence == "end" or self._times_back >= _TIMES_BACK or not saved:
            self.save_last(snapshot)
            return None
        self._times_back += 1
        for leaf in jax.tree.leaves((snapshot.params, snapshot.state)):
            leaf.delete()  # there may be no room for both
        found = resumed(self._run, self._saves, self._console)
        self._saved = found.step
        say(self._console, f"{why}; back to step {found.step}, and on with other rows")
        return dataclasses.replace(found, position=snapshot.position)
