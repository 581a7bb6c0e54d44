"""A training step to be measured, the task that it does, its figures; and jaxshard's own steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

import jaxshard
from jaxshard.apps.bench import models

Tree = Any


class UnfitError(ValueError):
    """The step cannot do the task; the message says why."""


@dataclasses.dataclass(frozen=True)
class Task:
    """The task of a step.

    Attributes:
      model: from `models`.
      mesh: of one axis, "data".
      rows: of the global batch, all microbatches.
      microbatches: the number whose gradients are summed before one update.
      masters: bfloat16 params, with float32 masters in the state.
    """

    model: Any
    mesh: jax.sharding.Mesh
    rows: int
    microbatches: int = 1
    masters: bool = False

    @property
    def dtype(self) -> str:
        """The dtype of the params."""
        return "bfloat16" if self.masters else "float32"

    @property
    def platform(self) -> str:
        """The platform of the mesh's devices: "cpu", "gpu" or "tpu"."""
        return self.mesh.devices.flat[0].platform


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step of one library or strategy.

    Attributes:
      lower: the program, lowered.
      run: (params, state, batch) to (params, state, metrics), donating the first two.
      optimize: (grads, state, params) to (params, state): the optimizer alone, donating the last two.
      params, state, batch, grads: `jax.ShapeDtypeStruct`s with shardings.
      init: params to state.
    """

    lower: Callable[[], jax.stages.Lowered]
    run: Callable[..., Any]
    optimize: Callable[..., Any]
    params: Tree
    state: Tree
    batch: Tree
    grads: Tree
    init: Callable[[Tree], Tree]

    def place(self, kind: str, values: Tree) -> Tree:
        """Places host arrays, a tree with the same order of leaves, as the step's "params", "batch" or "grads"."""
        to, treedef = jax.tree.flatten(getattr(self, kind))
        found = zip(jax.tree.leaves(values), to, strict=True)
        return treedef.unflatten([jax.device_put(x.astype(t.dtype), t.sharding) for x, t in found])


def optimizer() -> optax.GradientTransformation:
    """AdamW and a clip of the gradients' norm, as most people train."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


_MB = 1e6


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of one step, per device.

    Attributes:
      peak_bytes: arguments + outputs + scratch - aliases.
      wire_bytes: bytes that it sends.
      covered_bytes: the payload of collectives with a matrix product between their start and done.
      payload_bytes: the payload of all collectives.
      num_covered, num_collectives: the numbers of those collectives in the program; one in a loop counts once.
      traffic_bytes: bytes that kernels other than matrix products and collectives read and write.
    """

    peak_bytes: float
    wire_bytes: float
    covered_bytes: float
    payload_bytes: float
    num_covered: int
    num_collectives: int
    traffic_bytes: float

    def __str__(self) -> str:
        beside = f"{self.num_covered} of {self.num_collectives}, "
        beside += f"{self.covered_bytes / _MB:.0f} of {self.payload_bytes / _MB:.0f} MB"
        return (
            f"peak {self.peak_bytes / _MB:.0f} MB, wire {self.wire_bytes / _MB:.0f} MB, covered {beside}, "
            f"traffic {self.traffic_bytes / 1e9:.1f} GB"
        )


def figures(compiled: jax.stages.Compiled) -> Figures:
    """The figures of a compiled program."""
    found = jaxshard.inspect.schedule(compiled)
    return Figures(
        peak_bytes(compiled),
        jaxshard.inspect.wire_bytes(compiled),
        found.covered_bytes,
        found.payload_bytes,
        found.num_covered,
        found.num_collectives,
        found.kernel_bytes,
    )


def peak_bytes(compiled: jax.stages.Compiled) -> float:
    """Arguments + outputs + scratch - aliases, on each device."""
    memory = compiled.memory_analysis()
    assert memory is not None, "no compiler of XLA leaves it out"
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return float(held + memory.temp_size_in_bytes)


# jaxshard's own.


OURS = ("ddp", "zero1", "zero2", "zero3")


def ours(name: str, task: Task, max_skips: int | None = 20, loss_view: Any = "auto", **more: Any) -> Step:
    """The step of a strategy of jaxshard, with further options."""
    more |= {"master_dtype": "float32"} if task.masters else {}
    opt = getattr(jaxshard, name)(optimizer(), task.mesh, **more)
    shapes, batch = models.init(task.model, task.dtype), task.model.batch(task.rows)
    params = opt.place(shapes)
    state = opt.init(params)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        return models.loss(task.model, params, batch)

    run = jaxshard.train_step(loss, opt, microbatches=task.microbatches, max_skips=max_skips, loss_view=loss_view)
    by_rows = jax.sharding.NamedSharding(task.mesh, jax.sharding.PartitionSpec("data"))
    return Step(
        lower=lambda: run.lower(params, state, batch),
        run=run,
        optimize=jax.jit(_optimize(opt), donate_argnums=(1, 2)),
        params=params,
        state=state,
        batch=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_rows), batch),
        grads=_shaped(shapes, opt.shardings(shapes).grads),
        init=opt.init,
    )


def _optimize(opt: jaxshard.ShardedOptimizer) -> Any:
    def optimize(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return optimize


def _shaped(shapes: Tree, shardings: Tree) -> Tree:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
