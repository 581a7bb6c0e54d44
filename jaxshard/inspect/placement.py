"""Draws as text which part of each leaf is on which device, only from specs and axis sizes."""

import itertools
import math
from typing import Any

import jax
import numpy as np

from jaxshard.base.tree import named_leaves
from jaxshard.base.types import AnyMesh, axes_in

_Part = tuple[tuple[int, int, bool], ...]  # for each dim: start, stop, and whether they span the whole dim


def picture(tree: Any, *, width: int = 120) -> str:
    """Draws each leaf's placement: a row per leaf, a column per device, and in each cell the part that it holds.

    A row is two lines: the leaf's path, shape and spec; then its parts as index slices, such as "0:64, :". Neighbours
    with the same part share a cell. Devices with the same parts of every leaf share a column, headed "0-3" or "0,4".
    If not all columns fit, the middle ones are omitted, with a note.

    Args:
        tree: a pytree of arrays or `jax.ShapeDtypeStruct`s, each with a `NamedSharding`, all on one mesh. An
            `AbstractMesh` needs no devices, and numbers them in mesh order; a `Mesh` has its devices' ids.
        width: the most characters in a line of cells, if two columns fit.

    Raises:
        ValueError: if a leaf has no `NamedSharding`, is on a different mesh than the first, or does not divide.

    >>> mesh = jax.sharding.AbstractMesh((2, 2), ("replica", "data"))
    >>> sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    >>> print(picture({"w": jax.ShapeDtypeStruct((8, 3), "float32", sharding=sharding)}))
    device
    |  0,2   |  1,3   |
    w  (8, 3)  P('data')
    | 0:4, : | 4:8, : |
    """
    leaves = [("/".join(names) or "(the only leaf)", leaf) for names, leaf in named_leaves(tree)]
    if not leaves:
        return "no leaves"
    ids = _device_ids(leaves)
    parts = [_parts(path, leaf) for path, leaf in leaves]  # by leaf, then by device
    columns: dict[tuple[_Part, ...], list[int]] = {}
    for position, held in enumerate(zip(*parts, strict=True)):
        columns.setdefault(held, []).append(ids[position])
    heads = [_ranges(sorted(devices)) for devices in columns.values()]
    rows = [[_in_words(held[i]) for held in columns] for i in range(len(leaves))]
    cell = max(map(len, (*heads, *(text for row in rows for text in row))))
    shown = _shown(len(heads), max(2, (width - 1) // (cell + 3)))
    lines = ["device" + (f" ({len(heads) - len(shown) + 1} columns left out)" if None in shown else "")]
    lines.append(_line(heads, shown, cell, merge=False))
    for (path, leaf), row in zip(leaves, rows, strict=True):
        spec = ", ".join(map(repr, leaf.sharding.spec))
        lines += [f"{path}  {tuple(leaf.shape)}  P({spec})", _line(row, shown, cell, merge=True)]
    return "\n".join(lines)


def _device_ids(leaves: list[tuple[str, Any]]) -> list[int]:
    """The device ids in mesh order; checks that all leaves are on one mesh."""
    meshes = []
    for path, leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, jax.sharding.NamedSharding):
            raise ValueError(
                f"picture: {path} has {'no sharding' if sharding is None else f'a {type(sharding).__name__}'}, and "
                "needs a NamedSharding; place it on a mesh, or give a ShapeDtypeStruct with sharding="
            )
        meshes.append(sharding.mesh)
        if sharding.mesh != meshes[0] and _devices_of(sharding.mesh) != _devices_of(meshes[0]):
            raise ValueError(
                f"picture: {path} is on the mesh {sharding.mesh}, and {leaves[0][0]} on {meshes[0]}; draw them "
                "separately"
            )
    return _devices_of(meshes[0])


def _devices_of(mesh: AnyMesh) -> list[int]:
    """The ids of a mesh's devices, in order."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return list(range(mesh.size))
    return [device.id for device in mesh.devices.flat]


def _parts(path: str, leaf: Any) -> list[_Part]:
    """Each device's part of a leaf, in mesh order."""
    sizes = dict(leaf.sharding.mesh.shape)
    coordinates = dict(zip(sizes, np.indices(tuple(sizes.values())).reshape(len(sizes), -1), strict=True))
    dims = []
    for size, entry in itertools.zip_longest(leaf.shape, leaf.sharding.spec):
        ways, block = 1, np.zeros(math.prod(sizes.values()), int)
        for axis in axes_in(entry):
            ways, block = ways * sizes[axis], block * sizes[axis] + coordinates[axis]
        if size is None or size % ways:
            raise ValueError(
                f"picture: {path} of shape {tuple(leaf.shape)} cannot be sharded as {leaf.sharding.spec} over {sizes}; "
                "each dim must be divisible by the axes that shard it"
            )
        step = size // ways
        dims.append([(i * step, (i + 1) * step, ways == 1) for i in block.tolist()])
    return list(zip(*dims, strict=True)) if dims else [()] * math.prod(sizes.values())


def _in_words(part: _Part) -> str:
    return ", ".join(":" if whole else f"{start}:{stop}" for start, stop, whole in part) or "()"


def _ranges(ids: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _shown(count: int, fit: int) -> list[int | None]:
    """The columns to draw; None stands for omitted ones."""
    if count <= fit:
        return list(range(count))
    return [*range(fit - 2), None, count - 1] if fit > 2 else [0, None, count - 1]


def _line(texts: list[str], shown: list[int | None], cell: int, merge: bool) -> str:
    """One line of cells; with `merge`, equal neighbours share one."""
    left_out = {text for i, text in enumerate(texts) if i not in shown}
    between = left_out.pop() if merge and len(left_out) == 1 else "..."
    cells = [between if i is None else texts[i] for i in shown]
    runs = [len(list(same)) for _, same in itertools.groupby(cells)] if merge else [1] * len(cells)
    starts = [sum(runs[:i]) for i in range(len(runs))]
    drawn = [f" {cells[at]:^{(cell + 3) * n - 3}} " for at, n in zip(starts, runs, strict=True)]
    return "|" + "|".join(drawn) + "|"
