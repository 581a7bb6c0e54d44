"""Writes, moves and deletes files so that the changes are on disk when these functions return; follows no links.

The caller's folder, or a folder above it, may be a link. Inside it, these functions never make, replace or delete
anything through a link.

New files get a random name, where no link can be planted, and are moved into place complete, so that readers never see
half of one. Such names are locked while their process lives; the next writer of the folder deletes unlocked ones.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Container, Generator, Iterable
from pathlib import Path
from typing import BinaryIO

Write = Callable[[BinaryIO], object]

_TEMPORARY = re.compile(r"\.jaxshard-[0-9a-f]{24}")
_FOLDER = ".d"  # ends the name of a temporary folder; the locked file beside it has the same name without this
_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: its fsync does not flush the disk's own cache
_NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: opening a pipe does not wait
_CANNOT = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS}  # not supported there
_MAY_NOT = {errno.EACCES, errno.EPERM}
_NOT_OURS = {errno.ENOENT, *_MAY_NOT}
_READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NAME_IN_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC  # Linux: also if unreadable


def is_temporary(name: str) -> bool:
    """Whether this is the name of a temporary file or folder: one being written, or left by a killed process.

    >>> is_temporary(".jaxshard-0123456789abcdef01234567"), is_temporary("config.toml")
    (True, False)
    """
    return _TEMPORARY.fullmatch(name.removesuffix(_FOLDER)) is not None


# Writing.


def replace(path: Path, content: str | bytes | Write) -> None:
    """Replaces the file (or link) at `path` atomically by a new file that is already on disk.

    Args:
      path: in an existing folder.
      content: text, bytes, or a function that writes to the open file.
    """
    with _naming(path), _opened(path.parent, _NAME_IN_FOLDER) as folder:
        _delete_left(folder)
        name, number = _new_file(folder)
        try:
            with os.fdopen(number, "wb") as file:
                _write(content, file)
                sync_file(file)
                os.replace(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            raise
        _sync_folder(".", folder)


def overwrite(path: Path, content: str | bytes) -> None:
    """Writes to a path that the user named: a new or existing file, a link to one, a pipe or a device."""
    with _naming(path), path.open("wb") as file:
        _write(content, file)
        file.flush()
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            _sync(file.fileno())
            sync_folder(path.resolve().parent)


def append(path: str | Path, folder: int | None = None) -> BinaryIO:
    """Opens a file to append, and creates it if missing.

    Args:
      path: the file's path, relative to `folder` if that is given.
      folder: the descriptor of an open folder.

    Raises:
      OSError: the path is a link, or not a file.
    """
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_LINK, 0o666, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return os.fdopen(number, "ab")


def make_folder(path: Path) -> None:
    """Makes the folder and missing folders above it."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in dict.fromkeys([*missing, path]):
        sync_folder(each.parent)


def rename(path: Path, target: Path) -> None:
    """Renames a file or folder, or moves it to another folder."""
    path.rename(target)
    for folder in {path.parent, target.parent}:
        sync_folder(folder)


def publish(path: Path, target: Path) -> None:
    """Moves a file to an unused name in another folder; raises FileExistsError if the name is used."""
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in _CANNOT | _MAY_NOT:  # a file system without hard links
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        path.rename(target)
    else:
        path.unlink()


@contextlib.contextmanager
def workplace(folder: Path) -> Generator[Path]:
    """An empty folder in `folder`, with a random name and private to this user; it is deleted at the end."""
    with _opened(folder, _NAME_IN_FOLDER) as opened:
        _delete_left(opened)
        with _naming(folder):
            name, number = _new_file(opened)
        try:
            with _naming(folder):
                os.mkdir(name + _FOLDER, 0o700, dir_fd=opened)
            yield folder / (name + _FOLDER)
        finally:
            _delete_both(name, opened)
            os.close(number)


def _write(content: str | bytes | Write, file: BinaryIO) -> None:
    if callable(content):
        content(file)
    else:
        file.write(content.encode() if isinstance(content, str) else content)


# Temporary names.


def _new_file(folder: int) -> tuple[str, int]:
    """(name, descriptor) of a new, empty, locked file; tries again if another process locks and deletes it first."""
    while True:
        name = f".jaxshard-{secrets.token_hex(12)}"
        number = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666, dir_fd=folder)
        with contextlib.suppress(OSError):  # a file system without locks: then no other process gets one, either
            fcntl.flock(number, fcntl.LOCK_EX)
        if os.fstat(number).st_nlink:
            return name, number
        os.close(number)


def _delete_left(folder: int) -> None:
    """Deletes temporary files of this user's killed processes; leaves the rest to the next writer."""
    with contextlib.suppress(OSError):
        with _opened(".", _READ_FOLDER, folder) as number:
            names = os.listdir(number)
        for name in filter(_TEMPORARY.fullmatch, names):
            with contextlib.suppress(OSError):
                _delete_if_left(name, folder)


def _delete_if_left(name: str, folder: int) -> None:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        return
    with _opened(name, os.O_RDWR | _NO_LINK, folder) as number:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _delete_both(name, folder)


def _delete_both(name: str, folder: int) -> None:
    """Deletes a temporary folder, then its file, which is locked until then; a link itself, not its target."""
    for each in (name + _FOLDER, name):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(each, dir_fd=folder, follow_symlinks=False).st_mode):
                shutil.rmtree(each, dir_fd=folder)
            else:
                os.unlink(each, dir_fd=folder)


def check_no_links(folder: Path) -> None:
    """Raises OSError if a folder is or contains a link, through which writes would go elsewhere."""
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            raise OSError(errno.ELOOP, "is a link, and files are not written through links: remove it", str(path))


def delete(path: Path) -> None:
    """Deletes a folder with its contents, or a file; a link itself, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# Syncing.


def sync_tree(folder: Path, but: Iterable[str] = ()) -> None:
    """Syncs all files and folders in `folder`, then the folder itself; does not follow links.

    Args:
      folder: an existing folder.
      but: names directly in it to skip.

    Raises:
      OSError: the disk failed to store the data.
    """
    with _naming(folder), _opened(folder, _NAME_IN_FOLDER) as top:
        for _, folders, names, opened in os.fwalk(".", topdown=True, onerror=_raised, dir_fd=top):
            folders[:] = [name for name in folders if name not in but]
            but = ()
            for name in names:
                _sync_file(name, opened)
            _sync_folder(".", opened)


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder, if the file system supports that."""
    with _naming(folder):
        _sync_folder(folder, None)


def sync_file(file: BinaryIO) -> None:
    """Flushes and syncs an open file."""
    file.flush()
    _sync(file.fileno())


def _raised(error: OSError) -> None:
    if error.errno not in _NOT_OURS:
        raise error


def _sync_file(name: str, folder: int) -> None:
    """Syncs a file; skips anything that is not a file, is gone or is unreadable: it is not ours."""
    with _unless(_NOT_OURS):
        if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            with _opened(name, os.O_RDONLY | _NO_LINK, folder) as number:
                _sync(number)


def _sync_folder(path: str | Path, folder: int | None) -> None:
    """Syncs a folder, if this user may read it and the file system supports that."""
    with _unless(_MAY_NOT), _opened(path, _READ_FOLDER, folder) as number, _unless(_CANNOT):
        _sync(number)


def _sync(number: int) -> None:
    if _FULL_SYNC is not None:
        with _unless(_CANNOT):
            fcntl.fcntl(number, _FULL_SYNC)
            return
    os.fsync(number)


@contextlib.contextmanager
def _unless(numbers: Container[int | None]) -> Generator[None]:
    """Suppresses OSErrors with these numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


@contextlib.contextmanager
def _opened(path: str | Path, flags: int, folder: int | None = None) -> Generator[int]:
    """The descriptor of an opened path, or of a name in an open folder."""
    number = os.open(path, flags, dir_fd=folder)
    try:
        yield number
    finally:
        os.close(number)


@contextlib.contextmanager
def _naming(path: Path) -> Generator[None]:
    """Makes OSErrors about temporary names or descriptors name `path` instead."""
    try:
        yield
    except OSError as error:
        if not isinstance(error.filename, str) or error.filename == "." or is_temporary(error.filename):
            error.filename, error.filename2 = str(path), None
        raise
