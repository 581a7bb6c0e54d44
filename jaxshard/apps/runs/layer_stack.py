"""The layers of a model in one stack, (L, ...), as it is saved; and in virtual stages, (v, L / v, ...), as it trains.

So a run can go on from any save, whatever pipeline it was saved from.
"""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath, keystr

from jaxshard.apps.runs.run_folder import Snapshot


def in_one_stack(template: Snapshot) -> Snapshot:
    """The abstract snapshot with its layers in one stack, cut over the same mesh axes."""
    params, state = jax.tree_util.tree_map_with_path(_in_one_stack, (template.params, template.state))
    return dataclasses.replace(template, params=params, state=state)


def reshaped(snapshot: Snapshot, template: Snapshot) -> Snapshot:
    """The snapshot, each leaf in the shape and sharding that the template has for it."""
    trees, wanted = (snapshot.params, snapshot.state), (template.params, template.state)
    params, state = jax.tree.map(_reshaped, trees, wanted)
    return dataclasses.replace(snapshot, params=params, state=state)


def _reshaped(leaf: jax.Array, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """XLA reshapes a leaf that is whole along the stages; called for one leaf at a time, no more than one is."""
    if leaf.shape == like.shape:
        return leaf
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    num_stacked = 2 if leaf.ndim > like.ndim else 1
    rest = (*sharding.spec, *(None,) * leaf.ndim)[num_stacked : leaf.ndim]
    whole = NamedSharding(sharding.mesh, jax.P(*(None,) * num_stacked, *rest))
    return jax.jit(lambda x: jax.device_put(x, whole).reshape(like.shape), out_shardings=like.sharding)(leaf)


def _in_one_stack(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """A leaf of (v, L / v, ...) as (L, ...)."""
    if "blocks" not in keystr(path, simple=True, separator="/").split("/"):
        return leaf
    old = leaf.sharding
    assert isinstance(old, NamedSharding)
    rounds, layers, *rest = (*old.spec, None, None)[: max(2, len(old.spec))]
    sharding = NamedSharding(old.mesh, jax.P(tuple(jax.tree.leaves((rounds, layers))), *rest))
    return jax.ShapeDtypeStruct((leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), leaf.dtype, sharding=sharding)
