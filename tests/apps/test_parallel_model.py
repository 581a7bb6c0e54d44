"""The reference model over tensor, pipeline and data axes: as on one device, and its options."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from oracle import assert_close, assert_same_bits

import jaxshard
from jaxshard.apps.config.checks import check
from jaxshard.apps.config.config import Config, ModelConfig, ShardingConfig
from jaxshard.apps.model.model import LanguageModel, Pipelined

SMALL = ModelConfig(layers=4, width=16, heads=4, hidden=32, sequence_length=8, vocabulary=256)

GROUPED = dataclasses.replace(SMALL, kv_heads=2)
CHUNKED = dataclasses.replace(SMALL, loss_chunk=2)


@functools.cache
def start(config):
    return jax.device_get(LanguageModel(config).init(jax.random.key(0)))


def batch(rows=16, length=8):
    return {"tokens": np.random.default_rng(0).integers(0, 256, (rows, length + 1)).astype(np.int32)}


def wide(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@functools.cache
def truth(config):
    config = dataclasses.replace(config, loss_chunk=0)
    loss, grads = jax.jit(jax.value_and_grad(LanguageModel(config).loss))(wide(start(config)), batch())
    return loss, grads


CASES = {
    "default": (SMALL, Pipelined("1f1b", 2), {"pipeline": 2, "tensor": 2}, 2, False),
    "sequence": (SMALL, Pipelined("1f1b", 2, 1, "microbatch"), {"pipeline": 2, "tensor": 2}, 3, True),
    "learned, gelu, tied": (
        dataclasses.replace(SMALL, positions="learned", mlp="gelu", tied=True),
        Pipelined("gpipe", 2),
        {"pipeline": 2, "tensor": 2},
        3,
        True,
    ),
    "layer norm, biases": (
        dataclasses.replace(SMALL, positions="learned", mlp="gelu", norm="layer", bias=True, norm_epsilon=1e-5),
        Pipelined("1f1b", 2),
        {"pipeline": 2, "tensor": 2},
        2,
        True,
    ),
    "interleaved": (SMALL, Pipelined("interleaved", 2, 2), {"pipeline": 2, "tensor": 2}, 1, False),
    "no pipeline": (SMALL, None, {"tensor": 4}, 3, True),
    "grouped": (GROUPED, Pipelined("1f1b", 2), {"pipeline": 2, "tensor": 2}, 3, True),
    "grouped, no pipeline": (GROUPED, None, {"tensor": 2}, 2, False),
    "loss chunks": (CHUNKED, Pipelined("1f1b", 2), {"pipeline": 2, "tensor": 2}, 3, True),
    "loss chunks, tied": (dataclasses.replace(CHUNKED, tied=True), Pipelined("gpipe", 2), {"pipeline": 2}, 2, False),
    "loss chunks, no pipeline": (CHUNKED, None, {"tensor": 2}, 3, True),
    "no tensor": (SMALL, Pipelined("1f1b", 4), {"pipeline": 4}, 3, False),
}


@pytest.mark.filterwarnings("ignore:.*cannot be sharded")  # small biases
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(name):
    config, pipelined, sizes, zero, sequence = CASES[name]
    with jax.enable_x64(True):
        model = LanguageModel(dataclasses.replace(config, dtype="float32"), pipelined, sequence)
        opt = jaxshard.hybrid(optax.sgd(0.1), jaxshard.make_mesh(**sizes), model.specs, zero, min_shard_size=1)
        params, (want, want_grads) = wide(start(config)), truth(config)
        virtual = pipelined.virtual if pipelined else 1
        if virtual > 1:
            params, want_grads = (stacked(tree, virtual) for tree in (params, want_grads))
        loss, grads = jaxshard.value_and_grad(model.loss, opt)(opt.place(params), batch())
        assert float(loss) == pytest.approx(float(want), rel=1e-5)
        assert_close(grads, want_grads, 2e-5)


def repeated(params):
    """The weights of a model with as many heads of keys and values: each group's are those of all its queries."""
    kernel = params["blocks"]["attention"]["qkv"]["kernel"]
    groups, queries = GROUPED.kv_heads, GROUPED.heads // GROUPED.kv_heads
    parts = kernel.reshape(*kernel.shape[:2], groups, queries + 2, -1)
    shared = np.repeat(parts[:, :, :, None, queries:], queries, axis=3)
    heads = np.concatenate([parts[:, :, :, :queries, None], shared], axis=4)  # (L, D, groups, queries, 3, K)
    attention = params["blocks"]["attention"] | {"qkv": {"kernel": heads.reshape(*kernel.shape[:2], -1)}}
    return params | {"blocks": params["blocks"] | {"attention": attention}}


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_groups_of_queries_share_a_key_and_a_value(positions):
    grouped, all_heads = (dataclasses.replace(c, positions=positions) for c in (GROUPED, SMALL))
    params = start(grouped)
    assert params["blocks"]["attention"]["qkv"]["kernel"].shape == (4, 16, (4 + 2 * 2) * 4)
    assert start(all_heads)["blocks"]["attention"]["qkv"]["kernel"].shape == (4, 16, 3 * 16)
    got, want = (
        LanguageModel(config).loss(p, batch()) for config, p in ((grouped, params), (all_heads, repeated(params)))
    )
    assert float(got) == pytest.approx(float(want), rel=1e-6)


def test_as_many_heads_of_keys_and_values_is_as_without_the_option():
    both = [SMALL, dataclasses.replace(SMALL, kv_heads=SMALL.heads)]
    assert_same_bits(*(start(config) for config in both))
    assert_same_bits(*(jax.grad(LanguageModel(config).loss)(start(config), batch()) for config in both))


def stacked(tree, virtual):
    return tree | {"blocks": jax.tree.map(lambda x: x.reshape(virtual, -1, *x.shape[1:]), tree["blocks"])}


def test_the_weighted_loss_of_a_pipeline():
    model = LanguageModel(SMALL, Pipelined("1f1b", 2))
    opt = jaxshard.hybrid(optax.sgd(0.1), jaxshard.make_mesh(pipeline=2), model.specs, 2, min_shard_size=1)
    given = batch() | {"weights": (np.random.default_rng(1).uniform(size=(16, 8)) < 0.5).astype("f")}
    got = jaxshard.evaluate(model.weighted_loss, opt, weighted=True)(opt.place(start(SMALL)), given)
    total, weight = LanguageModel(SMALL).weighted_loss(start(SMALL), given)
    assert float(got) == pytest.approx(float(total / weight), rel=1e-5)


@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_is_the_same_however_layers_are_cut(sequence):
    """The keys go by layer, not by device of the tensor axis or stage."""
    config = dataclasses.replace(SMALL, dropout=0.3)
    found = []
    for pipelined, sizes in ((None, {"tensor": 2}), (Pipelined("1f1b", 1), {"pipeline": 2, "tensor": 2})):
        model = LanguageModel(config, pipelined, sequence)
        mesh = jaxshard.make_mesh(**sizes, devices=jax.devices()[: 2 * len(sizes)])
        opt = jaxshard.hybrid(optax.sgd(0.1), mesh, model.specs, 0)
        run = jaxshard.value_and_grad(model.loss, opt)
        found.append(run(opt.place(start(config)), batch(), jax.random.key(5))[0])
    plain = LanguageModel(config).loss(start(config), batch())
    assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-5)
    assert abs(float(found[0]) - float(plain)) > 1e-4


BAD = [
    ({"tensor": 2}, "sharding.tensor = 2: the strategy zero2 does not use this axis.*tensor_parallel or hybrid"),
    ({"strategy": "tensor_parallel", "pipeline": 2}, "sharding.pipeline = 2: the strategy tensor_parallel"),
    ({"strategy": "hybrid", "virtual": 2}, "sharding.virtual = 2 with sharding.schedule = 1f1b"),
    (
        {"strategy": "hybrid", "pipeline": 2},
        "model.layers = 3 is not a multiple of sharding.pipeline 2 x .* 4 would be",
    ),
    ({"strategy": "hybrid", "tensor": 4}, "model.heads = 6 is not a multiple of sharding.tensor = 4: 8 would be"),
    (
        {"strategy": "hybrid", "tensor": 6, "kv_heads": 3},
        "model.kv_heads = 3 is not a multiple of sharding.tensor = 6: 6 would be",
    ),
    ({"strategy": "hybrid", "zero": 4}, "sharding.zero = 4: it must be 0, 1, 2 or 3"),
    (
        {"strategy": "hybrid", "pipeline": 3, "virtual": 2, "schedule": "interleaved", "layers": 6},
        "sharding.stage_microbatches = 4 is not a multiple of sharding.pipeline = 3",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_options_that_do_not_fit(options, message):
    model = ModelConfig(layers=options.pop("layers", 3), kv_heads=options.pop("kv_heads", 0))
    with pytest.raises(ValueError, match=message):
        check(Config(model=model, sharding=ShardingConfig(**options)))


def test_specs_name_every_matrix():
    for config in (SMALL, dataclasses.replace(SMALL, tied=True, positions="learned", mlp="gelu")):
        model = LanguageModel(config, Pipelined())
        opt = jaxshard.hybrid(optax.sgd(0.1), jaxshard.make_mesh(pipeline=2, tensor=2), model.specs)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        specs = opt.shardings(shapes).specs.params
        assert "tensor" in str(specs["embedding"])
        assert all("pipeline" in str(spec) for spec in jax.tree.leaves(specs["blocks"]))
        assert str(specs["blocks"]).count("tensor") == 4
