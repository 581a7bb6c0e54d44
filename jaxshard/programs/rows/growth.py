"""The power of the number of rows by which a value grows: 1 for a sum over rows, 0 for a mean."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax.numpy as jnp

from jaxshard.base.types import Equation
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
from jaxshard.programs.rows.labels import NO_POWER, Degree, Free, Label, Mixed, PerRow, Stat, Trail
from jaxshard.programs.rows.partners import Partners

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
