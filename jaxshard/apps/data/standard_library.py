"""The source of Python's standard library: 8 MB of text that is on every machine."""

from __future__ import annotations

import os
import sys
import sysconfig
import zlib
from pathlib import Path

NAME = "stdlib"
"""What names it in place of a path."""

_LEFT_OUT = frozenset(
    {
        *("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"),  # not in every distribution
        *("encodings", "pydoc_data"),  # tables and English
        *("test", "tests"),
    }
)


def files(option: str) -> list[Path]:
    """Its modules, in an order that mixes them: the last tenth is of the same kind as the rest.

    Versions of Python that have the same module give it the same place.

    Args:
      option: that names it, for errors.

    Raises:
      ValueError: this Python carries no source, or something here has the same name.
    """
    if os.path.lexists(NAME):
        raise ValueError(
            f"{option}: {NAME!r} is the source of Python's standard library, and something here has this name: write "
            f"{os.path.join('.', NAME)} for that"
        )
    root = Path(sysconfig.get_path("stdlib"))
    names = sys.stdlib_module_names - _LEFT_OUT
    found = [root / f"{name}.py" for name in names] + [file for name in names for file in (root / name).rglob("*.py")]
    paths = [file.relative_to(root) for file in found if file.is_file()]
    paths = [path for path in paths if not _LEFT_OUT & set(path.parts)]
    if not paths:
        raise ValueError(
            f"{option}: {NAME!r}: this Python has no source of its standard library in {str(root)!r}: give a file or a "
            "folder of text"
        )
    return [root / path for path in sorted(paths, key=lambda path: (zlib.crc32(path.as_posix().encode()), path))]
