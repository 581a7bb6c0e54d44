"""Moves params, gradients and state between devices.

Lookups, owners of matrices, tensor blocks, pipelines and digests have collectives of their own.

A leaf's `dims` say how it is cut: pairs (dim counted from the end, data axes), which also fit a slice of a stacked
leaf. This file is the local view (inside `jax.shard_map`): functions take this device's shard; in `global_view` they
take whole arrays. In shapes, D is a dim's size and N the number of devices that cut it.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard import platforms
from jaxshard.base.tree import is_key
from jaxshard.base.types import CUT_ALONG, Dims, Names, T, Tree, beyond, num_along
from jaxshard.base.types import varying as varying
from jaxshard.collectives import blocks


def part_of_rows(x: jax.Array, axis: str) -> jax.Array:
    """`x` with a mark, which vanishes in lowering: it is a part of rows that are cut along a mesh axis."""
    return checkpoint_name(x, f"{CUT_ALONG}{axis}") if axis in manual_axes() else x


def gather(x: jax.Array, dims: Dims, *, invarying: bool = False) -> jax.Array:
    """(D/N, ...) on each device -> (D, ...) on all; `invarying` makes its type replicated, to leave a shard_map."""
    if blocks.are_blocks(dims):
        grid = blocks.Grid(dims, x.ndim)
        return grid.assembled(gather(x[None], grid.stacked, invarying=invarying))
    how = {"to": "invarying"} if invarying else {}
    for dim, axes in dims:

        def along(x: jax.Array, axes: Sequence[str], dim: int = dim) -> jax.Array:
            return lax.all_gather(x, tuple(axes), axis=x.ndim + dim, tiled=True, **how)

        x = _axis_by_axis(along, x, axes, axes[::-1])
    return x


def scatter_sum(x: jax.Array, dims: Dims) -> jax.Array:
    """A different (D, ...) on each device -> (D/N, ...), this device's shard of the sum over the data axes."""
    if blocks.are_blocks(dims):
        grid = blocks.Grid(dims, x.ndim)
        return _scattered(grid.split(x), grid.stacked)
    for dim, axes in dims:

        def along(x: jax.Array, axes: Sequence[str], dim: int = dim) -> jax.Array:
            return _scatter_along(x, tuple(axes), x.ndim + dim)

        x = _axis_by_axis(along, x, axes, axes)
    return x


def _scattered(stack: jax.Array, dims: Dims) -> jax.Array:
    """A different (N, d, ...) on each device -> (d, ...), its block of the sum."""
    if not platforms.here().scatters_tiles:
        return scatter_sum(stack, dims)[0]
    (_, axes), *_ = dims
    rows = scatter_sum(blocks.in_tiles(stack), ((-2, axes),))
    return blocks.out_of_tiles(rows, stack.shape[1:])


def _scatter_along(x: jax.Array, axes: Names, dim: int) -> jax.Array:
    """`scatter_sum` along one dim.

    On TPU, 2-byte arrays are scattered along another dim if the shards' last dim is an odd multiple of 128.
    """
    shard = x.shape[dim] // math.prod(lax.axis_size(axis) for axis in axes)
    is_last = dim == x.ndim - 1 > 0
    if platforms.here().turns_narrow_scatters and is_last and x.dtype.itemsize == 2 and shard % 256 == 128:
        return _scatter_along(x.swapaxes(-1, -2), axes, dim - 1).swapaxes(-1, -2)
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def _axis_by_axis(
    along: Callable[[jax.Array, Sequence[str]], jax.Array], x: jax.Array, axes: Sequence[str], order: Sequence[str]
) -> jax.Array:
    """Runs `along` over `axes` (outermost first): on TPU over one after another, in `order`; elsewhere all at once.

    Both move the same bytes. On GPUs, one ring of all devices sends less between nodes.
    """
    if len(axes) == 1 or not platforms.here().axis_by_axis:
        return along(x, axes)
    for axis in order:
        x = along(x, (axis,))
    return x


def total(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum of `x` over the devices along `axes`; `x` itself if there are none."""
    return lax.psum(x, tuple(axes)) if axes else x


def of_first_device(keys: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The keys that the first device along `axes` has, on all devices."""
    if not axes:
        return keys
    data = jax.random.key_data(keys)
    mine = jnp.where(lax.axis_index(axes) == 0, data, jnp.zeros_like(data))
    return jax.random.wrap_key_data(total(mine, axes), impl=jax.random.key_impl(keys))


def own_part(x: jax.Array, dims: Dims, sizes: Mapping[str, int]) -> jax.Array:
    """(D, ...) -> (D/N, ...), this device's shard, without communication."""
    if blocks.are_blocks(dims):
        return blocks.Grid(dims, x.ndim).own(x)
    for dim, axes in dims:
        part = x.shape[dim] // num_along(axes, sizes)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * part, part, axis=x.ndim + dim)
    return x


def varying_of_shape(x: jax.ShapeDtypeStruct) -> frozenset[str]:
    """As `varying`, for a shape that `jax.eval_shape` made."""
    kind = getattr(x, "manual_axis_type", None)
    return kind.varying if kind is not None else frozenset()


def vary(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """`x` with a type that varies over `axes`. No data moves, but its gradient on each device is then partial."""
    missing = tuple(axis for axis in axes if axis not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_as(x: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """`x` with a type that varies over the same axes as `shape`, too."""
    return vary(x, tuple(varying_of_shape(shape)))


def zeros(shapes: T) -> T:
    """Zeros of these shapes and dtypes, with types that vary over the same axes."""
    return jax.tree.map(lambda x: vary_as(jnp.zeros(x.shape, x.dtype), x), shapes)


@jax.custom_vjp
def whole_with_grad_apart(x: jax.Array) -> jax.Array:
    """`x`, an uncut parameter; its gradient goes through `_apart_from_its_dot`."""
    return x


whole_with_grad_apart.defvjp(lambda x: (x, None), lambda _, cotangent: (_apart_from_its_dot(cotangent),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def whole_with_scattered_grad(local: jax.Array, stand_in: jax.Array, dims: Dims, held: Dims) -> jax.Array:
    """The whole parameter; its gradient comes out reduce-scattered by `dims`, as the gradient of `stand_in`.

    `local` is a shard, cut by `held` and gathered here (ZeRO-3), or the whole parameter (ZeRO-2). Its own gradient is
    computed only if a caller differentiates with respect to it. `stand_in`, the gradient slot, is zeros of the shape of
    the gradient's shard, in the dtype in which gradients are reduced and accumulated.
    """
    del stand_in, dims
    return gather(local, held)


def _whole_forward(local, stand_in, dims, held):
    return whole_with_scattered_grad(local, stand_in, dims, held), stand_in


def _whole_backward(dims, held, stand_in, cotangent):
    cotangent = _apart_from_its_dot(cotangent)
    as_held = scatter_sum(cotangent.astype(stand_in.dtype), held) if held else cotangent
    scattered = as_held if dims == held else scatter_sum(as_held.astype(stand_in.dtype), beyond(dims, held))
    return as_held.astype(cotangent.dtype), scattered


def _apart_from_its_dot(gradient: jax.Array) -> jax.Array:
    """`gradient`, behind a barrier: XLA for CPU must not fold autodiff's transpose into the dot before it."""
    if gradient.ndim < 2 or not platforms.here().parts_from_dots:
        return gradient
    return jnp.swapaxes(lax.optimization_barrier(jnp.swapaxes(gradient, -1, -2)), -1, -2)


whole_with_scattered_grad.defvjp(_whole_forward, _whole_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def whole_with_summed_grad(whole: jax.Array, stand_in: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The whole parameter; its gradient, summed over `axes`, comes out as the gradient of `stand_in`, in its dtype."""
    del stand_in, axes
    return whole


def _summed_backward(axes, stand_in, cotangent):
    cotangent = _apart_from_its_dot(cotangent)
    summed = total(cotangent.astype(stand_in.dtype), axes)
    return cotangent, vary(summed, tuple(varying(stand_in)))


whole_with_summed_grad.defvjp(lambda whole, stand_in, axes: (whole, stand_in), _summed_backward)


def first_copy(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Copies the bits of `x` on the first device along `axes` to all devices along them."""
    if not axes:
        return x
    if is_key(x):
        data = first_copy(jax.random.key_data(x), axes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(first_copy(x.real, axes), first_copy(x.imag, axes))
    # Summed as integers: adding zeros to floats would lose -0.0 and the payload of NaNs.
    bits = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    bits = lax.psum(jnp.where(lax.axis_index(tuple(axes)) == 0, bits, jnp.zeros_like(bits)), tuple(axes))
    return bits.astype(jnp.bool_) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(bits, x.dtype)


def shapes_of(fn: Callable[..., T], *args: Tree) -> T:
    """As `jax.eval_shape`, but one can trace with its results even if some mesh axes are left to XLA.

    In that case JAX (0.10 to 0.12) drops the mesh from the shapes, and then fails on the axes that their types name.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def on_mesh(x: Tree) -> Tree:
        if x.sharding is not None or not varying_of_shape(x):
            return x
        kind = getattr(x, "manual_axis_type", None)
        sharding = NamedSharding(mesh, P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type, manual_axis_type=kind)

    return jax.tree.map(on_mesh, jax.eval_shape(fn, *args))


def manual_axes() -> frozenset[str]:
    """The manual axes of the enclosing shard_map; none outside of one."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def axis_size(axis: str) -> int:
    """The number of devices along a manual axis; 1 outside of `shard_map`, or if the mesh has no such axis."""
    return lax.axis_size(axis) if axis in manual_axes() else 1


def types_are_checked(axis: str) -> bool:
    """Whether JAX's types track which values vary over a manual axis; not under `shard_map(check_vma=False)`."""
    return axis in varying(lax.axis_index(axis))
