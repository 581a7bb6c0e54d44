"""Traces the inner optimizer's update on shapes, for modules that must know what it computes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxshard.base.jaxprs import depends
from jaxshard.base.memo import by_shapes
from jaxshard.base.tree import Names, named_leaves
from jaxshard.base.types import Jaxpr, Tree
from jaxshard.inner.update import fast, update


class Traced(NamedTuple):
    """A traced update: `jaxpr` maps (gradients, state, params) to (updates, state); also the state before and after."""

    jaxpr: Jaxpr
    before: Tree
    after: Tree


@by_shapes
def first_update(inner: optax.GradientTransformation, params: Tree) -> Traced | None:
    """Traces the first update. None if that fails: it needs further arguments, or the first step will raise."""
    return _traced(inner, params, jax.eval_shape(inner.init, params))


def _traced(inner: optax.GradientTransformation, params: Tree, state: Tree) -> Traced | None:
    def run(grads, state, params):
        offered = {"value": jnp.zeros((), jnp.result_type(float)), "grad": grads}
        return update(inner, grads, state, params, offered)

    try:
        jaxpr, (_, after) = jax.make_jaxpr(run, return_shape=True)(fast(params), state, params)
    except Exception:  # of any type: it is the user's own code
        return None
    return Traced(jaxpr, state, after)


class Settled(NamedTuple):
    """The state after the first update, which for a few optimizers (`optax.monitor`) has other leaves than before.

    `binding` names leaves that the first update drops, or adds for later updates to read. A step that changes these
    leaves cannot be skipped.
    """

    state: Tree
    binding: list[Names]


@by_shapes
def settled(inner: optax.GradientTransformation, params: Tree) -> Settled | None:
    """The state after the first update, if its structure changes; None for nearly all optimizers."""
    first = first_update(inner, params)
    if first is None or jax.tree.structure(first.after) == jax.tree.structure(first.before):
        return None
    before, after = ([names for names, _ in named_leaves(state)] for state in (first.before, first.after))
    second = _traced(inner, params, first.after)
    came = [names for names in after if names not in before]
    read = came if second is None else [names for names in came if _is_read(second, params, after.index(names))]
    return Settled(first.after, [*(names for names in before if names not in after), *read])


def _is_read(traced: Traced, params: Tree, index: int) -> bool:
    """Whether any output depends on leaf `index` of the state before the update."""
    num_grads, num_params = len(jax.tree.leaves(fast(params))), len(jax.tree.leaves(params))
    which = [i == index for i in range(len(jax.tree.leaves(traced.before)))]
    return any(depends(traced.jaxpr, [*[False] * num_grads, *which, *[False] * num_params]))
