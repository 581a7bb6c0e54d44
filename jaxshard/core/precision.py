"""Narrow params, wide arithmetic: masters, stochastic rounding, bf16 moments, loss scaling.

The state that they need beyond optax's own is in `ShardedState.extra`, cut like the rest.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxshard.base.jaxprs import depends, hands_on
from jaxshard.base.tree import Names, matched, named_leaves, owner_of, path_of, shape_of
from jaxshard.base.types import DType, Tree
from jaxshard.core.options import Config
from jaxshard.inner.trace import Traced, first_state, first_update
from jaxshard.inner.update import fast, update


class ShardedState(NamedTuple):
    """The state of an optimizer whose options need more than plain optax's state, which is `inner`.

    `extra` has an entry for each need: "master", the masters (with `master_dtype`); "rounding", the number of updates
    so far, which seeds the next update's roundings (with `stochastic_rounding` or `moment_dtype`); and "loss_scale",
    the state of `LossScale` (with `loss_scale`).
    """

    inner: Tree
    extra: dict[str, Tree]


# Which dtype where.


def like(wanted: DType | None, dtype: DType) -> DType:
    """`wanted`, or `dtype` itself if that is None; complex if `dtype` is."""
    if wanted is None:
        return dtype
    return jnp.promote_types(wanted, jnp.complex64) if jnp.issubdtype(dtype, jnp.complexfloating) else wanted


def wide(config: Config, dtype: DType) -> DType:
    """The dtype in which the inner optimizer sees a parameter of `dtype`, and its gradient."""
    if config.stochastic_rounding and dtype == jnp.bfloat16:
        return jnp.dtype(jnp.float32)
    return like(config.master_dtype, dtype)


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
                f"some of its digits; give {jnp.promote_types(leaf.dtype, jnp.float32)}, or cast the params"
            )
    if half is not None and config.loss_scale is not None and config.master_dtype in _HALF_OR_NONE:
        raise ValueError(
            f"loss_scale: {half} is float16, so its gradient would underflow again once it is unscaled; add "
            "master_dtype=jnp.float32 (or keep the params in float32, and cast them in the loss function)"
        )
    if config.stochastic_rounding and not any(leaf.dtype == jnp.bfloat16 for _, leaf in named):
        raise ValueError(
            "stochastic_rounding: no parameter is bfloat16, so there is nothing to round; cast the params, or leave "
            "the option out"
        )


def widened(config: Config, params: Tree) -> Tree:
    """The params (arrays or shapes) as the inner optimizer sees them."""
    return jax.tree.map(lambda p: _cast(p, wide(config, p.dtype)), params)


# The state.


def extends(config: Config) -> bool:
    """Whether the state is a `ShardedState`: an option asks for more than plain optax's."""
    return config.widens or config.moment_dtype is not None or config.loss_scale is not None


def init(inner: optax.GradientTransformation, params: Tree, config: Config) -> Tree:
    """The state: plain optax's, or a `ShardedState` if options need more.

    Raises:
      ValueError: an option that these params' dtypes, or this optimizer's state, cannot use.
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
        dtypes = _stored_dtypes(inner, wider, config)
        state = jax.tree.map(lambda x, dtype: x if jnp.result_type(x) == dtype else x.astype(dtype), state, dtypes)
    return ShardedState(state, extra) if extra else state


def _stored_dtypes(inner: optax.GradientTransformation, params: Tree, config: Config) -> Tree:
    """The dtype at rest of each leaf of the inner state.

    A moment is a float32 or float64 leaf with its parameter's shape that does not depend on params at the start, and
    that no update makes a copy of params or gradients. `mu` and `nu` are moments. Lookahead's slow params, the centre
    of a distance, and the arrays that L-BFGS takes differences from are not, since they need all their digits.
    """
    shapes = jax.tree.map(shape_of, params)
    if why := first_state(inner, shapes).why:
        raise ValueError(
            "moment_dtype: this optimizer's init reads values of its params, so nobody knows which parts of its state "
            f"are moments; leave the option out. JAX said: {why}"
        )
    jaxpr, state = jax.make_jaxpr(inner.init, return_shape=True)(shapes)
    copies = depends(jaxpr, [True] * len(jax.tree.leaves(shapes)))
    updated = first_update(inner, shapes)
    if updated is None:
        raise ValueError(
            "moment_dtype: this optimizer's update cannot be traced without further arguments (or fails), so nobody "
            "knows which parts of its state are moments; leave the option out"
        )
    copies = [a or b for a, b in zip(copies, _handed_on(updated, shapes), strict=True)]
    owners = {names: tuple(leaf.shape) for names, leaf in named_leaves(shapes)}
    dtypes = [
        config.moment_dtype if not copy and _is_moment(names, leaf, owners) else leaf.dtype
        for (names, leaf), copy in zip(named_leaves(state), copies, strict=True)
    ]
    if all(dtype == leaf.dtype for dtype, leaf in zip(dtypes, jax.tree.leaves(state), strict=True)):
        raise ValueError(
            f"moment_dtype: this optimizer's state has no float32 moments, only {_leaves_in_words(state)}; leave the "
            "option out"
        )
    return jax.tree.unflatten(jax.tree.structure(state), dtypes)


def _handed_on(updated: Traced, params: Tree) -> list[bool]:
    """For each leaf of the state, whether an update makes it a copy of a param or a gradient."""
    num_grads, num_params = len(jax.tree.leaves(fast(params))), len(jax.tree.leaves(params))
    before = [names for names, _ in named_leaves(updated.before)]
    marks = [True] * num_grads + [False] * len(before) + [True] * num_params
    after = [names for names, _ in named_leaves(updated.after)]
    found = dict(zip(after, hands_on(updated.jaxpr, marks)[-len(after) :], strict=True)) if after else {}
    return [found.get(names, False) for names in before]


def _is_moment(names: Names, leaf: jax.ShapeDtypeStruct, owners: Mapping[Names, tuple[int, ...]]) -> bool:
    """Whether it has its parameter's shape, or any parameter's if it is at no one's path (lookahead, a list)."""
    owner = owner_of(names, owners)
    alike = owner == tuple(leaf.shape) if owner is not None else tuple(leaf.shape) in owners.values()
    return leaf.dtype in (jnp.float32, jnp.float64) and bool(leaf.shape) and alike


def _leaves_in_words(state: Tree) -> str:
    return (
        ", ".join(f"{path_of(names)} {leaf.dtype}{list(leaf.shape)}" for names, leaf in named_leaves(state)) or "none"
    )


# One step.


def step(
    inner: optax.GradientTransformation,
    config: Config,
    grads: Tree,
    state: Tree,
    params: Tree,
    extra: Mapping[str, Tree],
) -> tuple[Tree, Tree, Tree]:
    """Returns (updates, new params, state) of one step; new params are None if the params are not widened.

    With masters, the step updates the masters, and the new params are the masters rounded, bit for bit. An element of
    the params that is not its master rounded was changed by someone else, and replaces its master.
    """
    if not isinstance(state, ShardedState):
        updates, state = update(inner, grads, state, params, extra)
        return updates, None, state
    added = dict(state.extra)
    wider = params
    if params is not None and config.widens:
        wider = widened(config, params)
        if "master" in added:
            wider = jax.tree.map(_master_of, added["master"], params, wider)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), fast(grads), fast(wider))
    rounder = Rounder(added["rounding"]) if "rounding" in added else None
    updates, inner_state = _stored(inner, config, grads, state.inner, wider, extra, rounder)
    new = None
    if params is not None and config.widens:
        wider = optax.apply_updates(wider, updates)
        new = jax.tree.map(lambda w, p: _rounded(w, p.dtype, config, rounder), wider, params)
    if "master" in added:
        added["master"] = wider
    if "rounding" in added:
        added["rounding"] += 1
    return updates, new, ShardedState(inner_state, added)


def _master_of(master: jax.Array, param: jax.Array, widened: jax.Array) -> jax.Array:
    return jnp.where(master.astype(param.dtype) == param, master, widened)


def _stored(
    inner: optax.GradientTransformation,
    config: Config,
    grads: Tree,
    state: Tree,
    params: Tree,
    extra: Mapping[str, Tree],
    rounder: "Rounder | None",
) -> Tree:
    """Runs the inner optimizer, whose moments are stored in `moment_dtype`; returns (updates, state)."""
    if config.moment_dtype is None or rounder is None:
        return update(inner, grads, state, params, extra)
    computed = as_computed(inner, config, grads if params is None else params, state)
    updates, new = update(inner, grads, computed, params, extra)
    return updates, as_stored(new, computed, state, rounder)


def as_computed(inner: optax.GradientTransformation, config: Config, params: Tree, state: Tree) -> Tree:
    """The inner state (arrays or shapes) in the dtypes in which the optimizer computes: narrow moments are widened."""
    if config.moment_dtype is None:
        return state

    def widen(x: Tree, plain: Tree) -> Tree:
        return _cast(x, plain.dtype) if x.dtype == config.moment_dtype else x

    return matched(widen, state, first_state(inner, params).state)


def as_stored(new: Tree, computed: Tree, state: Tree, narrow: Callable[[Tree], Tree]) -> Tree:
    """`new`, an inner state after an update, with `narrow` applied to what is stored narrower than it is computed."""
    differs = jax.tree.map(lambda x, stored: x.dtype != stored.dtype, computed, state)
    names_of_narrow = {names for names, yes in named_leaves(differs) if yes}
    leaves = [narrow(x) if names in names_of_narrow else x for names, x in named_leaves(new)]
    return jax.tree.unflatten(jax.tree.structure(new), leaves)


def _cast(x: Tree, dtype: DType) -> Tree:
    return x.update(dtype=dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)


def _rounded(x: jax.Array, dtype: DType, config: Config, rounder: "Rounder | None") -> jax.Array:
    stochastic = config.stochastic_rounding and dtype == jnp.bfloat16
    return rounder(x) if stochastic and rounder else x.astype(dtype)


class Rounder:
    """Rounds to bfloat16, up or down at random, so that the mean is exact (Gupta et al. 2015, section 3).

    The seed is the number of the update and the array's place among those it rounds, never the device, so the roundings
    are the same on any mesh.
    """

    def __init__(self, count: jax.Array):
        self._key, self._calls = jax.random.fold_in(jax.random.key(0), count), 0

    def __call__(self, x: jax.Array) -> jax.Array:
        """(...) float32 -> (...) bfloat16."""
        key, self._calls = jax.random.fold_in(self._key, self._calls), self._calls + 1
        x = x.astype(jnp.float32)
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        bits = bits + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
        down = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        return jnp.where(jnp.isfinite(x), down, x).astype(jnp.bfloat16)


def difference(new: jax.Array, old: jax.Array, wide_dtype: DType) -> jax.Array:
    """`new - old`, in a dtype wide enough that `optax.apply_updates` takes `old` to `new`.

    That is exact for params narrower than their masters, unless `new` is smaller than `old` by a factor of 2**16 (bf16)
    or 2**13 (fp16). Params as wide as their masters may miss `new` by one rounding. `train_step` has no such limits,
    and the masters never drift.
    """
    wide = like(jnp.promote_types(wide_dtype, jnp.float32), new.dtype)
    return new.astype(wide) - old.astype(wide)
