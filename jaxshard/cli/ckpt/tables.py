"""The output of `jaxshard ckpt`: the checkpoints that its arguments name, and the tables of `ls`, `info` and `diff`.

In a terminal, no line is wider than the terminal, and nothing is cut off.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxshard.apps.config.paths import near_path
from jaxshard.checkpoint import Checkpointer, CorruptCheckpointError, NewerFormatError
from jaxshard.checkpoint.step_folders import located
from jaxshard.checkpoint.storage.leaves import Entry, Index
from jaxshard.checkpoint.storage.manifest import CheckpointInfo, faults_in_words, health
from jaxshard.cli.ckpt import export as files
from jaxshard.system.text import printable, size_in_words

_NUMBERS = ("step", "on disk", "leaves", "elements", "in arrays", "bytes", "digest or number")
_GAP = 2  # columns between two columns of a table


def make_console() -> Console:
    """A console as wide as the terminal; unlimited without one, so that other programs read complete lines."""
    width = None if Console().is_terminal else 10**5
    return Console(highlight=False, markup=False, emoji=False, width=width)


def say(console: Console, line: str) -> None:
    """Prints a line that the terminal wraps; removes control characters that came from a file."""
    console.print(printable(line), soft_wrap=True)


def show(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], long: str) -> None:
    """Prints a table.

    Args:
      console: to print on.
      headings: of the columns.
      rows: a cell for each column.
      long: the column that gets its own lines if the table is wider than the console.
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
    """Prints each row in two lines, the long cell and the others, in the columns' order."""
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
    """A table whose cells wrap in a narrow terminal; nothing is cut off."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


Side = tuple[Checkpointer, int]  # and a step
_COMPARED = 2**20  # elements at once


def differences(left: Side, right: Side, values: bool) -> Iterator[str]:
    """A line for each leaf that is in one checkpoint alone (-, +) or differs (!).

    Args:
      left: one checkpoint.
      right: the other.
      values: read leaves of which only the digests differ, and report their largest difference.
    """
    one, two = (checkpoints.info(step)["leaves"] for checkpoints, step in (left, right))
    yield from (f"- {path}: only here: {_kind(one[path])}" for path in one if path not in two)
    yield from (f"+ {path}: only here: {_kind(two[path])}" for path in two if path not in one)
    both = [path for path in one if path in two and one[path] != two[path]]
    kinds = {path: (_kind(one[path]), _kind(two[path])) for path in both}
    yield from (f"! {path}: {a}, {b}" for path, (a, b) in kinds.items() if a != b)
    changed = [path for path, (a, b) in kinds.items() if a == b]
    if not values:
        yield from (f"! {path}: different values" for path in changed)
    elif changed:
        yield from _distances(left, right, changed)


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest absolute difference, in float64 or complex128; nan if only one of two elements is nan.

    >>> largest_difference(np.array([1.0, np.inf, np.nan]), np.array([1.5, np.inf, np.nan]))
    0.5
    """
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    a, b, largest = a.reshape(-1), b.reshape(-1), []
    for start in range(0, a.size, _COMPARED):
        x, y = (each[start : start + _COMPARED].astype(wide) for each in (a, b))
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore", over="ignore"):
            largest.append(np.max(np.where(same, 0, np.abs(x - y))))
    return float(np.max(largest))


def _distances(left: Side, right: Side, paths: Sequence[str]) -> Iterator[str]:
    one, two = (checkpoints.read(step, paths) for checkpoints, step in (left, right))
    for (path, a), (_, b) in zip(one, two, strict=True):
        yield f"! {path}: different values, largest difference {largest_difference(a, b):.6g}"


def _kind(leaf: Entry) -> str:
    return f"{leaf['dtype']}{leaf['shape']}"


def row_of(checkpoints: Checkpointer, step: int) -> list[str]:
    folder, cells = checkpoints.path / str(step), [str(step)]
    try:
        cells += [saved_at(folder), size_in_words(_size(folder))]
        found = checkpoints.info(step)
    except CorruptCheckpointError:
        return [*cells, "", "", "", "unreadable", "", ""]
    except NewerFormatError as error:
        return [*cells, "", "", "", f"format {error.found}", "", ""]
    except FileNotFoundError:  # by the run that writes here
        return [str(step), "deleted", *[""] * 7]
    except OSError:
        return [str(step), "not read", *[""] * 7]
    leaves = found["leaves"]
    sizes = [f"{len(leaves)}", f"{num_elements(leaves):,}", size_in_words(num_bytes(leaves))]
    state = health(leaves, found["not_finite"])
    numbers = state if state in ("finite", "unknown") else "not finite"
    return [*cells, *sizes, "ok", numbers, metrics_in_words(found["metrics"])]


def finite_in_words(found: CheckpointInfo) -> str:
    if found["not_finite"] is None:
        return "unknown: jaxshard 0.1 saved it; `ckpt verify` checks it"
    words = faults_in_words(found["leaves"], found["not_finite"])
    return f"not finite: {words}" if words else "finite"


def saved_at(folder: Path) -> str:
    return datetime.datetime.fromtimestamp(folder.stat().st_mtime).strftime("%Y-%m-%d %H:%M")


def _size(folder: Path) -> int:
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names)


def metrics_in_words(metrics: Mapping[str, float] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (metrics or {}).items())


def num_elements(leaves: Index) -> int:
    return sum(int(np.prod(leaf["shape"])) for leaf in leaves.values())


def num_bytes(leaves: Index) -> int:
    return sum(map(files.num_bytes, leaves.values()))


def opened(folder: Path) -> tuple[Checkpointer, int | None]:
    """(checkpoints, step or None) of a folder: of checkpoints, of a run or of one step."""
    if not folder.is_dir():
        problem = "is a file: give a folder" if folder.exists() else f"does not exist: give a folder{near_path(folder)}"
        raise ValueError(f"{folder} {problem}")
    place, step = located(folder)
    return Checkpointer(place), step


def asked(folder: Path, step: int | None) -> tuple[Checkpointer, list[int]]:
    """The checkpoints of a folder, and the chosen steps: all, or one."""
    checkpoints, itself = opened(folder)
    if step is not None and itself is not None:
        raise ValueError(f"--step {step}: {folder} is the folder of step {itself}; leave --step out")
    one, steps, damaged = itself if step is None else step, checkpoints.steps(), checkpoints.damaged()
    if one in damaged or (damaged and not steps):
        number = max(damaged) if one is None else one
        raise CorruptCheckpointError(number, None, f"{damaged[number]} is missing in {checkpoints.path / str(number)}")
    if not steps:
        raise ValueError(none_in(checkpoints.path))
    if one is not None and one not in steps:
        newest = ", ".join(map(str, steps[-8:]))
        raise ValueError(f"--step {one}: no such checkpoint in {checkpoints.path}; the newest are {newest}")
    return checkpoints, steps if one is None else [one]


def chosen(folder: Path, step: int | None) -> tuple[Checkpointer, int]:
    checkpoints, steps = asked(folder, step)
    return checkpoints, steps[-1]


def none_in(folder: Path) -> str:
    return f"no checkpoint in {folder}: give a folder of checkpoints, or a run's folder, which has them in model/"
