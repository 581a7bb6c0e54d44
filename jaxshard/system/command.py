"""How the command `jaxshard` begins, before JAX is imported. Other programs that import jaxshard are left alone.

* Its standard files are open: a data file never takes the number of a standard error that was closed (`2>&-`), where
  libraries would write into it.
* Ctrl-C ends it at once, with status 130. An exception would be lost in a callback of the garbage collector, would
  spoil a module that is being imported, and would crash JAX if Python ends while XLA compiles.
* `jaxshard doctor` says in a line why JAX cannot be imported.
"""

import importlib
import os
import signal
import sys

INTERRUPTED = 128 + signal.SIGINT
_BEFORE = dict(os.environ)


def environment() -> dict[str, str]:
    """The environment that the user gave the command; JAX adds to it when it is imported."""
    return dict(_BEFORE if is_command() else os.environ)


def is_command() -> bool:
    """Whether this process was started as `jaxshard ...` or `python -m jaxshard ...`."""
    name, *_ = getattr(sys, "argv", None) or [""]
    return _is_module() or os.path.basename(name) == "jaxshard"


def python(*words: str) -> list[str]:
    """A command that starts this Python again. It finds no modules in the current folder, where anybody's may lie,
    unless the user started this one so."""
    return [sys.executable, *([] if _is_module() and not sys.flags.safe_path else ["-P"]), *words]


def _is_module() -> bool:
    """Whether this process was started as `python -m jaxshard ...`."""
    rest = (getattr(sys, "argv", None) or [""])[1:]
    return sys.orig_argv[: len(sys.orig_argv) - len(rest)][-2:] == ["-m", "jaxshard"]


def _begin() -> None:
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    if sys.argv[1:2] == ["doctor"]:
        _check_imports()


def _check_imports() -> None:
    """Ends `jaxshard doctor` with a line that says why JAX, or what else it stands on, cannot be imported."""
    for name in ("jax", "optax"):
        try:
            importlib.import_module(name)
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), "")
            print(f"jaxshard doctor: {name} cannot be imported: {type(error).__name__}: {reason}", file=sys.stderr)
            sys.exit(1)


def _end(number: int, frame: object) -> None:
    del number, frame
    os._exit(INTERRUPTED)


if is_command():
    _begin()
