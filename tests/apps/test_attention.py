"""Attention in one kernel: its numbers, where it runs, what is said where it does not, what is planned. Loss chunks."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxshard
from jaxshard import plan
from jaxshard.apps.config.config import Config, ModelConfig, ShardingConfig, TrainConfig
from jaxshard.apps.model.attention import why_not_fused
from jaxshard.apps.model.fused_attention import fused_attention, plain, splash
from jaxshard.apps.trainer.parts import make_parts, make_step
from jaxshard.cli.plan import command
from jaxshard.mesh import abstract_mesh
from jaxshard.programs.jaxprs import equations
from jaxshard.step.step import loss_of

MODEL = ModelConfig(
    layers=2, width=512, heads=4, kv_heads=2, hidden=256, sequence_length=256, vocabulary=256, dtype="bfloat16"
)


def qkv(length=256, features=64):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, length, heads, features) for heads in (4, 2, 2, 4)]
    return [jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=True)]


def value_and_gradients(attention, q, k, v, cotangent):
    out, pull = jax.vjp(attention, q, k, v)
    return out, *pull(cotangent)


def test_splash_attention_gives_the_same_numbers():
    """Within 1e-5 of the largest in float32; its blocks are summed in another order."""
    given = qkv()
    want = jax.jit(functools.partial(value_and_gradients, plain))(*given)
    found = jax.jit(functools.partial(value_and_gradients, functools.partial(splash, interpret=True)))(*given)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
def test_where_no_kernel_is_compiled_the_primitives_are_plain_attention(checked):
    given = qkv(32, 8)
    mesh = jaxshard.make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    cut = P("data", None, "tensor")

    def run(attention):
        fn = functools.partial(value_and_gradients, attention)
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=checked))(*given)

    for a, b in zip(run(functools.partial(fused_attention, kernel="cudnn")), run(plain), strict=True):
        np.testing.assert_array_equal(a, b)


def on(platform, kind="", **sizes):
    return abstract_mesh(8, platform=platform, device_kind=kind, **sizes)


def test_the_tpu_is_given_its_kernel_under_checked_types():
    """Pallas refuses to be traced there."""
    given = [jax.ShapeDtypeStruct((8, *x.shape[1:]), jnp.bfloat16) for x in qkv()]
    fn = functools.partial(value_and_gradients, functools.partial(fused_attention, kernel="splash"))
    specs = P("data", None, "tensor")
    mapped = jax.shard_map(fn, mesh=on("tpu", tensor=2), in_specs=specs, out_specs=specs)
    text = jax.jit(mapped).trace(*given).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= 3  # forward, the queries' gradient, and that of keys and values


REASONS = [
    ({}, on("cpu"), None),
    ({}, on("gpu", "NVIDIA H100 80GB HBM3"), None),
    ({}, on("tpu", "v5e:2x4"), None),
    ({"dtype": "float32"}, on("tpu", "v5e:2x4"), None),
    ({"attention": "xla", "dtype": "float32"}, on("gpu"), None),
    ({"dtype": "float32"}, on("gpu", "h100"), "model.dtype = float32"),
    ({"heads": 2, "kv_heads": 0}, on("gpu", "h100"), "model.width / model.heads = 256"),
    ({"width": 48, "heads": 4}, on("gpu", "h100"), "model.width / model.heads = 12"),
    ({"sequence_length": 127}, on("gpu", "h100"), "an even number of positions, and model.sequence_length = 127"),
    ({}, on("gpu", "Tesla V100-SXM2-16GB"), "this is a Tesla V100"),
    ({}, on("gpu", "AMD Instinct MI300X"), "this is a AMD"),
    ({"sequence_length": 192}, on("tpu", "v5e:2x4"), "model.sequence_length = 192"),
]


@pytest.mark.parametrize(("changes", "mesh", "words"), REASONS)
def test_why_attention_is_not_fused(changes, mesh, words):
    found = why_not_fused(dataclasses.replace(MODEL, **changes), mesh)
    assert found is None if words is None else words in (found or "")


@pytest.mark.parametrize(("changes", "mesh", "words"), [*REASONS[5:], ({}, on("cpu"), "the platform cpu")])
def test_strict_attention_is_refused_with_the_reason_and_the_cure(changes, mesh, words):
    config = config_of(attention="fused", **changes)
    with pytest.raises(ValueError, match=r"^model\.attention = fused: .*model\.attention = auto") as error:
        make_parts(config, mesh)
    assert words in str(error.value)
    assert why_not_fused(config_of(attention="fused").model, on("gpu", "h100")) is None


def config_of(rows=8, microbatches=1, **changes):
    sharding = ShardingConfig(strategy="zero3", microbatches=microbatches)
    return Config(model=dataclasses.replace(MODEL, **changes), sharding=sharding, train=TrainConfig(rows=rows))


def step_of(mesh, config):
    model, _, opt, params = make_parts(config, mesh)
    tokens = jax.ShapeDtypeStruct((config.train.rows, config.model.sequence_length + 1), np.int32)
    return make_step(config, model, opt), params, {"tokens": tokens}


def predicted(mesh, **changes):
    step, *given = step_of(mesh, config_of(**changes))
    with warnings.catch_warnings(action="error"):
        return plan.predict(step, *given)


@pytest.mark.parametrize(
    ("mesh", "attention", "names"),
    [
        (on("gpu", "h100"), "auto", {"fused_attention", "fused_attention_backward"}),
        (on("tpu", "v5e:2x4"), "fused", {"fused_attention", "fused_attention_backward"}),
        (on("gpu", "h100"), "xla", set()),
        (on("cpu"), "auto", set()),
    ],
)
def test_which_program_is_traced(mesh, attention, names):
    step, params, batch = step_of(mesh, config_of(attention=attention))
    traced = step.trace(params, loss_of(step).setup.abstract_state(params), batch)
    found = {eqn.primitive.name for eqn in equations(traced.jaxpr)}
    assert {name for name in found if name.startswith("fused_attention")} == names


@pytest.mark.parametrize(("mesh", "products"), [(on("gpu", "h100"), 2 + 2 + 5), (on("tpu", "v5e:2x4"), 2 + 2 + 7)])
def test_the_plan_counts_the_kernels_products(mesh, products):
    """Two forward, again in the backward pass, and those of its own; each looks at half of the pairs of positions."""
    heads, length, features = MODEL.heads, MODEL.sequence_length, MODEL.width // MODEL.heads
    one = 2 * heads * length**2 * features  # one row, all pairs
    fused, whole = predicted(mesh), predicted(mesh, attention="xla")
    less = MODEL.layers * one * ((2 + 2 + 4) - products / 2)
    assert sum(whole.costs.flops.values()) - sum(fused.costs.flops.values()) == pytest.approx(less, rel=1e-9)


def test_the_plan_knows_that_no_matrix_of_pairs_is_written():
    """Twice the positions are twice the bytes, in memory and on the way there; by plain operations up to four times."""
    mesh = on("gpu", "h100")

    def grown(attention):
        short, long = (predicted(mesh, attention=attention, sequence_length=n, width=128) for n in (4096, 8192))
        peaks = [p.memory["activations"] for p in (short, long)]
        return peaks[1] / peaks[0], long.costs.memory_bytes / short.costs.memory_bytes

    assert all(ratio < 2.1 for ratio in grown("auto"))
    assert all(ratio > 3.5 for ratio in grown("xla"))


def test_the_command_says_where_attention_is_not_fused(capsys):
    sizes = ["--model.layers", "1", "--model.width", "32", "--model.heads", "4", "--train.rows", "16"]
    assert command.command([*sizes, "--machine", "h100:8", "--strategies", "zero2"]) == 0
    out = capsys.readouterr().out
    assert out.count("Attention is not fused: ") == 1
    assert "MFU" in out
    assert command.command([*sizes, "--machine", "h100:8", "--strategies", "zero2", "--model.dtype", "bfloat16"]) == 0
    assert "Attention" not in capsys.readouterr().out


# The loss, a chunk of positions at a time.


def test_the_output_layer_is_gathered_once_and_its_gradient_reduced_once():
    """Whatever the chunks; and the logits' bytes are no longer part of the peak."""
    for mesh in (on("gpu", "h100"), on("tpu", "v5e:2x4")):
        whole, parts = (predicted(mesh, vocabulary=65536, loss_chunk=n, rows=128) for n in (0, 64))
        assert parts.wire_bytes == whole.wire_bytes
        logits = 16 * MODEL.sequence_length * 65536 * 2  # of 16 rows, in bfloat16
        assert parts.peak_bytes < whole.peak_bytes - logits / 3


def test_chunks_are_chosen_by_size():
    model = jaxshard.apps.model.model.LanguageModel(MODEL)
    assert model._loss_chunk(256, 256) == 256
    assert model._loss_chunk(8192, 128256) == 1024
    assert model._loss_chunk(8192, 128256 // 8) == 8192
    assert model._loss_chunk(7, 2**28) == 1


@pytest.mark.parametrize(("zero", "microbatches"), [("zero2", 1), ("zero3", 2)])
def test_chunks_compile_to_one_gather_and_one_scatter(zero, microbatches):
    sizes = ModelConfig(layers=1, width=32, heads=2, hidden=32, sequence_length=32)

    def report(chunk):
        model = jaxshard.apps.model.model.LanguageModel(dataclasses.replace(sizes, loss_chunk=chunk))
        opt = getattr(jaxshard, zero)(optax.sgd(0.1), jaxshard.make_mesh(), min_shard_size=64)
        params = opt.place(model.init(jax.random.key(0)))
        step = jaxshard.train_step(model.loss, opt, microbatches=microbatches)
        tokens = np.zeros((16, 33), np.int32)
        return jaxshard.inspect.report(step.lower(params, opt.init(params), {"tokens": tokens}).compile())

    assert report(8).wire_bytes == report(0).wire_bytes
