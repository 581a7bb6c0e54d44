"""How long a step takes at the least: a roofline.

Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model", 2009.
"""

import dataclasses
import math

from jaxshard.base.types import AxisSizes
from jaxshard.hardware.chips import PAGED_BYTES, Chip
from jaxshard.plan.costs import Costs


@dataclasses.dataclass(frozen=True)
class Seconds:
    """How long each resource is busy at the least, in seconds per step.

    Attributes:
      products: matrix products, at the chip's peak, or as fast as their operands come.
      memory: reading and writing for all else; on simulated devices also what the operating system hands out anew.
      links: sending, inside the fast domain and between domains.
      waits: starting collectives, however small.
      host: what comes from the host's memory, and goes there.
    """

    products: float
    memory: float
    links: float
    waits: float
    host: float = 0.0

    @property
    def overlapped(self) -> float:
        """If all sending overlapped with computing: no step is faster."""
        return max(self.products + self.memory, self.links, self.host)

    @property
    def total(self) -> float:
        """If nothing that is sent overlapped with computing; what plans are ranked by."""
        return self.products + self.memory + self.links + self.waits + self.host

    @property
    def bound(self) -> str:
        """What takes longest: "products", "memory", "links" or "host"."""
        times = {"products": self.products, "memory": self.memory, "links": self.links, "host": self.host}
        return max(times, key=lambda name: times[name])


def roofline(costs: Costs, sizes: AxisSizes, temporary_bytes: int, chip: Chip) -> Seconds:
    """The roofline of a step.

    Args:
      costs: of the step, on each device.
      sizes: devices along each axis of the mesh.
      temporary_bytes: of the peak, what comes and goes in a step, in bytes.
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
    """Bytes per second that a device sends along axes ("data x tensor"): by the network, if they leave the domain."""
    names = list(sizes)
    outermost = min(names.index(axis) for axis in axes.split(" x "))
    span = math.prod(list(sizes.values())[outermost:])
    return chip.link_bandwidth if span <= chip.domain_size else chip.network_bandwidth
