"""A run's output: tables at the start, then a progress bar, or plain lines without a terminal.

No number is cut off; in a narrow terminal, cells wrap.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

import jaxshard
from jaxshard.system.text import size_in_words

_PLAIN_WIDTH = 120


def make_console() -> Console:
    """Standard output of process 0; the others are silent. Brackets are not markup.

    It is as wide as COLUMNS or else the terminal, or 120 columns wide.
    """
    quiet, columns = jax.process_index() != 0, os.environ.get("COLUMNS", "")
    is_given = int(columns) > 0 if columns.isdecimal() else Console().is_terminal  # rich follows the terminal's width
    width = None if is_given else _PLAIN_WIDTH
    return Console(quiet=quiet, width=width, highlight=False, markup=False, emoji=False)


def say(console: Console, text: str) -> None:
    """Prints lines without wrapping, so that paths and commands can be copied."""
    console.print(text, soft_wrap=True)


def bits(nats: float) -> float:
    """Nats to bits.

    >>> round(bits(math.log(256)), 6)
    8.0
    """
    return nats / math.log(2)


def loss_in_words(nats: float, is_bytes: bool) -> str:
    """A loss, in bits per byte for bytes, in nats per token for tokens.

    >>> loss_in_words(math.log(4), is_bytes=True), loss_in_words(3.28, is_bytes=False)
    ('2.000 bits/byte', '3.280 nats/token')
    """
    return f"{bits(nats):.3f} bits/byte" if is_bytes else f"{nats:.3f} nats/token"


def _loss(scalars: Mapping[str, float], of: str) -> str:
    return loss_in_words(scalars[f"{of}loss"], f"{of}bits_per_byte" in scalars)


def _status(scalars: Mapping[str, float], width: int = 0) -> list[list[str]]:
    """A record of training in three short rows of cells, which fit beside a bar in 80 columns.

    Args:
      scalars: the record.
      width: 1 to pad all cells, so that records below each other have columns, and to leave unknown ones blank; 0 to
        leave unknown ones out.
    """
    loss = _loss(scalars, "") if "loss" in scalars else "no finite loss"
    known = [
        [(loss, 17), (f"{scalars['tokens_per_second']:,.0f} tokens/s", 18)],
        [
            (f"{_figure(1000 * scalars['step_seconds'])} ms/step", 15),
            (f"lr {scalars['learning_rate']:.1e}", 10),
            (f"norm {_figure(scalars['grad_norm']):>{8 * width}}" if "grad_norm" in scalars else "", 13),
        ],
        [
            (f"MFU {scalars['mfu']:>{4 * width}.0%}" if "mfu" in scalars else "", 0),
            (f"{size_in_words(scalars['peak_memory_bytes'])} peak" if "peak_memory_bytes" in scalars else "", 0),
            (f"{scalars['skipped_steps']} skipped" if scalars["skipped_steps"] else "", 0),
        ],
    ]
    return [[text.rjust(room * width) for text, room in row if text or room * width] for row in known]


def _figure(value: float) -> str:
    """A number to three significant digits, of at most 8 characters.

    >>> _figure(3.0), _figure(0.0123), _figure(1234.5), _figure(1.5e7)
    ('3.00', '0.0123', '1,234', '1.50e+07')
    """
    return f"{value:#.3g}" if not 99.95 <= abs(value) < 999_999 else f"{value:,.0f}"


def memory_table(strategy: str, held: Mapping[str, int], whole: Mapping[str, int]) -> Table:
    """Memory of each device, compared with DDP's.

    Args:
      strategy: its name.
      held: bytes per device of each kind (params, grads, state) under the strategy.
      whole: the same under DDP.
    """
    table = _table("bytes per device", [""], [strategy, "ddp", "ratio"])
    for kind in held:
        table.add_row(kind, *_cells(held[kind], whole[kind]))
    table.add_section()
    table.add_row("all", *_cells(sum(held.values()), sum(whole.values())))
    return table


def step_table(report: jaxshard.inspect.Report) -> Table:
    """The collectives of a compiled step, one row for each kind, group size and dtype.

    Columns: devices in a group, dtype, instructions, executions, bytes of their payloads, and bytes that each device
    sends.
    """
    heads = ["group", "dtype", "count", "runs", "payload", "sent"]
    table = _table("collectives in the compiled step", ["collective"], heads)
    groups: dict[tuple[str, int, str], list[jaxshard.inspect.Collective]] = {}
    for each in report.collectives:
        groups.setdefault((each.kind, each.group_size, each.dtype), []).append(each)
    for (kind, size, dtype), members in sorted(groups.items()):
        runs, payload = sum(each.trips for each in members), sum(each.trips * each.bytes for each in members)
        counts = (str(size), dtype, f"{len(members):,}", f"{runs:,}")
        table.add_row(kind, *counts, size_in_words(payload), size_in_words(sum(each.wire_bytes for each in members)))
    return table


def step_totals(report: jaxshard.inspect.Report) -> str:
    """A compiled step's traffic and memory on each device, a line for each."""
    sizes = {
        "wire bytes sent per device and step": report.wire_bytes,
        "peak memory per device": report.peak_bytes,
        "  arguments": report.argument_bytes,
        "  outputs": report.output_bytes,
        "  outputs that reuse arguments": report.alias_bytes,
        "  scratch": report.temp_bytes,
    }
    lines = [f"{what:<35}  {'unknown' if size is None else size_in_words(size)}" for what, size in sizes.items()]
    overlapped = sum(bool(each.overlapped) for each in report.collectives)
    lines.append(f"{'overlapped with compute':<35}  {overlapped} of {len(report.collectives)} collectives")
    if not report.trips_known:
        lines.append("some loops have an unknown trip count: they count once, so the real traffic is higher")
    return "\n".join(lines)


def axis_table(sizes: Mapping[str, int], shares: Mapping[str, Mapping[str, float]], sent: Mapping[str, float]) -> Table:
    """For each mesh axis, the fraction of the bytes sharded over it, and the bytes sent along it.

    Args:
      sizes: devices along each axis.
      shares: axis -> kind (params, grads, state) -> the fraction of the bytes sharded over it, 0 to 1.
      sent: bytes that each device sends per step, by axis; "data x tensor": along both at once.
    """
    kinds = list(next(iter(shares.values())))
    heads = ["devices", *(f"{kind}\ncut" for kind in kinds), "sent per\nstep"]
    table = _table("each axis's share", ["axis"], heads)
    axes = [axis for axis, size in sizes.items() if size > 1]
    for axis in axes:
        parts = (f"{shares[axis][kind]:.0%}" for kind in kinds)
        table.add_row(axis, str(sizes[axis]), *parts, size_in_words(sent.get(axis, 0)))
    for several in sorted(set(sent) - set(axes)):
        table.add_row(several, *[""] * (1 + len(kinds)), size_in_words(sent[several]))
    return table


def _table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    """An empty table with columns of words and of numbers; cells wrap in a narrow terminal."""
    table = Table(title=title)
    for head in words:
        table.add_column(head, overflow="fold")
    for head in numbers:
        table.add_column(head, justify="right", overflow="fold")
    return table


def _cells(ours: int, theirs: int) -> tuple[str, str, str]:
    return size_in_words(ours), size_in_words(theirs), f"{ours / theirs:.3f}"


class Display:
    """A progress bar if `console` is a terminal, else a line for each record.

    Args:
      console: to print on.
      first: the number of steps already taken.
      last: the total number of steps.
    """

    def __init__(self, console: Console, first: int, last: int):
        self._console, self._last = console, last
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24 if console.width >= 100 else 10),
            TextColumn("{task.fields[status]}", markup=False, table_column=Column(overflow="fold")),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal or console.quiet,
        )
        self._task = self._bar.add_task("", total=last, completed=first, status="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, step: int) -> None:
        """Moves the bar."""
        self._bar.update(self._task, completed=step)

    def training(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows a record of training."""
        self._bar.update(self._task, status="\n".join("  ".join(row) for row in _status(scalars) if row))
        if self._bar.disable:
            cells = [cell for row in _status(scalars, width=1) for cell in row]
            self._console.print("  ".join([self._at(step), *cells]).rstrip())

    def heldout(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows an evaluation, above the bar."""
        self._console.print(f"{self._at(step)}  held out: {_loss(scalars, 'heldout_')}")

    def _at(self, step: int) -> str:
        return f"step {step:>{len(str(self._last))}}/{self._last}"
