"""Delays exceptions of signal handlers until a call's results are assigned to the caller's variables.

Python runs handlers in the main thread between two instructions: even after a call has consumed its arguments
(donation), but before the caller has assigned the results. An exception there (Ctrl-C) would lose both.
"""

import concurrent.futures
import dis
import importlib
import inspect
import itertools
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jax

_NUMBERS = sorted(signal.valid_signals())
_handler_of: Callable[[int], Any] = importlib.import_module("_signal").getsignal  # 20 times as fast as signal.getsignal
_MOVES = ("UNPACK", "STORE", "LOAD", "COPY", "SWAP", "PUSH_NULL", "NOP", "EXTENDED", "BINARY_S", "BUILD_S", "RETURN")
_TO_ASSIGN = 0.1  # seconds: the most for C code between the step and its caller (functools.partial) to return
_BETWEEN_REMINDERS = 0.01  # seconds
_TO_ARRIVE = 1  # seconds: the most for a signal within a process to arrive; a program may have blocked it


class _Call(NamedTuple):
    """A call: its frame and its caller's (by id: a reference would keep their variables alive), with their code.

    `at` is the caller's instruction; `donated` are the arrays that the call consumes, None once they are gone.
    """

    own: int
    own_code: CodeType
    caller: int
    caller_code: CodeType
    at: int
    donated: Any


class Interrupts:
    """Delays handlers' exceptions from the moment when a call's arguments are gone until the caller's assignment.

    Handlers themselves run at once. Their exceptions are raised by `begin` of the next call, or, if none comes, about
    10 ms later in the main thread. Handlers are wrapped from the first call until `release`.
    """

    def __init__(self):
        self._call: _Call | None = None
        self._ended = 0.0
        self._held: list[BaseException] = []
        self._raised: BaseException | None = None  # by a handler, within the call
        self._reminded = False  # the reminder's signal is on its way
        self._reminding = threading.Lock()  # handlers never take it: they may interrupt its holder
        self._reminder: threading.Thread | None = None
        self._handlers: list[Any] = []

    def begin(self, donated: Any) -> None:
        """Called by the function that is about to consume the arrays `donated`; raises a delayed exception."""
        self._call = self._raised = None
        if threading.current_thread() is not threading.main_thread():  # handlers never run there
            return
        handlers = list(map(_handler_of, _NUMBERS))
        if handlers != self._handlers:
            self._wrap(handlers)
        self._raise_held()
        own = getattr(inspect.currentframe(), "f_back", None)  # this frame gets no variable: that would be a cycle
        if own is None:
            return
        caller = own.f_back or own
        self._call = _Call(id(own), own.f_code, id(caller), caller.f_code, caller.f_lasti, donated)

    def end(self) -> None:
        """Called by the same function when only its return remains."""
        if self._call is not None:
            self._call = self._call._replace(donated=None)
            self._ended = time.monotonic()

    def cancel(self, error: BaseException | None = None) -> None:
        """Called instead of `end` if nothing is returned, because of `error`; raises what a handler raised instead.

        JAX's C++ caches replace an exception from Python's `==` of their keys by a ValueError (jax 0.12).
        """
        raised, self._call, self._raised = self._raised, None, None
        if error is not None and raised not in (None, error):
            raise raised from error

    def release(self) -> None:
        """Removes the wrappers, and raises a delayed exception."""
        self._call = None
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            self._raise_held()
        finally:
            for number, handler in zip(_NUMBERS, map(_handler_of, _NUMBERS), strict=True):
                if isinstance(handler, _Guarded) and handler.interrupts is self:
                    signal.signal(number, handler.handler)
            self._handlers = []

    def _raise_held(self) -> None:
        """Raises a delayed exception. If the reminder's signal is pending, waits for it, and its handler raises: Python
        runs a handler once for two pending signals, so a new signal would be mistaken for the reminder."""
        end = time.monotonic() + _TO_ARRIVE
        while self._held:
            with self._reminding:
                if self._held and (not self._reminded or time.monotonic() > end):
                    raise self._held.pop(0)
            time.sleep(0)  # the handler runs here at the latest

    def _wrap(self, handlers: list[Any]) -> None:
        deal_with(_is_put_off)
        for number, handler in zip(_NUMBERS, handlers, strict=True):
            inner = handler.handler if isinstance(handler, _Guarded) else handler
            if callable(inner) and getattr(handler, "interrupts", None) is not self:
                signal.signal(number, _Guarded(self, inner))
        self._handlers, self._reminded = list(map(_handler_of, _NUMBERS)), False

    def run(self, handler: Callable[[int, FrameType | None], object], number: int, frame: FrameType | None) -> None:
        """Runs a handler; delays its exception if the latest call's results are not assigned yet."""
        if self._reminded:
            self._reminded = False
            if self._held and not self._must_wait(frame):
                raise self._held.pop(0)
            return
        try:
            handler(number, frame)
        except BaseException as error:
            if not self._must_wait(frame):
                self._raised = error
                raise
            self.put_off(error, number)

    def put_off(self, error: BaseException, number: int) -> None:
        self._held.append(error)
        self._remind(number)

    def _must_wait(self, frame: FrameType | None) -> bool:
        """Whether an exception would be lost now, or the results with it; `frame` is the interrupted one."""
        return _is_in_hook(frame) or self._is_returning(frame)

    def _is_returning(self, frame: FrameType | None) -> bool:
        """Whether the arguments are gone, and the results not yet assigned; `frame` is the interrupted one."""
        call, top = self._call, frame
        if call is None or not _are_gone(call.donated):
            return False
        while frame is not None:
            if frame.f_code is _Guarded.__call__.__code__:
                top = frame.f_back  # a signal during another signal's handler
            if id(frame) == call.own and frame.f_code is call.own_code:
                return True
            if id(frame) == call.caller and frame.f_code is call.caller_code:
                straight = frame.f_lasti in _assigning(frame.f_code, call.at)
                return straight or (frame.f_lasti == call.at and frame is top)
            frame = frame.f_back
        return time.monotonic() < self._ended + _TO_ASSIGN

    def _remind(self, number: int) -> None:
        if self._reminder is None or not self._reminder.is_alive():
            self._reminder = threading.Thread(target=self._signal, args=(number,), name="jaxshard signals", daemon=True)
            self._reminder.start()

    def _signal(self, number: int) -> None:
        """Sends the signal again until the delayed exceptions are raised, since the main thread may be asleep.

        `_reminded` tells the handler that the signal is not a new one.
        """
        while self._held:
            time.sleep(_BETWEEN_REMINDERS)
            with self._reminding:
                call = self._call
                if self._held and not self._reminded and (call is None or call.donated is None):
                    self._send(number)

    def _send(self, number: int) -> None:
        if getattr(_handler_of(number), "interrupts", None) is self:
            self._reminded = True
        else:  # another handler was set meanwhile, and handles the signal
            self._held.clear()
        signal.pthread_kill(threading.main_thread().ident or 0, number)


class _Guarded:
    """A signal handler that `Interrupts` runs."""

    def __init__(self, interrupts: Interrupts, handler: Callable[[int, FrameType | None], object]):
        self.interrupts, self.handler = interrupts, handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.interrupts.run(self.handler, number, frame)


def _is_put_off(unraisable: "sys.UnraisableHookArgs") -> bool:
    """Whether this is a handler's error in code where Python ignores errors; it is then delayed.

    Such code is a callback of the garbage collector (JAX has one) or of a weak reference, or a `__del__`.
    """
    for frame, _ in traceback.walk_tb(unraisable.exc_traceback):
        if frame.f_code is _Guarded.__call__.__code__ and unraisable.exc_value is not None:
            guarded, number = frame.f_locals["self"], frame.f_locals["number"]
            guarded.interrupts.put_off(unraisable.exc_value.with_traceback(None), number)
            return True
    return False


def _are_gone(donated: Any) -> bool:
    return donated is None or any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(donated))


def _assigning(code: CodeType, call: int) -> set[int]:
    """The instructions that assign or return a call's results: those after it that only move values.

    Python runs handlers between these only in a debugger's trace function.
    """
    after = itertools.dropwhile(lambda one: one.offset <= call, dis.get_instructions(code))
    return {one.offset for one in itertools.takewhile(lambda one: one.opname.startswith(_MOVES), after)}


class _Hook:
    def __init__(
        self,
        deals: "Callable[[sys.UnraisableHookArgs], bool]",
        before: "Callable[[sys.UnraisableHookArgs], object]",
    ):
        self.deals, self.before = deals, before

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if not self.deals(unraisable):
            self.before(unraisable)


def _is_in_hook(frame: FrameType | None) -> bool:
    """Whether Python deals with an error that it ignores: it ignores further ones then, and tells nobody but stderr."""
    while frame is not None and frame.f_code is not _Hook.__call__.__code__:
        frame = frame.f_back
    return frame is not None


def deal_with(deals: "Callable[[sys.UnraisableHookArgs], bool]") -> None:
    """From now on Python does not print errors for which `deals` returns True. A second call changes nothing."""
    hook = sys.unraisablehook
    while isinstance(hook, _Hook):
        if hook.deals is deals:
            return
        hook = hook.before
    sys.unraisablehook = _Hook(deals, sys.unraisablehook)


# The start of Python's shutdown.


class ExitNotice:
    """Calls `told` in a thread when Python starts to shut down, unless `off` was called before.

    Args:
      told: when it runs, no `ThreadPoolExecutor` accepts work any more. Python waits for it.
      name: the thread's name.
    """

    def __init__(self, told: Callable[[], object], name: str):
        self._told, self._is_off = told, False
        self._pool = concurrent.futures.ThreadPoolExecutor(1)  # its thread would end without this reference
        self._idle = self._pool.submit(threading.current_thread).result()
        threading.Thread(target=self._wait, name=name).start()

    def off(self) -> None:
        """Cancels the call."""
        self._is_off = True
        self._pool.shutdown(wait=False)

    def _wait(self) -> None:
        self._idle.join()
        if not self._is_off:
            self._told()
