"""A program as each device runs it: values with their size on one device, operations, and blocks of operations."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jaxshard.hardware.chips import ring_bytes
from jaxshard.programs.dims import moved_dims
from jaxshard.programs.primitives import COND, CONVOLUTION, PRODUCT, RESHAPE, RESHARD, SCAN

Spec = tuple[tuple[str, ...], ...]  # for each dim, the axes that shard it


@dataclasses.dataclass(frozen=True)
class Moved:
    """A predicted collective: its kind, payload in bytes, and mesh axes; see `inspect.Collective`."""

    kind: str
    bytes: int
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    trips: int = 1

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends per step."""
        return ring_bytes(self.kind, self.bytes * self.trips, self.group_size)


@dataclasses.dataclass(frozen=True)
class OnHost:
    """The dtype of an array in host memory, which takes no device memory."""

    name: str
    itemsize: int = 0


class Value:
    """An array: its shape (the global one in the global view, one device's in the local view) and its sharding.

    `root` is the array whose memory it has; `tied` are the arrays that a barrier has joined with it.
    """

    __slots__ = ("dtype", "parts", "root", "shape", "spec", "tied")

    def __init__(self, shape: Sequence[int], dtype: Any, spec: Spec = (), parts: int = 1, root: "Value | None" = None):
        self.shape, self.dtype, self.spec, self.parts = tuple(shape), dtype, spec, parts
        self.root: Value = self if root is None else root.root
        self.tied: tuple[Value, ...] = () if root is None else root.tied

    @property
    def size(self) -> int:
        """Elements on one device."""
        return math.prod(self.shape) // self.parts

    @property
    def itemsize(self) -> int:
        """Bytes of an element; 0 for tokens and other values that are not arrays."""
        return getattr(self.dtype, "itemsize", 0)

    @property
    def bytes(self) -> int:
        """Bytes on one device."""
        return self.size * self.itemsize

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}{'/' + str(self.parts) if self.parts > 1 else ''}"


@dataclasses.dataclass(eq=False)
class Op:
    """One operation. For a loop, `blocks` has its body, and `split` the numbers of its constants and carries.

    `cut`: the number of devices over which its sums are made.
    """

    name: str
    ins: list[Value]
    outs: list[Value]
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    blocks: tuple["Block", ...] = ()
    trips: int = 1
    split: tuple[int, int] = (0, 0)
    moved: tuple[Moved, ...] = ()
    in_global_view: bool = False
    cut: int = 1


@dataclasses.dataclass(eq=False)
class Block:
    """A program: its inputs, its operations in order, its outputs."""

    ins: list[Value]
    ops: list[Op]
    outs: list[Value]


def distinct(values: Sequence[Value]) -> list[Value]:
    """The distinct arrays in memory behind values."""
    return list(dict.fromkeys(x.root for x in values))


# Dead code elimination.


def pruned(block: Block, wanted: Sequence[bool]) -> tuple[Block, list[bool]]:
    """Returns (the block without operations that its wanted outputs do not need, whether each input is used)."""
    outs = [out for out, yes in zip(block.outs, wanted, strict=True) if yes]
    live = {out.root for out in outs}
    ops: list[Op] = []
    for op in reversed(block.ops):
        asked = [out.root in live for out in op.outs]
        if any(asked):
            op = _pruned_op(op, asked)
            ops.append(op)
            live |= {x.root for x in op.ins}
    return Block(block.ins, ops[::-1], outs), [x.root in live for x in block.ins]


def _pruned_op(op: Op, asked: list[bool]) -> Op:
    if op.name == COND:
        blocks = tuple(pruned(block, asked)[0] for block in op.blocks)
        return dataclasses.replace(op, outs=list(itertools.compress(op.outs, asked)), blocks=blocks)
    if op.name != SCAN:
        return op
    (body,), (consts, carries) = op.blocks, op.split
    while True:
        block, used = pruned(body, asked)
        more = [a or (i < carries and used[consts + i]) for i, a in enumerate(asked)]
        if more == asked:
            break
        asked = more
    kept = [u or (consts <= i < consts + carries and asked[i - consts]) for i, u in enumerate(used)]
    block.ins = list(itertools.compress(block.ins, kept))
    split = (sum(kept[:consts]), sum(kept[consts : consts + carries]))
    return dataclasses.replace(
        op,
        ins=list(itertools.compress(op.ins, kept)),
        outs=list(itertools.compress(op.outs, asked)),
        blocks=(block,),
        split=split,
    )


# The same program for more or fewer rows.


def rescaled(block: Block, old: int, new: int) -> Block:
    """The block with `new` rows instead of `old`: scales all dims that `old` divides."""
    return _Rescaler(old, new).block(block)


class _Rescaler:
    def __init__(self, old: int, new: int):
        self.old, self.new = old, new
        self.values: dict[Value, Value] = {}
        self.ties: dict[int, tuple[Value, ...]] = {}

    def block(self, block: Block) -> Block:
        ins = [self.value(x) for x in block.ins]
        return Block(ins, [self.op(op) for op in block.ops], [self.value(x) for x in block.outs])

    def value(self, x: Value) -> Value:
        if x not in self.values:
            root = None if x.root is x else self.value(x.root)
            shape = [self._dim(size) for size in x.shape]
            self.values[x] = Value(shape, x.dtype, x.spec, x.parts, root)
            self.values[x].tied = self.tied(x.tied)
        return self.values[x]

    def tied(self, values: tuple[Value, ...]) -> tuple[Value, ...]:
        if id(values) not in self.ties:
            self.ties[id(values)] = tuple(map(self.value, values))
        return self.ties[id(values)]

    def op(self, op: Op) -> Op:
        ins, outs = [self.value(x) for x in op.ins], [self.value(x) for x in op.outs]
        sums = op.in_global_view and op.name != RESHARD  # of the results; all else moves its operands
        payloads = zip(op.outs, outs, strict=True) if sums else ((op.ins[0], ins[0]) for _ in op.moved)
        moved = tuple(
            dataclasses.replace(m, bytes=m.bytes * after.bytes // before.bytes) if before.bytes else m
            for m, (before, after) in zip(op.moved, payloads, strict=False)
        )
        blocks = tuple(self.block(inner) for inner in op.blocks)
        trips = self._dim(op.trips)
        return dataclasses.replace(op, ins=ins, outs=outs, moved=moved, blocks=blocks, trips=trips)

    def _dim(self, size: int) -> int:
        return size // self.old * self.new if size and size % self.old == 0 else size


def product_flops(op: Op) -> float:
    """Multiplications and additions of a matrix product, convolution or custom kernel; 0 for other operations."""
    if op.name == PRODUCT:
        contracted: Sequence[int] = op.params["dimension_numbers"][0][0]
        deep = math.prod(op.ins[0].shape[d] for d in contracted)
        return 2.0 * op.outs[0].size * deep / op.cut
    if op.name == CONVOLUTION:
        kernel = op.ins[1]
        out_dim: int = op.params["dimension_numbers"].rhs_spec[0]
        return 2.0 * op.outs[0].size * math.prod(kernel.shape) / kernel.shape[out_dim]
    if (stated := op.params.get("cost_estimate")) is not None:  # of a Pallas kernel
        return float(stated.flops)
    return float(op.params["flops_per_element"] * op.ins[0].size) if "flops_per_element" in op.params else 0.0


def kernels_without_cost(block: Block) -> list[str]:
    """Names of the user's kernels whose arithmetic is unknown: Pallas's without `cost_estimate`, and foreign calls."""
    kernels = [op for op in block.ops if "cost_estimate" in op.params or "target_name" in op.params]
    unknown = [op.params for op in kernels if op.params.get("cost_estimate") is None]
    names = [str(params.get("target_name") or params.get("name") or "a Pallas kernel") for params in unknown]
    inner = [name for op in block.ops for part in op.blocks for name in kernels_without_cost(part)]
    return list(dict.fromkeys(names + inner))


# Propagation of specs in the global view, as XLA's partitioner does it.


def followed(
    name: str, params: Mapping[str, Any], ins: list[Value], shapes: list[tuple[int, ...]]
) -> tuple[list[Spec], tuple[str, ...]]:
    """Returns (the spec of each output, the axes over which it is summed).

    Args:
      name: of the primitive.
      params: of the equation.
      ins: its inputs.
      shapes: of its outputs.
    """
    if name == PRODUCT:
        return _followed_product(params, ins, shapes[0])
    moved = moved_dims(name, params, len(ins[0].shape)) if ins else None
    if moved is not None:
        spec: list[tuple[str, ...]] = [()] * len(shapes[0])
        for old, new in moved.items():
            spec[new] = ins[0].spec[old] if ins[0].shape[old] == shapes[0][new] else ()
        summed = tuple(axis for old, axes in enumerate(ins[0].spec) if old not in moved for axis in axes)
        return [tuple(spec) for _ in shapes], summed
    if name == RESHAPE:
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
    """The spec of the most sharded input of this rank, in the dims that keep their size."""
    alike = [x for x in ins if len(x.shape) == len(shape)]
    best = max(alike, key=lambda x: x.parts, default=None)
    if best is None:
        return ((),) * len(shape)
    return tuple(e if size == best.shape[i] else () for i, (e, size) in enumerate(zip(best.spec, shape, strict=True)))


def _reshaped(x: Value, shape: tuple[int, ...]) -> Spec:
    """Dims with the same sizes before them (or after) keep their specs."""
    spec: list[tuple[str, ...]] = [()] * len(shape)
    for i, axes in enumerate(x.spec):
        before = math.prod(x.shape[:i])
        for j, size in enumerate(shape):
            if axes and size == x.shape[i] and math.prod(shape[:j]) == before:
                spec[j] = axes
    return tuple(spec)
