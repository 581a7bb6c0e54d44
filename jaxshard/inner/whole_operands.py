"""Lays out whole what XLA computes wrongly, or not at all, from cut operands.

XLA for CPU wants a Fourier transform's operands in the order of rows (RET_CHECK in fft_thunk, jax 0.10 to 0.12), which
its own moves between devices do not keep. XLA of jax 0.10.2 gives wrong numbers where one cut array goes into two kinds
of cumulative operations, a sum and a maximum.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax import lax

from jaxshard.base.jaxprs import inner_jaxpr, is_literal, open_jaxpr, run_equations, scan_split, subprograms
from jaxshard.base.primitives import CALLS
from jaxshard.base.types import Equation, Jaxpr, T, Tree, Var

Whole = Callable[[jax.Array], jax.Array]
_CUMULATIVE = frozenset(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
ALL = _CUMULATIVE | {"fft"}


class _Mend(NamedTuple):
    whole: Whole
    names: frozenset[str]

    def has_work_in(self, eqn: Equation) -> bool:
        return eqn.primitive.name in self.names or any(_names(one) & self.names for one in subprograms(eqn))


def fragile(program: Jaxpr) -> frozenset[str]:
    """The names of the operations in the program, at any depth, whose operands must not be cut."""
    found = _names(program)
    cumulative = found & _CUMULATIVE
    return (found & {"fft"}) | (cumulative if len(cumulative) > 1 else frozenset())


def _names(program: Jaxpr) -> frozenset[str]:
    eqns = open_jaxpr(program).eqns
    return frozenset(eqn.primitive.name for eqn in eqns).union(
        *(_names(one) for eqn in eqns for one in subprograms(eqn))
    )


def with_whole_operands(fn: Callable[..., T], whole: Whole, names: frozenset[str]) -> Callable[..., T]:
    """`fn`, with `whole` applied to the operands and the results of its operations of these names."""

    def run(*args: Tree) -> T:
        program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        outs = _evaluate(program, jax.tree.leaves(args), _Mend(whole, names))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return run


def _evaluate(program: Jaxpr, values: Sequence[jax.Array], mend: _Mend) -> list[jax.Array]:
    jaxpr = open_jaxpr(program)
    env: dict[Var, jax.Array] = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
    env |= dict(zip(jaxpr.invars, values, strict=True))
    plain: list[Equation] = []  # equations since the last one with work
    for eqn in jaxpr.eqns:
        if not mend.has_work_in(eqn):
            plain.append(eqn)
            continue
        run_equations(jaxpr, plain, env)
        plain = []
        if eqn.primitive.name in mend.names:
            (operand,), (result,) = eqn.invars, eqn.outvars
            env[operand] = mend.whole(env[operand])
            run_equations(jaxpr, [eqn], env)
            env[result] = mend.whole(env[result])
        elif outs := _inside(eqn, [v.val if is_literal(v) else env[v] for v in eqn.invars], mend):
            env |= dict(zip(eqn.outvars, outs, strict=True))
        else:
            run_equations(jaxpr, [eqn], env)
    run_equations(jaxpr, plain, env)
    return [v.val if is_literal(v) else env[v] for v in jaxpr.outvars]


def _inside(eqn: Equation, values: list[jax.Array], mend: _Mend) -> list[jax.Array] | None:
    """The results of a call, or of control flow; None for any other operation."""
    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        return _evaluate(inner_jaxpr(eqn), values, mend)
    if name == "cond" and params.get("branches_platforms") is None:
        branches = [lambda *args, one=one: _evaluate(one, args, mend) for one in params["branches"]]
        return lax.switch(values[0], branches, *values[1:])
    if name == "while":
        return _while(eqn, values, mend)
    if name == "scan":
        return _scan(eqn, values, mend)
    return None


def _while(eqn: Equation, values: list[jax.Array], mend: _Mend) -> list[jax.Array]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, of_body = values[:num_cond], values[num_cond : num_cond + num_body]
    return lax.while_loop(
        lambda carry: _evaluate(eqn.params["cond_jaxpr"], [*of_cond, *carry], mend)[0],
        lambda carry: _evaluate(eqn.params["body_jaxpr"], [*of_body, *carry], mend),
        values[num_cond + num_body :],
    )


def _scan(eqn: Equation, values: list[jax.Array], mend: _Mend) -> list[jax.Array]:
    num_consts, num_carry = scan_split(eqn)

    def body(carry: list[jax.Array], xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        outs = _evaluate(inner_jaxpr(eqn), [*values[:num_consts], *carry, *xs], mend)
        return outs[:num_carry], outs[num_carry:]

    start, xs = values[num_consts : num_consts + num_carry], values[num_consts + num_carry :]
    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(body, start, xs, **how)
    return [*carry, *stacked]
