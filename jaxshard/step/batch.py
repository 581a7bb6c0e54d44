"""Reads users' arrays: a batch's rows, and the PartitionSpecs that params already have."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import is_key, is_traced, path_of
from jaxshard.base.types import REPLICA_AXIS, AnyMesh, Batch, Names, Tree, axes_in, canonical, num_along, processes_of
from jaxshard.layout.specs import BatchCut
from jaxshard.optimizer.optimizer import ShardedOptimizer, setup_of


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


def shard_batch(batch: Batch, opt: ShardedOptimizer, specs: Tree = None) -> Batch:
    """Makes global arrays, split over the optimizer's batch axes, from this process's rows.

    Args:
      batch: a pytree of arrays (rows of this process, ...); with one process in the mesh, the full batch.
      opt: the optimizer, which has the mesh and its batch axes.
      specs: how the batch is cut, if not by rows alone; the `batch_specs` of `train_step`, such as
        `P("data", "context")`. A process gives the part that its devices hold of each dim.

    Returns:
      Arrays of (rows of all processes, ...), each device holding its own rows, or its own part by `specs`.

    Raises:
      TypeError: the batch is traced, as in a function under `jit`; or a leaf of the specs is not a PartitionSpec.
      ValueError: a leaf's dim does not divide over the devices (the message names the leaf); or the specs name other
        axes than the batch axes, or not all of them.
    """
    setup = setup_of(opt, "shard_batch", batch)
    if is_traced(batch):
        raise TypeError(
            "shard_batch: the batch is traced, so this call is inside jit, grad or another transformation, and has no "
            "arrays to distribute. Call it before, on the rows that this process loaded; for a value inside the "
            "program use jax.lax.with_sharding_constraint"
        )
    cut = BatchCut("shard_batch: specs", specs, setup.mesh, setup.batch_axes)
    for names, leaf, spec in cut.named(batch):
        for dim, entry in enumerate(spec):
            sizes, parts = np.shape(leaf)[dim : dim + 1], _parts_here(setup.mesh, axes_in(entry))
            if not sizes or sizes[0] % parts:
                needed = _needed(setup.mesh, dim, sizes, axes_in(entry), parts)
                raise ValueError(f"shard_batch: {path_of(names)} has shape {np.shape(leaf)}; {needed}")
    return jax.tree.map(_from_local, batch, cut.shardings(batch))


def _from_local(x: Tree, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and is_key(x):
        data = _from_local(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.make_array_from_process_local_data(sharding, np.array(x))  # a copy, since loaders reuse their buffers


@functools.lru_cache
def _parts_here(mesh: AnyMesh, axes: Names) -> int:
    """The number of parts, along a dim that these axes cut, that this process's devices hold."""
    if len(processes_of(mesh)) == 1 or not isinstance(mesh, Mesh):
        return num_along(axes, mesh.shape)
    mine = jax.process_index()
    places = np.argwhere(np.vectorize(lambda device: device.process_index == mine, otypes=[bool])(mesh.devices))
    return len({tuple(place[mesh.axis_names.index(axis)] for axis in axes) for place in places}) or 1


def _needed(mesh: AnyMesh, dim: int, sizes: tuple[int, ...], axes: Names, unit: int) -> str:
    """The requirement for a dim that these axes cut, and the nearest right numbers of rows."""
    cut_by = " x ".join(axis for axis in axes if mesh.shape[axis] > 1) or axes[0]
    processes, num = len(processes_of(mesh)), num_along(axes, mesh.shape)
    of_each = f" of each of {processes} processes" if processes > 1 else ""
    what = f"dim {dim}" if dim else "first dim"
    text = f"its {what}{of_each} must be divisible by {unit} ({num} devices over {cut_by})"
    if not sizes:
        return f"{text}: give arrays of (rows, ...)"
    if dim:
        return f"{text}: pad it to {-(-sizes[0] // unit) * unit}, with a weight of 0 (weighted=True)"
    lower = sizes[0] // unit * unit
    some = f"{lower} rows or {lower + unit}" if lower else f"{unit} rows"
    return f"{text}: give {some}; or pad with rows whose weight is 0 (weighted=True)"
