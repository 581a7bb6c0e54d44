"""Reads traced programs (jaxprs) in the same way on jax 0.10 to 0.12."""

from types import ModuleType

import jax

from jaxshard.base.primitives import CALLS, INLINED, SAME_NUMBERS
from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Var


def core() -> ModuleType:
    """`jax.extend.core`, on first use: importing it takes 70 ms, most of it Pallas."""
    from jax.extend import core

    return core


def is_literal(v: Var) -> bool:
    """Whether an operand is a constant written into the program."""
    return isinstance(v, core().Literal)


def open_jaxpr(jaxpr: Jaxpr) -> OpenJaxpr:
    """The `Jaxpr` that a `ClosedJaxpr` holds up to jax 0.11; after that the two are one class."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def closed_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """A `ClosedJaxpr` of the program; an open one must have no constants."""
    return jaxpr if hasattr(jaxpr, "consts") else core().ClosedJaxpr(jaxpr, ())


def without_consts(closed: Jaxpr) -> tuple[Jaxpr, list[jax.Array]]:
    """Makes the arrays that a program closed over its last inputs; returns (the new program, these arrays)."""
    jaxpr = open_jaxpr(closed)
    ins = [*jaxpr.invars, *jaxpr.constvars]
    opened = jaxpr.replace(constvars=[], invars=ins, debug_info=unnamed(jaxpr, len(ins), len(jaxpr.outvars)))
    return core().ClosedJaxpr(opened, ()), list(getattr(closed, "consts", ()))


def unnamed(jaxpr: OpenJaxpr, num_ins: int, num_outs: int) -> object:
    """The debug info of `jaxpr` for a program of `num_ins` inputs and `num_outs` outputs, none of them named."""
    return jaxpr.debug_info._replace(arg_names=("",) * num_ins, result_paths=("",) * num_outs)


def inner_jaxpr(eqn: Equation) -> Jaxpr:
    """The program that a call, a scan or a remat runs."""
    return next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)


def scan_split(eqn: Equation) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan, from the ranks of its operands and results.

    An array that is scanned over, or stacked, has one dim more outside the scan than in its body.
    """
    inner = open_jaxpr(inner_jaxpr(eqn))
    num_scanned = sum(o.aval.ndim != i.aval.ndim for o, i in zip(eqn.invars, inner.invars, strict=True))
    num_carry = sum(o.aval.ndim == i.aval.ndim for o, i in zip(eqn.outvars, inner.outvars, strict=True))
    return len(eqn.invars) - num_scanned - num_carry, num_carry


def depends(jaxpr: Jaxpr, differs: list[bool], summed: frozenset[str] | None = None) -> list[bool]:
    """For each output, whether it depends on `axis_index` or on an input marked in `differs`.

    The result of a psum, pmax or pmin over all axes in `summed` counts as one that does not.
    """
    jaxpr = open_jaxpr(jaxpr)
    env = dict.fromkeys(jaxpr.constvars, False) | dict(zip(jaxpr.invars, differs, strict=True))
    for eqn in jaxpr.eqns:
        found = [not is_literal(v) and env[v] for v in eqn.invars]
        env |= dict(zip(eqn.outvars, _eqn_depends(eqn, found, summed), strict=True))
    return [not is_literal(v) and env[v] for v in jaxpr.outvars]


def _eqn_depends(eqn: Equation, found: list[bool], summed: frozenset[str] | None) -> list[bool]:
    name = eqn.primitive.name
    if name in INLINED:
        return depends(inner_jaxpr(eqn), found, summed)
    if name.startswith(("psum", "pmax", "pmin")) and summed is not None and summed <= set(eqn.params.get("axes", ())):
        return [False] * len(eqn.outvars)
    return [any(found) or name == "axis_index"] * len(eqn.outvars)


def hands_on(jaxpr: Jaxpr, marked: list[bool]) -> list[bool]:
    """For each output, whether it may be a marked input itself: unchanged, cast, reshaped, or chosen among others."""
    jaxpr = open_jaxpr(jaxpr)
    env = dict.fromkeys(jaxpr.constvars, False) | dict(zip(jaxpr.invars, marked, strict=True))
    for eqn in jaxpr.eqns:
        found = [not is_literal(v) and env.get(v, False) for v in eqn.invars]
        outs = [False] * len(eqn.outvars)
        if any(found):
            outs = _eqn_hands_on(eqn, found)
        env |= dict(zip(eqn.outvars, outs, strict=True))
    return [not is_literal(v) and env[v] for v in jaxpr.outvars]


def _eqn_hands_on(eqn: Equation, found: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    if name in CALLS:
        return hands_on(inner_jaxpr(eqn), found)
    if name == "cond":
        branches = [hands_on(branch, found[1:]) for branch in eqn.params["branches"]]
        return [any(column) for column in zip(*branches, strict=True)]
    if name in SAME_NUMBERS:
        return found if len(found) == len(eqn.outvars) else [any(found)]
    return [name == "select_n" and any(found[1:])] * len(eqn.outvars)
