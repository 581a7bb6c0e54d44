"""Walks two traced programs side by side: which equations and variables correspond."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np

from jaxshard.base.types import Equation, Jaxpr, Var
from jaxshard.programs.jaxprs import is_literal, open_jaxpr


class Unlike(ValueError):
    """Two programs differ from these equations on; None: that program has ended."""

    def __init__(self, one: Equation | None = None, two: Equation | None = None):
        super().__init__("the programs differ")
        self.one, self.two = one, two


class Partners:
    """For each variable of the first program, its partner: the corresponding one of the second."""

    def __init__(self):
        self._of: dict[Var, Var] = {}

    def bind(self, vs: Iterable[Var], ws: Iterable[Var]) -> None:
        """Makes the variables partners, one by one."""
        self._of.update(zip(vs, ws, strict=True))

    def of(self, v: Var) -> Var:
        """The partner of a variable; a number is its own."""
        return v if is_literal(v) else self._of[v]

    def are(self, v: Var, w: Var) -> bool:
        """Whether the two are partners, or the same number."""
        if is_literal(v):
            return is_literal(w) and same(v.val, w.val)
        return not is_literal(w) and self._of.get(v) is w

    def all_are(self, vs: list[Var], ws: list[Var]) -> bool:
        """Whether all pairs from `vs` and `ws` are partners."""
        return len(vs) == len(ws) and all(map(self.are, vs, ws))


def paired(
    one: Jaxpr, two: Jaxpr, partners: Partners | None = None, nothing: Callable[[Equation], bool] = lambda _: False
) -> Iterator[tuple[Equation, Equation]]:
    """The equations of both programs, in pairs.

    Before the first pair, `partners` gets the programs' constants and inputs; after each pair, its results. The caller
    checks whether a pair's operands are partners, and its parameters equal.

    Args:
      nothing: whether an equation of the first program would do nothing in the second, which may lack it. Its partner
        is then an equation from its operands' partners to themselves.

    Raises:
      Unlike: the programs differ in their number of inputs, or in their operations.
    """
    first, second, partners = open_jaxpr(one), open_jaxpr(two), partners or Partners()
    if len(first.invars) != len(second.invars):
        raise Unlike
    partners.bind(first.invars, second.invars)
    constants = min(len(first.constvars), len(second.constvars))  # shapes may differ in what they close over
    partners.bind(first.constvars[:constants], second.constvars[:constants])
    rest = iter(second.eqns)
    b = next(rest, None)
    for a in first.eqns:
        if b is not None and _form(a) == _form(b):
            yield a, b
            partners.bind(a.outvars, b.outvars)
            b = next(rest, None)
        elif nothing(a) and len(a.invars) == len(a.outvars):
            same = [partners.of(v) for v in a.invars]
            yield a, cast(Any, a).replace(invars=same, outvars=same)
            partners.bind(a.outvars, same)
        else:
            raise Unlike(a, b)
    if b is not None:
        raise Unlike(None, b)


def _form(eqn: Equation) -> tuple[str, int, int]:
    return eqn.primitive.name, len(eqn.invars), len(eqn.outvars)


def same_consts(one: Jaxpr, two: Jaxpr) -> bool:
    """Whether two programs close over the same values."""
    return same(*(list(getattr(program, "consts", ())) for program in (one, two)))


def same(x: object, y: object) -> bool:
    """Whether two values are equal, arrays and floats bit for bit; an unreadable one (a tracer) equals only itself."""
    if x is y:
        return True
    try:
        if hasattr(open_jaxpr(x), "eqns"):
            return same_program(x, y)
        if isinstance(x, tuple | list):
            return type(x) is type(y) and len(x) == len(y) and all(map(same, x, y))  # pyright: ignore
        if hasattr(x, "dtype") or isinstance(x, float | complex):
            x, y = np.asarray(x), np.asarray(y)
            return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        return type(x) is type(y) and bool(x == y)
    except Exception:  # a type that we do not know may raise anything; it is then not known to be equal
        return False


def same_program(one: Jaxpr, two: Jaxpr) -> bool:
    """Whether two programs have the same equations, wired alike, with equal types, parameters and constants."""
    first, second, partners = open_jaxpr(one), open_jaxpr(two), Partners()
    try:
        equal = all(_same_equation(a, b, partners) for a, b in paired(one, two, partners))
    except Unlike:
        return False
    heads = _same_types(first.constvars, second.constvars) and _same_types(first.invars, second.invars)
    return equal and heads and same_consts(one, two) and partners.all_are(first.outvars, second.outvars)


def _same_equation(a: Equation, b: Equation, partners: Partners) -> bool:
    equal = a.params.keys() == b.params.keys() and all(same(a.params[key], b.params[key]) for key in a.params)
    return equal and partners.all_are(a.invars, b.invars) and _same_types(a.outvars, b.outvars)


def _same_types(vs: list[Var], ws: list[Var]) -> bool:
    return len(vs) == len(ws) and all(v.aval == w.aval for v, w in zip(vs, ws, strict=True))
