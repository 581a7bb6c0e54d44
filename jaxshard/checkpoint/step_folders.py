"""The folder of a run's checkpoints: a sub-folder for each step, and others that are no checkpoints."""

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from jaxshard.checkpoint.storage import manifest, orbax_store
from jaxshard.checkpoint.storage.errors import CorruptCheckpointError, NewerFormatError, first_line
from jaxshard.checkpoint.storage.manifest import Manifest
from jaxshard.checkpoint.storage.trouble import is_folder, patiently, system_error
from jaxshard.system import files

_DELETED = re.compile(r"\d+\.deleted\.[0-9a-f]{8}")
_LISTINGS = 100  # of a folder whose steps come and go while it is listed
_Found = TypeVar("_Found")
_PUT_ASIDE = re.compile(r"\d+\.(uncommitted|corrupt|unreadable)\..*")


def located(folder: Path) -> tuple[Path, int | None]:
    """The folder of checkpoints that a folder stands for, and the step if it is the folder of one.

    It may be the folder of checkpoints itself, a run's, which has them in model/, or a step's.
    """
    folder = folder.resolve()
    if _is_step(folder.name) and (orbax_store.is_committed(folder) or orbax_store.lacks(folder)):
        return folder.parent, int(folder.name)
    if not StepFolders(folder).steps() and is_folder(folder / "model"):
        return folder / "model", None
    return folder, None


class StepFolders:
    """The sub-folders of `path`. A step's folder is named by its number alone once it is whole."""

    def __init__(self, path: Path):
        self.path = path

    def of(self, step: int) -> Path:
        """The folder of a step, whether it is there or not."""
        return self.path / str(step)

    def steps(self) -> list[int]:
        """The steps that were written to their end, the oldest first."""
        return [step for step, is_whole in self._looked_at(orbax_store.is_committed) if is_whole]

    def damaged(self) -> dict[int, str]:
        """Step -> what is missing, of the folders that have a part of a checkpoint, the oldest first."""
        return {step: missing for step, missing in self._looked_at(orbax_store.lacks) if missing}

    def _looked_at(self, look: Callable[[Path], _Found]) -> list[tuple[int, _Found]]:
        """What `look` finds of each step, of the folders that were all there together.

        A run may save one step and delete another between the list and the look: then it is listed again.
        """
        found = list[tuple[int, _Found]]()
        for _ in range(_LISTINGS):
            found = [(step, look(self.of(step))) for step in self._numbered()]
            if {step for step, _ in found} <= set(self._numbered()):
                break
        return found

    def _numbered(self) -> list[int]:
        try:
            found = patiently(lambda: os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            found = []
        except OSError as error:
            raise system_error("the folder of checkpoints", error, self.path) from error
        return sorted(int(name) for name in found if _is_step(name))

    def others(self) -> dict[str, str]:
        """Name -> what it is, of the sub-folders that look like checkpoints and are no whole ones."""
        steps, damaged, found = self.steps(), self.damaged(), dict[str, str]()
        for name in sorted(entry.name for entry in self.path.iterdir() if entry.is_dir()):
            if orbax_store.is_temporary(name):
                found[name] = "temporary: it is being written, or its writing was cut off"
            elif aside := _PUT_ASIDE.fullmatch(name):
                found[name] = f"put aside, {aside[1]}"
            elif _is_step(name) and int(name) in damaged:
                found[name] = f"damaged: {damaged[int(name)]} is missing"
            elif name.isdecimal() and int(name) not in steps:
                found[name] = "uncommitted: it was not written to its end"
        return found

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step; arrays are not read.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          NewerFormatError: only a newer jaxshard reads it.
          CorruptCheckpointError: the manifest is missing, cannot be decoded, or is not what was saved.
          OSError: the system does not let us read it.
        """
        folder = self.of(step)
        if missing := orbax_store.lacks(folder):
            raise CorruptCheckpointError(step, None, f"{missing} is missing in {folder}")
        try:
            return manifest.opened(orbax_store.read_manifest(folder), step)
        except NewerFormatError:
            raise
        except (FileNotFoundError, NotADirectoryError):
            raise self._gone(step) from None
        except (OSError, MemoryError) as error:
            raise system_error(f"checkpoint {step}", error, folder) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(step, None, f"its index cannot be read: {first_line(error)}") from error

    def _gone(self, step: int) -> FileNotFoundError:
        newest = self.steps()[-8:]
        there = f"the newest are {newest}" if newest else "there is none"
        return FileNotFoundError(errno.ENOENT, f"there is no checkpoint of step {step}; {there}", str(self.path))

    # What only the run that writes here may do.

    def measure(self, step: int, saved: Manifest, metrics: Mapping[str, float]) -> None:
        """Adds metrics to those in the manifest of a step, which is `saved`."""
        joined = {**(saved["metrics"] or {}), **metrics}
        if metrics and joined != saved["metrics"]:
            orbax_store.replace_manifest(self.of(step), manifest.sealed({**saved, "metrics": joined}))

    def sync(self, step: int | None = None) -> None:
        """Puts the names of all steps on the disk, and all that is in the folder of `step`, if it is given."""
        if step is not None:
            files.sync_tree(self.of(step))
        files.sync_folder(self.path)

    def rests(self, step: int | None = None) -> Iterator[Path]:
        """Renames what saves and deletions that were cut off have left, and yields it, to be deleted.

        Args:
          step: only of saves of this step.
        """
        for name in os.listdir(self.path):
            number = name.partition(".")[0]
            if orbax_store.is_temporary(name) and step in (None, int(number)):
                with contextlib.suppress(OSError):  # it may be another user's
                    yield self._renamed(name, f"{number}.deleted")
            elif step is None and _DELETED.fullmatch(name):
                yield self.path / name

    def put_aside(self, step: int, why: str) -> None:
        """Renames a step's folder to, for example, 7.corrupt.1f2e3d4c."""
        self._renamed(str(step), f"{step}.{why}")
        files.sync_folder(self.path)

    def discard(self, step: int) -> Path:
        """Renames a step's folder, so that no step is ever half there; returns what `Deletion` is to delete."""
        return self._renamed(str(step), f"{step}.deleted")

    def _renamed(self, name: str, beginning: str) -> Path:
        return (self.path / name).rename(self.path / f"{beginning}.{uuid.uuid4().hex[:8]}")

    def has_space(self, num_bytes: int) -> bool:
        """Whether the disk has this many bytes free."""
        return shutil.disk_usage(self.path).free >= num_bytes

    def check_space(self, num_bytes: int) -> None:
        """Raises OSError where the disk has less free space."""
        if not self.has_space(num_bytes):
            free = shutil.disk_usage(self.path).free
            raise OSError(
                errno.ENOSPC,
                f"no space: the checkpoint takes {num_bytes / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free; nothing "
                "was written",
                str(self.path),
            )


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and name == str(int(name))
