"""Serializes a small tree, held by one process, to one byte string."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.base.types import T, Tree
from jaxshard.checkpoint.storage import leaves
from jaxshard.checkpoint.storage.errors import CorruptCheckpointError, NewerFormatError, first_line, not_installed
from jaxshard.checkpoint.storage.leaves import Entry, Index, Leaf
from jaxshard.checkpoint.storage.manifest import DIGEST_BYTES, FORMAT, check_entries, check_format, digest_of, index_of
from jaxshard.checkpoint.template import check_fits, unflatten
from jaxshard.digest import named_digests, unwatched

try:
    from flax import serialization
except ModuleNotFoundError as error:
    raise not_installed(error) from error


@unwatched()
def to_bytes(tree: Tree) -> bytes:
    """Serializes a tree of arrays and numbers, with their digests, to one byte string (msgpack, by flax).

    The full tree passes through this process's memory. For a large tree, or several processes, use a `Checkpointer`.

    Raises:
      ValueError: two leaves have the same path, or part of an array is on other processes.
      TypeError: a leaf is neither an array nor a number.

    >>> import jax.numpy as jnp
    >>> from_bytes({"w": jnp.zeros(3)}, to_bytes({"w": jnp.arange(3.0)}))
    {'w': Array([0., 1., 2.], dtype=float32)}
    """
    found = leaves.flatten(tree)
    for path, x in found.arrays().items():
        if not leaves.is_local(x):
            raise ValueError(f"to_bytes: {path} is also on devices of other processes; save it with a Checkpointer")
    raw = {path: _raw(jax.device_get(x)) for path, x in found.arrays().items()}
    data = serialization.msgpack_serialize({"format": FORMAT, "leaves": index_of(found)[0], "arrays": raw})
    return digest_of(data) + data


@unwatched()
def from_bytes(template: T, data: bytes, *, cast: bool = False) -> T:
    """Restores the tree that `to_bytes` serialized, each array as `template` has it (see `Checkpointer.restore`).

    Args:
      template: a tree of arrays, or of `ShapeDtypeStruct`s.
      data: from `to_bytes`.
      cast: convert dtypes to the template's.

    Raises:
      ValueError: the template's leaves, shapes or dtypes differ.
      CorruptCheckpointError: the bytes are damaged.
    """
    wanted = leaves.flatten(template, shapes=True)
    if digest_of(data[DIGEST_BYTES:]) != data[:DIGEST_BYTES]:
        raise CorruptCheckpointError(None, None, "the digest differs; the bytes may be truncated, or not from to_bytes")
    index, raw = _decoded(data[DIGEST_BYTES:])
    check_fits(wanted, index, "these bytes do", cast)
    found = {path: _from_raw(path, raw.get(path), index[path]) for path in wanted.leaves}
    _check_digests(index, found)
    return unflatten(template, wanted, found)


def _decoded(data: bytes) -> tuple[Index, Mapping[str, object]]:
    """Returns (the index, the arrays' bytes by path) of data whose digest is right; anybody may have made it."""
    try:
        found: Any = serialization.msgpack_restore(data)
        check_format(found["format"])
        index, raw = found["leaves"], found["arrays"]
        check_entries(index)
        return dict(index), dict(raw)
    except NewerFormatError:
        raise
    except Exception as error:  # of any kind: flax and NumPy decode data that may be hostile
        raise CorruptCheckpointError(None, None, f"they cannot be decoded: {first_line(error)}") from error


def _check_digests(index: Index, found: Mapping[str, Leaf]) -> None:
    arrays = {path: x for path, x in found.items() if not isinstance(x, leaves.NUMBERS)}
    with jax.enable_x64(jax.config.read("jax_enable_x64") or leaves.need_x64(index)):
        digests = named_digests(arrays)
    for path, digest in digests.items():
        if digest != index[path].get("digest"):
            raise CorruptCheckpointError(None, path, "its bits differ from those saved")


def _raw(x: np.ndarray) -> np.ndarray:
    """An array's bytes as uint8, since msgpack lacks some dtypes."""
    return np.frombuffer(np.asarray(x).tobytes(), np.uint8)


def _from_raw(path: str, raw: object, entry: Entry) -> Leaf:
    if "value" in entry:
        return leaves.number(entry)
    if not isinstance(raw, np.ndarray) or raw.dtype != np.uint8 or raw.size != leaves.num_bytes(entry):
        raise CorruptCheckpointError(None, path, "its number of bytes does not match its shape and dtype")
    return np.frombuffer(raw.tobytes(), jnp.dtype(entry["dtype"])).reshape(entry["shape"])
