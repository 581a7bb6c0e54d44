"""Finds and reads the text files that a configuration names."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxshard.apps.config import memory, paths
from jaxshard.apps.data.token_files import TOKENIZER

STDLIB = "stdlib"
"""Names the source of Python's standard library, 8 MB of text on every machine."""

_LEFT_OUT = frozenset(
    {
        *("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"),  # missing in some distributions
        *("encodings", "pydoc_data"),  # tables and English
        *("test", "tests"),
    }
)

BUILTIN = "pydoc_data.topics"


def are_tokens(format: str, files: Sequence[Path]) -> bool:
    """Whether files have tokens, by `data.format`."""
    tokens = without_tokenizer(files)
    return format.startswith("uint") or (
        format == "auto" and bool(tokens) and all(file.suffix == ".bin" for file in tokens)
    )


def without_tokenizer(files: Sequence[Path]) -> list[Path]:
    """The files without a tokenizer.json among several, which is not text."""
    return [file for file in files if file.name != TOKENIZER or len(files) == 1]


@contextlib.contextmanager
def read_errors_named(option: str, path: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}: {path!r} cannot be read: {error}") from error


def readable(option: str, path: str) -> list[Path]:
    """The files of a path; raises ValueError if there are none, or they cannot be read."""
    with read_errors_named(option, path):
        files = _files(option, path)
    if not files:
        raise ValueError(f"{option}: {path!r} is empty (0 files): give a file or a folder of text")
    return files


def read_text(path: str | None, option: str = "data.path") -> np.ndarray:
    """All bytes of a file, or of a folder's files in the order of their relative paths.

    Args:
      path: of the file or folder; "stdlib": the source of Python's standard library; None: `BUILTIN`.
      option: the option with the path, for errors.

    Returns:
      uint8, one-dimensional.

    Raises:
      ValueError: the path does not exist, cannot be read completely, is too large for this host, or empty.
    """
    if path is None:
        from pydoc_data.topics import topics

        return _bytes("\n".join(topics[name] for name in sorted(topics)).encode())
    with read_errors_named(option, path):
        files = _files(option, path)
        size = sum(file.stat().st_size for file in files)
        memory.check(2 * size, f"{option}: {path!r}, held in memory twice,", "give less text")
        text = b"\n".join(map(_as_long_as_it_is, files))
    if not text.strip():
        raise ValueError(f"{option}: {path!r} is empty ({len(files)} files): give a file or a folder of text")
    return _bytes(text)


def _as_long_as_it_is(file: Path) -> bytes:
    """A file's bytes, without those appended while it is read."""
    with file.open("rb") as stream:
        return stream.read(os.fstat(stream.fileno()).st_size)


def _files(option: str, path: str) -> list[Path]:
    """The file itself, or all files of the folder, in the order of their paths. Follows links.

    Raises:
      ValueError: the folder has something else than files, such as a pipe or a dangling link.
      OSError: a folder cannot be read.
    """
    if path == STDLIB:
        return stdlib_files(option)
    root = Path(path)
    if not os.path.lexists(root):
        raise ValueError(f"{option}: {path!r} does not exist: give a file or a folder of text{paths.near_path(root)}")
    return sorted(_walked(option, root))


def _walked(option: str, root: Path) -> Iterator[Path]:
    """The files of a path, in any order."""
    paths: list[tuple[Path, frozenset[tuple[int, int]]]] = [(root, frozenset())]  # each with its parent folders
    while paths:
        path, above = paths.pop()
        found = _found(option, path)
        folder = found.st_dev, found.st_ino
        if stat.S_ISREG(found.st_mode):
            yield path
        elif not stat.S_ISDIR(found.st_mode):
            raise ValueError(f"{option}: {str(path)!r} is neither a file nor a folder: put the text into a file")
        elif folder in above:
            raise ValueError(f"{option}: {str(path)!r} is a link to a folder that contains it: remove the link")
        else:
            paths += ((path / name, above | {folder}) for name in os.listdir(path))


def _found(option: str, path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        if not path.is_symlink():
            raise
        raise ValueError(f"{option}: {str(path)!r} is a broken link ({error.strerror}): remove it") from None


def _bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def stdlib_files(option: str) -> list[Path]:
    """The modules of `STDLIB`, shuffled, so that the last tenth resembles the rest.

    A module has the same relative order in all versions of Python.

    Args:
      option: the option that names it, for errors.

    Raises:
      ValueError: this Python has no source, or a local file has the same name.
    """
    if os.path.lexists(STDLIB):
        raise ValueError(
            f"{option}: {STDLIB!r} is the source of Python's standard library, and a file or folder here has the same "
            f"name: write {os.path.join('.', STDLIB)} for it"
        )
    root = Path(sysconfig.get_path("stdlib"))
    names = sys.stdlib_module_names - _LEFT_OUT
    found = [root / f"{name}.py" for name in names] + [file for name in names for file in (root / name).rglob("*.py")]
    paths = [file.relative_to(root) for file in found if file.is_file()]
    paths = [path for path in paths if not _LEFT_OUT & set(path.parts)]
    if not paths:
        raise ValueError(
            f"{option}: {STDLIB!r}: this Python does not include the source of its standard library in {str(root)!r}: "
            "give a file or a folder of text"
        )
    return [root / path for path in sorted(paths, key=lambda path: (zlib.crc32(path.as_posix().encode()), path))]
