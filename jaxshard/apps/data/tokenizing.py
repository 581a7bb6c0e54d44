"""Trains or loads a tokenizer, and converts text to token files, in pieces, so that it may be larger than memory."""

from __future__ import annotations

import codecs
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxshard.apps.data.token_files import COUNTED, HEADERS, MOST_TOKENIZER_BYTES, TOKENIZER
from jaxshard.system import small_files
from jaxshard.system.files import make_folder, rename, sync_tree, workplace

END = "<|endoftext|>"
_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_PIECE = 2**18  # bytes to read at once
_CUTS = (r"(?<=\S)\n(?=\S)", r"(?<=[^\W_])(?=\r\n\S)", r"(?<=\S)(?= \S)")
"""Where the regular expressions of GPT-2 and its successors always split words, in any context."""
_LONGEST = 2**24  # characters without a place to split
_PIECES = 16  # to encode at once
_FILES = ("train.bin", "val.bin", TOKENIZER)
_MODELS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_CURE = (
    "download its vocab.json and merges.txt, or tokenizer.json, on a machine with network access, and give their folder"
)


def tokenizers(who: str = "this") -> Any:
    """The package tokenizers; raises ImportError, with the name of `who` needs it, if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise ImportError(f'{who} needs the package tokenizers: pip install "jaxshard[tokens]"') from None
    return tokenizers


def pieces(file: Path) -> Iterator[str]:
    """Yields a file's text in pieces, split where byte-level tokenizers split, too, so that tokens stay the same.

    Raises:
      ValueError: it is not UTF-8.
      OSError: it cannot be read.
    """
    decode, rest, read = codecs.getincrementaldecoder("utf-8")(), "", 0
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size  # text appended meanwhile is not read
        while block := stream.read(min(_PIECE, size - read)):
            try:
                rest += decode.decode(block)
            except UnicodeDecodeError as error:
                place = read - (len(error.object) - len(block)) + error.start
                raise ValueError(
                    f"{file}: byte {place:,} is not UTF-8: convert the file (iconv), or leave it out"
                ) from None
            read += len(block)
            cut = _cut(rest)
            if cut:
                yield rest[:cut]
            rest = rest[cut:]
    try:
        rest += decode.decode(b"", final=True)
    except UnicodeDecodeError:
        raise ValueError(f"{file}: it ends within a UTF-8 character: it is truncated") from None
    if rest:
        yield rest


def _cut(text: str) -> int:
    """The last place to split; 0 if there is none yet."""
    for pattern in _CUTS:
        tail = text[-2 * _PIECE :]
        found = [match.end() for match in re.finditer(pattern, tail)]
        if found:
            return len(text) - len(tail) + found[-1]
    return len(text) if len(text) > _LONGEST else 0


def learned(files: Sequence[Path], vocabulary: int) -> Any:
    """Trains a byte-level BPE (Radford et al. 2019) of at most `vocabulary` tokens, including the end of a text."""
    package = tokenizers()
    made = _byte_level(package.models.BPE())
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    how = {"vocab_size": vocabulary, "special_tokens": [END], "initial_alphabet": alphabet, "show_progress": False}
    text = itertools.chain.from_iterable(map(pieces, files))
    in_words = made.pre_tokenizer
    made.pre_tokenizer = package.pre_tokenizers.Sequence([in_words, package.pre_tokenizers.FixedLength(_WORD)])
    made.train_from_iterator(text, package.trainers.BpeTrainer(**how))
    made.pre_tokenizer = in_words
    return made


_WORD = 1000  # characters; longer words are not trained on, as the time grows with the square of the length


def _byte_level(model: Any) -> Any:
    package = tokenizers()
    made = package.Tokenizer(model)
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    return made


def opened(name: str) -> Any:
    """Loads an existing tokenizer.

    Args:
      name: a tokenizer.json, a folder with one or with GPT-2's two files, or "gpt2", which is downloaded.

    Raises:
      ValueError: it cannot be loaded.
    """
    path = Path(name)
    try:
        found = _opened(name, path)
    except ValueError:
        raise
    except Exception as error:  # tokenizers raises this type only
        cure = f": {_CURE}" if name == "gpt2" and not path.exists() else ""
        raise ValueError(f"--tokenizer {name} cannot be read: {error}{cure}") from error
    largest = max(found.get_vocab().items(), key=lambda each: each[1], default=("", 0))
    if largest[1] >= _MOST_IDS:  # when saving, tokenizers allocates memory for all ids up to the largest
        raise ValueError(
            f"--tokenizer {name}: token {largest[0]!r} has id {largest[1]:,}: ids must be below {_MOST_IDS:,}"
        )
    return found


_MOST_IDS = 2**24


def _opened(name: str, path: Path) -> Any:
    if path.is_dir():
        return _of_folder(path)
    if path.exists():
        return _of_file(path)
    if name == "gpt2":
        return tokenizers().Tokenizer.from_pretrained(name)
    raise ValueError(f"--tokenizer {name} does not exist: give a tokenizer.json, a folder that has one, or gpt2")


def _of_file(path: Path) -> Any:
    content = small_files.read(path, MOST_TOKENIZER_BYTES)
    try:
        return tokenizers().Tokenizer.from_buffer(content)
    except ValueError as error:
        raise ValueError(f"--tokenizer {path} cannot be read: {error}") from error


def _of_folder(path: Path) -> Any:
    package = tokenizers()
    if (path / TOKENIZER).exists():
        return _of_file(path / TOKENIZER)
    for names in _MODELS:
        vocabulary, merges = (path / name for name in names)
        if vocabulary.exists() and merges.exists():
            for file in (vocabulary, merges):
                small_files.check(file, MOST_TOKENIZER_BYTES)
            made = _byte_level(package.models.BPE.from_file(str(vocabulary), str(merges)))
            if made.token_to_id(END) is not None:
                made.add_special_tokens([END])
            return made
    pairs = ", or ".join(" and ".join(names) for names in _MODELS)
    raise ValueError(f"--tokenizer {path}: it has neither {TOKENIZER} nor {pairs}")


def end_of(token_of: Callable[[str], int | None]) -> tuple[str, int] | None:
    """(token, id) of the end of a text, by a function from token to id; None if there is none."""
    return next(((text, token) for text in _ENDS if (token := token_of(text)) is not None), None)


def check_folder(path: Path, overwrite: bool) -> None:
    """Raises ValueError if writing tokens to `path` would destroy other files."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise ValueError(f"--out {path} is a file: give a folder")
    others = sorted({entry.name for entry in path.iterdir()} - set(_FILES))
    if others:
        raise ValueError(f"--out {path} has {others[0]}, which is not a file of tokens: give a different folder")
    if any(path.iterdir()) and not overwrite:
        raise ValueError(f"--out {path} already exists: give a different folder, or add --overwrite")


def write(files: Sequence[Path], tokenizer: Any, path: Path, heldout: float) -> tuple[int, int]:
    """Writes train.bin, val.bin and tokenizer.json, which appear together when complete.

    Tokens are uint16 or, for larger vocabularies, uint32 after llm.c's header.

    Args:
      files: documents; an end-of-text token follows each.
      tokenizer: makes the tokens.
      path: the folder, checked by `check_folder`.
      heldout: the last part of the tokens, for val.bin; 0: no val.bin.

    Returns:
      The numbers of tokens in train.bin and val.bin.
    """
    path = path.resolve()
    make_folder(path.parent)
    with workplace(path.parent) as place:
        new = place / "new"
        new.mkdir()
        counts = _write_tokens(files, tokenizer, new, heldout)
        tokenizer.save(str(new / TOKENIZER))
        sync_tree(new)
        if path.exists():
            path.rename(place / "old")
        rename(new, path)
    return counts


def _write_tokens(files: Sequence[Path], tokenizer: Any, folder: Path, heldout: float) -> tuple[int, int]:
    """Writes all tokens to one file, then moves the last part to another."""
    dtype = np.dtype("<u2" if max(tokenizer.get_vocab().values(), default=0) < 2**16 else "<u4")  # ids may have holes
    everything = folder / "all"
    with everything.open("wb") as stream:
        for tokens in _tokens(files, tokenizer):
            stream.write(np.asarray(tokens, dtype).tobytes())
    total = everything.stat().st_size // dtype.itemsize
    held = int(total * heldout)
    with everything.open("rb") as stream:
        for name, count in (("train.bin", total - held), ("val.bin", held)):
            if count:
                _copy(stream, folder / name, count, dtype)
    everything.unlink()
    return total - held, held


def _copy(stream: Any, file: Path, count: int, dtype: np.dtype) -> None:
    with file.open("wb") as out:
        if dtype.itemsize == 4:
            magic = next(magic for magic, name in HEADERS.items() if name == "uint32")
            out.write(np.asarray([magic, _LLAMA3, count % COUNTED, *[0] * 253], "<u4").tobytes())
        left = count * dtype.itemsize
        while block := stream.read(min(left, 2**24)):
            out.write(block)
            left -= len(block)


_LLAMA3 = 7  # the version that llm.c writes


def _tokens(files: Sequence[Path], tokenizer: Any) -> Iterator[list[int]]:
    end = end_of(tokenizer.token_to_id)
    tokenizer.encode_special_tokens = True  # special tokens that occur in the text are plain text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for file in files:
        text = pieces(file)
        while batch := list(itertools.islice(text, _PIECES)):
            for encoded in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield encoded.ids
        if end is not None:
            yield [end[1]]


def is_lossless(file: Path, tokenizer: Any) -> bool:
    """Whether decoding the tokens restores the file's first piece."""
    piece = next(pieces(file), "")
    tokenizer.encode_special_tokens = True
    return tokenizer.decode(tokenizer.encode(piece, add_special_tokens=False).ids, skip_special_tokens=False) == piece
