"""The global view: lays out, copies and gathers trees of whole arrays over a mesh; XLA partitions them."""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard import collectives
from jaxshard.base.tree import is_key, is_traced
from jaxshard.base.types import AnyMesh, Dims, T, Tree, sharding_on
from jaxshard.collectives.blocks import shard_map as shard_map


def is_explicit(mesh: AnyMesh) -> bool:
    """Whether the mesh's axes are Explicit, as those of `jax.make_mesh` are."""
    return all(kind == AxisType.Explicit for kind in mesh.axis_types)


def at(tree: T, mesh: AnyMesh, specs: Tree, *, traced: bool = False, split: frozenset[str] = frozenset()) -> T:
    """`tree` laid out by `specs` (a tree of the same structure), on a mesh with the parts of `split`; values stay.

    If a leaf is traced, or `traced` is set, each leaf gets a sharding constraint. Otherwise an array is copied if its
    sharding differs, and returned itself if not.
    """
    traced = traced or is_traced(tree)
    return jax.tree.map(lambda x, spec: _at(x, sharding_on(mesh, spec, split=split), traced), tree, specs)


def on(tree: T, mesh: AnyMesh, froms: Tree, tos: Tree) -> T:
    """As `at(tree, mesh, tos)`, for a tree laid out by `froms`: in a trace, leaves that stay get no constraint."""
    if not is_traced(tree):
        return at(tree, mesh, tos)
    return jax.tree.map(lambda x, a, b: x if a == b else _at(x, sharding_on(mesh, b), True), tree, froms, tos)


def moved(tree: T, mesh: AnyMesh, froms: Tree, tos: Tree) -> T:
    """As `at(tree, mesh, tos)`; in a trace, `tree` itself is first laid out by `froms`.

    Otherwise XLA lays out `tree`, and the user's values computed from it, by `tos`: params would leave a scan sharded.
    """
    return on(_held_at(tree, mesh, froms, tos) if is_traced(tree) else tree, mesh, froms, tos)


def _held_at(tree: T, mesh: AnyMesh, specs: Tree, tos: Tree) -> T:
    """As `at(tree, mesh, specs)`, in a trace, for a tree that is then laid out by `tos`.

    If an array has two constraints in a row, XLA applies the second to its other users, too: `params + updates` would
    be sharded. So an identity shard_map separates the two.
    """
    tree = at(tree, mesh, specs)
    if is_explicit(mesh):
        return tree

    def held(x: jax.Array, spec: P, to: P) -> jax.Array:
        return x if spec == to else shard_map(lambda x: x, mesh=mesh, in_specs=(spec,), out_specs=spec)(x)

    return jax.tree.map(held, tree, specs, tos)


def lying_anywhere(tree: T, mesh: AnyMesh) -> T:
    """`tree`, left to XLA to lay out in any way; for traced arrays before a shard_map, or elsewhere.

    Otherwise XLA replicates an array if only a shard_map that takes it whole determines its layout: new params that a
    second loss takes as a further argument would leave the program replicated.
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


def auto_context(mesh: AnyMesh) -> contextlib.AbstractContextManager[object]:
    """In which a function is traced as within `globally`: all axes of an Explicit mesh are Auto."""
    if not is_explicit(mesh):
        return contextlib.nullcontext()
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    return jax.sharding.use_abstract_mesh(abstract.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto)))


def constrained(x: jax.Array, mesh: AnyMesh, spec: P) -> jax.Array:
    """`x`, which XLA lays out by `spec`; in a trace whose axes are all Auto, as within `globally`."""
    return lax.with_sharding_constraint(x, spec if is_explicit(mesh) else sharding_on(mesh, spec))


def whole_in_rows(x: jax.Array, mesh: AnyMesh) -> jax.Array:
    """`x`, replicated, in row-major layout; for use within `globally`."""
    if not is_traced(x):
        return lying_at(x, NamedSharding(x.sharding.mesh, P())) if isinstance(x.sharding, NamedSharding) else x
    return with_layout_constraint(constrained(x, mesh, P()), Layout(tuple(range(x.ndim))))


def laid_out(tree: T, shardings: Tree) -> T:
    """Concrete arrays laid out by `shardings`: each itself if it already is, else a copy."""
    return jax.tree.map(lying_at, tree, shardings)


def lying_at(x: Tree, sharding: NamedSharding) -> jax.Array:
    """`x` itself if it has an equivalent sharding, else a copy under `sharding`."""
    if isinstance(x, jax.Array) and (x.sharding == sharding or x.sharding.is_equivalent_to(sharding, x.ndim)):
        return x
    return copy_to(x, sharding)


def globally(
    fn: Callable[..., Tree], mesh: AnyMesh, out_specs: Tree, split: frozenset[str] = frozenset()
) -> Callable[..., Tree]:
    """`fn` in the global view: it takes whole logical arrays, XLA partitions it, `out_specs` lay out its results.

    JAX takes a constraint's mesh for that of a result: with `split`, the mesh of these axes' parts.
    """
    if not is_explicit(mesh):
        return lambda *args: at(fn(*args), mesh, out_specs, traced=is_traced(args), split=split)
    out_sharding = jax.tree.map(lambda spec: sharding_on(mesh, spec), out_specs)
    return jax.sharding.auto_axes(fn, axes=mesh.axis_names, out_sharding=out_sharding)


def copies_to(tree: T, shardings: Tree) -> T:
    """A copy of each leaf under its sharding, in new buffers, so that donating it leaves the caller's array alive.

    `jax.device_put(..., may_alias=False)` alone shares memory on CPU (jax 0.10 to 0.12): the first device's buffer when
    it replicates, and the memory of aligned NumPy arrays.
    """
    leaves, treedef = jax.tree.flatten(tree)
    tos: list[jax.sharding.Sharding] = treedef.flatten_up_to(shardings)
    at_once = [i for i, (x, to) in enumerate(zip(leaves, tos, strict=True)) if not is_key(x) and _is_sent(x, to)]
    # A copy of one's own may be shared. (`jnp.copy` would be compiled.)
    own = [np.array(x) if isinstance(x, np.ndarray) and _on_cpu(to) else x for x, to in zip(leaves, tos, strict=True)]
    sent = jax.device_put([own[i] for i in at_once], [tos[i] for i in at_once], may_alias=False)
    placed = dict(zip(at_once, sent, strict=True))
    for i, (x, to) in enumerate(zip(leaves, tos, strict=True)):
        placed[i] = _alone(placed[i], x) if i in placed else _copy_apart(x, to)
    return jax.tree.unflatten(treedef, [placed[i] for i in range(len(leaves))])


def copy_to(x: Tree, sharding: jax.sharding.Sharding) -> jax.Array:
    """As `copies_to`, for one array."""
    return copies_to([x], [sharding])[0]


def _is_sent(x: Tree, sharding: jax.sharding.Sharding) -> bool:
    """Whether `device_put` may send it: it would send a host's array to all processes, to compare it there."""
    return sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable)


def _on_cpu(sharding: jax.sharding.Sharding) -> bool:
    return next(iter(sharding.device_set)).platform == "cpu"


def _copy_apart(x: Tree, sharding: jax.sharding.Sharding) -> jax.Array:
    """A copy of a key, or of what each process has whole."""
    if is_key(x):
        return jax.random.wrap_key_data(copy_to(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    whole = np.array(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _alone(placed: jax.Array, x: Tree) -> jax.Array:
    """`placed`, or a copy if it shares buffers with the array of which it was made. (Traced code copies its inputs.)"""
    if not isinstance(x, jax.Array) or is_traced(placed):
        return placed
    return copied(placed) if x.size == 0 or buffers(x) & buffers(placed) else placed


def copied(x: jax.Array) -> jax.Array:
    """A true copy with the same sharding; under Explicit axes `jnp.copy` alone adds trailing Nones to its spec."""
    return jax.device_put(jnp.copy(x), x.sharding)


def buffers(x: jax.Array) -> set[int]:
    """The addresses of this process's buffers of `x`."""
    if is_key(x):
        x = jax.random.key_data(x)
    return {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards if x.size}


def first_buffer(x: jax.Array) -> int | None:
    """The address of this process's first buffer of `x`; None if it is empty."""
    if is_key(x):
        x = jax.random.key_data(x)
    return x.addressable_data(0).unsafe_buffer_pointer() if x.size else None


def gather_all(
    leaves: Sequence[jax.Array],
    mesh: AnyMesh,
    froms: Sequence[P],
    tos: Sequence[P],
    dims: Sequence[Dims],
    *,
    over: Sequence[jax.Array] | None = None,
) -> list[jax.Array]:
    """Gathers global arrays, laid out by `froms` and cut by `dims`, into layouts `tos`: one all-gather per cut leaf.

    Args:
      over: arrays under `tos` that are not used again. Stacks of layers are gathered layer by layer over these, so that
        at most one layer exists twice. (XLA for GPU gathers along the first dim in memory; it would gather a stack that
        is cut along another dim at once, and then transpose it.)
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
                    i: lax.dynamic_update_index_in_dim(whole[i], collectives.gather(part, dims[i]), layer, 0)
                    for i, part in parts.items()
                }

            found |= lax.fori_loop(0, length, one, {i: old[i] for i in stacks})
        return found | {i: collectives.gather(shards[i], dims[i]) for i in moved if i not in found}

    def of_moved(values: Sequence[T]) -> dict[int, T]:
        return {i: values[i] for i in moved}

    old, old_specs = ({}, {}) if over is None else (of_moved(over), of_moved(tos))
    in_specs, out_specs = (of_moved(froms), old_specs), of_moved(tos)
    whole = shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(of_moved(leaves), old)
    return [whole.get(i, leaf) for i, leaf in enumerate(leaves)]


def _stacks(arrays: Mapping[int, jax.Array], dims: Sequence[Dims]) -> dict[int, list[int]]:
    """First dim's size -> the indices of arrays with three dims or more whose first dim is not cut."""
    found: dict[int, list[int]] = {}
    for i, x in arrays.items():
        if x.ndim >= 3 and all(-dim != x.ndim for dim, _ in dims[i]):
            found.setdefault(x.shape[0], []).append(i)
    return found
