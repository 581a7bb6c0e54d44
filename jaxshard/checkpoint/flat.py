"""Trees as flat sets of named arrays and numbers, an index of these, and the way back by a template."""

import math
import string
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import check_alive, is_key, named_leaves, unambiguous_path
from jaxshard.digest import named_digests

NUMBERS = (bool, int, float, complex)
_DTYPES: dict[type, str] = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
_OF_KIND = {"b": "True".__eq__, "i": int, "f": float, "c": complex}
_NEVER_STORED = ("uint4", "uint2", "float4_e2m1fn")


class Flat(NamedTuple):
    """`leaves`: path -> array or Python's number; of typed keys their data. `keys`: path -> implementation of those."""

    leaves: dict[str, Any]
    keys: dict[str, str]


def flatten(tree: Any, *, shapes: bool = False) -> Flat:
    """The leaves of a tree, `ShapeDtypeStruct`s among them if they may be.

    Raises:
      ValueError: there are no leaves, two have the same path, or an array was donated.
      TypeError: a leaf that is no array and no number.
    """
    check_alive("checkpoint", tree)
    leaves: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for names, leaf in named_leaves(tree):
        path = unambiguous_path(names)
        if path in leaves:
            raise ValueError(f"checkpoint: two leaves are called {path!r}; rename one")
        if isinstance(leaf, jax.ShapeDtypeStruct) and not shapes:
            raise TypeError(f"checkpoint: {path} is only a shape; give the array")
        leaves[path] = _storable(path, leaf)
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and is_key(leaf):
            keys[path] = _implementation(leaf)
    if not leaves:
        raise ValueError("checkpoint: the tree has no leaves")
    return Flat(leaves, keys)


def _implementation(leaf: Any) -> str:
    """Of typed keys, or of their shape."""
    return str(jax.random.key_impl(leaf if isinstance(leaf, jax.Array) else jnp.empty((), leaf.dtype)))


def _storable(path: str, leaf: Any) -> Any:
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"checkpoint: {path} is a masked array; save its data and its mask, each by itself")
    if isinstance(leaf, np.ndarray | np.generic):
        return _as_on_devices(path, np.asarray(leaf))
    if isinstance(leaf, NUMBERS):
        return leaf
    if isinstance(leaf, Tracer):
        raise TypeError(f"checkpoint: {path} is being traced; save outside of jit")
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        raise TypeError(f"checkpoint: {path} is a {type(leaf).__name__}; only arrays and numbers can be saved")
    if str(leaf.dtype) in _NEVER_STORED:
        raise TypeError(f"checkpoint: {path} is {leaf.dtype}, which cannot be stored; convert it to a dtype of 8 bits")
    if not is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _as_on_devices(path: str, x: np.ndarray) -> np.ndarray:
    """NumPy's wide dtypes as JAX has them: float64 rounded to float32, unless x64 is on."""
    if not (x.dtype == bool or jnp.issubdtype(x.dtype, jnp.number)) or not x.dtype.isnative:
        raise TypeError(f"checkpoint: {path} is an array of {x.dtype}; JAX has none such")
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if jnp.issubdtype(dtype, jnp.integer) and x.size and not (x.astype(dtype) == x).all():
        raise ValueError(f"checkpoint: {path} has numbers too large for {dtype}; enable jax_enable_x64")
    return x.astype(dtype)


def arrays(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are no numbers."""
    return {path: x for path, x in leaves.items() if not isinstance(x, NUMBERS)}


def is_local(x: Any) -> bool:
    """Whether it lies on devices of this process alone, or on none."""
    sharding = getattr(x, "sharding", None)
    return sharding is None or sharding.is_fully_addressable


def everywhere(x: Any) -> Any:
    """What each of several processes holds for itself, as one array with a copy on each device."""
    if jax.process_count() == 1 or not is_local(x):
        return x
    whole = np.asarray(x)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("all",))
    return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P()), lambda index: whole[index])


# The index.


def index_of(flat: Flat) -> dict[str, dict[str, Any]]:
    """Path -> shape and dtype; of arrays the digest (of typed keys the implementation, too), of numbers the value."""
    found = named_digests(arrays(flat.leaves))
    return {path: _entry(x, found.get(path), flat.keys.get(path)) for path, x in flat.leaves.items()}


def _entry(x: Any, digest: int | None, key: str | None) -> dict[str, Any]:
    if isinstance(x, NUMBERS):
        return {"shape": [], "dtype": _dtype_of_number(x), "value": repr(x)}
    entry = {"shape": list(x.shape), "dtype": str(x.dtype), "digest": digest}
    return entry if key is None else entry | {"key": key}


def _dtype_of_number(x: Any) -> str:
    return next(dtype for kind, dtype in _DTYPES.items() if isinstance(x, kind))


def described(step: int, flat: Flat) -> str:
    """A line for each leaf, in which processes are to agree."""
    lines = (
        f"{path} {x!r}" if isinstance(x, NUMBERS) else f"{path} {x.dtype}{list(x.shape)}"
        for path, x in flat.leaves.items()
    )
    return "\n".join([f"step {step}", *lines])


def number(saved: Mapping[str, Any]) -> Any:
    """Python's number, to the last bit."""
    return _OF_KIND[np.dtype(saved["dtype"]).kind](saved["value"])


def parts(leaves: Mapping[str, Any], num_bytes: int) -> Iterator[list[str]]:
    """The paths of an index, in groups of so many bytes, or of one leaf that is larger."""
    part, total = [], 0
    for path, saved in leaves.items():
        size = math.prod(saved["shape"]) * jnp.dtype(saved["dtype"]).itemsize
        if part and total + size > num_bytes:
            yield part
            part, total = [], 0
        part, total = [*part, path], total + size
    if part:
        yield part


def are_wide(leaves: Mapping[str, Any]) -> bool:
    """Whether some arrays of an index need 64 bits that JAX would take away."""
    dtypes = {jnp.dtype(saved["dtype"]) for saved in leaves.values() if "digest" in saved}
    return any(jax.dtypes.canonicalize_dtype(dtype) != dtype for dtype in dtypes)


# Templates.


def check_same(wanted: Flat, leaves: Mapping[str, Any], what: str, cast: bool) -> None:
    """Raises ValueError, which names what is wrong, unless the template `wanted` fits the index `leaves`."""
    wrong = [f"{path} is not in the checkpoint" for path in wanted.leaves if path not in leaves]
    wrong += [f"{path} is not in the template" for path in leaves if path not in wanted.leaves]
    for path, x in wanted.leaves.items():
        if path in leaves:
            wrong += _misfits(path, x, wanted.keys.get(path), leaves[path], cast)
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"{what} not fit the template: " + "; ".join(wrong[:5]) + more)


def _misfits(path: str, x: Any, key: str | None, saved: Mapping[str, Any], cast: bool) -> Iterable[str]:
    shape = np.shape(x)
    if shape != tuple(saved["shape"]):
        yield f"{path} has shape {tuple(saved['shape'])}, the template {shape}"
    elif key != saved.get("key"):
        yield f"{path} is a key of {saved.get('key') or 'no kind'}, in the template of {key or 'no kind'}"
    elif not cast and not _same_dtype(x, saved):
        dtype = _dtype_of_number(x) if isinstance(x, NUMBERS) else x.dtype
        yield f"{path} has dtype {saved['dtype']}, the template {dtype} (cast=True converts)"
    elif "value" in saved and not _holds(x, number(saved)):
        yield f"{path} is {saved['value']}, which the template's {x.dtype} cannot hold"
    elif not isinstance(x, NUMBERS) and getattr(x, "sharding", None) is not None:
        try:
            x.sharding.shard_shape(shape)
        except ValueError as error:
            yield f"{path} of shape {shape} cannot lie as the template says: {first_line(error)}"


def _same_dtype(x: Any, saved: Mapping[str, Any]) -> bool:
    """Between numbers and arrays of no dims, their kinds alone count: both whole, say."""
    mine, other = jnp.dtype(_dtype_of_number(x)) if isinstance(x, NUMBERS) else x.dtype, jnp.dtype(saved["dtype"])
    if isinstance(x, NUMBERS) or "value" in saved:
        kinds = {"u": "i", "V": "f"}  # V: bfloat16 and the like
        return kinds.get(mine.kind, mine.kind) == kinds.get(other.kind, other.kind)
    return mine == other


def _holds(x: Any, value: Any) -> bool:
    """Whether the template's leaf can have this whole number."""
    if isinstance(x, NUMBERS) or not jnp.issubdtype(x.dtype, jnp.integer):
        return True
    return int(jnp.iinfo(x.dtype).min) <= value <= int(jnp.iinfo(x.dtype).max)


def target(x: Any, saved: Mapping[str, Any]) -> Any:
    """Where an array is to be put that is a template's `x`, in the dtype it was saved in."""
    dtype = jnp.dtype(saved["dtype"])
    if _goes_by_host(x):
        return np.zeros(np.shape(x), dtype)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)


def _goes_by_host(x: Any) -> bool:
    """NumPy's arrays and numbers; what this one of several processes holds for itself; what may lie on any device."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct) or x.sharding is None:
        return True
    return (jax.process_count() > 1 and is_local(x)) or (isinstance(x, jax.Array) and not x.committed)


def spread(saved: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    """A leaf of an index, cut over all devices where they divide one of its dims."""
    shape, mesh = tuple(saved["shape"]), jax.sharding.Mesh(np.asarray(jax.devices()), ("all",))
    cut = next((i for i, size in enumerate(shape) if size % mesh.size == 0), None)
    spec = P() if cut is None else P(*(None,) * cut, "all")
    return jax.ShapeDtypeStruct(shape, jnp.dtype(saved["dtype"]), sharding=NamedSharding(mesh, spec))


def unflatten(template: Any, wanted: Flat, found: Mapping[str, Any]) -> Any:
    """The leaves that were loaded, in the template's structure and each of its kind."""
    leaves, treedef = jax.tree.flatten(template)
    made = [_like(leaf, found[path]) for leaf, path in zip(leaves, wanted.leaves, strict=True)]
    return jax.tree.unflatten(treedef, made)


def _like(leaf: Any, x: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        made = np.asarray(x).astype(jax.dtypes.canonicalize_dtype(leaf.dtype))
        return made if isinstance(leaf, np.ndarray) else made[()]
    if isinstance(leaf, NUMBERS):
        return type(leaf)(x)
    if isinstance(x, jax.ShapeDtypeStruct):  # of no elements, so never stored
        return jnp.zeros(x.shape, leaf.dtype, device=x.sharding)
    if isinstance(x, np.ndarray | bool | int | float | complex):
        x = _placed(leaf, np.asarray(x))
    if is_key(leaf):
        return jax.random.wrap_key_data(x, impl=_implementation(leaf))
    return x if x.dtype == leaf.dtype else x.astype(leaf.dtype)


def _placed(leaf: Any, x: np.ndarray) -> jax.Array:
    """On the template's devices; on any, where that leaves it open."""
    if not is_key(leaf):
        x = x.astype(leaf.dtype)
    if leaf.sharding is None or (isinstance(leaf, jax.Array) and not leaf.committed):
        return jnp.array(x)
    return jax.device_put(x, leaf.sharding, may_alias=False)


# Names and messages.


def escaped(path: str) -> str:
    """A name of letters, digits, _ and -, which nothing takes for a way out of the folder; the rest as ~ and hex.

    >>> escaped("../a")
    '~2E~2E~2Fa'
    """
    kept = string.ascii_letters + string.digits + "_-"
    return "".join(chr(byte) if chr(byte) in kept else f"~{byte:02X}" for byte in path.encode(errors="surrogatepass"))


def first_line(error: BaseException) -> str:
    """What an error says, cut short."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:400]
