"""Compares two traces of a loss, the second with twice the rows, to find which numbers grow with the rows."""

import math
from collections.abc import Sequence

from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Var
from jaxshard.programs.jaxprs import is_literal, open_jaxpr, subprograms
from jaxshard.programs.paired import paired
from jaxshard.programs.rows.labels import Degree


class Partners:
    """For each equation of a traced loss, its partner in a trace of `times` as many rows.

    Raises:
      ValueError: the two programs have different operations.
    """

    def __init__(self, jaxpr: Jaxpr, larger: Jaxpr, times: int = 2):
        self._of: dict[int, Equation] = {}
        self._outputs: dict[int, list[Var]] = {}
        self._log = math.log(times)
        self._align(jaxpr, larger)

    def _align(self, one: Jaxpr, two: Jaxpr) -> None:
        self._outputs[id(open_jaxpr(one))] = open_jaxpr(two).outvars
        for a, b in paired(one, two):
            if self._of.setdefault(id(a), b) is b:
                for mine, other in zip(subprograms(a), subprograms(b), strict=True):
                    self._align(mine, other)

    def degree_of_literal(self, eqn: Equation, position: int) -> Degree:
        """The power of the number of rows by which a literal in the program grows."""
        return self._of_pair(eqn.invars[position], self._of[id(eqn)].invars[position])

    def degree_of_output(self, jaxpr: OpenJaxpr, position: int) -> Degree:
        """As `degree_of_literal`, for a literal that a program returns."""
        return self._of_pair(jaxpr.outvars[position], self._outputs[id(jaxpr)][position])

    def _of_pair(self, one: Var, two: Var) -> Degree:
        return self._degree(one.val, two.val) if is_literal(two) else None

    def grows(self, eqn: Equation, position: int) -> bool:
        """Whether an operand's shape changes with the number of rows."""
        return eqn.invars[position].aval.shape != self._of[id(eqn)].invars[position].aval.shape

    def degree_of_sum(self, eqn: Equation, dims: Sequence[int]) -> Degree:
        """The power of the number of rows by which the number of elements in these dims grows."""
        shapes = eqn.invars[0].aval.shape, self._of[id(eqn)].invars[0].aval.shape
        return self._degree(*(math.prod(shape[d] for d in dims) for shape in shapes))

    def _degree(self, one: float, two: float) -> Degree:
        try:
            one, two = float(one), float(two)
        except TypeError:
            return 0
        if one == two or math.isnan(one):
            return 0
        if one * two <= 0:
            return None
        return round(math.log(two / one) / self._log, 3)
