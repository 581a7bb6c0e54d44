"""`Setup`: an optimizer, a mesh and a strategy, and the layouts that follow from them. Pure: no array moves."""

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxshard import platforms
from jaxshard.base.tree import by_shapes, named_leaves, shape_of, unflatten
from jaxshard.base.types import AnyMesh, T, Tree, processes_of, sharding_on
from jaxshard.layout import frozen
from jaxshard.layout.cutting import deal_leaf
from jaxshard.layout.host_memory import HOST
from jaxshard.layout.layout import Layout, Shardings, check_specs_used, layout_params, layout_state
from jaxshard.layout.options import Config
from jaxshard.optimizer import precision
from jaxshard.optimizer.inner import whole_matrices
from jaxshard.optimizer.inner.update import Settled, Start, Traced, first_state, settled, state_of_values, update_of
from jaxshard.optimizer.inner.whole_operands import ALL, FOURIER, fragile
from jaxshard.optimizer.precision import ShardedState


@dataclasses.dataclass(frozen=True)
class Setup:
    """The inner optimizer, the mesh, and the strategy with its options; derives layouts for given params.

    Params and states may be arrays or `ShapeDtypeStruct`s: answers depend only on structure, shapes and dtypes, and are
    cached by them.
    """

    inner: optax.GradientTransformation
    mesh: AnyMesh
    config: Config

    def __reduce__(self):
        if isinstance(self.mesh, AbstractMesh):
            return Setup, (self.inner, self.mesh, self.config)
        ids = np.vectorize(lambda device: device.id, otypes=[int])(self.mesh.devices)
        return _on_devices, (self.inner, ids, self.mesh.axis_names, self.mesh.axis_types, self.config)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of devices along each axis of the mesh."""
        return dict(self.mesh.shape)

    @property
    def processes(self) -> tuple[int, ...]:
        """The indices of the processes whose devices are in the mesh."""
        return processes_of(self.mesh)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which a batch is split, outermost first."""
        replica = (axis for axis in self.config.replica_axes if axis in self.mesh.shape)
        return (*replica, *self.config.data_axes)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The batch axes larger than 1: types vary over these, and gradients are summed over them."""
        return tuple(axis for axis in self.batch_axes if self.sizes[axis] > 1)

    @property
    def num_batch_shards(self) -> int:
        """The number of parts into which a batch is split."""
        return math.prod(self.sizes[axis] for axis in self.batch_axes)

    def frozen(self, params: Tree) -> list[bool]:
        """For each leaf of the params, whether it is frozen."""
        return frozen.flags(self.config.frozen, params)[0]

    def trained(self, params: Tree) -> Tree:
        """The params (or a tree like them) with an `optax.MaskedNode` in place of each frozen leaf."""
        return frozen.trained(self.frozen(params), params) if self.config.frozen is not None else params

    def with_frozen(self, tree: Tree, params: Tree, fill: Callable[[Tree], Tree]) -> Tree:
        """A tree like `params`: trained leaves from `tree`, and `fill(leaf)` for each frozen one."""
        if self.config.frozen is None:
            return tree
        return frozen.with_frozen(self.frozen(params), tree, params, fill)

    def layout(self, params: Tree) -> Layout:
        """Where params and gradients live."""
        return _layout(self, params)

    def dealt(self, params: Tree) -> Layout:
        """As `layout`, with `Leaf.home` set for each leaf whose state is cut into whole matrices."""
        return _dealt(self, params)

    def with_state(self, params: Tree, state: Tree | None = None) -> Layout:
        """As `dealt`, with the leaves of `state`, or of the state that `init` makes."""
        if state is None:
            state = self.abstract_state(params)
        return _with_state(self, (params, state))

    def strictly(self, params: Tree) -> Layout:
        """As `layout`, for the complete params: raises a ValueError for specs that match no leaf."""
        found = self.layout(params)
        check_specs_used(found)
        return found

    def shardings(self, params: Tree) -> Shardings:
        """Where params, gradients and state live, as `NamedSharding`s."""
        self.strictly(params)
        return _shardings(self, (params, self.abstract_state(params)))

    def param_shardings(self, params: Tree) -> Tree:
        """Where params live, as `NamedSharding`s."""
        return _param_shardings(self, params)

    def named(self, specs: T, split: frozenset[str]) -> T:
        """A tree of PartitionSpecs as `NamedSharding`s on the mesh, or on the finer one of these axes' parts."""
        return jax.tree.map(lambda spec: sharding_on(self.mesh, spec, split=split), specs)

    def state_shardings(self, found: Layout) -> Tree:
        """The `NamedSharding`s of a layout's state, with memory kinds."""
        leaves = [sharding_on(self.mesh, leaf.cut, _KINDS[leaf.memory], found.split) for leaf in found.state]
        return unflatten(found.state_treedef, leaves)

    def plain_init(self, params: Tree) -> Tree:
        """The state before sharding: `inner.init`'s, and the state that options add."""
        return precision.init(self.inner, self.trained(params), self.config)

    def abstract_state(self, params: Tree) -> Tree:
        """The shapes of the state that `init` makes; runs an init that reads values of its params.

        Raises:
          ValueError: the init needs values, and these params have none here.
        """
        start = _start(self, params)
        if not start.why:
            return start.state
        return jax.tree.map(shape_of, state_of_values(self.plain_init, params, start.why))

    def why_no_shapes(self, params: Tree) -> str:
        """Why `init` cannot be traced, so that only running it shows its state's shapes; "" if it can."""
        return _start(self, params).why

    def is_traceable(self, params: Tree, state: Tree) -> bool:
        """Whether an update of this state can be traced without further arguments."""
        return _update_of(self, (params, state)) is not None

    def fragile(self, params: Tree, state: Tree, *, traced: bool) -> frozenset[str]:
        """The operations in an update whose operands must not be cut; if unknown, all in a trace, else none."""
        found = _fragile(self, (params, state))
        if found is None:
            found = ALL if traced else frozenset()
        return self._where_it_runs(found)

    def fragile_at_init(self, params: Tree) -> frozenset[str]:
        """The same for `init`."""
        return self._where_it_runs(_start(self, params).fragile)

    def _where_it_runs(self, fragile: frozenset[str]) -> frozenset[str]:
        return fragile if platforms.of(self.mesh).transforms_whole_rows else fragile - FOURIER

    def settled(self, params: Tree, state: Tree) -> Settled:
        """The shapes of the state after an update of `state`; nearly all optimizers keep them."""
        return _settled(self, (params, state))

    def expected_states(self, params: Tree) -> list[Tree]:
        """The shapes that a state may have: those that `init` makes, and those after the first update.

        Empty if `init` reads values of its params.
        """
        start = _start(self, params)
        return [] if start.why else [start.state, self.settled(params, start.state).state]


_KINDS = {"device": None, "host": HOST}  # memory kinds, of `Leaf.memory`


@by_shapes
def _layout(setup: Setup, params: Tree) -> Layout:
    on = setup.sizes, platforms.of(setup.mesh).name
    found = layout_params(setup.config, params, *on)
    if setup.config.over_replicas(setup.sizes) == setup.config:
        return found
    dims = iter(_matrix_dims(setup, params))
    return layout_params(
        setup.config, params, *on, [not leaf.frozen and next(dims) is not None for leaf in found.params]
    )


def _matrix_dims(setup: Setup, params: Tree) -> list[tuple[int, ...] | None]:
    """For each trained leaf, the batch dims of its matrix operations in an update."""
    return whole_matrices.batch_dims(setup.inner, precision.widened(setup.config, setup.trained(params)))


@by_shapes
def _dealt(setup: Setup, params: Tree) -> Layout:
    found = setup.layout(params)
    if not any(leaf.dims and len(leaf.shape) > 1 for leaf in found.params):
        return found
    dims, further = iter(_matrix_dims(setup, params)), setup.config.over_replicas(setup.sizes)
    leaves = tuple(
        leaf
        if leaf.frozen
        else deal_leaf(leaf, next(dims), setup.sizes, further if leaf.over_replicas else setup.config, found.platform)
        for leaf in found.params
    )
    return dataclasses.replace(found, params=leaves)


@by_shapes
def _with_state(setup: Setup, params_and_state: tuple[Tree, Tree]) -> Layout:
    params, state = params_and_state
    return layout_state(setup.dealt(params), state)


@by_shapes
def _shardings(setup: Setup, params_and_state: tuple[Tree, Tree]) -> Shardings:
    found = setup.with_state(*params_and_state)
    grad_specs = setup.with_frozen(found.grad_specs, params_and_state[0], lambda _: P())
    return Shardings(*setup.named((found.param_specs, grad_specs), found.split), setup.state_shardings(found))


@by_shapes
def _param_shardings(setup: Setup, params: Tree) -> Tree:
    found = setup.layout(params)
    if setup.config.uneven == "blocks" and not setup.why_no_shapes(params):
        found = setup.with_state(params)
    return setup.named(found.param_specs, found.split)


@by_shapes
def _start(setup: Setup, params: Tree) -> Start:
    setup.layout(params)  # refuses a leaf that is not a floating array
    whole, params = params, setup.trained(params)
    precision.check_params(setup.config, params)
    try:
        start = first_state(setup.inner, precision.widened(setup.config, params))
    except Exception as error:  # of any type: it is the user's own code
        if setup.config.frozen is not None:
            error.add_note(frozen.in_words(setup.frozen(whole), whole))
        raise
    if start.why:
        return start
    state = (
        jax.eval_shape(lambda p: precision.init(setup.inner, p, setup.config), params)
        if precision.extends(setup.config)
        else start.state
    )
    return start._replace(state=jax.tree.map(shape_of, state))


@by_shapes
def _update_of(setup: Setup, params_and_state: tuple[Tree, Tree]) -> Traced | None:
    params, state = params_and_state
    params = precision.widened(setup.config, setup.trained(params))
    computed = precision.as_computed(setup.inner, setup.config, params, _inner_of(state))
    return update_of(setup.inner, params, computed)


@by_shapes
def _fragile(setup: Setup, params_and_state: tuple[Tree, Tree]) -> frozenset[str] | None:
    traced = _update_of(setup, params_and_state)
    return traced and fragile(traced.jaxpr)


@by_shapes
def _settled(setup: Setup, params_and_state: tuple[Tree, Tree]) -> Settled:
    params, state = params_and_state
    traced = _update_of(setup, params_and_state)
    found = traced and settled(setup.inner, precision.widened(setup.config, setup.trained(params)), traced)
    if not traced or not found:
        return Settled(state, [])
    narrow = precision.stored_narrower(traced.before, _inner_of(state))
    leaves = [shape_of(x).update(dtype=narrow.get(names, x.dtype)) for names, x in named_leaves(found.state)]
    new = jax.tree.unflatten(jax.tree.structure(found.state), leaves)
    return found._replace(state=state._replace(inner=new) if isinstance(state, ShardedState) else new)


def _inner_of(state: Tree) -> Tree:
    return state.inner if isinstance(state, ShardedState) else state


def _on_devices(
    inner: optax.GradientTransformation, ids: np.ndarray, axis_names: tuple[str, ...], axis_types: Tree, config: Config
) -> Setup:
    """Rebuilds a pickled `Setup` on this process's devices with the same ids."""
    by_id = {device.id: device for device in jax.devices()}
    devices = np.vectorize(lambda i: by_id[i], otypes=[object])(ids)
    return Setup(inner, Mesh(devices, axis_names, axis_types=axis_types), config)
