"""Text, as bytes or as tokens, and the batches made of it, each a pure function of seed and step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import stat
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from jaxshard.apps.config import memory
from jaxshard.apps.config.config import DataConfig
from jaxshard.apps.data import dataset, standard_library, token_files
from jaxshard.apps.data.dataset import ElementBatches, Elements
from jaxshard.apps.data.token_files import TokenFiles

Rows = dict[str, np.ndarray]
Array: TypeAlias = np.ndarray | TokenFiles
Train: TypeAlias = Array | Elements

_FORMATS: Mapping[int, Literal["bytes", "uint16", "uint32"]] = {1: "bytes", 2: "uint16", 4: "uint32"}

BUILTIN = "pydoc_data.topics"


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """What there is to train on, and what is held out: bytes, or token ids.

    Attributes:
      train: uint8 bytes, or tokens, or a dataset of rows of tokens.
      heldout: the same, in memory; of a dataset, rows.
      fingerprint: a checksum of both, as a signed number of 32 bits: of every byte, but of samples of a dataset.
      whole: all bytes, where both are parts of one text.
      older_fingerprint: makes the checksum of samples that older versions of jaxshard saved for files of tokens.
    """

    train: Train
    heldout: np.ndarray
    fingerprint: int
    whole: np.ndarray | None = None
    older_fingerprint: Callable[[], int] | None = None

    @property
    def is_bytes(self) -> bool:
        """Whether it is text, whose bytes are counted."""
        return self.format == "bytes"

    @property
    def num_targets(self) -> int:
        """Held-out tokens, or bytes, that are predicted."""
        rows = self.heldout
        return len(rows) - 1 if rows.ndim == 1 else rows[:, 1:].size

    @property
    def format(self) -> Literal["bytes", "uint16", "uint32"]:
        """As in the configuration."""
        return _FORMATS[self.train.dtype.itemsize]


def read(
    config: DataConfig, length: int, vocabulary: int, typed: Collection[str] = (), *, heldout_alone: bool = False
) -> Text:
    """The text that a configuration names, in two parts; tokens stay on the disk.

    Args:
      config: where it is.
      length: of a sequence.
      vocabulary: what tokens must be below.
      typed: the functions that the user asked for; one that only a file names is not called.
      heldout_alone: nothing is trained: tokens that are not held out are not read, and have no fingerprint.

    Raises:
      ValueError: nothing is there, not all of it can be read, it is too large for this host, too short, or has other
        tokens than the model.
    """
    if config.path is not None and dataset.names_dataset(config.path):
        train, held = dataset.read(config.path, config.heldout_path, config.heldout, length, typed)
        return _read_elements(config, train, held, vocabulary)
    if config.path is not None and config.format != "bytes":
        files = readable("data.path", config.path)
        if are_tokens(config.format, files):
            return _read_tokens(config, files, length, vocabulary, heldout_alone)
    text = read_text(config.path)
    if config.heldout_path is None:
        train, heldout = split(text, config.heldout, length)
        held = np.asarray(heldout[: config.heldout_bytes])
        return Text(train, held, _signed(zlib.crc32(text.data)), whole=text)
    heldout = read_text(config.heldout_path, "data.heldout_path")
    check_length(text, "data.path", length)
    check_length(heldout, "data.heldout_path", length)
    return Text(text, heldout[: config.heldout_bytes], _signed(zlib.crc32(heldout.data, zlib.crc32(text.data))))


def _read_elements(config: DataConfig, train: Elements, held: Elements, vocabulary: int) -> Text:
    rows = held.rows(range(min(len(held), -(-config.heldout_bytes // held.length))))
    for piece, part in ((rows, held), (train.rows([0]), train)):
        _check(token_files.out_of_range(piece, vocabulary, lambda index: part.place(index // (part.length + 1))))
    return Text(train, rows, _signed(zlib.crc32(rows.tobytes(), train.fingerprint)))


def are_tokens(format: str, files: Sequence[Path]) -> bool:
    """Whether files hold tokens, as `data.format` says."""
    tokens = without_tokenizer(files)
    return format.startswith("uint") or (
        format == "auto" and bool(tokens) and all(file.suffix == ".bin" for file in tokens)
    )


def without_tokenizer(files: Sequence[Path]) -> list[Path]:
    """The files but a tokenizer.json among several, which is no text."""
    return [file for file in files if file.name != token_files.TOKENIZER or len(files) == 1]


def _read_tokens(config: DataConfig, files: Sequence[Path], length: int, vocabulary: int, heldout_alone: bool) -> Text:
    files, dtype = without_tokenizer(files), None if config.format == "auto" else config.format
    apart = None
    if config.heldout_path is not None:
        apart = without_tokenizer(readable("data.heldout_path", config.heldout_path))
    own = [file for file in files if "val" in file.stem.lower()] if apart is None else []
    own = own if len(own) < len(files) else []  # there must be others to train on
    with _told("data.path", config.path):
        text = token_files.read([file for file in files if file not in own], dtype)
        held = token_files.read(apart or own, dtype) if apart or own else None
    check_length(text, "data.path", length)
    whole = [text] if held is None else [text, held]
    if held is None:
        train, heldout = split(text, config.heldout, length)
    else:
        check_length(held, "data.heldout_path" if apart else f"data.path: {own[0]}", length)
        train, heldout = text, held
    assert isinstance(heldout, TokenFiles)
    with _told("data.path", config.path):
        for part in () if heldout_alone else whole:
            _check(token_files.out_of_range_anywhere(part, vocabulary))
        rows = heldout.rows([0], min(len(heldout), config.heldout_bytes))[0]
        if heldout_alone:
            _check(token_files.out_of_range(rows, vocabulary, heldout.place))
            return Text(train, rows, 0)
        fingerprint = _joined(token_files.fingerprint(part) for part in whole)
    return Text(train, rows, fingerprint, None, lambda: _joined(map(token_files.sampled_fingerprint, whole)))


def _check(wrong: str | None) -> None:
    if wrong is not None:
        raise ValueError(wrong)


def _joined(prints: Iterable[int]) -> int:
    return _signed(zlib.crc32(repr(list(prints)).encode()))


def _signed(number: int) -> int:
    return int(np.uint32(number).view(np.int32))


@contextlib.contextmanager
def _told(option: str, path: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}: {path!r} cannot be read: {error}") from error


def readable(option: str, path: str) -> list[Path]:
    """The files of a path.

    Raises:
      ValueError: there is none, or they cannot be read.
    """
    with _told(option, path):
        files = _files(option, path)
    if not files:
        raise ValueError(f"{option}: {path!r} is empty (0 files): give a file or a folder of text")
    return files


def read_text(path: str | None, option: str = "data.path") -> np.ndarray:
    """All bytes of a file, or of a folder's files in the order of their relative paths.

    Args:
      path: of the file or folder; "stdlib": the source of Python's standard library; None: `BUILTIN`.
      option: that gave the path, for errors.

    Returns:
      uint8, one-dimensional.

    Raises:
      ValueError: nothing is there, not all of it can be read, it is too large for this host, or empty.
    """
    if path is None:
        from pydoc_data.topics import topics

        return _bytes("\n".join(topics[name] for name in sorted(topics)).encode())
    with _told(option, path):
        files = _files(option, path)
        size = sum(file.stat().st_size for file in files)
        memory.check(2 * size, f"{option}: {path!r}, of which two copies are held,", "give less text")
        text = b"\n".join(map(_as_long_as_it_is, files))
    if not text.strip():
        raise ValueError(f"{option}: {path!r} is empty ({len(files)} files): give a file or a folder of text")
    return _bytes(text)


def _as_long_as_it_is(file: Path) -> bytes:
    """A file's bytes, without those that are added while it is read."""
    with file.open("rb") as stream:
        return stream.read(os.fstat(stream.fileno()).st_size)


def _files(option: str, path: str) -> list[Path]:
    """The file itself, or all files of the folder, in the order of their paths. Links are followed.

    Raises:
      ValueError: something there is no file: a pipe, a link to nothing.
      OSError: a folder cannot be read.
    """
    if path == standard_library.NAME:
        return standard_library.files(option)
    root = Path(path)
    if not os.path.lexists(root):
        raise ValueError(f"{option}: {path!r} does not exist: give a file or a folder of text")
    return sorted(_walked(option, root))


def _walked(option: str, root: Path) -> Iterator[Path]:
    """The files of a path, in any order."""
    paths: list[tuple[Path, frozenset[tuple[int, int]]]] = [(root, frozenset())]  # each with the folders it lies in
    while paths:
        path, above = paths.pop()
        found = _found(option, path)
        folder = found.st_dev, found.st_ino
        if stat.S_ISREG(found.st_mode):
            yield path
        elif not stat.S_ISDIR(found.st_mode):
            raise ValueError(f"{option}: {str(path)!r} is no file, and no folder: put the text into a file")
        elif folder in above:
            raise ValueError(f"{option}: {str(path)!r} is a link to a folder that it lies in: remove it")
        else:
            paths += ((path / name, above | {folder}) for name in os.listdir(path))


def _found(option: str, path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        if not path.is_symlink():
            raise
        raise ValueError(
            f"{option}: {str(path)!r} is a link that leads nowhere ({error.strerror}): remove it"
        ) from None


def _counted(text: Array) -> str:
    return "bytes" if text.dtype == np.uint8 else "tokens"


def check_length(text: Array, what: str, length: int) -> None:
    """Raises ValueError unless there is one sequence."""
    if len(text) <= length:
        raise ValueError(
            f"{what} has {len(text)} {_counted(text)}, and a sequence needs more than "
            f"model.sequence_length = {length}: give more, or take shorter sequences"
        )


def split(text: Array, heldout: float, length: int) -> tuple[Array, Array]:
    """The text to train on and the last `heldout` part of it, each long enough for one sequence of `length`.

    Raises:
      ValueError: the text is too short.
    """
    cut = len(text) - int(len(text) * heldout)
    train, held = text[:cut], text[cut:]
    if min(len(train), len(held)) <= length:
        needed = (length + 1) / min(heldout, 1 - heldout)
        needed = int(needed) + 1 if needed < 2**63 else "an impossible number of"
        unit = _counted(text)
        raise ValueError(
            f"the text has {len(text)} {unit}, {len(train)} to train on and {len(held)} held out; both need more than "
            f"model.sequence_length = {length}: give a text of {needed} {unit} or more, or shorter sequences"
        )
    return train, held


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingBatches:
    """Endless rows of a text, in windows that cover it once per epoch, in a new order and from a new offset each time.

    What a step gets depends on seed and step alone, so a resumed run needs no replay.
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
        """Where a token of the batch for `step` is, for messages."""
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


_ORDER_BYTES = 16  # of a window: its place in the orders of two epochs


def batches_of(text: Text, rows: int, length: int, seed: int) -> TrainingBatches | ElementBatches:
    """The batches of what there is to train on."""
    if isinstance(text.train, Elements):
        return ElementBatches(text.train, rows)
    windows = len(text.train) // length
    memory.check(_ORDER_BYTES * windows, f"the order of {windows:,} windows of the text", "give less text")
    return TrainingBatches(text.train, rows, length, seed)


def heldout_batches(
    text: np.ndarray, rows: int, length: int, first: int = 0, last: int | None = None
) -> Iterator[tuple[Rows, int]]:
    """The text in order, each byte but the first predicted once; rows and positions beyond its end weigh nothing.

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
    """The same of a dataset's rows."""
    for start in range(0, len(text), rows):
        numbers = np.arange(start, start + rows)[first:last]
        weights = np.broadcast_to((numbers < len(text))[:, None], (len(numbers), text.shape[1] - 1))
        tokens = text[np.minimum(numbers, len(text) - 1)]
        yield (
            {"tokens": tokens, "weights": weights.astype(np.float32)},
            min(rows, len(text) - start) * (text.shape[1] - 1),
        )


def zlib_bits_per_byte(text: np.ndarray) -> float:
    """The bits that zlib needs for a byte at its best (level 9): a mark for a language model."""
    return 8 * len(zlib.compress(text.data, 9)) / len(text)


def _bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)
