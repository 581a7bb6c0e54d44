"""Checks the option `state_memory=`, and chooses the leaves of a state that are stored in the host's memory."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxshard.base.tree import compiled, first_rules, path_of
from jaxshard.base.types import AnyMesh, AxisSizes
from jaxshard.layout.cutting import Leaf

MemoryRules: TypeAlias = Sequence[tuple[str, str]]  # (regular expression on a path, "host" or "device")
HOST = "pinned_host"  # the memory kind
_WORDS = 'give "host", "host:0.5" (a fraction of the bytes), "device", or rules [(regex, "host" or "device"), ...]'


def checked(who: str, asked: object, mesh: AnyMesh) -> str | MemoryRules:
    """The option, checked.

    Raises:
      ValueError: it is invalid, or the mesh's devices cannot use the host's memory.
    """
    if isinstance(asked, str):
        if asked == "device":
            return asked
        fraction(who, asked)
    elif not _are_rules(asked):
        raise ValueError(f"{who}: state_memory={asked!r:.80} is unknown; {_WORDS}")
    else:
        for regex, _ in cast("Sequence[tuple[str, str]]", asked):
            compiled(f"{who}: state_memory: {regex!r}", regex)
    _check_backend(who, mesh)
    return asked if isinstance(asked, str) else tuple((a, b) for a, b in cast("Sequence[tuple[str, str]]", asked))


def fraction(who: str, asked: str) -> float:
    """The fraction of the bytes that "host" or "host:0.5" asks for; a ValueError for another word or number."""
    word, _, number = asked.partition(":")
    try:
        found = 1.0 if asked == "host" else float(number)
    except ValueError:
        found = -1.0
    if word != "host" or not 0 < found <= 1:
        raise ValueError(f"{who}: state_memory={asked!r:.80} is unknown; {_WORDS}")
    return found


def _are_rules(asked: object) -> bool:
    if not isinstance(asked, list | tuple):
        return False
    pairs = cast("Sequence[object]", asked)
    return len(pairs) > 0 and all(
        isinstance(pair, tuple | list)
        and len(cast("Sequence[object]", pair)) == 2
        and isinstance(cast("Sequence[object]", pair)[0], str)
        and cast("Sequence[object]", pair)[1] in ("host", "device")
        for pair in pairs
    )


def _check_backend(who: str, mesh: AnyMesh) -> None:
    """Raises a ValueError for devices that cannot address the host's memory; an abstract mesh passes."""
    if not isinstance(mesh, Mesh):
        return
    device = mesh.devices.flat[0]
    try:
        kinds = [memory.kind for memory in device.addressable_memories()]
    except jax.errors.JaxRuntimeError:
        kinds = []  # a topology of GPUs that this machine lacks
    if HOST not in kinds:
        raise ValueError(
            f"{who}: state_memory: these devices ({device.device_kind}, platform {device.platform}) have no memory "
            f"{HOST!r}, only {kinds}; GPUs, TPUs and CPUs have it, and ahead of time only TPUs: leave the option out, "
            "or plan it with `jaxshard plan`"
        )


def placed(leaves: Sequence[Leaf], asked: str | MemoryRules, least: int, sizes: AxisSizes) -> list[Leaf]:
    """The leaves of a state, with `memory` set; scalars and arrays of fewer than `least` elements stay on devices.

    Raises:
      ValueError: no leaf can move, or a rule matches none.
    """
    may = [_may_move(leaf, least) for leaf in leaves]
    if asked == "device":
        return list(leaves)
    if not any(may):
        raise ValueError(
            f"state_memory: this optimizer's state has no array of {max(least, 2)} elements or more (min_shard_size), "
            "so nothing can be stored on the host; leave the option out"
        )
    if isinstance(asked, str):
        chosen = _by_bytes(leaves, may, fraction("state_memory", asked), sizes)
    else:
        chosen = _by_rules(leaves, may, asked)
    each = zip(leaves, chosen, strict=True)
    return [dataclasses.replace(leaf, memory="host") if yes else leaf for leaf, yes in each]


def _may_move(leaf: Leaf, least: int) -> bool:
    return math.prod(leaf.shape) >= max(least, 2) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _by_bytes(leaves: Sequence[Leaf], may: Sequence[bool], fraction: float, sizes: AxisSizes) -> list[bool]:
    """Chooses leaves, the largest first, up to this fraction of the bytes of all that may move."""
    held = [leaf.bytes(leaf.cut, sizes) if yes else 0 for leaf, yes in zip(leaves, may, strict=True)]
    chosen, left = [False] * len(leaves), fraction * sum(held)
    for i in sorted(range(len(leaves)), key=lambda i: -held[i]):
        if may[i] and held[i] <= left * (1 + 1e-9):
            chosen[i], left = True, left - held[i]
    return chosen


def _by_rules(leaves: Sequence[Leaf], may: Sequence[bool], rules: MemoryRules) -> list[bool]:
    paths = [path_of(leaf.names) for leaf in leaves]
    found, idle = first_rules("state_memory", [rule for rule, _ in rules], paths)
    if idle is not None:
        raise ValueError(
            f"state_memory: the rule {idle!r} matches no leaf of the state; the leaves are {', '.join(paths[:8])}"
        )
    return [yes and i is not None and rules[i][1] == "host" for yes, i in zip(may, found, strict=True)]
