"""Frozen params: in the loss like others, cut and gathered like others, but without gradient, update and state."""

import difflib
import re
from collections.abc import Callable, Sequence
from typing import TypeGuard

import jax
import numpy as np
import optax

from jaxshard.base.tree import Names, named_leaves, names_of, path_of, structure, unflatten
from jaxshard.base.types import Tree


def flags(frozen: Tree | Sequence[str] | None, params: Tree) -> list[bool]:
    """For each leaf of `params`, whether it is frozen.

    Args:
      frozen: regular expressions on the '/'-joined path, of which any match freezes; a tree, or prefix, of bools; or
        None.
      params: arrays or shapes.

    Raises:
      TypeError: a leaf of the tree is no bool.
      ValueError: nothing is said of a leaf, or a rule is no regular expression.
    """
    names = [names for names, _ in named_leaves(params)]
    if frozen is None:
        return [False] * len(names)
    if is_rules(frozen):
        return [any(_search(rule, "/".join(name)) for rule in frozen) for name in names]
    given = _given(frozen)
    return [_of_prefix(given, name) for name in names]


def is_rules(frozen: Tree) -> TypeGuard[Sequence[str]]:
    """Whether it is a list of regular expressions."""
    return isinstance(frozen, list | tuple) and all(isinstance(rule, str) for rule in frozen)


def unused(frozen: Tree | Sequence[str] | None, params: Tree) -> str:
    """The error message for a rule that matches no parameter, or an empty text."""
    paths = ["/".join(names) for names, _ in named_leaves(params)]
    if frozen is not None and not is_rules(frozen):
        names = [names for names, _ in named_leaves(params)]
        extra = next((given for given in _given(frozen) if not any(n[: len(given)] == given for n in names)), None)
        return "" if extra is None else f"frozen: {path_of(extra)} is no parameter; drop it, or mend its path"
    rules = frozen if is_rules(frozen) else ()
    missed = next((rule for rule in rules if not any(_search(rule, path) for path in paths)), None)
    if missed is None:
        return ""
    near = difflib.get_close_matches(missed, paths, n=3, cutoff=0.0)
    return f"frozen: the rule {missed!r} matches no parameter; mend or drop it. The nearest paths: {near}"


def in_words(which: Sequence[bool], params: Tree) -> str:
    """A note on an optimizer that cannot start."""
    paths = [path_of(names) for (names, _), yes in zip(named_leaves(params), which, strict=True) if yes]
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return (
        f"frozen: the optimizer gets no {', '.join(paths[:5])}{more}, but an optax.MaskedNode in the place of each; if "
        "it asks for one of them, do not freeze that, or let the optimizer do without"
    )


def _search(rule: str, path: str) -> bool:
    try:
        return re.search(rule, path) is not None
    except re.error as error:
        raise ValueError(f"frozen: the rule {rule!r} is no regular expression: {error}; mend it") from None


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


def _of_prefix(given: dict[Names, bool], names: Names) -> bool:
    prefix = next((names[:n] for n in range(len(names), -1, -1) if names[:n] in given), None)
    if prefix is None:
        raise ValueError(f"frozen: nothing is said of the parameter {path_of(names)}; give True or False for it")
    return given[prefix]


def nothing() -> Tree:
    """What stands in a tree in place of a frozen leaf; it has no leaves."""
    return optax.MaskedNode()


def trained(which: Sequence[bool], tree: Tree) -> Tree:
    """The tree with `optax.MaskedNode`s in place of frozen leaves, as `optax.masked` has them."""
    if not any(which):
        return tree
    leaves = jax.tree.leaves(tree)
    return unflatten(structure(tree), [nothing() if yes else x for x, yes in zip(leaves, which, strict=True)])


def with_frozen(which: Sequence[bool], tree: Tree, like: Tree, fill: Callable[[Tree], Tree]) -> Tree:
    """The tree of all leaves: those of `tree`, which has the trained ones, and `fill(leaf of like)` for frozen ones."""
    if not any(which):
        return tree
    rest, leaves = iter(jax.tree.leaves(tree)), jax.tree.leaves(like)
    return unflatten(structure(like), [fill(x) if yes else next(rest) for x, yes in zip(leaves, which, strict=True)])
