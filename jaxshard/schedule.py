"""Pipeline schedules, in whole numbers: which stage works on which microbatch at which tick; and their picture.

Pure: nothing here touches an array or a device (though ticks and stages may be traced).
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

Schedule = Literal["gpipe", "1f1b", "interleaved"]
SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Info(NamedTuple):
    """What a stage works on, as whole numbers: the chunk of layers, 0 to S v - 1 from the first, and the microbatch."""

    chunk: Any
    microbatch: Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """Who does what when: S stages, M microbatches, v virtual stages.

    >>> Plan(4, 8, 1).num_ticks, Plan(4, 8, 2).num_ticks
    (11, 19)
    """

    num_stages: int
    num_microbatches: int
    virtual: int = 1

    @property
    def num_ticks(self) -> int:
        """Ticks of each direction."""
        return self.virtual * self.num_microbatches + self.num_stages - 1

    @property
    def delay(self) -> int:
        """Ticks between the start of the forward and of the backward pass."""
        return self.virtual * self.num_stages - 1

    @property
    def num_kept(self) -> int:
        """Stage inputs that a device keeps at once, so that it can compute backward: those of so many ticks."""
        return 2 * self.delay + 1

    def forward(self, tick: Any, stage: Any) -> "Work":
        return self._work(tick - stage, backward=False)

    def backward(self, tick: Any, stage: Any) -> "Work":
        """`tick` counted from the first of the backward pass."""
        return self._work(tick - (self.num_stages - 1 - stage), backward=True)

    def forward_tick(self, work: "Work", stage: Any) -> Any:
        """The tick at which a stage did forward what it now does backward."""
        group, place = work.microbatch // self.num_stages, work.microbatch % self.num_stages
        return (group * self.virtual + work.round) * self.num_stages + place + stage

    def _work(self, unit: Any, *, backward: bool) -> "Work":
        """Units come in groups of S microbatches, each group going v times around the stages."""
        count = self.virtual * self.num_microbatches
        clipped = jnp.clip(unit, 0, count - 1)
        group, within = clipped // (self.num_stages * self.virtual), clipped % (self.num_stages * self.virtual)
        turn = within // self.num_stages
        turn = self.virtual - 1 - turn if backward else turn
        return Work((unit >= 0) & (unit < count), turn, group * self.num_stages + within % self.num_stages)


class Work(NamedTuple):
    """One tick of one stage: whether there is anything to do, in which round (virtual stage), on which microbatch.

    Where there is nothing to do, round and microbatch are those of some real work, whose results are dropped.
    """

    busy: Any
    round: Any
    microbatch: Any
