"""Calls the inner optimizer's `update` as plain optax does."""

import re
from collections.abc import Mapping

import optax

from jaxshard.base.types import Tree

_OFFERED = ("value", "grad")  # `train_step` gives these to every optimizer that takes them


def fast(tree: Tree) -> Tree:
    """The params that the loss is differentiated by: the fast ones of `optax.LookaheadParams`, else all."""
    return tree.fast if isinstance(tree, optax.LookaheadParams) else tree


def with_fast(tree: Tree, of_fast: Tree) -> Tree:
    """The inverse of `fast`: `tree` with `of_fast` as its fast part."""
    return tree._replace(fast=of_fast) if isinstance(tree, optax.LookaheadParams) else of_fast


def update(
    inner: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, extra: Mapping[str, Tree]
) -> tuple[Tree, Tree]:
    """Returns (updates, state). A transformation that refuses `value` or `grad`, as sam does, is called without it.

    Raises:
      TypeError: it needs an argument that it is not given.
    """
    run = optax.with_extra_args_support(inner).update
    while True:
        try:
            return run(fast(grads), state, params, **extra)
        except TypeError as error:
            refused = [name for name in _OFFERED if f"unexpected keyword argument '{name}'" in str(error)]
            if not refused or refused[0] not in extra:
                _raise_if_missing(error)
                raise
            extra = {name: value for name, value in extra.items() if name != refused[0]}


def _raise_if_missing(error: TypeError) -> None:
    """Raises a TypeError with the cure if the error says that an argument is missing, as `value_fn` often is."""
    missing = re.search(r"missing \d+ required keyword-only arguments?: '(\w+)'", str(error))
    if not missing:
        return
    name = missing[1]
    raise TypeError(
        f"update: the optimizer needs the argument {name!r}; give update(..., {name}=...), or train_step(..., "
        f"extra=lambda params, batch: {{{name!r}: ...}}). A line search's value_fn is a function of params: "
        "lambda params: loss(params, batch)"
    ) from error
