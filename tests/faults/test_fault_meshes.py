"""Meshes of some of the devices: checks ask the processes of the mesh, not those of the job."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from group import Group, program

import jaxshard


@pytest.mark.parametrize(("count", "size", "devices"), [(2, 1, 2), (4, 2, 2), (4, 2, 1), (3, 1, 1)])
def test_groups_of_processes_train_models_of_their_own_at_once(tmp_path, count, size, devices):
    with Group(program("trains_on_its_own_mesh", tmp_path, size), tmp_path, count, devices) as group:
        assert group.wait(240) == [0] * count, group.text()
        for index in range(count):
            assert f"trained {index // size} {3 + 4 * (index // size)}" in group.log(index)
            assert group.log(index).count(f"process {index} has no device in this mesh") == 2
            assert ("cannot save alone" in group.log(index)) == (size == 1)


def test_processes_of_one_mesh_that_differ_are_told_and_the_others_train(tmp_path):
    with Group(program("trains_otherwise_than_the_rest_of_its_mesh"), tmp_path, 4, 1) as group:
        assert group.wait(120) == [0] * 4, group.text()
        for index, said in enumerate(["trained", "trained", "refused: process 3", "refused: process 3"]):
            assert said in group.log(index)
        assert "train_step: the step's program: this process has" in group.log(2)
        assert "process 2 has" in group.log(2)


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def trained(devices, width, steps=4):
    opt = jaxshard.zero3(optax.adamw(1e-2), jaxshard.make_mesh(devices=devices), min_shard_size=1)
    step = jaxshard.train_step(loss, opt)
    params = {"w": np.arange(width * 12.0, dtype="f").reshape(width, 12) / width / 12}
    params, state = opt.place(params), opt.init(params)
    losses = []
    for i in range(steps):
        batch = np.random.default_rng(i).normal(size=(12, width)).astype("f")
        params, state, metrics = step(params, state, jaxshard.shard_batch(batch, opt))
        losses.append(float(metrics["loss"]))
    return losses


MESHES = [(slice(0, 3), 24), (slice(3, 5), 40), (slice(5, 8), 24), (slice(0, 1), 40)]


def test_meshes_in_turn_and_in_threads_at_once():
    alone = {width: trained(jax.devices()[:1], width) for width in (24, 40)}
    found = {}

    def run(i, part, width):
        found[i] = trained(jax.devices()[part], width)

    threads = [threading.Thread(target=run, args=(i, *mesh)) for i, mesh in enumerate(MESHES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (part, width) in enumerate(MESHES):
        np.testing.assert_allclose(found[i], alone[width], rtol=1e-5)
        np.testing.assert_allclose(trained(jax.devices()[part], width), alone[width], rtol=1e-5)
