"""Narrow params, wide arithmetic: masters, stochastic rounding, moments in bf16 or 8 bits, loss scaling.

Their state beyond optax's own is in `ShardedState.extra`, sharded like the rest.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxshard.base.tree import named_leaves, path_of
from jaxshard.base.types import DType, Names, Tree, like
from jaxshard.layout.options import Config
from jaxshard.optimizer import eight_bits
from jaxshard.optimizer.inner.update import Update, fast, first_state, update
from jaxshard.optimizer.moments import stored_dtypes
from jaxshard.optimizer.rounding import Rounder
from jaxshard.system.users_lines import warn


class ShardedState(NamedTuple):
    """The state of an optimizer whose options need more than plain optax's state, which is `inner`.

    `extra` has an entry for each need: "master", the masters (with `master_dtype`); "rounding", the number of updates
    so far, which seeds the next update's roundings (with `stochastic_rounding` or `moment_dtype`); "scale", the scales
    of moments in 8 bits, by their path in `inner`; and "loss_scale", the state of `LossScale` (with `loss_scale`).
    """

    inner: Tree
    extra: dict[str, Tree]


# Dtypes.


def wide(config: Config, dtype: DType) -> DType:
    """The dtype in which the inner optimizer sees a parameter of `dtype`, and its gradient."""
    if config.stochastic_rounding and dtype == jnp.bfloat16:
        return jnp.dtype(jnp.float32)
    return like(config.master_dtype, dtype)


_WIDENED = "the update promoted them: use optax.apply_updates, which keeps their dtype, not eqx.apply_updates or +"
_HALF_OR_NONE = (None, jnp.float16, jnp.dtype(jnp.float16))


def check_params(config: Config, params: Tree) -> None:
    """Raises a ValueError for an option that these params' dtypes cannot use."""
    named = named_leaves(params)
    half = next((path_of(names) for names, leaf in named if leaf.dtype == jnp.float16), None)
    if half is not None and config.stochastic_rounding:
        raise ValueError(
            f"stochastic_rounding: {half} is float16, and only bfloat16 is rounded stochastically; use bfloat16, or "
            "master_dtype=jnp.float32"
        )
    for names, leaf in named if config.master_dtype is not None else ():
        if jnp.result_type(leaf.dtype, config.master_dtype) != like(config.master_dtype, leaf.dtype):
            raise ValueError(
                f"master_dtype: {path_of(names)} is {leaf.dtype}; {jnp.dtype(config.master_dtype)} masters would lose "
                f"precision; give {jnp.promote_types(leaf.dtype, jnp.float32)}, or cast the params"
            )
    if half is not None and config.loss_scale is not None and config.master_dtype in _HALF_OR_NONE:
        raise ValueError(
            f"loss_scale: {half} is float16, so its gradient would underflow again once it is unscaled; add "
            "master_dtype=jnp.float32 (or keep the params in float32, and cast them in the loss function)"
        )
    if config.stochastic_rounding and not any(leaf.dtype == jnp.bfloat16 for _, leaf in named):
        raise ValueError(
            "stochastic_rounding: no parameter is bfloat16, so there is nothing to round; cast the params, or leave "
            f"the option out. If some were, {_WIDENED}"
        )


def widened(config: Config, params: Tree) -> Tree:
    """The params (arrays or shapes) as the inner optimizer sees them."""
    return jax.tree.map(lambda p: _cast(p, wide(config, p.dtype)), params)


# The state.


def extends(config: Config) -> bool:
    """Whether the state is a `ShardedState`: an option needs more than plain optax's."""
    return config.widens or config.moment_dtype is not None or config.loss_scale is not None


def init(inner: optax.GradientTransformation, params: Tree, config: Config) -> Tree:
    """The state: plain optax's, or a `ShardedState` if options need more.

    Raises:
      ValueError: an option does not fit these params' dtypes, or this optimizer's state.
    """
    check_params(config, params)
    wider = widened(config, params)
    state = inner.init(wider)
    extra: dict[str, Tree] = {}
    if config.master_dtype is not None:
        extra["master"] = wider
    if config.stochastic_rounding or config.moment_dtype is not None:
        extra["rounding"] = jnp.uint32(0)
    if config.loss_scale is not None:
        extra["loss_scale"] = config.loss_scale.start()
    if config.moment_dtype is not None:
        dtypes = dict(named_leaves(stored_dtypes(inner, wider, config)))
        state, scales = _narrowed(state, dtypes, lambda x: x.astype(jnp.bfloat16), bits=None)
        extra |= {"scale": _nested(scales)} if scales else {}
    return ShardedState(state, extra) if extra else state


# One step.


def step(
    inner: optax.GradientTransformation,
    config: Config,
    grads: Tree,
    state: Tree,
    params: Tree,
    extra: Mapping[str, Tree],
    run: Update = update,
) -> tuple[Tree, Tree, Tree]:
    """Returns (updates, new params, state) of one step; new params are None if the params are not widened.

    `run` runs the inner optimizer's update.

    With masters, the step updates the masters, and the new params are exactly the rounded masters. If an element of the
    params differs from its rounded master, someone has changed it, and it replaces its master.
    """
    if not isinstance(state, ShardedState):
        updates, state = run(inner, grads, state, params, extra)
        return updates, None, state
    added = dict(state.extra)
    wider = params
    if params is not None and config.widens:
        _warn_if_wide(config, params)
        wider = widened(config, params)
        if "master" in added:
            wider = jax.tree.map(_master_of, added["master"], params, wider)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), fast(grads), fast(wider))
    rounder = Rounder(added["rounding"]) if "rounding" in added else None
    updates, inner_state, scales = _stored(inner, config, grads, state, wider, extra, rounder, run)
    if scales:
        added["scale"] = _nested(scales)
    new = None
    if params is not None and config.widens:
        wider = optax.apply_updates(wider, updates)
        new = jax.tree.map(lambda w, p: _rounded(w, p.dtype, config, rounder), wider, params)
    if "master" in added:
        added["master"] = wider
    if "rounding" in added:
        added["rounding"] += 1
    return updates, new, ShardedState(inner_state, added)


def _warn_if_wide(config: Config, params: Tree) -> None:
    """Warns if all params are as wide as their masters: most often a sum without a cast has widened them."""
    dtypes = {p.dtype for p in jax.tree.leaves(params)}
    if config.master_dtype is not None and all(dtype == like(config.master_dtype, dtype) for dtype in dtypes):
        warn(
            f"master_dtype: all params are {' or '.join(sorted(map(str, dtypes)))}, as wide as their masters would be. "
            f"If some were narrower, {_WIDENED}"
        )


def _master_of(master: jax.Array, param: jax.Array, widened: jax.Array) -> jax.Array:
    return jnp.where(master.astype(param.dtype) == param, master, widened)


def _stored(
    inner: optax.GradientTransformation,
    config: Config,
    grads: Tree,
    state: ShardedState,
    params: Tree,
    extra: Mapping[str, Tree],
    rounder: "Rounder | None",
    run: Update,
) -> tuple[Tree, Tree, dict[Names, jax.Array]]:
    """Runs the inner optimizer with moments stored in `moment_dtype`; returns (updates, state, scales)."""
    if config.moment_dtype is None or rounder is None:
        return *run(inner, grads, state.inner, params, extra), {}
    scales = dict(named_leaves(state.extra.get("scale", {})))
    computed = as_computed(inner, config, grads if params is None else params, state.inner, scales)
    updates, new = run(inner, grads, computed, params, extra)
    return updates, *_narrowed(new, stored_narrower(computed, state.inner), rounder, rounder.bits)


def as_computed(
    inner: optax.GradientTransformation,
    config: Config,
    params: Tree,
    state: Tree,
    scales: Mapping[Names, jax.Array] | None = None,
) -> Tree:
    """The inner state in the dtypes in which the optimizer computes: narrow moments are widened.

    `scales`: path -> scale of an 8-bit moment; None: the state holds only shapes.
    """
    if config.moment_dtype is None:
        return state
    narrow, plain = _NARROW[jnp.dtype(config.moment_dtype)], dict(named_leaves(first_state(inner, params).state))

    def widened(names: Names, x: Tree) -> Tree:
        if names not in plain or x.dtype not in narrow or x.dtype == plain[names].dtype:
            return x
        return _cast(eight_bits.decode(x, scales[names]) if scales and names in scales else x, plain[names].dtype)

    leaves = [widened(names, x) for names, x in named_leaves(state)]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


_NARROW = {
    jnp.dtype(jnp.bfloat16): (jnp.dtype(jnp.bfloat16),),
    jnp.dtype(jnp.int8): (jnp.dtype(jnp.int8), jnp.dtype(jnp.uint8)),
}


def stored_narrower(computed: Tree, state: Tree) -> dict[Names, DType]:
    """Path -> dtype, for leaves that `state` stores in a narrower dtype than they are computed in."""
    pairs = zip(named_leaves(computed), jax.tree.leaves(state), strict=True)
    return {names: stored.dtype for (names, x), stored in pairs if x.dtype != stored.dtype}


def _narrowed(
    state: Tree,
    dtypes: Mapping[Names, DType],
    rounded: Callable[[jax.Array], jax.Array],
    bits: eight_bits.Bits | None,
) -> tuple[Tree, dict[Names, jax.Array]]:
    """(an inner state as it is stored, path -> scales of 8-bit leaves)."""
    leaves: list[Tree] = []
    scales: dict[Names, jax.Array] = {}
    for names, x in named_leaves(state):
        dtype = dtypes.get(names, jnp.result_type(x))
        if dtype == jnp.result_type(x):
            leaves.append(x)
        elif dtype == jnp.bfloat16:
            leaves.append(rounded(x))
        else:
            codes, scales[names] = eight_bits.encode(x, dtype, bits)
            leaves.append(codes)
    return jax.tree.unflatten(jax.tree.structure(state), leaves), scales


def _nested(leaves: Mapping[Names, jax.Array]) -> dict[str, Tree]:
    """Nested dicts that hold each leaf at its path."""
    found: dict[str, Tree] = {}
    for names, leaf in leaves.items():
        inside = found
        for name in names[:-1]:
            inside = inside.setdefault(name, {})
        inside[names[-1]] = leaf
    return found


def _cast(x: Tree, dtype: DType) -> Tree:
    return x.update(dtype=dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)


def _rounded(x: jax.Array, dtype: DType, config: Config, rounder: "Rounder | None") -> jax.Array:
    stochastic = config.stochastic_rounding and dtype == jnp.bfloat16
    return rounder(x) if stochastic and rounder else x.astype(dtype)
