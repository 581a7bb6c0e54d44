"""Where in the user's code an equation of a traced program, or an operation of a compiled one, comes from."""

import inspect
import itertools
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import jax

from jaxshard.base.types import Equation

Frame: TypeAlias = tuple[str, int]  # the file and the line at which a function stood

_OURS, _JAX = (os.path.dirname(os.path.abspath(path)) + os.sep for path in (os.path.dirname(__file__), jax.__file__))
_USERS = tuple(os.path.join(_OURS, part) + os.sep for part in ("apps",))  # they use the rest as users do
_ENTRANCES = tuple(os.path.join(_OURS, *name) for name in (("loss", "loss_program.py"), ("step", "step.py")))
_LIBRARIES = tuple(path + os.sep for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_PYTHON = sysconfig.get_path("stdlib") + os.sep


class Place(NamedTuple):
    """A line of the user's, and the innermost one of a library that it calls there; "" where there is none."""

    own: str
    library: str

    def __str__(self) -> str:
        return f"{self.own} ({self.library})" if self.own and self.library else self.own or self.library


def line_of(trail: Sequence[Equation]) -> str:
    """The user's line, and the library's if it is there: "train.py:12 (flax/linen/normalization.py:97)"; "" if unknown.

    Args:
      trail: an equation, after the calls around it, the outermost first.
    """
    return str(_place([frame for eqn in reversed(trail) for frame in _within(_frames(eqn))]))


def place_of(frames: Iterable[Frame]) -> Place:
    """Where functions stood that ran inside each other, the innermost first; who called jaxshard is left out."""
    return _place(_within((os.path.abspath(file), line) for file, line in frames))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the user's line that called jaxshard, however deep within jaxshard and JAX."""
    files = (os.path.abspath(frame.f_code.co_filename) for frame, _ in traceback.walk_stack(inspect.currentframe()))
    depth = next((i for i, file in enumerate(files, 1) if _is_own(file)), 2)
    warnings.warn(message, category, stacklevel=depth)


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


def _place(frames: Iterable[Frame]) -> Place:
    theirs = [frame for frame in frames if _is_theirs(frame[0])]
    own = next((frame for frame in theirs if _is_own(frame[0])), None)
    library = theirs[0] if theirs and theirs[0] != own else None
    return Place(*(_in_short(*frame) if frame else "" for frame in (own, library)))


def _is_theirs(file: str) -> bool:
    """Whether a file is the user's, or of a library other than JAX, jaxshard and Python's own."""
    if file.startswith((_OURS, _JAX)):
        return file.startswith(_USERS)
    is_pythons = file.startswith(_PYTHON) or os.path.basename(file).startswith("<frozen ")
    return file.startswith(_LIBRARIES) or not is_pythons


def _is_own(file: str) -> bool:
    """Whether a file is the user's, and no library's."""
    return _is_theirs(file) and (file.startswith(_USERS) or not file.startswith(_LIBRARIES))


def _in_short(file: str, line: int) -> str:
    if cell := _cell(file):
        return f"{cell}, line {line}"
    for root in (*_LIBRARIES, os.getcwd() + os.sep):
        if file.startswith(root):
            return f"{os.path.relpath(file, root)}:{line}"
    return f"{file}:{line}"


def _cell(file: str) -> str:
    """The cell of a notebook, as IPython's tracebacks name it: "Cell In[3]"; "" for a file, and before IPython 8."""
    shell = ipython.get_ipython() if (ipython := sys.modules.get("IPython")) else None
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    if name_of is None:
        return ""
    return " ".join(name_of(file) or name_of(os.path.basename(file)) or ())
