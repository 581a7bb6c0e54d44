"""Whether an operation has the same parameters in two traced programs."""

import numpy as np

from jaxshard.base.jaxprs import is_literal, open_jaxpr
from jaxshard.base.primitives import LOOPS
from jaxshard.base.types import Equation, Jaxpr, Var

_SHAPES = frozenset({"shape", "new_sizes"})  # of results, which are compared themselves
_FOLLOWED = frozenset({"jaxpr", "branches", "cond_jaxpr", "body_jaxpr"})  # programs of loops, which are followed


def same_params(a: Equation, b: Equation) -> bool:
    """Whether two equations of one primitive have equal parameters, but for shapes of results and programs of loops."""
    apart = _FOLLOWED if a.primitive.name in LOOPS else _SHAPES
    return all(key in apart or same(x, b.params.get(key)) for key, x in a.params.items())


def same(x: object, y: object) -> bool:
    """Whether two values are equal, arrays and floats bit for bit; an unreadable one (a tracer) equals only itself."""
    if x is y:
        return True
    try:
        if hasattr(open_jaxpr(x), "eqns"):
            return _same_program(x, y)
        if isinstance(x, tuple | list):
            return type(x) is type(y) and len(x) == len(y) and all(map(same, x, y))  # pyright: ignore
        if hasattr(x, "dtype") or isinstance(x, float | complex):
            x, y = np.asarray(x), np.asarray(y)
            return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        return type(x) is type(y) and bool(x == y)
    except Exception:  # a type that we do not know may raise anything; it is then not known to be equal
        return False


def _same_program(x: Jaxpr, y: Jaxpr) -> bool:
    """Whether two programs have the same equations, wired alike, with equal parameters and constants."""
    one, two = open_jaxpr(x), open_jaxpr(y)
    place: dict[Var, Var] = {}

    def bound(vs: list[Var], ws: list[Var]) -> bool:
        place.update(zip(vs, ws, strict=True))
        return all(v.aval == w.aval for v, w in zip(vs, ws, strict=True))

    def read(vs: list[Var], ws: list[Var]) -> bool:
        pairs = zip(vs, ws, strict=True)
        return all(is_literal(w) and same(v.val, w.val) if is_literal(v) else place[v] is w for v, w in pairs)

    def alike(a: Equation, b: Equation) -> bool:
        named = a.primitive is b.primitive and a.params.keys() == b.params.keys()
        equal = named and all(same(a.params[key], b.params[key]) for key in a.params)
        return equal and read(a.invars, b.invars) and bound(a.outvars, b.outvars)

    constants = same(list(getattr(x, "consts", ())), list(getattr(y, "consts", ())))
    begin = constants and bound([*one.constvars, *one.invars], [*two.constvars, *two.invars])
    equations = len(one.eqns) == len(two.eqns) and all(map(alike, one.eqns, two.eqns))
    return begin and equations and read(one.outvars, two.outvars)
