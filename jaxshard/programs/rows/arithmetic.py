"""Labels of the results of elementwise operations, and of reductions over dims and over devices."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxshard.base.types import Equation
from jaxshard.programs.jaxprs import is_float
from jaxshard.programs.primitives import (
    ADDS,
    ADDS_UP,
    CHOOSES,
    COMPARES,
    DIV,
    HOMOGENEOUS,
    LT,
    MULTIPLIES,
    NUMBERS,
    OVER_DEVICES,
    REDUCE_SUM,
    SAME_NUMBERS,
    SUB,
    SUMS,
    power_of,
)
from jaxshard.programs.rows.labels import (
    ANY,
    Cause,
    Label,
    Ratio,
    Trail,
    all_plain,
    joined,
    lie_apart,
    lost,
    near,
    product,
    shifted,
)

Shape: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Pair:
    """An operation in the loss of each of `parts` devices' rows, and its partner in that of all rows."""

    one: Equation
    two: Equation
    parts: int
    trail: Trail

    @property
    def name(self) -> str:
        """The operation."""
        return self.one.primitive.name

    @property
    def adds_up(self) -> bool:
        """Whether it adds up many numbers."""
        return self.name in ADDS_UP

    @property
    def is_linear(self) -> bool:
        """Whether it is linear in its operands, for given indices and predicates."""
        return self.name in SUMS

    @property
    def keeps_numbers(self) -> bool:
        """Whether its result is its operand, number for number, but for the rounding of floats: not a cast to bool."""
        if self.name not in SAME_NUMBERS:
            return False
        old, new = (v.aval.dtype for v in (self.one.invars[0], self.one.outvars[0]))
        whole = not jnp.issubdtype(new, jnp.inexact)
        return np.can_cast(old, new, "safe") if whole else True

    @property
    def keeps_places(self) -> bool:
        """Whether its result is its operand, if that is places in the batch, of which there are fewer than 2^31."""
        dtype = self.one.outvars[0].aval.dtype
        return self.name in SAME_NUMBERS and jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4

    @property
    def may_wrap(self) -> bool:
        """Whether its result is of integers so short that sums of many may not fit."""
        dtype = self.one.outvars[0].aval.dtype
        return jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4

    def shapes(self, position: int) -> tuple[Shape, Shape]:
        """The shapes of an operand."""
        return self.one.invars[position].aval.shape, self.two.invars[position].aval.shape

    def out_shapes(self, position: int = 0) -> tuple[Shape, Shape]:
        """The shapes of a result."""
        return self.one.outvars[position].aval.shape, self.two.outvars[position].aval.shape

    def grown(self, position: int = 0) -> list[int]:
        """The dims of a result that have other sizes in the two programs."""
        return [d for d, (x, y) in enumerate(zip(*self.out_shapes(position), strict=True)) if x != y]

    def no(self, cause: Cause, of: Trail = (), *, extreme: bool = False) -> Label:
        """The label of a result without a formula."""
        return lost(cause, self.trail, of, extreme=extreme)


Rule: TypeAlias = Callable[[Pair, Sequence[Label]], Label]


def pointwise(pair: Pair, labels: Sequence[Label]) -> Label:
    """Each element of the result depends on the operands' elements at its index. Operands without a formula are out."""
    if any(x.place for x in labels):
        return _of_places(pair, labels)
    totals = [x for x in labels if x.kind == "total"]
    if totals:
        return _of_totals(pair, labels, totals)
    rows = [x for x in labels if x.kind == "rows"]
    if lie_apart(rows):
        return pair.no("pairs")
    ratio = _ratio(pair, labels)
    if ratio is _NONE:
        return pair.no("count" if is_float(pair.one.outvars[0]) else "some")
    value = labels[0].value if pair.keeps_numbers else None
    own = any(x.own for x in labels)
    if not rows:
        return Label("same", ratio, own=own, value=value, trail=next((x.trail for x in labels if x.trail), ()))
    outer = max(x.outer for x in rows)
    return Label("rows", ratio, rows[0].dim, outer, fixed=all(x.fixed for x in rows), own=own, value=value)


_NONE = math.nan  # no ratio


def _ratio(pair: Pair, labels: Sequence[Label]) -> Ratio:
    """The ratio of a result from those of operands; `_NONE` if the result has none."""
    name, floats = pair.name, is_float(pair.one.outvars[0])
    if name in MULTIPLIES and len(labels) == 2 and (floats or name != DIV):
        return _scaled(name, *(x.ratio for x in labels))
    power = power_of(pair.one)
    if power is not None:
        ratio = labels[0].ratio
        return (1.0 if power <= 0 else None) if ratio is None else ratio**power
    ratios = [x.ratio for x in labels[NUMBERS.get(name, slice(None))] if x.ratio is not None]
    if not all_plain(labels):
        is_cast = name in SAME_NUMBERS and not pair.keeps_numbers
        scales = name in COMPARES or (name in HOMOGENEOUS and name != DIV and not is_cast)
        if not scales or not all(near(x, ratios[0]) for x in ratios):
            return _NONE
        return 1.0 if name in COMPARES else ratios[0]
    return None if not ratios and name in SUMS else 1.0


def _scaled(name: str, one: Ratio, two: Ratio) -> Ratio:
    """The ratio of a product or a quotient."""
    if name != DIV or one is None:
        return product(one, two)
    return _NONE if two is None else one / two


def _of_places(pair: Pair, labels: Sequence[Label]) -> Label:
    """Of places in the batch: they stay what they are, and none is negative (what an index is asked for)."""
    first, *rest = labels
    if pair.keeps_places:
        return first
    if pair.name == LT and first.place and all(x.value is not None and x.value <= 0 for x in rest):
        return Label("rows", None, first.dim, ANY, fixed=True, value=0.0)
    return pair.no("position")


def with_index(pair: Pair, labels: Sequence[Label]) -> Label:
    """Of a device's index: times the rows of a device, plus each row's place there, it is the place among all."""
    index = next(x for x in labels if x.kind == "other")
    rest = [x for x in labels if x is not index]
    if not rest and pair.keeps_places:
        return index
    if len(rest) == 1 and index.first is not None:
        (term,) = rest
        if pair.name in MULTIPLIES and pair.name != DIV and term.kind == "same" and term.first is not None:
            return index.with_(first=index.first * term.first)
        if pair.name in ADDS and term.place and index.first == pair.out_shapes()[0][term.dim]:
            return term.with_(place=False, fixed=False)
    return index.with_(first=None)


def _of_totals(pair: Pair, labels: Sequence[Label], totals: Sequence[Label]) -> Label:
    """Of totals: only what is linear in them has a formula."""
    name, first = pair.name, totals[0]
    if any(x.running for x in totals):
        return _of_running(pair, labels)
    if any(x.by != "sum" for x in totals):
        same = len(totals) == len(labels) == 1 and pair.keeps_numbers
        return first if same else pair.no("statistic", first.trail, extreme=True)
    rounds = (name in SAME_NUMBERS and not pair.keeps_numbers) or pair.may_wrap
    if any(x.kind == "rows" for x in labels) or rounds:
        return pair.no("statistic", first.trail)
    if name in MULTIPLIES:
        if len(totals) > 1 or (name == DIV and (labels[1].kind == "total" or not is_float(pair.one.outvars[0]))):
            return pair.no("ratio" if name == DIV and len(totals) > 1 else "statistic", first.trail)
        ratio = _scaled(name, *(x.ratio for x in labels))
        return pair.no("count") if ratio is _NONE else first.with_(ratio=ratio, value=None, fixed=False)
    operands = labels[NUMBERS.get(name, slice(None))]
    chosen = [x for x in labels if not any(x is y for y in operands)]
    if name not in SUMS or any(x.kind != "same" or not near(x.ratio, 1.0) for x in chosen):
        return pair.no("statistic", first.trail)
    found = joined(operands, pair.parts)
    return found.with_(value=None) if found else pair.no("count", first.trail)


def _of_running(pair: Pair, labels: Sequence[Label]) -> Label:
    """Of sums inside a scan over rows: more may be added to them, and nothing else done."""
    name, running = pair.name, [x for x in labels if x.running]
    trail = running[0].trail or pair.trail
    terms = [x for x in labels if not x.running]
    if any(x.kind == "total" for x in terms):
        return pair.no("statistic", trail)
    if pair.keeps_numbers and len(labels) == 1 and not pair.may_wrap:
        return running[0]
    if name in CHOOSES and all(x.running for x in labels[1:]):
        found = joined(labels[1:], pair.parts)
        return found or pair.no("count", trail)
    if pair.may_wrap:
        return pair.no("statistic", trail)
    adds = (name in ADDS or (name == SUB and labels[0].running)) and len(running) == 1
    if not adds or not all(near(x.ratio, running[0].ratio) for x in terms):
        return pair.no("statistic", trail)
    ratios = [x.ratio for x in labels if x.ratio is not None]
    return running[0].with_(ratio=ratios[0] if ratios else None, trail=trail)


def reduction(pair: Pair, labels: Sequence[Label]) -> Label:
    """A sum, or another reduction over the dims `axes`."""
    over = "sum" if pair.name == REDUCE_SUM else extreme_of(OVER_DEVICES.get(pair.name, ""))
    return reduced(pair, labels[0], [int(d) for d in pair.one.params["axes"]], over)


def extreme_of(collective: str) -> str:
    """What a collective that is no sum takes of all devices' values; "" for any other."""
    return "largest" if collective.endswith("max") else "smallest" if collective.endswith("min") else ""


def reduced(pair: Pair, label: Label, dims: Sequence[int], over: str) -> Label:
    """The label of a reduction over some dims to the "sum", "largest", "smallest", or anything else."""
    if label.kind == "total":
        return label.with_(value=None) if over == label.by == "sum" else pair.no("statistic", label.trail)
    if label.kind != "rows" or label.dim not in dims:
        if not over and not near(label.ratio, 1.0):
            return pair.no("count")
        return shifted(label.with_(ratio=label.ratio if over else 1.0, value=None), dims)
    if label.place:
        return pair.no("position")
    if over == "sum":
        return summed(pair, label)
    if not over:
        return pair.no("statistic", pair.trail)
    return Label("same", label.ratio) if label.fixed else Label("total", label.ratio, by=over, trail=pair.trail)  # pyright: ignore[reportArgumentType]


def summed(pair: Pair, *labels: Label) -> Label:
    """The label of a sum over rows of products of these."""
    if pair.may_wrap or any(x.place for x in labels):
        return pair.no("position" if not pair.may_wrap else "statistic", pair.trail)
    ratio = functools.reduce(product, [x.ratio for x in labels])
    if all(x.fixed for x in labels):
        return Label("same", product(ratio, pair.parts), own=any(x.own for x in labels))
    return Label("total", ratio, trail=pair.trail)
