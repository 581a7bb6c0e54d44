"""What XLA for GPU does to a program before it runs it, where that changes memory; each was seen in compiled steps.

It makes one kernel of a sum over rows and the element-wise work on them, which writes beside what it reads. Products
that it would put off, and loops that it would begin early, wait in our programs: `core.backward` orders them.
"""

from jaxshard.base.primitives import REDUCTIONS
from jaxshard.plan.fusion import Fusion
from jaxshard.plan.program import Op

_LONGEST_ROW = 2**13  # elements that one block of threads keeps


def normalises(fusion: Fusion, op: Op) -> bool:
    """Whether the operation is part of a kernel that sums rows as it goes, and so cannot write over what it reads."""
    shape = op.outs[0].shape
    if not shape or shape[-1] > _LONGEST_ROW:
        return False
    return any(s in fusion.made and fusion.made[s].name in REDUCTIONS for s in fusion.read_by(op))
