"""Where in the user's source each parameter is gathered, or its gradient reduced."""

import itertools
from collections.abc import Iterator, Sequence

from jaxshard.base.source import line_of
from jaxshard.base.types import Equation, Jaxpr, Var
from jaxshard.loss import uses
from jaxshard.loss.per_device import Notes
from jaxshard.loss.unshard import deferred
from jaxshard.programs.jaxprs import inner_jaxpr, open_jaxpr
from jaxshard.programs.primitives import CASTS, INLINED, REMAT


def lines(notes: Notes) -> list[tuple[str, ...]]:
    """For each parameter the lines where the loss gathers it or looks its rows up, or where its gradient is reduced.

    They are in the order in which the loss comes to them. () where that happens outside of the loss, or not at all.

    Args:
      notes: what a trace of the loss has found out.
    """
    program = open_jaxpr(notes.program.jaxpr)
    each = zip(program.invars, notes.reasons, notes.inside, notes.looked_up, strict=False)  # more inputs follow
    return [_lines_of(program, v, reason, looked_up) if inside else () for v, reason, inside, looked_up in each]


def _lines_of(program: Jaxpr, var: Var, reason: str | None, looked_up: bool) -> tuple[str, ...]:
    if reason is None or looked_up:
        trails = _used(program, var, (), INLINED | REMAT | {"scan"})
    else:
        trails = itertools.islice(_used(program, var, (), INLINED), 1)
    return tuple(dict.fromkeys(filter(None, map(line_of, trails))))


def _used(
    program: Jaxpr, var: Var, around: Sequence[Equation], entered: frozenset[str]
) -> Iterator[tuple[Equation, ...]]:
    """Each use of a variable, after the calls around it; the programs of `entered` calls are entered."""
    for eqn, position in uses.uses_of(open_jaxpr(program), var):
        trail, name = (*around, eqn), eqn.primitive.name
        if name in CASTS:
            yield from _used(program, eqn.outvars[0], around, entered)
        elif name in entered and deferred(eqn) is None:
            inner = open_jaxpr(inner_jaxpr(eqn))
            yield from _used(inner, inner.invars[position], trail, entered)
        else:
            yield trail
