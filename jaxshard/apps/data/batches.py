"""Batches of a text; each is a pure function of seed and step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from jaxshard.apps.config import memory
from jaxshard.apps.data.data import Array, Rows, Text
from jaxshard.apps.data.dataset import ElementBatches, Elements
from jaxshard.apps.data.token_files import TokenFiles


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingBatches:
    """Endless rows of a text: windows that cover it once per epoch, each epoch with a new order and offset.

    A step's rows depend on seed and step alone, so a resumed run replays nothing.
    """

    text: Array
    rows: int
    length: int
    seed: int

    def __call__(self, step: int, first: int = 0, last: int | None = None) -> Rows:
        """Rows `first` to `last` of the batch for `step`: `{"tokens": (last - first, length + 1) int32}`."""
        rows = range(self.rows)[first:last]
        starts = [self._start(step * self.rows + row) for row in rows]
        if isinstance(self.text, TokenFiles):
            return {"tokens": self.text.rows(starts, self.length + 1).astype(np.int32)}
        return {"tokens": self.text[np.asarray(starts)[:, None] + np.arange(self.length + 1)].astype(np.int32)}

    def place(self, step: int, row: int, column: int) -> str:
        """The location of a token of the batch for `step`, for messages."""
        index = self._start(step * self.rows + row) + column
        return self.text.place(index) if isinstance(self.text, TokenFiles) else f"byte {index:,}"

    def _start(self, index: int) -> int:
        windows = max(1, (len(self.text) - 1) // self.length - 1)
        order, offset = _epoch(self.seed, index // windows, windows, len(self.text) - 1 - windows * self.length)
        return int(offset + self.length * order[index % windows])


@functools.lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, windows: int, slack: int) -> tuple[np.ndarray, int]:
    generator = np.random.default_rng([seed, epoch])
    return generator.permutation(windows), int(generator.integers(slack + 1))


_ORDER_BYTES = 16  # per window: its index in the orders of two epochs


def batches_of(text: Text, rows: int, length: int, seed: int) -> TrainingBatches | ElementBatches:
    """The batches of the training text."""
    if isinstance(text.train, Elements):
        return ElementBatches(text.train, rows)
    windows = len(text.train) // length
    memory.check(_ORDER_BYTES * windows, f"the order of {windows:,} windows of the text", "give less text")
    return TrainingBatches(text.train, rows, length, seed)


def heldout_batches(
    text: np.ndarray, rows: int, length: int, first: int = 0, last: int | None = None
) -> Iterator[tuple[Rows, int]]:
    """The text in order; predicts each byte but the first once. Rows and positions beyond its end have weight 0.

    Yields:
      rows `first` to `last` of `{"tokens": (rows, length + 1) int32, "weights": (rows, length) float32}`, and the
      weight of the whole batch.
    """
    if text.ndim == 2:
        yield from _heldout_rows(text, rows, first, last)
        return
    num_targets = len(text) - 1
    num_batches = -(-num_targets // (rows * length))
    padded = np.zeros(num_batches * rows * length + 1, np.int32)
    padded[: len(text)] = text
    weights = (np.arange(num_batches * rows * length) < num_targets).astype(np.float32)
    for batch in range(num_batches):
        starts = (np.arange(batch * rows, (batch + 1) * rows)[first:last] * length)[:, None]
        tokens, mine = padded[starts + np.arange(length + 1)], weights[starts + np.arange(length)]
        yield {"tokens": tokens, "weights": mine}, min(rows * length, num_targets - batch * rows * length)


def _heldout_rows(text: np.ndarray, rows: int, first: int, last: int | None) -> Iterator[tuple[Rows, int]]:
    """The same for a dataset's rows."""
    for start in range(0, len(text), rows):
        numbers = np.arange(start, start + rows)[first:last]
        weights = np.broadcast_to((numbers < len(text))[:, None], (len(numbers), text.shape[1] - 1))
        tokens = text[np.minimum(numbers, len(text) - 1)]
        yield (
            {"tokens": tokens, "weights": weights.astype(np.float32)},
            min(rows, len(text) - start) * (text.shape[1] - 1),
        )
