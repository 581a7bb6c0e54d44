"""Where in the user's code an equation of a traced program, or an operation of a compiled one, comes from.

What a module of jaxshard is to a reader of its frames it says itself:

  ENDS_TRAIL = True    users' code runs inside its functions; who stands outside called jaxshard.
  PART = "the update"  what its functions do in a step; `@part("...")` says so of one function.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, TypeVar

from jaxshard.base.types import Equation
from jaxshard.system import users_lines
from jaxshard.system.users_lines import Frame, Place

Function = TypeVar("Function", bound=Callable[..., Any])
_PART = "_part_of_step"  # the attribute that `part` sets


def line_of(trail: Sequence[Equation]) -> str:
    """The user's line, and the library's if it is there: "train.py:12 (flax/linen/normalization.py:97)"; "" if unknown.

    Args:
      trail: an equation, after the calls around it, the outermost first.
    """
    return str(users_lines.place_of([frame for eqn in reversed(trail) for frame in _within(_frames(eqn))]))


def place_of(frames: Iterable[Frame]) -> Place:
    """Where functions stood that ran inside each other, the innermost first; who called jaxshard is left out."""
    return users_lines.place_of(_within((os.path.abspath(file), line) for file, line in frames))


def part(of_step: str) -> Callable[[Function], Function]:
    """Marks a function by what it does in a step, in words."""

    def marked(fn: Function) -> Function:
        setattr(fn, _PART, of_step)
        return fn

    return marked


def part_of(frames: Iterable[tuple[str, str]]) -> str:
    """What the functions that ran inside each other do in a step, in words; "" where none says.

    Args:
      frames: the file and the qualified name of each function, the innermost first.
    """
    stack = [(users_lines.module_of(os.path.abspath(file)), function) for file, function in frames]
    own = (getattr(_function(module, name), _PART, "") for module, name in stack)
    return next(filter(None, [*own, *(getattr(module, "PART", "") for module, _ in stack)]), "")


def _function(module: ModuleType | None, name: str) -> object:
    """The function of a module, or of a class of it, in which one of this qualified name is written."""
    found: object = module
    for each in name.partition(".<locals>")[0].split("."):
        found = getattr(found, each, None)
    return found


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
    return itertools.takewhile(lambda frame: not getattr(users_lines.module_of(frame[0]), "ENDS_TRAIL", False), frames)
