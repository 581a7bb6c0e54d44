"""Which leaves of a state lie in the host's memory (`state_memory=`)."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxshard.base.tree import first_rules, path_of
from jaxshard.base.types import AxisSizes
from jaxshard.layout.cutting import Leaf
from jaxshard.layout.memory_option import MemoryRules, fraction


def placed(leaves: Sequence[Leaf], asked: str | MemoryRules, least: int, sizes: AxisSizes) -> list[Leaf]:
    """The leaves of a state, with their memories; numbers and arrays of fewer than `least` elements stay on devices.

    Raises:
      ValueError: no leaf is left that could move, or a rule matches none.
    """
    may = [_may_move(leaf, least) for leaf in leaves]
    if asked == "device":
        return list(leaves)
    if not any(may):
        raise ValueError(
            f"state_memory: this optimizer's state has no array of {max(least, 2)} elements or more (min_shard_size), "
            "so nothing could lie on the host; leave the option out"
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
    """The largest first, until they hold this fraction of the bytes of all that may move."""
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
            f"state_memory: the rule {idle!r} matches no leaf of the state; there are {', '.join(paths[:8])}"
        )
    return [yes and i is not None and rules[i][1] == "host" for yes, i in zip(may, found, strict=True)]
