"""`value_and_grad` and `evaluate`: the boundary of differentiation, microbatches, and the reduction of gradients."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import check_alive, is_key, is_traced, named_leaves, path_of, sum_dtype
from jaxshard.core import collectives, layout, unshard
from jaxshard.core.layout import Layout
from jaxshard.core.loss_program import Options, Program
from jaxshard.core.optimizer import ShardedOptimizer, engine_of
from jaxshard.core.precision import like, wide
from jaxshard.core.sharding import Engine
from jaxshard.core.specs import without


def value_and_grad(
    loss_fn: Callable[..., Any],
    opt: ShardedOptimizer,
    *,
    has_aux: bool = False,
    microbatches: int = 1,
    weighted: bool = False,
    fold_keys: bool = True,
) -> "LossFunction":
    """`jax.value_and_grad` over the mesh: the loss and gradients of the whole batch, reduced once, left sharded.

    Args:
      loss_fn: `(params, batch, *args) -> loss`, pure, written for one device's share of the batch: params come whole,
        the batch's leaves as (rows of this device and microbatch, ...). It returns the mean loss over those rows.
      opt: the optimizer; says how params, batch and gradients lie.
      has_aux: `loss_fn` returns `(loss, aux)`. Floating leaves of aux are averaged over the batch, others must not
        depend on it.
      microbatches: parts into which each device's rows are cut; their gradients are accumulated.
      weighted: `loss_fn` returns `(loss_sum, weight)` in place of the mean; the result is sum/weight over all devices
        and microbatches. The weight is not differentiated.
      fold_keys: typed PRNG keys among `args` are folded with the data shard's and the microbatch's index.

    Returns:
      `f(params, batch, *args) -> (loss, grads)` or `((loss, aux), grads)`; loss a replicated scalar, grads global
      arrays like the params, cut as `opt.shardings(params).grads`. `f.layout(params, batch, *args)` says where each
      parameter is gathered, and why.

    Raises:
      TypeError: `opt` is not a `ShardedOptimizer`; the loss is not a floating scalar; params that are not floating.
      ValueError: a batch that does not divide; params that were donated.
    """
    engine = engine_of(opt, "value_and_grad")
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"value_and_grad: microbatches {microbatches!r} must be a whole number, 1 or more")
    return LossFunction(Options(loss_fn, engine, has_aux, microbatches, weighted, fold_keys, differentiate=True))


def evaluate(
    loss_fn: Callable[..., Any], opt: ShardedOptimizer, *, has_aux: bool = False, weighted: bool = False
) -> "LossFunction":
    """The loss alone, params gathered as in training: `f(params, batch, *args) -> loss` or `(loss, aux)`.

    The arguments are those of `value_and_grad`.
    """
    engine = engine_of(opt, "evaluate")
    return LossFunction(Options(loss_fn, engine, has_aux, 1, weighted, fold_keys=True, differentiate=False))


class LossFunction:
    """What `value_and_grad` and `evaluate` return: called with `(params, batch, *args)`, inside or outside `jit`."""

    def __init__(self, options: Options):
        self.options = options
        self._jitted = jax.jit(self._traced, compiler_options=options.compiler_options)

    def __call__(self, params: Any, batch: Any, *args: Any) -> Any:
        engine = self.options.engine
        found = layout.layout_params(engine.config, params, engine.sizes)
        check_batch(batch, self.options)
        if is_traced(params, batch, args):
            return self._traced(params, batch, *args)
        check_alive("params", params)
        check_alive("batch", batch)
        check_alive("argument", args)
        check_global(batch)
        params = collectives.at(params, engine.mesh, engine.rest(found, params))
        batch = collectives.at(batch, engine.mesh, jax.tree.map(lambda _: P(engine.batch_axes), batch))
        return self._jitted(params, batch, *engine.within_reach(args))

    def layout(self, params: Any, batch: Any, *args: Any) -> Layout:
        """The layout, with where each parameter is gathered and why; traces the loss, compiles nothing.

        Args: as in a call; `ShapeDtypeStruct`s do.
        """
        engine = self.options.engine
        found = engine.layout(params)
        reasons: list[str | None] = []
        jax.eval_shape(lambda *a: self._traced(*a, reasons=reasons), params, batch, *args)
        gathers = {
            leaf.names: _how_gathered(leaf, reason, engine) for leaf, reason in zip(found.params, reasons, strict=True)
        }
        return dataclasses.replace(found, gathers=gathers)

    def _traced(self, params: Any, batch: Any, *args: Any, reasons: list[str | None] | None = None) -> Any:
        found = self.measure(params, batch, args, reasons=reasons)
        value = (found.loss, found.aux) if self.options.has_aux else found.loss
        return (value, found.grads) if self.options.differentiate else value

    def measure(
        self,
        params: Any,
        batch: Any,
        args: tuple[Any, ...],
        *,
        scale: Any = None,
        reasons: list[str | None] | None = None,
    ) -> "Measured":
        """Loss, aux, weight and gradients, inside a trace.

        With `scale`, a scalar, the loss is multiplied by it for the backward pass, and the reduced gradients divided.
        """
        engine, options = self.options.engine, self.options
        found = layout.layout_params(engine.config, params, engine.sizes)
        cut = tuple(found.spec(leaf, cut=engine.config.cuts.state) for leaf in found.params)
        alone = tuple(axis for axis, size in engine.sizes.items() if size == 1)  # in no type, so nothing sums over them
        specs = jax.tree.map(lambda spec: without(spec, alone), (engine.rest(found, params), cut, P(engine.batch_axes)))
        rest, cut, rows = specs
        params = collectives.at(params, engine.mesh, rest)
        batch = collectives.at(batch, engine.mesh, jax.tree.map(lambda _: rows, batch))
        auto = engine.config.auto_axes
        held, left = jax.tree.map(lambda spec: without(spec, auto), (rest, cut))

        def body(params, batch, args, scale):
            return _Device(options, found, params, batch, args, scale, reasons).run()

        whole, grads = jax.shard_map(
            body,
            mesh=engine.mesh,
            in_specs=(held, rows, P(), P()),
            out_specs=(P(), left if options.differentiate else P()),
            axis_names=set(engine.mesh.axis_names) - set(auto),
            check_vma=options.checked,
        )(params, batch, args, scale)
        if options.differentiate:
            grads = collectives.at(grads, engine.mesh, cut) if auto else grads
            grads = jax.tree.unflatten(jax.tree.structure(params), grads)
        return Measured(*whole, grads=grads)


class Measured(NamedTuple):
    """Over the whole batch: the loss, aux, weight (1 unless weighted), and the gradients."""

    loss: Any
    aux: Any
    weight: Any
    grads: Any


def _how_gathered(leaf: layout.Leaf, reason: str | None, engine: Engine) -> str:
    cuts = engine.config.cuts
    if not leaf.dims or not cuts.accumulators:
        return "never moved but for its gradient" if not cuts.params or not leaf.dims else ""
    what = "gathered" if cuts.params else "its gradient scattered"
    return f"{what} where unshard is" if reason is None else f"{what} at the start: {reason}"


def check_batch(batch: Any, options: Options) -> None:
    shards, m = options.engine.num_batch_shards, options.microbatches
    leaves = named_leaves(batch)
    if not leaves:
        raise ValueError("batch: it has no leaves; give at least one array of (rows, ...)")
    for names, leaf in leaves:
        rows = np.shape(leaf)[:1]
        if not rows or rows[0] % (shards * m) or rows[0] == 0:
            raise ValueError(
                f"batch: {path_of(names)} has shape {np.shape(leaf)}; its first dim must be divisible by "
                f"{shards * m} = {shards} data shards x {m} microbatches: give a multiple of {shards * m} rows, or "
                "change microbatches"
            )


def check_global(batch: Any) -> None:
    """With several processes, JAX would take one process's rows for the whole batch, and mix them silently."""
    for names, leaf in named_leaves(batch) if jax.process_count() > 1 else ():
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            raise ValueError(
                f"batch: {path_of(names)} holds this process's rows only; make global arrays with "
                "jaxshard.shard_batch(batch, opt)"
            )


class _Device:
    """One device's part of the work, inside shard_map. `shards` are its params as they lie at rest."""

    def __init__(self, options: Options, found: Layout, params: Any, batch: Any, args: Any, scale: Any, reasons: Any):
        self.options, self.engine, self.leaves, self.args = options, options.engine, found.params, args
        self.scale = scale
        self.shards = jax.tree.leaves(params)
        if options.checked:
            self.shards = [collectives.vary(x, self.engine.split_axes) for x in self.shards]
        m = options.microbatches
        self.batch = jax.tree.map(lambda x: x.reshape(m, x.shape[0] // m, *x.shape[1:]), batch)
        self.program = self._trace(jax.tree.structure(params))
        self.reasons = [unshard.why_not_lazy(self.program.jaxpr, i, leaf.dims) for i, leaf in enumerate(self.leaves)]
        if reasons is not None:
            reasons[:] = self.reasons

    def run(self) -> Any:
        """((loss, aux, weight), gradients of this device's shards)."""
        if not self.options.differentiate:
            outs = self._loss(self.shards, self._differentiated(), self._microbatch(0), 0)
            return self._reduced(*jax.tree.map(lambda x: x[None], outs))[0], ()
        grads, outs = self._accumulated()
        value, denominator = self._reduced(*outs)
        return value, tuple(self._finish(g, leaf, denominator) for g, leaf in zip(grads, self.leaves, strict=True))

    # The loss.

    def _trace(self, treedef: Any) -> Program:
        whole = collectives.shapes_of(lambda: [_whole(x) for x in self._values(self.shards, self._differentiated())])
        batch, args = collectives.shapes_of(lambda: (self._microbatch(0), self._folded(0)))
        return Program.trace(self.options, treedef, whole, batch, args, self.scale)

    def _is_cut(self, leaf: layout.Leaf) -> bool:
        """Whether its gradient is scattered where the leaf is gathered, microbatch by microbatch."""
        return bool(leaf.dims) and self.engine.config.cuts.accumulators

    def _differentiated(self) -> list[jax.Array]:
        """What gradients are taken of: whole leaves themselves, and zeros standing in for the shards of cut ones."""
        pairs = zip(self.shards, self.leaves, strict=True)
        return [self._stand_in(x, leaf) if self._is_cut(leaf) else x for x, leaf in pairs]

    def _stand_in(self, x: jax.Array, leaf: layout.Leaf) -> jax.Array:
        shape = list(x.shape)
        for dim, axes in () if self.engine.config.cuts.params else leaf.dims:
            shape[dim] //= math.prod(self.engine.sizes[axis] for axis in axes)
        return collectives.vary(jnp.zeros(shape, self._sum_dtype(leaf)), tuple(collectives.varying(x)))

    def _sum_dtype(self, leaf: layout.Leaf) -> Any:
        return like(self.engine.config.reduce_dtype, leaf.dtype)

    def _values(self, shards: Sequence[jax.Array], diff: Sequence[jax.Array]) -> list[Any]:
        """The loss's parameters, cut ones not yet gathered; alone, as the user gave them, to the last bit."""
        is_shard, differentiate = self.engine.config.cuts.params, self.options.differentiate
        alone = not self.engine.split_axes

        def value(x: jax.Array, d: jax.Array, leaf: layout.Leaf) -> Any:
            if not self._is_cut(leaf):
                return unshard.Sharded(None, d, (), False) if differentiate and not alone else d
            return unshard.Sharded(x, d if differentiate else None, leaf.dims, is_shard)

        return [value(*each) for each in zip(shards, diff, self.leaves, strict=True)]

    def _loss(self, shards: Sequence[jax.Array], diff: Sequence[jax.Array], batch: Any, index: Any) -> Any:
        """(loss, weight, aux) of one microbatch."""
        pairs = zip(self._values(shards, diff), self.reasons, strict=True)
        values = [x if reason is None else _whole(x) for x, reason in pairs]
        return jax.tree.map(self._varied, self.program.run(values, batch, self._folded(index), self.scale))

    def _varied(self, x: jax.Array) -> jax.Array:
        """A loss that the user already averaged over devices is one mean among equals; its type must say so."""
        averaged = self.options.checked and jnp.issubdtype(x.dtype, jnp.inexact)
        return collectives.vary(x, self.engine.split_axes) if averaged else x

    def _microbatch(self, index: Any) -> Any:
        return jax.tree.map(lambda x: x[index], self.batch)

    def _folded(self, index: Any) -> Any:
        """The further arguments, with keys folded by data shard and microbatch."""
        if not self.options.fold_keys:
            return self.args
        axes = self.engine.split_axes
        shard = (lax.axis_index(axes) if axes else 0) * self.options.microbatches + index

        def fold(x):
            if not is_key(x):
                return x
            return jax.vmap(lambda key: jax.random.fold_in(key, shard))(x.reshape(-1)).reshape(x.shape)

        return jax.tree.map(fold, self.args)

    # Gradients.

    def _grad(self, shards: Sequence[jax.Array], diff: list[jax.Array], batch: Any, index: Any) -> tuple[Any, Any]:
        """Gradients of one microbatch's loss, in the dtype they are summed in, and its (loss, weight, aux)."""

        def loss_of(diff):
            outs = self._loss(shards, diff, batch, index)
            return outs[0] if self.scale is None else outs[0] * self.scale, outs

        grads, outs = jax.grad(loss_of, has_aux=True)(diff)
        return [g.astype(self._sum_dtype(leaf)) for g, leaf in zip(grads, self.leaves, strict=True)], outs

    def _accumulated(self) -> tuple[list[jax.Array], Any]:
        """Gradients summed over microbatches, and each microbatch's (loss, weight, aux), stacked."""
        m, diff = self.options.microbatches, self._differentiated()
        if m == 1:
            grads, outs = self._grad(self.shards, diff, self._microbatch(0), 0)
            return grads, jax.tree.map(lambda x: x[None], outs)
        shapes, _ = jax.eval_shape(lambda: self._grad(self.shards, diff, self._microbatch(0), 0))

        def step(sums, indexed):
            index, batch = indexed
            grads, outs = self._grad(self._bound_to(index), diff, batch, index)
            return [
                s + self._scattered_here(g, leaf) for s, g, leaf in zip(sums, grads, self.leaves, strict=True)
            ], outs

        return lax.scan(step, collectives.zeros(shapes), (jnp.arange(m), self.batch))

    def _scattered_here(self, g: jax.Array, leaf: layout.Leaf) -> jax.Array:
        """The same; XLA for TPU else sums whole gradients over the loop, and scatters them after it."""
        return lax.optimization_barrier(g) if self._is_cut(leaf) else g

    def _bound_to(self, index: jax.Array) -> list[jax.Array]:
        """The shards, tied to the microbatch, so that XLA does not gather them before the loop and keep them whole."""
        if not self.engine.config.cuts.params:
            return self.shards
        pairs = zip(self.shards, self.leaves, strict=True)
        return [lax.optimization_barrier((x, index))[0] if leaf.dims else x for x, leaf in pairs]

    def _finish(self, g: jax.Array, leaf: layout.Leaf, denominator: Any) -> jax.Array:
        """The average over all devices, as the inner optimizer takes it: cut, if the state is."""
        cuts, done = self.engine.config.cuts, set()
        if leaf.dims and cuts.state:
            done = {axis for _, axes in leaf.dims for axis in axes}
            g = g if cuts.accumulators else collectives.scatter_sum(g, leaf.dims)
        g = collectives.total(g, [axis for axis in self.engine.split_axes if axis not in done])
        if self.scale is not None:
            g, denominator = g.astype(sum_dtype(g)), denominator * self.scale
        return (g / denominator).astype(wide(self.engine.config, leaf.dtype))

    def _reduced(self, losses: Any, weights: Any, auxes: Any) -> tuple[Any, Any]:
        """((loss, aux, weight) over the whole batch, what gradients are divided by)."""
        axes = self.engine.split_axes
        denominator: Any = self.options.microbatches * self.engine.num_batch_shards
        weight = jnp.ones(())
        if self.options.weighted:
            weight = collectives.total(weights.sum(0), axes)
            denominator = jnp.where(weight == 0, jnp.ones_like(weight), weight)

        def average(x):
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return x[-1]
            wide = x.astype(sum_dtype(x))
            if self.options.weighted:
                wide = wide * weights.reshape(-1, *(1,) * (x.ndim - 1))
            return (collectives.total(wide.sum(0), axes) / denominator).astype(x.dtype)

        loss = collectives.total(losses.sum(0), axes) / denominator
        return (loss, jax.tree.map(average, auxes), weight), denominator


def _whole(x: Any) -> Any:
    """At the start."""
    if not isinstance(x, unshard.Sharded):
        return x
    return x.stand_in if x.local is None else x.whole()
