"""Generates text with a trained model, token by token, from params that may be sharded."""

from __future__ import annotations

import codecs
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard
from jaxshard.apps.config import memory
from jaxshard.apps.config.config import Config
from jaxshard.apps.data import tokenizing
from jaxshard.apps.data.token_files import MOST_TOKENIZER_BYTES
from jaxshard.apps.model import linear
from jaxshard.apps.model.model import LanguageModel, Params
from jaxshard.apps.model.transformer import Cache
from jaxshard.apps.trainer.finished_run import Start
from jaxshard.system import small_files


def loaded(config: Config, start: Start) -> tuple[LanguageModel, Params]:
    """A trained model, with its layers in one stack and its adapters merged, and its parameters.

    The parameters are sharded over all devices, and have the computation's type, `model.dtype`.
    """
    model, mesh = LanguageModel(config.model), jaxshard.make_mesh()
    held = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.eval_shape(lambda: model.empty_cache(1)))
    memory.check(held, f"model.sequence_length = {config.model.sequence_length}: keys and values", "make it smaller")
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, config.model.dtype), shapes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*cannot be sharded", UserWarning)
        shardings = jaxshard.zero3(optax.sgd(1.0), mesh).shardings(shapes).params
    template = jax.tree.map(lambda shape, sharding: shape.update(sharding=sharding), shapes, shardings)
    return model, linear.nested(start.params(linear.by_path(template)))


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample the next token.

    Attributes:
      temperature: divides the logits; 0: take the likeliest token.
      top_k: sample only from this many of the likeliest tokens; 0: all.
      seed: of the random numbers.
    """

    temperature: float = 0.8
    top_k: int = 0
    seed: int = 0


def generated(model: LanguageModel, params: Params, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """Yields tokens after the prompt, without end.

    It caches keys and values. When the model's context is full, it goes on from the last half.

    Args:
      model: with its layers in one stack.
      params: replicated or sharded.
      prompt: tokens; if longer than the context, the last ones count.
      sampling: how to sample tokens.
    """
    room = model.config.sequence_length
    seen, start, cache, last = list(prompt), 0, model.empty_cache(1), list(prompt)[-room:]
    key = jax.random.key(sampling.seed)

    @jax.jit
    def step(params: Params, tokens_1xL: jax.Array, cache: Cache, start: jax.Array, key: jax.Array):
        logits_1xV, cache = model.extended(params, tokens_1xL, cache, start)
        return _chosen(logits_1xV[0], sampling, key), cache

    while True:
        token, cache = step(
            params, np.asarray([last], np.int32), cache, np.int32(start), jax.random.fold_in(key, len(seen))
        )
        start, last = start + len(last), [int(token)]
        seen += last
        yield last[0]
        if start == room:
            start, last = 0, seen[-max(1, room // 2) :]


def _chosen(logits_V: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    if sampling.temperature == 0:
        return jnp.argmax(logits_V)
    if 0 < sampling.top_k < len(logits_V):
        least = jax.lax.top_k(logits_V, sampling.top_k)[0][-1]
        logits_V = jnp.where(logits_V >= least, logits_V, -jnp.inf)
    return jax.random.categorical(key, logits_V / sampling.temperature)


def as_text(tokens: Iterator[int]) -> Iterator[str]:
    """Bytes as text, piece by piece; invalid UTF-8 becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        yield decoder.decode(bytes([token])) if token < 256 else "\N{REPLACEMENT CHARACTER}"


def as_numbers(tokens: Iterator[int]) -> Iterator[str]:
    """Tokens as numbers."""
    return (f"{token} " for token in tokens)


_Encode = Callable[[str], list[int]]
_Decode = Callable[[Iterator[int]], Iterator[str]]


def coded(tokenizer: Path | None, config: Config) -> tuple[_Encode, _Decode]:
    """(encode, decode) between text and a model's tokens; decoding is piece by piece.

    Args:
      tokenizer: a tokenizer.json, if there is one.
      config: the model's.

    Raises:
      ValueError: the tokenizer cannot be read.
      ImportError: a package for it is not installed.
    """
    if tokenizer is not None:
        return _by_tokenizer(tokenizer)
    if config.data.format.startswith("uint"):
        return _numbers, as_numbers
    return lambda text: list(text.encode()), as_text


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ValueError(
            "--prompt: this model reads tokens: give --tokenizer FILE, or token ids, as --prompt '464 3290'"
        ) from None


def _by_tokenizer(path: Path) -> tuple[_Encode, _Decode]:
    package = tokenizing.tokenizers(str(path))
    try:
        tokenizer = package.Tokenizer.from_buffer(small_files.read(path, MOST_TOKENIZER_BYTES))
    except Exception as error:  # tokenizers raises this type only
        raise ValueError(f"--tokenizer {path} cannot be read: {error}") from error

    def decode(tokens: Iterator[int]) -> Iterator[str]:
        """Decodes all tokens again for each new one, which may be part of a character."""
        seen: list[int] = []
        shown = ""
        for token in tokens:
            seen.append(token)
            text = tokenizer.decode(seen)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text.removeprefix(shown)
                shown = text

    return lambda text: tokenizer.encode(text).ids, decode
