"""The layout's table as text: leaves whose paths differ only in numbers share a row."""

import re
from collections.abc import Iterable, Sequence

Row = tuple[str, ...]  # kind, leaf, shape, dtype, spec at rest, bytes per device, why

_HEAD = ("", "leaf", "shape", "dtype", "at rest", "bytes/device", "why")
_FEWEST = 4  # leaves that share a row: fewer are easier to read one by one
_NUMBER = re.compile(r"\d+")
_OWNER = re.compile(r"(?<=^like )\S+(?=:)")


def grouped(rows: Iterable[Row]) -> list[Row]:
    """The headings, and the rows: leaves whose paths differ only in numbers share one."""
    return [_HEAD, *_joined(rows)]


def table(rows: Iterable[Row]) -> str:
    """The rows under their headings, in columns.

    >>> rows = [("params", f"layers/{i}/w", "(8, 8)", "float32", "P()", "256", "too small") for i in range(12)]
    >>> print(table(rows))
            leaf            shape   dtype    at rest  bytes/device  why
    params  layers/0..11/w  (8, 8)  float32  P()      12 x 256      too small
    """
    found = grouped(rows)
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in found)
    return "\n".join(line.rstrip() for line in lines)


def of_rounding(dtypes: Sequence[str]) -> str:
    """What trained params of these dtypes lose if nothing widens them; "" if they lose nothing."""
    short = [name for name in dtypes if name in ("bfloat16", "float16")]
    if not short:
        return ""
    cures = ['master_dtype="float32"', *(["stochastic_rounding=True"] if "float16" not in short else [])]
    return (
        f"{len(short)} of {len(dtypes)} params are {' or '.join(sorted(set(short)))}, and updates far smaller than a "
        f"value are lost in its rounding; give {' or '.join(cures)}"
    )


def _joined(rows: Iterable[Row]) -> list[Row]:
    """The rows, with one row for each large group of leaves that differ only in the numbers in their paths."""
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        groups.setdefault(_without_numbers(row), []).append(row)
    return [row for group in groups.values() for row in ([_one_of(group)] if len(group) >= _FEWEST else group)]


def _without_numbers(row: Row) -> Row:
    kind, leaf, *others, why = row
    return (kind, _NUMBER.sub("0", leaf), *others, _OWNER.sub(lambda owner: _NUMBER.sub("0", owner[0]), why))


def _one_of(group: Sequence[Row]) -> Row:
    kind, _, *others, num_bytes, why = group[0]
    owners = [owner[0] for row in group if (owner := _OWNER.search(row[-1]))]
    if owners:
        why = _OWNER.sub(_one_path(owners), why)
    return (kind, _one_path([row[1] for row in group]), *others, f"{len(group)} x {num_bytes}", why)


def _one_path(paths: Sequence[str]) -> str:
    """One path for all: "a/0..3/w", or "a/*/w" if numbers are missing or several differ.

    >>> _one_path(["a/0/w", "a/1/w", "a/2/w"]), _one_path(["a/0/w1", "a/1/w2"]), _one_path(["a/0", "a/7"])
    ('a/0..2/w', 'a/*/w*', 'a/*')
    """
    columns = list(zip(*(map(int, _NUMBER.findall(path)) for path in paths), strict=True))
    several = sum(len(set(column)) > 1 for column in columns) > 1
    words = iter(_words(sorted(set(column)), several) for column in columns)
    return _NUMBER.sub(lambda _: next(words), paths[0])


def _words(numbers: Sequence[int], several: bool) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    contiguous = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}..{numbers[-1]}" if contiguous and not several else "*"
