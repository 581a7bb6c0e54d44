"""Master weights: params kept in a wider dtype inside the state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class ShardedState(NamedTuple):
    """The state where an option adds to it: `inner` is what plain optax has, `extra` has "master" (`master_dtype`)."""

    inner: Any
    extra: dict[str, Any]


def like(wanted: Any, dtype: Any) -> Any:
    """`wanted` (None: `dtype` itself), made complex where `dtype` is."""
    if wanted is None:
        return dtype
    return jnp.promote_types(wanted, jnp.complex64) if jnp.issubdtype(dtype, jnp.complexfloating) else wanted


def init(inner: optax.GradientTransformation, params: Any, master_dtype: Any) -> Any:
    """The state: plain optax's, or with masters beside it."""
    if master_dtype is None:
        return inner.init(params)
    master = jax.tree.map(lambda p: p.astype(like(master_dtype, p.dtype)), params)
    return ShardedState(inner.init(master), {"master": master})


def updates(inner: optax.GradientTransformation, grads: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
    """(updates, state) of the inner optimizer."""
    return optax.with_extra_args_support(inner).update(grads, state, params, **extra)


def new_params(inner: optax.GradientTransformation, grads: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
    """(new params, state); with masters, these are updated, and the params are their roundings, bit for bit."""
    if not isinstance(state, ShardedState):
        out, state = updates(inner, grads, state, params, extra)
        return optax.apply_updates(params, out), state
    master = state.extra["master"]
    grads = jax.tree.map(lambda g, m: g.astype(m.dtype), grads, master)
    out, inner_state = updates(inner, grads, state.inner, master, extra)
    master = optax.apply_updates(master, out)
    rounded = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
    return rounded, ShardedState(inner_state, {**state.extra, "master": master})


def difference(new: jax.Array, old: jax.Array, master_dtype: Any) -> jax.Array:
    """The update that takes `old` to `new`, in a dtype wide enough that `optax.apply_updates` lands on `new`.

    Exact for params narrower than their masters, unless `new` is smaller than `old` by a factor of 2**16 (bf16) or
    2**13 (fp16). Params as wide as their masters may land one rounding beside; `train_step` has no such limits, and
    the masters never drift.
    """
    wide = like(jnp.promote_types(master_dtype, jnp.float32), new.dtype)
    return new.astype(wide) - old.astype(wide)
