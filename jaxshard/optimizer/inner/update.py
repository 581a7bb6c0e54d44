"""Calls the inner optimizer's `update` as plain optax does."""

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxshard.base.tree import check_same_structure, named_leaves, path_of, structure
from jaxshard.base.types import Tree

PART = "the update"  # in a step, for `programs.source`

Update: TypeAlias = Callable[
    [optax.GradientTransformation, Tree, Tree, Tree, Mapping[str, Tree]], tuple[Tree, Tree]
]  # like `update`: (inner, gradients, state, params, further arguments) -> (updates, state)

_OFFERED = ("value", "grad")  # `train_step` passes these to every optimizer that accepts them


def fast(tree: Tree) -> Tree:
    """The params that the loss uses: the fast ones of `optax.LookaheadParams`, else all."""
    return tree.fast if isinstance(tree, optax.LookaheadParams) else tree


def with_fast(tree: Tree, of_fast: Tree) -> Tree:
    """The inverse of `fast`: `tree` with `of_fast` as its fast part."""
    return tree._replace(fast=of_fast) if isinstance(tree, optax.LookaheadParams) else of_fast


def update(
    inner: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, extra: Mapping[str, Tree]
) -> tuple[Tree, Tree]:
    """Returns (updates, state). A transformation that refuses `value` or `grad`, like sam, is called without it.

    Raises:
      TypeError: the optimizer lacks an argument that it needs, or does not return (updates, state).
      ValueError: the updates do not fit the params.
    """
    run = optax.with_extra_args_support(inner).update
    while True:
        try:
            result = run(fast(grads), state, params, **extra)
            break
        except TypeError as error:
            refused = [name for name in _OFFERED if f"unexpected keyword argument '{name}'" in str(error)]
            if not refused or refused[0] not in extra:
                _raise_if_missing(error)
                raise
            extra = {name: value for name, value in extra.items() if name != refused[0]}
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"update: the optimizer's update must return (updates, state), not {type(result).__name__}")
    return _fitting(result[0], grads if params is None else params), result[1]


def _fitting(updates: Tree, params: Tree) -> Tree:
    """The updates in the params' shapes; smaller ones are broadcast, as in `optax.apply_updates`.

    Raises:
      TypeError: an update is neither an array nor a number.
      ValueError: the updates and params differ in structure, or a shape cannot be broadcast.
    """
    shapes = [(names, jnp.shape(leaf)) for names, leaf in named_leaves(params)]
    if structure(updates) != structure(params):
        like = jax.tree.unflatten(structure(updates), [0] * structure(updates).num_leaves)
        check_same_structure("update: the optimizer's updates", like, jax.tree.map(lambda _: 0, params), "parameter")
        raise ValueError(
            f"update: the optimizer's updates have the structure {structure(updates)}, and the params "
            f"{structure(params)}; return updates of the params' structure"
        )
    leaves = [
        _broadcast(path_of(names), u, shape) for (names, shape), u in zip(shapes, jax.tree.leaves(updates), strict=True)
    ]
    return jax.tree.unflatten(structure(updates), leaves)


def _broadcast(path: str, update: Tree, shape: tuple[int, ...]) -> Tree:
    check_is_array(f"update: the optimizer's update of {path}", update)
    given = jnp.shape(update)
    if given == shape:
        return update
    try:
        return jnp.broadcast_to(update, shape)
    except ValueError as error:
        raise ValueError(
            f"update: the optimizer's update of {path} has shape {given}, and that parameter has {shape}; return "
            "updates of the params' shapes"
        ) from error


def check_is_array(what: str, leaf: Tree) -> None:
    """Raises a TypeError for a leaf that is neither an array of numbers (or keys) nor a number."""
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    if not (is_array or isinstance(leaf, bool | int | float | complex)) or (
        isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "OSUmM"
    ):
        raise TypeError(
            f"{what} is of type {type(leaf).__name__}, neither an array nor a number; keep it out of the tree, in the "
            "function's closure or a node's static part"
        )


def _raise_if_missing(error: TypeError) -> None:
    """Raises a TypeError with the cure if the error is about a missing argument, such as `value_fn`."""
    missing = re.search(r"missing \d+ required keyword-only arguments?: '(\w+)'", str(error))
    if not missing:
        return
    name = missing[1]
    value = "lambda params: loss_fn(params, batch)" if name == "value_fn" else "..."
    raise TypeError(
        f"update: the optimizer needs the argument {name!r}: give\n"
        f'train_step(loss_fn, opt, extra=lambda params, batch: {{"{name}": {value}}})\n'
        "or in a step of your own\n"
        f"opt.update(grads, state, params, value=loss, grad=grads, {name}={value})"
    ) from error
