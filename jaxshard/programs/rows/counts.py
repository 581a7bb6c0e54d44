"""Which outputs of a loss depend on the number of its rows, through Python or shapes, but on no row's values."""

import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxshard.base.types import Jaxpr, Var
from jaxshard.programs.jaxprs import is_literal, makers_of, open_jaxpr, operands_of, part_of
from jaxshard.programs.questions import depends

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def may_count(jaxpr: Jaxpr, batch: Sequence[bool], position: int) -> bool:
    """Whether an output depends on no row's values, and is a whole number, a boolean, or a number made by Python."""
    if depends(jaxpr, list(batch))[position]:
        return False
    out = open_jaxpr(jaxpr).outvars[position]
    return not jnp.issubdtype(out.aval.dtype, jnp.inexact) or is_literal(out) or out in open_jaxpr(jaxpr).constvars


def counts(jaxpr: Jaxpr, larger: Jaxpr, position: int) -> bool:
    """Whether an output that `may_count` differs in the trace of more rows."""
    (one, values), (two, others) = _made_by(jaxpr, position), _made_by(larger, position)
    same_values = len(values) == len(others) and all(map(np.array_equal, values, others))
    return one != two or not same_values


def _made_by(jaxpr: Jaxpr, position: int) -> tuple[str, list[np.ndarray]]:
    """(the program of one output, as text; the constants in it)."""
    program = open_jaxpr(jaxpr)
    out = program.outvars[position]
    if is_literal(out):
        return "", [np.asarray(out.val)]
    eqns = makers_of(program.eqns, [out])
    read = {out, *operands_of(eqns)}
    inputs: list[Var] = [v for v in (*program.constvars, *program.invars) if v in read]
    consts = dict(zip(program.constvars, getattr(jaxpr, "consts", ()), strict=False))
    text = _ADDRESS.sub("", str(part_of(program, eqns, inputs, [out])))
    return text, [np.asarray(consts[v]) for v in inputs if v in consts]
