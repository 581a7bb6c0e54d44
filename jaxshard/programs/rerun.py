"""Runs a traced program again, equation by equation, with some of its equations entered or replaced."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.base.types import Equation, Jaxpr, Tree, Var
from jaxshard.programs.jaxprs import (
    inner_jaxpr,
    is_literal,
    linear_solver,
    open_jaxpr,
    run_equations,
    scan_split,
    without_consts,
)
from jaxshard.programs.primitives import CALLS, CONSTRAINT, CONTROL, SOLVES, kind_of

Values: TypeAlias = Sequence[jax.Array]
Instead: TypeAlias = Callable[[Equation, Values], list[jax.Array] | None]


def rerun(
    program: Jaxpr, values: Values, enters: Callable[[Equation], bool], instead: Instead | None = None
) -> list[jax.Array]:
    """The results of a program.

    Args:
      enters: whether to enter an equation. The program inside a call or control flow is then run again in the same way:
        a call is inlined, a loop or a branch is traced anew.
      instead: computes the results of an equation that `enters` chose, from its operands; None: as above.
    """
    jaxpr = open_jaxpr(program)
    env: dict[Var, Tree] = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
    env |= dict(zip(jaxpr.invars, values, strict=True))
    plain: list[Equation] = []  # equations since the last entered one
    for eqn in jaxpr.eqns:
        if not enters(eqn):
            plain.append(eqn)
            continue
        run_equations(jaxpr, plain, env)
        plain = []
        operands = [v.val if is_literal(v) else env[v] for v in eqn.invars]
        outs = (instead(eqn, operands) if instead else None) or _inside(eqn, operands, enters, instead)
        if outs is None:
            run_equations(jaxpr, [eqn], env)
        else:
            env |= dict(zip(eqn.outvars, outs, strict=True))
    run_equations(jaxpr, plain, env)
    return [v.val if is_literal(v) else env[v] for v in jaxpr.outvars]


def flat(program: Jaxpr) -> tuple[Jaxpr, list[jax.Array]]:
    """(the program with its calls inlined and its constants as further inputs, these constants)."""
    program, consts = without_consts(program)

    def run(*values: jax.Array) -> list[jax.Array]:
        return rerun(program, values, lambda eqn: eqn.primitive.name in CALLS | SOLVES)

    trace: Any = jax.make_jaxpr(run)  # pyright: ignore[reportUnknownMemberType]
    written, more = without_consts(trace(*(_shape_of(v.aval) for v in open_jaxpr(program).invars)))
    return written, [*consts, *more]


def _shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype without the sharding, which may name the mesh that the program was traced on."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def anew(program: Jaxpr, values: Values, changed: Mapping[int, Mapping[str, Any]] | None = None) -> list[jax.Array]:
    """The results of a program that was traced elsewhere, perhaps on another mesh that its types and parameters name.

    Args:
      changed: equation id -> parameters that replace its own.
    """

    def instead(eqn: Equation, operands: Values) -> list[jax.Array] | None:
        if eqn.primitive.name == CONSTRAINT:
            return list(operands)
        if eqn.primitive.name in CALLS | CONTROL | SOLVES:
            return None
        return bound(
            eqn, operands, dict.fromkeys(_SHARDINGS & eqn.params.keys()) | dict((changed or {}).get(id(eqn), {}))
        )

    return rerun(program, values, lambda _: True, instead)


_SHARDINGS = frozenset({"sharding", "out_sharding"})  # parameters that name the mesh that it was traced on


def bound(eqn: Equation, operands: Values, changed: Mapping[str, Any] | None = None) -> list[jax.Array]:
    """The results of an equation's operation on other operands, with some parameters changed."""
    params = eqn.primitive.get_bind_params(eqn.params | dict(changed or {}))
    made = eqn.primitive.bind(*operands, **params)
    return list(made) if eqn.primitive.multiple_results else [made]


def _inside(
    eqn: Equation, values: Values, enters: Callable[[Equation], bool], instead: Instead | None
) -> list[jax.Array] | None:
    """The results of a call, or of control flow; None for any other operation."""
    kind, params = kind_of(eqn), eqn.params

    def run(program: Jaxpr, values: Values) -> list[jax.Array]:
        return rerun(program, values, enters, instead)

    if kind == "call":
        return run(inner_jaxpr(eqn), values)
    if kind == "solve":
        return run(*linear_solver(eqn, values))
    if kind == "cond" and params.get("branches_platforms") is None:
        branches = [functools.partial(_branch, run, one) for one in params["branches"]]
        return lax.switch(values[0], branches, *values[1:])  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if kind == "while":
        return _while(eqn, values, run)
    if kind == "scan":
        return _scan(eqn, values, run)
    return None


def _branch(run: Callable[[Jaxpr, Values], list[jax.Array]], program: Jaxpr, *values: jax.Array) -> list[jax.Array]:
    return run(program, values)


def _while(eqn: Equation, values: Values, run: Callable[[Jaxpr, Values], list[jax.Array]]) -> list[jax.Array]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, of_body = values[:num_cond], values[num_cond : num_cond + num_body]
    under_vmap = open_jaxpr(eqn.params["cond_jaxpr"]).outvars[0].aval.ndim > 0

    def goes_on(carry: list[jax.Array]) -> jax.Array:
        return run(eqn.params["cond_jaxpr"], [*of_cond, *carry])[0]

    def body(carry: list[jax.Array]) -> list[jax.Array]:
        return run(eqn.params["body_jaxpr"], [*of_body, *carry])

    def body_of_many(carry: list[jax.Array]) -> list[jax.Array]:
        """Loops that have ended keep their carry; the predicate's dims are the first dims of all arrays."""
        made, yes = body(carry), goes_on(carry)
        wide = [yes.reshape(yes.shape + (1,) * (x.ndim - yes.ndim)) for x in made]
        return [jnp.where(one, new, old) for one, new, old in zip(wide, made, carry, strict=True)]

    start = list(values[num_cond + num_body :])
    if under_vmap:
        return lax.while_loop(lambda carry: jnp.any(goes_on(carry)), body_of_many, start)
    return lax.while_loop(goes_on, body, start)


def _scan(eqn: Equation, values: Values, run: Callable[[Jaxpr, Values], list[jax.Array]]) -> list[jax.Array]:
    num_consts, num_carry = scan_split(eqn)

    def body(carry: list[jax.Array], xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        outs = run(inner_jaxpr(eqn), [*values[:num_consts], *carry, *xs])
        return outs[:num_carry], outs[num_carry:]

    start, xs = list(values[num_consts : num_consts + num_carry]), list(values[num_consts + num_carry :])
    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(body, start, xs, **how)
    return [*carry, *stacked]
