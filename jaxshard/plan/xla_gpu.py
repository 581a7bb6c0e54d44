"""XLA for GPU's program transformations that change memory; each was seen in compiled steps.

* It fuses a sum over rows and the element-wise work on them into one kernel, which cannot overwrite what it reads.
* It fuses only casts of arrays in memory into a matrix product, no other element-wise work: a layer's normed input is
  kept for the weight's gradient.
* It joins reduce-scatters outside of loops, and keeps all their operands until the last is there.
* It merges two iterations of a loop, and reduces the first one's gradients while the second computes; both are live.
* An iteration copies its slice of a scanned array if a product or several kernels read it.
* cuDNN needs a convolution's kernel in a different dim order than JAX. XLA transposes each kernel before its first
  convolution, and keeps the copy for the backward pass.
* cuDNN needs equal padding on both sides, and no zeros between the input's elements. For another convolution, such as a
  transposed one, XLA writes a padded copy of the input, which the kernel's gradient reads too. The gradient of the
  input is a larger array, of which a slice is copied.

XLA would also delay products and start loops early; `platforms.backward` orders our programs to prevent that.
"""

from collections.abc import Mapping, Sequence

from jax.lax import ConvDimensionNumbers

from jaxshard.plan.fusion import Fusion
from jaxshard.plan.program import Block, Op, Value
from jaxshard.programs.primitives import CONVERT, CONVOLUTION, FUSED, GATHERS, PAD, REDUCTIONS, REV

_LONGEST_ROW = 2**13  # elements that one thread block keeps


def normalises(fusion: Fusion, op: Op) -> bool:
    """Whether the operation is part of a kernel that also sums rows, and so cannot overwrite what it reads."""
    shape = op.outs[0].shape
    if not shape or shape[-1] > _LONGEST_ROW:
        return False
    return any(s in fusion.made and fusion.made[s].name in REDUCTIONS for s in fusion.read_by(op))


def bytes_of_previous_iteration(block: Block) -> int:
    """Bytes of the previous iteration's gradients that a loop is still reducing; 0 if a loop within reduces some."""
    if any(_sums(inner) for op in block.ops for inner in op.blocks):
        return 0
    read = {x.root for op in block.ops if op.name not in FUSED for x in op.ins}
    return sum(x.bytes for op in _sums(block) if not read & set(op.outs) for x in op.ins)


def _sums(block: Block) -> list[Op]:
    """The reductions over devices of a block, and of the loops within."""
    found = [op for op in block.ops if any(m.kind in ("reduce-scatter", "all-reduce") for m in op.moved)]
    return found + [op for one in block.ops for inner in one.blocks for op in _sums(inner)]


def held_for_joined_sums(fusion: Fusion) -> dict[Value, Op]:
    """For arrays that reduce-scatters read, the last of the reduce-scatters that XLA joins: it frees them all.

    XLA joins those that do not depend on each other, however far apart they are; one that it could join with earlier or
    with later ones, with the later ones.
    """
    following: dict[Value, int] = {}  # the reduce-scatters that wait for a value, and for each other
    of_tied: dict[int, int] = {}
    last: dict[int, Op] = {}
    found: dict[Value, Op] = {}
    for op in reversed(fusion.block.ops):
        num = max((following.get(x, 0) for x in op.outs), default=0)
        if any(m.kind == "reduce-scatter" for m in op.moved):
            found |= dict.fromkeys(fusion.read_by(op), last.setdefault(num, op))
            num += 1
        num += bool(op.blocks)
        for x in op.ins:
            following[x.root] = max(following.get(x.root, 0), num)
            if num > of_tied.get(id(x.tied), 0):
                of_tied[id(x.tied)] = num
                following |= {y: max(following.get(y, 0), num) for y in x.tied}
    return found


def copied_slices(fusion: Fusion, num_given: int) -> list[Value]:
    """The slices of scanned arrays (inputs of an iteration after the first `num_given`) that the iteration copies.

    A slice that only one element-wise kernel reads is read in place.
    """
    readers: dict[Value, list[Op]] = {}
    for op in fusion.block.ops:
        for s in () if fusion.is_virtual(op) else fusion.read_by(op):
            readers.setdefault(s, []).append(op)
    slices = dict.fromkeys(x.root for x in fusion.block.ins[num_given:])
    by = [(s, readers.get(s, [])) for s in slices]
    return [s for s, ops in by if len(ops) > 1 or any(op.name not in FUSED | REDUCTIONS for op in ops)]


def as_for_cudnn(block: Block) -> Block:
    """The block with the copies that convolutions need: of kernels, transposed, and of inputs and gradients, padded."""
    transposed: dict[Value, Value] = {}
    padded: dict[Value, Value] = {}  # input -> its copy
    made: dict[Value, Op] = {}
    ops: list[Op] = []
    for op in block.ops:
        op.blocks = tuple(as_for_cudnn(inner) for inner in op.blocks)
        kernel, after = _kernel(op, made), list[Op]()
        if kernel is not None:
            if kernel not in transposed:
                transposed[kernel] = Value(kernel.shape, kernel.dtype, kernel.spec, kernel.parts)
                ops.append(Op("turned_copy", [kernel], [transposed[kernel]]))
            is_forward = op.ins[1].root is kernel or any(stride > 1 for stride in op.params["window_strides"])
            op.ins = [op.ins[0], transposed[kernel], *op.ins[2:]]
            ops += _pad(op, padded) if is_forward else []
            after = [] if is_forward else _slice(op)
        elif op.name == CONVOLUTION and op.ins[0].root in padded:
            op.ins = [padded[op.ins[0].root], *op.ins[1:]]
        made |= dict.fromkeys(op.outs, op)
        ops += [op, *after]
    return Block(block.ins, ops, block.outs)


def _pad(op: Op, padded: dict[Value, Value]) -> list[Op]:
    """The operation that pads a convolution's input, which the convolution reads instead; none if cuDNN pads it.

    Args:
      padded: inputs and their padded copies that the gradients of kernels read; it is added to.
    """
    x, config = op.ins[0], [(0, 0, 0)] * len(op.ins[0].shape)
    dims, pads = op.params["dimension_numbers"].lhs_spec[2:], op.params["padding"]
    for dim, (low, high), step in zip(dims, pads, op.params["lhs_dilation"], strict=True):
        config[dim] = (low, high, step - 1)
    if all(low == high >= 0 and not between for low, high, between in config):
        return []
    shape = [low + size + max(size - 1, 0) * gap + high for size, (low, high, gap) in zip(x.shape, config, strict=True)]
    found = Value(shape, x.dtype, x.spec, x.parts)
    op.ins = [found, *op.ins[1:]]
    if all(min(low, high) == between == 0 for low, high, between in config):
        padded[x.root] = found
    return [Op(PAD, [x], [found], {"padding_config": config})]


def _slice(op: Op) -> list[Op]:
    """The operation that slices the gradient of a convolution's input; none if the padding was even."""
    numbers: ConvDimensionNumbers = op.params["dimension_numbers"]
    pads: Sequence[tuple[int, int]] = op.params["padding"]
    strides: Sequence[int] = op.params["lhs_dilation"]
    dims = zip(numbers.out_spec[2:], numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)
    (out,) = op.outs
    shape = list(out.shape)
    for (i, j, k), (before, _), stride in zip(dims, pads, strides, strict=True):
        size = op.ins[1].shape[k]
        low = size - 1 - before
        least = size + stride * (op.ins[0].shape[j] - 1) - out.shape[i] - low  # of the padding at the end
        shape[i] += max(least - low, low - (least + stride - 1), 0)
    if tuple(shape) == out.shape:
        return []
    op.outs = [Value(shape, out.dtype, out.spec, out.parts)]
    return [Op("sliced_copy", op.outs, [out])]


def _kernel(op: Op, made: Mapping[Value, Op]) -> Value | None:
    """The array of a convolution's kernel; None for the convolution that makes a kernel's gradient, which has none."""
    if op.name != CONVOLUTION:
        return None
    kernel = op.ins[1].root
    if kernel in made and made[kernel].name == REV:
        kernel = made[kernel].ins[0].root
    origin = kernel
    while origin in made and made[origin].name in GATHERS | {CONVERT}:
        origin = made[origin].ins[0].root
    return None if origin in made else kernel
