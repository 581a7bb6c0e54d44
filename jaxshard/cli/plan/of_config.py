"""The reference model of a configuration, as `jaxshard plan` and `jaxshard explain` build it under each strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxshard.apps.config.checks import check
from jaxshard.apps.config.config import Config
from jaxshard.apps.config.memory import useful_flops
from jaxshard.apps.model.attention import why_not_fused
from jaxshard.apps.trainer.parts import check_rows, make_parts, make_step
from jaxshard.base.types import AnyMesh
from jaxshard.mesh import abstract_mesh
from jaxshard.plan import choices, search
from jaxshard.plan.choices import Candidate, Target
from jaxshard.plan.search import Build, Built, Row


def building(config: Config) -> Build:
    """`build` for the configuration's model, as `plan.compare` takes it."""

    def build(candidate: Candidate, mesh: AnyMesh) -> Built:
        chosen = sharded_as(config, candidate)
        check(chosen)
        check_rows(chosen, mesh)
        model, _, opt, params = make_parts(chosen, mesh)
        batch = {"tokens": jax.ShapeDtypeStruct((chosen.train.rows, chosen.model.sequence_length + 1), np.int32)}
        keys = [jax.eval_shape(lambda: jax.random.key(0))] if chosen.model.dropout else []
        return (make_step(chosen, model, opt), params, batch, *keys)

    return build


def sharded_as(config: Config, candidate: Candidate) -> Config:
    """The configuration with another strategy and mesh."""
    chosen = {"strategy": candidate.strategy, "microbatches": candidate.microbatches, "devices": None}
    chosen |= {**candidate.sizes, "state_over": "+".join(candidate.state_axes) or "data"}
    chosen |= {"state_memory": candidate.state_memory}
    chosen |= {} if candidate.zero is None else {"zero": candidate.zero}
    chosen |= {} if candidate.pipeline > 1 else {"schedule": "1f1b", "virtual": 1}
    return dataclasses.replace(config, sharding=dataclasses.replace(config.sharding, **chosen))


def own(config: Config, target: Target) -> Candidate:
    """The configuration's own strategy on the target's devices.

    Raises:
      ValueError: its axes do not multiply to the number of devices.
    """
    sharding = config.sharding
    sizes = {axis: getattr(sharding, axis) for axis in ("data", "tensor", "pipeline", "replica")}
    try:
        mesh = abstract_mesh(target.num_devices, **sizes)
    except ValueError:
        given = ", ".join(f"--sharding.{axis} {size}" for axis, size in sizes.items())
        raise ValueError(
            f"{given} do not make {target.num_devices} devices: change one (-1 takes the remaining devices), or change "
            "--machine or --devices"
        ) from None
    zero = sharding.zero if sharding.strategy == "hybrid" else None
    strategy = "zero3" if sharding.strategy == "fsdp" else sharding.strategy
    state_axes = ("data", "replica") if sharding.state_over == "data+replica" else ()
    sizes = dict(mesh.shape)
    return Candidate(
        strategy,
        **sizes,
        zero=zero,
        microbatches=sharding.microbatches,
        state_axes=state_axes,
        state_memory=sharding.state_memory,
    )


def why_left_out(config: Config, target: Target) -> str:
    """Why a comparison leaves the configuration's own strategy out; "" if it does not."""
    try:
        own(config, target)
    except ValueError as error:
        return str(error)
    return ""


def candidates(config: Config, strategies: Sequence[str], target: Target) -> list[Candidate]:
    """The strategies of --strategies; by default all data-parallel ones, and the configuration's own."""
    all_data = choices.side_by_side(target, config.sharding.microbatches)
    if not strategies and why_left_out(config, target):
        return all_data
    mine = own(config, target)
    if not strategies:
        return all_data if mine in all_data else [*all_data, mine]
    named = {"hfsdp" if c.state_axes else c.strategy: c for c in all_data} | {"own": mine}
    missing = [name for name in strategies if name not in named]
    if missing:
        raise ValueError(
            f"--strategies {' '.join(missing)}: it needs several groups of devices joined by fast links, and the "
            f"{target.num_devices} x {target.chip.name} are one group"
        )
    return [named[name] for name in strategies]


def to_try(config: Config, target: Target) -> list[Candidate]:
    """The combinations of strategy, mesh and microbatches for --fit that the model's sizes allow."""
    model = config.model
    groups = model.kv_heads or model.heads
    tensors = [n for n in (1, 2, 4, 8) if groups % n == 0 and n <= target.chip.domain_size]
    pipelines = [n for n in (1, 2, 4, 8) if model.layers % n == 0]
    rows = config.train.rows
    microbatches = [m for m in (1, 4, 16) if rows % m == 0]
    return choices.candidates(target, microbatches=microbatches, tensors=tensors, pipelines=pipelines)


@dataclasses.dataclass(frozen=True)
class OfConfig:
    """The reference model of a configuration."""

    config: Config
    title: str

    @property
    def heading(self) -> str:
        """The batch, in words."""
        return f"{self.rows} rows of {self.config.model.sequence_length} a step"

    @property
    def rows(self) -> int:
        """The rows of a batch."""
        return self.config.train.rows

    def with_rows(self, rows: int) -> OfConfig:
        """The same with another number of rows."""
        train = dataclasses.replace(self.config.train, rows=rows)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, train=train))

    def build(self, candidate: Candidate, mesh: AnyMesh) -> Built:
        """See `building`."""
        return building(self.config)(candidate, mesh)

    def row(self, candidate: Candidate, target: Target) -> Row:
        """The prediction, and the largest batch that fits, from one trace."""
        found = search.AnyRows(*self.build(candidate, candidate.mesh(target)), unit=self.unit(candidate))
        return Row(candidate, found.at(self.rows), target, search.largest_batch(found, target))

    def unit(self, candidate: Candidate) -> int:
        """A device's rows of a microbatch are a multiple of it."""
        return self.config.sharding.stage_microbatches if candidate.pipeline > 1 else 1

    def candidates(self, names: Sequence[str], target: Target) -> list[Candidate]:
        """See `candidates`."""
        return candidates(self.config, names, target)

    def to_try(self, target: Target) -> list[Candidate]:
        """See `to_try`."""
        return to_try(self.config, target)


def with_useful_seconds(config: Config, rows: Sequence[Row], target: Target) -> list[Row]:
    """Adds to each row the time that the step's useful operations take at the chip's peak."""
    each = useful_flops(config) / target.num_devices / target.chip.flops[config.model.dtype]
    return [dataclasses.replace(row, useful_seconds=each) for row in rows]


def unfused(config: Config, target: Target) -> list[str]:
    """A note if attention runs by plain operations, although a different shape or type would allow a kernel."""
    reason = why_not_fused(config.model, Candidate("ddp", data=target.num_devices).mesh(target))
    return [f"Attention is not fused: {reason}."] if reason else []
