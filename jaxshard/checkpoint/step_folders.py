"""The folder of a run's checkpoints: a sub-folder for each step, and others that are no checkpoints."""

import contextlib
import errno
import operator
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import SupportsIndex, TypeVar

from jaxshard.checkpoint.storage import leaves, manifest, orbax_store, sizes
from jaxshard.checkpoint.storage.errors import (
    CorruptCheckpointError,
    NewerFormatError,
    first_line,
    is_folder,
    mode_of,
    patiently,
    proven,
    system_error,
)
from jaxshard.checkpoint.storage.leaves import Index
from jaxshard.checkpoint.storage.manifest import Manifest
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

    def check_saved(self, step: int, index: Index) -> Manifest:
        """Opens a step that was just written, as `restore` would: its index, and the list of its arrays, of which none
        is read. If something is missing, the step is put aside. Returns the manifest.

        Raises:
          OSError: what is missing; or the system does not let us look, and the step stays where it is.
        """
        try:
            found = self.manifest(step)
            if found["leaves"] != index:
                raise CorruptCheckpointError(step, None, "its index is not what was saved")
            folder = self.of(step)
            stored = proven(step, folder, lambda: sizes.listed(folder))
            for path, entry in index.items():
                whole = tuple(entry["shape"]), entry["dtype"]
                if leaves.is_stored(entry) and stored.get(orbax_store.stored_name(path)) != whole:
                    raise CorruptCheckpointError(step, path, "it is not there")
        except CorruptCheckpointError as error:
            with contextlib.suppress(OSError):
                self.put_aside(step, "unreadable")
            raise OSError(errno.EIO, f"what was written cannot be read back: {first_line(error)}") from error
        return found

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


# What a `Checkpointer` is given.


def folder_of(path: str | os.PathLike[str]) -> Path:
    """The folder of this path, whether it is there or not; an absolute path.

    Raises:
      TypeError, ValueError: it is no path of a folder.
      FileNotFoundError: it is relative to a working folder that was deleted.
      NotADirectoryError: it is a file.
      OSError: the system does not say what it is.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise TypeError(f"Checkpointer: {path!r:.80} is no path of a folder")
    if not str(path):
        raise ValueError("Checkpointer: '' is no folder; name one, or '.' for the working folder")
    if "://" in str(path):
        raise ValueError(
            f"Checkpointer: {str(path)!r} is no folder; mount the bucket (of a hierarchical namespace), and name it"
        )
    try:
        found = Path(path).expanduser().absolute()
    except RuntimeError as error:  # no such user
        raise ValueError(f"Checkpointer: {str(path)!r}: {error}") from None
    except FileNotFoundError as error:
        raise FileNotFoundError(
            error.errno, "Checkpointer: the working folder was deleted; name a folder from / on", str(path)
        ) from None
    if os.path.lexists(found) and not is_folder(found):
        what = "file" if mode_of(found) else "link to nothing"
        raise NotADirectoryError(errno.ENOTDIR, f"Checkpointer: this is a {what}; name a folder", str(found))
    return found


def whole_number(step: object) -> int:
    """The number of a step.

    >>> whole_number(7)
    7
    """
    if isinstance(step, bool | float) or not isinstance(step, SupportsIndex) or operator.index(step) < 0:
        raise ValueError(
            f"checkpoint: step {step!r:.80} must be a whole number, 0 or more; the calls are save(step, tree) and "
            "restore(template, step)"
        )
    return operator.index(step)
