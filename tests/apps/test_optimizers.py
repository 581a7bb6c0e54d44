"""The optimizers that `jaxshard train --optimizer.name` knows, and what is told of those that it cannot have."""

import inspect

import jax
import numpy as np
import optax
import pytest
from oracle import assert_same_bits

from jaxshard.apps.commands.train import command
from jaxshard.apps.config.config import LoraConfig, ModelConfig, OptimizerConfig
from jaxshard.apps.model.model import LanguageModel
from jaxshard.apps.trainer.optimizers import check_arguments, make_optimizer

SMALL = ModelConfig(layers=2, width=16, heads=2, hidden=32, sequence_length=8)
OPTIONS = ["--model.layers", "2", "--model.width", "16", "--model.heads", "2", "--model.hidden", "32"]
OPTIONS += ["--model.sequence-length", "32", "--train.rows", "8", "--train.steps", "3", "--data.heldout-bytes", "1000"]


def params():
    return LanguageModel(SMALL).init(jax.random.key(0))


def two_updates(inner):
    given = params()
    grads = jax.tree.map(lambda x: np.cos(9 * x), given)
    state, updates = inner.init(given), None
    for _ in range(2):
        updates, state = jax.jit(inner.update)(grads, state, given)
    return updates


def kernels(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", tree)


def made(**options):
    return make_optimizer(OptimizerConfig(warmup_steps=1, learning_rate=0.1, **options), 10)


EXPECTED = {
    "adamw": (made, lambda rate: optax.adamw(rate, 0.9, 0.98, weight_decay=0.1, mask=kernels)),
    "adamw with its options": (
        lambda: made(beta1=0.8, beta2=0.99, weight_decay=0.0, arguments="nesterov = true, eps = 1e-4"),
        lambda rate: optax.adamw(rate, 0.8, 0.99, eps=1e-4, weight_decay=0.0, mask=kernels, nesterov=True),
    ),
    "lion": (lambda: made(name="lion"), lambda rate: optax.lion(rate, weight_decay=0.1, mask=kernels)),
    "sgd": (lambda: made(name="sgd", arguments="momentum = 0.9"), lambda rate: optax.sgd(rate, momentum=0.9)),
    "adafactor": (
        lambda: made(name="adafactor"),
        lambda rate: optax.adafactor(rate, weight_decay_mask=kernels),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_is_optaxs_with_these_arguments(name):
    make, plain = EXPECTED[name]
    schedule, inner = make()
    want = optax.chain(optax.clip_by_global_norm(1.0), plain(schedule))
    assert_same_bits(two_updates(inner), two_updates(want))


def test_muon_has_the_blocks_matrices_layer_by_layer_and_adamw_the_rest():
    schedule, inner = made(name="muon", weight_decay=0.0)
    found = two_updates(inner)
    adam = two_updates(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, nesterov=True)))
    for path, update in jax.tree_util.tree_leaves_with_path(found):
        names = [key.key for key in path]
        if names[0] == "blocks" and names[-1] == "kernel":
            for layer in update:
                values = np.linalg.svd(layer, compute_uv=False)
                assert values.max() < 2 * values.min()  # nearly orthogonal
        else:
            other = adam
            for name in names:
                other = other[name]
            np.testing.assert_allclose(update, other, rtol=1e-5, atol=1e-9)


def test_adapters_decay_and_go_to_muon_as_matrices_do():
    lora = LanguageModel(SMALL, lora=LoraConfig(rank=2)).init(jax.random.key(0))
    adapters = jax.tree.map(lambda x: x, lora["blocks"]["mlp"]["up"])
    still = jax.tree.map(np.zeros_like, {"blocks": {"up": adapters}})
    _, inner = made(beta2=0.9)
    updates, _ = inner.update(still, inner.init({"blocks": {"up": adapters}}), {"blocks": {"up": adapters}})
    assert np.abs(updates["blocks"]["up"]["lora_a"]).max() == 0  # at a learning rate of 0
    state = inner.init({"blocks": {"up": adapters}})
    for _ in range(2):
        updates, state = inner.update(still, state, {"blocks": {"up": adapters}})
    assert np.abs(updates["blocks"]["up"]["lora_a"]).max() > 0


WRONG = {
    "no such": ({"name": "lionn"}, "has no optimizer of this name with a learning rate; the nearest: lion"),
    "a transformation": ({"name": "scale_by_adam"}, "has no optimizer of this name"),
    "a line search": ({"name": "lbfgs"}, "optimizer.name = lbfgs, with a schedule as learning rate"),
    "no schedules": ({"name": "sm3"}, "use a different optimizer"),
    "more arguments": ({"name": "dpsgd"}, "missing 3 required positional arguments: 'l2_norm_clip'"),
    "unknown argument": ({"arguments": "momentum = 1"}, "adamw has no argument 'momentum'; it has b1, b2"),
    "not valid TOML": ({"arguments": "b1 0.9"}, "write it as TOML: b1 = 0.9"),
    "no decay": ({"name": "sgd", "weight_decay": 0.1}, "weight_decay = 0.1: sgd has no argument weight_decay"),
    "no betas": ({"name": "sgd", "beta2": 0.9}, "optimizer.beta2 = 0.9: sgd has no argument b2"),
    "twice": ({"beta1": 0.9, "arguments": "b1 = 0.8"}, "leave one out"),
    "the rate": ({"arguments": "learning_rate = 1"}, "adamw has no argument 'learning_rate'"),
    "a value that is none": ({"arguments": 'b1 = "x"'}, "b1 = 'x': it must be a number"),
    "a mean that grows": ({"arguments": "b1 = 2.0"}, "b1 = 2.0: it must be at least 0 and below 1"),
    "below zero": ({"arguments": "b2 = -0.1"}, "b2 = -0.1: it must be at least 0 and below 1"),
    "1 in float32": ({"arguments": "b2 = 0.999999999"}, "b2 = 0.999999999: it must be at least 0 and below 1"),
    "another's momentum": ({"name": "sgd", "arguments": "momentum = 1"}, "momentum = 1: it must be at least 0"),
    "no number": ({"arguments": "eps = nan"}, "eps = nan: it must be a finite number"),
    "no end": ({"arguments": "eps = inf"}, "eps = inf: it must be a finite number"),
    "more than float32 has": ({"arguments": "eps = 1e39"}, "eps = 1e+39: it must be a finite number in float32"),
    "many digits": ({"arguments": "eps = 1" + "0" * 400}, "it must be a finite number in float32"),
    "more than Python reads": ({"arguments": "eps = " + "9" * 5000}, "write it as TOML"),
    "deep": ({"arguments": "eps = " + "[" * 100_000}, "write it as TOML"),
    "a sign": ({"arguments": "eps = -1e-8"}, "eps = -1e-08: it must be 0 or more"),
    "true": ({"arguments": "b1 = true"}, "b1 = True: it must be a number"),
    "a number for true": ({"arguments": "nesterov = 1"}, "nesterov = 1: it must be true or false"),
    "a table": ({"arguments": "mask = {a = 1}"}, "mask = {'a': 1}: it must be a number, or text"),
    "a day": ({"arguments": "mu_dtype = 2020-01-01"}, "it must be a number, or text"),
    "no type": ({"arguments": 'mu_dtype = "evil.py:rows"'}, "optax says"),
    "work without end": ({"name": "muon", "arguments": "ns_steps = 1000000000"}, "it must be at most 1000"),
    "NaN of finite gradients": ({"name": "rmsprop", "arguments": "initial_scale = -1.0"}, "is not finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_told(name):
    options, words = WRONG[name]
    with pytest.raises(ValueError, match="optimizer") as error:
        made(**options)
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["muon", "galore"])
def test_a_run(name, tmp_path, capfd):
    options = [*OPTIONS, "--out", str(tmp_path / "run"), "--optimizer.name", name, "--sharding.strategy", "zero3"]
    assert command([*options, "--sharding.min-shard-size", "1"]) == 0
    assert command(["--resume", "--out", str(tmp_path / "run"), "--train.steps", "4"]) == 0
    assert command(["--resume", "--out", str(tmp_path / "run"), "--optimizer.name", "lion", "--train.steps", "5"]) == 2
    assert "optimizer.name = 'lion', saved" in capfd.readouterr().err


def test_optaxs_own_defaults_may_be_given():
    """The ranges are not narrower than what optax takes by default."""
    found = 0
    for module in (optax, optax.contrib):
        for make in vars(module).values():
            if not inspect.isfunction(make) or "learning_rate" not in inspect.signature(make).parameters:
                continue
            defaults = {name: each.default for name, each in inspect.signature(make).parameters.items()}
            plain = {name: value for name, value in defaults.items() if isinstance(value, bool | int | float | str)}
            check_arguments({name: value for name, value in plain.items() if name != "learning_rate"}, make)
            found += len(plain)
    assert found > 100


def test_arguments_are_looked_at_before_a_run_goes_on(tmp_path, capfd):
    options = [*OPTIONS, "--out", str(tmp_path / "run")]
    assert command(options) == 0
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    assert command(["--resume", "--out", str(tmp_path / "run"), "--optimizer.arguments", "b1 = 2.0"]) == 2
    assert capfd.readouterr().err.endswith("optimizer.arguments: b1 = 2.0: it must be at least 0 and below 1\n")
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before
