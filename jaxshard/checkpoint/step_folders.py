"""The folder of a run's checkpoints: a sub-folder for each step, and others that are no checkpoints."""

import errno
import re
import shutil
import uuid
from pathlib import Path

from jaxshard.checkpoint import manifest, orbax_store
from jaxshard.checkpoint.errors import CorruptCheckpointError, first_line
from jaxshard.checkpoint.manifest import Manifest

_DELETED = re.compile(r"\d+\.deleted\.[0-9a-f]{8}")
_PUT_ASIDE = re.compile(r"\d+\.(uncommitted|corrupt)\..*")


class StepFolders:
    """The sub-folders of `path`. A step's folder is named by its number alone once it is whole."""

    def __init__(self, path: Path):
        self.path = path

    def of(self, step: int) -> Path:
        """The folder of a step, whether it is there or not."""
        return self.path / str(step)

    def steps(self) -> list[int]:
        """The steps that were written to their end, the oldest first."""
        found = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(int(entry.name) for entry in found if _is_step(entry.name) and orbax_store.is_committed(entry))

    def others(self) -> dict[str, str]:
        """Name -> what it is, of the sub-folders that look like checkpoints and are no whole ones."""
        steps, found = self.steps(), dict[str, str]()
        for name in sorted(entry.name for entry in self.path.iterdir() if entry.is_dir()):
            if orbax_store.is_temporary(name):
                found[name] = "temporary: it is being written, or its writing was cut off"
            elif aside := _PUT_ASIDE.fullmatch(name):
                found[name] = f"put aside, {aside[1]}"
            elif name.isdecimal() and int(name) not in steps:
                found[name] = "uncommitted: it was not written to its end"
        return found

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step; arrays are not read.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          CorruptCheckpointError: the manifest cannot be read, or is not what was saved.
        """
        if step not in self.steps():
            raise FileNotFoundError(
                errno.ENOENT, f"there is no checkpoint of step {step}; there are {self.steps()}", str(self.path)
            )
        try:
            return manifest.opened(orbax_store.read_manifest(self.of(step)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(step, None, f"its index cannot be read: {first_line(error)}") from error

    # What only the run that writes here may do.

    def remove_rests(self) -> None:
        """Deletes what saves and deletions that were cut off have left."""
        for entry in self.path.iterdir():
            if orbax_store.is_temporary(entry.name) or _DELETED.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)

    def put_aside(self, step: int, why: str) -> None:
        """Renames a step's folder to, for example, 7.corrupt.1f2e3d4c."""
        self.of(step).rename(self.path / f"{step}.{why}.{uuid.uuid4().hex[:8]}")

    def delete(self, step: int) -> None:
        """Renames a step's folder and then deletes it, so that no step is ever half there."""
        shutil.rmtree(self.of(step).rename(self.path / f"{step}.deleted.{uuid.uuid4().hex[:8]}"))

    def check_space(self, num_bytes: int) -> None:
        """Raises OSError where the disk has less free space."""
        free = shutil.disk_usage(self.path).free
        if free < num_bytes:
            raise OSError(
                errno.ENOSPC,
                f"no space: the checkpoint takes {num_bytes / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free; nothing "
                "was written",
                str(self.path),
            )


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and name == str(int(name))
