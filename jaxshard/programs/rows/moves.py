"""Labels of the results of operations that move elements: where the rows of the operands lie afterwards."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp

from jaxshard.base.types import Equation
from jaxshard.programs.primitives import ADDS_UP, MOVES, SEVERAL, kind_of, mixed_dims
from jaxshard.programs.rows.arithmetic import Arithmetic, differing, over_parts, without_dims
from jaxshard.programs.rows.labels import (
    Free,
    Label,
    Mixed,
    Part,
    PerRow,
    Trail,
    Unknown,
    dims_of,
    moved,
    reshaped,
    units,
    worst,
)

Rule: TypeAlias = Callable[[Arithmetic, Equation, Sequence[Label], Trail], Label]
PiecesRule: TypeAlias = Callable[[Arithmetic, Equation, Sequence[Label], Trail], list[Label]]  # for several results
_CONTRACTED = 1000  # stand for a matrix product's contracted dims, from this number on


def iota(_: Arithmetic, eqn: Equation, __: Sequence[Label], ___: Trail) -> Label:
    dim = eqn.params["dimension"]
    return Free(frozenset({dim}), dim)


def broadcast_in_dim(_: Arithmetic, eqn: Equation, labels: Sequence[Label], __: Trail) -> Label:
    dims, shape = eqn.params["broadcast_dimensions"], eqn.outvars[0].aval.shape
    old = eqn.invars[0].aval.shape
    return moved(labels[0], lambda d: dims[d] if shape[dims[d]] == old[d] else None)


def reshape(_: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    found = reshaped(labels[0], eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)
    return Unknown(trail) if found is None else found


def transpose(_: Arithmetic, eqn: Equation, labels: Sequence[Label], __: Trail) -> Label:
    return moved(labels[0], eqn.params["permutation"].index)


def squeeze(_: Arithmetic, eqn: Equation, labels: Sequence[Label], __: Trail) -> Label:
    return without_dims(labels[0], eqn.params["dimensions"], len(eqn.invars[0].aval.shape))


def rev(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    (label,), reversed_dims = labels, set(eqn.params["dimensions"])
    if isinstance(label, Free) and label.counts in reversed_dims:
        return dataclasses.replace(label, counts=None)
    if not isinstance(label, PerRow) or not dims_of(label) & reversed_dims:
        return label
    return arithmetic.in_groups(label, reversed_dims, trail) or dataclasses.replace(label, order=id(eqn))


def slice_(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    shape, starts, limits = eqn.invars[0].aval.shape, eqn.params["start_indices"], eqn.params["limit_indices"]
    steps = eqn.params["strides"] or (1,) * len(shape)
    (label,) = labels
    for dim, cut in enumerate(zip(starts, limits, steps, strict=True)):
        if cut != (0, shape[dim], 1):
            label = _sliced(arithmetic, label, dim, cut, trail)
    return label


def split(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> list[Label]:
    dim, start, found = eqn.params["axis"], 0, []
    for size in eqn.params["sizes"]:
        found.append(_sliced(arithmetic, labels[0], dim, (start, start + size, 1), trail))
        start += size
    return found


def _sliced(arithmetic: Arithmetic, label: Label, dim: int, cut: tuple[int, int, int], trail: Trail) -> Label:
    """The label of a slice (start, limit, step) of a dim."""
    if not isinstance(label, PerRow) or dim not in dims_of(label):
        return dataclasses.replace(label, counts=None) if isinstance(label, Free) and label.counts == dim else label
    part = next(part for part in label.parts if part.dim == dim)
    start, limit, step = cut
    block, length = part.rows * part.inner, -(-(limit - start) // step)
    if step == 1 and start % block == 0 and length % block == 0:  # whole copies of the batch
        return _with_part(label, dataclasses.replace(part, outer=length // block))
    evenly = part.inner > 1 and part.inner % step == 0  # the same elements of each row
    if evenly and start < step and length * step == part.outer * block:
        return _with_part(label, dataclasses.replace(part, inner=part.inner // step))
    if (part.outer, part.inner) == (1, 1) and start < step and part.rows == length * step:  # one of each group
        grouped = _with_part(label, Part(dim, 1, length, 1, part.stride * step))
        arithmetic.groups.append((units(grouped, arithmetic.num_rows), trail))
        return grouped
    return arithmetic.in_groups(label, {dim}, trail) or Mixed("some", trail)


def _with_part(label: PerRow, part: Part) -> PerRow:
    return dataclasses.replace(label, parts=tuple(part if p.dim == part.dim else p for p in label.parts))


def concatenate(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    dim = eqn.params["dimension"]
    if not any(dim in dims_of(label) for label in labels):
        joined, sizes = arithmetic.pointwise(eqn, labels, trail), [v.aval.shape[dim] for v in eqn.invars]
        whole = all(size % arithmetic.num_rows == 0 for size in sizes)  # labels of real and generated rows, say
        return joined if whole else differing(joined, {dim}, labels)
    cut = [(x, part) for x in labels if isinstance(x, PerRow) for part in x.parts if part.dim == dim]
    if len(cut) < len(labels) or len({dataclasses.replace(part, outer=1) for _, part in cut}) > 1:
        return worst(labels) or Unknown(trail)
    once = dataclasses.replace(cut[0][1], outer=1)
    joined = arithmetic.pointwise(eqn, [_with_part(x, once) for x, _ in cut], trail)
    outer = sum(part.outer for _, part in cut)
    return _with_part(joined, dataclasses.replace(once, outer=outer)) if isinstance(joined, PerRow) else joined


def stack(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    new = eqn.params["axis"]
    return arithmetic.pointwise(eqn, [moved(label, lambda d: d + (d >= new)) for label in labels], trail)


def unstack(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> list[Label]:
    old, (label,) = eqn.params["axis"], labels
    if isinstance(label, PerRow) and old in dims_of(label):
        return [Mixed("some", trail)] * len(eqn.outvars)
    return [moved(label, lambda d: None if d == old else d - (d > old))] * len(eqn.outvars)


def tile(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    """Repeats the whole array along each dim."""
    (label,), times = labels, eqn.params["reps"]
    if isinstance(label, Free) and label.counts is not None and times[label.counts] > 1:
        return dataclasses.replace(label, counts=None)
    if not isinstance(label, PerRow):
        return label
    copies = [dataclasses.replace(p, outer=p.outer * (1 if p.dim < 0 else times[p.dim])) for p in label.parts]
    return dataclasses.replace(label, parts=tuple(copies))


def pad(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    padded = {dim for dim, amounts in enumerate(eqn.params["padding_config"]) if any(amounts)}
    if dims_of(labels[0]) & padded:
        return Unknown(trail)
    return differing(arithmetic.pointwise(eqn, labels, trail), padded, labels)


def dot_general(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    """A product of elements over all dims of both operands, and a sum over the contracted ones."""
    contracted, _ = eqn.params["dimension_numbers"]
    sides = [_joint_dims(eqn, side) for side in (0, 1)]
    joint = [moved(label, sides[i].get) for i, label in enumerate(labels[:2])]
    sizes = [eqn.invars[0].aval.shape[d] for d in contracted[0]]
    product = arithmetic.pointwise(eqn, joint, trail)
    dims = [_CONTRACTED + i for i in range(len(sizes))]
    if isinstance(product, Free):
        return dataclasses.replace(product, varied=product.varied - set(dims))
    if isinstance(product, PerRow) and dims_of(product) & set(dims):
        return over_parts(product, dims, math.prod(sizes), trail)
    return product


def _joint_dims(eqn: Equation, side: int) -> dict[int, int]:
    """Operand dim -> result dim; `_CONTRACTED` + i for the i-th contracted dim."""
    contracted, batch = eqn.params["dimension_numbers"]
    ndims = [len(v.aval.shape) for v in eqn.invars[:2]]
    free = [d for d in range(ndims[side]) if d not in contracted[side] and d not in batch[side]]
    first = len(batch[0]) + (ndims[0] - len(contracted[0]) - len(batch[0]) if side else 0)
    return (
        {d: i for i, d in enumerate(batch[side])}
        | {d: first + i for i, d in enumerate(free)}
        | {d: _CONTRACTED + i for i, d in enumerate(contracted[side])}
    )


def conv_general_dilated(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    image, kernel = labels
    numbers = eqn.params["dimension_numbers"]
    if not isinstance(kernel, Free) or eqn.params["batch_group_count"] != 1:
        return worst(labels) or Unknown(trail)
    if isinstance(image, PerRow) and dims_of(image) - {numbers.lhs_spec[0]} - set(range(-9, 0)):
        return Unknown(trail)
    kernel = dataclasses.replace(kernel, varied=frozenset())
    where = {numbers.lhs_spec[0]: numbers.out_spec[0]}
    return arithmetic.pointwise(eqn, [moved(image, where.get), kernel], trail)


def dynamic_slice(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    sizes, shape = eqn.params["slice_sizes"], eqn.invars[0].aval.shape
    cut = {d for d in range(len(shape)) if sizes[d] != shape[d]}
    return _at_index(arithmetic, eqn, labels, cut, 1, trail)


def dynamic_update_slice(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    part, shape = eqn.invars[1].aval.shape, eqn.invars[0].aval.shape
    cut = {d for d in range(len(shape)) if part[d] != shape[d]}
    return _at_index(arithmetic, eqn, labels, cut, 2, trail)


def _at_index(
    arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], cut: set[int], num_arrays: int, trail: Trail
) -> Label:
    """The label of a slice; the operands after the first `num_arrays` tell where it starts along `cut`."""
    if (bad := worst(labels)) is not None:
        return bad
    if any(dims_of(label) & cut for label in labels):
        return Unknown(trail)
    arrays, places = labels[:num_arrays], labels[num_arrays:]
    index = [dataclasses.replace(x, varied=frozenset(), degree=0) if isinstance(x, Free) else x for x in places]
    joined = arithmetic.pointwise(eqn, [*arrays, *index], trail)
    return differing(joined, cut, arrays) if num_arrays == 2 else joined


def reduction(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    """A sum, product, maximum or minimum, or the index of one."""
    dims, shape = eqn.params["axes"], eqn.invars[0].aval.shape
    if eqn.primitive.name in ADDS_UP:
        found = arithmetic.summed(eqn, labels[0], dims, [shape[d] for d in dims], trail)
    else:
        found = arithmetic.reduced(arithmetic.pointwise(eqn, labels, trail), dims, trail)
    return without_dims(found, dims, len(shape))


def along(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    """A sort or a cumulative sum: each element depends on all elements that share its other indices."""
    ndim = len(eqn.invars[0].aval.shape)
    dim = next((eqn.params[key] for key in ("axis", "dimension") if key in eqn.params), -1) % max(ndim, 1)
    joined = arithmetic.pointwise(eqn, labels, trail)
    if dim not in dims_of(joined):
        so_far = kind_of(eqn) == "cumulative" and eqn.primitive.name not in MOVES
        return differing(joined, {dim}) if so_far else joined
    by_number = kind_of(eqn) == "sort" and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.integer)
    return Unknown(trail) if by_number else Mixed("statistic", trail, trail)  # rows sorted by expert, say, and back


def leading(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    """Linear algebra or a Fourier transform: it mixes the last dims, and none before."""
    first = len(eqn.invars[0].aval.shape) - mixed_dims(eqn)
    joined = arithmetic.pointwise(eqn, labels, trail)
    if isinstance(joined, Free):
        return _like_nothing(joined)
    return Mixed("statistic", trail, trail) if any(d >= first for d in dims_of(joined)) else joined


def triangular_solve(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    """Each right-hand side is solved by itself: a column of the right matrix, or a row if that comes first."""
    matrix, right = labels
    if not isinstance(matrix, Free):
        return leading(arithmetic, eqn, labels, trail)
    matrix = dataclasses.replace(matrix, varied=frozenset(), counts=None)
    joined = arithmetic.pointwise(eqn, [matrix, right], trail)
    mixed = len(eqn.invars[1].aval.shape) - (2 if eqn.params["left_side"] else 1)
    return Mixed("statistic", trail, trail) if mixed in dims_of(joined) else joined


def random(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    """Random keys and numbers: for each key, they lie in dims after the keys' own."""
    joined = arithmetic.pointwise(eqn, labels, trail)
    if not isinstance(joined, Free):
        return joined
    if joined.placed or joined.given or eqn.primitive.name not in SEVERAL:
        return dataclasses.replace(_like_nothing(joined), varied=frozenset(d for d in joined.varied if d < 0))
    sizes = enumerate(eqn.outvars[0].aval.shape)
    return Free(frozenset(d for d, size in sizes if size > 1) | {d for d in joined.varied if d < 0}, drawn=True)


def _like_nothing(label: Free) -> Free:
    """The label of values of which only the origin is known."""
    return Free(placed=label.placed, given=label.given, drawn=label.drawn)


def window(arithmetic: Arithmetic, eqn: Equation, labels: Sequence[Label], trail: Trail) -> Label:
    """Pooling."""
    sizes = eqn.params.get("window_dimensions", ())
    wide = {d for d, size in enumerate(sizes) if size != 1}
    joined = arithmetic.pointwise(eqn, labels, trail)
    if isinstance(joined, Free):
        return _like_nothing(joined)
    return Mixed("statistic", trail, trail) if dims_of(joined) & wide else joined
