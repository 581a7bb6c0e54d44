"""Where in the user's code an equation of a traced program comes from."""

import os
import sysconfig
from collections.abc import Sequence
from typing import Any

import jax

from jaxshard.base.types import Equation

_OURS, _JAX = (os.path.dirname(os.path.abspath(path)) + os.sep for path in (os.path.dirname(__file__), jax.__file__))
_LIBRARIES = tuple(path + os.sep for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def line_of(trail: Sequence[Equation]) -> str:
    """The user's line, and the library's if it is there: "train.py:12 (flax/linen/normalization.py:97)"; "" if unknown.

    Args:
      trail: an equation, after the calls around it, the outermost first.
    """
    frames = [frame for eqn in reversed(trail) for frame in _frames(eqn)]
    theirs = [frame for frame in frames if not frame[0].startswith((_OURS, _JAX))]
    own = next((frame for frame in theirs if not frame[0].startswith(_LIBRARIES)), None)
    if not theirs:
        return ""
    library = "" if own == theirs[0] else _in_short(*theirs[0])
    return " ".join([*([_in_short(*own)] if own else []), *([f"({library})" if own else library] if library else [])])


def _frames(eqn: Equation) -> list[tuple[str, int]]:
    """(file, line) of each function that was running, the innermost first."""
    traceback: Any = eqn.source_info.traceback
    return [(os.path.abspath(x.file_name), int(x.line_num)) for x in traceback.frames] if traceback else []


def _in_short(file: str, line: int) -> str:
    for root in (*_LIBRARIES, os.getcwd() + os.sep):
        if file.startswith(root):
            return f"{os.path.relpath(file, root)}:{line}"
    return f"{file}:{line}"
