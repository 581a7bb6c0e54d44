"""How the traced loss uses each parameter: through marks alone, to look rows up, or as a whole."""

import dataclasses

import jax.numpy as jnp

from jaxshard.base.axes import Dims
from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Var
from jaxshard.loss.params import lookup
from jaxshard.loss.params.unshard import LOOKUP_MARK, MARK, deferred
from jaxshard.programs.jaxprs import equations, inner_jaxpr, is_literal, open_jaxpr, scan_split
from jaxshard.programs.primitives import CASTS, CONVERT, INLINED, REMAT, SCAN, mark_of


def why_not_lazy(
    jaxpr: Jaxpr, index: int, dims: Dims, *, looked_up_by: Dims | None = None, once: bool = False
) -> str | None:
    """None if input `index` of the traced loss goes to marks and lookups alone, else its first other use, in words.

    Args:
      jaxpr, index: the loss, and the parameter's place among its inputs.
      dims: how its gradient is cut.
      looked_up_by: how a table is cut whose rows are exchanged; None: by `dims`.
      once: its gradient is to be reduced once, so it may go to one mark only, and to none in a loop over other things.
    """
    return _Search(dims, dims if looked_up_by is None else looked_up_by, once).why_not(jaxpr, index, in_loop=False)


@dataclasses.dataclass(frozen=True)
class _Search:
    """Looks for other uses of a parameter cut by `dims`. (A lookup in a loop would exchange rows at every step.)"""

    dims: Dims
    looked_up_by: Dims
    once: bool

    def why_not(self, jaxpr: Jaxpr, index: int, *, in_loop: bool) -> str | None:
        opened = open_jaxpr(jaxpr)
        return self._of_variable(opened, opened.invars[index], in_loop)

    def _of_variable(self, jaxpr: OpenJaxpr, var: Var, in_loop: bool) -> str | None:
        if any(out is var for out in jaxpr.outvars):
            return "returned or carried through a scan"
        if self.once and num_uses(jaxpr, var) > 1:
            return "used in several places"
        reasons = (self._of_use(jaxpr, eqn, position, in_loop) for eqn, position in uses_of(jaxpr, var))
        return next(filter(None, reasons), None)

    def _of_use(self, jaxpr: OpenJaxpr, eqn: Equation, position: int, in_loop: bool) -> str | None:
        name = eqn.primitive.name
        if mark(eqn) or (not in_loop and looks_up(jaxpr, eqn, position, self.looked_up_by, asked=False)):
            return None
        if (part := deferred(eqn)) is not None:
            return part.why_not_lazy(position, eqn.invars[position].aval.ndim, self.dims)
        if name in CASTS:
            return self._of_variable(jaxpr, eqn.outvars[0], in_loop)
        if name in INLINED or name in REMAT:
            return self.why_not(inner_jaxpr(eqn), position, in_loop=in_loop)
        if name != SCAN:
            return f"used by {name}"
        num_consts, num_carry = scan_split(eqn)
        if num_consts <= position < num_consts + num_carry:
            return "carried through a scan"
        if self.once and position < num_consts:
            return "used in every step of a scan"
        if position >= num_consts and any(-dim == eqn.invars[position].aval.ndim for dim, _ in self.dims):
            return "cut on the dim that a scan runs over"
        return self.why_not(inner_jaxpr(eqn), position, in_loop=True)


def defers(jaxpr: Jaxpr) -> bool:
    """Whether a part of the program runs later, by rules of its own: a pipeline."""
    return any(deferred(eqn) is not None for eqn in equations(jaxpr))


def mark(eqn: Equation) -> str:
    """The mark that an equation leaves: of `unshard`, of `lookup`, or none ("")."""
    name = mark_of(eqn)
    return name if name in (MARK, LOOKUP_MARK) else ""


def looks_up(jaxpr: OpenJaxpr, eqn: Equation, position: int, dims: Dims, *, asked: bool) -> bool:
    """Whether all that an equation does with its operand, a table cut by `dims`, is to look rows up for an exchange.

    Before, the table may be cast and marked. `asked`: rows are exchanged whatever that costs.
    """
    name = eqn.primitive.name
    if mark(eqn):
        return only_looked_up(jaxpr, eqn.outvars[0], dims, asked=asked or mark(eqn) == LOOKUP_MARK)
    if name == CONVERT:
        is_floating = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
        return is_floating and only_looked_up(jaxpr, eqn.outvars[0], dims, asked=asked)
    if name in INLINED and deferred(eqn) is None:
        inner = open_jaxpr(inner_jaxpr(eqn))
        return only_looked_up(inner, inner.invars[position], dims, asked=asked)
    return lookup.is_worth_it(eqn, position, dims, asked=asked)


def only_looked_up(jaxpr: OpenJaxpr, var: Var, dims: Dims, *, asked: bool = False) -> bool:
    """Whether all uses of a table, at least one, look rows up for an exchange."""
    if any(out is var for out in jaxpr.outvars):
        return False
    uses = uses_of(jaxpr, var)
    return bool(uses) and all(looks_up(jaxpr, eqn, i, dims, asked=asked) for eqn, i in uses)


def is_looked_up(jaxpr: OpenJaxpr, var: Var, dims: Dims) -> bool:
    """Whether some use of a table looks rows up for an exchange."""
    return any(looks_up(jaxpr, eqn, i, dims, asked=False) for eqn, i in uses_of(jaxpr, var))


def num_uses(jaxpr: OpenJaxpr, var: Var) -> int:
    """How often a program's equations read a variable, or the program returns it."""
    return len(uses_of(jaxpr, var)) + sum(v is var for v in jaxpr.outvars)


def uses_of(jaxpr: OpenJaxpr, var: Var) -> list[tuple[Equation, int]]:
    """The equations that read a variable, each with the position of that operand."""
    return [(eqn, i) for eqn in jaxpr.eqns for i, operand in enumerate(eqn.invars) if operand is var]


def first_used_after(jaxpr: OpenJaxpr, place: int) -> list[Var]:
    """The variables that equations after the one at `place` use, and none before."""
    used = {v for eqn in jaxpr.eqns[: place + 1] for v in eqn.invars if not is_literal(v)}
    later = dict.fromkeys(v for eqn in jaxpr.eqns[place + 1 :] for v in eqn.invars if not is_literal(v))
    return [v for v in later if v not in used]
