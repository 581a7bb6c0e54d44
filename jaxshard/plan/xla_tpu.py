"""XLA for TPU's program transformations that change bytes; each was seen in compiled steps.

* Float32 matrix products and convolutions of default precision read bfloat16 on TPU. So the compiler narrows values
  that only products read, or that are cast to bfloat16 anyway: gathers, saved activations, and, before a loop over
  layers, a copy of the layers' parameters.
* The gradient of picking one element per row, a scatter into zeros, becomes element-wise work.
* A reduce-scatter whose shards do not fill the tiles becomes an all-reduce, with twice the bytes.
* A sum over one axis, followed by a scatter over all others, is done in the opposite order.
* A scatter or gather over all chips of a 3D torus becomes an all-reduce, with twice the bytes (v5p:2x2x2 to 8x8x8);
  over part of the torus, or axis by axis, it stays.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from jaxshard.plan.program import Block, Op, Value
from jaxshard.programs.primitives import (
    ADDS_UP,
    CONVERT,
    DYNAMIC_SLICE,
    GATHERS,
    PASSED_TO_PRODUCTS,
    PRODUCTS,
    PSUM,
    REDUCE_SCATTER,
    SCAN,
    SCATTER_ADD,
    SELECT,
)

_DEFAULT = (None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT, lax.Precision.DEFAULT))


def as_on_tpu(block: Block, num_devices: int, torus_dims: int) -> Block:
    """The block as a TPU runs it; changes values in place.

    Args:
      block: the program on each device.
      num_devices: of the mesh.
      torus_dims: the number of dims of the torus; 0 if unknown.
    """
    _pick_by_comparing(block)
    only = _only_products(block, frozenset())
    _narrow(block, only)
    _reduce_otherwise(block, num_devices)
    if torus_dims == 3:
        _reduce_over_all(block, num_devices)
    return _with_copies(block, only)


def _pick_by_comparing(block: Block) -> None:
    """Replaces scatters of one element into each row of an array by element-wise operations, in place."""
    block.ops = [Op(SELECT, op.ins[1:], op.outs, op.params) if _is_unpicked(op) else op for op in block.ops]
    for op in block.ops:
        for inner in op.blocks:
            _pick_by_comparing(inner)


def _is_unpicked(op: Op) -> bool:
    if op.name != SCATTER_ADD:
        return False
    rows, numbers = op.ins[0].shape, op.params["dimension_numbers"]
    return tuple(numbers.operand_batching_dims) == tuple(range(len(rows) - 1)) and not numbers.update_window_dims


def _only_products(block: Block, fine: frozenset[Value]) -> set[Value]:
    """The values that only products read, also in loop bodies.

    Args:
      block: the program.
      fine: its outputs that only products read outside the block.
    """
    outs = {x.root for x in block.outs} - fine
    bad: set[Value] = set(outs)
    read: set[Value] = set()
    found: set[Value] = set()
    for op in reversed(block.ops):
        made = [out for out in op.outs if _is_single(out) and (out in read or out in fine) and out not in bad]
        inner: set[Value] = set()
        if op.name == SCAN:
            body, carries = op.blocks[0], op.split[1]
            pairs = zip(op.outs[carries:], body.outs[carries:], strict=True)
            stacked = frozenset(y.root for out, y in pairs if out in made)
            inner = _only_products(body, stacked) | stacked
        found |= set(made) | inner
        for i, x in enumerate(op.ins):
            read.add(x.root)
            if not _is_fine(op, i, set(made), inner):
                bad.add(x.root)
    found |= {x.root for x in block.ins if x.root in read and x.root not in bad and _is_single(x)}
    return found


def _is_single(x: Value) -> bool:
    return x.dtype == jnp.float32


def _is_fine(op: Op, i: int, made: set[Value], inner: set[Value]) -> bool:
    """Whether the operation is a product that reads its input `i`, or passes it on to products alone."""
    if op.name in PRODUCTS:
        return op.params.get("precision") in _DEFAULT
    if op.name == CONVERT and op.outs[0].dtype == jnp.bfloat16:
        return True
    if op.name in PASSED_TO_PRODUCTS or op.name in GATHERS:
        return op.outs[0] in made
    consts, carries = op.split
    if op.name == SCAN and not consts <= i < consts + carries:
        return op.blocks[0].ins[i].root in inner
    return False


def _narrow(block: Block, only: set[Value]) -> None:
    """Changes the values in `only` to bfloat16, in place, and halves the bytes of their gathers."""
    given = {x.root for x in block.ins}
    for op in block.ops:
        for out in op.outs:
            if out in only and out not in given:
                out.dtype = jnp.dtype(jnp.bfloat16)
        if op.name in GATHERS and op.outs[0] in only:
            op.moved = tuple(dataclasses.replace(m, bytes=m.bytes // 2, dtype="bfloat16") for m in op.moved)
        for inner in op.blocks:
            _narrow(inner, only)


def _reduce_otherwise(block: Block, num_devices: int) -> None:
    """Changes reductions as XLA does, in place."""
    read_by: dict[Value, list[Op]] = {}
    for op in block.ops:
        for x in op.ins:
            read_by.setdefault(x.root, []).append(op)
    for op in block.ops:
        if op.name == REDUCE_SCATTER and _misses_tiles(op):
            op.moved = tuple(dataclasses.replace(m, kind="all-reduce") for m in op.moved)
    for op in block.ops:
        readers = read_by.get(op.outs[0], ()) if op.moved and op.name in ADDS_UP else ()
        if readers and all(r.name == REDUCE_SCATTER and r.moved[0].kind == "reduce-scatter" for r in readers):
            num_shards = readers[0].moved[0].group_size
            if num_shards * op.moved[0].group_size == num_devices:
                op.moved = tuple(dataclasses.replace(m, bytes=m.bytes // num_shards) for m in op.moved)
    for op in block.ops:
        for inner in op.blocks:
            _reduce_otherwise(inner, num_devices)


def _reduce_over_all(block: Block, num_devices: int) -> None:
    block.ops = [part for op in block.ops for part in (_as_all_reduce(op) if _is_over(op, num_devices) else [op])]
    for op in block.ops:
        for inner in op.blocks:
            _reduce_over_all(inner, num_devices)


def _is_over(op: Op, num_devices: int) -> bool:
    return any(m.kind in ("reduce-scatter", "all-gather") and m.group_size == num_devices for m in op.moved)


def _as_all_reduce(op: Op) -> list[Op]:
    """The equivalent all-reduce: a gather sums zeros that contain each device's shard; a scatter slices the sum."""
    moved = tuple(dataclasses.replace(m, kind="all-reduce") for m in op.moved)
    if op.name != REDUCE_SCATTER:
        return [dataclasses.replace(op, moved=moved)]
    whole = Value(op.ins[0].shape, op.ins[0].dtype)
    return [Op(PSUM, op.ins, [whole], moved=moved), Op(DYNAMIC_SLICE, [whole], op.outs)]


def _misses_tiles(op: Op) -> bool:
    """Whether a shard's columns are an odd multiple of 128, in a 2-byte dtype."""
    part = op.outs[0]
    dim: int = op.params["scatter_dimension"]
    return dim == len(part.shape) - 1 and part.itemsize == 2 and part.shape[dim] % 256 == 128


def _with_copies(block: Block, only: set[Value]) -> Block:
    """The block with bfloat16 copies, before each loop, of scanned arrays that only products read in it."""
    copies: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in block.ops:
        if op.name == SCAN:
            op.blocks = tuple(_with_copies(inner, only) for inner in op.blocks)
            consts, carries = op.split
            for i, x in enumerate(op.ins):
                carried = consts <= i < consts + carries
                if carried or not _is_single(x) or op.blocks[0].ins[i].root not in only:
                    continue
                if x.root not in copies:
                    copies[x.root] = Value(x.root.shape, jnp.dtype(jnp.bfloat16), x.root.spec, x.root.parts)
                    ops.append(Op("hoisted_copy", [x], [copies[x.root]]))
                op.ins[i] = copies[x.root]
                op.blocks[0].ins[i].root.dtype = jnp.dtype(jnp.bfloat16)
        ops.append(op)
    return Block(block.ins, ops, block.outs)
