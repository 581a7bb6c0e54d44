"""Plants the bug that each reduction could have, and sees the comparison with one device fail.

A test that cannot fail proves nothing: these prove test_strategies.py and its siblings.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from test_traps import fit, opt_of, rows
from test_traps import weights as cut_weights

import jaxshard
from jaxshard import collectives
from jaxshard.loss import per_device

pytestmark = [pytest.mark.filterwarnings("ignore:.*cannot be sharded:UserWarning"), pytest.mark.usefixtures("x64")]


def weights():
    return cut_weights() | {"odd": np.linspace(-1.0, 1.0, 7)}  # which no device count divides


def error(strategy, loss=fit, **options):
    """The largest distance of any leaf of the params from one device's, after three steps of SGD with momentum."""
    opt, steps = opt_of(strategy), rows()
    step = jaxshard.train_step(loss, opt, **options)
    params, state = opt.place(weights()), opt.init(weights())
    want, tx = jax.tree.map(jnp.asarray, weights()), optax.sgd(0.1, momentum=0.9)
    want_state = tx.init(want)
    for batch in steps:
        params, state, _ = step(params, state, batch)
        updates, want_state = tx.update(jax.grad(plain(loss))(want, batch), want_state)
        want = optax.apply_updates(want, updates)
    return max(float(jnp.linalg.norm(params[k] - want[k]) / jnp.linalg.norm(want[k])) for k in want)


def plain(loss):
    def whole(params, batch):
        out = loss(params, batch)
        return out[0] / out[1] if isinstance(out, tuple) else out

    return whole


def weighted(params, batch):
    each = jnp.mean(jnp.square(jnp.tanh(batch["x"] @ params["a"]) @ params["b"] + params["c"] - batch["y"]), -1)
    weight = jnp.abs(batch["x"][:, 0])
    return jnp.sum(each * weight), jnp.sum(weight)


def no_sum(x, axes):
    return x


def twice(x, axes):
    return lax.psum(lax.psum(x, tuple(axes)), tuple(axes)) if axes else x


def mean_scatter(x, dims):
    return REAL["scatter_sum"](x, dims) / 8 if dims else x


def first_part(x, dims):
    """No reduction: each device keeps its own part of its own gradient."""
    return collectives.own_part(x, dims, {"data": 8})


def shifted_scatter(x, dims):
    """The right sums, dealt to the wrong devices."""
    for dim, _ in dims:
        x = jnp.roll(x, 1, axis=x.ndim + dim)
    return REAL["scatter_sum"](x, dims)


def unordered_gather(x, dims, **how):
    for dim, _ in dims:
        x = jnp.roll(REAL["gather"](x, ((dim, ("data",)),), **how), x.shape[dim], axis=x.ndim + dim)
    return x


REAL = {name: getattr(collectives, name) for name in ("scatter_sum", "gather", "total")}
BUGS = [
    ("total", no_sum, "ddp"),
    ("total", twice, "ddp"),
    ("total", no_sum, "zero2"),  # the leaf kept whole beside cut ones, and the loss
    ("scatter_sum", mean_scatter, "zero1"),
    ("scatter_sum", mean_scatter, "zero2"),
    ("scatter_sum", mean_scatter, "zero3"),
    ("scatter_sum", first_part, "zero1"),
    ("scatter_sum", first_part, "zero2"),
    ("scatter_sum", first_part, "zero3"),
    ("scatter_sum", shifted_scatter, "zero2"),
    ("gather", unordered_gather, "zero1"),
    ("gather", unordered_gather, "zero3"),
]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_without_a_bug_all_is_well(strategy):
    assert error(strategy) < 1e-12
    assert error(strategy, weighted, weighted=True, microbatches=2) < 1e-12


@pytest.mark.parametrize(("name", "bug", "strategy"), BUGS)
def test_a_wrong_collective_is_seen(monkeypatch, name, bug, strategy):
    monkeypatch.setattr(collectives, name, bug)
    assert error(strategy, whole_vector) > 1e-4


def whole_vector(params, batch):
    """As `fit`, with a leaf that is kept whole beside the cut ones."""
    return fit(params, batch) + jnp.mean(batch["x"]) * jnp.sum(params["odd"] ** 3)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_lost_microbatch_is_seen(monkeypatch, strategy):
    real = per_device.DeviceLoss._grad

    def lossy(self, shards, diff, batch, index):
        grads, outs = real(self, shards, diff, batch, index)
        return [jnp.where(index == 1, 0, g) for g in grads], outs

    monkeypatch.setattr(per_device.DeviceLoss, "_grad", lossy)
    assert error(strategy, microbatches=2) > 1e-4


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_mean_of_means_is_seen(strategy):
    """Weighted means averaged over devices, as if each weighed the same: the local view of such a loss."""

    def mean_of_means(params, batch):
        total, weight = weighted(params, batch)
        return total / weight

    def error(view):
        grad = jaxshard.value_and_grad(mean_of_means, opt_of(strategy), loss_view=view)
        assert "divides one sum over rows by another" in str(grad.layout(weights(), rows(1)[0])) or view == "global"
        got, want = grad(weights(), rows(1)[0])[1], jax.grad(plain(weighted))(weights(), rows(1)[0])
        return float(jnp.linalg.norm(got["a"] - want["a"]) / jnp.linalg.norm(want["a"]))

    assert error("local") > 1e-3
    assert max(error("auto"), error("global")) < 1e-6


def test_a_repeated_key_is_seen(monkeypatch):
    """Without folding, each device drops the same entries of its rows: the shards' masks are equal."""
    (batch,) = rows(1)

    def loss(params, batch, key):
        mask = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return jnp.mean(mask * params["c"]), jax.lax.all_gather(mask.astype(float), "data", tiled=True)

    def masks():
        f = jaxshard.value_and_grad(loss, opt_of("zero2"), has_aux=True)
        return np.split(np.asarray(f(weights(), batch, jax.random.key(0))[0][1]), 8)

    assert len({mask.tobytes() for mask in masks()}) == 8
    monkeypatch.setattr(per_device.DeviceLoss, "_folded", lambda self, index: self.args)
    assert len({mask.tobytes() for mask in masks()}) == 1
