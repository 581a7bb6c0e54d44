"""Pipeline schedules in integers: which stage works on which microbatch at which tick; and their picture.

Pure: no arrays and no devices (though ticks and stages may be traced).
"""

import dataclasses
import itertools
import os
from collections.abc import Iterable
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxshard.base.types import Scalar
from jaxshard.system.small_files import by_own_settings

Schedule = Literal["gpipe", "1f1b", "interleaved"]
SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Info(NamedTuple):
    """A stage's work, as integers: `chunk` of layers, 0 (the first) to S v - 1, and `microbatch`, 0 to M - 1."""

    chunk: Scalar
    microbatch: Scalar


@dataclasses.dataclass(frozen=True)
class Plan:
    """The times of all work: S stages, M microbatches, v virtual stages on each device.

    >>> Plan(4, 8, 1).num_ticks, Plan(4, 8, 2).num_ticks
    (11, 19)
    """

    num_stages: int
    num_microbatches: int
    virtual: int = 1

    @property
    def num_ticks(self) -> int:
        """The number of ticks of the forward pass, and of the backward pass."""
        return self.virtual * self.num_microbatches + self.num_stages - 1

    @property
    def delay(self) -> int:
        """The number of ticks from the start of the forward pass to the start of the backward pass (1F1B)."""
        return self.virtual * self.num_stages - 1

    @property
    def num_kept(self) -> int:
        """The number of ticks whose stage inputs a device keeps for the backward pass."""
        return 2 * self.delay + 1

    def forward(self, tick: Scalar, stage: Scalar) -> "Work":
        """The forward work of a stage in a tick."""
        return self._work(tick - stage, backward=False)

    def backward(self, tick: Scalar, stage: Scalar) -> "Work":
        """The backward work of a stage in a tick, counted from the start of the backward pass."""
        return self._work(tick - (self.num_stages - 1 - stage), backward=True)

    def forward_tick(self, work: "Work", stage: Scalar) -> Scalar:
        """The tick in which a stage did the forward work for the backward work `work`."""
        group, place = work.microbatch // self.num_stages, work.microbatch % self.num_stages
        return (group * self.virtual + work.round) * self.num_stages + place + stage

    def _work(self, unit: Scalar, *, backward: bool) -> "Work":
        """The work that a stage does `unit` ticks after its first.

        Microbatches go in groups of S; each group goes v times around the stages.
        """
        count = self.virtual * self.num_microbatches
        clipped = jnp.clip(unit, 0, count - 1)
        group, within = clipped // (self.num_stages * self.virtual), clipped % (self.num_stages * self.virtual)
        round_index = within // self.num_stages
        round_index = self.virtual - 1 - round_index if backward else round_index
        return Work((unit >= 0) & (unit < count), round_index, group * self.num_stages + within % self.num_stages)


class Work(NamedTuple):
    """One tick of one stage: whether it is `busy`, and its `round` (virtual stage) and `microbatch`.

    A stage that is not busy has the round and microbatch of some real work, whose results are dropped.
    """

    busy: Scalar
    round: Scalar
    microbatch: Scalar


# The picture.


class Cell(NamedTuple):
    """One stage's work in one tick: its direction, chunk of layers and microbatch, all counted from 0."""

    stage: int
    tick: int
    direction: Literal["forward", "backward"]
    chunk: int
    microbatch: int


def cells(plan: Plan, schedule: Schedule) -> list[Cell]:
    """All work, in the order of the ticks; gpipe starts the backward pass after the whole forward pass."""
    delay = plan.num_ticks if schedule == "gpipe" else plan.delay
    found = []
    for tick, stage in itertools.product(range(plan.num_ticks), range(plan.num_stages)):
        forward, backward = plan.forward(tick, stage), plan.backward(tick, stage)
        if forward.busy:
            found.append(Cell(stage, tick, "forward", _chunk(forward, stage, plan), int(forward.microbatch)))
        if backward.busy:
            found.append(Cell(stage, tick + delay, "backward", _chunk(backward, stage, plan), int(backward.microbatch)))
    return sorted(found, key=lambda cell: (cell.tick, cell.stage))


def _chunk(work: Work, stage: int, plan: Plan) -> int:
    return int(work.round) * plan.num_stages + stage


def chart(plan: Plan, schedule: Schedule) -> str:
    """A table of the schedule: a line for each stage and direction, a column for each tick.

    A cell is the microbatch; with virtual stages it is microbatch.round.

    >>> print(chart(Plan(2, 3), "1f1b"))
    tick              0  1  2  3  4
    stage 0 forward   0  1  2  .  .
            backward  .  .  0  1  2
    stage 1 forward   .  0  1  2  .
            backward  .  0  1  2  .
    """
    done = {(c.stage, c.direction, c.tick): _name(c, plan) for c in cells(plan, schedule)}
    num_ticks = 1 + max(tick for _, _, tick in done)
    width = max(2, *(len(name) for name in done.values()), len(str(num_ticks - 1)))
    lines = ["tick".ljust(16) + _row(map(str, range(num_ticks)), width)]
    for stage in range(plan.num_stages):
        for direction in ("forward", "backward"):
            head = f"stage {stage} " if direction == "forward" else ""
            names = (done.get((stage, direction, tick), ".") for tick in range(num_ticks))
            lines.append((head.ljust(8) + direction).ljust(16) + _row(names, width))
    return "\n".join(lines)


def _row(names: Iterable[str], width: int) -> str:
    return "".join(" " + name.rjust(width) for name in names)


def _name(cell: Cell, plan: Plan) -> str:
    suffix = f".{cell.chunk // plan.num_stages}" if plan.virtual > 1 else ""
    return f"{cell.microbatch}{suffix}"


@by_own_settings
def draw(plan: Plan, schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Writes the chart to `path` as a PNG: in each stage's row forward above, backward below; colours by microbatch.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # only drawing needs it
    from matplotlib.figure import Figure

    found = cells(plan, schedule)
    num_ticks = 1 + max(cell.tick for cell in found)
    figure = Figure(figsize=(min(0.4 * num_ticks + 1.5, 24), 0.7 * plan.num_stages + 1), layout="constrained")
    axes = figure.add_subplot()
    for cell in found:
        top = cell.direction == "forward"
        shade = 0.35 + 0.6 * cell.microbatch / max(plan.num_microbatches - 1, 1)
        colour = (0.2, 0.4, shade) if top else (0.25, shade, 0.3)
        low = plan.num_stages - 1 - cell.stage + (0.5 if top else 0.0)
        axes.broken_barh([(cell.tick, 0.96)], (low, 0.46), facecolors=[colour])
        name = {"ha": "center", "va": "center", "color": "white", "fontsize": 7}
        axes.text(cell.tick + 0.48, low + 0.23, _name(cell, plan), **name)
    axes.set_yticks([plan.num_stages - 0.5 - s for s in range(plan.num_stages)], map(str, range(plan.num_stages)))
    axes.set(xlim=(0, num_ticks), xlabel="tick", ylabel="stage")
    lost = (plan.num_stages - 1) / plan.num_ticks
    sizes = f"{plan.num_stages} stages, {plan.num_microbatches} microbatches"
    sizes += f", {plan.virtual} virtual stages each" if plan.virtual > 1 else ""
    axes.set_title(f"{schedule}: {sizes}; {lost:.0%} of the time idle (forward above, backward below)", fontsize=9)
    FigureCanvasAgg(figure).print_png(os.fspath(path))
