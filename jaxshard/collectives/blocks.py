"""Arrays that one mesh axis cuts along several dims, in blocks (`base.types`), inside and at the border of `shard_map`.

A collective runs over the axis, on blocks that are stacked along a new first dim: one reduce-scatter, one all-gather.
In shapes, D is a dim's size, d that of a block's, and N the number of blocks, one for each device.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxshard import platforms
from jaxshard.base.types import (
    AnyMesh,
    Dims,
    Names,
    Tree,
    axes_in,
    axes_of_parts,
    canonical,
    finer,
    in_parts,
    is_part,
    num_along,
    positions,
    size_of,
    split_axes,
)


def are_blocks(dims: Dims) -> bool:
    """Whether parts of axes cut an array."""
    return any(is_part(name) for _, names in dims for name in names)


class _Grid:
    """The blocks of an array that has `ndim` dims, cut by `dims`, inside a shard_map."""

    def __init__(self, dims: Dims, ndim: int):
        names = [name for _, each in dims for name in each]
        self.axes: Names = axes_of_parts(names)
        self.sizes = {axis: lax.axis_size(axis) for axis in self.axes}
        self.parts = in_parts(self.axes, axes_of_parts(filter(is_part, names)), self.sizes)
        assert sorted(names) == sorted(self.parts), dims
        self.counts = [size_of(part, self.sizes) for part in self.parts]
        by_dim = dict(dims)
        self.of_dims = [[self.parts.index(name) for name in by_dim.get(dim - ndim, ())] for dim in range(ndim)]

    def assembled(self, blocks: jax.Array) -> jax.Array:
        """(N, d, ...) -> (D, ...)."""
        num, shape = len(self.parts), blocks.shape[1:]
        order = [place for dim, parts in enumerate(self.of_dims) for place in (*parts, num + dim)]
        whole = [size * self._count(parts) for size, parts in zip(shape, self.of_dims, strict=True)]
        return blocks.reshape(*self.counts, *shape).transpose(order).reshape(whole)

    def split(self, x: jax.Array) -> jax.Array:
        """(D, ...) -> (N, d, ...)."""
        shape, places, rest = list[int](), dict[int, int](), list[int]()
        for size, parts in zip(x.shape, self.of_dims, strict=True):
            for part in parts:
                places[part] = len(shape)
                shape.append(self.counts[part])
            rest.append(len(shape))
            shape.append(size // self._count(parts))
        x = x.reshape(shape).transpose([*(places[i] for i in range(len(self.parts))), *rest])
        return x.reshape(-1, *x.shape[len(self.parts) :])

    def _count(self, parts: Sequence[int]) -> int:
        return math.prod(self.counts[part] for part in parts)


def gathered(x: jax.Array, dims: Dims, **how: Any) -> jax.Array:
    """(d, ...) on each device -> (D, ...) on all; `how` are arguments of `jax.lax.all_gather`."""
    grid = _Grid(dims, x.ndim)
    shape = x.shape
    for axes in [(axis,) for axis in reversed(grid.axes)] if platforms.here().axis_by_axis else [grid.axes]:
        x = lax.all_gather(x, axes, axis=0, tiled=False, **how)
    return grid.assembled(x.reshape(-1, *shape))


def scattered_sum(x: jax.Array, dims: Dims) -> jax.Array:
    """A different (D, ...) on each device -> (d, ...), this device's block of the sum over all."""
    grid = _Grid(dims, x.ndim)
    blocks = grid.split(x)
    if platforms.here().scatters_tiles:
        return _scattered_in_tiles(blocks, grid.axes)
    if not platforms.here().axis_by_axis or len(grid.axes) == 1:
        return lax.psum_scatter(blocks, grid.axes, scatter_dimension=0, tiled=False)
    blocks = blocks.reshape(*(grid.sizes[axis] for axis in grid.axes), *blocks.shape[1:])
    for axis in grid.axes:
        blocks = lax.psum_scatter(blocks, (axis,), scatter_dimension=0, tiled=False)
    return blocks


_TILE = (8, 128)


def _scattered_in_tiles(blocks: jax.Array, axes: Sequence[str]) -> jax.Array:
    """A different (N, d, ...) on each device -> (d, ...), its block of the sum, sent as rows of whole tiles."""
    shape, size = blocks.shape[1:], math.prod(blocks.shape[1:])
    rows = jnp.pad(blocks.reshape(-1, size), ((0, 0), (0, -size % math.prod(_TILE)))).reshape(-1, _TILE[1])
    for axis in axes:
        rows = lax.psum_scatter(rows, (axis,), scatter_dimension=0, tiled=True)
    return rows.reshape(-1)[:size].reshape(shape)


def own(x: jax.Array, dims: Dims) -> jax.Array:
    """(D, ...) -> (d, ...), this device's block, without communication."""
    axes = axes_of_parts(name for _, names in dims for name in names)
    sizes, here = {axis: lax.axis_size(axis) for axis in axes}, {axis: lax.axis_index(axis) for axis in axes}
    for dim, names in dims:
        size = x.shape[dim] // num_along(names, sizes)
        x = lax.dynamic_slice_in_dim(x, positions(names, here, sizes) * size, size, axis=x.ndim + dim)
    return x


# The border of a shard_map over the user's mesh.


def shard_map(
    body: Callable[..., Tree], *, mesh: AnyMesh | None, in_specs: Tree, out_specs: Tree, **how: Any
) -> Callable[..., Tree]:
    """`jax.shard_map`; its PartitionSpecs may name parts of the mesh's axes. `body` takes and returns blocks.

    Blocks cross its border stacked along a new first dim, cut by whole axes. A shard_map over the finer mesh stacks
    them, each device its own block, so that nothing moves.
    """
    if mesh is None or not any(map(split_axes, jax.tree.leaves((in_specs, out_specs)))):
        return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **how)

    def run(*args: Tree) -> Tree:
        outs_by: list[Tree] = []

        def on_blocks(*stacks: Tree) -> Tree:
            given = jax.tree.map(lambda x, spec: x[0] if split_axes(spec) else x, stacks, by_leaf)
            outs = body(*given)
            outs_by[:] = [_for_each(out_specs, outs)]
            return jax.tree.map(lambda x, spec: x[None] if split_axes(spec) else x, outs, outs_by[0])

        by_leaf = _for_each(tuple(in_specs), args)
        stacks = jax.tree.map(lambda x, spec: _stacked(x, mesh, spec, **how), args, by_leaf)
        specs = {
            "in_specs": jax.tree.map(lambda spec: _of_stack(mesh, spec), tuple(in_specs)),
            "out_specs": jax.tree.map(lambda spec: _of_stack(mesh, spec), out_specs),
        }
        outs = jax.shard_map(on_blocks, mesh=mesh, **specs, **how)(*stacks)
        return jax.tree.map(lambda x, spec: _unstacked(x, mesh, spec, **how), outs, outs_by[0])

    return run


def _for_each(specs: Tree, tree: Tree) -> Tree:
    """A PartitionSpec for each leaf of a tree, from a prefix of it."""
    return jax.tree.map(lambda spec, sub: jax.tree.map(lambda _: spec, sub), specs, tree)


def _of_stack(mesh: AnyMesh, spec: P) -> P:
    """The PartitionSpec of stacked blocks over the user's mesh; of another array, its own."""
    split = split_axes(spec)
    rest = [tuple(name for name in axes_in(entry) if not is_part(name)) for entry in spec]
    return canonical([tuple(axis for axis in mesh.axis_names if axis in split), *rest]) if split else spec


def _stacked(x: jax.Array, mesh: AnyMesh, spec: P, **how: Any) -> jax.Array:
    """(D, ...), laid out by `spec` -> (N, d, ...), each device's block; other arrays stay as they are."""
    return _on_finer(lambda x: x[None], x, mesh, spec, enters=True, **how) if split_axes(spec) else x


def _unstacked(x: jax.Array, mesh: AnyMesh, spec: P, **how: Any) -> jax.Array:
    """The inverse of `_stacked`."""
    return _on_finer(lambda x: x[0], x, mesh, spec, enters=False, **how) if split_axes(spec) else x


def _on_finer(
    fn: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    mesh: AnyMesh,
    spec: P,
    *,
    enters: bool,
    axis_names: set[str] | None = None,
    check_vma: bool = True,
) -> jax.Array:
    """`fn` on each device's block, in a shard_map over the finer mesh."""
    split, sizes = split_axes(spec), dict(mesh.shape)
    found = finer(mesh, split)
    of_stack = _of_stack(mesh, spec)
    of_stack = canonical([in_parts(axes_in(of_stack[0]), split, sizes), *of_stack[1:]])
    in_specs, out_specs = (spec, of_stack) if enters else (of_stack, spec)
    names = found.axis_names if axis_names is None else in_parts(axis_names, split, sizes)
    run = jax.shard_map(
        fn, mesh=found, in_specs=in_specs, out_specs=out_specs, axis_names=set(names), check_vma=check_vma
    )
    if jax.sharding.get_abstract_mesh().empty:
        return run(x)
    with jax.sharding.use_abstract_mesh(found.abstract_mesh):
        return run(x)  # `jax.set_mesh` has set the user's mesh
