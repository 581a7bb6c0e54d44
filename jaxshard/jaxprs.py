"""What three modules need to read of a traced program, alike on jax 0.10 to 0.12."""

from typing import Any

INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})  # calls that are what they call
REMAT = frozenset({"remat", "remat2", "checkpoint"})


def core() -> Any:
    """`jax.extend.core`, on first use: importing it takes 70 ms, most of it Pallas."""
    from jax.extend import core

    return core


def is_literal(v: Any) -> bool:
    return isinstance(v, core().Literal)


def open_jaxpr(jaxpr: Any) -> Any:
    """The plain jaxpr; up to jax 0.11 a closed one holds it, later they are one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def closed_jaxpr(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, "consts") else core().ClosedJaxpr(jaxpr, ())


def inner_jaxpr(eqn: Any) -> Any:
    """The program that a call, a scan or a remat runs."""
    return next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)


def scan_split(eqn: Any) -> tuple[int, int]:
    """(number of constants, number of carries), read off the ranks: what is scanned over has one dim more outside."""
    inner = open_jaxpr(inner_jaxpr(eqn))
    num_scanned = sum(o.aval.ndim != i.aval.ndim for o, i in zip(eqn.invars, inner.invars, strict=True))
    num_carry = sum(o.aval.ndim == i.aval.ndim for o, i in zip(eqn.outvars, inner.outvars, strict=True))
    return len(eqn.invars) - num_scanned - num_carry, num_carry
