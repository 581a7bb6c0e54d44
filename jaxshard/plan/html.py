"""A plan as one self-contained HTML page: bars, tables, and where each leaf lies. No script, no links."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxshard.base.axes import axes_in
from jaxshard.base.units import seconds_in_words, size_in_words
from jaxshard.core.layout import Layout
from jaxshard.plan.charts import (
    Chart,
    axes_sent_along,
    check,
    fits_in_words,
    machine_in_words,
    memory_chart,
    names_of,
    traffic_chart,
)
from jaxshard.plan.prediction import KINDS
from jaxshard.plan.search import Row


def page(rows: Sequence[Row], path: Path, *, title: str, notes: Sequence[str] = ()) -> None:
    """Writes all that is known of a plan to one HTML page, which needs no other file, network or script.

    Args:
      rows: of `plan.compare` or `plan.fit`.
      path: of the page, in an existing folder; it is written over.
      title: of the page.
      notes: what else to say, such as `Fit.why()`; line breaks are kept.

    Raises:
      ValueError: there are no rows, or they are for different targets.
    """
    check(rows)
    memory, traffic = memory_chart(rows), traffic_chart(rows)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="machine">{escape(machine_in_words(rows))}</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        f"<h2>{memory.title}</h2>{_legend(memory)}{_svg(memory)}{_memory_table(rows)}",
        f"<h2>{traffic.title}</h2>{_legend(traffic)}{_svg(traffic)}{_traffic_table(rows)}",
        f"<h2>Time at best, per step</h2>{_times_table(rows)}",
        "<p>A roofline: a step computes (products or memory, what takes longer), sends along links, and waits for "
        "sending to start. No step is faster than if all of this overlapped. Point at a figure for the exact one.</p>",
        "<h2>Where each leaf lies</h2>",
        f"<p>{_swatch('var(--part)')}the first device's part</p>",
        *map(_leaves, rows),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_CSS}</style>'
    body = "\n".join(parts)
    text = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
    path.write_text(text, encoding="utf-8")


_CSS = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2024; --dim: #5b6470; --rule: #dfe3e8; --bad: #b3261e;
  --part: #0072b2; --soft: #f5f7f9 }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --ink: #e6e8ea; --dim: #a0a8b0; --rule: #343a40;
  --bad: #ff8a80; --part: #56b4e9; --soft: #1d2126 } }
body { margin: 2rem auto; padding: 0 1.25rem; max-width: 84rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; margin-bottom: 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
.machine { color: var(--dim); margin-top: .25rem }
.note { white-space: pre-line; border-left: 3px solid var(--part); padding: .25rem .75rem; background: var(--soft) }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--rule); text-align: left; white-space: nowrap }
thead th { color: var(--dim); font-weight: 600 } tbody th { font-weight: 600 } .n { text-align: right }
.why { white-space: normal; min-width: 11rem }
.bad, svg text.bad { color: var(--bad); fill: var(--bad); font-weight: 600 }
.legend span { margin-right: 1.2rem; white-space: nowrap } .swatch { vertical-align: -1px; margin-right: .4rem }
svg.chart { width: 100%; min-width: 44rem; height: auto; font-size: 13px }
svg text { fill: var(--ink) } svg .tick { fill: var(--dim); font-size: 11px }
svg .end { paint-order: stroke; stroke: var(--ground); stroke-width: 5px; stroke-linejoin: round }
#beyond line { stroke: var(--ink); stroke-width: 2px }
svg .grid { stroke: var(--rule) } svg .limit { stroke: var(--bad); stroke-dasharray: 5 4; stroke-width: 1.5 }
.cut { vertical-align: middle; margin-right: .5rem } .cut .whole { fill: var(--soft); stroke: var(--dim) }
.cut .part { fill: var(--part) } .cut .lines { stroke: var(--dim); stroke-width: .6; fill: none }
.cut text { font-size: 11px }
details { border: 1px solid var(--rule); border-radius: 6px; margin: .5rem 0; padding: .4rem .75rem }
summary { cursor: pointer } summary span { color: var(--dim) }
"""


_WIDTH, _ROW, _CHAR = 1000, 32, 7.5  # of a chart, of one bar with its gap, and of a character, in pixels
_HATCH = (
    '<defs><pattern id="beyond" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line y2="6"/></pattern></defs>'
)


def _svg(chart: Chart) -> str:
    """The bars, drawn by hand: each part has its size as a tooltip."""
    left = 0.9 * _CHAR * max(map(len, chart.names)) + 12
    reach = chart.reach((_WIDTH - left) / _CHAR)
    scale, bottom = (_WIDTH - left) / reach, 26 + _ROW * len(chart.names)
    parts = [_HATCH] if any(chart.excess) else []
    for tick in _ticks(reach):
        x = left + tick * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="22" y2="{bottom}"/>')
        where = f'x="{x:.1f}" y="{bottom + 15}" text-anchor="{"middle" if tick else "start"}"'
        parts.append(f'<text class="tick" {where}>{size_in_words(tick) if tick else 0}</text>')
    parts += [_svg_bar(chart, i, left, scale) for i in range(len(chart.names))]
    if chart.limit is not None:
        parts.insert(-len(chart.names), _svg_limit(chart, left, scale, bottom))
    box = f'viewBox="0 0 {_WIDTH} {bottom + 22}"'
    label = escape(chart.title)
    return f'<div class="wide"><svg class="chart" {box} role="img" aria-label="{label}">{"".join(parts)}</svg></div>'


def _svg_bar(chart: Chart, i: int, left: float, scale: float) -> str:
    y, x = 26 + _ROW * i, left
    parts = [f'<text x="{left - 8:.1f}" y="{y + 16}" text-anchor="end">{escape(chart.names[i])}</text>']
    for (part, values), colour in zip(chart.parts.items(), chart.colours, strict=True):
        width = values[i] * scale
        tip = f"<title>{escape(part)}: {size_in_words(values[i])}</title>"
        parts.append(f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="22" fill="{colour}">{tip}</rect>')
        x += width
    if over := chart.excess[i] * scale:
        parts.append(f'<rect x="{x - over:.2f}" y="{y}" width="{over:.2f}" height="22" fill="url(#beyond)"/>')
    look = "end bad" if over else "end"
    parts.append(f'<text class="{look}" x="{x + 6:.1f}" y="{y + 16}">{escape(chart.ends[i])}</text>')
    return "".join(parts)


def _svg_limit(chart: Chart, left: float, scale: float, bottom: float) -> str:
    x = _WIDTH if chart.line is None else left + chart.line * scale
    line = "" if chart.line is None else f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom}"/>'
    right = x > (left + _WIDTH) / 2
    where = f'x="{x - 6 if right else x + 6:.1f}" y="15" text-anchor="{"end" if right else "start"}"'
    return f'{line}<text class="bad" {where}>{chart.limit_in_words}</text>'


def _ticks(reach: float) -> list[float]:
    """Round numbers from 0 to `reach`."""
    power = 10 ** math.floor(math.log10(reach / 4))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if reach / step <= 7)
    return [i * step for i in range(int(0.97 * reach / step) + 1)]


def _legend(chart: Chart) -> str:
    shown = [(part, colour) for part, colour in zip(chart.parts, chart.colours, strict=True)]
    shown += [("beyond the limit", "url(#beyond)")] if any(chart.excess) else []
    return f'<p class="legend">{"".join(f"<span>{_swatch(c)}{escape(part)}</span>" for part, c in shown)}</p>'


def _swatch(colour: str) -> str:
    return f'<svg class="swatch" width="12" height="12"><rect width="12" height="12" fill="{colour}"/></svg>'


def _cell(text: str, look: str = "", tip: str = "") -> str:
    tip = f' title="{escape(tip)}"' if tip else ""
    return f'<td class="{look}"{tip}>{escape(text)}</td>'


def _bytes_cell(num_bytes: float) -> str:
    return _cell(size_in_words(num_bytes), "n", f"{num_bytes:,.16g} bytes")


def _table(head: str, body: Iterable[str]) -> str:
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{"".join(body)}</tbody></table></div>'


def _grid(rows: Sequence[Row], heads: Sequence[str], cells: Iterable[Iterable[str]]) -> str:
    """One line per row, with its name first."""
    head = "".join(f'<th class="n">{escape(head)}</th>' for head in heads)
    names = (f"<th>{escape(name)}</th>" for name in names_of(rows))
    body = (f"<tr>{name}{''.join(line)}</tr>" for name, line in zip(names, cells, strict=True))
    return _table(f"<tr><th>strategy</th>{head}</tr>", body)


def _memory_table(rows: Sequence[Row]) -> str:
    asked = any(row.largest_batch is not None for row in rows)

    def cells(row: Row) -> Iterable[str]:
        memory = [*(row.prediction.memory[kind] for kind in KINDS), row.prediction.peak_bytes]
        fits = _cell(fits_in_words(row), "n" if row.fits else "n bad", f"{abs(row.excess_bytes):,.16g} bytes")
        batch = "" if row.largest_batch is None else f"{row.largest_batch:,} rows"
        return [*map(_bytes_cell, memory), fits, *([_cell(batch, "n")] if asked else [])]

    return _grid(rows, (*KINDS, "peak", "fits", *(["largest batch"] if asked else [])), map(cells, rows))


def _traffic_table(rows: Sequence[Row]) -> str:
    axes = axes_sent_along(rows)

    def cells(row: Row) -> Iterable[str]:
        sent = row.prediction.costs.wire_bytes_by_axes()
        return map(_bytes_cell, [row.prediction.wire_bytes, *(sent.get(a, 0.0) for a in axes)])

    return _grid(rows, ("in all", *(f"along {a}" for a in axes)), map(cells, rows))


def _times_table(rows: Sequence[Row]) -> str:
    def cells(row: Row) -> Iterable[str]:
        took = row.seconds
        times = (took.total, took.overlapped, took.products, took.memory, took.links, took.waits)
        return [*(_cell(seconds_in_words(seconds), "n", f"{seconds!r} s") for seconds in times), _cell(took.bound, "n")]

    heads = ("a step", "if all overlapped", "products", "memory", "links", "waits", "bound by")
    return _grid(rows, heads, map(cells, rows))


def _leaves(row: Row) -> str:
    """The sharding of every leaf, folded away."""
    layout = row.prediction.layout
    held = ", ".join(f"{kind} {size_in_words(num_bytes)}" for kind, num_bytes in layout.bytes_per_device.items())
    heads = ("", "leaf", "shape", "dtype", "at rest", "cut", "per device", "why")
    head = "".join(f'<th class="{"n" if h == "per device" else ""}">{h}</th>' for h in heads)
    body = (_leaf(cells, ways) for cells, ways in zip(layout.rows(), _ways(layout), strict=True))
    summary = f"<summary><b>{escape(row.candidate.name)}</b> <span>{held} on each device</span></summary>"
    return f"<details>{summary}{_table(f'<tr>{head}</tr>', body)}</details>"


def _ways(layout: Layout) -> list[list[int]]:
    """Of each of the layout's rows, in how many parts each dim is."""
    cuts, sizes = layout.config.cuts, layout.sizes
    params = [(leaf, layout.spec(leaf, cut=cuts.params)) for leaf in layout.params]
    state = [(leaf, layout.spec(leaf, cut=cuts.state)) for leaf in layout.state]
    return [_parts(len(leaf.shape), spec, sizes) for leaf, spec in (*params, *state)]


def _parts(ndim: int, spec: Any, sizes: Mapping[str, int]) -> list[int]:
    entries = [*spec, *[None] * (ndim - len(spec))]
    return [math.prod(sizes[axis] for axis in axes_in(entry)) for entry in entries]


def _leaf(cells: Sequence[str], ways: Sequence[int]) -> str:
    *texts, num_bytes, why = cells
    cut = [f"dim {dim} in {n}" for dim, n in enumerate(ways) if n > 1]
    picture = f"<td>{_cut(ways)}{', '.join(cut) or 'whole'}</td>"
    texts = "".join(_cell(text) for text in texts)
    return f"<tr>{texts}{picture}{_bytes_cell(int(num_bytes))}{_cell(why, 'why')}</tr>"


_STRIPES = (8, 16)  # at most so many are drawn down and across


def _cut(ways: Sequence[int]) -> str:
    """A rectangle in as many stripes as there are parts, the first device's filled; of the cut dims, the first two."""
    cut, last = [dim for dim, n in enumerate(ways) if n > 1], len(ways) - 1
    down, across = (None, last) if cut == [last] else (*cut, None, None)[:2]
    counts = [1 if dim is None else ways[dim] for dim in (down, across)]
    width, height = 64 if last >= 0 else 16, 34 if last > 0 else 16
    tall, wide = (size / min(n, most) for size, n, most in zip((height, width), counts, _STRIPES, strict=True))
    path = "".join(f"M0 {i * tall:.2f}H{width}" for i in _edges(counts[0], _STRIPES[0]))
    path += "".join(f"M{i * wide:.2f} 0V{height}" for i in _edges(counts[1], _STRIPES[1]))
    more = any(n > most for n, most in zip(counts, _STRIPES, strict=True))
    dots = f'<text x="{width - 12}" y="{height - 3}">\u2026</text>' if more else ""
    return (
        f'<svg class="cut" width="{width + 2}" height="{height + 2}" viewBox="-1 -1 {width + 2} {height + 2}">'
        f'<rect class="whole" width="{width}" height="{height}"/>'
        f'<rect class="part" width="{wide:.2f}" height="{tall:.2f}"/><path class="lines" d="{path}"/>{dots}</svg>'
    )


def _edges(count: int, most: int) -> range:
    """The stripes that a line precedes; of more than can be drawn, the last ones make room for dots."""
    return range(1, count if count <= most else most * 3 // 4)
