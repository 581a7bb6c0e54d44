"""A tree as one string of bytes, for what is small and lies on one process."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from jaxshard.checkpoint import flat
from jaxshard.checkpoint.manifest import DIGEST_BYTES, FORMAT, CorruptCheckpointError, check_format, digest_of


def to_bytes(tree: Any) -> bytes:
    """A tree of arrays and numbers, its digests with it, as one string of bytes (msgpack, by flax).

    All of it goes through this process's memory: a `Checkpointer` is for what is large, or lies on several processes.

    Raises:
      ValueError: names that collide; an array that lies on other processes, too.
      TypeError: a leaf that is no array and no number.

    >>> import jax.numpy as jnp
    >>> from_bytes({"w": jnp.zeros(3)}, to_bytes({"w": jnp.arange(3.0)}))
    {'w': Array([0., 1., 2.], dtype=float32)}
    """
    found = flat.flatten(tree)
    arrays = flat.arrays(found.leaves)
    for path, x in arrays.items():
        if not flat.is_local(x):
            raise ValueError(f"to_bytes: {path} lies on devices of other processes, too; save it by a Checkpointer")
    raw = {path: _raw(jax.device_get(x)) for path, x in arrays.items()}
    data = serialization.msgpack_serialize({"format": FORMAT, "leaves": flat.index_of(found), "arrays": raw})
    return digest_of(data) + data


def from_bytes(template: Any, data: bytes, *, cast: bool = False) -> Any:
    """The tree that `to_bytes` made `data` of, each array as `template` has it (see `Checkpointer.restore`).

    Raises:
      ValueError: the template has other leaves, shapes or dtypes.
      CorruptCheckpointError: the bytes are not what was made.
    """
    wanted = flat.flatten(template, shapes=True)
    if digest_of(data[DIGEST_BYTES:]) != data[:DIGEST_BYTES]:
        raise CorruptCheckpointError(None, None, "their digest is another; were they cut short, or made by to_bytes?")
    found: Any = serialization.msgpack_restore(data[DIGEST_BYTES:])
    check_format(found)
    leaves, raw = found["leaves"], found["arrays"]
    flat.check_same(wanted, leaves, "these bytes do", cast)
    return flat.unflatten(template, wanted, {path: _from_raw(raw.get(path), leaves[path]) for path in wanted.leaves})


def _raw(x: Any) -> np.ndarray:
    """The bits of an array, of dtypes that msgpack does not know, too."""
    return np.frombuffer(np.asarray(x).tobytes(), np.uint8)


def _from_raw(raw: Any, leaf: dict[str, Any]) -> Any:
    if raw is None:
        return flat.number(leaf)
    return np.frombuffer(raw.tobytes(), jnp.dtype(leaf["dtype"])).reshape(leaf["shape"])
