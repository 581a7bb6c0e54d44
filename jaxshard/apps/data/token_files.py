"""Files of token ids, as nanoGPT and llm.c write them. They are read in pieces, so they may be larger than memory.

No file is mapped into memory: the system would end a program by SIGBUS where a mapped file was cut short, or its disk
fails. A read is an error instead. Each read also compares the file with what it was when the run began.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import itertools
import os
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

HEADERS = {20240520: "uint16", 20240801: "uint32"}
"""The first of the 256 int32 numbers that llm.c puts before the tokens: of GPT-2's, and of Llama 3's."""
COUNTED = 2**32
"""The header's number of tokens is the whole number modulo this."""
TOKENIZER = "tokenizer.json"
"""Beside the tokens, what made them."""
MOST_TOKENIZER_BYTES = 2**26
"""Of it, or of another file that goes with it; Gemma's has 33 MB."""
_HEADER_BYTES = 1024
_BLOCK = 2**19  # tokens that are read at once for the checksum
_PART = 2**25  # tokens that have a checksum of their own, made by one thread
_THREADS = 8
_PAUSES = (0.1, 1.0)  # seconds before a read that failed is tried again
_LONG = 2**33  # bytes that take some seconds
_SAMPLES, _SAMPLE_TOKENS = 64, 2**15  # of `sampled_fingerprint`

_T = TypeVar("_T")


class TextError(OSError):
    """The text cannot be read any more, or is not what it was when the run began."""


class Sums(NamedTuple):
    """What is known of all tokens of a file: a checksum of their bytes, and the largest."""

    checksum: int
    largest: int


class TokenFile:
    """The tokens of a file, opened for each read: many files need no more handles than one.

    Args:
      path: the file.
      dtype: of a token.
      start: bytes before the first token.
      count: tokens.
      seen: the file's `os.stat_result` when `count` was read off it.

    Attributes:
      sums: of all tokens, once `look_over` has read them.
    """

    def __init__(self, path: Path, dtype: np.dtype, start: int, count: int, seen: os.stat_result):
        self.path, self.dtype, self._start, self._count = path, dtype, start, count
        self._seen = _marks(seen)
        self.sums: Sums | None = None

    def __len__(self) -> int:
        return self._count

    def read(self, pieces: Sequence[tuple[int, np.ndarray]]) -> None:
        """Fills each array with the tokens from a place on.

        Raises:
          TextError: the file cannot be read, was cut short, or has other tokens than when the run began.
        """

        def fill(number: int) -> None:
            for first, into in pieces:
                self._fill(number, first, into)

        self._reading(fill)

    def look_over(self) -> Sums:
        """Reads all tokens, in several threads.

        Raises:
          TextError: as `read`.
        """
        if self.sums is None:
            if (size := self._count * self.dtype.itemsize) >= _LONG:
                print(f"{self.path}: all its {size:,} bytes are read once, for their checksum", file=sys.stderr)
            self.sums = self._reading(self._summed)
        return self.sums

    def first_from(self, limit: int) -> tuple[int, int]:
        """The place of the first token that is `limit` or larger, and that token; there must be one."""
        for first in range(0, self._count, _BLOCK):
            tokens = np.empty(min(_BLOCK, self._count - first), self.dtype)
            self.read([(first, tokens)])
            if tokens.max() >= limit:
                index = int(np.argmax(tokens >= limit))
                return first + index, int(tokens[index])
        raise AssertionError(f"{self.path}: no token is {limit} or larger")

    def _reading(self, act: Callable[[int], _T]) -> _T:
        """`act(file descriptor)`, tried again after errors of the system: a network's file system has such for a
        moment. What `act` read counts if the file is as it was seen, or was found to have the same tokens."""

        def attempt() -> _T:
            number = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place would wait for a writer
            try:
                found = act(number)
                while (marks := _marks(os.fstat(number))) != self._seen:
                    self._compare(number, marks)
                    found = act(number)
                return found
            finally:
                os.close(number)

        for pause in _PAUSES:
            try:
                return attempt()
            except TextError:
                raise
            except OSError:
                time.sleep(pause)
        try:
            return attempt()
        except TextError:
            raise
        except OSError as error:
            raise TextError(f"{self.path}: it cannot be read any more: {error.strerror or error}") from error

    def _compare(self, number: int, marks: tuple[int, ...]) -> None:
        """Takes a file that was replaced, written to or touched for what it was, if it has the same tokens.

        Raises:
          TextError: it has others, or those before are not known.
        """
        if self.sums is None or self._summed(number) != self.sums:
            raise TextError(
                f"{self.path} was changed while it is read: it has other tokens than when the run began: bring these "
                "back, or start another run with the new ones"
            )
        self._seen = marks
        warnings.warn(
            f"{self.path} was replaced, written to or touched while it is read; the tokens are the same", stacklevel=1
        )

    def _summed(self, number: int) -> Sums:
        def summed(first: int) -> Sums:
            checksum = largest = 0
            last, into = min(first + _PART, self._count), np.empty(_BLOCK, self.dtype)
            for start in range(first, last, _BLOCK):
                tokens = into[: last - start]
                self._fill(number, start, tokens)
                checksum, largest = zlib.crc32(tokens.data, checksum), max(largest, int(tokens.max()))
            return Sums(checksum, largest)

        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:  # zlib and NumPy leave Python meanwhile
            sums = list(pool.map(summed, range(0, self._count, _PART)))
        checksums = np.asarray([each.checksum for each in sums], "<u4")
        return Sums(zlib.crc32(checksums.data), max((each.largest for each in sums), default=0))

    def _fill(self, number: int, first: int, into: np.ndarray) -> None:
        rest = into.data.cast("B") if into.size else memoryview(b"")
        place = self._start + first * self.dtype.itemsize
        while rest:
            read = os.pread(number, len(rest), place)
            if not read:
                had, has = self._start + self._count * self.dtype.itemsize, os.fstat(number).st_size
                raise TextError(
                    f"{self.path} was cut short while it is read: it ends at byte {has:,}, and had {had:,}: bring the "
                    "rest back"
                )
            rest[: len(read)] = read
            rest, place = rest[len(read) :], place + len(read)


def _marks(found: os.stat_result) -> tuple[int, ...]:
    """What another file, or another content, changes."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Part(NamedTuple):
    """Some tokens of a file, one after the other."""

    file: TokenFile
    first: int
    length: int


class TokenFiles:
    """Several files of tokens, one behind the other, as one array of one dim.

    Args:
      parts: of files, in their order.
    """

    def __init__(self, parts: Sequence[Part]):
        self.parts = parts
        self._starts = [0, *itertools.accumulate(part.length for part in parts)]

    @property
    def dtype(self) -> np.dtype:
        """Of the tokens."""
        return self.parts[0].file.dtype

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, where: slice) -> TokenFiles:
        """The tokens of a slice, as another such array; nothing is read."""
        first, last, _ = where.indices(len(self))
        cut = []
        for start, part in zip(self._starts, self.parts, strict=False):
            a, b = (min(max(end - start, 0), part.length) for end in (first, last))
            cut.append(Part(part.file, part.first + a, max(b - a, 0)))
        return TokenFiles(cut)

    def rows(self, starts: Sequence[int], length: int) -> np.ndarray:
        """Reads `length` tokens from each place on, `(len(starts), length)`.

        Raises:
          TextError: a file cannot be read, was cut short, or has other tokens than when the run began.
        """
        found = np.empty((len(starts), length), self.dtype)
        wanted: dict[int, list[tuple[int, np.ndarray]]] = {}  # by part
        for start, row in zip(starts, found, strict=True):
            for part, first, piece in self._pieces(start, row):
                wanted.setdefault(part, []).append((first, piece))
        for part, pieces in wanted.items():
            self.parts[part].file.read(pieces)
        return found

    def place(self, index: int) -> str:
        """Where a token is, for messages."""
        part = self._part_of(index)
        return f"{self.parts[part].file.path}, token {self.parts[part].first + index - self._starts[part]:,}"

    def _part_of(self, index: int) -> int:
        return bisect.bisect_right(self._starts, index) - 1

    def _pieces(self, start: int, row: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """(part, first token in its file, the piece of `row` to fill) for the parts that a row lies in."""
        part, done = self._part_of(start), 0
        while done < len(row):
            skipped = start + done - self._starts[part]
            count = min(len(row) - done, self.parts[part].length - skipped)
            yield part, self.parts[part].first + skipped, row[done : done + count]
            part, done = part + 1, done + count


def read(files: Sequence[Path], dtype: str | None) -> TokenFiles:
    """The tokens of some files, in this order.

    Args:
      files: with llm.c's header, or tokens alone.
      dtype: of tokens that have no header; None: uint16.

    Raises:
      ValueError: a file holds no whole number of tokens, or others than `dtype`.
      OSError: one cannot be read.
    """
    found = [_opened(file, dtype) for file in files]
    if len({each.dtype for each in found}) > 1:
        named = ", ".join(f"{each.path}: {each.dtype}" for each in found)
        raise ValueError(f"data.path: the files hold tokens of different types: {named}; give those of one")
    return TokenFiles([Part(each, 0, len(each)) for each in found])


def _opened(file: Path, dtype: str | None) -> TokenFile:
    with file.open("rb") as stream:
        seen, head = os.fstat(stream.fileno()), np.frombuffer(stream.read(_HEADER_BYTES), np.uint8)
    numbers = head.view("<u4") if len(head) == _HEADER_BYTES else np.zeros(3, np.uint32)
    of_header = HEADERS.get(int(numbers[0]))
    if of_header and dtype not in (None, of_header):
        raise ValueError(
            f"data.path: {file} has llm.c's header for {of_header}, and data.format = {dtype}: leave it out"
        )
    chosen = np.dtype(of_header or dtype or "uint16").newbyteorder("<")
    start = _HEADER_BYTES if of_header else 0
    count, rest = divmod(seen.st_size - start, chosen.itemsize)
    if rest:
        raise ValueError(
            f"data.path: {file} has {seen.st_size - start:,} bytes of tokens, no multiple of {chosen.itemsize}, the "
            f"size of {chosen.name}: it was cut short, or is text: set data.format = bytes"
        )
    if of_header and count % COUNTED != int(numbers[2]):
        raise ValueError(
            f"data.path: {file} holds {count:,} tokens, and its header says {int(numbers[2]):,}: copy it anew"
        )
    return TokenFile(file, chosen, start, count, seen)


def out_of_range(tokens: np.ndarray, vocabulary: int, place: Callable[[int], str]) -> str | None:
    """An error's text if there is a token that the model has no row for, with the place that `place` gives for its
    index in the flat array. (A token of 32 bits may have become negative.)"""
    unsigned = tokens.view(np.dtype(f"u{tokens.dtype.itemsize}")).reshape(-1)
    largest = int(unsigned.max(initial=0))
    if largest < vocabulary:
        return None
    first = int(np.argmax(unsigned >= vocabulary))
    return _out_of_range(int(unsigned[first]), place(first), vocabulary, largest)


def out_of_range_anywhere(text: TokenFiles, vocabulary: int) -> str | None:
    """The same for all tokens of some files, which are read to their ends.

    Raises:
      TextError: one cannot be read.
    """
    for file in (part.file for part in text.parts):
        if (largest := file.look_over().largest) >= vocabulary:
            place, token = file.first_from(vocabulary)
            return _out_of_range(token, f"{file.path}, token {place:,}", vocabulary, largest)
    return None


def _out_of_range(token: int, place: str, vocabulary: int, largest: int) -> str:
    return (
        f"the text has the token {token} ({place}), and model.vocabulary = {vocabulary}: set it to {largest + 1} or "
        "more (for GPT-2's 50257 take 50304, a multiple of 64); or does the file hold something else? See data.format"
    )


def fingerprint(text: TokenFiles) -> int:
    """A checksum of the lengths, and of every byte of the files."""
    whole = [(part.length, part.file.dtype.name, part.first, part.file.look_over().checksum) for part in text.parts]
    return zlib.crc32(repr(whole).encode())


def sampled_fingerprint(text: TokenFiles) -> int:
    """A checksum of the lengths and of samples, which older versions of jaxshard saved."""
    found = zlib.crc32(repr([(part.length, part.file.dtype.name) for part in text.parts]).encode())
    starts = np.linspace(0, max(0, len(text) - _SAMPLE_TOKENS), _SAMPLES).astype(np.int64)
    for start in dict.fromkeys(starts.tolist()):
        found = zlib.crc32(text.rows([start], min(len(text), _SAMPLE_TOKENS)).tobytes(), found)
    return found
