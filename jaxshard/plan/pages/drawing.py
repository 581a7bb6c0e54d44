# pyright: standard
# (matplotlib's types are partly unknown, which strict refuses)
"""A plan's bar charts of memory and traffic, drawn by matplotlib as one PNG, or as one SVG each for the page."""

import dataclasses
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from jaxshard.plan.prediction import KINDS, Row
from jaxshard.system.files import replace
from jaxshard.system.small_files import by_own_settings
from jaxshard.system.text import size_in_words, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OF_MEMORY = dict(zip(KINDS, ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9"), strict=True))
OF_TRAFFIC = ("#4477aa", "#ee6677", "#ccbb44", "#228833", "#aa3377", "#66ccee")
OTHERS = "#999999"
BAD = "#b3261e"
FAR = 3  # a limit above 3 times the longest bar is written, not drawn: the bars would be dots

_INK, _GROUND, _GRID, _FRAME = "#222222", "#ffffff", "#e3e6ea", "#000000"
_ROW = 0.42  # height of a bar with its gap, in inches
_CHAR = 1 / 14  # width of a character, in inches
_TIP = "tip: "  # precedes a bar's tooltip, which is stored as the bar's id

_PAGE_COLOURS: Mapping[str, str] = MappingProxyType(
    {_INK: "var(--ink)", _GROUND: "var(--ground)", _GRID: "var(--rule)", _FRAME: "var(--dim)", BAD: "var(--bad)"}
)
"""Chart colours that follow the page's light or dark theme."""


# The charts' data.


def check(rows: Sequence[Row]) -> None:
    """Raises ValueError if there are no rows, or they have different targets."""
    if not rows:
        raise ValueError("rows: it is empty; give the rows of plan.compare or plan.fit")
    for row in rows:
        if row.target != rows[0].target:
            raise ValueError(
                f"rows: {row.candidate.name} is for {row.target.num_devices} x {row.target.chip.name}, "
                f"{rows[0].candidate.name} for a different target; give the rows of one target"
            )


@dataclasses.dataclass(frozen=True)
class Chart:
    """Stacked bars, one per row.

    Attributes:
      title: of the chart.
      names: of the rows.
      parts: the bytes of each row, by part.
      colours: of the parts.
      ends: the labels after the bars.
      limit: in bytes, or None.
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
        """The bytes of each bar beyond the limit."""
        return [0.0 if self.limit is None else max(0.0, total - self.limit) for total in self.totals]

    @property
    def line(self) -> float | None:
        """The limit, if it is near enough to draw."""
        near = self.limit is not None and self.limit <= FAR * max(self.totals)
        return self.limit if near else None

    @property
    def limit_in_words(self) -> str:
        """The text at the limit."""
        if self.limit is None:
            return ""
        return f"limit {size_in_words(self.limit)}" + ("" if self.line is not None else ", far above the bars")

    def reach(self, num_chars: float) -> float:
        """The scale's end, in bytes, such that each bar and its label fit in a panel `num_chars` characters wide."""
        bars = zip(self.totals, self.ends, self.excess, strict=True)
        ends = (total / (1 - (len(end) + 2) * (1.15 if bold else 1) / num_chars) for total, end, bold in bars)
        return max(*ends, 1.02 * (self.line or 0.0), 1.0)


def memory_chart(rows: Sequence[Row]) -> Chart:
    """Each row's peak memory by kind, with the target's memory as the limit."""
    parts = {kind: [float(row.prediction.memory[kind]) for row in rows] for kind in KINDS}
    ends = [size_in_words(row.prediction.peak_bytes) + ("" if row.fits else f", {fits_in_words(row)}") for row in rows]
    title = "Memory at the peak, per device"
    return Chart(title, names_of(rows), parts, list(OF_MEMORY.values()), ends, rows[0].target.memory_bytes)


def traffic_chart(rows: Sequence[Row]) -> Chart:
    """Bytes sent, by mesh axes. Axes with too few bytes to see, or without their own colour, share the last part."""
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
    """All combinations of mesh axes that carry traffic."""
    sent = [row.prediction.costs.wire_bytes_by_axes().items() for row in rows]
    return list(dict.fromkeys(axes for axes, num_bytes in itertools.chain(*sent) if num_bytes))


def names_of(rows: Sequence[Row]) -> list[str]:
    return [row.candidate.name for row in rows]


def machine_in_words(rows: Sequence[Row]) -> str:
    """The target of the rows, such as "8 x h100, at most 80 GB of memory on each device"."""
    target = rows[0].target
    most = size_in_words(target.memory_bytes)
    return f"{target.num_devices} x {target.chip.name}, at most {most} of memory on each device"


def fits_in_words(row: Row) -> str:
    """The free or missing memory, such as "34.8 GB free"."""
    return (
        f"{size_in_words(row.excess_bytes)} too large" if not row.fits else f"{size_in_words(-row.excess_bytes)} free"
    )


# The charts drawn.


@by_own_settings
def draw(rows: Sequence[Row], path: str | Path, *, title: str) -> None:
    """Draws all rows' memory against the limit, and traffic by mesh axes, to a PNG.

    Args:
      rows: from `plan.compare` or `plan.fit`, one bar each, the first on top.
      path: of the PNG, in an existing folder; it is overwritten.
      title: above the picture.

    Raises:
      ValueError: there are no rows, or they have different targets.
      ModuleNotFoundError: matplotlib is not installed; `jaxshard[train]` installs it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check(rows)
    charts = (memory_chart(rows), traffic_chart(rows))
    width = 14.0
    panel = (width - _CHAR * max(map(len, charts[0].names))) / 2
    figure = Figure(figsize=(width, 2.4 + _ROW * len(rows)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, chart, side in zip((left, right), charts, ("left", "right"), strict=True):
        _bars(axes, chart, panel / _CHAR)
        axes.set_title(chart.title, loc="left", fontsize=10, weight="bold")
        _legend(axes, side)
    figure.suptitle(f"{title}\n{machine_in_words(rows)}", x=0.01, ha="left", fontsize=11, parse_math=False)
    replace(Path(path), lambda file: figure.savefig(file, format="png"))


@by_own_settings
def svg(chart: Chart) -> str:
    """One chart as an `<svg>` element for a page, with a tooltip on each bar, in the page's font and colours.

    Args:
      chart: see `memory_chart`, `traffic_chart`.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    width, written = 8.0, io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.title}):
        figure = Figure(figsize=(width, 1.2 + _ROW * len(chart.names)), layout="constrained")
        axes = figure.subplots()
        _bars(axes, chart, width / _CHAR - max(map(len, chart.names)))
        _legend(axes, "left")
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    return _for_page(written.getvalue(), chart.title)


def _for_page(text: str, title: str) -> str:
    """Turns matplotlib's SVG file into an element of a page, with unique ids."""
    prefix, box = re.sub(r"\W+", "-", title.lower()), re.findall(r'viewBox="([^"]*)"', text)[0]
    inside = text[text.index("<defs>") :].replace("url(#", f"url(#{prefix}-")
    inside = re.sub(r"<style.*?</style>", "", inside)
    inside = re.sub(rf'<g id="{_TIP}([^"]*)">', r"<g><title>\1</title>", inside)
    inside = re.sub(r' id="', f' id="{prefix}-', inside)
    for colour, variable in _PAGE_COLOURS.items():
        inside = inside.replace(colour, variable)
    return f'<svg class="chart" viewBox="{box}" role="img" aria-label="{escape(title)}">{inside}'


def _legend(axes: "Axes", side: str) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(handles, labels, loc=cast(Any, f"outside lower {side}"), ncols=3, frameon=False, fontsize=9)


def _bars(axes: "Axes", chart: Chart, num_chars: float) -> None:
    """Draws the bars on a panel `num_chars` characters wide."""
    reach, count = chart.reach(num_chars), len(chart.names)
    unit, scale = unit_of(reach)
    left = [0.0] * count
    for (part, values), colour in zip(chart.parts.items(), chart.colours, strict=True):
        _bar(axes, chart, part, values, [start / scale for start in left], scale, color=colour)
        left = [start + value for start, value in zip(left, values, strict=True)]
    for i, (total, end, excess) in enumerate(zip(chart.totals, chart.ends, chart.excess, strict=True)):
        look: dict[str, Any] = {"color": BAD, "weight": "bold"} if excess else {"color": _INK}
        look["bbox"] = {"facecolor": _GROUND, "edgecolor": "none", "pad": 0.8}
        axes.annotate(end, (total / scale, i), (4, 0), textcoords="offset points", va="center", **look)
    if chart.limit is not None:
        _limit_line(axes, chart, reach, scale)
    axes.set(xlim=(0, reach / scale), ylim=(count - 0.4, -1.1), yticks=range(count), yticklabels=chart.names)
    axes.set_xlabel(unit)
    axes.tick_params(length=0)
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _bar(
    axes: "Axes", chart: Chart, part: str, values: Sequence[float], starts: Sequence[float], scale: float, **look: Any
) -> None:
    """Draws one part of all bars: `values` in bytes, from `starts` in units of `scale` bytes."""
    drawn = axes.barh(
        range(len(values)), [value / scale for value in values], 0.66, starts, label=part, linewidth=0, **look
    )
    for bar, name, value in zip(drawn, chart.names, values, strict=True):
        if value or part in chart.parts:
            bar.set_gid(f"{_TIP}{name}, {part}: {size_in_words(value)}")


def _limit_line(axes: "Axes", chart: Chart, reach: float, scale: float) -> None:
    line = reach if chart.line is None else chart.line
    if chart.line is not None:
        axes.axvline(line / scale, color=BAD, linewidth=1.2, linestyle="--", gid="limit")
    side = "right" if line > reach / 2 else "left"
    where: dict[str, Any] = {
        "xytext": (-4 if side == "right" else 4, 0),
        "textcoords": "offset points",
        "ha": side,
        "va": "center",
    }
    axes.annotate(chart.limit_in_words, (line / scale, -0.8), color=BAD, **where)
    if any(chart.excess):
        starts = [line / scale] * len(chart.excess)
        look = {"facecolor": "none", "edgecolor": _INK, "hatch": "////"}
        _bar(axes, chart, "beyond the limit", chart.excess, starts, scale, **look)
