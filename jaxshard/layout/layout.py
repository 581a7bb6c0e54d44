"""Decides where each leaf of params, grads and state lives, from shapes, dtypes, options and the mesh's axis sizes.

This needs no array and no device, so you can compute a layout before renting a machine.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import named_leaves, owner_of, parent_of, path_of, structure, unflatten
from jaxshard.base.types import (
    AxisSizes,
    Names,
    Tree,
    TreeDef,
    axes_in,
    axis_of,
    canonical,
    in_axes,
    over_axes,
    split_axes,
)
from jaxshard.layout import frozen, host_memory
from jaxshard.layout.cutting import Leaf, at_home, cut_beside, cut_leaf, cut_like, frozen_leaf, in_words
from jaxshard.layout.layout_table import grouped, of_rounding, table
from jaxshard.layout.options import Config
from jaxshard.layout.specs import model_specs
from jaxshard.layout.undivided import Undivided, undivided
from jaxshard.system.text import html_table
from jaxshard.system.users_lines import warn

_SCALES = ("extra", "scale")  # the path in a `ShardedState` of the scales of 8-bit moments


def _spec_of(sharding: NamedSharding) -> P:
    sizes: dict[str, int] = {}
    for name, size in sharding.mesh.shape.items():
        sizes[axis_of(name)] = sizes.get(axis_of(name), 1) * size
    return over_axes(canonical(in_axes(axes_in(entry), sizes) for entry in sharding.spec))


class Shardings(NamedTuple):
    """`NamedSharding`s of params, grads (as `value_and_grad` returns them) and state."""

    params: Tree
    grads: Tree
    state: Tree

    @property
    def specs(self) -> "Shardings":
        """The same trees of PartitionSpecs, over the mesh's axes alone: arrays cut in blocks count as whole."""
        return Shardings(*jax.tree.map(_spec_of, tuple(self)))


@dataclasses.dataclass(frozen=True, repr=False)
class Layout:
    """Where one optimizer's params, gradients and state live, shown as a table with one row per leaf."""

    config: Config
    sizes: AxisSizes
    platform: str  # "cpu", "gpu" or "tpu"
    treedef: TreeDef
    params: tuple[Leaf, ...]
    state_treedef: TreeDef | None = None  # None: a layout of the params alone
    state: tuple[Leaf, ...] = ()
    gathers: Mapping[Names, str] | None = None  # a parameter's names -> where and why it is gathered
    loss_rows: str = ""  # the verdict on the rows of the loss
    sums: str = ""  # the rounding error of sums of gradients over microbatches
    unused_specs: str = ""  # the error message for specs that match no leaf; empty if all match
    kept: str = ""  # the whole params that stay for the backward pass

    def _param_leaves(self, leaves: Iterable[object]) -> Tree:
        return unflatten(self.treedef, leaves)

    @functools.cached_property
    def param_specs(self) -> Tree:
        """The params' PartitionSpecs at rest."""
        return self._param_leaves(leaf.params.spec for leaf in self.params)

    @functools.cached_property
    def grad_specs(self) -> Tree:
        """The PartitionSpecs of reduced gradients; a `MaskedNode` for each frozen leaf."""
        return self._param_leaves(frozen.nothing() if leaf.frozen else leaf.cut for leaf in self.params)

    @functools.cached_property
    def home_specs(self) -> Tree:
        """The PartitionSpecs of gradients, params and updates in the inner optimizer's step."""
        return self._param_leaves(leaf.home or leaf.cut for leaf in self.params)

    @functools.cached_property
    def state_specs(self) -> Tree:
        """The state's PartitionSpecs; only for a layout that has a state."""
        assert self.state_treedef is not None
        return unflatten(self.state_treedef, [leaf.cut for leaf in self.state])

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes at rest per device: params, grads (as the inner optimizer gets them) and state."""
        return {
            "params": sum(leaf.bytes(leaf.params.spec, self.sizes) for leaf in self.params),
            "grads": sum(leaf.bytes(leaf.cut, self.sizes) for leaf in self.params if not leaf.frozen),
            "state": sum(leaf.bytes(leaf.cut, self.sizes) for leaf in self.state if leaf.memory == "device"),
            **({"state on host": on_host} if (on_host := self.host_bytes) else {}),
        }

    @property
    def host_bytes(self) -> int:
        """Bytes at rest in the host's memory, per device."""
        return sum(leaf.bytes(leaf.cut, self.sizes) for leaf in self.state if leaf.memory == "host")

    @property
    def at_rest(self) -> list[tuple[str, Leaf, P]]:
        """Params, then state: (kind, leaf, its PartitionSpec at rest)."""
        params = [("params", leaf, leaf.params.spec) for leaf in self.params]
        return params + [("state", leaf, leaf.cut) for leaf in self.state]

    def rows(self) -> list[tuple[str, ...]]:
        """The table's rows: kind, leaf, shape, dtype, spec at rest, bytes per device, why."""
        rows: list[tuple[str, ...]] = []
        for kind, leaf, spec in self.at_rest:
            why = self.why(kind, leaf)
            if kind == "params" and self.gathers is not None:
                why += f"; {self.gathers[leaf.names]}"
            num_bytes = str(leaf.bytes(spec, self.sizes))
            rows.append((kind, leaf.path, str(leaf.shape), str(leaf.dtype), str(spec), num_bytes, why))
        return rows

    def why(self, kind: str, leaf: Leaf) -> str:
        """Why a leaf of params or state is sharded as it is, and its memory if not the devices'."""
        if leaf.memory == "host":
            return f"{self.why(kind, dataclasses.replace(leaf, memory='device'))}; on the host"
        if leaf.frozen:
            return leaf.reason
        if not getattr(self.config.cuts, kind):
            return f"{self.config.strategy} keeps {kind} {'replicated' if not leaf.spec else 'replicated over data'}"
        if kind == "params" and leaf.params.dims and leaf.params.dims != leaf.dims:
            return in_words(leaf.params.dims, len(leaf.shape))
        return leaf.reason

    def over_axes(self) -> "Layout":
        """The same in a user's own shard_map, whose mesh has no parts of axes: leaves cut in blocks are whole."""
        params, state = (tuple(leaf.over_axes() for leaf in leaves) for leaves in (self.params, self.state))
        return dataclasses.replace(self, params=params, state=state)

    @functools.cached_property
    def split(self) -> frozenset[str]:
        """The axes whose parts cut some leaf at rest.

        All leaves lie on the one mesh of these parts: JAX expresses the results of a user's `jit` on the mesh of its
        first argument.
        """
        specs = [leaf.cut for leaf in (*self.params, *self.state)] + [leaf.params.spec for leaf in self.params]
        return frozenset[str]().union(*map(split_axes, specs))

    @property
    def undivided(self) -> str:
        """What it costs that N devices do not divide some params, and a number that holds less; "" if it is little."""
        return str(undivided(self.params, self.sizes, self.config, self.platform) or "")

    def _notes(self) -> list[str]:
        total = ", ".join(f"{kind} {num_bytes}" for kind, num_bytes in self.bytes_per_device.items())
        dtypes = [] if self.config.widens else [str(leaf.dtype) for leaf in self.params if not leaf.frozen]
        known = {"bytes per device": total, "undivided": self.undivided, "rounding": of_rounding(dtypes)}
        known |= {"rows": self.loss_rows, "sums": self.sums, "kept": self.kept}
        return [f"{name}: {text}" for name, text in known.items() if text]

    def __repr__(self) -> str:
        return "\n".join([table(self.rows()), *self._notes()])

    def _repr_html_(self) -> str:
        return html_table(grouped(self.rows()), self._notes())


def check_specs_used(layout: Layout) -> None:
    """Raises a ValueError if some of the user's specs match no parameter."""
    if layout.unused_specs:
        raise ValueError(layout.unused_specs)


def layout_params(
    config: Config, params: Tree, sizes: AxisSizes, platform: str, over_replicas: Sequence[bool] = ()
) -> Layout:
    """The layout of a tree of arrays or `ShapeDtypeStruct`s on a mesh with axes of these sizes, for a platform.

    Args:
      over_replicas: for each leaf, whether its state is cut over the replicas too, where their dims divide; or none.

    Raises:
      TypeError: a leaf is not floating (or complex).
      ValueError: see `model_specs`.
    """
    which, unused = frozen.flags(config.frozen, params)
    if which and all(which):
        raise ValueError("frozen: all parameters are frozen, so nothing would be trained; freeze fewer")
    if unused and not all(jnp.issubdtype(getattr(x, "dtype", float), jnp.inexact) for _, x in named_leaves(params)):
        raise ValueError(unused)
    check_floating(params, which)
    specs = model_specs(config, params, sizes)
    leaves = [
        cut_leaf(names, tuple(leaf.shape), leaf.dtype, spec, sizes, config, platform, over_replicas=further)
        for (names, leaf), spec, further in zip(
            named_leaves(params), specs.specs, over_replicas or [False] * len(specs.specs), strict=True
        )
    ]
    leaves = tuple(frozen_leaf(leaf) if yes else leaf for leaf, yes in zip(leaves, which, strict=True))
    return Layout(config, dict(sizes), platform, structure(params), leaves, unused_specs=specs.unused or unused)


def layout_state(params: Layout, state: Tree) -> Layout:
    """Adds the leaves of an (abstract) optimizer state.

    A leaf follows a parameter, that is, takes the model's spec of it, in three cases:

    * its path ends in the parameter's path, and it has the parameter's shape;
    * its path ends so, and it stacks arrays of that shape (L-BFGS's memory): the spec then holds for its last dims;
    * its path goes on within the parameter's path (a tuple per parameter), or contains none (a list), but its shape is
      that of some parameters, which are all sharded alike.

    Other leaves (counts, factored moments) get no model axes. The data axes then shard every leaf by the rule of
    `cut_leaf`. A leaf that follows a parameter is sharded as if it had the parameter's dtype, so that float32 masters
    and moments are sharded like their bfloat16 parameter.
    """
    owners = {leaf.names: leaf for leaf in params.params if not leaf.frozen}
    twins: dict[tuple[int, ...], set[Leaf]] = {}
    for leaf in owners.values():
        twins.setdefault(leaf.shape, set()).add(leaf)
    leaves: list[Leaf] = []
    for names, leaf in named_leaves(state):
        alike = twins.get(tuple(leaf.shape), set[Leaf]()) if leaf.shape else set[Leaf]()
        agreed = len({(twin.cut, twin.home) for twin in alike}) == 1
        twin = min(alike, key=lambda leaf: leaf.names) if agreed else None
        owner = owner_of(names, owners) or parent_of(names, owners) or twin
        leaves.append(_state_leaf(names, leaf, owner, params))
    config = params.config
    leaves = host_memory.placed(leaves, config.state_memory, config.min_shard_size, params.sizes)
    return dataclasses.replace(params, state_treedef=structure(state), state=tuple(leaves))


def _state_leaf(names: Names, leaf: jax.ShapeDtypeStruct, owner: Leaf | None, params: Layout) -> Leaf:
    shape, spec, who, dtype = tuple(leaf.shape), P(), "", leaf.dtype
    extra_dims = len(shape) - len(owner.shape) if owner else 0
    if owner and shape == owner.shape:
        spec, who = owner.spec, f"like {owner.path}: "
    elif owner and owner.shape and shape[extra_dims:] == owner.shape:
        spec, who = canonical([None] * extra_dims + list(owner.spec)), f"a stack like {owner.path}: "
    elif owner and owner.shape:
        who = f"made from {owner.path}, with a different shape: "
    if owner and owner.shape and shape[extra_dims:] == owner.shape and not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = owner.dtype
    further = owner is not None and owner.over_replicas
    found = cut_leaf(names, shape, dtype, spec, params.sizes, params.config, params.platform, over_replicas=further)
    if owner and names[: len(_SCALES)] == _SCALES:
        found = cut_beside(owner, dataclasses.replace(found, dtype=leaf.dtype), params.sizes)
        return dataclasses.replace(found, reason=f"blocks of {owner.path}: {found.reason}")
    found = dataclasses.replace(found, dtype=leaf.dtype)
    if extra_dims > 0 and who.startswith("a stack") and owner and owner.dims:
        found = cut_like(owner, found)
    if owner and owner.home is not None and found.dims and (home := at_home(owner, shape)) is not None:
        found = dataclasses.replace(found, cut=home.spec, dims=home.dims, reason=in_words(home.dims, len(shape)))
    note = f"; {owner.at_home}" if owner and shape == owner.shape and owner.at_home else ""
    return dataclasses.replace(found, reason=who + found.reason + note)


_SPLIT = "as by nnx.split(model, nnx.Param, ...) or eqx.partition(model, eqx.is_inexact_array)"


def check_arrays(params: Tree) -> None:
    """Raises a TypeError for a leaf that is not an array."""
    for names, leaf in named_leaves(params):
        _check_array(names, leaf)


def _check_array(names: Names, leaf: Tree) -> None:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise TypeError(
            f"params: {path_of(names)} is a {type(leaf).__name__}; every leaf must be an array: give a model's params "
            f"only, {_SPLIT}"
        )


def check_floating(params: Tree, which: Sequence[bool]) -> None:
    """Raises a TypeError for a leaf that is not an array, or that is not frozen and has a dtype without gradient."""
    for (names, leaf), is_frozen in zip(named_leaves(params), which, strict=True):
        _check_array(names, leaf)
        if is_frozen:
            continue
        dtype = leaf.dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"params: {path_of(names)} has dtype {dtype}, which has no gradient: freeze it (frozen=), or cast it "
                f"to a floating dtype. Or give only a model's params, {_SPLIT}, and pass the rest as a further "
                "argument of the loss"
            )
        if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 2:
            raise TypeError(
                f"params: {path_of(names)} has dtype {dtype}, in which updates are lost and sums overflow; keep params "
                "in bfloat16 or float32, and cast them in the loss, where products are computed"
            )


def warn_if_one_replica(config: Config, sizes: AxisSizes) -> None:
    """Warns of hsdp on a mesh without replicas."""
    if config.strategy == "hsdp" and math.prod(sizes[axis] for axis in config.replica_axes) == 1:
        over = " x ".join(config.replica_axes)
        warn(
            f"hsdp: the mesh has one replica ({over} is 1), so hsdp equals zero3. Make a mesh with one replica for "
            "each node, as by jaxshard.make_mesh(replica=2), or use zero3"
        )


def warn_if_awkward(layout: Layout) -> None:
    """Warns of leaves that cannot be sharded over N devices, if they have more than 1% of a device's param bytes."""
    found = undivided(layout.params, layout.sizes, layout.config, layout.platform)
    if found is None:
        return
    named = "; ".join(f"{leaf.path}: {leaf.reason}, {num_bytes} more bytes" for leaf, num_bytes in found.lost[:5])
    more = f"; and {len(found.lost) - 5} more, see the layout" if len(found.lost) > 5 else ""
    leaves, fewer = ("1 leaf" if len(found.lost) == 1 else f"{len(found.lost)} leaves"), found.fewer
    take = f"Take {fewer[0]} devices, pad" if fewer else "Pad"
    warn(
        f"{layout.config.strategy}: {leaves} cannot be sharded over {found.num_shards} devices; each device stores "
        f"{found.lost_bytes} more bytes for each of params, grads and moments: {named}{more}. {take} a dim to a "
        f"multiple of {found.num_shards}, or split the data axis in two (data_axes=('slice', 'data')) so that each "
        f"shards its own dim.{_if_in_blocks(layout, found)}"
    )


def _if_in_blocks(layout: Layout, found: Undivided) -> str:
    """How many of these leaves `uneven="blocks"` would cut, in words; "" if none."""
    config = dataclasses.replace(layout.config, uneven="blocks")
    again = (
        cut_leaf(leaf.names, leaf.shape, leaf.dtype, leaf.spec, layout.sizes, config, layout.platform)
        for leaf, _ in found.lost
    )
    cured = 0 if layout.config.uneven == "blocks" else sum(not leaf.awkward for leaf in again)
    return f' Or give uneven="blocks", which cuts {cured} of {len(found.lost)} along several dims.' if cured else ""
