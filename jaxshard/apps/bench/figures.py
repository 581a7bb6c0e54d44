"""The figures of a compiled step."""

from __future__ import annotations

import dataclasses

import jax

import jaxshard

_MB = 1e6


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one step, per device.

    Attributes:
      peak_bytes: arguments + outputs + scratch - aliases.
      wire_bytes: what it sends.
      covered_bytes: the collectives' payload whose collective has a matrix product between its start and its done.
      payload_bytes: the payload of all collectives.
      num_covered, num_collectives: collectives, as the program lists them.
      traffic_bytes: what kernels other than matrix products and collectives read and write.
    """

    peak_bytes: float
    wire_bytes: float
    covered_bytes: float
    payload_bytes: float
    num_covered: int
    num_collectives: int
    traffic_bytes: float

    def __str__(self) -> str:
        beside = f"{self.num_covered} of {self.num_collectives}, "
        beside += f"{self.covered_bytes / _MB:.0f} of {self.payload_bytes / _MB:.0f} MB"
        return (
            f"peak {self.peak_bytes / _MB:.0f} MB, wire {self.wire_bytes / _MB:.0f} MB, covered {beside}, "
            f"traffic {self.traffic_bytes / 1e9:.1f} GB"
        )


def figures(compiled: jax.stages.Compiled) -> Figures:
    """The figures of a compiled program."""
    found = jaxshard.inspect.schedule(compiled)
    return Figures(
        peak_bytes(compiled),
        jaxshard.inspect.wire_bytes(compiled),
        found.covered_bytes,
        found.payload_bytes,
        found.num_covered,
        found.num_collectives,
        found.kernel_bytes,
    )


def peak_bytes(compiled: jax.stages.Compiled) -> float:
    """Arguments + outputs + scratch - aliases, on each device."""
    memory = compiled.memory_analysis()
    assert memory is not None, "no compiler of XLA leaves it out"
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return float(held + memory.temp_size_in_bytes)
