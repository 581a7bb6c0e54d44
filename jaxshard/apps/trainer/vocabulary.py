"""Finds the tokenizer.json beside tokens or in a run, and checks that it fits the model and the text."""

from __future__ import annotations

import dataclasses
import operator
from pathlib import Path
from typing import Any, cast

from jaxshard.apps.config.config import Config, ModelConfig
from jaxshard.apps.data import tokenizing
from jaxshard.apps.data.dataset import names_dataset
from jaxshard.apps.data.text_files import are_tokens, readable
from jaxshard.apps.data.token_files import MOST_TOKENIZER_BYTES, TOKENIZER
from jaxshard.apps.huggingface import hf_folder
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.system import small_files
from jaxshard.system.text import shell_command

_UNIT = 64


def tokenizer_of(config: Config) -> Path | None:
    """The tokenizer.json in the folder of a run's tokens, or beside its file of tokens.

    Raises:
      ValueError: `data.path` cannot be read.
    """
    path = config.data.path
    if path is None or names_dataset(path):
        return None
    if not are_tokens(config.data.format, readable("data.path", path)):
        return None
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return folder / TOKENIZER if (folder / TOKENIZER).is_file() else None


def kept_tokenizer(start: Path) -> Path | None:
    """The tokenizer of a run, or of the Hugging Face folder that it is or started from."""
    paths = (RunFolder(start).tokenizer, hf_folder.kept_of(start) / TOKENIZER)
    return next((path for path in paths if path.is_file()), None)


def check_start(config: Config) -> None:
    """Raises ValueError if the text has different tokens than the model that training starts from."""
    if config.train.start is None:
        return
    kept, path = kept_tokenizer(Path(config.train.start)), config.data.path
    if kept is None or (path is not None and names_dataset(path)):
        return
    if path is None or not are_tokens(config.data.format, readable("data.path", path)):
        raise ValueError(f"data.path: the model of train.start reads tokens, and this text is bytes: {tokens_by(kept)}")
    check_tokenizer(config, Path(config.train.start), "train.start")


def check_tokenizer(config: Config, model: Path, name: str) -> None:
    """Raises ValueError if the tokens are not from the tokenizer of the model in a folder.

    Args:
      config: has `data.path`.
      model: a run, or a Hugging Face folder.
      name: of the model, in the message.
    """
    kept, tokenizer = kept_tokenizer(model), tokenizer_of(config)
    if kept is not None and tokenizer is not None and _ids(tokenizer) != _ids(kept):
        raise ValueError(f"data.path: {tokenizer} differs from the tokenizer of {name}: {tokens_by(kept)}")


def tokens_by(kept: Path) -> str:
    """The command that makes tokens with a model's tokenizer."""
    return f"{shell_command('jaxshard', 'tokenize', 'TEXT', '--tokenizer', str(kept))} --out FOLDER, then --data FOLDER"


def chosen(config: Config) -> Config:
    """If `model.vocabulary` is the default, sets it to the tokenizer's, rounded up to a multiple of 64.

    Raises:
      ValueError: the tokenizer's vocabulary is larger than the given one.
    """
    tokenizer, given = tokenizer_of(config), config.model.vocabulary
    if tokenizer is None:
        return config
    needed = vocabulary_of(tokenizer)
    if given == ModelConfig().vocabulary:
        rounded = -(-needed // _UNIT) * _UNIT
        return dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary=rounded))
    if given < needed:
        raise ValueError(
            f"model.vocabulary = {given}, but {tokenizer} has {needed}: leave it out, or set it to {needed} or more"
        )
    return config


def vocabulary_of(tokenizer: Path) -> int:
    """The largest token of a tokenizer.json, plus one; raises ValueError if it is not one."""
    return max(_ids(tokenizer).values()) + 1


def end_of(tokenizer: Path) -> tuple[str, int] | None:
    """`tokenizing.end_of` for a tokenizer.json; raises ValueError if it is not one."""
    return tokenizing.end_of(_ids(tokenizer).get)


def _ids(tokenizer: Path) -> dict[str, int]:
    """token -> id."""
    try:
        found = cast(Any, small_files.read_json(tokenizer, MOST_TOKENIZER_BYTES))
        vocabulary = found["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: tokens with their weights
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {each["content"]: each["id"] for each in found["added_tokens"]}
        ids = {token: operator.index(number) for token, number in {**vocabulary, **added}.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{tokenizer} is not a valid tokenizer ({error!r}): create it again, or remove it") from error
    if not ids:
        raise ValueError(f"{tokenizer} has no tokens: create it again, or remove it")
    return ids
