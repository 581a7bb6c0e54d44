"""Compares strategies, and finds the best, before anything is compiled or rented.

ZeRO's bytes at rest: Rajbhandari et al. 2020, section 5.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]

from jaxshard import strategies
from jaxshard.base.types import AnyMesh, Tree
from jaxshard.loss.params.lookup import AsIf
from jaxshard.plan.choices import Candidate, Target
from jaxshard.plan.prediction import LaidOut, Prediction, Row, TracedStep, predict
from jaxshard.step.step import TrainStep, loss_of, train_step
from jaxshard.system.text import seconds_in_words, size_in_words

# (step, params, batch, *args), as `predict` takes them.
Built: TypeAlias = tuple[TrainStep, Tree, Tree, *tuple[Tree, ...]]
Build: TypeAlias = Callable[[Candidate, AnyMesh], Built]


class AnyRows:
    """`predict` for any number of rows, from one trace, and one more for each table that fewer ids would have exchange
    its rows.

    In a trace each device has a prime number of rows that divides no other dim: so the dims made of rows are known.

    Args:
      step, params, batch, args: as for `predict`.
      unit: each device's rows of a microbatch are a multiple of it: a pipeline's `num_microbatches`, say.

    Attributes:
      parts: rows per step are a multiple of it: devices x microbatches x `unit`.
    """

    def __init__(self, step: TrainStep, params: Tree, batch: Tree, *args: Tree, unit: int = 1):
        options = loss_of(step).options
        self.parts: int = options.cut.num_row_parts * options.microbatches * unit
        self._given = step, params, batch, args
        sizes = {d for x in jax.tree.leaves((params, args)) for d in np.shape(x)}
        sizes |= {d for x in jax.tree.leaves(batch) for d in np.shape(x)[1:]}
        self._sizes = {d for d in sizes if d}
        self._traces: list[tuple[AsIf, TracedStep]] = []
        self._trace(1)

    def at(self, rows: int) -> Prediction:
        """The prediction for `rows` rows a step, over all devices and microbatches.

        Raises:
          ValueError: `rows` is no multiple of `parts`.
        """
        if rows % self.parts or rows < 1:
            raise ValueError(f"plan: {rows} rows are not a multiple of {self.parts}, devices x microbatches")
        each = rows // self.parts
        found = next((trace for trace in self._traces if trace[0].holds_for(each)), None)
        as_if, traced = found or self._trace(each)
        return traced.rescaled(as_if.traced, each, with_rows(self._given[2], rows)).prediction()

    def _trace(self, rows: int) -> tuple[AsIf, TracedStep]:
        step, params, batch, args = self._given
        as_if = AsIf(next(p for p in _primes if all(d % p for d in self._sizes)), rows)
        with as_if.within():
            traced = TracedStep(LaidOut(step, params, with_rows(batch, as_if.traced * self.parts), *args))
        self._traces.append((as_if, traced))
        return self._traces[-1]


_primes = filter(lambda n: all(n % d for d in range(2, math.isqrt(n) + 1)), itertools.count(1009))
"""One for each trace of the process: JAX would return what it has traced for the same."""


def with_rows(batch: Tree, rows: int) -> Tree:
    """The shapes of a batch with another number of rows, the first dim of every leaf."""

    def resized(x: jax.ShapeDtypeStruct | jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

    return jax.tree.map(resized, batch)


def compare(build: Build, candidates: Iterable[Candidate], target: Target) -> list[Row]:
    """Predicts each candidate.

    Args:
      build: `(candidate, mesh) -> (step, params, batch, *args)`; see `building` for a loss and an optax optimizer.
      candidates: in the order of the rows.
      target: the devices.
    """
    return [Row(c, predict(*build(c, c.mesh(target))), target) for c in candidates]


def building(
    loss_fn: Callable[..., Tree],
    inner: optax.GradientTransformation,
    params: Tree,
    batch: Tree,
    *args: Tree,
    **options: Any,
) -> Build:
    """Makes `build` for any model, from a loss, an optax optimizer, params and a batch (arrays or abstract).

    Args:
      loss_fn, params, batch, args: as `train_step` takes them; the batch is the global one.
      inner: the optax optimizer.
      options: of `train_step` (`has_aux`, `weighted`, ...) and of the strategies (`specs`, `master_dtype`, ...).

    >>> import jax, jax.numpy as jnp, optax
    >>> from jaxshard.plan import chip, side_by_side
    >>> loss = lambda p, batch: jnp.mean((batch @ p) ** 2)
    >>> shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 512), (64, 512))]
    >>> target = Target(chip("h100"), 8, 80e9)
    >>> rows = compare(building(loss, optax.adam(1e-3), *shapes), side_by_side(target), target)
    >>> [(row.candidate.name, row.prediction.at_rest["state"]) for row in rows][2]
    ('zero2', 262148)
    """
    of_step = {k: options.pop(k) for k in ("has_aux", "weighted", "fold_keys", "extra", "max_skips") if k in options}

    def build(candidate: Candidate, mesh: AnyMesh) -> Built:
        own = options | ({} if candidate.zero is None else {"zero": candidate.zero})
        own |= {"state_axes": candidate.state_axes} if candidate.state_axes else {}
        own |= {"state_memory": candidate.state_memory} if candidate.state_memory != "device" else {}
        opt = getattr(strategies, candidate.strategy)(inner, mesh, **own)
        step = train_step(loss_fn, opt, microbatches=candidate.microbatches, **of_step)
        return (step, params, batch, *args)

    return build


# The best of all.


@dataclasses.dataclass(frozen=True)
class Fit:
    """Ranked candidates: those that fit, by time; then the others, by the memory they lack.

    `refused` lists, with the reason, those that the model's sizes do not allow, or whose params and state alone do not
    fit.
    """

    rows: tuple[Row, ...]
    refused: tuple[tuple[Candidate, str], ...] = ()

    @property
    def best(self) -> Row | None:
        """The fastest that fits."""
        return self.rows[0] if self.rows and self.rows[0].fits else None

    def why(self) -> str:
        """Explains why the best is best, and the next cheaper change; or why nothing fits, and how much is missing."""
        if self.best is None:
            return _nothing_fits(self.rows, self.refused)
        best, others, took = self.best, [row for row in self.rows[1:] if row.fits], self.best.seconds
        products, memory, links = map(seconds_in_words, (took.products, took.memory, took.links))
        host = f", {seconds_in_words(took.host)} to and from the host" if took.host else ""
        lines = [
            f"{best.candidate.name} is the fastest that fits: {seconds_in_words(took.total)} a step, {products} of "
            f"products, {memory} of memory and {links} of links{host}; {size_in_words(best.peak_bytes)} of "
            f"{size_in_words(best.target.memory_bytes)} at the peak."
        ]
        if best.peak_bytes * _MOST_OVER_PREDICTED > best.target.memory_bytes:
            lines.append(
                f"That is close: compiled steps have needed up to {_MOST_OVER_PREDICTED} times the predicted peak; "
                "check with --compile or jaxshard.aot."
            )
        if others:
            lines.append(f"Next: {others[0].candidate.name}, {_compared(others[0], best)}.")
        lighter = next((row for row in others if row.peak_bytes < best.peak_bytes), None)
        if lighter is not None and lighter is not others[0]:
            lines.append(f"The next cheaper change: {lighter.candidate.name}, {_compared(lighter, best)}.")
        faster = [row for row in self.rows if not row.fits and row.seconds.total < took.total]
        if faster:
            first = min(faster, key=lambda row: row.excess_bytes)
            excess = f"{size_in_words(first.excess_bytes)} too large"
            lines.append(f"{first.candidate.name} would take {seconds_in_words(first.seconds.total)}, and is {excess}.")
        return "\n".join(lines)


_MOST_OVER_PREDICTED = 1.2  # on large models (docs/plan_figures.md)


def _compared(row: Row, best: Row) -> str:
    slower = row.seconds.total / best.seconds.total - 1
    saved = best.peak_bytes - row.peak_bytes
    return f"{slower:.0%} slower, {size_in_words(abs(saved))} {'less' if saved >= 0 else 'more'} memory"


def _nothing_fits(rows: Sequence[Row], refused: Sequence[tuple[Candidate, str]]) -> str:
    if not rows:
        reasons = dict.fromkeys(reason for _, reason in refused)
        return "\n".join(["Nothing can be planned:", *reasons] if reasons else ["No candidates."])
    least = min(rows, key=lambda row: row.excess_bytes)
    return (
        f"Nothing fits in {size_in_words(least.target.memory_bytes)}: the smallest, {least.candidate.name}, needs "
        f"{size_in_words(least.peak_bytes)}, {size_in_words(least.excess_bytes)} too much."
    )


def fit(build: Build, found: Iterable[Candidate], target: Target) -> Fit:
    """Ranks candidates. If none fits, ranks the same with the state on the host, too.

    Candidates whose params and state alone do not fit are refused by their shapes, without tracing; if no other
    candidate fits, those that hold the least are traced.

    Args:
      build: as for `compare`; raises ValueError for a candidate that the model's sizes do not allow.
      found: from `candidates`.
      target: the devices.
    """
    found = list(found)
    first = _ranked(build, found, target)
    if first.best is not None:
        return first
    on_host = [dataclasses.replace(one, state_memory="host") for one in found if one.state_memory == "device"]
    second = _ranked(build, on_host, target)
    if second.best is None:
        return first
    fits, others = ([row for row in second.rows if row.fits == yes] for yes in (True, False))
    return Fit((*fits, *first.rows, *others), (*first.refused, *second.refused))


def _ranked(build: Build, found: Iterable[Candidate], target: Target) -> Fit:
    rows: list[Row] = []
    refused: list[tuple[Candidate, str]] = []
    too_large: list[tuple[Candidate, LaidOut]] = []
    for candidate in found:
        try:
            laid = LaidOut(*build(candidate, candidate.mesh(target)))
            if laid.held_bytes > target.memory_bytes:
                too_large.append((candidate, laid))
            else:
                rows.append(Row(candidate, laid.prediction(), target))
        except ValueError as error:
            refused.append((candidate, str(error)))
    if not any(row.fits for row in rows) and too_large:
        least = min(laid.held_bytes for _, laid in too_large)
        rows += [Row(candidate, laid.prediction(), target) for candidate, laid in too_large if laid.held_bytes == least]
        too_large = [(candidate, laid) for candidate, laid in too_large if laid.held_bytes > least]
    for candidate, laid in too_large:
        excess = size_in_words(laid.held_bytes - target.memory_bytes)
        refused.append((candidate, f"params and state alone exceed the memory by {excess}"))
    order = sorted(rows, key=lambda row: (not row.fits, row.seconds.total if row.fits else row.excess_bytes))
    return Fit(tuple(order), tuple(refused))


def at_rest(step: TrainStep, params: Tree, *_: Tree) -> int:
    """Bytes of params and state on each device, from shapes alone."""
    return LaidOut(step, params, None).held_bytes


def largest_batch(found: AnyRows, target: Target) -> int:
    """The most rows per step that fit, to within 1%; 0 if not even the smallest batch does.

    Args:
      found: predictions of one candidate.
      target: the devices.
    """
    limit, unit = target.memory_bytes, found.parts
    low, high = (1, found.at(unit).peak_bytes), None
    if low[1] > limit:
        return 0
    at = 16
    while high is None or high[0] - low[0] > max(1, low[0] // 100):
        peak = found.at(at * unit).peak_bytes
        slope = max(1.0, (peak - low[1]) / (at - low[0]))
        if peak <= limit:
            low = (at, peak)
        else:
            high = (at, peak)
        ahead = low[0] + int((limit - low[1]) / slope)
        at = max(low[0] + 1, min(ahead, high[0] - 1)) if high else max(ahead, low[0] + 1) + (low[0] == ahead)
        if low[0] > 2**30:
            break  # rows take no memory
    return low[0] * unit


def fewest_devices(build: Build, target: Target, candidate: Candidate) -> int | None:
    """The fewest devices on which the candidate fits, by doubling its data axis; None if 2**16 are too few.

    Args:
      build: as for `compare`; sizes that it refuses (rows that do not divide) are skipped.
      target: only its chip and memory matter, not its number of devices.
      candidate: the strategy; its tensor and pipeline axes stay fixed.
    """
    larger = candidate
    while larger.num_devices <= 2**16:
        with contextlib.suppress(ValueError):
            laid = LaidOut(*build(larger, larger.mesh(target)))
            if laid.held_bytes <= target.memory_bytes and laid.prediction().peak_bytes <= target.memory_bytes:
                return larger.num_devices
        larger = dataclasses.replace(larger, data=2 * larger.data)
    return None
