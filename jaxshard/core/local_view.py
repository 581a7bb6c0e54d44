"""The local view: `update` inside a user's own `jax.shard_map` over the data axes."""

import jax
from jax import lax

from jaxshard.base.axes import Dims, axes_of
from jaxshard.base.tree import named_leaves, path_of, shape_of
from jaxshard.base.types import Jaxpr, Tree
from jaxshard.core import collectives
from jaxshard.core.cutting import Leaf
from jaxshard.core.layout import Layout, layout_state
from jaxshard.core.precision import like
from jaxshard.core.sharding import Setup
from jaxshard.core.update import Extra, as_updates, shard_step
from jaxshard.inner import blame, elementwise
from jaxshard.inner.update import fast, with_fast


def local_update(setup: Setup, updates: Tree, state: Tree, params: Tree, extra: Extra) -> tuple[Tree, Tree]:
    """Averages and scatters this device's gradients, updates its shard, gathers the updates.

    Raises:
      TypeError: gradients, params or extra arguments vary over the wrong axes.
      ValueError: the strategy, the optimizer or the shard_map does not allow an update in the local view.
    """
    _check_boundary(setup)
    _check_types(setup, updates, params, extra)
    whole = updates if params is None else params
    found = setup.layout(whole)
    dims = [leaf.dims if setup.config.cuts.state else () for leaf in found.params]
    treedef, of_grads = jax.tree.structure(whole), jax.tree.structure(fast(updates))
    pairs = zip(jax.tree.leaves(fast(updates)), dims, strict=False)  # lookahead's fast params come first
    grads = jax.tree.unflatten(of_grads, [_average(g, d, setup) for g, d in pairs])
    mine = None
    if params is not None:
        parts = [collectives.own_part(p, d, setup.sizes) for p, d in zip(jax.tree.leaves(params), dims, strict=True)]
        mine = jax.tree.unflatten(treedef, parts)
        grads = with_fast(mine, grads)
    _check_elementwise(setup, found, whole, (grads, state, mine, extra))
    out, state = shard_step(setup, grads, state, mine, None, extra, new=setup.config.widens)
    out = [collectives.gather(u, d, invarying=True) for u, d in zip(jax.tree.leaves(out), dims, strict=True)]
    out = jax.tree.unflatten(treedef, out)
    return as_updates(setup, out, params), state


def _average(g: jax.Array, dims: Dims, setup: Setup) -> jax.Array:
    dtype = g.dtype
    g = collectives.scatter_sum(g.astype(like(setup.config.reduce_dtype, dtype)), dims)
    done = {axis for _, axes in dims for axis in axes}
    rest = [axis for axis in setup.batch_axes if axis not in done and axis in collectives.varying(g)]
    return (collectives.total(g, rest) / setup.num_batch_shards).astype(dtype)


def _check_boundary(setup: Setup) -> None:
    name, axes = setup.config.strategy, setup.batch_axes
    for option in ("stochastic_rounding", "moment_dtype"):
        if getattr(setup.config, option):
            raise ValueError(
                f"{name}: {option} rounds by an array's place in the whole leaf, which a shard does not know; call "
                "update outside shard_map"
            )
    if setup.config.cuts.params:
        raise ValueError(
            f"{name}: the params themselves are cut, so a plain shard_map cannot hold them; use "
            "jaxshard.value_and_grad (or zero2) and call update outside shard_map"
        )
    missing = [axis for axis in axes if axis not in collectives.manual_axes() and setup.sizes[axis] > 1]
    if missing:
        raise ValueError(f"{name}: update inside a shard_map that leaves {missing} out; make all of {axes} manual")
    if not collectives.varying(lax.axis_index(axes)):
        raise ValueError(
            f"{name}: under shard_map(check_vma=False) nothing says whether gradients were already averaged; "
            "use check_vma=True (the default), or call update outside shard_map"
        )
    used = axes_of(setup.config.specs) & collectives.manual_axes()
    if any(setup.sizes[axis] > 1 for axis in used):
        raise ValueError(f"{name}: specs over the manual axes {sorted(used)}: call update outside shard_map")


def _check_types(setup: Setup, updates: Tree, params: Tree, extra: Extra) -> None:
    axes = {axis for axis in setup.batch_axes if setup.sizes[axis] > 1}
    for names, g in named_leaves(updates):
        if missing := sorted(axes - collectives.varying(g)):
            raise TypeError(
                f"{setup.config.strategy}: the gradient of {path_of(names)} does not vary over {missing}: it "
                "was already reduced, as a sum or as a mean, which no type tells. Either cast the params before "
                f"differentiating, jax.lax.pcast(params, {tuple(setup.batch_axes)}, to='varying'), and pass the "
                "partial gradients; or average them yourself and call update outside shard_map"
            )
    for what, tree in (("params", params), ("extra argument", extra)):
        for names, x in named_leaves(tree):
            if isinstance(x, jax.Array) and (wrong := sorted(axes & collectives.varying(x))):
                raise TypeError(
                    f"{setup.config.strategy}: {what} {path_of(names)} varies over {wrong}; pass params as "
                    "they came in, not their cast, and reduce other values first (jax.lax.pmean)"
                )


def _check_elementwise(setup: Setup, found: Layout, like: Tree, args: tuple[Tree, Tree, Tree, Extra]) -> None:
    if not any(leaf.dims for leaf in found.params) or not setup.config.cuts.state:
        return
    grads, state, mine, extra = args
    whole_state = setup.expected_state(state, like)
    labels = [_relation(leaf) for leaf in (*found.params, *layout_state(found, whole_state).state)]
    labels += labels[: len(found.params)] if mine is not None else []
    on_whole = (like, whole_state, None if mine is None else like)
    whole = _traced(setup, on_whole, extra)  # first: if this raises, the shards are not to blame
    try:
        elementwise.check_elementwise(_traced(setup, (grads, state, mine), extra), whole, labels)
        return
    except elementwise.NotElementwise as error:
        place, reason = blame.of_equations(error.mixed.trail, setup.inner), error.mixed.what
    except Exception as error:  # of any type: the user's own code, run on shapes that it may not be made for
        paths = ", ".join(leaf.path for leaf in found.params if leaf.dims)
        place, reason = blame.of_error(error, setup.inner), f"it cannot run on the shards of {paths}: {error}"
    reason = f"in {place}, {reason}" if place else reason
    raise ValueError(
        f"{setup.config.strategy}: the inner optimizer is not element-wise: {reason}, so the result would be wrong. "
        "Call update outside shard_map (jaxshard.value_and_grad gives it the gradients), where every optax optimizer "
        "is exact; or use ddp; or keep such leaves whole with min_shard_size"
    )


def _relation(leaf: Leaf) -> elementwise.Label:
    return elementwise.Shard(leaf.path, leaf.dims) if leaf.dims else elementwise.SAME


def _traced(setup: Setup, trees: Tree, extra: Extra) -> Jaxpr:
    """The inner step, traced on plain shapes: in varying types, shards would differ from whole leaves."""
    leaves, treedef = jax.tree.flatten(trees)
    shapes = [shape_of(x) for x in leaves]
    new = setup.config.widens

    def step(leaves):
        grads, state, mine = jax.tree.unflatten(treedef, leaves)
        return shard_step(setup, grads, state, mine, None, extra, new=new)

    return jax.make_jaxpr(step)(shapes)
