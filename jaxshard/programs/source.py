"""Finds the user's line that an equation of a traced program, or an operation of a compiled one, comes from.

A module of jaxshard may set two attributes:

  ENDS_TRAIL = True    users' code runs inside its functions; frames outside of them belong to jaxshard's caller.
  PART = "the update"  the part of a step that its functions run; `@part("...")` sets it for one function.
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
    """The user's line, and a library's line if known: "train.py:12 (flax/linen/normalization.py:97)"; "" if unknown.

    Args:
      trail: an equation, after the calls around it, the outermost first.
    """
    return str(users_lines.place_of([frame for eqn in reversed(trail) for frame in _within(_frames(eqn))]))


def place_of(frames: Iterable[Frame]) -> Place:
    """The place of a stack of frames, the innermost first; frames of jaxshard's caller are left out."""
    return users_lines.place_of(_within((os.path.abspath(file), line) for file, line in frames))


def part(of_step: str) -> Callable[[Function], Function]:
    """A decorator that names the part of a step that a function runs."""

    def marked(fn: Function) -> Function:
        setattr(fn, _PART, of_step)
        return fn

    return marked


def part_of(frames: Iterable[tuple[str, str]]) -> str:
    """The part of a step that a stack of functions runs, in words; "" if none has one.

    Args:
      frames: the file and the qualified name of each function, the innermost first.
    """
    stack = [(users_lines.module_of(os.path.abspath(file)), function) for file, function in frames]
    own = (getattr(_function(module, name), _PART, "") for module, name in stack)
    return next(filter(None, [*own, *(getattr(module, "PART", "") for module, _ in stack)]), "")


def _function(module: ModuleType | None, name: str) -> object:
    """The outermost function of this qualified name, in a module or one of its classes."""
    found: object = module
    for each in name.partition(".<locals>")[0].split("."):
        found = getattr(found, each, None)
    return found


def as_written_at(eqn: Equation) -> AbstractContextManager[None]:
    """A context in which traced operations get the equation's line, in compiled programs, profiles and errors."""
    from jax.extend.source_info_util import user_context  # importing it takes 60 ms

    return user_context(eqn.source_info.traceback)


def _frames(eqn: Equation) -> list[Frame]:
    """The frames of an equation's traceback, the innermost first."""
    traceback: Any = eqn.source_info.traceback
    return [(os.path.abspath(x.file_name), int(x.line_num)) for x in traceback.frames] if traceback else []


def _within(frames: Iterable[Frame]) -> Iterable[Frame]:
    """The frames without those of jaxshard's caller."""
    return itertools.takewhile(lambda frame: not getattr(users_lines.module_of(frame[0]), "ENDS_TRAIL", False), frames)
