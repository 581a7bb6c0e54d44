"""The leaves in which two checkpoints differ, by their indexes, and by how much, by their arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jaxshard.checkpoint import Checkpointer
from jaxshard.checkpoint.storage.leaves import Entry

Side = tuple[Checkpointer, int]  # and a step
_COMPARED = 2**20  # elements at once


def differences(left: Side, right: Side, values: bool) -> Iterator[str]:
    """A line for each leaf that is in one alone (-, +) or another (!).

    Args:
      left: one checkpoint.
      right: the other.
      values: read leaves of which only the digests differ, and tell their largest difference.
    """
    one, two = (checkpoints.info(step)["leaves"] for checkpoints, step in (left, right))
    yield from (f"- {path}: only here: {_kind(one[path])}" for path in one if path not in two)
    yield from (f"+ {path}: only here: {_kind(two[path])}" for path in two if path not in one)
    both = [path for path in one if path in two and one[path] != two[path]]
    kinds = {path: (_kind(one[path]), _kind(two[path])) for path in both}
    yield from (f"! {path}: {a}, {b}" for path, (a, b) in kinds.items() if a != b)
    changed = [path for path, (a, b) in kinds.items() if a == b]
    if not values:
        yield from (f"! {path}: other values" for path in changed)
    elif changed:
        yield from _distances(left, right, changed)


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest absolute difference, in float64 or complex128; nan where only one of two elements is nan.

    >>> largest_difference(np.array([1.0, np.inf, np.nan]), np.array([1.5, np.inf, np.nan]))
    0.5
    """
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    a, b, largest = a.reshape(-1), b.reshape(-1), []
    for start in range(0, a.size, _COMPARED):
        x, y = (each[start : start + _COMPARED].astype(wide) for each in (a, b))
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore", over="ignore"):
            largest.append(np.max(np.where(same, 0, np.abs(x - y))))
    return float(np.max(largest))


def _distances(left: Side, right: Side, paths: Sequence[str]) -> Iterator[str]:
    one, two = (checkpoints.read(step, paths) for checkpoints, step in (left, right))
    for (path, a), (_, b) in zip(one, two, strict=True):
        yield f"! {path}: other values, largest difference {largest_difference(a, b):.6g}"


def _kind(leaf: Entry) -> str:
    return f"{leaf['dtype']}{leaf['shape']}"
