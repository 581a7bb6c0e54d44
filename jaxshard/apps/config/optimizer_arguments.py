"""The arguments of optax's optimizers that a configuration gives as text: read, and checked as other options are."""

from __future__ import annotations

import inspect
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

_LOOPS = ("ns_steps", "memory_size")  # what is repeated in each update
_BELOW_ONE = ("b1", "b2", "b3", "adam_b1", "adam_b2", "beta3", "rho", "decay", "momentum")
_NOT_NEGATIVE = ("eps", "eps_root", "adam_eps_root", "weight_decay", "adam_weight_decay", "noise_multiplier")
_POSITIVE = ("clipping_threshold", "l2_norm_clip", "rank", "update_interval", "update_proj_gap", *_LOOPS)
_MOST_LOOPS = 1000
_TRIED_STEPS = 3


def parsed(text: str) -> dict[str, Any]:
    """The arguments by name.

    Raises:
      ValueError: it is no TOML.
    """
    try:
        return tomllib.loads(f"x = {{{text}}}")["x"]
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads
        raise ValueError(
            f"optimizer.arguments = {text!r}: {error}; write it as TOML: b1 = 0.9, nesterov = true"
        ) from None


def check(given: Mapping[str, Any], make: Callable[..., Any]) -> None:
    """Raises ValueError for a value of another type than the optimizer's default, or outside of its range."""
    parameters = inspect.signature(make).parameters
    for name, value in given.items():
        needed = _needed(name, value, parameters[name].default)
        if needed:
            raise ValueError(f"optimizer.arguments: {name} = {reprlib.repr(value)}: it must be {needed}")


def _needed(name: str, value: Any, default: Any) -> str:
    """What the value must be, "" if it is that."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, tuple) or default is None or isinstance(default, str | type):
        return _plain(name, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "a number"
    return _in_range(name, value)


def _plain(name: str, value: Any) -> str:
    """The same, where the default has no type to go by: a type of arrays by its name, numbers, or what chooses."""
    if isinstance(value, list):
        return next(filter(None, (_plain(name, each) for each in value)), "")
    if isinstance(value, str | bool):
        return ""
    return _in_range(name, value) if isinstance(value, int | float) else "a number, or text"


def _in_range(name: str, value: float) -> str:
    with np.errstate(over="ignore"):
        in_float32 = float(np.float32(value)) if abs(value) < 1e300 else np.inf
    if not np.isfinite(in_float32):
        return "a finite number in float32"
    if name in _BELOW_ONE and not (0 <= in_float32 < 1):
        return "at least 0 and below 1"
    if name in _NOT_NEGATIVE and value < 0:
        return "0 or more"
    if name in _POSITIVE and value <= 0:
        return "above 0"
    if name in _LOOPS and value > _MOST_LOOPS:
        return f"at most {_MOST_LOOPS}"
    return ""


def check_finite(optimizer: optax.GradientTransformation, shapes: Any) -> None:
    """Takes some steps with small random gradients.

    Raises:
      ValueError: the optimizer makes an update of them that is not finite.
    """
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(leaf.dtype), shapes)
    grads = jax.tree.map(lambda leaf: 0.01 * random.normal(size=leaf.shape).astype(leaf.dtype), shapes)
    state, update = optimizer.init(params), optax.with_extra_args_support(optimizer).update
    for step in range(_TRIED_STEPS):
        updates, state = jax.jit(update)(grads, state, params, value=np.float32(1), grad=grads)
        params = optax.apply_updates(params, updates)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(params))):
            raise ValueError(f"its update in step {step} is not finite, of gradients that are")
