"""Frozen params: the loss uses them, and they are sharded and gathered, but have no gradient, update or state."""

from collections.abc import Callable, Sequence
from typing import TypeGuard

import jax
import numpy as np
import optax

from jaxshard.base.tree import named_leaves, names_of, path_of, structure, unflatten
from jaxshard.base.types import Names, Tree
from jaxshard.layout.specs import by_rules, by_tree


def flags(frozen: Tree | Sequence[str] | None, params: Tree) -> tuple[list[bool], str]:
    """(for each leaf of `params`, whether it is frozen; the error of a rule that matches no leaf, or "").

    Args:
      frozen: regular expressions on the '/'-joined path, of which any match freezes; a tree (or prefix) of bools; None.
      params: arrays or shapes.

    Raises:
      TypeError: a leaf of the tree is not a bool.
      ValueError: a leaf has no bool, or a rule is not a regular expression.
    """
    names = [names for names, _ in named_leaves(params)]
    if frozen is None:
        return [False] * len(names), ""
    if _is_rules(frozen):
        return by_rules("frozen", [(rule, True) for rule in frozen], names, False)
    absent = "the parameter {} is missing; give True or False for it"
    return by_tree("frozen", _given(frozen), names, absent)


def _is_rules(frozen: Tree) -> TypeGuard[Sequence[str]]:
    return isinstance(frozen, list | tuple) and all(isinstance(rule, str) for rule in frozen)


def in_words(which: Sequence[bool], params: Tree) -> str:
    """A note on an optimizer that cannot start."""
    paths = [path_of(names) for (names, _), yes in zip(named_leaves(params), which, strict=True) if yes]
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return (
        f"frozen: in place of {', '.join(paths[:5])}{more} the optimizer gets an optax.MaskedNode; if it needs one of "
        "these params, do not freeze that one"
    )


def _given(frozen: Tree) -> dict[Names, bool]:
    given: dict[Names, bool] = {}
    for path, value in jax.tree_util.tree_flatten_with_path(frozen)[0]:
        if not isinstance(value, bool | np.bool_):
            raise TypeError(
                f"frozen: {path_of(names_of(path))} is {value!r:.80}; give True or False for each parameter, or a list "
                "of regular expressions"
            )
        given[names_of(path)] = bool(value)
    return given


def nothing() -> Tree:
    """The node without leaves that replaces a frozen leaf in a tree."""
    return optax.MaskedNode()


def trained(which: Sequence[bool], tree: Tree) -> Tree:
    """The tree with an `optax.MaskedNode` in place of each frozen leaf, as in `optax.masked`."""
    if not any(which):
        return tree
    leaves = jax.tree.leaves(tree)
    return unflatten(structure(tree), [nothing() if yes else x for x, yes in zip(leaves, which, strict=True)])


def with_frozen(which: Sequence[bool], tree: Tree, like: Tree, fill: Callable[[Tree], Tree]) -> Tree:
    """The full tree: trained leaves from `tree`, and `fill(leaf of like)` for frozen ones."""
    if not any(which):
        return tree
    rest, leaves = iter(jax.tree.leaves(tree)), jax.tree.leaves(like)
    return unflatten(structure(like), [fill(x) if yes else next(rest) for x, yes in zip(leaves, which, strict=True)])
