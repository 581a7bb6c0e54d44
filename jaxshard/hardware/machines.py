"""Machines by name: a chip and how many of it: "v5e:2x4", "v5e:16x16*4" (4 slices), "h100:4x8" (4 nodes of 8)."""

import dataclasses
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxshard.hardware.chips import CHIPS, Chip, nearest

_GPU_EXAMPLES = "{0}:8 (a node of 8), {0}:4x8 (4 nodes of 8)"


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices that one program runs on.

    Attributes:
        name: the argument of `machine`.
        chip: the figures of each device.
        shape: the TPU torus of a slice, (nodes, GPUs of a node) or (GPUs,), or (devices,) of a CPU.
        num_devices: of all slices. (JAX sees one device per chip, of v4 and v5p too, but two of v7x.)
        num_slices: the number of TPU slices, between which links are slow.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    num_devices: int
    num_slices: int = 1


def machine(name: str) -> Machine:
    """The machine of that name.

    Args:
        name: a chip (`chips.CHIPS`) and a shape: "v5e:2x4" and "v6e:16x16" (2-D torus), "v4:4x4x4" and "v5p:8x8x8" (3-D
            torus), "v5e:16x16*4" (4 slices of 16 x 16), "h100:8" (one node), "h100:4x8" or "h100:8*4" (4 nodes of 8),
            "gb200:72*8" (8 racks of 72), "cpu:8" (simulated devices).

    Raises:
        ValueError: if the chip is not known, or no machine with it has that shape.

    >>> machine("h100:4x8").num_devices
    32
    """
    found = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)(?:\*([1-9]\d*))?", str(name))
    if not found or found[1] not in CHIPS:
        known = "; ".join(examples(known) for known in CHIPS)
        raise ValueError(f"machine: {name!r} {_misnomer(str(name))}; available: {known}")
    chip, shape, times = CHIPS[found[1]], tuple(map(int, found[2].split("x"))), int(found[3] or 1)
    if wrong := _misfit(chip, shape, times):
        raise ValueError(f"machine: {name!r} {wrong}; write, for example, {examples(chip.name)}")
    if chip.platform == "gpu":
        return Machine(name, chip, shape if times == 1 else (times, *shape), math.prod(shape) * times)
    return Machine(name, chip, shape, math.prod(shape) * chip.devices * times, times)


def examples(chip: str) -> str:
    """Names of machines with this chip, for messages.

    >>> examples("v5p")
    'v5p:2x2x1, v5p:8x8x8'
    """
    return ", ".join(CHIPS[chip].machines) or _GPU_EXAMPLES.format(chip)


def _misnomer(name: str) -> str:
    """The error in a name that cannot be parsed."""
    chip = name.partition(":")[0]
    if chip in CHIPS or not re.fullmatch(r"\w*[a-zA-Z]\w*", chip):
        return "is not a chip and a shape"
    likely = nearest(chip)
    return f"has an unknown chip, {chip!r}" + (f" (did you mean {likely}?)" if likely else "")


def _misfit(chip: Chip, shape: tuple[int, ...], times: int) -> str:
    """The error in a shape, or ""; `times`: what follows a "*"."""
    if chip.platform == "tpu":
        if len(shape) != chip.torus_dims:
            return f"has {len(shape)} dims; {chip.name} chips are joined in {chip.torus_dims} dims"
        if math.prod(shape) > (most := chip.domain_size // chip.devices):
            return f"has {math.prod(shape)} chips in a slice; a {chip.name} pod has at most {most}"
    elif chip.platform == "gpu":
        if len(shape) > (2 if times == 1 else 1):
            return f"has {len(shape) + (times > 1)} dims; give nodes x GPUs of a node, or the GPUs of one node"
        if (size := shape[len(shape) - 1]) > chip.domain_size:
            return f"has {size} GPUs in a node; a node has at most {chip.domain_size}"
    elif times > 1 or len(shape) > 1:
        return f"has {len(shape) + (times > 1)} dims; give the number of simulated devices"
    return ""


# Descriptions of absent chips for the TPU and GPU compilers, and options that they need.


PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"tpu": ("libtpu",), "gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin")}
)
"""The modules that hold each platform's compiler; one of them is enough."""

_NO_OFFLOAD: Mapping[str, str] = MappingProxyType({"xla_tpu_offload_gather_to_sparsecore": "false"})

READABLE: Mapping[str, Mapping[str, str]] = MappingProxyType({"v5p": _NO_OFFLOAD, "v6e": _NO_OFFLOAD})
"""Chip -> compiler options for programs that can be read back as text; those that use SparseCores cannot."""

TOPOLOGY_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"v4": MappingProxyType({"chip_config_name": "megacore"})}
)
"""Chip -> topology options. JAX runs the two cores of a v4 as one device; libtpu describes two by default."""


_NAMES: Mapping[str, str] = MappingProxyType({"v7x": "tpu7x"})  # libtpu's, where it has another


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """A GPU as its compiler describes it.

    Attributes:
        name: the driver's name.
        num_cores: streaming multiprocessors.
        units_per_core: float32 units of each core.
        core_shared_bytes: shared memory of a core, in bytes.
        block_shared_bytes: the most shared memory that one block of threads can have, in bytes.
        l2_bytes: size of the L2 cache, in bytes.
        clock_ghz: clock rate, in GHz.
        memory_bytes: size of its memory, in bytes, according to the driver.
        memory_bandwidth: bytes per second between it and its memory.
        compute_capability: the major number.
        minor: the minor number.
    """

    name: str
    num_cores: int
    units_per_core: int
    core_shared_bytes: int
    block_shared_bytes: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int
    memory_bandwidth: int
    compute_capability: int
    minor: int = 0

    @property
    def text(self) -> str:
        """A `GpuTargetConfigProto` as text."""
        return f"""gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          shared_memory_per_block: 49152 shared_memory_per_core: {self.core_shared_bytes}
          shared_memory_per_block_optin: {self.block_shared_bytes}
          core_count: {self.num_cores} fpus_per_core: {self.units_per_core} clock_rate_ghz: {self.clock_ghz}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {self.memory_bandwidth} l2_cache_size: {self.l2_bytes}
          device_memory_size: {self.memory_bytes}
          cuda_compute_capability {{ major: {self.compute_capability} minor: {self.minor} }}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }}
        device_description_str: "{self.name}" """


_H100 = GpuTarget(
    "NVIDIA H100 80GB HBM3", 132, 128, 233472, 232448, 52428800, 1.98, 84942979072, 3352320000000, compute_capability=9
)

GPU_TARGETS: Mapping[str, GpuTarget] = MappingProxyType(
    {
        "a100": GpuTarget(
            *("NVIDIA A100-SXM4-80GB", 108, 64, 167936, 166912, 41943040, 1.41, 85100068864, 2039040000000),
            compute_capability=8,
        ),
        "h100": _H100,
        "h200": dataclasses.replace(
            _H100, name="NVIDIA H200 141GB HBM3e", memory_bytes=151397597184, memory_bandwidth=4800000000000
        ),
        "b200": GpuTarget(
            *("NVIDIA B200", 148, 128, 233472, 232448, 132644864, 1.965, 191514411008, 7672320000000),
            compute_capability=10,
        ),
        "gb200": GpuTarget(
            *("NVIDIA GB200", 152, 128, 233472, 232448, 135528448, 2.062, 197897748480, 7928064000000),
            compute_capability=10,
        ),
        "b300": GpuTarget(
            *("NVIDIA B300", 158, 128, 233472, 232448, 135528448, 1.965, 297021865984, 7936000000000),
            compute_capability=10,
            minor=3,
        ),
        "gb300": GpuTarget(
            *("NVIDIA GB300", 152, 128, 233472, 232448, 135528448, 2.07, 297021079552, 7928064000000),
            compute_capability=10,
            minor=3,
        ),
    }
)
"""By chip. Source: openxla/xla, xla/backends/gpu/target_config/specs."""


def topology_options(machine: Machine) -> dict[str, Any]:
    """The arguments of `jax.experimental.topologies.get_topology_desc` for a TPU or GPU machine.

    Raises:
      ValueError: no compiler for it is known.

    >>> topology_options(machine("v4:2x2x1"))
    {'platform': 'tpu', 'topology_name': 'v4:2x2x1', 'chip_config_name': 'megacore'}
    """
    chip = machine.chip
    if chip.platform == "gpu":
        if chip.name not in GPU_TARGETS:
            raise ValueError(
                f"machine: {machine.name!r} can be planned, but not compiled for: the GPU compiler here is CUDA's"
            )
        nodes, size = (1, *machine.shape)[-2:]
        of_host = size if chip.domain_size <= 8 else math.gcd(size, 4)
        topology = f"{nodes}x{size // of_host}x{of_host}"  # fast domains x hosts in each x GPUs of each host
        target = GPU_TARGETS[chip.name].text
        return {"platform": "cuda", "topology_name": "", "topology": topology, "target_config": target}
    torus, more = "x".join(map(str, machine.shape)), TOPOLOGY_OPTIONS.get(chip.name, {})
    slices = {} if machine.num_slices == 1 else {"num_slices": machine.num_slices}
    return {"platform": "tpu", "topology_name": f"{_NAMES.get(chip.name, chip.name)}:{torus}", **slices, **more}
