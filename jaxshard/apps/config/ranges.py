"""Which values an option may have, whatever the others are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

_INT32 = 2**31 - 1  # sizes, counts and steps lie in arrays and in C
_INT64 = 2**63 - 1
_LONG = ("data.heldout_bytes", "sharding.min_shard_size", "train.seed")

_POSITIVE = (
    *(f"model.{name}" for name in ("layers", "width", "heads", "hidden", "sequence_length")),
    *("model.rotary_base", "model.rotary_length", "model.norm_epsilon"),
    *("lora.alpha", "optimizer.learning_rate", "optimizer.clip_norm"),
    *(f"sharding.{name}" for name in ("replica", "tensor", "pipeline", "virtual")),
    *("sharding.microbatches", "sharding.stage_microbatches"),
    *(f"train.{name}" for name in ("steps", "rows", "log_every", "eval_every", "keep_last", "heartbeat_seconds")),
)
_NOT_NEGATIVE = (
    *("optimizer.warmup_steps", "optimizer.weight_decay", "sharding.min_shard_size"),
    *("model.kv_heads", "lora.rank", "train.seed"),
    *(f"train.{name}" for name in ("patience", "min_improvement", "save_every", "max_skips")),
    *(f"train.{name}" for name in ("keep_every", "keep_best", "sample", "check_every", "hang_seconds")),
)
_OPTIONAL = ("optimizer.beta1", "optimizer.beta2", "optimizer.weight_decay")
_BELOW_ONE = ("model.dropout", "optimizer.beta1", "optimizer.beta2")


def check(values: Mapping[str, object]) -> None:
    """Checks each option by itself.

    Args:
      values: by `section.name`.

    Raises:
      ValueError: one is out of its range; it is named, with what it must be.
    """
    for name in _POSITIVE:
        _require(values, name, lambda value: value > 0, "above 0")
    for name in _NOT_NEGATIVE:
        _require(values, name, lambda value: value >= 0, "0 or more")
    for name in _BELOW_ONE:
        _require(values, name, lambda value: 0 <= value < 1, "at least 0 and below 1")
    _check_single(values)
    for name, value in values.items():
        if isinstance(value, float):
            _require(values, name, math.isfinite, "a finite number")
        if isinstance(value, int):
            most = _INT64 if name in _LONG else _INT32
            _require(values, name, lambda value, most=most: value <= most, f"at most {most}")


def _check_single(values: Mapping[str, object]) -> None:
    _require(values, "data.path", lambda value: value != "", "a file or a folder; leave it out for the built-in text")
    _require(
        values, "data.heldout_path", lambda value: value != "", "a file or a folder; leave it out for a part of path"
    )
    _require(values, "data.heldout", lambda value: 0 < value < 1, "between 0 and 1")
    _require(values, "data.heldout_bytes", lambda value: value > 1, "at least 2")
    _require(values, "model.vocabulary", lambda value: value >= 256, "at least 256, the number of bytes")
    _require(values, "model.rotary_factor", lambda value: value >= 1, "at least 1")
    _require(values, "model.loss_chunk", lambda value: value >= -1, "above 0, 0 for all positions, or -1 to choose")
    _require(values, "optimizer.final_fraction", lambda value: 0 <= value <= 1, "between 0 and 1")
    _require(values, "sharding.devices", lambda value: value is None or value > 0, "above 0")
    _require(values, "sharding.data", lambda value: value > 0 or value == -1, "above 0, or -1 for all devices left")
    _require(values, "sharding.zero", lambda value: value in (0, 1, 2, 3), "0, 1, 2 or 3")
    _require(values, "train.start", lambda value: value != "", "the folder of a run; leave it out to start anew")
    _require(values, "train.hang_seconds", lambda value: value == 0 or value >= 1, "0, or at least 1")
    cuts_params = values["sharding.strategy"] in ("zero3", "fsdp", "hsdp") or (
        values["sharding.strategy"] == "hybrid" and values["sharding.zero"] == 3
    )
    _require(values, "sharding.regather", lambda value: value == "use" or cuts_params, "use: parameters are not cut")
    hsdp = values["sharding.strategy"] == "hsdp"
    _require(values, "sharding.replica", lambda value: value > 1 or not hsdp, "at least 2 for the strategy hsdp")


def _require(values: Mapping[str, object], name: str, is_right: Callable[..., bool], needed: str) -> None:
    """Raises ValueError where a value, or what float32 makes of it, is not right."""
    value = values[name]
    if value is None and name in _OPTIONAL:
        return
    if not is_right(value):
        raise ValueError(f"{name} = {_shown(value)}: it must be {needed}")
    with np.errstate(over="ignore", under="ignore"):
        if isinstance(value, float) and not is_right(float(np.float32(value))):
            raise ValueError(f"{name} = {value} is {np.float32(value)} in float32: it must be {needed}")


def _shown(value: object) -> str:
    """The value, of a number with more digits than one wants to read only how many."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"{'-' if value < 0 else ''}(a number of {math.floor(math.log10(abs(value))) + 1} digits)"
    return str(value)
