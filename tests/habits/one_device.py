"""The recipes' single-device counterpart of `jaxshard.train_step`."""

import jax
import optax


def train_step(loss_fn, tx, *, has_aux=False, extra=None):
    @jax.jit
    def step(params, state, batch, *args):
        found, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(params, batch, *args)
        loss, aux = found if has_aux else (found, None)
        more = {"value": loss, "grad": grads, **extra(params, batch)} if extra else {}
        updates, state = tx.update(grads, state, params, **more)
        return optax.apply_updates(params, updates), state, {"loss": loss, "aux": aux, "skipped": False}

    return step
