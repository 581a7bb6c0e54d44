"""Tries in a folder everything that saving a checkpoint needs."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxshard.system import files
from jaxshard.system.command import python

_BYTES = 8 * 2**20


class Trial(NamedTuple):
    """One operation tried in a folder.

    Attributes:
        what: "write", "rename", ...
        seconds: its duration.
        wrong: what went wrong; "" if nothing did.
    """

    what: str
    seconds: float
    wrong: str


def trials(folder: Path, lock: Callable[[Path], Any] | None) -> Iterator[Trial]:
    """Tries operations in a new sub-folder, and removes it; skips those that depend on one that failed.

    Args:
        folder: an existing folder.
        lock: takes the lock of a folder, and returns it; None: try no lock.
    """
    made: list[Path] = []
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # leftovers do not matter
        first = _tried("make a folder", lambda: made.append(stack.enter_context(files.workplace(folder))))
        yield first
        if not first.wrong:
            yield from _within(made[0], lock)


def _within(place: Path, lock: Callable[[Path], Any] | None) -> Iterator[Trial]:
    content = os.urandom(_BYTES)
    before, after = place / "step.tmp", place / "step"

    def write() -> None:
        before.mkdir()
        files.replace(before / "arrays", content)

    def read() -> None:
        found = (after / "arrays").read_bytes()
        if found != content:
            raise OSError(f"{sum(a != b for a, b in zip(found, content, strict=False))} bytes differ")

    steps = (("write", write), ("rename", lambda: os.rename(before, after)), ("read back", read))
    for what, act in steps:
        done = _tried(what, act)
        yield done
        if done.wrong:
            return
    if lock is not None:
        yield _tried("lock", lambda: _lock(place, lock))


def _lock(place: Path, lock: Callable[[Path], Any]) -> None:
    """Takes the lock; raises OSError if another process gets it too."""
    held = lock(place)
    try:
        path = str(place / ".lock")
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; import filelock; filelock.FileLock({path!r}).acquire(timeout=0)"
        )
        other = subprocess.run(python("-c", code), capture_output=True, text=True, check=False)
    finally:
        held.release()
    if other.returncode == 0:
        raise OSError("two processes get the lock at once")
    if "Timeout" not in other.stderr:
        raise OSError(f"another process requested it, and failed: {other.stderr.strip().splitlines()[-1:]}")


def _tried(what: str, act: Callable[[], object]) -> Trial:
    start, wrong = time.perf_counter(), ""
    try:
        act()
    except (OSError, NotImplementedError) as error:  # filelock raises it if a file system has no locks
        wrong = getattr(error, "strerror", None) or str(error)
    return Trial(what, time.perf_counter() - start, wrong)
