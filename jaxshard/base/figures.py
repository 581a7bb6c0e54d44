# pyright: standard
# (matplotlib's types are partly unknown, which strict refuses)
"""Figures run no other program: a `matplotlibrc` in the current folder, which is read first, may ask for LaTeX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_latex(draw: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that draws, with matplotlib's own text."""

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        import matplotlib as mpl

        with mpl.rc_context({"text.usetex": False}):
            return draw(*args, **kwargs)

    return drawn
