"""Questions about a traced program's use of its inputs: each is a `Walk` over the program.

If there is no exact answer, a question gets its safe one; each function says which that is.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Var
from jaxshard.programs.jaxprs import axes_of_equation, core, equations_inside, is_float, subprograms, unnamed
from jaxshard.programs.primitives import (
    ALL_REDUCES,
    CLIPS,
    COLLECTIVE_KINDS,
    DIFFERS,
    DIV,
    GATHERS,
    KEEPS_SIGN,
    LINEAR,
    MAX,
    MOVES,
    MULTIPLIES,
    NO_GRADIENT,
    NOT_NEGATIVE,
    OWN_GRADIENT,
    SELECT,
    SUB,
    kind_of,
    power_of,
)
from jaxshard.programs.walk import Walk


def depends(program: Jaxpr, differs: Sequence[bool], summed: frozenset[str] | None = None) -> list[bool]:
    """For each output, whether it may depend on `axis_index` or on an input marked in `differs`.

    The result of a psum, pmax, pmin or all_gather over all axes in `summed` is independent of both.
    """
    return _Depends(summed).through(program, differs)


class _Marks(Walk[bool]):
    """Whether a value is marked: a join is marked if either value is; constants are not."""

    nothing = False

    def join(self, one: bool, other: bool) -> bool:
        return one or other

    def unknown(self, eqn: Equation, known: Sequence[bool]) -> bool:
        return any(known)


class _Depends(_Marks):
    def __init__(self, summed: frozenset[str] | None):
        self.summed = summed

    def of(self, eqn: Equation, known: Sequence[bool]) -> list[bool]:
        name = eqn.primitive.name
        return [not self._reduces(eqn) and (any(known) or name in DIFFERS)] * len(eqn.outvars)

    def unknown(self, eqn: Equation, known: Sequence[bool]) -> bool:
        return any(known) or any(inner.primitive.name in DIFFERS for inner in equations_inside(eqn))

    def chosen(self, by: bool, values: list[bool]) -> list[bool]:
        return [by or value for value in values]

    def _reduces(self, eqn: Equation) -> bool:
        """Whether all devices along the axes `summed` get one result."""
        is_one = eqn.primitive.name in ALL_REDUCES | GATHERS and not eqn.params.get("axis_index_groups")
        if self.summed is None or not is_one:
            return False
        return self.summed <= {*axes_of_equation(eqn)}


def varies_smoothly(program: Jaxpr, wrt: Sequence[bool], *, but_along: str | None = None) -> list[bool]:
    """For each output, whether it may have a gradient with respect to an input that is marked in `wrt`.

    Comparisons, whole numbers and `stop_gradient` have none. A custom derivative may give one to anything, as a
    straight-through estimator does to `round`. Results of collectives along the mesh axis `but_along` count as having
    none.
    """
    return _Smooth(but_along).through(program, wrt)


class _Smooth(_Marks):
    def __init__(self, but_along: str | None):
        self.but_along = but_along

    def of(self, eqn: Equation, known: Sequence[bool]) -> list[bool]:
        smooth = any(known) and eqn.primitive.name not in NO_GRADIENT and not self._moves(eqn)
        return [smooth] * len(eqn.outvars)

    def called(self, eqn: Equation, known: Sequence[bool]) -> Sequence[bool]:
        """A custom rule may give any gradient; but a primal program with a collective along the axis is followed."""
        own_rule = eqn.primitive.name in OWN_GRADIENT
        if own_rule and (self.but_along is None or not any(map(self._moves, equations_inside(eqn)))):
            return [any(known)] * len(eqn.outvars)
        return super().called(eqn, known)

    def solved(self, eqn: Equation, known: Sequence[bool]) -> list[bool]:
        """The derivative is that of the linear system, whatever the solver does."""
        return [any(known)] * len(eqn.outvars)

    def kept(self, v: Var, value: bool) -> bool:
        return value and is_float(v)

    def _moves(self, eqn: Equation) -> bool:
        """Whether an equation is a collective along the axis."""
        along = self.but_along
        return along is not None and eqn.primitive.name in COLLECTIVE_KINDS and along in axes_of_equation(eqn)


def variables_that_vary_smoothly(jaxpr: OpenJaxpr, wrt: Sequence[bool]) -> set[Var]:
    """All variables of a program that may have a gradient with respect to an input that is marked in `wrt`."""
    return _variables(jaxpr, lambda whole: varies_smoothly(whole, wrt))


def variables_that_depend(jaxpr: OpenJaxpr, differs: Sequence[bool]) -> set[Var]:
    """All variables of a program that may depend on `axis_index` or on an input marked in `differs`."""
    return _variables(jaxpr, lambda whole: depends(whole, differs))


def _variables(jaxpr: OpenJaxpr, question: Callable[[OpenJaxpr], list[bool]]) -> set[Var]:
    """The variables for which a question about a program's outputs is answered with yes."""
    made = [v for eqn in jaxpr.eqns for v in eqn.outvars if not isinstance(v, core().DropVar)]
    variables = [*jaxpr.invars, *made]
    whole = jaxpr.replace(outvars=variables, debug_info=unnamed(jaxpr, len(jaxpr.invars), len(variables)))
    return {v for v, yes in zip(variables, question(whole), strict=True) if yes}


def reaches(program: Jaxpr, names: frozenset[str], inputs: Sequence[bool]) -> list[bool]:
    """For each input, whether it is marked in `inputs` and an operand of a primitive of these names depends on it."""
    walk = _Reaches(names)
    walk.through(program, [yes << i for i, yes in enumerate(inputs)])
    return [bool(walk.reached >> i & 1) for i in range(len(inputs))]


class _Reaches(Walk[int]):
    """An answer has a bit for each input that a value depends on."""

    nothing = 0

    def __init__(self, names: frozenset[str]):
        self.names, self.reached = names, 0

    def join(self, one: int, other: int) -> int:
        return one | other

    def of(self, eqn: Equation, known: Sequence[int]) -> list[int]:
        return [self._made(known, eqn.primitive.name in self.names)] * len(eqn.outvars)

    def unknown(self, eqn: Equation, known: Sequence[int]) -> int:
        return self._made(known, any(inner.primitive.name in self.names for inner in equations_inside(eqn)))

    def _made(self, known: Sequence[int], is_reached: bool) -> int:
        made = functools.reduce(self.join, known, 0)
        self.reached |= made if is_reached else 0
        return made

    def chosen(self, by: int, values: list[int]) -> list[int]:
        return [by | value for value in values]


def hands_on(program: Jaxpr, marked: Sequence[bool]) -> list[bool]:
    """For each output, whether it may hold numbers of a marked input: unchanged, cast, moved, or chosen among others.

    True if unknown.
    """
    return _HandsOn().through(program, marked)


class _HandsOn(_Marks):
    def of(self, eqn: Equation, known: Sequence[bool]) -> Sequence[bool]:
        if eqn.primitive.name == SELECT:
            return [any(known[1:])]
        if kind_of(eqn) == "barrier":
            return known
        return [eqn.primitive.name in MOVES and any(known)] * len(eqn.outvars)


def never_negative(program: Jaxpr, known: Sequence[bool]) -> list[bool]:
    """For each output, whether it cannot be below 0, given which inputs cannot. False if unknown."""
    return _NeverNegative().through(program, known)


class _NeverNegative(Walk[bool]):
    nothing = False

    def join(self, one: bool, other: bool) -> bool:
        return one and other

    def literal(self, v: Var) -> bool:
        value = getattr(v, "val", -1)
        is_number = jnp.ndim(value) == 0 and not jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)
        return is_number and bool(value >= 0)

    def of(self, eqn: Equation, known: Sequence[bool]) -> list[bool]:
        name = eqn.primitive.name
        power = power_of(eqn)
        if name in NOT_NEGATIVE or (power and power % 2 == 0):
            return [True] * len(eqn.outvars)
        if name == MAX:
            return [any(known)]
        if name == SELECT:
            return [all(known[1:])]
        return [name in KEEPS_SIGN and all(known)] * len(eqn.outvars)

    def unknown(self, eqn: Equation, known: Sequence[bool]) -> bool:
        return False


def linear(program: Jaxpr, degrees: Sequence[int]) -> list[int]:
    """For each output, its degree in some inputs: 0 if it does not depend on them, 1 if linear, 2 if neither is known.

    Args:
      degrees: 1 for these inputs, 0 for others. Scalars (a norm that scales) count as 0, whatever they depend on.
    """
    return _Linear().through(program, degrees)


class _Linear(Walk[int]):
    nothing = 0
    _loops = 0  # the number of scans around this equation; inside one, a scalar may be an array's element

    def join(self, one: int, other: int) -> int:
        return max(one, other)

    def kept(self, v: Var, value: int) -> int:
        return value if getattr(v.aval, "ndim", 0) or self._loops else 0

    def of(self, eqn: Equation, known: Sequence[int]) -> list[int]:
        name = eqn.primitive.name
        most = max(known, default=0)
        if most == 0 or name in LINEAR or name in CLIPS or power_of(eqn) == 1:
            return [most] * len(eqn.outvars)
        if name == SELECT:
            return [max(known[1:])]
        if name == DIV:
            return [most if known[1] == 0 else 2]
        return [min(sum(known), 2) if name in MULTIPLIES else 2] * len(eqn.outvars)

    def unknown(self, eqn: Equation, known: Sequence[int]) -> int:
        return 2 if any(known) else 0

    def scanned(self, eqn: Equation, known: Sequence[int]) -> list[int]:
        self._loops += 1
        try:
            return super().scanned(eqn, known)
        finally:
            self._loops -= 1


def subtracts(program: Jaxpr, of: Sequence[bool], others: Sequence[bool]) -> bool:
    """Whether a program subtracts a value that depends on inputs `of` and one that depends on `others`."""
    walk = _Subtracts()
    walk.through(program, [*zip(of, others, strict=True)])
    return walk.found


class _Subtracts(Walk[tuple[bool, bool]]):
    """An answer says whether a value depends on inputs `of`, and on inputs `others`."""

    nothing = (False, False)

    def __init__(self):
        self.found = False

    def join(self, one: tuple[bool, bool], other: tuple[bool, bool]) -> tuple[bool, bool]:
        return one[0] or other[0], one[1] or other[1]

    def of(self, eqn: Equation, known: Sequence[tuple[bool, bool]]) -> list[tuple[bool, bool]]:
        if eqn.primitive.name == SUB:
            (a, b), (c, d) = known
            self.found |= (a and d and not c) or (c and b and not a)
        return [functools.reduce(self.join, known, self.nothing)] * len(eqn.outvars)

    def unknown(self, eqn: Equation, known: Sequence[tuple[bool, bool]]) -> tuple[bool, bool]:
        made = functools.reduce(self.join, known, self.nothing)
        self.found |= all(made) and any(True for _ in subprograms(eqn))
        return made
