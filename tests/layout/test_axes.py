"""`params_axes`, `grads_axes` and `state_axes`: where things lie, over which of the batch's axes.

Params, state and losses are compared with one device's, what is sent along each axis with the formula.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import assert_close, batches, distances, hostile_params, model_loss, one_device, sharded

import jaxshard
from jaxshard import collectives
from jaxshard.checkpoint import Checkpointer

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be sharded:UserWarning")

BOTH = ("data", "replica")
ALL = {"data_axes": ("replica", "data"), "replica_axes": ()}
SETTINGS = {
    "hsdp, state over both": ("hsdp", {"state_axes": BOTH}),
    "hsdp, gradients and state over both": ("hsdp", {"grads_axes": BOTH, "state_axes": BOTH}),
    "zero3, params within the node": ("zero3", {**ALL, "params_axes": "data"}),
    "zero3, params and sums within the node": ("zero3", {**ALL, "params_axes": "data", "grads_axes": "data"}),
    "zero3, whole params": ("zero3", {"params_axes": ()}),
    "zero2, sums within the node": ("zero2", {**ALL, "grads_axes": ("data",)}),
    "zero2, state over both": ("zero2", {"state_axes": ("replica", "data")}),
    "zero1, state over the replicas": ("zero1", {"state_axes": ["replica"]}),
    "ddp, state cut": ("ddp", {"state_axes": "data"}),
    "hybrid 3, state over both": ("hybrid", {"zero": 3, "state_axes": BOTH}),
    "zero3, gathered once": ("zero3", {**ALL, "regather": "step"}),
    "hsdp, state over both, gathered once": ("hsdp", {"state_axes": BOTH, "regather": "step"}),
}
INNER = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "clipped adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1)),
}


def make(name, inner, n=8, **options):
    strategy, own = SETTINGS[name]
    mesh = jaxshard.make_mesh(replica=2, devices=jax.devices()[:n])
    return getattr(jaxshard, strategy)(INNER[inner](), mesh, **{"min_shard_size": 1, **own, **options})


@functools.cache
def expected(inner):
    return one_device(model_loss, INNER[inner](), hostile_params(np.float64), batches(4))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("inner", "n", "microbatches"), [("sgd", 4, 1), ("clipped adamw", 8, 3)])
def test_equals_one_device(x64, name, inner, n, microbatches):
    got = sharded(model_loss, make(name, inner, n), hostile_params(np.float64), batches(4), microbatches=microbatches)
    for found, want in zip(got, expected(inner), strict=True):
        assert_close(found, want, 1e-12)


@pytest.mark.parametrize("name", ["hsdp, state over both", "zero3, params within the node"])
def test_masters_and_bfloat16_params(name):
    """Params are the masters, rounded, bit for bit."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), hostile_params(np.float32))
    got, state, _ = sharded(model_loss, make(name, "sgd", master_dtype=jnp.float32), params, batches(2))
    masters = state.extra["masters"] if "masters" in state.extra else state.extra["master"]
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), masters)
    assert max(distances(got, rounded).values()) == 0


# What lies where, and what is sent.


@pytest.mark.parametrize("name", SETTINGS)
def test_each_device_holds_its_part(name):
    """Params, sums and state nest: a device's part of the state is in its part of the params."""
    opt = make(name, "sgd", min_shard_size=1)
    params = hostile_params(np.float32)
    placed, layout = opt.place(params), opt.layout(params)
    state = opt.init(placed)
    held = [sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree)) for tree in (placed, state)]
    assert held == [layout.bytes_per_device["params"], layout.bytes_per_device["state"]]
    for p, trace in zip(jax.tree.leaves(placed), jax.tree.leaves(state[0].trace), strict=True):
        for a, b in zip(p.addressable_shards, trace.addressable_shards, strict=True):
            assert a.device == b.device
            for outer, inner, size in zip(a.index, b.index, p.shape, strict=True):
                (low, high, _), (start, stop, _) = outer.indices(size), inner.indices(size)
                assert low <= start <= stop <= high


def params_of(width):
    return {"w": np.zeros((4, width, width), np.float32), "head": np.zeros((width, 2 * width), np.float32)}


def loss_of(params, batch):
    def layer(x, w):
        return x + jnp.tanh(x @ jaxshard.unshard(w)), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], params["w"])
    return jnp.mean((x @ jaxshard.unshard(params["head"])) ** 2)


def wire(strategy, microbatches=1, **options):
    """Bytes that a device sends in a step, by axes, of those larger than scalars; and of all elements."""
    mesh, params = jaxshard.make_mesh(replica=2, data=4), params_of(128)
    opt = getattr(jaxshard, strategy)(optax.adam(1e-3), mesh, **options)
    step = jaxshard.train_step(loss_of, opt, microbatches=microbatches, max_skips=None)
    batch = {"x": np.zeros((48, 128), np.float32)}
    placed = opt.place(params)
    report = jaxshard.inspect.report(step.lower(placed, opt.init(placed), batch).compile())
    found = {}
    for c in report.collectives:
        if c.wire_bytes > 1000:
            found[" x ".join(c.axes(mesh))] = found.get(" x ".join(c.axes(mesh)), 0) + c.wire_bytes
    return found, {name: x.nbytes for name, x in params.items()}


@pytest.mark.parametrize("microbatches", [1, 3])
def test_hsdp_with_its_state_over_both_sends_what_hsdp_does(microbatches):
    """Over data gathers forward and (but for the head) backward, and a scatter; over replica as an all-reduce."""
    whole, size = wire("hsdp", microbatches)
    cut, _ = wire("hsdp", microbatches, state_axes=BOTH)
    data = microbatches * 3 / 4 * (3 * size["w"] + 2 * size["head"])
    replica = 2 * (1 / 2) * sum(size.values()) / 4
    assert cut == whole == {"data": pytest.approx(data, rel=0.01), "replica": pytest.approx(replica, rel=0.01)}


def test_params_within_the_node_send_over_the_node_once_per_step():
    """ZeRO-3 over both gathers over both, forward and backward; here only new params and gradients cross."""
    found, size = wire("zero3", **ALL, params_axes="data", grads_axes="data")
    assert found["replica"] == pytest.approx(sum(size.values()) / 4, rel=0.01)
    everywhere, _ = wire("zero3", **ALL)
    assert everywhere == {"replica x data": pytest.approx(7 / 8 * (3 * size["w"] + 2 * size["head"]), rel=0.01)}


@pytest.mark.parametrize("microbatches", [1, 3])
def test_params_gathered_once_per_step(microbatches):
    """One gather, whatever the microbatches; gradients are scattered in each."""
    found, size = wire("zero3", microbatches, **ALL, regather="step")
    assert found == {"replica x data": pytest.approx(7 / 8 * (1 + microbatches) * sum(size.values()), rel=0.01)}


def test_the_layout_says_that_params_are_gathered_once():
    opt = make("zero3, gathered once", "sgd")
    ours = jaxshard.value_and_grad(model_loss, opt)
    said = ours.layout(hostile_params(np.float32), batches(1)[0]).gathers
    assert said["blocks", "up"] == "gathered once per step"


def test_state_is_cut_over_all_devices():
    opt = jaxshard.hsdp(optax.adam(1e-3), jaxshard.make_mesh(replica=2), state_axes=BOTH)
    params = params_of(128)
    held, size = opt.layout(params).bytes_per_device, 4 * sum(x.size for x in jax.tree.leaves(params))
    assert held == {"params": size // 4, "grads": size // 8, "state": 2 * size // 8 + 4}


def test_the_plan_knows_them():
    """Bytes at rest to the byte, what is sent within 1%."""
    opt = jaxshard.hsdp(optax.adam(1e-3), jaxshard.make_mesh(replica=2), state_axes=BOTH)
    step, params, batch = jaxshard.train_step(loss_of, opt), params_of(128), {"x": np.zeros((16, 128), np.float32)}
    placed = opt.place(params)
    report = jaxshard.inspect.report(step.lower(placed, opt.init(placed), batch).compile())
    found = jaxshard.plan.predict(step, placed, batch)
    assert (found.at_rest["params"], found.at_rest["state"]) == report.arguments[:2]
    assert found.wire_bytes == pytest.approx(report.wire_bytes, rel=0.01)


def test_a_checkpoint_fits_any_axes(tmp_path):
    params = jax.tree.map(lambda x: x + 1, params_of(16))
    mesh = jaxshard.make_mesh(replica=2)
    wide = jaxshard.hsdp(optax.adam(1e-3), mesh, state_axes=BOTH, min_shard_size=1)
    placed = wide.place(params)
    other = jaxshard.zero2(optax.adam(1e-3), jaxshard.make_mesh(devices=jax.devices()[:3]))
    zeros = other.place(jax.tree.map(np.zeros_like, params))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": placed, "state": wide.init(placed)})
        _, found = checkpoints.restore({"params": zeros, "state": other.init(zeros)})
    assert max(distances(found["params"], params).values()) == 0


# Wrong input.


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("hsdp", {"state_axes": "tensor"}, "state_axes ('tensor',) names 'tensor', over which the batch is not split"),
        ("hsdp", {"state_axes": "replica"}, "grads_axes ('data',) must be among state_axes ('replica',)"),
        ("hsdp", {"state_axes": "replica"}, "give state_axes=('data', 'replica')"),
        ("zero2", {"params_axes": "data", "grads_axes": ()}, "params_axes ('data',) must be among grads_axes ()"),
        (
            "zero2",
            {"grads_axes": "rows"},
            "names 'rows', over which the batch is not split; the batch axes are ('replica', 'd",
        ),
        ("ddp", {"params_axes": "data"}, "must be among grads_axes ()"),
    ],
)
def test_axes_that_do_not_nest(strategy, options, words):
    mesh = jaxshard.mesh.abstract_mesh(8, replica=2, tensor=2)
    with pytest.raises(ValueError, match="^" + strategy) as caught:
        getattr(jaxshard, strategy)(optax.sgd(0.1), mesh, **options)
    assert words in str(caught.value)


def test_regather_is_for_params_that_are_cut():
    mesh = jaxshard.mesh.abstract_mesh(8)
    with pytest.raises(ValueError, match='zero2: regather="step" is for sharded params'):
        jaxshard.zero2(optax.sgd(0.1), mesh, regather="step")
    with pytest.raises(ValueError, match='zero1: regather="backward" is for sharded params'):
        jaxshard.zero1(optax.sgd(0.1), mesh, regather="backward")
    with pytest.raises(ValueError, match='zero3: regather=\'once\' is unknown; give "use", "backward" or "step"'):
        jaxshard.zero3(optax.sgd(0.1), mesh, regather="once")


def test_an_axis_is_a_name():
    with pytest.raises(TypeError, match="state_axes=1 must be a mesh axis's name"):
        jaxshard.zero2(optax.sgd(0.1), jaxshard.mesh.abstract_mesh(8), state_axes=1)


# Planted bugs.


@pytest.mark.parametrize("name", ["hsdp, state over both", "zero2, sums within the node"])
def test_a_scatter_over_replicas_left_out_is_seen(x64, name, monkeypatch):
    """Each replica then trains on its own rows."""
    real = collectives.scatter_sum

    def planted(x, dims):
        if {axis for _, axes in dims for axis in axes} != {"replica"}:
            return real(x, dims)
        sizes = {"replica": 2}
        return 2 * collectives.own_part(x, dims, sizes)

    monkeypatch.setattr(collectives, "scatter_sum", planted)
    got = sharded(model_loss, make(name, "sgd", 4), hostile_params(np.float64), batches(4))
    assert max(distances(got[0], expected("sgd")[0]).values()) > 1e-4


def test_sizes():
    """The tests above would prove little on axes of size 1."""
    assert math.prod(jaxshard.make_mesh(replica=2).shape.values()) == len(jax.devices()) == 8
