"""Labels of the results of matrix products, convolutions and collectives."""

import math
from collections.abc import Mapping, Sequence

from jaxshard.programs.jaxprs import axes_of_equation
from jaxshard.programs.primitives import ALL_TO_ALL, kind_of
from jaxshard.programs.rows.arithmetic import Pair, extreme_of, reduced, summed
from jaxshard.programs.rows.labels import ANY, Label, outers, product


def dot_general(pair: Pair, labels: Sequence[Label]) -> Label:
    """A product of elements over all dims of both operands, and a sum over the contracted ones."""
    contracted, batch = pair.one.params["dimension_numbers"]
    left, right = labels[:2]
    rows = [i for i, x in enumerate((left, right)) if x.kind == "rows"]
    totals = [x for x in (left, right) if x.kind == "total"]
    if totals:
        bad = rows or len(totals) > 1 or totals[0].by != "sum"
        ratio = product(left.ratio, right.ratio)
        return pair.no("statistic", totals[0].trail) if bad else totals[0].with_(ratio=ratio, value=None, fixed=False)
    if not rows:
        return Label("same", product(left.ratio, right.ratio), own=left.own or right.own)
    if len(rows) == 1:
        (side,) = rows
        return _of_product(pair, labels[side], side, product(left.ratio, right.ratio))
    places = [_place(x.dim, contracted[i], batch[i]) for i, x in enumerate((left, right))]
    if places[0] != places[1] or places[0] is None:
        return pair.no("pairs")
    if len(outers((left, right))) > 1:
        return pair.no("unknown")
    if places[0][0] == "contracted":
        return summed(pair, left, right)
    fixed, outer = left.fixed and right.fixed, max(left.outer, right.outer)
    return Label("rows", product(left.ratio, right.ratio), places[0][1], outer, fixed=fixed)


def _place(dim: int, contracted: Sequence[int], batch: Sequence[int]) -> tuple[str, int] | None:
    """What a product does with a dim; None if it is one of the dims of the result that are no batch."""
    if dim in contracted:
        return "contracted", [*contracted].index(dim)
    return ("batch", [*batch].index(dim)) if dim in batch else None


def _of_product(pair: Pair, label: Label, side: int, ratio: float | None) -> Label:
    """The label of the product with rows on one side alone."""
    contracted, batch = pair.one.params["dimension_numbers"]
    if _place(label.dim, contracted[side], batch[side]) is not None:
        return pair.no("unknown")
    ndims = [len(pair.shapes(i)[0]) for i in (0, 1)]
    free = [d for d in range(ndims[side]) if d not in contracted[side] and d not in batch[side]]
    first = len(batch[0]) + (ndims[0] - len(contracted[0]) - len(batch[0]) if side else 0)
    return label.with_(ratio=ratio, dim=first + free.index(label.dim), value=None)


def conv_general_dilated(pair: Pair, labels: Sequence[Label]) -> Label:
    image, kernel = labels
    numbers, ratio = pair.one.params["dimension_numbers"], product(image.ratio, kernel.ratio)
    grouped = pair.one.params["batch_group_count"] != 1 or pair.one.params["feature_group_count"] != 1
    if image.kind == "same" and kernel.kind == "same":
        return Label("same", ratio)
    in_batch = image.kind == "rows" and kernel.kind == "same" and image.dim == numbers.lhs_spec[0]
    if in_batch and pair.one.params["batch_group_count"] == 1:
        return image.with_(ratio=ratio, dim=numbers.out_spec[0], value=None)
    total = image if image.kind == "total" else kernel
    if {image.kind, kernel.kind} == {"same", "total"} and total.by == "sum":
        return total.with_(ratio=ratio, value=None, fixed=False)
    over_batch = (image.dim, kernel.dim, image.outer) == (numbers.lhs_spec[1], numbers.rhs_spec[1], kernel.outer)
    if image.kind == kernel.kind == "rows" and not grouped and over_batch:  # in a backward pass
        return summed(pair, image, kernel)
    return pair.no("unknown")


# Collectives. In the loss of all rows, the axes that split them have size 1.


def collective(pair: Pair, label: Label, split: Mapping[str, int]) -> Label:
    """The label of one result; `split`: the sizes of the axes that split the rows."""
    named = [axis for axis in axes_of_equation(pair.one) if axis in split]
    kind, is_sum = kind_of(pair.one), pair.adds_up
    if axes_of_equation(pair.one) != axes_of_equation(pair.two):
        return pair.no("unknown")
    dims = [axis for axis in pair.one.params.get("axes", ()) if isinstance(axis, int)]
    if dims:  # of a `vmap` with a named axis
        over = "sum" if is_sum else extreme_of(pair.name)
        label = reduced(pair, label, dims, over)
        if label.kind == "other":
            return label
    if pair.name == ALL_TO_ALL:
        return _exchanged(pair, label, among_rows=bool(named)) if len(named) in (0, len(split)) else pair.no("unknown")
    if not named:
        return _over_model_axes(pair, label) if axes_of_equation(pair.one) else label
    size, whole = math.prod(split[axis] for axis in named), len(named) == len(split)
    if kind == "all_reduce":
        return _reduced(pair, label, size, is_sum=is_sum, whole=whole)
    return _gathered(pair, label) if kind == "all_gather" and whole else pair.no("unknown")


def _reduced(pair: Pair, label: Label, size: int, *, is_sum: bool, whole: bool) -> Label:
    if label.kind == "rows":
        return pair.no("statistic", pair.trail) if whole else pair.no("unknown")
    if label.kind == "same":
        return label.with_(ratio=product(label.ratio, 1 / size)) if is_sum else label
    by = "sum" if is_sum else extreme_of(pair.name)
    if label.by != by or label.running:
        return pair.no("statistic", label.trail)
    if whole:
        return Label("same", label.ratio, trail=pair.trail)
    return label.with_(ratio=product(label.ratio, 1 / size)) if is_sum else label


def _gathered(pair: Pair, label: Label) -> Label:
    """All rows, on each device."""
    along = pair.one.params["all_gather_dimension"]
    one_dim = label.kind == "rows" and label.dim == along and label.outer in (1, ANY) and not label.place
    if not pair.one.params["tiled"] or not one_dim or pair.grown():
        return pair.no("unknown")
    return Label("same", label.ratio)


def _exchanged(pair: Pair, label: Label, *, among_rows: bool) -> Label:
    """Of an all-to-all: each device sends parts of one dim, and joins what it gets along another.

    Along the axes that split rows, rows come together along the second dim, and are then cut along the first; without
    them, in the loss of all rows, nothing is to be moved. Along other axes, blocks of rows change devices.
    """
    how = pair.one.params
    cut, join = how["split_axis"], how["concat_axis"]
    if not how["tiled"] or how["axis_index_groups"] is not None or label.place:
        return pair.no("unknown")
    if among_rows:
        fits = label.kind == "rows" and label.dim == join and label.outer == 1
        return label.with_(dim=cut, fixed=False) if fits else pair.no("unknown")
    size = pair.out_shapes()[0][join] // pair.shapes(0)[0][join]
    if cut == join or label.kind != "rows" or label.outer == ANY or label.dim not in (cut, join):
        return label
    if label.dim == join:
        return label.with_(outer=label.outer * size)
    return label.with_(outer=label.outer // size) if label.outer % size == 0 else pair.no("unknown")


def _over_model_axes(pair: Pair, label: Label) -> Label:
    """Over other axes than the rows': each device has the same rows there."""
    (old, _), (new, _) = pair.shapes(0), pair.out_shapes()
    if label.kind == "total":
        is_sum = pair.adds_up or kind_of(pair.one) != "all_reduce"
        return label if is_sum and label.by == "sum" else pair.no("statistic", label.trail)
    if label.kind == "rows" and (len(old) != len(new) or old[label.dim] != new[label.dim] or label.place):
        return pair.no("unknown")
    return label.with_(value=None)
