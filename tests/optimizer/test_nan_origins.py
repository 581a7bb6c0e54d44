"""One table: NaN and infinity of every origin, under every strategy. What is skipped changes no bit."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_skips import STRATEGIES, batch, every_copy, loss, make, params, weighted

import jaxshard
from jaxshard.optimizer import streams

UPDATE = "the update of [bvw]"
GRADIENT = "the gradient of [bvw] is not finite"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(streams, "_CHUNK", 64)


def widened(p):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), p)


def large():
    """Moments of 4096 elements or more can be stored in 8 bits."""
    rng = np.random.default_rng(0)
    found = {"w": rng.normal(size=(16, 512)), "v": rng.normal(size=(512, 8)), "b": np.zeros(8)}
    return {name: (x / 8).astype("f") for name, x in found.items()}


def masked():
    return params() | {"mask": np.float32([-np.inf] * 8)}


def poisoned(name, value=np.nan):
    p = params()
    p[name] = p[name].copy()
    p[name].reshape(-1)[3] = value
    return p


def loss_alone(p, batch):
    return loss(p, batch) + jax.lax.stop_gradient(jnp.mean(batch["z"]))


def nan_in_aux(p, batch):
    return loss(p, batch), {"mean": jnp.mean(batch["z"])}


def one_layer(p, batch):
    """NaN arises in one of two stages alone, of one row."""
    hidden = jnp.tanh(batch["x"] @ p["w"])
    return jnp.mean((jnp.where(batch["z"] > 0, jnp.log(batch["z"] - 2), hidden) @ p["v"] + p["b"] - batch["y"]) ** 2)


def dividing(scale):
    """A user's transformation: 0 / 0 at elements whose gradient is as it was at the step before."""

    def update(grads, state, params=None):
        del params
        return jax.tree.map(lambda g, s: scale * (g - s) / (g - s), grads, state), grads

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)


def running_out():
    """A user's schedule that divides by the steps that are left, of which the second step has none."""
    return optax.scale_by_schedule(lambda count: -0.1 / (1 - count))


def growing():
    """Its moment overflows, its update does not."""

    def update(grads, state, params=None):
        del params
        return jax.tree.map(lambda g, s: g / (1 + s), grads, state), jax.tree.map(lambda s: s * 1e30, state)

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.ones_like, p), update)


def overflowing():
    """A parameter that is a single number becomes infinite, and nothing else."""
    return optax.stateless(lambda grads, params: jax.tree.map(lambda g: jnp.where(g.ndim == 0, jnp.inf, 0 * g), grads))


def counting():
    """A single number of the state becomes NaN, and nothing else."""

    def update(grads, state, params=None):
        del params
        return grads, jnp.where(state > 0, state - 1, jnp.nan)

    return optax.GradientTransformation(lambda p: jnp.float32(1), update)


def best_so_far():
    """Its state is infinite from the start, as a plateau's best loss is."""

    def update(grads, state, params=None):
        del params
        return jax.tree.map(lambda g: -0.01 * g, grads), state

    return optax.GradientTransformation(lambda p: {"best": jnp.float32(jnp.inf)}, update)


def narrow_hyperparams():
    """In bfloat16 `b2` is 1, and the first step divides 0 by 0."""
    return optax.inject_hyperparams(optax.adamw)(learning_rate=jnp.bfloat16(1e-3), b2=jnp.bfloat16(0.999))


def at_sevens():
    """Divides 0 by 0 where a parameter is 7."""
    return optax.stateless(lambda g, p: jax.tree.map(lambda p: 0 * (p - 7) / (p - 7), p))


def momentum_at_sevens():
    return optax.chain(optax.trace(0.9), at_sevens())


def with_a_seven(name, shape=(16, 16)):
    """In the last element, which one device looks at where each holds a copy."""
    found = params() | {name: np.ones(shape, "f")}
    found[name].flat[-1] = 7
    return found


def scaled():
    return jaxshard.LossScale(initial=4.0, growth_interval=1000)


ZERO = {"z": np.zeros((16, 32), "f")}


def bad(**values):
    return batch(1, **values) | ZERO


def bad_z(value=np.nan):
    z = np.zeros((16, 32), "f")
    z[9, 3] = value
    return batch(1) | {"z": z}


# By origin: the loss; the strategy's options; the step's; the params; the batch of the second step; the words.
ORIGINS = {
    "one device's rows": (loss, {}, {}, params, bad(x=np.nan), GRADIENT),
    "one microbatch": (loss, {}, {"microbatches": 2}, params, bad(x=np.inf), GRADIENT),
    "loss only": (loss_alone, {}, {}, params, bad_z(), "the loss is not finite"),
    "one stage": (one_layer, {}, {}, params, bad_z(1.0), GRADIENT),
    "int8 moments": (loss, {"moment_dtype": jnp.int8}, {}, large, bad(x=np.nan), GRADIENT),
    "bfloat16 moments": (loss, {"moment_dtype": jnp.bfloat16}, {}, params, bad(x=np.nan), GRADIENT),
    "state on the host": (loss, {"state_memory": "host"}, {}, params, bad(x=np.nan), GRADIENT),
    "masters": (loss, {"master_dtype": jnp.float32}, {}, lambda: widened(params()), bad(x=np.nan), GRADIENT),
    "weighted": (weighted, {}, {"weighted": True}, params, bad(x=np.nan) | {"weight": np.ones(16, "f")}, GRADIENT),
}

INT8, HOST = {"moment_dtype": jnp.int8}, {"state_memory": "host"}
MASTERS = {"master_dtype": jnp.float32}

# By origin: the optimizer; the strategy's options; the params; the words, or "" where every step is taken.
UPDATES = {
    "hyperparameters in bfloat16": (narrow_hyperparams, {}, lambda: widened(params()), UPDATE),
    "a division": (lambda: dividing(0.1), {}, params, UPDATE),
    "with masters": (lambda: dividing(0.1), MASTERS, lambda: widened(params()), UPDATE),
    "with int8 moments": (lambda: optax.chain(optax.scale_by_adam(), running_out()), INT8, large, UPDATE),
    "state on the host": (lambda: optax.chain(optax.scale_by_adam(), dividing(0.1)), HOST, params, UPDATE),
    "a moment on the host": (growing, HOST, params, UPDATE),
    "one element of many chunks": (momentum_at_sevens, HOST, lambda: with_a_seven("one"), "the update of one"),
    "masters on the host": (lambda: dividing(0.1), HOST | MASTERS, lambda: widened(params()), UPDATE),
    "behind a clip": (lambda: optax.chain(optax.clip_by_global_norm(1.0), dividing(0.1)), {}, params, UPDATE),
    "one element": (at_sevens, {}, lambda: with_a_seven("one"), "the update of one"),
    "one of 7 x 16": (at_sevens, {}, lambda: with_a_seven("one", (7, 16)), "the update of one"),
    "in MultiSteps": (lambda: optax.MultiSteps(dividing(0.1), 1).gradient_transformation(), {}, params, UPDATE),
    "with a loss scale": (lambda: dividing(0.1), {"loss_scale": scaled()}, params, UPDATE),
    "a moment": (growing, {}, params, UPDATE),
    "a single parameter": (overflowing, {}, lambda: params() | {"s": np.float32(1)}, "the update of s"),
    "one number of the state": (counting, {}, params, r"the new optimizer state's .+"),
    "infinity that was there": (best_so_far, {}, params, ""),
    "infinity among the params": (lambda: optax.sgd(0.01), {}, masked, ""),
}  # fmt: skip


def outcomes(step, p, state, batches):
    """(params, state, metrics of the last step, what was warned of)."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for one in batches:
            p, state, metrics = step(p, state, one)
        step.close()
    return p, state, metrics, [str(one.message) for one in warned]


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loss_and_gradients(strategy, origin):
    loss, options, of_step, start, poison, words = ORIGINS[origin]
    opt = make(strategy, **options)
    good = {name: np.nan_to_num(x, posinf=0) * (name != "z") for name, x in poison.items()}
    step = jaxshard.train_step(loss, opt, **of_step)
    p, state, metrics = step(opt.place(start()), opt.init(start()), good)
    assert not metrics["skipped"]
    before = every_copy((p, state))
    p, state, metrics, said = outcomes(step, p, state, [poison])
    assert metrics["skipped"]
    assert every_copy((p, state)) == before
    (line,) = said
    assert re.fullmatch(f"train_step: step 2 was skipped: {words}", line)


@pytest.mark.parametrize("origin", UPDATES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_update_and_state(strategy, origin):
    """From finite gradients: the same batch twice, so that the second difference of gradients is 0."""
    tx, options, start, words = UPDATES[origin]
    still = batch(0) | {"x": np.zeros((16, 16), "f")}  # the gradients of w and v are 0 or do not change
    opt = make(strategy, tx(), **options)
    step = jaxshard.train_step(lambda p, b: loss(p, b) + 0 * jnp.sum(jnp.exp(p.get("mask", 0.0))), opt)
    p, state = opt.place(start()), opt.init(start())
    taken = []
    for _ in range(3):
        before = every_copy((p, state))
        p, state, metrics, said = outcomes(step, p, state, [still])
        taken.append(not metrics["skipped"])
        assert np.isfinite(float(metrics["grad_norm"]))
        if metrics["skipped"]:
            assert every_copy((p, state)) == before
            (line,) = said
            assert re.fullmatch(rf"train_step: step \d was skipped: {words} is not finite", line)
            leaves = len(jax.tree.leaves(p))
            assert (int(metrics["bad_leaf"]) >= leaves) == ("state" in words)
        else:
            assert (said, int(metrics["bad_leaf"])) == ([], -1)
    assert all(taken) == (words == "")
    if options.get("loss_scale"):
        assert float(state.extra["loss_scale"]["scale"]) == 4.0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_aux_only_the_step_is_taken(strategy):
    opt = make(strategy)
    step = jaxshard.train_step(nan_in_aux, opt, has_aux=True)
    p, state, metrics, said = outcomes(step, opt.place(params()), opt.init(params()), [bad_z()])
    assert not metrics["skipped"]
    assert said == []
    assert np.isnan(metrics["aux"]["mean"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((p, state)))


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_rows_of_weight_0_it_counts_nothing(strategy, microbatches):
    """Neither in the loss nor in aux: a mean over no rows is 0 / 0 on the devices that have none."""

    def mean(p, batch):
        each = jnp.mean((jnp.tanh(batch["x"] @ p["w"]) @ p["v"] + p["b"] - batch["y"]) ** 2, -1)
        weight = jnp.sum(batch["weight"])
        return (jnp.sum(each * batch["weight"]), weight), {"mean": jnp.sum(each * batch["weight"]) / weight}

    opt = make(strategy)
    weight = np.arange(16, dtype="f") % 3
    weight[4:8] = 0
    one = batch(0) | {"weight": weight}
    step = jaxshard.train_step(mean, opt, has_aux=True, weighted=True, microbatches=microbatches)
    _, _, metrics = step(opt.place(params()), opt.init(params()), one)
    assert not metrics["skipped"]
    assert float(metrics["aux"]["mean"]) == pytest.approx(float(metrics["loss"]), rel=1e-5)


@pytest.mark.parametrize("name", ["w", "b"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_params_that_were_not_finite_before_are_named_with_the_way_back(strategy, name):
    opt = make(strategy)
    step = jaxshard.train_step(loss, opt, max_skips=0)
    p, state = opt.place(poisoned(name)), opt.init(poisoned(name))
    before = every_copy((p, state))
    for i in range(2):
        p, state, _ = step(p, state, batch(i))
    with pytest.raises(jaxshard.NonFiniteError, match="latest_finite") as caught:
        step(p, state, batch(2))
    assert f"Params were already not finite before this step ({name})" in str(caught.value)
    assert "check the batch" not in str(caught.value)
    assert caught.value.broken == name
    assert every_copy((p, state)) == before


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_params_that_are_not_finite(strategy):
    opt = make(strategy, frozen=["^w$"])
    step = jaxshard.train_step(loss, opt, max_skips=0)
    p, state = opt.place(poisoned("w")), opt.init(poisoned("w"))
    before = every_copy((p, state))
    for i in range(2):
        p, state, metrics = step(p, state, batch(i))
        assert metrics["skipped"]
    with pytest.raises(jaxshard.NonFiniteError, match=r"not finite before this step \(w\)"):
        step(p, state, batch(2))
    assert every_copy((p, state)) == before


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_average_and_batch_statistics_stay_where_a_step_was_skipped(strategy):
    """As the loops of docs/coming_from/plain_optax.md, docs/recipes.md and the examples keep them."""
    opt = make(strategy)
    step = jaxshard.train_step(nan_in_aux, opt, has_aux=True)
    p, state = opt.place(params()), opt.init(params())
    ema, stats, moved = jax.tree.map(jnp.copy, p), {"mean": jnp.float32(0)}, []
    for one in (bad_z(1.0), bad(x=np.nan) | {"z": bad_z()["z"]}, bad_z(2.0)):
        before = every_copy((ema, stats))
        p, state, metrics = step(p, state, one)
        ema = optax.tree.where(metrics["skipped"], ema, optax.incremental_update(p, ema, 0.1))
        stats = optax.tree.where(metrics["skipped"], stats, metrics["aux"])
        moved.append(every_copy((ema, stats)) != before)
    assert moved == [True, False, True]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((ema, stats)))


@pytest.mark.optimized
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_verdict_shares_the_reduction_of_the_norm(strategy, clip):
    """One more is taken behind a clip, whose factor every update needs first, and where devices hold copies of updates,
    of which each looks at its own part."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)) if clip else optax.adamw(1e-2)
    opt, counts = make(strategy, tx), []
    for max_skips in (None, 20):
        step = jaxshard.train_step(loss, opt, max_skips=max_skips)
        found = jaxshard.inspect.report(step.lower(params(), opt.init(params()), batch(0)).compile()).collectives
        counts.append(sum(one.kind == "all-reduce" for one in found if one.group_size > 1))
    assert counts[1] - counts[0] == (clip or strategy in ("ddp", "hsdp"))
