"""What it costs that N devices do not divide some leaves, and how many devices would hold less."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxshard.base.types import AxisSizes
from jaxshard.layout.cutting import Leaf, cut_leaf
from jaxshard.layout.options import Config
from jaxshard.system.text import digits, size_in_words

_MOST_TRIED = 256  # numbers of devices


class Undivided(NamedTuple):
    """The leaves that N devices do not divide.

    Attributes:
      num_shards: N.
      lost: each leaf, with the bytes that a device holds beyond 1/N of it; the largest first.
      held_bytes: what a device holds of all leaves.
      fewer: a number of devices on which each holds less, and how many bytes; None if there is none, or several axes
        shard the leaves.
    """

    num_shards: int
    lost: list[tuple[Leaf, int]]
    held_bytes: int
    fewer: tuple[int, int] | None

    @property
    def lost_bytes(self) -> int:
        """The bytes that a device holds beyond 1/N."""
        return sum(num_bytes for _, num_bytes in self.lost)

    def __str__(self) -> str:
        leaves = "1 leaf has" if len(self.lost) == 1 else f"{len(self.lost)} leaves have"
        factor = self.held_bytes / max(1, self.held_bytes - self.lost_bytes)
        text = (
            f"{leaves} no dims that {self.num_shards} divides (the largest is {self.lost[0][0].path}): a device holds "
            f"{digits(factor)} times 1/{self.num_shards} of each of params, grads and moments"
        )
        if self.fewer is None:
            return text
        count, num_bytes = self.fewer
        less = f"{size_in_words(num_bytes)} instead of {size_in_words(self.held_bytes)}"
        return f"{text}. On {count} devices it would hold {less}"


def undivided(leaves: Sequence[Leaf], sizes: AxisSizes, config: Config, platform: str) -> Undivided | None:
    """The params that cannot be sharded over all devices; None if they have at most 1% of a device's bytes."""
    axes = [axis for axis in config.cut_axes.state if sizes[axis] > 1]
    num_shards, held = math.prod(sizes[axis] for axis in axes), {leaf: leaf.bytes(leaf.cut, sizes) for leaf in leaves}
    awkward, total = {leaf: num_bytes for leaf, num_bytes in held.items() if leaf.awkward}, sum(held.values())
    if sum(awkward.values()) <= 0.01 * total:
        return None
    lost = [(leaf, num_bytes - num_bytes * leaf.ways // num_shards) for leaf, num_bytes in awkward.items()]
    fewer = _fewer(leaves, sizes, config, platform, axes[0]) if len(axes) == 1 else None
    smaller = fewer if fewer is not None and fewer[1] < total else None
    return Undivided(num_shards, sorted(lost, key=lambda item: -item[1]), total, smaller)


def _fewer(leaves: Sequence[Leaf], sizes: AxisSizes, config: Config, platform: str, axis: str) -> tuple[int, int]:
    """The smaller number of devices along the axis on which each holds the least, and how many bytes."""
    most, alike = sizes[axis], dict[Any, list[Leaf]]()
    for leaf in leaves:
        alike.setdefault((leaf.shape, leaf.dtype, leaf.spec, leaf.frozen), []).append(leaf)
    held, fewer = min(
        (sum(len(same) * _bytes_on(same[0], {**sizes, axis: n}, config, platform) for same in alike.values()), -n)
        for n in {most // 2, *range(max(most // 2, most - _MOST_TRIED), most)}
    )
    return -fewer, held


def _bytes_on(leaf: Leaf, sizes: AxisSizes, config: Config, platform: str) -> int:
    """What a device holds of a leaf on a mesh of these sizes."""
    if leaf.frozen:
        return leaf.bytes(leaf.cut, sizes)
    cut = cut_leaf(leaf.names, leaf.shape, leaf.dtype, leaf.spec, sizes, config, platform)
    return leaf.bytes(cut.cut, sizes)
