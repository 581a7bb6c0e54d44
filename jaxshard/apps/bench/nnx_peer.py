"""The step that flax.nnx's users write: parameters with shardings, and `nnx.Optimizer`, whose state inherits them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.apps.bench import gspmd, models
from jaxshard.apps.bench.step import Step, Task, UnfitError, optimizer

Tree = Any


class _Held(nnx.Module):
    """The model's leaves as `nnx.Param`s, each with its sharding."""

    def __init__(self, shapes: Tree, specs: Tree):
        for place, (x, spec) in enumerate(zip(jax.tree.leaves(shapes), jax.tree.leaves(specs), strict=True)):
            setattr(self, f"leaf{place:04}", nnx.Param(jnp.zeros(x.shape, x.dtype), out_sharding=spec))

    def tree(self, like: Tree) -> Tree:
        """The leaves as the model's own tree."""
        leaves, treedef = jax.tree.flatten(like)
        return treedef.unflatten([getattr(self, f"leaf{place:04}")[...] for place in range(len(leaves))])


class _Parts:
    """The parts of the step, as pure functions of nnx states."""

    def __init__(self, task: Task):
        self.task, self.mesh = task, task.mesh
        self.shapes = models.init(task.model)
        self.specs = gspmd.specs_of(self.shapes, task.mesh.size, gspmd.Peer(3), task.model.scanned)
        with jax.set_mesh(task.mesh):
            model, tx = nnx.eval_shape(self._make)
        self.graphdef, params = nnx.split(model)
        self.tx_graphdef, state = nnx.split(tx)
        self.params, self.state = _placed(params, task.mesh), _placed(state, task.mesh)

    def _make(self) -> tuple[_Held, nnx.Optimizer]:
        model = _Held(self.shapes, self.specs)
        return model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    def init(self, params: Tree) -> Tree:
        """The optimizer's state, which nnx places by the current mesh."""
        return nnx.state(nnx.Optimizer(nnx.merge(self.graphdef, params), optimizer(), wrt=nnx.Param))

    def step(self, params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree, Tree]:
        """One step."""
        rows = NamedSharding(self.mesh, P("data"))
        hooks = models.Hooks(layer=lambda x: x, rows=lambda x: jax.lax.with_sharding_constraint(x, rows))

        def loss(model: _Held) -> jax.Array:
            return models.loss(self.task.model, model.tree(self.shapes), batch, hooks)

        model = nnx.merge(self.graphdef, params)
        value, grads = nnx.value_and_grad(loss)(model)
        params, state = self.optimize(grads, state, params)
        return params, state, {"loss": value, "grad_norm": optax.tree.norm(grads)}

    def optimize(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """The update alone."""
        model, tx = nnx.merge(self.graphdef, params), nnx.merge(self.tx_graphdef, state)
        tx.update(model, grads)
        return nnx.state(model), nnx.state(tx)


def _placed(state: Tree, mesh: Mesh) -> Tree:
    """The state's shapes, with its variables' shardings."""
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        state,
        nnx.get_partition_spec(state),
    )


def build(task: Task) -> Step:
    """The step.

    Raises:
      UnfitError: this peer does not support microbatches or masters.
    """
    if task.microbatches > 1 or task.masters:
        raise UnfitError("nnx.Optimizer supports neither microbatches nor masters")
    parts = _Parts(task)
    batch = task.model.batch(task.rows)
    batch = gspmd.shaped(batch, task.mesh, jax.tree.map(lambda _: P("data"), batch))
    named = functools.partial(jax.tree.map, lambda x: x.sharding)
    placed = (named(parts.params), named(parts.state))
    run = jax.jit(parts.step, donate_argnums=(0, 1), out_shardings=(*placed, NamedSharding(task.mesh, P())))
    return Step(
        lower=lambda: run.lower(parts.params, parts.state, batch),
        run=run,
        optimize=jax.jit(parts.optimize, donate_argnums=(1, 2), out_shardings=placed),
        params=parts.params,
        state=parts.state,
        batch=batch,
        grads=parts.params,
        init=_within(task.mesh, jax.jit(parts.init, out_shardings=named(parts.state))),
    )


def _within(mesh: Mesh, init: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
    def within(params: Tree) -> Tree:
        with jax.set_mesh(mesh):
            return init(params)

    return within
