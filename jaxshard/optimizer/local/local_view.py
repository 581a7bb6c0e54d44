"""The local view: `update` inside a user's own `jax.shard_map` over the data axes."""

import jax

from jaxshard import collectives
from jaxshard.base.axes import Dims
from jaxshard.base.types import Tree
from jaxshard.optimizer.inner.update import fast, with_fast
from jaxshard.optimizer.local import local_checks
from jaxshard.optimizer.rounding import like
from jaxshard.optimizer.sharding import Setup
from jaxshard.optimizer.update import Extra, as_updates, shard_step


def local_update(setup: Setup, updates: Tree, state: Tree, params: Tree, extra: Extra) -> tuple[Tree, Tree]:
    """Averages and scatters this device's gradients, updates its shard, gathers the updates.

    Raises:
      TypeError: gradients, state, params or extra arguments vary over the wrong axes.
      ValueError: the strategy, the optimizer or the shard_map does not allow an update in the local view.
    """
    whole = updates if params is None else params
    local_checks.check_boundary(setup)
    found = setup.layout(whole)
    whole_state = local_checks.check_inputs(setup, updates, state, params, extra)
    dims = [leaf.dims for leaf in found.params]
    treedef, of_grads = jax.tree.structure(whole), jax.tree.structure(fast(updates))
    pairs = zip(jax.tree.leaves(fast(updates)), dims, strict=False)  # lookahead's fast params come first
    grads = jax.tree.unflatten(of_grads, [_average(g, d, setup) for g, d in pairs])
    mine = None
    if params is not None:
        parts = [collectives.own_part(p, d, setup.sizes) for p, d in zip(jax.tree.leaves(params), dims, strict=True)]
        mine = jax.tree.unflatten(treedef, parts)
        grads = with_fast(mine, grads)
    local_checks.check_update(setup, (grads, state, mine), (whole, whole_state, None if mine is None else whole), extra)
    (out, _), state = shard_step(setup, grads, state, mine, None, extra, new=setup.config.widens)
    out = [collectives.gather(u, d, invarying=True) for u, d in zip(jax.tree.leaves(out), dims, strict=True)]
    out = jax.tree.unflatten(treedef, out)
    return as_updates(setup, out, params), state


def _average(g: jax.Array, dims: Dims, setup: Setup) -> jax.Array:
    dtype = g.dtype
    g = collectives.scatter_sum(g.astype(like(setup.config.reduce_dtype, dtype)), dims)
    done = {axis for _, axes in dims for axis in axes}
    rest = [axis for axis in setup.batch_axes if axis not in done and axis in collectives.varying(g)]
    return (collectives.total(g, rest) / setup.num_batch_shards).astype(dtype)
