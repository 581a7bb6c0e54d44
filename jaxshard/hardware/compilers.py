"""What the TPU and GPU compilers must be told of chips that are not there, and where they need other options."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jaxshard.hardware.machines import Machine

PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"tpu": ("libtpu",), "gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin")}
)
"""The modules that hold each platform's compiler; one of them is enough."""

_NO_OFFLOAD: Mapping[str, str] = MappingProxyType({"xla_tpu_offload_gather_to_sparsecore": "false"})

READABLE: Mapping[str, Mapping[str, str]] = MappingProxyType({"v5p": _NO_OFFLOAD, "v6e": _NO_OFFLOAD})
"""Compiler options by chip, for programs that can be read back as text: those that use SparseCores cannot."""

TOPOLOGY_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"v4": MappingProxyType({"chip_config_name": "megacore"})}
)
"""Options of a chip's topology. JAX runs the two cores of a v4 as one device, and libtpu describes them apart."""


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """A GPU as its compiler knows it.

    Attributes:
        name: as the driver gives it.
        num_cores: streaming multiprocessors.
        units_per_core: float32 units of each core.
        core_shared_bytes: shared memory of a core, in bytes.
        block_shared_bytes: the most shared memory that one block of threads can have, in bytes.
        l2_bytes: size of the L2 cache, in bytes.
        clock_ghz: clock rate, in GHz.
        memory_bytes: size of its memory, in bytes, as the driver gives it.
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

    >>> from jaxshard.hardware.machines import machine
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
