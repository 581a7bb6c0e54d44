"""How cuts go from operation to operation in the global view, where XLA partitions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jaxshard.plan.program import Spec, Value


def followed(
    name: str, params: Mapping[str, Any], ins: list[Value], shapes: list[tuple[int, ...]]
) -> tuple[list[Spec], tuple[str, ...]]:
    """(the spec of each output, the axes over which it is summed).

    Args:
      name: of the primitive.
      params: of the equation.
      ins: its inputs.
      shapes: of its outputs.
    """
    if name == "dot_general":
        return _followed_product(params, ins, shapes[0])
    if name.startswith(("reduce_", "arg")) and "axes" in params and ins:
        gone = params["axes"]
        kept = tuple(e for i, e in enumerate(ins[0].spec) if i not in gone)
        summed = tuple(a for i, e in enumerate(ins[0].spec) if i in gone for a in e)
        return [kept for _ in shapes], summed
    if name == "transpose":
        permutation: Sequence[int] = params["permutation"]
        return [tuple(ins[0].spec[i] for i in permutation)], ()
    if name == "broadcast_in_dim":
        spec: list[tuple[str, ...]] = [()] * len(shapes[0])
        for i, dim in enumerate(params["broadcast_dimensions"]):
            spec[dim] = ins[0].spec[i] if ins[0].shape[i] == shapes[0][dim] else ()
        return [tuple(spec)], ()
    if name in ("reshape", "squeeze", "expand_dims"):
        return [_reshaped(ins[0], shapes[0])], ()
    return [_widest(ins, shape) for shape in shapes], ()


_ProductDims: TypeAlias = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def _followed_product(
    params: Mapping[str, Any], ins: list[Value], shape: tuple[int, ...]
) -> tuple[list[Spec], tuple[str, ...]]:
    numbers: _ProductDims = params["dimension_numbers"]
    (left_sum, right_sum), (left_batch, right_batch) = numbers
    left, right = ins
    twice = [a for d in left_sum for a in left.spec[d]] + [a for d in right_sum for a in right.spec[d]]
    summed = tuple(dict.fromkeys(twice))
    spec = [left.spec[i] or right.spec[j] for i, j in zip(left_batch, right_batch, strict=True)]
    for x, used in ((left, {*left_sum, *left_batch}), (right, {*right_sum, *right_batch})):
        spec += [x.spec[d] for d in range(len(x.shape)) if d not in used]
    taken = set(summed)
    for i, axes in enumerate(spec):
        spec[i] = tuple(a for a in axes if a not in taken)
        taken |= set(axes)
    assert len(spec) == len(shape)
    return [tuple(spec)], summed


def _widest(ins: list[Value], shape: tuple[int, ...]) -> Spec:
    """The spec of the input of this rank that is cut most, in the dims whose size stays."""
    alike = [x for x in ins if len(x.shape) == len(shape)]
    best = max(alike, key=lambda x: x.parts, default=None)
    if best is None:
        return ((),) * len(shape)
    return tuple(e if size == best.shape[i] else () for i, (e, size) in enumerate(zip(best.spec, shape, strict=True)))


def _reshaped(x: Value, shape: tuple[int, ...]) -> Spec:
    """Dims with the same sizes before them (or after) keep their cuts."""
    spec: list[tuple[str, ...]] = [()] * len(shape)
    for i, axes in enumerate(x.spec):
        before = math.prod(x.shape[:i])
        for j, size in enumerate(shape):
            if axes and size == x.shape[i] and math.prod(shape[:j]) == before:
                spec[j] = axes
    return tuple(spec)
