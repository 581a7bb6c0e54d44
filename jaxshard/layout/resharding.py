"""`reshard`: moves a tree of arrays to other shardings, also those of another mesh, a chunk at a time."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import check_alive, is_key, is_traced, named_leaves, path_of
from jaxshard.base.types import T, Tree, is_whole, itemsize_of
from jaxshard.system.text import size_in_words

CHUNK_BYTES = 2**28
Device: TypeAlias = Any
Region: TypeAlias = tuple[tuple[int, int], ...]  # of an array: for each dim, (start, end)


def reshard(tree: T, shardings: Tree, *, dtype: Any = None, chunk_bytes: int = CHUNK_BYTES) -> T:
    """Copies a tree of arrays to other shardings: from training to evaluation or rollout, from one mesh to another.

    Arrays are cast before they move, so that a narrower dtype sends fewer bytes. They move one after another, and those
    larger than `chunk_bytes` in pieces: beside the tree and the result, no device holds more than `chunk_bytes` (per
    array of typed keys or of several processes: that array). `plan.resharding` predicts the bytes.

    Args:
      tree: arrays, of any sharding, and NumPy arrays. They stay as they are.
      shardings: a `jax.sharding.Sharding`, or a tree (or prefix) of them: `opt.shardings(params).params`,
        `NamedSharding(mesh, P("tensor"))`.
      dtype: the dtype of floating leaves in the result; None: their own.
      chunk_bytes: the most bytes in flight.

    Returns:
      The same tree, its leaves new arrays with these shardings.

    Raises:
      TypeError: `shardings` has something else than shardings; `dtype` is not floating; the tree is traced.
      ValueError: a sharding does not fit its leaf; an array was donated; `shardings` is no prefix of the tree;
        `chunk_bytes` is not positive; arrays would move between the meshes of different processes.

    >>> import jaxshard
    >>> mesh = jaxshard.make_mesh(devices=jax.devices()[:4])
    >>> moved = jaxshard.reshard({"w": np.ones((8, 2))}, NamedSharding(mesh, P("data")), dtype="bfloat16")
    >>> moved["w"].sharding.spec[0], str(moved["w"].dtype)
    ('data', 'bfloat16')
    """
    if is_traced(tree):
        raise TypeError("reshard: the tree is traced; inside jit use jax.lax.with_sharding_constraint")
    moves = moves_of(tree, shardings, dtype, chunk_bytes)
    check_alive("reshard", tree)
    found: list[Any] = []
    for group in _groups(moves, chunk_bytes):
        if len(group) == 1 and group[0].num_bytes > chunk_bytes and group[0].is_local:
            found.append(_in_pieces(group[0], chunk_bytes))
        else:
            casts = [move.x if move.x.dtype == move.dtype else _as_dtype(move.x, move.dtype) for move in group]
            put = jax.device_put(casts, [move.sharding for move in group], may_alias=False)
            found += jax.block_until_ready(put)
    return jax.tree.unflatten(jax.tree.structure(tree), found)


@dataclasses.dataclass(frozen=True)
class Move:
    """One array and where it goes: its path, the dtype in which it moves, and the sharding of the result."""

    path: str
    x: Any
    dtype: np.dtype
    sharding: Sharding

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole array, in the wider of its two dtypes."""
        return math.prod(self.x.shape) * max(itemsize_of(self.x.dtype), itemsize_of(self.dtype))

    @property
    def is_local(self) -> bool:
        """Whether it can be sliced, and all its devices, before and after, are this process's."""
        before = getattr(self.x, "sharding", None)
        devices = self.sharding.device_set | (before.device_set if before is not None else set())
        here = all(device.process_index == jax.process_index() for device in devices)
        return here and not is_key(self.x) and bool(self.x.shape)

    def regions(self) -> dict[Region, list[Device]]:
        """The regions into which the result is sharded, each with the devices that hold it."""
        return regions_of(self.sharding, self.x.shape)


def regions_of(sharding: Sharding, shape: Sequence[int]) -> dict[Region, list[Device]]:
    """The regions into which an array of this shape is sharded, each with the devices that hold it."""
    found: dict[Region, list[Device]] = {}
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        region = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        found.setdefault(region, []).append(device)
    return found


def moves_of(tree: Tree, shardings: Tree, dtype: Any, chunk_bytes: int = CHUNK_BYTES) -> list[Move]:
    """The moves of a tree of arrays or shapes, checked; raises as `reshard`."""
    if not is_whole(chunk_bytes, 1):
        raise ValueError(f"reshard: chunk_bytes={chunk_bytes!r} must be a positive integer, such as 2**28")
    wanted = None if dtype is None else jnp.dtype(dtype)
    if wanted is not None and not jnp.issubdtype(wanted, jnp.floating):
        raise TypeError(f"reshard: dtype={wanted.name} is not floating; give float32, bfloat16 or float16, or None")
    for names, one in named_leaves(shardings):
        if not isinstance(one, Sharding):
            raise TypeError(
                f"reshard: shardings has a {type(one).__name__} at {path_of(names)}; give jax.sharding.Sharding, such "
                "as NamedSharding(mesh, PartitionSpec('data'))"
            )
    try:
        each = jax.tree.broadcast(shardings, tree)
    except ValueError as error:
        raise ValueError(f"reshard: shardings is not a prefix of the tree: {error}") from None
    pairs = zip(named_leaves(tree), jax.tree.leaves(each), strict=True)
    return [_move(path_of(names), leaf, sharding, wanted) for (names, leaf), sharding in pairs]


def _move(path: str, leaf: Any, sharding: Sharding, dtype: np.dtype | None) -> Move:
    x = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)
    is_cast = dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
    try:
        sharding.shard_shape(tuple(x.shape))
    except ValueError as error:
        raise ValueError(
            f"reshard: {path} has shape {tuple(x.shape)}, which {sharding} does not fit: {error}"
        ) from None
    before = getattr(x, "sharding", None)
    if before is not None and before.device_set != sharding.device_set:
        processes = sorted({d.process_index for d in before.device_set | sharding.device_set})
        if len(processes) > 1:
            raise ValueError(
                f"reshard: {path} would move to other devices, of the processes {processes}; JAX moves arrays of "
                "several processes only between shardings of the same devices. Save a checkpoint, and restore it with "
                "the other shardings"
            )
    return Move(path, x, jnp.dtype(dtype) if is_cast else x.dtype, sharding)


def _groups(moves: Sequence[Move], chunk_bytes: int) -> Iterator[list[Move]]:
    """Moves that go together: each a chunk at most, or one array."""
    group, total = list[Move](), 0
    for move in moves:
        if group and total + move.num_bytes > chunk_bytes:
            yield group
            group, total = [], 0
        group.append(move)
        total += move.num_bytes
    if group:
        yield group


def _as_dtype(x: Any, dtype: np.dtype) -> Any:
    """An array in another dtype, where it is."""
    return _casting(dtype, x.sharding)(x) if isinstance(x, jax.Array) else x.astype(dtype)


@functools.lru_cache
def _casting(dtype: np.dtype, sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    """Casts arrays with this sharding; one function, so that arrays of one shape share a program."""
    return jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)


def _in_pieces(move: Move, chunk_bytes: int) -> jax.Array:
    """Moves a large array region by region, in pieces of at most half a chunk, without collectives.

    A piece is sliced and cast on one device that holds it, copied to the devices of the region, and written into it.
    """
    shards: dict[Device, jax.Array] = {}
    most = max(1, chunk_bytes // 2 // max(itemsize_of(move.x.dtype), itemsize_of(move.dtype)))
    sources = _sources(move.x)
    for region, devices in move.regions().items():
        made = _region(move, region, devices, sources, most)
        shards |= {shard.device: shard.data for shard in made.addressable_shards}
    order = move.sharding.addressable_devices_indices_map(tuple(move.x.shape))
    arrays = [shards[device] for device in order]
    return jax.make_array_from_single_device_arrays(tuple(move.x.shape), move.sharding, arrays)


def _sources(x: Any) -> dict[Region, dict[Device | None, Any]]:
    """The regions of an array, each with the parts that hold it, by device (None: NumPy's memory)."""
    if not isinstance(x, jax.Array):
        return {tuple((0, size) for size in x.shape): {None: x}}
    parts = {shard.device: shard.data for shard in x.addressable_shards}
    return {region: {d: parts[d] for d in devices} for region, devices in regions_of(x.sharding, x.shape).items()}


def _region(
    move: Move,
    region: Region,
    devices: Sequence[Device],
    sources: dict[Region, dict[Device | None, Any]],
    most: int,
) -> jax.Array:
    """One region of the result, on its devices."""
    everywhere = NamedSharding(Mesh(np.asarray(devices), ("copies",)), P())
    shape = tuple(end - start for start, end in region)
    made = jnp.zeros(shape, move.dtype, device=everywhere)
    for source, holders in sources.items():
        overlap = _overlap(source, region)
        if not _volume(overlap):
            continue
        nearest = next((d for d in devices if d in holders), None)
        part = holders[nearest] if nearest in holders else next(iter(holders.values()))
        for piece in _pieces(overlap, most):
            moved = jax.device_put(_sliced(part, piece, source, move.dtype), everywhere)
            made = jax.block_until_ready(_written(made, moved, _offsets(piece, region)))
    return made


@functools.partial(jax.jit, donate_argnums=0)
def _written(whole: jax.Array, piece: jax.Array, start: list[np.int32]) -> jax.Array:
    return lax.dynamic_update_slice(whole, piece, start)


def _sliced(part: Any, piece: Region, source: Region, dtype: np.dtype) -> Any:
    """A piece of the array, of the part that holds the region `source`."""
    sizes, start = tuple(end - start for start, end in piece), _offsets(piece, source)
    if not isinstance(part, jax.Array):
        return part[tuple(slice(a, a + size) for a, size in zip(start, sizes, strict=True))].astype(dtype)
    return _slice(part, start, sizes, dtype)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _slice(x: jax.Array, start: list[np.int32], sizes: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    return lax.dynamic_slice(x, start, sizes).astype(dtype)


def _offsets(piece: Region, region: Region) -> list[np.int32]:
    """Where a piece begins within a region."""
    return [np.int32(a - b) for (a, _), (b, _) in zip(piece, region, strict=True)]


def _pieces(region: Region, most: int) -> Iterator[Region]:
    """The parts of a region of at most `most` elements: whole along the last dims, cut along the first."""
    sizes = [end - start for start, end in region]
    if math.prod(sizes) <= most:
        yield region
        return
    dim = next(d for d, size in enumerate(sizes) if size > 1)
    rows = max(1, most // math.prod(sizes[dim + 1 :]))
    start, end = region[dim]
    for a in range(start, end, rows):
        yield from _pieces((*region[:dim], (a, min(a + rows, end)), *region[dim + 1 :]), most)


# Foretold.


@dataclasses.dataclass(frozen=True)
class Resharding:
    """What `reshard` moves.

    Attributes:
      result_bytes: of the result, on the device that holds the most of it.
      received: device id -> the bytes that it gets from other devices or the host, in the dtype of the result.
      beside: the most bytes on a device beside the tree and the result.
    """

    result_bytes: int
    received: dict[int, int]
    beside: int

    @property
    def moved_bytes(self) -> int:
        """The bytes that all devices get."""
        return sum(self.received.values())

    def __str__(self) -> str:
        most = max(self.received.values(), default=0)
        return (
            f"{size_in_words(self.moved_bytes)} move, at most {size_in_words(most)} to one device; the result takes "
            f"{size_in_words(self.result_bytes)} of a device, and moving at most {size_in_words(self.beside)} more"
        )


def resharding(tree: Tree, shardings: Tree, *, dtype: Any = None, chunk_bytes: int = CHUNK_BYTES) -> Resharding:
    """Predicts what `jaxshard.reshard` moves with these arguments; moves nothing.

    A region that a device already holds does not move to it. Shapes (`ShapeDtypeStruct`) with shardings will do.

    Raises:
      TypeError, ValueError: as `reshard`.
    """
    moves = moves_of(tree, shardings, dtype, chunk_bytes)
    received: dict[int, int] = {}
    result: dict[int, int] = {}
    for move in moves:
        before = getattr(move.x, "sharding", None)
        has = dict[Device, Region]()
        if before is not None:
            has = {d: region for region, ds in regions_of(before, move.x.shape).items() for d in ds}
        for region, devices in move.regions().items():
            for device in devices:
                size = _volume(region) - (_volume(_overlap(region, has[device])) if device in has else 0)
                received[device.id] = received.get(device.id, 0) + size * itemsize_of(move.dtype)
                result[device.id] = result.get(device.id, 0) + _volume(region) * itemsize_of(move.dtype)
    beside = max((min(move.num_bytes, chunk_bytes) if move.is_local else move.num_bytes for move in moves), default=0)
    total = sum(move.num_bytes for move in moves)
    return Resharding(max(result.values(), default=0), received, max(beside, min(chunk_bytes, total)))


def _overlap(one: Region, two: Region) -> Region:
    pairs = zip(one, two, strict=True)
    return tuple((max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in pairs)


def _volume(region: Region) -> int:
    return math.prod(end - start for start, end in region)
