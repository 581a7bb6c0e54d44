"""Machines by name: a chip and how many of it, "v5e:2x4", "v5p:8x8x8", "h100:4x8" (4 nodes of 8), "cpu:8"."""

import dataclasses
import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from jaxshard.hardware.chips import CHIPS, Chip, nearest

_GPU_EXAMPLES = "{0}:8 (a node of 8), {0}:4x8 (4 nodes of 8)"


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices that one program runs on.

    Attributes:
        name: the argument of `machine`.
        chip: the figures of each device.
        shape: the TPU torus, (nodes, GPUs of a node) or (GPUs,), or (devices,) of a CPU.
        num_devices: the product of `shape`. (JAX sees one device per chip, of v4 and v5p too.)
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    num_devices: int


def machine(name: str) -> Machine:
    """The machine of that name.

    Args:
        name: a chip (`chips.CHIPS`) and a shape: "v5e:2x4" and "v6e:16x16" (2-D torus), "v4:4x4x4" and "v5p:8x8x8" (3-D
            torus), "h100:8" (one node), "h100:4x8" (4 nodes of 8), "cpu:8" (simulated devices).

    Raises:
        ValueError: if the chip is not known, or no machine with it has that shape.

    >>> machine("h100:4x8").num_devices
    32
    """
    found = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", str(name))
    if not found or found[1] not in CHIPS:
        known = "; ".join(examples(known) for known in CHIPS)
        raise ValueError(f"machine: {name!r} {_misnomer(str(name))}; available: {known}")
    chip, shape = CHIPS[found[1]], tuple(map(int, found[2].split("x")))
    wrong = _misfit(chip, shape)
    if wrong:
        raise ValueError(f"machine: {name!r} {wrong}; write, for example, {examples(chip.name)}")
    return Machine(name, chip, shape, math.prod(shape))


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


def _misfit(chip: Chip, shape: tuple[int, ...]) -> str:
    """The error in a shape, or ""."""
    if chip.platform == "tpu":
        if len(shape) != chip.torus_dims:
            return f"has {len(shape)} dims; {chip.name} chips are joined in {chip.torus_dims} dims"
        if math.prod(shape) > chip.domain_size:
            return f"has {math.prod(shape)} chips; a {chip.name} pod has at most {chip.domain_size}"
    elif chip.platform == "gpu":
        if len(shape) > 2:
            return f"has {len(shape)} dims; give nodes x GPUs of a node, or the GPUs of one node"
        if (size := shape[len(shape) - 1]) > chip.domain_size:
            return f"has {size} GPUs in a node; a node has at most {chip.domain_size}"
    elif len(shape) > 1:
        return f"has {len(shape)} dims; give the number of simulated devices"
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
          cuda_compute_capability {{ major: {self.compute_capability} }}
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
    }
)
"""By chip. Source: openxla/xla, xla/backends/gpu/target_config/specs."""


def topology_options(machine: Machine) -> dict[str, str]:
    """The arguments of `jax.experimental.topologies.get_topology_desc` for a TPU or GPU machine.

    >>> topology_options(machine("v4:2x2x1"))
    {'platform': 'tpu', 'topology_name': 'v4:2x2x1', 'chip_config_name': 'megacore'}
    """
    chip = machine.chip
    if chip.platform == "gpu":
        nodes, size = (1, *machine.shape)[-2:]
        target = GPU_TARGETS[chip.name].text
        # Fast domains x hosts in each x GPUs of each host.
        return {"platform": "cuda", "topology_name": "", "topology": f"{nodes}x1x{size}", "target_config": target}
    return {"platform": "tpu", "topology_name": machine.name, **TOPOLOGY_OPTIONS.get(chip.name, {})}
