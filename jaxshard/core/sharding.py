"""`Setup`: an optimizer, a mesh and a strategy, and the layouts that follow from them. Pure: no array moves."""

import dataclasses
import math

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxshard.base.axes import REPLICA_AXIS
from jaxshard.base.memo import by_shapes
from jaxshard.base.tree import have_same_shapes, matched, shape_of
from jaxshard.base.types import AnyMesh, T, Tree
from jaxshard.core import precision
from jaxshard.core.cutting import deal_leaf
from jaxshard.core.layout import Layout, Shardings, layout_params, layout_state
from jaxshard.core.options import Config
from jaxshard.core.precision import ShardedState
from jaxshard.inner import whole_matrices
from jaxshard.inner.trace import Settled, settled


@dataclasses.dataclass(frozen=True)
class Setup:
    """The inner optimizer, the mesh, and the strategy with its options; and what follows from them for given params.

    Params and states may be arrays or `ShapeDtypeStruct`s: only structure, shapes and dtypes count, and each answer is
    cached by these.
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
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which a batch is split, outermost first."""
        replica = (REPLICA_AXIS,) if REPLICA_AXIS in self.mesh.shape else ()
        return (*replica, *self.config.data_axes)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The batch axes larger than 1: types vary over these, and gradients are summed over these."""
        return tuple(axis for axis in self.batch_axes if self.sizes[axis] > 1)

    @property
    def num_batch_shards(self) -> int:
        """The number of parts into which a batch is split."""
        return math.prod(self.sizes[axis] for axis in self.batch_axes)

    def layout(self, params: Tree) -> Layout:
        """Where params and gradients live."""
        return _layout(self, params)

    def dealt(self, params: Tree) -> Layout:
        """As `layout`, and with `Leaf.home` for each leaf whose state is laid out by whole matrices."""
        return _dealt(self, params)

    def with_state(self, params: Tree, state: Tree | None = None) -> Layout:
        """As `dealt`, and with the leaves of `state`, or of the state that `init` makes."""
        if state is None or have_same_shapes(state, self.abstract_state(params)):
            return _with_init(self, params)
        return layout_state(self.dealt(params), state)

    def strictly(self, params: Tree) -> Layout:
        """As `layout`, for the whole tree of params: raises a ValueError for specs that match no leaf."""
        found = self.layout(params)
        found.check_specs_used()
        return found

    def shardings(self, params: Tree) -> Shardings:
        """Where params, gradients and state live, as `NamedSharding`s."""
        self.strictly(params)
        return _shardings(self, params)

    def param_shardings(self, params: Tree) -> Tree:
        """Where params live, as `NamedSharding`s."""
        return _param_shardings(self, params)

    def named(self, specs: T) -> T:
        """A tree of PartitionSpecs as `NamedSharding`s on the mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)  # pyright: ignore[reportArgumentType]

    def plain_init(self, params: Tree) -> Tree:
        """The state before it is sharded: `inner.init`, and the state that options add to it."""
        return precision.init(self.inner, params, self.config)

    def abstract_state(self, params: Tree) -> Tree:
        """The shapes of the state that `init` makes."""
        return _abstract_state(self, params)

    def settled(self, params: Tree) -> Settled:
        """The shapes of the state after the first update; for nearly all optimizers, those that `init` makes."""
        return _settled(self, params)

    def expected_state(self, state: Tree, params: Tree) -> Tree:
        """The shapes that `state` should have: those after an update if its structure is that, else those of `init`."""
        after = self.settled(params).state
        return after if jax.tree.structure(state) == jax.tree.structure(after) else self.abstract_state(params)


@by_shapes
def _layout(setup: Setup, params: Tree) -> Layout:
    return layout_params(setup.config, params, setup.sizes)


@by_shapes
def _dealt(setup: Setup, params: Tree) -> Layout:
    found = setup.layout(params)
    if not setup.config.cuts.state or not any(leaf.dims and len(leaf.shape) > 1 for leaf in found.params):
        return found
    dims = whole_matrices.batch_dims(setup.inner, params)
    pairs = zip(found.params, dims, strict=True)
    dealt = tuple(deal_leaf(leaf, batch, setup.sizes, setup.config) for leaf, batch in pairs)
    return dataclasses.replace(found, params=dealt)


@by_shapes
def _with_init(setup: Setup, params: Tree) -> Layout:
    return layout_state(setup.dealt(params), setup.abstract_state(params))


@by_shapes
def _shardings(setup: Setup, params: Tree) -> Shardings:
    found = setup.with_state(params)
    return Shardings(*setup.named((found.param_specs, found.grad_specs, found.state_specs)))


@by_shapes
def _param_shardings(setup: Setup, params: Tree) -> Tree:
    return setup.named(setup.layout(params).param_specs)


@by_shapes
def _abstract_state(setup: Setup, params: Tree) -> Tree:
    return jax.tree.map(shape_of, jax.eval_shape(setup.plain_init, params))


@by_shapes
def _settled(setup: Setup, params: Tree) -> Settled:
    before, found = setup.abstract_state(params), settled(setup.inner, params)
    if found is None:
        return Settled(before, [])
    extended = isinstance(before, ShardedState)
    stored = matched(lambda _, old: old, found.state, before.inner if extended else before)  # with stored dtypes
    return found._replace(state=before._replace(inner=stored) if extended else stored)


def _on_devices(
    inner: optax.GradientTransformation, ids: np.ndarray, axis_names: tuple[str, ...], axis_types: Tree, config: Config
) -> Setup:
    """Rebuilds a pickled `Setup` on this process's devices with the same ids."""
    by_id = {device.id: device for device in jax.devices()}
    devices = np.vectorize(lambda i: by_id[i], otypes=[object])(ids)
    return Setup(inner, Mesh(devices, axis_names, axis_types=axis_types), config)
