# pyright: standard
# (matplotlib's types are partly unknown, which strict refuses)
"""Figures are drawn by matplotlib's own settings. Those of a `matplotlibrc` in the current folder, which is read first,
may ask for LaTeX, or for more dots than there is memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from jaxshard.system import small_files

_P = ParamSpec("_P")
_R = TypeVar("_R")

_SETTINGS, _MOST_BYTES = Path("matplotlibrc"), 2**20


def by_own_settings(draw: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that draws, with matplotlib's own settings.

    It raises OSError where those in the current folder, which matplotlib reads all the same, have no end.
    """

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if _SETTINGS.exists() and not _SETTINGS.is_dir():
            small_files.check(_SETTINGS, _MOST_BYTES)
        from matplotlib import style

        with style.context("default"):
            return draw(*args, **kwargs)

    return drawn
