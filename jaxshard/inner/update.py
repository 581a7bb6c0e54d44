"""The inner optimizer's `update`, called as plain optax would."""

from collections.abc import Mapping

import optax

from jaxshard.base.types import Tree

_OFFERED = ("value", "grad")


def fast(tree: Tree) -> Tree:
    """What gradients are taken by: the fast one of each pair of lookahead's params; else all params."""
    return tree.fast if isinstance(tree, optax.LookaheadParams) else tree


def with_fast(tree: Tree, of_fast: Tree) -> Tree:
    """The inverse of `fast`: a tree in the structure of `tree`, whose fast part is `of_fast`."""
    return tree._replace(fast=of_fast) if isinstance(tree, optax.LookaheadParams) else of_fast


def update(
    inner: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, extra: Mapping[str, Tree]
) -> tuple[Tree, Tree]:
    """(updates, state). `value` and `grad` are left out where a transformation does not take them, as sam does not."""
    run = optax.with_extra_args_support(inner).update
    while True:
        try:
            return run(fast(grads), state, params, **extra)
        except TypeError as error:
            refused = [name for name in _OFFERED if f"unexpected keyword argument '{name}'" in str(error)]
            if not refused or refused[0] not in extra:
                raise
            extra = {name: value for name, value in extra.items() if name != refused[0]}
