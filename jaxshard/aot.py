"""Compiling for machines that are not here: their devices, and the reports of programs compiled for them.

A `Machine` is named by a chip and how many: "v5e:2x4", "v5p:8x8x8", "h100:4x8" (4 nodes of 8), "cpu:8". `devices` makes
devices that exist only for the compiler, and `report` compiles a program lowered for a mesh of them by the real TPU or
GPU compiler, on any machine. Nothing is run. See `jax.experimental.topologies`.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxshard.hardware.chips import CHIPS, Chip
from jaxshard.inspect import hlo, reports
from jaxshard.inspect.reports import Report
from jaxshard.inspect.reports import report as report_of

_EXAMPLES = {
    "v4": "v4:4x4x4",
    "v5e": "v5e:2x4, v5e:16x16",
    "v5p": "v5p:2x2x1, v5p:8x8x8",
    "v6e": "v6e:2x4, v6e:16x16",
    "cpu": "cpu:8",
}
_GPU_EXAMPLES = "{0}:8 (a node of 8), {0}:4x8 (4 nodes of 8)"


class CompilerMissingError(ImportError):
    """The compiler for this platform is not installed; the message has the command that installs it."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices that one program runs on.

    Attributes:
        name: as given to `machine`.
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
        ValueError: if the chip is not known, or the shape is none of a machine with it.

    >>> machine("h100:4x8").num_devices
    32
    """
    found = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", name) if isinstance(name, str) else None
    if not found or found[1] not in CHIPS:
        known = "; ".join(_examples(known) for known in CHIPS)
        raise ValueError(f"machine: {name!r} is no chip and shape; there are: {known}")
    chip, shape = CHIPS[found[1]], tuple(map(int, found[2].split("x")))
    wrong = _misfit(chip, shape)
    if wrong:
        raise ValueError(f"machine: {name!r} {wrong}; write, for example, {_examples(chip.name)}")
    return Machine(name, chip, shape, math.prod(shape))


def _examples(chip: str) -> str:
    return _EXAMPLES.get(chip, _GPU_EXAMPLES.format(chip))


def _misfit(chip: Chip, shape: tuple[int, ...]) -> str:
    """What is wrong with a shape, or ""."""
    if chip.platform == "tpu":
        dims = 3 if chip.name in ("v4", "v5p") else 2
        if len(shape) != dims:
            return f"has {len(shape)} dims; {chip.name} chips are joined in {dims} dims"
        if math.prod(shape) > chip.domain_size:
            return f"has {math.prod(shape)} chips; a {chip.name} pod has at most {chip.domain_size}"
    elif chip.platform == "gpu":
        if len(shape) > 2:
            return f"has {len(shape)} dims; give nodes x GPUs of a node, or the GPUs of one node"
        if shape[len(shape) - 1] > chip.domain_size:
            return f"has {shape[len(shape) - 1]} GPUs in a node; a node has at most {chip.domain_size}"
    elif len(shape) > 1:
        return f"has {len(shape)} dims; give the number of simulated devices"
    return ""


def devices(machine: Machine) -> list[Any]:
    """The devices of a machine, for `jaxshard.make_mesh(devices=...)` and `jax.sharding.Mesh`.

    Those of a TPU or GPU machine cannot hold arrays: lower a jitted function for `ShapeDtypeStruct`s with shardings on
    a mesh of them, and compile. Those of a CPU machine are real: `jax.devices("cpu")`. JAX_PLATFORMS may be "cpu".

    Args:
        machine: as `machine` returns it.

    Returns:
        `machine.num_devices` devices.

    Raises:
        CompilerMissingError: if the TPU or GPU compiler is not installed.
        ValueError: if the compiler refuses the topology, or there are fewer CPU devices.
    """
    if machine.chip.platform == "cpu":
        return _cpu_devices(machine)
    _check_compiler(machine)
    try:
        with _libtpu_alone():
            described = topologies.get_topology_desc(**_topology(machine))
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        raise ValueError(
            f"devices: the compiler refuses the topology {machine.name!r}: {error}; take a shape that exists, for "
            f"example {_examples(machine.chip.name)}"
        ) from None
    found = list(described.devices)
    assert len(found) == machine.num_devices, f"{machine.name} has {len(found)} devices"
    return found


def _cpu_devices(machine: Machine) -> list[Any]:
    found = jax.devices("cpu")
    if len(found) < machine.num_devices:
        raise ValueError(
            f"devices: {machine.name!r} needs {machine.num_devices} CPU devices, there are {len(found)}; before JAX "
            f'starts, set jax.config.update("jax_num_cpu_devices", {machine.num_devices})'
        )
    return found[: machine.num_devices]


def _topology(machine: Machine) -> dict[str, Any]:
    """The arguments of `get_topology_desc`."""
    if machine.chip.platform == "gpu":
        nodes, size = (1, *machine.shape)[-2:]
        target = _gpu_target(machine.chip.name)
        # Fast domains x hosts in each x GPUs of each host.
        return {"platform": "cuda", "topology_name": "", "topology": f"{nodes}x1x{size}", "target_config": target}
    one_device = {"chip_config_name": "megacore"} if machine.chip.name == "v4" else {}  # as JAX runs it, not per core
    return {"platform": "tpu", "topology_name": machine.name, **one_device}


# The compilers: whether they are there, and what they need to know.

_PACKAGES = {"tpu": ("libtpu",), "gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin")}


def _check_compiler(machine: Machine) -> None:
    platform = machine.chip.platform
    if not any(importlib.util.find_spec(package) for package in _PACKAGES[platform]):
        raise CompilerMissingError(
            f"devices: {machine.name!r} needs the {platform.upper()} compiler, which is not installed: "
            f'pip install "jaxshard[aot-{platform}]"'
        )


@contextlib.contextmanager
def _libtpu_alone() -> Iterator[None]:
    """While libtpu loads: it asks no cloud what machine this is, and other processes may have it loaded too.

    It takes one process at a time (/tmp/libtpu_lockfile), for the sake of a TPU that is not used here.
    """
    wanted = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any; without these two it writes warnings
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


# Of openxla/xla, xla/backends/gpu/target_config/specs: cores, units per core, shared memory per core and the most for
# one block, L2, clock (GHz), memory, its bandwidth, compute capability, and the name.
_GPUS = {
    "a100": (108, 64, 167936, 166912, 41943040, 1.41, 85100068864, 2039040000000, 8, "NVIDIA A100-SXM4-80GB"),
    "h100": (132, 128, 233472, 232448, 52428800, 1.98, 84942979072, 3352320000000, 9, "NVIDIA H100 80GB HBM3"),
    "h200": (132, 128, 233472, 232448, 52428800, 1.98, 151397597184, 4800000000000, 9, "NVIDIA H200 141GB HBM3e"),
    "b200": (148, 128, 233472, 232448, 132644864, 1.965, 191514411008, 7672320000000, 10, "NVIDIA B200"),
}


def _gpu_target(chip: str) -> str:
    """What the GPU compiler needs to know of a GPU that is not there: a GpuTargetConfigProto as text."""
    cores, units, shared, block, l2, clock, memory, bandwidth, major, name = _GPUS[chip]
    return f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
      shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {block}
      core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {bandwidth} l2_cache_size: {l2} device_memory_size: {memory}
      cuda_compute_capability {{ major: {major} }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }}
    device_description_str: "{name}" """


# Reports, kept in files named by what they are of.


_NO_OFFLOAD = {"xla_tpu_offload_gather_to_sparsecore": "false"}
READABLE: Mapping[str, dict[str, Any]] = {"v5p": _NO_OFFLOAD, "v6e": _NO_OFFLOAD}


def report(
    lowered: jax.stages.Lowered, machine: Machine, *, compiler_options: Mapping[str, Any] | None = None
) -> Report:
    """What a program costs each device of a machine: compiles it, or finds the report of an earlier compilation.

    Reports are kept as JSON in $JAXSHARD_CACHE, or ~/.cache/jaxshard/reports, by what was compiled (the program with
    its shardings and donations, its inputs, the order of devices), for which machine, and with which versions of JAX,
    the compiler and `jaxshard.inspect`. A file that cannot be read is made anew.

    Args:
        lowered: `jax.jit(f).lower(...)` or `train_step(...).lower(...)`, on a mesh of `devices(machine)`.
        machine: the machine that it was lowered for.
        compiler_options: as for `Lowered.compile`. On v5p and v6e lookups in large tables are kept off the SparseCores
            unless it says otherwise: programs that use them cannot be read back as text.

    Returns:
        The `Report`, as `inspect.report` makes it.

    Raises:
        TypeError: if `lowered` is not a lowered program.
        ValueError: if it was lowered for another platform than the machine's.
        jax.errors.JaxRuntimeError: if the compiler refuses the program; RESOURCE_EXHAUSTED where it does not fit.
    """
    if not isinstance(lowered, jax.stages.Lowered):
        raise TypeError(f"aot.report needs a lowered program, jax.jit(f).lower(...), got {type(lowered).__name__}")
    options = READABLE.get(machine.chip.name, {}) | dict(compiler_options or {})
    path = _folder() / f"{_key(lowered, machine, options)}.json"
    with contextlib.suppress(OSError, ValueError):  # not there, or not whole
        return Report.from_dict(json.loads(path.read_text()))
    compiled = lowered.compile(compiler_options=options or None)
    found = report_of(compiled)
    if found.platform != machine.chip.platform:
        raise ValueError(
            f"aot.report: the program was lowered for {found.platform}, and {machine.name!r} is a machine of "
            f"{machine.chip.platform}; lower it for arrays on a mesh of aot.devices(machine)"
        )
    _write(path, json.dumps(found.to_dict()))
    return found


def _folder() -> Path:
    return Path(os.environ.get("JAXSHARD_CACHE") or Path.home() / ".cache" / "jaxshard" / "reports")


def _key(lowered: jax.stages.Lowered, machine: Machine, options: Mapping[str, Any] | None) -> str:
    """The text lacks the arguments that the program does not use, and the order of the devices."""
    meshes = {_mesh_of(x) for x in jax.tree.leaves(lowered.out_info)} - {None}
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
    parts = [
        lowered.as_text(),
        str(lowered.in_avals),
        sorted(str([(d.platform, d.id) for d in mesh.devices.flat]) for mesh in meshes if mesh),
        machine.name,
        sorted((options or {}).items()),
        [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        [_version(package) for package in packages],
        [inspect.getsource(reports), inspect.getsource(hlo)],
    ]
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _mesh_of(result: Any) -> jax.sharding.Mesh | None:
    mesh = getattr(getattr(result, "sharding", None), "mesh", None)
    return mesh if isinstance(mesh, jax.sharding.Mesh) else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _write(path: Path, text: str) -> None:
    """Whole or not at all, whoever else writes it at the same time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(
            f"aot.report: cannot keep the report ({error}); set JAXSHARD_CACHE to a folder that can be written",
            stacklevel=3,
        )
