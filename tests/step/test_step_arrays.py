"""What a step gave back is not looked at again; all else is."""

import gc
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard
from jaxshard.step import program as step_arrays

PARAMS = {"a": np.ones((16, 4), "f"), "b": np.full((16, 4), 2.0, "f"), "c": np.ones(4, "f")}
BATCH = np.arange(64.0, dtype="f").reshape(16, 4) / 64


def loss(p, x):
    return jnp.mean((jnp.tanh(x @ p["a"].T) @ p["b"] + p["c"]) ** 2)


def started(strategy="zero3", tx=None, **options):
    opt = getattr(jaxshard, strategy)(tx or optax.adam(1e-2), jaxshard.make_mesh(), min_shard_size=2)
    step = jaxshard.train_step(loss, opt, **options)
    p, s = opt.place(PARAMS), opt.init(PARAMS)
    for _ in range(3):
        p, s, _ = step(p, s, BATCH)
    return opt, step, p, s


@pytest.fixture
def looked_at(monkeypatch):
    """How many trees were looked at."""
    calls, placed = [], step_arrays.placed
    monkeypatch.setattr("jaxshard.step.step.placed", lambda *args: calls.append(1) or placed(*args))
    return calls


def test_what_it_gave_back_is_looked_at_twice(looked_at):
    """At the first call nothing is known; at the second it is seen that the step takes what it returns."""
    _, step, p, s = started()
    assert len(looked_at) == 2
    for _ in range(3):
        p, s, _ = step(p, s, BATCH)
    assert len(looked_at) == 2


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_step_in_a_scan_of_ones_own(strategy):
    _, step, p, s = started(strategy)
    batches = np.stack([BATCH + i for i in range(4)])

    @jax.jit
    def four(p, s):
        def one(carry, x):
            p, s, metrics = step(*carry, x)
            return (p, s), metrics["loss"]

        return jax.lax.scan(one, (p, s), batches)

    (got, after), losses = four(*jax.tree.map(jnp.copy, (p, s)))
    for x, loss_before in zip(batches, losses, strict=True):
        p, s, metrics = step(p, s, x)
        assert float(metrics["loss"]) == pytest.approx(float(loss_before), rel=1e-6)
    chex.assert_trees_all_close((got, after), (p, s), rtol=1e-5, atol=1e-7)
    assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, p)


def exchanged(p, s):
    return p | {"a": p["b"], "b": p["a"]}, s


def another(p, s):
    return p | {"c": np.zeros(4, "f")}, s


def doubled(p, s):
    return p | {"b": p["a"]}, s


def elsewhere(p, s):
    return jax.device_put(p, jax.devices()[1]), s


def reordered(p, s):
    """The same leaves, in another tree."""
    return dict(reversed(p.items())), s


CHANGES = [exchanged, another, doubled, elsewhere, reordered]


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_changed_meanwhile_is_seen(change, donate):
    opt, step, p, s = started(donate=donate)
    fresh = jaxshard.train_step(loss, opt, donate=False)
    p, s = change(p, s)
    want = fresh(*jax.tree.map(jnp.copy, (p, s)), BATCH)
    got = step(p, s, BATCH)
    chex.assert_trees_all_equal(got[:2], want[:2])
    assert jax.tree.leaves(got[0])[0].sharding == jax.tree.leaves(want[0])[0].sharding


def test_what_was_deleted_meanwhile_is_named():
    _, step, p, s = started()
    p["b"].delete()
    with pytest.raises(ValueError, match="train_step: params: b was donated to an earlier step and deleted"):
        step(p, s, BATCH)
    _, step, p, s = started()
    s[0].mu["a"].delete()
    with pytest.raises(ValueError, match="train_step: state: 0/mu/a was donated"):
        step(p, s, BATCH)


def test_a_rate_that_was_set_meanwhile():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    _, step, p, s = started(tx=tx)
    s.hyperparams["learning_rate"] = 0.0
    before = jax.tree.map(np.array, p)
    p, s, _ = step(p, s, BATCH)
    chex.assert_trees_all_equal(before, p)


def test_two_models_by_turns():
    opt, step, p, s = started()
    wide = PARAMS | {"a": np.ones((24, 4), "f"), "b": np.ones((24, 4), "f")}
    q, t = opt.place(wide), opt.init(wide)
    plain = jaxshard.train_step(loss, opt)
    p2, s2, q2, t2 = jax.tree.map(jnp.copy, (p, s, q, t))
    for _ in range(3):
        p, s, _ = step(p, s, BATCH)
        q, t, _ = step(q, t, BATCH)
    for _ in range(3):
        p2, s2, _ = plain(p2, s2, BATCH)
    for _ in range(3):
        q2, t2, _ = plain(q2, t2, BATCH)
    chex.assert_trees_all_equal((p, s, q, t), (p2, s2, q2, t2))


def test_who_drops_the_results_frees_them():
    _, step, p, s = started()
    kept = [weakref.ref(x) for x in jax.tree.leaves((p, s))]
    del p, s
    gc.collect()
    step.close()
    assert not any(ref() is not None for ref in kept)


@pytest.mark.parametrize("around", [jax.eval_shape, lambda call: jax.jit(call)(), lambda call: jax.make_jaxpr(call)()])
@pytest.mark.parametrize("is_warm", [False, True])
def test_a_trace_that_closes_over_all_arrays_leaves_the_step_whole(around, is_warm):
    """Its metrics were kept as a step's, and every later call failed."""
    opt = jaxshard.zero2(optax.adam(1e-2), jaxshard.make_mesh(), min_shard_size=2)
    with jaxshard.train_step(loss, opt, donate=False) as step:
        p, s = opt.place(PARAMS), opt.init(PARAMS)
        wanted = step(p, s, BATCH)[0] if is_warm else None
        around(lambda: step(p, s, BATCH))
        for _ in range(3):
            found, _, metrics = step(p, s, BATCH)
            assert not metrics["skipped"]
        if is_warm:
            chex.assert_trees_all_equal(found, wanted)
