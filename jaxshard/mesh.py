"""Device meshes: the axes that strategies cut over, and the start of several processes."""

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxshard.processes.roll_call import roll_call

AXES = ("pipeline", "replica", "data", "tensor")


def make_mesh(
    *, data: int = -1, tensor: int = 1, pipeline: int = 1, replica: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """Arranges the devices in a mesh with axes ("pipeline", "replica", "data", "tensor"), tensor innermost.

    Neighbours on the tensor axis exchange the most, so they get the closest devices.

    Args:
      data: devices that share optimizer state, gradients and (zero3) parameters. -1: all that are left.
      tensor: devices that share single layers.
      pipeline: stages of layers.
      replica: copies of the whole `data` x `tensor` x `pipeline` arrangement (`hsdp`).
      devices: the devices to use, by default `jax.devices()` (those of all processes).

    Returns:
      A `jax.sharding.Mesh` of Auto axes.

    Raises:
      ValueError: the sizes' product is not the number of devices, or more than one size is -1.

    >>> dict(make_mesh(tensor=2).shape)
    {'pipeline': 1, 'replica': 1, 'data': 4, 'tensor': 2}
    """
    devices = list(jax.devices() if devices is None else devices)
    if not devices:
        raise ValueError("make_mesh: there are 0 devices; give at least one in devices=, or leave it out for all")
    given = {"pipeline": pipeline, "replica": replica, "data": data, "tensor": tensor}
    sizes = _inferred(given, len(devices))
    return jax.make_mesh(tuple(sizes.values()), AXES, devices=devices, axis_types=(AxisType.Auto,) * len(AXES))


def abstract_mesh(
    num_devices: int,
    *,
    data: int = -1,
    tensor: int = 1,
    pipeline: int = 1,
    replica: int = 1,
    platform: str = "cpu",
    device_kind: str = "",
) -> AbstractMesh:
    """`make_mesh` without devices: strategies take it, for plans; what is compiled or run needs a real mesh.

    Args:
      num_devices: how many there would be.
      data, tensor, pipeline, replica: as for `make_mesh`.
      platform: "cpu", "gpu" or "tpu": strategies do a few things otherwise on a TPU.
      device_kind: the chip's name, with the sides of its torus if they are known: "v5p:8x8x8".

    Raises:
      ValueError: as `make_mesh`.

    >>> abstract_mesh(4096, tensor=8).shape["data"]
    512
    """
    if num_devices < 1:
        raise ValueError(f"abstract_mesh: num_devices {num_devices} must be 1 or more")
    given = {"pipeline": pipeline, "replica": replica, "data": data, "tensor": tensor}
    sizes = _inferred(given, num_devices)
    device = AbstractDevice(device_kind=device_kind or platform, num_cores=None, platform=platform)
    types = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(tuple(sizes.values()), AXES, axis_types=types, abstract_device=device)


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """ "cpu", "gpu" (JAX's name for CUDA too) or "tpu"."""
    if isinstance(mesh, AbstractMesh):
        return mesh.abstract_device.platform if mesh.abstract_device else "cpu"
    return mesh.devices.flat[0].platform


def torus_dims(mesh: Mesh | AbstractMesh) -> int:
    """In how many dims TPU chips are joined: those in which there are two or more; 0 where that is not known."""
    if isinstance(mesh, AbstractMesh):
        kind = mesh.abstract_device.device_kind if mesh.abstract_device else ""
        sides = kind.partition(":")[2].split("x")
        return sum(side not in ("", "1") for side in sides)
    places = [device.coords for device in mesh.devices.flat if hasattr(device, "coords")]
    return sum(len(set(side)) > 1 for side in zip(*places, strict=True))


def check_has_devices(who: str, mesh: Mesh | AbstractMesh) -> Mesh:
    """The mesh; raises a ValueError for an abstract one, on which no array can lie."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(f"{who}: the mesh is abstract and has no devices; make one with jaxshard.make_mesh")
    return mesh


def _inferred(given: dict[str, int], num_devices: int) -> dict[str, int]:
    """The sizes with the one -1 replaced; raises with the whole equation."""
    equation = " x ".join(f"{axis} {size}" for axis, size in given.items())
    for axis, size in given.items():
        if not isinstance(size, int | np.integer) or size < -1 or size == 0:
            raise ValueError(f"make_mesh: {axis}={size!r} is no size; give a positive whole number, or -1 to infer it")
    unknown = [axis for axis, size in given.items() if size == -1]
    if len(unknown) > 1:
        raise ValueError(
            f"make_mesh: {' and '.join(unknown)} are both -1 in {equation} = {num_devices} devices; "
            "only one size can be inferred, give the others"
        )
    known = math.prod(size for size in given.values() if size != -1)
    if num_devices % known or (not unknown and known != num_devices):
        raise ValueError(
            f"make_mesh: {equation} does not make {num_devices} devices (the given sizes multiply to {known}); "
            "change a size, or pass the devices to use as `devices=`"
        )
    return {axis: num_devices // known if size == -1 else int(size) for axis, size in given.items()}


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    **options: Any,
) -> None:
    """Joins this process to the others of a run; call it first, once, in every process.

    Takes what is given, else JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, else what
    `jax.distributed` detects (Slurm, Open MPI, TPU pods, Kubernetes). A lone process needs no call and is left alone.

    Args:
      coordinator_address: "host:port" of process 0.
      num_processes: how many processes there are.
      process_id: which one this is, from 0.
      **options: passed on to `jax.distributed.initialize`; `initialization_timeout`, 300 seconds by default, is how
        long to wait for others.

    Raises:
      ValueError: some of the three are known and others not, a number is out of range, or processes disagree.
      TimeoutError: some processes did not come; it says which. (What JAX has detected by itself, JAX reports.)
      OSError: the coordinator's port is taken.
      RuntimeError: JAX runs already, or was initialized.
    """
    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count = num_processes if num_processes is not None else _from_environment("JAX_NUM_PROCESSES")
    rank = process_id if process_id is not None else _from_environment("JAX_PROCESS_ID")
    known = {"coordinator_address": address, "num_processes": count, "process_id": rank}
    if all(value is None for value in known.values()):
        _detect(options)
        return
    missing = [name for name, value in known.items() if value is None]
    if count == 1 and rank in (None, 0):
        return
    if missing:
        raise ValueError(f"initialize: {known} lacks {', '.join(missing)}; give all three, or none to detect them")
    assert count is not None
    assert rank is not None
    if not 0 <= rank < count:
        raise ValueError(f"initialize: process_id {rank} is not in 0 .. {count - 1} (num_processes {count})")
    if not jax.distributed.is_initialized():
        roll_call(str(address), count, rank, options.get("initialization_timeout", 300))
    jax.distributed.initialize(address, count, rank, **options)


def _from_environment(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"initialize: {name}={text!r} in the environment is no whole number") from None


def _detect(options: dict[str, Any]) -> None:
    """Lets JAX find its cluster; a machine that is part of none stays alone."""
    try:
        jax.distributed.initialize(**options)
    except ValueError as error:
        if "coordinator_address should be defined" not in str(error):
            raise
