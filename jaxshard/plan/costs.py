"""What a traced step will cost each device: arithmetic, bytes moved and the most memory at once. Nothing is compiled.

Memory is that of a compiler that fuses: element-wise work is done where its result is read, what is read by nobody any
more makes room, and what is updated is updated in place. `docs/plan.md` has how near the compilers this comes.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Mapping, Sequence

from jaxshard.plan.program import Block, Moved, Op, Value, product_flops


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of one step, on each device.

    Attributes:
      flops: of matrix products and convolutions, by the dtype of what is multiplied.
      product_bytes: read from and written to memory by products.
      memory_bytes: the same by all else: what is element by element, reductions, lookups, the optimizer.
      collectives: in the order of the program, those in loops once, with their trips.
      peak_bytes: the most memory at once, inputs included.
      trips_known: False if there is a while loop, which counts as one trip.
    """

    flops: dict[str, float]
    product_bytes: float
    memory_bytes: float
    collectives: tuple[Moved, ...]
    peak_bytes: int
    trips_known: bool

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends."""
        return sum(m.wire_bytes for m in self.collectives)

    def wire_bytes_by_axes(self) -> dict[str, float]:
        """The same by the axes of the mesh that they go along: {"data": ..., "data x tensor": ...}."""
        found: dict[str, float] = {}
        for m in self.collectives:
            axes = " x ".join(m.axes)
            found[axes] = found.get(axes, 0.0) + m.wire_bytes
        return found


def costs_of(block: Block, donated: Sequence[bool], platform: str) -> Costs:
    """The costs of a program (`flow.written_out`); `donated` says which of its inputs may be written over."""
    flops: dict[str, float] = {}
    moved: list[Moved] = []
    known = _add_up(block, 1, flops, moved)
    memory = Memory(platform)
    held = sum(x.bytes for x in _distinct(block.ins))
    freed = [x for x, yes in zip(block.ins, donated, strict=True) if yes]
    peak = held - sum(x.bytes for x in _distinct(freed)) + memory.peak(block, freed)
    return Costs(flops, *memory.traffic(block), tuple(moved), int(peak), known)


def _distinct(values: Sequence[Value]) -> list[Value]:
    return list(dict.fromkeys(x.root for x in values))


def _add_up(block: Block, trips: int, flops: dict[str, float], moved: list[Moved]) -> bool:
    """Adds products' arithmetic and what is moved; False if some loop's trips are not known."""
    known = True
    for op in block.ops:
        if count := product_flops(op):
            dtype = str(op.ins[0].dtype)
            flops[dtype] = flops.get(dtype, 0.0) + count * trips
        moved += [dataclasses.replace(m, trips=trips) for m in op.moved]
        if op.name == "cond":
            known = _add_dearest(op, trips, flops, moved) and known
        for inner in op.blocks if op.name != "cond" else ():
            known = _add_up(inner, trips * op.trips, flops, moved) and known and op.name != "while"
    return known


def _add_dearest(op: Op, trips: int, flops: dict[str, float], moved: list[Moved]) -> bool:
    """Of the branches of which one runs, the one with the most arithmetic; False if some branch's trips are unknown."""
    choices: list[tuple[dict[str, float], list[Moved]]] = [({}, []) for _ in op.blocks]
    known = [_add_up(block, trips, *one) for block, one in zip(op.blocks, choices, strict=True)]
    more, sent = max(choices, key=lambda one: (sum(one[0].values()), sum(m.wire_bytes for m in one[1])))
    for dtype, count in more.items():
        flops[dtype] = flops.get(dtype, 0.0) + count
    moved += sent
    return all(known)


# Memory.


def _scatters(loop: Op) -> bool:
    """Whether each step of a loop reduce-scatters something."""
    return any(m.kind == "reduce-scatter" for block in loop.blocks for op in block.ops for m in op.moved)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PLAIN = _names(
    """abs add add_any and and_ argmax ceil clamp convert_element_type copy eq floor ge gt imag integer_pow iota
    is_finite le lt max min mul ne neg nextafter not not_ or or_ real rem round select_n shift_left
    shift_right_arithmetic shift_right_logical sign square sub xor bitcast_convert_type axis_index broadcast_in_dim pad
    slice transpose rev concatenate stack dynamic_slice complex conj clip population_count reduce_precision"""
)
_DEAR = _names(
    """exp exp2 expm1 log log1p tanh erf erf_inv erfc logistic pow sqrt rsqrt cbrt div sin cos tan atan2 sinh cosh asin
    acos atan lgamma digamma"""
)
_FUSED = _PLAIN | _DEAR
_REDUCTIONS = _names(
    "reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin cumsum cumlogsumexp"
)
_IN_PLACE = _names("dynamic_update_slice scatter scatter-add scatter_add")
_FREE = _names("broadcast_in_dim iota axis_index")
_BENT = _names("transpose slice rev convert_element_type")


_LONGEST_ROW = 2**13  # that one block of threads keeps


class Memory:
    """What a fusing compiler keeps where; see `_is_virtual`."""

    def __init__(self, platform: str):
        self.platform = platform

    def peak(self, block: Block, freed: Sequence[Value]) -> int:
        """The most bytes at once of `freed` inputs (which end with their last use) and all that the block makes."""
        return _Pass(self, block, freed).run()

    def traffic(self, block: Block) -> tuple[float, float]:
        """Bytes read and written by products, and by all else."""
        found = _Pass(self, block, ())
        totals = [0.0, 0.0]
        for op in block.ops:
            if op.blocks:
                inner = max((self.traffic(b) for b in op.blocks), key=sum)
                totals = [total + op.trips * more for total, more in zip(totals, inner, strict=True)]
            elif not found.is_virtual(op):
                totals[0 if product_flops(op) else 1] += found.touched(op)
        return totals[0], totals[1]


class _Pass:
    """One block, seen once."""

    def __init__(self, memory: Memory, block: Block, freed: Sequence[Value]):
        self.memory, self.block = memory, block
        self.freed = {x.root for x in freed}
        self.given = {x.root for x in block.ins}
        self.made: dict[Value, Op] = {out: op for op in block.ops for out in op.outs}
        self.readers: dict[Value, list[Op]] = {}
        for op in block.ops:
            for root in {x.root for x in op.ins}:
                self.readers.setdefault(root, []).append(op)
        self.outs = {x.root for x in block.outs}
        self._virtual: dict[Op, bool] = {}
        self._sources: dict[Value, frozenset[Value]] = {}
        self.kept = {s for x in block.outs for s in self.sources(x)}

    # What is never in memory, because it is made where it is read.

    def is_virtual(self, op: Op) -> bool:
        if op not in self._virtual:
            self._virtual[op] = self._is_virtual(op)
        return self._virtual[op]

    def _is_virtual(self, op: Op) -> bool:
        if op.name not in _FUSED or len(op.outs) != 1 or op.outs[0] in self.outs:
            return False
        readers = self.readers.get(op.outs[0], [])
        if op.name in _FREE:
            return True
        return all(self._takes(reader, op) for reader in readers)

    def _takes(self, reader: Op, op: Op) -> bool:
        """Whether `reader` makes what `op` does itself, as it goes."""
        if reader.name in _FUSED or reader.name in _REDUCTIONS:
            return True
        if reader.name == "dot_general":
            return self.memory.platform == "tpu" or op.name in _BENT
        return reader.name in _IN_PLACE and op.outs[0] is not reader.ins[0].root

    def sources(self, x: Value) -> frozenset[Value]:
        """What is read from memory to make `x`."""
        root = x.root
        if root not in self._sources:
            op = self.made.get(root)
            if op is None or not self.is_virtual(op):
                self._sources[root] = frozenset((root,))
            else:
                self._sources[root] = frozenset(s for i in op.ins for s in self.sources(i))
        return self._sources[root]

    def read_by(self, op: Op) -> frozenset[Value]:
        """What is read from memory by an operation."""
        return frozenset(s for x in op.ins for s in self.sources(x))

    def touched(self, op: Op) -> int:
        """Bytes that an operation reads and writes: of what is sliced or updated, that part."""
        written = sum(x.bytes for x in op.outs)
        if op.name in ("gather", "dynamic_slice"):
            return 2 * written
        if op.name == "dynamic_update_slice":
            return 2 * op.ins[1].bytes
        ins = op.ins
        if op.name in _IN_PLACE:
            ins, written = op.ins[1:], op.ins[-1].bytes
        reads: dict[Value, int] = {}
        for x in ins:
            reads |= self._read_bytes(x)
        return written + sum(reads.values())

    def _read_bytes(self, x: Value) -> dict[Value, int]:
        op = self.made.get(x.root)
        if op is None or not self.is_virtual(op) or op.name in ("slice", "dynamic_slice"):
            return {x.root: x.root.bytes}
        found: dict[Value, int] = {}
        for i in op.ins:
            found |= self._read_bytes(i)
        return found

    # Who lives when.

    def ordered(self) -> list[Op]:
        """The operations that are not virtual; those of the update where compilers put them: what frees most first.

        XLA for CPU leaves them as they are.
        """
        ops = [op for op in self.block.ops if not self.is_virtual(op)]
        if self.memory.platform == "cpu":
            return ops
        start = next((i + 1 for i in range(len(ops) - 1, -1, -1) if ops[i].blocks), 0)
        late = []
        if self.memory.platform == "gpu" and start and not _scatters(ops[start - 1]):
            late = self._put_off(ops, start - 1)
        return [op for op in ops[:start] if op not in late] + self._thriftily(late + ops[start:])

    def _put_off(self, ops: list[Op], loop: int) -> list[Op]:
        """Products before the last loop that nothing reads before its end: XLA for GPU puts them off until then."""
        waits = set(ops[loop + 1 :])
        late: list[Op] = []
        for op in reversed(ops[:loop]):
            if op.blocks:
                break
            movable = op.name == "dot_general" or op.name in _BENT or op.moved
            if movable and all(self._is_put_off(out, waits) for out in op.outs):
                waits.add(op)
                late.append(op)
        made: set[Value] = set()
        for op in reversed(late):  # what is made of no product stays where it is
            if op.name == "dot_general" or self.read_by(op) & made:
                made |= set(op.outs)
        return [op for op in reversed(late) if made & set(op.outs)]

    def _is_put_off(self, x: Value, waits: set[Op]) -> bool:
        readers = self.readers.get(x, [])
        return bool(readers) and all(
            r in waits or (self.is_virtual(r) and all(self._is_put_off(out, waits) for out in r.outs)) for r in readers
        )

    def _thriftily(self, ops: list[Op]) -> list[Op]:
        """A topological order: of what is ready, always what adds least."""
        reads = {op: self.read_by(op) for op in ops}
        made = {out: op for op in ops for out in op.outs}
        readers: dict[Value, set[Op]] = {}  # still to come
        for op in ops:
            for s in reads[op]:
                readers.setdefault(s, set()).add(op)
        waits = {op: len({made[s] for s in reads[op] if s in made}) for op in ops}
        place = {op: i for i, op in enumerate(ops)}
        heap: list[tuple[int, int, Op]] = []

        def offer(op: Op) -> None:
            if not waits[op]:
                heapq.heappush(heap, (self._net(op, reads[op], readers), place[op], op))

        for op in ops:
            offer(op)
        done: dict[Op, None] = {}
        while heap:
            *_, op = heapq.heappop(heap)
            if op in done:
                continue  # offered again since, when it had come to free more
            done[op] = None
            for s in reads[op]:
                readers[s].discard(op)
                for last in readers[s] if len(readers[s]) == 1 else ():
                    offer(last)
            for reader in {r for out in op.outs for r in readers.get(out, ())}:
                waits[reader] -= 1
                offer(reader)
        return list(done)

    def _net(self, op: Op, reads: frozenset[Value], readers: Mapping[Value, set[Op]]) -> int:
        """Bytes that the operation adds to what is held."""
        ended = [s for s in reads if len(readers[s]) == 1 and s not in self.kept and self._may_end(s)]
        return sum(out.bytes for out in op.outs) - sum(s.bytes for s in ended)

    def run(self) -> int:
        ops = self.ordered()
        last: dict[Value, int] = {}
        for i, op in enumerate(ops):
            for source in self.read_by(op):
                last[source] = i
        kept = self.kept
        live = sum(x.bytes for x in self.freed)
        peak = live
        early = self._made_early(ops)
        for i, op in enumerate(ops):
            dying = [s for s in self.read_by(op) if last[s] == i and s not in kept and self._may_end(s)]
            made = sum(out.bytes for out in op.outs)
            reused = self._reused(op, dying)
            inner = self._inside(op, dying)
            peak = max(peak, live + max(made - reused, 0) + inner + early.get(op, 0))
            unread = sum(out.bytes for out in op.outs if out not in last and out not in kept)
            live += made - sum(s.bytes for s in dying) - unread
        return peak

    def _made_early(self, ops: list[Op]) -> dict[Op, int]:
        """What is held at operations between two loops, for the second.

        XLA for GPU takes a step of a loop that scatters out of it, to overlap the scattering, and starts it at once.
        """
        found: dict[Op, int] = {}
        if self.memory.platform != "gpu":
            return found
        loops = [i for i, op in enumerate(ops) if op.name == "scan"]
        for before, i in itertools.pairwise(loops):
            if _scatters(ops[i]):
                found |= dict.fromkeys(ops[before + 1 : i], self._inside(ops[i], []))
        return found

    def _may_end(self, s: Value) -> bool:
        return s in self.made or s in self.freed

    def _reused(self, op: Op, dying: list[Value]) -> int:
        """Bytes of the operation's results that take the place of what it reads last."""
        if op.name in _FUSED:
            size = op.outs[0].bytes
            return size if any(s.bytes == size for s in dying) and not self._normalises(op) else 0
        if op.name in _IN_PLACE:
            return op.outs[0].bytes if op.ins[0].root in dying else 0
        if op.name in ("scan", "while"):
            consts, carries = op.split
            starts = {x.root for x in op.ins[consts : consts + carries]}
            return sum(s.bytes for s in dying if s in starts)
        return 0

    def _normalises(self, op: Op) -> bool:
        """Whether XLA for GPU makes a kernel of it that sums rows as it goes, and writes beside what it reads."""
        if self.memory.platform != "gpu" or not op.outs[0].shape or op.outs[0].shape[-1] > _LONGEST_ROW:
            return False
        return any(s in self.made and self.made[s].name in _REDUCTIONS for s in self.read_by(op))

    def _inside(self, op: Op, dying: list[Value]) -> int:
        """What a loop needs beside its inputs and results."""
        if not op.blocks:
            return 0
        peaks = []
        for block in op.blocks:
            consts, carries = op.split
            carried = block.ins[consts : consts + carries]
            held = sum(x.bytes for x in _distinct(carried))
            peaks.append(self.memory.peak(block, carried) - held)
        return max(0, *peaks)
