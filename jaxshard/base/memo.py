"""Answers kept by the structure, shapes and dtypes of a tree, whose numbers do not matter to them."""

import functools
from collections.abc import Callable, Hashable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxshard.base.tree import flatten, shape_of, unflatten
from jaxshard.base.types import T, Tree, TreeDef

Owner = TypeVar("Owner")


def by_shapes(fn: Callable[[Owner, Tree], T]) -> Callable[[Owner, Tree], T]:
    """Caches `fn(owner, tree)` by the owner, and by the tree's structure, shapes and dtypes; `fn` gets shapes.

    An owner that cannot be hashed, or a tree of other things than arrays, is answered anew each time.
    """

    def of_shapes(owner: Owner, treedef: TreeDef, kinds: tuple[Hashable, ...], wide: Hashable) -> T:
        del wide  # NumPy's float64 is another dtype on devices where x64 is on
        shapes = [shape_of(jax.ShapeDtypeStruct(shape, dtype)) for shape, dtype in kinds]  # pyright: ignore
        return fn(owner, unflatten(treedef, shapes))

    cached = functools.lru_cache(maxsize=64)(of_shapes)

    @functools.wraps(fn)
    def ask(owner: Owner, tree: Tree) -> T:
        leaves, treedef = flatten(tree)
        try:
            kinds = tuple([(leaf.shape, leaf.dtype) for leaf in leaves])
        except AttributeError:
            return fn(owner, tree)
        try:
            return cached(owner, treedef, kinds, jnp.result_type(float))
        except TypeError as error:
            if "unhashable" not in str(error):
                raise
            return fn(owner, jax.tree.map(shape_of, tree))

    return ask
