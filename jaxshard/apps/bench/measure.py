"""One row of a benchmark: a step's figures from the compiler, and its time against another's on local devices."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxshard.apps.bench import models
from jaxshard.apps.bench.step import Step, Task, figures

Tree = Any
_WARM = 2  # rounds that are not timed


@dataclasses.dataclass(frozen=True)
class Row:
    """The measurements of one step.

    Attributes:
      machine, model, step: names.
      figures: by name, in bytes, seconds or counts. Times are medians.
      note: why figures are missing, or "".
    """

    machine: str
    model: str
    step: str
    figures: Mapping[str, float]
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The row as plain dicts, for `json.dumps`."""
        plain = {"machine": self.machine, "model": self.model, "step": self.step}
        return {**plain, **self.figures, "note": self.note}


def compiled(build: Callable[[], Step], options: Mapping[str, Any]) -> tuple[Step, dict[str, float]]:
    """Builds, lowers and compiles a step.

    Args:
      build: makes the step.
      options: compiler options.
    """
    start = time.process_time()  # other programs on the machine do not affect it
    step = build()
    lowered = step.lower()
    traced = time.process_time()
    program = lowered.compile(compiler_options=dict(options) or None)
    done = time.process_time()
    found = dataclasses.asdict(figures(program))
    return step, {**found, "trace_seconds": traced - start, "compile_seconds": done - traced}


class Running:
    """A step with its arrays, on this machine's devices."""

    def __init__(self, step: Step, task: Task):
        self.step = step
        self.params = step.place("params", models.values(models.init(task.model)))
        self.state = step.init(self.params)
        self.batch = step.place("batch", models.values(task.model.batch(task.rows)))
        self.grads = step.place("grads", jax.tree.map(lambda x: np.full(x.shape, 0.01, "float32"), step.grads))

    def train(self) -> float:
        """Runs one step; returns its time in seconds."""
        start = time.perf_counter()
        self.params, self.state, metrics = self.step.run(self.params, self.state, self.batch)
        jax.block_until_ready((self.params, self.state, metrics))
        return time.perf_counter() - start

    def optimize(self) -> float:
        """Runs one update; returns its time in seconds."""
        start = time.perf_counter()
        self.params, self.state = self.step.optimize(self.grads, self.state, self.params)
        jax.block_until_ready((self.params, self.state))
        return time.perf_counter() - start


def alternated(one: Callable[[], float], other: Callable[[], float], rounds: int) -> list[tuple[float, float]]:
    """Runs both alternately, in reversed order each round; returns the seconds of each round."""
    pairs = []
    for number in range(rounds + _WARM):
        first, second = (one, other) if number % 2 == 0 else (other, one)
        times = {first: first(), second: second()}
        pairs.append((times[one], times[other]))
    return pairs[_WARM:]


def beside(pairs: Sequence[tuple[float, float]], what: str) -> dict[str, float]:
    """The first one's median time, and the quartiles of the paired ratios.

    >>> beside([(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)], "step")
    {'step_seconds': 2.0, 'step_ratio': 1.0, 'step_ratio_low': 0.5, 'step_ratio_high': 1.5}
    """
    ratios = [a / b for a, b in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        f"{what}_seconds": statistics.median(a for a, _ in pairs),
        f"{what}_ratio": middle,
        f"{what}_ratio_low": low,
        f"{what}_ratio_high": high,
    }


def timed(one: Running, other: Running, rounds: int) -> dict[str, float]:
    """Times the whole step and the optimizer alone, against another step's."""
    steps = beside(alternated(one.train, other.train, rounds), "step")
    return steps | beside(alternated(one.optimize, other.optimize, rounds), "update")
