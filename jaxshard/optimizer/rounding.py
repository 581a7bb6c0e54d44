"""Stochastic rounding to narrow dtypes, the same on all devices."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.base.types import DType, like


class Rounder:
    """Rounds to bfloat16, up or down at random, so that the mean is exact (Gupta et al. 2015, section 3).

    The seed is the number of the update and the array's index among the rounded ones, never the device, so roundings
    are the same on any mesh.
    """

    def __init__(self, count: jax.Array):
        self._key, self._calls = jax.random.fold_in(jax.random.key(0), count), 0

    def _next_key(self) -> jax.Array:
        self._calls += 1
        return jax.random.fold_in(self._key, self._calls - 1)

    def bits(self, shape: tuple[int, ...]) -> jax.Array:
        """Random numbers from 0 to 2**20: midpoints of 2**16 equal intervals."""
        return (jax.random.bits(self._next_key(), shape, jnp.uint16).astype(jnp.uint32) << 4) + 8

    def __call__(self, x: jax.Array) -> jax.Array:
        """(...) float32 -> (...) bfloat16."""
        x = x.astype(jnp.float32)
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        bits = bits + jax.random.bits(self._next_key(), x.shape, jnp.uint16).astype(jnp.uint32)
        down = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        return jnp.where(jnp.isfinite(x), down, x).astype(jnp.bfloat16)


def difference(new: jax.Array, old: jax.Array, wide_dtype: DType) -> jax.Array:
    """`new - old`, in a dtype wide enough that `optax.apply_updates` takes `old` to `new`.

    Exact for params narrower than their masters, unless `new` is smaller than `old` by a factor of 2**16 (bf16) or
    2**13 (fp16). Params as wide as their masters may miss `new` by one rounding. `train_step` has no such limits, and
    the masters never drift.
    """
    wide = like(jnp.promote_types(wide_dtype, jnp.float32), new.dtype)
    return new.astype(wide) - old.astype(wide)
