"""Keeps quiet what orbax and asyncio log of a load or a save that fails, with tracebacks: its error says it once."""

import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxshard.base.types import T

_LOGGERS = ("absl", "asyncio")


def quietly(load: Callable[[], T], folder: Path) -> T:
    """The result of `load`, which has orbax read in `folder`.

    Where one array cannot be read, orbax leaves the reads of others behind, whose errors asyncio logs once they are
    collected. So they are collected here. The error comes without its traceback, which would hold them.

    Raises:
      Exception: what `load` raises.
    """
    with quiet(folder):
        try:
            return load()
        except Exception as error:
            failed = error
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
            failed = _bare(failed)
            gc.collect()
    raise failed


@contextmanager
def quiet(folder: Path) -> Iterator[None]:
    """Within the block, warnings and errors that orbax logs, or that asyncio logs of this folder, are dropped."""
    dropped = _Filter(folder)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(dropped)
    try:
        yield
    finally:
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(dropped)


class _Filter(logging.Filter):
    def __init__(self, folder: Path):
        super().__init__()
        self._named = ("/orbax/", str(folder))

    def filter(self, record: logging.LogRecord) -> bool:
        said = f"{record.pathname} {record.getMessage()} {record.exc_info[1] if record.exc_info else ''}"
        return record.levelno < logging.WARNING or not any(name in said for name in self._named)


def _bare(error: Exception) -> Exception:
    """The error without the frames that raised it."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error
