"""The plan of each parameter in a step's loss: where it is gathered, and where its gradient is reduced.

Shards go in. Microbatches are a scan, and the sums are divided once. Pure functions make the plans from the layout, the
options and the traced loss, before the loss is evaluated.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import jax.numpy as jnp

from jaxshard import platforms
from jaxshard.base.types import Dims, DType, Equation, Jaxpr, Names, OpenJaxpr, Var, axes_in, axes_of, like
from jaxshard.layout.cutting import Leaf
from jaxshard.loss.arguments import LossOptions, PartsError
from jaxshard.loss.params import uses
from jaxshard.loss.params.unshard import MARK, deferred, lookup_dims
from jaxshard.optimizer.sharding import Setup
from jaxshard.programs.jaxprs import axes_named, inner_jaxpr, open_jaxpr, scan_split, subprograms
from jaxshard.programs.primitives import CASTS, CONVERT, INLINED, MOVES, POINTWISE, REMAT, SCAN, WHOLE
from jaxshard.programs.questions import varies_smoothly
from jaxshard.programs.source import line_of


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """The plan of one parameter in the loss, from rest to a reduced gradient.

    Attributes:
      leaf: its shape, and where it lives.
      gather: where it is gathered: "never" (it is replicated at rest), at the "start" of the step, or at each "use".
      reduce: where its gradient is reduced: "none" (no gradient), "after" the backward pass, or "at use", within it.
      scattered: the dims along which a microbatch's gradient is scattered, and the sum over microbatches is cut.
      summed: the axes over which its gradient is summed: those that split the batch, except those in its spec.
      sum_dtype: the dtype of the sums over microbatches, and of those over devices, but for `reduced_in`.
      reason: why it is gathered at its first use; None: only marks (`unshard`) and lookups use it.
      looks_up: the loss only looks rows up in it, which devices exchange.
      computed_in: the one narrower dtype to which the loss casts it wherever it uses it, and in which it is gathered.
      reduced_in: the dtype in which its gradient is reduced, if it is reduced at its use; None: `sum_dtype`.
      regathers: the backward pass gathers it again, instead of keeping it.
    """

    leaf: Leaf
    gather: Literal["never", "start", "use"]
    reduce: Literal["none", "after", "at use"]
    scattered: Dims
    summed: Names
    sum_dtype: DType
    reason: str | None = None
    looks_up: bool = False
    computed_in: DType | None = None
    reduced_in: DType | None = None
    regathers: bool = False

    @property
    def held(self) -> Dims:
        """The dims along which it is still cut when the loss begins."""
        return self.leaf.params.dims if self.gather == "use" else ()

    @property
    def gathered_in(self) -> DType:
        """The dtype in which it is gathered."""
        return self.leaf.dtype if self.computed_in is None else self.computed_in

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole parameter."""
        return math.prod(self.leaf.shape) * self.leaf.dtype.itemsize

    @property
    def num_bytes_gathered(self) -> int:
        """The bytes of the whole parameter, as it is gathered."""
        return math.prod(self.leaf.shape) * jnp.dtype(self.gathered_in).itemsize

    @property
    def is_moved(self) -> bool:
        """Whether a collective gathers it, or reduces its gradient, where the loss uses it."""
        return self.gather == "use" or self.reduce == "at use"

    @property
    def table_dims(self) -> Dims:
        """The dims along which a table is cut for lookups that exchange rows; () if they cannot."""
        return lookup_dims(self.scattered, self.held)

    def cut_over(self, axes: Sequence[str]) -> dict[str, int]:
        """Those of these axes by which the user's rules cut it, each with the dim: it stays so in the loss."""
        return {axis: dim for dim, entry in enumerate(self.leaf.spec) for axis in axes_in(entry) if axis in axes}

    def __str__(self) -> str:
        gathered = f"gathered in {self.computed_in}" if self.computed_in is not None else "gathered"
        if self.gather == "start":
            return f"{gathered} once per step"
        if self.leaf.frozen:
            return f"{gathered} {self._where}" if self.gather == "use" else "not gathered"
        if not self.is_moved:
            return (
                "not gathered; its gradient is reduced after the backward pass"
                if self.reduce == "after"
                else "not gathered"
            )
        if self.looks_up:
            exchanged = "its rows exchanged where the loss looks them up"
            return exchanged if self.gather == "use" else "its rows' gradients exchanged"
        gradient = "its gradient scattered" if self.leaf.dims else "its gradient summed"
        gradient += f" in {self.reduced_in}" if self.reduced_in is not None else ""
        return f"{gathered if self.gather == 'use' else gradient} {self._where}"

    @property
    def _where(self) -> str:
        where = "at unshard" if self.reason is None else f"at its first use: {self.reason}"
        return f"{where}; for the backward pass again" if self.regathers else where


def before_the_trace(leaves: Sequence[Leaf], options: LossOptions) -> tuple[LeafPlan, ...]:
    """The plans as far as the layout and the options decide them."""
    return tuple(_before_the_trace(leaf, options) for leaf in leaves)


def _before_the_trace(leaf: Leaf, options: LossOptions) -> LeafPlan:
    at_once = options.differentiate and options.setup.config.regather == "step"
    gather = ("start" if at_once else "use") if leaf.params.dims else "never"
    is_differentiated = options.differentiate and not leaf.frozen
    held = leaf.params.dims if gather == "use" else ()
    scattered = leaf.grads.dims if is_differentiated else held
    reduce = ("at use" if scattered else "after") if is_differentiated else "none"
    summed = tuple(axis for axis in options.setup.split_axes if axis not in axes_of(leaf.spec))
    regathers = gather == "use" and options.regathers
    return LeafPlan(leaf, gather, reduce, scattered, summed, _sum_dtype(options.setup, leaf), regathers=regathers)


def _sum_dtype(setup: Setup, leaf: Leaf) -> DType:
    """The dtype in which a parameter's gradients are summed over microbatches and devices."""
    given = like(setup.config.reduce_dtype, leaf.dtype)
    is_wide = setup.config.auto_axes and platforms.of(setup.mesh).widens_sums
    return jnp.promote_types(given, jnp.float32) if is_wide else given


def after_the_trace(plans: Sequence[LeafPlan], jaxpr: Jaxpr, options: LossOptions) -> tuple[LeafPlan, ...]:
    """The plans for a traced loss, by how it uses each parameter.

    Raises:
      ValueError: the loss uses a parameter as its layout does not allow.
    """
    for index, plan in enumerate(plans):
        _check_own_axes(index, plan.leaf, jaxpr, options)
        _check_frozen(plan, jaxpr, options)
    once = not options.setup.config.cuts.accumulators
    if once and _reduces_once(jaxpr, options):
        plans = [_reduced_once(plan, options.setup.config.min_shard_size) for plan in plans]
    plans = [with_casts(plan, jaxpr, index, options) for index, plan in enumerate(plans)]
    return tuple(_by_uses(index, plan, jaxpr, once) for index, plan in enumerate(plans))


def with_casts(plan: LeafPlan, jaxpr: Jaxpr, index: int, options: LossOptions) -> LeafPlan:
    """The plan of a parameter that the loss casts: it is gathered in that dtype, and its gradient is reduced in it.

    `reduce_dtype` decides where it is given; and a dtype of a smaller range (float16) is for gathers alone, since sums
    could overflow.
    """
    moved = plan.is_moved or plan.gather == "start"
    if (narrow := uses.computed_in(jaxpr, index) if moved else None) is None:
        return plan
    same_range = jnp.finfo(narrow).maxexp == jnp.finfo(plan.leaf.dtype).maxexp
    widened = options.setup.config.auto_axes and platforms.of(options.setup.mesh).widens_sums
    as_cast = same_range and options.setup.config.reduce_dtype is None and not widened
    return dataclasses.replace(plan, computed_in=narrow, reduced_in=narrow if as_cast else None)


def _reduces_once(jaxpr: Jaxpr, options: LossOptions) -> bool:
    """Whether an all-reduce may run inside the backward pass: with one microbatch, and no pipeline."""
    return options.differentiate and options.microbatches == 1 and not uses.defers(jaxpr)


def _reduced_once(plan: LeafPlan, min_shard_size: int) -> LeafPlan:
    """The plan of a whole parameter, whose gradient is reduced at its one use if it is large enough."""
    if plan.leaf.frozen:
        return plan
    is_large = bool(plan.summed) and math.prod(plan.leaf.shape) >= max(min_shard_size, 1)
    return dataclasses.replace(plan, reduce="at use" if is_large else "after", scattered=plan.leaf.dims)


def _by_uses(index: int, plan: LeafPlan, jaxpr: Jaxpr, once: bool) -> LeafPlan:
    table, inputs = plan.table_dims, open_jaxpr(jaxpr)
    is_cast, once = plan.computed_in is not None, once and not plan.leaf.frozen
    reason = uses.why_not_lazy(jaxpr, index, plan.scattered, looked_up_by=table, once=once, cast=is_cast)
    looks_up = plan.is_moved and uses.only_looked_up(inputs, inputs.invars[index], table)
    return as_used(plan, inputs, inputs.invars[index], reason=reason, looks_up=looks_up)


def as_used(plan: LeafPlan, program: OpenJaxpr, var: Var, *, reason: str | None, looks_up: bool) -> LeafPlan:
    """The plan of a parameter, the variable of a traced loss, by how that uses it."""
    plan = dataclasses.replace(plan, reason=reason, looks_up=looks_up)
    return dataclasses.replace(plan, regathers=plan.regathers and is_made_again(plan, program, var))


def is_made_again(plan: LeafPlan, program: OpenJaxpr, var: Var) -> bool:
    """Whether the backward pass can gather a parameter again wherever it needs it (`loss.evaluation` does so)."""
    dims, is_cast = (*plan.held, *plan.scattered), plan.computed_in is not None
    return _Again(dims, lazy=plan.reason is None, cast=is_cast).of_variable(program, var, is_whole=False)


@dataclasses.dataclass(frozen=True)
class _Again:
    """Follows a parameter cut by `dims`, which only marks gather if `lazy`, and which every use casts if `cast`."""

    dims: Dims
    lazy: bool
    cast: bool

    def of_variable(self, jaxpr: OpenJaxpr, var: Var, *, is_whole: bool) -> bool:
        if any(out is var for out in jaxpr.outvars):
            return False
        stays = not is_whole and (self.lazy or uses.num_uses(jaxpr, var) == 1)
        return all(self._of_use(jaxpr, eqn, i, stays=stays) for eqn, i in uses.uses_of(jaxpr, var))

    def _of_use(self, jaxpr: OpenJaxpr, eqn: Equation, position: int, *, stays: bool) -> bool:
        name = eqn.primitive.name
        if deferred(eqn) is not None:
            return True  # it has a backward pass of its own
        if name in REMAT:
            return stays and not uses.saves(eqn.params["policy"], MARK)
        if name == SCAN and not (stays and (self.lazy or self._is_sliced(eqn, position))):
            return False
        if name in INLINED or name == SCAN:
            inner = open_jaxpr(inner_jaxpr(eqn))
            return self.of_variable(inner, inner.invars[position], is_whole=not stays)
        if name in WHOLE and len(eqn.invars) == 1:
            stays = stays and not uses.mark(eqn) and (self.lazy or (name == CONVERT and self.cast))
            return self.of_variable(jaxpr, eqn.outvars[0], is_whole=not stays)
        is_derived = name in POINTWISE | MOVES and uses.is_small(eqn, position)
        return next(subprograms(eqn), None) is None and not (is_derived and uses.is_needed(jaxpr, eqn))

    def _is_sliced(self, scan: Equation, position: int) -> bool:
        is_cut = any(-dim == scan.invars[position].aval.ndim for dim, _ in self.dims)
        return not is_cut and position >= sum(scan_split(scan))


def _check_own_axes(index: int, leaf: Leaf, jaxpr: Jaxpr, options: LossOptions) -> None:
    """Raises a ValueError if `specs` cut a parameter over a batch axis, and the loss has no collective along it.

    Otherwise each device would train its shard of the parameter on its own rows alone.
    """
    for axis in sorted(axes_of(leaf.spec) & {*options.setup.split_axes}):
        wrt = [i == index for i in range(len(open_jaxpr(jaxpr).invars))]
        if varies_smoothly(jaxpr, wrt, but_along=axis)[0]:
            kind = PartsError if axes_named(jaxpr) else ValueError
            raise kind(
                f"specs: {leaf.path} has {leaf.spec}, and {axis!r} splits the batch, too: the loss must exchange its "
                "results along that axis (jaxshard.tensor.expert_parallel does; a penalty needs jax.lax.psum(x, "
                f"{axis!r})). Or leave {axis!r} out of specs: the strategy shards over it itself"
            )


def _check_frozen(plan: LeafPlan, jaxpr: Jaxpr, options: LossOptions) -> None:
    """Raises a ValueError for a frozen parameter that a schedule with its own backward pass (1F1B) cannot take."""
    leaf = plan.leaf
    if not leaf.frozen or not options.differentiate or not uses.defers(jaxpr):
        return
    if plan.held or leaf.dtype.itemsize < 2 or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise ValueError(
            f"frozen: {leaf.path} ({leaf.dtype}{', sharded' if plan.held else ''}) cannot be in a pipeline whose "
            'schedule has its own backward pass: give jaxshard.pipeline(schedule="gpipe"), or a base in '
            "bfloat16 or float32 that ZeRO does not shard (zero=2)"
        )


# Lines of the user's source.


def lines(jaxpr: Jaxpr, plans: Sequence[LeafPlan]) -> list[tuple[str, ...]]:
    """For each parameter, the lines where the loss gathers it, looks rows up in it, or reduces its gradient.

    They are in the loss's order; () if this happens outside of the loss, or not at all.
    """
    program = open_jaxpr(jaxpr)
    each = zip(program.invars, plans, strict=False)  # more inputs follow
    return [lines_of(program, var, plan) if plan.is_moved else () for var, plan in each]


def lines_of(program: OpenJaxpr, var: Var, plan: LeafPlan) -> tuple[str, ...]:
    """As `lines`, for one parameter that is moved."""
    trails = gathered_at(program, var, plan)
    if plan.reason is not None and not plan.looks_up:
        trails = itertools.islice(trails, 1)
    return tuple(dict.fromkeys(filter(None, map(line_of, trails))))


def gathered_at(
    program: OpenJaxpr, var: Var, plan: LeafPlan, *, through: frozenset[str] = CASTS
) -> Iterator[tuple[Equation, ...]]:
    """The trails (`uses.trails`) of a parameter's marks and lookups; or of all uses, if it is whole from the first."""
    lazily = plan.reason is None or plan.looks_up
    return uses.trails(program, var, uses.ENTERED if lazily else INLINED, through=through)
