"""`jaxshard eval`: the held-out loss of a run's model, on its own text or a different one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro

from jaxshard.apps.commands import arguments as words
from jaxshard.apps.config.config import NO_LORA, Config, DataConfig, PrecisionConfig, ShardingConfig, TrainConfig
from jaxshard.apps.data.dataset import names_dataset
from jaxshard.apps.data.text_files import are_tokens, readable
from jaxshard.apps.huggingface.hf_folder import HuggingFaceFolder
from jaxshard.apps.model import linear
from jaxshard.apps.records.display import loss_in_words
from jaxshard.apps.trainer.build import prepare
from jaxshard.apps.trainer.finished_run import opened
from jaxshard.apps.trainer.vocabulary import check_tokenizer, kept_tokenizer, tokens_by
from jaxshard.system.command import INTERRUPTED, ended_at_once, fail

_DESCRIPTION = """Measures the held-out loss of a run's newest saved model, on the run's text or on --data.

Parameters are sharded over all devices, and adapters are merged. Exit status: 0 done,
1 a save is corrupt, 2 bad input."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The command line of `jaxshard eval`."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's folder, or a Hugging Face folder of a GPT-2 or Llama."""
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """A file or folder of text or tokens; all of it is measured; stdlib: Python's standard library; by default the
    run's held-out text. If a function (MODULE:FUNCTION) gave the run its data, name it here: it is called only then,
    and the run's held-out part is measured."""
    rows: Annotated[int, tyro.conf.arg(metavar="N")] = 16
    """Sequences measured at once, over all devices."""


def command(arguments: Sequence[str]) -> int:
    """Runs `jaxshard eval`; returns the exit status."""
    try:
        with ended_at_once(lambda: "jaxshard eval: interrupted"):
            print(measured(parse(arguments)))
        return 0
    except FloatingPointError as error:
        return _fail(error, 1)
    except (ValueError, OSError) as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


_fail = functools.partial(fail, "jaxshard eval")


def parse(arguments: Sequence[str]) -> Arguments:
    """The command line.

    Raises:
      ValueError: an option is unknown or out of range.
    """
    given = words.parsed(arguments, Arguments, "jaxshard eval", _DESCRIPTION, {"data": str})
    if given.data == "":
        raise ValueError("--data '': it must be a file or a folder; leave it out for the run's text")
    if not 1 <= given.rows < 2**20:
        raise ValueError(f"--rows {given.rows} must be at least 1, and below {2**20}")
    return given


def measured(given: Arguments) -> str:
    """Measures the loss; returns a line with it and the size of the text.

    Raises:
      ValueError: the run or text does not exist, or one has tokens and the other bytes.
    """
    config, found = opened(given.run, "RUN")
    whole = DataConfig(given.data, heldout_path=given.data, heldout_bytes=2**31 - 1)
    is_own = given.data is None or (names_dataset(given.data) and given.data == config.data.path)
    devices = jax.device_count()
    plain = Config(
        config.data if is_own else whole,
        config.model,
        NO_LORA,
        precision=PrecisionConfig(params=config.model.dtype),
        sharding=ShardingConfig(strategy="zero3", devices=devices),
        train=TrainConfig(rows=-(-given.rows // devices) * devices),
    )
    if not given.data and isinstance(found, HuggingFaceFolder):
        raise ValueError(f"RUN {given.run} is not a run folder, and has no held-out text: give a text by --data")
    if given.data:
        _check_kind(given.data, config.data.format, given.run)
    check_tokenizer(plain, given.run, f"RUN {given.run}")
    run = prepare(plain, [given.data] if given.data else [], trains=False)
    params = found.params(linear.by_path(run.template.params))
    loss = run.make_evaluate()(linear.nested(params))
    words = loss_in_words(loss, run.text.is_bytes)
    size = f"{run.text.heldout.size:,} {'bytes' if run.text.is_bytes else 'tokens'}"
    return f"held out: {words}, {loss:.6f} nats, on {size}"


def _check_kind(path: str, format: str, run: Path) -> None:
    """Raises ValueError if the run has tokens and the path text, or vice versa."""
    tokens = names_dataset(path) or are_tokens("auto", readable("--data", path))
    if tokens != format.startswith("uint"):
        kept = None if tokens else kept_tokenizer(run)
        cure = f": {tokens_by(kept)}" if kept else ""
        raise ValueError(
            f"--data {path} has {'tokens' if tokens else 'bytes'}, and the run's model does not read them{cure}"
        )
