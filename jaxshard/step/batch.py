"""Reads users' arrays: a batch's rows, and the PartitionSpecs that params already have."""

import math

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import is_key, is_traced, named_leaves, path_of
from jaxshard.base.types import REPLICA_AXIS, Batch, Tree, axes_in, canonical
from jaxshard.optimizer.optimizer import ShardedOptimizer, setup_of
from jaxshard.optimizer.sharding import Setup


def specs_of(params: Tree, data_axes: tuple[str, ...] = ("data",)) -> Tree:
    """The PartitionSpecs that arrays have now, without the data axes and "replica"; pass them as `specs=`.

    Args:
      params: arrays; those without a mesh (NumPy, one device) get `PartitionSpec()`.
      data_axes: the axes to leave out.

    Returns:
      A tree like `params`, of PartitionSpecs.

    >>> specs_of({"w": np.ones((4, 4))})
    {'w': P()}
    """
    return jax.tree.map(lambda x: _model_spec(x, (*data_axes, REPLICA_AXIS)), params)


def _model_spec(x: Tree, left_out: tuple[str, ...]) -> P:
    sharding = jax.typeof(x).sharding if is_traced(x) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return P()
    return canonical(tuple(a for a in axes_in(e) if a not in left_out) for e in sharding.spec)


def shard_batch(batch: Batch, opt: ShardedOptimizer) -> Batch:
    """Makes global arrays, split over the optimizer's batch axes, from this process's rows.

    Args:
      batch: a pytree of arrays (rows of this process, ...); with one process in the mesh, the full batch.
      opt: the optimizer, which has the mesh and its batch axes.

    Returns:
      Arrays of (rows of all processes, ...), each device holding its own rows.

    Raises:
      TypeError: the batch is traced, as in a function under `jit`.
      ValueError: a leaf's rows do not divide over the devices; the message names the leaf.
    """
    setup = setup_of(opt, "shard_batch", batch)
    if is_traced(batch):
        raise TypeError(
            "shard_batch: the batch is traced, so this call is inside jit, grad or another transformation, and has no "
            "arrays to distribute. Call it before, on the rows that this process loaded; for a value inside the "
            "program use jax.lax.with_sharding_constraint"
        )
    count = len(setup.processes)
    for names, leaf in named_leaves(batch):
        rows = np.shape(leaf)[:1]
        if not rows or (rows[0] * count) % setup.num_batch_shards:
            raise ValueError(f"shard_batch: {path_of(names)} has shape {np.shape(leaf)}; {_needed(setup, rows, count)}")
    sharding = NamedSharding(setup.mesh, P(setup.batch_axes))
    return jax.tree.map(lambda x: _from_local(x, sharding), batch)


def _from_local(x: Tree, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and is_key(x):
        data = _from_local(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.make_array_from_process_local_data(sharding, np.array(x))  # a copy, since loaders reuse their buffers


def _needed(setup: Setup, rows: tuple[int, ...], processes: int) -> str:
    """The requirement for the first dim, and the nearest right numbers of rows."""
    axes = " x ".join(axis for axis in setup.batch_axes if setup.sizes[axis] > 1) or setup.batch_axes[0]
    of_each = f" of each of {processes} processes" if processes > 1 else ""
    unit = setup.num_batch_shards // math.gcd(setup.num_batch_shards, processes)
    text = f"its first dim{of_each} must be divisible by {unit} ({setup.num_batch_shards} devices over {axes})"
    if not rows:
        return f"{text}: give arrays of (rows, ...)"
    lower = rows[0] // unit * unit
    some = f"{lower} rows or {lower + unit}" if lower else f"{unit} rows"
    return f"{text}: give {some}; or pad with rows whose weight is 0 (weighted=True)"
