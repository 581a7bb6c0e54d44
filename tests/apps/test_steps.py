"""The peers train as one device does, hold what they promise to hold, and say what they cannot do."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from jaxshard.apps.bench import gspmd, models, steps
from jaxshard.apps.bench.step import OURS, Running, Step, Task, UnfitError, optimizer

ROWS = 16


def task(model="decoder", **how):
    sizes = {"dtype": "bfloat16" if how.get("masters") else "float32"}
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    return Task(models.model(model, "toy", **sizes), mesh, ROWS * how.get("microbatches", 1), **how)


def varied(shapes, seed):
    """A batch whose ids go up to 7."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: random.integers(0, 8, x.shape).astype(x.dtype), shapes)


def one_device(of, batch):
    """Loss and params after one step of plain optax on one device."""
    params, tx = models.values(models.init(of.model)), optimizer()

    def step(params, batch):
        loss, grads = jax.value_and_grad(lambda p: models.loss(of.model, p, batch))(params)
        updates, _ = tx.update(grads, tx.init(params), params)
        return loss, optax.tree.norm(grads), optax.apply_updates(params, updates)

    return jax.jit(step)(params, batch)


def check_trains_as_one_device(name, of):
    step = steps.build(name, of)
    assert isinstance(step, Step)
    batch = varied(of.model.batch(of.rows), 1)
    params = step.place("params", models.values(models.init(of.model)))
    params, state, metrics = step.run(params, step.init(params), step.place("batch", batch))
    loss, norm, wanted = one_device(of, batch)
    np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=1e-5)
    if name != "optax-multisteps" or of.microbatches == 1:  # its last microbatch's
        np.testing.assert_allclose(float(metrics["grad_norm"]), norm, rtol=1e-4)
    largest = 0.0
    for found, want, start in zip(
        jax.tree.leaves(params), jax.tree.leaves(wanted), jax.tree.leaves(models.values(models.init(of.model))),
        strict=True,
    ):  # fmt: skip
        far = np.abs(np.asarray(found) - want) > 1e-5  # Adam's first step takes the sign of a gradient
        assert far.mean() < 2e-3
        largest = max(largest, np.abs(want - start).max())
    assert largest > 1e-4, "nothing was trained"
    placed = jax.tree.map(lambda x, like: x.sharding.is_equivalent_to(like.sharding, x.ndim), state, step.state)
    assert all(jax.tree.leaves(placed))


@pytest.mark.parametrize("name", [name for name in steps.PEERS if name not in ("optax-multisteps", "gspmd-zero")])
def test_a_peer_trains_as_one_device(name):
    check_trains_as_one_device(name, task())


@pytest.mark.parametrize("name", ["optax-multisteps", "gspmd-zero-best"])
def test_microbatches_train_as_one_device(name):
    check_trains_as_one_device(name, task(microbatches=2))


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("zero3", "llama"),
        ("gspmd-fsdp-best", "unrolled"),
        ("zero2", "conv"),
        ("gspmd-fsdp-best", "dlrm"),
        ("gspmd-zero-best", "translator"),
    ],
)
def test_other_models_train_as_one_device(name, model):
    check_trains_as_one_device(name, task(model))


@pytest.mark.parametrize("name", ["zero2", "gspmd-zero"])
def test_masters_are_float32_and_params_their_roundings(name):
    of = task(masters=True)
    running = Running(steps.build(name, of), of)
    assert running.optimize() > 0
    floats = {str(x.dtype) for x in jax.tree.leaves(running.state) if x.size > 1}
    assert floats == {"float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(running.params)} == {"bfloat16"}


def test_masters_of_the_best_peer_of_another_platform(monkeypatch):
    monkeypatch.setattr(gspmd, "best", lambda zero, platform, real=gspmd.best: real(zero, "tpu"))
    of = task(masters=True)
    running = Running(steps.build("gspmd-zero-best", of), of)
    running.optimize()
    masters = running.state[1]
    for x, master in zip(jax.tree.leaves(running.params), jax.tree.leaves(masters), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(master.astype("bfloat16")))


@pytest.mark.parametrize("name", ["optax-multisteps", "nnx"])
def test_what_a_peer_cannot_do_is_told(name):
    with pytest.raises(UnfitError, match="masters"):
        steps.build(name, task(masters=True))


def test_without_flax_its_row_says_so(monkeypatch):
    monkeypatch.setattr(steps.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnfitError, match="flax is not installed: pip install flax"):
        steps.build("nnx", task())


def bytes_of(tree):
    sharded = [np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)]
    return float(sum(sharded))


@pytest.mark.parametrize(
    ("name", "params", "state"), [("optax", 1, 1), ("gspmd-zero-best", 1, 8), ("gspmd-fsdp", 8, 8)]
)
def test_a_device_holds_its_share(name, params, state):
    """But for vectors, which stay whole."""
    of = task()
    step, whole = steps.build(name, of), 4 * sum(np.prod(x.shape) for x in jax.tree.leaves(models.init(of.model)))
    assert whole / params <= bytes_of(step.params) < 1.2 * whole / params
    assert 2 * whole / state <= bytes_of(step.state) < 1.2 * 2 * whole / state


def test_lanes_are_cut_where_shards_are_multiples_of_128():
    peer = gspmd.Peer(3, cut="lanes", table=1)
    cut = lambda path, *shape: tuple(gspmd.spec_of(path, shape, 8, peer, path.startswith("blocks")))  # noqa: E731
    assert cut("blocks/up", 12, 1024, 4096) == (None, None, "data")
    assert cut("head", 1024, 32000) == ("data",)
    assert cut("embed", 32000, 1024) == (None, "data")
    assert cut("blocks/norm1", 12, 1024) == ()


@pytest.mark.parametrize(("table", "spec"), [(0, ("data",)), (1, (None, "data")), (None, ("data",))])
def test_every_table_is_cut_as_the_peer_says(table, spec):
    tables = {
        "embed": {"a": jax.ShapeDtypeStruct((64, 16), "float32")},
        "head": jax.ShapeDtypeStruct((64, 16), "float32"),
    }
    specs = gspmd.specs_of(tables, 8, gspmd.Peer(3, table=table), scanned=False)
    assert tuple(specs["embed"]["a"]) == spec
    assert tuple(specs["head"]) == ("data",)


def test_a_table_whose_rows_do_not_divide_is_cut_by_features():
    assert tuple(gspmd.spec_of("embed/a", (500, 16), 8, gspmd.Peer(3, table=0), False)) == (None, "data")


def test_the_best_peer_of_another_platform_trains_as_one_device(monkeypatch):
    """On TPU updates are gathered, not new params."""
    monkeypatch.setattr(gspmd, "best", lambda zero, platform, real=gspmd.best: real(zero, "tpu"))
    check_trains_as_one_device("gspmd-zero-best", task())


def test_a_layer_in_a_list_is_cut_as_one_in_a_stack():
    for path, shape in (("blocks/0/up", (64, 128)), ("blocks/0/down", (128, 64))):
        alone = tuple(gspmd.spec_of(path, shape, 8, gspmd.Peer(3), False))
        assert tuple(gspmd.spec_of(path, (12, *shape), 8, gspmd.Peer(3), True)) == (None, *alone)


def test_tasks_and_names():
    assert set(OURS) | set(steps.PEERS) == set(steps.NAMES)
    assert dataclasses.replace(task(), masters=True).dtype == "bfloat16"
    assert task().platform == "cpu"
