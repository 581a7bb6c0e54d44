"""Judges whether a traced loss is a mean over rows, which data parallelism may average."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from jaxshard.base.types import Jaxpr
from jaxshard.programs.jaxprs import open_jaxpr, sizes_of
from jaxshard.programs.rows import words
from jaxshard.programs.rows.arithmetic import Arithmetic
from jaxshard.programs.rows.growth import Partners, counts, may_count
from jaxshard.programs.rows.labels import NO_POWER, Free, Label, Mixed, Part, PerRow, Stat, Unknown
from jaxshard.programs.rows.walk import Walk, array_label

_MANY_ROWS = 106  # hardly any other size, or inverse of a number, equals this


class RowsWarning(UserWarning):
    """The loss is not a mean of independent rows, so it differs between one device and several."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The findings about a loss.

    Attributes:
      problem: why it is not a mean over rows, and the cure; "" if no problem was found.
      unknown: the operation through which rows could not be followed; "" if there is none.
      row_dims: for each output of the program, the dim that holds the batch's rows, one each; or None.
      folded: for each output, True if rows share a dim, are permuted, or hold a statistic.
      counted: for each output, whether it depends on the number of rows, but on no row's values.
      averaged: for each output, why its average over devices differs from one device's result, in words; or "".
      group: the number of neighbouring rows that are computed together.
      alone: all rows are on one device at once, so any loss is right.
    """

    problem: str = ""
    unknown: str = ""
    row_dims: tuple[int | None, ...] = ()
    folded: tuple[bool, ...] = ()
    counted: tuple[bool, ...] = ()
    averaged: tuple[str, ...] = ()
    group: int = 1
    alone: bool = False

    def __str__(self) -> str:
        if self.alone:
            return "all are on one device at once, so that any loss will do"
        if self.problem:
            return f"the loss is no mean over rows: {self.problem}"
        return f"not known: {self.unknown}" if self.unknown else "the loss is a mean over rows"


@dataclasses.dataclass(frozen=True)
class Question:
    """A loss to judge.

    Attributes:
      trace: number of rows -> the traced loss of these; its outputs are (loss, weight, ...).
      num_rows: the rows of one microbatch on one device.
      batch: which inputs of the program are leaves of the batch.
      folded: which inputs are keys that differ between devices.
      weighted: the loss is (sum, weight).
      per_row: outputs after the first two have rows, and these are judged.
      split_axes: the mesh axes over which rows are split.
      num_shards: the number of devices along these axes.
      microbatches: the number of microbatches on each device.
    """

    trace: Callable[[int], Jaxpr]
    num_rows: int
    batch: Sequence[bool]
    folded: Sequence[bool]
    weighted: bool
    per_row: bool
    split_axes: Sequence[str]
    num_shards: int
    microbatches: int


class _Fault(Exception):
    """The loss is not a mean over rows; the message says why, with the cure."""


class _Unclear(Exception):
    """Whether the loss is a mean over rows cannot be decided."""


def judge(question: Question, jaxpr: Jaxpr) -> Verdict:
    """The verdict on a loss whose trace of `question.num_rows` rows is `jaxpr`."""
    question = dataclasses.replace(question, trace=functools.cache(question.trace))
    try:
        found = _judged(question, jaxpr)
        return dataclasses.replace(found, counted=_counted(question, jaxpr, found.row_dims))
    except Exception as error:  # of any type: an unusual program must not keep a user from training
        return Verdict("", f"{type(error).__name__}: {error}")


def _judged(question: Question, jaxpr: Jaxpr) -> Verdict:
    rows = question.num_rows
    if rows == 1:  # a dim of size 1 may be rows or not; a dim of many rows is unambiguous
        jaxpr = _traced(question, _MANY_ROWS) or jaxpr
        rows = _num_rows(jaxpr, question)
    found = _judged_at(question, jaxpr, rows)
    if found.problem and not question.per_row and (larger := _traced(question, 2 * rows)) is not None:
        again = _judged_at(question, larger, 2 * rows)  # all rows of a device may be one group of a fixed size
        if not again.problem and not again.unknown and question.num_rows % again.group == 0:
            kept = {name: getattr(found, name) for name in ("row_dims", "folded", "averaged")}
            return dataclasses.replace(again, **kept)
    return found


def _judged_at(question: Question, jaxpr: Jaxpr, rows: int) -> Verdict:
    outs, arithmetic = _labels(question, jaxpr, rows, None)
    groups = arithmetic.groups
    shapes = [v.aval.shape for v in open_jaxpr(jaxpr).outvars]
    row_dims = tuple(_row_dim(label, shape, rows) for label, shape in zip(outs, shapes, strict=True))
    if question.per_row:
        return _of_rows(question, jaxpr, outs, row_dims)
    row_dims, folded = _of_aux(question, jaxpr, outs, row_dims)
    unknown = words.of_rule(arithmetic.rules[0]) if arithmetic.rules else ""
    _, weight, *aux = outs
    averaged = ("", "", *(words.of_aux(label, weight, question.split_axes, question.weighted) for label in aux))
    known = Verdict(unknown=unknown, row_dims=row_dims, folded=folded, averaged=averaged)
    try:
        _check(question, outs, exact=False)
        if groups:
            raise _Unclear("rows are computed with in groups")
    except _Fault as fault:
        return dataclasses.replace(known, problem=str(fault))
    except _Unclear as unclear:
        if any(isinstance(label, Unknown) for label in outs[:2]):
            return dataclasses.replace(known, unknown=str(unclear))
        exact, group = _exactly(question, jaxpr, rows), math.lcm(*(size for size, _ in groups))
        group = 1 if exact.problem else group
        return dataclasses.replace(known, problem=exact.problem, unknown=exact.unknown or known.unknown, group=group)
    return known


def _of_aux(
    question: Question, jaxpr: Jaxpr, outs: Sequence[Label], row_dims: tuple[int | None, ...]
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """(the dims of rows, whether an output has rows in another way): by its label, or else by its shape."""
    rows, shapes = _num_rows(jaxpr, question), [v.aval.shape for v in open_jaxpr(jaxpr).outvars]
    found, folded = list(row_dims), [isinstance(x, PerRow) and d is None for x, d in zip(outs, row_dims, strict=True)]
    if _of_powers(question, jaxpr, rows, outs):
        folded = [yes or (isinstance(x, PerRow) and x.degree != 0) for yes, x in zip(folded, outs, strict=True)]
        found = [None if yes else dim for yes, dim in zip(folded, found, strict=True)]
    asked = [i for i in range(2, len(outs)) if found[i] is None and _may_grow(outs[i], shapes[i], rows)]
    larger = _traced(question, 2 * rows) if asked else None
    for i in asked if larger is not None else ():
        if open_jaxpr(larger).outvars[i].aval.shape != shapes[i]:
            label = outs[i]
            same = isinstance(label, Free) and 0 not in label.varied
            found[i], folded[i] = 0 if same else None, not same
    return tuple(found), tuple(folded)


def _counted(question: Question, jaxpr: Jaxpr, row_dims: Sequence[int | None]) -> tuple[bool, ...]:
    """For each output, whether it depends on the number of rows, as a trace with the whole batch's rows shows."""
    asked = [i >= 2 and dim is None and may_count(jaxpr, question.batch, i) for i, dim in enumerate(row_dims)]
    all_rows = question.num_rows * question.num_shards * question.microbatches
    larger = _traced(question, all_rows) if any(asked) else None
    if larger is None:
        return (False,) * len(asked)
    return tuple(yes and counts(jaxpr, larger, i) for i, yes in enumerate(asked))


def _may_grow(label: Label, shape: Sequence[int], rows: int) -> bool:
    """Whether an output may have rows although its label does not show them."""
    if isinstance(label, Free):
        return tuple(shape[:1]) == (rows,)
    return isinstance(label, Mixed | Unknown) and tuple(shape) != ()


def _of_rows(question: Question, jaxpr: Jaxpr, outs: Sequence[Label], row_dims: tuple[int | None, ...]) -> Verdict:
    """The verdict on outputs that should have rows; if labels do not tell, the first dim's size does."""
    shapes = [v.aval.shape for v in open_jaxpr(jaxpr).outvars]
    rows = _num_rows(jaxpr, question)
    clear = [isinstance(label, Free | Stat) or (isinstance(label, PerRow) and not label.plus) for label in outs]
    sized = tuple(0 if not known and shape[:1] == (rows,) else None for known, shape in zip(clear, shapes, strict=True))
    found = tuple(dim if dim is not None else other for dim, other in zip(row_dims, sized, strict=True))
    mixed = next((label for label in map(_with_plus, outs[2:]) if isinstance(label, Mixed)), None)
    problem = "" if mixed is None else words.of_mixture(mixed, question.split_axes, question.microbatches)
    if not problem and _of_powers(question, jaxpr, rows, outs):
        problem = words.of_outputs()
    return Verdict(problem if question.num_shards > 1 else "", "", found)


def _of_powers(question: Question, jaxpr: Jaxpr, rows: int, outs: Sequence[Label]) -> bool:
    """Whether some output with rows scales with the number of rows."""
    if not any(isinstance(label, PerRow) and label.degree != 0 for label in outs[2:]):
        return False
    try:
        exact, _ = _labels(question, jaxpr, rows, _with_partners(question, jaxpr, rows)[0])
    except ValueError:
        return False
    return any(isinstance(label, PerRow) and label.degree not in (0, None) for label in exact[2:])


def _with_plus(label: Label) -> Label:
    """A statistic added to rows makes a per-row output Mixed (in a loss it is allowed)."""
    return Mixed("statistic", label.plus) if isinstance(label, PerRow) and label.plus else label


def _exactly(question: Question, jaxpr: Jaxpr, rows: int) -> Verdict:
    """The verdict with a second trace, of twice as many rows, which shows what grows with them."""
    try:
        partners, larger = _with_partners(question, jaxpr, rows)
    except ValueError as error:
        return Verdict("", str(error))
    outs, arithmetic = _labels(question, jaxpr, rows, partners)
    groups, larger_groups = arithmetic.groups, _labels(question, larger, 2 * rows, None)[1].groups
    try:
        if len(groups) != len(larger_groups):
            raise _Unclear("rows are computed with in groups, and with other ones where there are more rows")
        for mine, other in zip(groups, larger_groups, strict=True):
            if mine[0] != other[0]:
                raise _Fault(words.of_parts(mine[1]))
        _check(question, outs, exact=True)
    except _Fault as fault:
        return Verdict(str(fault))
    except _Unclear as unclear:
        return Verdict("", str(unclear))
    return Verdict()


def _with_partners(question: Question, jaxpr: Jaxpr, rows: int) -> tuple[Partners, Jaxpr]:
    """(partners in a trace of twice as many rows, this trace); raises ValueError if there is none."""
    larger = _traced(question, 2 * rows)
    if larger is None:
        raise ValueError("it cannot be traced with twice as many rows")
    return Partners(jaxpr, larger), larger


def _traced(question: Question, rows: int) -> Jaxpr | None:
    try:
        return question.trace(rows)
    except Exception:  # of any type: it is the user's own code, on a batch of another size
        return None


def _num_rows(jaxpr: Jaxpr, question: Question) -> int:
    invars = open_jaxpr(jaxpr).invars
    return next(v.aval.shape[0] for v, of_batch in zip(invars, question.batch, strict=True) if of_batch)


def _labels(question: Question, jaxpr: Jaxpr, rows: int, partners: Partners | None) -> tuple[list[Label], Arithmetic]:
    """The labels of the loss's outputs, and the `Arithmetic` with its groups and rules."""
    sizes = functools.cache(lambda: sizes_of(jaxpr))
    arithmetic = Arithmetic(rows, question.num_shards * question.microbatches, partners, sizes)
    walk = Walk(arithmetic, question.split_axes, question.microbatches == 1)
    split = PerRow((Part(0, 1, rows, 1, 1),))
    invars = open_jaxpr(jaxpr).invars
    labels: list[Label] = [dataclasses.replace(array_label(v), given=True) for v in invars]
    labels = [split if yes else label for label, yes in zip(labels, question.batch, strict=True)]
    labels = [
        Free(placed=True, given=True) if yes else label for label, yes in zip(labels, question.folded, strict=True)
    ]
    return walk.through(jaxpr, labels), arithmetic


def _row_dim(label: Label, shape: Sequence[int], rows: int) -> int | None:
    if isinstance(label, Free) and label.placed:  # drawn on each device
        return 0 if tuple(shape[:1]) == (rows,) else None
    whole = isinstance(label, PerRow) and len(label.parts) == 1 and not label.order and not label.plus
    if not whole or not isinstance(label, PerRow):
        return None
    part = label.parts[0]
    return part.dim if (part.outer, part.rows, part.inner, part.stride) == (1, rows, 1, 1) else None


def _check(question: Question, outs: Sequence[Label], *, exact: bool) -> None:
    """Raises for a loss that is not a mean, or may not be one; `exact`: the labels' degrees are from two traces."""
    loss, weight = outs[:2]
    for label in (loss, weight):
        if isinstance(label, Mixed):
            raise _Fault(words.of_mixture(label, question.split_axes, question.microbatches))
    for label in (loss, weight):
        if isinstance(label, Unknown):
            raise _Unclear(f"rows are not followed through {words.named(label.trail)}")
        if isinstance(label, PerRow):
            raise _Unclear("each device has one row, and the loss takes no other number of rows")
    degrees = [label.degree if isinstance(label, Free | Stat) else None for label in (loss, weight)]
    wanted = degrees[1] if question.weighted else 0
    is_number = question.weighted and isinstance(weight, Free)  # which may be the number of rows
    is_number |= any(isinstance(label, Stat) and label.guessed for label in (loss, weight))
    if degrees[0] == wanted and wanted not in (None, NO_POWER) and (exact or not is_number):
        return
    if not exact or degrees[0] is None or wanted is None:
        raise _Unclear("a number in it may depend on the number of rows")
    if isinstance(loss, Free) and loss.summed and degrees[0] < wanted:
        raise _Fault(words.of_devices(loss.summed))
    raise _Fault(words.of_sum(loss, weight, question.weighted))
