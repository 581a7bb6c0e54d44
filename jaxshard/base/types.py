"""The types that signatures name: trees, meshes, dtypes, traced programs; and mesh axes as PartitionSpecs name them.

`Params`, `State`, `Batch` and `T` are type variables: a function that takes one and returns it keeps the caller's own
type. `Tree` is any pytree whose leaves are arrays or shapes, for functions that know nothing more about it.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, Protocol, TypeAlias, TypedDict, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

T = TypeVar("T")
Params = TypeVar("Params")
State = TypeVar("State")
Batch = TypeVar("Batch")

Tree: TypeAlias = Any
TreeDef: TypeAlias = Any  # `jax.tree.structure` of a tree
AnyMesh: TypeAlias = Mesh | AbstractMesh
REPLICA_AXIS = "replica"  # the mesh axis that copies of the params and state lie along
CUT_ALONG = "jaxshard.cut along "  # a mark's name (`checkpoint_name`), before the axis that cuts the marked rows
DType: TypeAlias = jax.typing.DTypeLike
Scalar: TypeAlias = jax.Array | int | bool  # a number, traced or not
AxisSizes: TypeAlias = Mapping[str, int]
Names: TypeAlias = tuple[str, ...]
Entry: TypeAlias = str | tuple[str, ...] | None  # one entry of a PartitionSpec
Dims: TypeAlias = tuple[tuple[int, Names], ...]
"""How an array is sharded: pairs (dim, axes). Dims count from the end (-1 is the last), so a stack's slices fit too."""


class Metrics(TypedDict):
    """The metrics that a training step returns; scalars, the same on all devices."""

    loss: jax.Array
    """Of the whole batch, before the step."""

    grad_norm: jax.Array
    """Of the full averaged gradient."""

    skipped: jax.Array
    """Whether params and state stayed as they were, bit for bit."""

    bad_leaf: jax.Array
    """The index in `jax.tree.leaves((params, state))`, frozen params left out, of the first not finite leaf; or -1."""

    loss_scale: NotRequired[jax.Array]
    """The scale of this step, if the optimizer uses loss scaling."""

    aux: NotRequired[Any]
    """With `has_aux`, the loss's auxiliary output, as `value_and_grad` returns it."""


def is_whole(value: object, least: int) -> bool:
    """Whether `value` is a Python or NumPy integer, `least` or more; booleans are not integers here."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and cast(int, value) >= least


def itemsize_of(dtype: np.dtype) -> int:
    """Bytes of one element; NumPy does not know the dtype of PRNG keys."""
    return dtype.itemsize if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).itemsize


def like(wanted: DType | None, dtype: DType) -> DType:
    """`wanted`, or `dtype` itself if that is None; complex if `dtype` is."""
    if wanted is None:
        return dtype
    return jnp.promote_types(wanted, jnp.complex64) if jnp.issubdtype(dtype, jnp.complexfloating) else wanted


# Mesh axes.


def axes_in(entry: Entry) -> Names:
    """The axes, and parts of axes, named by one entry of a PartitionSpec; none by `P.UNCONSTRAINED`."""
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def canonical(entries: Iterable[Entry]) -> P:
    """The PartitionSpec of these entries without trailing Nones: JAX would recompile for P("data", None)."""
    spec = [axes[0] if len(axes) == 1 else axes or None for axes in map(axes_in, entries)]
    while spec and spec[-1] is None:
        spec.pop()
    return P(*spec)


def local_shape(shape: tuple[int, ...], spec: P, sizes: AxisSizes) -> tuple[int, ...]:
    """The shape of one device's shard of an array of `shape`, sharded by `spec` over axes of these sizes."""
    num_shards = [num_along(axes_in(entry), sizes) for entry in spec]
    return tuple(size // n for size, n in itertools.zip_longest(shape, num_shards, fillvalue=1))


def axes_of_dims(dims: Dims) -> Names:
    """The axes that cut an array."""
    return axes_of_parts(name for _, names in dims for name in names)


def beyond(dims: Dims, first: Dims) -> Dims:
    """The cuts that remain to reach `dims` for an array already cut by `first`, whose axes come first in each dim."""
    done = dict(first)
    rest = ((dim, axes[len(done.get(dim, ())) :]) for dim, axes in dims)
    return tuple((dim, axes) for dim, axes in rest if axes)


def axes_of(specs: Tree) -> set[str]:
    """All axes named in a tree of PartitionSpecs, or in rules."""
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    return {axis_of(name) for spec in leaves if isinstance(spec, P) for entry in spec for name in axes_in(entry)}


def without(spec: P, axes: Names) -> P:
    """The PartitionSpec with these axes removed."""
    return canonical(tuple(name for name in axes_in(entry) if axis_of(name) not in axes) for entry in spec)


def varying(x: Tree) -> frozenset[str]:
    """The mesh axes over which JAX's types say that `x` differs (always none under `check_vma=False`)."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)  # None: a mutable array
    return kind.varying if kind is not None else frozenset()


# Parts of mesh axes: with these, one axis cuts an array along several dims, in blocks.
#
# The devices along an axis form a grid with one dim for each prime factor of their number: the axis's parts, outermost
# first. "data" of 12 devices has the parts "data:2.0", "data:2.1" and "data:3.2" (the prime, then the place). Some
# parts cut one dim of an array, the others another; all parts of an axis cut the same array. Such an array lies on
# the finer mesh that has these parts as its axes; losses know only the axes of the user's mesh.

_PART = re.compile(r"(.+):(\d+)\.\d+")


@functools.lru_cache
def parts_of(axis: str, size: int) -> tuple[str, ...]:
    """The parts of an axis of this size; the axis itself if the size is a prime, or 1."""
    primes = _primes(size)
    return tuple(f"{axis}:{prime}.{i}" for i, prime in enumerate(primes)) if len(primes) > 1 else (axis,)


def _primes(number: int) -> list[int]:
    """The prime factors, in ascending order."""
    found, prime = list[int](), 2
    while prime * prime <= number:
        while number % prime == 0:
            found.append(prime)
            number //= prime
        prime += 1
    return [*found, number] if number > 1 else found


@functools.lru_cache
def _split(name: str) -> tuple[str, int] | None:
    """(axis, size) of a part; None for an axis."""
    found = _PART.fullmatch(name)
    return (found[1], int(found[2])) if found else None


def is_part(name: str) -> bool:
    """Whether this is the name of a part, not of an axis."""
    return _split(name) is not None


def axis_of(name: str) -> str:
    """The axis that a part belongs to; an axis itself."""
    return found[0] if (found := _split(name)) else name


def axes_of_parts(names: Iterable[str]) -> tuple[str, ...]:
    """The axes that these parts belong to, in order, each once."""
    return tuple(dict.fromkeys(map(axis_of, names)))


def size_of(name: str, sizes: AxisSizes) -> int:
    """The number of devices along an axis, or a part of one."""
    return found[1] if (found := _split(name)) else sizes[name]


def num_along(names: Iterable[str], sizes: AxisSizes) -> int:
    """The number of devices along axes, or parts of these, taken together."""
    return math.prod(size_of(name, sizes) for name in names)


def split_axes(spec: P) -> frozenset[str]:
    """The axes whose parts a PartitionSpec names."""
    entries: Iterable[Any] = spec
    return frozenset(axis_of(name) for entry in entries for name in axes_in(entry) if is_part(name))


def over_axes(spec: P) -> P:
    """The PartitionSpec without the axes whose parts it names."""
    return without(spec, tuple(split)) if (split := split_axes(spec)) else spec


def in_axes(names: Sequence[str], sizes: AxisSizes) -> tuple[str, ...]:
    """The same names, with an axis in place of all of its parts, where these stand in order."""
    found, rest = list[str](), list(names)
    while rest:
        axis = axis_of(rest[0])
        parts = parts_of(axis, sizes.get(axis, 1))
        whole = is_part(rest[0]) and tuple(rest[: len(parts)]) == parts
        found.append(axis if whole else rest[0])
        del rest[: len(parts) if whole else 1]
    return tuple(found)


def in_parts(names: Iterable[str], split: Iterable[str], sizes: AxisSizes) -> tuple[str, ...]:
    """The same names, with its parts in place of each axis that is among `split`."""
    axes = frozenset(split)
    return tuple(part for name in names for part in (parts_of(name, sizes[name]) if name in axes else (name,)))


@functools.lru_cache
def finer(mesh: AnyMesh, split: frozenset[str]) -> AnyMesh:
    """The mesh of the same devices, in which the parts of these axes are axes."""
    if not split:
        return mesh
    sizes, types = dict(mesh.shape), dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = in_parts(mesh.axis_names, split, sizes)
    shape, kinds = tuple(size_of(name, sizes) for name in names), tuple(types[axis_of(name)] for name in names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(shape, names, axis_types=kinds, abstract_device=mesh.abstract_device)
    return Mesh(mesh.devices.reshape(shape), names, axis_types=kinds)


def sharding_on(
    mesh: AnyMesh, spec: P, memory_kind: str | None = None, split: frozenset[str] = frozenset()
) -> NamedSharding:
    """The sharding of an array on a mesh, or on the finer one of its PartitionSpec's parts, and of those in `split`."""
    if split := split | split_axes(spec):
        sizes = dict(mesh.shape)
        mesh, spec = finer(mesh, split), canonical(in_parts(axes_in(entry), split, sizes) for entry in spec)
    found = NamedSharding(mesh, spec)  # pyright: ignore[reportArgumentType]
    return found if memory_kind is None else found.with_memory_kind(memory_kind)


# Traced programs: the attributes that we read, without importing `jax.extend.core` (70 ms).


class Var(Protocol):
    """A variable of a traced program, or a literal."""

    aval: Any
    val: Any  # only a literal has it


class Primitive(Protocol):
    """An operation, by name."""

    name: str
    bind: Any
    multiple_results: bool
    get_bind_params: Any


class Equation(Protocol):
    """One operation of a traced program."""

    primitive: Primitive
    replace: Any
    invars: list[Var]
    outvars: list[Var]
    params: dict[str, Any]
    effects: Iterable[object]
    source_info: Any


class OpenJaxpr(Protocol):
    """A traced program, as `jaxshard.programs.jaxprs.open_jaxpr` gives it."""

    invars: list[Var]
    outvars: list[Var]
    constvars: list[Var]
    eqns: list[Equation]
    debug_info: Any

    def replace(self, **changes: object) -> "OpenJaxpr":
        """A copy of the program with these fields changed."""
        ...


Jaxpr: TypeAlias = Any
"""A traced program, open or closed: a `Jaxpr` or `ClosedJaxpr` of `jax.extend.core`."""


class AxisTypeError(TypeError):
    """A value varies over a mesh axis and must not, or must and does not: a mistake in a loss that is for a mesh."""


@functools.lru_cache
def processes_of(mesh: AnyMesh) -> tuple[int, ...]:
    """The indices of the processes whose devices are in a mesh; of an abstract one, those of the job."""
    if isinstance(mesh, AbstractMesh):
        return tuple(range(jax.process_count()))  # pyright: ignore[reportUnknownMemberType]
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))
