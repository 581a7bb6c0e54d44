"""Moments in 8 bits: small floats with a scale for each block of 128 elements (Dettmers et al. 2022, section 2.1).

A linear code of second moments fails: within a block they span many powers of ten, and one that is rounded to 0 makes
the update unbounded (same source, section 2.2). So codes are spaced like floats, 8 per power of two: down to 2**-15.75
of the block's largest for first moments, down to 2**-31.75 for second moments, which have no sign. Smaller numbers are
rounded up or down by chance if they have a sign, else up.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128  # elements
_FRACTION_BITS = 3
_DROPPED_BITS = 23 - _FRACTION_BITS  # of a float32
_ONE = 127 << _FRACTION_BITS  # the float32 bits of 1.0, without the dropped bits

Bits = Callable[[tuple[int, ...]], jax.Array]
"""Makes random uint32 numbers of a shape, from 0 to 2**20."""


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array's scales: one per block along the last dim, or along the last two if the last is short.

    >>> scale_shape((12, 1024, 4096)), scale_shape((12, 1024, 32)), scale_shape((300,))
    ((12, 1024, 32), (12, 256, 1), (3,))
    """
    return tuple(-(-size // part) for size, part in zip(shape, _block(shape), strict=True))


def _block(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The sides of a block."""
    last = min(BLOCK, shape[-1])
    rows = min(BLOCK // last, shape[-2]) if len(shape) > 1 else 1
    return (*[1] * (len(shape) - 2), rows, last)[-len(shape) :]


def encode(x: jax.Array, dtype: jax.typing.DTypeLike, bits: Bits | None = None) -> tuple[jax.Array, jax.Array]:
    """(codes, scales) of an array: int8 codes have a sign, uint8 codes are for numbers that are never negative.

    Args:
      x: any shape but ().
      dtype: the codes' dtype.
      bits: makes random numbers, for codes that are right on average; None: the nearest code.
    """
    x = x.astype(jnp.float32)
    most = jnp.iinfo(dtype).max
    blocks = _in_blocks(jnp.abs(x))
    largest = jnp.max(blocks, axis=tuple(range(1, blocks.ndim, 2)))
    scales = jnp.where(largest == 0, 1.0, largest)
    part = jnp.abs(x) / _spread(scales, x.shape)
    chance = lax.full(x.shape, 1 << (_DROPPED_BITS - 1), jnp.uint32) if bits is None else bits(x.shape)
    number = (lax.bitcast_convert_type(part, jnp.uint32) + chance) >> _DROPPED_BITS
    code = jnp.clip(number.astype(jnp.int32) - (_ONE - most), 0, most)
    tiny = lax.full_like(code, 1)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        up = part * 2.0**_DROPPED_BITS > chance.astype(jnp.float32) * _value(tiny, most)
        tiny = up.astype(code.dtype)
    code = jnp.where(part == 0, 0, jnp.where(code < 1, tiny, code))
    return jnp.where(x < 0, -code, code).astype(dtype), scales


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The array that the codes and scales encode, in float32."""
    wide = codes.astype(jnp.int32)
    found = _value(jnp.abs(wide), jnp.iinfo(codes.dtype).max)
    return jnp.where(wide < 0, -found, jnp.where(wide == 0, 0.0, found)) * _spread(scales, codes.shape)


def _value(code: jax.Array, most: int) -> jax.Array:
    """The value of a code above 0, as a fraction of its block's largest."""
    return lax.bitcast_convert_type((code + (_ONE - most)).astype(jnp.uint32) << _DROPPED_BITS, jnp.float32)


def _in_blocks(x: jax.Array) -> jax.Array:
    """(D, ...) -> (D / d, d, ...), padded with zeros, for blocks of sides (d, ...)."""
    block, padded = _block(x.shape), scale_shape(x.shape)
    wanted = [n * part for n, part in zip(padded, block, strict=True)]
    if tuple(wanted) != x.shape:
        x = lax.pad(
            x, lax.full((), 0, x.dtype), [(0, want - size, 0) for want, size in zip(wanted, x.shape, strict=True)]
        )
    return x.reshape([side for pair in zip(padded, block, strict=True) for side in pair])


def _spread(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Each element's scale."""
    for dim, part in enumerate(_block(shape)):
        if part > 1:  # XLA partitions these operations without communication
            before, after = scales.shape[: dim + 1], scales.shape[dim + 1 :]
            repeated = jnp.broadcast_to(jnp.expand_dims(scales, dim + 1), (*before, part, *after))
            scales = repeated.reshape(*before[:-1], before[-1] * part, *after)
    return scales if scales.shape == shape else scales[tuple(slice(size) for size in shape)]
