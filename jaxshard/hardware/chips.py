"""The published peak figures of one device of each kind, and the bytes that a ring sends.

The figures are dense peaks: a real step reaches only a part of each.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from types import MappingProxyType

PAGED_BYTES = 24 * 10**6
"""Simulated devices return temporary memory above this size to the operating system: glibc's `M_MMAP_THRESHOLD` is at
most 32 MiB, and XLA for CPU takes about a third more than `predict` counts."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, as JAX counts devices: a GPU, or a TPU chip (v4 and v5p with their two cores as one).

    Attributes:
        name: as in `machines.machine`, such as "v5e".
        platform: JAX's name: "tpu", "gpu" or "cpu".
        memory_bytes: size of its memory (HBM), in bytes. The runtime keeps some of it for itself.
        flops: peak floating-point operations per second of dense matrix products, by the dtype of the operands.
            "float32" is JAX's default for it: one bfloat16 pass on TPU, TF32 on GPU.
        memory_bandwidth: bytes per second between it and its memory.
        link_bandwidth: bytes per second that it can send inside its fast domain, in one direction, all links together.
            GPU: half of NVLink's "total bandwidth", which counts both directions. TPU: half of the documented
            "bidirectional ICI bandwidth per chip", which is the sum over its 4 (2-D torus) or 6 (3-D torus) links; a
            ring along one axis of the torus uses 2 of them.
        domain_size: the number of devices that fast links join: 8 in an HGX node, 72 in an NVL72 rack; for TPU those of
            the largest pod, or of a slice of a machine of several.
        network_bandwidth: bytes per second that it can send to other domains, in one direction: its share of the
            host's network cards.
        collective_seconds: the latency of a collective of any size, in seconds; undocumented, so a rough value.
        source: the source of the figures.
        torus_dims: the number of torus dims of TPU chips, 2 or 3; 0 for others.
        machines: names of machines with it (`machines.machine`), for messages; () if they follow from its name.
        host_bandwidth: bytes per second between it and its host's memory, in one direction: PCIe's, for TPUs a guess.
        paging_bandwidth: bytes per second at which the operating system provides memory. It matters on simulated
            devices, which request temporary memory again in each step if it exceeds `PAGED_BYTES`.
        devices: the number of devices that JAX sees in each chip; the figures are those of one device.
    """

    name: str
    platform: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    domain_size: int
    network_bandwidth: float
    collective_seconds: float
    source: str
    torus_dims: int = 0
    machines: tuple[str, ...] = ()
    paging_bandwidth: float = math.inf
    host_bandwidth: float = math.inf
    devices: int = 1


def _peak(half: float, single: float) -> Mapping[str, float]:
    return {"bfloat16": half, "float16": half, "float32": single}


def _tpu(
    name: str, flops: float, memory: int, bandwidth: float, ici: float, pod: int, dcn: float, source: str, *toruses: str
) -> Chip:
    """`toruses` are examples, such as "2x4"."""
    machines = tuple(f"{name}:{torus}" for torus in toruses)
    dims = toruses[0].count("x") + 1
    peak, source = _peak(flops, flops), f"{source}; PCIe: no figure is documented, taken as 16 lanes of Gen3"
    return Chip(name, "tpu", memory, peak, bandwidth, ici, pod, dcn, 5e-6, source, dims, machines, host_bandwidth=16e9)


def _gpu(
    name: str,
    half: float,
    tf32: float,
    memory: float,
    bandwidth: float,
    link: float,
    nic: float,
    pcie: float,
    source: str,
    domain: int = 8,
) -> Chip:
    peak, examples = _peak(half, tf32), () if domain == 8 else (f"{name}:{domain}", f"{name}:{domain}*8")
    return Chip(
        *(name, "gpu", int(memory), peak, bandwidth, link, domain, nic, 20e-6, source),
        machines=examples,
        host_bandwidth=pcie,
    )


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            _tpu(
                *("v4", 275e12, 32 * 2**30, 1200e9, 300e9, 4096, 3.125e9),
                "cloud.google.com/tpu/docs/v4; ICI, 6 links of 50 GB/s: Jouppi et al. 2023, 'TPU v4', table 4; "
                "network: no figure is documented, taken as v5e's 25 Gb/s per chip",
                "4x4x4",
            ),
            _tpu(
                *("v5e", 197e12, 16 * 10**9, 819e9, 200e9, 256, 3.125e9),
                "cloud.google.com/tpu/docs/v5e (ICI 400 GB/s in both directions; network 6.4 Tb/s per pod of 256)",
                *("2x4", "16x16"),
            ),
            _tpu(
                *("v5p", 459e12, 95 * 2**30, 2765e9, 600e9, 8960, 6.25e9),
                "cloud.google.com/tpu/docs/v5p (ICI 1200 GB/s in both directions; network 50 Gb/s per chip)",
                *("2x2x1", "8x8x8"),
            ),
            _tpu(
                *("v6e", 918e12, 32 * 10**9, 1600e9, 400e9, 256, 12.5e9),
                "cloud.google.com/tpu/docs/v6e (ICI 800 GB/s in both directions; network 25.6 Tb/s per pod of 256)",
                *("2x4", "16x16"),
            ),
            dataclasses.replace(
                _tpu(
                    *("v7x", 1153.5e12, 96 * 2**30, 3690e9, 300e9, 18432, 6.25e9),
                    "cloud.google.com/tpu/docs/tpu7x, halved: JAX sees two devices in each chip (bfloat16; ICI 1200 "
                    "GB/s in both directions; network 100 Gb/s per chip; pods of 9,216 chips)",
                    *("2x2x1", "8x8x8"),
                ),
                devices=2,
            ),
            _gpu(
                *("a100", 312e12, 156e12, 80e9, 2039e9, 300e9, 25e9, 32e9),
                "NVIDIA A100 datasheet (SXM, 80 GB; NVLink 600 GB/s; PCIe 64 GB/s in both directions); DGX "
                "A100 datasheet (200 Gb/s NIC per GPU)",
            ),
            _gpu(
                *("h100", 989.5e12, 494.5e12, 80e9, 3.35e12, 450e9, 50e9, 64e9),
                "NVIDIA H100 datasheet (SXM, halved: it counts sparsity; NVLink 900 GB/s; PCIe 128 GB/s in "
                "both directions); DGX H100 datasheet (400 Gb/s NIC per GPU)",
            ),
            _gpu(
                *("h200", 989.5e12, 494.5e12, 141e9, 4.8e12, 450e9, 50e9, 64e9),
                "NVIDIA H200 datasheet (SXM, halved: it counts sparsity; NVLink 900 GB/s; PCIe 128 GB/s in "
                "both directions); DGX H200 datasheet (400 Gb/s NIC per GPU)",
            ),
            _gpu(
                *("b200", 2250e12, 1100e12, 180e9, 8e12, 900e9, 50e9, 64e9),
                "NVIDIA Blackwell architecture brief (HGX B200, dense; NVLink 1.8 TB/s; PCIe: as the H200); DGX B200 "
                "datasheet (1,440 GB and 64 TB/s for 8 GPUs, 400 Gb/s NIC per GPU)",
            ),
            _gpu(
                *("b300", 2250e12, 1125e12, 288e9, 8e12, 900e9, 100e9, 128e9),
                "NVIDIA HGX page (HGX B300, 8 GPUs: 36 PFLOPS of BF16 and 18 of TF32 with sparsity, 2.3 TB, 64 TB/s; "
                "NVLink 1.8 TB/s; network 1.6 TB/s in both directions); PCIe Gen6: 256 GB/s in both directions",
            ),
            _gpu(
                *("gb200", 2500e12, 1250e12, 186e9, 8e12, 900e9, 50e9, 225e9),
                "NVIDIA GB200 NVL72 page (72 GPUs: 360 PFLOPS of BF16, 180 of TF32 with sparsity, 13.4 TB, 576 TB/s; "
                "NVLink 1.8 TB/s); 400 Gb/s NIC per GPU; host: NVLink-C2C's 900 GB/s in both directions for 2 GPUs",
                domain=72,
            ),
            _gpu(
                *("gb300", 2500e12, 1250e12, 279e9, 8e12, 900e9, 100e9, 225e9),
                "NVIDIA GB300 NVL72 page (72 GPUs: 360 PFLOPS of BF16 and 180 of TF32 with sparsity, 20 TB, 576 TB/s; "
                "NVLink 1.8 TB/s; 800 Gb/s NIC per GPU); host: NVLink-C2C's 900 GB/s in both directions for 2 GPUs",
                domain=72,
            ),
            _gpu(
                *("mi300x", 1307.4e12, 653.7e12, 192e9, 5.3e12, 448e9, 50e9, 64e9),
                "AMD Instinct MI300X data sheet (dense; 7 Infinity Fabric links of 128 GB/s in both directions; PCIe "
                "Gen5); network: 400 Gb/s NIC per GPU, as its platforms have",
            ),
            _gpu(
                *("mi355x", 2516.6e12, 157.3e12, 288e9, 8e12, 537.6e9, 50e9, 64e9),
                "AMD Instinct MI355X data sheet (dense; no TF32: float32's own peak; 7 Infinity Fabric links of 153.6 "
                "GB/s in both directions; PCIe Gen5); network: 400 Gb/s NIC per GPU, as its platforms have",
            ),
            Chip(
                *("cpu", "cpu", 4 * 2**30, _peak(23.5e9, 23.5e9), 1.52e9, 1.1e9, 1024, 1.1e9, 3e-4),
                "no datasheet: for one of 8 simulated devices on two cores, fitted to the measured steps of "
                "benchmarks/fit_cases.py, so that plans for them rank",
                machines=("cpu:8",),
                paging_bandwidth=282e6,
            ),
        )
    }
)


def chip(name: str) -> Chip:
    """The chip of that name.

    Args:
        name: one of `CHIPS`: "v4", "v5e", "v5p", "v6e", "v7x", "a100", "h100", "h200", "b200", "b300", "gb200",
            "gb300", "mi300x", "mi355x", "cpu".

    Raises:
        ValueError: if the chip is unknown; the message has the nearest name, and lists all.

    >>> chip("v5e").flops["bfloat16"]
    197000000000000.0
    """
    if name not in CHIPS:
        likely = nearest(name)
        hint = f"; did you mean {likely}?" if likely else ""
        raise ValueError(f"chip: {name!r} is unknown; available: {', '.join(CHIPS)}{hint}")
    return CHIPS[name]


_KINDS = (
    ("NVIDIA H100 80GB HBM3", "h100"),
    (r"NVIDIA H200( 141GB HBM3e)?", "h200"),
    ("NVIDIA B200", "b200"),
    ("NVIDIA B300.*", "b300"),
    ("NVIDIA GB200", "gb200"),
    ("NVIDIA GB300", "gb300"),
    (".*Instinct MI300X.*", "mi300x"),
    (".*Instinct MI355X.*", "mi355x"),
    (r"NVIDIA A100-SXM4?-\d\dGB", "a100"),
    ("TPU v4", "v4"),
    ("TPU v5 lite|TPU v5e", "v5e"),
    ("TPU v5p?", "v5p"),
    ("TPU v6 lite|TPU v6e", "v6e"),
    ("TPU ?7x", "v7x"),
)
"""JAX's names of whole devices with known figures; a part of one (MIG) or another board has other figures."""


def chip_of(device_kind: str) -> Chip | None:
    """The chip with JAX's name `device_kind`; None if its figures are unknown.

    Args:
        device_kind: `jax.Device.device_kind`.

    >>> chip_of("NVIDIA H100 80GB HBM3").name, chip_of("TPU v5 lite").name, chip_of("NVIDIA H100 PCIe")
    ('h100', 'v5e', None)
    """
    return next((CHIPS[name] for kind, name in _KINDS if re.fullmatch(kind, device_kind)), None)


def nearest(name: str) -> str | None:
    """The chip whose name is most similar to a wrong one, or None.

    >>> nearest("H10")
    'h100'
    """
    return next(iter(difflib.get_close_matches(name.lower(), CHIPS, n=1, cutoff=0.7)), None)


def ring_bytes(kind: str, payload_bytes: int, group_size: int) -> float:
    """Bytes that each device sends in a collective, on a ring of g devices and for a payload of b bytes.

    The rings are those of ZeRO (Rajbhandari et al. 2020, section 7), after Thakur, Rabenseifner, Gropp, "Optimization
    of Collective Communication Operations in MPICH", 2005.

    An all-reduce sends 2(g-1)/g b, a permute b (from its busiest device), any other collective (g-1)/g b. One device
    alone (g = 1) sends 0 bytes.

    Args:
        kind: "all-reduce", "all-gather", ..., as `inspect.Collective.kind`.
        payload_bytes: b, as `inspect.Collective.bytes`.
        group_size: g, the number of devices that take part.

    >>> ring_bytes("all-reduce", 800, 8)
    1400.0
    """
    if group_size <= 1:
        return 0.0
    if kind == "collective-permute":
        return float(payload_bytes)
    factor = 2 if kind == "all-reduce" else 1
    return factor * (group_size - 1) * payload_bytes / group_size
