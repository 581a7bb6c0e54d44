"""Silences the tracebacks that orbax and asyncio log when a load or save fails: its error already says why."""

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
NO_MORE_WORK = "cannot schedule new futures"  # Python's message at its exit
_LOGGERS = ("absl", "asyncio")
_LOOPS = ("asyncio", "uvloop")  # packages


def quietly(load: Callable[[], T], folder: Path) -> T:
    """Returns the result of `load`, by which orbax reads in `folder`.

    When one array cannot be read, orbax abandons the reads of others, whose errors asyncio logs when they are garbage
    collected. So they are collected here, and the error is raised without its traceback, which would hold them.

    Raises:
      Exception: from `load`.
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
    """The error without its traceback. Objects that its frames held are collected, and log their errors now.

    Reads and writes in `folder` that are still running fail later; from now on asyncio does not log them.
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
    """Within the block, drops warnings and errors that orbax logs, or that asyncio logs about this folder.

    From then on Python does not print tracebacks of late answers either.
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
    """Whether a thread of tensorstore called a closed event loop: such an error has only the loop's own frames.

    When one array fails, orbax closes its loop. Each array that is still being read or written reports to the closed
    loop when it ends, which may be seconds after the save.
    """
    trace = unraisable.exc_traceback
    caller = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    closed = isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"
    return closed and unraisable.object is None and caller.partition(".")[0] in _LOOPS


@contextmanager
def while_python_runs(path: Path) -> Generator[None]:
    """Replaces Python's error at exit, that it takes no new work, by one that names the cure."""
    try:
        yield
    except RuntimeError as error:
        if NO_MORE_WORK not in str(error):
            raise
        why = "it was not saved: the main thread has ended; let it wait for the saving thread with thread.join()"
        raise OSError(errno.ECANCELED, why, str(path)) from None
