"""Custom derivatives: whether what a user's rule returns is what the loss's value says.

If a loss is the total, of some ratio, of devices' losses, then the cotangent of a value with a label has the dual
label, and so must have what the rule returns. The rule's own program is followed, at both numbers of rows.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxshard.base.types import Equation, Jaxpr
from jaxshard.programs.jaxprs import core, is_float, is_literal, open_jaxpr, operands_of, part_of
from jaxshard.programs.rows.labels import Label, Trail, joined

Outputs: TypeAlias = Callable[[Jaxpr, Jaxpr, Sequence[Label]], Sequence[Label]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A call with a derivative of its own, in the two programs, with the labels of its operands and results."""

    one: Equation
    two: Equation
    operands: Sequence[Label]
    results: Sequence[Label]
    trail: Trail

    def holds(self, ratio: float, parts: int, outputs: Outputs) -> bool:
        """Whether its gradients have the labels that they must have; `outputs`: labels two programs' outputs."""
        try:
            return self._is_dual(ratio, parts, outputs)
        except Exception:  # of any type: it is the user's own rule
            return False

    def _is_dual(self, ratio: float, parts: int, outputs: Outputs) -> bool:
        by_var = {v: x for v, x in zip(self.one.invars, self.operands, strict=True) if not is_literal(v)}
        names, given = [*by_var], [*by_var.values()]
        results = zip(self.results, self.one.outvars, strict=True)
        cotangents = [_dual(x, ratio) for x, v in results if is_float(v)]
        found = outputs(backward(self.one), backward(self.two), [*given, *cotangents])
        wanted = [_dual(x, ratio) for x, v in zip(given, names, strict=True) if is_float(v)]
        pairs = zip(found, [*self.results, *wanted], strict=True)
        return all(x.kind != "other" and joined([x, y], parts) is not None for x, y in pairs)


def backward(eqn: Equation) -> Jaxpr:
    """The program of a call and of its backward pass: (operands, cotangents) to (results, gradients)."""
    ins = operands_of([eqn])
    call = core().jaxpr_as_fun(part_of(open_jaxpr(jax.make_jaxpr(lambda: ())()), [eqn], ins, eqn.outvars))
    smooth = [is_float(v) for v in ins]

    def run(*values: jax.Array) -> list[jax.Array]:
        operands, cotangents = values[: len(ins)], values[len(ins) :]

        def of(*moving: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            rest = iter(moving)
            outs = call(*(next(rest) if yes else x for x, yes in zip(operands, smooth, strict=True)))
            return [x for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)], outs

        moving = [x for x, yes in zip(operands, smooth, strict=True) if yes]
        _, pull, outs = jax.vjp(of, *moving, has_aux=True)
        return [*outs, *pull(list(cotangents))]

    shapes = [v.aval for v in ins] + [v.aval for v in eqn.outvars if is_float(v)]
    return jax.make_jaxpr(run)(*shapes)


def _dual(label: Label, ratio: float) -> Label:
    """The label of a value's cotangent, in a loss that is the total of this ratio."""
    mine = 1.0 if label.ratio is None else label.ratio
    if label.kind == "rows":
        return label.with_(ratio=ratio / mine, fixed=False, value=None)
    if label.kind == "total":
        return Label("same", ratio / mine)
    return Label("total", ratio / mine)
