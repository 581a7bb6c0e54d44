"""The paths of leaves as names, questions about whole trees, and a cache by their shapes."""

import functools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxshard.base.types import Names, T, Tree, TreeDef

_trees: Any = jax.tree  # JAX gives the functions of these modules no types
_paths: Any = jax.tree_util
_jax: Any = jax


def flatten(tree: Tree) -> tuple[list[Tree], TreeDef]:
    """The leaves of a tree, and its structure."""
    return _trees.flatten(tree)


def unflatten(treedef: TreeDef, leaves: Iterable[object]) -> Tree:
    """The tree of this structure with these leaves.

    Raises:
      TypeError: a node of it, of the user's own type, refuses such leaves.
    """
    leaves = list(leaves)
    try:
        return _trees.unflatten(treedef, leaves)
    except Exception as error:  # of any type: it is the user's own code
        if len(leaves) != treedef.num_leaves:
            raise
        raise TypeError(
            f"a node of the tree, of a type of yours, cannot be rebuilt with leaves that are not arrays, but jaxshard "
            f"and JAX store specs and shapes in such nodes: {type(error).__name__}: {error}\n"
            "Its tree_unflatten must create the node without checks or conversions: node = object.__new__(cls), then "
            "set the attributes"
        ) from error


def structure(tree: Tree) -> TreeDef:
    """The structure of a tree, without its leaves."""
    return _trees.structure(tree)


def names_of(path: Iterable[object]) -> Names:
    """The names on a key path; the trailing `.value` of nnx variables and boxed linen params is dropped.

    >>> names_of(jax.tree_util.tree_flatten_with_path({"a": [1]})[0][0][0])
    ('a', '0')
    """
    path = tuple(path)
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return tuple(_paths.keystr((key,), simple=True) for key in path)


def path_of(names: Names) -> str:
    """The names joined by slashes; "(the only leaf)" if there are none."""
    return "/".join(names) or "(the only leaf)"


def unambiguous_path(names: Names) -> str:
    """As `path_of`, with slashes in names written as %2F, so that no two paths are the same.

    >>> unambiguous_path(("a/b", "c"))
    'a%2Fb/c'
    """
    return path_of(tuple(name.replace("%", "%25").replace("/", "%2F") for name in names))


def names_in(path: str) -> Names:
    """The names of an `unambiguous_path`.

    >>> names_in("a%2Fb/c")
    ('a/b', 'c')
    """
    return tuple(name.replace("%2F", "/").replace("%25", "%") for name in path.split("/"))


def named_leaves(tree: Tree) -> list[tuple[Names, Tree]]:
    """(the names on its path, the leaf) for each leaf, in the order of `jax.tree.leaves`."""
    return [(names_of(path), leaf) for path, leaf in _paths.tree_flatten_with_path(tree)[0]]


def owner_of(names: Names, owners: Mapping[Names, T]) -> T | None:
    """The owner whose path is the longest suffix of this path, or None: ("w",) owns ("0", "mu", "w").

    >>> owner_of(("0", "mu", "w"), {("w",): "the parameter"})
    'the parameter'
    """
    suffixes = (names[start:] for start in range(len(names) + 1))
    return next((owners[suffix] for suffix in suffixes if suffix in owners), None)


def parent_of(names: Names, owners: Mapping[Names, T]) -> T | None:
    """The owner whose path ends inside this path: ("w",) owns ("0", "parts", "w", "2").

    >>> parent_of(("0", "parts", "w", "2"), {("w",): "the parameter"})
    'the parameter'
    """
    stops = range(len(names) - 1, 1, -1)
    return next((found for stop in stops if (found := owner_of(names[1:stop], owners)) is not None), None)


def compiled(what: str, rule: str) -> re.Pattern[str]:
    """A rule as a pattern, to search for in a path joined by slashes.

    Raises:
      ValueError: the rule is not a regular expression; `what` names it in the message.
    """
    try:
        return re.compile(rule)
    except (re.error, TypeError) as error:
        raise ValueError(f"{what} is not a regular expression: {error}; correct it") from None


def first_rules(what: str, rules: Sequence[str], paths: Sequence[str]) -> tuple[list[int | None], str | None]:
    """(for each path, the index of the first rule that matches it, or None; a rule that matches no path, or None).

    >>> first_rules("specs", ["w$", "k"], ["a/w", "a/b"])
    ([0, None], 'k')
    """
    patterns = [compiled(f"{what}: the rule {rule!r}", rule) for rule in rules]
    found = [next((i for i, each in enumerate(patterns) if each.search(path)), None) for path in paths]
    return found, next((each.pattern for each in patterns if not any(map(each.search, paths))), None)


def shape_of(x: Tree, sharding: jax.sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
    """The shape of `x`, in the dtype that it has on a device: NumPy's float64 is float32 there, unless x64 is on."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)


def dtype_of(x: Tree) -> Any:
    """The dtype of an array, or of a Python number, on a device."""
    return jax.dtypes.canonicalize_dtype(jnp.result_type(x), allow_extended_dtype=True)


def shapes_of(tree: Tree) -> Tree:
    """The shapes of a tree whose leaves may be Python's numbers."""
    leaves, treedef = flatten(tree)
    return unflatten(treedef, [jax.ShapeDtypeStruct(jnp.shape(x), dtype_of(x)) for x in leaves])


def have_same_shapes(one: Tree, other: Tree) -> bool:
    """Whether two trees of arrays or shapes agree in structure, shapes and dtypes."""
    if one is other:
        return True
    (leaves, treedef), (others, other_treedef) = flatten(one), flatten(other)
    if treedef != other_treedef:
        return False
    return all(
        getattr(a, "shape", None) == b.shape and getattr(a, "dtype", None) == b.dtype
        for a, b in zip(leaves, others, strict=True)
    )


def sum_dtype(x: Tree) -> jnp.dtype:
    """The dtype for sums of many arrays like `x`: its own, or float32 if that is wider."""
    return jnp.promote_types(x.dtype, jnp.float32)


def matched(fn: Callable[[Tree, Tree], Tree], new: Tree, old: Tree) -> Tree:
    """`new`, with `fn(new leaf, old leaf)` for each leaf whose path is in `old` too; other leaves stay.

    >>> matched(lambda new, old: new + old, {"kept": 1, "came": 2}, {"kept": 10, "went": 20})
    {'came': 2, 'kept': 11}
    """
    if structure(new) == structure(old):
        return jax.tree.map(fn, new, old)
    found = dict(named_leaves(old))
    leaves = [fn(leaf, found[names]) if names in found else leaf for names, leaf in named_leaves(new)]
    return unflatten(structure(new), leaves)


def is_traced(*trees: Tree) -> bool:
    """Whether any leaf is being traced, under `jit` or another transformation."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))


def parted(tree: Tree) -> tuple[list[Tree], Callable[[Iterable[Tree]], Tree]]:
    """The arrays of a tree (or their shapes), and a function that puts others in their places; all else stays."""
    leaves, treedef = flatten(tree)
    which = [isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) for leaf in leaves]

    def put(arrays: Iterable[Tree]) -> Tree:
        filled = iter(arrays)
        return unflatten(treedef, [next(filled) if yes else x for yes, x in zip(which, leaves, strict=True)])

    return [x for yes, x in zip(which, leaves, strict=True) if yes], put


def is_staged() -> bool:
    """Whether operations are recorded, as under `jit`, and not run one by one, as under `vmap` or `grad` alone.

    One by one, the operations of a shard_map are slow.
    """
    return is_traced(jnp.add(0.0, 0.0))


def is_key(x: Tree) -> bool:
    """Whether this is an array of typed PRNG keys."""
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def without_boxes(tree: Tree) -> Tree:
    """The tree with flax's boxes (`nn.Partitioned`, `nn.LogicallyPartitioned`) taken off its leaves."""

    def is_box(x: object) -> bool:
        return hasattr(x, "unbox") and hasattr(x, "replace_boxed") and hasattr(x, "value")

    return _trees.map(lambda x: x.value if is_box(x) else x, tree, is_leaf=is_box)  # pyright: ignore


def is_like_raw_key(x: Tree) -> bool:
    """Whether this may be a raw key of `jax.random.PRNGKey`: uint32, and the last dim has a key's size."""
    if getattr(x, "dtype", None) != jnp.uint32 or not x.shape:
        return False
    default: jax.ShapeDtypeStruct = _jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return x.shape[-1:] == default.shape


def check_alive(what: str, tree: Tree) -> None:
    """Raises a ValueError for a donated or deleted array, on which jax 0.10 would crash the process.

    `what` names the tree in the message.
    """
    if not any(_is_gone(leaf) for leaf in jax.tree.leaves(tree)):
        return  # this runs at every step, so paths are made only for an error
    names = next(names for names, leaf in named_leaves(tree) if _is_gone(leaf))
    raise ValueError(
        f"{what}: {path_of(names)} was donated to an earlier step and deleted; use that step's result, or build the "
        "step with donate=False"
    )


def _is_gone(leaf: Tree) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def check_same_structure(what: str, given: Tree, wanted: Tree, noun: str) -> None:
    """Raises a ValueError that names the first difference between two trees' leaves and shapes.

    In the message, `what` names the given tree, and `noun` names a leaf of the wanted one.
    """
    one = {names: tuple(jnp.shape(leaf)) for names, leaf in named_leaves(given)}
    two = {names: tuple(jnp.shape(leaf)) for names, leaf in named_leaves(wanted)}
    for names in [*two, *one]:
        if names not in one:
            raise ValueError(f"{what}: {path_of(names)} is missing; give every {noun}")
        if names not in two:
            raise ValueError(f"{what}: {path_of(names)} is not a {noun}; give only each {noun}")
        if one[names] != two[names]:
            raise ValueError(f"{what}: {path_of(names)} has shape {one[names]}, but that {noun} has {two[names]}")


Owner = TypeVar("Owner")


def by_shapes(fn: Callable[[Owner, Tree], T]) -> Callable[[Owner, Tree], T]:
    """Caches `fn(owner, tree)`; the key is the owner and the tree's structure, shapes and dtypes.

    `fn` gets the leaves as `ShapeDtypeStruct`s. If the owner cannot be hashed, nothing is cached. If a leaf is not an
    array, nothing is cached either, and `fn` gets the tree itself.
    """

    def of_shapes(owner: Owner, treedef: TreeDef, kinds: tuple[Hashable, ...], float_dtype: Hashable) -> T:
        del float_dtype  # only part of the key: x64 decides whether NumPy's float64 stays float64 on devices
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
