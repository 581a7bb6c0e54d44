"""The start of several processes: what is given, what is detected, and a real run of two."""

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
from compiled_once import fast_environment

import jaxshard
from jaxshard.processes import start

ROOT = Path(__file__).parents[2]


@pytest.fixture
def started(monkeypatch):
    """What `jax.distributed.initialize` is called with; nothing starts."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(start, "roll_call", lambda *_: None)
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


ONE_OF_TWO = {"coordinator_address": "host:1", "num_processes": 2, "process_id": 1}


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
        ({"coordinator_address": "host:1", "num_processes": 10**9, "process_id": 5}, ("from 1 to 1,000,000",)),
        ({"coordinator_address": "host:1", "num_processes": 2, "process_id": "a"}, ("process_id 'a'", "integer")),
        ({"coordinator_address": "host:1", "num_processes": 2, "process_id": True}, ("process_id True",)),
        ({"coordinator_address": "host:1", "num_processes": 2.0, "process_id": 0}, ("num_processes 2.0",)),
        (ONE_OF_TWO | {"initialization_timeout": 0}, ("initialization_timeout 0", "above 0")),
        (ONE_OF_TWO | {"initialization_timeout": float("nan")}, ("initialization_timeout nan",)),
    ],
)
def test_initialize_with_arguments_that_cannot_be(started, given, words):
    with pytest.raises((ValueError, TypeError), match="initialize") as caught:
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
    environment = fast_environment(
        PYTHONPATH=os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "processes"))),
        JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
        JAX_NUM_PROCESSES="2",
        JAX_PROCESS_ID=str(index),
        TEST_OUT=str(out),
    )
    code = "import test_start; test_start.one_of_two_processes()"
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
