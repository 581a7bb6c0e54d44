"""The local view: `update` inside a user's own `jax.shard_map` over the data axes."""

from typing import Any

import jax
from jax import lax

from jaxshard.base.tree import named_leaves, path_of, shape_of
from jaxshard.core import collectives, layout, precision
from jaxshard.core.layout import Layout
from jaxshard.core.precision import like
from jaxshard.core.specs import axes_of
from jaxshard.inner import blame, elementwise
from jaxshard.inner.update import fast, with_fast


def local_update(engine: Any, updates: Any, state: Any, params: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
    """Averages and scatters this device's gradients, updates its shard, gathers the updates.

    Raises:
      TypeError: gradients (or params, or extra arguments) of a type that cannot be right.
      ValueError: a strategy, an optimizer or a shard_map that the local view cannot serve.
    """
    _check_boundary(engine)
    _check_types(engine, updates, params, extra)
    like = updates if params is None else params
    found = layout.layout_params(engine.config, like, engine.sizes)
    dims = [leaf.dims if engine.config.cuts.state else () for leaf in found.params]
    treedef, of_grads = jax.tree.structure(like), jax.tree.structure(fast(updates))
    fast_come_first = zip(jax.tree.leaves(fast(updates)), dims, strict=False)
    grads = jax.tree.unflatten(of_grads, [_average(g, d, engine) for g, d in fast_come_first])
    mine = None
    if params is not None:
        parts = [collectives.own_part(p, d, engine.sizes) for p, d in zip(jax.tree.leaves(params), dims, strict=True)]
        mine = jax.tree.unflatten(treedef, parts)
        grads = with_fast(mine, grads)
    _check_elementwise(engine, found, like, (grads, state, mine, extra))
    out, state = engine.shard_step(grads, state, mine, None, extra, new=precision.widens(engine.config))
    out = [collectives.gather(u, d, invarying=True) for u, d in zip(jax.tree.leaves(out), dims, strict=True)]
    out = jax.tree.unflatten(treedef, out)
    return engine.as_updates(out, params), state


def _average(g: jax.Array, dims: collectives.Dims, engine: Any) -> jax.Array:
    dtype = g.dtype
    g = collectives.scatter_sum(g.astype(like(engine.config.reduce_dtype, dtype)), dims)
    done = {axis for _, axes in dims for axis in axes}
    rest = [axis for axis in engine.batch_axes if axis not in done and axis in collectives.varying(g)]
    return (collectives.total(g, rest) / engine.num_batch_shards).astype(dtype)


def _check_boundary(engine: Any) -> None:
    name, axes = engine.config.strategy, engine.batch_axes
    for option in ("stochastic_rounding", "moment_dtype"):
        if getattr(engine.config, option):
            raise ValueError(
                f"{name}: {option} rounds by an array's place in the whole leaf, which a shard does not know; call "
                "update outside shard_map"
            )
    if engine.config.cuts.params:
        raise ValueError(
            f"{name}: the params themselves are cut, so a plain shard_map cannot hold them; use "
            "jaxshard.value_and_grad (or zero2) and call update outside shard_map"
        )
    missing = [axis for axis in axes if axis not in collectives.manual_axes() and engine.sizes[axis] > 1]
    if missing:
        raise ValueError(f"{name}: update inside a shard_map that leaves {missing} out; make all of {axes} manual")
    if not collectives.varying(lax.axis_index(axes)):
        raise ValueError(
            f"{name}: under shard_map(check_vma=False) nothing says whether gradients were already averaged; "
            "use check_vma=True (the default), or call update outside shard_map"
        )
    used = axes_of(engine.config.specs) & collectives.manual_axes()
    if any(engine.sizes[axis] > 1 for axis in used):
        raise ValueError(f"{name}: specs over the manual axes {sorted(used)}: call update outside shard_map")


def _check_types(engine: Any, updates: Any, params: Any, extra: dict[str, Any]) -> None:
    axes = {axis for axis in engine.batch_axes if engine.sizes[axis] > 1}
    for names, g in named_leaves(updates):
        if missing := sorted(axes - collectives.varying(g)):
            raise TypeError(
                f"{engine.config.strategy}: the gradient of {path_of(names)} does not vary over {missing}: it "
                "was already reduced, as a sum or as a mean, which no type tells. Either cast the params before "
                f"differentiating, jax.lax.pcast(params, {tuple(engine.batch_axes)}, to='varying'), and pass the "
                "partial gradients; or average them yourself and call update outside shard_map"
            )
    for what, tree in (("params", params), ("extra argument", extra)):
        for names, x in named_leaves(tree):
            if isinstance(x, jax.Array) and (wrong := sorted(axes & collectives.varying(x))):
                raise TypeError(
                    f"{engine.config.strategy}: {what} {path_of(names)} varies over {wrong}; pass params as "
                    "they came in, not their cast, and reduce other values first (jax.lax.pmean)"
                )


def _check_elementwise(engine: Any, found: Layout, like: Any, args: tuple[Any, Any, Any, Any]) -> None:
    if not any(leaf.dims for leaf in found.params) or not engine.config.cuts.state:
        return
    grads, state, mine, extra = args
    whole_state = engine.expected_state(state, like)
    labels = [_relation(leaf) for leaf in (*found.params, *layout.layout_state(found, whole_state).state)]
    labels += labels[: len(found.params)] if mine is not None else []
    on_whole = (like, whole_state, None if mine is None else like)
    whole = _traced(engine, on_whole, extra)  # first: where this fails, the fault is not in the shards
    try:
        elementwise.check_elementwise(_traced(engine, (grads, state, mine), extra), whole, labels)
        return
    except elementwise.NotElementwise as error:
        place, reason = blame.of_equations(error.mixed.trail, engine.inner), error.mixed.what
    except Exception as error:  # of any type: the user's own code, run on shapes that it may not be made for
        paths = ", ".join(leaf.path for leaf in found.params if leaf.dims)
        place, reason = blame.of_error(error, engine.inner), f"it cannot run on the shards of {paths}: {error}"
    reason = f"in {place}, {reason}" if place else reason
    raise ValueError(
        f"{engine.config.strategy}: the inner optimizer is not element-wise: {reason}, so the result would be wrong. "
        "Call update outside shard_map (jaxshard.value_and_grad gives it the gradients), where every optax optimizer "
        "is exact; or use ddp; or keep such leaves whole with min_shard_size"
    )


def _relation(leaf: layout.Leaf) -> elementwise.Label:
    return elementwise.Shard(leaf.path, leaf.dims) if leaf.dims else elementwise.SAME


def _traced(engine: Any, trees: Any, extra: dict[str, Any]) -> Any:
    """The inner step, traced on plain shapes, so that varying types cannot get in the way."""
    leaves, treedef = jax.tree.flatten(trees)
    shapes = [shape_of(x) for x in leaves]
    new = precision.widens(engine.config)

    def step(leaves):
        return engine.shard_step(*jax.tree.unflatten(treedef, leaves), None, extra, new=new)

    return jax.make_jaxpr(step)(shapes)
