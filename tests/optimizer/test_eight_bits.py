"""Moments in 8 bits: the codes, what lies where, the same on every mesh, and what a linear code would do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import assert_same_bits

import jaxshard
from jaxshard.optimizer import eight_bits

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp"]
SHAPES = [(1,), (300,), (64, 256), (3, 50, 32), (7, 5), (2, 3, 130)]


def numbers(shape, seed=0):
    """Over ten powers of ten."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 3, shape)).astype(np.float32)


def by_chance(key):
    return lambda shape: jax.random.bits(key, shape, jnp.uint32) >> 12


# The codes.


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_the_nearest_code_is_within_a_sixteenth(shape, dtype):
    x = numbers(shape) if dtype == jnp.int8 else numbers(shape) ** 2
    codes, scales = eight_bits.encode(x, dtype)
    assert (codes.shape, codes.dtype, scales.shape) == (shape, dtype, eight_bits.scale_shape(shape))
    found, largest = np.asarray(eight_bits.decode(codes, scales)), np.asarray(eight_bits._spread(scales, shape))
    reach = 2.0**-15.7 if dtype == jnp.int8 else 2.0**-31.7
    near = np.abs(x) >= reach * largest
    np.testing.assert_allclose(found[near], x[near], rtol=1 / 16)
    assert np.all(np.abs(found[~near]) <= 2 * reach * largest[~near])
    if dtype == jnp.uint8:
        assert np.all((found > 0) == (x > 0))  # a second moment is never lost


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_codes_by_chance_are_right_on_average(dtype):
    x = numbers((40, 130), seed=1)
    x = x if dtype == jnp.int8 else x**2

    @jax.jit
    def once(key):
        return eight_bits.decode(*eight_bits.encode(x, dtype, by_chance(key)))

    mean = np.mean([once(jax.random.key(i)) for i in range(600)], axis=0)
    largest = np.asarray(eight_bits._spread(eight_bits.encode(x, dtype)[1], x.shape))
    near = np.abs(x) > 1e-4 * largest
    np.testing.assert_allclose(mean[near], x[near], rtol=0.015)
    if dtype == jnp.int8:  # below the smallest code, too
        tiny = np.abs(x) < 1.8e-5 * largest
        assert np.all(np.abs(mean - x)[tiny] < 3e-6 * largest[tiny])
        assert np.sum(tiny) > 100


def test_what_is_special_stays():
    codes, scales = eight_bits.encode(jnp.zeros((3, 256)), jnp.int8)
    assert not np.any(codes)
    assert not np.any(eight_bits.decode(codes, scales))
    for value in (np.inf, np.nan):
        x = jnp.ones((256,)).at[3].set(value)
        assert not np.all(np.isfinite(eight_bits.decode(*eight_bits.encode(x, jnp.uint8))))
    largest = jnp.array([3.0, -7.0, 0.1])
    np.testing.assert_array_equal(eight_bits.decode(*eight_bits.encode(largest, jnp.int8))[1], -7.0)


# In the state.


def params():
    rng = np.random.default_rng(0)
    shapes = {"w": (3, 128, 256), "short": (256, 64), "table": (1024, 64), "bias": (256,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def make(strategy, tx, n=8, **options):
    mesh = jaxshard.make_mesh(replica=2 if strategy == "hsdp" else 1, devices=jax.devices()[:n])
    return getattr(jaxshard, strategy)(tx, mesh, moment_dtype="int8", **options)


def gradients(count):
    rng = np.random.default_rng(3)
    return [jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params()) for _ in range(count)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_stored_how_and_where(strategy):
    opt = make(strategy, optax.adam(1e-2))
    state, layout = opt.init(params()), opt.layout(params())
    kept = {"w": "int8", "short": "int8", "table": "float32", "bias": "float32"}
    assert {k: x.dtype.name for k, x in state.inner[0].mu.items()} == kept
    assert {k: x.dtype.name.replace("uint8", "int8") for k, x in state.inner[0].nu.items()} == kept
    assert state.inner[0].nu["w"].dtype == jnp.uint8
    scales = state.extra["scale"]["0"]
    assert {k: x.shape for k, x in scales["nu"].items()} == {"w": (3, 128, 2), "short": (128, 1)}
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert held == layout.bytes_per_device["state"]
    for name in ("w", "short"):
        codes, scale = state.inner[0].nu[name], scales["nu"][name]
        assert codes.sharding.spec == scale.sharding.spec  # scales lie beside their blocks


def test_bytes_per_parameter():
    opt = make("zero2", optax.adam(1e-2))
    big = {"w": jax.ShapeDtypeStruct((12, 1024, 4096), jnp.float32), "up": jax.ShapeDtypeStruct((1024, 50304), "f")}
    state = opt.layout(big).bytes_per_device["state"] * 8
    assert state / sum(x.size for x in big.values()) < 2.1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.optimized
def test_given_equal_gradients_every_strategy_has_the_same_bits(strategy):
    def run(opt):
        p, state = opt.place(params()), opt.init(params())
        update = jax.jit(opt.update)
        for g in gradients(3):
            updates, state = update(g, state, p)
            p = optax.apply_updates(p, updates)
        return p, state

    assert_same_bits(run(make(strategy, optax.adam(1e-2))), run(make("ddp", optax.adam(1e-2), n=1)))


def test_no_byte_more_is_sent():
    def sent(**options):
        opt = jaxshard.zero2(optax.adam(1e-2), jaxshard.make_mesh(), **options)
        step = jaxshard.train_step(lambda p, b: jnp.mean(b) * sum(jnp.mean(x**2) for x in p.values()), opt)
        p = opt.place(params())
        return jaxshard.inspect.report(step.lower(p, opt.init(p), np.ones((8, 4), "f")).compile()).wire_bytes

    assert sent(moment_dtype="int8") == pytest.approx(sent(), rel=1e-4)


def test_updates_follow_those_of_float32():
    def run(opt):
        p, state = opt.place(params()), opt.init(params())
        update = jax.jit(opt.update)
        for g in gradients(20):
            updates, state = update(g, state, p)
            p = optax.apply_updates(p, updates)
        return jax.device_get(p)

    got, want = run(make("zero2", optax.adam(1e-2))), run(jaxshard.ddp(optax.adam(1e-2), jaxshard.make_mesh()))
    start = params()
    for name, x in want.items():
        moved = np.linalg.norm(x - start[name])
        assert np.linalg.norm(got[name] - x) < 0.12 * moved, name


TX = {
    "adamw": (lambda: optax.adamw(1e-2), ["int8", "uint8"]),
    "rmsprop": (lambda: optax.rmsprop(1e-2), ["uint8"]),
    "momentum": (lambda: optax.sgd(1e-2, momentum=0.9), ["int8"]),
    "lion": (lambda: optax.lion(1e-3), ["int8"]),
    "amsgrad": (lambda: optax.amsgrad(1e-3), ["int8", "uint8", "uint8"]),
    "yogi": (lambda: optax.yogi(1e-3), ["int8", "float32"]),  # its second moment is a sum with signs
    "injected": (lambda: optax.inject_hyperparams(optax.adam)(1e-2), ["int8", "float32"]),  # b2 is an argument
    "steps": (lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(), ["int8", "uint8", "int8"]),
    "if finite": (lambda: optax.apply_if_finite(optax.adam(1e-2), 2), ["int8", "uint8"]),
    "clipped": (lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), ["int8", "uint8"]),
    "chain": (lambda: optax.chain(optax.clip(1.0), optax.scale_by_adam(), optax.scale(-1e-3)), ["int8", "uint8"]),
}


@pytest.mark.parametrize("name", TX)
def test_a_moment_without_sign_is_known_by_its_update(name):
    tx, want = TX[name]
    opt = make("zero2", tx())
    start = {"w": params()["w"]}
    p, state = opt.place(start), opt.init(start)
    found = [x.dtype.name for x in jax.tree.leaves(state.inner) if x.ndim]
    assert found == want
    for g in gradients(2):
        updates, state = jax.jit(opt.update)({"w": g["w"]}, state, p)
    assert [x.dtype.name for x in jax.tree.leaves(state.inner) if x.ndim] == want
    assert np.all(np.isfinite(updates["w"]))


def test_a_variance_keeps_the_digits_of_both():
    with pytest.raises(ValueError, match="no float32 moments that 8 bits could hold"):
        make("zero2", optax.rmsprop(1e-3, centered=True)).init(params())


WRAPPERS = {
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "steps": lambda: optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "if finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 2),
    "prodigy": lambda: optax.contrib.prodigy(0.1),
    "yogi": lambda: optax.yogi(1e-3),
    "adam": lambda: optax.adam(1e-3),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_gradients_that_differ_in_size_within_a_block(name):
    """A second moment rounded to 0 would take weights to 20 and more."""
    sizes, target = np.logspace(0, -3, 128).astype("f"), np.random.default_rng(0).normal(size=(64, 128)).astype("f")

    def loss(p, batch):
        return jnp.mean(jnp.sum((batch["x"] @ (p["w"] - target)) ** 2 * sizes, -1))

    def largest(**options):
        opt = jaxshard.zero2(WRAPPERS[name](), jaxshard.make_mesh(), **options)
        step = jaxshard.train_step(loss, opt)
        p = opt.place({"w": np.zeros((64, 128), "f")})
        state = opt.init(p)
        for i in range(40):
            batch = {"x": np.random.default_rng(i).normal(size=(16, 64)).astype("f")}
            p, state, _ = step(p, state, batch)
        return float(jnp.max(jnp.abs(p["w"])))

    assert largest(moment_dtype="int8") < 1.6 * largest()


# Bad input.


def test_nothing_large_is_refused():
    with pytest.raises(ValueError, match=r"moments that 8 bits could hold \(4096 elements .*, only .*mu/b"):
        make("zero2", optax.adam(1e-2)).init({"b": np.ones(64, "f"), "t": np.ones((4096, 8), "f")})


def test_another_dtype_is_refused_by_name():
    with pytest.raises(ValueError, match=r'must be jnp\.bfloat16, .*or "int8"'):
        jaxshard.zero2(optax.adam(1e-2), jaxshard.make_mesh(), moment_dtype=jnp.uint8)


def test_a_state_in_float32_is_refused():
    opt = make("zero2", optax.adam(1e-2))
    p = opt.place(params())
    with pytest.raises(ValueError, match="ShardedState"):
        opt.update(p, optax.adam(1e-2).init(p), p)


def test_no_cast_makes_one_state_of_the_other():
    ours, plain = make("zero2", optax.adam(1e-2)), jaxshard.zero2(optax.adam(1e-2), jaxshard.make_mesh())
    p, state = ours.place(params()), ours.init(params())
    with pytest.raises(ValueError, match='give moment_dtype="int8", or restart the moments'):
        plain.update(p, state, p)
    with pytest.raises(ValueError, match="a cast cannot convert them"):
        plain.update(p, state.inner, p)
    with pytest.raises(ValueError, match="a cast cannot convert them"):
        ours.update(p, jaxshard.ShardedState(plain.init(p), state.extra), p)


# A linear code.


def from_linear(codes, scales):
    return codes.astype(jnp.float32) / jnp.iinfo(codes.dtype).max * eight_bits._spread(scales, codes.shape)


def test_a_linear_code_of_second_moments_diverges(monkeypatch):
    """Gradients of a block that span powers of ten, as those of a layer's rows do."""
    reach = 10.0 ** np.linspace(0, -4, 256).astype(np.float32)

    def longest_step():
        opt = make("zero2", optax.adam(1e-3, eps=1e-12))
        start = {"w": params()["w"]}
        p, state = opt.place(start), opt.init(start)
        update, longest = jax.jit(opt.update), 0.0
        for g in gradients(10):
            updates, state = update({"w": g["w"] * reach}, state, p)
            longest = max(longest, float(jnp.max(jnp.abs(updates["w"]))))
        return longest

    ours = longest_step()
    real = eight_bits.encode
    monkeypatch.setattr(eight_bits, "encode", functools.partial(linear, real))
    monkeypatch.setattr(eight_bits, "decode", from_linear)
    assert ours < 0.1
    assert longest_step() > 10


def linear(real, x, dtype, bits=None):
    most = jnp.iinfo(dtype).max
    _, scales = real(x, dtype)
    part = jnp.abs(x) / eight_bits._spread(scales, x.shape) * most
    chance = 0.5 if bits is None else bits(x.shape).astype(jnp.float32) / 2**20
    return (jnp.sign(x) * jnp.floor(part + chance)).astype(dtype), scales
