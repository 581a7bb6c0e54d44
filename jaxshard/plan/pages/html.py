"""A plan as one self-contained HTML page, without scripts or links: charts, tables, and each leaf's sharding."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path

import jinja2
from jax.sharding import PartitionSpec as P
from markupsafe import Markup

from jaxshard.base.types import axes_in, num_along
from jaxshard.plan.pages import drawing
from jaxshard.plan.pages.drawing import (
    axes_sent_along,
    check,
    fits_in_words,
    machine_in_words,
    memory_chart,
    traffic_chart,
)
from jaxshard.plan.prediction import KINDS, Row
from jaxshard.system.files import replace
from jaxshard.system.text import seconds_in_words, size_in_words


def page(rows: Sequence[Row], path: Path, *, title: str, notes: Sequence[str] = ()) -> None:
    """Writes a plan with all details to one HTML page, which needs no other file, network or script.

    Args:
      rows: from `plan.compare` or `plan.fit`.
      path: of the page, in an existing folder; it is overwritten.
      title: of the page.
      notes: further text, such as `Fit.why()`; line breaks are kept.

    Raises:
      ValueError: there are no rows, or they have different targets.
    """
    check(rows)
    charts = [
        (chart.title, Markup(drawing.svg(chart)), table)  # our own SVG: matplotlib has escaped the names in it
        for chart, table in ((memory_chart(rows), _memory_table(rows)), (traffic_chart(rows), _traffic_table(rows)))
    ]
    text = _template().render(
        title=title,
        machine=machine_in_words(rows),
        notes=notes,
        charts=charts,
        times=_times_table(rows),
        layouts=[_Leaves(row) for row in rows],
    )
    replace(path, text)


def _template() -> jinja2.Template:
    text = resources.files("jaxshard.plan").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text)


@dataclasses.dataclass(frozen=True)
class _Cell:
    """A cell of a table: its text, its CSS classes, and the exact figure as a tooltip."""

    text: str
    look: str = ""
    tip: str = ""


@dataclasses.dataclass(frozen=True)
class _Table:
    """A table of figures: each line is a row's name and its cells."""

    heads: Sequence[str]
    lines: Sequence[tuple[str, Sequence[_Cell]]]


def _table(rows: Sequence[Row], heads: Sequence[str], cells: Iterable[Sequence[_Cell]]) -> _Table:
    return _Table(heads, list(zip((row.candidate.name for row in rows), cells, strict=True)))


def _bytes_cell(num_bytes: float) -> _Cell:
    return _Cell(size_in_words(num_bytes), "n", f"{num_bytes:,.16g} bytes")


def _memory_table(rows: Sequence[Row]) -> _Table:
    asked = any(row.largest_batch is not None for row in rows)

    def cells(row: Row) -> Sequence[_Cell]:
        memory = [*(row.prediction.memory[kind] for kind in KINDS), row.prediction.peak_bytes]
        fits = _Cell(fits_in_words(row), "n" if row.fits else "n bad", f"{abs(row.excess_bytes):,.16g} bytes")
        batch = "" if row.largest_batch is None else f"{row.largest_batch:,} rows"
        return [*map(_bytes_cell, memory), fits, *([_Cell(batch, "n")] if asked else [])]

    return _table(rows, (*KINDS, "peak", "fits", *(["largest batch"] if asked else [])), map(cells, rows))


def _traffic_table(rows: Sequence[Row]) -> _Table:
    axes = axes_sent_along(rows)

    def cells(row: Row) -> Sequence[_Cell]:
        sent = row.prediction.costs.wire_bytes_by_axes()
        return [_bytes_cell(num_bytes) for num_bytes in (row.prediction.wire_bytes, *(sent.get(a, 0.0) for a in axes))]

    return _table(rows, ("in all", *(f"along {a}" for a in axes)), map(cells, rows))


def _times_table(rows: Sequence[Row]) -> _Table:
    def cells(row: Row) -> Sequence[_Cell]:
        took = row.seconds
        times = (took.total, took.overlapped, took.products, took.memory, took.links, took.host, took.waits)
        return [*(_Cell(seconds_in_words(seconds), "n", f"{seconds!r} s") for seconds in times), _Cell(took.bound, "n")]

    heads = ("a step", "if all overlapped", "products", "memory", "links", "host", "waits", "bound by")
    return _table(rows, heads, map(cells, rows))


# Each leaf's sharding.


class _Leaves:
    """The sharding of every leaf of one row."""

    def __init__(self, row: Row):
        layout = row.prediction.layout
        self.name = row.candidate.name
        self.held = ", ".join(f"{kind} {size_in_words(n)}" for kind, n in layout.bytes_per_device.items())
        num_shards = [_parts(len(leaf.shape), spec, layout.sizes) for _, leaf, spec in layout.at_rest]
        self.lines = [_leaf(*each) for each in zip(layout.rows(), num_shards, strict=True)]


def _leaf(cells: Sequence[str], num_shards: Sequence[int]) -> tuple[list[str], Markup, str, _Cell, str]:
    """(kind to spec, the picture of the shards, their description, bytes per device, why) of one row of a layout."""
    *texts, num_bytes, why = cells
    cut = ", ".join(f"dim {dim} in {n}" for dim, n in enumerate(num_shards) if n > 1)
    return texts, _cut(num_shards), cut or "whole", _bytes_cell(int(num_bytes)), why


def _parts(ndim: int, spec: P, sizes: Mapping[str, int]) -> list[int]:
    """The number of shards of each dim."""
    entries = [*spec, *[None] * (ndim - len(spec))]
    return [num_along(axes_in(entry), sizes) for entry in entries]


_STRIPES = (8, 16)  # the most to draw down and across


def _cut(num_shards: Sequence[int]) -> Markup:
    """A rectangle with a stripe for each shard of the first two sharded dims; the first device's is filled."""
    cut, last = [dim for dim, n in enumerate(num_shards) if n > 1], len(num_shards) - 1
    down, across = (None, last) if cut == [last] else (*cut, None, None)[:2]
    counts = [1 if dim is None else num_shards[dim] for dim in (down, across)]
    width, height = 64 if last >= 0 else 16, 34 if last > 0 else 16
    tall, wide = (size / min(n, most) for size, n, most in zip((height, width), counts, _STRIPES, strict=True))
    path = "".join(f"M0 {i * tall:.2f}H{width}" for i in _edges(counts[0], _STRIPES[0]))
    path += "".join(f"M{i * wide:.2f} 0V{height}" for i in _edges(counts[1], _STRIPES[1]))
    more = any(n > most for n, most in zip(counts, _STRIPES, strict=True))
    dots = f'<text x="{width - 12}" y="{height - 3}">\u2026</text>' if more else ""
    return Markup(
        f'<svg class="cut" width="{width + 2}" height="{height + 2}" viewBox="-1 -1 {width + 2} {height + 2}">'
        f'<rect class="whole" width="{width}" height="{height}"/>'
        f'<rect class="part" width="{wide:.2f}" height="{tall:.2f}"/><path class="lines" d="{path}"/>{dots}</svg>'
    )


def _edges(count: int, most: int) -> range:
    """The stripes that a line precedes; if there are too many to draw, dots replace the last ones."""
    return range(1, count if count <= most else most * 3 // 4)
