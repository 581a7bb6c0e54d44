"""How the traced loss uses each parameter: through marks alone, for lookups, or as a whole."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxshard.base.types import Dims, DType, Equation, Jaxpr, OpenJaxpr, Var
from jaxshard.loss.params import lookup
from jaxshard.loss.params.unshard import LOOKUP_MARK, MARK, deferred
from jaxshard.programs.jaxprs import equations, inner_jaxpr, is_literal, open_jaxpr, scan_split
from jaxshard.programs.primitives import CASTS, CONVERT, INLINED, LINEAR, MOVES, REMAT, SCAN, SUMS, mark_of

CUT_LAYERS = "sharded on the dim that a scan iterates over"


def why_not_lazy(
    jaxpr: Jaxpr,
    index: int,
    dims: Dims,
    *,
    looked_up_by: Dims | None = None,
    once: bool = False,
    cast: bool = False,
) -> str | None:
    """None if only marks and lookups use input `index` of the traced loss, else its first other use, in words.

    Args:
      jaxpr, index: the loss, and the parameter's index among its inputs.
      dims: how its gradient is cut.
      looked_up_by: how a table is cut for lookups that exchange rows; None: by `dims`.
      once: its gradient is reduced once, so allowed is exactly one mark, not inside a scan that does not slice it.
      cast: every use casts it to one dtype, and may do so before a mark.
    """
    by = dims if looked_up_by is None else looked_up_by
    return _Search(dims, by, once, cast).why_not(jaxpr, index, in_loop=False)


@dataclasses.dataclass(frozen=True)
class _Search:
    """Finds other uses of a parameter cut by `dims`. (A lookup in a loop would exchange rows in each iteration.)"""

    dims: Dims
    looked_up_by: Dims
    once: bool
    cast: bool

    def why_not(self, jaxpr: Jaxpr, index: int, *, in_loop: bool) -> str | None:
        opened = open_jaxpr(jaxpr)
        return self._of_variable(opened, opened.invars[index], in_loop)

    def _of_variable(self, jaxpr: OpenJaxpr, var: Var, in_loop: bool) -> str | None:
        if any(out is var for out in jaxpr.outvars):
            return "returned or carried through a scan"
        if self.once and num_uses(jaxpr, var) > 1:
            return "used more than once"
        reasons = (self._of_use(jaxpr, eqn, position, in_loop) for eqn, position in uses_of(jaxpr, var))
        return next(filter(None, reasons), None)

    def _of_use(self, jaxpr: OpenJaxpr, eqn: Equation, position: int, in_loop: bool) -> str | None:
        name = eqn.primitive.name
        if mark(eqn) or (not in_loop and looks_up(jaxpr, eqn, position, self.looked_up_by, asked=False)):
            return None
        if (part := deferred(eqn)) is not None:
            return part.why_not_lazy(position, eqn.invars[position].aval.ndim, self.dims, self.cast)
        if name in CASTS or (self.cast and name == CONVERT):
            return self._of_variable(jaxpr, eqn.outvars[0], in_loop)
        if name in INLINED or name in REMAT:
            return self.why_not(inner_jaxpr(eqn), position, in_loop=in_loop)
        if name != SCAN:
            return f"used by {name}"
        num_consts, num_carry = scan_split(eqn)
        if num_consts <= position < num_consts + num_carry:
            return "carried through a scan"
        if self.once and position < num_consts:
            return "used in every iteration of a scan"
        if position >= num_consts and any(-dim == eqn.invars[position].aval.ndim for dim, _ in self.dims):
            return CUT_LAYERS
        return self.why_not(inner_jaxpr(eqn), position, in_loop=True)


def computed_in(jaxpr: Jaxpr, index: int) -> DType | None:
    """The dtype to which every use of input `index` casts it, moved or not, if that is one narrower floating dtype.

    Gathered in that dtype, the parameter gives the same results.
    """
    inner = open_jaxpr(jaxpr)
    var = inner.invars[index]
    found = set(_cast_to(inner, var)) if jnp.issubdtype(var.aval.dtype, jnp.floating) else set()
    return found.pop() if len(found) == 1 else None


def casts_to(jaxpr: Jaxpr, index: int) -> Iterator[DType | None]:
    """For each use of input `index`, the narrower floating dtype to which it casts it; None: it takes it as it is."""
    inner = open_jaxpr(jaxpr)
    return _cast_to(inner, inner.invars[index])


def _cast_to(jaxpr: OpenJaxpr, var: Var) -> Iterator[DType | None]:
    """As `casts_to`, of a variable."""
    if any(out is var for out in jaxpr.outvars):
        yield None
    for eqn, position in uses_of(jaxpr, var):
        name, carried = eqn.primitive.name, range(0)
        if name == SCAN:
            num_consts, num_carry = scan_split(eqn)
            carried = range(num_consts, num_consts + num_carry)
        if name == CONVERT:
            new = jnp.dtype(eqn.params["new_dtype"])
            is_narrower = jnp.issubdtype(new, jnp.floating) and new.itemsize < var.aval.dtype.itemsize
            yield new if is_narrower else None
        elif name in KEEPS_NUMBERS:
            for out in eqn.outvars:
                yield from _cast_to(jaxpr, out)
        elif (part := deferred(eqn)) is not None:
            yield from part.casts_to(position)
        elif (name in INLINED or name in REMAT or name == SCAN) and position not in carried:
            yield from casts_to(inner_jaxpr(eqn), position)
        else:
            yield None


KEEPS_NUMBERS = MOVES & SUMS
"""Operations whose results are numbers of their operands, marks among them: cast before or after, they are the same."""

ENTERED = INLINED | REMAT | {SCAN}
"""Calls in which a parameter may still be cut."""


def defers(jaxpr: Jaxpr) -> bool:
    """Whether the program has a deferred part, with its own backward schedule: a pipeline."""
    return any(deferred(eqn) is not None for eqn in equations(jaxpr))


def mark(eqn: Equation) -> str:
    """The mark that an equation makes: that of `unshard` or `lookup`, or ""."""
    name = mark_of(eqn)
    return name if name in (MARK, LOOKUP_MARK) else ""


def looks_up(jaxpr: OpenJaxpr, eqn: Equation, position: int, dims: Dims, *, asked: bool) -> bool:
    """Whether an equation's operand, a table cut by `dims`, serves only lookups that exchange rows.

    The table may be cast and marked before. `asked`: rows are exchanged, whatever that costs.
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
    """Whether a table has uses, and all are lookups that exchange rows."""
    if any(out is var for out in jaxpr.outvars):
        return False
    uses = uses_of(jaxpr, var)
    return bool(uses) and all(looks_up(jaxpr, eqn, i, dims, asked=asked) for eqn, i in uses)


def is_looked_up(jaxpr: OpenJaxpr, var: Var, dims: Dims) -> bool:
    """Whether some use of a table is a lookup that exchanges rows."""
    return any(looks_up(jaxpr, eqn, i, dims, asked=False) for eqn, i in uses_of(jaxpr, var))


def num_uses(jaxpr: OpenJaxpr, var: Var) -> int:
    """How many times a program's equations read a variable, or the program returns it."""
    return len(uses_of(jaxpr, var)) + sum(v is var for v in jaxpr.outvars)


def uses_of(jaxpr: OpenJaxpr, var: Var) -> Sequence[tuple[Equation, int]]:
    """The equations that read a variable, each with the position of that operand."""
    if jaxpr not in _uses:
        found = _uses[jaxpr] = {}
        for eqn in jaxpr.eqns:
            for i, operand in enumerate(eqn.invars):
                if not is_literal(operand):
                    found.setdefault(operand, []).append((eqn, i))
    return _uses[jaxpr].get(var, ())


_uses: weakref.WeakKeyDictionary[OpenJaxpr, dict[Var, list[tuple[Equation, int]]]] = weakref.WeakKeyDictionary()


def first_used_after(jaxpr: OpenJaxpr, place: int) -> list[Var]:
    """The variables that only equations after the one at `place` use."""
    used = {v for eqn in jaxpr.eqns[: place + 1] for v in eqn.invars if not is_literal(v)}
    later = dict.fromkeys(v for eqn in jaxpr.eqns[place + 1 :] for v in eqn.invars if not is_literal(v))
    return [v for v in later if v not in used]


def trails(
    program: Jaxpr,
    var: Var,
    entered: frozenset[str],
    *,
    through: frozenset[str] = CASTS,
    around: Sequence[Equation] = (),
) -> Iterator[tuple[Equation, ...]]:
    """The trail of each use of a variable: the calls around it, then the use.

    Args:
      entered: calls that are searched inside.
      through: operations whose results are searched in their place.
      around: the calls around the program.
    """
    for eqn, position in uses_of(open_jaxpr(program), var):
        trail, name = (*around, eqn), eqn.primitive.name
        if name in through and not mark(eqn):
            yield from trails(program, eqn.outvars[0], entered, through=through, around=around)
        elif name in entered and deferred(eqn) is None:
            inner = open_jaxpr(inner_jaxpr(eqn))
            yield from trails(inner, inner.invars[position], entered, through=through, around=trail)
        else:
            yield trail


def is_needed(jaxpr: OpenJaxpr, eqn: Equation) -> bool:
    """Whether the backward pass may need what an equation makes of a parameter."""
    waiting, seen = [eqn], {id(eqn)}
    while waiting:
        eqn = waiting.pop()
        if any(v is out for v in jaxpr.outvars for out in eqn.outvars):
            return True
        for reader, position in (use for out in eqn.outvars for use in uses_of(jaxpr, out)):
            if reader.primitive.name not in LINEAR:
                return True
            if is_small(reader, position) and id(reader) not in seen:
                seen.add(id(reader))
                waiting.append(reader)
    return False


def is_small(eqn: Equation, position: int) -> bool:
    """Whether the result is no larger than the operand: a parameter that is cut or scaled, no activation."""
    return eqn.outvars[0].aval.size <= eqn.invars[position].aval.size


# Policies of `jax.checkpoint` that name a mark.


def is_named_by(policy: Any, mark: str) -> bool:
    """Whether a policy does with values of this mark something else than with values of any other name."""
    return _answer(policy, mark) != _answer(policy, "any other name")


def refuses(policy: Any, mark: str) -> bool:
    """Whether a policy names the mark so that its values are not saved, as `save_anything_except_these_names` does."""
    return policy is not None and is_named_by(policy, mark) and _answer(policy, "any other name") is True


def saves(policy: Any, mark: str) -> bool:
    """Whether a policy saves values of this mark."""
    return policy is not None and _answer(policy, mark) is True


def _answer(policy: Any, name: str) -> object:
    """What a policy says of a value of this name; None if it raises: it may know only the operations of its layer."""
    primitive, aval = _naming()
    with contextlib.suppress(Exception):
        return policy(primitive, aval, name=name)
    return None


@functools.cache
def _naming() -> tuple[Any, Any]:
    """The primitive of `checkpoint_name`, and the type of an operand."""
    (eqn,) = jax.make_jaxpr(lambda x: checkpoint_name(x, "a name"))(0.0).eqns
    return eqn.primitive, eqn.invars[0].aval
