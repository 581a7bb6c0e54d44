"""Mistakes that pyright must find; never run. `python scripts/check_types.py` compares its errors with the marks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard
from jaxshard.checkpoint import Checkpointer

mesh = jaxshard.make_mesh()
params = {"w": np.ones((4, 4), np.float32)}
batch = np.ones((8, 4), np.float32)


def loss_fn(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean(batch @ params["w"])


right = jaxshard.zero2(optax.adamw(3e-4), mesh, reduce_dtype=jnp.float32, data_axes="data", min_shard_size=128)

jaxshard.zero2(optax.adamw(3e-4), mesh, master_dtype="float32", moment_dtype="int8")
jaxshard.zero2(optax.adamw(3e-4), mesh, reduce_dtype=np.float32, moment_dtype=jnp.bfloat16)
jaxshard.zero2(optax.adamw(3e-4), mesh, reduce_dtype=np.dtype("float32"), moment_dtype=jnp.dtype("bfloat16"))

jaxshard.zero2(optax.adamw(3e-4), mesh, reduce_dtyp="float32")  # wrong: an unknown option
jaxshard.zero3(optax.adamw(3e-4), mesh, min_shard_size="2048")  # wrong: a string for a number
jaxshard.zero1(optax.adamw(3e-4), mesh, stochastic_rounding=1.5)  # wrong: a number for a flag
jaxshard.zero2(optax.adamw(3e-4), mesh, loss_scale=2.0**15)  # wrong: a number for a LossScale
jaxshard.zero2(optax.adamw(3e-4), mesh, moment_dtype="int9")  # wrong: no such codes
jaxshard.zero2(optax.adamw(3e-4), mesh, master_dtype="int8")  # wrong: codes are for moments
jaxshard.hybrid(optax.adamw(3e-4), mesh, None, zero=4)  # wrong: no such level
jaxshard.tensor_parallel(optax.adamw(3e-4), mesh)  # wrong: no specs
jaxshard.zero2(optax.adamw, mesh)  # wrong: a factory for an optimizer
jaxshard.zero2(optax.adamw(3e-4), ("data",))  # wrong: axis names for a mesh
jaxshard.make_mesh(date=8)  # wrong: an unknown axis
level = jaxshard.zero4  # wrong: no such strategy

jaxshard.train_step(loss_fn, right, microbatches="4")  # wrong: a string for a number
jaxshard.train_step(loss_fn, optax.adamw(3e-4))  # wrong: a plain optax optimizer
jaxshard.train_step(loss_fn, right, has_aus=True)  # wrong: an unknown parameter

placed: dict[str, np.ndarray] = right.place(params)
lost: list[int] = right.place(params)  # wrong: place keeps the caller's type
step = jaxshard.train_step(loss_fn, right)
new_params, state, metrics = step(placed, right.init(params), batch)
kept: dict[str, np.ndarray] = new_params
gone: int = new_params  # wrong: a step keeps the caller's type
norm: jax.Array = metrics["grad_norm"]
absent = metrics["gard_norm"]  # wrong: no such figure
held: jaxshard.TrainStep = step
function: jaxshard.ValueAndGrad[jax.Array] = jaxshard.value_and_grad(loss_fn, right)
layout: jaxshard.Layout = right.layout(params)
shardings: jaxshard.Shardings = right.shardings(params)
value: jax.Array = jaxshard.evaluate(loss_fn, right)(placed, batch)
pair: jax.Array = jaxshard.evaluate(loss_fn, right, has_aux=True)(placed, batch)  # wrong: aux comes too
inner = right.setup  # wrong: how it works is private
loss, grads = jaxshard.value_and_grad(loss_fn, right)(placed, batch)
same: dict[str, np.ndarray] = grads
other: str = grads  # wrong: gradients are like the params
(loss, aux), grads = jaxshard.value_and_grad(loss_fn, right, has_aux=True)(placed, batch)
number, restored = Checkpointer("runs/mine").restore({"params": params})
tree: dict[str, dict[str, np.ndarray]] = restored
bad: str = restored  # wrong: restore keeps the template's type
