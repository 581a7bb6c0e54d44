"""A step that a user's own function makes (`jaxshard explain MODULE:FUNCTION`), checked; and put on other devices."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax

from jaxshard.base.source import place_of
from jaxshard.base.units import nearest
from jaxshard.cli.explanation import Subject
from jaxshard.core.step import TrainStep, on_mesh

_WANTED = "it must return (step, params, batch, *more), where step = jaxshard.train_step(loss_fn, opt)"


class UsersError(ValueError):
    """The user's own code raised an error; the message has its type and the line."""


def names_function(what: str) -> bool:
    """Whether this is a MODULE:FUNCTION, and no file.

    >>> names_function("train:build"), names_function("configs/zero3.toml")
    (True, False)
    """
    return ":" in what and not what.endswith(".toml")


def made_by(what: str) -> Subject:
    """What the function returns.

    Args:
      what: "module:function"; the module is looked for in the current folder, too.

    Raises:
      ValueError: there is no such function, or it returns something else.
      UsersError: the module cannot be imported, or the function fails.
    """
    with _here_first():
        function = _function(what)
        with blamed(what):
            made = function()
    if not isinstance(made, tuple | list) or len(made) < 3:
        shape = f" of {len(made)}" if isinstance(made, tuple | list) else ""
        raise ValueError(f"{what} returned a {type(made).__name__}{shape}: {_WANTED}")
    if not isinstance(made[0], TrainStep):
        raise ValueError(f"{what} returned a {type(made[0]).__name__} as the step: {_WANTED}")
    with blamed(what):
        return Subject.of(*made)


@contextlib.contextmanager
def blamed(what: str) -> Iterator[None]:
    """While entered, an error of the user's code is told as one, with the innermost line of the user's."""
    try:
        yield
    except Exception as error:
        _blame(what, error)
    except SystemExit as error:
        raise UsersError(f"{what}: it ended the program, by SystemExit({error.code!r}): {_UNDER_MAIN}") from None


_UNDER_MAIN = 'put what is not to run on an import under if __name__ == "__main__":'


def _blame(what: str, error: Exception) -> NoReturn:
    frames = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    notes = [note for note in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in note]
    text = "\n".join([str(error), *notes])
    if isinstance(error, SyntaxError):
        frames, text = [(error.filename or "", error.lineno or 0)], error.msg
    line = place_of(frames).own
    raise UsersError(f"{what}: {f'{line}: ' if line else ''}{kind}{text}") from error


@contextlib.contextmanager
def _here_first() -> Iterator[None]:
    """While entered, modules of the current folder can be imported, as by `python -m`."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module has taken it away
            sys.path.remove(here)


def _function(what: str) -> Callable[[], Any]:
    name, _, attribute = what.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", name) or not attribute.isidentifier() or name.endswith(".py"):
        cure = name.removesuffix(".py").replace("/", ".").strip(".")
        raise ValueError(
            f"{what}: name a module and a function as Python imports them, such as {cure or 'train'}:build"
        )
    module = _module(what, name)
    if not hasattr(module, attribute):
        raise ValueError(f"{what}: {name} has no {attribute}{nearest(attribute, vars(module))}")
    function = getattr(module, attribute)
    if not callable(function):
        raise ValueError(f"{what}: {attribute} is no function, but of type {type(function).__name__}")
    if missing := _why_not_called(function):
        raise ValueError(
            f"{what}: {attribute} must take no arguments ({missing}): wrap it in a function that gives them"
        )
    return function


def _why_not_called(function: Callable[..., Any]) -> str:
    """Why a function cannot be called without arguments; "" if it can, or shows no signature."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        return str(error)
    except ValueError:
        return ""
    return ""


def _module(what: str, name: str) -> Any:
    with blamed(what):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            missing = error.name
    raise ValueError(f"{what}: there is no module {missing!r} here, nor among the installed packages")


def on_devices(what: str, subject: Subject, devices: Sequence[Any]) -> Subject:
    """The same on other devices, as many as the step's mesh has.

    Raises:
      ValueError: there are more or fewer.
    """
    mesh = subject.step.setup.mesh
    if mesh.size != len(devices):
        sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        raise ValueError(
            f"{what} makes a mesh of {mesh.size} devices ({sizes}), and there are {len(devices)}: make it of all of "
            "jax.devices(), as jaxshard.make_mesh() does, or name a machine of that size"
        )
    new = jax.make_mesh(tuple(mesh.shape.values()), mesh.axis_names, devices=devices, axis_types=mesh.axis_types)
    return subject._replace(step=on_mesh(subject.step, new))
