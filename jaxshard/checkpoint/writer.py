"""The one run that writes in a folder of checkpoints: it locks the folder, makes way for saves, deletes old ones.

With several processes only process 0 calls these.
"""

import contextlib
import os
from collections.abc import Mapping

from jaxshard.checkpoint import orbax_store
from jaxshard.checkpoint.errors import CorruptCheckpointError
from jaxshard.checkpoint.folder_lock import Lock
from jaxshard.checkpoint.leaves import Index
from jaxshard.checkpoint.retention import Retention
from jaxshard.checkpoint.step_folders import StepFolders


class Writer:
    """Writes in `folders`, once it has claimed them.

    Attributes:
      corrupt: the steps that were found corrupt; the next save of such a step puts it aside.
    """

    def __init__(self, folders: StepFolders, retention: Retention):
        self._folders, self._retention = folders, retention
        self._lock: Lock | None = None
        self.corrupt: set[int] = set()

    def claim(self) -> str:
        """Makes the folder and locks it until `release`; returns the run's id.

        Raises:
          ValueError: orbax cannot write under this path.
          OSError: the folder cannot be made or written to, or another run is writing there.
        """
        orbax_store.check_path(self._folders.path)
        if self._lock is not None and not self._lock.is_there():  # the folder was deleted
            self.release()
        if self._lock is None:
            self._folders.path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self._folders.path)
            self._folders.remove_rests()
        return self._lock.run

    def release(self) -> None:
        """Lets other runs write here."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def prepare(self, step: int, index: Index, num_bytes: int) -> bool:
        """Makes way for a save: puts aside what has the step's name and is no whole checkpoint.

        Returns:
          False: the same is saved already.

        Raises:
          ValueError: the step is there with other bits, or newer ones are.
          OSError: less than `num_bytes` are free on the disk.
        """
        self._put_aside(step)
        steps = self._whole_steps()
        if step in steps:
            if self._folders.manifest(step)["leaves"] == index:
                return False
            raise ValueError(
                f"checkpoint: step {step} is saved already in {self._folders.path}, with other bits; steps never change"
            )
        if steps and step < steps[-1]:
            raise ValueError(
                f"checkpoint: step {step} is older than {steps[-1]}, which is in {self._folders.path}: to go on from "
                "an older step, save in a new folder, or take the newer ones away"
            )
        self._folders.check_space(num_bytes)
        return True

    def _put_aside(self, step: int) -> None:
        folder = self._folders.of(step)
        why = "corrupt" if step in self.corrupt else "uncommitted" if not orbax_store.is_committed(folder) else None
        if why and os.path.lexists(folder):
            self._folders.put_aside(step, why)
        self.corrupt.discard(step)

    def prune(self, saved: int) -> list[str]:
        """Deletes the checkpoints that are not to be kept, but never `saved`; returns the errors."""
        steps, failed = self._whole_steps(), []
        for step in set(steps) - {saved} - self._retention.kept(steps, self._metrics):
            try:
                self._folders.delete(step)
            except OSError as error:
                failed.append(str(error))
        return failed

    def _whole_steps(self) -> list[int]:
        return [step for step in self._folders.steps() if step not in self.corrupt]

    def _metrics(self, step: int) -> Mapping[str, float]:
        with contextlib.suppress(CorruptCheckpointError):
            return self._folders.manifest(step)["metrics"] or {}
        return {}
