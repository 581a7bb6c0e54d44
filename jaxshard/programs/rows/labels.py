"""Labels: how a value of the loss of all rows follows from its partners in the losses of each device's rows.

Two traces are compared: one of the rows of each of k devices, and one of all rows together, where the mesh axes that
split them have size 1. A label says by which formula a value of the second follows from its k partners of the first:

  same   ratio * the partner, which is equal on all devices;
  rows   ratio * the partners, concatenated along a dim: rows in the batch's order;
  total  ratio * the sum of the partners (or their maximum, or minimum);
  other  no such formula is known; `Trouble` says where it ended.

A loss is proved to be a mean over rows if it is a total of ratio 1/k. Each formula holds for any values of the inputs,
so that derivatives follow it too.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import jax

from jaxshard.base.types import Equation

Trail: TypeAlias = tuple[Equation, ...]  # an equation, after the equations whose programs hold it
Ratio: TypeAlias = float | None  # None: the value is 0 in both programs, so that any ratio holds
Cause: TypeAlias = Literal["statistic", "ratio", "pairs", "some", "position", "drawn", "count", "unknown"]

ROW = -1  # the dim of rows inside a scan over them
ANY = 0  # the `outer` of equal rows


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Where a proof ended: the cause, the operation, and the sum over rows that it uses."""

    cause: Cause
    trail: Trail
    of: Trail = ()
    extreme: bool = False  # it is a maximum or minimum over rows


@dataclasses.dataclass(frozen=True)
class Label:
    """The formula of a value.

    Attributes:
      dim, outer: of rows. Each dim of size outer * n splits into (outer, n); devices' parts join along its second half.
      fixed: rows are equal on all devices: they depend on nothing in the batch.
      place: each row is its place in the batch (from an iota).
      own: it comes from a key that each device folds with its index; what is drawn from it is drawn for each row.
      value: the number that all elements are, in both programs; None if unknown.
      first: the number that all elements are in the first program; of a device's index: by what it is multiplied.
      by: what a total is: the sum over devices, or their largest or smallest value.
      running: the number (from 1) of a scan's carry, of a total inside a scan over rows; 0 of any other.
      columns: labels of the parts of an index array along its last dim.
    """

    kind: Literal["same", "rows", "total", "other"]
    ratio: Ratio = 1.0
    dim: int = 0
    outer: int = 1
    fixed: bool = False
    place: bool = False
    own: bool = False
    value: float | None = None
    first: float | None = None
    by: Literal["sum", "largest", "smallest"] = "sum"
    running: int = 0
    columns: tuple["Label", ...] = ()
    trail: Trail = dataclasses.field(default=(), compare=False)
    trouble: Trouble | None = dataclasses.field(default=None, compare=False)

    def with_(self, **changes: object) -> "Label":
        """The label with some attributes changed; one of other elements loses the number that they were."""
        changes |= {"first": None} if changes.get("value", self) is None else {}
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]


SAME = Label("same")


def lost(cause: Cause, trail: Trail, of: Trail = (), *, extreme: bool = False) -> Label:
    """The label of a value without a formula."""
    return Label("other", trouble=Trouble(cause, trail, of, extreme))


def number(one: float | None, two: float | None) -> Label | None:
    """The label of a number in the two programs; None if it has other signs, or is none."""
    if one is None or two is None:
        return None
    if one == two or (math.isnan(one) and math.isnan(two)):
        return Label("same", None if one == 0 else 1.0, value=one, first=one)
    return Label("same", two / one, first=one) if one * two > 0 and math.isfinite(two / one) else None


def worst(labels: Sequence[Label]) -> Label | None:
    """The first label without a formula, one that says why before one that does not; None if all have one."""
    bad = [x for x in labels if x.kind == "other"]
    return next((x for x in bad if x.trouble and x.trouble.cause != "unknown"), bad[0] if bad else None)


def near(one: Ratio, two: Ratio) -> bool:
    """Whether two ratios are equal, but for a rounding of numbers in the program: of float32, if 64 bits are off."""
    return one is None or two is None or math.isclose(one, two, rel_tol=1e-13 if jax.config.jax_enable_x64 else 1e-6)  # pyright: ignore[reportAttributeAccessIssue]


def shifted(label: Label, gone: Iterable[int]) -> Label:
    """The label once some dims, of no rows, are gone, and the others have moved up."""
    return label if label.kind != "rows" else label.with_(dim=label.dim - sum(0 <= d < label.dim for d in gone))


def all_plain(labels: Iterable[Label]) -> bool:
    """Whether all values are their partners themselves: their ratios are 1."""
    return all(near(x.ratio, 1.0) for x in labels)


def product(one: Ratio, two: Ratio) -> Ratio:
    """The ratio of a product."""
    return None if one is None or two is None else one * two


def lie_apart(rows: Sequence[Label]) -> bool:
    """Whether rows of several arrays lie in different places, so that their elements do not match."""
    return len({x.dim for x in rows}) > 1 or len(outers(rows)) > 1


def outers(labels: Iterable[Label]) -> set[int]:
    """In how many ways dims of rows split, those of equal rows aside."""
    return {x.outer for x in labels if x.kind == "rows"} - {ANY}


def as_total(label: Label, parts: int) -> Label:
    """The same value as a total: of k equal partners."""
    if label.kind != "same":
        return label
    return Label("total", None if label.ratio is None else label.ratio / parts, fixed=True)


def joined(labels: Sequence[Label], parts: int) -> Label | None:
    """The label of an array whose elements come from several; None if no formula fits all."""
    kinds = {x.kind for x in labels}
    if "total" in kinds:
        labels = [as_total(x, parts) for x in labels]
    known = [x.ratio for x in labels if x.ratio is not None]
    first = labels[0]
    alike = {(x.kind, x.dim if x.kind == "rows" else 0, x.place, x.by, x.running) for x in labels}
    split = outers(labels)
    if len(alike) > 1 or len(split) > 1 or not all(near(x, known[0]) for x in known):
        return None
    return Label(
        first.kind,
        known[0] if known else None,
        first.dim,
        split.pop() if split else first.outer,
        fixed=all(x.fixed for x in labels),
        place=first.place,
        own=any(x.own for x in labels),
        value=first.value if len({x.value for x in labels}) == 1 else None,
        by=first.by,
        running=first.running,
        trail=next((x.trail for x in labels if x.trail), ()),
    )
