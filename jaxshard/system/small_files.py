"""Reads files that others may have written: only regular files, and only up to a bound.

A pipe without a writer would never answer, a device may be endless or act when it is opened, and a file that should be
small may have any size.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import select
import stat
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_PIPE_SECONDS = 2.0  # the longest pause of a pipe's writer
_BLOCK, _LARGE_BLOCK = 2**16, 2**20
_SETTINGS, _MOST_SETTINGS = Path("matplotlibrc"), 2**20
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def read(path: Path, most: int, pipes: bool = False) -> bytes:
    """All bytes of a file.

    Args:
      path: the file's path; links are followed.
      most: the most bytes that it may have.
      pipes: whether it may be a pipe, whose writer does not pause for long.

    Raises:
      OSError: it cannot be read, is not a file, or has more bytes.
    """
    with _opened(path, pipes) as number:
        found = b"".join(_blocks(number, path, most + 1))
    if len(found) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return found


def read_part(path: Path, start: int, most: int) -> bytes:
    """At most `most` bytes of a file of any size, from offset `start`.

    Raises:
      OSError: it cannot be read, or is not a file.
    """
    with _opened(path, pipes=False) as number:
        os.lseek(number, start, os.SEEK_SET)
        return b"".join(_blocks(number, path, most))


def read_through(path: Path) -> None:
    """Reads all data of a file, but skips its holes, which may be larger than any disk.

    Raises:
      OSError: it cannot be read, or is not a file.
    """
    with _opened(path, pipes=False) as number:
        while _is_at_data(number) and os.read(number, _LARGE_BLOCK):
            pass


def read_json(path: Path, most: int) -> object:
    """The contents of a JSON file.

    Raises:
      OSError: as `read`.
      ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(read(path, most))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check(path: Path, most: int) -> None:
    """Checks a file that a library reads by its name.

    Raises:
      OSError: it cannot be read, is not a file, or has more than `most` bytes.
    """
    with _opened(path, pipes=False) as number:
        if os.fstat(number).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))


@contextlib.contextmanager
def _opened(path: Path, pipes: bool) -> Generator[int]:
    """The descriptor of an open file; opening never blocks."""
    _check_kind(os.stat(path), path, pipes)  # before opening, which may trigger a device
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_kind(os.fstat(number), path, pipes)
        yield number
    finally:
        os.close(number)


def _check_kind(found: os.stat_result, path: Path, pipes: bool) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFREG or (pipes and kind == stat.S_IFIFO):
        return
    number = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
    raise OSError(number, f"it is {_KINDS.get(kind, 'of an unknown kind')}, not a file", str(path))


def _is_at_data(number: int) -> bool:
    """Whether a file has more data; moves to its start."""
    try:
        os.lseek(number, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_DATA)
    except OSError as error:
        return error.errno != errno.ENXIO  # other errors: a file system without holes
    return True


def _blocks(number: int, path: Path, most: int) -> Iterator[bytes]:
    """The file's bytes in blocks, at most `most` in all."""
    ready = select.poll()
    ready.register(number, select.POLLIN)
    while most > 0:
        if not ready.poll(1000 * _PIPE_SECONDS):
            # Not ETIMEDOUT, which means a network problem that may pass: the pipe would be silent again.
            raise TimeoutError(errno.ENODATA, f"it sent nothing within {_PIPE_SECONDS:g} s", str(path))
        block = os.read(number, min(most, _BLOCK))
        if not block:
            return
        most -= len(block)
        yield block


def by_own_settings(draw: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a drawing function use matplotlib's own settings, not a `matplotlibrc` in the current folder, which may ask
    for LaTeX, or for more dots than fit in memory.

    It raises OSError if that file, which matplotlib reads anyway, is endless.
    """

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if _SETTINGS.exists() and not _SETTINGS.is_dir():
            check(_SETTINGS, _MOST_SETTINGS)
        from matplotlib import style

        with style.context("default"):  # pyright: ignore[reportUnknownMemberType]
            return draw(*args, **kwargs)

    return drawn
