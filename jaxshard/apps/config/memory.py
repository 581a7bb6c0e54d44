"""Compares a run's memory with the available memory before allocating any; and counts a step's arithmetic."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jaxshard.apps.config.config import Config, ModelConfig
from jaxshard.plan import chip_of
from jaxshard.system.text import size_in_words

_LIMIT_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def host_bytes() -> float:
    """The memory of this host, or of its container, in bytes; infinite if unknown.

    >>> host_bytes() > 2**28
    True
    """
    try:
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return float("inf")
    try:
        return min(host, int(_LIMIT_OF_CONTAINER.read_text()))
    except (OSError, ValueError):  # not a container, or "max"
        return host


def peak_bytes(devices: Iterable[Any]) -> int | None:
    """The most bytes that any of the devices has held since the process began; None if the backend does not report it.

    Args:
      devices: `jax.Device`s of this process.
    """
    found = [_stats(device).get("peak_bytes_in_use") for device in devices]
    return max((peak for peak in found if peak is not None), default=None)


def _stats(device: Any) -> dict[str, int]:
    with contextlib.suppress(jax.errors.JaxRuntimeError, NotImplementedError):  # by platform
        return device.memory_stats() or {}
    return {}


def check(needed: float, what: str, cure: str, most: float | None = None) -> None:
    """Checks that something fits.

    Args:
      needed: bytes.
      what: needs them.
      cure: advice for the error message.
      most: available bytes; by default this host's.

    Raises:
      ValueError: it does not fit.
    """
    most = host_bytes() if most is None else most
    if needed > most:
        raise ValueError(
            f"{what} would take {size_in_words(needed)}, and only {size_in_words(most)} are available: {cure}"
        )


def useful_flops(config: Config) -> float:
    """Multiplications and additions of a step's matrix products on all devices together, without recomputation.

    Each position takes 6 per element of a matrix (one product forward, two backward: Chowdhery et al. 2022, PaLM,
    appendix B). Causal attention computes half of the pairs of positions. A frozen matrix has no gradient, so its
    elements take 4.
    """
    model = config.model
    positions = config.train.rows * model.sequence_length
    attention = model.layers * model.width * model.sequence_length  # two products of half of the pairs
    each = 4.0 if config.lora.rank else 6.0
    return positions * (each * _num_multiplied(model) + 6.0 * (attention + _num_adapted(model, config.lora.rank)))


def least_seconds(config: Config, devices: Iterable[Any]) -> float | None:
    """Seconds of `useful_flops` at the peak rate of all devices, for the computation's type; None if that is unknown.

    `devices` are `jax.Device`s. Divided by a step's seconds it is the model FLOPs utilization (MFU).
    """
    peaks = [chip and chip.flops[config.model.dtype] for chip in (chip_of(each.device_kind) for each in devices)]
    known = [peak for peak in peaks if peak is not None]
    return useful_flops(config) / sum(known) if len(known) == len(peaks) else None


def _num_multiplied(model: ModelConfig) -> int:
    """Elements of the matrices that each position is multiplied by; a table's rows are only looked up."""
    each = sum(inputs * outputs for inputs, outputs in matrices(model))
    return model.layers * each + model.width * model.vocabulary


def _num_adapted(model: ModelConfig, rank: int) -> int:
    """Elements of the adapters of rank `rank`."""
    return model.layers * rank * sum(inputs + outputs for inputs, outputs in matrices(model))


def matrices(model: ModelConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of each matrix of a block: of qkv, out, up and down."""
    groups = model.kv_heads or model.heads
    qkv = model.width // model.heads * (model.heads + 2 * groups)
    up = model.hidden * (2 if model.mlp == "swiglu" else 1)
    return [(model.width, qkv), (model.width, model.width), (model.width, up), (model.hidden, model.width)]
