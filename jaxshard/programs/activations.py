"""Adds an operation to each product of activations and weights in a traced program."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr
from jaxshard.programs.jaxprs import inner_jaxpr, is_literal, open_jaxpr, scan_split
from jaxshard.programs.primitives import INLINED, REMAT, SCAN, kind_of
from jaxshard.programs.questions import variables_that_depend

Then: TypeAlias = Callable[[jax.Array, int], jax.Array]


def with_each(program: Jaxpr, by_rows: Sequence[bool], num_rows: int, then: Then) -> Jaxpr:
    """The program, in which each product of activations and weights is replaced by `then(product, dim of rows)`.

    Activations depend on the batch, and weights do not. Products in a loop over layers, a remat or a call count too.

    Args:
      by_rows: for each input, whether it depends on the batch.
      num_rows: the size of the batch's dim. Products in which it has another size, as it is merged with others, stay.
      then: traced for each product.
    """
    return _Rewriting(num_rows, then).rewritten(program, by_rows)


class _Rewriting:
    def __init__(self, num_rows: int, then: Then):
        self._num_rows, self._then = num_rows, then
        self._known: dict[tuple[int, tuple[bool, ...]], tuple[Jaxpr, Jaxpr]] = {}  # the first is kept alive: its id

    def rewritten(self, program: Jaxpr, by_rows: Sequence[bool]) -> Jaxpr:
        """One program for all equal ones, so that JAX differentiates and lowers it once."""
        key = id(open_jaxpr(program)), tuple(by_rows)
        if key not in self._known:
            inner = open_jaxpr(program)
            new = inner.replace(eqns=self._equations(inner, by_rows))
            whole = program.replace(jaxpr=new) if hasattr(program, "jaxpr") else new
            self._known[key] = program, whole
        return self._known[key][1]

    def _equations(self, jaxpr: OpenJaxpr, by_rows: Sequence[bool]) -> list[Equation]:
        depend = variables_that_depend(jaxpr, by_rows)
        found = list[Equation]()
        for eqn in jaxpr.eqns:
            known = [not is_literal(v) and v in depend for v in eqn.invars]
            name = eqn.primitive.name
            if name in INLINED or name in REMAT or name == SCAN:
                found.append(self._call(eqn, known, [v in depend for v in eqn.outvars]))
            else:
                found += self._followed(eqn, known)
        return found

    def _call(self, eqn: Equation, known: list[bool], outs: list[bool]) -> Equation:
        if eqn.primitive.name == SCAN:  # what a step leaves behind is what the next one takes
            consts, count = scan_split(eqn)
            known[consts : consts + count] = outs[:count]
        inner = inner_jaxpr(eqn)
        key = next(key for key, value in eqn.params.items() if value is inner)
        return eqn.replace(params={**eqn.params, key: self.rewritten(inner, known)})

    def _followed(self, eqn: Equation, known: Sequence[bool]) -> list[Equation]:
        """The equation, and `then` if it is a product of activations and weights."""
        dim = _dim_of_rows(eqn, known, self._num_rows)
        if dim is None:
            return [eqn]
        result = eqn.outvars[0]
        trace: Any = jax.make_jaxpr(self._then, static_argnums=1)  # pyright: ignore[reportUnknownMemberType]
        after = open_jaxpr(trace(result.aval, dim))
        *before, last = after.eqns
        return [eqn.replace(outvars=after.invars), *before, last.replace(outvars=[result])]


def _dim_of_rows(eqn: Equation, by_rows: Sequence[bool], num_rows: int) -> int | None:
    """The dim of a product's result in which the batch's rows lie; None of any other operation, or if unknown."""
    if kind_of(eqn) not in ("conv", "dot") or sum(by_rows) != 1:
        return None
    place = by_rows.index(True)
    dims = [d for d in _dims_of(eqn, place) if eqn.outvars[0].aval.shape[d] == num_rows]
    return dims[0] if dims else None


def _dims_of(eqn: Equation, place: int) -> Sequence[int]:
    """The dims of a product's result in which an operand's rows may lie."""
    if kind_of(eqn) == "conv":
        return [eqn.params["dimension_numbers"].out_spec[0]] if place == 0 else []
    contracted, batched = eqn.params["dimension_numbers"]
    first = len(batched[0])
    free = [v.aval.ndim - first - len(c) for v, c in zip(eqn.invars, contracted, strict=True)]
    own = range(first, first + free[0]) if place == 0 else range(first + free[0], first + sum(free))
    return [*range(first), *own]
