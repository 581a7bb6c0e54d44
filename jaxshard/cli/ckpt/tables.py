"""What `jaxshard ckpt` prints. In a terminal nothing is wider than it, and nothing is cut off."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxshard.system.text import printable

_NUMBERS = ("step", "on disk", "leaves", "elements", "in arrays", "bytes", "digest or number")
_GAP = 2  # columns between two columns of a table


def make_console() -> Console:
    """In a terminal of its width; else without end, for other programs to read lines that are whole."""
    width = None if Console().is_terminal else 10**5
    return Console(highlight=False, markup=False, emoji=False, width=width)


def say(console: Console, line: str) -> None:
    """Prints a line whole, for the terminal to wrap; what was read from a file cannot move the cursor."""
    console.print(printable(line), soft_wrap=True)


def show(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], long: str) -> None:
    """Prints a table.

    Args:
      console: where to.
      headings: of the columns.
      rows: a cell for each column.
      long: the column that gets lines of its own where the table is wider than the console.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(headings, *cells, strict=True)]
    where = headings.index(long)
    if sum(widths) + _GAP * (len(widths) - 1) <= console.width:
        console.print(_table(headings, cells))
    elif sum(widths) - widths[where] + _GAP * len(widths) <= console.width:
        _show_in_two_lines(console, headings, cells, where, widths)
    else:
        console.print(_table(headings, cells))  # whose cells take several lines


def _show_in_two_lines(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], where: int, widths: Sequence[int]
) -> None:
    """Each row in two lines: the long cell, and the others; the one that stands first comes first."""
    for row in (headings, *rows):
        others = [
            " " * (width - cell_len(cell)) + cell if heading in _NUMBERS else cell + " " * (width - cell_len(cell))
            for number, (heading, cell, width) in enumerate(zip(headings, row, widths, strict=True))
            if number != where
        ]
        short, long = (" " * _GAP).join(others).rstrip(), row[where]
        first, second = (long, short) if where == 0 else (short, long)
        for text in (first, f"{' ' * _GAP}{second}"):
            if text.strip():
                console.print(Text(text, overflow="fold"))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table that cuts nothing off: in a narrow terminal a cell takes several lines."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
