"""Files of token ids, as nanoGPT and llm.c write them: read in place, so that they may be larger than memory."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from pathlib import Path

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
_SAMPLES, _SAMPLE_TOKENS = 64, 2**15


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFiles:
    """Several files of tokens, one behind the other, as one array."""

    parts: Sequence[np.ndarray]

    @property
    def dtype(self) -> np.dtype:
        """Of the tokens."""
        return self.parts[0].dtype

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, where: slice | np.ndarray) -> TokenFiles | np.ndarray:
        """Another such array for a slice, an array of tokens for an array of places."""
        ends = np.cumsum([len(part) for part in self.parts])
        starts = ends - [len(part) for part in self.parts]
        if isinstance(where, slice):
            first, last, _ = where.indices(len(self))
            cuts = [(max(first - start, 0), max(last - start, 0)) for start in starts]
            return TokenFiles([part[a:b] for part, (a, b) in zip(self.parts, cuts, strict=True)])
        found, file = np.empty(where.shape, self.dtype), np.searchsorted(ends, where, side="right")
        for i in np.unique(file):
            found[file == i] = self.parts[i][where[file == i] - starts[i]]
        return found


def read(files: Sequence[Path], dtype: str | None) -> TokenFiles:
    """The tokens of some files, in this order.

    Args:
      files: with llm.c's header, or tokens alone.
      dtype: of tokens that have no header; None: uint16.

    Raises:
      ValueError: a file holds no whole number of tokens, or others than `dtype`.
      OSError: one cannot be read.
    """
    parts = [_part(file, dtype) for file in files]
    if len({part.dtype for part in parts}) > 1:
        named = ", ".join(f"{file}: {part.dtype}" for file, part in zip(files, parts, strict=True))
        raise ValueError(f"data.path: the files hold tokens of different types: {named}; give those of one")
    return TokenFiles(parts)


def _part(file: Path, dtype: str | None) -> np.ndarray:
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = np.frombuffer(stream.read(_HEADER_BYTES), np.uint8)
    numbers = head.view("<u4") if len(head) == _HEADER_BYTES else np.zeros(3, np.uint32)
    of_header = HEADERS.get(int(numbers[0]))
    if of_header and dtype not in (None, of_header):
        raise ValueError(
            f"data.path: {file} has llm.c's header for {of_header}, and data.format = {dtype}: leave it out"
        )
    chosen = np.dtype(of_header or dtype or "uint16").newbyteorder("<")
    start = _HEADER_BYTES if of_header else 0
    count, rest = divmod(size - start, chosen.itemsize)
    if rest:
        raise ValueError(
            f"data.path: {file} has {size - start:,} bytes of tokens, no multiple of {chosen.itemsize}, the size of "
            f"{chosen.name}: it was cut short, or is text: set data.format = bytes"
        )
    if of_header and count % COUNTED != int(numbers[2]):
        raise ValueError(
            f"data.path: {file} holds {count:,} tokens, and its header says {int(numbers[2]):,}: copy it anew"
        )
    return np.memmap(file, chosen, "r", start, (count,)) if count else np.zeros(0, chosen)


def check_vocabulary(tokens: np.ndarray, vocabulary: int) -> None:
    """Raises ValueError for a token that the model has no row for."""
    largest = int(tokens.max(initial=0))
    if largest >= vocabulary:
        raise ValueError(
            f"the text has the token {largest}, and model.vocabulary = {vocabulary}: set it to {largest + 1} or more "
            "(for GPT-2's 50257 take 50304, a multiple of 64); or does the file hold something else? See data.format"
        )


def samples(text: TokenFiles) -> list[np.ndarray]:
    """Pieces from all over the text, of at most 4 MB together."""
    starts = np.linspace(0, max(0, len(text) - _SAMPLE_TOKENS), _SAMPLES).astype(np.int64)
    last = min(len(text), _SAMPLE_TOKENS)
    return [np.asarray(text[start + np.arange(last)]) for start in dict.fromkeys(starts.tolist())]


def fingerprint(text: TokenFiles) -> int:
    """A checksum of the lengths and of samples."""
    found = zlib.crc32(repr([(len(part), part.dtype.name) for part in text.parts]).encode())
    for piece in samples(text):
        found = zlib.crc32(piece.tobytes(), found)
    return found
