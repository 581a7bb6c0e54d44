"""The devices to train on, and the candidate strategies and meshes for them."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh

from jaxshard.hardware.chips import Chip
from jaxshard.mesh import abstract_mesh


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices to train on.

    Attributes:
      chip: the kind of each device.
      num_devices: the number of devices.
      memory_bytes: usable memory of each device, in bytes.
      torus: the sides of a TPU's torus; () if unknown or not a torus.
    """

    chip: Chip
    num_devices: int
    memory_bytes: float
    torus: tuple[int, ...] = ()

    @property
    def num_domains(self) -> int:
        """The number of groups of devices that fast links join."""
        return max(1, self.num_devices // self.chip.domain_size)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A strategy on a mesh, with its options.

    Attributes:
      strategy: "ddp", "zero1", ..., or "hybrid".
      data, tensor, pipeline, replica: devices along each axis of the mesh.
      zero: the ZeRO level of "hybrid".
      microbatches: the number of microbatches that each device's rows are split into.
      state_axes: the axes that the state is sharded over; () for the strategy's default.
      state_memory: as the strategies take it.
    """

    strategy: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    replica: int = 1
    zero: int | None = None
    microbatches: int = 1
    state_axes: tuple[str, ...] = ()
    state_memory: str = "device"

    @property
    def name(self) -> str:
        """Such as "zero2", or "hybrid zero3 8 x data, 4 x tensor, m 2"."""
        level = f" zero{self.zero}" if self.zero is not None else ""
        axes = ("replica", "data", "tensor", "pipeline")
        cut = ", ".join(f"{getattr(self, axis)} x {axis}" for axis in axes if getattr(self, axis) > 1)
        sizes = f" {cut}" if self.strategy == "hybrid" or self.replica > 1 else ""
        sizes += f", state over {' x '.join(self.state_axes)}" if self.state_axes else ""
        sizes += "" if self.state_memory == "device" else f", state on {self.state_memory}"
        return f"{self.strategy}{level}{sizes}" + (f", m {self.microbatches}" if self.microbatches > 1 else "")

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis, as `make_mesh` takes them."""
        return {axis: getattr(self, axis) for axis in ("data", "tensor", "pipeline", "replica")}

    @property
    def num_devices(self) -> int:
        """The product of all axes."""
        return math.prod(self.sizes.values())

    def mesh(self, target: Target) -> AbstractMesh:
        """An abstract mesh."""
        chip, sides = target.chip, "x".join(map(str, target.torus))
        kind = f"{chip.name}:{sides}" if sides else chip.name
        return abstract_mesh(self.num_devices, **self.sizes, platform=chip.platform, device_kind=kind)


def side_by_side(target: Target, microbatches: int = 1) -> list[Candidate]:
    """The data-parallel strategies on all devices; with several domains also hsdp, one replica on each.

    For hsdp there are two candidates: state sharded within each replica, and over all devices.
    """
    found = [
        Candidate(strategy, data=target.num_devices, microbatches=microbatches)
        for strategy in ("ddp", "zero1", "zero2", "zero3")
    ]
    domains = target.num_domains
    if domains > 1 and target.num_devices % domains == 0:
        hsdp = Candidate("hsdp", target.num_devices // domains, replica=domains, microbatches=microbatches)
        found += [hsdp, dataclasses.replace(hsdp, state_axes=("data", "replica"))]
    return found


def candidates(
    target: Target,
    *,
    microbatches: Sequence[int] = (1, 4, 16),
    tensors: Sequence[int] = (1,),
    pipelines: Sequence[int] = (1,),
) -> list[Candidate]:
    """All combinations of strategy, mesh and microbatches, for `fit`.

    Args:
      target: the devices.
      microbatches: numbers of microbatches to try.
      tensors, pipelines: sizes of those axes to try; those that the devices do not allow are skipped.
    """
    found: list[Candidate] = []
    for m, tensor, pipeline in itertools.product(microbatches, tensors, pipelines):
        if target.num_devices % (tensor * pipeline):
            continue
        if tensor == pipeline == 1:
            found += side_by_side(target, m)
            continue
        data = target.num_devices // (tensor * pipeline)
        levels = (1, 2, 3) if data > 1 else (0,)
        found += [Candidate("hybrid", data, tensor, pipeline, zero=level, microbatches=m) for level in levels]
    return found
