"""Labels of the results of gathers and scatters: whether each row reads and writes its own elements."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jaxshard.base.types import Equation
from jaxshard.programs.primitives import ADDS_UP
from jaxshard.programs.rows.arithmetic import Arithmetic, differing, over_parts
from jaxshard.programs.rows.labels import Free, Label, Mixed, PerRow, Stat, Trail, Unknown, dims_of, moved, worst

Rule: TypeAlias = Callable[[Arithmetic, Equation, Sequence[Label], Sequence[Label], Trail], Label]


def gather(
    arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], columns: Sequence[Label], trail: Trail
) -> Label:
    """`columns`: the label of each column of the indices."""
    operand, indices = labels[0], _as_index(labels[1])
    if (bad := worst(labels)) is not None:
        return bad
    numbers, ndim = eqn.params["dimension_numbers"], len(eqn.outvars[0].aval.shape)
    of_index = [d for d in range(ndim) if d not in numbers.offset_dims]
    where: dict[int, int | None] = dict(
        zip(numbers.operand_batching_dims, _batch_places(numbers, of_index), strict=True)
    )
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(eqn.invars[0].aval.shape)) if d not in gone]
    where |= dict(zip(kept, numbers.offset_dims, strict=True))
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    for dim in dims_of(operand):
        if dim in numbers.start_index_map and sizes[dim] != shape[dim]:
            column = columns[numbers.start_index_map.index(dim)]
            place = _own_rows(column, eqn.invars[1].aval.shape, shape[dim])
            if place is None and (grouped := arithmetic.in_groups(operand, {dim}, trail)) is not None:
                operand = grouped
                continue
            if place is None:
                return _taken(operand, dim, column, trail)
            where[dim], indices = of_index[place], _plain(indices)
    return arithmetic.pointwise(eqn, [_plain(moved(operand, where.get)), moved(indices, _place(of_index))], trail)


def scatter(
    arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], columns: Sequence[Label], trail: Trail
) -> Label:
    """`columns`: the label of each column of the indices."""
    operand, indices, updates = labels[0], _as_index(labels[1]), labels[2]
    if (bad := worst(labels)) is not None:
        return bad
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[2].aval.shape
    of_index = [d for d in range(len(shape)) if d not in numbers.update_window_dims]
    zero, cut = Free(value=0.0), _cut_dims(eqn)
    if all(isinstance(label, Free) for label in labels):
        return differing(arithmetic.pointwise(eqn, [operand, zero, _plain(updates)], trail), cut)
    if dims_of(operand) & _fixed(eqn, cut, columns):
        return Mixed("position", trail)
    joint = arithmetic.pointwise(eqn, [zero, moved(indices, _place(of_index)), _plain(updates)], trail)
    if isinstance(joint, PerRow):
        where = _scattered_dims(eqn, columns, of_index)
        gone = [d for d in dims_of(joint) if d >= 0 and d not in where]
        if gone:
            if eqn.primitive.name not in ADDS_UP:
                return Mixed("statistic", trail, trail)
            into = [eqn.invars[0].aval.shape[d] for d in numbers.scatter_dims_to_operand_dims]
            index = labels[1]
            own = any(size % arithmetic.num_rows == 0 for size in into) and isinstance(index, Free)
            own |= isinstance(index, PerRow) and index.shifted
            if own or (arithmetic.partners is not None and arithmetic.partners.grows(eqn, 0)):
                return Unknown(trail)  # each row may add at indices of its own
            joint = over_parts(joint, gone, math.prod(shape[d] for d in gone), trail)
        joint = moved(joint, where.get)
    return arithmetic.pointwise(eqn, [_plain(operand), Free(value=0.0), joint], trail)


def _window_dims(eqn: Equation) -> dict[int, int]:
    """Dim of a scatter's updates -> dim of the operand, for window dims."""
    numbers = eqn.params["dimension_numbers"]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(eqn.invars[0].aval.shape)) if d not in gone]
    return dict(zip(numbers.update_window_dims, kept, strict=True))


def _cut_dims(eqn: Equation) -> set[int]:
    """The operand dims along which a scatter writes only a part."""
    shape, window = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
    whole = {into for d, into in _window_dims(eqn).items() if window[d] == shape[into]}
    chosen = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    return {d for d in chosen if shape[d] > 1 and d not in whole}


def _fixed(eqn: Equation, cut: set[int], columns: Sequence[Label]) -> set[int]:
    """The dims among `cut` whose indices do not depend on the batch, and do not enumerate all its rows."""
    (operand, indices), into = (v.aval.shape for v in eqn.invars[:2]), eqn.params["dimension_numbers"]
    chosen = zip(into.scatter_dims_to_operand_dims, columns, strict=False)
    frees = {dim: column for dim, column in chosen if isinstance(column, Free) and not column.placed}
    return {dim for dim, column in frees.items() if _own_rows(column, indices, operand[dim]) is None} & cut


def _scattered_dims(eqn: Equation, columns: Sequence[Label], of_index: Sequence[int]) -> dict[int, int]:
    """Dim of the updates -> dim of the operand, for dims along which rows stay apart."""
    numbers, shape, where = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape, _window_dims(eqn)
    places = [of_index[d] for d in numbers.scatter_indices_batching_dims]
    where |= dict(zip(places, numbers.operand_batching_dims, strict=True))
    for dim, column in zip(numbers.scatter_dims_to_operand_dims, columns, strict=False):
        place = _own_rows(column, eqn.invars[1].aval.shape, shape[dim])
        if place is not None:
            where[of_index[place]] = dim
    return where


def _batch_places(numbers: object, of_index: Sequence[int]) -> list[int]:
    return [of_index[d] for d in getattr(numbers, "start_indices_batching_dims", ())]


def _place(of_index: Sequence[int]):
    return lambda d: of_index[d] if d < len(of_index) else None


def _own_rows(column: Label, shape: Sequence[int], size: int) -> int | None:
    """The dim of the indices along which this column is 0, 1, ..., size - 1; None if there is none."""
    if isinstance(column, Free) and column.counts is not None and shape[column.counts] == size:
        return column.counts
    return None


def _taken(operand: Label, dim: int, column: Label, trail: Trail) -> Label:
    """The label of elements gathered along a dim that holds rows."""
    assert isinstance(operand, PerRow)
    part = next(part for part in operand.parts if part.dim == dim)
    if isinstance(column, PerRow | Stat):  # indices from the batch, perhaps into a flattened array
        return Unknown(trail) if part.inner * part.outer > 1 else Mixed("pairs", trail)
    return Mixed("some", trail)


def _as_index(label: Label) -> Label:
    """The label of indices, which are not terms of a sum."""
    if isinstance(label, PerRow):
        return dataclasses.replace(label, degree=0, shifted=False)
    return dataclasses.replace(label, degree=0) if isinstance(label, Free) else label


def _plain(label: Label) -> Label:
    return dataclasses.replace(label, varied=frozenset(), counts=None) if isinstance(label, Free) else label
