"""One device's part of the loss and its gradients, inside `jax.shard_map`: microbatches, keys, reductions."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard import collectives
from jaxshard.base.axes import Dims, axes_of, axes_of_dims, beyond
from jaxshard.base.tree import Names, is_key, is_like_raw_key, sum_dtype
from jaxshard.base.types import DType, T, Tree, TreeDef
from jaxshard.layout.cutting import Leaf
from jaxshard.layout.layout import Layout
from jaxshard.loss import uses
from jaxshard.loss.loss_program import LossOptions, Program
from jaxshard.loss.unshard import AtFirstUse, Scale, Sharded, Value, lookup_dims
from jaxshard.mesh import platform_of
from jaxshard.optimizer.precision import like, wide
from jaxshard.optimizer.sharding import Setup
from jaxshard.platforms import backward
from jaxshard.programs.jaxprs import open_jaxpr
from jaxshard.programs.questions import varies_smoothly

Index: TypeAlias = jax.Array | int  # the index of a microbatch


@dataclasses.dataclass
class Notes:
    """What the trace of the loss finds out.

    Attributes:
      reasons: why each parameter is gathered at its first use (None: it is not).
      inside: whether its gradient is reduced within the backward pass, where the loss asks for it.
      looked_up: whether devices exchange rows of a parameter where the loss looks them up, and do nothing else with it.
      program: the traced loss.
    """

    reasons: list[str | None] = dataclasses.field(init=False)
    inside: list[bool] = dataclasses.field(init=False)
    looked_up: list[bool] = dataclasses.field(init=False)
    program: Program = dataclasses.field(init=False)


class DeviceLoss:
    """One device's part of the loss, inside shard_map; `shards` are its parts of the params, as they lie at rest."""

    def __init__(
        self,
        options: LossOptions,
        found: Layout,
        params: Tree,
        batch: Tree,
        args: tuple[Tree, ...],
        scale: Scale,
        notes: Notes,
    ):
        self.options, self.setup, self.leaves, self.args = options, options.setup, found.params, args
        self.scale = scale
        self.shards = jax.tree.leaves(params)
        if options.checked:
            self.shards = [collectives.vary(x, self.setup.split_axes) for x in self.shards]
        m = options.microbatches
        self.batch = jax.tree.map(lambda x: x.reshape(m, x.shape[0] // m, *x.shape[1:]), batch)
        self.held = [leaf.params.dims for leaf in self.leaves]
        if options.differentiate and self.setup.config.regather == "step":
            self.shards = [collectives.gather(x, dims) for x, dims in zip(self.shards, self.held, strict=True)]
            self.held = [()] * len(self.leaves)
        self.scattered = [
            held if leaf.frozen else leaf.grads.dims for leaf, held in zip(self.leaves, self.held, strict=True)
        ]
        self.inside = [bool(dims) for dims in self.scattered]
        self.program = self._trace(jax.tree.structure(params))
        self._check_own_axes()
        self._check_frozen()
        jaxpr, once = self.program.jaxpr, not self.setup.config.cuts.accumulators
        if once and self._reduces_once():
            self.inside = [self._is_large(leaf) and not leaf.frozen for leaf in self.leaves]
            self.scattered = [leaf.dims for leaf in self.leaves]
        tables = [lookup_dims(*each) for each in zip(self.scattered, self.held, strict=True)]
        self.reasons = [
            uses.why_not_lazy(jaxpr, i, dims, looked_up_by=table, once=once and not self.leaves[i].frozen)
            for i, (dims, table) in enumerate(zip(self.scattered, tables, strict=True))
        ]
        notes.reasons, notes.inside, notes.program = self.reasons, self.inside, self.program
        inputs = open_jaxpr(jaxpr)
        triples = zip(inputs.invars, tables, self.inside, strict=False)  # further inputs are no parameters
        notes.looked_up = [inside and uses.only_looked_up(inputs, v, table) for v, table, inside in triples]

    def run(self) -> Tree:
        """Returns ((loss, averaged leaves of aux, weight), leaves of aux with rows, gradients of this device's shards).

        The rows of a leaf are its first dim here.
        """
        if not self.options.differentiate:
            outs = self._loss(self.shards, self._differentiated(), self._microbatch(0), 0)
            value, rows, _ = self._reduced(*jax.tree.map(lambda x: x[None], outs))
            return value, rows, ()
        grads, outs = self._accumulated()
        value, rows, denominator = self._reduced(*outs)
        each = zip(self._trained(self.leaves), self._trained(self.inside), self._trained(self.scattered), strict=True)
        return value, rows, tuple(self._finish(g, *one, denominator) for g, one in zip(grads, each, strict=True))

    def _trained(self, values: Sequence[T]) -> list[T]:
        """Of values, one for each parameter, those for parameters that are not frozen."""
        return [x for x, leaf in zip(values, self.leaves, strict=True) if not leaf.frozen]

    # The loss.

    def _trace(self, treedef: TreeDef) -> Program:
        whole = collectives.shapes_of(
            lambda: [_without_gradient(x) for x in self._values(self.shards, self._differentiated())]
        )
        batch, args = collectives.shapes_of(lambda: (self._microbatch(0), self._like_folded()))
        frozen = [leaf.frozen for leaf in self.leaves]
        return Program.trace(self.options, treedef, whole, batch, args, self.scale, frozen)

    def _check_own_axes(self) -> None:
        """Raises a ValueError if rows meet a parameter that `specs` cut over their own axis, and do not move along it.

        Each device would train on the parts of such a parameter that its own rows meet.
        """
        for i, leaf in enumerate(self.leaves):
            for axis in sorted(axes_of(leaf.spec) & {*self.setup.split_axes}):
                wrt = [j == i for j in range(len(open_jaxpr(self.program.jaxpr).invars))]
                if varies_smoothly(self.program.jaxpr, wrt, but_along=axis)[0]:
                    raise ValueError(
                        f"specs: {leaf.path} has {leaf.spec}, and {axis!r} splits the batch, too: what the loss makes "
                        "of it must go along that axis (jaxshard.tensor.expert_parallel sends it; a penalty needs "
                        f"jax.lax.psum(x, {axis!r})). Or leave {axis!r} out of specs: the strategy cuts over it itself"
                    )

    def _check_frozen(self) -> None:
        """Raises a ValueError for frozen params of which a schedule with a backward pass of its own would fail."""
        if not self.options.differentiate or not uses.defers(self.program.jaxpr):
            return
        for leaf, held in zip(self.leaves, self.held, strict=True):
            if leaf.frozen and (held or leaf.dtype.itemsize < 2 or not jnp.issubdtype(leaf.dtype, jnp.inexact)):
                raise ValueError(
                    f"frozen: {leaf.path} ({leaf.dtype}{', cut' if held else ''}) cannot be in a pipeline whose "
                    'schedule has a backward pass of its own: give jaxshard.pipeline(schedule="gpipe"), or a base in '
                    "bfloat16 or float32 that ZeRO does not cut (zero=2)"
                )

    def _reduces_once(self) -> bool:
        """Whether gradients that are summed whole are reduced once all the same where autodiff makes them.

        They are if the step has one microbatch, and no pipeline, which makes several.
        """
        return self.options.differentiate and self.options.microbatches == 1 and not uses.defers(self.program.jaxpr)

    def _is_large(self, leaf: Leaf) -> bool:
        """Whether a gradient is worth a reduction of its own."""
        return bool(self._summed_over(leaf)) and math.prod(leaf.shape) >= max(self.setup.config.min_shard_size, 1)

    def _summed_over(self, leaf: Leaf) -> Names:
        """The axes over which the leaf's gradient is summed: those of the batch, but for those that its spec names."""
        own = axes_of(leaf.spec)
        return tuple(axis for axis in self.setup.split_axes if axis not in own)

    def _differentiated(self) -> list[jax.Array]:
        """The arrays that the loss is differentiated by: zeros in place of what is reduced inside, else the leaves."""
        each = zip(self.shards, self.leaves, self.held, self.inside, self.scattered, strict=True)
        return [
            self._stand_in(x, leaf, held, dims) if inside else x
            for x, leaf, held, inside, dims in each
            if not leaf.frozen
        ]

    def _stand_in(self, x: jax.Array, leaf: Leaf, held: Dims, dims: Dims) -> jax.Array:
        shape = list(x.shape)
        for dim, axes in beyond(dims, held):
            shape[dim] //= math.prod(self.setup.sizes[axis] for axis in axes)
        summed = () if dims else self._summed_over(leaf)  # where its gradient is made, with that type
        axes = collectives.varying(x).difference(summed)
        return collectives.vary(jnp.zeros(shape, self._sum_dtype(leaf)), tuple(axes))

    def _sum_dtype(self, leaf: Leaf) -> DType:
        return dtype_of_sums(self.setup, leaf)

    def _values(self, shards: Sequence[jax.Array], diff: Sequence[jax.Array]) -> list[Value]:
        """The loss's parameters, cut ones not yet gathered; with one data device, exactly as the user gave them."""
        differentiate, alone = self.options.differentiate, not self.setup.split_axes

        rest = iter(diff)

        def value(x: jax.Array, leaf: Leaf, held: Dims, inside: bool, dims: Dims) -> Value:
            if leaf.frozen:
                return Sharded(x, None, dims, held) if held else x
            d = next(rest)
            if not inside:
                return Sharded(None, d, (), ()) if differentiate and not alone else d
            summed = () if dims else self._summed_over(leaf)
            return Sharded(x, d if differentiate else None, dims, held, summed)

        each = zip(shards, self.leaves, self.held, self.inside, self.scattered, strict=True)
        return [value(*one) for one in each]

    def _loss(self, shards: Sequence[jax.Array], diff: Sequence[jax.Array], batch: Tree, index: Index) -> Tree:
        """(loss, weight, aux) of one microbatch."""
        pairs = zip(self._values(shards, diff), self.reasons, strict=True)
        values = [x if reason is None else _at_first_use(x) for x, reason in pairs]
        return jax.tree.map(self._varied, self.program.run(values, batch, self._folded(index), self.scale))

    def _varied(self, x: jax.Array) -> jax.Array:
        """`x` with a type that varies over the batch axes.

        If the user averaged it over devices already, the sum over devices then counts it as one of N equal means.
        """
        averaged = self.options.checked and jnp.issubdtype(x.dtype, jnp.inexact)
        return collectives.vary(x, self.setup.split_axes) if averaged else x

    def _microbatch(self, index: Index) -> Tree:
        return jax.tree.map(lambda x: x[index], self.batch)

    def _folded(self, index: Index) -> Tree:
        """The further arguments, with keys folded by data shard and microbatch."""
        if not self.options.fold_keys:
            return self.args
        axes = self.setup.split_axes
        shard = (lax.axis_index(axes) if axes else 0) * self.options.microbatches + index

        def fold(x: Tree, role: str) -> Tree:
            if role == "other":
                return x
            keys = x if role == "key" else jax.random.wrap_key_data(x)
            folded = jax.vmap(lambda key: jax.random.fold_in(key, shard))(keys.reshape(-1)).reshape(keys.shape)
            return folded if role == "key" else jax.random.key_data(folded)

        leaves, treedef = jax.tree.flatten(self.args)
        roles = self.program.roles_of_args
        return jax.tree.unflatten(treedef, [fold(x, role) for x, role in zip(leaves, roles, strict=True)])

    def _like_folded(self) -> Tree:
        """The further arguments with the types that folding gives."""

        def varied(x: Tree) -> Tree:
            return collectives.vary(x, self.setup.split_axes) if is_key(x) or is_like_raw_key(x) else x

        return jax.tree.map(varied, self.args) if self.options.fold_keys and self.options.checked else self.args

    # Gradients.

    def _grad(
        self, shards: Sequence[jax.Array], diff: list[jax.Array], batch: Tree, index: Index
    ) -> tuple[list[jax.Array], Tree]:
        """Gradients of one microbatch's loss, in the dtype they are summed in, and its (loss, weight, aux)."""

        def loss_of(diff):
            outs = self._loss(shards, diff, batch, index)
            return outs[0] if self.scale is None else outs[0] * self.scale, outs

        grads, outs = jax.grad(loss_of, has_aux=True)(diff)
        leaves = self._trained(self.leaves)
        return [g.astype(self._sum_dtype(leaf)) for g, leaf in zip(grads, leaves, strict=True)], outs

    def _accumulated(self) -> tuple[list[jax.Array], Tree]:
        """Gradients summed over microbatches, and each microbatch's (loss, weight, aux), stacked."""
        m, diff = self.options.microbatches, self._differentiated()
        if m == 1:
            grads, outs = self._grad(self.shards, diff, self._microbatch(0), 0)
            return grads, jax.tree.map(lambda x: x[None], outs)
        shapes, _ = jax.eval_shape(lambda: self._grad(self.shards, diff, self._microbatch(0), 0))

        def step(sums, indexed):
            index, batch = indexed
            shards, sums = self._bound_to(index, sums)
            grads, outs = self._grad(shards, diff, batch, index)
            each = zip(sums, grads, self._trained(self.leaves), strict=True)
            return [s + self._scattered_here(g, leaf) for s, g, leaf in each], outs

        return lax.scan(step, collectives.zeros(shapes), (jnp.arange(m), self.batch))

    def _scattered_here(self, g: jax.Array, leaf: Leaf) -> jax.Array:
        """`g` behind a barrier; without it, XLA for TPU sums whole gradients in the loop and scatters the sum."""
        return lax.optimization_barrier(g) if leaf.grads.dims else g

    def _bound_to(self, index: jax.Array, sums: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """The shards, tied to the microbatch, so that XLA does not gather them before the loop and keep them whole.

        On GPU they are tied to the sums of the microbatches before: XLA would gather what a microbatch needs first (and
        its output layer) beside the microbatch before, at 224 MB of 1208 MB (`benchmarks/NOTES.md`).
        """
        cut = [x for x, dims in zip(self.shards, self.held, strict=True) if dims]
        if not cut:
            return self.shards, sums
        tied = [lax.optimization_barrier((x, index))[0] for x in cut]
        if backward.is_ordered() and not backward.on_tpu():
            held = backward.held_together([*tied, *sums])
            tied, sums = held[: len(cut)], held[len(cut) :]
        bound = iter(tied)
        return [next(bound) if dims else x for x, dims in zip(self.shards, self.held, strict=True)], sums

    def _finish(
        self, g: jax.Array, leaf: Leaf, inside: bool, scattered: Dims, denominator: jax.Array | int
    ) -> jax.Array:
        """The gradient averaged over all devices, as the inner optimizer takes it: cut as the state is."""
        if not inside or scattered:
            g = collectives.scatter_sum(g, beyond(leaf.dims, scattered if inside else ()))
            g = collectives.total(g, [a for a in self._summed_over(leaf) if a not in axes_of_dims(leaf.dims)])
        if self.scale is not None:
            g, denominator = g.astype(sum_dtype(g)), denominator * self.scale
        return (g / denominator).astype(wide(self.setup.config, leaf.dtype))

    def _reduced(
        self, losses: jax.Array, weights: jax.Array, auxes: Tree
    ) -> tuple[Tree, list[jax.Array], jax.Array | int]:
        """((loss, averaged leaves of aux, weight) over the whole batch, leaves of aux with rows, the number that
        divides the sums of gradients)."""
        axes = self.setup.split_axes
        denominator: jax.Array | int = self.options.microbatches * self.setup.num_batch_shards
        weight = jnp.ones(())
        if self.options.weighted:
            weight = collectives.total(weights.sum(0), axes)
            denominator = jnp.where(weight == 0, jnp.ones_like(weight), weight)

        def average(x):
            if is_key(x):
                return _of_first_device(x[-1], axes)
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return x[-1]
            wide = x.astype(sum_dtype(x))
            if self.options.weighted:  # what has no weight counts nothing, not even a NaN
                each = weights.reshape(-1, *(1,) * (x.ndim - 1))
                wide = jnp.where(each == 0, jnp.zeros_like(wide), wide * each)
            return (collectives.total(wide.sum(0), axes) / denominator).astype(x.dtype)

        loss = collectives.total(losses.sum(0), axes) / denominator
        pairs = list(zip(jax.tree.leaves(auxes), self.program.row_dims, strict=True))
        averaged = [average(x) for x, row_dim in pairs if row_dim is None]
        rows = [_one_after_the_other(x, row_dim) for x, row_dim in pairs if row_dim is not None]
        return (loss, averaged, weight), rows, denominator


def dtype_of_sums(setup: Setup, leaf: Leaf) -> DType:
    """The dtype in which the gradients of a parameter are added up over microbatches and devices.

    XLA for CPU ends the program at a sum of 2-byte floats over some axes while other axes are left to it.
    """
    given = like(setup.config.reduce_dtype, leaf.dtype)
    aborts = setup.config.auto_axes and platform_of(setup.mesh) == "cpu"
    return jnp.promote_types(given, jnp.float32) if aborts else given


def _one_after_the_other(x: jax.Array, row_dim: int) -> jax.Array:
    """The rows of all microbatches, of shape (microbatches, ...), as the first dim."""
    x = jnp.moveaxis(x, row_dim + 1, 1)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _of_first_device(keys: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The keys that the first device over these axes has, on all devices."""
    if not axes:
        return keys
    data = jax.random.key_data(keys)
    mine = jnp.where(lax.axis_index(axes) == 0, data, jnp.zeros_like(data))
    return jax.random.wrap_key_data(collectives.total(mine, axes), impl=jax.random.key_impl(keys))


def _at_the_start(x: Value) -> jax.Array:
    """The whole parameter, gathered now, before the loss runs."""
    if isinstance(x, jax.Array):
        return x
    return x.stand_in if isinstance(x, Sharded) and x.local is None and x.stand_in is not None else x.whole()


def _without_gradient(x: Value) -> jax.Array:
    """As `_at_the_start`, where no gradient is asked for: less to trace."""
    if isinstance(x, Sharded) and x.local is not None:
        return dataclasses.replace(x, stand_in=None).whole()
    return _at_the_start(x)


def _at_first_use(x: Value) -> Value:
    """The whole parameter, gathered where the loss first uses it; one that is not cut is whole at once."""
    return AtFirstUse(x) if isinstance(x, Sharded) and x.local is not None else _at_the_start(x)
