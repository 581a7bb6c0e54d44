"""The leaves of a tree in a checkpoint: each one's path, its array or number, and its entry in the index."""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NotRequired, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import check_alive, compiled, is_key, named_leaves, unambiguous_path
from jaxshard.processes import agreement

NUMBERS = (bool, int, float, complex)
Number: TypeAlias = bool | int | float | complex
Shaped: TypeAlias = jax.Array | np.ndarray | jax.ShapeDtypeStruct
Leaf: TypeAlias = Shaped | Number

_DTYPES: dict[type, str] = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
_SMALL_BYTES, _SMALL_BYTES_IN_ALL = 2**20, 2**28
_NEVER_STORED = ("uint4", "uint2", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3")


class ArrayEntry(TypedDict):
    """An array in the index. `digest`: 32 bits; `key`: for typed PRNG keys, the implementation, such as "threefry2x32";
    their other fields describe their uint32 data."""

    shape: list[int]
    dtype: str
    digest: int
    key: NotRequired[str]


class NumberEntry(TypedDict):
    """A Python number in the index. `shape`: []; `value`: its `repr`."""

    shape: list[int]
    dtype: str
    value: str


Entry: TypeAlias = ArrayEntry | NumberEntry
Index: TypeAlias = Mapping[str, Entry]  # by path


class FlatTree(NamedTuple):
    """The leaves of a tree by path; typed PRNG keys as their uint32 data. `keys`: path -> their implementation."""

    leaves: dict[str, Leaf]
    keys: dict[str, str]

    def arrays(self) -> dict[str, Shaped]:
        """The leaves that are not Python numbers."""
        return {path: x for path, x in self.leaves.items() if not isinstance(x, NUMBERS)}


def flatten(tree: Any, *, shapes: bool = False) -> FlatTree:
    """The leaves of a tree by path, each checked; NumPy arrays in the dtypes that JAX would give them.

    Args:
      tree: arrays and Python numbers.
      shapes: `ShapeDtypeStruct`s are allowed too: the tree is a template.

    Raises:
      ValueError: the tree has no leaves, two have the same path, or an array was donated.
      TypeError: a leaf is neither an array nor a number.
    """
    check_alive("checkpoint", tree)
    found = FlatTree({}, {})
    for names, leaf in named_leaves(tree):
        path = unambiguous_path(names)
        _check_name(path)
        if path in found.leaves:
            raise ValueError(f"checkpoint: two leaves have the path {path!r}; rename one")
        if isinstance(leaf, jax.ShapeDtypeStruct) and not shapes:
            raise TypeError(f"checkpoint: {path} is only a shape; give the array")
        found.leaves[path] = _storable(path, leaf)
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and is_key(leaf):
            found.keys[path] = key_implementation(leaf)
    if not found.leaves:
        raise ValueError("checkpoint: the tree has no leaves")
    return found


def key_implementation(keys: jax.Array | jax.ShapeDtypeStruct) -> str:
    """The name of the PRNG of an array of typed keys, or of such an array's shape.

    >>> key_implementation(jax.random.key(0, impl="rbg"))
    'rbg'
    """
    return str(jax.random.key_impl(keys if isinstance(keys, jax.Array) else jnp.empty((), keys.dtype)))


def _storable(path: str, leaf: object) -> Leaf:
    """The leaf in a form that can be stored; raises if there is none."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"checkpoint: {path} is a masked array; save its data and its mask separately")
    dtype = str(getattr(leaf, "dtype", ""))
    if dtype in _NEVER_STORED:
        raise TypeError(f"checkpoint: {path} is {dtype}, which cannot be stored; convert it to a dtype of 8 bits")
    if isinstance(leaf, np.ndarray | np.generic):
        return _as_on_devices(path, np.asarray(leaf))
    if isinstance(leaf, NUMBERS):
        _check_digits(path, leaf)
        return leaf
    if isinstance(leaf, Tracer):
        raise TypeError(f"checkpoint: {path} is being traced; save outside of jit")
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        raise TypeError(f"checkpoint: {path} is a {type(leaf).__name__}; only arrays and numbers can be saved")
    return _key_data(leaf) if is_key(leaf) else leaf


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"checkpoint: the name {path!r} is not UTF-8; rename this leaf") from None


def _check_digits(path: str, x: Number) -> None:
    try:
        repr(x)
    except ValueError:  # Python's own limit
        raise ValueError(
            f"checkpoint: {path} is an integer of more than {sys.get_int_max_str_digits()} digits"
        ) from None


def _key_data(keys: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
    if isinstance(keys, jax.Array):
        return jax.random.key_data(keys)
    data = jax.eval_shape(jax.random.key_data, keys)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=keys.sharding)


def _as_on_devices(path: str, x: np.ndarray) -> np.ndarray:
    """Converts 64-bit NumPy dtypes as JAX does: float64 to float32, unless x64 is on."""
    known = (x.dtype == bool or jnp.issubdtype(x.dtype, jnp.number)) and x.dtype not in (np.longdouble, np.clongdouble)
    if not known or not x.dtype.isnative:
        raise TypeError(f"checkpoint: {path} is an array of {x.dtype}, which JAX does not support")
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if jnp.issubdtype(dtype, jnp.integer) and x.size and not (x.astype(dtype) == x).all():
        raise ValueError(f"checkpoint: {path} has numbers too large for {dtype}; enable jax_enable_x64")
    return x.astype(dtype)


def is_local(x: Leaf) -> bool:
    """Whether an array lies on devices of this process alone, or in host memory."""
    sharding = getattr(x, "sharding", None)
    return sharding is None or sharding.is_fully_addressable


def small(arrays: Mapping[str, Shaped]) -> list[str]:
    """The paths of arrays of at most 1 MiB, and 256 MiB in all. orbax takes as long for one shard of an array on a
    device as for a whole array in host memory; for many shards it takes minutes."""
    found, total = list[str](), 0
    for path, x in arrays.items():
        num_bytes = math.prod(x.shape) * x.dtype.itemsize
        if num_bytes <= _SMALL_BYTES and total + num_bytes <= _SMALL_BYTES_IN_ALL:
            found.append(path)
            total += num_bytes
    return found


def on_all_devices(x: Shaped) -> Shaped:
    """Makes one array, replicated on every device, of the copies that several processes hold."""
    if agreement.is_alone() or not is_local(x):
        return x
    whole = np.asarray(x)
    mesh = jax.sharding.Mesh(np.asarray(agreement.devices()), ("all",))
    return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P()), lambda index: whole[index])


# The index.


def dtype_of_number(x: Number) -> str:
    """The dtype under which the index lists a Python number.

    >>> dtype_of_number(True), dtype_of_number(7)
    ('bool', 'int64')
    """
    return next(dtype for kind, dtype in _DTYPES.items() if isinstance(x, kind))


def described(step: int, tree: FlatTree) -> str:
    """A line for the step and one for each leaf, which must be the same on all processes."""
    lines = (
        f"{path} {x!r}" if isinstance(x, NUMBERS) else f"{path} {x.dtype}{list(x.shape)}"
        for path, x in tree.leaves.items()
    )
    return "\n".join([f"step {step}", *lines])


def number(entry: NumberEntry) -> Number:
    """The exact Python number of an entry.

    >>> number({"shape": [], "dtype": "float64", "value": "0.1"})
    0.1
    """
    text, kind = entry["value"], np.dtype(entry["dtype"]).kind
    return text == "True" if kind == "b" else {"i": int, "f": float, "c": complex}[kind](text)


def num_bytes(entry: Entry) -> int:
    """The size of the leaf's elements, in bytes."""
    return math.prod(entry["shape"]) * jnp.dtype(entry["dtype"]).itemsize


def is_stored(entry: Entry) -> bool:
    """Whether an array is stored for the leaf; not for a number or an empty array."""
    return "digest" in entry and 0 not in entry["shape"]


def matching(paths: Iterable[str], only: str | None) -> list[str]:
    """The paths that a regular expression matches anywhere; None: all.

    Raises:
      ValueError: it is not a regular expression, or matches no path.

    >>> matching(["params/w", "state/0/mu/w"], "^params/")
    ['params/w']
    """
    paths = list(paths)
    found = paths if only is None else list(filter(compiled(f"checkpoint: only={only!r}", only).search, paths))
    if not found:
        first = f"; the first is {paths[0]}" if paths else ""
        raise ValueError(f"checkpoint: only={only!r} does not match any of {len(paths)} leaves{first}")
    return found


def groups(index: Index, max_bytes: int) -> Iterator[list[str]]:
    """The paths of an index in groups of at most `max_bytes` bytes; a larger leaf is a group by itself.

    >>> entry = {"shape": [4], "dtype": "float32", "digest": 0}
    >>> list(groups({"a": entry, "b": entry, "c": entry}, max_bytes=32))
    [['a', 'b'], ['c']]
    """
    group, total = [], 0
    for path, entry in index.items():
        size = num_bytes(entry)
        if group and total + size > max_bytes:
            yield group
            group, total = [], 0
        group, total = [*group, path], total + size
    if group:
        yield group


def need_x64(index: Index) -> bool:
    """Whether some arrays have 64-bit dtypes, which JAX narrows to 32 bits unless x64 is on."""
    dtypes = {jnp.dtype(entry["dtype"]) for entry in index.values() if "digest" in entry}
    return any(jax.dtypes.canonicalize_dtype(dtype) != dtype for dtype in dtypes)
