"""Ctrl-C as a request that the training loop meets between two steps, when nothing is half-done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, Self

import jax


class Interrupt:
    """While entered, the first Ctrl-C makes `asked` true and says so by `say`; the second one raises KeyboardInterrupt.

    With several processes Ctrl-C stays what it was: they could not agree on a step, and saving takes all of them.
    """

    def __init__(self, say: Callable[[str], None]):
        self.asked = False
        self._say = say
        self._previous: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread() and jax.process_count() == 1:
            self._previous = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say("interrupted: after this step the model is saved (Ctrl-C again: it is not)")
