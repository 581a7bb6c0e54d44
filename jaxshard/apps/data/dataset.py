"""Rows of tokens from a user's dataset: any sequence with random access, such as a `grain.MapDataset`."""

from __future__ import annotations

import dataclasses
import os
import re
import zlib
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from jaxshard.system.text import shell_command
from jaxshard.system.users_code import UsersError, blamed, called

_SAMPLES = 16
_NO_END = 2**62  # elements; grain's repeat() has about 2**63
_WANTED = "it must return rows of tokens, as a grain.MapDataset or another sequence with len() and indexing"


def names_dataset(path: str | None) -> bool:
    """Whether a path is MODULE:FUNCTION or FILE.py:FUNCTION, not a file.

    >>> names_dataset("my.data:build"), names_dataset("my data/build.py:rows"), names_dataset("text.txt")
    (True, True, False)
    """
    return path is not None and bool(re.fullmatch(r"(.+\.py|[\w.]+):\w+", path)) and not os.path.lexists(path)


@dataclasses.dataclass(frozen=True, eq=False)
class Elements:
    """A range of elements of a user's dataset.

    Attributes:
      source: has a length and elements.
      places: the indices of these elements in it.
      length: tokens of each, minus one.
      what: the function that made it, for messages.
    """

    source: Any
    places: range
    length: int
    what: str

    @property
    def dtype(self) -> np.dtype:
        """The dtype, as for token files."""
        return np.dtype(np.uint32)

    def __len__(self) -> int:
        return len(self.places)

    def rows(self, numbers: Iterable[int]) -> np.ndarray:
        """The elements with these numbers, `(n, length + 1)` int32.

        Raises:
          UsersError: reading one fails, or it is not a row of tokens.
        """
        return np.stack([self._row(self.places[number]) for number in numbers])

    def place(self, number: int) -> str:
        """The location of an element, for messages."""
        return f"{self.what}, element {self.places[number]}"

    def _row(self, place: int) -> np.ndarray:
        with blamed(self.what):
            element = self.source[place]
            row = _as_array(element)
        found = f"{row.dtype} of shape {row.shape}" if isinstance(element, np.ndarray) else type(element).__name__
        wanted = f"and a row of tokens is a 1-D array of {self.length + 1} integers, model.sequence_length + 1"
        if row.shape != (self.length + 1,) or row.dtype.kind not in "iu":
            shape = "" if isinstance(element, np.ndarray) or not row.shape else f" of shape {row.shape}"
            raise UsersError(f"{self.what}: element {place} is {found}{shape}, {wanted}")
        if row.min() < 0 or row.max() >= 2**31:
            raise UsersError(f"{self.what}: element {place} has the token {row.min() if row.min() < 0 else row.max()}")
        return row.astype(np.int32)

    @property
    def fingerprint(self) -> int:
        """A checksum of the number of elements and of a sample of them."""
        places = dict.fromkeys(i * (len(self) - 1) // (_SAMPLES - 1) for i in range(_SAMPLES))
        return zlib.crc32(self.rows(places).tobytes(), zlib.crc32(repr(self.places).encode()))


def _as_array(element: Any) -> np.ndarray:
    """An array; of objects, if the element's parts have different lengths."""
    try:
        return np.asarray(element)
    except ValueError:
        return np.asarray(element, object)


@dataclasses.dataclass(frozen=True, eq=False)
class ElementBatches:
    """Endless rows of a dataset in its own order; a step's rows depend on the step alone."""

    elements: Elements
    rows: int

    def __call__(self, step: int, first: int = 0, last: int | None = None) -> dict[str, np.ndarray]:
        """Rows `first` to `last` of the batch for `step`: `{"tokens": (last - first, length + 1) int32}`."""
        numbers = range(step * self.rows, (step + 1) * self.rows)[first:last]
        return {"tokens": self.elements.rows(number % len(self.elements) for number in numbers)}

    def place(self, step: int, row: int, column: int) -> str:
        """The location of a token of the batch for `step`, for messages."""
        return f"{self.elements.place((step * self.rows + row) % len(self.elements))}, token {column}"


def read(
    path: str, heldout_path: str | None, heldout: float, length: int, typed: Collection[str]
) -> tuple[Elements, Elements]:
    """The training elements and the held-out ones: the last part, or all of a second dataset.

    Args:
      path: the function.
      heldout_path: a second function, or None.
      heldout: the part to hold out, without a second function.
      length: of a sequence.
      typed: the functions that the user typed; no other is called.

    Raises:
      ValueError: a function may not or cannot be called, or does not return a dataset, or one that is too short or
        endless.
    """
    check_typed(path, "--data", typed)
    if heldout_path is not None and names_dataset(heldout_path):
        check_typed(heldout_path, "--data.heldout-path", typed)
    whole = _made(path, length)
    if heldout_path is not None:
        if not names_dataset(heldout_path):
            raise ValueError(
                f"data.heldout_path = {heldout_path}: data.path is a function, so give a function here, too"
            )
        return whole, _made(heldout_path, length)
    count = len(whole)
    if count >= _NO_END:
        raise ValueError(f"{path}: it never ends: leave out repeat() (jaxshard repeats it), or give data.heldout_path")
    held = int(count * heldout)
    if min(held, count - held) < 1:
        raise ValueError(f"{path}: it has {count} elements, too few to hold out a fraction of {heldout}: give more")
    train, rest = whole.places[: count - held], whole.places[count - held :]
    return dataclasses.replace(whole, places=train), dataclasses.replace(whole, places=rest)


def check_typed(function: str, option: str, typed: Collection[str]) -> None:
    """Raises ValueError for a function that only a file names: the file's author could run any code."""
    if function not in typed:
        raise ValueError(
            f"{option.removeprefix('--')}: the configuration names the function {function}, but files may not run "
            f"code. If you trust it, type {shell_command(option, function)}"
        )


def _made(what: str, length: int) -> Elements:
    source = called(what, files=True)
    kind = type(source)
    if not hasattr(kind, "__getitem__") or not hasattr(kind, "__len__") or isinstance(source, dict | str | bytes):
        raise ValueError(f"{what} returned a {kind.__name__}: {_WANTED}")
    with blamed(what):
        count = len(source)
    if not count:
        raise ValueError(f"{what} has no elements: {_WANTED}")
    elements = Elements(source, range(count), length, what)
    if not np.array_equal(elements.rows([0]), elements.rows([0])):
        raise ValueError(
            f"{what}: element 0 differs when it is read again, so a resumed run could not continue with the same data"
        )
    return elements
