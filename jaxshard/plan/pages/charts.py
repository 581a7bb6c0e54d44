"""The data of a plan's charts: bars of memory and of traffic, and numbers in words."""

import dataclasses
import itertools
from collections.abc import Sequence

from jaxshard.plan.prediction import KINDS
from jaxshard.plan.search import Row
from jaxshard.system.text import size_in_words

OF_MEMORY = dict(zip(KINDS, ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9"), strict=True))
OF_TRAFFIC = ("#4477aa", "#ee6677", "#ccbb44", "#228833", "#aa3377", "#66ccee")
OTHERS = "#999999"
BAD = "#b3261e"
FAR = 3  # a limit that is more than 3 times the longest bar is told, not drawn: the bars would be dots


def check(rows: Sequence[Row]) -> None:
    """Raises a ValueError if there are no rows, or they are for different targets."""
    if not rows:
        raise ValueError("rows: there are none to show; give those of plan.compare or plan.fit")
    for row in rows:
        if row.target != rows[0].target:
            raise ValueError(
                f"rows: {row.candidate.name} is for {row.target.num_devices} x {row.target.chip.name}, "
                f"{rows[0].candidate.name} for another target; give the rows of one target"
            )


@dataclasses.dataclass(frozen=True)
class Chart:
    """Stacked bars, one per row.

    Attributes:
      title: of the chart.
      names: of the rows.
      parts: the bytes of each row, by part.
      colours: of the parts.
      ends: the texts after the bars.
      limit: in bytes, if there is one.
    """

    title: str
    names: list[str]
    parts: dict[str, list[float]]
    colours: Sequence[str]
    ends: list[str]
    limit: float | None = None

    @property
    def totals(self) -> list[float]:
        """The length of each bar, in bytes."""
        return [sum(values) for values in zip(*self.parts.values(), strict=True)] or [0.0] * len(self.names)

    @property
    def excess(self) -> list[float]:
        """By how many bytes each bar is longer than the limit."""
        return [0.0 if self.limit is None else max(0.0, total - self.limit) for total in self.totals]

    @property
    def line(self) -> float | None:
        """The limit, if it is near enough to be drawn."""
        near = self.limit is not None and self.limit <= FAR * max(self.totals)
        return self.limit if near else None

    @property
    def limit_in_words(self) -> str:
        """The text at the limit."""
        if self.limit is None:
            return ""
        return f"limit {size_in_words(self.limit)}" + ("" if self.line is not None else ", far beyond the bars")

    def reach(self, num_chars: float) -> float:
        """The scale's end, in bytes: each bar and its text fit in a panel that is `num_chars` characters wide."""
        bars = zip(self.totals, self.ends, self.excess, strict=True)
        ends = (total / (1 - (len(end) + 2) * (1.15 if bold else 1) / num_chars) for total, end, bold in bars)
        return max(*ends, 1.02 * (self.line or 0.0), 1.0)


def memory_chart(rows: Sequence[Row]) -> Chart:
    """The peak of each row by kind, against the memory of the target."""
    parts = {kind: [float(row.prediction.memory[kind]) for row in rows] for kind in KINDS}
    ends = [size_in_words(row.prediction.peak_bytes) + ("" if row.fits else f", {fits_in_words(row)}") for row in rows]
    title = "Memory at the peak, per device"
    return Chart(title, names_of(rows), parts, list(OF_MEMORY.values()), ends, rows[0].target.memory_bytes)


def traffic_chart(rows: Sequence[Row]) -> Chart:
    """Bytes sent, by axes. Axes that carry too little to be seen, or for which no colour is left, share the last."""
    sent = [row.prediction.costs.wire_bytes_by_axes() for row in rows]
    parts = {axes: [found.get(axes, 0.0) for found in sent] for axes in axes_sent_along(rows)}
    most = max(row.prediction.wire_bytes for row in rows)
    ranked = sorted((axes for axes in parts if max(parts[axes]) > 2e-3 * most), key=lambda axes: -sum(parts[axes]))
    shown = {f"along {axes}": parts.pop(axes) for axes in ranked[: len(OF_TRAFFIC)]}
    colours = [*OF_TRAFFIC[: len(shown)], OTHERS]
    if parts:
        name = f"along {len(parts)} others" if len(parts) > 1 else f"along {next(iter(parts))}"
        shown[name] = [sum(values) for values in zip(*parts.values(), strict=True)]
    ends = [size_in_words(row.prediction.wire_bytes) for row in rows]
    return Chart("Sent by each device, per step", names_of(rows), shown, colours[: len(shown)], ends)


def axes_sent_along(rows: Sequence[Row]) -> list[str]:
    """All combinations of mesh axes along which anything is sent."""
    sent = [row.prediction.costs.wire_bytes_by_axes().items() for row in rows]
    return list(dict.fromkeys(axes for axes, num_bytes in itertools.chain(*sent) if num_bytes))


def names_of(rows: Sequence[Row]) -> list[str]:
    """The rows' names."""
    return [row.candidate.name for row in rows]


def machine_in_words(rows: Sequence[Row]) -> str:
    """The target of the rows, such as "8 x h100, at most 80 GB of memory on each device"."""
    target = rows[0].target
    most = size_in_words(target.memory_bytes)
    return f"{target.num_devices} x {target.chip.name}, at most {most} of memory on each device"


def fits_in_words(row: Row) -> str:
    """How much is free, or too much, such as "34.8 GB free"."""
    return (
        f"{size_in_words(row.excess_bytes)} too large" if not row.fits else f"{size_in_words(-row.excess_bytes)} free"
    )
