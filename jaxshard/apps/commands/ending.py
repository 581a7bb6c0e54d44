"""Ends the process of `jaxshard train` with a status that says whether to run the same command again."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from typing import NoReturn

import jax

import jaxshard
from jaxshard.system.interrupts import ExitNotice

FAILED_SECONDS = 5
LEAVE_SECONDS = 60  # for the others to report the same error, or to notice that this process is gone


def leave_at_once(status: int, seconds: float) -> NoReturn:
    """Ends this process; cleanly if the other processes end within `seconds`, too."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    if seconds:
        jaxshard.processes.take_leave(seconds)
    os._exit(status)


def end_within(seconds: float, status: int) -> None:
    """Limits the time for which Python joins threads at exit: orbax's may wait for minutes."""
    begun = threading.Event()

    def end() -> None:
        begun.wait()
        time.sleep(seconds)
        leave_at_once(status, 0)

    threading.Thread(target=end, name="jaxshard ends", daemon=True).start()
    ExitNotice(begun.set, "jaxshard hears of the end")


_LOST = 134  # the status by which JAX itself ends a process that has lost another


def status_of(error: BaseException, otherwise: int) -> int:
    """The exit status after an error: 134 if the same command may succeed when run again."""
    lost = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)
    taken = getattr(error, "errno", None) == errno.EADDRINUSE
    return _LOST if lost or taken or isinstance(error, TimeoutError) else otherwise
