"""The folder of a run's checkpoints: a sub-folder for each step, and others that are not complete checkpoints."""

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

_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # of `gs://bucket` a `Path` makes `gs:/bucket`
_DELETED = re.compile(r"\d+\.deleted\.[0-9a-f]{8}")
_LISTINGS = 100  # of a folder whose steps come and go while it is listed
_Found = TypeVar("_Found")
_PUT_ASIDE = re.compile(r"\d+\.(uncommitted|corrupt|unreadable)\..*")


def located(folder: Path) -> tuple[Path, int | None]:
    """(folder of checkpoints, step or None) of a path.

    The path may be a folder of checkpoints, a run's folder (which has them in model/), or a step's folder.
    """
    folder = folder.resolve()
    if _is_step(folder.name) and (orbax_store.is_committed(folder) or orbax_store.lacks(folder)):
        return folder.parent, int(folder.name)
    if not StepFolders(folder).steps() and is_folder(folder / "model"):
        return folder / "model", None
    return folder, None


class StepFolders:
    """The sub-folders of `path`. A step's folder is named by its number alone once it is complete."""

    def __init__(self, path: Path):
        self.path = path

    def of(self, step: int) -> Path:
        """The folder of a step, which may not exist."""
        return self.path / str(step)

    def steps(self) -> list[int]:
        """The steps that are complete, the oldest first."""
        return [step for step, is_whole in self._looked_at(orbax_store.is_committed) if is_whole]

    def damaged(self) -> dict[int, str]:
        """Step -> the missing file, for each folder with a part of a checkpoint, the oldest first."""
        return {step: missing for step, missing in self._looked_at(orbax_store.lacks) if missing}

    def _looked_at(self, look: Callable[[Path], _Found]) -> list[tuple[int, _Found]]:
        """Applies `look` to all steps' folders, as they were at one moment.

        A run may save one step and delete another meanwhile: then the folder is listed again.
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
        """Name -> description, for each sub-folder that looks like a checkpoint but is not a complete one."""
        steps, damaged, found = self.steps(), self.damaged(), dict[str, str]()
        for name in sorted(entry.name for entry in self.path.iterdir() if entry.is_dir()):
            if orbax_store.is_temporary(name):
                found[name] = "temporary: it is being written, or writing it was interrupted"
            elif aside := _PUT_ASIDE.fullmatch(name):
                found[name] = f"moved aside, {aside[1]}"
            elif _is_step(name) and int(name) in damaged:
                found[name] = f"damaged: {damaged[int(name)]} is missing"
            elif name.isdecimal() and int(name) not in steps:
                found[name] = "uncommitted: it was not written completely"
        return found

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step; arrays are not read.

        Raises:
          FileNotFoundError: the checkpoint does not exist.
          NewerFormatError: only a newer jaxshard can read it.
          CorruptCheckpointError: the manifest is missing or damaged.
          OSError: the file system refuses to read it.
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
        there = f"the newest steps are {newest}" if newest else "the folder has no checkpoints"
        return FileNotFoundError(errno.ENOENT, f"no checkpoint of step {step}; {there}", str(self.path))

    # Only the run that writes here may call these.

    def measure(self, step: int, saved: Manifest, metrics: Mapping[str, float]) -> None:
        """Adds metrics to `saved`, the manifest of a step."""
        joined = {**(saved["metrics"] or {}), **metrics}
        if metrics and joined != saved["metrics"]:
            orbax_store.replace_manifest(self.of(step), manifest.sealed({**saved, "metrics": joined}))

    def sync(self, step: int | None = None) -> None:
        """Syncs the names of all steps to disk and, if given, the folder of `step`."""
        if step is not None:
            files.sync_tree(self.of(step))
        files.sync_folder(self.path)

    def check_saved(self, step: int, index: Index) -> Manifest:
        """Checks a step that was just written: its index, and the list of its arrays; reads no array. Moves the step
        aside if something is missing. Returns the manifest.

        Raises:
          OSError: something is missing; or the file system refuses to look, and the step stays where it is.
        """
        try:
            found = self.manifest(step)
            if found["leaves"] != index:
                raise CorruptCheckpointError(step, None, "its index differs from the saved one")
            folder = self.of(step)
            stored = proven(step, folder, lambda: sizes.listed(folder))
            for path, entry in index.items():
                whole = tuple(entry["shape"]), entry["dtype"]
                if leaves.is_stored(entry) and stored.get(orbax_store.stored_name(path)) != whole:
                    raise CorruptCheckpointError(step, path, "it is missing")
        except CorruptCheckpointError as error:
            with contextlib.suppress(OSError):
                self.put_aside(step, "unreadable")
            raise OSError(errno.EIO, f"the written data cannot be read back: {first_line(error)}") from error
        return found

    def rests(self, step: int | None = None) -> Iterator[Path]:
        """Renames and yields the leftovers of interrupted saves and deletions, for the caller to delete.

        Args:
          step: only those of saves of this step.
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
        """Renames a step's folder, for `Deletion` to delete, so that no step is ever half deleted."""
        return self._renamed(str(step), f"{step}.deleted")

    def _renamed(self, name: str, beginning: str) -> Path:
        return (self.path / name).rename(self.path / f"{beginning}.{uuid.uuid4().hex[:8]}")

    def has_space(self, num_bytes: int) -> bool:
        """Whether the disk has this many bytes free."""
        return shutil.disk_usage(self.path).free >= num_bytes

    def check_space(self, num_bytes: int) -> None:
        """Raises OSError if the disk has less free space."""
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
    """The absolute path of a folder, which may not exist.

    Raises:
      TypeError, ValueError: it does not name a folder.
      FileNotFoundError: it is relative to a working folder that was deleted.
      NotADirectoryError: it is a file.
      OSError: the file system refuses to look.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise TypeError(f"Checkpointer: {path!r:.80} is not a path")
    if not str(path):
        raise ValueError("Checkpointer: '' is not a folder; give one, or '.' for the current folder")
    if _URL.match(str(path)):
        raise ValueError(
            f"Checkpointer: {str(path)!r} is not a folder; mount the bucket (with a hierarchical namespace), and give "
            "the path of the mount"
        )
    try:
        found = Path(path).expanduser().absolute()
    except RuntimeError as error:  # no such user
        raise ValueError(f"Checkpointer: {str(path)!r}: {error}") from None
    except FileNotFoundError as error:
        raise FileNotFoundError(
            error.errno, "Checkpointer: the current folder was deleted; give an absolute path", str(path)
        ) from None
    if os.path.lexists(found) and not is_folder(found):
        what = "file" if mode_of(found) else "broken link"
        raise NotADirectoryError(errno.ENOTDIR, f"Checkpointer: this is a {what}; give a folder", str(found))
    return found


def whole_number(step: object) -> int:
    """A step's number, checked.

    >>> whole_number(7)
    7
    """
    if isinstance(step, bool | float) or not isinstance(step, SupportsIndex) or operator.index(step) < 0:
        raise ValueError(
            f"checkpoint: step {step!r:.80} must be an integer, 0 or more; the calls are save(step, tree) and "
            "restore(template, step)"
        )
    return operator.index(step)
