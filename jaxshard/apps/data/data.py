"""Reads the training and the held-out text, as bytes or tokens."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from jaxshard.apps.config.config import DataConfig
from jaxshard.apps.data import dataset, token_files
from jaxshard.apps.data.dataset import Elements
from jaxshard.apps.data.text_files import are_tokens, read_errors_named, read_text, readable, without_tokenizer
from jaxshard.apps.data.token_files import TokenFiles

Rows = dict[str, np.ndarray]
Array: TypeAlias = np.ndarray | TokenFiles
Train: TypeAlias = Array | Elements

_FORMATS: Mapping[int, Literal["bytes", "uint16", "uint32"]] = {1: "bytes", 2: "uint16", 4: "uint32"}


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """The training and the held-out text: bytes or token ids.

    Attributes:
      train: uint8 bytes, or tokens, or a dataset of rows of tokens.
      heldout: the same, in memory; for a dataset, rows.
      fingerprint: a checksum of both, as a signed 32-bit number: of every byte, or of samples of a dataset.
      whole: all bytes, if both are parts of one text.
      older_fingerprint: computes the checksum of samples that older versions of jaxshard saved for token files.
    """

    train: Train
    heldout: np.ndarray
    fingerprint: int
    whole: np.ndarray | None = None
    older_fingerprint: Callable[[], int] | None = None

    @property
    def is_bytes(self) -> bool:
        """Whether it is text in bytes."""
        return self.format == "bytes"

    @property
    def num_targets(self) -> int:
        """The number of held-out tokens or bytes that are predicted."""
        rows = self.heldout
        return len(rows) - 1 if rows.ndim == 1 else rows[:, 1:].size

    @property
    def format(self) -> Literal["bytes", "uint16", "uint32"]:
        """The format, as in the configuration."""
        return _FORMATS[self.train.dtype.itemsize]


def read(
    config: DataConfig, length: int, vocabulary: int, typed: Collection[str] = (), *, heldout_alone: bool = False
) -> Text:
    """Reads the text of a configuration, in two parts; tokens stay on disk.

    Args:
      config: names the text.
      length: of a sequence.
      vocabulary: upper bound of the tokens.
      typed: the functions that the user typed; functions that only a file names are not called.
      heldout_alone: for evaluation: training tokens are not read, and have no fingerprint.

    Raises:
      ValueError: the text does not exist, cannot be read completely, is too large for this host, too short, or has
        tokens outside the vocabulary.
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


def _read_tokens(config: DataConfig, files: Sequence[Path], length: int, vocabulary: int, heldout_alone: bool) -> Text:
    files, dtype = without_tokenizer(files), None if config.format == "auto" else config.format
    apart = None
    if config.heldout_path is not None:
        apart = without_tokenizer(readable("data.heldout_path", config.heldout_path))
    own = [file for file in files if "val" in file.stem.lower()] if apart is None else []
    own = own if len(own) < len(files) else []  # some files must be left to train on
    with read_errors_named("data.path", config.path):
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
    with read_errors_named("data.path", config.path):
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


def _counted(text: Array) -> str:
    return "bytes" if text.dtype == np.uint8 else "tokens"


def check_length(text: Array, what: str, length: int) -> None:
    """Raises ValueError unless the text has at least one sequence."""
    if len(text) <= length:
        raise ValueError(
            f"{what} has {len(text)} {_counted(text)}, and a sequence needs more than model.sequence_length = "
            f"{length}: give more text, or use shorter sequences"
        )


def split(text: Array, heldout: float, length: int) -> tuple[Array, Array]:
    """The training text and the last `heldout` part, each long enough for one sequence of `length`.

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


def zlib_bits_per_byte(text: np.ndarray) -> float:
    """Bits per byte of zlib at level 9: a baseline for a language model."""
    return 8 * len(zlib.compress(text.data, 9)) / len(text)
