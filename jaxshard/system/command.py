"""How the command `jaxshard` begins, before JAX is imported, and how Ctrl-C ends it.

Other programs that import jaxshard are left alone.

* Its standard files are open: a data file never takes the number of a standard error that was closed (`2>&-`), where
  libraries would write into it.
* Ctrl-C ends it at once, with status 130. An exception would be lost in a callback of the garbage collector, would
  spoil a module that is being imported, and would crash JAX if Python ends while XLA compiles.
* `jaxshard doctor` says in a line why JAX cannot be imported.
"""

import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator

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
                    _end_after(last_words)

    threading.Thread(target=listen, name="jaxshard interrupts", daemon=True).start()
    woken_before = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(woken_before)
        there.close()


def _end_after(last_words: Callable[[], str]) -> None:
    try:
        sys.stdout.flush()
        print(last_words(), file=sys.stderr, flush=True)
    finally:
        os._exit(INTERRUPTED)


if is_command():
    _begin()
