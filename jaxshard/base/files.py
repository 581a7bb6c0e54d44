"""Files that are replaced whole, so that no reader meets half of one."""

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


def _keep_name(folder: Path) -> None:
    """The folder's list of names is on the disk, where the file system can do that."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
