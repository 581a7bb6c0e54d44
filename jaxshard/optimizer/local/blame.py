"""Finds the part of a user's chain of transformations that an equation comes from, by its traceback."""

import functools
import os
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import optax

from jaxshard.base.types import Equation

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_JAX, _OPTAX = (os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep for package in (jax, optax))
Held: TypeAlias = Any  # any object that a user's function can reach
_PLUMBING = "with_extra_args_support"


class Step(NamedTuple):
    """A function in a traceback; `name` is the function that made it: "chain" for `chain.<locals>.update_fn`."""

    name: str
    qualname: str
    file: str
    first_line: int
    line: int


Frames = list[tuple[str, str, int, int]]  # (qualname, file, first line, current line) of functions, the outermost first


def of_equations(trail: tuple[Equation, ...], inner: optax.GradientTransformation) -> str:
    """The equation's place, such as "chain[0] > clip_by_global_norm (optax/transforms/_clipping.py:96)"; "" if unknown.

    Args:
      trail: an equation, after the calls around it, the outermost first.
      inner: the transformation whose update was traced.
    """
    found = [eqn.source_info.traceback for eqn in trail]
    frames = [frame for one in found if one is not None for frame in reversed(one.frames)]
    return _place([(f.function_name, f.file_name, f.function_start_line, f.line_num) for f in frames], inner)


def of_error(error: BaseException, inner: optax.GradientTransformation) -> str:
    """The place in the chain where an exception was raised, as `of_equations` gives it."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return _place([(code.co_qualname, code.co_filename, code.co_firstlineno, line) for code, line in frames], inner)


def _place(frames: Frames, inner: optax.GradientTransformation) -> str:
    steps = list(_steps(frames))
    kept = [step for i, step in enumerate(steps) if not any(_within(step, other) for other in steps[max(i - 1, 0) : i])]
    if not kept:
        return ""
    routes = _routes([inner.update], kept)
    best = [indices for unknown, indices in routes if unknown == min(routes)[0]]
    left_by = [sorted({indices[i] for indices in best} - {""}) for i in range(1, len(kept))]
    names = [step.name + (f"[{' or '.join(at)}]" if at else "") for step, at in zip(kept, [*left_by, []], strict=True)]
    return f"{' > '.join(names)} ({_short(kept[-1].file)}:{steps[-1].line})"


def _routes(start: object, steps: list[Step]) -> list[tuple[int, tuple[str, ...]]]:
    """All routes from `start` through `steps`: (number of steps not found, each step's index or "")."""
    for skipped, step in enumerate(steps):
        if found := [(index, fn) for index, fn in _reached(start) if _is(fn, step)]:
            rest = [(index, *route) for index, fn in found for route in _routes(fn, steps[skipped + 1 :])]
            return [(skipped + unknown, (index, *[""] * skipped, *indices)) for index, unknown, indices in rest]
    return [(len(steps), ("",) * len(steps))]


def _steps(frames: Frames) -> Iterator[Step]:
    """The functions of a traceback, except JAX's, ours and optax's helpers."""
    for qualname, file, first_line, line in frames:
        file = os.path.abspath(file)
        helper = file.startswith(_OPTAX) and ("." not in qualname or qualname.startswith(_PLUMBING))
        if not helper and not file.startswith((_HERE, _JAX)):
            yield Step(qualname.split(".<locals>")[0].removesuffix(".update"), qualname, file, first_line, line)


def _within(step: Step, outer: Step) -> bool:
    """Whether `step` was defined inside its caller `outer`: a loop's body, a nested function."""
    return step.file == outer.file and step.qualname != outer.qualname and step.name == outer.name


def _is(fn: object, step: Step) -> bool:
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    return code is not None and (code.co_firstlineno, code.co_qualname) == (step.first_line, step.qualname)


def _reached(start: object) -> Iterator[tuple[str, object]]:
    """Every function reachable from `start`, at any depth, with the first index or key on the way to it."""
    seen: set[int] = {id(start)}
    todo: list[tuple[str, object]] = list(_held(start))
    while todo:
        index, found = todo.pop()
        if id(found) not in seen:
            seen.add(id(found))
            if callable(found):
                yield index, found
            todo += [(index or key, held) for key, held in _held(found)]


def _held(x: Held) -> Iterator[tuple[str, object]]:
    """(index or key, object) for each object that a function, transformation or container holds; "" for no index."""
    if isinstance(x, dict):
        yield from ((repr(key), value) for key, value in x.items())
    elif hasattr(x, "init") and hasattr(x, "update"):
        yield "", x.update
    elif isinstance(x, list | tuple):
        yield from ((str(i), value) for i, value in enumerate(x))
    elif isinstance(x, functools.partial):
        yield from (("", held) for held in (x.func, *x.args, *x.keywords.values()))
    elif callable(x):
        yield from _held_by_function(x)


def _held_by_function(fn: Held) -> Iterator[tuple[str, object]]:
    if hasattr(fn, "__wrapped__"):
        yield "", fn.__wrapped__
    if hasattr(fn, "__self__"):
        yield from (("", held) for held in getattr(fn.__self__, "__dict__", {}).values())
    for cell in getattr(getattr(fn, "__func__", fn), "__closure__", None) or ():
        try:
            yield "", cell.cell_contents
        except ValueError:  # a variable that was never set
            continue


def _short(file: str) -> str:
    """The path relative to the folder that holds optax, or to the current one, if the file is in either."""
    for root in (os.path.dirname(_OPTAX.rstrip(os.sep)), os.getcwd()):
        if file.startswith(root + os.sep):
            return os.path.relpath(file, root)
    return file
