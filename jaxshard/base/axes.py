"""Mesh axes as PartitionSpecs name them."""

import itertools
import math
from collections.abc import Iterable
from typing import TypeAlias

import jax
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import Names
from jaxshard.base.types import REPLICA_AXIS as REPLICA_AXIS
from jaxshard.base.types import AxisSizes, Tree

Entry: TypeAlias = str | tuple[str, ...] | None  # one entry of a PartitionSpec
Dims: TypeAlias = tuple[tuple[int, Names], ...]
"""How an array is cut: pairs (dim, axes). Dims count from the end (-1 is the last), so a stack's slices fit too."""


def axes_in(entry: Entry) -> Names:
    """The axes named by one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def canonical(entries: Iterable[Entry]) -> P:
    """The PartitionSpec of these entries without trailing Nones: JAX would recompile for P("data", None)."""
    spec = [axes[0] if len(axes) == 1 else axes or None for axes in map(axes_in, entries)]
    while spec and spec[-1] is None:
        spec.pop()
    return P(*spec)


def local_shape(shape: tuple[int, ...], spec: P, sizes: AxisSizes) -> tuple[int, ...]:
    """The shape of one device's shard of an array of `shape`, sharded by `spec` over axes of these sizes."""
    num_shards = [math.prod(sizes[axis] for axis in axes_in(entry)) for entry in spec]
    return tuple(size // n for size, n in itertools.zip_longest(shape, num_shards, fillvalue=1))


def axes_of_dims(dims: Dims) -> Names:
    """The axes that cut an array."""
    return tuple(axis for _, axes in dims for axis in axes)


def beyond(dims: Dims, first: Dims) -> Dims:
    """The cuts that remain to reach `dims` for an array already cut by `first`, whose axes come first in each dim."""
    done = dict(first)
    rest = ((dim, axes[len(done.get(dim, ())) :]) for dim, axes in dims)
    return tuple((dim, axes) for dim, axes in rest if axes)


def axes_of(specs: Tree) -> set[str]:
    """All axes named in a tree of PartitionSpecs, or in rules."""
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    return {axis for spec in leaves if isinstance(spec, P) for entry in spec for axis in axes_in(entry)}


def without(spec: P, axes: Names) -> P:
    """The PartitionSpec with these axes removed."""
    return canonical(tuple(axis for axis in axes_in(entry) if axis not in axes) for entry in spec)


def varying(x: Tree) -> frozenset[str]:
    """The mesh axes over which JAX's types say that `x` differs (always none under `check_vma=False`)."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)  # None: a mutable array
    return kind.varying if kind is not None else frozenset()
