"""A tree as one string of bytes, for a small tree that is on one process."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.base.types import T, Tree
from jaxshard.base.watches import unwatched
from jaxshard.checkpoint import leaves
from jaxshard.checkpoint.errors import CorruptCheckpointError, not_installed
from jaxshard.checkpoint.leaves import Entry, Leaf
from jaxshard.checkpoint.manifest import DIGEST_BYTES, FORMAT, check_format, digest_of
from jaxshard.checkpoint.template import check_fits, unflatten

try:
    from flax import serialization
except ModuleNotFoundError as error:
    raise not_installed(error) from error


@unwatched()
def to_bytes(tree: Tree) -> bytes:
    """A tree of arrays and numbers, with its digests, as one string of bytes (msgpack, by flax).

    All of it goes through this process's memory: for a large tree, or one on several processes, use a `Checkpointer`.

    Raises:
      ValueError: names that collide; an array that lies on other processes, too.
      TypeError: a leaf that is no array and no number.

    >>> import jax.numpy as jnp
    >>> from_bytes({"w": jnp.zeros(3)}, to_bytes({"w": jnp.arange(3.0)}))
    {'w': Array([0., 1., 2.], dtype=float32)}
    """
    found = leaves.flatten(tree)
    for path, x in found.arrays().items():
        if not leaves.is_local(x):
            raise ValueError(f"to_bytes: {path} lies on devices of other processes, too; save it by a Checkpointer")
    raw = {path: _raw(jax.device_get(x)) for path, x in found.arrays().items()}
    data = serialization.msgpack_serialize({"format": FORMAT, "leaves": leaves.index_of(found)[0], "arrays": raw})
    return digest_of(data) + data


@unwatched()
def from_bytes(template: T, data: bytes, *, cast: bool = False) -> T:
    """The tree that `to_bytes` made `data` of, each array as `template` has it (see `Checkpointer.restore`).

    Args:
      template: a tree of arrays, or of `ShapeDtypeStruct`s.
      data: from `to_bytes`.
      cast: let dtypes be converted to the template's.

    Raises:
      ValueError: the template has other leaves, shapes or dtypes.
      CorruptCheckpointError: the bytes are not what was made.
    """
    wanted = leaves.flatten(template, shapes=True)
    if digest_of(data[DIGEST_BYTES:]) != data[:DIGEST_BYTES]:
        raise CorruptCheckpointError(None, None, "their digest is another; were they cut short, or made by to_bytes?")
    found: Any = serialization.msgpack_restore(data[DIGEST_BYTES:])
    check_format(found["format"])
    index, raw = found["leaves"], found["arrays"]
    check_fits(wanted, index, "these bytes do", cast)
    return unflatten(template, wanted, {path: _from_raw(raw.get(path), index[path]) for path in wanted.leaves})


def _raw(x: np.ndarray) -> np.ndarray:
    """The bytes of an array, as uint8: msgpack does not know all dtypes."""
    return np.frombuffer(np.asarray(x).tobytes(), np.uint8)


def _from_raw(raw: np.ndarray | None, entry: Entry) -> Leaf:
    if "value" in entry:
        return leaves.number(entry)
    assert raw is not None
    return np.frombuffer(raw.tobytes(), jnp.dtype(entry["dtype"])).reshape(entry["shape"])
