"""Labels of the results of elementwise operations, of sums and of other reductions."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp

from jaxshard.base.types import Equation
from jaxshard.programs.primitives import (
    ADDS,
    CHOOSES,
    DIV,
    KINDS,
    MULTIPLIES,
    OVER_DEVICES,
    POWERS,
    SAME_NUMBERS,
    SELECT,
    STOP_GRADIENT,
    SUB,
    SUMS,
    power_of,
)
from jaxshard.programs.rows.growth import Growth, Partners
from jaxshard.programs.rows.labels import (
    FREE,
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


class Arithmetic:
    """Labels of results, for a loss of `num_rows` rows.

    Args:
      num_rows: the number of rows of the traced batch.
      num_parts: the number of such batches that the whole batch is split into.
      partners: tells which numbers grow with the rows; None: a divisor's value decides, which is a guess.
      sizes: returns the sizes of all dims in the loss; called only if a number in it may be the number of rows.

    Attributes:
      groups: for each operation that treats neighbouring rows as one group, (rows in a group, the operation).
      rules: operations on rows whose gradients come from a user's `jax.custom_vjp`.
    """

    def __init__(self, num_rows: int, num_parts: int, partners: Partners | None, sizes: Callable[[], frozenset[int]]):
        self.num_rows, self.partners = num_rows, partners
        self.groups: list[tuple[int, Trail]] = []
        self.rules: list[Trail] = []
        self._growth = Growth(num_rows, num_parts, partners, sizes)

    @property
    def num_findings(self) -> int:
        """The number of groups and rules found so far."""
        return len(self.groups) + len(self.rules)

    def pointwise(self, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
        """The label of an operation's result; each element depends on the operands' elements at its index."""
        name = eqn.primitive.name
        if (bad := worst(labels)) is not None:
            if isinstance(bad, Mixed) and bad.root is not None and power_of(eqn) == 2:
                return bad.root
            if not isinstance(bad, Mixed) or name in SAME_NUMBERS or name == STOP_GRADIENT:
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
        if name == DIV and isinstance(labels[0], Stat):
            return isinstance(labels[1], Mixed) and is_guarded(labels[1])
        mixed = [label for label in labels if isinstance(label, Mixed)]
        if name == SELECT:
            return any(label.quotient for label in mixed) and is_guarded(mixed[0])
        return self._is_linear(name, labels) and all(label.quotient for label in mixed)

    def _is_linear(self, name: str, labels: Sequence[Label]) -> bool:
        depend = [not isinstance(label, Free) for label in labels]
        if name in CHOOSES and all(map(is_running, labels[1:])):
            return isinstance(labels[0], Free | PerRow)
        if name == SELECT:
            return not depend[0]
        if name == DIV:
            return not depend[1]
        if name in MULTIPLIES:
            return sum(depend) == 1
        return name in SUMS and not (KINDS.get(name) == "scatter" and depend[1])

    def _settled(self, label: PerRow | Stat, name: str, labels: Sequence[Label], trail: Trail) -> Label:
        """The label of an operand that is used nonlinearly."""
        if isinstance(label, Stat):
            kind: Kind = "ratio" if name == DIV and isinstance(labels[1], Stat) else "statistic"
            root = label if POWERS.get(name) == 0.5 else None
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
        degree = self._growth.degree(eqn, labels)
        if self.partners is None and any(self._growth.may_hide_a_count(eqn, x, per_row) for x in labels):
            degree = None
        if not per_row:
            size = stats[0].size if all(stat.size == stats[0].size for stat in stats) else 0
            guessed = any(stat.guessed for stat in stats)
            total = Stat(degree, size, stats[0].trail, running is not None, guessed)
            total = self._growth.over_devices(eqn.primitive.name, labels, total)
            return self._growth.averaged(eqn.primitive.name, labels, total, trail)
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
        added = found.added if eqn.primitive.name in SAME_NUMBERS else 0
        state = {"degree": degree, "plus": plus, "summed": summed, "running": running is not None}
        across = any(x.across if isinstance(x, PerRow) else isinstance(x, Free) and bool(x.summed) for x in labels)
        joined = dataclasses.replace(found, **state, added=added, shifted=shifted, across=across)
        return self._growth.over_devices(eqn.primitive.name, labels, joined)

    def _by_place(self, labels: Sequence[Label], found: PerRow) -> Free | None:
        """An operand that varies with the row's index alone."""
        return next((x for x in labels if isinstance(x, Free) and x.varied & dims_of(found)), None)

    def _free(self, eqn: Equation, labels: Sequence[Free]) -> Free:
        if not labels:
            return FREE
        name = eqn.primitive.name
        if len(labels) == 1 and name in SAME_NUMBERS:
            return labels[0]
        varied = frozenset[int]().union(*(label.varied for label in labels))
        counts = next((x.counts for x in labels if x.counts is not None), None) if name == SELECT else None
        placed, given, drawn = (any(getattr(x, name) for x in labels) for name in ("placed", "given", "drawn"))
        scaled = self._growth.is_scaled(name, labels)
        varied = frozenset() if placed else varied
        summed = next((x.summed for x in labels if x.summed), ())
        return Free(varied, counts, None, self._growth.degree(eqn, labels), placed, given, drawn, scaled, summed)

    # Reductions.

    def summed(self, eqn: Equation, label: Label, dims: Sequence[int], sizes: Sequence[int], trail: Trail) -> Label:
        """The label of a sum over `dims`, of these sizes, before the remaining dims move up."""
        count = math.prod(sizes)
        if isinstance(label, Free):
            degree = self._growth.plus_count(label, eqn, [d for d in dims if d not in label.varied or self.partners])
            value = None if label.value is None else label.value * count
            return dataclasses.replace(label, value=value, degree=degree)
        if isinstance(label, Stat):
            return dataclasses.replace(label, size=label.size * count, degree=self._growth.plus_count(label, eqn, dims))
        if not isinstance(label, PerRow):
            return label
        if not dims_of(label) & set(dims):
            return dataclasses.replace(label, size=label.size * count if label.summed else label.size, added=count)
        if self.partners is not None and label.degree is not None:
            others = self._growth.grown(eqn, [d for d in dims if d not in dims_of(label)], label.across)
            label = dataclasses.replace(label, degree=None if others is None else label.degree + others)
        return over_parts(label, dims, count, trail)

    def reduced(self, label: Label, dims: Iterable[int], trail: Trail) -> Label:
        """The label of another reduction over `dims` than a sum (a maximum), before the remaining dims move up."""
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
        return Mixed("statistic", trail, trail, extreme=trail[-1].primitive.name in OVER_DEVICES)

    def in_groups(self, label: Label, dims: set[int], trail: Trail) -> PerRow | None:
        """The label of rows permuted along `dims` inside groups of neighbours; None if they leave their groups."""
        if not isinstance(label, PerRow):
            return None
        coarse = dataclasses.replace(label, parts=tuple(part for part in label.parts if part.dim not in dims))
        if not coarse.parts or label.order or not are_groups(coarse, self.num_rows):
            return None
        self.groups.append((units(coarse, self.num_rows), trail))
        return coarse


def over_parts(label: PerRow, dims: Iterable[int], count: int, trail: Trail) -> Label:
    """The label of a sum of `count` elements over `dims`, some of which have rows."""
    parts, gone = label.parts, set(dims)
    left = tuple(part for part in parts if part.dim not in gone)
    if label.running:
        return _so_far(label, trail)  # the sum would count the carry several times
    if left:
        return dataclasses.replace(label, parts=left, size=label.size * count, summed=trail)
    degree = None if label.degree is None else label.degree + 1
    return Stat(degree, label.size * count, trail, by_devices=label.by_devices, by_sum=label.by_sum)


def differing(label: Label, dims: set[int], labels: Sequence[Label] = ()) -> Label:
    """The label of a value whose elements may differ along `dims`, unless all `labels` have the same known value."""
    values = {x.value if isinstance(x, Free) else None for x in labels}
    if not isinstance(label, Free) or label.placed or (len(values) == 1 and None not in values):
        return label
    return dataclasses.replace(label, varied=label.varied | dims, value=None)


def without_dims(label: Label, dims: Iterable[int], ndim: int) -> Label:
    """The label of an array of `ndim` dims once `dims` are gone and the others have moved up."""
    gone = set(dims)
    left = [d for d in range(ndim) if d not in gone]
    return moved(label, {d: i for i, d in enumerate(left)}.get)


def _so_far(running: PerRow | Stat, trail: Trail) -> Mixed:
    """The label of a scan's partial sum that is used (other than added to) before the scan ended."""
    return Mixed("statistic", trail, running.plus if isinstance(running, PerRow) else running.trail)


def _adds_to_running(name: str, labels: Sequence[Label]) -> bool:
    """Whether the result is one partial sum of a scan, plus other terms."""
    running = [is_running(label) for label in labels]
    if name in ADDS:
        return sum(running) == 1
    if name in CHOOSES:
        return all(running[1:])
    return name in SAME_NUMBERS or (name == SUB and running == [True, False])


def _adds(label: PerRow | Stat) -> bool:
    return isinstance(label, Stat) or bool(label.plus)
