"""What the user sees: tables at the start, then a progress bar, or plain lines where no terminal is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

_PLAIN_WIDTH = 120


def make_console() -> Console:
    """Standard output, in the first process; the others are silent."""
    console = Console(quiet=jax.process_index() != 0, highlight=False)
    return console if console.is_terminal else Console(quiet=console.quiet, highlight=False, width=_PLAIN_WIDTH)


def bits(nats: float) -> float:
    """Nats to bits."""
    return nats / math.log(2)


def megabytes(num_bytes: float) -> str:
    """`1234567` as `1.23 MB`."""
    return f"{num_bytes / 1e6:,.2f} MB"


def memory_table(strategy: str, held: Mapping[str, int], whole: Mapping[str, int]) -> Table:
    """Bytes per device, beside what DDP holds.

    Args:
      strategy: its name.
      held: bytes per device of each kind (params, grads, state) under the strategy.
      whole: the same under DDP.
    """
    table = Table(title="bytes per device")
    for heading in ("", strategy, "ddp", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for kind in held:
        table.add_row(kind, *_cells(held[kind], whole[kind]))
    table.add_section()
    table.add_row("all", *_cells(sum(held.values()), sum(whole.values())))
    return table


def axis_table(sizes: Mapping[str, int], shares: Mapping[str, Mapping[str, float]], sent: Mapping[str, float]) -> Table:
    """What each mesh axis does: which part of the bytes it cuts, and what is sent along it.

    Args:
      sizes: devices along each axis.
      shares: by axis and kind (params, grads, state), the part of the bytes that is cut over it.
      sent: bytes that each device sends per step, by axis; "data x tensor": along both at once.
    """
    table = Table(title="each axis's share")
    kinds = list(next(iter(shares.values())))
    for heading in ("axis", "devices", *(f"{kind} cut" for kind in kinds), "sent per step"):
        table.add_column(heading, justify="left" if heading == "axis" else "right")
    axes = [axis for axis, size in sizes.items() if size > 1]
    for axis in axes:
        parts = (f"{shares[axis][kind]:.0%}" for kind in kinds)
        table.add_row(axis, str(sizes[axis]), *parts, megabytes(sent.get(axis, 0)))
    for several in sorted(set(sent) - set(axes)):
        table.add_row(several, *[""] * (1 + len(kinds)), megabytes(sent[several]))
    return table


def _cells(ours: int, theirs: int) -> tuple[str, str, str]:
    return megabytes(ours), megabytes(theirs), f"{ours / theirs:.3f}"


class Display:
    """A progress bar where `console` is a terminal, else a line for each record.

    Args:
      console: where to print.
      first: steps already taken.
      last: steps in all.
    """

    def __init__(self, console: Console, first: int, last: int):
        self._console, self._last = console, last
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
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
        loss = f"{scalars['bits_per_byte']:.3f} bits/byte" if "bits_per_byte" in scalars else "no finite loss"
        status = f"{loss}  {scalars['tokens_per_second']:,.0f} tokens/s  {1000 * scalars['step_seconds']:.0f} ms/step"
        if scalars["skipped_steps"]:
            status += f"  {scalars['skipped_steps']} skipped"
        self._bar.update(self._task, status=status)
        if self._bar.disable:
            self._console.print(f"{self._at(step)}  {status}")

    def heldout(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows an evaluation, above the bar."""
        self._console.print(f"{self._at(step)}  held out: {scalars['heldout_bits_per_byte']:.3f} bits/byte")

    def _at(self, step: int) -> str:
        return f"step {step:>{len(str(self._last))}}/{self._last}"
