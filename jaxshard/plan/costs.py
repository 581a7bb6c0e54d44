"""The costs of a traced step on each device: arithmetic, bytes moved, peak memory, and time. Nothing is compiled.

`docs/plan_figures.md` compares the predictions with compiled programs.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxshard.base.types import AxisSizes
from jaxshard.hardware.chips import PAGED_BYTES, Chip
from jaxshard.plan import memory
from jaxshard.plan.program import Block, Moved, OnHost, Op, distinct, kernels_without_cost, product_flops
from jaxshard.programs.primitives import COND, DEVICE_PUT, WHILE


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of one step on each device.

    Attributes:
      flops: multiplications and additions of matrix products and convolutions, by the dtype of their operands.
      product_bytes: bytes that products read from memory and write to it.
      memory_bytes: the same for all other operations: element-wise, reductions, lookups, the optimizer.
      collectives: in program order; one in a loop is listed once, with its trips.
      peak_bytes: peak memory in bytes, inputs included.
      trips_known: False if there is a while loop, which counts as one trip.
      host_bytes: bytes transferred from and to host memory.
      uncounted: kernels whose arithmetic `flops` lacks, since they state no cost.
    """

    flops: dict[str, float]
    product_bytes: float
    memory_bytes: float
    collectives: tuple[Moved, ...]
    peak_bytes: int
    trips_known: bool
    host_bytes: int = 0
    uncounted: tuple[str, ...] = ()

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends, over all axes."""
        return sum(m.wire_bytes for m in self.collectives)

    def wire_bytes_by_axes(self) -> dict[str, float]:
        """Bytes that a device sends, by mesh axes: {"data": ..., "data x tensor": ...}."""
        found: dict[str, float] = {}
        for m in self.collectives:
            axes = " x ".join(m.axes)
            found[axes] = found.get(axes, 0.0) + m.wire_bytes
        return found


def costs_of(block: Block, donated: Sequence[bool], platform: str) -> Costs:
    """The costs of a program.

    Args:
      block: the program on each device (`from_jaxpr.written_out`).
      donated: for each of its inputs, whether it may be overwritten.
      platform: "cpu", "gpu" or "tpu".
    """
    flops: dict[str, float] = {}
    moved: list[Moved] = []
    known = _add_up(block, 1, flops, moved)
    freed = [x for x, yes in zip(block.ins, donated, strict=True) if yes]
    held = sum(x.bytes for x in distinct(block.ins)) - sum(x.bytes for x in distinct(freed))
    peak = held + memory.peak_bytes(block, freed, platform)
    uncounted = tuple(kernels_without_cost(block))
    return Costs(flops, *memory.traffic(block, platform), tuple(moved), int(peak), known, _host_bytes(block), uncounted)


def _host_bytes(block: Block) -> int:
    own = [op for op in block.ops if any(isinstance(x.dtype, OnHost) for x in (*op.ins, *op.outs))]
    moved = sum(x.bytes for op in own if op.name == DEVICE_PUT for x in (*op.ins, *op.outs))
    return moved + sum(op.trips * _host_bytes(inner) for op in block.ops for inner in op.blocks)


def _add_up(block: Block, trips: int, flops: dict[str, float], moved: list[Moved]) -> bool:
    """Adds the arithmetic of products, and the collectives; returns False if some loop's trip count is unknown."""
    known = True
    for op in block.ops:
        if count := product_flops(op):
            dtype = str(op.ins[0].dtype)
            flops[dtype] = flops.get(dtype, 0.0) + count * trips
        moved += [dataclasses.replace(m, trips=trips) for m in op.moved]
        if op.name == COND:
            known = _add_dearest(op, trips, flops, moved) and known
        for inner in op.blocks if op.name != COND else ():
            known = _add_up(inner, trips * op.trips, flops, moved) and known and op.name != WHILE
    return known


def _add_dearest(op: Op, trips: int, flops: dict[str, float], moved: list[Moved]) -> bool:
    """Adds only the branch with the most arithmetic; returns False if some loop's trip count is unknown."""
    choices: list[tuple[dict[str, float], list[Moved]]] = [({}, []) for _ in op.blocks]
    known = [_add_up(block, trips, *one) for block, one in zip(op.blocks, choices, strict=True)]
    more, sent = max(choices, key=lambda one: (sum(one[0].values()), sum(m.wire_bytes for m in one[1])))
    for dtype, count in more.items():
        flops[dtype] = flops.get(dtype, 0.0) + count
    moved += sent
    return all(known)


# The roofline: Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model", 2009.


@dataclasses.dataclass(frozen=True)
class Seconds:
    """The least time that each resource is busy, in seconds per step.

    Attributes:
      products: matrix products, at the chip's peak, or at the memory bandwidth of their operands.
      memory: reads and writes of all other operations; on simulated devices also fresh pages of the operating system.
      links: sending, inside the fast domain and between domains.
      waits: the latency of starting collectives.
      host: transfers from and to host memory.
    """

    products: float
    memory: float
    links: float
    waits: float
    host: float = 0.0

    @property
    def overlapped(self) -> float:
        """The time if all communication overlapped with computation: a lower bound."""
        return max(self.products + self.memory, self.links, self.host)

    @property
    def total(self) -> float:
        """The time if no communication overlapped with computation; `fit` ranks by it."""
        return self.products + self.memory + self.links + self.waits + self.host

    @property
    def bound(self) -> str:
        """The resource that takes longest: "products", "memory", "links" or "host"."""
        times = {"products": self.products, "memory": self.memory, "links": self.links, "host": self.host}
        return max(times, key=lambda name: times[name])


def roofline(costs: Costs, sizes: AxisSizes, temporary_bytes: int, chip: Chip) -> Seconds:
    """The roofline of a step.

    Args:
      costs: of the step, on each device.
      sizes: devices along each axis of the mesh.
      temporary_bytes: the part of the peak that is allocated and freed in each step, in bytes.
      chip: the kind of each device.
    """
    flops = sum(count / chip.flops.get(dtype, chip.flops["float32"]) for dtype, count in costs.flops.items())
    sent = {axes: num_bytes for axes, num_bytes in costs.wire_bytes_by_axes().items() if axes}
    paged = temporary_bytes / chip.paging_bandwidth if temporary_bytes > PAGED_BYTES else 0.0
    return Seconds(
        products=max(flops, costs.product_bytes / chip.memory_bandwidth),
        memory=costs.memory_bytes / chip.memory_bandwidth + paged,
        links=sum(num_bytes / bandwidth_along(axes, sizes, chip) for axes, num_bytes in sent.items()),
        waits=chip.collective_seconds * sum(m.trips for m in costs.collectives),
        host=costs.host_bytes / chip.host_bandwidth,
    )


def bandwidth_along(axes: str, sizes: AxisSizes, chip: Chip) -> float:
    """Bytes per second that a device sends along axes ("data x tensor"): the network's if they leave the domain."""
    names = list(sizes)
    outermost = min(names.index(axis) for axis in axes.split(" x "))
    span = math.prod(list(sizes.values())[outermost:])
    return chip.link_bandwidth if span <= chip.domain_size else chip.network_bandwidth
