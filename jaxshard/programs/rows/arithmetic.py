"""Labels of what is computed element by element, and of sums and other reductions."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import jax.numpy as jnp

from jaxshard.base.types import Equation
from jaxshard.programs.primitives import SAME_NUMBERS
from jaxshard.programs.rows.labels import (
    FREE,
    NO_POWER,
    Degree,
    Free,
    Kind,
    Label,
    Mixed,
    PerRow,
    Stat,
    Trail,
    are_groups,
    coarsest,
    dims_of,
    is_guarded,
    is_running,
    moved,
    units,
    worst,
)
from jaxshard.programs.rows.partners import Partners

_LINEAR = SAME_NUMBERS | frozenset(
    [
        "add",
        "add_any",
        "broadcast_in_dim",
        "complex",
        "concatenate",
        "conj",
        "cumsum",
        "dynamic_slice",
        "dynamic_update_slice",
        "fft",
        "gather",
        "imag",
        "name",
        "neg",
        "pad",
        "pcast",
        "pvary",
        "real",
        "reduce_precision",
        "reduce_window_sum",
        "reshard",
        "select_n",
        "sharding_constraint",
        "stack",
        "stop_gradient",
        "sub",
    ]
)
"""Sums of their operands' elements times constants, but for the operands that `_is_linear` names."""
_PRODUCTS = ("mul", "div", "dot_general", "conv_general_dilated")
_POWERS = {"square": 2, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}
_HOMOGENEOUS = frozenset(
    ["abs", "argmax", "argmin", "clamp", "cond", "integer_pow", "max", "min", "sort", "top_k", "while"]
)
_SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
_OPERANDS = (
    {"select_n": slice(1, None), "dynamic_update_slice": slice(0, 2), "clamp": slice(1, 2)}
    | dict.fromkeys(("dynamic_slice", "gather", "sort"), slice(0, 1))
    | dict.fromkeys(_SCATTERS, slice(0, None, 2))
)
"""Where other operands are indices, or bounds."""
_SUMS = ("add", "add_any", "sub")
_SIMPLE = ("mul", "div", "add", "sub")
_COMPARISONS = ("gt", "lt", "ge", "le", "eq", "ne")
_FEW = 4  # rows
_KEEP_SUMS = SAME_NUMBERS | {"broadcast_in_dim"}
_SMALL = 64
"""Up to this number of elements, a constant of the loss may equal it by chance; then a second trace tells."""

_Dependent = TypeVar("_Dependent", PerRow, Stat)


class Arithmetic:
    """Labels of results, for a loss of `num_rows` rows.

    Args:
      num_rows: of the batch that was traced.
      num_parts: the number of such batches that the whole batch is cut into.
      partners: numbers that grow with the rows; None: of a sum's divisor it is guessed, by its value.
      sizes: returns the sizes of all dims in the loss; asked only where a number in it may be that of rows.

    Attributes:
      groups: the number of rows in each group of rows that was computed with as one.
      rules: operations on rows whose gradients are what the user says, by `jax.custom_vjp`.
    """

    def __init__(self, num_rows: int, num_parts: int, partners: Partners | None, sizes: Callable[[], frozenset[int]]):
        self.num_rows, self.num_parts, self.partners, self._sizes = num_rows, num_parts, partners, sizes
        self.groups: list[tuple[int, Trail]] = []
        self.rules: list[Trail] = []
        self._log_parts = math.log(max(num_parts, 2))

    @property
    def num_findings(self) -> int:
        """How many groups and rules were found so far."""
        return len(self.groups) + len(self.rules)

    def pointwise(self, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
        """The label of an operation's result; each element depends on the operands' elements at its index."""
        name = eqn.primitive.name
        if (bad := worst(labels)) is not None:
            if isinstance(bad, Mixed) and bad.root is not None and _squares(eqn):
                return bad.root
            if not isinstance(bad, Mixed) or name in SAME_NUMBERS or name == "stop_gradient":
                return bad
            return dataclasses.replace(bad, extreme=False, root=None, quotient=self._are_quotients(name, labels))
        if all(isinstance(label, Free) for label in labels):
            return self._free(eqn, [label for label in labels if isinstance(label, Free)])
        dependent = [label for label in labels if isinstance(label, PerRow | Stat)]
        if not self._is_linear(name, labels):
            settled = [self._settled(label, name, labels, trail) for label in dependent]
            if (bad := worst(settled)) is not None:
                return bad
            dependent = [label for label in settled if isinstance(label, PerRow)]
        return self._joined(eqn, labels, dependent, trail)

    def _are_quotients(self, name: str, labels: Sequence[Label]) -> bool:
        """Whether the result of an operation on something mixed is a `quotient`."""
        if name == "div" and isinstance(labels[0], Stat):
            return isinstance(labels[1], Mixed) and is_guarded(labels[1])
        mixed = [label for label in labels if isinstance(label, Mixed)]
        if name == "select_n":
            return any(label.quotient for label in mixed) and is_guarded(mixed[0])
        return self._is_linear(name, labels) and all(label.quotient for label in mixed)

    def _is_linear(self, name: str, labels: Sequence[Label]) -> bool:
        depend = [not isinstance(label, Free) for label in labels]
        if name in ("select_n", "cond") and all(map(is_running, labels[1:])):
            return isinstance(labels[0], Free | PerRow)
        if name == "select_n":
            return not depend[0]
        if name in ("mul", "dot_general", "conv_general_dilated"):
            return sum(depend) == 1
        if name == "div":
            return not depend[1]
        if name in _SCATTERS[:3]:
            return not depend[1]
        return name in _LINEAR

    def _settled(self, label: PerRow | Stat, name: str, labels: Sequence[Label], trail: Trail) -> Label:
        """The label of an operand that is used in another way than linearly."""
        if isinstance(label, Stat):
            kind: Kind = "ratio" if name == "div" and isinstance(labels[1], Stat) else "statistic"
            root = label if name == "sqrt" else None
            return Mixed(kind, trail, label.trail, root=root, quotient=kind == "ratio")
        if label.plus:
            return Mixed("statistic", trail, label.plus)
        if not label.summed:
            return label
        if not are_groups(label, self.num_rows):
            return Mixed("statistic", trail, label.summed)
        self.groups.append((units(label, self.num_rows), trail))
        return dataclasses.replace(label, summed=(), size=1)

    def _joined(
        self, eqn: Equation, labels: Sequence[Label], dependent: Sequence[PerRow | Stat], trail: Trail
    ) -> Label:
        per_row = [label for label in dependent if isinstance(label, PerRow)]
        stats = [label for label in dependent if isinstance(label, Stat)]
        running = next((label for label in dependent if label.running), None)
        if running is not None and not _adds_to_running(eqn.primitive.name, labels):
            return _so_far(running, trail)
        degree = self._degree(eqn, labels)
        if self.partners is None and any(self._may_hide_a_count(eqn, x, per_row) for x in labels):
            degree = None
        if not per_row:
            size = stats[0].size if all(stat.size == stats[0].size for stat in stats) else 0
            guessed = any(stat.guessed for stat in stats)
            total = Stat(degree, size, stats[0].trail, running is not None, guessed)
            total = self._over_devices(eqn.primitive.name, labels, total)
            return self._averaged(eqn.primitive.name, labels, total, trail)
        found = coarsest(per_row)
        if found is None:
            return Mixed("pairs", trail)
        if any(units(label, self.num_rows) != units(found, self.num_rows) for label in per_row):
            if not are_groups(found, self.num_rows):
                return Mixed("pairs", trail)
            self.groups.append((units(found, self.num_rows), trail))
        by_place, is_number = self._by_place(labels, found), jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
        shifted = by_place is not None or any(label.shifted for label in per_row)
        if shifted and is_number:
            return Mixed("drawn" if by_place is not None and by_place.drawn else "position", trail)
        plus = next((label.trail if isinstance(label, Stat) else label.plus for label in dependent if _adds(label)), ())
        summed = next((label.summed for label in per_row if label.summed), ())
        added = found.added if eqn.primitive.name in _KEEP_SUMS else 0
        state = {"degree": degree, "plus": plus, "summed": summed, "running": running is not None}
        across = any(x.across if isinstance(x, PerRow) else isinstance(x, Free) and bool(x.summed) for x in labels)
        joined = dataclasses.replace(found, **state, added=added, shifted=shifted, across=across)
        return self._over_devices(eqn.primitive.name, labels, joined)

    def _by_place(self, labels: Sequence[Label], found: PerRow) -> Free | None:
        """An operand that differs from row to row by their places alone."""
        return next((x for x in labels if isinstance(x, Free) and x.varied & dims_of(found)), None)

    def _over_devices(self, name: str, labels: Sequence[Label], found: _Dependent) -> _Dependent:
        """The label of what was multiplied by the number of devices, and divided by a sum over these."""
        flags = [(x.by_devices, x.by_sum) if isinstance(x, PerRow | Stat) else (False, False) for x in labels]
        if name in _SUMS:
            both = [all(flag) for flag in zip(*flags, strict=True)]
            return dataclasses.replace(found, by_devices=both[0], by_sum=both[1])
        if name not in _PRODUCTS and name not in SAME_NUMBERS:
            return dataclasses.replace(found, by_devices=False, by_sum=False)
        flags = flags[: 1 if name == "div" else None]
        by_devices, by_sum = (any(flag) for flag in zip(*flags, strict=True))
        other = next((label for label in labels if isinstance(label, Free)), None)
        if other is not None:
            by_devices |= other.value == (1 / self.num_parts if name == "div" else self.num_parts)
            by_sum |= name == "div" and bool(other.summed)
        newly = by_devices and by_sum and (True, True) not in flags
        degree = found.degree - 1 if newly and found.degree is not None else found.degree
        return dataclasses.replace(found, degree=degree, by_devices=by_devices, by_sum=by_sum)

    def _averaged(self, name: str, labels: Sequence[Label], found: Stat, trail: Trail) -> Label:
        """A sum over n elements, times 1/n, has degree 0; where there are no partners, n says that it is a mean."""
        value = next((label.value for label in labels if isinstance(label, Free)), None)
        if name not in ("mul", "div") or not found.size or not value or not math.isfinite(value):
            return found
        divisor = value if name == "div" else 1 / value
        if self.partners is None and found.degree == 1 and abs(divisor / found.size - 1) < 1e-6:
            return dataclasses.replace(found, degree=0, guessed=found.size <= _SMALL)
        if self.partners is None and any(x >= self.num_rows and x % self.num_rows == 0 for x in (divisor, 1 / divisor)):
            return dataclasses.replace(found, degree=None)  # it may be a number of rows
        if self.partners is not None and found.degree == 0 and self._counts_all_devices(found.size, divisor):
            return Mixed("count", trail, found.trail)
        return found

    def _counts_all_devices(self, size: int, divisor: float) -> bool:
        """Whether a sum of `size` elements is divided by a number of rows that all devices have together.

        It is not, if the factor may as well be the size of a dim of the elements.
        """
        mine, rest = divmod(round(divisor), self.num_parts)
        if rest or abs(divisor - round(divisor)) > 1e-6 * divisor or not mine:
            return False
        of_each_row = size // self.num_rows
        return mine == size or (not mine % self.num_rows and not size % mine and bool(of_each_row % self.num_parts))

    def _degree(self, eqn: Equation, labels: Sequence[Label]) -> Degree:
        name = eqn.primitive.name
        is_whole = not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
        if name in _COMPARISONS:
            degrees = {_degree_of(x) for x in labels if not (isinstance(x, Free) and _is_nothing(x.value))}
            return 0 if len(degrees) < 2 and None not in degrees else None
        if name == "sign" or (is_whole and not any(map(_is_total, labels))):
            return 0  # an index or a mask
        operands = labels[_OPERANDS.get(name, slice(None))]
        found = {_degree_of(x) for x in operands if not (isinstance(x, Free) and _is_nothing(x.value))}
        if None in found or NO_POWER in found:
            return None if None in found else NO_POWER
        if name in _PRODUCTS:
            one, two = self._degrees_of_factors(name, operands[:2])
            return round(one - two if name == "div" else one + two, 3)
        if len(found) > 1:
            return None if self.partners is None else NO_POWER
        if any(found) and not _is_homogeneous(name):
            return None if self.partners is None or any(isinstance(x, PerRow) for x in operands) else NO_POWER
        power = eqn.params["y"] if name == "integer_pow" else _POWERS.get(name, 1)
        return round(power * (found.pop() or 0), 3) if found else 0

    def _degrees_of_factors(self, name: str, labels: Sequence[Label]) -> list[float]:
        """The degrees of two factors; one that is the number of devices, or of all rows, makes a sum over devices an
        average."""
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

    def _free(self, eqn: Equation, labels: Sequence[Free]) -> Free:
        if not labels:
            return FREE
        name = eqn.primitive.name
        if len(labels) == 1 and name in SAME_NUMBERS:
            return labels[0]
        varied = frozenset[int]().union(*(label.varied for label in labels))
        counts = next((x.counts for x in labels if x.counts is not None), None) if name == "select_n" else None
        placed, given, drawn = (any(getattr(x, name) for x in labels) for name in ("placed", "given", "drawn"))
        scaled = name in _PRODUCTS[:2] and any(self._may_count(x.value) for x in labels)
        scaled |= (name in _SIMPLE or len(labels) == 1) and any(self._is_like_a_count(x.value) for x in labels)
        scaled |= any(x.scaled for x in labels) and (name in _PRODUCTS or name in _LINEAR)
        varied = frozenset() if placed else varied
        summed = next((x.summed for x in labels if x.summed), ())
        return Free(varied, counts, None, self._degree(eqn, labels), placed, given, drawn, scaled, summed)

    def _may_hide_a_count(self, eqn: Equation, label: Label, per_row: Sequence[PerRow]) -> bool:
        """Whether a factor or a term may be made from the number of rows."""
        if not isinstance(label, Free):
            return False
        if eqn.primitive.name == "div" and any(x.added == label.value for x in per_row):
            return False  # a mean over another dim
        return label.scaled or (eqn.primitive.name in _SIMPLE and self._is_like_a_count(label.value))

    def _is_like_a_count(self, value: float | None) -> bool:
        """Whether it is what a loss makes of the number of rows, or its inverse; small numbers say nothing, nor does
        the inverse root of the size of a dim, by which attention divides."""
        if not value or not math.isfinite(value) or self.num_rows < _FEW:
            return False
        rows = self.num_rows
        likely = (rows, rows - 1, rows + 1, rows / (rows - 1), math.sqrt(rows), math.log(rows))
        small = (2.0, 0.5)  # in every loss
        if not any(abs(x / y - 1) < 1e-6 for x in (abs(value), 1 / abs(value)) for y in likely if y not in small):
            return False
        root = max(abs(value), 1 / abs(value)) ** 2
        return abs(root - round(root)) > 1e-4 or round(root) not in self._sizes()

    def _may_count(self, value: float | None) -> bool:
        """Whether this number, or its inverse, may be a number of rows."""
        if not value or not math.isfinite(value):
            return False
        return any(x >= self.num_rows and abs(x % self.num_rows) < 1e-4 for x in (abs(value), 1 / abs(value)))

    # Reductions.

    def summed(self, eqn: Equation, label: Label, dims: Sequence[int], sizes: Sequence[int], trail: Trail) -> Label:
        """The label of a sum over `dims`, of these sizes, before the dims that are left move up."""
        count = math.prod(sizes)
        if isinstance(label, Free):
            degree = self._plus_count(label, eqn, [d for d in dims if d not in label.varied or self.partners])
            value = None if label.value is None else label.value * count
            return dataclasses.replace(label, value=value, degree=degree)
        if isinstance(label, Stat):
            return dataclasses.replace(label, size=label.size * count, degree=self._plus_count(label, eqn, dims))
        if not isinstance(label, PerRow):
            return label
        if not dims_of(label) & set(dims):
            return dataclasses.replace(label, size=label.size * count if label.summed else label.size, added=count)
        if self.partners is not None and label.degree is not None:
            others = self._grown(eqn, [d for d in dims if d not in dims_of(label)], label.across)
            label = dataclasses.replace(label, degree=None if others is None else label.degree + others)
        return over_parts(label, dims, count, trail)

    def _plus_count(self, label: Free | Stat, eqn: Equation, dims: Sequence[int]) -> Degree:
        """The degree of a sum over dims that are no rows, but may be as many."""
        if label.degree is None:
            return None
        if self.partners is None:
            return None if self.num_rows in (eqn.invars[0].aval.shape[d] for d in dims) else label.degree
        degree = self._grown(eqn, dims, isinstance(label, Free) and bool(label.summed))
        return None if degree is None else label.degree + degree

    def _grown(self, eqn: Equation, dims: Sequence[int], across: bool) -> Degree:
        """The degree of a sum over dims that are no rows; of what is `across`, all that grow may be the rows of all."""
        if self.partners is None:
            return None
        degree = self.partners.degree_of_sum(eqn, dims)
        count = math.prod(eqn.invars[0].aval.shape[d] for d in dims)
        of_all = across and count % (self.num_rows * self.num_parts) == 0
        return degree - 1 if degree and of_all else degree

    def reduced(self, label: Label, dims: Iterable[int], trail: Trail) -> Label:
        """The label of a reduction over `dims` that is no sum (a maximum), before the dims that are left move up."""
        if isinstance(label, Stat):
            return Mixed("statistic", trail, label.trail)
        if not isinstance(label, PerRow):
            return label
        label = self._settled(label, "", [], trail)
        if not isinstance(label, PerRow) or not dims_of(label) & set(dims):
            return label
        left = over_parts(label, dims, 1, trail)
        if isinstance(left, PerRow) and are_groups(left, self.num_rows):
            self.groups.append((units(left, self.num_rows), trail))
            return dataclasses.replace(left, summed=(), size=1)
        return Mixed("statistic", trail, trail, extreme=trail[-1].primitive.name in ("reduce_max", "reduce_min"))


def over_parts(label: PerRow, dims: Iterable[int], count: int, trail: Trail) -> Label:
    """The label of a sum of `count` elements over `dims`, some of which have rows."""
    parts, gone = label.parts, set(dims)
    left = tuple(part for part in parts if part.dim not in gone)
    if label.running:
        return _so_far(label, trail)  # it has the carry several times
    if left:
        return dataclasses.replace(label, parts=left, size=label.size * count, summed=trail)
    degree = None if label.degree is None else label.degree + 1
    return Stat(degree, label.size * count, trail, by_devices=label.by_devices, by_sum=label.by_sum)


def without_dims(label: Label, dims: Iterable[int], ndim: int) -> Label:
    """The label of an array of `ndim` dims once `dims` are gone and the others have moved up."""
    gone = set(dims)
    left = [d for d in range(ndim) if d not in gone]
    return moved(label, {d: i for i, d in enumerate(left)}.get)


def _squares(eqn: Equation) -> bool:
    name = eqn.primitive.name
    if name == "integer_pow":
        return eqn.params["y"] == 2
    return name == "square" or (name == "mul" and eqn.invars[0] is eqn.invars[1])


def _is_homogeneous(name: str) -> bool:
    """Whether a factor of the operands is a power of it in the result."""
    return name in _LINEAR or name in _POWERS or name in _HOMOGENEOUS or name.startswith(("reduce_", "scatter"))


def _is_nothing(value: float | None) -> bool:
    """Whether this number may be added to anything: 0, or what guards against a division by 0."""
    return value is not None and abs(value) < 1e-5


def _degree_of(label: Label) -> Degree:
    return label.degree if isinstance(label, Free | PerRow | Stat) else None


def _is_total(label: Label) -> bool:
    """Whether it is a sum over rows, so that whole numbers are counts."""
    return isinstance(label, Stat) or (isinstance(label, Free) and bool(label.summed))


def _so_far(running: PerRow | Stat, trail: Trail) -> Mixed:
    """The label of what is made, otherwise than by adding, of what a scan has added up so far."""
    return Mixed("statistic", trail, running.plus if isinstance(running, PerRow) else running.trail)


def _adds_to_running(name: str, labels: Sequence[Label]) -> bool:
    """Whether the result is a scan's carry, once, and what is added to it."""
    running = [is_running(label) for label in labels]
    if name in ("add", "add_any"):
        return sum(running) == 1
    if name in ("select_n", "cond"):
        return all(running[1:])
    return name in SAME_NUMBERS or (name == "sub" and running == [True, False])


def _adds(label: PerRow | Stat) -> bool:
    return isinstance(label, Stat) or bool(label.plus)
