"""A training step to be measured, the task that it does, its figures and its times; and jaxshard's own steps."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
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
    assert memory is not None, "every XLA compiler reports it"
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

    run = jaxshard.train_step(
        loss, opt, microbatches=task.microbatches, loss_view=loss_view, donate=True, max_skips=max_skips
    )
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


# A row of a benchmark: figures from the compiler, and times against another step's on local devices.

_WARM = 2  # rounds that are not timed


@dataclasses.dataclass(frozen=True)
class Row:
    """The measurements of one step.

    Attributes:
      machine, model, step: names.
      figures: by name, in bytes, seconds or counts. Times are medians.
      note: why figures are missing, or "".
    """

    machine: str
    model: str
    step: str
    figures: Mapping[str, float]
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The row as plain dicts, for `json.dumps`."""
        plain = {"machine": self.machine, "model": self.model, "step": self.step}
        return {**plain, **self.figures, "note": self.note}


def compiled(build: Callable[[], Step], options: Mapping[str, Any]) -> tuple[Step, dict[str, float]]:
    """Builds, lowers and compiles a step.

    Args:
      build: makes the step.
      options: compiler options.
    """
    start = time.process_time()  # other programs on the machine do not affect it
    step = build()
    lowered = step.lower()
    traced = time.process_time()
    program = lowered.compile(compiler_options=dict(options) or None)
    done = time.process_time()
    found = dataclasses.asdict(figures(program))
    return step, {**found, "trace_seconds": traced - start, "compile_seconds": done - traced}


class Running:
    """A step with its arrays, on this machine's devices."""

    def __init__(self, step: Step, task: Task):
        self.step = step
        self.params = step.place("params", models.values(models.init(task.model)))
        self.state = step.init(self.params)
        self.batch = step.place("batch", models.values(task.model.batch(task.rows)))
        self.grads = step.place("grads", jax.tree.map(lambda x: np.full(x.shape, 0.01, "float32"), step.grads))

    def train(self) -> float:
        """Runs one step; returns its time in seconds."""
        start = time.perf_counter()
        self.params, self.state, metrics = self.step.run(self.params, self.state, self.batch)
        jax.block_until_ready((self.params, self.state, metrics))
        return time.perf_counter() - start

    def optimize(self) -> float:
        """Runs one update; returns its time in seconds."""
        start = time.perf_counter()
        self.params, self.state = self.step.optimize(self.grads, self.state, self.params)
        jax.block_until_ready((self.params, self.state))
        return time.perf_counter() - start


def alternated(one: Callable[[], float], other: Callable[[], float], rounds: int) -> list[tuple[float, float]]:
    """Runs both alternately, in reversed order each round; returns the seconds of each round."""
    pairs = []
    for number in range(rounds + _WARM):
        first, second = (one, other) if number % 2 == 0 else (other, one)
        times = {first: first(), second: second()}
        pairs.append((times[one], times[other]))
    return pairs[_WARM:]


def beside(pairs: Sequence[tuple[float, float]], what: str) -> dict[str, float]:
    """The first one's median time, and the quartiles of the paired ratios.

    >>> beside([(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)], "step")
    {'step_seconds': 2.0, 'step_ratio': 1.0, 'step_ratio_low': 0.5, 'step_ratio_high': 1.5}
    """
    ratios = [a / b for a, b in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        f"{what}_seconds": statistics.median(a for a, _ in pairs),
        f"{what}_ratio": middle,
        f"{what}_ratio_low": low,
        f"{what}_ratio_high": high,
    }


def timed(one: Running, other: Running, rounds: int) -> dict[str, float]:
    """Times the whole step and the optimizer alone, against another step's."""
    steps = beside(alternated(one.train, other.train, rounds), "step")
    return steps | beside(alternated(one.optimize, other.optimize, rounds), "update")
