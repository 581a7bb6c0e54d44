"""Judges whether a traced loss is a mean over rows, which data parallelism may average."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence

from jaxshard.base.types import Jaxpr
from jaxshard.programs.dims import row_dims_of
from jaxshard.programs.jaxprs import open_jaxpr
from jaxshard.programs.paired import Unlike
from jaxshard.programs.rows import words
from jaxshard.programs.rows.labels import SAME, Label, Ratio, as_total, near
from jaxshard.programs.rows.pairs import scale_alike
from jaxshard.programs.rows.proof import Proof


class RowsWarning(UserWarning):
    """The loss is not a mean of independent rows, so it differs between one device and several."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The findings about a loss.

    Attributes:
      problem: why it is not a mean over rows, and the cure; "" if no problem was found.
      unknown: where the proof that it is one ended; "" if it did not.
      row_dims: for each output of the program, the dim that holds the batch's rows, one each; or None.
      folded: for each output, True if it has rows, but no such dim.
      counted: for each output, whether it depends on the number of rows, if it depends on no row's values.
      averaged: for each output, why its average over devices may differ from one device's result, in words; or "".
      group: the number of neighbouring rows that are computed together.
      alone: all rows are on one device at once, so any loss is right that has no problem in microbatches of its own.
      in_microbatches: `problem` is one of a part with microbatches of its own, a pipeline.
    """

    problem: str = ""
    unknown: str = ""
    row_dims: tuple[int | None, ...] = ()
    folded: tuple[bool, ...] = ()
    counted: tuple[bool, ...] = ()
    averaged: tuple[str, ...] = ()
    group: int = 1
    alone: bool = False
    in_microbatches: bool = False

    @property
    def is_proved(self) -> bool:
        """Whether averaging over devices is known to be right."""
        return self.alone or not (self.problem or self.unknown)

    def __str__(self) -> str:
        if self.problem:
            return f"the loss is not a mean over rows: {self.problem}"
        if self.alone:
            return "all rows are on one device, so any loss is correct"
        return f"not known: {self.unknown}" if self.unknown else "the loss is a mean over rows"


@dataclasses.dataclass(frozen=True)
class Question:
    """A loss to judge.

    Attributes:
      trace: (the number of rows, the mesh axes that have size 1, the number of devices that these rows are of, or None
        for one) -> the traced loss; its outputs are (loss, weight, ...).
      num_rows: the rows of one microbatch on one device.
      batch: which inputs of the program are leaves of the batch.
      folded: which inputs are keys that differ between devices.
      weighted: the loss is (sum, weight).
      per_row: outputs after the first two have rows, and these are judged.
      differentiated: whether its gradients are taken.
      split: the mesh axes over which rows are split, and their sizes.
      parts: the number of devices along these axes.
      cut: for each input, the axes of `split` that `specs` cut it over, each with the dim.
      gone: further axes that had split the rows, and are of size 1 by now.
    """

    trace: Callable[[int, tuple[str, ...], int | None], Jaxpr]
    num_rows: int
    batch: Sequence[bool]
    folded: Sequence[bool]
    weighted: bool
    per_row: bool
    differentiated: bool
    split: Mapping[str, int]
    parts: int
    cut: Sequence[Mapping[str, int]] = ()
    gone: tuple[str, ...] = ()


def judge(question: Question, jaxpr: Jaxpr) -> Verdict:
    """The verdict on a loss whose trace of `question.num_rows` rows is `jaxpr`.

    Axes that params are cut over come last, one by one: such a param is the same along the others, and has parts in
    place of rows along its own.
    """
    own = [axis for axis in question.split if any(axis in cut for cut in question.cut)]
    rest = {axis: size for axis, size in question.split.items() if axis not in own}
    steps = [rest] * bool(rest or not own) + [{axis: question.split[axis]} for axis in own]
    verdicts, rows, gone = list[Verdict](), question.num_rows, ()
    for split in steps:
        parts = math.prod(split.values()) if own else question.parts
        step = dataclasses.replace(question, num_rows=rows, split=split, parts=parts, gone=gone)
        program = _traced(step, rows, alone=False) if gone else jaxpr
        if program is None:
            verdicts.append(_unknown(step, jaxpr, None, "it cannot be traced with the rows of several devices"))
        else:
            verdicts.append(_in_step(step, program))
        rows, gone = rows * parts, (*gone, *split)
    return functools.reduce(_both, verdicts)


def _both(one: Verdict, two: Verdict) -> Verdict:
    """The verdict on a loss from those along some axes, and along further ones."""

    def first(a: str, b: str) -> str:
        return a or b

    return dataclasses.replace(
        one,
        problem=first(one.problem, two.problem),
        unknown=first(one.unknown, two.unknown),
        row_dims=tuple(a if a == b else None for a, b in zip(one.row_dims, two.row_dims, strict=True)),
        folded=tuple(map(operator.or_, one.folded, two.folded)),
        counted=tuple(map(operator.or_, one.counted, two.counted)),
        averaged=tuple(map(first, one.averaged, two.averaged)),
        in_microbatches=one.in_microbatches or two.in_microbatches,
    )


def _in_step(question: Question, jaxpr: Jaxpr) -> Verdict:
    """The verdict along the axes `question.split`, all at once."""
    found = _compared(question, question.num_rows, jaxpr)
    if question.num_rows > 1 or not (found.problem or found.unknown):
        return found
    two = _traced(question, 2, alone=False)  # a dim of one row may be broadcast as one of several is not
    many = _traced(question, 2 * question.parts, alone=False)
    if two is None or many is None or not scale_alike([jaxpr, two, many], [1, 2, 2 * question.parts]):
        return found
    return _compared(question, 2, two)


def _compared(question: Question, rows: int, jaxpr: Jaxpr) -> Verdict:
    """The verdict on a loss whose trace of `rows` rows is `jaxpr`, from its trace with the rows of all devices."""
    whole = _traced(question, rows * question.parts, alone=True)
    if whole is None:
        return _unknown(question, jaxpr, None, "it cannot be traced with the rows of all devices")
    try:
        return _judged(question, rows, jaxpr, whole)
    except Unlike as error:
        return _unknown(question, jaxpr, whole, words.of_other_programs(() if error.one is None else (error.one,)))
    except Exception as error:  # of any type: an unusual program must not keep a user from training
        return _unknown(question, jaxpr, whole, f"{type(error).__name__}: {error}")


def _unknown(question: Question, jaxpr: Jaxpr, whole: Jaxpr | None, why: str) -> Verdict:
    shapes, count = [v.aval.shape for v in open_jaxpr(jaxpr).outvars], len(open_jaxpr(jaxpr).outvars)
    folded = [bool(shape) for shape in shapes] if whole is None else _grown(jaxpr, whole)
    averaged = ("", "", *[f"is not known to be a mean over rows: {why}"] * (count - 2))
    row_dims = (None,) * count if whole is None else _placed(question, jaxpr, whole, (None,) * count, folded)
    folded = [yes and dim is None for yes, dim in zip(folded, row_dims, strict=True)]
    row_dims = _by_shape(question, jaxpr, row_dims, folded)
    return Verdict(unknown=why, row_dims=row_dims, folded=tuple(folded), averaged=averaged)


def _placed(
    question: Question, jaxpr: Jaxpr, whole: Jaxpr, row_dims: tuple[int | None, ...], grown: Sequence[bool]
) -> tuple[int | None, ...]:
    """`row_dims`, and those of outputs whose rows depend on other rows too, but stand in the batch's order."""
    if not any(yes and dim is None for yes, dim in zip(grown, row_dims, strict=True)):
        return row_dims
    found = [None, None, *row_dims_of(jaxpr, whole, question.batch)[2:]]  # a loss and its weight have no dims
    return tuple(other if dim is None else dim for dim, other in zip(row_dims, found, strict=True))


def _by_shape(
    question: Question, jaxpr: Jaxpr, row_dims: Sequence[int | None], sized: Sequence[bool]
) -> tuple[int | None, ...]:
    """Outputs of `predict` that depend on several rows have their rows in the first dim, if it has as many."""
    rows = next(v.aval.shape[0] for v, yes in zip(open_jaxpr(jaxpr).invars, question.batch, strict=True) if yes)
    each = zip(row_dims, sized, open_jaxpr(jaxpr).outvars, strict=True)
    fits = question.per_row
    return tuple(0 if fits and dim is None and yes and v.aval.shape[:1] == (rows,) else dim for dim, yes, v in each)


def _grown(jaxpr: Jaxpr, whole: Jaxpr) -> list[bool]:
    """Which outputs have more elements where there are more rows."""
    outs = (open_jaxpr(program).outvars for program in (jaxpr, whole))
    return [math.prod(a.aval.shape) != math.prod(b.aval.shape) for a, b in zip(*outs, strict=True)]


def _traced(question: Question, rows: int, *, alone: bool) -> Jaxpr | None:
    try:
        axes = (*question.gone, *question.split) if alone else question.gone
        return question.trace(rows, axes, question.parts if alone else None)
    except Exception:  # of any type: it is the user's own code, on a batch of another size
        return None


def _judged(question: Question, rows: int, jaxpr: Jaxpr, whole: Jaxpr) -> Verdict:
    proof = Proof(question.split, question.parts, rows)
    outs = proof.outputs(jaxpr, whole, _inputs(question))
    sizes = [v.aval.shape for v in open_jaxpr(jaxpr).outvars]
    row_dims = tuple(_row_dim(x, size, rows) for x, size in zip(outs, sizes, strict=True))
    grown = _grown(jaxpr, whole)
    placed = _placed(question, jaxpr, whole, row_dims, grown)
    found = Verdict(
        row_dims=placed,
        folded=tuple(yes and dim is None for yes, dim in zip(grown, placed, strict=True)),
        counted=tuple(map(_of_count, outs)),
        averaged=tuple("" if dim is not None else _of_average(question, outs, i) for i, dim in enumerate(row_dims)),
        group=1 if any(question.cut) else proof.group,  # parts of params are no groups of rows
    )
    if question.per_row:
        problem = _of_outputs(question, outs, row_dims)
        moved = [x.trouble is not None and x.trouble.cause == "some" for x in outs]
        sized = [yes and not elsewhere for yes, elsewhere in zip(found.folded, moved, strict=True)]
        return dataclasses.replace(
            found, row_dims=_by_shape(question, jaxpr, placed, sized), problem=problem, averaged=()
        )
    return _of_loss(question, found, outs, proof)


def _inputs(question: Question) -> list[Label]:
    rows, own = Label("rows"), Label("same", own=True)
    cut = question.cut or [{}] * len(question.batch)
    dims = [[dim for axis, dim in axes.items() if axis in question.split] for axes in cut]
    each = zip(question.batch, question.folded, dims, strict=True)
    return [
        rows if of_batch else own if folded else Label("rows", dim=at[0]) if at else SAME
        for of_batch, folded, at in each
    ]


def _row_dim(label: Label, shape: Sequence[int], rows: int) -> int | None:
    if label.kind != "rows" or label.outer not in (0, 1) or not near(label.ratio, 1.0) or label.place:
        return None
    return label.dim if shape[label.dim] == rows else None


def _as_total(question: Question, label: Label) -> Ratio:
    return as_total(label, question.parts).ratio


def _of_loss(question: Question, found: Verdict, outs: Sequence[Label], proof: Proof) -> Verdict:
    """The findings about the loss, and its weight."""
    loss, weight = outs[:2]
    if proof.no_means:
        return dataclasses.replace(found, problem=words.of_microbatches(proof.no_means[0]), in_microbatches=True)
    for label in (loss, weight):
        if label.kind == "other" or label.by != "sum":
            return _in_words(question, found, label)
    ratio = _as_total(question, loss)
    wanted = _as_total(question, weight) if question.weighted else 1 / question.parts
    if not near(ratio, wanted):
        return dataclasses.replace(found, problem=words.of_sum(loss, question.parts, weighted=question.weighted))
    rule = proof.wrong_rule(wanted if ratio is None else ratio) if question.differentiated and wanted else ()
    return dataclasses.replace(found, unknown=words.of_rule(rule)) if rule else found


def _in_words(question: Question, found: Verdict, label: Label) -> Verdict:
    trouble, axes = words.trouble_of(label), [*question.split]
    if trouble.cause == "unknown":
        return dataclasses.replace(found, unknown=words.of_unknown(trouble))
    return dataclasses.replace(found, problem=words.of_trouble(trouble, axes, weighted=question.weighted))


def _of_count(label: Label) -> bool:
    """Whether a value that depends on no row depends on their number."""
    of_number = label.kind == "same" and not near(label.ratio, 1.0)
    return of_number or (label.trouble is not None and label.trouble.cause in ("count", "some"))


def _of_average(question: Question, outs: Sequence[Label], position: int) -> str:
    """Why the average of an output of aux over devices is not known to be one device's; "" if it is, or has rows."""
    label, weight = outs[position], outs[1]
    if position < 2:
        return ""
    if label.kind == "same" and near(label.ratio, 1.0):
        return ""
    if label.kind in ("same", "total") and label.by == "sum":
        is_mean = near(_as_total(question, label), 1 / question.parts)
        if is_mean and (not question.weighted or weight.kind == "same"):
            return ""
        return words.of_sum_in_aux(label, [*question.split], by_weight=is_mean)
    return words.of_aux(words.trouble_of(label), [*question.split])


def _of_outputs(question: Question, outs: Sequence[Label], row_dims: Sequence[int | None]) -> str:
    """Why an output of `predict` is not each row's own; "" if all are."""
    for label, dim in zip(outs[2:], row_dims[2:], strict=True):
        if dim is None:
            if label.kind == "rows":
                return words.of_outputs()
            return words.of_trouble(words.trouble_of(label), [*question.split])
    return ""
