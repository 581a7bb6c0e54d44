"""Which operations a compiler makes one: kernels of element-wise operations, and reduce-scatters of sums.

Element-wise operations run inside the kernels that read them; `Fusion` says which results are written to memory.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from jaxshard.plan.program import Block, Op, Value
from jaxshard.programs.primitives import (
    ADDS,
    CONVERT,
    CUTS,
    DYNAMIC_UPDATE_SLICE,
    FUSED,
    FUSED_INTO,
    MEMORYLESS,
    PAD,
    PASSED_TO_PRODUCTS,
    PICKS,
    POINTWISE,
    PRODUCT,
    REDUCTIONS,
    RESHARD,
    SCAN,
    SLICE,
    TRANSPOSE,
    UPDATES,
)

_MOST_TIMES = 31
"""How often a kernel has the code of an operation that it reads at several indices, at most.

XLA for GPU has a limit of 15, and counts otherwise. 24 to 31 give the peak of an `associative_scan` within 1%.
"""


class Fusion:
    """One block, as a fusing compiler runs it.

    An operation is virtual if its result is never in memory, because all its readers compute it themselves.

    Args:
      products_cast: matrix products fuse only casts of arrays in memory.

    Attributes:
      block: the block.
      platform: "cpu", "gpu" or "tpu".
      made: value -> the operation that makes it.
      readers: array -> the operations that read it.
      kept: the arrays that the block's results are read from.
    """

    def __init__(self, block: Block, platform: str, products_cast: bool = False):
        self.block, self.platform, self._products_cast = block, platform, products_cast
        self.made: dict[Value, Op] = {out: op for op in block.ops for out in op.outs}
        self.readers: dict[Value, list[Op]] = {}
        for op in block.ops:
            for root in {x.root for x in op.ins}:
                self.readers.setdefault(root, []).append(op)
        self._outs = {x.root for x in block.outs}
        self._emitted: dict[Op, dict[Op, int]] = {}  # kernel -> how often it has the operation's code
        self._sources: dict[Value, frozenset[Value]] = {}
        self._fits: dict[Op, bool] = {}
        self._feeds: set[Op] = set()  # matrix products, and what is fused into them
        for op in reversed(block.ops):
            self._fits[op] = self._fits_in_readers(op)
            if self._feeds_product(op):
                self._feeds.add(op)
        self._elsewhere: dict[Value, frozenset[Value]] = {}
        self._bytes: dict[Value, dict[Value, int]] = {}
        self._virtual: set[Op] = set()
        for op in block.ops:
            if self._fits[op] and not self._stands_for_several(op):
                self._virtual.add(op)
                self._sources[op.outs[0]] = self.read_by(op)
                self._elsewhere[op.outs[0]] = self.read_elsewhere(op)
                self._bytes[op.outs[0]] = self._bytes_read(op)
        self.kept = frozenset[Value]().union(*map(self.sources, block.outs))

    def is_virtual(self, op: Op) -> bool:
        """Whether the operation's result is never in memory."""
        return op in self._virtual

    def _fits_in_readers(self, op: Op) -> bool:
        """Whether all readers of the operation can compute its result themselves. Those must have been asked before."""
        emitted = self._times_emitted(op)
        fits = self._is_taken(op) and max(emitted.values(), default=0) <= _MOST_TIMES
        self._emitted[op] = emitted if fits else {op: 1}
        return fits

    def _times_emitted(self, op: Op) -> dict[Op, int]:
        """How often each kernel would have the operation's code: once for each index at which it reads the result."""
        readers = self.readers.get(op.outs[0], []) if op.outs else []
        if len(readers) == 1:
            return self._emitted[readers[0]]
        alike: dict[Op, int] = {}
        others: dict[Op, int] = {}
        for reader in readers:
            for kernel, times in self._emitted[reader].items():
                if reader.name in POINTWISE:
                    alike[kernel] = max(alike.get(kernel, 0), times)
                else:
                    others[kernel] = others.get(kernel, 0) + times
        return {kernel: alike.get(kernel, 0) + others.get(kernel, 0) for kernel in alike | others}

    def _is_taken(self, op: Op) -> bool:
        if op.name not in FUSED or len(op.outs) != 1 or op.outs[0] in self._outs:
            return False
        if self.platform == "tpu" and _has_strides(op):
            return False
        return op.name in MEMORYLESS or all(self._takes(reader, op) for reader in self.readers.get(op.outs[0], []))

    def _stands_for_several(self, op: Op) -> bool:
        """Whether an operation adds arrays, so that its sum takes less memory than they do: a residual stream."""
        if op.name not in ADDS or len(self.readers.get(op.outs[0], [])) < 2 or self._is_for_one_kernel(op):
            return False
        return sum(s.bytes >= op.outs[0].bytes > 0 for s in self.read_by(op)) > 1

    def _is_for_one_kernel(self, op: Op) -> bool:
        """Whether all kernels that have the operation's code become one with several results.

        Each works on the result element by element, or sums it to a number, as an optimizer does with a leaf.
        """
        shape = op.outs[0].shape
        by_element = [kernel for kernel in self._emitted[op] if kernel.name in POINTWISE]
        to_number = [kernel for kernel in self._emitted[op] if kernel.name in REDUCTIONS and not kernel.outs[0].shape]
        alike = all(kernel.outs[0].shape == shape for kernel in by_element)
        return alike and len(by_element) + len(to_number) == len(self._emitted[op])

    def _takes(self, reader: Op, op: Op) -> bool:
        """Whether the kernel of `reader` computes the result of `op` itself."""
        if self._products_cast and reader in self._feeds:
            return self._is_passed_on(op)
        if reader.name in FUSED or reader.name in REDUCTIONS:
            return True
        if reader.name == PRODUCT and self.platform == "tpu":
            return True
        if reader.name in FUSED_INTO:
            return op.name in FUSED_INTO[reader.name]
        return reader.name in UPDATES and op.outs[0] is not reader.ins[0].root

    def _feeds_product(self, op: Op) -> bool:
        """Whether the operation is a matrix product, or fused into one."""
        if op.name == PRODUCT:
            return True
        is_part = op.name in FUSED_INTO[PRODUCT] and self._fits[op]
        return is_part and any(reader in self._feeds for reader in self.readers.get(op.outs[0], ()))

    def _is_passed_on(self, op: Op) -> bool:
        """Whether a product can read the operand instead: the operation moves elements, or casts an array in memory."""
        if op.name not in FUSED_INTO[PRODUCT]:
            return False
        made = self.made.get(op.ins[0].root)
        return op.name != CONVERT or made is None or made.name not in FUSED or self._is_passed_on(made)

    def sources(self, x: Value) -> frozenset[Value]:
        """The arrays that are read from memory to make `x`."""
        return self._sources.get(x.root, frozenset((x.root,)))

    def read_by(self, op: Op) -> frozenset[Value]:
        """The arrays that an operation reads from memory."""
        return frozenset[Value]().union(*map(self.sources, op.ins))

    def read_elsewhere(self, op: Op) -> frozenset[Value]:
        """The arrays that an element-wise operation reads at other indices than it writes, and so cannot overwrite."""
        makers = [self.made.get(x.root) for x in op.ins]
        if op.name == TRANSPOSE and makers[0] is not None and makers[0].name == PRODUCT:
            return frozenset()  # a product can write its result in any order of dims
        if op.name not in POINTWISE:
            return self.read_by(op)
        return frozenset[Value]().union(*(self._elsewhere.get(x.root, ()) for x in op.ins))

    def touched(self, op: Op) -> int:
        """Bytes that an operation reads and writes. Of an array that it slices or updates, only that part counts."""
        written = sum(x.bytes for x in op.outs)
        if op.name in PICKS:
            return 2 * written
        if op.name == DYNAMIC_UPDATE_SLICE:
            return 2 * op.ins[1].bytes
        ins = op.ins
        if op.name in UPDATES:
            ins, written = op.ins[1:], op.ins[-1].bytes
        return written + sum(self._bytes_of(ins).values())

    def _bytes_read(self, op: Op) -> dict[Value, int]:
        """Array in memory -> the bytes of it that are read to make the result of a virtual operation."""
        return {op.outs[0]: op.outs[0].bytes} if op.name in CUTS else self._bytes_of(op.ins)

    def _bytes_of(self, values: Sequence[Value]) -> dict[Value, int]:
        found: dict[Value, int] = {}
        for x in values:
            found |= self._bytes.get(x.root, {x.root: x.root.bytes})
        return found


# Sums of which each device keeps a part are reduce-scatters, as XLA for GPU and TPU makes them.

Axes: TypeAlias = Collection[str]


def scatter_sums(block: Block, cuts: Mapping[Value, Axes] | None = None) -> None:
    """Turns each all-reduce whose result is cut along the axes of the sum into a reduce-scatter, in place.

    Args:
      block: a program.
      cuts: the axes along which its outputs are cut after it, by the outputs' roots.
    """
    uses = _Uses(block, cuts or {})
    ops = list[Op]()
    for op in block.ops:
        ops.append(op)
        if op.in_global_view and [m.kind for m in op.moved] == ["all-reduce"]:
            chain, axes = uses.until_cut(op.outs[0])
            if set(op.moved[0].axes) <= set(axes):
                uses.divide(chain, op.moved[0].group_size)
                ops.append(_scattered(op))
        elif op.name == SCAN:
            _scatter_stacks(op, uses)
        else:
            for inner in op.blocks:
                scatter_sums(inner)
    block.ops = ops


def _scattered(op: Op) -> Op:
    """The reduce-scatter of what `op` computes, which then moves nothing itself."""
    out, (moved,) = op.outs[0], op.moved
    whole = Value(out.shape, out.dtype, out.spec, out.parts // moved.group_size)
    op.outs, op.moved = [whole], ()
    return Op("scattered", [whole], [out], moved=(dataclasses.replace(moved, kind="reduce-scatter"),))


def _scatter_stacks(loop: Op, uses: "_Uses") -> None:
    """In the body of a loop: a stack that is cut afterwards is one of parts."""
    (body,), (_, carries) = loop.blocks, loop.split
    stacks = zip(loop.outs[carries:], body.outs[carries:], strict=True)
    found = [(row.root, row.root.parts, *uses.until_cut(stack)) for stack, row in stacks]
    cuts: dict[Value, Axes] = {carry.root: () for carry in body.outs[:carries]}
    for row, _, _, axes in found:
        cuts[row] = () if row in cuts else axes
    scatter_sums(body, cuts)
    for row, parts, chain, _ in found:
        uses.divide(chain, row.parts // parts)


class _Uses:
    """What reads the values of a block."""

    def __init__(self, block: Block, cuts: Mapping[Value, Axes]):
        self.ends = {out.root: cuts.get(out.root, ()) for out in block.outs}
        self.readers, self.views = dict[Value, list[Op]](), dict[Value, set[Value]]()
        for op in block.ops:
            for x in op.ins:
                self.views.setdefault(x.root, set()).add(x)
            for root in {x.root for x in op.ins}:
                self.readers.setdefault(root, []).append(op)
        for out in block.outs:
            self.views.setdefault(out.root, set()).add(out)

    def until_cut(self, value: Value) -> tuple[list[Value], Axes]:
        """The values from this one to what cuts it, or to the last that has one reader; and the axes of that cut."""
        chain = [value]
        while True:
            found = self.readers.get(chain[-1].root, [])
            if chain[-1].root in self.ends:
                return chain, () if found else self.ends[chain[-1].root]
            if len(found) != 1:
                return chain, ()
            (reader,) = found
            if reader.name == RESHARD:
                return chain, () if reader.moved else [a for e in reader.outs[0].spec for a in e]
            if reader.name not in PASSED_TO_PRODUCTS:
                return chain, ()
            chain.append(reader.outs[0])

    def divide(self, chain: list[Value], parts: int) -> None:
        """Divides the values of a chain."""
        for value in chain:
            for view in {value} | self.views.get(value.root, set()):
                view.parts *= parts


def _has_strides(op: Op) -> bool:
    """Whether an operation takes every other element, or puts zeros between them, as an `associative_scan` does.

    XLA for TPU writes its result to memory.
    """
    if op.name == PAD:
        return any(between for _, _, between in op.params["padding_config"])
    return op.name == SLICE and any(stride > 1 for stride in op.params["strides"] or ())
