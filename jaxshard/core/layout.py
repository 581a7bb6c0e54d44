"""Where each leaf of params, grads and state lives: pure, from shapes, dtypes, options and the mesh's axis sizes.

Nothing here touches an array or a device, so everything can be asked before any machine is rented.
"""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import Names, named_leaves, owner_of, path_of
from jaxshard.core.specs import canonical, local_shape, model_specs


class Cuts(NamedTuple):
    """What a strategy cuts 1/N over the data axes."""

    params: bool
    accumulators: bool  # gradients, while microbatches are summed
    state: bool  # and the gradients that reach the inner optimizer


STRATEGIES = {
    "ddp": Cuts(params=False, accumulators=False, state=False),
    "zero1": Cuts(params=False, accumulators=False, state=True),
    "zero2": Cuts(params=False, accumulators=True, state=True),
    "zero3": Cuts(params=True, accumulators=True, state=True),
    "hsdp": Cuts(params=True, accumulators=True, state=True),
    "tensor_parallel": Cuts(params=False, accumulators=False, state=False),
    "pipeline_parallel": Cuts(params=False, accumulators=False, state=False),
}
_LEVELS = ("ddp", "zero1", "zero2", "zero3")  # of ZeRO, inside "hybrid"


@dataclasses.dataclass(frozen=True)
class Config:
    """The options of a strategy, as given to `zero2(...)` and its siblings."""

    strategy: str
    specs: Any = dataclasses.field(default=None, hash=False)
    data_axes: Names = ("data",)
    min_shard_size: int = 2**11
    reduce_dtype: Any = None
    master_dtype: Any = None
    moment_dtype: Any = None
    stochastic_rounding: bool = False
    loss_scale: Any = None
    auto_axes: Names = ()
    zero: int | None = None  # of "hybrid" alone

    @property
    def cuts(self) -> Cuts:
        return STRATEGIES[self.strategy if self.zero is None else _LEVELS[self.zero]]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf: `spec` over the model's axes alone, `cut` with the data axes added, and why it is so."""

    names: Names
    shape: tuple[int, ...]
    dtype: Any
    spec: P
    cut: P
    dims: tuple[tuple[int, Names], ...]  # (dim counted from the end, data axes that cut it)
    ways: int
    reason: str
    awkward: bool = False  # larger than min_shard_size, and no dims to cut it all N ways
    home: P | None = None  # where its state lives and its update is made, if elsewhere than `cut`
    home_dims: tuple[tuple[int, Names], ...] = ()
    at_home: str = ""  # what to know of its update

    @property
    def path(self) -> str:
        return path_of(self.names)

    def bytes(self, spec: P, sizes: Mapping[str, int]) -> int:
        """Bytes of one device's part under `spec`."""
        return math.prod(local_shape(self.shape, spec, sizes)) * np.dtype(_plain(self.dtype)).itemsize


class Shardings(NamedTuple):
    """`NamedSharding`s of params, grads (as `value_and_grad` returns them) and state; `.specs` has the specs alone."""

    params: Any
    grads: Any
    state: Any

    @property
    def specs(self) -> "Shardings":
        return Shardings(*jax.tree.map(lambda sharding: sharding.spec, tuple(self)))


# The rule: where one leaf is cut.


def _plain(dtype: Any) -> Any:
    """A NumPy dtype of the same width for PRNG keys, whose own NumPy does not know."""
    return np.dtype(f"V{dtype.itemsize}") if jnp.issubdtype(dtype, jax.dtypes.extended) else dtype


def cut_leaf(
    names: Names, shape: tuple[int, ...], dtype: Any, spec: P, sizes: Mapping[str, int], config: Config
) -> Leaf:
    """Decides where the data axes cut a leaf (DESIGN section 4).

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
    best, ways = _best_cut(shape, _free_dims(shape, spec), data_sizes, _lanes(dtype, config))
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


def deal_leaf(leaf: Leaf, batch_dims: tuple[int, ...] | None, sizes: Mapping[str, int], config: Config) -> Leaf:
    """The leaf, its state dealt out by whole matrices: cut along dims over which its update is batched, if N divides.

    Gradients are reduced as before; one all-to-all of 1/N of the leaf takes them there.
    """
    if batch_dims is None or not leaf.dims:
        return leaf
    data_sizes = {axis: sizes[axis] for axis in config.data_axes if sizes[axis] > 1}
    free = [dim for dim in _free_dims(leaf.shape, leaf.spec) if dim in batch_dims]
    best, ways = _best_cut(leaf.shape, free, data_sizes, _lanes(leaf.dtype, config))
    if ways < math.prod(data_sizes.values()):
        why = f"no stack of matrices that {'x'.join(data_sizes)} divides: they are multiplied across devices"
        return dataclasses.replace(leaf, at_home=why)
    home, home_dims, _ = _described(leaf, best)
    return dataclasses.replace(leaf, home=home, home_dims=home_dims, at_home="whole matrices dealt out")


def _free_dims(shape: tuple[int, ...], spec: P) -> list[int]:
    return [dim for dim in range(len(shape)) if dim >= len(spec) or spec[dim] is None]


def _lanes(dtype: Any, config: Config) -> int:
    """The last dim's shards should be multiples of this many elements: 512 bytes of a gradient as it is reduced.

    Measured with the TPU compiler: shards of bfloat16 with an odd multiple of 128 columns are all-reduced, at twice the
    bytes, not reduce-scattered.
    """
    return max(128, 512 // np.dtype(dtype if config.reduce_dtype is None else config.reduce_dtype).itemsize)


def _best_cut(
    shape: tuple[int, ...], free: list[int], data_sizes: Mapping[str, int], lanes: int
) -> tuple[dict[int, Names], int]:
    """(dim -> data axes that cut it, number of ways), of all that the free dims allow."""
    assignments = itertools.product([None, *free], repeat=len(data_sizes))
    candidates = [dims for a in assignments if (dims := _assign(a, shape, data_sizes)) is not None]
    best = min(candidates, key=lambda dims: _badness(dims, shape, data_sizes, lanes))
    return best, math.prod(data_sizes[axis] for axes in best.values() for axis in axes)


def _described(leaf: Leaf, dims: dict[int, Names]) -> tuple[P, tuple[tuple[int, Names], ...], str]:
    """(the spec, the dims counted from the end, and in words) of a leaf cut along `dims`."""
    ndim = len(leaf.shape)
    entries = list(leaf.spec) + [None] * (ndim - len(leaf.spec))
    for dim, axes in dims.items():
        entries[dim] = axes
    cuts = tuple((dim - ndim, axes) for dim, axes in sorted(dims.items()))
    return canonical(entries), cuts, _in_words(cuts, ndim)


def _in_words(dims: tuple[tuple[int, Names], ...], ndim: int) -> str:
    return " and ".join(f"dim {dim + ndim} by {'x'.join(axes)}" for dim, axes in dims)


def _assign(
    assignment: tuple[int | None, ...], shape: tuple[int, ...], data_sizes: Mapping[str, int]
) -> dict[int, Names] | None:
    """dim -> data axes that cut it, or None where a dim does not divide."""
    dims: dict[int, Names] = {}
    for axis, dim in zip(data_sizes, assignment, strict=True):
        if dim is not None:
            dims[dim] = (*dims.get(dim, ()), axis)
    divides = all(shape[dim] % math.prod(data_sizes[a] for a in axes) == 0 for dim, axes in dims.items())
    return dims if divides else None


def _badness(
    dims: dict[int, Names], shape: tuple[int, ...], data_sizes: Mapping[str, int], lanes: int
) -> tuple[Any, ...]:
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


# Whole trees.


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything of one optimizer lives; `print(layout)` is the table, one row per leaf."""

    config: Config
    sizes: Mapping[str, int]
    params: tuple[Leaf, ...]
    state: tuple[Leaf, ...] = ()
    gathers: Mapping[Names, str] | None = None  # params' names -> where and why they are gathered

    def spec(self, leaf: Leaf, *, cut: bool) -> P:
        return leaf.cut if cut else leaf.spec

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes at rest on each device: params, grads (as the inner optimizer gets them) and state."""
        cuts = self.config.cuts
        return {
            "params": sum(leaf.bytes(self.spec(leaf, cut=cuts.params), self.sizes) for leaf in self.params),
            "grads": sum(leaf.bytes(self.spec(leaf, cut=cuts.state), self.sizes) for leaf in self.params),
            "state": sum(leaf.bytes(self.spec(leaf, cut=cuts.state), self.sizes) for leaf in self.state),
        }

    def rows(self) -> list[tuple[str, ...]]:
        """The table's rows: kind, leaf, shape, dtype, spec at rest, bytes per device, why."""
        cuts, rows = self.config.cuts, []
        for kind, leaves, cut in (("params", self.params, cuts.params), ("state", self.state, cuts.state)):
            for leaf in leaves:
                spec = self.spec(leaf, cut=cut)
                whole = "whole" if not leaf.spec else "uncut over data"
                why = leaf.reason if cut else f"{self.config.strategy} keeps {kind} {whole}"
                if kind == "params" and self.gathers is not None:
                    why += f"; {self.gathers[leaf.names]}"
                dtype = str(leaf.dtype)
                rows.append((kind, leaf.path, str(leaf.shape), dtype, str(spec), leaf.bytes(spec, self.sizes), why))
        return [tuple(map(str, row)) for row in rows]

    def __str__(self) -> str:
        head = ("", "leaf", "shape", "dtype", "at rest", "bytes/device", "why")
        rows = [head, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = ", ".join(f"{kind} {num_bytes}" for kind, num_bytes in self.bytes_per_device.items())
        return "\n".join([*lines, f"bytes per device: {total}"])


def layout_params(config: Config, params: Any, sizes: Mapping[str, int], *, strict: bool = False) -> Layout:
    """The layout of a tree of arrays or `ShapeDtypeStruct`s.

    Raises:
      TypeError: a leaf is not floating (or complex).
      ValueError: see `model_specs`.
    """
    check_floating(params)
    specs = model_specs(config, params, sizes, strict=strict)
    leaves = tuple(
        cut_leaf(names, tuple(leaf.shape), leaf.dtype, spec, sizes, config)
        for (names, leaf), spec in zip(named_leaves(params), specs, strict=True)
    )
    return Layout(config, dict(sizes), leaves)


def layout_state(params: Layout, state: Any) -> Layout:
    """Adds the leaves of an (abstract) optimizer state.

    A leaf whose path ends in a parameter's path and has its shape lies beside that parameter; so does one that stacks
    several of them (L-BFGS's memory), in its last dims; and one at no parameter's path (a state kept as a list) that
    has the shape of some, if these agree. Others (counts, factored moments) have no spec of the model's. The data axes
    then cut each by the same rule: what lies beside a parameter as if it had that one's dtype, so that float32 masters
    and moments are cut where their bfloat16 parameter is.
    """
    owners = {leaf.names: leaf for leaf in params.params}
    twins: dict[tuple[int, ...], set[Leaf]] = {}
    for leaf in params.params:
        twins.setdefault(leaf.shape, set()).add(leaf)
    leaves = []
    for names, leaf in named_leaves(state):
        alike = twins.get(tuple(leaf.shape), set()) if leaf.shape else set()
        agreed = len({(twin.cut, twin.home) for twin in alike}) == 1
        twin = min(alike, key=lambda leaf: leaf.names) if agreed else None
        leaves.append(_state_leaf(names, leaf, owner_of(names, owners) or twin, params))
    return dataclasses.replace(params, state=tuple(leaves))


def _state_leaf(names: Names, leaf: Any, owner: Leaf | None, params: Layout) -> Leaf:
    shape, spec, who, dtype = tuple(leaf.shape), P(), "", leaf.dtype
    extra_dims = len(shape) - len(owner.shape) if owner else 0
    if owner and shape == owner.shape:
        spec, who = owner.spec, f"like {owner.path}: "
    elif owner and owner.shape and shape[extra_dims:] == owner.shape:
        spec, who = canonical([None] * extra_dims + list(owner.spec)), f"a stack like {owner.path}: "
    elif owner and owner.shape:
        who = f"made from {owner.path}, of another shape: "
    if owner and owner.shape and shape[extra_dims:] == owner.shape and not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = owner.dtype
    found = dataclasses.replace(cut_leaf(names, shape, dtype, spec, params.sizes, params.config), dtype=leaf.dtype)
    if owner and shape == owner.shape and owner.home is not None and found.dims:
        reason = _in_words(owner.home_dims, len(shape))
        found = dataclasses.replace(found, cut=owner.home, dims=owner.home_dims, reason=reason)
    note = f"; {owner.at_home}" if owner and shape == owner.shape and owner.at_home else ""
    return dataclasses.replace(found, reason=who + found.reason + note)


def check_floating(params: Any) -> None:
    for names, leaf in named_leaves(params):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not hasattr(leaf, "shape"):
            raise TypeError(f"params: {path_of(names)} is a {type(leaf).__name__}; every leaf must be an array")
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"params: {path_of(names)} has dtype {dtype}, which has no gradient; keep it out of the params "
                "(pass it as a further argument of the loss), or cast it to a floating dtype"
            )


def warn_if_awkward(layout: Layout) -> None:
    """Warns of leaves too awkward to cut, where they hold more than 1% of a device's bytes."""
    if not layout.config.cuts.state:
        return
    num_shards = math.prod(layout.sizes[axis] for axis in layout.config.data_axes)
    held = {leaf: leaf.bytes(leaf.cut, layout.sizes) for leaf in layout.params}
    awkward = {leaf: num_bytes for leaf, num_bytes in held.items() if leaf.awkward}
    if sum(awkward.values()) <= 0.01 * sum(held.values()):
        return
    lost = {leaf: num_bytes - num_bytes * leaf.ways // num_shards for leaf, num_bytes in awkward.items()}
    named = "; ".join(f"{leaf.path}: {leaf.reason}, {num_bytes} bytes lost" for leaf, num_bytes in lost.items())
    warnings.warn(
        f"{layout.config.strategy}: {len(awkward)} leaves cannot be cut {num_shards} ways, which costs each device "
        f"{sum(lost.values())} bytes for each copy of them (params, grads, moments): {named}. Pad a dim to a multiple "
        f"of {num_shards}, or split the data axis in two (data_axes=('slice', 'data')) so that each cuts its own dim.",
        stacklevel=4,
    )
