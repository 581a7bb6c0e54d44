"""Keeps quiet what orbax and asyncio log of a load or a save that fails, with tracebacks: its error says it once."""

import errno
import gc
import logging
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from jaxshard.base.types import T
from jaxshard.system.interrupts import deal_with

E = TypeVar("E", bound=BaseException)
NO_MORE_WORK = "cannot schedule new futures"  # Python's words, once it ends
_LOGGERS = ("absl", "asyncio")
_LOOPS = ("asyncio", "uvloop")  # packages


def quietly(load: Callable[[], T], folder: Path) -> T:
    """The result of `load`, which has orbax read in `folder`.

    Where one array cannot be read, orbax leaves the reads of others behind, whose errors asyncio logs once they are
    collected. So they are collected here. The error comes without its traceback, which would hold them.

    Raises:
      Exception: what `load` raises.
    """
    with quiet(folder), older_objects_left_out():
        try:
            return load()
        except Exception as error:
            failed = error
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
            failed = forgotten(failed, folder)
    raise failed


def forgotten(error: E, folder: Path) -> E:
    """The error without the frames that raised it; what they held is collected, and says what it has to say now.

    What is still being written or read in `folder` says it later: asyncio logs it no more.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
    _late.names.add(str(folder))
    logging.getLogger("asyncio").addFilter(_late)
    gc.collect()
    return error


@contextmanager
def older_objects_left_out() -> Iterator[None]:
    """Within the block, Python's garbage collection looks only at objects that are made in it.

    It takes seconds for all objects of a process that has traced many programs.
    """
    is_ours = gc.get_freeze_count() == 0  # else what the program has frozen itself stays so
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


@contextmanager
def quiet(folder: Path) -> Iterator[None]:
    """Within the block, warnings and errors that orbax logs, or that asyncio logs of this folder, are dropped.

    From then on Python prints no traceback of an answer that comes late, either.
    """
    deal_with(_is_late_answer)
    dropped = _Filter("/orbax/", str(folder))
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(dropped)
    try:
        yield
    finally:
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(dropped)


class _Filter(logging.Filter):
    """Drops warnings and errors that name one of `names`."""

    def __init__(self, *names: str):
        super().__init__()
        self.names = set(names)

    def filter(self, record: logging.LogRecord) -> bool:
        said = f"{record.pathname} {record.getMessage()} {record.exc_info[1] if record.exc_info else ''}"
        return record.levelno < logging.WARNING or not any(name in said for name in self.names)


_late = _Filter()  # the folders where a load or a save failed


def _is_late_answer(unraisable: "sys.UnraisableHookArgs") -> bool:
    """Whether no code in Python called a closed event loop: such an error has the loop's own frames alone.

    Where one array fails, orbax closes its loop. Each array that is still being read or written then tells the closed
    loop that it has ended, from a thread of tensorstore's, for as long as seconds after the save.
    """
    trace = unraisable.exc_traceback
    caller = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    closed = isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"
    return closed and unraisable.object is None and caller.partition(".")[0] in _LOOPS


@contextmanager
def while_python_runs(path: Path) -> Generator[None]:
    """Turns Python's error that it takes no more work into one that names the cure."""
    try:
        yield
    except RuntimeError as error:
        if NO_MORE_WORK not in str(error):
            raise
        why = "it was not saved: the main thread has ended; let it wait for the one that saves, by thread.join()"
        raise OSError(errno.ECANCELED, why, str(path)) from None
