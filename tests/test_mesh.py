"""Meshes, and the start of several processes: also a real run of two."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxshard

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (1, 1, 8, 1)),
        ({"data": 8}, (1, 1, 8, 1)),
        ({"tensor": 2}, (1, 1, 4, 2)),
        ({"replica": 2, "tensor": 2}, (1, 2, 2, 2)),
        ({"pipeline": 2, "replica": 2, "tensor": 2}, (2, 2, 1, 2)),
        ({"pipeline": 8}, (8, 1, 1, 1)),
        ({"data": 2, "tensor": -1}, (1, 1, 2, 4)),
        ({"data": 1, "pipeline": -1, "replica": 4}, (2, 4, 1, 1)),
        ({"data": 2, "replica": 2, "pipeline": 2, "tensor": 1}, (2, 2, 2, 1)),
    ],
)
def test_sizes(sizes, shape):
    mesh = jaxshard.make_mesh(**sizes)
    assert mesh.axis_names == ("pipeline", "replica", "data", "tensor")
    assert mesh.axis_sizes == shape
    assert mesh.axis_types == (AxisType.Auto,) * 4
    assert {d.id for d in mesh.devices.flat} == {d.id for d in jax.devices()}


def test_tensor_is_innermost_and_pipeline_outermost():
    mesh = jaxshard.make_mesh(pipeline=2, tensor=2)
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(2, 1, 2, 2))


@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_some_of_the_devices(num):
    devices = jax.devices()[8 - num :]
    mesh = jaxshard.make_mesh(devices=devices)
    assert mesh.axis_sizes == (1, 1, num, 1)
    assert [d.id for d in mesh.devices.flat] == [d.id for d in devices]
    opt = jaxshard.zero2(optax.sgd(1.0), mesh, min_shard_size=1)
    params = opt.place({"w": np.arange(30, dtype=np.float32)})
    assert {d.id for d in params["w"].sharding.device_set} == {d.id for d in devices}
    assert opt.world_size == num
    assert opt.rank == 0


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"data": 3}, ("pipeline 1 x replica 1 x data 3 x tensor 1", "8 devices", "multiply to 3")),
        ({"data": 16}, ("data 16", "8 devices")),
        ({"data": 4}, ("data 4", "8 devices", "devices=")),
        ({"tensor": 3}, ("pipeline 1 x replica 1 x data -1 x tensor 3", "8 devices", "multiply to 3")),
        ({"replica": 4, "tensor": 4}, ("replica 4", "tensor 4", "multiply to 16")),
        ({"tensor": -1}, ("data and tensor", "both -1", "data -1 x tensor -1", "8 devices")),
        ({"tensor": -1, "replica": -1}, ("-1", "replica", "data", "tensor")),
        ({"data": 0}, ("data=0", "positive", "-1")),
        ({"replica": -2}, ("replica=-2", "positive")),
        ({"tensor": 2.0}, ("tensor=2.0",)),
        ({"tensor": "2"}, ("tensor='2'",)),
        ({"data": None}, ("data=None",)),
        ({"data": -1, "devices": 0}, ("0 devices",)),
    ],
)
def test_sizes_that_cannot_be(sizes, words):
    if "devices" in sizes:
        sizes = sizes | {"devices": jax.devices()[: sizes["devices"]]}
    with pytest.raises(ValueError, match="make_mesh") as caught:
        jaxshard.make_mesh(**sizes)
    for word in words:
        assert word in str(caught.value)


def test_sizes_are_keywords():
    with pytest.raises(TypeError):
        jaxshard.make_mesh(8)  # pyright: ignore[reportCallIssue]
    assert jaxshard.make_mesh(data=np.int64(4), tensor=2).axis_sizes == (1, 1, 4, 2)


# initialize


@pytest.fixture
def started(monkeypatch):
    """What `jax.distributed.initialize` is called with; nothing starts."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(sys.modules["jaxshard.mesh"], "roll_call", lambda *_: None)
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_initialize_with_what_is_given(started):
    jaxshard.initialize("host:1234", 4, 3, local_device_ids=[0])
    assert started == [(("host:1234", 4, 3), {"local_device_ids": [0]})]


def test_initialize_from_the_environment_and_what_is_given_wins(started, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1234")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    jaxshard.initialize()
    jaxshard.initialize(process_id=2)
    assert started == [(("host:1234", 4, 0), {}), (("host:1234", 4, 2), {})]


def test_initialize_leaves_detection_to_jax(started):
    jaxshard.initialize(cluster_detection_method="mpi4py")
    assert started == [((), {"cluster_detection_method": "mpi4py"})]


def test_initialize_leaves_a_lone_process_alone(started, monkeypatch):
    def alone(*args, **kwargs):
        del args, kwargs
        raise ValueError("coordinator_address should be defined.")

    jaxshard.initialize(num_processes=1)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    jaxshard.initialize(process_id=0)
    assert started == []
    monkeypatch.delenv("JAX_NUM_PROCESSES")
    monkeypatch.setattr(jax.distributed, "initialize", alone)
    jaxshard.initialize()


def test_initialize_does_not_hide_other_errors(monkeypatch):
    def fails(*args, **kwargs):
        del args, kwargs
        raise ValueError("coordinator_bind_address is wrong")

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    with pytest.raises(ValueError, match="coordinator_bind_address"):
        jaxshard.initialize()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"coordinator_address": "host:1"}, ("num_processes, process_id",)),
        ({"num_processes": 4}, ("coordinator_address, process_id",)),
        ({"process_id": 1}, ("coordinator_address, num_processes",)),
        ({"num_processes": 4, "process_id": 1}, ("coordinator_address", "all three")),
        ({"coordinator_address": "host:1", "num_processes": 4, "process_id": 4}, ("process_id 4", "0 .. 3")),
        ({"coordinator_address": "host:1", "num_processes": 4, "process_id": -1}, ("process_id -1", "0 .. 3")),
        ({"coordinator_address": "host:1", "num_processes": 0, "process_id": 0}, ("num_processes 0",)),
        ({"coordinator_address": "host:1", "num_processes": 1, "process_id": 5}, ("process_id 5", "0 .. 0")),
    ],
)
def test_initialize_with_arguments_that_cannot_be(started, given, words):
    with pytest.raises(ValueError, match="initialize") as caught:
        jaxshard.initialize(**given)
    for word in words:
        assert word in str(caught.value)
    assert started == []


@pytest.mark.parametrize("name", ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID"])
def test_an_environment_that_is_no_number(started, monkeypatch, name):
    monkeypatch.setenv(name, "two")
    with pytest.raises(ValueError, match=f"{name}='two'"):
        jaxshard.initialize()
    assert started == []


# Two processes, four devices each.

NUM_STEPS = 3


def inner():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def params_and_batches():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(16, 24)).astype(np.float32), "b": rng.normal(size=17).astype(np.float32)}
    batches = [{"x": rng.normal(size=(32, 16)).astype(np.float32)} for _ in range(NUM_STEPS)]
    return params, batches


def loss_fn(params, batch):
    return jnp.mean(jnp.tanh(batch["x"] @ params["w"]) ** 2) + jnp.mean((batch["x"][:, :1] * params["b"]) ** 2)


def _local_rows_are_refused(fn, batch):
    with pytest.raises(ValueError, match=r"batch: x .*shard_batch"):
        fn({"x": batch["x"][16 * jax.process_index() :][:16]})


def one_of_two_processes():
    """What each process runs; prints what the test compares."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jaxshard.initialize(initialization_timeout=60)
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)
    opt = jaxshard.zero2(inner(), jaxshard.make_mesh(), min_shard_size=32)
    params, batches = params_and_batches()
    params = opt.place(params)
    state = opt.init(params)
    step = jaxshard.train_step(loss_fn, opt, microbatches=2)
    mine = slice(16 * jax.process_index(), 16 * (jax.process_index() + 1))
    _local_rows_are_refused(lambda batch: step(params, state, batch), batches[0])
    _local_rows_are_refused(lambda batch: jaxshard.value_and_grad(loss_fn, opt)(params, batch), batches[0])
    _local_rows_are_refused(lambda batch: jaxshard.evaluate(loss_fn, opt)(params, batch), batches[0])
    for batch in batches:
        here = {"x": batch["x"][mine]}
        params, state, metrics = step(params, state, jaxshard.shard_batch(here, opt))
    momentum = state[1][0].trace["w"]
    assert not momentum.is_fully_addressable
    print("world", opt.world_size, "rank", opt.rank)
    print("loss", float(metrics["loss"]), "norm", float(metrics["grad_norm"]))
    np.save(os.environ["TEST_OUT"], np.concatenate([np.asarray(params["w"]).ravel(), np.asarray(params["b"])]))


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _start(index, port, out):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(index),
        "TEST_OUT": str(out),
    }
    environment.pop("XLA_FLAGS", None)
    code = "import test_mesh; test_mesh.one_of_two_processes()"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_processes_train_as_one(tmp_path):
    """Each gives its own half of the rows; params, loss and norm equal plain optax on the whole batch."""
    outs, port = [tmp_path / "0.npy", tmp_path / "1.npy"], _free_port()
    children = [_start(i, port, out) for i, out in enumerate(outs)]
    try:
        texts = [child.communicate(timeout=120)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0, 0], "\n\n".join(text[:3000] for text in texts)
    assert "world 8 rank 0" in texts[0]
    assert "world 8 rank 4" in texts[1]

    params, batches = params_and_batches()
    params, tx = jax.tree.map(jnp.array, params), inner()
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(grads)

    for batch in batches:
        params, state, loss, norm = step(params, state, batch)
    want = np.concatenate([np.asarray(params["w"]).ravel(), np.asarray(params["b"])])
    for text, out in zip(texts, outs, strict=True):
        np.testing.assert_allclose(np.load(out), want, rtol=1e-5, atol=1e-6)
        words = next(line for line in text.splitlines() if line.startswith("loss")).split()
        np.testing.assert_allclose([float(words[1]), float(words[3])], [float(loss), float(norm)], rtol=1e-5)
