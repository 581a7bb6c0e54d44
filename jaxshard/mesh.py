"""Device meshes, and the names of the axes that strategies shard over."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxshard.system.text import checks_names

__all__ = ["AXES", "abstract_mesh", "make_mesh"]

AXES = ("pipeline", "replica", "data", "tensor")


@checks_names
def make_mesh(
    *,
    data: int = -1,
    tensor: int = 1,
    pipeline: int = 1,
    replica: int = 1,
    devices: Sequence[Any] | None = None,
    slice_axes: str | tuple[str, ...] = (),
) -> Mesh:
    """Arranges the devices in a mesh with axes ("pipeline", "replica", "data", "tensor"), tensor innermost.

    Neighbours on the tensor axis exchange the most, so they get the closest devices. Slices of TPUs, and hosts or
    NVLink domains of GPUs, have slow links between them: these get replica, then pipeline, then data, never tensor.

    Args:
      data: the number of devices that share optimizer state, gradients and (zero3) parameters; -1: all the rest.
      tensor: the number of devices that share each layer.
      pipeline: the number of pipeline stages.
      replica: the number of replicas of the full `data` x `tensor` x `pipeline` mesh (`hsdp`).
      devices: the devices to use, by default `jax.devices()` (those of all processes).
      slice_axes: the axes over the links between slices, in place of this order: "data", or ("data", "tensor").

    Returns:
      A `jax.sharding.Mesh` of Auto axes.

    Raises:
      TypeError: something in `devices` is not a device.
      ValueError: the sizes' product is not the number of devices, or more than one size is -1; tensor would span
        slices; the slices do not divide the axes that `slice_axes` names.

    >>> dict(make_mesh(tensor=2).shape)
    {'pipeline': 1, 'replica': 1, 'data': 4, 'tensor': 2}
    """
    devices = jax.devices() if devices is None else _listed(devices)
    if not devices:
        raise ValueError("make_mesh: devices= is empty; give at least one device, or leave it out for all")
    given = {"pipeline": pipeline, "replica": replica, "data": data, "tensor": tensor}
    sizes, types = _inferred(given, len(devices)), (AxisType.Auto,) * len(AXES)
    slices = _slices(devices)
    if len(slices) > 1:
        return Mesh(_over_slices(sizes, slices, slice_axes), AXES, axis_types=types)
    return jax.make_mesh(tuple(sizes.values()), AXES, devices=devices, axis_types=types)


def _slices(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices by slice (TPU), or by NVLink domain or host (GPU): what has fast links within."""
    of = [(getattr(d, "partition_index", None), getattr(d, "slice_index", None)) for d in devices]
    place = 0 if len({partition for partition, _ in of}) > 1 else 1
    found: dict[Any, list[Any]] = {}
    for device, group in zip(devices, of, strict=True):
        found.setdefault(group[place], []).append(device)
    return [found[group] for group in sorted(found, key=lambda group: -1 if group is None else group)]


def _over_slices(sizes: dict[str, int], slices: list[list[Any]], asked: str | tuple[str, ...]) -> np.ndarray:
    """The devices in the shape of the mesh, each slice a block of it, as `create_hybrid_device_mesh` arranges them."""
    order = (asked,) if isinstance(asked, str) else asked or ("replica", "pipeline", "data")
    for axis in order:
        if axis not in AXES:
            raise ValueError(f"make_mesh: slice_axes={asked!r} has {axis!r}; give some of {', '.join(AXES)}")
    of_each = {len(devices) for devices in slices}
    outer: dict[str, int] = dict.fromkeys(AXES, 1)
    left = len(slices)
    for axis in order if len(of_each) == 1 else ():
        outer[axis] = math.gcd(sizes[axis], left)
        left //= outer[axis]
    if left == 1:
        inner = [sizes[axis] // outer[axis] for axis in AXES]
        blocks = np.empty(tuple(outer.values()), object)
        for place, devices in zip(np.ndindex(blocks.shape), slices, strict=True):
            blocks[place] = mesh_utils.create_device_mesh(inner, devices, allow_split_physical_axes=True)
        return np.block(blocks.tolist())
    flat = np.asarray([device for devices in slices for device in devices], object).reshape(tuple(sizes.values()))
    which = {device: i for i, devices in enumerate(slices) for device in devices}
    if asked or any(len({which[device] for device in row}) > 1 for row in flat.reshape(-1, sizes["tensor"])):
        many, each = len(slices), " or ".join(map(str, sorted(of_each)))
        wrong = f"slice_axes={asked!r} cannot split them" if asked else "tensor would span their slow links"
        raise ValueError(
            f"make_mesh: {' x '.join(f'{axis} {size}' for axis, size in sizes.items())} on {many} slices of {each} "
            f"devices: {wrong}. Choose sizes so that {many} divides replica x pipeline x data and tensor divides "
            f"{each}; or name the axes to split with slice_axes="
        )
    return flat


@checks_names
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
    """A mesh like `make_mesh`'s, without devices: enough to plan with; compiling and running need a real mesh.

    Args:
      num_devices: the number of devices that the mesh would have.
      data, tensor, pipeline, replica: as for `make_mesh`.
      platform: "cpu", "gpu" or "tpu": strategies behave differently on TPUs in a few ways.
      device_kind: the chip's name, with the sides of its torus if they are known: "v5p:8x8x8".

    Returns:
      A `jax.sharding.AbstractMesh` of Auto axes.

    Raises:
      ValueError: as `make_mesh`, or `num_devices` is below 1.

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


def with_auto_axes(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh with axes of type Auto."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        device = mesh.abstract_device
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types, abstract_device=device)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def axes_in_words(mesh: Mesh | AbstractMesh) -> str:
    """The axes larger than 1, with their sizes: "data 4 x tensor 2"."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """The platform of a mesh: "cpu", "gpu" (JAX's name for CUDA, too) or "tpu"."""
    if isinstance(mesh, AbstractMesh):
        return mesh.abstract_device.platform if mesh.abstract_device else "cpu"
    return mesh.devices.flat[0].platform


def platform_here() -> str:
    """The platform of the mesh in whose `shard_map` this is traced."""
    return platform_of(jax.sharding.get_abstract_mesh())


def torus_dims(mesh: Mesh | AbstractMesh) -> int:
    """The number of torus dims along which the mesh has two or more TPU chips; 0 if unknown."""
    if isinstance(mesh, AbstractMesh):
        kind = mesh.abstract_device.device_kind if mesh.abstract_device else ""
        sides = kind.partition(":")[2].split("x")
        return sum(side not in ("", "1") for side in sides)
    places = [device.coords for device in mesh.devices.flat if hasattr(device, "coords")]
    return sum(len(set(side)) > 1 for side in zip(*places, strict=True))


def check_has_devices(who: str, mesh: Mesh | AbstractMesh) -> Mesh:
    """The mesh; raises a ValueError for an abstract one, which cannot hold arrays."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(f"{who}: the mesh is abstract and has no devices; make one with jaxshard.make_mesh")
    return mesh


def check_context(who: str, mesh: Mesh | AbstractMesh) -> None:
    """Raises a ValueError if `jax.set_mesh` has set another mesh: JAX would apply every spec to that one's axes."""
    current = jax.sharding.get_abstract_mesh()
    if current.empty:
        return
    kinds = {} if current.manual_axes else {"types": lambda x: dict(zip(x.axis_names, x.axis_types, strict=True))}
    of = {"sizes": lambda x: dict(x.shape), **kinds, "devices": _ids}
    for what, read in of.items():
        other, own = read(_set_mesh() if what == "devices" else current), read(mesh)
        if other and own and other != own:
            raise ValueError(
                f"{who}: the mesh that jax.set_mesh has set has the axes' {what} {other}, and the optimizer's has "
                f"{own}: call this outside jax.set_mesh, or create the optimizer for that mesh"
            )


def _set_mesh() -> Mesh | None:
    """The mesh with devices that `jax.set_mesh` has set; None if there is none, or in a trace (JAX hides it)."""
    try:
        return jax.sharding.get_mesh()
    except ValueError:
        return None


def _ids(mesh: Mesh | AbstractMesh | None) -> list[int]:
    """The devices' ids, in mesh order; empty for an abstract mesh."""
    return [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) and not mesh.empty else []


def _listed(devices: object) -> list[Any]:
    """The devices as a list; raises a TypeError for anything else, such as their number."""
    found = list(devices) if isinstance(devices, Iterable) else [devices]
    for device in found:
        if not hasattr(device, "platform"):
            raise TypeError(
                f"make_mesh: devices={devices!r:.80} has {device!r:.80}, which is not a device; give some of "
                "jax.devices(), such as jax.devices()[:4]"
            )
    return found


def _inferred(given: dict[str, int], num_devices: int) -> dict[str, int]:
    """The sizes with the one -1 replaced; raises a ValueError that shows the whole equation."""
    equation = " x ".join(f"{axis} {'(the rest)' if size == -1 else size}" for axis, size in given.items())
    for axis, size in given.items():
        if not isinstance(size, int | np.integer) or size < -1 or size == 0:
            raise ValueError(
                f"make_mesh: {axis}={size!r} is not a valid size; give a positive integer, or -1 to infer it"
            )
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
