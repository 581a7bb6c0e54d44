"""Pipeline parallelism: layers sharded into stages over a mesh axis, microbatches passed from stage to stage.

S stages, M microbatches, v virtual stages on each device (S v chunks of layers in all), A the bytes of one activation.
All devices run the same ticks in lockstep: in each, a device runs one chunk on one microbatch and sends its activation
to the next stage. Forward and backward take v M + S - 1 ticks each, so (S - 1) / (v M + S - 1) of the time is lost
(Narayanan et al. 2021, section 2.2), and each device sends 2 (v M + S - 1) A bytes.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxshard import collectives
from jaxshard.base.tree import named_leaves, path_of, sum_dtype
from jaxshard.base.types import AxisTypeError, Scalar, Tree
from jaxshard.loss.params import unshard
from jaxshard.pipelining import stages
from jaxshard.pipelining.one_f_one_b import Pipe
from jaxshard.pipelining.stages import Parts
from jaxshard.pipelining.timetable import SCHEDULES, Info, Plan, Schedule
from jaxshard.programs.rows.microbatches import record


def pipeline(
    stage_fn: Callable[..., Tree],
    first_fn: Callable[..., Tree],
    last_fn: Callable[..., Tree],
    blocks: Tree,
    shared: Tree,
    batch: Tree,
    *,
    num_microbatches: int,
    schedule: Schedule = "1f1b",
    virtual: int = 1,
    const: Tree = None,
    remat: Literal["tick", "stage"] = "tick",
    axis: str = "pipeline",
) -> Any:
    """Inside a loss function: the mean loss over microbatches, with the layers sharded into stages over `axis`.

    The schedules `1f1b` and `interleaved` compute their own gradients, so they can be differentiated only once, in
    reverse mode. Outside of `shard_map`, or if the mesh has no such axis, this is a loop over the microbatches.

    Args:
      stage_fn: `(blocks, x, info) -> x`, or `(blocks, x, info, const)` if `const` is given: one chunk of layers.
        `blocks` are its params; x must keep its shape and dtype. It may close over values that need no gradient.
      first_fn: `(shared, microbatch, info) -> x`: the embedding.
      last_fn: `(shared, x, microbatch, info) -> loss`, a scalar: head and loss, a mean over the microbatch's rows. Or
        (the sum of the loss, its weight), two scalars, for a loss with masks or weights and `weighted=True`.
      blocks: the stacked layers' parameters, of (L, ...), sharded over `axis` on their first dim; with virtual stages
        (v, L/v, ...), a reshape of that, sharded on the second.
      shared: the parameters of `first_fn` and `last_fn`, replicated on every stage; gradients are summed over stages
        once.
      batch: leaves of (rows, ...), rows divisible by `num_microbatches`.
      num_microbatches: M. With more, less time is lost to filling and draining the pipeline.
      schedule: "1f1b" keeps the inputs of 2 S - 1 microbatches, whatever M is (Narayanan et al. 2019), and recomputes
        each stage in the backward pass; "interleaved" has v chunks on each device, and loses about 1/v of the time that
        1f1b loses (Narayanan et al. 2021); "gpipe" keeps an activation per microbatch (Huang et al. 2019).
      virtual: v, above 1 only for "interleaved".
      const: further arguments of `stage_fn`; gradients stop here.
      remat: the part that gpipe recomputes in the backward pass: the full "tick", with embedding and head, or only the
        "stage", which takes more memory.
      axis: the mesh axis of the stages.

    Returns:
      A scalar, the same on every stage; of a `last_fn` with weights, the sums over all microbatches of (the loss, its
      weight), which `loss_fn` returns under `weighted=True`.

    Raises:
      TypeError: blocks are not sharded over the axis, or shared params are; a gradient is needed of a value that a
        function closes over; or the loss is not a floating scalar.
      ValueError: sizes do not divide, or the activation changes its shape.
    """
    _check_schedule(schedule, virtual, num_microbatches, remat)
    num_stages = collectives.axis_size(axis)
    _check_sizes(blocks, batch, num_stages, num_microbatches, virtual)
    parts = Parts(stage_fn, first_fn, last_fn, None)
    plan = Plan(num_stages, num_microbatches, virtual)
    if num_stages > 1:
        _check_types(blocks, shared, axis)

    def run(given: tuple[Tree, Tree, Tree], batch: Tree) -> Tree:
        blocks, shared, const = given
        microbatches = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
        here = parts._replace(const=lax.stop_gradient(const))
        if num_stages == 1:
            return _loop(here, plan, blocks, shared, microbatches, axis)
        if schedule == "gpipe":
            return _gpipe(here, plan, blocks, shared, microbatches, axis, remat)
        pipe = Pipe(here, plan, blocks, shared, microbatches, axis)
        scale = unshard.loss_scale()
        scale = jnp.float32(1) if scale is None else scale
        loss, *weight = pipe.part.bind(jax.tree.leaves((blocks, shared, scale, microbatches, pipe.consts)))
        return (loss, *map(lax.stop_gradient, weight)) if weight else loss

    def of_rows(given: tuple[Tree, Tree, Tree], rows: Tree, chunk: Scalar, microbatch: Scalar) -> list[Tree]:
        blocks, shared, const = given
        return _at_once(parts._replace(const=const), plan, blocks, shared, rows, Info(chunk, microbatch), axis)

    return record(run, of_rows, (blocks, shared, const), batch, num_microbatches)


def _at_once(
    parts: Parts, plan: Plan, blocks: Tree, shared: Tree, rows: Tree, info: Info, axis: str
) -> list[jax.Array]:
    """The losses of some rows at once, with this device's layers in place of all: to judge what is done with rows."""
    if plan.num_stages == 1:
        return _one(parts, plan, blocks, shared, rows, info.microbatch, axis)
    info = stages.cast(info, (axis,))
    blocks, shared = stages.cast((blocks, shared), stages.axes_of_sums(rows, axis))
    chunk = stages.of_round(blocks, info.chunk, plan)
    kind = stages.settled(parts, axis, chunk, shared, rows, info)

    def stage(x: Tree, _: None) -> tuple[Tree, None]:
        return jax.tree.map(collectives.vary_as, parts.stage(chunk, x, info), kind), None

    x = jax.tree.map(collectives.vary_as, parts.first_fn(shared, rows, info), kind)
    x, _ = lax.scan(stage, x, None, plan.num_stages * plan.virtual)
    return stages.losses(parts.last_fn(shared, x, rows, info))


# One stage: a loop over the microbatches.


def _loop(parts: Parts, plan: Plan, blocks: Tree, shared: Tree, microbatches: Tree, axis: str) -> Tree:
    """Runs the microbatches one after another, and recomputes them in the backward pass."""

    @jax.checkpoint
    def one(blocks, shared, microbatch, index):
        return _one(parts, plan, blocks, shared, microbatch, index, axis)

    def step(totals, at):
        index, microbatch = at
        return jax.tree.map(jnp.add, totals, one(blocks, shared, microbatch, index)), None

    indices = jnp.arange(plan.num_microbatches, dtype=jnp.int32)
    first = jax.tree.map(lambda x: x[0], microbatches)
    shapes = collectives.shapes_of(one, blocks, shared, first, indices[0])
    start = [collectives.vary_as(jnp.zeros((), sum_dtype(x)), x) for x in shapes]
    totals, _ = lax.scan(step, start, (indices, microbatches))
    totals = [lax.psum(x, axis) if _differs(blocks, axis) else x for x in totals]
    return stages.combined(totals, plan)


def _one(
    parts: Parts, plan: Plan, blocks: Tree, shared: Tree, microbatch: Tree, index: Scalar, axis: str
) -> list[jax.Array]:
    """The losses of one microbatch, by all layers."""
    x = parts.first_fn(shared, microbatch, Info(jnp.int32(0), index))
    x = stages.cast(x, (axis,)) if _differs(blocks, axis) else x
    for chunk in range(plan.virtual):
        x = parts.stage(stages.of_round(blocks, chunk, plan), x, Info(jnp.int32(chunk), index))
    return stages.losses(parts.last_fn(shared, x, microbatch, Info(jnp.int32(plan.virtual - 1), index)))


def _differs(blocks: Tree, axis: str) -> bool:
    """Whether the types of the blocks vary over the axis, though it has one stage."""
    return any(axis in collectives.varying(leaf) for leaf in jax.tree.leaves(blocks))


# GPipe: all forward, then all backward, by autodiff through the scan of ticks.


def _gpipe(parts: Parts, plan: Plan, blocks: Tree, shared: Tree, microbatches: Tree, axis: str, remat: str) -> Tree:
    stage = lax.axis_index(axis)
    is_first, is_last = stage == 0, stage == plan.num_stages - 1
    blocks, shared = stages.cast((blocks, shared), stages.axes_of_sums(microbatches, axis))
    run_stage = jax.checkpoint(parts.stage) if remat == "stage" else parts.stage

    def tick(x, index):
        work = plan.forward(index, stage)
        info, microbatch = Info(stage, work.microbatch), stages.at(microbatches, work.microbatch)
        x = stages.select(is_first, parts.first_fn(shared, microbatch, info), x)
        y = run_stage(blocks, x, info)
        found = stages.losses(parts.last_fn(shared, y, microbatch, info))
        counted = [jnp.where(work.busy & is_last, x, 0).astype(sum_dtype(x)) for x in found]
        return stages.passed(y, axis, plan, 1), counted

    # Real data fills the pipeline at first: the results are dropped, but their gradients must be finite, too.
    filling = stages.at(microbatches, 0), Info(stage, collectives.vary(jnp.int32(0), (axis,)))
    kind = stages.settled(parts, axis, blocks, shared, *filling)
    x = jax.tree.map(collectives.vary_as, parts.first_fn(shared, *filling), kind)
    run_tick = jax.checkpoint(tick) if remat == "tick" else tick
    _, found = lax.scan(run_tick, x, jnp.arange(plan.num_ticks, dtype=jnp.int32))
    return stages.combined([lax.psum(jnp.sum(x), axis) for x in found], plan)


# Checks.


def _check_schedule(schedule: str, virtual: int, num_microbatches: int, remat: str) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"pipeline: unknown schedule {schedule!r}; the schedules are {', '.join(SCHEDULES)}")
    if remat not in ("tick", "stage"):
        raise ValueError(f"pipeline: remat {remat!r} must be 'tick' or 'stage'")
    for name, value in (("num_microbatches", num_microbatches), ("virtual", virtual)):
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"pipeline: {name} {value!r} must be an integer, 1 or more")
    if (virtual > 1) != (schedule == "interleaved"):
        raise ValueError(
            f"pipeline: schedule {schedule!r} with virtual={virtual}; 'interleaved' needs at least 2 virtual stages, "
            "and the other schedules none"
        )


def _check_sizes(blocks: Tree, batch: Tree, num_stages: int, num_microbatches: int, virtual: int) -> None:
    if virtual > 1 and num_microbatches % num_stages:
        raise ValueError(
            f"pipeline: num_microbatches {num_microbatches} must be divisible by the number of stages {num_stages}, "
            f"since virtual={virtual}: give {-(-num_microbatches // num_stages) * num_stages}"
        )
    for names, leaf in named_leaves(batch):
        if not leaf.ndim or leaf.shape[0] % num_microbatches or leaf.shape[0] == 0:
            raise ValueError(
                f"pipeline: {path_of(names)} of the batch has shape {leaf.shape} on each device; its first dim must be "
                f"divisible by num_microbatches {num_microbatches}"
            )
    if not jax.tree.leaves(blocks) or not jax.tree.leaves(batch):
        raise ValueError("pipeline: blocks and batch need at least one array each")
    for names, leaf in named_leaves(blocks):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"pipeline: {path_of(names)} of the blocks has dtype {leaf.dtype}; pass it as const")
        if virtual > 1 and (leaf.ndim < 2 or leaf.shape[0] != virtual):
            raise ValueError(
                f"pipeline: {path_of(names)} of the blocks has shape {leaf.shape} on each device; it must be (virtual "
                f"{virtual}, layers / (virtual {virtual} x stages {num_stages}), ...): reshape (layers, ...) to "
                f"({virtual}, layers / {virtual}, ...), and shard the second dim: P(None, 'pipeline')"
            )


def _check_types(blocks: Tree, shared: Tree, axis: str) -> None:
    if not collectives.types_are_checked(axis):
        raise AxisTypeError(
            "pipeline: under shard_map(check_vma=False) it is unknown which values differ between stages, and "
            "gradients would be wrong: use check_vma=True, the default"
        )
    for names, leaf in named_leaves(blocks):
        if axis not in collectives.varying(leaf):
            raise AxisTypeError(
                f"pipeline: {path_of(names)} of the blocks is replicated on every stage; shard it: give it the spec "
                f"P({axis!r}) for its dim of layers"
            )
    for names, leaf in named_leaves(shared):
        if axis in collectives.varying(leaf):
            raise AxisTypeError(
                f"pipeline: {path_of(names)} of shared is sharded over {axis!r}; it must be replicated on every stage: "
                "remove the axis from its spec"
            )
