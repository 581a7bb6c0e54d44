"""The optimizer that a configuration names: any of optax's that has a learning rate, behind a clip of the gradients."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxshard.apps.config import optimizer_arguments
from jaxshard.apps.config.config import OptimizerConfig
from jaxshard.apps.model import linear

Tree = Any

_FIELDS = {"weight_decay": "weight_decay", "beta1": "b1", "beta2": "b2"}  # of OptimizerConfig: optax's names
_OURS: Mapping[str, Mapping[str, float]] = {"adamw": {"b1": 0.9, "b2": 0.98}}  # in place of optax's defaults
_WEIGHT_DECAY = 0.1  # where the optimizer takes one


def make_optimizer(config: OptimizerConfig, steps: int) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """The learning rate as a function of the step, and the optimizer.

    Raises:
      ValueError: optax has no such optimizer, or it does not take an option that was given.
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
    except Exception as error:  # of any type: it is optax's
        given = arguments or "no arguments"
        raise ValueError(
            f"optimizer.name = {config.name}, with a schedule as learning rate and {given}: optax says: {error}; mend "
            "optimizer.arguments, or take another optimizer"
        ) from error
    return schedule, optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)


def _try(optimizer: optax.GradientTransformation, of_user: bool) -> None:
    """Traces an update of a small model, and takes some steps with arguments of the user's; the optimizer's own errors
    pass through."""
    shapes = {"blocks": {"up": {"kernel": (2, 8, 8)}, "norm": {"scale": (2, 8)}}, "head": {"kernel": (8, 8)}}
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, "float32"), shapes, is_leaf=lambda x: type(x) is tuple)

    def update(params: Tree) -> Tree:
        more = {"value": jnp.float32(0), "grad": params}
        return optax.with_extra_args_support(optimizer).update(params, optimizer.init(params), params, **more)

    jax.eval_shape(update, params)
    if of_user:
        optimizer_arguments.check_finite(optimizer, params)


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
            f"the nearest: {', '.join(near) or 'none'}; there is {', '.join(sorted(known))}"
        )
    return known[name]


def _arguments(config: OptimizerConfig, make: Callable[..., Any]) -> dict[str, Any]:
    """What the optimizer is called with besides its learning rate."""
    taken, given = _parameters(make), optimizer_arguments.parsed(config.arguments)
    unknown = [key for key in given if key not in taken or key == "learning_rate"]
    if unknown:
        raise ValueError(
            f"optimizer.arguments: {config.name} takes no {unknown[0]!r}; it takes "
            f"{', '.join(key for key in taken if key != 'learning_rate')}"
        )
    optimizer_arguments.check(given, make)
    own = {"weight_decay": _WEIGHT_DECAY, **_OURS.get(config.name, {})}
    found = {key: value for key, value in own.items() if key in taken}
    for field, key in _FIELDS.items():
        value = getattr(config, field)
        if value is None:
            continue
        if key not in taken:
            raise ValueError(
                f"optimizer.{field} = {value}: {config.name} takes no {key}: leave it out; it takes {', '.join(taken)}"
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
    """True for the matrices, whose weights decay: not for norms and embeddings."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in linear.MATRICES, params)


def _by_muon(params: Tree) -> Tree:
    """The blocks' matrices, which are stacked by layer; AdamW has the rest."""
    dims = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: dims if path[0].key == "blocks" and path[-1].key in linear.MATRICES else None, params
    )
