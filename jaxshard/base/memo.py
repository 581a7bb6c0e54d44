"""A cache for functions of a tree that read only its structure, shapes and dtypes."""

import functools
from collections.abc import Callable, Hashable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxshard.base.tree import flatten, shape_of, unflatten
from jaxshard.base.types import T, Tree, TreeDef

Owner = TypeVar("Owner")


def by_shapes(fn: Callable[[Owner, Tree], T]) -> Callable[[Owner, Tree], T]:
    """Caches `fn(owner, tree)`; the key is the owner and the tree's structure, shapes and dtypes.

    `fn` gets the leaves as `ShapeDtypeStruct`s. Nothing is cached for an owner that cannot be hashed, nor for a tree
    with a leaf that is no array, which `fn` gets as it is.
    """

    def of_shapes(owner: Owner, treedef: TreeDef, kinds: tuple[Hashable, ...], float_dtype: Hashable) -> T:
        del float_dtype  # part of the key alone: NumPy's float64 stays float64 on devices only where x64 is on
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
