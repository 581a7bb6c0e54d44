"""Finds out whether a unit runs the same program on each layer of a stack, independently; and that program.

The unit's program is compared with that for another number of layers. A dim counts layers if its size grows with
their number. Each operation is then checked by itself: if an operand has such a dim, the operation must keep it,
element by element; if only a result has it, it must repeat the same numbers along it. If all do, the unit has a
program for one layer; an operation that no rule covers counts as work on all layers together.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from jaxshard.base.types import Equation, Jaxpr, Var
from jaxshard.optimizer.owners.matrix_units import Unit
from jaxshard.programs.dims import Dim, keeps_apart
from jaxshard.programs.jaxprs import open_jaxpr, scan_split, subprograms
from jaxshard.programs.paired import Partners, Unlike, paired, same, same_consts
from jaxshard.programs.primitives import CALLS, COND, CONTROL, SCAN, SIZES, SOLVES
from jaxshard.programs.rerun import Values, anew

Changed: TypeAlias = dict[int, Mapping[str, Any]]  # equation id -> changed parameters


class OneLayer(NamedTuple):
    """A unit's work on one layer, as a stack of one.

    Attributes:
      program: the program for the whole stack.
      changed: equation id -> its parameters for one layer.
      stacked: for each operand, then for each result, whether it is a stack.
    """

    program: Jaxpr
    changed: Mapping[int, Mapping[str, Any]]
    stacked: tuple[bool, ...]

    def run(self, values: Values) -> list[jax.Array]:
        """The results, from operands whose stacks have one layer."""
        return anew(self.program, values, self.changed)


def one_layer(unit: Unit, other: Unit, size: int, other_size: int) -> OneLayer | None:
    """The work of `unit` on each of `size` layers; None if it does not run the same program on each, independently.

    `other` is the same unit for `other_size` layers.
    """
    if (len(unit.ins), len(unit.outs)) != (len(other.ins), len(other.outs)):
        return None
    pair = _Pair(size, other_size)
    try:
        pair.compare(unit.program, other.program)
        wires = [*zip(unit.ins, other.ins, strict=True), *zip(unit.outs, other.outs, strict=True)]
        stacked = tuple(pair.is_stack(v, w) for v, w in wires)
    except Unlike:
        return None
    return OneLayer(unit.program, pair.changed, stacked)


class _Pair:
    """Two programs of stacks of `size` and `other_size` layers, equation by equation."""

    def __init__(self, size: int, other_size: int):
        self.size, self.other_size = size, other_size
        self.changed: Changed = {}

    def compare(self, x: Jaxpr, y: Jaxpr) -> None:
        """Raises `Unlike` unless both run the same program on each layer; notes the parameters for one layer."""
        partners = Partners()
        for a, b in paired(x, y, partners):
            if a.params.keys() != b.params.keys() or not partners.all_are(a.invars, b.invars):
                raise Unlike(a, b)
            self._equation(a, b)
        if not same_consts(x, y) or not partners.all_are(open_jaxpr(x).outvars, open_jaxpr(y).outvars):
            raise Unlike

    def dim(self, v: Var, w: Var) -> Dim:
        """The dim of a variable that grows with the layers."""
        a, b = tuple(v.aval.shape), tuple(w.aval.shape)
        grown = [d for d, (m, n) in enumerate(zip(a, b, strict=False)) if m != n]
        if len(a) != len(b) or len(grown) > 1 or not all(self._grows(a[d], b[d]) for d in grown):
            raise Unlike
        return grown[0] if grown else None

    def is_stack(self, v: Var, w: Var) -> bool:
        """Whether the first dim of a variable, and no other, has the layers."""
        d = self.dim(v, w)
        if d is not None and (d, v.aval.shape[d]) != (0, self.size):
            raise Unlike
        return d is not None

    def _grows(self, a: Any, b: Any) -> bool:
        whole = type(a) is int and type(b) is int
        return whole and a % self.size == 0 and a * self.other_size == b * self.size

    def _equation(self, a: Equation, b: Equation) -> None:
        ins = [self.dim(v, w) for v, w in zip(a.invars, b.invars, strict=True)]
        outs = [self.dim(v, w) for v, w in zip(a.outvars, b.outvars, strict=True)]
        if a.primitive.name in CALLS | CONTROL | SOLVES:
            self._enter(a, b, ins, outs)
            return
        if not any(d is not None for d in (*ins, *outs)):
            self._note(a, b, None)
            return
        if a.effects or not keeps_apart(a, ins, outs):
            raise Unlike
        self._note(a, b, SIZES.get(a.primitive.name))

    def _note(self, a: Equation, b: Equation, sizes: str | None) -> None:
        """Notes the parameters for one layer; only `sizes`, a tuple, may differ."""
        for key, value in a.params.items():
            if "sharding" in key or _same_param(value, b.params[key]):
                continue
            if key != sizes:
                raise Unlike
            pairs = list(zip(value, b.params[key], strict=True))
            if not all(m == n or self._grows(m, n) for m, n in pairs):
                raise Unlike
            self.changed[id(a)] = {key: tuple(m if m == n else m // self.size for m, n in pairs)}

    def _enter(self, a: Equation, b: Equation, ins: Sequence[Dim], outs: Sequence[Dim]) -> None:
        """Checks the inner programs; a scan must not run over the layers."""
        name = a.primitive.name
        if name == SCAN:
            num_consts, num_carry = scan_split(a)
            if 0 in ins[num_consts + num_carry :] or 0 in outs[num_carry:]:
                raise Unlike  # the scan runs over the layers
        if name == COND and a.params.get("branches_platforms"):
            raise Unlike  # XLA chooses the branch, so `anew` cannot run it
        mine, others = list(subprograms(a)), list(subprograms(b))
        if len(mine) != len(others) or not all(same(a.params[key], b.params[key]) for key in _compared_params(a)):
            raise Unlike
        for x, y in zip(mine, others, strict=True):
            self.compare(x, y)


def _compared_params(eqn: Equation) -> list[str]:
    """The parameters of control flow that hold no program, no rule and no layout."""

    def holds_programs(value: Any) -> bool:
        listed = value if isinstance(value, tuple | list) else [value]
        return any(callable(one) or hasattr(open_jaxpr(one), "eqns") for one in listed)

    return [key for key, value in eqn.params.items() if "sharding" not in key and not holds_programs(value)]


def _same_param(a: Any, b: Any) -> bool:
    """Whether two parameters are equal; programs in them (how a scatter joins two numbers) have no layers."""
    if hasattr(open_jaxpr(a), "eqns") and hasattr(open_jaxpr(b), "eqns"):
        return str(a) == str(b)
    return same(a, b)
