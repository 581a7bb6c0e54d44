"""Compiles for machines that you do not have: their devices, and the reports of programs compiled for them.

A `Machine` is named by a chip and its number: "v5e:2x4", "v5p:8x8x8", "h100:4x8" (4 nodes of 8), "cpu:8". `devices`
makes devices that exist only for the compiler; `report` compiles a program lowered for a mesh of them with the real TPU
or GPU compiler, on any machine, and runs nothing. See `jax.experimental.topologies`.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jax
from jax.experimental import topologies

from jaxshard.hardware.chips import ring_bytes
from jaxshard.hardware.machines import PACKAGES, READABLE, examples, topology_options
from jaxshard.hardware.machines import Machine as Machine
from jaxshard.hardware.machines import machine as machine
from jaxshard.inspect import hlo, reports, traffic
from jaxshard.inspect.reports import Report
from jaxshard.inspect.reports import report as report_of
from jaxshard.system import files, small_files
from jaxshard.system.users_lines import warn

__all__ = ["CompilerMissingError", "Machine", "compiled", "devices", "machine", "report"]

_MOST_BYTES = 2**28  # of a stored report


class CompilerMissingError(ImportError):
    """The compiler for this platform is not installed; the message has the command that installs it."""


def devices(machine: Machine) -> list[Any]:
    """The devices of a machine, for `jaxshard.make_mesh(devices=...)` and `jax.sharding.Mesh`.

    TPU and GPU devices made so cannot hold arrays: lower a jitted function for `ShapeDtypeStruct`s with shardings on a
    mesh of them, and compile. CPU devices are real: `jax.devices("cpu")`. JAX_PLATFORMS may be "cpu".

    Args:
        machine: as `machine` returns it.

    Returns:
        `machine.num_devices` devices.

    Raises:
        CompilerMissingError: if the TPU or GPU compiler is not installed.
        ValueError: if the compiler rejects the topology, there is no compiler (AMD), or JAX has too few CPU devices.
    """
    if machine.chip.platform == "cpu":
        return _cpu_devices(machine)
    options = topology_options(machine)
    _check_compiler(machine)
    try:
        with _libtpu_alone():
            described = topologies.get_topology_desc(**options)
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        raise ValueError(
            f"devices: the compiler rejects the topology {machine.name!r}: {error}; use a valid shape, for example "
            f"{examples(machine.chip.name)}"
        ) from None
    found = list(described.devices)
    assert len(found) == machine.num_devices, f"{machine.name} has {len(found)} devices"
    return found


def _cpu_devices(machine: Machine) -> list[Any]:
    found = jax.devices("cpu")
    if len(found) < machine.num_devices:
        raise ValueError(
            f"devices: {machine.name!r} needs {machine.num_devices} CPU devices, found {len(found)}; before JAX "
            f'starts, set jax.config.update("jax_num_cpu_devices", {machine.num_devices})'
        )
    return found[: machine.num_devices]


# The compilers: whether they are installed, and how they are loaded.


def _check_compiler(machine: Machine) -> None:
    platform = machine.chip.platform
    if not any(importlib.util.find_spec(package) for package in PACKAGES[platform]):
        raise CompilerMissingError(
            f"devices: {machine.name!r} needs the {platform.upper()} compiler, which is not installed: "
            f'pip install "jaxshard[aot-{platform}]"'
        )


@contextlib.contextmanager
def _libtpu_alone() -> Iterator[None]:
    """Sets libtpu's environment while it loads, so that it does not query the cloud for this machine's TPU, and loads
    even if another process has loaded it. (It locks /tmp/libtpu_lockfile, as a TPU serves one process; we use none.)
    """
    wanted = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any type; without these two, libtpu writes warnings
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def compiled(
    lowered: jax.stages.Lowered,
    machine: Machine,
    *,
    compiler_options: Mapping[str, str | float | bool] | None = None,
) -> jax.stages.Compiled:
    """Compiles a program for a machine, so that it can be read back as text.

    Args:
        lowered, machine, compiler_options: as for `report`.

    Returns:
        The compiled program. It can be run only if the machine is a CPU.

    Raises:
        jax.errors.JaxRuntimeError: as `report`.
    """
    return lowered.compile(compiler_options=_readable(machine, compiler_options) or None)


def _readable(machine: Machine, given: Mapping[str, str | float | bool] | None) -> dict[str, Any]:
    return {**READABLE.get(machine.chip.name, {}), **(given or {})}


# Reports, kept in files.


def report(
    lowered: jax.stages.Lowered,
    machine: Machine,
    *,
    compiler_options: Mapping[str, str | float | bool] | None = None,
) -> Report:
    """A program's cost on each device of a machine: compiles it, or reads the report of an earlier compilation.

    Reports are stored as JSON in $JAXSHARD_CACHE, or ~/.cache/jaxshard/reports. Their key is the program (with its
    shardings, donations, inputs and order of devices), the machine, and the versions of JAX, the compiler and
    `jaxshard.inspect`. An unreadable file is replaced.

    Args:
        lowered: `jax.jit(f).lower(...)` or `train_step(...).lower(...)`, on a mesh of `devices(machine)`.
        machine: the machine that it was lowered for.
        compiler_options: as for `Lowered.compile`. On v5p and v6e, lookups in large tables do not use the SparseCores
            unless you set so: programs that use them cannot be read back as text.

    Returns:
        The `Report`, as `inspect.report` makes it.

    Raises:
        TypeError: if `lowered` is not a lowered program.
        ValueError: if it was lowered for another platform than the machine's.
        jax.errors.JaxRuntimeError: if the compiler refuses the program; RESOURCE_EXHAUSTED if it does not fit.
    """
    if not isinstance(lowered, jax.stages.Lowered):
        raise TypeError(f"aot.report needs a lowered program, jax.jit(f).lower(...), got {type(lowered).__name__}")
    options = _readable(machine, compiler_options)
    path = _folder() / f"{_key(lowered, machine, options)}.json"
    with contextlib.suppress(OSError, ValueError):  # missing or incomplete
        return Report.from_dict(cast(Any, small_files.read_json(path, _MOST_BYTES)))
    found = report_of(lowered.compile(compiler_options=options or None))
    if found.platform != machine.chip.platform:
        raise ValueError(
            f"aot.report: the program was lowered for {found.platform}, and {machine.name!r} is a machine of "
            f"{machine.chip.platform}; lower it for arrays on a mesh of aot.devices(machine)"
        )
    _write(path, json.dumps(found.to_dict()))
    return found


def _folder() -> Path:
    return Path(os.environ.get("JAXSHARD_CACHE") or Path.home() / ".cache" / "jaxshard" / "reports")


def _key(lowered: jax.stages.Lowered, machine: Machine, options: Mapping[str, object]) -> str:
    """The report's name: a digest of everything that it depends on.

    A program's text lacks its unused arguments and the order of the devices, so these are added.
    """
    meshes = {_mesh_of(x) for x in jax.tree.leaves(lowered.out_info)} - {None}
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
    parts = [
        lowered.as_text(),
        str(lowered.in_avals),
        sorted(str([(d.platform, d.id) for d in mesh.devices.flat]) for mesh in meshes if mesh),
        machine.name,
        sorted(options.items()),
        [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        [_version(package) for package in packages],
        [inspect.getsource(module) for module in (reports, traffic, hlo, ring_bytes)],
    ]
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _mesh_of(result: object) -> jax.sharding.Mesh | None:
    mesh = getattr(getattr(result, "sharding", None), "mesh", None)
    return mesh if isinstance(mesh, jax.sharding.Mesh) else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _write(path: Path, text: str) -> None:
    """Writes a file atomically, even if another process writes it at the same time."""
    try:
        files.make_folder(path.parent)
        files.replace(path, text)
    except OSError as error:
        warn(f"aot.report: cannot store the report ({error}); set JAXSHARD_CACHE to a writable folder")
