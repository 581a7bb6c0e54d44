"""Runs work in a process of its own, killed when its time is up, so that a hang there does not hang the command."""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 5.0  # for a killed process to end; one that waits for a dead disk stays

Lines = Iterable[Mapping[str, Any]]


class Told(NamedTuple):
    """A process's report.

    Attributes:
      lines: reported until its end.
      status: its exit status, negative for a signal; None: its time was up.
      errors: its standard error.
    """

    lines: list[dict[str, Any]]
    status: int | None
    errors: str


def told_by(module: str, arguments: Sequence[str], environment: Mapping[str, str], seconds: float) -> Told:
    """Runs `main(arguments)` of a module of jaxshard for at most `seconds`; returns what it reported by `tell`."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main({[str(seconds), *arguments]!r})"
    command = [sys.executable, "-P", "-c", code]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    status: int | None = None
    try:
        out, errors = process.communicate(timeout=seconds)
        status = process.returncode
    except subprocess.TimeoutExpired as late:
        process.kill()
        try:
            out, errors = process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            out, errors = late.stdout, late.stderr
    except BaseException:
        process.kill()
        raise
    return Told(_read(out), status, (errors or b"").decode(errors="replace"))


def tell(arguments: Sequence[str], work: Callable[[Sequence[str]], Lines]) -> None:
    """Runs in the process: does the work, and reports each line at once. Ends with its parent, or when time is up."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    seconds, *rest = arguments
    signal.alarm(int(float(seconds) + _GRACE_SECONDS) + 1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for line in work(rest):
        print(json.dumps(dict(line)), flush=True)


def _read(out: bytes | None) -> list[dict[str, Any]]:
    """The lines of JSON; ignores lines that a library printed, and a last one that was cut short."""
    found: list[dict[str, Any]] = []
    for line in (out or b"").decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            one: Any = json.loads(line)
            if isinstance(one, dict):
                found.append(cast(dict[str, Any], one))
    return found


def last_words(errors: str) -> str:
    """The last message of a crashed process, in one line, without the time and source line that C++ prefixes.

    >>> last_words("F1125 14:46:17.125430   20894 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --x")
    'Unknown flag in XLA_FLAGS: --x'
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    fatal = [line for line in lines if line[:1] == "F" and "] " in line] or lines[-1:]
    return fatal[-1].partition("] ")[2] or fatal[-1] if fatal else ""
