"""The model, its optimizer and its step, on a mesh that may be abstract; reads and computes nothing.

Also checks that all processes of a run have the same options and settings that affect the compiled step.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard
from jaxshard import ShardedOptimizer, TrainStep
from jaxshard.apps.config.config import Config, PrecisionConfig
from jaxshard.apps.model import linear
from jaxshard.apps.model.attention import AnyMesh, why_not_fused
from jaxshard.apps.model.model import LanguageModel, Params, Pipelined
from jaxshard.apps.trainer.optimizers import make_optimizer
from jaxshard.processes import ProcessError, gathered

_WITH_SPECS = ("tensor_parallel", "pipeline_parallel", "hybrid")


def make_parts(config: Config, mesh: AnyMesh) -> tuple[LanguageModel, optax.Schedule, ShardedOptimizer, Params]:
    """(model, learning rate at each step, sharded optimizer, abstract parameters with their shardings) on a mesh."""
    why_not_fused(config.model, mesh)  # raises if a kernel is required and none is available
    schedule, inner = make_optimizer(config.optimizer, config.train.steps)
    model = make_model(config)
    opt = make_strategy(config, model, inner, mesh)
    shapes = jax.eval_shape(initial(model, config.precision), jax.random.key(0))
    placed = jax.tree.map(lambda shape, sharding: shape.update(sharding=sharding), shapes, opt.shardings(shapes).params)
    return model, schedule, opt, placed


def make_step(config: Config, model: LanguageModel, opt: ShardedOptimizer) -> TrainStep:
    """`step(params, state, batch, *keys) -> (params, state, metrics)`."""
    sharding = config.sharding
    return jaxshard.train_step(
        model.loss,
        opt,
        microbatches=sharding.microbatches,
        loss_view=sharding.loss_view,
        donate=True,
        max_skips=config.train.max_skips,
    )


def make_model(config: Config) -> LanguageModel:
    """The model, with its layers in stages if the mesh has a pipeline axis."""
    sharding = config.sharding
    how = Pipelined(sharding.schedule, sharding.stage_microbatches, sharding.virtual, sharding.gather)
    pipelined = how if sharding.pipeline > 1 else None
    return LanguageModel(config.model, pipelined, sharding.sequence_parallel, config.lora)


def make_strategy(
    config: Config, model: LanguageModel, inner: optax.GradientTransformation, mesh: AnyMesh
) -> ShardedOptimizer:
    """The configuration's sharded optimizer."""
    sharding = config.sharding
    options = {"min_shard_size": sharding.min_shard_size, **precision_options(config.precision)}
    options |= {"specs": model.specs} if sharding.strategy in _WITH_SPECS else {}
    options |= {"state_axes": ("data", "replica")} if sharding.state_over == "data+replica" else {}
    options |= {"state_memory": sharding.state_memory} if sharding.state_memory != "device" else {}
    options |= {"zero": sharding.zero} if sharding.strategy == "hybrid" else {}
    options |= {"frozen": [linear.FROZEN]} if config.lora.rank else {}
    options |= {"regather": sharding.regather} if sharding.regather != "use" else {}
    return getattr(jaxshard, sharding.strategy)(inner, mesh, **options)


def precision_options(config: PrecisionConfig) -> dict[str, Any]:
    """The configuration as options of jaxshard's strategies, without defaults."""
    return (
        ({"master_dtype": jnp.float32} if config.masters else {})
        | ({"moment_dtype": config.moments} if config.moments != "float32" else {})
        | ({"reduce_dtype": jnp.dtype(config.reduce)} if config.reduce else {})
        | ({"stochastic_rounding": True} if config.stochastic_rounding else {})
        | ({"loss_scale": jaxshard.LossScale()} if config.loss_scale else {})
    )


def check_rows(config: Config, mesh: AnyMesh) -> None:
    """Raises ValueError unless all devices get the same number of rows in each microbatch."""
    sharding = config.sharding
    sizes = {"replica": mesh.shape["replica"], "data": mesh.shape["data"], "microbatches": sharding.microbatches}
    sizes |= {"stage_microbatches": sharding.stage_microbatches} if sharding.pipeline > 1 else {}
    parts = int(np.prod(list(sizes.values())))
    if config.train.rows % parts:
        equation = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"train.rows = {config.train.rows} is not a multiple of {equation} = {parts}: "
            f"{config.train.rows // parts * parts + parts} would be"
        )


def initial(model: LanguageModel, precision: PrecisionConfig) -> Callable[[jax.Array], Params]:
    """`init(key)`: fresh parameters in their storage type."""
    return lambda key: linear.stored(model.init(key), model.lora, precision.params)


_OF_JAX = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_default_prng_impl")
_MOST = 5  # settings to name in an error
_LONGEST = 160  # characters of a setting to show


def check_same_settings(config: Config) -> None:
    """Checks that all processes have the same settings.

    Raises:
      ProcessError: on every process, with the settings that differ and their values.
    """
    everyone: list[dict[str, str]] = [json.loads(each) for each in gathered("start", json.dumps(_settings(config)))]
    first = everyone[0]
    for process, others in enumerate(everyone):
        names = [name for name in {**first, **others} if first.get(name) != others.get(name)]
        pairs = (f"{n}: process 0 has {_of(first, n)}, process {process} has {_of(others, n)}" for n in names[:_MOST])
        if names:
            more = f", and {len(names) - _MOST} more" if len(names) > _MOST else ""
            raise ProcessError(process, f"{'; '.join(pairs)}{more}: start all processes with the same command")


def _settings(config: Config) -> dict[str, str]:
    sections = {name: dataclasses.asdict(section) for name, section in vars(config).items()}
    options = {f"{name}.{key}": repr(value) for name, section in sections.items() for key, value in section.items()}
    versions = {package.__name__: package.__version__ for package in (jax, optax, np)}
    return options | versions | {name: repr(getattr(jax.config, name)) for name in _OF_JAX}


def _of(settings: Mapping[str, str], name: str) -> str:
    value = settings.get(name, "nothing")
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
