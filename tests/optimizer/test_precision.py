"""Narrow params and moments, stochastic rounding, loss scaling: each against what it promises."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same_bits

import jaxshard
from jaxshard.base.loss_scale import LossScale
from jaxshard.optimizer.rounding import Rounder

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp"]


def params(dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"w": (32, 64), "v": (64, 8), "b": (64,), "scale": ()}
    return {name: (rng.normal(size=shape) / 8).astype(dtype) for name, shape in shapes.items()}


def batch(seed, rows=32):
    rng = np.random.default_rng(100 + seed)
    return {"x": rng.normal(size=(rows, 32)).astype(np.float32), "y": rng.normal(size=(rows, 8)).astype(np.float32)}


def loss(p, batch):
    p = jax.tree.map(lambda x: x.astype(jnp.float32), p)
    hidden = jnp.tanh(batch["x"] @ p["w"] + p["b"])
    return jnp.mean((hidden @ p["v"] * (1 + p["scale"]) - batch["y"]) ** 2)


def make(strategy, tx, **options):
    mesh = jaxshard.make_mesh(replica=2 if strategy == "hsdp" else 1)
    return getattr(jaxshard, strategy)(tx, mesh, min_shard_size=8, **options)


def train(opt, start, steps, loss=loss, **options):
    p, state = opt.place(start), opt.init(start)
    step, history = jaxshard.train_step(loss, opt, **options), []
    for i in range(steps):
        p, state, metrics = step(p, state, batch(i))
        history.append({name: float(x) for name, x in metrics.items()})
    return p, state, history


def gradients(dtype, count=3):
    return [
        jax.tree.map(lambda x, i=i: np.cos(17 * (i + x.astype(np.float32))).astype(dtype), params())
        for i in range(count)
    ]


# Stochastic rounding.


def rounded(x, calls):
    run = jax.jit(lambda count: Rounder(count)(jnp.asarray(x, jnp.float32)))
    return np.stack([np.asarray(run(jnp.uint32(i)), np.float32) for i in range(calls)])


def test_rounds_to_one_of_the_two_neighbours_and_right_on_average():
    x = np.float32([1.001, -1.001, 0.3, 1e-30, -7e30, 2.0, 1e-39, 3.0, 1 + 2**-9])
    found = rounded(x, 4000)
    nearest = x.astype(jnp.bfloat16)
    exact = nearest.astype(np.float32) == x
    spacing = np.abs(
        np.nextafter(nearest, np.copysign(jnp.bfloat16(np.inf), nearest)).astype(np.float32)
        - nearest.astype(np.float32)
    )
    assert np.all(np.abs(found - x) < spacing)
    assert np.all(found[:, exact] == x[exact])
    inexact = ~exact
    bias = np.abs(found.astype(np.float64).mean(0) - x)[inexact] / spacing[inexact]
    assert np.all(bias < 4 * 0.5 / np.sqrt(4000)), bias  # four standard deviations of a coin's mean
    assert np.all(np.abs(nearest.astype(np.float32) - x)[[0, 1]] / spacing[[0, 1]] > 4 * 0.5 / np.sqrt(4000))


def test_rounding_leaves_zeros_infinities_and_nans():
    x = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan])
    for found in rounded(x, 20):
        np.testing.assert_array_equal(found, x)
        assert np.signbit(found[1])
    tiny_nan = np.array([0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(rounded(tiny_nan, 20)).all()


@pytest.mark.parametrize("count", [0, 1, 2**32 - 1])
def test_each_update_and_each_array_has_chances_of_its_own(count):
    rounder = Rounder(jnp.uint32(count))
    x = jnp.full(1000, 1 + 2**-8)
    a, b, c = rounder(x), rounder(x), Rounder(jnp.uint32(count) + jnp.uint32(1))(x)
    assert 0.4 < np.mean(np.asarray(a == b)) < 0.6
    assert 0.4 < np.mean(np.asarray(a == c)) < 0.6


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "options", [{"stochastic_rounding": True}, {"stochastic_rounding": True, "moment_dtype": jnp.bfloat16}]
)
@pytest.mark.optimized
def test_given_equal_gradients_every_strategy_rounds_alike(strategy, options):
    """Roundings depend on the update and the place in the whole leaf, not on the device or the mesh."""

    def run(opt):
        p, state = opt.place(params(jnp.bfloat16)), opt.init(params(jnp.bfloat16))
        update = jax.jit(opt.update)
        for g in gradients(jnp.bfloat16):
            updates, state = update(g, state, p)
            p = optax.apply_updates(p, updates)
        return p, state

    tx = optax.adamw(1e-2, b2=0.95)
    one = jaxshard.ddp(tx, jaxshard.make_mesh(devices=jax.devices()[:1]), **options)
    assert_same_bits(run(make(strategy, tx, **options)), run(one))


def test_small_updates_are_lost_by_the_nearest_and_kept_on_average():
    """A step of 2**-12 of the value: nearest rounding never moves, stochastic rounding arrives."""

    def drift(p, batch):
        return -jnp.sum(p["w"].astype(jnp.float32)) + 0 * jnp.mean(batch["x"])

    start = {"w": np.ones(4096, jnp.bfloat16)}
    found = {}
    for stochastic in (False, True):
        opt = make("zero2", optax.sgd(2.0**-12), stochastic_rounding=stochastic)
        p, _, _ = train(opt, start, 64, drift)
        found[stochastic] = np.asarray(p["w"], np.float32).mean()
    assert found[False] == 1
    assert found[True] == pytest.approx(1 + 64 * 2.0**-12, abs=4 * 2.0**-8 / np.sqrt(4096) * 2)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_inner_state_is_that_of_float32_params(strategy):
    opt = make(strategy, optax.adamw(1e-2), stochastic_rounding=True)
    p, state, _ = train(opt, params(jnp.bfloat16), 2)
    assert jax.tree.map(jnp.result_type, state.inner) == jax.tree.map(jnp.result_type, optax.adamw(1e-2).init(params()))
    assert {x.dtype for x in jax.tree.leaves(p)} == {jnp.dtype(jnp.bfloat16)}
    assert int(state.extra["rounding"]) == 2


# bf16 moments.


def test_second_moments_in_bfloat16_follow_those_in_float32():
    """At b2 = 0.999 a change is 2**-10 of the value, under bf16's half spacing: the nearest one stands still."""
    tx = optax.adam(1e-3, b2=0.999)
    grads = [{"w": np.full(4096, 1.0 if i < 100 else 2.0, np.float32)} for i in range(1000)]

    def second_moment(opt):
        p = opt.place({"w": np.ones(4096, np.float32)})
        state = opt.init(p)
        update = jax.jit(opt.update, donate_argnums=1)
        for g in grads:
            _, state = jax.block_until_ready(update(g, state, p))
        inner = state.inner if isinstance(state, jaxshard.ShardedState) else state
        return np.asarray(inner[0].nu["w"], np.float32)

    want = second_moment(make("zero2", tx))
    found = second_moment(make("zero2", tx, moment_dtype=jnp.bfloat16))
    assert found.mean() == pytest.approx(want.mean(), rel=0.01)
    nearest = jnp.bfloat16(0)
    for g in grads:
        nearest = (0.999 * nearest.astype(jnp.float32) + 0.001 * g["w"][0] ** 2).astype(jnp.bfloat16)
    assert float(nearest) < 0.5 * want.mean()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_moments_lie_in_half_the_bytes(strategy):
    plain, ours = make(strategy, optax.adamw(1e-2)), make(strategy, optax.adamw(1e-2), moment_dtype=jnp.bfloat16)
    state = ours.init(params())
    dtypes = {name: x.dtype.name for name, x in state.inner[0].nu.items()}
    assert dtypes == {"w": "bfloat16", "v": "bfloat16", "b": "bfloat16", "scale": "float32"}  # scalars gain nothing
    assert ours.shardings(params()).specs.state.inner == plain.shardings(params()).specs.state
    scalars = 4 + 2 * 4  # Adam's count, and the moments of "scale"
    wide = plain.layout(params()).bytes_per_device["state"] - scalars
    assert ours.layout(params()).bytes_per_device["state"] == wide / 2 + scalars + 4  # the count of roundings
    _, _, history = train(ours, params(), 4)
    _, _, want = train(plain, params(), 4)
    assert [m["loss"] for m in history] == pytest.approx([m["loss"] for m in want], rel=1e-2)


WRAPPED = {
    "schedule_free": lambda: optax.contrib.schedule_free(optax.adam(1e-2, b1=0.0), 1e-2, b1=0.9),
    "dog": lambda: optax.chain(optax.contrib.dog(1.0), optax.trace(0.9)),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.masked(optax.adam(1e-2), {k: k != "b" for k in params()})
    ),
    "steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_copies_of_params_are_no_moments(name):
    """What starts as a copy of the params keeps all its digits: rounding it would be another optimizer."""
    opt = make("zero2", WRAPPED[name](), moment_dtype=jnp.bfloat16)
    start = params()
    plain, state = WRAPPED[name]().init(start), jax.device_get(opt.init(start).inner)
    other = WRAPPED[name]().init(params(seed=1))
    for a, b, got in zip(*map(jax.tree.leaves, (plain, other, state)), strict=True):
        copy, shaped = not np.array_equal(a, b), np.ndim(a) > 0 and a.dtype == np.float32
        assert got.dtype == (jnp.bfloat16 if shaped and not copy else a.dtype)


def heavy_ball():
    """p - 0.01 g + 0.9 (p - the params before): a state that starts at zeros and becomes a copy of the params."""

    def update(grads, state, p):
        before, count = state
        momentum = jax.tree.map(lambda x, old: jnp.where(count == 0, 0.0, 0.9 * (x - old)), p, before)
        return jax.tree.map(lambda g, m: m - 0.01 * g, grads, momentum), (p, count + 1)

    return optax.GradientTransformation(lambda p: (jax.tree.map(jnp.zeros_like, p), 0), update)


@pytest.mark.parametrize("loop", ["none", "scan", "fori", "while"])
def test_a_gradient_that_a_loop_keeps_is_no_moment(loop):
    """The update takes its difference from the next one."""

    def init(p):
        return {"before": jax.tree.map(jnp.zeros_like, p), "mean": jax.tree.map(jnp.zeros_like, p)}

    def update(grads, state, params=None):
        def turn(carry):
            return {"before": grads, "mean": jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, carry["mean"], grads)}

        new = {
            "none": lambda: turn(state),
            "scan": lambda: jax.lax.scan(lambda c, _: (turn(c), None), state, None, length=1)[0],
            "fori": lambda: jax.lax.fori_loop(0, 1, lambda _, c: turn(c), state),
            "while": lambda: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, turn(c[1])), (0, state))[1],
        }[loop]()
        return jax.tree.map(lambda m, g, old: m + g - old, new["mean"], grads, state["before"]), new

    state = make("zero2", optax.GradientTransformation(init, update), moment_dtype=jnp.bfloat16).init(params()).inner
    assert {x.dtype for x in jax.tree.leaves(state["before"])} == {jnp.dtype("float32")}
    assert jnp.dtype(jnp.bfloat16) in {x.dtype for x in jax.tree.leaves(state["mean"])}


def test_what_becomes_a_copy_of_the_params_is_no_moment():
    """Differences are taken of it; and a count that is a plain Python number is no obstacle."""
    tx = optax.chain(optax.trace(0.5), heavy_ball())
    opt = make("zero2", tx, moment_dtype=jnp.bfloat16)
    state = opt.init(params())
    assert {x.dtype.name for x in jax.tree.leaves(state.inner[0])} == {"bfloat16", "float32"}  # "scale" is a number
    assert {x.dtype.name for x in jax.tree.leaves(state.inner[1][0])} == {"float32"}
    _, _, history = train(opt, params(), 6)
    _, _, want = train(make("zero2", tx), params(), 6)
    assert [m["loss"] for m in history] == pytest.approx([m["loss"] for m in want], rel=1e-2)


def test_moments_that_nobody_can_tell_are_refused():
    with pytest.raises(ValueError, match="cannot be traced without further arguments"):
        make("zero2", optax.lbfgs(), moment_dtype=jnp.bfloat16).init(params())


def as_list(tx):
    """Its state as the list of its leaves."""

    def update(grads, state, p=None):
        state = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(tx.init, grads)), state)
        updates, state = tx.update(grads, state, p)
        return updates, jax.tree.leaves(state)

    return optax.GradientTransformation(lambda p: jax.tree.leaves(tx.init(p)), update)


def test_moments_at_no_parameters_path():
    pair = optax.LookaheadParams.init_synced(params())
    state = make("zero2", optax.lookahead(optax.adam(0.01), 2, 0.5), moment_dtype=jnp.bfloat16).init(pair)
    assert state.inner.fast_state[0].nu["w"].dtype == jnp.bfloat16
    state = make("zero2", as_list(optax.adam(0.01)), moment_dtype="bfloat16").init(params())
    assert [x.dtype.name for x in state.inner if x.ndim] == ["bfloat16"] * 6


# Masters, and the dtype of reductions.


def narrowed(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


@pytest.mark.optimized
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_params_that_were_changed_take_their_masters_along(strategy):
    """Loaded, pruned, clipped: plain optax would go on from them, and so do masters; others keep all their digits."""
    opt = make(strategy, optax.sgd(0.1), master_dtype=jnp.float32)
    step = jaxshard.train_step(loss, opt)
    p, state, _ = step(opt.place(narrowed(params())), opt.init(narrowed(params())), batch(0))
    master = jax.device_get(state.extra["master"])
    pruned = jax.device_get(p) | {"v": np.zeros_like(p["v"])}
    p, state, metrics = step(opt.place(pruned), state, batch(1))
    want = {name: np.asarray(x, np.float32) for name, x in (master | {"v": np.zeros((64, 8))}).items()}
    value, grads = jax.value_and_grad(loss)(pruned, batch(1))
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-3)
    for name, x in jax.device_get(state.extra["master"]).items():
        np.testing.assert_allclose(x, want[name] - 0.1 * np.asarray(grads[name], np.float32), atol=1e-4)
    assert_same_bits(jax.device_get(p), narrowed(jax.device_get(state.extra["master"])))


def test_masters_inside_a_chain_that_scales_what_they_say():
    """What stands after them moves the params as it would without masters."""

    def moved(**options):
        opt = make("zero2", optax.sgd(0.5), **options)
        tx, p = optax.chain(opt, optax.scale(0.1)), opt.place(narrowed(params()))
        state = tx.init(p)
        for i in range(8):
            _, grads = jaxshard.value_and_grad(loss, opt)(p, batch(i))
            updates, state = tx.update(grads, state, p)
            p = jax.block_until_ready(optax.apply_updates(p, updates))
        start = narrowed(params())
        return sum(float(np.linalg.norm(np.float32(p[name]) - np.float32(start[name]))) for name in start)

    assert moved(master_dtype=jnp.float32) == pytest.approx(moved(), rel=0.1)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "hsdp"])
def test_with_masters_params_are_gathered_in_their_own_dtype(strategy):
    """Half the bytes for bf16: read from the program handed to the compiler (XLA for CPU widens bf16 collectives)."""
    opt = make(strategy, optax.adamw(1e-2), master_dtype=jnp.float32, reduce_dtype=jnp.float32)
    lowered = jaxshard.train_step(loss, opt).lower(params(jnp.bfloat16), opt.init(params(jnp.bfloat16)), batch(0))
    text = lowered.as_text()
    gathers = [line for line in text.splitlines() if "all_gather" in line and "tensor<" in line]
    scatters = [line for line in text.splitlines() if "reduce_scatter" in line]
    assert gathers
    assert all("bf16" in line.split("->")[-1] for line in gathers)
    assert scatters
    regions = text.split('"stablehlo.reduce_scatter"')[1:]
    assert all("bf16" not in region.split("}) : ")[1].split("\n")[0] for region in regions)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float32_params_reduced_in_bfloat16(strategy):
    """The reverse: half the wire, and gradients right to bf16's rounding of each device's part and of each sum."""
    narrow, plain = make(strategy, optax.sgd(0.1), reduce_dtype=jnp.bfloat16), make(strategy, optax.sgd(0.1))
    got = jaxshard.value_and_grad(loss, narrow, microbatches=2)(params(), batch(0))[1]
    want = jaxshard.value_and_grad(loss, plain, microbatches=2)(params(), batch(0))[1]
    for name in want:
        far = np.linalg.norm(np.asarray(got[name] - want[name])) / np.linalg.norm(np.asarray(want[name]))
        assert got[name].dtype == jnp.float32
        assert 0 < far < 16 * 2**-8


# Loss scaling.


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4), st.integers(1, 3))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_the_scale_follows_its_rule(overflows, interval, hysteresis):
    rule = LossScale(initial=8.0, growth_interval=interval, hysteresis=hysteresis, minimum=2.0, maximum=64.0)
    state = rule.start()
    scale, good, left = 8.0, 0, hysteresis
    for overflowed in overflows:
        state = rule.after(state, jnp.bool_(overflowed))
        if overflowed:
            good, left = 0, max(left - 1, 0)
            scale = max(scale / 2, 2.0) if left == 0 else scale
        else:
            good += 1
            if good == interval:
                scale, good, left = min(scale * 2, 64.0), 0, hysteresis
        assert (float(state["scale"]), int(state["good_steps"]), int(state["hysteresis"])) == (scale, good, left)


def half_loss(p, batch, strength=1.0):
    """All in float16, activations too; gradients of the order of 1e-8 underflow there (the least is 6e-8)."""
    p = jax.tree.map(lambda x: x.astype(jnp.float16), p)
    hidden = jnp.tanh(batch["x"].astype(jnp.float16) @ p["w"] + p["b"])
    out = hidden @ p["v"] * (1 + p["scale"])
    return strength * jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["float16 params with masters", "float32 params"])
def test_gradients_that_underflow_are_saved_and_clipped_after_unscaling(strategy, kind):
    tiny = functools.partial(half_loss, strength=1e-6)
    tx = optax.chain(optax.clip_by_global_norm(1e-7), optax.sgd(1e5, momentum=0.9))
    narrow = kind == "float16 params with masters"
    options = {"master_dtype": jnp.float32, "reduce_dtype": jnp.float32} if narrow else {}
    start = params(np.float16) if narrow else params()
    _, _, history = train(make(strategy, tx, loss_scale=LossScale(), **options), start, 5, tiny)
    _, _, lost = train(make(strategy, tx, **options), start, 5, tiny)
    _, _, want = train(make(strategy, tx), jax.tree.map(np.float32, start), 5, lambda p, b: 1e-6 * loss(p, b))
    norms = [m["grad_norm"] for m in history]
    assert norms == pytest.approx([m["grad_norm"] for m in want], rel=0.05)
    assert [m["loss"] for m in history] == pytest.approx([m["loss"] for m in want], rel=0.05)
    assert [m["grad_norm"] for m in lost] != pytest.approx(norms, rel=0.1)


@pytest.mark.optimized
def test_overflow_lowers_the_scale_and_nothing_else():
    opt = make("zero2", optax.adamw(1e-2), master_dtype=jnp.float32, loss_scale=LossScale(2.0**24, hysteresis=1))
    start = params(np.float16)
    p, state = opt.place(start), opt.init(start)
    step, scales = jaxshard.train_step(functools.partial(half_loss, strength=100.0), opt, donate=False), []
    for _ in range(20):
        new, after, metrics = step(p, state, batch(0))
        scales.append(float(metrics["loss_scale"]))
        if not metrics["skipped"]:
            break
        assert_same_bits((new, after.inner, after.extra["master"]), (p, state.inner, state.extra["master"]))
        assert float(after.extra["loss_scale"]["scale"]) == scales[-1] / 2
        p, state = new, after
    assert 2 <= len(scales) < 20
    assert scales == [2.0 ** (24 - j) for j in range(len(scales))]
    assert np.isfinite(metrics["grad_norm"])


def test_weighted_loss_is_scaled_too():
    def weighted(p, batch):
        return half_loss(p, batch, 1e-6) * 3.0, 3.0

    tx = optax.sgd(0.1)
    options = {"master_dtype": jnp.float32, "reduce_dtype": jnp.float32}
    _, _, got = train(
        make("zero2", tx, loss_scale=LossScale(), **options),
        params(np.float16),
        2,
        weighted,
        weighted=True,
        microbatches=2,
    )
    _, _, want = train(make("zero2", tx), params(), 2, lambda p, b: 1e-6 * loss(p, b))
    assert [m["grad_norm"] for m in got] == pytest.approx([m["grad_norm"] for m in want], rel=0.05)


# Bad input.


BAD = [
    (ValueError, {"moment_dtype": jnp.float16}, jnp.float32, ["moment_dtype", "bfloat16"]),
    (
        ValueError,
        {"stochastic_rounding": True, "master_dtype": jnp.float32},
        jnp.bfloat16,
        ["stochastic_rounding", "master_dtype"],
    ),
    (TypeError, {"loss_scale": 1024.0}, jnp.float32, ["loss_scale", "LossScale", "float"]),
    (ValueError, {"stochastic_rounding": True}, jnp.float32, ["stochastic_rounding", "no parameter is bfloat16"]),
    (ValueError, {"stochastic_rounding": True}, jnp.float16, ["stochastic_rounding", "b is float16", "master_dtype"]),
    (ValueError, {"loss_scale": LossScale()}, jnp.float16, ["loss_scale", "b is float16", "master_dtype"]),
    (
        ValueError,
        {"moment_dtype": jnp.bfloat16},
        jnp.bfloat16,
        ["moment_dtype", "no float32 moments", "mu/b bfloat16[64]"],
    ),
    (ValueError, {"master_dtype": jnp.bfloat16}, jnp.float32, ["master_dtype", "b is float32", "give float32"]),
    (ValueError, {"master_dtype": jnp.float16}, jnp.bfloat16, ["master_dtype", "b is bfloat16", "give float32"]),
    (ValueError, {"master_dtype": jnp.float8_e4m3fn}, jnp.bfloat16, ["master_dtype", "16 bits or more"]),
    (
        ValueError,
        {"loss_scale": LossScale(), "master_dtype": jnp.float16},
        jnp.float16,
        ["loss_scale", "b is float16", "master_dtype=jnp.float32"],
    ),
]


OTHER_OPTIONS = [
    ({}, {"master_dtype": jnp.float32}, "plain optax's, but this strategy's options also need 'master'.*ShardedState"),
    ({"moment_dtype": jnp.bfloat16}, {}, "has 'rounding' in addition to plain optax's.*give state.inner"),
    ({"moment_dtype": jnp.bfloat16}, {"stochastic_rounding": True}, "mu/b is bfloat16, and .* makes it float32"),
]


@pytest.mark.parametrize(("made", "used", "message"), OTHER_OPTIONS)
def test_a_state_made_under_other_options(made, used, message):
    dtype = jnp.bfloat16 if used else jnp.float32
    opt, tx = make("zero2", optax.adam(0.01), **used), optax.adam(0.01)
    state = make("zero2", tx, **made).init(params(np.float32 if made else dtype))
    p = opt.place(params(dtype))
    for run in (
        lambda: opt.update(p, state, p),
        lambda: jaxshard.train_step(loss, opt)(p, state, batch(0)),
    ):
        with pytest.raises(ValueError, match=message):
            run()


def test_a_plain_state_goes_on_beside_masters():
    """As the error says how."""
    opt, p = make("zero2", optax.adam(0.01), master_dtype=jnp.float32), narrowed(params())
    plain = optax.adam(0.01).init(params())
    state = jaxshard.ShardedState(plain, opt.init(p).extra)
    _, state, _ = jaxshard.train_step(loss, opt)(opt.place(p), state, batch(0))
    assert int(state.inner[0].count) == 1


def test_batches_without_weight_say_nothing_of_the_scale():
    def weighted(p, batch):
        return loss(p, batch) * jnp.sum(batch["weight"]), jnp.sum(batch["weight"])

    opt = make("zero2", optax.sgd(0.1), loss_scale=LossScale(8.0, 1), master_dtype=jnp.float32)
    step = jaxshard.train_step(weighted, opt, weighted=True)
    p, state = opt.place(params(np.float16)), opt.init(params(np.float16))
    scales = []
    for weight in (1.0, 0.0, 0.0, 1.0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            p, state, _ = step(p, state, batch(0) | {"weight": np.full((32,), weight, np.float32)})
        scales.append(float(state.extra["loss_scale"]["scale"]))
    assert scales == [16, 16, 16, 32]


@pytest.mark.optimized
def test_hyperparameters_set_to_pythons_numbers():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    opt = make("zero2", tx)
    step, p, state = jaxshard.train_step(loss, opt), opt.place(params()), opt.init(params())
    p, state, _ = step(p, state, batch(0))
    state.hyperparams["learning_rate"] = 0.0
    before = jax.device_get(p)
    p, state, _ = step(p, state, batch(1))
    assert_same_bits(jax.device_get(p), before)


@pytest.mark.parametrize(("error", "options", "dtype", "words"), BAD)
def test_senseless_options_are_refused_before_anything_is_made(error, options, dtype, words):
    with pytest.raises(error) as caught:
        make("zero2", optax.adamw(1e-2), **options).init(params(dtype))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "options",
    [
        {"initial": 0.5},
        {"minimum": 0.0},
        {"factor": 1.0},
        {"growth_interval": 0},
        {"hysteresis": 0},
        {"initial": 2.0**30},
        {"maximum": 2.0**128},
        {"factor": float("nan")},
        {"growth_interval": 1.5},
    ],
)
def test_a_scale_that_makes_no_sense(options):
    with pytest.raises(ValueError, match="LossScale: needs"):
        LossScale(**options)


def test_update_cannot_scale_the_loss():
    opt = make("zero2", optax.adamw(1e-2), loss_scale=LossScale())
    with pytest.raises(ValueError, match="train_step"):
        opt.update(params(), opt.init(params()), params())
    with pytest.raises(ValueError, match="max_skips=None"):
        jaxshard.train_step(loss, opt, max_skips=None)


def test_update_without_params_cannot_round():
    opt = make("zero2", optax.adamw(1e-2), stochastic_rounding=True)
    start = params(jnp.bfloat16)
    with pytest.raises(ValueError, match="need the params"):
        opt.update(start, opt.init(start))


@pytest.mark.parametrize("option", [{"stochastic_rounding": True}, {"moment_dtype": jnp.bfloat16}])
def test_the_local_view_cannot_round(option):
    dtype = jnp.bfloat16 if "stochastic_rounding" in option else jnp.float32
    opt = make("zero2", optax.adamw(1e-2), **option)
    state = opt.init(params(dtype))

    def local(p, state):
        return opt.update(jax.lax.pcast(p, ("replica", "data"), to="varying"), state, p)[0]

    specs = opt.shardings(params(dtype)).specs.state
    run = jax.shard_map(local, mesh=opt.mesh, in_specs=(jax.P(), specs), out_specs=jax.P())
    with pytest.raises(ValueError, match="call update outside shard_map"):
        jax.jit(run)(params(dtype), state)


WIDENED = r"not eqx\.apply_updates or \+"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"master_dtype": jnp.float32}, pytest.warns(UserWarning, match="all params are float32.*" + WIDENED)),
        ({"stochastic_rounding": True}, pytest.raises(ValueError, match="no parameter is bfloat16.*" + WIDENED)),
    ],
)
def test_params_that_a_plain_sum_widened_are_told(options, told):
    """As `eqx.apply_updates` does: the model then computed in float32, without a word."""
    opt = make("zero2", optax.sgd(0.1), **options)
    params = opt.place({"w": jnp.ones((16, 8), jnp.bfloat16)})
    state, grads = opt.init(params), {"w": jnp.ones((16, 8), jnp.bfloat16)}
    updates, state = opt.update(grads, state, params)
    kept = optax.apply_updates(params, updates)
    assert kept["w"].dtype == jnp.bfloat16
    opt.update(grads, state, kept)
    wide = jax.tree.map(lambda p, u: p + u.astype(jnp.float32), params, updates)
    with told:
        opt.update(grads, state, wide)


@pytest.mark.parametrize(
    ("dtype", "microbatches", "reduce_dtype", "told"),
    [
        (jnp.bfloat16, 2, None, True),
        (jnp.bfloat16, 1, None, False),
        (jnp.bfloat16, 2, jnp.float32, False),
        (jnp.float32, 2, None, False),
    ],
)
def test_the_layout_says_what_narrow_sums_over_microbatches_lose(dtype, microbatches, reduce_dtype, told):
    opt = jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh(), reduce_dtype=reduce_dtype)
    step = jaxshard.train_step(lambda p, b: jnp.mean(b @ p["w"]), opt, microbatches=microbatches)
    layout = step.layout({"w": jnp.ones((8, 4), dtype)}, jnp.ones((32, 8), dtype))
    assert ("sums: over 2 microbatches gradients are added up in bfloat16" in str(layout)) == told
