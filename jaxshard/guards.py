"""Guards of a run: signals ask it to end between two steps, and a watchdog ends it when it hangs."""

import contextlib
import ctypes
import faulthandler
import itertools
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Self

import jax

__all__ = ["HUNG", "Preemption", "Watchdog"]

HUNG = 75  # EX_TEMPFAIL: try again
_LAST_WORDS_SECONDS = 5
_ANNOUNCEMENTS = {signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}  # they announce that another signal follows
_calls = itertools.count(1)  # calls of `reached` in all loops of this process: JAX needs consecutive numbers


class Preemption:
    """While entered, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and Ctrl-C ask the run to end between two steps; a second one
    ends it at once.

    SIGHUP means that the terminal is closed. A shell sends several, or SIGTERM too, so it never counts as a second
    signal. Slurm sends SIGUSR1 or SIGUSR2 before a job's time is over (`--signal`), and SIGTERM when it is: that does
    not count either, but the same signal twice does. SIGHUP, SIGUSR1 and SIGUSR2 keep their behaviour if they are
    ignored, as by `nohup`, or have a handler already, such as `faulthandler.register`'s.

    With several processes, JAX's preemption service passes a signal to any of them on to all, and all see it at the
    same step. For this, all of them must call `reached` at every step.

    Args:
      say: called once, in the process that gets the signal, with a sentence about it.

    Raises:
      RuntimeError: on entering, if already entered; with several processes, if JAX's preemption service is off.

    >>> with Preemption() as preemption:
    ...     [step for step in range(3) if not preemption.reached(step)]
    [0, 1, 2]
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None):
        self._say = say
        self._signal: int | None = None
        self._previous: dict[int, Any] = {}
        self._handler: int | None = None  # the address of JAX's own handler of SIGTERM

    @property
    def status(self) -> int:
        """The exit status for the signal: 128 + its number; 143 if another process got it."""
        return 128 + (self._signal or signal.SIGTERM)

    def reached(self, step: int) -> bool:
        """Whether to save and end now, before `step`; the same on all processes."""
        del step  # JAX gets the number of this call instead: another loop may have counted the same steps
        if jax.process_count() == 1:
            return self._signal is not None
        from jax.experimental import multihost_utils

        return multihost_utils.reached_preemption_sync_point(next(_calls))

    def __enter__(self) -> Self:
        if self._previous:
            raise RuntimeError("Preemption: it is already entered; create a new one for another loop")
        self._signal = None
        self._numbers = {signal.SIGINT, signal.SIGTERM, *filter(_is_default, _ANNOUNCEMENTS)}
        if threading.current_thread() is not threading.main_thread():
            warnings.warn("Preemption: Python handles signals only in the main thread; enter it there", stacklevel=2)
            return self
        if jax.process_count() > 1:
            self._handler = _handler_of_jax()
            self._watch()
        for number in self._numbers:
            self._previous[number] = signal.signal(number, self._in_python)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self._previous = {}
        if self._handler:
            signal.set_wakeup_fd(self._woken_before)
            _libc().signal(signal.SIGTERM, self._handler)
            self._there.close()  # which ends the thread
            self._handler = None

    def _in_python(self, number: int, _: object) -> None:
        """The handler for one process. Python calls it between two of its instructions."""
        if jax.process_count() == 1:
            self._got(number)

    def _watch(self) -> None:
        """With several processes, a thread receives signals: the main thread may wait for other processes, and run no
        Python for long."""
        here, there = socket.socketpair()
        there.setblocking(False)
        self._woken_before = signal.set_wakeup_fd(there.fileno())

        def listen() -> None:
            with here:
                while numbers := here.recv(16):
                    for number in numbers:
                        if number in self._numbers:
                            self._got(number)

        self._there = there
        threading.Thread(target=listen, name="jaxshard signals", daemon=True).start()

    def _got(self, number: int) -> None:
        before = self._signal
        if before is not None and (number == before != signal.SIGHUP or not {number, before} & _ANNOUNCEMENTS):
            self._leave(number)
        if before is None or number not in _ANNOUNCEMENTS:
            self._signal = number
        if before is not None:
            return
        if self._handler:
            ctypes.CFUNCTYPE(None, ctypes.c_int)(self._handler)(signal.SIGTERM)  # which tells the other processes
        with contextlib.suppress(Exception, SystemExit):  # an error of `say` must not keep the run from ending
            self._say(
                f"{signal.Signals(number).name}: the model is saved after this step (a second signal ends the run "
                "without saving)"
            )

    def _leave(self, number: int) -> None:
        if jax.process_count() == 1 and number == signal.SIGINT:
            raise KeyboardInterrupt
        os._exit(128 + number)


def _is_default(number: int) -> bool:
    """Whether a signal is unused: not ignored by the parent process, and without a handler.

    Python knows which signals were ignored when it started, as by nohup. A library may ignore one later, unknown to
    Python, as libtpu ignores SIGHUP; that counts as unused.
    """
    action = ctypes.create_string_buffer(256)  # a `struct sigaction`, which begins with the handler's address
    _libc().sigaction(number, None, action)
    handler = ctypes.c_void_p.from_buffer(action).value or 0
    return signal.getsignal(number) == signal.SIG_DFL and handler in (signal.SIG_DFL, signal.SIG_IGN)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return libc


def _handler_of_jax() -> int:
    """The address of JAX's handler of SIGTERM, a C function that notifies the other processes."""
    address = _libc().signal(signal.SIGTERM, None)
    if not address:
        raise RuntimeError("Preemption: jax.distributed does not handle SIGTERM; is jax_enable_preemption_service off?")
    return address


class Watchdog:
    """Ends the process, with the stacks of all threads on standard error, if `beat` is not called for too long.

    A hanging process still sends heartbeats, so JAX does not notice, and all other processes wait for it. If each has a
    watchdog, they all end, with status 75, and their launcher can start them again.

    Args:
      seconds: the longest time between two beats; more than the longest compilation, save or restore takes.
      exit: ends the process; called with the status.

    Raises:
      ValueError: `seconds` is not above 0.

    >>> with Watchdog(60) as watchdog:
    ...     for step in range(3):
    ...         watchdog.beat()
    """

    def __init__(self, seconds: float, exit: Callable[[int], object] = os._exit):
        if not seconds > 0:
            raise ValueError(f"Watchdog: {seconds} seconds must be above 0")
        self._seconds, self._exit = seconds, exit
        self._last = time.monotonic()

    def beat(self) -> None:
        """Reports a finished step to the watchdog."""
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        self.beat()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxshard watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(min(1.0, self._seconds / 10)):
            silent = time.monotonic() - self._last
            if silent > self._seconds:
                self._end(silent)
                return

    def _end(self, silent: float) -> None:
        stream = sys.__stderr__
        try:
            if stream is not None:
                index = jax.process_index()
                print(f"jaxshard: process {index} took no step for {silent:.0f} s; its stacks:", file=stream)
                faulthandler.dump_traceback(stream, all_threads=True)
                stream.flush()
            if jax.process_count() > 1 and jax.process_index() == 0:
                time.sleep(_LAST_WORDS_SECONDS)  # the others write theirs: JAX ends them when the coordinator ends
        finally:  # even if writing fails because nobody reads standard error any more
            self._exit(HUNG)
