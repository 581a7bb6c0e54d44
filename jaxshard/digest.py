"""Digests of arrays, computed on their devices: 32 bits that do not depend on device count, mesh or sharding.

Each element's bits are mixed with its index in the array, and the results are summed mod 2**32. At a given index the
mixing is a bijection, so a change of any one element always changes the digest. A change of several elements goes
unnoticed with probability 2**-32.
"""

import contextlib
import functools
import math
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.mixed_bits import sum_and_level
from jaxshard.base.tree import is_key, named_leaves, unambiguous_path
from jaxshard.base.types import Tree, axes_in

__all__ = ["ReplicaError", "digests", "replica_digests"]

_SMALL_BYTES = 2**14  # of a leaf's shard on one device
_SMALL_AT_ONCE, _LARGE_AT_ONCE = 32, 8  # leaves in one program

Fault: TypeAlias = Literal["inf", "nan"]
_FAULTS: tuple[Fault, ...] = ("inf", "nan")  # for levels 1 and 2

_Leaf: TypeAlias = jax.Array | np.ndarray | np.generic | bool | int | float | complex


@contextlib.contextmanager
def unwatched() -> Generator[None]:
    """Allows transfers, and NaNs in arrays, whatever the user has set. Also a decorator."""
    with jax.transfer_guard("allow"), jax.debug_nans(False), jax.debug_infs(False):
        yield


@unwatched()
def digests(tree: Tree) -> dict[str, int]:
    """The digest of each leaf of a tree, computed on its devices.

    All processes must call it, with the same tree.

    Args:
      tree: arrays (of any sharding; typed PRNG keys, too) and numbers.

    Returns:
      path -> 32 bits.

    Raises:
      ReplicaError: devices that should hold the same bits do not.

    >>> import jax.numpy as jnp
    >>> digests({"w": jnp.arange(3.0)})
    {'w': 4237568830}
    """
    return named_digests(_named(tree))


def named_digests(leaves: Mapping[str, Any]) -> dict[str, int]:
    """As `digests`, for arrays that already have names."""
    return digests_and_faults(leaves)[0]


def digests_and_faults(leaves: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, Fault]]:
    """(name -> digest; name -> "nan" or "inf", for leaves that are not finite: "nan" if they have one).

    Raises:
      ReplicaError: as `digests`.
    """
    found, faults = _replica_digests(leaves)
    differ = {path: digest for path, digest in found.items() if len(np.unique(digest)) > 1}
    if differ:
        mesh = cast(Mesh, _mesh_of(_array(leaves[next(iter(differ))])))  # not None: on one device no copies can differ
        raise ReplicaError(differ, mesh.devices)
    return {path: int(digest.flat[0]) for path, digest in found.items()}, faults


@unwatched()
def replica_digests(tree: Tree) -> dict[str, np.ndarray]:
    """The digests of all copies of each leaf: for each device, of the copy that it holds a shard of.

    All processes must call it, with the same tree.

    Returns:
      path -> uint32 per device of the leaf's mesh, in the mesh's shape; of shape () for a leaf on one device.

    >>> import jax.numpy as jnp
    >>> replica_digests({"w": jnp.arange(3.0)})["w"].shape
    ()
    """
    return _replica_digests(_named(tree))[0]


def _named(tree: Tree) -> dict[str, Any]:
    return {unambiguous_path(names): leaf for names, leaf in named_leaves(tree)}


def _replica_digests(named: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Fault]]:
    """Runs one small program per kind of leaf, several times, and one exchange per mesh, so that compilation does not
    grow with the number of leaves."""
    parts, found = dict[Mesh | None, dict[tuple[str, ...], jax.Array]](), dict[str, np.ndarray]()
    faults = dict[str, Fault]()
    for paths in _groups(named):
        arrays = [_array(named[path]) for path in paths]
        mesh = _mesh_of(arrays[0])
        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():  # replaces any mesh of the caller
            parts.setdefault(mesh, {})[paths] = _parts(arrays, mesh, _spec_of(arrays[0]))
    for mesh, some in parts.items():
        for paths, columns in zip(some, _fetched(list(some.values()), mesh), strict=True):
            sums, levels = np.split(columns, 2)
            found |= {path: _of_copies(sums[i], mesh, _spec_of(named[path])) for i, path in enumerate(paths)}
            levels = levels.reshape(len(paths), -1).max(axis=1)
            faults |= {paths[i]: _FAULTS[levels[i] - 1] for i in np.flatnonzero(levels)}
    return {path: found[path] for path in named}, {path: faults[path] for path in named if path in faults}


def _groups(named: Mapping[str, _Leaf]) -> Iterator[tuple[str, ...]]:
    """The paths in groups for one program: of one shape, dtype and sharding.

    A group has 32 small leaves, padded with copies of the last one, so all groups share one program. Of larger leaves
    it has 8, 4, 2 or 1: four programs, without padding.
    """
    kinds = dict[Hashable, list[str]]()
    for path, x in named.items():
        kind = np.shape(x), getattr(x, "dtype", type(x)), getattr(x, "sharding", None)
        kinds.setdefault(kind, []).append(path)
    for left in kinds.values():
        stacked = len(left) > 1 and _is_small(named[left[0]])
        while stacked and left:
            group, left = left[:_SMALL_AT_ONCE], left[_SMALL_AT_ONCE:]
            yield (*group, *[group[-1]] * (_SMALL_AT_ONCE - len(group)))
        while left:
            count = min(_LARGE_AT_ONCE, 2 ** (len(left).bit_length() - 1))
            yield tuple(left[:count])
            left = left[count:]


def _is_small(leaf: _Leaf) -> bool:
    """Whether each device holds few bytes of a leaf: stacking such leaves is faster than compiling a sum for each."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf).nbytes <= _SMALL_BYTES
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize <= _SMALL_BYTES


def _fetched(parts: Sequence[jax.Array], mesh: Mesh | None) -> list[np.ndarray]:
    """The result of each device of the mesh, on the host; those of other processes come by one all-gather."""
    if mesh is None or parts[0].is_fully_addressable:
        return jax.device_get(parts)
    here = [np.concatenate(rows) for rows in zip(*(_of_devices_here(x) for x in parts), strict=True)]
    columns = [jax.device_put(rows, device) for rows, device in zip(here, mesh.local_devices, strict=True)]
    whole = (sum(map(len, parts)), mesh.size)
    cut = jax.make_array_from_single_device_arrays(whole, NamedSharding(mesh, P(None, mesh.axis_names)), columns)
    with jax.set_mesh(mesh):
        found = jax.device_get(_exchanged(cut, mesh))
    return np.split(found, np.cumsum([len(x) for x in parts])[:-1])


def _of_devices_here(x: jax.Array) -> list[np.ndarray]:
    """The shards of an array on this process's devices, in the order of `mesh.local_devices`."""
    found = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    mesh = _mesh_of(x)
    assert mesh is not None
    return [found[device] for device in mesh.local_devices]


def _of_copies(parts: np.ndarray, mesh: Mesh | None, spec: P) -> np.ndarray:
    """For each device, the digest of the copy that it holds a shard of: the sum over the copy's shards."""
    if mesh is None:
        return parts
    grid = parts.reshape(mesh.devices.shape)
    cut = tuple(mesh.axis_names.index(axis) for entry in spec for axis in axes_in(entry))
    return np.broadcast_to(grid.sum(axis=cut, keepdims=True, dtype=np.uint32), grid.shape)


class ReplicaError(RuntimeError):
    """Copies of an array differ between devices.

    Attributes:
      digests: path -> uint32 per device of the leaf's mesh, in the mesh's shape; only for leaves that differ.
    """

    def __init__(self, digests: dict[str, np.ndarray], devices: np.ndarray):
        self.digests = digests
        path, found = next(iter(digests.items()))
        values, counts = np.unique(found, return_counts=True)
        odd = devices[found != values[counts.argmax()]].ravel()
        more = f" and {odd.size - 4} more" if odd.size > 4 else ""
        named = ", ".join(f"{device.id} of process {device.process_index}" for device in odd[:4])
        others = f", and so do {len(digests) - 1} more leaves" if len(digests) > 1 else ""
        super().__init__(
            f"replicas differ: {path} has different bits on device {named}{more} than on the rest{others}. Find the "
            "cause; ShardedOptimizer.synchronize(tree) sets all replicas to the first"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which would give `__init__` the message alone."""
        return BaseException.__new__, (type(self), *self.args), self.__dict__


def _array(leaf: _Leaf) -> jax.Array:
    """The leaf as an array in device memory; for typed PRNG keys, their data."""
    x = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    x = jax.random.key_data(x) if is_key(x) else x
    if x.sharding.memory_kind == "pinned_host":  # offloaded: devices compute on their own memory only
        return jax.device_put(x, x.sharding.with_memory_kind("device"))
    return x


def _mesh_of(leaf: jax.Array) -> Mesh | None:
    """The mesh of an array; None if it is on one device."""
    return cast(Mesh, leaf.sharding.mesh) if isinstance(leaf.sharding, NamedSharding) else None


def _spec_of(leaf: _Leaf) -> P:
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    return sharding.spec if isinstance(sharding, NamedSharding) else P()


@functools.partial(jax.jit, static_argnums=(1, 2))
def _parts(leaves: Sequence[jax.Array], mesh: Mesh | None, spec: P) -> jax.Array:
    """Each device's sums, then levels, of its shards of leaves: uint32 of shape (2 * leaves, devices of the mesh), each
    column on its device; of shape (2 * leaves,) without a mesh."""
    if mesh is None:
        return _sums_of(leaves, [0] * leaves[0].ndim)
    columns = P(None, mesh.axis_names)
    if leaves[0].size == 0:  # XLA cannot compile a shard_map that uses nothing of its operands
        zeros = jnp.zeros((2 * len(leaves), mesh.size), jnp.uint32)
        return jax.device_put(zeros, NamedSharding(mesh, columns))

    def of_parts(leaves: Sequence[jax.Array]) -> jax.Array:
        shape = leaves[0].shape
        cut = [axes_in(entry) for entry in (*spec, *(None,) * (len(shape) - len(spec)))]
        starts = [lax.axis_index(entry) * size if entry else 0 for entry, size in zip(cut, shape, strict=True)]
        return _sums_of(leaves, starts)[:, None]

    specs = ([spec] * len(leaves),)
    # check_vma=False: we need each device's own result, even if types say that all are equal.
    run = jax.shard_map(of_parts, mesh=mesh, in_specs=specs, out_specs=columns, check_vma=False)
    return run(list(leaves))


def _sums_of(leaves: Sequence[jax.Array], starts: Sequence[Any]) -> jax.Array:
    """The sum over each shard, then the level of each; many small ones are stacked first."""
    if len(leaves) == _SMALL_AT_ONCE:
        return jnp.concatenate(jax.vmap(lambda x: sum_and_level(x, starts))(jnp.stack(leaves)))
    return jnp.stack(
        [each for column in zip(*(sum_and_level(x, starts) for x in leaves), strict=True) for each in column]
    )


@functools.partial(jax.jit, static_argnums=1)
def _exchanged(cut: jax.Array, mesh: Mesh) -> jax.Array:
    """Replicates a matrix whose columns lie on one device each."""

    def gathered(column: jax.Array) -> jax.Array:
        return lax.all_gather(column, mesh.axis_names, axis=1, tiled=True)

    specs = P(None, mesh.axis_names)
    return jax.shard_map(gathered, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(cut)
