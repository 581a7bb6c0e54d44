"""Pipeline parallelism: layers cut into stages over a mesh axis, microbatches passed from stage to stage.

S stages, M microbatches, v virtual stages on each device (S v chunks of layers in all), A the bytes of one activation.
Every device runs the same ticks in lockstep; in each it works on one chunk and one microbatch, and passes an activation
on. Forward and backward take v M + S - 1 ticks each, so that (S - 1) / (v M + S - 1) of the time is lost (Narayanan
et al. 2021, section 2.2), and 2 (v M + S - 1) A bytes go out of every device.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxshard import collectives, lazy
from jaxshard.jaxprs import without_consts
from jaxshard.schedule import SCHEDULES, Info, Plan, Schedule, Work
from jaxshard.tree import named_leaves, path_of


def pipeline(
    stage_fn: Callable[..., Any],
    first_fn: Callable[..., Any],
    last_fn: Callable[..., Any],
    blocks: Any,
    shared: Any,
    batch: Any,
    *,
    num_microbatches: int,
    schedule: Schedule = "1f1b",
    virtual: int = 1,
    const: Any = None,
    remat: Literal["tick", "stage"] = "tick",
    axis: str = "pipeline",
) -> jax.Array:
    """Inside a loss function: the mean loss over microbatches, the layers being cut into stages over `axis`.

    The gradients of `1f1b` and `interleaved` come from their own schedule, so they can be differentiated once, in
    reverse. Where the mesh has no such axis, and outside of `shard_map`, this is a loop over the microbatches.

    Args:
      stage_fn: `(blocks, x, info) -> x`, or `(blocks, x, info, const)` where `const` is given: one chunk of layers.
        `blocks` is that chunk's, x keeps its shape and dtype. It may close over what is not differentiated.
      first_fn: `(shared, microbatch, info) -> x`: the embedding.
      last_fn: `(shared, x, microbatch, info) -> loss`, a scalar: head and loss.
      blocks: the stacked layers' parameters, of (L, ...) cut over `axis` on their first dim; with virtual stages
        (v, L/v, ...), a reshape of that, cut on the second.
      shared: the parameters of `first_fn` and `last_fn`, whole on every stage; summed over stages once.
      batch: leaves of (rows, ...), rows divisible by `num_microbatches`.
      num_microbatches: M. More waste less time in filling and draining the pipeline.
      schedule: "1f1b" keeps the inputs of 2 S - 1 microbatches, however many there are (Narayanan et al. 2019), and
        computes each stage again in the backward pass; "interleaved" has v chunks on each device, for 1/v of the time
        lost (Narayanan et al. 2021); "gpipe" keeps an activation for each microbatch (Huang et al. 2019).
      virtual: v, above 1 for "interleaved" alone.
      const: further arguments of `stage_fn`; gradients stop here.
      remat: what gpipe computes again: the whole "tick", embedding and head too, or each "stage", which keeps more.
      axis: the mesh axis of the stages.

    Returns:
      A scalar, the same on every stage.

    Raises:
      TypeError: blocks that are not cut over the axis, shared params that are; gradients asked of what has none.
      ValueError: sizes that do not divide, or an activation that changes its shape.
    """
    _check_schedule(schedule, virtual, num_microbatches, remat)
    num_stages = collectives.axis_size(axis)
    _check_sizes(blocks, batch, num_stages, num_microbatches, virtual)
    microbatches = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
    parts = _Parts(stage_fn, first_fn, last_fn, lax.stop_gradient(const))
    plan = Plan(num_stages, num_microbatches, virtual)
    if num_stages == 1:
        return _loop(parts, plan, blocks, shared, microbatches, axis)
    _check_types(blocks, shared, axis)
    if schedule == "gpipe":
        return _gpipe(parts, plan, blocks, shared, microbatches, axis, remat)
    pipe = _Pipe(parts, plan, blocks, shared, microbatches, axis)
    scale = lazy.loss_scale()
    scale = jnp.float32(1) if scale is None else scale
    return pipe(jax.tree.leaves((blocks, shared, scale, microbatches, pipe.consts)))[0]


class _Parts(NamedTuple):
    stage_fn: Callable[..., Any]
    first_fn: Callable[..., Any]
    last_fn: Callable[..., Any]
    const: Any

    def stage(self, blocks: Any, x: Any, info: Info) -> Any:
        return self.stage_fn(blocks, x, info) if self.const is None else self.stage_fn(blocks, x, info, self.const)


# One device, or none in particular: a loop.


def _loop(parts: _Parts, plan: Plan, blocks: Any, shared: Any, microbatches: Any, axis: str) -> jax.Array:
    """Microbatches one after the other, each computed again in the backward pass."""
    differs = any(axis in collectives.varying(leaf) for leaf in jax.tree.leaves(blocks))

    @jax.checkpoint
    def one(blocks, shared, microbatch, index):
        x = parts.first_fn(shared, microbatch, Info(jnp.int32(0), index))
        x = _cast(x, (axis,)) if differs else x
        for turn in range(plan.virtual):
            x = parts.stage(_of_round(blocks, turn, plan), x, Info(jnp.int32(turn), index))
        return parts.last_fn(shared, x, microbatch, Info(jnp.int32(plan.virtual - 1), index))

    def step(total, at):
        index, microbatch = at
        return total + one(blocks, shared, microbatch, index), None

    indices = jnp.arange(plan.num_microbatches, dtype=jnp.int32)
    first = jax.tree.map(lambda x: x[0], microbatches)
    loss = collectives.shapes_of(one, blocks, shared, first, indices[0])
    _check_loss(loss)
    total, _ = lax.scan(step, collectives.vary_as(jnp.zeros((), _sum_dtype(loss)), loss), (indices, microbatches))
    total = lax.psum(total, axis) if differs else total
    return total / plan.num_microbatches


# GPipe: all forward, then all backward, by autodiff through the scan of ticks.


def _gpipe(parts: _Parts, plan: Plan, blocks: Any, shared: Any, microbatches: Any, axis: str, remat: str) -> jax.Array:
    stage = lax.axis_index(axis)
    is_first, is_last = stage == 0, stage == plan.num_stages - 1
    blocks, shared = _cast((blocks, shared), _axes_of_sums(microbatches, axis))
    run_stage = jax.checkpoint(parts.stage) if remat == "stage" else parts.stage

    def tick(x, index):
        work = plan.forward(index, stage)
        info, microbatch = Info(stage, work.microbatch), _at(microbatches, work.microbatch)
        x = _select(is_first, parts.first_fn(shared, microbatch, info), x)
        y = run_stage(blocks, x, info)
        loss = parts.last_fn(shared, y, microbatch, info)
        _check_loss(loss)
        return _passed(y, axis, plan, 1), jnp.where(work.busy & is_last, loss, 0).astype(_sum_dtype(loss))

    # What fills the pipeline at first is real too, since the gradients of what is dropped must be finite.
    filling = _at(microbatches, 0), Info(stage, collectives.vary(jnp.int32(0), (axis,)))
    kind = _settled(parts, axis, blocks, shared, *filling)
    x = jax.tree.map(collectives.vary_as, parts.first_fn(shared, *filling), kind)
    run_tick = jax.checkpoint(tick) if remat == "tick" else tick
    _, losses = lax.scan(run_tick, x, jnp.arange(plan.num_ticks, dtype=jnp.int32))
    return lax.psum(jnp.sum(losses), axis) / plan.num_microbatches


# 1F1B, plain and interleaved: gradients as soon as a microbatch has its loss.


class _Function(NamedTuple):
    """A traced function of flat inputs; what it closed over comes after them."""

    jaxpr: Any
    consts: list[Any]
    outs: Any

    @classmethod
    def trace(cls, fn: Callable[..., Any], *args: Any) -> "_Function":
        leaves, treedef = jax.tree.flatten(args)
        closed, outs = jax.make_jaxpr(lambda *x: fn(*jax.tree.unflatten(treedef, x)), return_shape=True)(*leaves)
        return cls(*without_consts(closed), outs)


class _Pipe(lazy.Deferred):
    """The three functions as traced programs, run by the schedule; params may come as `lazy.Sharded`.

    Inputs are flat: blocks and shared (which are differentiated), the scale of the backward pass, microbatches, and
    what the functions closed over.
    """

    def __init__(self, parts: _Parts, plan: Plan, blocks: Any, shared: Any, microbatches: Any, axis: str):
        self.plan, self.axis = plan, axis
        self.num_blocks, self.num_shared = len(jax.tree.leaves(blocks)), len(jax.tree.leaves(shared))
        self.num_batch = len(jax.tree.leaves(microbatches))
        self.cast = _axes_of_sums(microbatches, axis)

        def one_tick():
            index = collectives.vary(jnp.int32(0), (axis,))
            cast = _cast((blocks, shared), self.cast)
            return _of_round(cast[0], index, plan), cast[1], _at(microbatches, index), Info(index, index)

        chunk, shared, microbatch, info = collectives.shapes_of(one_tick)
        self.first = _Function.trace(parts.first_fn, shared, microbatch, info)
        self.kind = _settled(parts, axis, chunk, shared, microbatch, info)
        self.stage = _Function.trace(parts.stage, chunk, self.kind, info)
        self.last = _Function.trace(parts.last_fn, shared, self.kind, microbatch, info)
        _check_loss(self.last.outs)
        _check_loss_varies(self.last.outs, self.cast)
        self.consts = [self.stage.consts, self.first.consts, self.last.consts]

    def why_not_lazy(self, position: int, ndim: int, dims: collectives.Dims) -> str | None:
        if position < self.num_blocks:
            if self.plan.virtual > 1 and any(-dim == ndim for dim, _ in dims):
                return "cut on the dim of virtual stages"
            return lazy.why_not_lazy(self.stage.jaxpr, position, dims)
        position -= self.num_blocks
        if position >= self.num_shared:
            return "given to a pipeline as data"
        reasons = (lazy.why_not_lazy(fn.jaxpr, position, dims) for fn in (self.first, self.last))
        return next(filter(None, reasons), None)

    def run(self, values: Sequence[Any]) -> list[Any]:
        """[the mean loss]."""
        num_params = self.num_blocks + self.num_shared
        params, scale, data = values[:num_params], values[num_params], list(values[num_params + 1 :])
        params = _cast(list(params), self.cast)
        diff, held = [_diff(p) for p in params], [_held(p) for p in params]

        @jax.custom_vjp
        def loss_of(diff, held, data, scale):
            return _Device(self, params, held, data).loss(diff)

        def forward(diff, held, data, scale):
            if any(x.perturbed for x in jax.tree.leaves(data, is_leaf=_is_primal)):
                raise TypeError(
                    "pipeline: stage_fn, first_fn or last_fn uses, beside its params, something that gradients are "
                    "asked of: pass it as part of blocks or shared (or, if they are not wanted, jax.lax.stop_gradient)"
                )
            given = (diff, held, data, scale)
            diff, held, data, scale = jax.tree.map(lambda x: x.value, given, is_leaf=_is_primal)
            loss, grads = _Device(self, params, held, data).loss_and_grads(diff, scale)
            return loss, (grads, scale)

        def backward(kept, cotangent):
            grads, scale = kept  # the gradients have the scale in them already, and so has the cotangent
            ratio = cotangent.astype(_sum_dtype(cotangent)) / scale
            return jax.tree.map(lambda g: (g * ratio).astype(g.dtype), grads), None, None, None

        loss_of.defvjp(forward, backward, symbolic_zeros=True)
        return [loss_of(diff, held, data, scale)]


class _Carry(NamedTuple):
    """What a device keeps from tick to tick: activation and gradient as they come in, and what has been summed."""

    x: Any
    kept: Any
    loss: Any
    dx: Any
    grads: Any


class _Device:
    """One device's part of a pipeline, inside shard_map."""

    def __init__(self, pipe: _Pipe, params: list[Any], held: list[Any], data: list[Any]):
        self.pipe, self.plan, self.params, self.held = pipe, pipe.plan, params, held
        self.index = lax.axis_index(pipe.axis)
        self.microbatches, consts = data[: pipe.num_batch], iter(data[pipe.num_batch :])
        self.consts = [[next(consts) for _ in some] for some in pipe.consts]
        self.is_first, self.is_last = self.index == 0, self.index == self.plan.num_stages - 1

    # The functions.

    def _blocks(self, diff: list[Any], turn: Any) -> list[Any]:
        return _of_round(diff[: self.pipe.num_blocks], turn, self.plan)

    def _stage(self, blocks: list[Any], x: Any, work: Work) -> Any:
        """`blocks`: what is differentiated of them, of this round."""
        n = self.pipe.num_blocks
        held = _of_round(self.held[:n], work.round, self.plan)
        values = [_joined(*p) for p in zip(self.params[:n], blocks, held, strict=True)]
        return self._activation(self._call(self.pipe.stage, [*values, *jax.tree.leaves(x)], work, self.consts[0]))

    def _shared(self, diff: list[Any]) -> list[Any]:
        n = self.pipe.num_blocks
        return [_joined(*p) for p in zip(self.params[n:], diff, self.held[n:], strict=True)]

    def _first(self, shared: list[Any], work: Work) -> Any:
        values = [*self._shared(shared), *_at(self.microbatches, work.microbatch)]
        return self._activation(self._call(self.pipe.first, values, work, self.consts[1]))

    def _activation(self, leaves: list[Any]) -> Any:
        kind = self.pipe.kind
        return jax.tree.map(collectives.vary_as, jax.tree.unflatten(jax.tree.structure(kind), leaves), kind)

    def _last(self, shared: list[Any], x: Any, work: Work) -> Any:
        values = [*self._shared(shared), *jax.tree.leaves(x), *_at(self.microbatches, work.microbatch)]
        return self._call(self.pipe.last, values, work, self.consts[2])[0]

    def _call(self, fn: _Function, values: list[Any], work: Work, consts: list[Any]) -> list[Any]:
        chunk = work.round * self.plan.num_stages + self.index
        return lazy.run(fn.jaxpr, [*values, chunk, work.microbatch, *consts])

    # Forward alone.

    def loss(self, diff: list[Any]) -> Any:
        def tick(at, t):
            x, total = at
            work = self.plan.forward(t, self.index)
            y = self._stage(self._blocks(diff, work.round), self._entering(diff, x, work), work)
            return (self._passed(y, 1), total + self._counted(self._last(self._shared_diff(diff), y, work), work)), None

        (_, total), _ = lax.scan(
            tick, (collectives.zeros(self.pipe.kind), self._no_loss()), jnp.arange(self.plan.num_ticks, dtype=jnp.int32)
        )
        return lax.psum(total, self.pipe.axis) / self.plan.num_microbatches

    def _shared_diff(self, diff: list[Any]) -> list[Any]:
        return diff[self.pipe.num_blocks :]

    def _entering(self, diff: list[Any], x: Any, work: Work) -> Any:
        """The chunk's input: fresh from the batch at the very first, else what came from the stage before."""
        return _select(self.is_first & (work.round == 0), self._first(self._shared_diff(diff), work), x)

    def _leaves(self, work: Work) -> Any:
        """Whether this is the last chunk."""
        return self.is_last & (work.round == self.plan.virtual - 1)

    def _counted(self, loss: Any, work: Work) -> Any:
        return jnp.where(work.busy & self._leaves(work), loss, 0)

    def _no_loss(self) -> Any:
        loss = self.pipe.last.outs
        return collectives.vary(jnp.zeros((), _sum_dtype(loss)), self.pipe.cast)

    def _passed(self, tree: Any, step: int) -> Any:
        return _passed(tree, self.pipe.axis, self.plan, step)

    # Forward and backward.

    def loss_and_grads(self, diff: list[Any], scale: Any) -> tuple[Any, list[Any]]:
        """The mean loss, and the gradients of `scale` times that."""
        plan = self.plan
        kept = jax.tree.map(lambda x: jnp.stack([x] * plan.num_kept), collectives.zeros(self.pipe.kind))
        sums = [collectives.vary(jnp.zeros_like(d, dtype=_sum_dtype(d)), tuple(collectives.varying(d))) for d in diff]
        at = _Carry(
            collectives.zeros(self.pipe.kind), kept, self._no_loss(), _floats(collectives.zeros(self.pipe.kind)), sums
        )
        first, both = plan.delay, plan.num_ticks
        at = self._scan(lambda at, t: self._forward(diff, at, t)[0], at, 0, first)
        at = self._scan(functools.partial(self._both, diff, scale), at, first, both)
        at = self._scan(lambda at, t: self._backward(diff, at, t, at.dx), at, both, both + plan.delay)
        grads = [g.astype(d.dtype) for g, d in zip(at.grads, diff, strict=True)]
        return lax.psum(at.loss, self.pipe.axis) / plan.num_microbatches, grads

    def _scan(self, tick: Callable[[_Carry, Any], _Carry], at: _Carry, start: int, stop: int) -> _Carry:
        return lax.scan(lambda at, t: (tick(at, t), None), at, jnp.arange(start, stop, dtype=jnp.int32))[0]

    def _forward(self, diff: list[Any], at: _Carry, t: Any) -> tuple[_Carry, Any, Work]:
        """(what is kept, what came out, of which work)."""
        work = self.plan.forward(t, self.index)
        x = self._entering(diff, at.x, work)
        kept = jax.tree.map(lambda k, x: _put(k, x, t % self.plan.num_kept), at.kept, x)
        y = self._stage(self._blocks(diff, work.round), x, work)
        return at._replace(x=self._passed(y, 1), kept=kept), y, work

    def _both(self, diff: list[Any], scale: Any, at: _Carry, t: Any) -> _Carry:
        at, y, work = self._forward(diff, at, t)

        def head(shared: list[Any], floats: list[Any]) -> Any:
            return self._last(shared, _with_floats(y, floats), work)

        loss, pull = jax.vjp(head, self._shared_diff(diff), _floats(y))
        seed = scale.astype(_sum_dtype(loss)) / self.plan.num_microbatches
        d_shared, dy = pull(jnp.ones_like(loss) * seed.astype(loss.dtype))
        grads = self._added(at.grads, self.pipe.num_blocks, d_shared, work.busy & self._leaves(work))
        return self._backward(diff, at._replace(loss=at.loss + self._counted(loss, work), grads=grads), t, dy)

    def _backward(self, diff: list[Any], at: _Carry, t: Any, dy_of_loss: Any) -> _Carry:
        work = self.plan.backward(t - self.plan.delay, self.index)
        slot = self.plan.forward_tick(work, self.index) % self.plan.num_kept
        x, blocks = _at(at.kept, slot), self._blocks(diff, work.round)

        def stage(blocks: list[Any], floats: list[Any]) -> Any:
            return _floats(self._stage(blocks, _with_floats(x, floats), work))

        _, pull = jax.vjp(stage, blocks, _floats(x))
        d_blocks, dx = pull(_select(self._leaves(work), dy_of_loss, at.dx))
        _, pull = jax.vjp(lambda shared: _floats(self._first(shared, work)), self._shared_diff(diff))
        (d_shared,) = pull(dx)
        grads = self._added(at.grads, self.pipe.num_blocks, d_shared, work.busy & self.is_first & (work.round == 0))
        if self.plan.virtual > 1:
            rows = _of_round(grads[: self.pipe.num_blocks], work.round, self.plan)
            rows = self._added(rows, 0, d_blocks, work.busy)
            grads[: self.pipe.num_blocks] = [
                _put(g, row, work.round) for g, row in zip(grads[: self.pipe.num_blocks], rows, strict=True)
            ]
        else:
            grads = self._added(grads, 0, d_blocks, work.busy)
        return at._replace(dx=self._passed(dx, -1), grads=grads)

    def _added(self, sums: list[Any], start: int, grads: list[Any], wanted: Any) -> list[Any]:
        """The sums with these gradients, from `start` on, where they are `wanted`: what others made of nothing real."""
        new = list(sums)
        for i, g in enumerate(grads, start):
            new[i] = sums[i] + jnp.where(wanted, g, 0).astype(sums[i].dtype)
        return new


def _diff(value: Any) -> Any:
    """What is differentiated of a parameter."""
    return value.stand_in if isinstance(value, lazy.Sharded) else value


def _held(value: Any) -> Any:
    return value.local if isinstance(value, lazy.Sharded) else None


def _joined(template: Any, diff: Any, held: Any) -> Any:
    if not isinstance(template, lazy.Sharded):
        return diff
    return dataclasses.replace(template, local=held, stand_in=diff)


def _is_primal(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


def _floats(x: Any) -> list[Any]:
    """The leaves of an activation that have gradients; masks or numbers of segments may go along with them."""
    return [leaf for leaf in jax.tree.leaves(x) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _with_floats(x: Any, floats: list[Any]) -> Any:
    new = iter(floats)
    return jax.tree.map(lambda leaf: next(new) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, x)


def _sum_dtype(x: Any) -> Any:
    """Sums of many are made in float32 at least."""
    return jnp.promote_types(x.dtype, jnp.float32)


# Arrays of rounds, microbatches, ticks.


def _of_round(tree: Any, turn: Any, plan: Plan) -> Any:
    """The blocks of one chunk."""
    return tree if plan.virtual == 1 else _at(tree, turn)


def _at(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def _put(x: Any, row: Any, index: Any) -> Any:
    return lax.dynamic_update_index_in_dim(x, row, index, 0)


def _select(which: Any, one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(which, a, b), one, other)


def _passed(tree: Any, axis: str, plan: Plan, step: int) -> Any:
    """To the next stage (`step` 1) or the one before (-1); with virtual stages around, from one end to the other."""
    num = plan.num_stages
    pairs = [(i, (i + step) % num) for i in range(num) if plan.virtual > 1 or 0 <= i + step < num]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), tree)


def _axes_of_sums(microbatches: Any, axis: str) -> tuple[str, ...]:
    """The stages and the batch's axes: params whose types vary over these have their gradients summed once, outside."""
    return tuple(sorted({axis, *(a for x in jax.tree.leaves(microbatches) for a in collectives.varying(x))}))


def _cast(tree: Any, axes: tuple[str, ...]) -> Any:
    """Of types that vary over these axes."""
    return jax.tree.map(lambda x: collectives.vary(x, axes), tree)


def _settled(parts: _Parts, axis: str, blocks: Any, shared: Any, microbatch: Any, info: Info) -> Any:
    """The shapes and types of the activation: of what comes in first, and out of every stage.

    Raises:
      ValueError: a stage changes the shape or dtype.
    """
    x = collectives.shapes_of(lambda *args: _cast(parts.first_fn(*args), (axis,)), shared, microbatch, info)
    while True:
        y = collectives.shapes_of(parts.stage, blocks, x, info)
        _check_activation(x, y)
        wider = collectives.shapes_of(lambda x: jax.tree.map(collectives.vary_as, x, y), x)
        if wider == x:
            return x
        x = wider


# Checks.


def _check_schedule(schedule: str, virtual: int, num_microbatches: int, remat: str) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"pipeline: no schedule {schedule!r}; there are {', '.join(SCHEDULES)}")
    if remat not in ("tick", "stage"):
        raise ValueError(f"pipeline: remat {remat!r} must be 'tick' or 'stage'")
    for name, value in (("num_microbatches", num_microbatches), ("virtual", virtual)):
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"pipeline: {name} {value!r} must be a whole number, 1 or more")
    if (virtual > 1) != (schedule == "interleaved"):
        raise ValueError(
            f"pipeline: schedule {schedule!r} with virtual={virtual}; virtual stages, at least 2, are what makes "
            "'interleaved'"
        )


def _check_sizes(blocks: Any, batch: Any, num_stages: int, num_microbatches: int, virtual: int) -> None:
    if virtual > 1 and num_microbatches % num_stages:
        raise ValueError(
            f"pipeline: num_microbatches {num_microbatches} / stages {num_stages} is no whole number, and with "
            f"virtual={virtual} microbatches go around in groups of one for each stage: give "
            f"{-(-num_microbatches // num_stages) * num_stages}"
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
                f"({virtual}, layers / {virtual}, ...), and cut the second dim: P(None, 'pipeline')"
            )


def _check_types(blocks: Any, shared: Any, axis: str) -> None:
    if not collectives.types_are_checked(axis):
        raise TypeError(
            "pipeline: under shard_map(check_vma=False) nothing says what differs between stages, and gradients come "
            "out wrong: use check_vma=True, the default"
        )
    for names, leaf in named_leaves(blocks):
        if axis not in collectives.varying(leaf):
            raise TypeError(
                f"pipeline: {path_of(names)} of the blocks is whole on every stage; cut it: a spec of P({axis!r}) for "
                "its dim of layers"
            )
    for names, leaf in named_leaves(shared):
        if axis in collectives.varying(leaf):
            raise TypeError(
                f"pipeline: {path_of(names)} of shared is cut over {axis!r}; every stage needs it whole: take the axis "
                "out of its spec"
            )


def _check_activation(x: Any, y: Any) -> None:
    if jax.tree.structure(x) != jax.tree.structure(y):
        raise ValueError(
            f"pipeline: stage_fn makes {jax.tree.structure(y)} of {jax.tree.structure(x)}; it must keep the structure"
        )
    for (names, a), b in zip(named_leaves(x), jax.tree.leaves(y), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"pipeline: stage_fn makes {b.dtype}{list(b.shape)} of {a.dtype}{list(a.shape)}"
                + (f" ({path_of(names)})" if names else "")
                + "; the activation must keep its shape and dtype, so change them in first_fn and last_fn alone"
            )


def _check_loss(loss: Any) -> None:
    if not hasattr(loss, "shape"):
        raise TypeError(f"pipeline: last_fn must return the loss, a floating scalar, got a {type(loss).__name__}")
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"pipeline: last_fn must return a floating scalar, got {loss.dtype}{list(loss.shape)}; take its mean"
        )


def _check_loss_varies(loss: Any, axes: tuple[str, ...]) -> None:
    others = sorted(collectives.varying_of_shape(loss) - set(axes))
    if others:
        raise TypeError(
            f"pipeline: the loss of last_fn differs over {others}; sum or average it over these (jax.lax.psum, "
            "jax.lax.pmean, or jaxshard.tensor's blocks)"
        )
