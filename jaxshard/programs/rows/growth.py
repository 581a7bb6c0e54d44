"""What grows with the number of rows: powers of it (1 for a sum over rows, 0 for a mean), and numbers made from it.

`Partners` compares two traces of a loss, the second of twice the rows.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax.numpy as jnp
import numpy as np

from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Var
from jaxshard.programs.jaxprs import is_literal, makers_of, open_jaxpr, operands_of, part_of, subprograms
from jaxshard.programs.paired import paired
from jaxshard.programs.primitives import (
    ADDS,
    COMPARES,
    DIV,
    HOMOGENEOUS,
    MULTIPLIES,
    NUMBERS,
    POINTWISE,
    SAME_NUMBERS,
    SUB,
    SUMS,
    power_of,
)
from jaxshard.programs.questions import depends
from jaxshard.programs.rows.labels import NO_POWER, Degree, Free, Label, Mixed, PerRow, Stat, Trail


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


_SCALES = MULTIPLIES & POINTWISE
_SIMPLE = _SCALES | ADDS | {SUB}
_FEW = 4  # rows
_SMALL = 64
"""A constant may equal a count of up to this many elements by chance; a second trace then decides."""

_Dependent = TypeVar("_Dependent", PerRow, Stat)


class Growth:
    """Degrees of values (`labels.Degree`), for a loss of `num_rows` rows; the arguments are those of `Arithmetic`."""

    def __init__(self, num_rows: int, num_parts: int, partners: Partners | None, sizes: Callable[[], frozenset[int]]):
        self.num_rows, self.num_parts, self.partners, self._sizes = num_rows, num_parts, partners, sizes
        self._log_parts = math.log(max(num_parts, 2))

    def degree(self, eqn: Equation, labels: Sequence[Label]) -> Degree:
        name = eqn.primitive.name
        is_whole = not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
        if name in COMPARES:
            degrees = {_degree_of(x) for x in labels if not (isinstance(x, Free) and _is_nothing(x.value))}
            return 0 if len(degrees) < 2 and None not in degrees else None
        power = power_of(eqn)
        if power == 0 or (is_whole and not any(map(_is_total, labels))):
            return 0  # an index or a mask
        operands = labels[NUMBERS.get(name, slice(None))]
        found = {_degree_of(x) for x in operands if not (isinstance(x, Free) and _is_nothing(x.value))}
        if None in found or NO_POWER in found:
            return None if None in found else NO_POWER
        if name in MULTIPLIES:
            one, two = self._degrees_of_factors(name, operands[:2])
            return round(one - two if name == DIV else one + two, 3)
        if len(found) > 1:
            return None if self.partners is None else NO_POWER
        if any(found) and name not in HOMOGENEOUS:
            return None if self.partners is None or any(isinstance(x, PerRow) for x in operands) else NO_POWER
        return round((1 if power is None else power) * (found.pop() or 0), 3) if found else 0

    def _degrees_of_factors(self, name: str, labels: Sequence[Label]) -> list[float]:
        """The degrees of two factors, less 1 for a number of devices (or of all rows) that averages a device sum."""
        degrees = [_degree_of(label) or 0 for label in labels]
        for i, label in enumerate(labels):
            other = labels[1 - i]
            if not isinstance(other, Free) or not other.summed or not isinstance(label, Free) or not label.value:
                continue
            if degrees[i] and label.value % (self.num_rows * self.num_parts) == 0:
                degrees[i] -= 1
            power = math.log(abs(label.value)) / self._log_parts
            if not degrees[i] and abs(abs(power) - 1) < 1e-6 and (other.fresh or degrees[1 - i] < 0):
                degrees[i] -= round(power)
        return degrees

    # Sums and averages.

    def plus_count(self, label: Free | Stat, eqn: Equation, dims: Sequence[int]) -> Degree:
        """The degree of a sum over dims that are not rows, but may have as many elements."""
        if label.degree is None:
            return None
        if self.partners is None:
            return None if self.num_rows in (eqn.invars[0].aval.shape[d] for d in dims) else label.degree
        degree = self.grown(eqn, dims, isinstance(label, Free) and bool(label.summed))
        return None if degree is None else label.degree + degree

    def grown(self, eqn: Equation, dims: Sequence[int], across: bool) -> Degree:
        """The degree of a sum over dims that are not rows; if `across`, they may be the rows of all devices."""
        if self.partners is None:
            return None
        degree = self.partners.degree_of_sum(eqn, dims)
        count = math.prod(eqn.invars[0].aval.shape[d] for d in dims)
        of_all = across and count % (self.num_rows * self.num_parts) == 0
        return degree - 1 if degree and of_all else degree

    def averaged(self, name: str, labels: Sequence[Label], found: Stat, trail: Trail) -> Label:
        """A sum over n elements times 1/n has degree 0; without partners, the value of n shows that it is a mean."""
        value = next((label.value for label in labels if isinstance(label, Free)), None)
        if name not in _SCALES or not found.size or not value or not math.isfinite(value):
            return found
        divisor = value if name == DIV else 1 / value
        if self.partners is None and found.degree == 1 and abs(divisor / found.size - 1) < 1e-6:
            return dataclasses.replace(found, degree=0, guessed=found.size <= _SMALL)
        if self.partners is None and any(x >= self.num_rows and x % self.num_rows == 0 for x in (divisor, 1 / divisor)):
            return dataclasses.replace(found, degree=None)  # it may be a number of rows
        if self.partners is not None and found.degree == 0 and self._counts_all_devices(found.size, divisor):
            return Mixed("count", trail, found.trail)
        return found

    def _counts_all_devices(self, size: int, divisor: float) -> bool:
        """Whether a sum of `size` elements is divided by the number of rows of all devices.

        False if the divisor could also be the size of a dim of the elements.
        """
        mine, rest = divmod(round(divisor), self.num_parts)
        if rest or abs(divisor - round(divisor)) > 1e-6 * divisor or not mine:
            return False
        of_each_row = size // self.num_rows
        return mine == size or (not mine % self.num_rows and not size % mine and bool(of_each_row % self.num_parts))

    def over_devices(self, name: str, labels: Sequence[Label], found: _Dependent) -> _Dependent:
        """The label with its flags `by_devices` and `by_sum`, and the degree less 1 once both are set."""
        flags = [(x.by_devices, x.by_sum) if isinstance(x, PerRow | Stat) else (False, False) for x in labels]
        if name in ADDS or name == SUB:
            both = [all(flag) for flag in zip(*flags, strict=True)]
            return dataclasses.replace(found, by_devices=both[0], by_sum=both[1])
        if name not in MULTIPLIES and name not in SAME_NUMBERS:
            return dataclasses.replace(found, by_devices=False, by_sum=False)
        flags = flags[: 1 if name == DIV else None]
        by_devices, by_sum = (any(flag) for flag in zip(*flags, strict=True))
        other = next((label for label in labels if isinstance(label, Free)), None)
        if other is not None:
            by_devices |= other.value == (1 / self.num_parts if name == DIV else self.num_parts)
            by_sum |= name == DIV and bool(other.summed)
        newly = by_devices and by_sum and (True, True) not in flags
        degree = found.degree - 1 if newly and found.degree is not None else found.degree
        return dataclasses.replace(found, degree=degree, by_devices=by_devices, by_sum=by_sum)

    # Numbers that may be the number of rows.

    def may_hide_a_count(self, eqn: Equation, label: Label, per_row: Sequence[PerRow]) -> bool:
        """Whether a factor or a term may be computed from the number of rows."""
        if not isinstance(label, Free):
            return False
        if eqn.primitive.name == DIV and any(x.added == label.value for x in per_row):
            return False  # a mean over another dim
        return label.scaled or (eqn.primitive.name in _SIMPLE and self._is_like_a_count(label.value))

    def is_scaled(self, name: str, labels: Sequence[Free]) -> bool:
        """Whether the result of an operation on values that are free of rows is `scaled`."""
        if name in _SCALES and any(self._may_count(x.value) for x in labels):
            return True
        if (name in _SIMPLE or len(labels) == 1) and any(self._is_like_a_count(x.value) for x in labels):
            return True
        return any(x.scaled for x in labels) and (name in MULTIPLIES or name in SUMS)

    def _is_like_a_count(self, value: float | None) -> bool:
        """Whether a value, or its inverse, is a usual function of the number of rows (n - 1, its root, its log).

        Small numbers do not count, nor does the root of a dim's size, by which attention divides.
        """
        if not value or not math.isfinite(value) or self.num_rows < _FEW:
            return False
        rows = self.num_rows
        likely = (rows, rows - 1, rows + 1, rows / (rows - 1), math.sqrt(rows), math.log(rows))
        small = (2.0, 0.5)  # these occur in every loss
        if not any(abs(x / y - 1) < 1e-6 for x in (abs(value), 1 / abs(value)) for y in likely if y not in small):
            return False
        root = max(abs(value), 1 / abs(value)) ** 2
        return abs(root - round(root)) > 1e-4 or round(root) not in self._sizes()

    def _may_count(self, value: float | None) -> bool:
        """Whether this number, or its inverse, may be a number of rows."""
        if not value or not math.isfinite(value):
            return False
        return any(x >= self.num_rows and abs(x % self.num_rows) < 1e-4 for x in (abs(value), 1 / abs(value)))


def _is_nothing(value: float | None) -> bool:
    """Whether this number is negligible as a term: 0, or an epsilon against division by 0."""
    return value is not None and abs(value) < 1e-5


def _degree_of(label: Label) -> Degree:
    return label.degree if isinstance(label, Free | PerRow | Stat) else None


def _is_total(label: Label) -> bool:
    """Whether it is a sum over rows, so that whole numbers are counts."""
    return isinstance(label, Stat) or (isinstance(label, Free) and bool(label.summed))


_ADDRESS = re.compile(r"0x[0-9a-f]+")


def may_count(jaxpr: Jaxpr, batch: Sequence[bool], position: int) -> bool:
    """Whether an output depends on no row's values, and is a whole number, a boolean, or a number made by Python."""
    if depends(jaxpr, list(batch))[position]:
        return False
    out = open_jaxpr(jaxpr).outvars[position]
    return not jnp.issubdtype(out.aval.dtype, jnp.inexact) or is_literal(out) or out in open_jaxpr(jaxpr).constvars


def counts(jaxpr: Jaxpr, larger: Jaxpr, position: int) -> bool:
    """Whether an output that `may_count` differs in the trace of more rows."""
    (one, values), (two, others) = _made_by(jaxpr, position), _made_by(larger, position)
    same_values = len(values) == len(others) and all(map(np.array_equal, values, others))
    return one != two or not same_values


def _made_by(jaxpr: Jaxpr, position: int) -> tuple[str, list[np.ndarray]]:
    """(the program of one output, as text; the constants in it)."""
    program = open_jaxpr(jaxpr)
    out = program.outvars[position]
    if is_literal(out):
        return "", [np.asarray(out.val)]
    eqns = makers_of(program.eqns, [out])
    read = {out, *operands_of(eqns)}
    inputs: list[Var] = [v for v in (*program.constvars, *program.invars) if v in read]
    consts = dict(zip(program.constvars, getattr(jaxpr, "consts", ()), strict=False))
    text = _ADDRESS.sub("", str(part_of(program, eqns, inputs, [out])))
    return text, [np.asarray(consts[v]) for v in inputs if v in consts]
