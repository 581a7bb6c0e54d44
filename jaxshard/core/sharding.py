"""What a sharded optimizer does: lays out, places, initialises, updates. The inner update runs in the global view."""

import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import check_alive, check_same_structure, is_traced, matched, named_leaves, path_of, shape_of
from jaxshard.core import collectives, layout, local_view, precision
from jaxshard.core.layout import Config, Layout, Shardings
from jaxshard.core.specs import axes_in
from jaxshard.inner import whole_matrices
from jaxshard.inner.update import Settled, fast, settled
from jaxshard.mesh import REPLICA_AXIS, check_has_devices, platform_of
from jaxshard.processes import agreement


@dataclasses.dataclass(frozen=True)
class Engine:
    """What a `ShardedOptimizer` does: the inner optimizer, on a mesh, laid out by a strategy."""

    inner: optax.GradientTransformation
    mesh: Mesh  # or, for plans, an AbstractMesh
    config: Config

    def __reduce__(self):
        if isinstance(self.mesh, AbstractMesh):
            return Engine, (self.inner, self.mesh, self.config)
        devices = np.vectorize(lambda device: device.id, otypes=[int])(self.mesh.devices)
        mesh = (devices, self.mesh.axis_names, self.mesh.axis_types)
        return _rebuild, (self.inner, mesh, self.config)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.shape)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which a batch is split, outermost first."""
        replica = (REPLICA_AXIS,) if REPLICA_AXIS in self.mesh.shape else ()
        return (*replica, *self.config.data_axes)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Those of them that are larger than 1: what types vary over, and gradients are summed over."""
        return tuple(axis for axis in self.batch_axes if self.sizes[axis] > 1)

    @property
    def num_batch_shards(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.batch_axes)

    # Layout.

    def layout(self, params: Any, *, strict: bool = False) -> Layout:
        """The layout of params, and (from `inner.init`, abstractly) of the state."""
        return layout.layout_state(self.dealt(params, strict=strict), self.abstract_state(params))

    def dealt(self, params: Any, *, strict: bool = False) -> Layout:
        """The layout of params, with the homes of those that the inner optimizer takes as whole matrices."""
        found = layout.layout_params(self.config, params, self.sizes, strict=strict)
        if not self.config.cuts.state or not any(leaf.dims and len(leaf.shape) > 1 for leaf in found.params):
            return found
        dims = whole_matrices.batch_dims(self.inner, params)
        pairs = zip(found.params, dims, strict=True)
        dealt = tuple(layout.deal_leaf(leaf, batch, self.sizes, self.config) for leaf, batch in pairs)
        return dataclasses.replace(found, params=dealt)

    def trees(self, params: Any, *, strict: bool = False) -> Shardings:
        """The PartitionSpecs of params, grads and state, as trees."""
        found = self.dealt(params, strict=strict)
        state = self._state_specs(found, self.abstract_state(params))
        return Shardings(params=self.rest(found, params), grads=self.cut(found, params), state=state)

    def rest(self, found: Layout, params: Any) -> Any:
        """The params' PartitionSpecs at rest, as a tree."""
        return _unflatten(params, [found.spec(leaf, cut=self.config.cuts.params) for leaf in found.params])

    def cut(self, found: Layout, params: Any) -> Any:
        """The PartitionSpecs of gradients, as a tree."""
        return _unflatten(params, [found.spec(leaf, cut=self.config.cuts.state) for leaf in found.params])

    def home(self, found: Layout, params: Any) -> Any:
        """The PartitionSpecs of what meets the inner optimizer (gradients, params, updates), as a tree."""
        return _unflatten(params, [leaf.home or found.spec(leaf, cut=self.config.cuts.state) for leaf in found.params])

    def shardings(self, params: Any) -> Shardings:
        return Shardings(*self._named(tuple(self.trees(params, strict=True))))

    def _named(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    # Params and state at rest.

    def place(self, params: Any) -> Any:
        found = layout.layout_params(self.config, params, self.sizes, strict=True)
        rest = self.rest(found, params)
        if is_traced(params):
            return collectives.at(params, self.mesh, rest)
        check_has_devices("place", self.mesh)
        layout.warn_if_awkward(found)
        check_alive("place: params", params)
        agreement.check_same_arrays("place", params)
        return jax.tree.map(collectives.copy_to, params, self._named(rest))

    def within_reach(self, args: Any) -> Any:
        """Further arguments; arrays on other devices than the mesh's (say, the first alone) copied to all of these."""
        devices, everywhere = set(self.mesh.devices.flat), NamedSharding(self.mesh, P())

        def move(x: Any) -> Any:
            away = isinstance(x, jax.Array) and x.committed and x.sharding.device_set != devices
            return collectives.copy_to(x, everywhere) if away else x

        return jax.tree.map(move, args)

    def synchronize(self, tree: Any) -> Any:
        for names, leaf in named_leaves(tree):
            if not isinstance(getattr(leaf, "sharding", None), NamedSharding):
                raise ValueError(f"synchronize: {path_of(names)} does not lie on a mesh; call `place` or `init` first")
        check_alive("synchronize", tree)
        specs = tuple(leaf.sharding.spec for leaf in jax.tree.leaves(tree))
        named = [{axis for entry in spec for axis in axes_in(entry)} for spec in specs]
        copied = [tuple(axis for axis in self.mesh.axis_names if axis not in axes) for axes in named]

        def body(*shards):
            return tuple(collectives.first_copy(x, axes) for x, axes in zip(shards, copied, strict=True))

        same = jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=specs, check_vma=False)
        out_shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(tree))
        return _unflatten(tree, jax.jit(same, out_shardings=out_shardings)(*jax.tree.leaves(tree)))

    def _plain_init(self, params: Any) -> Any:
        return precision.init(self.inner, params, self.config)

    def abstract_state(self, params: Any) -> Any:
        return jax.eval_shape(self._plain_init, jax.tree.map(shape_of, params))

    def settled(self, params: Any) -> Settled:
        """What the state is after its first update, abstractly: nearly always what `init` makes."""
        before, found = self.abstract_state(params), settled(self.inner, params)
        if found is None:
            return Settled(before, [])
        extended = isinstance(before, precision.ShardedState)
        stored = matched(lambda _, old: old, found.state, before.inner if extended else before)  # in narrower dtypes
        return found._replace(state=before._replace(inner=stored) if extended else stored)

    def expected_state(self, state: Any, params: Any) -> Any:
        """What a state should be, abstractly: as updates leave it where it has that structure, else as from `init`."""
        after = self.settled(params).state
        return after if jax.tree.structure(state) == jax.tree.structure(after) else self.abstract_state(params)

    def check_state(self, who: str, state: Any, expected: Any) -> None:
        """Raises a ValueError for a state that another optimizer made, or the same one under other options."""
        extended = isinstance(expected, precision.ShardedState)
        if extended and not isinstance(state, precision.ShardedState):
            raise ValueError(
                f"{who}: the state is plain optax's, and {', '.join(map(repr, expected.extra))} belong beside it, as "
                "options of this strategy ask: give jaxshard.ShardedState(state, opt.init(params).extra)"
            )
        if not extended and isinstance(state, precision.ShardedState):
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

    def init(self, params: Any) -> Any:
        if self.is_local():
            raise ValueError("init inside shard_map would make one state per device; call it outside, on whole params")
        leaves, specs = jax.tree.leaves(params), self.trees(params)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            return jax.tree.map(shape_of, self.abstract_state(params), self._named(specs.state))
        if is_traced(params):
            params = collectives.at(params, self.mesh, specs.grads)
            return self.globally(self._plain_init, specs.state)(params)
        check_has_devices("init", self.mesh)
        layout.warn_if_awkward(layout.layout_params(self.config, params, self.sizes))
        check_alive("init: params", params)
        params = collectives.at(params, self.mesh, specs.params)
        run = jax.jit(self.globally(self._plain_init, specs.state), out_shardings=self._named(specs.state))
        taken = {address for leaf in jax.tree.leaves(params) for address in collectives.buffers(leaf)}
        return jax.tree.map(lambda x: collectives.copied(x) if collectives.buffers(x) & taken else x, run(params))

    # Updates.

    def is_local(self) -> bool:
        """Whether we are inside a shard_map over batch axes."""
        return bool(collectives.manual_axes() & set(self.batch_axes))

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is not None:
            check_same_structure("update: the gradients", fast(updates), fast(params), "parameter")
        elif precision.widens(self.config):
            raise ValueError(
                "update: master weights (master_dtype) and stochastic_rounding need the params: "
                "update(updates, state, params)"
            )
        if self.config.loss_scale is not None:
            raise ValueError("update: the loss is scaled, and the scale kept up, by train_step alone; use that")
        for what, tree in (("the gradients", updates), ("the state", state), ("the params", params)):
            check_alive(f"update: {what}", tree)
        if self.is_local():
            return local_view.local_update(self, updates, state, params, extra)
        self.check_state("update", state, self.expected_state(state, updates if params is None else params))
        return self.advance(updates, state, params, extra, want="updates")

    def advance(
        self, grads: Any, state: Any, params: Any, extra: dict[str, Any], *, want: str, ok: Any = None
    ) -> tuple[Any, Any]:
        """One step in the global view: ("updates" or "params", whichever is wanted, as params lie; the new state).

        With a boolean scalar `ok`, and "params" wanted: where it is False, nothing changes.
        """
        like = grads if params is None else params
        found = self.dealt(like)
        home, state_specs = self.home(found, like), self._state_specs(found, self.settled(like).state)
        cut = fast(self.cut(found, like))
        grads = collectives.at(collectives.at(fast(grads), self.mesh, cut), self.mesh, fast(home))
        mine = None if params is None else collectives.at(params, self.mesh, home)
        new = precision.widens(self.config) or (want == "params" and not self._sends_updates(found))
        step = self._with_extra(lambda *args: self.shard_step(*args, new=new), extra, (home, state_specs))
        out, state = step(grads, state, mine, ok)
        out = self._gathered(found, out)
        if want == "updates":
            return self.as_updates(out, params), state
        if not new:
            out = optax.apply_updates(cast(Any, params), out)
        return out if new and not self._chooses_whole() else _unless(ok, out, params), state

    def shard_step(
        self, grads: Any, state: Any, params: Any, ok: Any, extra: dict[str, Any], *, new: bool
    ) -> tuple[Any, Any]:
        """(updates, or with `new` the new params, and the state), before anything is gathered.

        Where `ok` is False, the state stays as it is, and so do params, unless that is chosen when they are whole; None
        says that it always is.
        """
        updates, params_after, state_after = precision.step(self.inner, self.config, grads, state, params, extra)
        state_after = _unless(ok, state_after, state)
        if not new:
            return updates, state_after
        if params_after is None:
            params_after = optax.apply_updates(params, updates)
        return params_after if self._chooses_whole() else _unless(ok, params_after, params), state_after

    def as_updates(self, out: Any, params: Any) -> Any:
        """What `shard_step` gave, gathered, as updates: if params are widened, new ones came, in their own dtype."""
        if not precision.widens(self.config):
            return out
        wide = self.config.master_dtype or jnp.float32
        return jax.tree.map(lambda new, old: precision.difference(new, old, wide), out, params)

    def _sends_updates(self, found: Layout) -> bool:
        """Whether updates move to where the params lie, not new params.

        Peak MB by compiler, updates and params gathered: TPU 1896 and 2782, H100 2124 and 1981. Where params are cut
        elsewhere than their updates are made, an optimizer that does not read them spares them the way.
        """
        elsewhere = self.config.cuts.params and any(leaf.home for leaf in found.params)
        return elsewhere or platform_of(self.mesh) == "tpu"

    def _chooses_whole(self) -> bool:
        """Whether new params are chosen, or old ones, after the gather, not before.

        Peak MB by compiler of a model with masters, after and before: TPU 438 and 625 (zero1), 436 and 500 (zero2), for
        it copied all old params whole; on CPU, which writes what is gathered to where they lay, before takes less.
        """
        return platform_of(self.mesh) == "tpu"

    def state_shardings(self, params: Any, state: Any) -> Any:
        """Where each leaf of a state lives, as a tree; `state` as `init` makes it or as updates leave it, or shapes."""
        return self._named(self._state_specs(self.dealt(params), state))

    def _state_specs(self, found: Layout, state: Any) -> Any:
        leaves = layout.layout_state(found, state).state
        return _unflatten(state, [found.spec(leaf, cut=self.config.cuts.state) for leaf in leaves])

    def globally(self, fn: Any, out_specs: Any) -> Any:
        """`fn` run in the global view: whole logical arrays, XLA partitions; results laid out by `out_specs`."""
        if not collectives.is_explicit(self.mesh):
            return lambda *args: collectives.at(fn(*args), self.mesh, out_specs, traced=is_traced(args))
        return jax.sharding.auto_axes(fn, axes=self.mesh.axis_names, out_sharding=self._named(out_specs))

    def _with_extra(self, step: Any, extra: dict[str, Any], out_specs: Any) -> Any:
        """`step` in the global view; arrays in `extra` go through its boundary, functions and constants around it."""
        leaves, treedef = jax.tree.flatten(extra)
        is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]

        def with_arrays(grads, state, params, ok, arrays):
            filled = iter(arrays)
            whole = [next(filled) if yes else leaf for yes, leaf in zip(is_array, leaves, strict=True)]
            return step(grads, state, params, ok, jax.tree.unflatten(treedef, whole))

        arrays = [leaf for yes, leaf in zip(is_array, leaves, strict=True) if yes]
        run = self.globally(with_arrays, out_specs)
        return lambda grads, state, params, ok: run(grads, state, params, ok, arrays)

    def _gathered(self, found: Layout, tree: Any) -> Any:
        """From where the state lives to where the params live."""
        if self.config.cuts.params:
            return collectives.at(tree, self.mesh, self.rest(found, tree))
        if not self.config.cuts.state:
            return tree
        froms, tos = [leaf.home or leaf.cut for leaf in found.params], [leaf.spec for leaf in found.params]
        dims = [leaf.home_dims if leaf.home else leaf.dims for leaf in found.params]
        return _unflatten(tree, collectives.gather_all(jax.tree.leaves(tree), self.mesh, froms, tos, dims))


def _unless(ok: Any, new: Any, old: Any) -> Any:
    """`new` where `ok`, else `old`, bit for bit; leaves that `old` has not are new, whatever `ok` is."""

    def choose(n: Any, o: Any) -> Any:
        return lax.select(ok, n, o if o.dtype == n.dtype else o.astype(n.dtype))

    return new if ok is None else matched(choose, new, old)


def _unflatten(like: Any, leaves: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _rebuild(inner: Any, mesh: tuple[Any, Any, Any], config: Config) -> Engine:
    ids, axis_names, axis_types = mesh
    by_id = {device.id: device for device in jax.devices()}
    devices = np.vectorize(lambda i: by_id[i], otypes=[object])(ids)
    return Engine(inner, Mesh(devices, axis_names, axis_types=axis_types), config)
