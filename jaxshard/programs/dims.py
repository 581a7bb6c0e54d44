"""Follows one dim of an array through operations that treat all elements along it apart and alike."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jaxshard.base.types import Equation, Jaxpr
from jaxshard.programs.primitives import KINDS, Kind, kind_of, mixed_dims
from jaxshard.programs.walk import Walk

Dim: TypeAlias = int | None  # the dim's index in an array; None: the array does not have it
Dims: TypeAlias = Sequence[Dim]
Rule: TypeAlias = Callable[[Equation, Dims, Dims], bool]


def keeps_apart(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    """Whether slice i of each result along the dim depends only on slice i of each operand, in the same way for all i.

    Args:
      ins: the dim's index in each operand; operands without it are the same for all i.
      outs: the dim's index in each result.

    False if unknown.
    """
    kind = kind_of(eqn)
    return kind in _RULES and _RULES[kind](eqn, ins, outs)


def dims_of_rows(program: Jaxpr, batch: Sequence[bool]) -> list[frozenset[int]]:
    """For each output, the dims along which it holds the batch's rows in their order; none if unknown.

    What stands in row i may depend on all rows, as logits after a BatchNorm do. A dim that has nothing to do with the
    batch may be among them, as one of zeros is: rows lie in those whose size follows the number of rows.

    Args:
      batch: which inputs are leaves of the batch, with its rows along their first dims.
    """
    return _DimsOfRows().through(program, [frozenset({0} if yes else ()) for yes in batch])


def row_dims_of(few: Jaxpr, many: Jaxpr, batch: Sequence[bool]) -> list[int | None]:
    """For each output, the dim that holds the batch's rows in their order, alone; None if unknown.

    Args:
      few, many: the program, traced with fewer and with more rows.
      batch: as for `dims_of_rows`.
    """
    first = list(batch).index(True)
    rows = few.in_avals[first].shape[0], many.in_avals[first].shape[0]
    each = zip(dims_of_rows(few, batch), few.out_avals, many.out_avals, strict=True)
    grown = [[d for d in sorted(dims) if (a.shape[d], b.shape[d]) == rows] for dims, a, b in each]
    return [dims[0] if dims and rows[0] != rows[1] else None for dims in grown]


class _DimsOfRows(Walk[frozenset[int]]):
    nothing = frozenset[int]()

    def of(self, eqn: Equation, known: Sequence[frozenset[int]]) -> list[frozenset[int]]:
        dims = range(getattr(eqn.outvars[0].aval, "ndim", 0))
        if kind_of(eqn) in ("iota", "random"):  # element i goes with row i
            found = frozenset(dims)
        else:
            ways = _ways(known)
            found = frozenset(d for d in dims if any(keeps_apart(eqn, ins, [d] * len(eqn.outvars)) for ins in ways))
        return [found] * len(eqn.outvars)

    def join(self, one: frozenset[int], other: frozenset[int]) -> frozenset[int]:
        return one & other

    def unknown(self, eqn: Equation, known: Sequence[frozenset[int]]) -> frozenset[int]:
        return frozenset()

    def slice(self, value: frozenset[int]) -> frozenset[int]:
        return frozenset(d - 1 for d in value if d)

    def stack(self, value: frozenset[int]) -> frozenset[int]:
        return frozenset(d + 1 for d in value)


def _ways(known: Sequence[frozenset[int]]) -> list[Dims]:
    """The choices of one dim, or none, of each operand; of many operands, only those of the same dim of all."""
    if len(known) <= 3:
        return list(itertools.product(*([None, *dims] for dims in known)))
    return [[d if d in dims else None for dims in known] for d in frozenset[int]().union(*known)]


def moved_dims(name: str, params: Mapping[str, Any], ndim: int) -> dict[int, int] | None:
    """Operand dim -> result dim, for a primitive that moves, adds or removes dims (transpose, broadcast, reduction).

    None for any other primitive.

    Args:
      params: the equation's parameters.
      ndim: the operand's number of dims.
    """
    kind = KINDS.get(name)
    if kind == "transpose":
        return {old: new for new, old in enumerate(params["permutation"])}
    if kind == "broadcast":
        dims: Sequence[int] = params["broadcast_dimensions"]
        return dict(enumerate(dims))
    if kind != "squeeze" and kind != "reduction":
        return None
    gone = params["dimensions" if kind == "squeeze" else "axes"]
    return {old: new for new, old in enumerate(d for d in range(ndim) if d not in gone)}


def _common(ins: Dims) -> Dim:
    """The dim's index in the operands that have it; None if none has it, or they disagree."""
    found = {d for d in ins if d is not None}
    return found.pop() if len(found) == 1 else None


def _at(d: Dim, outs: Dims) -> bool:
    return d is not None and all(out == d for out in outs)


def _pointwise(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    """An operand without the dim must be a scalar (a predicate, a bound), or have size 1 there."""
    d, rank = _common(ins), eqn.outvars[0].aval.ndim
    shapes = [v.aval.shape for v in eqn.invars]
    if not _at(d, outs) or any(len(shape) not in (0, rank) for shape in shapes):
        return False
    return all(place == d or not shape or shape[d] == 1 for shape, place in zip(shapes, ins, strict=True))


def _barrier(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    return [*ins] == [*outs]


def _along(key: str) -> Rule:
    """The rule for operations that keep all dims, and work along those that a parameter names."""

    def rule(eqn: Equation, ins: Dims, outs: Dims) -> bool:
        named, d = eqn.params[key], _common(ins)
        return None not in ins and _at(d, outs) and d not in (named if isinstance(named, tuple | list) else [named])

    return rule


def _without(key: str) -> Rule:
    """The rule for operations that remove the dims that a parameter names."""

    def rule(eqn: Equation, ins: Dims, outs: Dims) -> bool:
        gone, d = eqn.params[key], _common(ins)
        return d is not None and d not in gone and _at(d - sum(other < d for other in gone), outs)

    return rule


def _leading(last: Callable[[Equation], int]) -> Rule:
    """The rule for operations that mix the last dims of arrays; `last` gives their number."""

    def rule(eqn: Equation, ins: Dims, outs: Dims) -> bool:
        d = ins[0]
        return d is not None and d < eqn.invars[0].aval.ndim - last(eqn) and all(each == d for each in (*ins, *outs))

    return rule


def _iota(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    return outs[0] != eqn.params["dimension"]


def _broadcast_in_dim(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    to, d = list(eqn.params["broadcast_dimensions"]), ins[0]
    if d is not None:
        return _at(to[d], outs)
    return outs[0] not in to or eqn.invars[0].aval.shape[to.index(outs[0])] == 1


def _reshape(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    """The dims before it must have as many elements as before; later ones may merge with it, or split from it."""
    if ins[0] is None or outs[0] is None:
        return False
    before, after = (v.aval.shape[:d] for v, d in ((eqn.invars[0], ins[0]), (eqn.outvars[0], outs[0])))
    return math.prod(before) == math.prod(after)


def _transpose(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    return ins[0] is not None and _at(list(eqn.params["permutation"]).index(ins[0]), outs)


def _pad(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    d = ins[0]
    return ins[1] is None and _at(d, outs) and tuple(eqn.params["padding_config"][d]) == (0, 0, 0)


def _slice(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    d, (operand,) = ins[0], eqn.invars
    if not _at(d, outs):
        return False
    steps = eqn.params["strides"] or (1,) * operand.aval.ndim
    return (eqn.params["start_indices"][d], eqn.params["limit_indices"][d], steps[d]) == (0, operand.aval.shape[d], 1)


def _dynamic_slice(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    d, shape = ins[0], eqn.invars[0].aval.shape
    return _at(d, outs) and not any(i is not None for i in ins[1:]) and eqn.params["slice_sizes"][d] == shape[d]


def _dynamic_update_slice(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    d, (operand, new) = ins[0], (v.aval.shape for v in eqn.invars[:2])
    return ins[1] == d and _at(d, outs) and not any(i is not None for i in ins[2:]) and operand[d] == new[d]


def _dot_general(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    contracted, batch = eqn.params["dimension_numbers"]
    left, right = ins
    if left in batch[0] or right in batch[1]:
        place = list(batch[0]).index(left) if left in batch[0] else list(batch[1]).index(right)
        return (left, right) == (batch[0][place], batch[1][place]) and _at(place, outs)
    side = 0 if right is None else 1
    d = ins[side]
    if d is None or ins[1 - side] is not None or d in contracted[side]:
        return False
    operands = zip(eqn.invars, contracted, batch, strict=True)
    free = [[i for i in range(v.aval.ndim) if i not in (*summed, *both)] for v, summed, both in operands]
    return _at(len(batch[0]) + side * len(free[0]) + free[side].index(d), outs)


def _conv(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    """Only the batch's dim is known."""
    numbers = eqn.params["dimension_numbers"]
    is_batch = ins[0] == numbers.lhs_spec[0] and _at(numbers.out_spec[0], outs)
    return is_batch and ins[1] is None and eqn.params["batch_group_count"] == 1


def _window(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    d, sizes = ins[0], eqn.params["window_dimensions"]
    if not _at(d, outs) or any(each != d for each in ins if each is not None):
        return False
    steps = ("window_strides", "base_dilation", "window_dilation")
    plain = all(key not in eqn.params or eqn.params[key][d] == 1 for key in steps)
    return sizes[d] == 1 and plain and tuple(eqn.params["padding"][d]) == (0, 0)


def _gather(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    """The gathered slices must span the whole dim, or each slice along it gathers by indices of its own."""
    numbers, (d, by) = eqn.params["dimension_numbers"], ins
    taken = [i for i in range(eqn.outvars[0].aval.ndim) if i not in numbers.offset_dims]
    if by is not None:
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        return by < len(taken) and (d is None or (d, by) in pairs) and _at(taken[by], outs)
    apart = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if d is None or d in apart or d in numbers.start_index_map:
        return False
    if eqn.params["slice_sizes"][d] != eqn.invars[0].aval.shape[d]:
        return False
    left = [i for i in range(eqn.invars[0].aval.ndim) if i not in apart]
    return _at(numbers.offset_dims[left.index(d)], outs)


def _scatter(eqn: Equation, ins: Dims, outs: Dims) -> bool:
    """The written slices must span the whole dim, or each slice along it scatters by indices of its own."""
    numbers, (d, by, new) = eqn.params["dimension_numbers"], ins
    operand, _, updates = (v.aval for v in eqn.invars)
    if d is None or new is None or not _at(d, outs):
        return False
    if by is not None:
        rows = [i for i in range(updates.ndim) if i not in numbers.update_window_dims]
        pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
        return by < len(rows) and (d, by) in pairs and new == rows[by]
    apart = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    if d in apart or d in numbers.scatter_dims_to_operand_dims or new not in numbers.update_window_dims:
        return False
    left = [i for i in range(operand.ndim) if i not in apart]
    return new == numbers.update_window_dims[left.index(d)] and updates.shape[new] == operand.shape[d]


_RULES: dict[Kind, Rule] = {
    "barrier": _barrier,
    "broadcast": _broadcast_in_dim,
    "concatenate": _along("dimension"),
    "conv": _conv,
    "cumulative": _along("axis"),
    "dot": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "pivots": _leading(lambda _: 1),
    "pointwise": _pointwise,
    "reduction": _without("axes"),
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "scatter": _scatter,
    "slice": _slice,
    "sort": _along("dimension"),
    "split": _along("axis"),
    "squeeze": _without("dimensions"),
    "top_k": _leading(lambda _: 1),
    "trailing": _leading(mixed_dims),
    "transpose": _transpose,
    "triangular_solve": _leading(mixed_dims),
    "update": _dynamic_update_slice,
    "window": _window,
}
