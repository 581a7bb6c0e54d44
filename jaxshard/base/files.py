"""Files that are replaced whole, so that no reader meets half of one; folders that can be made."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """`write(temporary)` makes the new file beside `path`. Once it is on the disk, it becomes `path` in one move."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _keep_name(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def nearest_above(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def check_room(option: str, path: Path) -> None:
    """Raises ValueError if no folder can be made at `path`, or none that is there be written to; `option` names it."""
    nearest = nearest_above(path)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"{option} {path}: {nearest} is no folder that can be written to: name another one")


def check_file(option: str, path: Path) -> None:
    """Raises ValueError if no file can be written at `path`, where nothing is changed; `option` names it."""
    is_new = not path.exists()
    try:
        if is_new or path.is_dir() or path.is_file():
            path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        reason = f"{option} {path}: {error.strerror}: name a file in a folder that is there and can be written to"
        raise ValueError(reason) from None


def _keep_name(folder: Path) -> None:
    """The folder's list of names is on the disk, where the file system can do that."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
