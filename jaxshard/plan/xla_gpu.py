"""What XLA for GPU does to a program before it runs it, where that changes memory; each was seen in compiled steps.

* It starts a loop that scatters early: it takes a step out of the loop, to overlap the scattering.
* It puts off products whose results nothing reads before the last loop has ended.
* It makes one kernel of a sum over rows and the element-wise work on them, which writes beside what it reads.
"""

import itertools
from collections.abc import Callable

from jaxshard.base.primitives import FUSED_INTO_DOTS, REDUCTIONS
from jaxshard.plan.fusion import Fusion
from jaxshard.plan.program import Op, Value

_LONGEST_ROW = 2**13  # elements that one block of threads keeps


def scatters(loop: Op) -> bool:
    """Whether each step of a loop reduce-scatters something."""
    return any(m.kind == "reduce-scatter" for block in loop.blocks for op in block.ops for m in op.moved)


def put_off(fusion: Fusion, ops: list[Op], loop: int) -> list[Op]:
    """The operations before the last loop that run after it: products whose results are not read before its end.

    Args:
      fusion: of the block.
      ops: its operations that are not virtual.
      loop: where in `ops` the last loop is.
    """
    if scatters(ops[loop]):
        return []
    waits = set(ops[loop + 1 :])
    late: list[Op] = []
    for op in itertools.takewhile(lambda op: not op.blocks, reversed(ops[:loop])):
        movable = op.name == "dot_general" or op.name in FUSED_INTO_DOTS or op.moved
        if movable and all(_is_put_off(fusion, out, waits) for out in op.outs):
            waits.add(op)
            late.append(op)
    return _made_of_products(fusion, late[::-1])


def _is_put_off(fusion: Fusion, x: Value, waits: set[Op]) -> bool:
    """Whether all that read `x` wait."""
    readers = fusion.readers.get(x, [])
    return bool(readers) and all(
        r in waits or (fusion.is_virtual(r) and all(_is_put_off(fusion, out, waits) for out in r.outs)) for r in readers
    )


def _made_of_products(fusion: Fusion, ops: list[Op]) -> list[Op]:
    """Products, and what is made of their results; all else stays where it is."""
    made: set[Value] = set()
    for op in ops:
        if op.name == "dot_general" or fusion.read_by(op) & made:
            made |= set(op.outs)
    return [op for op in ops if made & set(op.outs)]


def held_early(ops: list[Op], inside: Callable[[Op], int]) -> dict[Op, int]:
    """Extra bytes held at operations between two loops: XLA for GPU starts the second loop's first scatter early.

    Args:
      ops: in the order in which they run.
      inside: the bytes that a loop needs beside its inputs and results.
    """
    found: dict[Op, int] = {}
    loops = [i for i, op in enumerate(ops) if op.name == "scan"]
    for before, i in itertools.pairwise(loops):
        if scatters(ops[i]):
            found |= dict.fromkeys(ops[before + 1 : i], inside(ops[i]))
    return found


def normalises(fusion: Fusion, op: Op) -> bool:
    """Whether the operation is part of a kernel that sums rows as it goes, and so cannot write over what it reads."""
    shape = op.outs[0].shape
    if not shape or shape[-1] > _LONGEST_ROW:
        return False
    return any(s in fusion.made and fusion.made[s].name in REDUCTIONS for s in fusion.read_by(op))
