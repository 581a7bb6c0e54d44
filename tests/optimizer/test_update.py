"""The inner optimizer is called as plain optax would be: with what it takes, and whatever becomes of its state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from oracle import assert_close, assert_same_bits

import jaxshard

STRATEGIES = ["ddp", "zero2", "zero3"]


def params():
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(16, 24)), "b": rng.normal(size=(24,))}


def batches(count, dtype=np.float64):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(16, 16)).astype(dtype) for _ in range(count)]


def loss(p, x):
    p = getattr(p, "fast", p)
    return jnp.mean(jnp.square(jnp.tanh(x @ p["w"]) + p["b"]))


def make(strategy, tx, **options):
    return getattr(jaxshard, strategy)(tx, jaxshard.make_mesh(), min_shard_size=2, **options)


def plain(tx, p, steps, **extra):
    """(params, state) of plain optax."""
    state = jax.jit(tx.init)(p)

    @jax.jit
    def step(p, state, x):
        grads = jax.grad(loss)(p, x)
        updates, state = tx.update(getattr(grads, "fast", grads), state, p, **extra)
        return optax.apply_updates(p, updates), state

    for x in steps:
        p, state = step(p, state, x)
    return p, state


def trained(opt, p, steps, **options):
    """(params, state) by `train_step`."""
    step = jaxshard.train_step(loss, opt, **options)
    return go_on(step, opt.place(p), opt.init(p), steps)


def go_on(step, p, state, steps):
    for x in steps:
        p, state, _ = step(p, state, x)
    return p, state


# What an optimizer takes of `value` and `grad`.


@pytest.mark.parametrize("chained", [False, True])
def test_an_optimizer_that_takes_no_further_arguments(chained):
    """`train_step` offers `value` and `grad`; optax's sam takes neither, and needs not."""
    tx = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))
    tx = optax.chain(optax.clip(1.0), tx) if chained else tx
    with jax.enable_x64(True):
        assert_close(trained(make("zero2", tx), params(), batches(3))[0], plain(tx, params(), batches(3))[0], 1e-13)


def test_what_was_asked_for_and_is_refused_is_an_error():
    opt = make("zero2", optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'wobble'"):
        trained(opt, params(), batches(1), extra=lambda p, batch: {"wobble": 1.0})


# Lookahead: params in pairs, gradients of the fast ones.


def lookahead():
    return optax.lookahead(optax.adam(0.01), 2, 0.5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lookahead_in_a_training_step(strategy):
    with jax.enable_x64(True):
        pair = optax.LookaheadParams.init_synced(params())
        got, want = trained(make(strategy, lookahead()), pair, batches(5)), plain(lookahead(), pair, batches(5))
        assert_close(got, want, 1e-13)


def test_lookahead_by_update_takes_the_gradients_of_the_fast_params_or_of_both():
    with jax.enable_x64(True):
        pair = optax.LookaheadParams.init_synced(params())
        opt, (x,) = make("zero2", lookahead()), batches(1)
        grads = jax.grad(loss)(pair, x)
        want = optax.apply_updates(pair, lookahead().update(grads.fast, lookahead().init(pair), pair)[0])
        for given in (grads, grads.fast):
            updates, _ = opt.update(given, opt.init(pair), opt.place(pair))
            assert_close(optax.apply_updates(pair, updates), want, 1e-14)


def test_lookahead_in_a_users_own_shard_map():
    with jax.enable_x64(True):
        pair = optax.LookaheadParams.init_synced(params())
        opt, (x,) = make("zero2", lookahead()), batches(1)

        def step(pair, state, x):
            grads = jax.grad(loss)(jax.lax.pcast(pair, "data", to="varying"), x)
            return opt.update(grads.fast, state, pair)

        specs = opt.shardings(pair).specs.state
        run = jax.shard_map(step, mesh=opt.mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
        updates, _ = jax.jit(run)(pair, opt.init(pair), x)
        want = optax.apply_updates(pair, plain_updates(pair, x))
        assert_close(optax.apply_updates(pair, updates), want, 1e-13)


def plain_updates(pair, x):
    return lookahead().update(jax.grad(loss)(pair, x).fast, lookahead().init(pair), pair)[0]


# States that have other leaves after their first update.


def monitored():
    measures = {"norm": optax.tree.norm, "ema": optax.measure_with_ema(optax.tree.norm, 0.9)}
    return optax.chain(optax.monitor(measures), optax.adam(0.01))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_monitors_in_a_training_step(strategy):
    with jax.enable_x64(True):
        opt = make(strategy, monitored())
        assert jax.tree.structure(opt.init(params())) == jax.tree.structure(monitored().init(params()))
        assert_close(trained(opt, params(), batches(4)), plain(monitored(), params(), batches(4)), 1e-13)


def test_monitors_by_update():
    with jax.enable_x64(True):
        opt, p, state = make("zero2", monitored()), params(), make("zero2", monitored()).init(params())
        for x in batches(3):
            updates, state = opt.update(jax.grad(loss)(p, x), state, p)
            p = optax.apply_updates(p, updates)
        assert_close((p, state), plain(monitored(), params(), batches(3)), 1e-13)


@pytest.mark.parametrize("options", [{"moment_dtype": jnp.bfloat16}, {"master_dtype": jnp.float32}])
def test_monitors_beside_what_options_add(options):
    opt = make("zero2", monitored(), **options)
    p = jax.tree.map(lambda x: x.astype(np.float32), params())
    _, state = trained(opt, p, batches(3, np.float32))
    want = plain(monitored(), p, batches(3, np.float32))[1][0]
    assert_close(state.inner[0], want, 1e-5 if "master_dtype" in options else 1e-2)


@pytest.mark.optimized
def test_a_first_step_that_is_skipped():
    """What the monitors have is what they saw; all else stays as `init` made it."""
    good = batches(3)
    bad = np.where(np.arange(16) == 11, np.nan, good[0].T).T
    with jax.enable_x64(True):
        opt = make("zero2", monitored())
        step = jaxshard.train_step(loss, opt)
        start = opt.place(params())
        p, state, metrics = step(start, opt.init(start), bad)
        assert metrics["skipped"]
        assert np.isnan(optax.tree.get(state, "norm"))
        assert_same_bits((p, state[1]), (params(), monitored().init(params())[1]))
        with pytest.warns(UserWarning, match="step 1 was skipped"):
            p, state = go_on(step, p, state, good)
        assert_close((p, state), plain(monitored(), params(), good), 1e-13)


class Momentum(NamedTuple):
    trace: Any


def lazy_momentum():
    """As in torch: there is no momentum before the first gradient."""

    def update(updates, state, params=None):
        del params
        trace = updates if state.trace is None else jax.tree.map(lambda t, g: 0.9 * t + g, state.trace, updates)
        return jax.tree.map(lambda t: -0.1 * t, trace), Momentum(trace)

    return optax.GradientTransformation(lambda params: Momentum(None), update)


def test_a_state_that_is_made_by_its_first_update():
    with jax.enable_x64(True):
        opt = make("zero2", lazy_momentum())
        got = trained(opt, params(), batches(3), max_skips=None)
        assert_close(got, plain(lazy_momentum(), params(), batches(3)), 1e-13)
        assert got[1].trace["w"].sharding.spec == P("data")


def test_its_first_update_cannot_be_skipped():
    with pytest.raises(ValueError, match=r"first update adds or drops trace/b in the state.*init, or.*max_skips=None"):
        trained(make("zero2", lazy_momentum()), params(), batches(1))
