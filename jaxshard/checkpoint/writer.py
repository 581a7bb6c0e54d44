"""The one run that writes in a folder of checkpoints: locks the folder, clears the way for saves, deletes old ones.

With several processes only process 0 calls these.
"""

import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from jaxshard.checkpoint.folder_lock import Lock
from jaxshard.checkpoint.retention import Deletion, Retention
from jaxshard.checkpoint.step_folders import StepFolders
from jaxshard.checkpoint.storage import orbax_store
from jaxshard.checkpoint.storage.errors import CorruptCheckpointError, NewerFormatError
from jaxshard.checkpoint.storage.leaves import Index
from jaxshard.checkpoint.storage.manifest import HEALTHS, Manifest, health
from jaxshard.checkpoint.storage.paths import check_path
from jaxshard.system import files
from jaxshard.system.users_lines import warn

_PRUNING_SECONDS = 0.5  # after a save; the rest is done after the next saves
_DELETION_SECONDS = 60  # to wait if the disk is full
_CLOSING_SECONDS, _SETTLING_SECONDS = 10, 1


class Writer:
    """Writes in `folders`, once it has claimed them.

    Attributes:
      corrupt: the damaged steps; the next save of such a step moves it aside.
    """

    def __init__(self, folders: StepFolders, retention: Retention):
        self._folders, self._retention, self._deletion = folders, retention, Deletion()
        self._lock: Lock | None = None
        self._seen, self._unread = dict[int, _Seen](), set[int]()
        self._errors, self._warned = list[str](), False
        self._on_disk: int | None = None  # the last step that was written completely
        self.corrupt: set[int] = set()
        self._claiming = threading.Lock()  # threads may save at once

    def claim(self) -> str:
        """Makes the folder and locks it until `release`; returns the run's id.

        Raises:
          ValueError: orbax cannot write under this path.
          OSError: the folder cannot be made or written to, or another run is writing there.
        """
        check_path(self._folders.path)
        with self._claiming:
            return self._claimed()

    def _claimed(self) -> str:
        run = self._lock.run if self._lock else None
        if self._lock is not None and not self._lock.is_held():  # the folder was deleted, or its lock
            self.release()
        if self._lock is None:
            files.make_folder(self._folders.path)
            self._lock = Lock(self._folders.path, run)
            self._deletion.begin(self._folders.rests())
            self._prune(None)
        elif not self._lock.is_noted():
            self._lock.note()
        return self._lock.run

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def close(self) -> list[str]:
        """Waits at most 10 s for deletions, and unlocks the folder; returns the errors of deletions."""
        self._deletion.wait(_CLOSING_SECONDS)
        self.release()
        return self._errors_so_far()

    def settle(self) -> None:
        """Waits at most 1 s for deletions."""
        self._deletion.wait(_SETTLING_SECONDS)

    def check_saved(self, step: int, index: Index) -> None:
        """Checks a step that was just written. The pending save keeps this object, and so the lock, alive."""
        self._on_disk = step
        self._seen[step] = _Seen.of(self._folders.check_saved(step, index))

    def prepare(self, step: int, index: Index, num_bytes: int, metrics: Mapping[str, float] | None) -> bool:
        """Prepares a save: moves aside an incomplete or damaged folder with the step's name.

        Returns:
          False: the same bits are saved already; their metrics are updated.

        Raises:
          ValueError: the step is saved with different bits, or a newer step is saved.
          OSError: less than `num_bytes` are free on the disk.
        """
        self._put_aside(step)
        self._on_disk = None
        self._seen.pop(step, None)
        steps = self._whole_steps()
        if step in steps:
            saved = self._folders.manifest(step)
            if saved["leaves"] == index:
                self._folders.measure(step, saved, metrics or {})
                self._folders.sync(step)  # a process may have ended before it did
                return False
            raise ValueError(
                f"checkpoint: step {step} is already saved in {self._folders.path} with different contents; a saved "
                "step cannot change"
            )
        if steps and step < steps[-1]:
            raise ValueError(
                f"checkpoint: step {step} is older than {steps[-1]}, which is in {self._folders.path}: to continue "
                "from an older step, save in a new folder, or delete the newer steps"
            )
        self._deletion.begin(self._folders.rests(step))
        if not self._folders.has_space(num_bytes):
            self._deletion.wait(_DELETION_SECONDS)
        self._folders.check_space(num_bytes)
        return True

    def fail(self, step: int, processes: Collection[int]) -> None:
        """Moves aside the folder of a save that failed on these processes. It stays if it is complete on disk and only
        process 0 could not look at it: had process 0 seen damage, it would have moved it aside."""
        if step == self._on_disk and set(processes) == {0}:
            return
        self.corrupt.add(step)
        if self._lock is not None and self._lock.is_held():
            with contextlib.suppress(OSError):  # then the next save of this step tries again
                self._put_aside(step)

    def _put_aside(self, step: int) -> None:
        folder = self._folders.of(step)
        why = "corrupt" if step in self.corrupt else "uncommitted" if not orbax_store.is_committed(folder) else None
        if why and os.path.lexists(folder):
            self._folders.put_aside(step, why)
        self.corrupt.discard(step)

    def prune(self, saved: int) -> list[str]:
        """Starts to delete the checkpoints that are not kept, never `saved`; returns the errors since the last call.
        It stops after half a second, and the next calls delete the rest."""
        try:
            self._prune(saved)
        except OSError as error:  # the folder cannot be listed now, but the step is saved
            self._errors.append(str(error))
        return self._errors_so_far()

    def _errors_so_far(self) -> list[str]:
        found, self._errors = [*self._errors, *self._deletion.errors()], []
        return found

    def _prune(self, saved: int | None) -> None:
        if self._lock is None or not self._lock.is_held():
            return
        end = time.monotonic() + _PRUNING_SECONDS
        steps, surplus = self._whole_steps(), list[int]()
        if self._look(steps, end):
            seen = {step: self._seen.get(step, _CORRUPT) for step in steps}
            kept = self._retention.kept(steps, lambda step: seen[step].metrics, lambda step: seen[step].illness)
            kept |= self._unread
            surplus = [step for step in steps if step not in kept and step != saved]
            self._warn_of_no_metric(surplus)
        try:
            if surplus and saved is None:  # the run that saved the kept steps may have died before syncing their names
                self._folders.sync()
        except OSError as error:
            self._errors.append(str(error))
            return
        self._deletion.begin(list(self._discarded(surplus, end)))  # together: they are synced together

    def _discarded(self, surplus: Iterable[int], end: float) -> Iterator[Path]:
        for step in surplus:
            if time.monotonic() > end:
                return
            try:
                yield self._folders.discard(step)
            except OSError as error:
                self._errors.append(str(error))

    def _warn_of_no_metric(self, surplus: list[int]) -> None:
        """Warns, once, before it deletes a checkpoint although no checkpoint has the metric of `keep_best`."""
        best = self._retention.keep_best
        if best and surplus and not self._warned and not any(best.metric in one.metrics for one in self._seen.values()):
            self._warned = True
            warn(
                f"checkpoint: keep_best keeps nothing: no checkpoint has the metric {best.metric!r}; pass it: "
                f"save(step, tree, metrics={{{best.metric!r}: ...}})"
            )

    def _whole_steps(self) -> list[int]:
        return [step for step in self._folders.steps() if step not in self.corrupt]

    def _look(self, steps: list[int], end: float) -> bool:
        """Reads the steps' metrics and health, the newest first, until `end`; returns whether that suffices to decide.
        A step that cannot be read now may be the best, and is kept."""
        self._unread.clear()
        for step in reversed(steps):
            self._read(step)
            seen = self._seen.get(step)
            if seen and seen.illness == 0 and not self._retention.keep_best:
                return True
            if time.monotonic() > end:
                return step == steps[0]
        return True

    def _read(self, step: int) -> None:
        if step in self._seen:
            return
        try:
            self._seen[step] = _Seen.of(self._folders.manifest(step))
        except CorruptCheckpointError:
            self._unread |= {step} if self._retention.keep_best else set()
        except (NewerFormatError, OSError):
            self._unread.add(step)


def warn_of(errors: Iterable[str]) -> None:
    """Warns of checkpoints that could not be deleted."""
    for error in errors:
        warn(f"an old checkpoint could not be deleted: {error}")


class _Seen(NamedTuple):
    """A step's metrics, and its illness: 0 if all its numbers are finite."""

    metrics: Mapping[str, float]
    illness: int

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        state = health(manifest["leaves"], manifest.get("not_finite"))
        return cls(manifest["metrics"] or {}, HEALTHS.index(state))


_CORRUPT = _Seen({}, len(HEALTHS))
