"""Templates: whether a checkpoint fits one, and the tree assembled from its arrays."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxshard.base.tree import is_key
from jaxshard.base.types import T
from jaxshard.checkpoint.storage.errors import first_line
from jaxshard.checkpoint.storage.leaves import (
    NUMBERS,
    Entry,
    FlatTree,
    Index,
    Leaf,
    Number,
    Shaped,
    dtype_of_number,
    key_implementation,
    matching,
    number,
)


def check_fits(template: FlatTree, index: Index, what: str, cast: bool) -> None:
    """Checks that a checkpoint has the template's leaves, with the same shapes, kinds and dtypes.

    Args:
      template: its leaves.
      index: the checkpoint's.
      what: begins the message: "checkpoint 7 does".
      cast: dtypes may differ.

    Raises:
      ValueError: names the first five leaves that do not fit, and counts the rest.
    """
    if wrong := _wrong(template, index, cast):
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        more += " (only= restores a part)" if set(template.leaves) < set(index) else ""
        parts = "".join(f"; {part}" for part in _fitting_parts(template, index, cast))
        raise ValueError(
            f"{what} not fit the template: " + "; ".join(wrong[:5]) + more + _moved(template, index) + parts
        )


def fits(template: FlatTree, index: Index, cast: bool) -> bool:
    """Whether `check_fits` raises nothing."""
    return not _wrong(template, index, cast)


def _moved(template: FlatTree, index: Index) -> str:
    """A hint where a leaf moved, as when a chain was wrapped: the only saved leaf with the same shape and dtype whose
    path ends in the same two or more names."""
    ends = dict[tuple[str, ...], list[str]]()
    for path in index:
        if path not in template.leaves:
            for end in _ends(path):
                ends.setdefault(end, []).append(path)
    for path, x in template.leaves.items():
        if path not in index:
            found = next((ends[end] for end in _ends(path) if end in ends), [])
            same = [other for other in found if not [*_misfits(path, x, template.keys.get(path), index[other], False)]]
            if len(found) == len(same) == 1:
                return f"; {path} may be the checkpoint's {same[0]} (read it with Checkpointer.read)"
    return ""


def _ends(path: str) -> Iterable[tuple[str, ...]]:
    """The ends of a path with two or more names, the longest first."""
    names = tuple(path.split("/"))
    return (names[i:] for i in range(len(names) - 1))


def _fitting_parts(template: FlatTree, index: Index, cast: bool) -> Iterable[str]:
    """For each part of the tree that fits, in all or some leaves, how to restore it; nothing if no part fits fully."""
    good = {
        path
        for path, x in template.leaves.items()
        if path in index and not [*_misfits(path, x, template.keys.get(path), index[path], cast)]
    }
    every = {path for path in (*template.leaves, *index) if "/" in path}
    tops = {path.partition("/")[0]: set[str]() for path in (*template.leaves, *index) if path in every}
    for path in every:
        tops[path.partition("/")[0]].add(path)
    whole = [top for top, paths in tops.items() if paths <= good]
    shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in template.leaves.values())
    for top in whole:
        tree = f"{{{top!r}: template[{top!r}]}}" if shapes else "template"
        call = f"restore({tree}, only={f'^{re.escape(top)}/'!r})"
        yield f"{top}/ fits ({len(tops[top])} leaves): {call} restores it; the rest keeps its new values"
    for top, paths in tops.items() if whole else ():
        if top not in whole:
            yield f"of {top}/ {len(paths & good)} of {len(paths)} leaves fit"


def _wrong(template: FlatTree, index: Index, cast: bool) -> list[str]:
    wrong = [f"{path} is not in the checkpoint" for path in template.leaves if path not in index]
    wrong += [f"{path} is not in the template" for path in index if path not in template.leaves]
    for path, x in template.leaves.items():
        if path in index:
            wrong += _misfits(path, x, template.keys.get(path), index[path], cast)
    return wrong


def _misfits(path: str, x: Leaf, key: str | None, entry: Entry, cast: bool) -> Iterable[str]:
    """Why the saved leaf cannot become the template's `x`: at most one reason."""
    shape = np.shape(x)
    if shape != tuple(entry["shape"]):
        yield f"{path} has shape {tuple(entry['shape'])}, the template {shape}"
    elif key != entry.get("key"):
        yield f"{path} is a key of type {entry.get('key') or 'none'}, in the template of type {key or 'none'}"
    elif not cast and not _same_dtype(x, entry):
        yield f"{path} has dtype {entry['dtype']}, the template {_dtype(x)} (cast=True converts)"
    elif jnp.dtype(entry["dtype"]).kind == "c" and _dtype(x).kind != "c":
        yield f"{path} is {entry.get('value', 'complex')}, which the template's {_dtype(x)} cannot hold"
    elif isinstance(x, NUMBERS):
        return
    elif "value" in entry and not _can_hold(x, number(entry)):
        yield f"{path} is {entry['value']}, which the template's {x.dtype} cannot hold"
    elif not isinstance(x, np.ndarray) and x.sharding is not None:
        try:
            x.sharding.shard_shape(shape)
        except ValueError as error:
            yield f"{path} of shape {shape} cannot be sharded as in the template: {first_line(error)}"


def _same_dtype(x: Leaf, entry: Entry) -> bool:
    """Whether the dtypes are the same or, if one side is a Python number, both are integer, real or complex."""
    mine, other = _dtype(x), jnp.dtype(entry["dtype"])
    if isinstance(x, NUMBERS) or "value" in entry:
        kinds = {"u": "i", "V": "f"}  # V: bfloat16 and the like
        return kinds.get(mine.kind, mine.kind) == kinds.get(other.kind, other.kind)
    return mine == other


def _dtype(x: Leaf) -> np.dtype:
    return jnp.dtype(dtype_of_number(x)) if isinstance(x, NUMBERS) else x.dtype


def _can_hold(x: Shaped, value: Number) -> bool:
    """Whether the array's dtype can hold this number, apart from rounding."""
    try:
        converted("", as_array(value), x.dtype)
    except (ValueError, OverflowError):
        return False
    return True


# The tree.


def part_of(template: FlatTree, only: str | None) -> FlatTree:
    """The template's leaves whose paths match a regular expression; None: all.

    Raises:
      ValueError: it is not a regular expression, or matches no leaf; or another leaf has only a shape.
    """
    paths = set(matching(template.leaves, only))
    for path, x in template.leaves.items():
        if path not in paths and isinstance(x, jax.ShapeDtypeStruct):
            raise ValueError(
                f"checkpoint: {path} is only a shape in the template, and only={only!r} does not restore it; give its "
                "array, or a template with only the leaves to restore"
            )
    chosen = {path: x for path, x in template.leaves.items() if path in paths}
    return FlatTree(chosen, {path: key for path, key in template.keys.items() if path in paths})


def unflatten(template: T, flat: FlatTree, found: Mapping[str, Leaf]) -> T:
    """Puts loaded leaves into the template's structure, with its types, dtypes and shardings; other leaves stay.

    Args:
      template: the caller's tree.
      flat: its leaves by path.
      found: the loaded leaves, by path.
    """
    leaves, treedef = jax.tree.flatten(template)
    made = [
        _like(path, leaf, found[path]) if path in found else leaf
        for leaf, path in zip(leaves, flat.leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, made)


def _like(path: str, leaf: Leaf | np.generic, x: Leaf) -> Leaf | np.generic:
    """Converts a loaded leaf to the template's type, dtype and sharding."""
    if isinstance(leaf, np.ndarray | np.generic):
        made = np.asarray(converted(path, np.array(as_array(x)), jax.dtypes.canonicalize_dtype(leaf.dtype)))
        return made if isinstance(leaf, np.ndarray) else made[()]
    if isinstance(leaf, NUMBERS):
        return as_number(path, np.asarray(x), type(leaf))
    return _like_array(path, leaf, x)


def _like_array(path: str, leaf: jax.Array | jax.ShapeDtypeStruct, x: Leaf) -> jax.Array:
    if isinstance(x, jax.ShapeDtypeStruct):  # it has no elements, so it was not stored
        return jnp.zeros(x.shape, leaf.dtype, device=x.sharding)
    if is_key(leaf):
        x = x if isinstance(x, jax.Array) else _placed(leaf, np.asarray(x))
        return jax.random.wrap_key_data(x, impl=key_implementation(leaf))
    made = converted(path, x if isinstance(x, jax.Array) else as_array(x), leaf.dtype)
    return made if isinstance(made, jax.Array) else _placed(leaf, made)


def _placed(leaf: jax.Array | jax.ShapeDtypeStruct, x: np.ndarray) -> jax.Array:
    """Puts an array on the template's devices or, if those are open, on JAX's default device."""
    if leaf.sharding is None or (isinstance(leaf, jax.Array) and not leaf.committed):
        return jnp.array(x)
    if leaf.sharding.is_fully_addressable:
        return jax.device_put(x, leaf.sharding, may_alias=False)
    # `device_put` would send the array to all processes to compare it.
    return jax.make_array_from_callback(x.shape, leaf.sharding, lambda index: x[index])


# Conversion of dtypes, which may round numbers but not change them otherwise.


def converted(path: str, x: jax.Array | np.ndarray, dtype: DTypeLike) -> jax.Array | np.ndarray:
    """Converts an array to a dtype; rounds floating-point numbers.

    Raises:
      ValueError: a number is too large for the dtype; or the dtype is integer, and a number has a fraction or is NaN.

    >>> converted("w", np.arange(3), np.float16)
    array([0., 1., 2.], dtype=float16)
    """
    if x.dtype == dtype:
        return x
    with jax.enable_x64(True), np.errstate(all="ignore"):  # or JAX would narrow 64-bit numbers before comparing them
        made = x.astype(dtype)
        if not _holds(x, made):
            raise ValueError(f"checkpoint: {path} is {x.dtype}, with values that {made.dtype} cannot hold")
    return made


def as_array(x: Leaf) -> np.ndarray:
    """An array or number as an array; an integer of more than 64 bits as float64.

    Raises:
      OverflowError: float64 cannot hold it.
    """
    made = np.asarray(x)
    return made if made.dtype != object else made.astype(np.float64)


def as_number(path: str, x: np.ndarray, kind: type[Number]) -> Number:
    """An array of one element as a Python number of this type; raises as `converted` does."""
    value = x.item()
    try:
        made = cast(Any, kind)(value)
    except (TypeError, ValueError, OverflowError):  # a complex number, none, an infinite one
        made = None
    if made is None or (kind in (bool, int) and made != value):
        raise ValueError(f"checkpoint: {path} is {value}, which a Python {kind.__name__} cannot hold")
    return made


def _holds(x: jax.Array | np.ndarray, made: jax.Array | np.ndarray) -> bool:
    """Whether `made` equals `x` apart from rounding."""
    xp: Any = jnp if isinstance(x, jax.Array) else np
    if made.dtype == bool:
        fits = (x == 0) | (x == 1)
    elif jnp.issubdtype(made.dtype, jnp.inexact):
        fits = (xp.isfinite(x) == xp.isfinite(made)) & (xp.isnan(x) == xp.isnan(made))
    elif x.dtype == bool:
        return True
    else:
        fits = _are_in_range(x, jnp.iinfo(made.dtype), xp)
    return bool(xp.all(fits))


def _are_in_range(x: jax.Array | np.ndarray, whole: jnp.iinfo, xp: Any) -> Any:
    low, high = int(whole.min), int(whole.max)
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(np.float64)
        return (x == xp.floor(x)) & (x >= float(low)) & (x < float(high) + 1)
    own = jnp.iinfo(x.dtype)
    return (x >= max(low, int(own.min))) & (x <= min(high, int(own.max)))
