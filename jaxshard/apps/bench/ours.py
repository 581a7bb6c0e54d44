"""jaxshard's own steps."""

from __future__ import annotations

from typing import Any

import jax
import optax

import jaxshard
from jaxshard.apps.bench import models
from jaxshard.apps.bench.step import Step, Task, optimizer

Tree = Any
NAMES = ("ddp", "zero1", "zero2", "zero3")


def build(name: str, task: Task, max_skips: int | None = 20, loss_view: Any = "auto", **more: Any) -> Step:
    """The step of a strategy, with further options."""
    more |= {"master_dtype": "float32"} if task.masters else {}
    opt = getattr(jaxshard, name)(optimizer(), task.mesh, **more)
    shapes, batch = models.init(task.model, task.dtype), task.model.batch(task.rows)
    params = opt.place(shapes)
    state = opt.init(params)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        return models.loss(task.model, params, batch)

    run = jaxshard.train_step(loss, opt, microbatches=task.microbatches, max_skips=max_skips, loss_view=loss_view)
    by_rows = jax.sharding.NamedSharding(task.mesh, jax.sharding.PartitionSpec("data"))
    return Step(
        lower=lambda: run.lower(params, state, batch),
        run=run,
        optimize=jax.jit(_optimize(opt), donate_argnums=(1, 2)),
        params=params,
        state=state,
        batch=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_rows), batch),
        grads=_shaped(shapes, opt.shardings(shapes).grads),
        init=opt.init,
    )


def _optimize(opt: jaxshard.ShardedOptimizer) -> Any:
    def optimize(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return optimize


def _shaped(shapes: Tree, shardings: Tree) -> Tree:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
