"""Meshes: their axes, sizes that are inferred, and what is refused."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxshard


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
        ({"tensor": 3}, ("pipeline 1 x replica 1 x data (the rest) x tensor 3", "8 devices", "multiply to 3")),
        ({"replica": 4, "tensor": 4}, ("replica 4", "tensor 4", "multiply to 16")),
        ({"tensor": -1}, ("data and tensor", "both -1", "data (the rest) x tensor (the rest)", "8 devices")),
        ({"tensor": -1, "replica": -1}, ("-1", "replica", "data", "tensor")),
        ({"data": 0}, ("data=0", "positive", "-1")),
        ({"replica": -2}, ("replica=-2", "positive")),
        ({"tensor": 2.0}, ("tensor=2.0",)),
        ({"tensor": "2"}, ("tensor='2'",)),
        ({"data": None}, ("data=None",)),
        ({"data": -1, "devices": 0}, ("devices= is empty",)),
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
