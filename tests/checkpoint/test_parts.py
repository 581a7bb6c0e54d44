"""A part of a checkpoint: by a template that has only that part, by a regular expression, and without a template."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_same_bits
from test_checkpointer import Pair, data_files

import jaxshard
from jaxshard.checkpoint import Checkpointer, CorruptCheckpointError, read

TX = optax.adam(1e-2)


def trained(seed):
    params = {"enc": {"w": jnp.full((8, 4), seed), "b": jnp.full(4, -seed)}, "dec": [jnp.full(16, 2 * seed)]}
    return {"params": params, "state": TX.init(params), "step": int(seed)}


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saves")
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, trained(1.0))
        checkpoints.save(2, trained(2.0))
    return folder


def test_params_alone_by_a_template_that_has_nothing_else(saves):
    opt = jaxshard.zero3(TX, jaxshard.make_mesh(), min_shard_size=1)
    template = {"params": opt.place(trained(0.0)["params"])}
    step, found = Checkpointer(saves).restore(template, only="^params/")
    assert step == 2
    assert_same_bits(found, {"params": trained(2.0)["params"]})
    for x, like in zip(jax.tree.leaves(found), jax.tree.leaves(template), strict=True):
        assert x.sharding == like.sharding


def test_params_alone_into_a_whole_tree_whose_other_leaves_stay(saves):
    mine = trained(7.0)
    step, found = Checkpointer(saves).restore(mine, 1, only="^params/enc/")
    assert step == 1
    assert_same_bits(found["params"]["enc"], trained(1.0)["params"]["enc"])
    assert found["params"]["dec"][0] is mine["params"]["dec"][0]
    assert found["state"][0].count is mine["state"][0].count
    assert found["step"] == 7


def test_without_only_a_part_is_an_error_that_names_it(saves):
    with pytest.raises(ValueError, match=r"state/0/count is not in the template.*\(only= restores a part\)"):
        Checkpointer(saves).restore({"params": trained(0.0)["params"]})


def test_within_the_part_template_and_checkpoint_must_be_the_same(saves):
    checkpoints, params = Checkpointer(saves), trained(0.0)["params"]
    with pytest.raises(ValueError, match="params/enc/b is not in the template"):
        checkpoints.restore({"params": {"enc": {"w": params["enc"]["w"]}}}, only="^params/enc/")
    with pytest.raises(ValueError, match="params/enc/v is not in the checkpoint"):
        checkpoints.restore({"params": params | {"enc": params["enc"] | {"v": jnp.ones(2)}}}, only="^params/")
    with pytest.raises(ValueError, match=r"params/dec/0 has shape \(16,\), the template \(3,\)"):
        checkpoints.restore({"params": params | {"dec": [jnp.ones(3)]}}, only="dec")
    with pytest.raises(ValueError, match=r"only='\^param/' does not match any of 3 leaves; the first is params/dec/0"):
        checkpoints.restore({"params": params}, only="^param/")
    for wrong in ("(", 7):
        with pytest.raises(ValueError, match="is not a regular expression"):
            checkpoints.restore({"params": params}, only=wrong)
    shapes = jax.eval_shape(lambda: trained(0.0) | {"step": jnp.int32(0)})
    with pytest.raises(ValueError, match="state/0/count is only a shape in the template"):
        checkpoints.restore(shapes, only="^params/")


def test_only_the_part_is_read(saves, tmp_path):
    """What is corrupt elsewhere does no harm."""
    tree = {"a": jnp.arange(2.0**19), "b": jnp.arange(3.0)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, tree, blocking=True)
        path = data_files(tmp_path / "1")[-1]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        assert_same_bits(checkpoints.restore({"b": jnp.zeros(3)}, only="b")[1], {"b": tree["b"]})
        assert read(tmp_path, only="b")["b"].tolist() == [0, 1, 2]
        with pytest.raises(CorruptCheckpointError, match="a: its bits differ from those saved"):
            read(tmp_path, 1)


def test_read_gives_nested_dicts_in_host_memory(saves):
    found = read(saves)
    assert list(found) == ["params", "state", "step"]
    assert isinstance(found["params"]["enc"]["w"], np.ndarray)
    assert found["params"]["enc"]["w"].tolist() == np.full((8, 4), 2.0).tolist()
    assert found["params"]["dec"]["0"].shape == (16,)
    assert found["step"] == 2
    assert read(saves, 1)["step"] == 1
    assert read(saves / "1", only="^step$|count") == {"state": {"0": {"count": 0}}, "step": 1}
    with pytest.raises(ValueError, match="is the folder of step 1; leave step=2 out"):
        read(saves / "1", 2)
    with pytest.raises(ValueError, match="does not match any of 11 leaves"):
        read(saves, only="paramz")
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 3"):
        read(saves, 3)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        read(saves / "nowhere")


def test_read_of_all_kinds(tmp_path):
    cut = NamedSharding(jaxshard.make_mesh(), P("data"))
    tree = {
        "pair": Pair(np.arange(3, dtype=np.int8), [jnp.ones((2, 2), jnp.bfloat16), ()]),
        "cut": jax.device_put(jnp.arange(16.0), cut),
        "big": 10**30,
        "flag": True,
        "rate": 0.1,
        "empty": jnp.zeros((0, 4)),
        "key": jax.random.key(5),
        "a": {"b/c": np.float32(4), "%2F": np.float32(5)},
    }
    with Checkpointer(tmp_path / "run" / "model") as checkpoints:
        checkpoints.save(0, tree)
    found = read(tmp_path / "run")
    assert found["pair"]["left"].dtype == np.int8
    assert found["pair"]["right"]["0"].dtype == jnp.bfloat16
    assert found["cut"].tolist() == list(range(16))
    assert (found["big"], found["flag"], found["rate"]) == (10**30, True, 0.1)
    assert found["empty"].shape == (0, 4)
    assert found["key"].tolist() == jax.random.key_data(tree["key"]).tolist()
    assert {name: float(x) for name, x in found["a"].items()} == {"b/c": 4, "%2F": 5}
    with jax.enable_x64(True), Checkpointer(tmp_path / "wide") as checkpoints:
        checkpoints.save(1, {"x": jnp.arange(3) + 2**40})
    assert read(tmp_path / "wide")["x"].tolist() == [2**40, 2**40 + 1, 2**40 + 2]  # x64 is off


def test_read_takes_the_one_before_a_corrupt_one(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.arange(3.0)})
        checkpoints.save(2, {"x": jnp.arange(3.0)})
    for path in data_files(tmp_path / "2"):
        path.write_bytes(b"")
    with pytest.warns(UserWarning, match="checkpoint 2 is corrupt.*trying the previous one"):
        assert read(tmp_path)["x"].tolist() == [0, 1, 2]
