"""Standard output and standard error of the command, which may go away before it ends."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any, TextIO, cast

from jaxshard.system.command import is_command
from jaxshard.system.text import LinesError, printable, printable_lines, shortened

_GLOO = b"[Gloo] Rank "


def fail(command: str, reason: object, status: int) -> int:
    """Tells on standard error, in `command`'s name, why it ends; returns its exit status."""
    show = printable_lines if isinstance(reason, LinesError | str) else printable
    print(f"{command}: {show(shortened(str(reason)))}", file=sys.stderr)
    return status


class OutputGoneError(Exception):
    """Standard output cannot be written. `reason`: the error."""

    def __init__(self, reason: Exception):
        super().__init__(getattr(reason, "strerror", None) or str(reason))
        self.reason = reason


class Lasting:
    """A text stream whose writes do not fail. Once one would, `gone` is told why, and all that follows is lost.

    The stream may be a pipe whose reader ended (`| head`), a terminal that was closed, or a file on a full disk.

    Args:
      stream: what is written to.
      gone: called once; what it raises is raised by that write.
    """

    def __init__(self, stream: TextIO, gone: Callable[[Exception], object]):
        self._stream, self._gone = stream, gone
        self._is_gone = False

    def write(self, text: str) -> int:
        """Writes `text`, if the stream is still there."""
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, if it is still there."""
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        """All else, such as whether it is a terminal, is the stream's own."""
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
    """What the stream still holds is lost too, so that the command's end does not fail."""
    if is_command():
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def output_needed() -> Generator[None]:
    """While entered, OutputGoneError is raised where standard output goes away, and nothing where standard error does.

    At the end all that was printed is written.
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
    """While entered, the command goes on where its standard output goes away, and says so on standard error."""

    def gone(error: Exception) -> None:
        reason = getattr(error, "strerror", None) or error
        print(f"{command}: standard output is gone ({reason}): the run goes on without it", file=sys.stderr)

    output = sys.stdout and cast(TextIO, Lasting(sys.stdout, gone))
    with contextlib.redirect_stdout(output):
        yield


def without_lines_of_gloo() -> None:
    """From now on a run of several processes on CPUs does not show the lines in which gloo tells that it connects them.

    C++ prints these. So all that C++ prints to standard output goes through a pipe, to a thread that leaves these lines
    out; Python prints past it.
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
