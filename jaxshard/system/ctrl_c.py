"""Ctrl-C where there is nothing to save: it ends the command at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator

from jaxshard.system.command import INTERRUPTED, is_command


@contextlib.contextmanager
def ended_at_once(last_words: Callable[[], str]) -> Generator[None]:
    """While entered, Ctrl-C prints `last_words()` to standard error and ends the process with status 130.

    So it does while the process waits in C++, for XLA or for other processes: a thread hears of it. Handlers that are
    set in the meantime have their own way. In another program than the command, Ctrl-C stays what it is there.
    """
    if not is_command() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    here, there = socket.socketpair()
    there.setblocking(False)
    heard = threading.Event()

    def handler(*_: object) -> None:
        if heard.is_set():  # a second Ctrl-C: the last words wait for something
            os._exit(INTERRUPTED)
        heard.set()

    def listen() -> None:
        with here:
            while numbers := here.recv(16):
                if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is handler:
                    _end(last_words)

    threading.Thread(target=listen, name="jaxshard interrupts", daemon=True).start()
    woken_before = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(woken_before)
        there.close()


def _end(last_words: Callable[[], str]) -> None:
    try:
        sys.stdout.flush()
        print(last_words(), file=sys.stderr, flush=True)
    finally:
        os._exit(INTERRUPTED)
