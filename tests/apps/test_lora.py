"""Adapters of low rank beside a frozen base: what is trained, what is held, and where a run starts from."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import assert_close, assert_same_bits

import jaxshard
from jaxshard.apps.commands.train import command
from jaxshard.apps.config.checks import check
from jaxshard.apps.config.config import Config, LoraConfig, ModelConfig, ShardingConfig, TrainConfig
from jaxshard.apps.config.devices import make_mesh
from jaxshard.apps.config.memory import useful_flops
from jaxshard.apps.model import linear
from jaxshard.apps.model.model import LanguageModel
from jaxshard.apps.runs import run_folder
from jaxshard.apps.trainer import finished_run, parts

SMALL = ModelConfig(layers=2, width=16, heads=4, kv_heads=2, hidden=32, sequence_length=8, vocabulary=256)
OPTIONS = ["--model.layers", "2", "--model.width", "16", "--model.heads", "4", "--model.hidden", "32"]
OPTIONS += ["--model.sequence-length", "32", "--train.rows", "8", "--data.heldout-bytes", "2000"]
BASES = ("", "bfloat16", "int8")


def batch(seed, rows=16, length=8):
    return {"tokens": np.random.default_rng(seed).integers(0, 256, (rows, length + 1)).astype(np.int32)}


@functools.cache
def start(base, model=SMALL):
    """Parameters whose adapters do something."""
    lora = LoraConfig(rank=4, alpha=4.0, base=base)
    fresh = LanguageModel(model, lora=lora).init(jax.random.key(0))
    params = linear.by_path(linear.stored(fresh, lora, "float32"))
    for number, path in enumerate(params):
        if path.endswith("lora_b"):
            params[path] = 0.1 * jax.random.normal(jax.random.key(number), params[path].shape)
    return lora, jax.device_get(linear.nested(params))


def as_one(lora, params):
    """The parameters of the model without adapters that does the same."""
    if "kernel" in params and len(params) > 1:
        return {"kernel": np.asarray(linear.merged(params, lora))}
    return {n: as_one(lora, p) if isinstance(p, dict) else np.asarray(p, np.float32) for n, p in params.items()}


def trained(params):
    return {path: leaf for path, leaf in linear.by_path(params).items() if linear.is_adapter(path)}


@functools.cache
def plain_steps(base):
    """Three steps on one device, with gradients of the adapters alone."""
    lora, params = start(base)
    model, inner = LanguageModel(SMALL, lora=lora), optax.adamw(0.01)
    flat = linear.by_path(jax.tree.map(jnp.asarray, params))
    ours, state, losses = trained(params), inner.init(trained(params)), []

    @jax.jit
    def value_and_grad(ours, tokens):
        return jax.value_and_grad(lambda ours: model.loss(linear.nested(flat | ours), tokens))(ours)

    for seed in range(3):
        loss, grads = value_and_grad(ours, batch(seed))
        updates, state = inner.update(grads, state, ours)
        ours, losses = optax.apply_updates(ours, updates), [*losses, float(loss)]
    return losses, ours


@pytest.mark.parametrize("base", BASES)
def test_a_model_with_adapters_is_the_model_with_merged_matrices(base):
    lora, params = start(base)
    got = LanguageModel(SMALL, lora=lora).loss(params, batch(0))
    want = LanguageModel(SMALL).loss(as_one(lora, params), batch(0))
    assert float(got) == pytest.approx(float(want), rel=2e-5)
    silent = LanguageModel(SMALL).loss(as_one(dataclasses.replace(lora, alpha=1e-30), params), batch(0))
    assert abs(float(got) - float(silent)) > 1e-4


STRATEGIES = {
    "zero1": ("zero1", {}),
    "zero3": ("zero3", {}),
    "hsdp": ("hsdp", {"replica": 2}),
    "hybrid": ("hybrid", {"tensor": 2, "zero": 3}),
    "hybrid, sequence": ("hybrid", {"tensor": 2, "zero": 2, "sequence_parallel": True}),
    "tensor": ("tensor_parallel", {"tensor": 2}),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_steps_are_those_of_one_device_and_the_base_keeps_its_bits(name, base):
    strategy, options = STRATEGIES[name]
    lora, params = start(base)
    sharding = ShardingConfig(strategy=strategy, min_shard_size=1, **options)
    config = Config(model=SMALL, lora=lora, sharding=sharding)
    check(config)
    model, mesh = parts.make_model(config), make_mesh(sharding)
    opt = parts.make_strategy(config, model, optax.adamw(0.01), mesh)
    placed = opt.place(params)
    state, step = opt.init(placed), jaxshard.train_step(model.loss, opt)
    assert {leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim} <= {x.shape for x in trained(params).values()}
    losses = []
    for seed in range(3):
        placed, state, metrics = step(placed, state, batch(seed))
        losses.append(float(metrics["loss"]))
    want_losses, want = plain_steps(base)
    assert losses == pytest.approx(want_losses, rel=1e-5)
    assert_close(trained(placed), want, 2e-4)
    before, after = linear.by_path(params), linear.by_path(jax.device_get(placed))
    assert_same_bits(*({path: x for path, x in p.items() if not linear.is_adapter(path)} for p in (before, after)))


def test_eight_bits_are_off_by_at_most_half_a_step():
    kernel = jax.random.normal(jax.random.key(0), (3, 8, 5)).at[1, :, 2].set(0.0)
    codes, scale = linear.quantized(kernel)
    assert codes.dtype == jnp.int8
    assert scale.shape == (3, 5)
    assert jnp.all(jnp.abs(codes * scale[:, None] - kernel) <= 0.5001 * scale[:, None])
    assert jnp.all(jnp.max(jnp.abs(codes), axis=1) == jnp.where(scale == 1.0, 0, 127))


def run(folder, *options):
    return command([*OPTIONS, "--out", str(folder), *options])


def saved(folder):
    """(its configuration, its newest parameters by their paths)."""
    paths = run_folder.RunFolder(folder)
    saves = jaxshard.checkpoint.Checkpointer(paths.model)
    leaves = dict(saves.read(paths.latest_step()))
    return {p.removeprefix("params/"): x for p, x in leaves.items() if p.startswith("params/")}


@pytest.fixture(scope="module")
def base_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "base"
    assert run(folder, "--train.steps", "3") == 0
    return folder


def test_a_run_of_adapters_goes_on_and_can_be_merged(base_run, tmp_path, capfd):
    lora = ["--lora.rank", "4", "--lora.base", "int8", "--train.start", str(base_run), "--sharding.strategy", "zero3"]
    assert run(tmp_path / "lora", *lora, "--train.steps", "4", "--train.save-every", "2", "--train.keep-last", "9") == 0
    out = capfd.readouterr().out
    assert "float32 parameters of rank 4 and" in out
    assert "frozen ones (matrices in int8)" in out
    before, after = saved(base_run), saved(tmp_path / "lora")
    kernel = "blocks/mlp/up/kernel"
    codes, scale = linear.quantized(jnp.asarray(before[kernel]))
    assert_same_bits([after[kernel], after[f"{kernel}_scale"]], jax.device_get([codes, scale]))
    assert after["embedding/embedding"].dtype == jnp.bfloat16
    assert np.abs(after["blocks/mlp/up/lora_b"]).max() > 0

    assert run(tmp_path / "lora", "--resume", "--train.steps", "5") == 0
    for other in (["--lora.rank", "3"], ["--train.start", "elsewhere"]):
        assert run(tmp_path / "lora", "--resume", *other, "--train.steps", "6") == 2
        assert other[0].removeprefix("--") in capfd.readouterr().err

    merged = ["--train.start", str(tmp_path / "lora"), "--train.steps", "1", "--optimizer.learning-rate", "1e-30"]
    assert run(tmp_path / "merged", *merged) == 0
    layer = {n: jnp.asarray(saved(tmp_path / "lora")[f"blocks/mlp/up/{n}"]) for n in ("kernel", *linear.ADDED)}
    want = linear.merged(layer, LoraConfig(rank=4))
    np.testing.assert_allclose(saved(tmp_path / "merged")[kernel], want, rtol=1e-6)
    assert f"{kernel}_scale" not in saved(tmp_path / "merged")


def test_all_parameters_start_from_another_run_under_any_strategy(base_run, tmp_path):
    options = ["--sharding.strategy", "pipeline_parallel", "--sharding.pipeline", "2", "--precision.params", "bfloat16"]
    options += ["--sharding.stage-microbatches", "2", "--train.rows", "16"]
    options += ["--precision.masters", "--train.steps", "1", "--optimizer.learning-rate", "1e-30"]
    assert run(tmp_path / "run", "--train.start", str(base_run), *options) == 0
    want = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16)), saved(base_run))
    assert_same_bits(saved(tmp_path / "run"), want)


def test_a_start_from_wider_numbers_keeps_them_in_masters(base_run, tmp_path):
    narrow = ["--precision.params", "bfloat16", "--precision.masters", "--train.steps", "1"]
    narrow += ["--optimizer.learning-rate", "1e-30", "--train.start"]
    assert run(tmp_path / "narrow", *narrow, str(base_run)) == 0
    assert run(tmp_path / "wide", "--train.start", str(tmp_path / "narrow"), "--train.steps", "1", *narrow[5:7]) == 0
    want = saved(base_run)
    for path, leaf in saved(tmp_path / "wide").items():
        np.testing.assert_array_equal(leaf, want[path])


def damaged(base_run, tmp_path, steps):
    """A copy of the run with another save, of which these are damaged."""
    folder = tmp_path / "damaged"
    shutil.copytree(base_run, folder)
    assert command(["--resume", "--out", str(folder), "--train.steps", "4"]) == 0
    for step in steps:
        for file in (folder / "model" / str(step) / "state").rglob("d/*"):
            file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    return folder


ONE_STEP = ["--train.steps", "1", "--optimizer.learning-rate", "1e-30"]


def test_a_damaged_save_is_told_and_the_one_before_it_taken(base_run, tmp_path):
    folder = damaged(base_run, tmp_path, [4])
    with pytest.warns(UserWarning, match="train.start = .*the previous save is used"):
        assert run(tmp_path / "run", "--train.start", str(folder), *ONE_STEP) == 0
    assert_same_bits(saved(tmp_path / "run"), saved(base_run))


@pytest.mark.filterwarnings("ignore:train.start")
def test_where_no_save_is_whole(base_run, tmp_path, capfd):
    assert run(tmp_path / "run", "--train.start", str(damaged(base_run, tmp_path, [3, 4])), *ONE_STEP) == 1
    assert "no save is intact" in capfd.readouterr().err


def test_a_save_that_was_deleted_meanwhile(base_run, tmp_path, monkeypatch):
    """The run that it starts from goes on, and keeps its newest saves alone."""
    found = finished_run.FinishedRun._newest
    asked = []

    def newest(self, without):
        asked.append(2 if not asked else found(self, without))  # it was there a moment ago
        return asked[-1]

    monkeypatch.setattr(finished_run.FinishedRun, "_newest", newest)
    assert run(tmp_path / "run", "--train.start", str(base_run), *ONE_STEP) == 0
    assert asked == [2, 3]


def test_numbers_that_do_not_fit_are_told(base_run, tmp_path, capfd):
    huge = ["--optimizer.learning-rate", "1e38", "--optimizer.clip-norm", "1e30", "--optimizer.warmup-steps", "0"]
    assert run(tmp_path / "huge", "--train.start", str(base_run), "--train.steps", "1", *huge) == 0
    half = ["--precision.params", "float16", "--precision.masters", "--precision.loss-scale"]
    assert run(tmp_path / "run", "--train.start", str(tmp_path / "huge"), *ONE_STEP, *half) == 1
    assert "train.start = " in capfd.readouterr().err


def test_a_configuration_that_was_changed_is_not_believed(base_run, tmp_path, capfd):
    shutil.copytree(base_run, tmp_path / "copy")
    path = tmp_path / "copy" / "config.toml"
    path.write_text(path.read_text().replace("alpha = 16.0", "alpha = 64.0"))
    assert run(tmp_path / "run", "--train.start", str(tmp_path / "copy")) == 2
    assert "was changed after the run wrote" in capfd.readouterr().err
    path.unlink()
    assert run(tmp_path / "run", "--train.start", str(tmp_path / "copy")) == 2
    assert "is missing" in capfd.readouterr().err


WRONG = {
    "no start": (["--lora.rank", "4"], "lora.rank = 4 without train.start"),
    "no run": (["--lora.rank", "4", "--train.start", "nowhere"], "train.start = nowhere: no saved run"),
    "a different model": (["--train.start", "BASE", "--model.hidden", "64"], "model.hidden = 64, there 32"),
    "no rank": (["--train.start", "BASE", "--lora.base", "int8"], "lora.base = int8 with lora.rank = 0"),
    "negative": (["--train.start", "BASE", "--lora.rank", "-1"], "lora.rank = -1: it must be 0 or more"),
    "alpha": (
        ["--train.start", "BASE", "--lora.rank", "2", "--lora.alpha", "0"],
        "lora.alpha = 0.0: it must be above 0",
    ),
    "alpha alone": (["--train.start", "BASE", "--lora.alpha", "3"], "lora.alpha = 3.0 with lora.rank = 0"),
    "pipeline": (
        ["--train.start", "BASE", "--lora.rank", "2", "--sharding.strategy", "hybrid", "--sharding.pipeline", "2"],
        "stages do not support frozen matrices",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_told_before_anything_is_written(name, base_run, tmp_path, capfd):
    options, words = WRONG[name]
    options = [str(base_run) if option == "BASE" else option for option in options]
    assert run(tmp_path / "run", *options) == 2
    assert words in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_frozen_matrix_takes_two_thirds_of_the_arithmetic():
    lora, attention = LoraConfig(rank=4), SMALL.layers * SMALL.width * SMALL.sequence_length
    positions = TrainConfig().rows * SMALL.sequence_length
    whole, adapted = (useful_flops(Config(model=SMALL, lora=given)) / positions for given in (LoraConfig(), lora))
    thin = sum(leaf.size for leaf in trained(start("")[1]).values())
    assert adapted == (whole - 6 * attention) * 4 / 6 + 6 * (attention + thin)
