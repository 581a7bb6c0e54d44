"""`jaxshard tokenize`: converts text to token files that `jaxshard train` and nanoGPT read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxshard.apps.commands import arguments as words
from jaxshard.apps.data import tokenizing
from jaxshard.apps.data.text_files import readable
from jaxshard.system.command import INTERRUPTED, check_room, ended_at_once, fail, is_command
from jaxshard.system.text import printable, shell_command

_COMMAND = "jaxshard tokenize"
_VOCABULARY = 8192
_DESCRIPTION = """Tokenizes UTF-8 text into train.bin, val.bin and tokenizer.json, for jaxshard train --data FOLDER.

Each file is a document, followed by the end-of-text token. The tokenizer is a byte-level BPE trained on the text, or
one that is given. Exit status: 0 done, 2 bad input, and nothing was written."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The command line of `jaxshard tokenize`."""

    input: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="INPUT...")] = ()
    """Text files, or folders of them; at least one."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """The folder for the tokens; it must be new. Required."""
    vocabulary: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Vocabulary of the BPE to train on the text, by default 8192."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """An existing tokenizer: a tokenizer.json, a folder with one or with vocab.json and merges.txt (or encoder.json and
    vocab.bpe), or gpt2, which is downloaded."""
    heldout: float = 0.1
    """The last part of the tokens, held out in val.bin; 0: no val.bin."""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """Replace existing tokens in FOLDER."""


def command(arguments: Sequence[str]) -> int:
    """Runs `jaxshard tokenize`; returns the exit status."""
    try:
        with ended_at_once(lambda: f"{_COMMAND}: interrupted; nothing was written"):
            _run(parse(arguments))
        return 0
    except (ValueError, OSError, ImportError) as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written", INTERRUPTED)


_fail = functools.partial(fail, _COMMAND)


def parse(arguments: Sequence[str]) -> Arguments:
    """The command line.

    Raises:
      ValueError: an option is unknown, out of range, or missing.
    """
    given = words.parsed(arguments, Arguments, _COMMAND, _DESCRIPTION, {"tokenizer": str})
    if not given.input:
        raise ValueError("INPUT is missing: give a file or a folder of text")
    if given.out is None:
        raise ValueError("--out is missing: give a new folder for the tokens")
    if given.vocabulary is not None and given.tokenizer is not None:
        raise ValueError("--vocabulary trains a new tokenizer and --tokenizer uses an existing one: give only one")
    if given.vocabulary is not None and not 257 <= given.vocabulary < 2**31:
        raise ValueError(f"--vocabulary {given.vocabulary} must be at least 257 (all bytes and the end), below {2**31}")
    if not 0 <= given.heldout < 1:
        raise ValueError(f"--heldout {given.heldout} must be at least 0 and below 1")
    return given


def _run(given: Arguments) -> None:
    assert given.out is not None  # `parse` has checked it
    tokenizing.tokenizers()
    tokenizing.check_folder(given.out, given.overwrite)
    check_room("--out", given.out)
    files = [file for path in given.input for file in readable("INPUT", str(path))]
    filled = [file for file in files if file.stat().st_size]
    if not filled:
        raise ValueError(f"INPUT: {str(given.input[0])!r} is empty ({len(files)} files): give a text")
    tokenizer = _tokenizer(given, filled)
    for note in _notes(filled, tokenizer):
        print(note)
    with _clearing_up():
        train, held = tokenizing.write(filled, tokenizer, given.out, given.heldout)
    size = sum(file.stat().st_size for file in filled)
    print(
        f"{size:,} bytes in {len(filled)} files are {train + held:,} tokens of {tokenizer.get_vocab_size():,} "
        f"({size / (train + held):.2f} bytes each): {train:,} to train on, {held:,} held out"
    )
    print(f"to train: {shell_command('jaxshard', 'train', '--data', str(given.out))}")


@contextlib.contextmanager
def _clearing_up() -> Iterator[None]:
    """Within the block, Ctrl-C and SIGTERM raise, so that half-written files are removed."""
    heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _end) for number in heard if is_command()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _: object) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _tokenizer(given: Arguments, files: Sequence[Path]) -> Any:
    if given.tokenizer is not None:
        return tokenizing.opened(given.tokenizer)
    wanted = given.vocabulary or _VOCABULARY
    made = tokenizing.learned(files, wanted)
    if made.get_vocab_size() < wanted:
        print(f"the text yields only {made.get_vocab_size():,} of the {wanted:,} tokens of --vocabulary")
    return made


def _notes(files: Sequence[Path], tokenizer: Any) -> list[str]:
    notes = []
    if tokenizing.end_of(tokenizer.token_to_id) is None:
        notes.append("the tokenizer has no end-of-text token: documents are not separated")
    if not tokenizing.is_lossless(files[0], tokenizer):
        notes.append(
            printable(f"the tokenizer changes the text: the tokens of {files[0]} do not decode to the same text")
        )
    return notes
