"""`jaxshard generate`: writes text with a run's model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxshard.apps.commands import arguments as words
from jaxshard.apps.config.config import Config
from jaxshard.apps.trainer import generate
from jaxshard.apps.trainer.finished_run import opened
from jaxshard.apps.trainer.vocabulary import kept_tokenizer
from jaxshard.system.command import INTERRUPTED, ended_at_once, fail
from jaxshard.system.text import printable_lines

_DESCRIPTION = """Generates text with the newest saved model of a run; parameters are sharded over all devices.

A model of bytes takes any text as a prompt; a model of tokens needs --tokenizer or token ids. Exit status: 0 done,
1 a save is corrupt, 2 bad input."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The command line of `jaxshard generate`."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's folder, or a Hugging Face folder of a GPT-2 or Llama."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")] = "\n"
    """The beginning of the text."""
    tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 256
    """Number of tokens to generate (bytes, for a byte-level model)."""
    temperature: float = 0.8
    """Sampling temperature: higher is more random; 0 always takes the likeliest token."""
    top_k: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Sample only from this many of the likeliest tokens; 0: all."""
    seed: int = 0
    """Random seed of the sampling."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The model's tokenizer.json (needs the package tokenizers); by default the run's or the Hugging Face folder's."""


def command(arguments: Sequence[str]) -> int:
    """Runs `jaxshard generate`; returns the exit status."""
    try:
        with ended_at_once(lambda: "jaxshard generate: interrupted"):
            _run(parse(arguments))
        return 0
    except FloatingPointError as error:
        return _fail(error, 1)
    except (ValueError, OSError, ImportError) as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


_fail = functools.partial(fail, "jaxshard generate")


def parse(arguments: Sequence[str]) -> Arguments:
    """The command line.

    Raises:
      ValueError: an option is unknown, or a number out of range.
    """
    given = words.parsed(arguments, Arguments, "jaxshard generate", _DESCRIPTION, {"prompt": str})
    for name, least in (("tokens", 1), ("top_k", 0), ("seed", 0)):
        if not least <= getattr(given, name) < 2**31:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} {getattr(given, name)} must be at least {least}, and below {2**31}")
    if not 0 <= given.temperature < float("inf"):
        raise ValueError(f"--temperature {given.temperature} must be 0 or more")
    return given


def _run(given: Arguments) -> None:
    config, found = opened(given.run, "RUN")
    encode, decode = generate.coded(given.tokenizer or kept_tokenizer(given.run), config)
    prompt = encode(given.prompt)
    _check_prompt(prompt, config)
    model, params = generate.loaded(config, found)
    sampling = generate.Sampling(given.temperature, given.top_k, given.seed)
    tokens = itertools.islice(generate.generated(model, params, prompt, sampling), given.tokens)
    for piece in decode(itertools.chain(prompt, tokens)):
        print(printable_lines(piece), end="", flush=True)
    print()


def _check_prompt(prompt: Sequence[int], config: Config) -> None:
    vocabulary = config.model.vocabulary
    wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ValueError(f"--prompt has the token id {wrong}; the model's ids are 0 to {vocabulary - 1}")
    if not prompt:
        raise ValueError("--prompt is empty: give at least one character")
