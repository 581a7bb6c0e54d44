"""Decides which checkpoints to keep, and deletes the others' folders in a thread."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, SupportsFloat

from jaxshard.base.types import is_whole
from jaxshard.system import files


@dataclasses.dataclass(frozen=True)
class Best:
    """Keeps the best checkpoints by a metric.

    Attributes:
      metric: its name in `metrics` of `Checkpointer.save`.
      count: the number to keep.
      mode: "min": the smallest values are the best; "max": the largest.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"


@dataclasses.dataclass(frozen=True)
class Retention:
    """Decides which checkpoints to keep, by the arguments of `Checkpointer`.

    Raises:
      ValueError: a count is not an integer of at least 1; `keep_best` is not a `Best`, or its mode is unknown.
    """

    keep_last: int
    keep_every: int | None
    keep_best: Best | None

    def __post_init__(self):
        best = self.keep_best
        if best is not None and not isinstance(best, Best):
            raise ValueError(f"Checkpointer: keep_best {best!r} must be a Best(metric)")
        if best is not None and (not isinstance(best.metric, str) or not best.metric):
            raise ValueError(f"Checkpointer: keep_best has metric {best.metric!r}, which must be a name")
        counts = {"keep_last": self.keep_last, "keep_every": self.keep_every, "keep_best": best and best.count}
        for name, value in counts.items():
            if (value is not None or name == "keep_last") and not is_whole(value, 1):
                raise ValueError(f"Checkpointer: {name} {value} must be an integer, 1 or more")
        if best and best.mode not in ("min", "max"):
            raise ValueError(f"Checkpointer: keep_best has mode {best.mode!r}, which must be min or max")

    def kept(
        self,
        steps: Sequence[int],
        metrics: Callable[[int], Mapping[str, object]],
        illness: Callable[[int], int] = lambda step: 0,
    ) -> set[int]:
        """The steps to keep, always with the newest of the healthiest.

        Args:
          steps: all steps, the oldest first.
          metrics: a step to its metrics; called only if `keep_best` is given.
          illness: a step to its illness: 0 if all its numbers are finite.

        >>> Retention(keep_last=1, keep_every=10, keep_best=None).kept([9, 10, 11, 12], metrics=lambda step: {})
        {10, 12}
        """
        regular = {step for step in steps if self.keep_every and step % self.keep_every == 0}
        healthiest = sorted(steps, key=lambda step: (-illness(step), step))[-1:]
        return regular | {*steps[-self.keep_last :], *self._best(steps, metrics), *healthiest}

    def _best(self, steps: Sequence[int], metrics: Callable[[int], Mapping[str, object]]) -> list[int]:
        best = self.keep_best
        if best is None:
            return []
        found = {step: metrics(step).get(best.metric) for step in steps}
        values = {step: x for step, x in found.items() if isinstance(x, int | float) and not math.isnan(x)}
        return sorted(values, key=lambda step: values[step], reverse=best.mode == "max")[: best.count]


class Deletion:
    """Deletes folders one after the other, in a thread; of a link, the link alone.

    The caller has just renamed them. The new names are synced first, so that a power cut cannot leave a half-deleted
    step under its own name.
    """

    def __init__(self):
        self._left = list[Path]()
        self._errors: list[str] = []
        self._lock, self._idle = threading.Lock(), threading.Event()
        self._idle.set()

    def begin(self, folders: Iterable[Path]) -> None:
        """Adds folders to delete."""
        with self._lock:
            self._left.extend(folders)
            if self._left and self._idle.is_set():
                self._idle.clear()
                threading.Thread(target=self._run, name="jaxshard deletes old checkpoints", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds`; returns whether all folders are deleted."""
        return self._idle.wait(seconds)

    def errors(self) -> list[str]:
        """Why folders could not be deleted, since the last call."""
        with self._lock:
            found, self._errors = self._errors, []
        return found

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    self._idle.set()
                    return
                folders, self._left = self._left, []
            for folder in self._renamed_for_good(folders):
                with self._noted(), contextlib.suppress(FileNotFoundError):  # another run may delete it, too
                    files.delete(folder)

    def _renamed_for_good(self, folders: list[Path]) -> Iterator[Path]:
        """Syncs the new names and yields the folders; the next run that writes here deletes those that failed."""
        for parent in {folder.parent for folder in folders}:
            with self._noted(), contextlib.suppress(FileNotFoundError):
                files.sync_folder(parent)
                yield from (folder for folder in folders if folder.parent == parent)

    @contextlib.contextmanager
    def _noted(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            with self._lock:
                self._errors.append(str(error))


def measured(metrics: Mapping[str, SupportsFloat] | None, needed: str | None = None) -> dict[str, float] | None:
    """Metrics as Python floats; `needed` must be among them, if there are any.

    >>> measured({"loss": 2})
    {'loss': 2.0}
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"checkpoint: metrics must be a dict of numbers, got {metrics!r:.200}")
    if metrics and needed is not None and needed not in metrics:
        raise ValueError(f"checkpoint: keep_best needs the metric {needed!r}, but metrics has {list(metrics)}")
    try:
        return {str(name): float(value) for name, value in metrics.items()} if metrics else None
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"checkpoint: metrics must be numbers, got {metrics!r:.200}: {error}") from None
