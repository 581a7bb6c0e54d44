"""Params and state at rest: places params, makes the state, synchronizes copies, checks a state."""

import itertools
from collections.abc import Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard import collectives
from jaxshard.base.tree import (
    check_alive,
    check_same_structure,
    dtype_of,
    flatten,
    is_traced,
    matched,
    named_leaves,
    path_of,
    shape_of,
    shapes_of,
    structure,
)
from jaxshard.base.types import Params, State, T, Tree, axes_of
from jaxshard.collectives import global_view
from jaxshard.layout.frozen import trained as without_frozen
from jaxshard.layout.host_memory import HOST
from jaxshard.layout.layout import Layout, warn_if_awkward
from jaxshard.mesh import check_context, check_has_devices
from jaxshard.optimizer.inner.update import state_of_values
from jaxshard.optimizer.inner.whole_operands import with_whole_operands
from jaxshard.optimizer.precision import ShardedState
from jaxshard.optimizer.sharding import Setup
from jaxshard.processes import agreement


def place(setup: Setup, params: Params) -> Params:
    """A copy of the params at rest on the mesh; see `ShardedOptimizer.place`."""
    found = setup.strictly(params)
    if is_traced(params):
        return global_view.at(params, setup.mesh, found.param_specs)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        return jax.tree.map(shape_of, params, setup.param_shardings(params))
    check_has_devices("place", setup.mesh)
    warn_if_awkward(found)
    check_alive("place: params", params)
    with agreement.among(setup.mesh):
        agreement.check_same_arrays("place", params)
    return _copied_to(setup, params, found.param_specs, setup.param_shardings(params))


def init(setup: Setup, params: Tree) -> Tree:
    """The state, sharded from the start; see `ShardedOptimizer`."""
    check_context("init", setup.mesh)
    if is_local(setup):
        raise ValueError("init inside shard_map would create one state per device; call it outside, on the full params")
    if setup.why_no_shapes(params):
        return _init_by_values(setup, params)
    leaves, found = jax.tree.leaves(params), setup.with_state(params)
    shardings = setup.state_shardings(found)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return jax.tree.map(shape_of, setup.abstract_state(params), shardings)
    fragile, plain = setup.fragile_at_init(params), setup.plain_init
    if fragile:
        plain = with_whole_operands(plain, lambda x: global_view.whole_in_rows(x, setup.mesh), fragile)
    make = global_view.globally(plain, setup.mesh, found.state_specs, found.split)
    if is_traced(params):
        which, trained = setup.frozen(params), setup.trained(params)
        return make(global_view.moved(trained, setup.mesh, without_frozen(which, found.param_specs), found.grad_specs))
    _check_before_init(setup, params, found)
    params = global_view.at(params, setup.mesh, found.param_specs)
    made = make if global_view.is_explicit(setup.mesh) else plain  # else the shardings below say all
    state = jax.jit(made, out_shardings=shardings)(params)
    if is_traced((params, state)):  # a trace around concrete params; the state may have no leaves
        return state
    taken = set(
        map(global_view.first_buffer, jax.tree.leaves(params))
    )  # `jit` returns an input as it is, or a new array
    return jax.tree.map(lambda x: global_view.copied(x) if global_view.first_buffer(x) in taken else x, state)


def _init_by_values(setup: Setup, params: Tree) -> Tree:
    """The state of an init that cannot be traced: computed on the host, then sharded."""
    state = state_of_values(setup.plain_init, params, setup.why_no_shapes(params))
    found = setup.with_state(params, shapes_of(state))
    _check_before_init(setup, params, found)
    return _copied_to(setup, state, found.state_specs, setup.state_shardings(found))


def _copied_to(setup: Setup, tree: T, specs: Tree, shardings: Tree) -> T:
    """A copy of concrete arrays, laid out by `specs`, also within a trace."""
    placed = global_view.copies_to(tree, shardings)
    return global_view.at(placed, setup.mesh, specs) if is_traced(placed) else placed


def _check_before_init(setup: Setup, params: Tree, found: Layout) -> None:
    check_has_devices("init", setup.mesh)
    warn_if_awkward(found)
    check_alive("init: params", params)


def is_local(setup: Setup) -> bool:
    """Whether this runs inside a shard_map over batch axes."""
    return bool(collectives.manual_axes() & set(setup.batch_axes))


def synchronize(setup: Setup, tree: T) -> T:
    """The tree with all copies of each array made equal; see `ShardedOptimizer.synchronize`."""
    check_context("synchronize", setup.mesh)
    for names, leaf in named_leaves(tree):
        if not isinstance(getattr(leaf, "sharding", None), NamedSharding):
            raise ValueError(f"synchronize: {path_of(names)} is not on a mesh; call `place` or `init` first")
    check_alive("synchronize", tree)
    leaves, treedef = jax.tree.flatten(tree)
    specs = tuple(leaf.sharding.spec for leaf in leaves)
    named = [axes_of(spec) for spec in specs]
    on_host = [leaf.sharding.memory_kind == HOST for leaf in leaves]
    copied = [tuple(axis for axis in setup.mesh.axis_names if axis not in axes) for axes in named]

    def body(*shards: jax.Array) -> tuple[jax.Array, ...]:
        here = [
            jax.device_put(x, jax.memory.Space.Device) if far else x for x, far in zip(shards, on_host, strict=True)
        ]
        return tuple(collectives.first_copy(x, axes) for x, axes in zip(here, copied, strict=True))

    same = global_view.shard_map(body, mesh=setup.mesh, in_specs=specs, out_specs=specs, check_vma=False)
    out_shardings = tuple(leaf.sharding for leaf in leaves)
    return jax.tree.unflatten(treedef, jax.jit(same, out_shardings=out_shardings)(*leaves))


def within_reach(setup: Setup, args: T) -> T:
    """The loss's further arguments; an array committed to other devices is copied to all devices of the mesh."""
    if not any(isinstance(x, jax.Array) and x.committed for x in jax.tree.leaves(args)):
        return args
    mesh = check_has_devices("further arguments", setup.mesh)
    devices, everywhere = set(mesh.devices.flat), NamedSharding(mesh, P())

    def move(x: Tree) -> Tree:
        away = isinstance(x, jax.Array) and x.committed and x.sharding.device_set != devices
        return global_view.copy_to(x, everywhere) if away else x

    return jax.tree.map(move, args)


def check_state(who: str, setup: Setup, state: Tree, params: Tree) -> None:
    """Raises a ValueError for a state that was made by another optimizer, or under other options.

    A state is right if `init` makes its shapes and dtypes, or updates lead to them. If that is unknown (an init that
    reads values), nothing is refused.
    """
    expected = setup.expected_states(params)
    if expected:
        _check_codes(who, state, expected)
    if not expected or any(fits(state, one) for one in expected):
        return
    extended = isinstance(expected[0], ShardedState)
    if extended and not isinstance(state, ShardedState):
        raise ValueError(
            f"{who}: the state is plain optax's, but this strategy's options also need "
            f"{', '.join(map(repr, expected[0].extra))}: give jaxshard.ShardedState(state, opt.init(params).extra)"
        )
    if not extended and isinstance(state, ShardedState) and "scale" in state.extra:
        raise ValueError(
            f"{who}: its moments are in 8 bits, but this strategy's options do not ask for that: give "
            'moment_dtype="int8", or restart the moments with opt.init(params)'
        )
    if not extended and isinstance(state, ShardedState):
        raise ValueError(
            f"{who}: the state has {', '.join(map(repr, state.extra))} in addition to plain optax's, but this "
            "strategy's options do not need them: give state.inner"
        )
    if not _goes_on(setup, state, params, expected):
        refuse(f"{who}: the state", state, nearest(state, expected))


_CODES = (jnp.int8, jnp.uint8)


def _check_codes(who: str, state: Tree, expected: Sequence[Tree]) -> None:
    """Raises a ValueError if moments have 8 bits and should not, or the other way round: no cast helps."""
    want = nearest(state, expected)
    if structure(want) != structure(state):
        return
    for (names, leaf), other in zip(named_leaves(state), jax.tree.leaves(want), strict=True):
        if dtype_of(leaf) != other.dtype and (dtype_of(leaf) in _CODES or other.dtype in _CODES):
            raise ValueError(
                f"{who}: {path_of(names)} is {dtype_of(leaf)}, and opt.init(params) makes it {other.dtype}: moments in "
                "8 bits also have scales, so a cast cannot convert them; restart them with opt.init(params), or keep "
                "the options that the state was created with"
            )


def nearest(state: Tree, expected: Sequence[Tree]) -> Tree:
    """The expected state with this state's structure, or else the first."""
    return next((one for one in expected if structure(one) == structure(state)), expected[0])


def in_order(setup: Setup, **given: Tree) -> Tree:
    """The state among params, state and batch, with arrays for its Python numbers.

    Raises:
      TypeError: the three were given in another order: one that is not the state is the state of another one.
    """
    if not _is_state_of(setup, given["state"], given["params"]):
        for (params, one), (state, other) in itertools.permutations(given.items(), 2):
            if jax.tree.leaves(other) and _is_state_of(setup, other, one):
                raise TypeError(
                    f"train_step: the arguments are swapped: got the params as {params} and the state as {state}; "
                    "write step(params, state, batch)"
                )
    return with_arrays(setup, given["state"], given["params"])


def _is_state_of(setup: Setup, state: Tree, params: Tree) -> bool:
    try:
        return any(structure(state) == structure(one) for one in setup.expected_states(params))
    except Exception:  # of any type: most often a TypeError, for leaves that cannot be params
        return False


def with_arrays(setup: Setup, state: State, params: Tree) -> State:
    """The state with Python numbers (hyperparameters set by the user) as arrays of the expected dtypes."""
    if all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(state)):
        return state
    expected = nearest(state, setup.expected_states(params) or [shapes_of(state)])
    return matched(lambda x, want: x if hasattr(x, "shape") else jnp.asarray(x, want.dtype), state, expected)


def fits(state: Tree, expected: Tree, *, dtypes: bool = True) -> bool:
    """Whether structure, shapes and (but for scalars and whole numbers, which JAX converts) dtypes agree."""
    (leaves, treedef), (wanted, other) = flatten(state), flatten(expected)
    if treedef != other:
        return False
    return all(
        jnp.shape(x) == want.shape and not (dtypes and _differs(x, want))
        for x, want in zip(leaves, wanted, strict=True)
    )


def _differs(x: Tree, want: jax.ShapeDtypeStruct) -> bool:
    return bool(want.ndim) and jnp.issubdtype(want.dtype, jnp.inexact) and dtype_of(x) != want.dtype


def _goes_on(setup: Setup, state: Tree, params: Tree, expected: Sequence[Tree]) -> bool:
    """Whether plain optax accepts a state that neither `init` nor the first update makes.

    It does if an update keeps the dtypes in which this state differs, or if every update changes the state's leaves or
    shapes (a list that grows).
    """
    given = shapes_of(state)
    if any(fits(state, one, dtypes=False) for one in expected):
        after = setup.settled(params, given)
        return setup.is_traceable(params, given) and fits(given, after.state)
    grows = not fits(setup.settled(params, expected[1]).state, expected[1], dtypes=False)
    return grows and setup.is_traceable(params, given)


def refuse(who: str, state: Tree, expected: Tree, noun: str = "part of opt.init(params)") -> NoReturn:
    """Raises a ValueError that names how a state differs from the expected one, whose leaves are called `noun`."""
    check_same_structure(who, state, expected, noun)
    if structure(state) != structure(expected):
        raise ValueError(
            f"{who} has a different structure than opt.init(params); was it created by a different optimizer? Got "
            f"{structure(state)}, expected {structure(expected)}"
        )
    for (names, leaf), want in zip(named_leaves(state), jax.tree.leaves(expected), strict=True):
        if _differs(leaf, want):
            raise ValueError(
                f"{who}: {path_of(names)} is {dtype_of(leaf)}, and opt.init(params) makes it {want.dtype}, as updates "
                "do: was it created with different options? Cast it with .astype"
            )
    raise ValueError(f"{who} does not fit")
