"""Finds and calls a function that a user names, MODULE:FUNCTION, and reports errors of the user's code as such."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from types import ModuleType
from typing import Any, NoReturn

from jaxshard.system.text import LinesError, nearest
from jaxshard.system.users_lines import place_of


class UsersError(LinesError):
    """The user's own code raised an error; the message has its type and the line."""


def names_function(what: str) -> bool:
    """Whether this is a MODULE:FUNCTION, not a file.

    >>> names_function("train:build"), names_function("configs/zero3.toml")
    (True, False)
    """
    return ":" in what and not what.endswith(".toml")


def called(what: str, files: bool = False, offered: Mapping[str, Any] | None = None) -> Any:
    """The result of the function.

    Args:
      what: "module:function"; the module may be in the current folder.
      files: whether it may be "path/to/file.py:function".
      offered: arguments that it gets if it has parameters of these names.

    Raises:
      ValueError: there is no such function, or it needs arguments.
      UsersError: the module cannot be imported, or the function fails.
    """
    with _here_first():
        function, given = _function(what, files, offered or {})
        with blamed(what):
            return function(**given)


@contextlib.contextmanager
def blamed(what: str) -> Generator[None]:
    """While entered, an error of the user's code becomes a `UsersError`, with the user's innermost line."""
    try:
        yield
    except Exception as error:
        _blame(what, error)
    except SystemExit as error:
        raise UsersError(f"{what}: it ended the program with SystemExit({error.code!r}): {_UNDER_MAIN}") from None


_UNDER_MAIN = 'put code that must not run on import under if __name__ == "__main__":'


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
def _here_first() -> Generator[None]:
    """While entered, modules of the current folder can be imported, as by `python -m`."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module has removed it
            sys.path.remove(here)


def _function(what: str, files: bool, offered: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function, and what it gets of the arguments that are offered."""
    name, _, attribute = what.rpartition(":")
    if files and name.endswith(".py") and attribute.isidentifier():
        module = _file(what, name)
    elif not re.fullmatch(r"\w+(\.\w+)*", name) or not attribute.isidentifier() or name.endswith(".py"):
        cure = name.removesuffix(".py").replace("/", ".").strip(".")
        raise ValueError(
            f"{what}: give a module and a function as Python imports them, such as {cure or 'train'}:build"
        )
    else:
        module = _module(what, name)
    if not hasattr(module, attribute):
        raise ValueError(f"{what}: {name} has no {attribute}{nearest(attribute, vars(module))}")
    function = getattr(module, attribute)
    if not callable(function):
        raise ValueError(f"{what}: {attribute} is not a function, but of type {type(function).__name__}")
    given = _taken(function, offered)
    if missing := _why_not_called(function, given):
        raise ValueError(
            f"{what}: {attribute} must take no arguments ({missing}): wrap it in a function that gives them"
        )
    return function, given


def _taken(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {name: value for name, value in offered.items() if name in names}


def _why_not_called(function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """Why a function cannot be called with these arguments; "" if it can, or shows no signature."""
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        return str(error)
    except ValueError:
        return ""
    return ""


def _module(what: str, name: str) -> ModuleType:
    with blamed(what):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            missing = error.name
    raise ValueError(f"{what}: no module {missing!r} in this folder or among the installed packages")


def _file(what: str, name: str) -> ModuleType:
    if not os.path.isfile(name):
        raise ValueError(f"{what}: the file {name!r} does not exist")
    module_name = f"jaxshard_users_{abs(hash(os.path.abspath(name))):x}"
    spec = importlib.util.spec_from_file_location(module_name, name)
    assert spec is not None  # true for any file that ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look there
    with blamed(what):
        spec.loader.exec_module(module)
    return module
