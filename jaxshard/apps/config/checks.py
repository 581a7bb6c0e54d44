"""Rejects impossible options before anything starts: out of range, or in conflict with others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import cast

import numpy as np

import jaxshard
from jaxshard.apps.config.config import NO_LORA, Config, ModelConfig, PrecisionConfig

_INT32 = 2**31 - 1  # sizes, counts and steps are stored in int32 arrays and C ints
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


def check(config: Config) -> None:
    """Raises ValueError, which names the option, for an impossible value."""
    sections = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(Config))
    _check_ranges({f"{name}.{option}": value for name, section in sections for option, value in vars(section).items()})
    _check_precision(config.precision)
    _check_lora(config)
    _check_parallel(config)
    model = config.model
    if model.width % model.heads:
        raise ValueError(
            f"model.width = {model.width} is not a multiple of model.heads = {model.heads}: change one of them"
        )
    if model.kv_heads and model.heads % model.kv_heads:
        raise ValueError(
            f"model.heads = {model.heads} is not a multiple of model.kv_heads = {model.kv_heads}, each shared by the "
            "same number of query heads: change one of them, or set model.kv_heads = 0 for the number of heads"
        )
    if model.loss_chunk > 0 and model.sequence_length % model.loss_chunk:
        raise ValueError(
            f"model.loss_chunk = {model.loss_chunk} does not divide model.sequence_length = {model.sequence_length}: "
            "change one of them, or set model.loss_chunk = -1 to choose it automatically"
        )
    _check_rotary(model)
    if model.positions == "rotary" and (model.width // model.heads) % 2:
        raise ValueError(
            f"model.width / model.heads = {model.width // model.heads} is odd, and rotary positions need pairs of "
            "features: choose different sizes, or model.positions = learned"
        )
    if config.optimizer.warmup_steps >= config.train.steps:
        raise ValueError(
            f"optimizer.warmup_steps = {config.optimizer.warmup_steps} is too long for train.steps = "
            f"{config.train.steps}: use fewer warmup steps"
        )


def _check_rotary(model: ModelConfig) -> None:
    """Raises ValueError for an option of rotary positions that would have no effect."""
    default = ModelConfig()
    for name in ("rotary_base", "rotary_factor", "rotary_length"):
        given = getattr(model, name)
        if model.positions == "learned" and given != getattr(default, name):
            raise ValueError(
                f"model.{name} = {given} with model.positions = learned: it is only for rotary positions: leave it out"
            )
    if model.rotary_factor == 1 and model.rotary_length != default.rotary_length:
        raise ValueError(
            f"model.rotary_length = {model.rotary_length} with model.rotary_factor = 1: there is no RoPE scaling: set "
            "model.rotary_factor, or leave it out"
        )


def _check_lora(config: Config) -> None:
    rank, base = config.lora.rank, config.lora.base
    if config.lora.alpha != NO_LORA.alpha and not rank:
        raise ValueError(f"lora.alpha = {config.lora.alpha} with lora.rank = 0: there are no adapters: set lora.rank")
    if base and not rank:
        raise ValueError(
            f"lora.base = {base} with lora.rank = 0: nothing is frozen: set lora.rank, or leave lora.base out and set "
            "precision.params"
        )
    if rank and config.sharding.pipeline > 1:
        raise ValueError(
            f"lora.rank = {rank} with sharding.pipeline = {config.sharding.pipeline}: pipeline stages do not support "
            "frozen matrices; use the data and tensor axes"
        )


def _check_parallel(config: Config) -> None:
    model, sharding = config.model, config.sharding
    for axis in ("tensor", "pipeline"):
        size, takers = getattr(sharding, axis), (f"{axis}_parallel", "hybrid")
        if size > 1 and sharding.strategy not in takers:
            raise ValueError(
                f"sharding.{axis} = {size}: the strategy {sharding.strategy} does not use this axis; choose "
                f"sharding.strategy = {' or '.join(takers)}"
            )
    if (sharding.virtual > 1) != (sharding.schedule == "interleaved"):
        raise ValueError(
            f"sharding.virtual = {sharding.virtual} with sharding.schedule = {sharding.schedule}: interleaved needs at "
            "least 2 virtual stages, and the other schedules none"
        )
    stages = sharding.pipeline * sharding.virtual
    if sharding.pipeline > 1 and model.layers % stages:
        raise ValueError(
            f"model.layers = {model.layers} is not a multiple of sharding.pipeline {sharding.pipeline} x "
            f"sharding.virtual {sharding.virtual} = {stages}: {-(-model.layers // stages) * stages} would be"
        )
    if sharding.pipeline > 1 and sharding.virtual > 1 and sharding.stage_microbatches % sharding.pipeline:
        raise ValueError(
            f"sharding.stage_microbatches = {sharding.stage_microbatches} is not a multiple of sharding.pipeline = "
            f"{sharding.pipeline}, as virtual stages need"
        )
    shared = ["heads", *(["kv_heads"] if model.kv_heads else []), "hidden", "vocabulary"]
    for name in [*shared, *(["sequence_length"] if sharding.sequence_parallel else [])]:
        size = getattr(model, name)
        if size % sharding.tensor:
            raise ValueError(
                f"model.{name} = {size} is not a multiple of sharding.tensor = {sharding.tensor}: "
                f"{-(-size // sharding.tensor) * sharding.tensor} would be"
            )


def _check_precision(chosen: PrecisionConfig) -> None:
    params, widened = chosen.params, chosen.masters or chosen.stochastic_rounding
    if chosen.masters and params == "float32":
        raise ValueError(
            "precision.masters: the parameters are already float32: leave it out, or set precision.params = bfloat16"
        )
    if chosen.stochastic_rounding and params != "bfloat16":
        raise ValueError(
            f"precision.stochastic_rounding rounds to bfloat16, and precision.params = {params}: leave it out, or set "
            "precision.params = bfloat16"
        )
    if chosen.stochastic_rounding and chosen.masters:
        raise ValueError("precision.stochastic_rounding replaces precision.masters: leave one of them out")
    if params == "float16" and not chosen.masters:
        raise ValueError(
            "precision.params = float16: AdamW's small values underflow to 0: add precision.masters = true, or set "
            "precision.params = bfloat16"
        )
    if chosen.loss_scale and params != "float16":
        raise ValueError(
            f"precision.loss_scale: {params} has enough range for gradients: leave it out; it is only for "
            "precision.params = float16"
        )
    if chosen.moments == "bfloat16" and params == "bfloat16" and not widened:
        raise ValueError(
            "precision.moments = bfloat16: without masters they would be rounded to nearest, and stop changing: add "
            "precision.masters or precision.stochastic_rounding, or leave it out"
        )


# Each option by itself.


def _check_ranges(values: Mapping[str, object]) -> None:
    """Checks each option by itself.

    Args:
      values: by `section.name`.

    Raises:
      ValueError: names the option that is out of range, and its range.
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
    _require(
        values, "sharding.data", lambda value: value > 0 or value == -1, "above 0, or -1 for all remaining devices"
    )
    _require(values, "sharding.zero", lambda value: value in (0, 1, 2, 3), "0, 1, 2 or 3")
    _require(
        values, "train.start", lambda value: value != "", "the folder of a run; leave it out to train from scratch"
    )
    _require(values, "train.hang_seconds", lambda value: value == 0 or value >= 1, "0, or at least 1")
    strategy = str(values["sharding.strategy"])
    zero = cast(int, values["sharding.zero"]) if strategy == "hybrid" else None
    cuts_params = jaxshard.layout.Config("zero3" if strategy == "fsdp" else strategy, zero=zero).cuts.params
    needed = f"use: sharding.strategy = {strategy} does not shard params"
    _require(values, "sharding.regather", lambda value: value == "use" or cuts_params, needed)
    blocks = values["sharding.tensor"] != 1 or values["sharding.pipeline"] != 1  # these name axes of the mesh
    needed = "auto or local: tensor and pipeline axes need the local view"
    _require(values, "sharding.loss_view", lambda value: value != "global" or not blocks, needed)
    hsdp = strategy == "hsdp"
    _require(
        values,
        "sharding.replica",
        lambda value: value > 1 or not hsdp,
        "at least 2 for the strategy hsdp (for one group of devices, give --sharding.strategy zero3)",
    )


def _require(values: Mapping[str, object], name: str, is_right: Callable[..., bool], needed: str) -> None:
    """Raises ValueError if a value, or its float32 rounding, is not right."""
    value = values[name]
    if value is None and name in _OPTIONAL:
        return
    if not is_right(value):
        raise ValueError(f"{name} = {_shown(value)}: it must be {needed}")
    with np.errstate(over="ignore", under="ignore"):
        if isinstance(value, float) and not is_right(float(np.float32(value))):
            raise ValueError(f"{name} = {value} is {np.float32(value)} in float32: it must be {needed}")


def _shown(value: object) -> str:
    """The value in words; of a very long number, only the count of its digits."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"{'-' if value < 0 else ''}(a number of {math.floor(math.log10(abs(value))) + 1} digits)"
    return str(value)
