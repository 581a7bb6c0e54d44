"""The optimizer of a configuration: any of optax with a learning rate, after clipping the gradients.

Its arguments are given as text, which is parsed and checked like other options.
"""

from __future__ import annotations

import difflib
import inspect
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from jaxshard.apps.config.config import OptimizerConfig
from jaxshard.apps.model import linear

Tree = Any

_FIELDS = {"weight_decay": "weight_decay", "beta1": "b1", "beta2": "b2"}  # field of OptimizerConfig -> optax's name
_OURS: Mapping[str, Mapping[str, float]] = {"adamw": {"b1": 0.9, "b2": 0.98}}  # instead of optax's defaults
_WEIGHT_DECAY = 0.1  # if the optimizer has one


def make_optimizer(config: OptimizerConfig, steps: int) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """The learning rate as a function of the step, and the optimizer.

    Raises:
      ValueError: optax has no such optimizer, or it does not support a given option.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=steps,
        end_value=config.learning_rate * config.final_fraction,
    )
    make = _found(config.name)
    arguments = _arguments(config, make)
    try:
        optimizer = make(learning_rate=schedule, **arguments)
        _try(optimizer, of_user=bool(config.arguments))
    except Exception as error:  # of any type, raised by optax
        given = arguments or "no arguments"
        raise ValueError(
            f"optimizer.name = {config.name}, with a schedule as learning rate and {given}: optax says: {error}; "
            "correct optimizer.arguments, or use a different optimizer"
        ) from error
    return schedule, optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)


def _try(optimizer: optax.GradientTransformation, of_user: bool) -> None:
    """Traces an update of a small model and, if the user gave arguments, runs a few steps. The optimizer's own errors
    propagate."""
    shapes = {"blocks": {"up": {"kernel": (2, 8, 8)}, "norm": {"scale": (2, 8)}}, "head": {"kernel": (8, 8)}}
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, "float32"), shapes, is_leaf=lambda x: type(x) is tuple)

    def update(params: Tree) -> Tree:
        more = {"value": jnp.float32(0), "grad": params}
        return optax.with_extra_args_support(optimizer).update(params, optimizer.init(params), params, **more)

    jax.eval_shape(update, params)
    if of_user:
        check_finite(optimizer, params)


def _found(name: str) -> Callable[..., optax.GradientTransformation]:
    known = {
        key: value
        for module in (optax.contrib, optax)
        for key, value in vars(module).items()
        if inspect.isfunction(value)
        and not key.startswith(("_", "scale_by_"))
        and "learning_rate" in _parameters(value)
    }
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        name = repr(name) if not name.isidentifier() else name
        raise ValueError(
            f"optimizer.name = {name}: optax {optax.__version__} has no optimizer of this name with a learning rate; "
            f"the nearest: {', '.join(near) or 'none'}; available: {', '.join(sorted(known))}"
        )
    return known[name]


def _arguments(config: OptimizerConfig, make: Callable[..., Any]) -> dict[str, Any]:
    """The optimizer's arguments besides its learning rate."""
    taken, given = _parameters(make), parsed(config.arguments)
    unknown = [key for key in given if key not in taken or key == "learning_rate"]
    if unknown:
        raise ValueError(
            f"optimizer.arguments: {config.name} has no argument {unknown[0]!r}; it has "
            f"{', '.join(key for key in taken if key != 'learning_rate')}"
        )
    check_arguments(given, make)
    own = {"weight_decay": _WEIGHT_DECAY, **_OURS.get(config.name, {})}
    found = {key: value for key, value in own.items() if key in taken}
    for field, key in _FIELDS.items():
        value = getattr(config, field)
        if value is None:
            continue
        if key not in taken:
            raise ValueError(
                f"optimizer.{field} = {value}: {config.name} has no argument {key}: leave it out; it has "
                f"{', '.join(taken)}"
            )
        if key in given:
            raise ValueError(f"optimizer.{field} = {value}, and optimizer.arguments has {key}, too: leave one out")
        found[key] = value
    found |= {key: decays for key in ("mask", "weight_decay_mask") if key in taken}
    found |= {"muon_weight_dimension_numbers": _by_muon} if config.name == "muon" else {}
    return found | given


def _parameters(make: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(make).parameters)


def decays(params: Tree) -> Tree:
    """Mask of weight decay: True for matrices, False for norms and embeddings."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in linear.MATRICES, params)


def _by_muon(params: Tree) -> Tree:
    """Marks the blocks' matrices, which are stacked by layer; AdamW updates the rest."""
    dims = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: dims if path[0].key == "blocks" and path[-1].key in linear.MATRICES else None, params
    )


_LOOPS = ("ns_steps", "memory_size")  # counts of loops in each update
_BELOW_ONE = ("b1", "b2", "b3", "adam_b1", "adam_b2", "beta3", "rho", "decay", "momentum")
_NOT_NEGATIVE = ("eps", "eps_root", "adam_eps_root", "weight_decay", "adam_weight_decay", "noise_multiplier")
_POSITIVE = ("clipping_threshold", "l2_norm_clip", "rank", "update_interval", "update_proj_gap", *_LOOPS)
_MOST_LOOPS = 1000
_TRIED_STEPS = 3


def parsed(text: str) -> dict[str, Any]:
    """Parses arguments from TOML; raises ValueError if it is not TOML."""
    try:
        return tomllib.loads(f"x = {{{text}}}")["x"]
    except (ValueError, RecursionError) as error:  # also for a number with more digits than Python reads
        raise ValueError(
            f"optimizer.arguments = {text!r}: {error}; write it as TOML: b1 = 0.9, nesterov = true"
        ) from None


def check_arguments(given: Mapping[str, Any], make: Callable[..., Any]) -> None:
    """Raises ValueError for a value out of range, or not of the type of the optimizer's default."""
    parameters = inspect.signature(make).parameters
    for name, value in given.items():
        needed = _needed(name, value, parameters[name].default)
        if needed:
            raise ValueError(f"optimizer.arguments: {name} = {reprlib.repr(value)}: it must be {needed}")


def _needed(name: str, value: Any, default: Any) -> str:
    """What the value must be; "" if it is right."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, tuple) or default is None or isinstance(default, str | type):
        return _plain(name, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "a number"
    return _in_range(name, value)


def _plain(name: str, value: Any) -> str:
    """The same without a typed default: a dtype by name, numbers, or a choice."""
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
    """Takes a few steps with small random gradients; raises ValueError if an update is not finite."""
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(leaf.dtype), shapes)
    grads = jax.tree.map(lambda leaf: 0.01 * random.normal(size=leaf.shape).astype(leaf.dtype), shapes)
    state, update = optimizer.init(params), optax.with_extra_args_support(optimizer).update
    for step in range(_TRIED_STEPS):
        updates, state = jax.jit(update)(grads, state, params, value=np.float32(1), grad=grads)
        params = optax.apply_updates(params, updates)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(params))):
            raise ValueError(f"its update in step {step} is not finite, though the gradients are")
