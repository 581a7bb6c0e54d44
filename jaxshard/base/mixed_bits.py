# pyright: standard
"""A checksum of an array or shard that depends on the order of elements, and whether all are finite, in one pass."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_ROW = 4096  # a long vector is reshaped into rows of this many elements


def sum_and_level(x: jax.Array, starts: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """(the checksum of a shard, its level: 0 all finite, 1 an infinite element, 2 a NaN), in one pass.

    Args:
      x: the shard.
      starts: for each dim, the index of the shard's first element in the whole array.
    """
    place = jnp.zeros(x.shape, jnp.uint32)
    for dim, start in enumerate(starts):
        here = lax.broadcasted_iota(jnp.uint32, x.shape, dim) + jnp.uint32(start)
        place = _mixed(place * jnp.uint32(31) + here + jnp.uint32(1))
    mixed = sum((_mixed(bits ^ (place + jnp.uint32(word))) for word, bits in enumerate(_words(x))), jnp.uint32(0))
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return _totals([mixed])[0], jnp.uint32(0)
    wide = x if _nan_is_largest(x.dtype) else x.astype(jnp.float32)
    total, largest = _totals([mixed, _sizes(wide)])
    infinity = jnp.full((), jnp.inf, wide.dtype)  # NaN, if the type has none
    infinite = _sizes(infinity) - jnp.isnan(infinity)
    return total, jnp.where(largest > infinite, 2, jnp.where(largest == infinite, 1, 0)).astype(jnp.uint32)


def _nan_is_largest(dtype: np.dtype) -> bool:
    """Whether NaN's bits, without the sign's, are above all others: in all types that have a negative zero."""
    return dtype.itemsize > 1 or not np.array(0x80, np.uint8).view(dtype).astype(np.float32).any()


def _totals(both: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """[the sum mod 2**32 of the first array, the maximum of the second if there is one]; element order does not matter.

    Each pass reduces eight rows to one, in both arrays, and a barrier keeps XLA from merging it with the next pass: on
    CPUs that takes a fifth of the time.
    """
    parts = list[Sequence[jax.Array]]()
    if both[0].ndim == 1 and both[0].size >= 8 * _ROW:
        both = _cut(both, 0, _ROW, parts)
        both = [x.reshape(-1, _ROW) for x in both]
    for _ in range(len(both)):  # with one array, XLA would merge two passes despite the barrier
        sizes = both[0].shape[:-1]
        dim = max(range(len(sizes)), key=lambda dim: (sizes[dim] >= 8, sizes[dim] % 8 == 0, dim), default=0)
        if not sizes or sizes[dim] < 8:
            break
        both = _cut(both, dim, 8, parts)
        shape = both[0].shape
        eights = [x.reshape(*shape[:dim], shape[dim] // 8, 8, *shape[dim + 1 :]) for x in both]
        both = lax.optimization_barrier(_reduced(eights, [dim + 1]))
    found = [_reduced(part, range(part[0].ndim)) for part in (both, *parts)]
    return functools.reduce(_joined, found)


def _cut(both: Sequence[jax.Array], dim: int, size: int, rests: list[Sequence[jax.Array]]) -> Sequence[jax.Array]:
    """The longest start of the arrays that `size` divides along `dim`; the rest is added to `rests`."""
    whole = both[0].shape[dim]
    most = whole // size * size
    if most == whole:
        return both
    rests.append([lax.slice_in_dim(x, most, whole, axis=dim) for x in both])
    return [lax.slice_in_dim(x, 0, most, axis=dim) for x in both]


def _reduced(both: Sequence[jax.Array], dims: Sequence[int]) -> Sequence[jax.Array]:
    """The sum of the first array, and the maximum of the second if there is one, over these dims."""
    return lax.reduce(list(both), [jnp.uint32(0)] * len(both), _joined, dims)


def _joined(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> Sequence[jax.Array]:
    return [op(x, y) for op, x, y in zip((lax.add, lax.max), a, b, strict=False)]


def _sizes(x: jax.Array) -> jax.Array:
    """The elements' absolute values as uint32, in the same order (64-bit values are rounded); NaN is above infinity."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.maximum(_sizes(x.real), _sizes(x.imag))
    *low, high = _words(x)
    size = high << (33 - min(32, 8 * x.dtype.itemsize))
    return size | (low[0] != 0) if low else size


def _words(x: jax.Array) -> list[jax.Array]:
    """The bits of the elements as arrays of uint32, one array per 32 bits of an element."""
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
    """A bijection of 32 bits in which each input bit flips each output bit with probability 1/2 (MurmurHash3's end)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
