"""Who follows float32's loss curve: a problem of seconds; benchmarks/precision_curves.py has the reference model.

The band is how far float32 itself goes when its rows come in another order, so nothing here was chosen to pass.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be sharded:UserWarning")

STEPS, ROWS, EVERY = 300, 32, 15
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
FOLLOW = {
    "masters": (BF16, {"master_dtype": F32}),
    "masters and bf16 moments": (BF16, {"master_dtype": F32, "moment_dtype": BF16}),
    "stochastic rounding": (BF16, {"stochastic_rounding": True}),
    "stochastic rounding and bf16 moments": (BF16, {"stochastic_rounding": True, "moment_dtype": BF16}),
    "fp16 with masters and loss scale": (F16, {"master_dtype": F32, "loss_scale": jaxshard.LossScale()}),
}


def network(params, x):
    """Computes in float32, whatever the params are kept in."""
    p = jax.tree.map(lambda leaf: leaf.astype(F32), params)
    return jnp.tanh(x @ p["up"]) @ p["down"]


def random_params(seed):
    rng = np.random.default_rng(seed)
    return {"up": rng.normal(size=(32, 64)) / np.sqrt(32), "down": rng.normal(size=(64, 8)) / 8}


def rows(count, seed):
    """What a teacher of the same form says, and noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 32)).astype("f")
    y = np.asarray(network(random_params(1), x)) + 0.1 * rng.normal(size=(count, 8))
    return {"x": x, "y": y.astype("f")}


def loss_fn(params, batch):
    return jnp.mean(jnp.square(network(params, batch["x"]) - batch["y"]))


@functools.cache
def curve(dtype=F32, order=0, **options):
    """The held-out loss at every `EVERY` steps of Adam under a cosine schedule."""
    inner = optax.adam(optax.cosine_decay_schedule(2e-3, STEPS, alpha=0.1), b2=0.95)
    opt = jaxshard.zero2(inner, jaxshard.make_mesh(devices=jax.devices()[:2]), min_shard_size=1, **options)
    params = opt.place(jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), random_params(2)))
    state, step, evaluate = opt.init(params), jaxshard.train_step(loss_fn, opt), jaxshard.evaluate(loss_fn, opt)
    data, heldout = rows(STEPS * ROWS, seed=3), rows(1024, seed=4)
    dealt = np.random.default_rng(order).permutation(STEPS * ROWS).reshape(STEPS, ROWS)
    losses, skipped = [], []
    for index in range(STEPS):
        params, state, metrics = step(params, state, {name: leaf[dealt[index]] for name, leaf in data.items()})
        skipped.append(metrics["skipped"])
        if (index + 1) % EVERY == 0:
            losses.append(float(evaluate(params, heldout)))
    assert np.sum(skipped) <= 3  # a loss scale finds itself
    return np.asarray(losses)


def distance(one, other):
    """The largest in the second half, where the learning rate is small and small updates count."""
    return np.max(np.abs(one - other)[STEPS // EVERY // 2 :])


@functools.cache
def band():
    found = max(distance(curve(order=order), curve()) for order in (1, 2, 3))
    assert found < 0.1 * curve()[-1]  # a band that is wide proves nothing
    return found


@pytest.mark.parametrize("how", FOLLOW)
def test_what_keeps_small_updates_follows_float32(how):
    dtype, options = FOLLOW[how]
    assert curve()[-1] < 0.2 * curve()[0]
    assert distance(curve(dtype, **options), curve()) <= band()


def test_bfloat16_alone_does_not():
    """Updates of less than half a unit in the last place are lost: the loss stays where the learning rate left it."""
    assert distance(curve(BF16), curve()) > 2 * band()
