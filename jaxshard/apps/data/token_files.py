"""Several files of token ids, as nanoGPT and llm.c write them."""

from __future__ import annotations

import bisect
import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxshard.apps.data.token_file import TokenFile

HEADERS = {20240520: "uint16", 20240801: "uint32"}
"""The first of the 256 int32 numbers of llm.c's header, for GPT-2's tokens and for Llama 3's."""
COUNTED = 2**32
"""The header has the number of tokens modulo this."""
TOKENIZER = "tokenizer.json"
"""The tokenizer's file beside the tokens."""
MOST_TOKENIZER_BYTES = 2**26
"""The most bytes of it, or of a related file; Gemma's has 33 MB."""
_HEADER_BYTES = 1024
_SAMPLES, _SAMPLE_TOKENS = 64, 2**15  # of `sampled_fingerprint`


class Part(NamedTuple):
    """A range of a file's tokens."""

    file: TokenFile
    first: int
    length: int


class TokenFiles:
    """Several token files, concatenated to one array of one dim.

    Args:
      parts: of files, in order.
    """

    def __init__(self, parts: Sequence[Part]):
        self.parts = parts
        self._starts = [0, *itertools.accumulate(part.length for part in parts)]

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].file.dtype

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, where: slice) -> TokenFiles:
        """A slice of the tokens, as another such array; nothing is read."""
        first, last, _ = where.indices(len(self))
        cut = []
        for start, part in zip(self._starts, self.parts, strict=False):
            a, b = (min(max(end - start, 0), part.length) for end in (first, last))
            cut.append(Part(part.file, part.first + a, max(b - a, 0)))
        return TokenFiles(cut)

    def rows(self, starts: Sequence[int], length: int) -> np.ndarray:
        """Reads `length` tokens from each start, `(len(starts), length)`.

        Raises:
          TextError: a file cannot be read, was cut short, or has changed since the run began.
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
        """The location of a token, for messages."""
        part = self._part_of(index)
        return f"{self.parts[part].file.path}, token {self.parts[part].first + index - self._starts[part]:,}"

    def _part_of(self, index: int) -> int:
        return bisect.bisect_right(self._starts, index) - 1

    def _pieces(self, start: int, row: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """(part, first token in its file, the piece of `row` to fill) for each part that a row overlaps."""
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
      dtype: of tokens without a header; None: uint16.

    Raises:
      ValueError: a file's size is not a multiple of a token's, or its header contradicts `dtype`.
      OSError: one cannot be read.
    """
    found = [_opened(file, dtype) for file in files]
    if len({each.dtype for each in found}) > 1:
        named = ", ".join(f"{each.path}: {each.dtype}" for each in found)
        raise ValueError(f"data.path: the files hold tokens of different types: {named}; use one type")
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
            f"data.path: {file} has {seen.st_size - start:,} bytes of tokens, not a multiple of {chosen.itemsize}, the "
            f"size of {chosen.name}: it is truncated, or is text: set data.format = bytes"
        )
    if of_header and count % COUNTED != int(numbers[2]):
        raise ValueError(
            f"data.path: {file} holds {count:,} tokens, and its header says {int(numbers[2]):,}: copy it again"
        )
    return TokenFile(file, chosen, start, count, seen)


def out_of_range(tokens: np.ndarray, vocabulary: int, place: Callable[[int], str]) -> str | None:
    """An error message if a token is outside the vocabulary, with its location by `place`, a function of the index in
    the flat array. (A 32-bit token may have become negative.)"""
    unsigned = tokens.view(np.dtype(f"u{tokens.dtype.itemsize}")).reshape(-1)
    largest = int(unsigned.max(initial=0))
    if largest < vocabulary:
        return None
    first = int(np.argmax(unsigned >= vocabulary))
    return _out_of_range(int(unsigned[first]), place(first), vocabulary, largest)


def out_of_range_anywhere(text: TokenFiles, vocabulary: int) -> str | None:
    """The same for all tokens of some files, which it reads completely; raises TextError if it cannot."""
    for file in (part.file for part in text.parts):
        if (largest := file.look_over().largest) >= vocabulary:
            place, token = file.first_from(vocabulary)
            return _out_of_range(token, f"{file.path}, token {place:,}", vocabulary, largest)
    return None


def _out_of_range(token: int, place: str, vocabulary: int, largest: int) -> str:
    return (
        f"the text has the token {token} ({place}), and model.vocabulary = {vocabulary}: set it to {largest + 1} or "
        "more (for GPT-2's 50257 use 50304, a multiple of 64). If the file holds something else, set data.format"
    )


def fingerprint(text: TokenFiles) -> int:
    """A checksum of the lengths and of every byte of the files."""
    whole = [(part.length, part.file.dtype.name, part.first, part.file.look_over().checksum) for part in text.parts]
    return zlib.crc32(repr(whole).encode())


def sampled_fingerprint(text: TokenFiles) -> int:
    """A checksum of the lengths and of samples, as older versions of jaxshard saved."""
    found = zlib.crc32(repr([(part.length, part.file.dtype.name) for part in text.parts]).encode())
    starts = np.linspace(0, max(0, len(text) - _SAMPLE_TOKENS), _SAMPLES).astype(np.int64)
    for start in dict.fromkeys(starts.tolist()):
        found = zlib.crc32(text.rows([start], min(len(text), _SAMPLE_TOKENS)).tobytes(), found)
    return found
