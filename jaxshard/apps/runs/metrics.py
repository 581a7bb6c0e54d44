"""The file of a run's metrics, a JSON object on each line. Other lines are ignored."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxshard.system import small_files

Record = dict[str, Any]

_LONGEST = 2**20  # bytes of a line; a record has less than 1000
_MOST_STEPS = 2**53
_MOST_BYTES = 2**28  # of a file, a million records


@dataclasses.dataclass(frozen=True)
class Found:
    """The content of a file of metrics.

    Attributes:
      records: objects with a step, in order.
      others: lines that are not records.
    """

    records: list[Record]
    others: list[bytes]


def read(path: Path) -> Found:
    """Reads a file, which may not exist; raises OSError if it cannot be read."""
    found = Found([], [])
    if not path.exists():
        return found
    for line in _lines(io.BytesIO(small_files.read(path, _MOST_BYTES))):
        record = record_in(line)
        if record is None:
            found.others.append(line)
        else:
            found.records.append(record)
    return found


def record_in(line: bytes) -> Record | None:
    """The record on a line, or None. NULs around it, from a lost write, are ignored.

    >>> record_in(b'\\0\\0{"step": 3, "loss": 2.5}\\n')
    {'step': 3, 'loss': 2.5}
    """
    try:
        record = json.loads(line.strip(b"\0\r\n ").decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int or not 0 <= record["step"] <= _MOST_STEPS:
        return None
    return record


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines; of one that is too long for a record, its first part. An unfinished last record, from a kill or a full
    disk, is skipped."""
    while line := file.readline(_LONGEST):
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(_LONGEST)):
            pass
        was_ended = line.endswith(b"\n") or not line.startswith(b"{") or b"\0" in line
        if line.strip() and was_ended:
            yield line
