"""A folder that is known by any name: whether it is still at its path, and where it is now."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path
from typing import BinaryIO

from jaxshard.system import files

_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)
_F_GETPATH = 50  # macOS
_LONGEST_PATH = 1024


class FolderWatch:
    """Holds a folder open, and so knows it by any name, also when another one has its path.

    Linux and macOS say where an open folder is; elsewhere a folder that was renamed counts as gone.

    Args:
      path: the folder.

    Raises:
      OSError: it cannot be opened.
    """

    def __init__(self, path: Path):
        self._path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._identity = identity(os.fstat(self._handle))

    def close(self) -> None:
        """Holds the folder no longer."""
        os.close(self._handle)

    def open(self, name: str) -> BinaryIO:
        """Opens a file in the folder, wherever that is, to write at its end; see `files.append`."""
        return files.append(name, self._handle)

    def has(self, name: str, file: BinaryIO) -> bool:
        """Whether an open file is the one that has this name in the folder."""
        try:
            there = os.stat(name, dir_fd=self._handle, follow_symlinks=False)
            return identity(there) == identity(os.fstat(file.fileno()))
        except OSError:
            return False

    def where(self) -> Path | None:
        """The path that was given, if the folder is there; else its new one; None: it was deleted or unmounted."""
        paths = self._path, _path_of(self._handle)
        return next((path for path in paths if path is not None and self._is(path)), None)

    def _is(self, path: Path) -> bool:
        """Whether the folder is at a path; also where that cannot be known now, without rights, say: then whoever
        writes there is told."""
        try:
            return identity(path.stat()) == self._identity
        except OSError as error:
            return error.errno not in _NOWHERE


def identity(found: os.stat_result) -> tuple[int, int]:
    """What tells a file or a folder from all others as long as it is open."""
    return found.st_dev, found.st_ino


def _path_of(handle: int) -> Path | None:
    """Where the system says that an open folder is, which `where` checks: it may have been deleted."""
    try:
        if sys.platform == "linux":
            return Path(os.readlink(f"/proc/self/fd/{handle}"))
        if sys.platform == "darwin":
            found = fcntl.fcntl(handle, _F_GETPATH, bytes(_LONGEST_PATH))
            return Path(os.fsdecode(found.partition(b"\0")[0]))
    except OSError:
        pass
    return None
