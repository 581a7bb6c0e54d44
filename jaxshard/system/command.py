"""The start of the command `jaxshard`, before JAX is imported; its output streams; its end by Ctrl-C.

Nothing here affects other programs that import jaxshard.

* Standard files are open: a data file never gets the number of a closed standard error (`2>&-`), where libraries would
  write into it.
* Ctrl-C ends the command at once, with status 130. An exception would be lost in a garbage collector's callback, would
  leave a half-imported module, and would crash JAX if Python ends while XLA compiles.
* `jaxshard doctor` prints a line with the reason if JAX cannot be imported.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TextIO, cast

from jaxshard.system.text import LinesError, printable, printable_lines, shortened

INTERRUPTED = 128 + signal.SIGINT
_BEFORE = dict(os.environ)
_GLOO = b"[Gloo] Rank "


def environment() -> dict[str, str]:
    """The environment in which the user started the command; importing JAX adds to it."""
    return dict(_BEFORE if is_command() else os.environ)


def is_command() -> bool:
    """Whether this process was started as `jaxshard ...` or `python -m jaxshard ...`."""
    name, *_ = getattr(sys, "argv", None) or [""]
    return _is_module() or os.path.basename(name) == "jaxshard"


def python(*words: str) -> list[str]:
    """A command that starts this Python again. It imports no modules from the current folder, which may hold anyone's,
    unless the user started this process so."""
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
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    if sys.argv[1:2] == ["doctor"]:
        _check_imports()


def _check_imports() -> None:
    """Ends `jaxshard doctor` with a line that says why JAX or optax cannot be imported."""
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

    This works even while the process waits in C++, for XLA or for other processes, since a thread receives the signal.
    Handlers that are set meanwhile take precedence. In other programs than the command, Ctrl-C is unchanged.
    """
    if not is_command() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    here, there = socket.socketpair()
    there.setblocking(False)
    heard = threading.Event()

    def handler(*_: object) -> None:
        if heard.is_set():  # a second Ctrl-C: the last words block
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


# Standard output and standard error, which may be closed before the command ends.


def fail(command: str, reason: object, status: int) -> int:
    """Prints the reason to standard error, after `command`'s name; returns the exit status."""
    show = printable_lines if isinstance(reason, LinesError | str) else printable
    print(f"{command}: {show(shortened(str(reason)))}", file=sys.stderr)
    return status


class OutputGoneError(Exception):
    """Standard output cannot be written. `reason`: the error."""

    def __init__(self, reason: Exception):
        super().__init__(getattr(reason, "strerror", None) or str(reason))
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which would give `__init__` the message alone."""
        return BaseException.__new__, (type(self), *self.args), self.__dict__


class Lasting:
    """A text stream whose writes do not fail: `gone` gets the first error, and all later output is dropped.

    The stream may be a pipe whose reader ended (`| head`), a closed terminal, or a file on a full disk.

    Args:
      stream: the stream to write to.
      gone: called once with the error; its own exceptions leave that write.
    """

    def __init__(self, stream: TextIO, gone: Callable[[Exception], object]):
        self._stream, self._gone = stream, gone
        self._is_gone = False

    def write(self, text: str) -> int:
        """Writes `text`, if the stream still works."""
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, if it still works."""
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        """Passes everything else on to the stream, such as `isatty`."""
        return getattr(self._stream, name)

    def _attempt(self, act: Callable[[], object]) -> None:
        if self._is_gone:
            return
        try:
            act()
        except (OSError, ValueError, OutputGoneError) as error:  # ValueError: the stream is closed
            self._is_gone = True
            _discard(self._stream)
            self._gone(error)


def _discard(stream: TextIO) -> None:
    """Drops buffered output, too, so that the command's end does not fail."""
    if is_command():
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def output_needed() -> Generator[None]:
    """While entered, a failing standard output raises OutputGoneError; a failing standard error raises nothing.

    Flushes standard output at the end.
    """

    def gone(error: Exception) -> None:
        raise OutputGoneError(error)

    with contextlib.ExitStack() as stack:
        if sys.stderr is not None:
            stack.enter_context(contextlib.redirect_stderr(cast(TextIO, Lasting(sys.stderr, lambda error: None))))
        if sys.stdout is not None:
            stack.enter_context(contextlib.redirect_stdout(cast(TextIO, Lasting(sys.stdout, gone))))
            stack.callback(sys.stdout.flush)
        yield


@contextlib.contextmanager
def output_not_needed(command: str) -> Generator[None]:
    """While entered, the command continues if standard output fails, and says so on standard error."""

    def gone(error: Exception) -> None:
        reason = getattr(error, "strerror", None) or error
        print(f"{command}: standard output is closed ({reason}): the run continues without it", file=sys.stderr)

    output = sys.stdout and cast(TextIO, Lasting(sys.stdout, gone))
    with contextlib.redirect_stdout(output):
        yield


def without_lines_of_gloo() -> None:
    """From now on, hides gloo's lines about connections in a run of several processes on CPUs.

    C++ prints them. So C++'s standard output goes through a pipe to a thread that drops these lines; Python's does not.
    """
    stdout, several = sys.stdout, os.environ.get("JAX_NUM_PROCESSES", "1") != "1"
    if not several or os.environ.get("JAX_PLATFORMS") != "cpu" or not isinstance(stdout, io.TextIOWrapper):
        return
    stdout.flush()
    past, (source, sink) = os.dup(stdout.fileno()), os.pipe()
    os.dup2(sink, stdout.fileno())
    os.close(sink)
    sys.stdout = os.fdopen(past, "w", encoding=stdout.encoding, errors=stdout.errors)
    sys.stdout.reconfigure(line_buffering=stdout.line_buffering or stdout.write_through)
    threading.Thread(target=_pass_on, args=(source, past), name="jaxshard output", daemon=True).start()


def _pass_on(source: int, sink: int) -> None:
    with os.fdopen(source, "rb") as lines, contextlib.suppress(OSError):
        for line in lines:
            if not line.startswith(_GLOO):
                os.write(sink, line)


# Files and folders that an option names.


def nearest_above(path: Path) -> Path:
    """The path itself, or the nearest existing folder above it."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def check_room(option: str, path: Path) -> None:
    """Raises ValueError unless `path` is a writable folder, or one can be made there; `option` names it."""
    nearest = nearest_above(path)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"{option} {path}: {nearest} is not a writable folder: give another one")


def check_file(option: str, path: Path) -> None:
    """Raises ValueError if no file can be written at `path`, without changing it; `option` names it."""
    is_new = not path.exists()
    try:
        if is_new or path.is_dir() or path.is_file():
            path.open("ab").close()
        if is_new:
            path.resolve().unlink()
    except OSError as error:
        reason = f"{option} {path}: {error.strerror}: give a file in an existing, writable folder"
        raise ValueError(reason) from None


if is_command():
    _begin()
