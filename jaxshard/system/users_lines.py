"""Finds the line of the user's code that a call, an error or a warning comes from.

A top-level package of jaxshard that uses the rest as users do sets `IS_A_USER = True`; its lines then count as the
user's.
"""

import functools
import inspect
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax

Frame: TypeAlias = tuple[str, int]  # a function's file and current line

_OURS, _JAX = (os.path.dirname(os.path.abspath(path)) + os.sep for path in (os.path.dirname(__file__), jax.__file__))
_NAME = __name__.partition(".")[0]
_LIBRARIES = tuple(path + os.sep for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_PYTHON = sysconfig.get_path("stdlib") + os.sep


class Place(NamedTuple):
    """The user's line, and the innermost line of a library that it calls; "" if there is none."""

    own: str
    library: str

    def __str__(self) -> str:
        return f"{self.own} ({self.library})" if self.own and self.library else self.own or self.library


def place_of(frames: Iterable[Frame]) -> Place:
    """The place of a stack of frames, the innermost first."""
    absolute = ((os.path.abspath(file), line) for file, line in frames)
    theirs = [frame for frame in absolute if _is_theirs(frame[0])]
    own = next((frame for frame in theirs if _is_own(frame[0])), None)
    library = theirs[0] if theirs and theirs[0] != own else None
    return Place(*(_in_short(*frame) if frame else "" for frame in (own, library)))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the user's line that called jaxshard, however deep within jaxshard and JAX."""
    files = (os.path.abspath(frame.f_code.co_filename) for frame, _ in traceback.walk_stack(inspect.currentframe()))
    depth = next((i for i, file in enumerate(files, 1) if _is_own(file)), 2)
    warnings.warn(message, category, stacklevel=depth)


def module_of(file: str) -> ModuleType | None:
    """The module of jaxshard in this file, if it is imported."""
    if not file.startswith(_OURS):
        return None
    return sys.modules.get(".".join([_NAME, *file.removeprefix(_OURS).removesuffix(".py").split(os.sep)]))


def _is_users_part(file: str) -> bool:
    """Whether a file is in a package of jaxshard that uses the rest as users do."""
    package, _, within = file.removeprefix(_OURS).partition(os.sep)
    ours = bool(within) and file.startswith(_OURS)
    return ours and getattr(sys.modules.get(f"{_NAME}.{package}"), "IS_A_USER", False)


def _is_theirs(file: str) -> bool:
    """Whether a file is the user's, or a library's other than JAX, jaxshard and the standard library."""
    if file.startswith((_OURS, _JAX)):
        return _is_users_part(file)
    is_pythons = file.startswith(_PYTHON) or os.path.basename(file).startswith("<frozen ")
    return file.startswith(_LIBRARIES) or not is_pythons


def _is_own(file: str) -> bool:
    """Whether a file is the user's, not a library's."""
    return _is_theirs(file) and (_is_users_part(file) or not file.startswith(_LIBRARIES))


def _in_short(file: str, line: int) -> str:
    if cell := _cell(file):
        return f"{cell}, line {line}"
    for root in (*_LIBRARIES, os.getcwd() + os.sep):
        if file.startswith(root):
            return f"{os.path.relpath(file, root)}:{line}"
    return f"{file}:{line}"


def _cell(file: str) -> str:
    """The notebook cell, as in IPython's tracebacks: "Cell In[3]"; "" for a file, and before IPython 8."""
    shell = ipython.get_ipython() if (ipython := sys.modules.get("IPython")) else None
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    if name_of is None:
        return ""
    return " ".join(name_of(file) or name_of(os.path.basename(file)) or ())


def named_as(fn: Any, users: Any) -> None:
    """Lets JAX's errors give `fn` the name and the line of the user's function; its arguments keep their names."""
    users = users.func if isinstance(users, functools.partial) else users
    if hasattr(users, "__code__"):
        fn.__signature__, fn.__name__, fn.__wrapped__ = inspect.signature(fn), users.__name__, users
