"""Labels: how a value inside a loss depends on the rows of the batch; and how operands' labels give a result's.

A loss may be split over devices if it is a mean over rows of terms that each depend on one row. Each value of the
traced loss gets a label:

  Free     it does not depend on the batch, or is the same on all devices (a sum over devices);
  PerRow   along some dims, the element at an index depends on one row only (or on one group of neighbouring rows);
  Stat     a sum over all rows of terms that each depend on one row, times `count ** (degree - 1)`: a sum has degree 1,
           a mean degree 0;
  Mixed    it depends on several rows in another way: `kind` and `trail` tell how and where;
  Unknown  an operation that we cannot analyse had rows among its operands.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

from jaxshard.base.types import Equation
from jaxshard.programs.primitives import GUARDS

Trail: TypeAlias = tuple[Equation, ...]  # an equation, after the calls around it
Degree: TypeAlias = float | None  # the power of the number of rows that a value grows with; None: not known
NO_POWER = math.inf  # a sum of terms that grow by different powers of the number of rows
Kind: TypeAlias = Literal["statistic", "pairs", "some", "position", "drawn", "ratio", "count", "devices", "microbatch"]


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows along one dim of an array: an index of the dim is a triple (index of `outer`, row, index of `inner`).

    `stride` is the number of batch rows between neighbours. Dim -1 stands for the iterations of the innermost scan
    over rows, -2 for those of the scan around it.
    """

    dim: int
    outer: int
    rows: int
    inner: int
    stride: int


@dataclasses.dataclass(frozen=True)
class Free:
    """See above.

    Attributes:
      varied: the dims along which elements may differ; negative ones as in `Part`.
      counts: the dim whose index each element equals.
      value: the number that all elements equal, if known.
      placed: it depends on the device's index, so it may differ from row to row.
      given: it depends on the loss's params or arguments; a constant does not.
      drawn: it holds random numbers of a constant key.
      scaled: it may be a multiple of the number of rows, or of its inverse.
      summed: a sum over devices that it depends on, or (); its degree is 0 for sums over rows, -1 for means.
      fresh: it is a sum over devices, unchanged.
    """

    varied: frozenset[int] = frozenset()
    counts: int | None = None
    value: float | None = None
    degree: Degree = 0
    placed: bool = False
    given: bool = False
    drawn: bool = False
    scaled: bool = False
    summed: Trail = ()
    fresh: bool = False


@dataclasses.dataclass(frozen=True)
class PerRow:
    """See above.

    Attributes:
      parts: where rows lie, the slowest first; together they may index groups of rows.
      order: 0 for the batch's order, else the id of the equation that changed it.
      degree: as in `Stat`, before the sum over rows.
      size: the number of elements already summed, if some rows are.
      summed: the equation that summed some, but not all, of the rows; () if none did.
      plus: a statistic of the rows that was added, or ().
      running: the statistic is a partial sum of a scan over rows.
      added: the number of elements along other dims, if it is exactly their sum; else 0.
      shifted: it holds whole numbers that depend on each row's index, too: most often an index.
      by_devices, by_sum: as in `Stat`.
      across: it depends on a sum over devices, or on the rows of all.
    """

    parts: tuple[Part, ...]
    order: int = 0
    degree: Degree = 0
    size: int = 1
    summed: Trail = ()
    plus: Trail = ()
    running: bool = False
    added: int = 0
    shifted: bool = False
    by_devices: bool = False
    by_sum: bool = False
    across: bool = False


@dataclasses.dataclass(frozen=True)
class Stat:
    """See above.

    Attributes:
      size: the number of summed elements, 0 if unknown.
      trail: the sum.
      running: it is the carry of a scan over rows, which has added up only some of them so far.
      guessed: it was divided by a small number that equals its size, perhaps by chance.
      by_devices: it was multiplied by a number that may be the number of devices.
      by_sum: it was divided by a sum over devices; with `by_devices` it is part of an average.
    """

    degree: Degree
    size: int
    trail: Trail
    running: bool = False
    guessed: bool = False
    by_devices: bool = False
    by_sum: bool = False


@dataclasses.dataclass(frozen=True)
class Mixed:
    """See above.

    Attributes:
      of: the statistic that was used; () for a microbatch's mean over all devices, whose average is right.
      extreme: it is exactly the maximum or minimum of the rows.
      root: it is exactly the square root of this.
      quotient: it is linear in ratios of sums over rows, whose divisors may be guarded against 0.
    """

    kind: Kind
    trail: Trail
    of: Trail = ()
    extreme: bool = False
    root: Stat | None = None
    quotient: bool = False


@dataclasses.dataclass(frozen=True)
class Unknown:
    """See above."""

    trail: Trail


Label: TypeAlias = Free | PerRow | Stat | Mixed | Unknown
FREE = Free()


def worst(labels: Iterable[Label]) -> Mixed | Unknown | None:
    """The first label that is Mixed, else the first Unknown one, else None."""
    bad = [label for label in labels if isinstance(label, Mixed | Unknown)]
    return next((label for label in bad if isinstance(label, Mixed)), bad[0] if bad else None)


def moved(label: Label, where: Callable[[int], int | None]) -> Label:
    """The label of a value whose old dim d is now dim `where(d)`; None: the dim is gone, and held no rows."""
    if isinstance(label, Free):
        varied = frozenset(new for d in label.varied if (new := d if d < 0 else where(d)) is not None)
        counts = None if label.counts is None else where(label.counts)
        return dataclasses.replace(label, varied=varied, counts=counts)
    if isinstance(label, PerRow):
        parts = [(part, part.dim if part.dim < 0 else where(part.dim)) for part in label.parts]
        kept = tuple(dataclasses.replace(part, dim=dim) for part, dim in parts if dim is not None)
        return dataclasses.replace(label, parts=kept)
    return label


def deeper(label: Label, by: int) -> Label:
    """The label of a value that is not scanned over, inside one more scan (`by` = -1), or one scan further out (1)."""
    if isinstance(label, Free):
        inside = label.varied - {-by} if by > 0 else label.varied
        return dataclasses.replace(label, varied=frozenset(d + by if d < 0 else d for d in inside))
    if not isinstance(label, PerRow):
        return label
    parts = tuple(dataclasses.replace(part, dim=part.dim + by) if part.dim < 0 else part for part in label.parts)
    return dataclasses.replace(label, parts=parts)


def scanned(label: Label, by: int) -> Label:
    """The label of one slice of a value that a scan runs over (`by` = -1), or of the stack of slices (1)."""
    if isinstance(label, Free):
        counts = None if label.counts is None or label.counts + by < 0 else label.counts + by
        return dataclasses.replace(label, varied=frozenset(d + by for d in label.varied), counts=counts)
    if not isinstance(label, PerRow):
        return label
    return dataclasses.replace(label, parts=tuple(dataclasses.replace(p, dim=p.dim + by) for p in label.parts))


def is_guarded(label: Mixed) -> bool:
    """Whether it is a sum over rows that is guarded against 0, as a divisor, or such a test."""
    return label.kind == "statistic" and label.trail[-1].primitive.name in GUARDS


def is_running(label: Label) -> bool:
    """Whether the value is a partial sum of a scan over rows."""
    return isinstance(label, PerRow | Stat) and label.running


def stopped(label: Label) -> Label:
    """The label of a scan's carry once the scan has ended."""
    return dataclasses.replace(label, running=False) if isinstance(label, PerRow | Stat) else label


def dims_of(label: Label) -> frozenset[int]:
    """The dims along which rows lie."""
    return frozenset(part.dim for part in label.parts) if isinstance(label, PerRow) else frozenset()


def units(label: PerRow, num_rows: int) -> int:
    """The number of rows that each element depends on."""
    return num_rows // math.prod(part.rows for part in label.parts)


def are_groups(label: PerRow, num_rows: int) -> bool:
    """Whether the rows that an element depends on follow each other in the batch."""
    size = units(label, num_rows)
    return size == 1 or (bool(label.parts) and min(part.stride for part in label.parts) == size)


def coarsest(labels: Sequence[PerRow]) -> PerRow | None:
    """The label of an elementwise result of values with these labels; None: they pair different rows."""
    found = min(labels, key=lambda label: math.prod(part.rows for part in label.parts))
    fits = all(label.order == found.order and _refines(label.parts, found.parts) for label in labels)
    return found if fits else None


def _refines(fine: tuple[Part, ...], coarse: tuple[Part, ...]) -> bool:
    """Whether every group of indices with the same rows in `fine` lies inside one of `coarse`."""
    if fine == coarse:
        return True
    return all(any(_within(small, large) for small in fine) for large in coarse)


def _within(small: Part, large: Part) -> bool:
    times, rest = divmod(small.rows, large.rows)
    return (
        (small.dim, small.outer, small.rows * small.inner) == (large.dim, large.outer, large.rows * large.inner)
        and rest == 0
        and large.stride == small.stride * times
    )


def reshaped(label: Label, old: Sequence[int], new: Sequence[int]) -> Label | None:
    """The label after a reshape from shape `old` to `new`; None: the new dims cut across rows."""
    strides = [math.prod(new[j + 1 :]) for j in range(len(new))]
    if isinstance(label, Free):
        places = {(math.prod(old[d + 1 :]), old[d]): d for d in range(len(old)) if old[d] > 1}
        kept = {places.get((strides[j], new[j])): j for j in range(len(new))}
        return moved(label, kept.get)
    if not isinstance(label, PerRow):
        return label
    parts: list[Part] = []
    for part in label.parts:
        found = [part] if part.dim < 0 else _cut(part, math.prod(old[part.dim + 1 :]), new, strides)
        if found is None:
            return None
        parts += found
    return dataclasses.replace(label, parts=_merged(parts))


def _merged(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The same parts, with adjacent ones of one dim merged."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last and (last.dim, last.inner, last.outer * last.rows, last.stride) == (
            part.dim,
            part.rows * part.inner,
            part.outer,
            part.stride * part.rows,
        ):
            found[-1] = Part(part.dim, last.outer, last.rows * part.rows, part.inner, part.stride)
        else:
            found.append(part)
    return tuple(found)


def _cut(part: Part, behind: int, new: Sequence[int], strides: Sequence[int]) -> list[Part] | None:
    """The parts of one part after a reshape; `behind` is the number of elements in the old dims after its own."""
    low, high = part.inner * behind, part.inner * behind * part.rows
    found: list[Part] = []
    for dim, (size, step) in enumerate(zip(new, strides, strict=True)):
        first, last = max(low, step), min(high, step * size)
        if last <= first:
            continue
        if first % step or (step * size) % last or last % first or first % low:
            return None
        stride = part.stride * (first // low)
        found.append(Part(dim, step * size // last, last // first, first // step, stride))
    return found if math.prod(each.rows for each in found) == part.rows else None
