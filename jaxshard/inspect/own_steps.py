"""Tells of a user's own step that sends far more than ZeRO has to: XLA has laid out activations by features."""

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.inspect.sources import frames
from jaxshard.inspect.traffic import Collective, inputs_of, text_of
from jaxshard.programs.source import place_of
from jaxshard.system.text import size_in_words

_LOSS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "loss") + os.sep
_LEAST = 2**20  # bytes


def excess(compiled: jax.stages.Compiled, found: Sequence[Collective]) -> str:
    """A sentence if a step sends twice what ZeRO-3 sends with one microbatch: how much, where, and the cure; else "".

    A step is a program of (params, ..., batch), its last arguments cut by rows over all devices. That of
    `jaxshard.train_step`, or with gradients of `jaxshard.value_and_grad`, makes its own collectives: it is left out.
    """
    inputs = inputs_of(compiled)
    num = _num_devices_of_rows(inputs[-1]) if len(inputs) > 1 else 1
    if num < 2 or not found:
        return ""
    params = sum(math.prod(x.shape) * x.dtype.itemsize for x, _ in inputs[0] if jnp.issubdtype(x.dtype, jnp.inexact))
    formula, sent = 3 * params * (num - 1) / num, sum(each.wire_bytes for each in found)
    if sent < max(2 * formula, _LEAST) or not params or f'"{_LOSS}' in text_of(compiled):
        return ""
    most = max(found, key=lambda each: each.wire_bytes)
    stacks = frames(compiled).get(most.name, [])
    line = next(filter(None, (place_of((f.file, f.line) for f in stack).own for stack in stacks)), "")
    most_at = f"{most.kind} at {line}" if line else most.kind
    return (
        f"this step sends {size_in_words(sent)} from each device, {sent / formula:.1f} times what ZeRO-3 sends for "
        f"these params with one microbatch ({size_in_words(formula)}); the most by {most_at}. Unless it has that many "
        "microbatches, XLA has laid out activations by features. Keep each row on its device, at the start of each "
        "block: x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('data'))); or take loss and gradients by "
        "jaxshard.value_and_grad(loss_fn, opt)(params, batch), which needs no constraint"
    )


def _num_devices_of_rows(leaves: Sequence[tuple[Any, jax.sharding.Sharding | None]]) -> int:
    """The number of devices, if the rows of an argument's first leaf are cut over all of them; else 1."""
    x, sharding = next(iter(leaves), (None, None))
    if x is None or not isinstance(sharding, jax.sharding.NamedSharding) or not x.ndim or not x.shape[0]:
        return 1
    parts = x.shape[0] // sharding.shard_shape(x.shape)[0]
    return parts if parts == len(sharding.device_set) else 1
