"""The option `state_memory=`, checked."""

from collections.abc import Sequence
from typing import TypeAlias, cast

import jax
from jax.sharding import Mesh

from jaxshard.base.tree import compiled
from jaxshard.base.types import AnyMesh

MemoryRules: TypeAlias = Sequence[tuple[str, str]]  # (regular expression on a path, "host" or "device")
HOST = "pinned_host"  # the memory kind
_WORDS = 'give "host", "host:0.5" (a fraction of the bytes), "device", or rules [(regex, "host" or "device"), ...]'


def checked(who: str, asked: object, mesh: AnyMesh) -> str | MemoryRules:
    """The option, checked.

    Raises:
      ValueError: it makes no sense, or the mesh's devices have no memory of the host.
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
    """The part of the bytes that "host" or "host:0.5" asks for; a ValueError for another word or number."""
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
    """Raises a ValueError for devices that cannot address the host's memory; an abstract mesh has none to ask."""
    if not isinstance(mesh, Mesh):
        return
    device = mesh.devices.flat[0]
    try:
        kinds = [memory.kind for memory in device.addressable_memories()]
    except jax.errors.JaxRuntimeError:
        kinds = []  # a topology of GPUs that are not here
    if HOST not in kinds:
        raise ValueError(
            f"{who}: state_memory: these devices ({device.device_kind}, platform {device.platform}) have no memory "
            f"{HOST!r}, only {kinds}; GPUs, TPUs and CPUs have it, and of machines that are not here, TPUs alone: "
            "leave the option out, or plan it with `jaxshard plan`"
        )
