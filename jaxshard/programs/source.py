"""Where in the user's code an equation of a traced program, or an operation of a compiled one, comes from."""

import itertools
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from jaxshard.base.types import Equation
from jaxshard.system import users_lines
from jaxshard.system.users_lines import Frame, Place

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ENTRANCES = tuple(os.path.join(_OURS, *name) for name in (("loss", "loss_program.py"), ("step", "step.py")))


def line_of(trail: Sequence[Equation]) -> str:
    """The user's line, and the library's if it is there: "train.py:12 (flax/linen/normalization.py:97)"; "" if unknown.

    Args:
      trail: an equation, after the calls around it, the outermost first.
    """
    return str(users_lines.place_of([frame for eqn in reversed(trail) for frame in _within(_frames(eqn))]))


def place_of(frames: Iterable[Frame]) -> Place:
    """Where functions stood that ran inside each other, the innermost first; who called jaxshard is left out."""
    return users_lines.place_of(_within((os.path.abspath(file), line) for file, line in frames))


def as_written_at(eqn: Equation) -> AbstractContextManager[None]:
    """While entered, what JAX traces is of the equation's line, in compiled programs, profiles and errors."""
    from jax.extend.source_info_util import user_context  # importing it takes 60 ms

    return user_context(eqn.source_info.traceback)


def _frames(eqn: Equation) -> list[Frame]:
    """Each function that was running, the innermost first."""
    traceback: Any = eqn.source_info.traceback
    return [(os.path.abspath(x.file_name), int(x.line_num)) for x in traceback.frames] if traceback else []


def _within(frames: Iterable[Frame]) -> Iterable[Frame]:
    """The frames without those of the program that called jaxshard."""
    return itertools.takewhile(lambda frame: frame[0] not in _ENTRANCES, frames)
