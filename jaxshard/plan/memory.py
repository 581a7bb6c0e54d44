"""A program's peak memory, and the bytes it reads and writes.

It models a fusing compiler (`fusion`): arrays are freed after their last use, and updated in place.
"""

import heapq
from collections.abc import Sequence

from jaxshard.plan import xla_gpu
from jaxshard.plan.fusion import Fusion
from jaxshard.plan.program import Block, Op, Value, distinct, product_flops
from jaxshard.programs.primitives import COND, FUSED, LOOPS, UPDATES


def peak_bytes(block: Block, freed: Sequence[Value], platform: str) -> int:
    """Peak bytes of the `freed` inputs, which end with their last use, and of all arrays that the block makes."""
    return _Lives(_fusion(block, platform), freed).peak()


def traffic(block: Block, platform: str) -> tuple[float, float]:
    """Bytes that products read and write, and bytes of all other operations.

    It assumes on GPU too that products fuse their operands. That is closer to compiled programs, whose kernels share
    reads (decoder of `jaxshard bench`, bfloat16: 25.1 GB predicted, 19.7 compiled; without the assumption 32.8).
    """
    fusion = Fusion(block, platform)
    products = rest = 0.0
    for op in block.ops:
        if op.blocks:
            inner = max((traffic(b, platform) for b in op.blocks), key=sum)
            products, rest = products + op.trips * inner[0], rest + op.trips * inner[1]
        elif fusion.is_virtual(op):
            continue
        elif product_flops(op):
            products += fusion.touched(op)
        else:
            rest += fusion.touched(op)
    return products, rest


class _Lives:
    """The lifetimes of a block's arrays.

    Args:
      fusion: of the block.
      freed: inputs that end with their last use.
      copied: inputs that are copied at their first use; the copy ends with the last use.
    """

    def __init__(self, fusion: Fusion, freed: Sequence[Value], copied: Sequence[Value] = ()):
        self.fusion, self.freed, self.copied = fusion, {x.root for x in freed}, set(copied)
        self._end_here = {*fusion.made, *self.freed, *self.copied}
        self.is_gpu = fusion.platform == "gpu"

    def ends(self, s: Value) -> bool:
        """Whether an array is freed after its last use."""
        return s in self._end_here and s not in self.fusion.kept

    def peak(self) -> int:
        ops, read_by = self.ordered(), self.fusion.read_by
        last = self._last_uses(ops)
        ending: dict[int, list[Value]] = {}
        for source, i in last.items():
            ending.setdefault(i, []).append(source)
        live = most = sum(x.bytes for x in self.freed)
        to_copy = set(self.copied)
        for i, op in enumerate(ops):
            dying = [s for s in ending.get(i, ()) if self.ends(s)]
            live += sum(s.bytes for s in read_by(op) & to_copy)
            to_copy -= read_by(op)
            made = sum(out.bytes for out in op.outs)
            needed = max(made - self._reused(op, dying), 0) + self._inside(op)
            most = max(most, live + needed)
            unread = sum(out.bytes for out in op.outs if out not in last and out not in self.fusion.kept)
            live += made - sum(s.bytes for s in dying) - unread
        return most

    def _last_uses(self, ops: list[Op]) -> dict[Value, int]:
        """The place of each array's last reader."""
        last = {source: i for i, op in enumerate(ops) for source in self.fusion.read_by(op)}
        if not self.is_gpu:
            return last
        joined, places = xla_gpu.held_for_joined_sums(self.fusion), {op: i for i, op in enumerate(ops)}
        return {source: max(i, places[joined[source]]) if source in joined else i for source, i in last.items()}

    def ordered(self) -> list[Op]:
        """The operations that are not virtual, in the order in which they run.

        Compilers reorder the operations after the loss (the update) to free memory early; XLA for CPU keeps the
        program's order.
        """
        ops = [op for op in self.fusion.block.ops if not self.fusion.is_virtual(op)]
        if self.fusion.platform == "cpu":
            return ops
        start = next((i + 1 for i in range(len(ops) - 1, -1, -1) if _keeps_its_place(ops[i])), 0)
        return ops[:start] + _Thrift(self, ops[start:]).ordered()

    def _reused(self, op: Op, dying: list[Value]) -> int:
        """Bytes of the operation's results that reuse the memory of arrays that end with it."""
        if op.name in FUSED:
            size = op.outs[0].bytes
            if self.is_gpu and xla_gpu.normalises(self.fusion, op):
                return 0
            kept = self.fusion.read_elsewhere(op) if self.is_gpu else ()
            return size if any(s.bytes == size and s not in kept for s in dying) else 0
        if op.name in UPDATES:
            return op.outs[0].bytes if op.ins[0].root in dying else 0
        if op.name in LOOPS:
            consts, carries = op.split
            starts = {x.root for x in op.ins[consts : consts + carries]}
            return sum(s.bytes for s in dying if s in starts)
        return 0

    def _inside(self, op: Op) -> int:
        """Bytes that a loop or conditional needs besides its inputs and results."""
        return max((_peak_of_iteration(op, block, self.fusion.platform) for block in op.blocks), default=0)


def _fusion(block: Block, platform: str) -> Fusion:
    return Fusion(block, platform, products_cast=platform == "gpu")


def _peak_of_iteration(op: Op, block: Block, platform: str) -> int:
    """Peak bytes of one iteration of a loop, or of a branch, besides its inputs."""
    consts, carries = op.split
    carried, fusion = block.ins[consts : consts + carries], _fusion(block, platform)
    held = sum(x.bytes for x in distinct(carried))
    if platform != "gpu" or op.name == COND:
        return _Lives(fusion, carried).peak() - held
    lives = _Lives(fusion, carried, xla_gpu.copied_slices(fusion, sum(op.split)))
    return lives.peak() - held + xla_gpu.bytes_of_previous_iteration(block)


def _keeps_its_place(op: Op) -> bool:
    """Whether compilers keep the operation in program order: a loop, or a product of the loss (the optimizer's products
    are in the global view)."""
    return bool(op.blocks) or (not op.in_global_view and product_flops(op) > 0)


class _Thrift:
    """Orders operations topologically; of those that are ready, the one that adds the fewest live bytes comes first."""

    def __init__(self, lives: _Lives, ops: list[Op]):
        self.lives, self.ops = lives, ops
        self.reads = {op: lives.fusion.read_by(op) for op in ops}
        self.readers: dict[Value, set[Op]] = {}  # still to come
        for op in ops:
            for s in self.reads[op]:
                self.readers.setdefault(s, set()).add(op)
        made = {out: op for op in ops for out in op.outs}
        self.waits = {op: len({made[s] for s in self.reads[op] if s in made}) for op in ops}
        self.places = {op: i for i, op in enumerate(ops)}
        self.heap: list[tuple[int, int, Op]] = []

    def ordered(self) -> list[Op]:
        for op in self.ops:
            self._offer(op)
        done: dict[Op, None] = {}
        while self.heap:
            *_, op = heapq.heappop(self.heap)
            if op not in done:  # an operation is offered again when it frees more
                done[op] = None
                self._follow(op)
        return list(done)

    def _offer(self, op: Op) -> None:
        if not self.waits[op]:
            heapq.heappush(self.heap, (self._net(op), self.places[op], op))

    def _follow(self, op: Op) -> None:
        """Offers the operations that are ready, or free more, after `op`."""
        for s in self.reads[op]:
            self.readers[s].discard(op)
            for last in self.readers[s] if len(self.readers[s]) == 1 else ():
                self._offer(last)
        for reader in {r for out in op.outs for r in self.readers.get(out, ())}:
            self.waits[reader] -= 1
            self._offer(reader)

    def _net(self, op: Op) -> int:
        """Live bytes that the operation adds."""
        ended = [s for s in self.reads[op] if len(self.readers[s]) == 1 and self.lives.ends(s)]
        return sum(out.bytes for out in op.outs) - sum(s.bytes for s in ended)
