"""The inner optimizer as plain optax would be called; and its update, traced on shapes, for those who ask about it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxshard.base.jaxprs import depends
from jaxshard.base.tree import Names, named_leaves, shape_of

_OFFERED = ("value", "grad")
T = TypeVar("T")


def fast(tree: Any) -> Any:
    """What gradients are taken of: of lookahead's pairs of params the fast ones; else all."""
    return tree.fast if isinstance(tree, optax.LookaheadParams) else tree


def with_fast(tree: Any, of_fast: Any) -> Any:
    """The tree of which `fast` is `of_fast`, in the structure of `tree`."""
    return tree._replace(fast=of_fast) if isinstance(tree, optax.LookaheadParams) else of_fast


def update(
    inner: optax.GradientTransformation, grads: Any, state: Any, params: Any, extra: dict[str, Any]
) -> tuple[Any, Any]:
    """(updates, state). `value` and `grad` go only to those that take them: not to sam, say, in whatever chain."""
    run = optax.with_extra_args_support(inner).update
    while True:
        try:
            return run(fast(grads), state, params, **extra)
        except TypeError as error:
            refused = [name for name in _OFFERED if f"unexpected keyword argument '{name}'" in str(error)]
            if not refused or refused[0] not in extra:
                raise
            extra = {name: value for name, value in extra.items() if name != refused[0]}


# What is read off the traced update.


def by_shapes(fn: Callable[[Any, Any], T]) -> Callable[[Any, Any], T]:
    """Caches `fn(inner, params)` by the optimizer, and by the structure, shapes and dtypes of the params."""

    def of_shapes(inner: Any, treedef: Any, shapes: Any) -> T:
        return fn(inner, jax.tree.unflatten(treedef, shapes))

    cached = functools.lru_cache(maxsize=32)(of_shapes)

    @functools.wraps(fn)
    def ask(inner: Any, params: Any) -> T:
        leaves, treedef = jax.tree.flatten(params)
        shapes = tuple(map(shape_of, leaves))
        try:
            return cached(inner, treedef, shapes)
        except TypeError as error:
            if "unhashable" not in str(error):
                raise
            return of_shapes(inner, treedef, shapes)

    return ask


class Traced(NamedTuple):
    """An update, as a program from (gradients, state, params) to (updates, state); the state before and after it."""

    jaxpr: Any
    before: Any
    after: Any


@by_shapes
def first_update(inner: optax.GradientTransformation, params: Any) -> Traced | None:
    """None where it wants further arguments; and where it is wrong, the first step will say so better."""
    return _traced(inner, params, jax.eval_shape(inner.init, params))


def _traced(inner: optax.GradientTransformation, params: Any, state: Any) -> Traced | None:
    def run(grads, state, params):
        offered = {"value": jnp.zeros((), jnp.result_type(float)), "grad": grads}
        return update(inner, grads, state, params, offered)

    try:
        jaxpr, (_, after) = jax.make_jaxpr(run, return_shape=True)(fast(params), state, params)
    except Exception:  # of any type: it is the user's own code
        return None
    return Traced(jaxpr, state, after)


class Settled(NamedTuple):
    """A state after its first update, where that has other leaves than before, as `optax.monitor`'s does.

    `binding` are the leaves that went, or that came and are read by later updates: of these no step can be undone.
    """

    state: Any
    binding: list[Names]


@by_shapes
def settled(inner: optax.GradientTransformation, params: Any) -> Settled | None:
    """None for nearly all optimizers: their states keep their structure."""
    first = first_update(inner, params)
    if first is None or jax.tree.structure(first.after) == jax.tree.structure(first.before):
        return None
    before, after = ([names for names, _ in named_leaves(state)] for state in (first.before, first.after))
    second = _traced(inner, params, first.after)
    came = [names for names in after if names not in before]
    read = came if second is None else [names for names in came if _is_read(second, params, after.index(names))]
    return Settled(first.after, [*(names for names in before if names not in after), *read])


def _is_read(traced: Traced, params: Any, index: int) -> bool:
    """Whether anything hangs on this leaf of the state before the update."""
    num_before, num_after = len(jax.tree.leaves(fast(params))), len(jax.tree.leaves(params))
    which = [i == index for i in range(len(jax.tree.leaves(traced.before)))]
    return any(depends(traced.jaxpr, [*[False] * num_before, *which, *[False] * num_after]))
