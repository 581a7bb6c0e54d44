"""Text as bytes, and the batches made of it, each a pure function of seed and step."""

from __future__ import annotations

import dataclasses
import functools
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxshard.trainer import memory

Rows = dict[str, np.ndarray]

BUILTIN = "pydoc_data.topics"


def read_text(path: str | None) -> np.ndarray:
    """All bytes of a file, or of a folder's files in the order of their relative paths; without a path, `BUILTIN`.

    Returns:
      uint8, one-dimensional.

    Raises:
      ValueError: nothing is there, not all of it can be read, it is too large for this host, or empty.
    """
    if path is None:
        from pydoc_data.topics import topics

        return _bytes("\n".join(topics[name] for name in sorted(topics)).encode())
    try:
        files = _files(Path(path))
        size = sum(file.stat().st_size for file in files)
        memory.check(2 * size, f"data.path: {path!r}, of which two copies are held,", "give less text")
        text = b"\n".join(file.read_bytes() for file in files)
    except OSError as error:
        raise ValueError(f"data.path: {path!r} cannot be read: {error}") from error
    if not text.strip():
        raise ValueError(f"data.path: {path!r} is empty ({len(files)} files): give a file or a folder of text")
    return _bytes(text)


def _files(root: Path) -> list[Path]:
    """The file itself, or all files of the folder, in the order of their paths. Links are followed.

    Raises:
      ValueError: something there is no file: a pipe, a link to nothing.
      OSError: a folder cannot be read.
    """
    if not os.path.lexists(root):
        raise ValueError(f"data.path: {str(root)!r} does not exist: give a file or a folder of text")
    return sorted(_walked(root))


def _walked(root: Path) -> Iterator[Path]:
    """The files of a path, in any order."""
    paths: list[tuple[Path, frozenset[tuple[int, int]]]] = [(root, frozenset())]  # each with the folders it lies in
    while paths:
        path, above = paths.pop()
        found = _found(path)
        folder = found.st_dev, found.st_ino
        if stat.S_ISREG(found.st_mode):
            yield path
        elif not stat.S_ISDIR(found.st_mode):
            raise ValueError(f"data.path: {str(path)!r} is no file, and no folder: put the text into a file")
        elif folder in above:
            raise ValueError(f"data.path: {str(path)!r} is a link to a folder that it lies in: remove it")
        else:
            paths += ((path / name, above | {folder}) for name in os.listdir(path))


def _found(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        if not path.is_symlink():
            raise
        raise ValueError(
            f"data.path: {str(path)!r} is a link that leads nowhere ({error.strerror}): remove it"
        ) from None


def split(text: np.ndarray, heldout: float, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The text to train on and the last `heldout` part of it, each long enough for one sequence of `length`.

    Raises:
      ValueError: the text is too short.
    """
    cut = len(text) - int(len(text) * heldout)
    train, held = text[:cut], text[cut:]
    if min(len(train), len(held)) <= length:
        needed = (length + 1) / min(heldout, 1 - heldout)
        needed = int(needed) + 1 if needed < 2**63 else "an impossible number of"
        raise ValueError(
            f"the text has {len(text)} bytes, {len(train)} to train on and {len(held)} held out; both need more than "
            f"model.sequence_length = {length}: give a text of {needed} bytes or more, or shorter sequences"
        )
    return train, held


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingBatches:
    """Endless rows of a text, in windows that cover it once per epoch, in a new order and from a new offset each time.

    What a step gets depends on seed and step alone, so a resumed run needs no replay.
    """

    text: np.ndarray
    rows: int
    length: int
    seed: int

    def __call__(self, step: int, first: int = 0, last: int | None = None) -> Rows:
        """Rows `first` to `last` of the batch for `step`: `{"tokens": (last - first, length + 1) int32}`."""
        rows = range(self.rows)[first:last]
        starts = [self._start(step * self.rows + row) for row in rows]
        windows = np.asarray(starts)[:, None] + np.arange(self.length + 1)
        return {"tokens": self.text[windows].astype(np.int32)}

    def _start(self, index: int) -> int:
        windows = max(1, (len(self.text) - 1) // self.length - 1)
        order, offset = _epoch(self.seed, index // windows, windows, len(self.text) - 1 - windows * self.length)
        return int(offset + self.length * order[index % windows])


@functools.lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, windows: int, slack: int) -> tuple[np.ndarray, int]:
    generator = np.random.default_rng([seed, epoch])
    return generator.permutation(windows), int(generator.integers(slack + 1))


def heldout_batches(
    text: np.ndarray, rows: int, length: int, first: int = 0, last: int | None = None
) -> Iterator[tuple[Rows, int]]:
    """The text in order, each byte but the first predicted once; rows and positions beyond its end weigh nothing.

    Yields:
      rows `first` to `last` of `{"tokens": (rows, length + 1) int32, "weights": (rows, length) float32}`, and the
      weight of the whole batch.
    """
    num_targets = len(text) - 1
    num_batches = -(-num_targets // (rows * length))
    padded = np.zeros(num_batches * rows * length + 1, np.int32)
    padded[: len(text)] = text
    weights = (np.arange(num_batches * rows * length) < num_targets).astype(np.float32)
    for batch in range(num_batches):
        starts = (np.arange(batch * rows, (batch + 1) * rows)[first:last] * length)[:, None]
        tokens, mine = padded[starts + np.arange(length + 1)], weights[starts + np.arange(length)]
        yield {"tokens": tokens, "weights": mine}, min(rows * length, num_targets - batch * rows * length)


def zlib_bits_per_byte(text: np.ndarray) -> float:
    """The bits that zlib needs for a byte at its best (level 9): a mark for a language model."""
    return 8 * len(zlib.compress(text.data, 9)) / len(text)


def _bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)
