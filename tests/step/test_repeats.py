"""A random key that is the same at every step is told, once; one that is not, or is not drawn from, is not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard

KEY = jax.random.key(3)
RNG = np.random.default_rng(0)
BATCHES = [RNG.normal(size=(8, 4)).astype("f") for _ in range(4)]


def noisy(p, x, key):
    return jnp.mean((x @ p["w"] + jax.random.normal(key, (len(x), 3))) ** 2)


def folded(p, x, key, i):
    return noisy(p, x, jax.random.fold_in(key, i))


def quiet(p, x, key):
    del key
    return jnp.mean((x @ p["w"]) ** 2)


def told(loss, args_at, batches=BATCHES, **options):
    """The warnings of four steps, with the line numbers that they name."""
    opt = jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh(devices=jax.devices()[:2]))
    params = opt.place({"w": np.ones((4, 3), "f")})
    state, step = opt.init(params), jaxshard.train_step(loss, opt, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, batch in enumerate(batches):
            params, state, _ = step(params, state, batch, *args_at(i))
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("loss", "args_at"),
    [
        (noisy, lambda _: (KEY,)),
        (noisy, lambda _: (jax.random.key(3),)),
        (noisy, lambda _: (jax.random.PRNGKey(3),)),
        (folded, lambda _: (KEY, 7)),
        (lambda p, x, rest: noisy(p, x, rest["dropout"]["key"]), lambda i: ({"dropout": {"key": KEY}, "lr": 0.1 * i},)),
        (lambda p, x, key, y: noisy(p, x, key) + y.mean(), lambda _: (KEY, jaxshard.whole(np.ones(8, "f")))),
    ],
)
def test_a_key_that_repeats(loss, args_at):
    (text,) = told(loss, args_at)
    assert "is the same random key at every call" in text
    assert "jax.random.fold_in(key, i)" in text
    assert "further argument 0: dropout/key" in text or "further argument 0 is" in text


@pytest.mark.parametrize(
    ("loss", "args_at", "options"),
    [
        (noisy, lambda i: (jax.random.fold_in(KEY, i),), {}),
        (folded, lambda i: (KEY, i), {}),
        (folded, lambda i: (KEY, jnp.int32(i)), {}),
        (quiet, lambda _: (KEY,), {}),
        (noisy, lambda _: (KEY,), {"loss_view": "local"}),
        (noisy, lambda _: (KEY,), {"batches": BATCHES[:1] * 4}),  # as where time is measured
        (noisy, lambda i: (jax.random.key(i // 2),), {}),  # a first step to warm up
    ],
)
def test_a_key_that_is_another_or_is_meant(loss, args_at, options):
    assert not told(loss, args_at, **options)


def test_as_an_error_it_comes_before_the_step():
    opt = jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh())
    params = opt.place({"w": np.ones((4, 3), "f")})
    state, step = opt.init(params), jaxshard.train_step(noisy, opt)
    for batch in BATCHES[:2]:
        params, state, _ = step(params, state, batch, KEY)
    with pytest.raises(UserWarning, match="same random key"):
        step(params, state, BATCHES[2], KEY)
    step(params, state, BATCHES[3], KEY)  # nothing was donated
