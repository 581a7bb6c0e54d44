"""Labels of the results of matrix products and convolutions."""

from collections.abc import Sequence

from jaxshard.programs.rows.arithmetic import Pair, summed
from jaxshard.programs.rows.labels import Label, outers, product


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
