"""Paths that a user types: names of presets, and the nearest name to a mistyped path."""

from __future__ import annotations

import difflib
import itertools
import os
from pathlib import Path

_MOST_NAMES = 10_000  # of a folder to compare with


def presets() -> dict[str, Path]:
    """The configurations that come with jaxshard: name -> file.

    >>> presets()["zero3"].name
    'zero3.toml'
    """
    package = Path(__file__).parents[2]
    folders = package / "presets", package.parent / "configs"  # of the installed package; of the repository
    folder = next((each for each in folders if each.is_dir()), None)
    return {} if folder is None else {file.stem: file for file in sorted(folder.glob("*.toml"))}


def configuration(path: Path) -> Path:
    """The file that a command's CONFIG names: the path itself, or a preset of this name if no file has it."""
    return path if os.path.isfile(path) else presets().get(str(path), path)


def near_configuration(path: Path) -> str:
    """The end of an error about a configuration that does not exist: a similar path or preset, or all presets."""
    hint, known = near_path(path), presets()
    if hint or not known:
        return hint
    (name,) = difflib.get_close_matches(path.stem, known, n=1) or [None]
    return f"; did you mean the preset {name!r}?" if name else f"; the presets are {', '.join(known)}"


def near_path(path: Path) -> str:
    """The end of an error about a path that does not exist: a similar path that exists, or "".

    >>> near_path(Path(__file__).parent / "path.py").endswith("/config/paths.py'?")
    True
    """
    above = next((each for each in path.parents if os.path.isdir(each)), None)
    if above is None:
        return ""
    wrong, *rest = path.relative_to(above).parts
    try:
        names = [each.name for each in itertools.islice(above.iterdir(), _MOST_NAMES)]
    except OSError:
        return ""
    found = (above.joinpath(name, *rest) for name in difflib.get_close_matches(wrong, names))
    near = next((str(each) for each in found if os.path.exists(each)), None)
    return f"; did you mean {near!r}?" if near else ""
