"""The tables of `jaxshard plan`, in which no number is cut off on a narrow screen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from jaxshard.inspect import Report
from jaxshard.plan import KINDS, Row
from jaxshard.system.text import seconds_in_words, size_in_words

_NAME_WIDTH = 14  # the least characters of a strategy's name


@dataclasses.dataclass(frozen=True)
class _Column:
    """A figure of each row; the heading wraps at a space."""

    head: str
    cell: Callable[[Row], str]
    left: bool = False


def show(console: Console, rows: Sequence[Row]) -> None:
    """Prints all rows as one table if the console is wide enough, else as two, else row by row."""
    memory, rest = _memory_columns(rows), [*_step_columns(rows), *_batch_columns(rows)]
    tables = [_wide([*memory, *rest], rows, "On each device, per step")]
    if not _fits(console, *tables):
        tables = [_wide(memory, rows, "Memory on each device"), _wide(rest, rows, "A step, and what fits")]
    if not _fits(console, *tables):
        tables = [_tall([*memory, *rest], rows)]
    for table in tables:
        console.print(table)
        console.print()


def _fits(console: Console, *tables: Table) -> bool:
    unbounded = console.options.update(width=10**4)
    return all(Measurement.get(console, unbounded, table).minimum <= console.width for table in tables)


def _memory_columns(rows: Sequence[Row]) -> list[_Column]:
    def of_kind(kind: str) -> Callable[[Row], str]:
        return lambda row: size_in_words(row.prediction.memory[kind])

    heads = (*KINDS[:-1], "working")
    columns = [_Column(head, of_kind(kind)) for head, kind in zip(heads, KINDS, strict=True)]
    peak = _Column("peak", lambda row: size_in_words(row.peak_bytes))
    excess = _Column("too much", lambda row: "" if row.fits else size_in_words(row.excess_bytes))
    return [*columns, peak] if all(row.fits for row in rows) else [*columns, peak, excess]


def _step_columns(rows: Sequence[Row]) -> list[_Column]:
    time = _Column("least time", lambda row: seconds_in_words(row.seconds.total))
    bound = _Column("bound by", lambda row: row.seconds.bound, left=True)
    return [_Column("sent", _sent), time, *_utilization_columns(rows), bound]


def _utilization_columns(rows: Sequence[Row]) -> list[_Column]:
    known = any(row.utilization is not None for row in rows)
    return [_Column("MFU", lambda row: f"{row.utilization or 0:.0%}")] if known else []


def _batch_columns(rows: Sequence[Row]) -> list[_Column]:
    if all(row.largest_batch is None for row in rows):
        return []
    return [_Column("largest batch", lambda row: "" if row.largest_batch is None else f"{row.largest_batch:,} rows")]


def _sent(row: Row) -> str:
    """A line for each combination of axes that carries noticeable traffic."""
    sent = row.prediction.costs.wire_bytes_by_axes()
    least = 2e-3 * max(sent.values(), default=0.0)
    return "\n".join(f"{axes} {size_in_words(size)}" for axes, size in sent.items() if size > least) or "0 B"


def _wide(columns: Sequence[_Column], rows: Sequence[Row], title: str) -> Table:
    """A line for each row; names may wrap, numbers do not."""
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    longest = max(len(row.candidate.name) for row in rows)
    table.add_column("strategy", min_width=min(_NAME_WIDTH, longest), overflow="fold")
    texts = [[column.cell(row) for row in rows] for column in columns]
    for column, cells in zip(columns, texts, strict=True):
        _add_whole(table, column.head.replace(" ", "\n"), cells, "left" if column.left else "right")
    for row, cells in zip(rows, zip(*texts, strict=True), strict=True):
        table.add_row(row.candidate.name, *cells)
    return table


def _add_whole(table: Table, head: str, cells: Sequence[str], justify: Literal["left", "right"] = "right") -> None:
    """Adds a column as wide as its longest line. (rich's `no_wrap` alone would let it shrink.)"""
    width = max(len(line) for text in (head, *cells) for line in text.split("\n"))
    table.add_column(head, justify=justify, no_wrap=True, min_width=width, overflow="fold")


def _tall(columns: Sequence[_Column], rows: Sequence[Row]) -> Table:
    """A line for each figure, below its row's name."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), show_edge=False, show_header=False)
    table.add_column(overflow="fold")
    _add_whole(table, "", [column.cell(row) for column in columns for row in rows])
    for row in rows:
        table.add_row(row.candidate.name, "")
        for column in columns:
            if text := column.cell(row):
                table.add_row(f"  {column.head}", text)
        table.add_section()
    return table


def show_beside(console: Console, row: Row, report: Report, mesh: jax.sharding.Mesh) -> None:
    """Prints the predicted and compiled figures of one row."""
    table = Table(title=row.candidate.name)
    table.add_column("per device and step", overflow="fold")
    figures = list(_beside(row, report, mesh))
    cells = [
        (f"{predicted:,.0f}", f"{compiled:,.0f}", f"{predicted / compiled:.4f}" if compiled else "")
        for _, predicted, compiled in figures
    ]
    for head, column in zip(("predicted", "compiled", "ratio"), zip(*cells, strict=True), strict=True):
        _add_whole(table, head, column)
    for (label, *_), line in zip(figures, cells, strict=True):
        table.add_row(label, *line)
    console.print(table)


def _beside(row: Row, report: Report, mesh: jax.sharding.Mesh) -> Iterator[tuple[str, float, float]]:
    """(label, predicted, compiled), in bytes and operations per device."""
    predicted = row.prediction
    params, state, *_ = report.arguments
    yield "params at rest, bytes", predicted.at_rest["params"], params
    yield "state at rest, bytes", predicted.at_rest["state"], state
    yield "peak memory, bytes", predicted.peak_bytes, report.peak_bytes or math.nan
    yield "sent, bytes", predicted.wire_bytes, report.wire_bytes
    compiled = report.wire_bytes_by_axes(mesh)
    for axes, size in predicted.costs.wire_bytes_by_axes().items():
        if axes and size > 1e-3 * predicted.wire_bytes:
            yield f"sent along {axes}, bytes", size, compiled.get(axes, 0.0)
    executed = sum(m.trips for m in predicted.costs.collectives)
    yield "collectives executed", executed, sum(c.trips for c in report.collectives)
    if report.flops:
        yield "operations (compiled: loops count once)", sum(predicted.costs.flops.values()), report.flops
