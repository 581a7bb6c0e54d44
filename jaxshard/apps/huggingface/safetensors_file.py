"""Reads .safetensors files without memory mapping. The library maps them, so that SIGBUS kills the program if a file is
cut short or its disk fails.

The format: 8 bytes with the length of the header, the header in JSON, then the bytes of the tensors.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

_LARGEST_HEADER = 100_000_000  # bytes, as in the library
_NOTES = "__metadata__"
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


class Entry(NamedTuple):
    """A tensor of a file: its safetensors type, its shape, and the range of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


def entries(file: Path) -> dict[str, Entry]:
    """The tensors of a file by name.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not a complete .safetensors file.
    """
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= min(size - 8, _LARGEST_HEADER):
            raise ValueError("it is not a .safetensors file, or is truncated: its header does not fit in it")
        header = stream.read(length)
    try:
        found = json.loads(header)
        tensors = {name: _entry(given, 8 + length) for name, given in found.items() if name != _NOTES}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header is not a .safetensors header: {type(error).__name__}: {error}") from error
    _check_order(tensors, 8 + length, size)
    return tensors


def _entry(given: Mapping[str, Any], start: int) -> Entry:
    first, last = given["data_offsets"]
    numbers = [first, last, *given["shape"]]
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(given["dtype"], str):
        raise ValueError(f"{given} does not describe a tensor")
    entry = Entry(given["dtype"], tuple(given["shape"]), start + first, start + last)
    if entry.dtype in _DTYPES and math.prod(entry.shape) * jnp.dtype(_DTYPES[entry.dtype]).itemsize != last - first:
        raise ValueError(f"{given} has a different number of bytes than its shape needs")
    return entry


def _check_order(tensors: Mapping[str, Entry], start: int, size: int) -> None:
    """Raises ValueError unless the tensors' bytes fill the rest of the file without gaps."""
    places = sorted((entry.first, entry.last) for entry in tensors.values())
    borders = [start, *itertools.chain.from_iterable(places), size]
    if any(borders[i] != borders[i + 1] for i in range(0, len(borders), 2)):
        raise ValueError(
            f"it has {size:,} bytes, but its header says that its tensors end at {borders[-2]:,}, without gaps"
        )


def tensor(file: Path, name: str) -> np.ndarray:
    """One tensor, in types of `_DTYPES`.

    Raises:
      OSError: it cannot be read, or the file has changed.
    """
    try:
        entry = entries(file)[name]
        found = np.empty(entry.shape, jnp.dtype(_DTYPES[entry.dtype]))
    except (ValueError, KeyError) as error:
        raise OSError(f"{file} cannot be read: {error}") from error
    into = found.reshape(-1).view(np.uint8).data
    with file.open("rb", buffering=0) as stream:
        stream.seek(entry.first)
        while len(into):
            read = stream.readinto(into)
            if not read:
                raise OSError(f"{file} was truncated while jaxshard read it: {name} is incomplete")
            into = into[read:]
    return found
