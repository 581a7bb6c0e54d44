"""Params that `specs` cut over an axis of the batch: experts, to which tokens are sent."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from oracle import assert_close, distances, one_device, sharded

import jaxshard
from jaxshard.loss import gradients
from jaxshard.loss.params import leaf_plan
from jaxshard.tensor import expert_parallel

WIDTH, HIDDEN, EXPERTS, LAYERS, ROWS, LENGTH = 8, 12, 8, 2, 16, 6


def params():
    rng = np.random.default_rng(0)
    shapes = {
        "embed": (32, WIDTH),
        "blocks": {
            "router": (LAYERS, WIDTH, EXPERTS),
            "experts": {"up": (LAYERS, EXPERTS, WIDTH, HIDDEN), "down": (LAYERS, EXPERTS, HIDDEN, WIDTH)},
        },
    }
    return jax.tree.map(lambda s: 0.5 * rng.normal(size=s), shapes, is_leaf=lambda x: type(x) is tuple)


def expert(p, x):
    return jnp.tanh(x @ p["up"]) @ p["down"]


def loss_of(axis, capacity=None, penalty=None):
    def layer(x, block):
        block = jaxshard.unshard(block)
        weights, ids = lax.top_k(jax.nn.softmax(x @ block["router"]), 2)
        return x + expert_parallel(expert, block["experts"], x, ids, weights, axis=axis, capacity=capacity), None

    def loss(p, batch):
        x, _ = lax.scan(jax.checkpoint(layer), p["embed"][batch["ids"]], p["blocks"])
        logits = x @ p["embed"].T
        found = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        return found if penalty is None else found + penalty(p["blocks"]["experts"]["up"])

    return loss


def batches(count):
    rng = np.random.default_rng(1)
    return [{k: rng.integers(0, 32, (ROWS, LENGTH)) for k in ("ids", "y")} for _ in range(count)]


def inner():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


@functools.cache
def expected(capacity=None):
    return one_device(loss_of("data", capacity), inner(), params(), batches(3))


RULES = [("experts/", P(None, "expert"))]


def mesh_of(data, expert, n=8):
    devices = np.array(jax.devices()[:n]).reshape(data, expert)
    return jax.sharding.Mesh(devices, ("data", "expert"))


OVER_BOTH = {"data_axes": ("data", "expert"), "min_shard_size": 1, "specs": RULES}
CASES = {
    "zero1": ("zero1", mesh_of, OVER_BOTH),
    "ddp": ("ddp", mesh_of, OVER_BOTH),
    "zero2": ("zero2", mesh_of, OVER_BOTH),
    "zero3": ("zero3", mesh_of, OVER_BOTH),
    "hsdp over replicas": (
        "hsdp",
        mesh_of,
        {"data_axes": "data", "replica_axes": "expert", "min_shard_size": 1, "specs": RULES},
    ),
    "hsdp, state over both": (
        "hsdp",
        mesh_of,
        {
            "data_axes": "data",
            "replica_axes": "expert",
            "min_shard_size": 1,
            "specs": RULES,
            "state_axes": ("data", "expert"),
        },
    ),
}


@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize(
    ("name", "sizes", "microbatches"), [(name, (2, 4), 1) for name in CASES] + [("zero3", (4, 2), 2)]
)
def test_experts_on_an_axis_of_their_own(x64, name, sizes, microbatches, capacity):
    strategy, mesh, options = CASES[name]
    opt = getattr(jaxshard, strategy)(inner(), mesh(*sizes), **options)
    got = sharded(loss_of("expert", capacity), opt, params(), batches(3), microbatches=microbatches)
    for found, want in zip(got, expected(capacity), strict=True):
        assert_close(found, want, 1e-12)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_experts_over_data(x64, strategy, n):
    mesh = jaxshard.make_mesh(devices=jax.devices()[:n])
    opt = getattr(jaxshard, strategy)(inner(), mesh, specs=[("experts/", P(None, "data"))], min_shard_size=1)
    got = sharded(loss_of("data"), opt, params(), batches(3))
    for found, want in zip(got, expected(), strict=True):
        assert_close(found, want, 1e-12)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (1, 8), None], ids=str)
def test_rows_are_followed_through_experts(x64, sizes):
    """A mean stays without a warning, with each row's loss in aux; a sum over rows is told, and so is a statistic."""
    mesh, axis = (jaxshard.make_mesh(), "data") if sizes is None else (mesh_of(*sizes), "expert")
    options = {"specs": [("experts/", P(None, "data"))], "min_shard_size": 1} if sizes is None else OVER_BOTH
    opt, given = jaxshard.zero2(inner(), mesh, **options), batches(1)[0]

    def layer(x, block):
        weights, ids = lax.top_k(jax.nn.softmax(x @ block["router"]), 2)
        return x + expert_parallel(expert, block["experts"], x, ids, weights, axis=axis), None

    def each(p, b):
        x, _ = lax.scan(layer, p["embed"][b["ids"]], p["blocks"])
        return optax.softmax_cross_entropy_with_integer_labels(x @ p["embed"].T, b["y"]).mean(1)

    def mean(p, b):
        return each(p, b).mean(), each(p, b)

    def centred(p, b):
        return jnp.mean((each(p, b) - each(p, b).mean()) ** 2), each(p, b)

    run = jaxshard.value_and_grad(mean, opt, has_aux=True)
    (loss, rows), _ = run(opt.place(params()), given)
    assert run.layout(params(), given).loss_rows == "the loss is a mean over rows"
    want = jaxshard.evaluate(mean, jaxshard.ddp(inner(), jaxshard.make_mesh(devices=jax.devices()[:1])), has_aux=True)
    assert_close((loss, rows), want(params(), given), 1e-12)
    for wrong, says in (
        (lambda p, b: (each(p, b).sum(), ()), "a sum over rows"),
        (centred, "is computed over the rows"),
    ):
        with pytest.warns(jaxshard.RowsWarning, match=says):
            jaxshard.value_and_grad(wrong, opt, has_aux=True)(opt.place(params()), given)


def test_a_loss_of_experts_that_takes_no_more_rows_is_not_known():
    """Axes of experts are judged one by one, each with a trace of more rows."""

    def loss(p, b):
        assert b["ids"].shape[0] <= 2, "of one device alone"
        return loss_of("expert")(p, b)

    opt = jaxshard.zero2(inner(), mesh_of(2, 4), **OVER_BOTH)
    line = jaxshard.value_and_grad(loss, opt).layout(params(), batches(1)[0]).loss_rows
    assert line.startswith("not known: it cannot be traced with the rows of all devices")


def test_experts_are_neither_gathered_nor_reduced_over_their_axis():
    opt = jaxshard.zero3(optax.sgd(0.1), mesh_of(2, 4), **OVER_BOTH)
    step = jaxshard.train_step(loss_of("expert"), opt, max_skips=None)
    placed = opt.place(params())
    assert placed["blocks"]["experts"]["up"].sharding.spec == P(None, "expert", "data")
    report = jaxshard.inspect.report(step.lower(placed, opt.init(placed), batches(1)[0]).compile())
    along = {c.kind for c in report.collectives if c.axes(opt.mesh) == ("expert",) and c.wire_bytes > 100}
    assert along == {"all-to-all"}
    found = jaxshard.plan.predict(step, placed, batches(1)[0])
    assert (found.at_rest["params"], found.at_rest["state"]) == report.arguments[:2]
    assert found.wire_bytes == pytest.approx(report.wire_bytes, rel=0.01)


def test_what_is_dropped_depends_on_the_row_alone():
    """First choices before second ones, then in order."""
    x = jnp.arange(1.0, 5)[None, :, None]
    ids = jnp.array([[[0, 1], [1, 0], [0, 1], [0, 1]]])
    weights = jnp.array([1.0, 10.0]) * jnp.ones((1, 4, 1))
    one = jnp.ones((2, 1))
    got = expert_parallel(jnp.multiply, one, x, ids, weights, axis="data", capacity=2)
    # expert 0 takes tokens 0 and 2 as first choices; expert 1 token 1, then token 0 as a second choice
    np.testing.assert_array_equal(got[0, :, 0], [1 + 10, 2, 3, 0])
    with_all = expert_parallel(jnp.multiply, one, x, ids, weights, axis="data")
    np.testing.assert_array_equal(with_all[0, :, 0], 11 * x[0, :, 0])


# Wrong input.


def test_specs_of_the_strategys_own_axis_are_refused_where_nothing_moves_along_it():
    """As FSDP's specs elsewhere say it; each device would train on its columns alone, but not in the global view."""
    opt = jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh(), specs={"w": P(None, "data")})
    given, batch = {"w": np.ones((8, 64), "f")}, {"x": np.ones((16, 8), "f")}

    def loss(p, b):
        return jnp.mean((b["x"] @ p["w"]) ** 2)

    with pytest.raises(ValueError, match=r"specs: w has .*, and 'data' splits the batch"):
        jaxshard.value_and_grad(loss, opt, loss_view="local")(given, batch)
    found = jaxshard.value_and_grad(loss, opt)(given, batch)
    assert_close(found, jax.value_and_grad(loss)(given, batch), 1e-6)


def test_a_penalty_of_experts_is_refused_until_it_is_summed(x64):
    def squared(x):
        return 0.01 * jnp.sum(x**2)

    opt = jaxshard.zero3(inner(), mesh_of(2, 4), **OVER_BOTH)
    with pytest.raises(ValueError, match=r"a penalty needs jax.lax.psum\(x, 'expert'\)"):
        sharded(loss_of("expert", penalty=squared), opt, params(), batches(1))
    summed = loss_of("expert", penalty=lambda x: lax.psum(squared(x), "expert"))
    got = sharded(summed, opt, params(), batches(3))
    want = one_device(loss_of("data", penalty=squared), inner(), params(), batches(3))
    assert_close(got[0], want[0], 1e-12)


@pytest.mark.parametrize(
    ("ids", "weights", "capacity", "says"),
    [
        ((2, 3), (2, 3), None, r"must be \(B, L, D\), \(B, L, K\) and \(B, L, K\)"),
        ((2, 3, 1), (2, 3, 2), None, r"ids \(2, 3, 1\), weights \(2, 3, 2\)"),
        ((2, 3, 1), (2, 3, 1), 0, "capacity 0 must be 1 or more"),
    ],
)
def test_shapes_that_do_not_fit(ids, weights, capacity, says):
    with pytest.raises(ValueError, match=says):
        expert_parallel(
            jnp.multiply,
            jnp.ones((4, 1)),
            jnp.ones((2, 3, 5)),
            jnp.zeros(ids, int),
            jnp.ones(weights),
            axis="data",
            capacity=capacity,
        )


def test_experts_that_the_axis_does_not_divide():
    opt = jaxshard.zero2(
        optax.sgd(0.1), jaxshard.make_mesh(devices=jax.devices()[:3]), specs=[("experts/", P(None, "data"))]
    )
    with pytest.raises(ValueError, match="dim 1 of 8 is not divisible by 3"):
        opt.layout(params())


# Planted bugs.


def test_gradients_of_experts_summed_over_their_axis_are_seen(x64, monkeypatch):
    real = leaf_plan.before_the_trace

    def everywhere(leaves, options):
        return [dataclasses.replace(plan, summed=options.setup.split_axes) for plan in real(leaves, options)]

    monkeypatch.setattr(gradients, "before_the_trace", everywhere)
    opt = jaxshard.zero2(inner(), mesh_of(2, 4), **OVER_BOTH)
    got = sharded(loss_of("expert"), opt, params(), batches(3))
    assert max(distances(got[0], expected()[0]).values()) > 1e-4
