"""Reads traced programs (jaxprs) in the same way on jax 0.10 to 0.12."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, T, Tree, Var


def core() -> ModuleType:
    """`jax.extend.core`, imported on first use: that takes 70 ms, most of it for Pallas."""
    from jax.extend import core

    return core


def is_literal(v: Var) -> bool:
    """Whether an operand is a constant written into the program."""
    return isinstance(v, core().Literal)


def number_of(literal: Var) -> float | None:
    """The number that is written into the program; None if it is not a real scalar."""
    try:
        return float(np.asarray(literal.val).item())
    except (TypeError, ValueError):
        return None


def is_float(v: Var) -> bool:
    """Whether a variable's numbers are floating or complex: those that gradients are taken of."""
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)


def is_ref(v: Var) -> bool:
    """Whether a variable is a mutable array (`jax.new_ref`), which equations write to."""
    return hasattr(v.aval, "inner_aval")


def open_jaxpr(jaxpr: Jaxpr) -> OpenJaxpr:
    """The `Jaxpr` inside a `ClosedJaxpr`; after jax 0.11 the two are one class."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def closed_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """A `ClosedJaxpr` of the program; an open one must have no constants."""
    return jaxpr if hasattr(jaxpr, "consts") else core().ClosedJaxpr(jaxpr, ())


def without_consts(closed: Jaxpr) -> tuple[Jaxpr, list[jax.Array]]:
    """Turns a program's constants into its last inputs; returns (the new program, the constants)."""
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
    """Runs equations as one program, so that JAX keeps names and contexts; reads `env`, and adds the results to it."""
    if not eqns:
        return
    outs = [v for eqn in eqns for v in eqn.outvars if not isinstance(v, core().DropVar)]
    ins = operands_of(eqns)
    results = core().jaxpr_as_fun(part_of(jaxpr, eqns, ins, outs))(*(env[v] for v in ins))
    env |= dict(zip(outs, results, strict=True))


def operands_of(eqns: Sequence[Equation]) -> list[Var]:
    """The variables that equations read before they compute them, if at all, in the order of first use."""
    made, found = set[Var](), dict[Var, None]()
    for eqn in eqns:
        found |= dict.fromkeys(v for v in eqn.invars if not is_literal(v) and v not in made)
        made |= {*eqn.outvars}
    return list(found)


def makers_of(
    eqns: Sequence[Equation], wanted: Iterable[Var], only: Callable[[Equation], bool] = lambda _: True
) -> list[Equation]:
    """The equations that compute the wanted values, directly or through operands, in order.

    Args:
      only: an equation for which it is False is left out, and so are equations that only that one needs.
    """
    needed, found = set(wanted), list[Equation]()
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars) and only(eqn):
            found.append(eqn)
            needed |= {v for v in eqn.invars if not is_literal(v)}
    return found[::-1]


def with_backward_pass(jaxpr: Jaxpr) -> Jaxpr:
    """A program that returns the outputs, and their gradients with respect to all inputs."""
    run = core().jaxpr_as_fun(jaxpr)

    def floating(*values: jax.Array) -> list[jax.Array]:
        return [x for x in run(*values) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def gradients(*values: jax.Array) -> list[jax.Array]:
        outs, pull = cast(Any, jax.vjp)(floating, *values)  # pyright: ignore[reportUnknownMemberType]
        return [*outs, *pull([jnp.ones_like(x) for x in outs])]  # pyright: ignore[reportUnknownMemberType]

    trace: Any = jax.make_jaxpr(gradients)  # pyright: ignore[reportUnknownMemberType]
    return trace(*(v.aval for v in open_jaxpr(jaxpr).invars))


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
        yield from equations_inside(eqn)


def equations_inside(eqn: Equation) -> Iterator[Equation]:
    """All equations of the programs that an equation holds, at any depth."""
    return (inner for program in subprograms(eqn) for inner in equations(program))


def sizes_of(jaxpr: Jaxpr) -> frozenset[int]:
    """The sizes of all dims of a program's operands."""
    shapes = (getattr(v.aval, "shape", ()) for eqn in equations(jaxpr) for v in eqn.invars)
    return frozenset(size for shape in shapes for size in shape)


def axes_named(jaxpr: Jaxpr) -> set[str]:
    """The mesh axes that a program's collectives and `axis_index` name."""
    return {axis for eqn in equations(jaxpr) for axis in axes_of_equation(eqn)}


def axes_of_equation(eqn: Equation) -> list[str]:
    """The mesh axes that an equation names."""
    named: Any = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    listed = cast("Sequence[object]", named if isinstance(named, tuple | list) else [named])
    return [axis for axis in listed if isinstance(axis, str)]
