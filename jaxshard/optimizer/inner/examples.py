"""Gradients of each example, of shape (examples, *shape), as `optax.contrib.dpsgd` takes them.

The inner optimizer gets them as a further argument, laid out as they come; zeros take the place of the gradients. So
the state, the updates and the params keep their layout.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxshard.base.tree import by_shapes, parted, structure
from jaxshard.base.types import Tree
from jaxshard.optimizer.inner.update import called, fast

_NAME = "jaxshard_gradients_of_each_example"


def are_of_each_example(grads: Tree, like: Tree) -> bool:
    """Whether each gradient has the shape (examples, *shape) of its leaf, with one number of examples."""
    given, wanted = jax.tree.leaves(grads), jax.tree.leaves(fast(like))
    if not given or structure(grads) != structure(fast(like)):
        return False
    examples = jnp.shape(given[0])[:1]
    return bool(examples) and all(
        jnp.shape(g) == (*examples, *jnp.shape(x)) for g, x in zip(given, wanted, strict=True)
    )


def as_argument(
    inner: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree | None, extra: dict[str, Any]
) -> tuple[optax.GradientTransformation, Tree, dict[str, Any]]:
    """Returns (inner, grads, extra), with gradients of each example as a further argument; others are unchanged.

    They are gradients of each example if each has the shape (examples, *shape) of its update, and of its parameter.
    """
    if params is not None and not are_of_each_example(grads, params):
        return inner, grads, extra
    updates = _updates_of(inner, (grads, state, params, extra))
    if updates is None or not are_of_each_example(grads, updates):
        return inner, grads, extra
    zeros = jax.tree.map(lambda g: jnp.zeros(g.shape[1:], g.dtype), grads)
    return _of_each_example(inner, zeros), zeros, {**extra, _NAME: grads}


@by_shapes
def _updates_of(inner: optax.GradientTransformation, args: tuple[Tree, Tree, Tree, dict[str, Any]]) -> Tree | None:
    """The shapes of the optimizer's updates; None if its update cannot be traced."""
    arrays, with_arrays = parted(args)
    try:
        return jax.eval_shape(lambda arrays: called(inner, *with_arrays(arrays))[0], arrays)
    except Exception:  # of any type: it is the user's own code, and the update raises it again
        return None


@by_shapes
def _of_each_example(inner: optax.GradientTransformation, grads: Tree) -> optax.GradientTransformationExtraArgs:
    """`inner` with its gradients as a further argument; cached, so that what is known of it is found again."""
    del grads

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        each = jax.tree.map(lambda g, x: g.astype(x.dtype), extra.pop(_NAME), updates)  # masters widen gradients
        return called(inner, each, state, params, extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)  # pyright: ignore[reportArgumentType]
