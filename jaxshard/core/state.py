"""Params and state at rest: places params, makes the state, makes copies equal, checks a state."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.axes import axes_in
from jaxshard.base.tree import check_alive, check_same_structure, is_traced, named_leaves, path_of, shape_of
from jaxshard.base.types import Params, T, Tree
from jaxshard.core import collectives
from jaxshard.core.layout import warn_if_awkward
from jaxshard.core.precision import ShardedState
from jaxshard.core.sharding import Setup
from jaxshard.mesh import check_has_devices
from jaxshard.processes import agreement


def place(setup: Setup, params: Params) -> Params:
    """A copy of the params at rest on the mesh; see `ShardedOptimizer.place`."""
    found = setup.strictly(params)
    if is_traced(params):
        return collectives.at(params, setup.mesh, found.param_specs)
    check_has_devices("place", setup.mesh)
    warn_if_awkward(found)
    check_alive("place: params", params)
    agreement.check_same_arrays("place", params)
    return jax.tree.map(collectives.copy_to, params, setup.param_shardings(params))


def init(setup: Setup, params: Tree) -> Tree:
    """The state, sharded from the start; see `ShardedOptimizer`."""
    if is_local(setup):
        raise ValueError("init inside shard_map would make one state per device; call it outside, on whole params")
    leaves, found = jax.tree.leaves(params), setup.with_state(params)
    shardings = setup.named(found.state_specs)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return jax.tree.map(shape_of, setup.abstract_state(params), shardings)
    make = collectives.globally(setup.plain_init, setup.mesh, found.state_specs)
    if is_traced(params):
        return make(collectives.at(params, setup.mesh, found.grad_specs))
    check_has_devices("init", setup.mesh)
    warn_if_awkward(found)
    check_alive("init: params", params)
    params = collectives.at(params, setup.mesh, found.param_specs)
    state = jax.jit(make, out_shardings=shardings)(params)
    taken = {address for leaf in jax.tree.leaves(params) for address in collectives.buffers(leaf)}
    return jax.tree.map(lambda x: collectives.copied(x) if collectives.buffers(x) & taken else x, state)


def is_local(setup: Setup) -> bool:
    """Whether this runs inside a shard_map over batch axes."""
    return bool(collectives.manual_axes() & set(setup.batch_axes))


def synchronize(setup: Setup, tree: T) -> T:
    """The tree with all copies of each array made equal; see `ShardedOptimizer.synchronize`."""
    for names, leaf in named_leaves(tree):
        if not isinstance(getattr(leaf, "sharding", None), NamedSharding):
            raise ValueError(f"synchronize: {path_of(names)} does not lie on a mesh; call `place` or `init` first")
    check_alive("synchronize", tree)
    leaves, treedef = jax.tree.flatten(tree)
    specs = tuple(leaf.sharding.spec for leaf in leaves)
    named = [{axis for entry in spec for axis in axes_in(entry)} for spec in specs]
    copied = [tuple(axis for axis in setup.mesh.axis_names if axis not in axes) for axes in named]

    def body(*shards: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(collectives.first_copy(x, axes) for x, axes in zip(shards, copied, strict=True))

    same = jax.shard_map(body, mesh=setup.mesh, in_specs=specs, out_specs=specs, check_vma=False)
    out_shardings = tuple(leaf.sharding for leaf in leaves)
    return jax.tree.unflatten(treedef, jax.jit(same, out_shardings=out_shardings)(*leaves))


def within_reach(setup: Setup, args: T) -> T:
    """The loss's further arguments; an array committed to other devices than the mesh's is copied to all of these."""
    if not any(isinstance(x, jax.Array) and x.committed for x in jax.tree.leaves(args)):
        return args
    mesh = check_has_devices("further arguments", setup.mesh)
    devices, everywhere = set(mesh.devices.flat), NamedSharding(mesh, P())

    def move(x: Tree) -> Tree:
        away = isinstance(x, jax.Array) and x.committed and x.sharding.device_set != devices
        return collectives.copy_to(x, everywhere) if away else x

    return jax.tree.map(move, args)


def check_state(who: str, state: Tree, expected: Tree) -> None:
    """Raises a ValueError for a state that was made by another optimizer, or under other options."""
    extended = isinstance(expected, ShardedState)
    if extended and not isinstance(state, ShardedState):
        raise ValueError(
            f"{who}: the state is plain optax's, and {', '.join(map(repr, expected.extra))} belong beside it, as "
            "options of this strategy ask: give jaxshard.ShardedState(state, opt.init(params).extra)"
        )
    if not extended and isinstance(state, ShardedState):
        raise ValueError(
            f"{who}: the state has {', '.join(map(repr, state.extra))} beside plain optax's, and no option of this "
            "strategy asks for them: give state.inner"
        )
    check_same_structure(f"{who}: the state", state, expected, "part of opt.init(params)")
    for (names, leaf), want in zip(named_leaves(state), jax.tree.leaves(expected), strict=True):
        dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(leaf), allow_extended_dtype=True)
        if want.ndim and jnp.issubdtype(want.dtype, jnp.inexact) and dtype != want.dtype:
            raise ValueError(
                f"{who}: the state's {path_of(names)} is {dtype}, and opt.init(params) makes it {want.dtype}: was "
                "it made under other options? Cast it with .astype"
            )
