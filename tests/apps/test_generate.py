"""Text that a trained model writes: the cache changes nothing, and params may lie anywhere."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jaxshard.apps.config.config import LoraConfig, ModelConfig
from jaxshard.apps.model.model import LanguageModel
from jaxshard.apps.trainer import generate
from jaxshard.apps.trainer.generate import Sampling, generated
from jaxshard.cli import main

SIZES = {"layers": 2, "width": 16, "heads": 4, "hidden": 32, "sequence_length": 12, "vocabulary": 256}
MODELS = {
    "rotary": (ModelConfig(**SIZES), LoraConfig()),
    "grouped, 8 bits": (ModelConfig(**SIZES, kv_heads=2), LoraConfig(rank=2)),
    "learned": (ModelConfig(**SIZES, positions="learned", mlp="gelu", tied=True), LoraConfig()),
}


def started(name):
    config, lora = MODELS[name]
    model = LanguageModel(config, lora=lora)
    return model, jax.tree.map(lambda x: 3 * x, model.init(jax.random.key(0)))


@pytest.mark.parametrize("first", [1, 5, 12])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_any_split_are_those_of_the_loss(name, first):
    model, params = started(name)
    tokens = np.random.default_rng(0).integers(0, 256, (3, 13)).astype(np.int32)
    logits, cache = model.extended(params, tokens[:, :first], model.empty_cache(3), 0)
    found = [logits]
    for i in range(first, 12):
        logits, cache = model.extended(params, tokens[:, i : i + 1], cache, i)
        found.append(logits)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(jnp.stack(found, 1)), tokens[:, first:, None], 2)
    weights = (np.arange(12) >= first - 1).astype("f") * np.ones((3, 1), "f")
    total, count = model.weighted_loss(params, {"tokens": tokens, "weights": weights})
    assert float(jnp.mean(losses)) == pytest.approx(float(total / count), rel=1e-5)


def taken(count, *args):
    return list(itertools.islice(generated(*args), count))


def test_the_likeliest_tokens_are_those_of_the_whole_text():
    model, params = started("rotary")
    prompt = [7, 8, 9]
    found = taken(9, model, params, prompt, Sampling(temperature=0))
    for i in range(9):
        text = np.asarray([[*prompt, *found[:i]]], np.int32)
        assert int(jnp.argmax(model.extended(params, text, model.empty_cache(1), 0)[0])) == found[i]


def test_it_goes_on_where_the_models_length_is_full():
    model, params = started("learned")
    found = taken(40, model, params, list(range(30)), Sampling(temperature=0))
    assert len(found) == 40
    kept = [*range(30), *found[:1]][-6:]  # the prompt filled it, and one token followed
    logits = model.extended(params, np.asarray([kept], np.int32), model.empty_cache(1), 0)[0]
    assert int(jnp.argmax(logits)) == found[1]


def test_chance_is_the_seeds_and_top_k_bounds_it():
    model, params = started("rotary")
    params = jax.tree.map(lambda x: x / 9, params)
    first, again, other = (taken(30, model, params, [1], Sampling(1.0, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert taken(30, model, params, [1], Sampling(1.0, top_k=1)) == taken(30, model, params, [1], Sampling(0.0))
    logits = jnp.asarray([0.0, 3.0, 2.0, 1.0])
    chosen = {int(generate._chosen(logits, Sampling(5.0, top_k=2), jax.random.key(i))) for i in range(60)}
    assert chosen == {1, 2}
    share = np.mean([int(generate._chosen(logits, Sampling(1.0), jax.random.key(i))) == 1 for i in range(400)])
    assert share == pytest.approx(float(jax.nn.softmax(logits)[1]), abs=0.08)


def test_bytes_that_are_cut_in_a_character():
    text = "naïve ☃"
    assert "".join(generate.as_text(iter(text.encode()))) == text
    assert "".join(generate.as_text(iter([0xE2, 0x41, 300]))) == "\ufffdA\ufffd"


OPTIONS = [
    "--model.layers",
    "2",
    "--model.width",
    "16",
    "--model.heads",
    "2",
    "--model.hidden",
    "32",
    "--train.rows",
    "16",
]
OPTIONS += ["--model.sequence-length", "16", "--train.steps", "2", "--data.heldout-bytes", "1000"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    pipeline = ["--sharding.strategy", "pipeline_parallel", "--sharding.pipeline", "2", "--sharding.virtual", "1"]
    tokens = np.random.default_rng(0).integers(0, 300, 4000).astype("<u2")
    tokens.tofile(folder / "train.bin")
    extra = {
        "bytes": ["--sharding.strategy", "zero3", "--sharding.min-shard-size", "64"],
        "pipeline": [*pipeline, "--sharding.stage-microbatches", "2"],
        "tokens": ["--data", str(folder / "train.bin"), "--model.vocabulary", "512"],
    }
    for name, options in extra.items():
        assert main(["train", *OPTIONS, *options, "--train.sample", "9", "--out", str(folder / name)]) == 0
    return folder


def shown(capfd, *arguments, status=0):
    capfd.readouterr()
    assert main(["generate", *map(str, arguments)]) == status
    return capfd.readouterr()


def test_the_command_writes_on(runs, capfd):
    out = shown(capfd, runs / "bytes", "--prompt", "The ", "--tokens", 20, "--top-k", 5).out
    assert out.startswith("The ")
    assert len(out.encode()) >= 24
    assert shown(capfd, runs / "pipeline", "--tokens", 3, "--temperature", 0).out.startswith("\n")


def test_a_sample_at_the_end_of_a_run_is_what_the_command_writes(tmp_path, capfd):
    options = ["--train.sample", "12", "--sharding.strategy", "hybrid", "--sharding.tensor", "2", "--train.seed", "3"]
    assert main(["train", *OPTIONS, *options, "--out", str(tmp_path / "run")]) == 0
    sample = capfd.readouterr().out.partition("a sample:\n")[2]
    text = shown(capfd, tmp_path / "run", "--tokens", 12, "--seed", 3).out
    assert sample.startswith(text.removeprefix("\n").removesuffix("\n"))


def test_tokens_are_numbers_or_a_tokenizers(runs, tmp_path, capfd):
    words = shown(capfd, runs / "tokens", "--prompt", "5 17", "--tokens", 4).out.split()
    assert words[:2] == ["5", "17"]
    assert len(words) == 6
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["some text"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert shown(capfd, runs / "tokens", "--tokenizer", tmp_path / "tokenizer.json", "--prompt", "some").out


WRONG = {
    "no run": (["nowhere"], "RUN nowhere: no saved run"),
    "no count": (["bytes", "--tokens", "0"], "--tokens 0 must be at least 1"),
    "negative": (["bytes", "--top-k", "-1"], "--top-k -1 must be at least 0"),
    "temperature": (["bytes", "--temperature", "-1"], "--temperature -1.0 must be 0 or more"),
    "words": (["tokens", "--prompt", "The"], "give --tokenizer FILE, or token ids"),
    "large": (["tokens", "--prompt", "512"], "--prompt has the token id 512; the model's ids are 0 to 511"),
    "no tokenizer": (["bytes", "--tokenizer", "nowhere.json"], "--tokenizer nowhere.json cannot be read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_told(name, runs, capfd):
    (run, *options), words = WRONG[name]
    path = runs / run if run != "nowhere" else run
    assert words in shown(capfd, path, *options, status=2).err
