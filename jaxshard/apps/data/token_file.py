"""A file of token ids, read in pieces, so that it may be larger than memory.

It is not mapped into memory, because if a mapped file is cut short or its disk fails, the system kills the program by
SIGBUS; a failed read raises an error instead. Each read also checks that the file has not changed since the run began.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

_BLOCK = 2**19  # tokens to read at once for the checksum
_PART = 2**25  # tokens per partial checksum, computed by one thread
_THREADS = 8
_PAUSES = (0.1, 1.0)  # seconds before retries of a failed read
_LONG = 2**33  # bytes that take several seconds to read
_T = TypeVar("_T")


class TextError(OSError):
    """The text can no longer be read, or has changed since the run began."""


class Sums(NamedTuple):
    """A checksum of the bytes of all tokens of a file, and the largest token."""

    checksum: int
    largest: int


class TokenFile:
    """The tokens of a file, opened for each read, so that many files need few handles.

    Args:
      path: the file.
      dtype: of a token.
      start: bytes before the first token.
      count: tokens.
      seen: the file's `os.stat_result` when it was first opened.

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
        """Fills each array with the tokens from an index on.

        Raises:
          TextError: the file cannot be read, was cut short, or has changed since the run began.
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
                print(f"{self.path}: reads all {size:,} bytes once, for their checksum", file=sys.stderr)
            self.sums = self._reading(self._summed)
        return self.sums

    def first_from(self, limit: int) -> tuple[int, int]:
        """The index of the first token that is at least `limit`, and that token; there must be one."""
        for first in range(0, self._count, _BLOCK):
            tokens = np.empty(min(_BLOCK, self._count - first), self.dtype)
            self.read([(first, tokens)])
            if tokens.max() >= limit:
                index = int(np.argmax(tokens >= limit))
                return first + index, int(tokens[index])
        raise AssertionError(f"{self.path}: no token is {limit} or larger")

    def _reading(self, act: Callable[[int], _T]) -> _T:
        """Calls `act(file descriptor)`, again after errors of the file system, which may be temporary on a network. The
        result counts only if the file is unchanged or is found to have the same tokens."""

        def attempt() -> _T:
            number = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would otherwise wait for a writer
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
        """Accepts a file that was replaced, written to or touched, if it has the same tokens.

        Raises:
          TextError: its tokens differ, or the earlier ones are unknown.
        """
        if self.sums is None or self._summed(number) != self.sums:
            raise TextError(
                f"{self.path} was changed during the run: its tokens differ from those at the start. Restore the file, "
                "or start a new run with the new tokens"
            )
        self._seen = marks
        warnings.warn(
            f"{self.path} was replaced, written to or touched during the run; the tokens are the same", stacklevel=1
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

        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:  # zlib and NumPy release the GIL
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
                    f"{self.path} was truncated during the run: it has {has:,} bytes, and had {had:,}: restore the file"
                )
            rest[: len(read)] = read
            rest, place = rest[len(read) :], place + len(read)


def _marks(found: os.stat_result) -> tuple[int, ...]:
    """The fields that change if the file or its content does."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
