"""Digests of arrays, computed where they lie: 32 bits that do not depend on device count, mesh or sharding.

Each element's bits are mixed with its place in the array, and the results are added up mod 2**32. At a given place the
mixing is one to one, so a change of any one element always changes the digest. A change of several elements goes
unseen with a chance of one in 2**32.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.axes import axes_in
from jaxshard.base.tree import is_key, named_leaves, unambiguous_path
from jaxshard.base.types import Tree

__all__ = ["ReplicaError", "digests", "replica_digests"]

_Leaf: TypeAlias = jax.Array | np.ndarray | np.generic | bool | int | float | complex


def digests(tree: Tree) -> dict[str, int]:
    """The digest of each leaf of a tree, computed where it lies.

    All processes must call it, with the same tree.

    Args:
      tree: arrays (of any sharding, typed PRNG keys too) and numbers.

    Returns:
      path -> 32 bits.

    Raises:
      ReplicaError: devices that should hold the same bits hold others.

    >>> import jax.numpy as jnp
    >>> digests({"w": jnp.arange(3.0)})
    {'w': 4237568830}
    """
    return named_digests(_named(tree))


def named_digests(leaves: Mapping[str, Any]) -> dict[str, int]:
    """As `digests`, of arrays that have names already."""
    found = _replica_digests(leaves)
    differ = {path: digest for path, digest in found.items() if len(np.unique(digest)) > 1}
    if differ:
        mesh = cast(Mesh, _mesh_of(_array(leaves[next(iter(differ))])))  # on one device there are no copies
        raise ReplicaError(differ, mesh.devices)
    return {path: int(digest.flat[0]) for path, digest in found.items()}


def replica_digests(tree: Tree) -> dict[str, np.ndarray]:
    """The digest of each copy of each leaf: of the copy that a device holds, or holds a part of.

    All processes must call it, with the same tree.

    Returns:
      path -> uint32 for each device of the leaf's mesh, in the mesh's shape; of shape () for a leaf on one device.

    >>> import jax.numpy as jnp
    >>> replica_digests({"w": jnp.arange(3.0)})["w"].shape
    ()
    """
    return _replica_digests(_named(tree))


def _named(tree: Tree) -> dict[str, Any]:
    return {unambiguous_path(names): leaf for names, leaf in named_leaves(tree)}


def _replica_digests(named: Mapping[str, Any]) -> dict[str, np.ndarray]:
    leaves = {path: _array(leaf) for path, leaf in named.items()}
    found: dict[str, np.ndarray] = {}
    for mesh in dict.fromkeys(_mesh_of(leaf) for leaf in leaves.values()):
        some = {path: leaf for path, leaf in leaves.items() if _mesh_of(leaf) == mesh}
        specs = tuple(leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else P() for leaf in some.values())
        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():  # whatever mesh the caller has set
            digests = jax.device_get(_on_mesh(tuple(some.values()), mesh, specs))
        shape = mesh.devices.shape if mesh else ()
        found |= {path: digest.reshape(shape) for path, digest in zip(some, digests, strict=True)}
    return {path: found[path] for path in leaves}


class ReplicaError(RuntimeError):
    """Copies of an array differ between devices.

    Attributes:
      digests: path -> uint32 for each device of the leaf's mesh, in the mesh's shape; only of leaves that differ.
    """

    def __init__(self, digests: dict[str, np.ndarray], devices: np.ndarray):
        self.digests = digests
        path, found = next(iter(digests.items()))
        values, counts = np.unique(found, return_counts=True)
        odd = devices[found != values[counts.argmax()]].ravel()
        more = f" and {odd.size - 4} more" if odd.size > 4 else ""
        named = ", ".join(f"{device.id} of process {device.process_index}" for device in odd[:4])
        others = f", and so do {len(digests) - 1} leaves more" if len(digests) > 1 else ""
        super().__init__(
            f"copies differ: {path} has other bits on device {named}{more} than on the rest{others}. Look for what "
            "made them differ; ShardedOptimizer.synchronize(tree) makes all copies as the first"
        )


def _array(leaf: _Leaf) -> jax.Array:
    """The leaf as an array in device memory; of typed PRNG keys their data."""
    x = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    x = jax.random.key_data(x) if is_key(x) else x
    if x.sharding.memory_kind == "pinned_host":  # offloaded: devices compute on their own memory only
        return jax.device_put(x, x.sharding.with_memory_kind("device"))
    return x


def _mesh_of(leaf: jax.Array) -> Mesh | None:
    """The mesh that an array lies on; None: it is on one device."""
    return cast(Mesh, leaf.sharding.mesh) if isinstance(leaf.sharding, NamedSharding) else None


@functools.partial(jax.jit, static_argnums=(1, 2))
def _on_mesh(leaves: Sequence[jax.Array], mesh: Mesh | None, specs: Sequence[P]) -> list[jax.Array]:
    """Digests of all leaves in one program with one exchange: for each leaf uint32 of shape (devices of the mesh,)."""
    if mesh is None:
        return [_sum_of(x, [0] * x.ndim) for x in leaves]

    def of_shards(leaves):
        sums = jnp.stack([_of_shard(x, spec) for x, spec in zip(leaves, specs, strict=True)])
        return lax.all_gather(sums, mesh.axis_names)

    # check_vma=False: each device's own result is wanted, also where the types say that all are equal.
    run = jax.shard_map(of_shards, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
    return list(run(tuple(leaves)).T)


def _of_shard(x: jax.Array, spec: P) -> jax.Array:
    """The digest of the copy of `x` that this device holds, or holds a part of."""
    cut = [axes_in(entry) for entry in (*spec, *(None,) * (x.ndim - len(spec)))]
    starts = [lax.axis_index(entry) * size if entry else 0 for entry, size in zip(cut, x.shape, strict=True)]
    axes = tuple(axis for entry in cut for axis in entry)
    return lax.psum(_sum_of(x, starts), axes) if axes else _sum_of(x, starts)


def _sum_of(x: jax.Array, starts: Sequence[Any]) -> jax.Array:
    """The sum over a part of an array; `starts`: the index of its first element in the whole array."""
    place = jnp.zeros(x.shape, jnp.uint32)
    for dim, start in enumerate(starts):
        here = lax.broadcasted_iota(jnp.uint32, x.shape, dim) + jnp.uint32(start)
        place = _mixed(place * jnp.uint32(31) + here + jnp.uint32(1))
    total = jnp.uint32(0)
    for word, bits in enumerate(_words(x)):
        total += _total(_mixed(bits ^ (place + jnp.uint32(word))))
    return total


def _total(x: jax.Array) -> jax.Array:
    """The sum mod 2**32, whose order does not matter. First eight by eight, in a step that XLA may not merge with the
    next: on CPUs that takes a fifth of the time."""
    dim = next((dim for dim in reversed(range(x.ndim - 1)) if x.shape[dim] % 8 == 0), None)
    if dim is not None and x.size:
        eights = x.reshape(*x.shape[:dim], x.shape[dim] // 8, 8, *x.shape[dim + 1 :])
        x = lax.optimization_barrier(jnp.sum(eights, axis=dim + 1, dtype=jnp.uint32))
    return jnp.sum(x, dtype=jnp.uint32)


def _words(x: jax.Array) -> list[jax.Array]:
    """The bits of the elements as arrays of uint32, one for each 32 bits that an element has."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(x.real), *_words(x.imag)]
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 4:
        return [x.astype(jnp.uint32)]
    if x.dtype.itemsize > 4:
        both = lax.bitcast_convert_type(x, jnp.uint32)
        return [both[..., 0], both[..., 1]]
    return [lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)]


def _mixed(x: jax.Array) -> jax.Array:
    """Maps 32 bits one to one, so that each bit of the input changes each of the output with a chance of a half
    (the last steps of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
