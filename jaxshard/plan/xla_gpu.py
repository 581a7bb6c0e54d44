"""What XLA for GPU does to a program before it runs it, where that changes memory; each was seen in compiled steps.

* It makes one kernel of a sum over rows and the element-wise work on them, which writes beside what it reads.
* A matrix product takes casts of what is in memory, no other element-wise work: a layer's normed input is kept for the
  weight's gradient.
* It makes two turns of a loop one, and sums the first's gradients while the second computes: they are held that long.
* A turn copies its slice of an array that the loop goes through, where a product or several kernels read it.
* cuDNN takes a convolution's kernel in another order of dims than JAX's programs keep it in. XLA transposes each one
  before its first convolution, and keeps that for the backward pass.

Products that it would put off, and loops that it would begin early, wait in our programs, which
`platforms.backward` orders.
"""

from collections.abc import Mapping

from jaxshard.plan.fusion import Fusion
from jaxshard.plan.program import Block, Op, Value
from jaxshard.programs.primitives import CONVERT, CONVOLUTION, FUSED, GATHERS, REDUCTIONS, REV

_LONGEST_ROW = 2**13  # elements that one block of threads keeps


def normalises(fusion: Fusion, op: Op) -> bool:
    """Whether the operation is part of a kernel that sums rows as it goes, and so cannot write over what it reads."""
    shape = op.outs[0].shape
    if not shape or shape[-1] > _LONGEST_ROW:
        return False
    return any(s in fusion.made and fusion.made[s].name in REDUCTIONS for s in fusion.read_by(op))


def bytes_of_turn_before(block: Block) -> int:
    """Bytes of the previous iteration's gradients that an innermost loop is still reducing."""
    if any(op.blocks for op in block.ops):
        return 0
    read = {x.root for op in block.ops for x in op.ins}
    sums = [op for op in block.ops if any(m.kind in ("reduce-scatter", "all-reduce") for m in op.moved)]
    return sum(x.bytes for op in sums if not read & set(op.outs) for x in op.ins)


def copied_slices(fusion: Fusion, num_given: int) -> list[Value]:
    """The slices of scanned arrays, after the first `num_given` inputs of a turn, that the turn makes copies of.

    Element-wise work that alone reads a slice takes it from where it lies.
    """
    readers: dict[Value, list[Op]] = {}
    for op in fusion.block.ops:
        for s in () if fusion.is_virtual(op) else fusion.read_by(op):
            readers.setdefault(s, []).append(op)
    slices = dict.fromkeys(x.root for x in fusion.block.ins[num_given:])
    by = [(s, readers.get(s, [])) for s in slices]
    return [s for s, ops in by if len(ops) > 1 or any(op.name not in FUSED | REDUCTIONS for op in ops)]


def with_turned_kernels(block: Block) -> Block:
    """The block with a copy of each kernel, in another order of dims, which its convolutions read in its place."""
    turned: dict[Value, Value] = {}
    made: dict[Value, Op] = {}
    ops: list[Op] = []
    for op in block.ops:
        op.blocks = tuple(with_turned_kernels(inner) for inner in op.blocks)
        kernel = _kernel(op, made)
        if kernel is not None:
            if kernel not in turned:
                turned[kernel] = Value(kernel.shape, kernel.dtype, kernel.spec, kernel.parts)
                ops.append(Op("turned_copy", [kernel], [turned[kernel]]))
            op.ins = [op.ins[0], turned[kernel], *op.ins[2:]]
        made |= dict.fromkeys(op.outs, op)
        ops.append(op)
    return Block(block.ins, ops, block.outs)


def _kernel(op: Op, made: Mapping[Value, Op]) -> Value | None:
    """The array that holds a convolution's kernel; None if it has none: a kernel's gradient is one of two others."""
    if op.name != CONVOLUTION:
        return None
    kernel = op.ins[1].root
    if kernel in made and made[kernel].name == REV:
        kernel = made[kernel].ins[0].root
    origin = kernel
    while origin in made and made[origin].name in GATHERS | {CONVERT}:
        origin = made[origin].ins[0].root
    return None if origin in made else kernel
