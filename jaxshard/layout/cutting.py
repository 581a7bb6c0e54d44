"""Decides how the batch axes shard one leaf, only from its shape, its dtype and the mesh's axis sizes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxshard import platforms
from jaxshard.base.tree import path_of
from jaxshard.base.types import (
    AxisSizes,
    Dims,
    Entry,
    Names,
    axes_in,
    axis_of,
    canonical,
    is_part,
    itemsize_of,
    local_shape,
    num_along,
    over_axes,
    size_of,
    split_axes,
)
from jaxshard.layout.best_cut import CutOrder, best_blocks, best_cut, ways
from jaxshard.layout.options import Config


class Place(NamedTuple):
    """How the batch axes cut an array: its PartitionSpec, with the model's axes, and the dims that they cut."""

    spec: P
    dims: Dims


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf: `spec` has the model's axes alone, `cut` also the batch axes that cut its state; `reason` says why.

    If `params` or sums of `grads` are cut by fewer axes, a device's larger part contains its part of the state.
    """

    names: Names
    shape: tuple[int, ...]
    dtype: np.dtype
    spec: P
    cut: P
    dims: Dims  # (dim counted from the end, batch axes that cut it)
    ways: int  # the number of shards that the batch axes cut it into
    reason: str
    params: Place
    grads: Place
    awkward: bool = False  # large enough to cut, but no dims divide by all N devices
    home: P | None = None  # the owners' layout: the spec of its state and update, if it is not `cut`
    home_dims: Dims = ()
    frozen: bool = False
    over_replicas: bool = False  # its state is cut over the replicas too: matrices are updated once, not in each
    matrices: tuple[int, ...] | None = None  # the batch dims of its matrix operations in the update, if there are any
    memory: str = "device"  # or "host": where its shards lie at rest
    at_home: str = ""  # a note on its update, for the table of `Layout`

    @property
    def path(self) -> str:
        """Its names, joined by slashes."""
        return path_of(self.names)

    def over_axes(self) -> "Leaf":
        """The same leaf, cut by whole axes alone."""
        if not (split := split_axes(self.cut)):
            return self
        dims = tuple(
            (dim, rest) for dim, names in self.dims if (rest := tuple(n for n in names if axis_of(n) not in split))
        )
        return dataclasses.replace(self, cut=over_axes(self.cut), dims=dims)

    def bytes(self, spec: P, sizes: AxisSizes) -> int:
        """Bytes of one device's shard under `spec`."""
        return math.prod(local_shape(self.shape, spec, sizes)) * itemsize_of(self.dtype)


def _in_factors(shape: tuple[int, ...], free: Sequence[int], sizes: list[int]) -> str:
    """How two data axes in place of one would cut an array; "" if they would not."""
    num = sizes[0] if len(sizes) == 1 else 1
    ways, dim = max(((math.gcd(shape[d], num), d) for d in free), default=(1, 0), key=lambda each: each[0])
    return f"; two data_axes of {num // ways} and {ways} devices would shard dim {dim} {ways} ways" if ways > 1 else ""


def cut_leaf(
    names: Names,
    shape: tuple[int, ...],
    dtype: np.dtype,
    spec: P,
    sizes: AxisSizes,
    config: Config,
    platform: str,
    *,
    over_replicas: bool = False,
) -> Leaf:
    """Decides where the batch axes cut a leaf: first the axes of the params, then of gradient sums, then of the state.

    Only dims that `spec` leaves free can be cut, each by other axes. A leaf that N shards do not divide gets as many as
    its dims allow. Which dim is best depends on the platform ("cpu", "gpu" or "tpu"): see `rank_of_cut` in
    `platforms.tpu` (for CPU, too) and `platforms.gpu`.

    Args:
      over_replicas: cut its state over the replicas too, where its dims allow all of these.
    """
    if over_replicas:
        found = cut_leaf(names, shape, dtype, spec, sizes, config.over_replicas(sizes), platform)
        if found.dims and not found.awkward:
            return dataclasses.replace(found, over_replicas=True)
    taken = {axis for entry in spec for axis in axes_in(entry)}
    levels = [{axis: sizes[axis] for axis in axes if sizes[axis] > 1 and axis not in taken} for axes in config.cut_axes]
    num_shards, size = math.prod(levels[-1].values()), math.prod(shape)
    own = Place(spec, ())
    whole = Leaf(names, shape, dtype, spec, cut=spec, dims=(), ways=1, reason="", params=own, grads=own)
    if num_shards == 1:
        return dataclasses.replace(whole, reason="one data device")
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dataclasses.replace(whole, reason="a PRNG key")
    if size < max(config.min_shard_size, 1):
        return dataclasses.replace(whole, reason=_too_small(size, config.min_shard_size))
    order = _order(dtype, config, platform)
    found, places = dict[int, Names](), []
    for before, level in zip([{}, *levels], levels, strict=False):
        more = {axis: n for axis, n in level.items() if axis not in before}
        found = _cut_further(
            shape, _free_dims(shape, spec), found, sizes, more, order, in_blocks=config.uneven == "blocks"
        )
        places.append(_described(whole, found))
    (cut, dims), num_parts = places[-1], ways(found, sizes)
    if num_parts == 1:
        why = f"no free dim of {shape} is divisible by {' or '.join(str(n) for n in levels[-1].values())}"
        why += _in_factors(shape, _free_dims(shape, spec), [*levels[-1].values()])
        return dataclasses.replace(whole, reason=why, awkward=size >= num_shards)
    where = in_words(dims, len(shape))
    return dataclasses.replace(
        whole,
        cut=cut,
        dims=dims,
        ways=num_parts,
        reason=where if num_parts == num_shards else f"{where}: only {num_parts} of {num_shards} shards",
        params=places[0],
        grads=places[1],
        awkward=num_parts < num_shards <= size,
    )


def _cut_further(
    shape: tuple[int, ...],
    free: tuple[int, ...],
    found: dict[int, Names],
    sizes: AxisSizes,
    more: dict[str, int],
    order: CutOrder,
    *,
    in_blocks: bool,
) -> dict[int, Names]:
    """`found` (dim -> axes), extended by the best cut of its shards over `more` axes; or by parts of these."""
    if not more:
        return found
    parts = tuple(size // num_along(found.get(dim, ()), sizes) for dim, size in enumerate(shape))
    best, num_parts = best_cut(parts, free, tuple(more.items()), order)
    if in_blocks and num_parts < math.prod(more.values()):
        best = best_blocks(parts, free, tuple(more.items()), order) or best
    return {dim: (*found.get(dim, ()), *best.get(dim, ())) for dim in found.keys() | best.keys()}


def frozen_leaf(leaf: Leaf) -> Leaf:
    """The same leaf, frozen: it has no gradient and no state, so only its params are cut."""
    reason = "frozen" if not leaf.params.dims else f"{in_words(leaf.params.dims, len(leaf.shape))}; frozen"
    own = Place(leaf.spec, ())
    return dataclasses.replace(
        leaf, cut=leaf.spec, dims=(), grads=own, ways=1, reason=reason, awkward=False, frozen=True
    )


def cut_like(leaf: Leaf, stack: Leaf) -> Leaf:
    """`stack`, arrays of the shape of `leaf` stacked on leading dims, cut like `leaf`."""
    cut, dims = _described(stack, {dim + len(stack.shape): axes for dim, axes in leaf.dims})
    where, partly = in_words(dims, len(stack.shape)), leaf.reason.partition(": ")[2]
    reason = f"{where}: {partly}" if partly else where
    return dataclasses.replace(stack, cut=cut, dims=dims, ways=leaf.ways, reason=reason, awkward=leaf.awkward)


def cut_beside(leaf: Leaf, other: Leaf, sizes: AxisSizes) -> Leaf:
    """Cuts `other`, an array of per-block scales, like the leaf it belongs to, as far as its dims divide."""
    entries = (leaf.home or leaf.cut)[: len(other.shape)]
    pairs = zip(other.shape, entries, strict=False)
    kept = [e if size % num_along(axes_in(e), sizes) == 0 else None for size, e in pairs]
    if any(was is not None and now is None for was, now in zip(entries, kept, strict=True)):
        kept = [_without_parts(entry) for entry in kept]  # all parts of an axis cut an array, or none
    dims = {dim: axes for dim, axes in leaf.home_dims or leaf.dims if kept[dim + len(leaf.shape)] is not None}
    num_parts = ways(dims, sizes)
    where = in_words(tuple(dims.items()), len(leaf.shape)) or "whole"
    return dataclasses.replace(other, cut=canonical(kept), dims=tuple(dims.items()), ways=num_parts, reason=where)


def _without_parts(entry: Entry) -> Entry:
    return None if any(map(is_part, axes_in(entry))) else entry


def deal_leaf(leaf: Leaf, batch_dims: tuple[int, ...] | None, sizes: AxisSizes, config: Config, platform: str) -> Leaf:
    """Gives each device whole matrices of this leaf's state: cuts only the batch dims of its matrix operations.

    If N does not divide these dims, the leaf keeps its cut, and gets a note. Gradients are still reduced to `leaf.cut`;
    an all-to-all of 1/N of the leaf then moves them to `home`.

    Args:
      batch_dims: the batch dims of its matrix operations in the update; None if it enters none, and keeps its cut.
    """
    leaf = dataclasses.replace(leaf, matrices=batch_dims)
    if batch_dims is None or not leaf.dims:
        return leaf
    taken = {axis for entry in leaf.spec for axis in axes_in(entry)}
    data_sizes = {axis: sizes[axis] for axis in config.cut_axes.state if sizes[axis] > 1 and axis not in taken}
    free = tuple(dim for dim in _free_dims(leaf.shape, leaf.spec) if dim in batch_dims)
    order = _order(leaf.dtype, config, platform)
    best, num_parts = best_cut(leaf.shape, free, tuple(data_sizes.items()), order)
    if num_parts < math.prod(data_sizes.values()):
        return dataclasses.replace(leaf, at_home="its matrices are updated on owner devices")
    home, home_dims = _described(leaf, best)
    return dataclasses.replace(leaf, home=home, home_dims=home_dims, at_home="full matrices distributed")


def at_home(leaf: Leaf, shape: tuple[int, ...]) -> Place | None:
    """The layout of an array of this shape in the state of a leaf whose whole matrices are distributed.

    An array of the leaf's shape gets the leaf's own `home`; a stack of other matrices (Shampoo's factors) is cut along
    the same batch dims. None for any other array.
    """
    if shape == leaf.shape:
        return Place(leaf.home or leaf.cut, leaf.home_dims)
    found = {dim + len(leaf.shape): axes for dim, axes in leaf.home_dims}
    if not all(dim < len(shape) and shape[dim] == leaf.shape[dim] for dim in range(max(found, default=-1) + 1)):
        return None
    entries = [found.get(dim) for dim in range(len(shape))]
    return Place(canonical(entries), tuple((dim - len(shape), axes) for dim, axes in sorted(found.items())))


def _free_dims(shape: tuple[int, ...], spec: P) -> tuple[int, ...]:
    return tuple(dim for dim in range(len(shape)) if dim >= len(spec) or spec[dim] is None)


def _order(dtype: np.dtype, config: Config, platform: str) -> CutOrder:
    found = platforms.named(platform)
    return CutOrder(found.rank_of_cut, found.tile(_gradient_itemsize(dtype, config)), bool(config.cut_axes.params))


def _gradient_itemsize(dtype: np.dtype, config: Config) -> int:
    """Bytes of an element of the reduced gradient.

    With masters every leaf is cut like a bfloat16 one, so a state made from float32 params has the same layout.
    """
    narrow = dtype if config.master_dtype is None else jnp.bfloat16
    return np.dtype(narrow if config.reduce_dtype is None else config.reduce_dtype).itemsize


def _described(leaf: Leaf, dims: dict[int, Names]) -> Place:
    """A leaf's place, cut along `dims`."""
    ndim = len(leaf.shape)
    entries = list(leaf.spec) + [None] * (ndim - len(leaf.spec))
    for dim, axes in dims.items():
        entries[dim] = axes
    return Place(canonical(entries), tuple((dim - ndim, axes) for dim, axes in sorted(dims.items())))


def in_words(dims: Dims, ndim: int) -> str:
    """A cut in words, such as "dim 1 by data"."""
    return " and ".join(f"dim {dim + ndim} by {_named(names)}" for dim, names in dims)


def _named(names: Names) -> str:
    """Axes in words, and parts: "8 of data"."""
    counts: dict[str, int] = {}
    for name in names:
        counts[axis_of(name)] = counts.get(axis_of(name), 1) * (size_of(name, {}) if is_part(name) else 1)
    return "x".join(f"{count} of {axis}" if count > 1 else axis for axis, count in counts.items())


def _too_small(size: int, least: int) -> str:
    return f"{size} element{'s' if size != 1 else ''}, under min_shard_size {least}"
