"""Labels of the results of gathers and scatters: whether each row reads and writes its own elements."""

from collections.abc import Sequence

import jax
import numpy as np

from jaxshard.programs.jaxprs import is_float
from jaxshard.programs.rows.arithmetic import Pair, summed
from jaxshard.programs.rows.labels import ANY, Label, all_plain, joined, near, outers


def gather(pair: Pair, labels: Sequence[Label]) -> Label:
    operand, indices = labels
    if operand.place or (_fills(pair) and (operand.kind == "total" or not near(operand.ratio, 1.0))):
        return pair.no("position" if operand.place else "count")
    numbers, (one, two) = pair.one.params["dimension_numbers"], pair.shapes(0)
    of_index = [d for d in range(len(pair.out_shapes()[0])) if d not in numbers.offset_dims]
    if operand.kind == "total":
        return operand if indices.kind == "same" and not pair.grown() else pair.no("statistic", operand.trail)
    if operand.kind != "rows":
        return _looked_up(pair, operand, indices, of_index)
    dim, sizes = operand.dim, (pair.one.params["slice_sizes"], pair.two.params["slice_sizes"])
    if dim in numbers.operand_batching_dims:
        place = numbers.start_indices_batching_dims[[*numbers.operand_batching_dims].index(dim)]
        if indices.kind != "rows" or indices.dim != place or indices.place:
            return pair.no("position" if indices.place else "unknown")
        return _rows(pair, operand, indices, of_index[place])
    if (sizes[0][dim], sizes[1][dim]) == (one[dim], two[dim]):
        gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        kept = [d for d in range(len(one)) if d not in gone]
        if indices.kind != "same" or dim not in kept:
            return pair.no("pairs")
        return operand.with_(dim=numbers.offset_dims[kept.index(dim)], value=None)
    columns = _columns(indices, len(numbers.start_index_map))
    column = columns[[*numbers.start_index_map].index(dim)]
    if column is None or column.kind == "other":
        return pair.no(column.trouble.cause if column and column.trouble else "unknown")
    if not column.place:
        return pair.no("pairs" if column.kind == "rows" else "some")
    others = [x for x in columns if x is not column]
    apart = all(x and (x.kind == "same" or (x.kind == "rows" and x.dim == column.dim and not x.place)) for x in others)
    each_its_own = pair.shapes(1)[0][column.dim] == one[dim] and sizes[0][dim] == sizes[1][dim] == 1
    if not apart or operand.outer > 1 or not each_its_own:
        return pair.no("position")
    return operand.with_(dim=of_index[column.dim], outer=1, fixed=False, value=None)


def _fills(pair: Pair) -> bool:
    """Whether elements past the end are a number other than 0, which no ratio fits (NaN fits any)."""
    fill, mode = pair.one.params["fill_value"], pair.one.params["mode"]
    is_nan = is_float(pair.one.outvars[0]) and (fill is None or bool(np.isnan(fill)))
    return mode == jax.lax.GatherScatterMode.FILL_OR_DROP and not is_nan and (fill is None or bool(fill != 0))


def _looked_up(pair: Pair, operand: Label, indices: Label, of_index: Sequence[int]) -> Label:
    """The label of elements of an array that has no rows."""
    if indices.kind == "other":
        return pair.no("position")
    if indices.kind == "total" or indices.place or not near(indices.ratio, 1.0):
        return pair.no("position" if indices.place else "statistic", indices.trail)
    if indices.kind == "rows":
        return indices.with_(ratio=operand.ratio, dim=of_index[indices.dim], value=None)
    return pair.no("unknown") if pair.grown() else operand.with_(value=None)


def _rows(pair: Pair, one: Label, two: Label, dim: int) -> Label:
    """The label of rows that depend on both."""
    if len(outers((one, two))) > 1 or not near(two.ratio, 1.0):
        return pair.no("unknown")
    return one.with_(dim=dim, outer=max(one.outer, two.outer), fixed=one.fixed and two.fixed, value=None)


def _columns(indices: Label, count: int) -> Sequence[Label | None]:
    """The labels of the columns of indices; None: unknown."""
    if indices.columns:
        return [*indices.columns][:count]
    return [indices] * count if indices.kind != "other" else [None] * count


def scatter(pair: Pair, labels: Sequence[Label]) -> Label:
    into, indices, updates = labels
    if into.place or updates.place:
        return pair.no("position")
    numbers, is_sum = pair.one.params["dimension_numbers"], pair.adds_up
    shape = pair.shapes(2)[0]
    of_index = [d for d in range(len(shape)) if d not in numbers.update_window_dims]
    if not pair.is_linear and (any(x.kind == "total" for x in labels) or not all_plain(labels)):
        return pair.no("statistic")
    if into.kind == "rows":
        return _into_rows(pair, labels, of_index)
    if indices.kind == "other" or indices.place or not near(indices.ratio, 1.0):
        return pair.no("unknown")
    if indices.kind == "same" and updates.kind != "rows":
        found = joined([into, updates], pair.parts)
        return found.with_(value=None) if found else pair.no("statistic", updates.trail)
    where = {of_index[x.dim] if x is indices else x.dim for x in (indices, updates) if x.kind == "rows"}
    if len(where) > 1 or len(outers((indices, updates))) > 1 or not where <= {*of_index} or updates.kind == "total":
        return pair.no("unknown")
    if not is_sum or pair.grown():
        return pair.no("statistic", pair.trail)
    rows = updates if updates.kind == "rows" else indices.with_(ratio=updates.ratio)
    added = summed(pair, rows.with_(fixed=indices.fixed and updates.fixed if updates.kind == "rows" else False))
    found = joined([into, added], pair.parts)
    return found.with_(value=None) if found else pair.no("count", added.trail)


def _into_rows(pair: Pair, labels: Sequence[Label], of_index: Sequence[int]) -> Label:
    """The label of rows into which each row writes."""
    into, indices, updates = labels
    numbers, (one, two) = pair.one.params["dimension_numbers"], pair.shapes(0)
    parts, dim = pair.shapes(2), into.dim
    if updates.kind != "rows" or updates.place:
        return pair.no("position")
    if not near(into.ratio, updates.ratio) or len(outers(labels)) > 1:
        return pair.no("count")
    found = into.with_(
        ratio=updates.ratio if into.ratio is None else into.ratio,
        outer=max(into.outer, updates.outer, indices.outer if indices.kind == "rows" else ANY),
        fixed=into.fixed and updates.fixed and indices.fixed,
        value=None,
    )
    if dim in numbers.operand_batching_dims:
        place = numbers.scatter_indices_batching_dims[[*numbers.operand_batching_dims].index(dim)]
        fits = indices.kind == "rows" and indices.dim == place and not indices.place and updates.dim == of_index[place]
        return found if fits else pair.no("unknown")
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(one)) if d not in gone]
    if dim in kept:
        at = numbers.update_window_dims[kept.index(dim)]
        whole = (parts[0][at], parts[1][at]) == (one[dim], two[dim])
        return found if whole and updates.dim == at and indices.kind == "same" else pair.no("unknown")
    columns = _columns(indices, len(numbers.scatter_dims_to_operand_dims))
    column = columns[[*numbers.scatter_dims_to_operand_dims].index(dim)]
    if column is None or not column.place or updates.dim != of_index[column.dim] or found.outer > 1:
        return pair.no("position")
    if pair.shapes(1)[0][column.dim] != one[dim]:
        return pair.no("position")
    others = [x for x in columns if x is not column]
    apart = all(x and (x.kind == "same" or (x.kind == "rows" and x.dim == column.dim and not x.place)) for x in others)
    return found.with_(outer=1, fixed=False) if apart else pair.no("unknown")
