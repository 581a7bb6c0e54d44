"""The local view: `update` inside a user's own `jax.shard_map` over the data axes, and its checks."""

from collections.abc import Collection
from typing import NoReturn

import jax
from jax import lax

from jaxshard import collectives
from jaxshard.base.tree import named_leaves, path_of, shapes_of, structure, unflatten
from jaxshard.base.types import Dims, Jaxpr, Names, Tree, axes_of, axes_of_dims, like, num_along
from jaxshard.layout.cutting import Leaf
from jaxshard.layout.layout import layout_state
from jaxshard.optimizer.inner.update import fast, with_fast
from jaxshard.optimizer.local import blame, elementwise
from jaxshard.optimizer.local.labels import SAME, Label, Mixed, Shard
from jaxshard.optimizer.sharding import Setup
from jaxshard.optimizer.state import fits, nearest, refuse
from jaxshard.optimizer.update import Extra, as_updates, shard_step


def local_update(setup: Setup, updates: Tree, state: Tree, params: Tree, extra: Extra) -> tuple[Tree, Tree]:
    """Averages and scatters this device's gradients, updates its shard, gathers the updates.

    Raises:
      TypeError: gradients, state, params or extra arguments vary over the wrong axes.
      ValueError: the strategy, the optimizer or the shard_map does not allow an update in the local view.
    """
    whole = updates if params is None else params
    check_boundary(setup)
    found = setup.layout(whole).over_axes()
    whole_state = check_inputs(setup, updates, state, params, extra)
    dims = [leaf.dims for leaf in found.params]
    treedef, of_grads = jax.tree.structure(whole), jax.tree.structure(fast(updates))
    pairs = zip(jax.tree.leaves(fast(updates)), dims, strict=False)  # lookahead's fast params come first
    grads = jax.tree.unflatten(of_grads, [_average(g, d, setup) for g, d in pairs])
    mine = None
    if params is not None:
        parts = [collectives.own_part(p, d, setup.sizes) for p, d in zip(jax.tree.leaves(params), dims, strict=True)]
        mine = jax.tree.unflatten(treedef, parts)
        grads = with_fast(mine, grads)
    check_update(setup, (grads, state, mine), (whole, whole_state, None if mine is None else whole), extra)
    (out, _), state = shard_step(setup, grads, state, mine, None, extra, new=setup.config.widens)
    out = [collectives.gather(u, d, invarying=True) for u, d in zip(jax.tree.leaves(out), dims, strict=True)]
    out = jax.tree.unflatten(treedef, out)
    return as_updates(setup, out, params), state


def _average(g: jax.Array, dims: Dims, setup: Setup) -> jax.Array:
    dtype = g.dtype
    g = collectives.scatter_sum(g.astype(like(setup.config.reduce_dtype, dtype)), dims)
    done = axes_of_dims(dims)
    rest = [axis for axis in setup.batch_axes if axis not in done and axis in collectives.varying(g)]
    return (collectives.total(g, rest) / setup.num_batch_shards).astype(dtype)


# It refuses updates that would differ between devices, or be wrong on shards.


OUTSIDE = "call update outside shard_map (jaxshard.value_and_grad gives it the gradients)"


def check_boundary(setup: Setup) -> None:
    """Raises a ValueError if the strategy, its options or the shard_map allow no update in the local view."""
    name, axes = setup.config.strategy, setup.batch_axes
    for option in ("stochastic_rounding", "moment_dtype"):
        if getattr(setup.config, option):
            raise ValueError(
                f"{name}: {option} rounds by an element's position in the full leaf, which a shard does not know; call "
                "update outside shard_map"
            )
    if setup.config.state_memory != "device":
        raise ValueError(f"{name}: state_memory streams full leaves; call update outside shard_map")
    if setup.config.cuts.params:
        raise ValueError(
            f"{name}: the params are sharded, so a plain shard_map cannot hold them; use jaxshard.value_and_grad (or "
            "zero2) and call update outside shard_map"
        )
    if missing := [axis for axis in setup.split_axes if axis not in collectives.manual_axes()]:
        raise ValueError(f"{name}: update inside a shard_map without the axes {missing}; make all of {axes} manual")
    if not collectives.varying(lax.axis_index(_manual(setup))):
        raise ValueError(
            f"{name}: under shard_map(check_vma=False) it is unknown whether gradients were already averaged; use "
            "check_vma=True (the default), or call update outside shard_map"
        )
    used = axes_of(setup.config.specs) & collectives.manual_axes()
    if any(setup.sizes[axis] > 1 for axis in used):
        raise ValueError(f"{name}: specs over the manual axes {sorted(used)}: call update outside shard_map")


def _manual(setup: Setup) -> tuple[str, ...]:
    """The batch axes that the shard_map has; an axis of size 1 may be left out."""
    return tuple(axis for axis in setup.batch_axes if axis in collectives.manual_axes())


# Its inputs.


def check_inputs(setup: Setup, updates: Tree, state: Tree, params: Tree, extra: Extra) -> Tree:
    """Checks shapes and varying types; returns the shapes of the whole state, of which `state` is a shard.

    Raises:
      TypeError: gradients do not vary, or something else does.
      ValueError: the state is not a shard of this optimizer's state.
    """
    for names, g in named_leaves(updates):
        if missing := sorted({*setup.split_axes} - collectives.varying(g)):
            raise TypeError(
                f"{setup.config.strategy}: the gradient of {path_of(names)} does not vary over {missing}: it was "
                "already reduced, and its type does not tell whether to a sum or a mean. Either cast the params before "
                f"differentiating, jax.lax.pcast(params, {_manual(setup)}, to='varying'), and pass the partial "
                "gradients; or average them yourself and call update outside shard_map"
            )
    for what, tree in (("params", params), ("extra argument", extra)):
        for names, x in named_leaves(tree):
            _check_same(setup, what, names, x)
    whole, leaves = _whole_state(setup, state, updates if params is None else params)
    for (names, x), leaf in zip(named_leaves(state), leaves, strict=True):
        _check_same(setup, "the state's", names, x, but=axes_of_dims(leaf.dims))
    return whole


def _check_same(setup: Setup, what: str, names: Names, x: Tree, but: Collection[str] = ()) -> None:
    """Raises a TypeError for an array that varies over an axis that is not in `but`."""
    if isinstance(x, jax.Array) and (wrong := sorted((collectives.varying(x) & {*setup.split_axes}) - {*but})):
        raise TypeError(
            f"{setup.config.strategy}: {what} {path_of(names)} varies over {wrong}; pass the original params, not "
            "their cast, and reduce other values first (jax.lax.pmean)"
        )


def _whole_state(setup: Setup, state: Tree, params: Tree) -> tuple[Tree, tuple[Leaf, ...]]:
    """The shapes of the whole state, and its leaves."""
    name, expected = setup.config.strategy, setup.expected_states(params)
    if not expected and setup.config.cuts.state:
        raise ValueError(
            f"{name}: this optimizer's init reads values of its params, so inside a shard_map the sharding of its "
            f"state is unknown; {OUTSIDE}"
        )
    expected = expected or [shapes_of(state)]
    layouts = [setup.with_state(params, one).over_axes().state for one in expected]
    parts = [
        unflatten(structure(one), [jax.ShapeDtypeStruct(_part(setup, leaf), leaf.dtype) for leaf in leaves])
        for one, leaves in zip(expected, layouts, strict=True)
    ]
    found = [(whole, leaves) for whole, part, leaves in zip(expected, parts, layouts, strict=True) if fits(state, part)]
    if not found:
        who = f"{name}: the state (its in_specs: opt.shardings(params).specs.state)"
        refuse(who, state, nearest(state, parts), "device's part of opt.init(params)")
    return found[0]


def _part(setup: Setup, leaf: Leaf) -> tuple[int, ...]:
    """The shape of a device's shard of a leaf; the model's axes, if left to XLA, cut nothing in a shard_map."""
    shape = list(leaf.shape)
    for dim, axes in leaf.dims:
        shape[dim] //= num_along(axes, setup.sizes)
    return tuple(shape)


# Its computation.


def check_update(setup: Setup, parts: tuple[Tree, Tree, Tree], whole: tuple[Tree, Tree, Tree], extra: Extra) -> None:
    """Checks that the update of a device's shards is its shard of the update of whole leaves, and has no effect.

    Args:
      parts: gradients, state and params (or None) of this device.
      whole: shapes of the whole ones.

    Raises:
      ValueError: this cannot be proved; the message has the operation, its place in the chain, and the cure.
    """
    try:
        on_whole, (_, after) = _traced(setup, whole, extra)  # first: if this raises, the shards are not to blame
    except TypeError as error:
        if "{V:" not in str(error):
            raise
        raise ValueError(_explained(setup, error)) from error
    found = setup.layout(whole[0])
    leaves = found.over_axes().params
    ins = (*leaves, *layout_state(found, whole[1]).over_axes().state, *(() if whole[2] is None else leaves))
    results = [_result(setup, leaf) for leaf in (*leaves, *layout_state(found, after).over_axes().state)]
    labels = [_relation(leaf) for leaf in ins]
    try:
        on_shards = on_whole
        if any(isinstance(label, Shard) for label in labels):
            on_shards, _ = _traced(setup, parts, extra)
        elementwise.check_elementwise(on_shards, on_whole, labels, results, frozenset(setup.split_axes))
    except elementwise.NotElementwise as error:
        _refuse_update(setup, error.mixed)
    except Exception as error:  # of any type: the user's own code, on shapes that it may not support
        paths = ", ".join(leaf.path for leaf in leaves if leaf.dims)
        _refuse_update(
            setup, Mixed(f"it cannot run on the shards of {paths}: {error}"), blame.of_error(error, setup.inner)
        )


def _relation(leaf: Leaf) -> Label:
    return Shard(leaf.path, leaf.dims) if leaf.dims else SAME


def _result(setup: Setup, leaf: Leaf) -> elementwise.Result:
    return elementwise.Result(leaf.path, _relation(leaf), _part(setup, leaf))


def _traced(setup: Setup, trees: tuple[Tree, Tree, Tree], extra: Extra) -> tuple[Jaxpr, Tree]:
    """The traced inner step and its results' shapes. Plain shapes: varying types would differ on shards and wholes."""
    leaves, treedef = jax.tree.flatten(trees)
    new = setup.config.widens

    def step(leaves):
        grads, state, mine = jax.tree.unflatten(treedef, leaves)
        (out, _), state = shard_step(setup, grads, state, mine, None, extra, new=new)
        return out, state

    return jax.make_jaxpr(step, return_shape=True)(shapes_of(leaves))


_IN_WORDS = {
    "mixes elements": "the inner optimizer is not element-wise",
    "is not known": "the updates may be wrong",
    "varies": "the updates would differ from device to device",
    "has an effect": "the inner optimizer does more than compute",
}


def _refuse_update(setup: Setup, mixed: Mixed, place: str = "") -> NoReturn:
    place = place or blame.of_equations(mixed.trail, setup.inner)
    cures = {
        "mixes elements": f"so the result would be wrong. C{OUTSIDE[1:]}, where every optax optimizer is exact; or use "
        "ddp; or keep such leaves replicated with min_shard_size",
        "is not known": f"which is not known to be correct here. C{OUTSIDE[1:]}, where every optax optimizer is exact",
        "varies": f"so replicas of the params would diverge. Reduce it first (jax.lax.pmean), or {OUTSIDE}",
        "has an effect": f"and each of {setup.num_batch_shards} devices would do it. C{OUTSIDE[1:]}, where it "
        "happens once",
    }
    reason = f"in {place}, {mixed.what}" if place else mixed.what
    raise ValueError(f"{setup.config.strategy}: {_IN_WORDS[mixed.fault]}: {reason}, {cures[mixed.fault]}") from None


def _explained(setup: Setup, error: TypeError) -> str:
    """The message for JAX's error about a value whose type began to vary, with its likely cause."""
    place = blame.of_error(error, setup.inner)
    return (
        f"{setup.config.strategy}: {_IN_WORDS['varies']}: {f'in {place}, ' if place else ''}it uses a value that "
        "varies and was computed outside the optimizer (a learning rate, a schedule or a value_fn computed from this "
        f"device's rows). Reduce it first (jax.lax.pmean), or {OUTSIDE}. JAX said: {error}"
    )
