"""Reads traced programs (jaxprs) in the same way on jax 0.10 to 0.12."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxshard.base.primitives import (
    ADDS,
    CALLS,
    COLLECTIVE_KINDS,
    INLINED,
    KEEPS_SIGN,
    LOOPS,
    NO_GRADIENT,
    SAME_NUMBERS,
)
from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, T, Tree, Var


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


def run_equations(jaxpr: OpenJaxpr, eqns: list[Equation], env: dict[Var, Tree]) -> None:
    """Runs equations of a program as one piece, so that JAX's own evaluation keeps names and contexts.

    `env` has the values of variables, and gets those of the results.
    """
    if not eqns:
        return
    outs = [v for eqn in eqns for v in eqn.outvars if not isinstance(v, core().DropVar)]
    ins = operands_of(eqns)
    results = core().jaxpr_as_fun(part_of(jaxpr, eqns, ins, outs))(*(env[v] for v in ins))
    env |= dict(zip(outs, results, strict=True))


def operands_of(eqns: Sequence[Equation]) -> list[Var]:
    """What equations read and do not make, in the order of its first use."""
    made = {v for eqn in eqns for v in eqn.outvars}
    return list(dict.fromkeys(v for eqn in eqns for v in eqn.invars if not is_literal(v) and v not in made))


def part_of(jaxpr: OpenJaxpr, eqns: Sequence[Equation], ins: Sequence[Var], outs: Sequence[Var]) -> Jaxpr:
    """Some equations of a program as a program of their own, from `ins` to `outs`."""
    info = unnamed(jaxpr, len(ins), len(outs))
    part = jaxpr.replace(constvars=[], invars=[*ins], outvars=[*outs], eqns=[*eqns], debug_info=info)
    return core().ClosedJaxpr(part, ())


def linear_solver(eqn: Equation, operands: Sequence[T]) -> tuple[Jaxpr, list[T]]:
    """The program that a `custom_linear_solve` runs, and which of the operands it gets."""
    lengths = eqn.params["const_lengths"]  # of the products, and of the two solvers, before the right-hand sides
    products = lengths.matvec + lengths.vecmat
    return eqn.params["jaxprs"].solve, [*operands[products : products + lengths.solve], *operands[sum(lengths) :]]


def subprograms(eqn: Equation) -> Iterator[Jaxpr]:
    """All programs among the parameters of an equation, alone or in tuples."""
    for value in eqn.params.values():
        several = [*cast(Iterable[Jaxpr], value)] if isinstance(value, tuple | list) else [value]
        yield from (one for one in several if hasattr(open_jaxpr(one), "eqns"))


def scan_split(eqn: Equation) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan, from the ranks of its operands and results.

    An array that is scanned over, or stacked, has one dim more outside the scan than in its body.
    """
    inner = open_jaxpr(inner_jaxpr(eqn))
    num_scanned = sum(o.aval.ndim != i.aval.ndim for o, i in zip(eqn.invars, inner.invars, strict=True))
    num_carry = sum(o.aval.ndim == i.aval.ndim for o, i in zip(eqn.outvars, inner.outvars, strict=True))
    return len(eqn.invars) - num_scanned - num_carry, num_carry


def equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """All equations of a program and of the programs that it runs."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in subprograms(eqn):
            yield from equations(inner)


def sizes_of(jaxpr: Jaxpr) -> frozenset[int]:
    """The sizes of all dims of a program's operands."""
    shapes = (getattr(v.aval, "shape", ()) for eqn in equations(jaxpr) for v in eqn.invars)
    return frozenset(size for shape in shapes for size in shape)


def axes_named(jaxpr: Jaxpr) -> set[str]:
    """The mesh axes that a program's collectives, and its questions for a device's index, name."""
    return {axis for eqn in equations(jaxpr) for axis in _named_by(eqn)}


def _named_by(eqn: Equation) -> list[str]:
    """The mesh axes that an equation names."""
    named: Any = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    listed = cast("Sequence[object]", named if isinstance(named, tuple | list) else [named])
    return [axis for axis in listed if isinstance(axis, str)]


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


def varies_smoothly(jaxpr: Jaxpr, wrt: Sequence[bool], *, but_along: str | None = None) -> list[bool]:
    """For each output, whether it may have a gradient with respect to an input that is marked in `wrt`.

    Comparisons, whole numbers and `stop_gradient` have none. What a collective along the mesh axis `but_along` makes
    counts as having none, too.
    """
    jaxpr = open_jaxpr(jaxpr)
    env = dict.fromkeys(jaxpr.constvars, False) | dict(zip(jaxpr.invars, wrt, strict=True))
    for eqn in jaxpr.eqns:
        found = [not is_literal(v) and env[v] for v in eqn.invars]
        name = eqn.primitive.name
        outs = [any(found) and name not in NO_GRADIENT and not _moves_along(eqn, but_along)] * len(eqn.outvars)
        if any(found) and name in (*CALLS, *LOOPS):
            outs = _vary_smoothly(eqn, found, but_along)
        smooth = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars]
        env |= {v: out and yes for v, out, yes in zip(eqn.outvars, outs, smooth, strict=True)}
    return [not is_literal(v) and env[v] for v in jaxpr.outvars]


def variables_that_vary_smoothly(jaxpr: OpenJaxpr, wrt: Sequence[bool]) -> set[Var]:
    """All variables of a program that may have a gradient with respect to an input that is marked in `wrt`."""
    made = [v for eqn in jaxpr.eqns for v in eqn.outvars if not isinstance(v, core().DropVar)]
    variables = [*jaxpr.invars, *made]
    whole = jaxpr.replace(outvars=variables, debug_info=unnamed(jaxpr, len(jaxpr.invars), len(variables)))
    return {v for v, smooth in zip(variables, varies_smoothly(whole, [*wrt]), strict=True) if smooth}


def _moves_along(eqn: Equation, axis: str | None) -> bool:
    """Whether an equation is a collective along this mesh axis."""
    return axis is not None and eqn.primitive.name in COLLECTIVE_KINDS and axis in _named_by(eqn)


def _vary_smoothly(eqn: Equation, found: list[bool], but_along: str | None) -> list[bool]:
    """As `varies_smoothly`, for what a call, a branch or a loop returns."""

    def walk(jaxpr: Jaxpr, wrt: Sequence[bool]) -> list[bool]:
        return varies_smoothly(jaxpr, wrt, but_along=but_along)

    name = eqn.primitive.name
    if name in CALLS or name == "cond":
        return _of_called(walk, eqn, found)
    if name == "scan":
        (first, num_carry), body = scan_split(eqn), inner_jaxpr(eqn)
    else:
        skipped, first, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"], eqn.params["body_jaxpr"]
        found, num_carry = found[skipped:], len(eqn.outvars)
    while True:  # each round adds to what varies, or is the last
        outs = walk(body, found)
        carry = [a or b for a, b in zip(found[first : first + num_carry], outs[:num_carry], strict=True)]
        if carry == found[first : first + num_carry]:
            return [*carry, *outs[num_carry:]]
        found = [*found[:first], *carry, *found[first + num_carry :]]


def _of_called(walk: Callable[[Jaxpr, list[bool]], list[bool]], eqn: Equation, found: list[bool]) -> list[bool]:
    """What `walk` finds in the program that a call runs, or in any of a cond's branches."""
    if eqn.primitive.name in CALLS:
        return walk(inner_jaxpr(eqn), found)
    branches = [walk(branch, found[1:]) for branch in eqn.params["branches"]]
    return [any(column) for column in zip(*branches, strict=True)]


def reaches(jaxpr: Jaxpr, name: str, wanted: Sequence[bool] | None = None) -> list[bool]:
    """For each input, whether an operand of a primitive of this name, or an output that is `wanted`, depends on it."""
    jaxpr = open_jaxpr(jaxpr)
    marked = {v for v, yes in zip(jaxpr.outvars, wanted or (), strict=False) if yes and not is_literal(v)}
    for eqn in reversed(jaxpr.eqns):
        outs = [v in marked for v in eqn.outvars]
        flags = [any(outs) or eqn.primitive.name == name] * len(eqn.invars)
        if eqn.primitive.name in (*CALLS, "shard_map", "scan"):
            flags = reaches(inner_jaxpr(eqn), name, [any(outs)] * len(outs) if eqn.primitive.name == "scan" else outs)
        elif any(inner.primitive.name == name for program in subprograms(eqn) for inner in equations(program)):
            flags = [True] * len(eqn.invars)
        marked |= {v for v, yes in zip(eqn.invars, flags, strict=True) if yes and not is_literal(v)}
    return [v in marked for v in jaxpr.invars]


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
    if name in CALLS or name == "cond":
        return _of_called(hands_on, eqn, found)
    if name in SAME_NUMBERS:
        return found if len(found) == len(eqn.outvars) else [any(found)]
    return [name == "select_n" and any(found[1:])] * len(eqn.outvars)


def never_negative(jaxpr: Jaxpr, known: Sequence[bool]) -> list[bool]:
    """For each output, whether it cannot be below 0, given which inputs cannot; False where nobody knows."""
    jaxpr = open_jaxpr(jaxpr)
    env = dict.fromkeys(jaxpr.constvars, False) | dict(zip(jaxpr.invars, known, strict=True))
    for eqn in jaxpr.eqns:
        found = [_is_positive(v) if is_literal(v) else env[v] for v in eqn.invars]
        env |= dict(zip(eqn.outvars, _eqn_never_negative(eqn, found), strict=True))
    return [_is_positive(v) if is_literal(v) else env[v] for v in jaxpr.outvars]


def _is_positive(v: Var) -> bool:
    value = getattr(v, "val", -1)
    return jnp.ndim(value) == 0 and not jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended) and bool(value >= 0)


def _eqn_never_negative(eqn: Equation, found: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    if name in CALLS:
        return never_negative(inner_jaxpr(eqn), found)
    if name == "cond":
        branches = [never_negative(branch, found[1:]) for branch in eqn.params["branches"]]
        return [all(column) for column in zip(*branches, strict=True)]
    squared = name == "mul" and eqn.invars[0] is eqn.invars[1]
    even = name == "integer_pow" and eqn.params["y"] % 2 == 0
    if name in ("square", "abs", "exp", "exp2") or squared or even:
        return [True] * len(eqn.outvars)
    if name == "max":
        return [any(found)]
    if name == "select_n":
        return [all(found[1:])]
    keeps = name in SAME_NUMBERS or name in KEEPS_SIGN or name == "integer_pow"
    return [keeps and all(found)] * len(eqn.outvars)


def linear(jaxpr: Jaxpr, degrees: Sequence[int]) -> list[int]:
    """For each output, whether it does not depend on some inputs (0), is linear in them (1), or neither is known (2).

    Args:
      degrees: 1 for these inputs, 0 for others. Single numbers count as 0, whatever they depend on: a norm that scales.
    """
    jaxpr = open_jaxpr(jaxpr)
    env = dict.fromkeys(jaxpr.constvars, 0) | dict(zip(jaxpr.invars, degrees, strict=True))
    for eqn in jaxpr.eqns:
        found = [0 if is_literal(v) else env[v] for v in eqn.invars]
        outs = zip(eqn.outvars, _eqn_linear(eqn, found), strict=True)
        env |= {v: degree if getattr(v.aval, "ndim", 0) else 0 for v, degree in outs}
    return [0 if is_literal(v) else env[v] for v in jaxpr.outvars]


def _eqn_linear(eqn: Equation, found: list[int]) -> list[int]:
    name = eqn.primitive.name
    if name in CALLS:
        return linear(inner_jaxpr(eqn), found)
    if name == "cond":
        branches = [linear(branch, found[1:]) for branch in eqn.params["branches"]]
        return [max(column) for column in zip(*branches, strict=True)]
    most = max(found, default=0)
    itself = name == "integer_pow" and eqn.params["y"] == 1
    if most == 0 or itself or name in ADDS or name in SAME_NUMBERS:
        return [most] * len(eqn.outvars)
    if name == "select_n":
        return [max(found[1:])]
    if name in ("clamp", "max", "min", "sign"):  # a gradient that is clipped is one still
        return [most]
    if name in ("mul", "dot_general"):
        return [min(sum(found), 2)]
    return [most if name == "div" and found[1] == 0 else 2] * len(eqn.outvars)


def subtracts(jaxpr: Jaxpr, of: Sequence[bool], others: Sequence[bool]) -> bool:
    """Whether a program takes the difference of what it makes of inputs `of` and of what it makes of `others`."""
    return _subtracts(jaxpr, [(a, b) for a, b in zip(of, others, strict=True)])[1]


def _subtracts(jaxpr: Jaxpr, marks: Sequence[tuple[bool, bool]]) -> tuple[list[tuple[bool, bool]], bool]:
    jaxpr, any_found, nothing = open_jaxpr(jaxpr), False, (False, False)
    env = dict.fromkeys(jaxpr.constvars, nothing) | dict(zip(jaxpr.invars, marks, strict=True))
    for eqn in jaxpr.eqns:
        found = [nothing if is_literal(v) else env[v] for v in eqn.invars]
        merged = (any(a for a, _ in found), any(b for _, b in found))
        outs = [merged] * len(eqn.outvars)
        if eqn.primitive.name in CALLS:
            outs, inside = _subtracts(inner_jaxpr(eqn), found)
            any_found = any_found or inside
        elif eqn.primitive.name == "cond":
            each = [_subtracts(branch, found[1:]) for branch in eqn.params["branches"]]
            any_found = any_found or any(inside for _, inside in each)
        elif eqn.primitive.name == "sub":
            (a, b), (c, d) = found
            any_found = any_found or (a and d and not c) or (c and b and not a)
        env |= dict(zip(eqn.outvars, outs, strict=True))
    return [nothing if is_literal(v) else env[v] for v in jaxpr.outvars], any_found
