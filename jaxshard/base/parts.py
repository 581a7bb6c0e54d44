"""Parts of mesh axes: with these, one axis cuts an array along several dims, in blocks.

The devices along an axis form a grid with one dim for each prime factor of their number: the axis's parts, outermost
first. "data" of 12 devices has the parts "data:2.0", "data:2.1" and "data:3.2" (the prime, then the place). Some parts
cut one dim of an array, the others another; all parts of an axis cut the same array. Such an array lies on the finer
mesh that has these parts as its axes; losses know only the axes of the user's mesh.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

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


def size_of(name: str, sizes: Mapping[str, int]) -> int:
    """The number of devices along an axis, or a part of one."""
    return found[1] if (found := _split(name)) else sizes[name]


def num_along(names: Iterable[str], sizes: Mapping[str, int]) -> int:
    """The number of devices along axes, or parts of these, taken together."""
    return math.prod(size_of(name, sizes) for name in names)


def split_axes(spec: P) -> frozenset[str]:
    """The axes whose parts a PartitionSpec names."""
    entries = ((entry,) if isinstance(entry, str) else entry for entry in spec)
    names = (name for entry in entries if isinstance(entry, tuple) for name in entry)  # else None, or unconstrained
    return frozenset(axis_of(name) for name in names if is_part(name))


def in_axes(names: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The same names, with an axis in place of all of its parts, where these stand in order."""
    found, rest = list[str](), list(names)
    while rest:
        axis = axis_of(rest[0])
        parts = parts_of(axis, sizes.get(axis, 1))
        whole = is_part(rest[0]) and tuple(rest[: len(parts)]) == parts
        found.append(axis if whole else rest[0])
        del rest[: len(parts) if whole else 1]
    return tuple(found)


def in_parts(names: Iterable[str], split: Iterable[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The same names, with its parts in place of each axis that is among `split`."""
    axes = frozenset(split)
    return tuple(part for name in names for part in (parts_of(name, sizes[name]) if name in axes else (name,)))


@functools.lru_cache
def finer(mesh: Mesh | AbstractMesh, split: frozenset[str]) -> Mesh | AbstractMesh:
    """The mesh of the same devices, in which the parts of these axes are axes."""
    if not split:
        return mesh
    sizes, types = dict(mesh.shape), dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = in_parts(mesh.axis_names, split, sizes)
    shape, kinds = tuple(size_of(name, sizes) for name in names), tuple(types[axis_of(name)] for name in names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(shape, names, axis_types=kinds, abstract_device=mesh.abstract_device)
    return Mesh(mesh.devices.reshape(shape), names, axis_types=kinds)


def sharding_on(mesh: Mesh | AbstractMesh, spec: P, memory_kind: str | None = None) -> NamedSharding:
    """The sharding of an array on a mesh, or on the finer one whose parts its PartitionSpec names."""
    on = finer(mesh, split_axes(spec))
    found = NamedSharding(on, spec)  # pyright: ignore[reportArgumentType]
    return found if memory_kind is None else found.with_memory_kind(memory_kind)


def positions(names: Iterable[str], coordinates: Mapping[str, jax.Array], sizes: Mapping[str, int]) -> jax.Array | int:
    """This device's index along axes and parts, taken together, from its index along each axis."""
    index: jax.Array | int = 0
    for name in names:
        axis = axis_of(name)
        here = coordinates[axis]
        if is_part(name):
            parts = parts_of(axis, sizes[axis])
            stride = num_along(parts[parts.index(name) + 1 :], sizes)
            here = here // stride % size_of(name, sizes)
        index = index * size_of(name, sizes) + here
    return index
