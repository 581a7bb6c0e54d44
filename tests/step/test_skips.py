"""Steps that must change nothing: gradients that are not finite, a batch of weight 0. One verdict, everywhere."""

import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled_once import fast_environment
from oracle import assert_close, assert_same_bits

import jaxshard
from jaxshard.optimizer import update

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp"]


def params():
    rng = np.random.default_rng(0)
    start = {"w": rng.normal(size=(16, 32)).astype("f") / 4, "v": rng.normal(size=(32, 8)).astype("f") / 4}
    return start | {"b": np.float32([0.0, -0.0] * 4)}  # adding 0 to -0.0 would change its bits


def batch(seed, rows=16, **bad):
    """`bad` replaces one feature of one row, so that one device alone sees it."""
    rng = np.random.default_rng(seed)
    found = {"x": rng.normal(size=(rows, 16)).astype("f"), "y": rng.normal(size=(rows, 8)).astype("f")}
    for name, value in bad.items():
        found[name][rows // 2 + 1, 3] = value
    return found


def loss(p, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ p["w"]) @ p["v"] + p["b"] - batch["y"]) ** 2)


def weighted(p, batch):
    each = jnp.mean((jnp.tanh(batch["x"] @ p["w"]) @ p["v"] + p["b"] - batch["y"]) ** 2, -1)
    return jnp.sum(each * batch["weight"]), jnp.sum(batch["weight"])


def make(strategy, tx=None, **options):
    mesh = jaxshard.make_mesh(replica=2 if strategy == "hsdp" else 1)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)) if tx is None else tx
    return getattr(jaxshard, strategy)(tx, mesh, min_shard_size=8, **options)


def start(opt, loss=loss, **options):
    return jaxshard.train_step(loss, opt, **options), opt.place(params()), opt.init(params())


def run(step, p, state, batches):
    """(params, state, what was warned of)."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for b in batches:
            p, state, _ = step(p, state, b)
    return p, state, [str(w.message) for w in warned]


def every_copy(tree):
    """The bytes that each device holds."""
    return [[np.asarray(s.data).tobytes() for s in x.addressable_shards] for x in jax.tree.leaves(tree)]


BAD = {"nan": {"x": np.nan}, "inf": {"x": np.inf}, "target": {"y": -np.inf}, "overflow of the square": {"y": 1e30}}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_devices_skip_and_nothing_changes(strategy, bad):
    step, p, state = start(make(strategy), microbatches=2 if bad == "nan" else 1)
    p, state, metrics = step(p, state, batch(0))
    assert not metrics["skipped"]
    assert metrics["bad_leaf"] == -1
    before = every_copy((p, state))
    p, state, metrics = step(p, state, batch(1, **BAD[bad]))
    assert metrics["skipped"]
    assert every_copy((p, state)) == before
    p, state, metrics = step(p, state, batch(2))
    assert not metrics["skipped"]
    assert every_copy((p, state)) != before


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_as_on_a_tpu_where_updates_are_gathered(strategy, monkeypatch):
    monkeypatch.setattr(update, "_sends_updates", lambda setup, found: True)
    step, p, state = start(make(strategy))
    before = every_copy((p, state))
    p, state, metrics = step(p, state, batch(1, x=np.nan))
    assert metrics["skipped"]
    assert every_copy((p, state)) == before


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_narrow_params_with_masters_keep_their_bits_too(strategy, whole, monkeypatch):
    """With `whole`, as on a TPU, where they are chosen after the gather."""
    monkeypatch.setattr(update, "_selects_whole", lambda setup: whole)
    opt = make(strategy, master_dtype=jnp.float32)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())
    step, p, state = jaxshard.train_step(loss, opt), opt.place(narrow), opt.init(narrow)
    p, state, _ = step(p, state, batch(0))
    before = every_copy((p, state))
    p, state, metrics = step(p, state, batch(1, x=np.nan))
    assert metrics["skipped"]
    assert every_copy((p, state)) == before


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_old_or_new_params_are_chosen_after_the_gather_as_on_a_tpu(strategy, as_on):
    """Of cut ones, XLA for TPU copied all params whole: the choice is among whole ones."""
    as_on("tpu")
    opt = make(strategy, master_dtype=jnp.float32)
    narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params())
    text = jaxshard.train_step(loss, opt).lower(narrow, opt.init(narrow), batch(0)).compile().as_text()
    chosen = re.findall(r"\w+\[([\d,]+)\]\S* select\(", text)
    assert {"16,32", "32,8"} <= set(chosen)


@pytest.mark.optimized
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_rest_of_the_run_equals_one_without_the_bad_batch(strategy):
    ends = []
    for bad in (False, True):
        step, p, state = start(make(strategy))
        for i in range(4):
            if i != 2:
                p, state, _ = step(p, state, batch(i))
            elif bad:
                p, state, _ = step(p, state, batch(i, x=np.nan))
        ends.append((p, state))
    assert_same_bits(*ends)


def only_one_leaf(p, batch):
    """The gradient of "v" alone is not finite: 0 times infinity, where its own factor overflows."""
    overflow = jnp.where(batch["x"] > 5, p["v"][0, 0] * jnp.inf, 0)
    return loss({**p, "v": jax.lax.stop_gradient(p["v"])}, batch) + jnp.mean(overflow)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_spike_that_is_finite_is_an_ordinary_step(strategy):
    """A hundred times the gradient, in one row: taken as optax takes it, which clips it to the same norm as any."""
    p, state, said = run(*start(make(strategy)), [batch(0), batch(1, y=1e4), batch(2)])
    assert said == []
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves((p, state)))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    want = jax.tree.map(jnp.asarray, params())
    plain = tx.init(want)
    for b in [batch(0), batch(1, y=1e4), batch(2)]:
        updates, plain = jax.jit(tx.update)(jax.grad(loss)(want, b), plain, want)
        want = optax.apply_updates(want, updates)
    assert_close(p, want, 1e-5)


def test_the_leaf_is_named_and_the_loss_too():
    step, p, state = start(make("zero2"), only_one_leaf)
    p, state, metrics = step(p, state, batch(0, x=9.0))
    assert list(params()).index("v") == 1
    assert sorted(params())[int(metrics["bad_leaf"])] == "v"

    def loss_alone(p, batch):
        return loss(p, batch) + jax.lax.stop_gradient(jnp.mean(batch["x"]))

    step, p, state = start(make("zero2"), loss_alone, max_skips=0)
    clean = batch(0)
    p, state, metrics = step(p, state, clean)

    def infinite(p, batch):
        return loss(p, batch) + jax.lax.stop_gradient(jnp.float32(jnp.inf))

    step, p, state = start(make("zero2"), infinite, max_skips=0)
    for _ in range(2):
        p, state, metrics = step(p, state, clean)
        assert metrics["skipped"]
        assert metrics["bad_leaf"] == -1
    with pytest.raises(jaxshard.NonFiniteError, match="step 1: the loss is not finite"):
        step(p, state, clean)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_after_too_many_it_raises_with_step_and_leaf_and_nothing_is_lost(strategy):
    step, p, state = start(make(strategy), max_skips=2)
    p, state, _ = step(p, state, batch(0))
    before = every_copy((p, state))
    p, state, warned = run(step, p, state, [batch(i, x=np.nan) for i in range(4)])
    with pytest.raises(
        jaxshard.NonFiniteError, match=r"the gradient of b is not finite, for the 3rd time in a row"
    ) as caught:
        step(p, state, batch(9))
    assert warned == [f"train_step: step {i} was skipped: the gradient of b is not finite" for i in (2, 3)]
    assert (caught.value.step, caught.value.leaf) == (4, "b")
    assert isinstance(caught.value, FloatingPointError)
    assert every_copy((p, state)) == before  # nothing was dispatched, so nothing was donated
    p, state, metrics = step(p, state, batch(9))  # and one may go on
    assert not metrics["skipped"]


def test_a_step_of_the_same_params_is_not_judged_again():
    """After the error one goes back to good params, and only what these do counts."""
    step, p, state = start(make("zero2"), max_skips=0)
    p, state, _ = step(p, state, batch(0))
    for i in (1, 2):
        p, state, _ = step(p, state, batch(i, x=np.nan))
    with pytest.raises(jaxshard.NonFiniteError):
        step(p, state, batch(3))
    for i in (3, 4, 5):
        p, state, metrics = step(p, state, batch(i))
        assert not metrics["skipped"]


def test_good_steps_between_start_the_count_again():
    step, p, state = start(make("zero2"), max_skips=1)
    _, _, warned = run(step, p, state, [batch(i, **({"x": np.nan} if i % 2 else {})) for i in range(10)])
    assert len(warned) == 4


def test_a_skipped_step_is_reported_two_calls_later_and_the_last_ones_at_the_end():
    """So that a call waits for nothing once it has dispatched its step."""
    step, p, state = start(make("zero2"))
    p, state, warned = run(step, p, state, [batch(0), batch(1, x=np.nan), batch(2)])
    assert not warned
    p, state, warned = run(step, p, state, [batch(3)])
    assert warned == ["train_step: step 2 was skipped: the gradient of b is not finite"]
    p, state, _ = step(p, state, batch(4, x=np.nan))
    with pytest.warns(UserWarning, match="step 5 was skipped"):
        step.close()
    step.close()  # once is enough
    opt = make("zero2")
    with pytest.warns(UserWarning, match="step 1 was skipped") as caught, jaxshard.train_step(loss, opt) as step:
        step(opt.place(params()), opt.init(params()), batch(0, x=np.nan))
    assert len(caught) == 1
    with pytest.raises(jaxshard.NonFiniteError), jaxshard.train_step(loss, opt, max_skips=0) as step:
        step(opt.place(params()), opt.init(params()), batch(0, x=np.nan))
    with pytest.raises(ValueError, match="rows"), jaxshard.train_step(loss, opt, max_skips=0) as step:
        step(*step(opt.place(params()), opt.init(params()), batch(0, x=np.nan))[:2], batch(1, rows=3))  # is not hidden


def test_where_warnings_are_errors_no_step_is_lost():
    step, p, state = start(make("zero2"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p, state, _ = step(p, state, batch(0, x=np.nan))
        p, state, _ = step(p, state, batch(1))
        with pytest.raises(UserWarning, match="step 1 was skipped"):
            step(p, state, batch(2))
        p, state, metrics = step(p, state, batch(2))  # nothing was dispatched, so nothing was donated
    assert not metrics["skipped"]


def test_a_program_that_ends_tells_its_last_step():
    program = """if True:
        import jax
        jax.config.update("jax_num_cpu_devices", 2)
        import jax.numpy as jnp, optax, jaxshard
        opt = jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh())
        step = jaxshard.train_step(lambda w, x: jnp.mean(x @ w), opt)
        w = jnp.ones((8, 8))
        step(opt.place(w), opt.init(w), jnp.full((2, 8), jnp.nan))
        """
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=fast_environment(), check=True)
    assert "step 1 was skipped: the gradient of (the only leaf) is not finite" in done.stderr


def test_inside_jit_the_verdict_is_in_the_metrics():
    step, p, state = start(make("zero2"), max_skips=0)

    @jax.jit
    def several(p, state, batches):
        skipped = []
        for b in batches:
            p, state, metrics = step(p, state, b)
            skipped.append(metrics["skipped"])
        return p, state, jnp.stack(skipped)

    skipped = several(p, state, [batch(0), batch(1, x=np.nan), batch(2, y=np.inf), batch(3)])[2]
    assert skipped.tolist() == [False, True, True, False]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_left_to_optax_a_nan_is_what_it_is_there(strategy, x64):
    """With max_skips=None `apply_if_finite` decides, and its counters count, as on one device; then it lets NaN in."""
    tx = optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), max_consecutive_errors=2)
    batches = [batch(0), batch(1, x=np.nan), batch(2), batch(3, x=np.inf)]
    want, want_state = params(), tx.init(params())
    step, p, state = start(make(strategy, tx), max_skips=None)
    for b in batches:
        updates, want_state = jax.jit(tx.update)(jax.jit(jax.grad(loss))(want, b), want_state, want)
        want = optax.apply_updates(want, updates)
        p, state, metrics = step(p, state, b)
        assert not metrics["skipped"]
    assert_close(p, want, 1e-6)
    assert (int(state.total_notfinite), int(state.notfinite_count)) == (2, 1)
    assert int(want_state.total_notfinite) == 2
    for i in range(3):
        p, state, metrics = step(p, state, batch(i, x=np.nan))
    assert np.isnan(np.asarray(p["w"])).any()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("max_skips", [20, None])
def test_a_batch_of_weight_0_changes_nothing_and_says_so(strategy, max_skips):
    step, p, state = start(make(strategy), weighted, weighted=True, max_skips=max_skips)
    weight = np.random.default_rng(0).integers(0, 3, 16).astype("f")
    p, state, metrics = step(p, state, batch(0) | {"weight": weight})
    before = every_copy((p, state))
    p, state, metrics = step(p, state, batch(1) | {"weight": 0 * weight})
    assert metrics["skipped"]
    assert metrics["loss"] == 0
    assert every_copy((p, state)) == before
    p, state, metrics = step(p, state, batch(2) | {"weight": weight})
    assert not metrics["skipped"]
    with pytest.warns(UserWarning, match="step 2 was skipped: the whole batch has weight 0"):
        step.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_weight_0_on_a_device_is_no_reason_to_skip(strategy, microbatches, x64):
    weight = np.arange(16.0) ** 2
    weight[4:8] = 0  # two devices without any
    wide = jax.tree.map(np.float64, (params(), batch(0)))
    whole = {**wide[1], "weight": weight}
    tx = optax.sgd(0.1, momentum=0.9)
    opt = make(strategy, tx)
    step = jaxshard.train_step(weighted, opt, weighted=True, microbatches=microbatches)
    p, _, metrics = step(opt.place(wide[0]), opt.init(wide[0]), whole)

    def mean(p):
        total, weight = weighted(p, whole)
        return total / weight

    value, grads = jax.jit(jax.value_and_grad(mean))(wide[0])
    assert not metrics["skipped"]
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-13)
    assert_close(p, optax.apply_updates(wide[0], tx.update(grads, tx.init(wide[0]))[0]), 1e-13)


def test_no_warning_where_nothing_is_skipped():
    step, p, state = start(make("zero2"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(4):
            p, state, _ = step(p, state, batch(i))


@pytest.mark.parametrize("max_skips", [-1, 1.5, "no"])
def test_max_skips_that_makes_no_sense(max_skips):
    with pytest.raises(ValueError, match="max_skips"):
        jaxshard.train_step(loss, make("zero2"), max_skips=max_skips)
