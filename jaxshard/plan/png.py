"""A plan as a picture: one PNG of memory and traffic (`draw`); `jaxshard.page` has the page that shows every leaf."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxshard.base.units import unit_of
from jaxshard.plan.charts import BAD, Chart, check, machine_in_words, memory_chart, traffic_chart
from jaxshard.plan.search import Row


def draw(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Draws memory against the limit, and traffic by mesh axes, of all rows to a PNG.

    Args:
      rows: of `plan.compare` or `plan.fit`, one bar each, the first on top.
      path: of the PNG, in an existing folder; it is written over.
      title: above the picture.

    Raises:
      ValueError: there are no rows, or they are for different targets.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check(rows)
    charts = (memory_chart(rows), traffic_chart(rows))
    num_chars = (196 - max(map(len, charts[0].names))) // 2  # of text, across a panel
    figure = Figure(figsize=(14, 2.4 + 0.42 * len(rows)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    sides = ("outside lower left", "outside lower right")
    for axes, chart, side in zip((left, right), charts, sides, strict=True):
        _bars(axes, chart, num_chars)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc=side, ncols=3, frameon=False, fontsize=9)
    figure.suptitle(f"{title}\n{machine_in_words(rows)}", x=0.01, ha="left", fontsize=11, parse_math=False)
    figure.savefig(path, format="png")


def _bars(axes: Any, chart: Chart, num_chars: float) -> None:
    reach, count = chart.reach(num_chars), len(chart.names)
    unit, scale = unit_of(reach)
    left = [0.0] * count
    for (part, values), colour in zip(chart.parts.items(), chart.colours, strict=True):
        starts = [start / scale for start in left]
        axes.barh(range(count), [v / scale for v in values], 0.66, starts, color=colour, label=part, linewidth=0)
        left = [start + value for start, value in zip(left, values, strict=True)]
    for i, (total, end, excess) in enumerate(zip(chart.totals, chart.ends, chart.excess, strict=True)):
        look = {"color": BAD, "weight": "bold"} if excess else {"color": "#222222"}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        axes.annotate(end, (total / scale, i), (4, 0), textcoords="offset points", va="center", bbox=box, **look)
    if chart.limit is not None:
        _limit_line(axes, chart, reach, scale)
    axes.set(xlim=(0, reach / scale), ylim=(count - 0.4, -1.1), yticks=range(count), yticklabels=chart.names)
    axes.set_xlabel(unit)
    axes.set_title(chart.title, loc="left", fontsize=10, weight="bold")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _limit_line(axes: Any, chart: Chart, reach: float, scale: float) -> None:
    line = reach if chart.line is None else chart.line
    if chart.line is not None:
        axes.axvline(line / scale, color=BAD, linewidth=1.2, linestyle="--")
    side = "right" if line > reach / 2 else "left"
    where = {"xytext": (-4 if side == "right" else 4, 0), "textcoords": "offset points", "ha": side, "va": "center"}
    axes.annotate(chart.limit_in_words, (line / scale, -0.8), color=BAD, **where)
    if over := {i: excess / scale for i, excess in enumerate(chart.excess) if excess}:
        look = {
            "facecolor": "none",
            "edgecolor": "#222222",
            "hatch": "////",
            "linewidth": 0,
            "label": "beyond the limit",
        }
        axes.barh(list(over), list(over.values()), 0.66, line / scale, **look)
