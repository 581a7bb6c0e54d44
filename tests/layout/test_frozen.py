"""Frozen params: exact, of any dtype; no gradient is computed or sent for them, and no state kept."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from oracle import assert_close, distances

import jaxshard
from jaxshard.checkpoint import Checkpointer

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp"]
LAYERS, WIDTH, RANK, VOCABULARY = 3, 64, 4, 512


def params(base=np.int8):
    """A base in 8 bits with scales, adapters of low rank, a frozen table and a trained head (Hu et al. 2021)."""
    rng = np.random.default_rng(0)
    whole = rng.integers(-7, 8, (LAYERS, WIDTH, WIDTH))
    return {
        "base": {
            "w": whole.astype(base),
            "scale": np.full((LAYERS, WIDTH), 0.03),
            "table": rng.normal(size=(VOCABULARY, WIDTH)),
        },
        "lora": {"a": rng.normal(size=(LAYERS, WIDTH, RANK)) / 8, "b": np.zeros((LAYERS, RANK, WIDTH))},
        "out": rng.normal(size=(WIDTH, VOCABULARY)) / 8,
    }


def loss(p, batch):
    def layer(x, block):
        w, scale, a, b = jaxshard.unshard(block)
        return x + jnp.tanh(x @ (w.astype(x.dtype) * scale) + x @ a @ b), None

    blocks = (p["base"]["w"], p["base"]["scale"], p["lora"]["a"], p["lora"]["b"])
    x, _ = lax.scan(jax.checkpoint(layer), p["base"]["table"][batch["ids"]], blocks)
    logits = x @ jaxshard.unshard(p["out"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def batches(count):
    rng = np.random.default_rng(1)
    return [{k: rng.integers(0, VOCABULARY, (48, 5)) for k in ("ids", "y")} for _ in range(count)]


INNER = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


@functools.cache
def expected(inner):
    """Plain optax, which gets the trained ones alone."""
    whole, tx = params(), INNER[inner]()
    base, rest = whole.pop("base"), whole
    state = tx.init(rest)
    for batch in batches(3):
        _, grads = jax.value_and_grad(lambda rest, b=batch: loss({"base": base, **rest}, b))(rest)
        updates, state = tx.update(grads, state, rest)
        rest = optax.apply_updates(rest, updates)
    return rest


def make(strategy, inner="adamw", n=8, **options):
    mesh = jaxshard.make_mesh(replica=2 if strategy == "hsdp" else 1, devices=jax.devices()[:n])
    return getattr(jaxshard, strategy)(INNER[inner](), mesh, **{"frozen": ["^base/"], "min_shard_size": 1, **options})


def train(opt, whole=None, **options):
    step = jaxshard.train_step(loss, opt, **options)
    p = opt.place(whole or params())
    state = opt.init(p)
    for batch in batches(3):
        p, state, metrics = step(p, state, batch)
    return p, state, metrics


def assert_same_base(p):
    chex.assert_trees_all_equal(p["base"], params()["base"], strict=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("inner", "n", "microbatches"), [("adamw", 8, 1), ("sgd", 4, 3), ("steps", 2, 1)])
def test_equals_optax_on_the_trained_ones(x64, strategy, inner, n, microbatches):
    p, _, _ = train(make(strategy, inner, n), microbatches=microbatches)
    assert_same_base(p)
    assert_close({k: p[k] for k in ("lora", "out")}, expected(inner), 1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"frozen": {"base": True, "lora": False, "out": False}},
        {"frozen": "base"},
        {"regather": "step"},
        {"state_axes": ("data", "replica")},
    ],
)
def test_with_other_options(x64, options):
    p, _, _ = train(make("hsdp", **options))
    assert_same_base(p)
    assert_close({k: p[k] for k in ("lora", "out")}, expected("adamw"), 1e-12)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize(("strategy", "microbatches"), [("ddp", 1), ("zero2", 1), ("zero3", 1), ("zero3", 3)])
def test_in_the_order_of_gpus_and_tpus(x64, as_on, strategy, microbatches, platform):
    as_on(platform)
    p, _, _ = train(make(strategy), microbatches=microbatches)
    assert_same_base(p)
    assert_close({k: p[k] for k in ("lora", "out")}, expected("adamw"), 1e-12)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_by_hand_and_by_evaluate(x64, strategy):
    """Gradients and updates of frozen ones are the number 0, which `apply_updates` adds."""
    opt = make(strategy)
    gradients, p = jaxshard.value_and_grad(loss, opt), opt.place(params())
    state = opt.init(p)

    @jax.jit
    def step(p, state, batch):
        value, grads = gradients(p, batch)
        updates, state = opt.update(grads, state, p)
        return value, grads, optax.apply_updates(p, updates), state

    for batch in batches(3):
        value, grads, p, state = step(p, state, batch)
        assert {x.shape for x in jax.tree.leaves(grads["base"])} == {()}
    assert_same_base(p)
    assert_close({k: p[k] for k in ("lora", "out")}, expected("adamw"), 1e-12)
    want = loss(jax.tree.map(jnp.asarray, params()), batches(3)[2])
    assert float(jaxshard.evaluate(loss, opt)(opt.place(params()), batches(3)[2])) == pytest.approx(
        float(want), rel=1e-12
    )
    assert value < 10
    assert jaxshard.check(loss, opt, opt.place(params()), batches(1)[0])


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint8, jnp.float8_e4m3fn, jnp.bfloat16])
def test_a_base_of_any_dtype(dtype):
    whole = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, params())
    whole["base"]["w"] = jnp.abs(jnp.asarray(whole["base"]["w"])).astype(dtype)
    p, _, metrics = train(make("zero3"), whole)
    assert p["base"]["w"].dtype == dtype
    np.testing.assert_array_equal(np.asarray(p["base"]["w"], np.float32), np.asarray(whole["base"]["w"], np.float32))
    assert np.isfinite(metrics["loss"])


def test_masters_and_eight_bit_moments_are_of_the_trained_ones():
    whole = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float64 else x, params())
    _, state, _ = train(make("zero3", master_dtype=jnp.float32, moment_dtype="int8"), whole)
    assert len(jax.tree.leaves(state.extra["master"])) == 3
    assert {x.dtype.name for x in jax.tree.leaves(state.inner) if x.size > 4096} == {"int8", "uint8"}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_init_may_be_traced(strategy):
    opt = make(strategy)
    want = jax.tree.map(lambda x: (x.shape, x.dtype), opt.init(params()))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(opt.init, params())) == want
    made = jax.jit(opt.init)(params())
    assert jax.tree.map(lambda x: x.sharding.spec, made) == jax.tree.map(lambda x: x.sharding.spec, opt.init(params()))


def pipelined(schedule):
    def stage(blocks, x, index):
        def layer(x, block):
            w, s = jaxshard.unshard((block["w"], block["s"]))
            return x + jnp.tanh(x @ w) * s, None

        return lax.scan(layer, x, blocks)[0]

    def loss(p, b):
        first, last = lambda sh, b, i: b["x"] @ sh["e"], lambda sh, x, b, i: jnp.mean((x - b["y"]) ** 2)
        return jaxshard.pipeline(
            stage, first, last, p["blocks"], {"e": p["e"]}, b, num_microbatches=2, schedule=schedule
        )

    return loss


@pytest.mark.parametrize(("schedule", "zero", "refused"), [("gpipe", 3, False), ("1f1b", 2, False), ("1f1b", 3, True)])
def test_in_a_pipeline(x64, schedule, zero, refused):
    rng = np.random.default_rng(0)
    whole = {"blocks": {"w": rng.normal(size=(4, 8, 8)) / 3, "s": rng.normal(size=(4, 8))}, "e": np.eye(8)}
    batch = {"x": rng.normal(size=(8, 8)), "y": rng.normal(size=(8, 8))}
    mesh = jaxshard.make_mesh(pipeline=2, devices=jax.devices()[:4])
    specs = [("blocks", jax.P("pipeline"))]
    opt = jaxshard.hybrid(optax.sgd(0.1), mesh, specs, zero=zero, frozen=["/s"], min_shard_size=2)
    p = opt.place(whole)
    step = jaxshard.train_step(pipelined(schedule), opt)
    if refused:
        with pytest.raises(ValueError, match=r'frozen: blocks/s .*sharded.*schedule="gpipe"'):
            step(p, opt.init(p), batch)
        return
    got, _, _ = step(p, opt.init(p), batch)

    def plain(w, e):
        x = batch["x"] @ e
        for i in range(4):
            x = x + jnp.tanh(x @ w[i]) * whole["blocks"]["s"][i]
        return jnp.mean((x - batch["y"]) ** 2)

    dw, de = jax.grad(plain, (0, 1))(whole["blocks"]["w"], whole["e"])
    np.testing.assert_array_equal(got["blocks"]["s"], whole["blocks"]["s"])
    assert_close([got["blocks"]["w"], got["e"]], [whole["blocks"]["w"] - 0.1 * dw, whole["e"] - 0.1 * de], 1e-12)


# What lies where, and what is sent.


def test_nothing_is_kept_or_sent_but_the_base_itself():
    whole = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, params())
    opt = make("zero3")
    layout, p = opt.layout(whole), opt.place(whole)
    trained = sum(whole[k].size if k == "out" else sum(x.size for x in whole[k].values()) for k in ("lora", "out"))
    assert layout.bytes_per_device["grads"] == trained * 4 // 8
    assert layout.bytes_per_device["state"] == 2 * trained * 4 // 8 + 4
    assert layout.bytes_per_device["params"] == sum(x.nbytes for x in jax.tree.leaves(whole)) // 8
    step = jaxshard.train_step(loss, opt)
    report = jaxshard.inspect.report(step.lower(p, opt.init(p), batches(1)[0]).compile())
    scattered = sum(c.wire_bytes for c in report.collectives if c.kind == "reduce-scatter")
    rows_of_table = batches(1)[0]["ids"].size * WIDTH
    assert scattered <= 7 / 8 * (trained + rows_of_table) * 4 * 1.01
    found = jaxshard.plan.predict(step, p, batches(1)[0])
    assert (found.at_rest["params"], found.at_rest["state"]) == report.arguments[:2]
    assert found.wire_bytes == pytest.approx(report.wire_bytes, rel=0.02)


def test_the_layout_says_so():
    said = jaxshard.value_and_grad(loss, make("zero3")).layout(params(), batches(1)[0])
    assert said.gathers["base", "w"] == "gathered at unshard"
    assert "frozen; gathered at unshard" in str(said)
    assert not [leaf.path for leaf in said.state if "base" in leaf.path]


def test_a_checkpoint_has_them(x64, tmp_path):
    opt, other = make("zero3"), make("zero2", n=4)
    p = opt.place(params())
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": p, "state": opt.init(p)})
        zeros = other.place(jax.tree.map(np.zeros_like, params()))
        _, found = checkpoints.restore({"params": zeros, "state": other.init(zeros)})
    assert_same_base(found["params"])


# Bad input.


@pytest.mark.parametrize(
    ("frozen", "error", "says"),
    [
        (["bas/"], ValueError, r"the rule 'bas/' matches no parameter.*nearest paths: \['base/"),
        (["("], ValueError, "not a regular expression"),
        (["."], ValueError, "all parameters are frozen"),
        ({"base": True, "lora": False, "out": False, "z": True}, ValueError, "frozen: z is not a parameter"),
        ({"base": True}, ValueError, "the parameter lora/a is missing"),
        ({"base": 1, "lora": False, "out": False}, TypeError, "base is 1; give True or False"),
        (None, TypeError, "base/w has dtype int8, which has no gradient: freeze it"),
    ],
)
def test_what_is_wrong_is_named(frozen, error, says):
    with pytest.raises(error, match=says):
        make("zero3", frozen=frozen).place(params())


def test_a_frozen_leaf_that_the_optimizer_asks_for():
    def decay_of_base(p):
        return {"sum": jnp.sum(p["base"]["scale"])}

    tx = optax.GradientTransformation(decay_of_base, lambda grads, state, p=None: (grads, state))
    opt = jaxshard.zero3(tx, jaxshard.make_mesh(), frozen=["^base/"])
    with pytest.raises(TypeError, match="MaskedNode") as caught:
        opt.init(params())
    assert "frozen: in place of base/scale, base/table, base/w" in caught.value.__notes__[-1]


def test_masks_and_labels_may_name_them(x64):
    """As those made for the whole model do."""
    labels = {"base": "slow", "lora": "fast", "out": "slow"}
    tx = optax.partition({"slow": optax.sgd(1e-2), "fast": optax.adam(1e-2)}, labels)
    mesh, mask = jaxshard.make_mesh(), jax.tree.map(lambda _: True, params())
    p, _, _ = train(jaxshard.zero3(optax.chain(tx, optax.masked(optax.clip(0.5), mask)), mesh, frozen=["^base/"]))
    assert_same_base(p)
    assert np.any(np.asarray(p["out"]) != params()["out"])


# Planted bugs.


def test_a_base_that_is_trained_is_seen(x64):
    whole = params(np.float64)
    p, _, _ = train(make("zero2", frozen=None), whole)
    assert max(distances(p["base"], params(np.float64)["base"]).values()) > 1e-3
