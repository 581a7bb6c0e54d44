"""Where the data axes cut one leaf: pure, from its shape, its dtype and the mesh's axis sizes."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxshard.base.axes import Dims, canonical, local_shape
from jaxshard.base.tree import Names, path_of
from jaxshard.base.types import AxisSizes
from jaxshard.core.options import Config


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf: `spec` over the model's axes alone, `cut` with the data axes added, and why it is so."""

    names: Names
    shape: tuple[int, ...]
    dtype: np.dtype
    spec: P
    cut: P
    dims: Dims  # (dim counted from the end, data axes that cut it)
    ways: int
    reason: str
    awkward: bool = False  # larger than min_shard_size, and no dims to cut it all N ways
    home: P | None = None  # where its state lives and its update is made, if elsewhere than `cut`
    home_dims: Dims = ()
    at_home: str = ""  # what to know of its update

    @property
    def path(self) -> str:
        return path_of(self.names)

    def bytes(self, spec: P, sizes: AxisSizes) -> int:
        """Bytes of one device's part under `spec`."""
        return math.prod(local_shape(self.shape, spec, sizes)) * _itemsize(self.dtype)


def _itemsize(dtype: np.dtype) -> int:
    """Of PRNG keys too, which NumPy does not know."""
    return dtype.itemsize if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).itemsize


def cut_leaf(names: Names, shape: tuple[int, ...], dtype: np.dtype, spec: P, sizes: AxisSizes, config: Config) -> Leaf:
    """Decides where the data axes cut a leaf by the rule below.

    Dims that `spec` uses are taken. Among the rest: the last dim if shards are multiples of 128 (256 where gradients
    have two bytes), else the second last if multiples of 8, else any; a stacked-layers dim (the first of three or more)
    last of all. Each data axis may cut a dim of its own. What cannot be cut N ways is cut as many ways as it can be.
    """
    data_sizes = {axis: sizes[axis] for axis in config.data_axes if sizes[axis] > 1}
    num_shards, size = math.prod(data_sizes.values()), math.prod(shape)
    whole = Leaf(names, shape, dtype, spec, cut=spec, dims=(), ways=1, reason="")
    if num_shards == 1:
        return dataclasses.replace(whole, reason="one data device")
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dataclasses.replace(whole, reason="a PRNG key")
    if size < max(config.min_shard_size, 1):
        return dataclasses.replace(whole, reason=f"{size} elements, under min_shard_size {config.min_shard_size}")
    best, ways = _best_cut(shape, _free_dims(shape, spec), tuple(data_sizes.items()), _lanes(dtype, config))
    if ways == 1:
        why = f"no free dim of {shape} is divisible by {' or '.join(str(n) for n in data_sizes.values())}"
        return dataclasses.replace(whole, reason=why, awkward=size >= num_shards)
    cut, dims, where = _described(whole, best)
    return dataclasses.replace(
        whole,
        cut=cut,
        dims=dims,
        ways=ways,
        reason=where if ways == num_shards else f"{where}: only {ways} of {num_shards} ways",
        awkward=ways < num_shards <= size,
    )


def deal_leaf(leaf: Leaf, batch_dims: tuple[int, ...] | None, sizes: AxisSizes, config: Config) -> Leaf:
    """The leaf, its state dealt out by whole matrices: cut along dims over which its update is batched, if N divides.

    Gradients are reduced as before; one all-to-all of 1/N of the leaf takes them there.
    """
    if batch_dims is None or not leaf.dims:
        return leaf
    data_sizes = {axis: sizes[axis] for axis in config.data_axes if sizes[axis] > 1}
    free = tuple(dim for dim in _free_dims(leaf.shape, leaf.spec) if dim in batch_dims)
    best, ways = _best_cut(leaf.shape, free, tuple(data_sizes.items()), _lanes(leaf.dtype, config))
    if ways < math.prod(data_sizes.values()):
        why = f"no stack of matrices that {'x'.join(data_sizes)} divides: they are multiplied across devices"
        return dataclasses.replace(leaf, at_home=why)
    home, home_dims, _ = _described(leaf, best)
    return dataclasses.replace(leaf, home=home, home_dims=home_dims, at_home="whole matrices dealt out")


def _free_dims(shape: tuple[int, ...], spec: P) -> tuple[int, ...]:
    return tuple(dim for dim in range(len(shape)) if dim >= len(spec) or spec[dim] is None)


def _lanes(dtype: np.dtype, config: Config) -> int:
    """The last dim's shards should be multiples of this many elements: 512 bytes of a gradient as it is reduced.

    Measured with the TPU compiler: shards of bfloat16 with an odd multiple of 128 columns are all-reduced, at twice the
    bytes, not reduce-scattered.
    """
    return max(128, 512 // np.dtype(dtype if config.reduce_dtype is None else config.reduce_dtype).itemsize)


@functools.lru_cache(maxsize=4096)
def _best_cut(
    shape: tuple[int, ...], free: tuple[int, ...], data_axes: tuple[tuple[str, int], ...], lanes: int
) -> tuple[dict[int, Names], int]:
    """(dim -> data axes that cut it, number of ways), of all that the free dims allow."""
    data_sizes = dict(data_axes)
    assignments = itertools.product([None, *free], repeat=len(data_sizes))
    candidates = [dims for a in assignments if (dims := _assign(a, shape, data_sizes)) is not None]
    best = min(candidates, key=lambda dims: _badness(dims, shape, data_sizes, lanes))
    return best, math.prod(data_sizes[axis] for axes in best.values() for axis in axes)


def _described(leaf: Leaf, dims: dict[int, Names]) -> tuple[P, Dims, str]:
    """(the spec, the dims counted from the end, and in words) of a leaf cut along `dims`."""
    ndim = len(leaf.shape)
    entries = list(leaf.spec) + [None] * (ndim - len(leaf.spec))
    for dim, axes in dims.items():
        entries[dim] = axes
    cuts = tuple((dim - ndim, axes) for dim, axes in sorted(dims.items()))
    return canonical(entries), cuts, in_words(cuts, ndim)


def in_words(dims: Dims, ndim: int) -> str:
    """Such as "dim 1 by data"."""
    return " and ".join(f"dim {dim + ndim} by {'x'.join(axes)}" for dim, axes in dims)


def _assign(
    assignment: tuple[int | None, ...], shape: tuple[int, ...], data_sizes: AxisSizes
) -> dict[int, Names] | None:
    """dim -> data axes that cut it, or None where a dim does not divide."""
    dims: dict[int, Names] = {}
    for axis, dim in zip(data_sizes, assignment, strict=True):
        if dim is not None:
            dims[dim] = (*dims.get(dim, ()), axis)
    divides = all(shape[dim] % math.prod(data_sizes[a] for a in axes) == 0 for dim, axes in dims.items())
    return dims if divides else None


def _badness(
    dims: dict[int, Names], shape: tuple[int, ...], data_sizes: AxisSizes, lanes: int
) -> tuple[int | list[int], ...]:
    """Smaller is better: more ways first, then the tiles that accelerators like, then fewer dims."""
    ways = math.prod(data_sizes[axis] for axes in dims.values() for axis in axes)
    ranks = []
    for dim, axes in dims.items():
        shard = shape[dim] // math.prod(data_sizes[axis] for axis in axes)
        ranks.append(_rank(dim - len(shape), len(shape), shard, lanes))
    return (-ways, max(ranks, default=0), sum(ranks), len(dims), sorted(dims, reverse=True))


def _rank(dim: int, ndim: int, shard: int, lanes: int) -> int:
    """How good a dim (counted from the end) is to cut into shards of this size: 0 is best."""
    if dim == -1:
        return 0 if shard % lanes == 0 else 4
    if dim == -ndim and ndim >= 3:
        return 5  # stacked layers: cutting these would gather all layers at once
    if dim == -2:
        return 1 if shard % 8 == 0 else 2
    return 3
