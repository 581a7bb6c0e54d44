"""Losses that look like means over rows, and are none; and ones that look as if they were none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from oracle import assert_close

import jaxshard


def data(rows):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(8, 8)) / 3, "t": rng.normal(size=(64, 8))}
    batch = {"x": rng.normal(size=(rows, 8)), "s": rng.normal(size=(rows, 3, 8)), "y": rng.integers(0, 4, rows)}
    return params, batch | {"m": rng.integers(0, 2, rows), "i": rng.integers(0, rows, rows)}


def h(p, b):
    return jnp.tanh(b["x"] @ p["w"])


def each(p, b):
    return jnp.sum((b["x"] @ p["w"]) ** 2, -1)


def count(b):
    return len(b["y"])


def by_place(places):
    """Rows chosen by what is made from their places."""

    def loss(p, b):
        at = places(lax.broadcasted_iota(int, (count(b), 2), 0), b)
        return jnp.mean(h(p, b) * 2 - h(p, b).at[at].get(mode="clip")) + jnp.mean(h(p, b)[at] ** 2)

    return loss


def scanned(body, i=0):
    return lambda p, b: lax.scan(body, (0.0, 0.0), each(p, b))[0][i] / count(b)


def with_rule(backward):
    rule = jax.custom_vjp(lambda x: x * 1.0)
    rule.defvjp(lambda x: (x * 1.0, None), lambda _, g: (backward(g),))
    return lambda p, b: jnp.mean(rule(b["x"] @ p["w"]) ** 2)


def with_number(of):
    """A mean, and a number of the batch for one element of a parameter."""
    return lambda p, b: each(p, b).mean() + p["w"][0, 0] * of(b) / count(b)


def pairs(p, b):
    return jnp.mean(jax.nn.softplus(h(p, b)[::2] - h(p, b)[1::2]))


def windows(p, b):
    found = jax.vmap(lambda i: lax.dynamic_slice_in_dim(h(p, b), i, 2))(jnp.arange(count(b)))
    return jnp.mean(found[:, 0] * found[:, 1])


def into_longer(p, b):
    z = jnp.zeros((2 * count(b), 8)).at[jnp.arange(count(b))].set(h(p, b))
    return jnp.mean(z.reshape(-1, 2, 8).sum(1) ** 2)


def top_k(p, b):
    x = b["x"] @ p["w"]
    return jnp.sum(lax.top_k(x * count(b), 2)[1] * x[:, :2]) / count(b) ** 2


def chosen(p, b):
    x = b["x"] @ p["w"]
    return jnp.mean(jnp.where(jnp.full(x.shape, 0.9).astype(bool), (x - x.mean(0)) ** 2, x))


def seen(c, m):
    return (c.astype(int) + m).astype(bool), None


DECEPTIVE = {
    "places in a product": lambda p, b: jnp.arange(count(b), dtype=float) @ each(p, b) / count(b),
    "places in a batched product": lambda p, b: jnp.mean(
        jnp.einsum("bi,bij->bj", lax.broadcasted_iota(float, (count(b), 8), 0), h(p, b)[..., None] * h(p, b)[:, None])
    ),
    "places in a scatter": lambda p, b: jax.ops.segment_sum(jnp.arange(count(b)), b["y"], 4) @ p["w"][0, :4] / count(b),
    "places summed": by_place(lambda iota, b: iota.sum(1)),
    "places multiplied": by_place(lambda iota, b: iota.prod(1)),
    "places compared": by_place(lambda iota, b: lax.argmax(iota, 1, jnp.int32)),
    "places times a matrix": by_place(lambda iota, b: (iota[:, :1] @ jnp.array([[2]]))[:, 0]),
    "places cast": by_place(lambda iota, b: iota[:, 0].astype(bool).astype(int)),
    "places cast to few bits": by_place(lambda iota, b: (iota[:, 0].astype(jnp.int8)).astype(int)),
    "places padded": by_place(lambda iota, b: jnp.pad(iota[:, :1], ((0, 0), (1, 0)))[:, 0]),
    "places written over": by_place(lambda iota, b: iota.at[:, 0].set(b["i"])[:, 0]),
    "half of the rows": lambda p, b: jnp.mean(h(p, b)[jnp.arange(count(b) // 2)] ** 2),
    "more than the rows": lambda p, b: jnp.mean(h(p, b)[jnp.arange(2 * count(b))] ** 2),
    "rows of rows": lambda p, b: jnp.mean((b["s"] @ p["w"]).reshape(-1, 8)[jnp.arange(count(b))] ** 2),
    "windows of rows": windows,
    "into half of the rows": lambda p, b: jnp.mean(
        jax.ops.segment_sum(h(p, b), jnp.arange(count(b)), count(b) // 2) ** 2
    ),
    "into more rows": into_longer,
    "clamped": lambda p, b: jnp.mean(lax.clamp(-0.5, b["x"] @ p["w"] * count(b), 0.5)) / count(b),
    "clamped by the number of rows": lambda p, b: jnp.mean(lax.clamp(-1.0 / count(b), b["x"] @ p["w"], 1 / count(b))),
    "an index clamped": lambda p, b: jnp.mean(p["t"][lax.clamp(0, b["y"] * 9, count(b))]),
    "gradients clamped": with_rule(lambda g: lax.clamp(-1e-3, g, 1e-3)),
    "a sum before": scanned(lambda c, x: ((c[0] + x, c[0]), None), 1),
    "carries swapped": scanned(lambda c, x: ((c[1] + x, c[0]), None)),
    "another carry": scanned(lambda c, x: ((jnp.where(x > 1, c[1], c[0] + x), c[1] + 0.1 * x), None)),
    "a branch with another carry": scanned(
        lambda c, x: ((lax.cond(x > 1, lambda: c[1], lambda: c[0] + x), c[1] + 0.1 * x), None)
    ),
    "any, by a scan": with_number(lambda b: lax.scan(seen, jnp.zeros((), bool), b["m"])[0]),
    "any, by a cast": with_number(lambda b: b["m"].sum().astype(bool)),
    "a sum of few bits": with_number(lambda b: (40 * b["y"]).astype(jnp.int8).sum(dtype=jnp.int8)),
    "a sum cast to few bits": with_number(lambda b: (b["y"] - 2).sum().astype(jnp.uint8)),
    "a sum cut to whole numbers": with_number(
        lambda b: lax.scan(lambda c, x: ((c + x).astype(int), None), 0, b["x"][:, 0] * 3)[0]
    ),
    "rounded": lambda p, b: lax.reduce_precision(each(p, b).mean(), 5, 2),
    "a number cast": lambda p, b: jnp.sum(each(p, b) * (b["m"] * count(b)).astype(bool)) / count(b) ** 2,
    "a choice cast": chosen,
    "places of the largest": top_k,
    "filled": lambda p, b: (
        (b["x"] @ p["w"]).sum(0).at[jnp.array([9])].get(mode="fill", fill_value=1.0)[0] * p["w"][0, 0] / count(b)
    ),
    "nearly the number of rows": lambda p, b: each(p, b).sum() / (count(b) + 1e-8),
}
ONE_ROW = {
    "at least two": lambda p, b: each(p, b).sum() / max(count(b), 2),
    "a term for several": lambda p, b: each(p, b).mean() + (count(b) > 1) * jnp.mean(h(p, b) ** 2),
    "where several": lambda p, b: jnp.where(count(b) > 1, each(p, b).mean(), 0.0),
    "a branch for several": lambda p, b: lax.cond(count(b) > 1, lambda: each(p, b).mean(), lambda: 0.0),
    "pairs": pairs,
    "every other row": lambda p, b: jnp.sum(jnp.concatenate([h(p, b)[::2], 2 * h(p, b)[1::2]]) ** 2) / count(b),
    "a rule for several": with_rule(lambda g: g * min(len(g), 2)),
}


def nll(p, b):
    return -jnp.take_along_axis(jax.nn.log_softmax(b["x"] @ p["w"]), b["y"][:, None], -1).mean()


RIGHT = {
    "cross entropy": nll,
    "own places": lambda p, b: jax.nn.log_softmax(h(p, b))[jnp.arange(count(b)), b["y"]].mean(),
    "relu": lambda p, b: jnp.mean(jax.nn.relu(b["x"] @ p["w"]) ** 2),
    "a rule": with_rule(lambda g: 0.5 * g),
    "sequences": lambda p, b: jnp.mean(jnp.take_along_axis(b["s"] @ p["w"], b["y"][:, None, None], -1) ** 2),
    "sum over its number": lambda p, b: each(p, b).sum() / count(b),
    "two sums of a scan": scanned(lambda c, x: ((c[0] + x, c[1] + x * x), None), 1),
    "clamped": lambda p, b: jnp.mean(lax.clamp(-0.5, b["x"] @ p["w"], 0.5)),
}


def found(loss, rows, devices=8):
    """(the layout's line, the loss and gradients), and these of one device."""
    p, b = data(rows)
    opt = jaxshard.ddp(optax.sgd(0.1), jaxshard.make_mesh(devices=jax.devices()[:devices]))
    run = jaxshard.value_and_grad(loss, opt)
    (value, grads), (wanted, of_one) = run(opt.place(p), b), jax.jit(jax.value_and_grad(loss))(p, b)
    assert_close((value, grads), (wanted, of_one), 1e-10)
    return run.layout(p, b).loss_rows


@pytest.mark.parametrize("name", DECEPTIVE)
def test_what_looks_like_a_mean_is_computed_on_all_rows(x64, name):
    assert found(DECEPTIVE[name], 16).startswith("global view: the loss sees all rows of a microbatch")


@pytest.mark.parametrize("name", ONE_ROW)
def test_one_row_on_each_device_that_is_treated_otherwise_than_several(x64, name):
    assert found(ONE_ROW[name], 8).startswith("global view: the loss sees all rows of a microbatch")


@pytest.mark.parametrize("rows", [8, 24])
@pytest.mark.parametrize("name", RIGHT)
def test_means_stay_on_each_devices_rows(x64, name, rows):
    assert found(RIGHT[name], rows) == "the loss is a mean over rows"
