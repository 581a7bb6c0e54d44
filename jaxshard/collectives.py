"""Moves params, gradients and state between devices.

Lookups, owners of matrices, tensor blocks, pipelines and digests have collectives of their own, beside what they do.

A leaf's `dims` say how it is cut: pairs (dim counted from the end, data axes), which also fit a slice of a stacked
leaf. In the local view (inside `jax.shard_map`) functions take this device's part; in the global view they take whole
arrays. In shapes, D is a dim's size and N the number of devices that cut it.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard import platforms
from jaxshard.base.axes import Dims, beyond
from jaxshard.base.axes import varying as varying
from jaxshard.base.tree import Names, is_key, is_traced
from jaxshard.base.types import AnyMesh, T, Tree

# The local view.


def gather(x: jax.Array, dims: Dims, *, invarying: bool = False) -> jax.Array:
    """(D/N, ...) on each device -> (D, ...) on all; `invarying` makes its type replicated, to leave a shard_map."""
    how = {"to": "invarying"} if invarying else {}
    for dim, axes in dims:

        def along(x: jax.Array, axes: Sequence[str], dim: int = dim) -> jax.Array:
            return lax.all_gather(x, tuple(axes), axis=x.ndim + dim, tiled=True, **how)

        x = _axis_by_axis(along, x, axes, axes[::-1])
    return x


def scatter_sum(x: jax.Array, dims: Dims) -> jax.Array:
    """A different (D, ...) on each device -> (D/N, ...), this device's part of the sum over the data axes."""
    for dim, axes in dims:

        def along(x: jax.Array, axes: Sequence[str], dim: int = dim) -> jax.Array:
            return _scatter_along(x, tuple(axes), x.ndim + dim)

        x = _axis_by_axis(along, x, axes, axes)
    return x


def _scatter_along(x: jax.Array, axes: Names, dim: int) -> jax.Array:
    """`scatter_sum` along one dim.

    On TPU that of 2-byte elements goes along another dim if the shards' last dim is an odd multiple of 128.
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

    Both ways move the same bytes. Among GPUs, one ring of all devices sends less from node to node.
    """
    if len(axes) == 1 or not platforms.here().axis_by_axis:
        return along(x, axes)
    for axis in order:
        x = along(x, (axis,))
    return x


def total(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum of `x` over the devices along `axes`; `x` itself if there are none."""
    return lax.psum(x, tuple(axes)) if axes else x


def own_part(x: jax.Array, dims: Dims, sizes: Mapping[str, int]) -> jax.Array:
    """(D, ...) -> (D/N, ...), this device's part; nothing moves."""
    for dim, axes in dims:
        part = x.shape[dim] // math.prod(sizes[axis] for axis in axes)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * part, part, axis=x.ndim + dim)
    return x


def varying_of_shape(x: jax.ShapeDtypeStruct) -> frozenset[str]:
    """As `varying`, for a shape that `jax.eval_shape` made."""
    kind = getattr(x, "manual_axis_type", None)
    return kind.varying if kind is not None else frozenset()


def vary(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """`x` with a type that varies over `axes`. No data moves, but each device's gradient of it is then partial."""
    missing = tuple(axis for axis in axes if axis not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_as(x: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """`x` with a type that varies over the axes over which `shape` does."""
    return vary(x, tuple(varying_of_shape(shape)))


def zeros(shapes: T) -> T:
    """Zeros of these shapes and dtypes, with types that vary over the same axes."""
    return jax.tree.map(lambda x: vary_as(jnp.zeros(x.shape, x.dtype), x), shapes)


@jax.custom_vjp
def whole_with_grad_apart(x: jax.Array) -> jax.Array:
    """`x`, a parameter that is not cut; its gradient goes through `_apart_from_its_dot`."""
    return x


whole_with_grad_apart.defvjp(lambda x: (x, None), lambda _, cotangent: (_apart_from_its_dot(cotangent),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def whole_with_scattered_grad(local: jax.Array, stand_in: jax.Array, dims: Dims, held: Dims) -> jax.Array:
    """The whole parameter; its gradient comes out reduce-scattered by `dims`, as the gradient of `stand_in`.

    `local` is a shard, cut by `held` and gathered here (ZeRO-3), or the whole parameter (ZeRO-2). The gradient of
    `local` itself is computed only if a caller differentiates through this function. `stand_in`, zeros of the shape of
    the gradient's shard, has the dtype in which gradients are reduced and accumulated.
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
    """`gradient`, but XLA for CPU cannot fold the transpose that autodiff puts after a weight's dot into that dot."""
    if gradient.ndim < 2 or not platforms.here().parts_from_dots:
        return gradient
    return jnp.swapaxes(lax.optimization_barrier(jnp.swapaxes(gradient, -1, -2)), -1, -2)


whole_with_scattered_grad.defvjp(_whole_forward, _whole_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def whole_with_summed_grad(whole: jax.Array, stand_in: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The whole parameter; its gradient, summed over `axes`, comes out as that of `stand_in`, in its dtype."""
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
    # Summed as whole numbers: adding zeros to floats would lose -0.0 and the payload of NaNs.
    bits = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    bits = lax.psum(jnp.where(lax.axis_index(tuple(axes)) == 0, bits, jnp.zeros_like(bits)), tuple(axes))
    return bits.astype(jnp.bool_) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(bits, x.dtype)


def shapes_of(fn: Callable[..., T], *args: Tree) -> T:
    """As `jax.eval_shape`, but its results can also be traced with where part of the mesh is left to XLA.

    There JAX (0.10 to 0.12) drops the mesh from the shapes, and then fails on the axes that their types name.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def at_home(x: Tree) -> Tree:
        if x.sharding is not None or not varying_of_shape(x):
            return x
        kind = getattr(x, "manual_axis_type", None)
        home = NamedSharding(mesh, P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home, weak_type=x.weak_type, manual_axis_type=kind)

    return jax.tree.map(at_home, jax.eval_shape(fn, *args))


# The global view.


def is_explicit(mesh: AnyMesh) -> bool:
    """Whether the mesh has Explicit axes, as `jax.make_mesh` makes them."""
    return all(kind == AxisType.Explicit for kind in mesh.axis_types)


def manual_axes() -> frozenset[str]:
    """The axes of the shard_map that this runs in; none outside of one."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def axis_size(axis: str) -> int:
    """The number of devices along a manual axis; 1 outside of `shard_map`, or if the mesh has no such axis."""
    return lax.axis_size(axis) if axis in manual_axes() else 1


def types_are_checked(axis: str) -> bool:
    """Whether JAX's types say which values differ over a manual axis; under `shard_map(check_vma=False)` none do."""
    return axis in varying(lax.axis_index(axis))


def at(tree: T, mesh: AnyMesh, specs: Tree, *, traced: bool = False) -> T:
    """`tree` laid out by `specs` (a tree of the same structure); values stay the same.

    If a leaf is traced, or `traced` is set, each leaf gets a sharding constraint. Otherwise an array whose sharding
    differs is copied, and any other is returned itself.
    """
    traced = traced or is_traced(tree)
    return jax.tree.map(lambda x, spec: _at(x, NamedSharding(mesh, spec), traced), tree, specs)


def on(tree: T, mesh: AnyMesh, froms: Tree, tos: Tree) -> T:
    """As `at(tree, mesh, tos)`, for a tree that lies under `froms`: in a trace, leaves that stay get no constraint."""
    if not is_traced(tree):
        return at(tree, mesh, tos)
    return jax.tree.map(lambda x, a, b: x if a == b else _at(x, NamedSharding(mesh, b), True), tree, froms, tos)


def moved(tree: T, mesh: AnyMesh, froms: Tree, tos: Tree) -> T:
    """As `at(tree, mesh, tos)`, and in a trace `tree` itself is laid out by `froms`.

    Otherwise XLA lays out `tree` by `tos` too, and what the user's program makes of it: params would leave a scan cut.
    """
    return on(_held_at(tree, mesh, froms, tos) if is_traced(tree) else tree, mesh, froms, tos)


def _held_at(tree: T, mesh: AnyMesh, specs: Tree, tos: Tree) -> T:
    """As `at(tree, mesh, specs)`, in a trace, for a tree that goes on to `tos`.

    Of two constraints, one after the other, XLA takes the second for whatever else uses the array: `params + updates`
    would be cut. So a shard_map that does nothing is between them.
    """
    tree = at(tree, mesh, specs)
    if is_explicit(mesh):
        return tree

    def held(x: jax.Array, spec: P, to: P) -> jax.Array:
        return x if spec == to else jax.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    return jax.tree.map(held, tree, specs, tos)


def lying_anywhere(tree: T, mesh: AnyMesh) -> T:
    """`tree`, which XLA may lay out in any way; for traced arrays on their way into a shard_map, or elsewhere.

    Otherwise XLA lays out an array that a shard_map takes whole, but that nothing else lays out, as a whole one: new
    params that a second loss takes as a further argument would leave the program whole.
    """

    def anywhere(x: Tree) -> Tree:
        if not is_traced(x) or not x.ndim or is_explicit(mesh):
            return x
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*[P.UNCONSTRAINED] * x.ndim)))

    return jax.tree.map(anywhere, tree)


def _at(x: Tree, sharding: NamedSharding, traced: bool) -> jax.Array:
    if not traced:
        return lying_at(x, sharding)
    if is_explicit(sharding.mesh):  # pyright: ignore[reportArgumentType]
        return jax.sharding.reshard(x, sharding)
    return lax.with_sharding_constraint(x, sharding)


def whole_in_rows(x: jax.Array, mesh: AnyMesh) -> jax.Array:
    """`x`, whole on each device, in the order of its rows; within `globally`."""
    if not is_traced(x):
        return lying_at(x, NamedSharding(x.sharding.mesh, P())) if isinstance(x.sharding, NamedSharding) else x
    x = lax.with_sharding_constraint(x, P() if is_explicit(mesh) else NamedSharding(mesh, P()))
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def laid_out(tree: T, shardings: Tree) -> T:
    """Concrete arrays laid out by `shardings`: each itself if it lies so already, else a copy."""
    return jax.tree.map(lying_at, tree, shardings)


def lying_at(x: Tree, sharding: NamedSharding) -> jax.Array:
    """`x` itself if it lies under an equivalent sharding, else a copy under `sharding`."""
    if isinstance(x, jax.Array) and (x.sharding == sharding or x.sharding.is_equivalent_to(sharding, x.ndim)):
        return x
    return copy_to(x, sharding)


def globally(fn: Callable[..., Tree], mesh: AnyMesh, out_specs: Tree) -> Callable[..., Tree]:
    """`fn` in the global view: it takes whole logical arrays, XLA partitions it, `out_specs` lay out its results."""
    if not is_explicit(mesh):
        return lambda *args: at(fn(*args), mesh, out_specs, traced=is_traced(args))
    out_sharding = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs)
    return jax.sharding.auto_axes(fn, axes=mesh.axis_names, out_sharding=out_sharding)


def copy_to(x: Tree, sharding: jax.sharding.Sharding) -> jax.Array:
    """A copy of `x` under `sharding`, in new buffers, so that donating it leaves the caller's array alive.

    `jax.device_put(..., may_alias=False)` alone shares memory on CPU (jax 0.10 to 0.12): the first device's buffer when
    it replicates, and the memory of aligned NumPy arrays.
    """
    if isinstance(x, jax.Array) and is_key(x):
        return jax.random.wrap_key_data(copy_to(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    if not sharding.is_fully_addressable and not (isinstance(x, jax.Array) and not x.is_fully_addressable):
        whole = np.array(x)  # `device_put` would send the whole array to all processes, to compare
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
    placed = jax.device_put(x, sharding, may_alias=False)
    if is_traced(placed):
        return placed  # a trace copies what it is given
    if isinstance(x, jax.Array):
        return copied(placed) if x.size == 0 or buffers(x) & buffers(placed) else placed
    start = np.asarray(x).ctypes.data
    if any(start <= address < start + placed.nbytes for address in buffers(placed)):
        return jax.device_put(np.array(x), sharding)  # of a copy that nobody else has; `jnp.copy` would be compiled
    return placed


def copied(x: jax.Array) -> jax.Array:
    """A true copy with the same sharding; under Explicit axes `jnp.copy` alone adds trailing Nones to its spec."""
    return jax.device_put(jnp.copy(x), x.sharding)


def buffers(x: jax.Array) -> set[int]:
    """The addresses of this process's buffers of `x`."""
    if is_key(x):
        x = jax.random.key_data(x)
    return {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards if x.size}


def gather_all(
    leaves: Sequence[jax.Array],
    mesh: AnyMesh,
    froms: Sequence[P],
    tos: Sequence[P],
    dims: Sequence[Dims],
    *,
    over: Sequence[jax.Array] | None = None,
) -> list[jax.Array]:
    """Gathers global arrays, laid out by `froms` and cut by `dims`, to lie under `tos`: an all-gather per cut leaf.

    Args:
      over: arrays under `tos` that are not used again. Stacks of layers are gathered layer by layer and written over
        these, so that no more than a layer is there twice. (XLA for GPU gathers along the first dim in memory. A stack
        that is cut along another it gathers whole, and then transposes.)
    """
    moved = [i for i, cuts in enumerate(dims) if cuts]
    if not moved:
        return list(leaves)

    def body(shards: dict[int, jax.Array], old: dict[int, jax.Array]) -> dict[int, jax.Array]:
        found: dict[int, jax.Array] = {}
        for length, stacks in _stacks(old, dims).items():

            def one(layer: jax.Array, whole: dict[int, jax.Array], stacks: Sequence[int] = stacks):
                parts = {i: lax.dynamic_index_in_dim(shards[i], layer, keepdims=False) for i in stacks}
                return {
                    i: lax.dynamic_update_index_in_dim(whole[i], gather(part, dims[i]), layer, 0)
                    for i, part in parts.items()
                }

            found |= lax.fori_loop(0, length, one, {i: old[i] for i in stacks})
        return found | {i: gather(shards[i], dims[i]) for i in moved if i not in found}

    def of_moved(values: Sequence[T]) -> dict[int, T]:
        return {i: values[i] for i in moved}

    old, old_specs = ({}, {}) if over is None else (of_moved(over), of_moved(tos))
    in_specs, out_specs = (of_moved(froms), old_specs), of_moved(tos)
    whole = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(
        of_moved(leaves), old
    )
    return [whole.get(i, leaf) for i, leaf in enumerate(leaves)]


def _stacks(arrays: Mapping[int, jax.Array], dims: Sequence[Dims]) -> dict[int, list[int]]:
    """The arrays of three dims or more whose first dim is not cut, by its size."""
    found: dict[int, list[int]] = {}
    for i, x in arrays.items():
        if x.ndim >= 3 and all(-dim != x.ndim for dim, _ in dims[i]):
            found.setdefault(x.shape[0], []).append(i)
    return found
