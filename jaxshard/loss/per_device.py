"""One device's part of the loss and its gradients, inside `jax.shard_map`: microbatches, keys, reductions."""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard import collectives, platforms
from jaxshard.base.tree import is_key, is_like_raw_key, sum_dtype
from jaxshard.base.types import Jaxpr, Tree, axes_of_dims, beyond, num_along
from jaxshard.loss import ordered
from jaxshard.loss.arguments import LossOptions, folded, unmarked
from jaxshard.loss.evaluation import Evaluation
from jaxshard.loss.loss_program import Program
from jaxshard.loss.loss_report import FOLDED, Price, in_words
from jaxshard.loss.params.leaf_plan import LeafPlan, after_the_trace
from jaxshard.loss.params.unshard import AtFirstUse, Scale, Sharded, Value, at_the_start, without_gradient
from jaxshard.optimizer.precision import wide
from jaxshard.platforms import backward
from jaxshard.programs.source import part

Index: TypeAlias = jax.Array | int  # the index of a microbatch


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class LossPlan:
    """The traced loss and the plan of each parameter; a trace returns it as a part of its results' structure.

    Attributes:
      options: these say in which view it was traced.
      why_global: why the loss needs to see all rows, as far as is known; "" if it does not, or if that was asked for.
      price: of seeing all rows; None if it is not known, or does not arise.
    """

    program: Program
    leaves: tuple[LeafPlan, ...]
    options: LossOptions
    why_global: str = ""
    price: Price | None = None

    def __str__(self) -> str:
        if self.options.loss_view == "global":
            return in_words(self.why_global, self.price)
        is_split = self.options.setup.num_batch_shards * self.options.microbatches > 1 and self.options.fold_keys
        folds = is_split and any("key" in role for role in self.program.roles_of_args)
        verdict, others = self.program.verdict, self.options.cut.other_axes
        found = "each device has a part of all rows" if others and verdict.alone and not verdict.problem else verdict
        parts = f"; the loss itself puts together what {', '.join(others)} cuts" if others else ""
        return f"{found}{parts}{FOLDED if folds else ''}"


class DeviceLoss:
    """One device's part of the loss, inside shard_map; `params` are its shards at rest.

    Attributes:
      axes: the mesh axes over which types vary and results are summed.
      num_shards: the number of parts of the batch, over which results are averaged.
    """

    def __init__(
        self,
        options: LossOptions,
        plans: Sequence[LeafPlan],
        params: Tree,
        batch: Tree,
        args: tuple[Tree, ...],
        scale: Scale,
    ):
        self.options, self.setup, self.args, self.scale = options, options.setup, unmarked(args), scale
        self.axes, self.num_shards = self._parts()
        self.plans, self.treedef = plans, jax.tree.structure(params)
        self.shards = [self._at_the_start(x, plan) for x, plan in zip(jax.tree.leaves(params), plans, strict=True)]
        self.batch = jax.tree.map(self._in_microbatches, batch)

    def _parts(self) -> tuple[tuple[str, ...], int]:
        return self.setup.split_axes, self.setup.num_batch_shards

    def _in_microbatches(self, x: jax.Array) -> jax.Array:
        """(rows, ...) -> (microbatches, rows of each, ...)."""
        m = self.options.microbatches
        return x.reshape(m, x.shape[0] // m, *x.shape[1:])

    @part("params are gathered once per step")
    def _at_the_start(self, x: jax.Array, plan: LeafPlan) -> jax.Array:
        x = collectives.vary(x, self.axes) if self.options.checked else x
        if plan.gather != "start":
            return x
        return collectives.gather(x.astype(plan.gathered_in), plan.leaf.params.dims).astype(x.dtype)

    def plan(self) -> LossPlan:
        """The loss, traced for whole parameters, and the plans that its uses of them give."""

        def inputs() -> Tree:
            values = self._values(self.shards, self._differentiated())
            return [without_gradient(x) for x in values], self._microbatch(0), self._like_folded()

        whole, batch, args = collectives.shapes_of(inputs)
        frozen, cut = ([plan.leaf.frozen for plan in self.plans], [plan.cut_over(self.axes) for plan in self.plans])
        program = Program.trace(self.options, self.treedef, whole, batch, args, self.scale, frozen, cut)
        return LossPlan(program, self._after_the_trace(program.jaxpr), self.options)

    def _after_the_trace(self, jaxpr: Jaxpr) -> tuple[LeafPlan, ...]:
        return after_the_trace(self.plans, jaxpr, self.options)

    def run(self, program: Program) -> Tree:
        """((loss, averaged leaves of aux, weight), leaves of aux with rows in the first dim, gradients of shards)."""
        self.program = program
        if not self.options.differentiate:
            outs = self._loss(self.shards, self._differentiated(), self._microbatch(0), 0)
            value, rows, _ = self._reduced(*jax.tree.map(lambda x: x[None], outs))
            return value, rows, ()
        grads, outs = self._accumulated()
        value, rows, denominator = self._reduced(*outs)
        each = zip(grads, self._trained, strict=True)
        return value, rows, tuple(self._finish(g, plan, denominator) for g, plan in each)

    @property
    def _trained(self) -> list[LeafPlan]:
        """The plans of parameters that are not frozen."""
        return [plan for plan in self.plans if not plan.leaf.frozen]

    # The loss.

    def _differentiated(self) -> list[jax.Array]:
        """The arrays passed to jax.grad: zero slots if gradients are reduced in the backward pass, else the leaves."""
        pairs = zip(self.shards, self.plans, strict=True)
        return [
            self._gradient_slot(x, plan) if plan.reduce == "at use" else x for x, plan in pairs if not plan.leaf.frozen
        ]

    def _gradient_slot(self, x: jax.Array, plan: LeafPlan) -> jax.Array:
        """Zeros of the shape and type of the reduced gradient."""
        shape = list(x.shape)
        for dim, axes in beyond(plan.scattered, plan.held):
            shape[dim] //= num_along(axes, self.setup.sizes)
        summed = () if plan.scattered else plan.summed  # a summed gradient does not vary over these axes
        return collectives.vary(jnp.zeros(shape, plan.sum_dtype), tuple(collectives.varying(x).difference(summed)))

    def _values(self, shards: Sequence[jax.Array], diff: Sequence[jax.Array]) -> list[Value]:
        """The loss's parameters, cut ones not yet gathered; with one data device, exactly the user's arrays."""
        rest = iter(diff)

        def value(x: jax.Array, plan: LeafPlan) -> Value:
            d = None if plan.leaf.frozen else next(rest)
            casts = plan.computed_in, plan.reduced_in
            if plan.reduce == "at use":
                return Sharded(x, d, plan.scattered, plan.held, () if plan.scattered else plan.summed, *casts)
            if plan.reduce == "after" and self.axes:
                return Sharded(None, d, (), ())
            return Sharded(x, None, plan.held, plan.held, (), *casts) if plan.held else x if d is None else d

        return [value(x, plan) for x, plan in zip(shards, self.plans, strict=True)]

    def _loss(self, shards: Sequence[jax.Array], diff: Sequence[jax.Array], batch: Tree, index: Index) -> Tree:
        """(loss, weight, aux) of one microbatch."""
        pairs = zip(self._values(shards, diff), self.plans, strict=True)
        values = [x if plan.reason is None else self._at_first_use(x) for x, plan in pairs]
        outs = self._run_program([*values, *jax.tree.leaves((batch, self._folded(index), self.scale))])
        return jax.tree.unflatten(self.program.out_tree, [self._varied(jnp.asarray(x)) for x in outs])

    def _run_program(self, flat: Sequence[Tree]) -> list[Value]:
        if not self.options.differentiate:
            return Evaluation.run(self.program.jaxpr, flat)
        smooth, regathers = [role == "param" for role in self.program.roles], self.options.regathers
        return ordered.run(self.program.jaxpr, flat, range(len(self.plans)), smooth, regathers=regathers)

    def _at_first_use(self, x: Value) -> Value:
        """The whole parameter, gathered where the loss first uses it; one that is not cut is whole at once."""
        return AtFirstUse(x) if isinstance(x, Sharded) and x.local is not None else at_the_start(x)

    def _varied(self, x: jax.Array) -> jax.Array:
        """`x` with a type that varies over the batch axes.

        If the user has averaged it over devices, the sum over devices then counts it as one of N equal means.
        """
        averaged = self.options.checked and jnp.issubdtype(x.dtype, jnp.inexact)
        return collectives.vary(x, self.axes) if averaged else x

    def _microbatch(self, index: Index) -> Tree:
        return jax.tree.map(lambda x: x[index], self.batch)

    def _folded(self, index: Index) -> Tree:
        """The further arguments, with keys folded by data shard and microbatch."""
        if not self.options.fold_keys:
            return self.args
        shard = (lax.axis_index(self.axes) if self.axes else 0) * self.options.microbatches + index
        return folded(self.args, self.program.roles_of_args, shard)

    def _like_folded(self) -> Tree:
        """The further arguments with the types that they have after folding."""

        def varied(x: Tree) -> Tree:
            return collectives.vary(x, self.axes) if is_key(x) or is_like_raw_key(x) else x

        return jax.tree.map(varied, self.args) if self.options.fold_keys and self.options.checked else self.args

    # Gradients.

    def _grad(
        self, shards: Sequence[jax.Array], diff: list[jax.Array], batch: Tree, index: Index
    ) -> tuple[list[jax.Array], Tree]:
        """(gradients of one microbatch's loss, in the dtype of their sums; its (loss, weight, aux))."""

        def loss_of(diff):
            outs = self._loss(shards, diff, batch, index)
            return outs[0] if self.scale is None else outs[0] * self.scale, outs

        grads, outs = jax.grad(loss_of, has_aux=True)(diff)
        return [g.astype(plan.sum_dtype) for g, plan in zip(grads, self._trained, strict=True)], outs

    def _accumulated(self) -> tuple[list[jax.Array], Tree]:
        """(gradients summed over microbatches, each microbatch's (loss, weight, aux), stacked)."""
        m, diff = self.options.microbatches, self._differentiated()
        if m == 1:
            grads, outs = self._grad(self.shards, diff, self._microbatch(0), 0)
            return grads, jax.tree.map(lambda x: x[None], outs)
        shapes, _ = jax.eval_shape(lambda: self._grad(self.shards, diff, self._microbatch(0), 0))

        def step(sums, indexed):
            index, batch = indexed
            shards, sums = self._bound_to(index, sums)
            grads, outs = self._grad(shards, diff, batch, index)
            each = zip(sums, grads, self._trained, strict=True)
            return [s + self._scattered_here(g, plan) for s, g, plan in each], outs

        return lax.scan(step, collectives.zeros(shapes), (jnp.arange(m), self.batch))

    def _bound_to(self, index: jax.Array, sums: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """The shards, tied to the microbatch, so that XLA does not gather them before the loop and keep them whole.

        On GPU they are also tied to the sums of the previous microbatches.
        """
        cut = [x for x, plan in zip(self.shards, self.plans, strict=True) if plan.held]
        if not cut:
            return self.shards, sums
        tied = [lax.optimization_barrier((x, index))[0] for x in cut]
        if platforms.here().holds_microbatches:
            held = backward.held_together([*tied, *sums])
            tied, sums = held[: len(cut)], held[len(cut) :]
        bound = iter(tied)
        return [next(bound) if plan.held else x for x, plan in zip(self.shards, self.plans, strict=True)], sums

    @part("the gradients' reduction, after the backward pass")
    def _finish(self, g: jax.Array, plan: LeafPlan, denominator: jax.Array | int) -> jax.Array:
        """The gradient averaged over all devices, as the inner optimizer takes it: cut as the state is."""
        g = self._total(g, plan)
        if self.scale is not None:
            g, denominator = g.astype(sum_dtype(g)), denominator * self.scale
        return (g / denominator).astype(wide(self.setup.config, plan.leaf.dtype))

    def _total(self, g: jax.Array, plan: LeafPlan) -> jax.Array:
        """The sum over all devices, cut as the state is."""
        leaf, is_reduced = plan.leaf, plan.reduce == "at use"
        if is_reduced and not plan.scattered:
            return g
        g = collectives.scatter_sum(g, beyond(leaf.dims, plan.scattered if is_reduced else ()))
        return collectives.total(g, [axis for axis in plan.summed if axis not in axes_of_dims(leaf.dims)])

    @part("the mean of the loss over devices")
    def _reduced(
        self, losses: jax.Array, weights: jax.Array, auxes: Tree
    ) -> tuple[Tree, list[jax.Array], jax.Array | int]:
        """((loss, averaged leaves of aux, weight) over the whole batch, leaves of aux with rows, the number that
        divides the sums of gradients)."""
        axes, weight = self.axes, jnp.ones(())
        denominator: jax.Array | int = self.options.microbatches * self.num_shards
        if self.options.weighted:
            weight = collectives.total(weights.sum(0), axes)
            denominator = jnp.where(weight == 0, jnp.ones_like(weight), weight)

        def average(x):
            if is_key(x):
                return collectives.of_first_device(x[-1], axes)
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return x[-1]
            wide = x.astype(sum_dtype(x))
            if self.options.weighted:  # without weight nothing counts, not even a NaN
                each = weights.reshape(-1, *(1,) * (x.ndim - 1))
                wide = jnp.where(each == 0, jnp.zeros_like(wide), wide * each)
            return (collectives.total(wide.sum(0), axes) / denominator).astype(x.dtype)

        loss = collectives.total(losses.sum(0), axes) / denominator
        pairs = [*zip(jax.tree.leaves(auxes), self.program.row_dims, strict=True)]
        averaged = [average(x) for x, row_dim in pairs if row_dim is None]
        rows = [self._in_order(jnp.moveaxis(x, row_dim + 1, 1)) for x, row_dim in pairs if row_dim is not None]
        return (loss, averaged, weight), rows, denominator

    def _in_order(self, x: jax.Array) -> jax.Array:
        """(microbatches, rows of each, ...) -> (rows, ...)."""
        if self.options.checked:  # what is the same along these axes may not leave with a type that says otherwise
            x = collectives.first_copy(x, self.options.cut.other_axes)
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def _scattered_here(self, g: jax.Array, plan: LeafPlan) -> jax.Array:
        """`g` behind a barrier; without it, XLA for TPU sums whole gradients in the loop and scatters the sum."""
        return lax.optimization_barrier(g) if plan.leaf.grads.dims else g
