"""Whether a unit of matrix work treats the layers of a stack apart and alike, and what it does to one layer.

Its program is compared with that of a stack of another number of layers. Where the two have the same operations, and
each number in them either is the same or grows with the layers, the program of one layer follows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxshard.base.jaxprs import is_literal, open_jaxpr
from jaxshard.base.rerun import Values, anew
from jaxshard.base.types import Jaxpr, Var
from jaxshard.core.matrix_units import Unit
from jaxshard.inner.equal_params import same
from jaxshard.rows.arithmetic import Arithmetic
from jaxshard.rows.labels import Label, Part, PerRow
from jaxshard.rows.walk import Walk, array_label


class OneLayer(NamedTuple):
    """What a unit does to one layer, as a stack of one.

    Attributes:
      program: of the whole stack.
      changed: by the id of an equation, the parameters that it has for one layer.
      stacked: for each operand, then for each result, whether it is a stack.
    """

    program: Jaxpr
    changed: Mapping[int, Mapping[str, Any]]
    stacked: tuple[bool, ...]

    def run(self, values: Values) -> list[jax.Array]:
        """The results, from operands whose stacks have one layer."""
        return anew(self.program, values, self.changed)


def one_layer(unit: Unit, other: Unit, size: int, other_size: int) -> OneLayer | None:
    """What `unit` does to each of `size` layers; None where it does not treat them apart and alike.

    `other` is the same unit for `other_size` layers.
    """
    pairs = [*zip(unit.ins, other.ins, strict=False), *zip(unit.outs, other.outs, strict=False)]
    if (len(unit.ins), len(unit.outs)) != (len(other.ins), len(other.outs)):
        return None
    stacked = tuple(_is_stack(v, w, size, other_size) for v, w in pairs)
    if not all(yes or v.aval.shape == w.aval.shape for yes, (v, w) in zip(stacked, pairs, strict=True)):
        return None
    changed: dict[int, Mapping[str, Any]] = {}
    try:
        _compare(unit.program, other.program, (size, other_size), changed)
    except _Unlike:
        return None
    return OneLayer(unit.program, changed, stacked) if _is_apart(unit, stacked, size) else None


def _is_stack(v: Var, w: Var, size: int, other_size: int) -> bool:
    a, b = tuple(v.aval.shape), tuple(w.aval.shape)
    return a[:1] == (size,) and b[:1] == (other_size,) and a[1:] == b[1:]


def _is_apart(unit: Unit, stacked: Sequence[bool], size: int) -> bool:
    """Whether each layer's results depend on that layer alone, in order."""
    rows = PerRow((Part(0, 1, size, 1, 1),))
    labels: list[Label] = [rows if yes else array_label(v) for v, yes in zip(unit.ins, stacked, strict=False)]
    outs = Walk(Arithmetic(size, 1, None, frozenset), (), True).through(unit.program, labels)
    return all(
        isinstance(label, PerRow) and label.parts == rows.parts and not label.order and not label.plus for label in outs
    )


class _Unlike(Exception):
    """The programs differ in more than the number of layers."""


def _compare(x: Jaxpr, y: Jaxpr, sizes: tuple[int, int], changed: dict[int, Mapping[str, Any]]) -> None:
    one, two = open_jaxpr(x), open_jaxpr(y)
    constants = same(list(getattr(x, "consts", ())), list(getattr(y, "consts", ())))
    if not constants or len(one.eqns) != len(two.eqns) or len(one.invars) != len(two.invars):
        raise _Unlike
    partner = dict(zip((*one.constvars, *one.invars), (*two.constvars, *two.invars), strict=True))
    for a, b in zip(one.eqns, two.eqns, strict=True):
        if a.primitive is not b.primitive or a.params.keys() != b.params.keys():
            raise _Unlike
        _compare_wires(a.invars, b.invars, partner)
        partner |= dict(zip(a.outvars, b.outvars, strict=False))
        if a.params.get("branches_platforms") and not same(list(a.params["branches"]), list(b.params["branches"])):
            raise _Unlike  # XLA chooses the branch, so that none is run anew
        found = {
            key: _param(value, b.params[key], sizes, changed)
            for key, value in a.params.items()
            if "sharding" not in key
        }
        new = {key: value for key, value in found.items() if value is not a.params[key]}
        if new:
            changed[id(a)] = new
    _compare_wires(one.outvars, two.outvars, partner)


def _compare_wires(vs: Sequence[Var], ws: Sequence[Var], partner: Mapping[Var, Var]) -> None:
    """Raises unless these are the same constants, and partners."""

    def alike(v: Var, w: Var) -> bool:
        return is_literal(w) and same(v.val, w.val) if is_literal(v) else partner[v] is w

    if len(vs) != len(ws) or not all(map(alike, vs, ws)):
        raise _Unlike


def _param(a: Any, b: Any, sizes: tuple[int, int], changed: dict[int, Mapping[str, Any]]) -> Any:
    """The parameter for one layer; `a` itself if it stays."""
    if hasattr(open_jaxpr(a), "eqns"):
        if not hasattr(open_jaxpr(b), "eqns"):
            raise _Unlike
        inside: dict[int, Mapping[str, Any]] = {}
        _compare(a, b, sizes, inside)
        changed |= inside
        return a
    if isinstance(a, tuple) and isinstance(b, tuple) and type(a) is tuple:
        if len(a) != len(b):
            raise _Unlike
        new = tuple(_param(x, y, sizes, changed) for x, y in zip(a, b, strict=True))
        return a if all(x is y for x, y in zip(new, a, strict=True)) else new
    if same(a, b):
        return a
    size, other = sizes
    if type(a) is int and type(b) is int and a % size == 0 and a * other == b * size:
        return a // size
    raise _Unlike
