"""Watches a folder: whether it is still at its path, and where it is now."""

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
    """Holds a folder open, and so recognizes it under any name, also if a different folder has its path.

    Linux and macOS report the path of an open folder; elsewhere a renamed folder counts as gone.

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
        os.close(self._handle)

    def open(self, name: str) -> BinaryIO:
        """Opens a file in the folder, wherever that is now, for appending; see `files.append`."""
        return files.append(name, self._handle)

    def has(self, name: str, file: BinaryIO) -> bool:
        """Whether an open file still has this name in the folder."""
        try:
            there = os.stat(name, dir_fd=self._handle, follow_symlinks=False)
            return identity(there) == identity(os.fstat(file.fileno()))
        except OSError:
            return False

    def where(self) -> Path | None:
        """The original path, if the folder is still there; else its new path; None: it was deleted or unmounted."""
        paths = self._path, _path_of(self._handle)
        return next((path for path in paths if path is not None and self._is(path)), None)

    def _is(self, path: Path) -> bool:
        """Whether the folder is at a path. True also if that is unknown, as without permissions: the writer then gets
        the error."""
        try:
            return identity(path.stat()) == self._identity
        except OSError as error:
            return error.errno not in _NOWHERE


def identity(found: os.stat_result) -> tuple[int, int]:
    """(device, inode), which identifies an open file or folder."""
    return found.st_dev, found.st_ino


def _path_of(handle: int) -> Path | None:
    """The path of an open folder by the system; it may have been deleted, which `where` checks."""
    try:
        if sys.platform == "linux":
            return Path(os.readlink(f"/proc/self/fd/{handle}"))
        if sys.platform == "darwin":
            found = fcntl.fcntl(handle, _F_GETPATH, bytes(_LONGEST_PATH))
            return Path(os.fsdecode(found.partition(b"\0")[0]))
    except OSError:
        pass
    return None
