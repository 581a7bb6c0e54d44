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
    size_of,
    split_axes,
)


def are_blocks(dims: Dims) -> bool:
    """Whether parts of axes cut an array."""
    return any(is_part(name) for _, names in dims for name in names)


class Grid:
    """The blocks of an array that has `ndim` dims, cut by `dims`, inside a shard_map."""

    def __init__(self, dims: Dims, ndim: int):
        names = [name for _, each in dims for name in each]
        self.axes: Names = axes_of_parts(names)
        self.stacked: Dims = ((-ndim - 1, self.axes),)  # how the axes cut an array (N, d, ...)
        self._sizes = {axis: lax.axis_size(axis) for axis in self.axes}
        self._parts = in_parts(self.axes, axes_of_parts(filter(is_part, names)), self._sizes)
        assert sorted(names) == sorted(self._parts), dims
        self._counts = [size_of(part, self._sizes) for part in self._parts]
        by_dim = dict(dims)
        self._of_dims = [[self._parts.index(name) for name in by_dim.get(dim - ndim, ())] for dim in range(ndim)]

    def assembled(self, blocks: jax.Array) -> jax.Array:
        """(N, d, ...) -> (D, ...)."""
        num, shape = len(self._parts), blocks.shape[1:]
        order = [place for dim, parts in enumerate(self._of_dims) for place in (*parts, num + dim)]
        whole = [size * self._count(parts) for size, parts in zip(shape, self._of_dims, strict=True)]
        return blocks.reshape(*self._counts, *shape).transpose(order).reshape(whole)

    def split(self, x: jax.Array) -> jax.Array:
        """(D, ...) -> (N, d, ...)."""
        shape, places, rest = list[int](), dict[int, int](), list[int]()
        for size, parts in zip(x.shape, self._of_dims, strict=True):
            for part in parts:
                places[part] = len(shape)
                shape.append(self._counts[part])
            rest.append(len(shape))
            shape.append(size // self._count(parts))
        x = x.reshape(shape).transpose([*(places[i] for i in range(len(self._parts))), *rest])
        return x.reshape(-1, *x.shape[len(self._parts) :])

    def own(self, x: jax.Array) -> jax.Array:
        """(D, ...) -> (d, ...), this device's block, without communication."""
        left, here = lax.axis_index(self.axes), list[jax.Array]()
        for count in reversed(self._counts):
            here.insert(0, left % count)
            left = left // count
        for dim, parts in enumerate(self._of_dims):
            size, index = x.shape[dim] // self._count(parts), 0
            for part in parts:
                index = index * self._counts[part] + here[part]
            x = lax.dynamic_slice_in_dim(x, index * size, size, axis=dim) if parts else x
        return x

    def _count(self, parts: Sequence[int]) -> int:
        return math.prod(self._counts[part] for part in parts)


_TILE = (8, 128)


def in_tiles(blocks: jax.Array) -> jax.Array:
    """(N, d, ...) -> (rows, 128): the blocks one after the other, each filled up to whole tiles."""
    size = math.prod(blocks.shape[1:])
    return jnp.pad(blocks.reshape(-1, size), ((0, 0), (0, -size % math.prod(_TILE)))).reshape(-1, _TILE[1])


def out_of_tiles(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """(rows, 128) of one block -> the block, of this shape."""
    return rows.reshape(-1)[: math.prod(shape)].reshape(shape)


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
