"""1F1B, plain and interleaved: a microbatch's backward pass starts as soon as its loss is known."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard import collectives
from jaxshard.base.tree import sum_dtype
from jaxshard.base.types import DType, Jaxpr, Scalar, Tree
from jaxshard.loss import ordered
from jaxshard.loss.params import unshard, uses
from jaxshard.pipelining import stages
from jaxshard.pipelining.stages import Parts
from jaxshard.pipelining.timetable import Info, Plan, Work


class Pipe:
    """The user's three functions as traced programs, run by the schedule; params may be `unshard.Sharded`.

    Its inputs are flat: blocks and shared (which are differentiated), the scale of the backward pass, microbatches, and
    the functions' constants.
    """

    def __init__(self, parts: Parts, plan: Plan, blocks: Tree, shared: Tree, microbatches: Tree, axis: str):
        self.plan, self.axis = plan, axis
        self.num_blocks, self.num_shared = len(jax.tree.leaves(blocks)), len(jax.tree.leaves(shared))
        self.num_batch = len(jax.tree.leaves(microbatches))
        self.cast = stages.axes_of_sums(microbatches, axis)

        def one_tick():
            index = collectives.vary(jnp.int32(0), (axis,))
            cast = stages.cast((blocks, shared), self.cast)
            return stages.of_round(cast[0], index, plan), cast[1], stages.at(microbatches, index), Info(index, index)

        chunk, shared, microbatch, info = collectives.shapes_of(one_tick)
        self.first = stages.Function.trace(parts.first_fn, shared, microbatch, info)
        self.kind = stages.settled(parts, axis, chunk, shared, microbatch, info)
        self.stage = stages.Function.trace(parts.stage, chunk, self.kind, info)
        self.last = stages.Function.trace(
            lambda *xs: stages.losses(parts.last_fn(*xs), self.cast), shared, self.kind, microbatch, info
        )
        self.consts = [self.stage.consts, self.first.consts, self.last.consts]
        # Held here: the traced program keeps this pipe alive, so `deferred` can find the part by its equation.
        self.part = unshard.Deferred(self.run, self.why_not_lazy, self.casts_to)

    def why_not_lazy(self, position: int, ndim: int, dims: collectives.Dims, cast: bool) -> str | None:
        """None if the input at `position` can stay a shard until its marks, else the reason; see `unshard.Deferred`."""
        if position < self.num_blocks and self.plan.virtual > 1 and any(-dim == ndim for dim, _ in dims):
            return "sharded on the dim of virtual stages"
        readers = self._readers(position)
        if not readers:
            return "passed to a pipeline as data"
        return next(filter(None, (uses.why_not_lazy(fn, i, dims, cast=cast) for fn, i in readers)), None)

    def casts_to(self, position: int) -> Iterator[DType | None]:
        """For each use of the input at `position`, the narrower dtype to which it is cast; see `unshard.Deferred`."""
        readers = self._readers(position)
        return itertools.chain.from_iterable(uses.casts_to(fn, i) for fn, i in readers) if readers else iter([None])

    def _readers(self, position: int) -> list[tuple[Jaxpr, int]]:
        """The functions that take the parameter at this input, each with its input there; [] if it is none."""
        if position < self.num_blocks:
            return [(self.stage.jaxpr, position)]
        position -= self.num_blocks
        return [(fn.jaxpr, position) for fn in (self.first, self.last)] if position < self.num_shared else []

    def run(self, values: Sequence[Tree]) -> list[Tree]:
        """Returns [the mean loss over microbatches], or the sums [loss, weight]; `values` are the flat inputs."""
        num_params = self.num_blocks + self.num_shared
        params, scale, data = values[:num_params], values[num_params], list(values[num_params + 1 :])
        params = stages.cast(list(params), self.cast)
        diff, held = map(list, zip(*map(_apart, params), strict=True))

        @jax.custom_vjp
        def losses_of(diff, held, data, scale):
            return _Device(self, params, held, data).losses(diff)

        def forward(diff, held, data, scale):
            if any(x.perturbed for x in jax.tree.leaves(data, is_leaf=_is_primal)):
                raise TypeError(
                    "pipeline: stage_fn, first_fn or last_fn uses a value other than its params that needs a gradient: "
                    "pass it as part of blocks or shared (or, if the gradient is not needed, use jax.lax.stop_gradient)"
                )
            given = (diff, held, data, scale)
            diff, held, data, scale = jax.tree.map(lambda x: x.value, given, is_leaf=_is_primal)
            losses, grads = _Device(self, params, held, data).losses_and_grads(diff, scale)
            return losses, (grads, scale)

        def backward(residuals, cotangents):
            grads, scale = residuals  # gradients and cotangent both contain the scale: divide by it once
            cotangent = cotangents[0]  # the weight has no gradient
            ratio = cotangent.astype(sum_dtype(cotangent)) / scale
            return jax.tree.map(lambda g: (g * ratio).astype(g.dtype), grads), None, None, None

        losses_of.defvjp(forward, backward, symbolic_zeros=True)
        return losses_of(diff, held, data, scale)


class _Carry(NamedTuple):
    """The scan carry of a device, from tick to tick.

    `x` and `dx` are the received activation and gradient, `kept` holds stage inputs for the backward pass, `losses`
    and `grads` are sums so far.
    """

    x: Tree
    kept: Tree
    losses: list[Tree]
    dx: Tree
    grads: Tree


class _Device:
    """One device's part of a pipeline, inside shard_map."""

    def __init__(self, pipe: Pipe, params: list[Tree], held: list[Tree], data: list[Tree]):
        self.pipe, self.plan, self.params, self.held = pipe, pipe.plan, params, held
        self.index = lax.axis_index(pipe.axis)
        self.microbatches, consts = data[: pipe.num_batch], iter(data[pipe.num_batch :])
        self.consts = [[next(consts) for _ in some] for some in pipe.consts]
        self.is_first, self.is_last = self.index == 0, self.index == self.plan.num_stages - 1

    # The functions.

    def _blocks(self, diff: list[Tree], index: Scalar) -> list[Tree]:
        return stages.of_round(diff[: self.pipe.num_blocks], index, self.plan)

    def _stage(self, blocks: list[Tree], x: Tree, work: Work) -> Tree:
        """One chunk's forward pass; `blocks` are the differentiated arrays of this round."""
        n = self.pipe.num_blocks
        held = stages.of_round(self.held[:n], work.round, self.plan)
        values = [_joined(*p) for p in zip(self.params[:n], blocks, held, strict=True)]
        return self._activation(self._call(self.pipe.stage, [*values, *jax.tree.leaves(x)], work, self.consts[0]))

    def _shared(self, diff: list[Tree]) -> list[Tree]:
        n = self.pipe.num_blocks
        return [_joined(*p) for p in zip(self.params[n:], diff, self.held[n:], strict=True)]

    def _first(self, shared: list[Tree], work: Work) -> Tree:
        values = [*self._shared(shared), *stages.at(self.microbatches, work.microbatch)]
        return self._activation(self._call(self.pipe.first, values, work, self.consts[1]))

    def _activation(self, leaves: list[Tree]) -> Tree:
        kind = self.pipe.kind
        return jax.tree.map(collectives.vary_as, jax.tree.unflatten(jax.tree.structure(kind), leaves), kind)

    def _last(self, shared: list[Tree], x: Tree, work: Work) -> list[Tree]:
        values = [*self._shared(shared), *jax.tree.leaves(x), *stages.at(self.microbatches, work.microbatch)]
        return self._call(self.pipe.last, values, work, self.consts[2])

    def _call(self, fn: stages.Function, values: list[Tree], work: Work, consts: list[Tree]) -> list[Tree]:
        chunk: Tree = work.round * self.plan.num_stages + self.index
        return ordered.run(fn.jaxpr, [*values, chunk, work.microbatch, *consts])

    # Forward alone.

    def losses(self, diff: list[Tree]) -> list[Tree]:
        """The results, from forward ticks alone."""

        def tick(at, t):
            x, totals = at
            device, work = self._at(t), self.plan.forward(t, self.index)
            y = device._stage(self._blocks(diff, work.round), device._entering(diff, x, work), work)
            losses = device._last(self._shared_diff(diff), y, work)
            return (self._passed(y, 1), self._counted(totals, losses, work)), None

        start, ticks = (collectives.zeros(self.pipe.kind), self._no_losses()), jnp.arange(self.plan.num_ticks)
        return self._results(lax.scan(tick, start, ticks.astype(jnp.int32))[0][1])

    def _results(self, totals: list[Tree]) -> list[Tree]:
        return jax.tree.leaves(stages.combined([lax.psum(x, self.pipe.axis) for x in totals], self.plan))

    def _shared_diff(self, diff: list[Tree]) -> list[Tree]:
        return diff[self.pipe.num_blocks :]

    def _entering(self, diff: list[Tree], x: Tree, work: Work) -> Tree:
        """The chunk's input: for the first chunk from `first_fn`, else the previous stage's activation."""
        return stages.select(self.is_first & (work.round == 0), self._first(self._shared_diff(diff), work), x)

    def _in_last_chunk(self, work: Work) -> Tree:
        """Whether the work is in the last chunk, which computes the loss."""
        return self.is_last & (work.round == self.plan.virtual - 1)

    def _counted(self, totals: list[Tree], losses: list[Tree], work: Work) -> list[Tree]:
        counts = work.busy & self._in_last_chunk(work)
        return [total + jnp.where(counts, x, 0) for total, x in zip(totals, losses, strict=True)]

    def _no_losses(self) -> list[Tree]:
        return [collectives.vary(jnp.zeros((), sum_dtype(x)), self.pipe.cast) for x in self.pipe.last.outs]

    def _passed(self, tree: Tree, step: int) -> Tree:
        return stages.passed(tree, self.pipe.axis, self.plan, step)

    # Forward and backward.

    def losses_and_grads(self, diff: list[Tree], scale: Tree) -> tuple[list[Tree], list[Tree]]:
        """(the results, the gradients of `scale` times the first)."""
        plan = self.plan
        kept = jax.tree.map(lambda x: jnp.stack([x] * plan.num_kept), collectives.zeros(self.pipe.kind))
        sums = [collectives.vary(jnp.zeros_like(d, dtype=sum_dtype(d)), tuple(collectives.varying(d))) for d in diff]
        x = collectives.zeros(self.pipe.kind)
        at = _Carry(x, kept, self._no_losses(), stages.floats(x), sums)
        first, both = plan.delay, plan.num_ticks
        at = self._scan(lambda device, at, t: device._forward(diff, at, t)[0], at, 0, first)
        at = self._scan(lambda device, at, t: device._both(diff, scale, at, t), at, first, both)
        at = self._scan(lambda device, at, t: device._backward(diff, at, t, at.dx), at, both, both + plan.delay)
        grads = [g.astype(d.dtype) for g, d in zip(at.grads, diff, strict=True)]
        return self._results(at.losses), grads

    def _scan(self, tick: Callable[["_Device", _Carry, Scalar], _Carry], at: _Carry, start: int, stop: int) -> _Carry:
        ticks = jnp.arange(start, stop, dtype=jnp.int32)
        return lax.scan(lambda at, t: (tick(self._at(t), at, t), None), at, ticks)[0]

    def _at(self, t: Scalar) -> "_Device":
        """A copy for tick `t` whose shards are tied to the tick, so that XLA does not gather them before the loop."""
        device = copy.copy(self)
        each = zip(self.held, self.params, strict=True)
        tied = [(x, isinstance(p, unshard.Sharded) and p.held) for x, p in each]
        device.held = [lax.optimization_barrier((x, t))[0] if yes else x for x, yes in tied]
        return device

    def _forward(self, diff: list[Tree], at: _Carry, t: Scalar) -> tuple[_Carry, Tree, Work]:
        """One forward tick: returns (the carry, the chunk's output, the work)."""
        work = self.plan.forward(t, self.index)
        x = self._entering(diff, at.x, work)
        kept = jax.tree.map(lambda k, x: stages.put(k, x, t % self.plan.num_kept), at.kept, x)
        y = self._stage(self._blocks(diff, work.round), x, work)
        return at._replace(x=self._passed(y, 1), kept=kept), y, work

    def _both(self, diff: list[Tree], scale: Tree, at: _Carry, t: Scalar) -> _Carry:
        """One tick in both directions: a forward pass, its loss and the loss's gradient, a backward pass."""
        at, y, work = self._forward(diff, at, t)

        def head(shared: list[Tree], floats: list[Tree]) -> tuple[Tree, list[Tree]]:
            losses = self._last(shared, stages.with_floats(y, floats), work)
            return losses[0], losses

        loss, pull, losses = jax.vjp(head, self._shared_diff(diff), stages.floats(y), has_aux=True)
        seed = scale.astype(sum_dtype(loss)) / (1 if len(losses) > 1 else self.plan.num_microbatches)
        d_shared, dy = pull(jnp.ones_like(loss) * seed.astype(loss.dtype))
        grads = self._added(at.grads, self.pipe.num_blocks, d_shared, work.busy & self._in_last_chunk(work))
        return self._backward(diff, at._replace(losses=self._counted(at.losses, losses, work), grads=grads), t, dy)

    def _backward(self, diff: list[Tree], at: _Carry, t: Scalar, dy_of_loss: Tree) -> _Carry:
        """One backward tick; `dy_of_loss` is the gradient that enters the last chunk."""
        work = self.plan.backward(t - self.plan.delay, self.index)
        slot = self.plan.forward_tick(work, self.index) % self.plan.num_kept
        x, blocks = stages.at(at.kept, slot), self._blocks(diff, work.round)

        def stage(blocks: list[Tree], floats: list[Tree]) -> Tree:
            return stages.floats(self._stage(blocks, stages.with_floats(x, floats), work))

        _, pull = jax.vjp(stage, blocks, stages.floats(x))
        d_blocks, dx = pull(stages.select(self._in_last_chunk(work), dy_of_loss, at.dx))
        _, pull = jax.vjp(lambda shared: stages.floats(self._first(shared, work)), self._shared_diff(diff))
        (d_shared,) = pull(dx)
        grads = self._added(at.grads, self.pipe.num_blocks, d_shared, work.busy & self.is_first & (work.round == 0))
        if self.plan.virtual > 1:
            rows = stages.of_round(grads[: self.pipe.num_blocks], work.round, self.plan)
            rows = self._added(rows, 0, d_blocks, work.busy)
            grads[: self.pipe.num_blocks] = [
                stages.put(g, row, work.round) for g, row in zip(grads[: self.pipe.num_blocks], rows, strict=True)
            ]
        else:
            grads = self._added(grads, 0, d_blocks, work.busy)
        return at._replace(dx=self._passed(dx, -1), grads=grads)

    def _added(self, sums: list[Tree], start: int, grads: list[Tree], wanted: Scalar) -> list[Tree]:
        """Adds gradients to the sums from `start` on if they are `wanted`; gradients of idle ticks are dropped."""
        new = list(sums)
        for i, g in enumerate(grads, start):
            new[i] = sums[i] + jnp.where(wanted, g, 0).astype(sums[i].dtype)
        return new


def _apart(value: Tree) -> tuple[Tree, Tree]:
    """(the differentiated array; the shard or whole copy that `_joined` combines with it, or None)."""
    return (value.stand_in, value.local) if isinstance(value, unshard.Sharded) else (value, None)


def _joined(template: Tree, diff: Tree, held: Tree) -> Tree:
    if not isinstance(template, unshard.Sharded):
        return diff
    return dataclasses.replace(template, local=held, stand_in=diff)


def _is_primal(x: Tree) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)
