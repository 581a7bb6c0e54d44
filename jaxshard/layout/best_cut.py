"""The best cut of one shape along some of its dims, by whole axes or by their parts."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from jaxshard.base.types import AxisSizes, Names, in_axes, num_along, parts_of, size_of


class CutOrder(NamedTuple):
    """How a platform ranks the dims of an array, as `Platform.rank_of_cut` and `tile` say."""

    rank: Callable[[int, tuple[int, ...], int, int | None, bool], int]
    tile: int | None
    params_cut: bool


@functools.lru_cache(maxsize=4096)
def best_cut(
    shape: tuple[int, ...], free: tuple[int, ...], data_axes: tuple[tuple[str, int], ...], order: CutOrder
) -> tuple[dict[int, Names], int]:
    """The best cut that the free dims allow: (dim -> data axes that cut it, number of parts)."""
    data_sizes = dict(data_axes)
    assignments = itertools.product([None, *free], repeat=len(data_sizes))
    candidates = [dims for a in assignments if (dims := _assign(a, shape, data_sizes)) is not None]
    best = min(candidates, key=lambda dims: _badness(dims, shape, data_sizes, order))
    return best, ways(best, data_sizes)


@functools.lru_cache(maxsize=4096)
def best_blocks(
    shape: tuple[int, ...], free: tuple[int, ...], data_axes: tuple[tuple[str, int], ...], order: CutOrder
) -> dict[int, Names] | None:
    """The best cut over all of these axes by their parts, each along one dim: dim -> parts; None if there is none."""
    data_sizes = dict(data_axes)
    alike: dict[tuple[str, int], list[str]] = {}
    for axis, size in data_axes:
        for part in parts_of(axis, size):
            alike.setdefault((axis, size_of(part, data_sizes)), []).append(part)
    found = list[dict[int, Names]]()
    for dealt in itertools.product(
        *(itertools.combinations_with_replacement(free, len(some)) for some in alike.values())
    ):
        dims: dict[int, Names] = {}
        for some, places in zip(alike.values(), dealt, strict=True):
            for part, dim in zip(some, places, strict=True):
                dims[dim] = (*dims.get(dim, ()), part)
        dims = {dim: in_axes(names, data_sizes) for dim, names in dims.items()}
        if all(shape[dim] % num_along(names, data_sizes) == 0 for dim, names in dims.items()):
            found.append(dims)
    return min(found, key=lambda dims: _badness(dims, shape, data_sizes, order), default=None)


def ways(dims: dict[int, Names], sizes: AxisSizes) -> int:
    """The number of shards."""
    return math.prod(num_along(names, sizes) for names in dims.values())


def _assign(
    assignment: tuple[int | None, ...], shape: tuple[int, ...], data_sizes: AxisSizes
) -> dict[int, Names] | None:
    """dim -> data axes that cut it; None if a dim does not divide."""
    dims: dict[int, Names] = {}
    for axis, dim in zip(data_sizes, assignment, strict=True):
        if dim is not None:
            dims[dim] = (*dims.get(dim, ()), axis)
    divides = all(shape[dim] % num_along(axes, data_sizes) == 0 for dim, axes in dims.items())
    return dims if divides else None


def _badness(
    dims: dict[int, Names], shape: tuple[int, ...], data_sizes: AxisSizes, order: CutOrder
) -> tuple[int | list[int], ...]:
    """Ranks a cut, smaller is better: more parts first, then what the platform's compiler prefers, then fewer dims."""
    num_parts = ways(dims, data_sizes)
    ranks = []
    for dim, axes in dims.items():
        shard = shape[dim] // num_along(axes, data_sizes)
        ranks.append(order.rank(dim, shape, shard, order.tile, order.params_cut))
    return (-num_parts, max(ranks, default=0), sum(ranks), len(dims), sorted(dims, reverse=True))
