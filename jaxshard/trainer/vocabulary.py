"""The tokenizer.json that lies beside tokens, and the vocabulary that it asks of the model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from jaxshard.trainer import data
from jaxshard.trainer.config import Config, ModelConfig
from jaxshard.trainer.dataset import names_dataset
from jaxshard.trainer.token_files import TOKENIZER

_UNIT = 64


def tokenizer_of(config: Config) -> Path | None:
    """The tokenizer.json in the folder of a run's tokens, or beside its file of tokens.

    Raises:
      ValueError: `data.path` cannot be read.
    """
    path = config.data.path
    if path is None or names_dataset(path):
        return None
    if not data.are_tokens(config.data.format, data.readable("data.path", path)):
        return None
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return folder / TOKENIZER if (folder / TOKENIZER).is_file() else None


def chosen(config: Config) -> Config:
    """The configuration with its tokenizer's vocabulary, a multiple of 64, where `model.vocabulary` is the default.

    Raises:
      ValueError: the tokenizer's is larger than the one that was asked for.
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
            f"model.vocabulary = {given}, and {tokenizer} has {needed}: leave it out, or set it to {needed} or more"
        )
    return config


def vocabulary_of(tokenizer: Path) -> int:
    """The largest token of a tokenizer.json, and one.

    Raises:
      ValueError: it is none.
    """
    try:
        found = json.loads(tokenizer.read_bytes())
        vocabulary = found["model"]["vocab"]  # by token, or for Unigram a list
        ids = [len(vocabulary) - 1] if isinstance(vocabulary, list) else list(vocabulary.values())
        return max([*ids, *(added["id"] for added in found["added_tokens"])]) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{tokenizer} is no tokenizer ({error!r}): make it anew, or remove it") from error
