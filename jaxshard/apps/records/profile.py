"""A trace of a few steps, by JAX's profiler."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import jax

from jaxshard.system import files
from jaxshard.system.text import printable, shell_command

Tree = Any


def steps_in(words: str) -> range:
    """The steps of `--profile FROM:TO`, counted from 0 in this process.

    Raises:
      ValueError: it is not a range, or is empty.

    >>> steps_in("10:15")
    range(10, 15)
    """
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", words)
    if not found:
        raise ValueError(f"--profile {words!r}: it must be FROM:TO, as in --profile 10:15")
    steps = range(int(found[1]), int(found[2]))
    if not steps:
        raise ValueError(
            f"--profile {words} covers no step: TO must be above FROM, as in {steps.start}:{steps.start + 5}"
        )
    return steps


def check(steps: range, left: int) -> None:
    """Raises ValueError for steps that a process with `left` steps to go does not reach, or cannot trace."""
    given = f"--profile {steps.start}:{steps.stop}"
    if steps.stop > left:
        raise ValueError(f"{given}: this process runs {left} steps: TO must be at most {left}")
    if steps and _would_crash():
        backend = jax.default_backend()
        raise ValueError(
            f"{given}: JAX's profiler crashes after libtpu has looked for a TPU and found none: set "
            f"JAX_PLATFORMS={'cuda' if backend == 'gpu' else backend}"
        )


def _would_crash() -> bool:
    """Whether libtpu is loaded in a process without a TPU, where tracing crashes (seen with jax 0.10.2)."""
    maps = Path("/proc/self/maps")
    return jax.default_backend() != "tpu" and maps.is_file() and "/libtpu.so" in maps.read_text(errors="replace")


class Profile:
    """Traces some of this process's steps, from the completion of earlier steps to their own.

    Args:
      steps: counted from 0; empty: trace nothing.
      folder: for the trace; each process has its own.
      tell: shows the user a line.
    """

    def __init__(self, steps: range, folder: Path, tell: Callable[[str], None]):
        several = jax.process_count() > 1
        self._steps, self._tell = steps, tell
        self._folder = folder / f"process_{jax.process_index()}" if several else folder
        self._taken, self._is_on = 0, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_on:
            self._stop()
        elif self._taken < self._steps.start:
            self._tell(f"no profile was written: the run ended after {self._taken} steps of this process")

    def before(self, tree: Tree) -> None:
        """Before the first traced step: waits for its inputs, and starts the trace."""
        if self._steps and self._taken == self._steps.start and not self._is_on:
            jax.block_until_ready(tree)
            with self._kept_going():
                files.check_no_links(self._folder)
                jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
                self._is_on = True

    def after(self, tree: Tree) -> None:
        """Counts a step; after the last traced one, waits for its outputs and ends the trace."""
        self._taken += 1
        if self._is_on and self._taken == self._steps.stop:
            jax.block_until_ready(tree)
            self._stop()

    def _stop(self) -> None:
        self._is_on = False
        with self._kept_going():
            jax.profiler.stop_trace()
            files.sync_tree(self._folder)
            show = shell_command("xprof", "--logdir", str(self._folder))
            self._tell(
                f"a profile of {self._taken - self._steps.start} steps: {show} (pip install xprof) shows it, or "
                f"ui.perfetto.dev its perfetto_trace.json.gz"
            )

    @contextlib.contextmanager
    def _kept_going(self) -> Iterator[None]:
        """Reports a profile that cannot be written, without stopping the run."""
        try:
            yield
        except Exception as error:  # of any type, by platform
            self._tell(printable(f"{self._folder}: no profile was written: {error}"))
