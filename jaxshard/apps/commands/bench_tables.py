"""The tables and plots of `jaxshard bench`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxshard.apps.bench.step import Row
from jaxshard.system.files import replace
from jaxshard.system.small_files import by_own_settings
from jaxshard.system.text import digits, seconds_in_words

_MB = 1e6
_Cell = Callable[[Mapping[str, float]], str]


def _mb(name: str) -> _Cell:
    return lambda figures: digits(figures[name] / _MB)


def _covered(figures: Mapping[str, float]) -> str:
    return f"{digits(figures['covered_bytes'] / _MB)} of {digits(figures['payload_bytes'] / _MB)}"


def _seconds(name: str) -> _Cell:
    return lambda figures: seconds_in_words(figures[name])


def _ratio(name: str) -> _Cell:
    return lambda figures: f"{figures[name]:.2f} ({figures[name + '_low']:.2f} to {figures[name + '_high']:.2f})"


_COMPILED: dict[str, _Cell] = {
    "peak, MB": _mb("peak_bytes"),
    "wire, MB": _mb("wire_bytes"),
    "covered, MB": _covered,
    "traffic, MB": _mb("traffic_bytes"),
    "collectives": lambda figures: f"{figures['num_collectives']:.0f}",
    "trace": _seconds("trace_seconds"),
    "compile": _seconds("compile_seconds"),
}
_STEP: dict[str, _Cell] = {"step": _seconds("step_seconds"), "ratio": _ratio("step_ratio")}
_UPDATE: dict[str, _Cell] = {
    "update": _seconds("update_seconds"),
    "ratio of updates": _ratio("update_ratio"),
}


def made_in_words(about: Mapping[str, Any]) -> str:
    """One line: date, versions, machine."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    machine = about["machine"]
    return f"{about['date']}; {versions}; {machine['cores']} cores of {machine['processor']}, load {machine['load'][0]}"


def line(row: Row) -> str:
    """The line to show as soon as a row is measured."""
    if row.note:
        return f"{row.machine} {row.model} {row.step}: {row.note}"
    return f"{row.machine} {row.model} {row.step}: {', '.join(_figures_in_words(row))}"


def _figures_in_words(row: Row) -> list[str]:
    given = row.figures
    columns = {
        **(_COMPILED if "peak_bytes" in given else {}),
        **(_STEP if "step_seconds" in given else {}),
        **(_UPDATE if "update_seconds" in given else {}),
    }
    return [_with_unit(head, cell(row.figures)) for head, cell in columns.items()]


def _with_unit(head: str, text: str) -> str:
    """Moves the unit of a heading behind the figure.

    >>> _with_unit("peak, MB", "12"), _with_unit("trace", "1.5 s")
    ('peak 12 MB', 'trace 1.5 s')
    """
    name, _, unit = head.partition(", ")
    return f"{name} {text} {unit}".strip()


def show(console: Console, rows: Sequence[Row], against: str) -> None:
    """Prints the rows of one machine and model: the compiler's figures, then the times."""
    with_figures = [row for row in rows if row.figures]
    if not with_figures:
        return
    console.print()
    title = f"{rows[0].model} on {rows[0].machine}"
    console.print(_table(f"{title}: per device and step", _COMPILED, with_figures))
    timed = [row for row in with_figures if "step_seconds" in row.figures]
    if timed:
        console.print()
        console.print(_table(f"{title}: times, and their ratios to {against}", _STEP | _UPDATE, timed))
    console.print()


def show_beside_one(console: Console, rows: Sequence[Row]) -> None:
    """Prints the cost of several devices against one."""
    measured = [row for row in rows if row.figures]
    if measured:
        named = [dataclasses.replace(row, step=f"{row.step}, {row.machine}") for row in measured]
        title = "times, and their ratios to the same framework's times on one device"
        console.print()
        console.print(_table(title, _STEP, named))
        console.print()


def _table(title: str, columns: Mapping[str, _Cell], rows: Sequence[Row]) -> Table:
    """A table whose cells wrap on a narrow console; no number is cut off."""
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("step", overflow="fold")
    for head in columns:
        table.add_column(head, justify="right", overflow="fold")
    for row in rows:
        table.add_row(row.step, *(cell(row.figures) for cell in columns.values()))
    return table


@by_own_settings
def draw(rows: Sequence[Row], folder: Path) -> None:
    """Writes `MODEL_on_MACHINE.png` for each machine and model: a panel of bars for each figure."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "peak_bytes" in row.figures:
            groups.setdefault((row.model, row.machine), []).append(row)
    for (model, machine), group in groups.items():
        name = f"{model}_on_{machine}".replace(":", "_")
        _draw(group, f"{model} on {machine}, per device and step", folder / f"{name}.png")


def _draw(rows: Sequence[Row], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    panels = {
        "peak memory, MB": lambda f: f["peak_bytes"] / _MB,
        "sent, MB": lambda f: f["wire_bytes"] / _MB,
        "not overlapped with products, MB": lambda f: (f["payload_bytes"] - f["covered_bytes"]) / _MB,
        "other kernels' traffic, MB": lambda f: f["traffic_bytes"] / _MB,
    }
    if all("step_ratio" in row.figures for row in rows):
        panels |= {"step, ratio": lambda f: f["step_ratio"], "update, ratio": lambda f: f["update_ratio"]}
    figure = Figure(figsize=(3.2 * len(panels), 1.2 + 0.3 * len(rows)), layout="constrained")
    figure.suptitle(title)
    names = [row.step for row in rows]
    for axes, (head, value) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        bars = axes.barh(range(len(rows)), [value(row.figures) for row in rows], 0.66)
        axes.bar_label(bars, fmt=digits, padding=3, fontsize=8)
        axes.set(title=head, yticks=range(len(rows)), yticklabels=names, ylim=(len(rows) - 0.4, -0.6))
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    replace(path, lambda file: figure.savefig(file, format="png", dpi=150))
