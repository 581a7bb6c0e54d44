"""What users should know of a traced loss: rounding, marks without effect, memory that could be saved."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxshard.base.types import DType, Equation, Jaxpr, OpenJaxpr, Var
from jaxshard.loss.arguments import LossOptions
from jaxshard.loss.params import uses
from jaxshard.loss.params.leaf_plan import LeafPlan, gathered_at, is_made_again, lines_of
from jaxshard.loss.params.unshard import LOOKUP_MARK, MARK, deferred
from jaxshard.programs.jaxprs import equations, inner_jaxpr, is_literal, open_jaxpr, scan_split
from jaxshard.programs.primitives import CUTS, LINEAR, POINTWISE, REMAT, SCAN
from jaxshard.programs.source import line_of
from jaxshard.system.text import size_in_words

_MARKS = (MARK, LOOKUP_MARK)
_LEAST_KEPT = 8 * 2**20  # bytes


class Kept(NamedTuple):
    """The params that the loss gathers whole and keeps for the backward pass.

    Attributes:
      num_bytes: of all of them, whole; at most so many are kept.
      num_leaves: how many they are.
      line: the user's line that gathers the largest of those that no mark asks for; "" if unknown.
      is_asked: whether all are gathered where the loss asks for it, by `unshard`.
      is_much: whether all but the largest, or the largest layer of a stack, have 10% of the bytes of all params, and 8
        MiB at least.
      can_regather: whether `regather="backward"` can gather them all again.
    """

    num_bytes: int
    num_leaves: int
    line: str
    is_asked: bool
    is_much: bool
    can_regather: bool

    def __str__(self) -> str:
        """What is kept, and the remedy; "" if nothing is."""
        if not self.num_leaves:
            return ""
        what = "1 param" if self.num_leaves == 1 else f"{self.num_leaves} params"
        return (
            f"each device keeps up to {size_in_words(self.num_bytes)} of gathered params ({what}) from the forward to "
            "the backward pass, since the loss gathers them outside jax.checkpoint, or its policy saves "
            f"them{self._first}. {_REGATHER if self.can_regather else _NO_REGATHER}"
        )

    @property
    def _first(self) -> str:
        return f" (the largest at {self.line})" if self.line else ""


_REGATHER = (
    'regather="backward" gathers them again instead; or wrap each layer in jax.checkpoint, and begin it with '
    "w = jaxshard.unshard(w), which also drops the layer's activations"
)
_NO_REGATHER = (
    'regather="backward" does not gather params again that the loss first slices, scales or scans, or that a policy '
    "saves: wrap each layer in jax.checkpoint, pass it complete leaves (of a list, or as the xs of a lax.scan), and "
    "begin it with w = jaxshard.unshard(w)"
)


def warnings(jaxpr: Jaxpr, plans: Sequence[LeafPlan], options: LossOptions) -> list[str]:
    """What is worth a warning."""
    held = kept(jaxpr, plans, options)
    unasked = str(held) if held.is_much and not held.is_asked else ""
    found = (void_marks(jaxpr, plans, options), unasked, idle_regather(plans, options), idle_policy(jaxpr))
    return [text for text in found if text]


def kept(jaxpr: Jaxpr, plans: Sequence[LeafPlan], options: LossOptions) -> Kept:
    """The params that the loss keeps whole for the backward pass; none if only the largest is large.

    (That one, or a layer of it, is whole at some time anyway, and the last layer's is needed again at once.
    `regather="step"` keeps all.)
    """
    program = open_jaxpr(jaxpr)
    each = zip(program.invars, plans, strict=False)  # more inputs follow
    waits = [(var, plan) for var, plan in each if options.differentiate and plan.held and not plan.regathers]
    found = [(plan, var) for var, plan in waits if not plan.looks_up and _is_kept(program, var, plan)]
    unasked = [(plan, var) for plan, var in found if plan.reason is not None]
    largest = max(unasked or found, key=lambda each: each[0].num_bytes, default=None)
    line = "" if largest is None else next(iter(lines_of(program, largest[1], largest[0])), "")
    num_bytes, of_all = sum(plan.num_bytes_gathered for plan, _ in found), sum(plan.num_bytes for plan in plans)
    scans = [eqn for eqn in program.eqns if eqn.primitive.name == SCAN]
    beyond = num_bytes - max((_at_once(program, scans, var, plan) for plan, var in found), default=0)
    num_leaves = len(found) if beyond >= of_all / 100 else 0
    can = not options.regathers and all(is_made_again(plan, program, var) for plan, var in found)
    return Kept(num_bytes, num_leaves, line, not unasked, beyond >= max(_LEAST_KEPT, of_all // 10), can)


def _at_once(program: OpenJaxpr, scans: Sequence[Equation], var: Var, plan: LeafPlan) -> int:
    """The bytes of a parameter that the loss, with these scans, needs at once: of a stack of layers, those of one."""
    lengths = [scan.params["length"] for scan in scans if _runs_over(scan, plan)]
    cuts = [eqn.outvars[0].aval.size for eqn, _ in uses.uses_of(program, var) if eqn.primitive.name in CUTS]
    parts = [var.aval.size // size for size in cuts if size and sum(cuts) >= var.aval.size]
    return plan.num_bytes_gathered // max([1, *lengths, *parts])


def _runs_over(scan: Equation, plan: LeafPlan) -> bool:
    """Whether a scan runs over an array of the parameter's shape: itself, or what is made of it."""
    return any(v.aval.shape == plan.leaf.shape for v in scan.invars[sum(scan_split(scan)) :])


def _is_kept(program: OpenJaxpr, var: Var, plan: LeafPlan) -> bool:
    """Whether a derivative needs the gathered parameter: it is not gathered in a remat, nor for linear uses alone.

    (A pipeline has a backward pass of its own, for which `regather` is no cure.)
    """
    trails = gathered_at(program, var, plan, through=uses.KEEPS_NUMBERS)
    return any(not _is_recomputed(trail) and _needs(trail[-1]) for trail in trails)


def _needs(eqn: Equation) -> bool:
    """Whether the backward pass of an equation needs its operand, or may need it."""
    return bool(uses.mark(eqn)) or (eqn.primitive.name not in LINEAR and deferred(eqn) is None)


def _is_recomputed(trail: Sequence[Equation]) -> bool:
    """Whether a use is in a remat that does not save what is gathered there."""
    remats = (eqn for eqn in trail[:-1] if eqn.primitive.name in REMAT)
    return any(not uses.saves(eqn.params["policy"], MARK) for eqn in remats)


def idle_regather(plans: Sequence[LeafPlan], options: LossOptions) -> str:
    """That `regather="backward"` has nothing to gather again; "" if it has."""
    if not options.regathers or options.setup.num_batch_shards == 1:
        return ""
    if any(plan.gather == "use" and not plan.looks_up for plan in plans):
        return ""
    least = options.setup.config.min_shard_size
    return (
        f'{options.setup.config.strategy}: regather="backward" has no effect, since no param is gathered: each is '
        f"replicated at rest, or the loss only looks rows up in it (the layout says why). Params of fewer than {least} "
        "elements stay replicated: give a smaller min_shard_size, or leave regather out"
    )


# Sums in few bits.


def sums_in_words(plans: Sequence[LeafPlan], options: LossOptions) -> str:
    """A sentence about gradients that are summed in 2 bytes, over several microbatches or over devices; else ""."""
    if not options.differentiate:
        return ""
    narrow = _narrow(plan.sum_dtype for plan in plans if not plan.leaf.frozen)
    of_devices = _of_all_rows(plans) if options.loss_view == "global" else _of_casts(plans)
    if not narrow or options.microbatches == 1:
        return of_devices
    return (
        f"over {options.microbatches} microbatches gradients are added up in {narrow}; in bfloat16 they are off by "
        "0.4% with 4 microbatches, 0.8% with 64, 1.6% with 256 (measured); reduce_dtype=jnp.float32 adds them up in "
        "float32"
    )


def _narrow(dtypes: Iterable[DType]) -> str:
    """Those of fewer than 4 bytes, in words."""
    return ", ".join(sorted({str(jnp.dtype(dtype)) for dtype in dtypes if jnp.dtype(dtype).itemsize < 4}))


def _of_casts(plans: Sequence[LeafPlan]) -> str:
    """A sentence about gradients that are summed over devices in the dtype to which the loss casts; else ""."""
    reduced = (plan for plan in plans if plan.reduce == "at use" and not plan.looks_up)
    cast = _narrow(plan.reduced_in for plan in reduced if plan.reduced_in is not None)
    if not cast:
        return ""
    return (
        f"over devices the gradients of params that the loss casts are added up in {cast}, as they are computed; "
        "reduce_dtype=jnp.float32 adds them up in float32, and sends twice the bytes for them"
    )


def _of_all_rows(plans: Sequence[LeafPlan]) -> str:
    """A sentence about gradients that XLA sums over devices in 2 bytes, in the global view; else ""."""
    cast = _narrow(plan.gathered_in for plan in plans if not plan.leaf.frozen)
    if not cast:
        return ""
    return (
        f"over devices XLA adds gradients up in {cast}, as the loss computes them, since the loss sees all rows; "
        "reduce_dtype applies only to sums over microbatches"
    )


# Marks.


def void_marks(jaxpr: Jaxpr, plans: Sequence[LeafPlan], options: LossOptions) -> str:
    """A sentence about marks that neither gather a parameter nor scatter its gradient: where, why, and the cure.

    It is "" if all these parameters together have less than 1 MiB, or 1% of the bytes of all.
    """
    program, found = open_jaxpr(jaxpr), []
    is_scattered = options.setup.config.cuts.accumulators  # else gradients are reduced once, wherever that may be
    for var, plan in zip(program.invars, plans, strict=False):  # more inputs follow
        is_void = plan.reason is not None and not plan.looks_up and (plan.held or (plan.scattered and is_scattered))
        trails = _trails_of_marks(program, var) if is_void else ()
        marked = [trail for trail in trails if uses.mark(trail[-1]) == MARK]
        found += [(plan, var, line_of(marked[0]))] if marked else []
    if sum(plan.num_bytes for plan, *_ in found) < max(2**20, sum(plan.num_bytes for plan in plans) // 100):
        return ""
    plan, var, marked = max(found, key=lambda each: each[0].num_bytes)
    first, more = next(iter(lines_of(program, var, plan)), ""), len(found) - 1
    return (
        f"unshard: {plan.leaf.path} is marked{f' at {marked}' if marked else ''}, but not gathered or reduced there: "
        f"{plan}{f' ({first})' if first else ''}. "
        f"{_CURES.get(plan.reason or '', _ALL_MARKED)}{f'. The layout lists {more} more' if more else ''}"
    )


def _trails_of_marks(program: OpenJaxpr, var: Var, around: Sequence[Equation] = ()) -> Iterator[tuple[Equation, ...]]:
    """The trails of a parameter's uses (`uses.trails`), and of those of what arithmetic with constants makes of it."""
    for trail in uses.trails(program, var, uses.ENTERED, through=uses.KEEPS_NUMBERS, around=around):
        yield trail
        eqn = trail[-1]
        if eqn.primitive.name in POINTWISE and sum(not is_literal(v) for v in eqn.invars) == 1:
            inner = open_jaxpr(inner_jaxpr(trail[-2])) if len(trail) > 1 else program
            yield from _trails_of_marks(inner, eqn.outvars[0], trail[:-1])


_ALL_MARKED = (
    "A mark counts only if unshard comes first in every use of the param: write w = jaxshard.unshard(w), and use only "
    "w from there on, also to scale, transpose or reshape it; pass layers of a stack as the xs of a lax.scan, or as "
    "leaves of a list, since a slice alone is not gathered; or leave unshard out"
)
_CURES = {
    uses.CUT_LAYERS: "No other dim could be sharded: make one divisible by the devices along the axis, or use a list "
    "of layers instead of a scan"
}


def idle_policy(jaxpr: Jaxpr) -> str:
    """A sentence about a policy of `jax.checkpoint` that names one of our marks where the call has none; else ""."""
    remats = (eqn for eqn in equations(jaxpr) if eqn.primitive.name in REMAT and eqn.params["policy"] is not None)
    return next(filter(None, map(_idle_in, remats)), "")


def _idle_in(remat: Equation) -> str:
    there = {uses.mark(eqn) for eqn in equations(inner_jaxpr(remat))}
    policy, line = remat.params["policy"], line_of([remat])
    where, known = f"the call at {line}" if line else "the call", " and ".join(f'"{mark}"' for mark in _MARKS)
    if MARK in there and _forgets_names(policy):
        return (
            f"jax.checkpoint: JAX's save_anything_except_these_names, in {where}, saves all values, whatever names it "
            'is given. Leave jax.checkpoint out, and give the strategy regather="backward", which gathers params again '
            "and saves everything else"
        )
    idle = [name for name in _named_by(policy) if name not in there]
    if not idle:
        return ""
    return (
        f'jax.checkpoint: its policy names "{idle[0]}", which no value in {where} has. jaxshard names {known}: '
        "call jaxshard.unshard, or jaxshard.lookup, inside the checkpointed function, or remove the name"
    )


def _forgets_names(policy: Any) -> bool:
    """Whether a policy is JAX's `save_anything_except_these_names`, in a version that ignores the names."""
    is_it = getattr(policy, "__qualname__", "").startswith("save_anything_except_these_names.")
    return is_it and not _held_by(policy)


def _named_by(policy: Any) -> Iterator[str]:
    """The names of marks of ours for which a policy asks, and names that look like ours."""
    yield from (mark for mark in _MARKS if uses.is_named_by(policy, mark))
    yield from (name for name in _names_in(policy) if name.startswith("jaxshard.") and name not in _MARKS)


def _names_in(policy: Any, seen: frozenset[int] = frozenset()) -> Iterator[str]:
    """The strings that a policy holds, and those of the functions, and of JAX's policies, of which it is made."""
    for value in _held_by(policy):
        for each in value if isinstance(value, set | frozenset | tuple | list) else (value,):
            if isinstance(each, str):
                yield each
            elif id(each) not in seen and (inspect.isfunction(each) or type(each).__module__.startswith("jax.")):
                yield from _names_in(each, seen | {id(policy), id(each)})


def _held_by(policy: Any) -> list[Any]:
    """The values that a function closes over, or an object's attributes."""
    if not inspect.isfunction(policy):
        return list(getattr(policy, "__dict__", {}).values())
    cells = policy.__closure__ or ()
    return [cell.cell_contents for cell in cells if cell != type(cell)()]  # an empty cell has no contents
