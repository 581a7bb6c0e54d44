"""GPT-2 and Llama in and out by Hugging Face's names: what `transformers` computes, and every tensor used once."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import NAMES, RECORDED, expected, fresh, greedy_of, logits_of, placed, saved_run, tensors_of
from oracle import assert_same_bits
from safetensors import numpy as safetensors_numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import jaxshard
from jaxshard.apps.config.config import Config, LoraConfig, ModelConfig, PrecisionConfig, ShardingConfig
from jaxshard.apps.huggingface import hf_config, hf_names
from jaxshard.apps.model import linear
from jaxshard.apps.model.model import LanguageModel
from jaxshard.apps.trainer import finished_run, generate, parts
from jaxshard.cli import main

GPT2 = ModelConfig(
    layers=2, width=12, heads=3, hidden=20, sequence_length=8, vocabulary=259, positions="learned", norm="layer",
    norm_epsilon=1e-5, bias=True, mlp="gelu",
)  # fmt: skip
LLAMA = ModelConfig(layers=3, width=24, heads=6, kv_heads=3, hidden=7, sequence_length=8, vocabulary=257)
FAMILIES = {
    "gpt2": dataclasses.replace(GPT2, tied=True),
    "gpt2, untied": dataclasses.replace(GPT2, kv_heads=3),
    "llama": dataclasses.replace(LLAMA, rotary_base=5e5, rotary_factor=8.0, rotary_length=64),
    "llama, tied": dataclasses.replace(LLAMA, tied=True, kv_heads=0, bias=True),
}


def opened(path):
    return finished_run.opened(path, "RUN")


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_likeliest_tokens_are_those_of_transformers(name):
    config, found = opened(RECORDED / name)
    want = expected(name)
    with jax.default_matmul_precision("highest"):
        model, params = generate.loaded(config, found)
        logits = logits_of(model, params, want["tokens"])
        assert greedy_of(model, params, [7, 200, 31, 4], 12) == want["greedy"].tolist()
    np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=1e-5 * np.abs(want["logits"]).max())


STRATEGIES = {
    "zero3": ShardingConfig(strategy="zero3", min_shard_size=1),
    "tensor": ShardingConfig(strategy="tensor_parallel", tensor=2),
    "hybrid": ShardingConfig(strategy="hybrid", tensor=2, pipeline=2, stage_microbatches=2, zero=3, min_shard_size=1),
    "sequence": ShardingConfig(strategy="hybrid", tensor=2, sequence_parallel=True, zero=2, min_shard_size=1),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_losses_of_every_strategy_are_those_of_transformers(name, strategy):
    config, found = opened(RECORDED / name)
    want, length = expected(name), 10
    tokens = np.tile(want["tokens"][:, : length + 1], (8, 1)).astype(np.int32)
    weights = np.random.default_rng(0).random((16, length), np.float32)
    with jax.default_matmul_precision("highest"):
        model, opt, params = placed(dataclasses.replace(config, sharding=STRATEGIES[strategy]), found)
        loss = jaxshard.evaluate(model.weighted_loss, opt, weighted=True)(
            params, {"tokens": tokens, "weights": weights}
        )
    logits = np.tile(want["logits"][:, :length], (8, 1, 1)).astype(np.float64)
    losses = -np.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], 2)[..., 0]
    assert float(loss) == pytest.approx(float(np.sum(losses * weights) / np.sum(weights)), rel=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rule_for_every_leaf_and_its_shape(name):
    model = FAMILIES[name]
    leaves = linear.by_path(jax.eval_shape(LanguageModel(model).init, jax.random.key(0)))
    shapes = {rule.path: (model.layers,) * rule.is_stacked + rule.shape for rule in hf_names.rules(model)}
    assert shapes == {path: leaf.shape for path, leaf in leaves.items()}


def export(run, folder, *options, status=0):
    assert main(["ckpt", "export", str(run), "--huggingface", str(folder), *options]) == status
    return folder


@pytest.mark.parametrize("size", ["5GB", "3kB"])
@pytest.mark.parametrize("name", FAMILIES)
def test_out_and_in_again_keeps_every_bit(name, size, tmp_path):
    config = Config(model=FAMILIES[name])
    _, params = fresh(config)
    folder = export(saved_run(tmp_path / "a run", config, params), tmp_path / "new [1] folder", "--shard-size", size)
    assert len(list(folder.glob("*.safetensors"))) == (1 if size == "5GB" else len(list(folder.glob("model-*"))))
    again, found = opened(folder)
    same = dataclasses.replace(config.model, kv_heads=again.model.kv_heads)
    assert again.model == same
    zero3 = dataclasses.replace(again, sharding=STRATEGIES["zero3"])
    assert_same_bits(jax.device_get(placed(zero3, found)[2]), jax.device_get(params))
    second = export(saved_run(tmp_path / "second", config, placed(zero3, found)[2]), tmp_path / "out")
    assert_same_bits(tensors_of(second), tensors_of(folder))


def test_the_tensors_of_a_folder_come_back_bit_for_bit(tmp_path):
    for name in NAMES:
        config, found = opened(RECORDED / name)
        _, _, params = placed(config, found)
        folder = export(saved_run(tmp_path / name, config, params), tmp_path / f"{name} out")
        assert_same_bits(tensors_of(folder), tensors_of(RECORDED / name))


def test_adapters_are_merged_and_8_bits_and_masters_read(tmp_path):
    lora = LoraConfig(rank=2, alpha=4.0)
    config = Config(model=FAMILIES["llama"], lora=lora)
    _, params = fresh(config)
    (folder, again), flat = (tmp_path / "a", tmp_path / "b"), linear.by_path(params)
    tensors = tensors_of(export(saved_run(tmp_path / "lora", config, params), folder))
    layer = {name: flat[f"blocks/mlp/down/{name}"][1] for name in linear.MATRICES}
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.down_proj.weight"], linear.merged(layer, lora).T)

    half = Config(model=FAMILIES["gpt2"], precision=PrecisionConfig(params="bfloat16", masters=True))
    _, wide = fresh(half)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    run = saved_run(tmp_path / "masters", half, narrow, state={"extra": {"master": wide}})
    plain, all_digits = tensors_of(export(run, again)), tensors_of(export(run, tmp_path / "c", "--dtype", "float32"))
    np.testing.assert_array_equal(plain["transformer.wte.weight"], narrow["embedding"]["embedding"])
    np.testing.assert_array_equal(all_digits["transformer.wte.weight"], wide["embedding"]["embedding"])
    assert json.loads((again / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert opened(again)[0].model.dtype == "bfloat16"


def test_a_base_in_8_bits(tmp_path):
    _, found = opened(RECORDED / "llama")
    lora = LoraConfig(rank=2, base="int8")
    config = Config(model=found.model, lora=lora, sharding=STRATEGIES["zero3"])
    *_, template = parts.make_parts(config, jaxshard.make_mesh())
    leaves = found.params(linear.by_path(template))
    plain = placed(Config(model=found.model), found)[2]["blocks"]["mlp"]["up"]["kernel"]
    codes, scale = linear.quantized(plain)
    assert_same_bits([leaves["blocks/mlp/up/kernel"]], [codes])
    np.testing.assert_allclose(leaves["blocks/mlp/up/kernel_scale"], scale, rtol=0.01)


def copy_of(name, folder):
    shutil.copytree(RECORDED / name, folder)
    return folder


def changed(folder, **fields):
    path = folder / "config.json"
    given = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in given.items() if value != "REMOVED"}))
    return folder


def rewritten(folder, change):
    tensors = safetensors_numpy.load_file(folder / "model.safetensors")
    safetensors_numpy.save_file(change(tensors), folder / "model.safetensors")
    return folder


def without(tensors, name):
    return {each: x for each, x in tensors.items() if each != name}


C_FC = "transformer.h.1.mlp.c_fc.weight"
WRONG = {
    "missing": ("gpt2", lambda f: rewritten(f, lambda t: without(t, C_FC)), f"{C_FC} is missing"),
    "extra": ("gpt2", lambda f: rewritten(f, lambda t: t | {"score.weight": t[C_FC]}), "score.weight is not in the"),
    "shape": ("gpt2", lambda f: rewritten(f, lambda t: t | {C_FC: t[C_FC].T.copy()}), f"{C_FC} has the shape (48, 12)"),
    "whole numbers": (
        "gpt2",
        lambda f: rewritten(f, lambda t: t | {C_FC: t[C_FC].astype(np.int8)}),
        f"{C_FC} (I8): jaxshard reads F16",
    ),
    "twice": (
        "llama",
        lambda f: rewritten(f, lambda t: t | {"norm.weight": t["model.norm.weight"]}),
        "occurs twice, with the prefix model. and without",
    ),
    "another head": (
        "gpt2",
        lambda f: rewritten(f, lambda t: t | {"lm_head.weight": t["transformer.wte.weight"] + 1}),
        "lm_head.weight differs from transformer.wte.weight",
    ),
    "architecture": ("gpt2", lambda f: changed(f, model_type="mistral"), "model_type = 'mistral', and jaxshard"),
    "head": ("gpt2", lambda f: changed(f, architectures=["GPT2ForSequenceClassification"]), "architectures has 'GPT2"),
    "gelu": ("gpt2", lambda f: changed(f, activation_function="gelu"), 'activation_function = "gelu", and jaxshard'),
    "by layer": ("gpt2", lambda f: changed(f, scale_attn_by_inverse_layer_idx=True), "inverse_layer_idx = true"),
    "rope": (
        "llama",
        lambda f: changed(f, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
        'the type of rope_scaling = "yarn"',
    ),
    "old rope": (
        "llama",
        lambda f: changed(f, rope_parameters="REMOVED", rope_scaling={"type": "linear", "factor": 2.0}),
        'the type of rope_scaling = "linear"',
    ),
    "turns": (
        "llama",
        lambda f: changed(f, rope_parameters={**json.loads((f / "config.json").read_text())["rope_parameters"],
                                              "high_freq_factor": 8.0}),
        "high_freq_factor = 8.0, and jaxshard supports only 4.0",
    ),
    "one bias": ("llama", lambda f: changed(f, attention_bias=True), "mlp_bias = false, and jaxshard supports only"),
    "wide heads": ("llama", lambda f: changed(f, head_dim=8), "head_dim = 8, and jaxshard supports only null or 4"),
    "quantized": ("llama", lambda f: changed(f, quantization_config={"bits": 4}), "quantization_config = "),
    "no end": ("llama", lambda f: changed(f, num_hidden_layers=2**31 - 1), "2147483647 layers, and the folder has"),
    "text": ("llama", lambda f: changed(f, num_hidden_layers="2"), "num_hidden_layers = '2' is not an integer"),
    "heads": ("llama", lambda f: changed(f, num_attention_heads=3), "width = 16 is not a multiple of model.heads"),
    "no json": ("llama", lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "no config": ("llama", lambda f: (f / "config.json").unlink(), "config.json, which describes the model, is"),
    "cut short": (
        "llama",
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-8]),
        "model.safetensors cannot be read",
    ),
    "pickle": (
        "gpt2",
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "pytorch_model.bin is a pickle, which can run code",
    ),
    "no weights": ("gpt2", lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_exactly_a_model_of_ours_is_told(name, tmp_path):
    recorded, change, words = WRONG[name]
    folder = copy_of(recorded, tmp_path / "a folder")
    change(folder)
    with pytest.raises(ValueError, match=re.escape(words)):
        opened(folder)


def sharded(tmp_path):
    config = Config(model=FAMILIES["llama"])
    return export(saved_run(tmp_path / "run", config, fresh(config)[1]), tmp_path / "out", "--shard-size", "4kB")


def test_an_index_that_is_not_right(tmp_path):
    folder = sharded(tmp_path)
    index = folder / "model.safetensors.index.json"
    right = json.loads(index.read_text())
    assert opened(index)[1].places == opened(folder)[1].places
    other = {**right["weight_map"], "model.norm.weight": "../model.safetensors"}
    for places, words in (
        ({}, "has no weight_map"),
        (other, "does not name a file of this folder"),
        ({"a": "gone"}, "is missing"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(ValueError, match=words):
            opened(folder)
    moved = {**right["weight_map"], "model.norm.weight": right["weight_map"]["model.embed_tokens.weight"]}
    index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ValueError, match=r"has different tensors than its index: model\.norm\.weight"):
        opened(folder)


def test_names_without_prefix_with_buffers_and_with_the_head_once_more(tmp_path):
    def old(tensors):
        found = {name.removeprefix("transformer."): x for name, x in tensors.items()}
        found |= {"h.0.attn.bias": np.ones((1, 1, 16, 16), np.uint8), "h.1.attn.masked_bias": np.float32([-1e4])}
        return found | {"lm_head.weight": tensors["transformer.wte.weight"]}

    config, found = opened(rewritten(copy_of("gpt2", tmp_path / "gpt2"), old))
    want = placed(*opened(RECORDED / "gpt2"))[2]
    assert_same_bits(placed(config, found)[2], want)


def test_a_cache_of_the_hub_is_links_to_blobs(tmp_path):
    cache = tmp_path / "models--me--tiny"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, name in enumerate(("config.json", "model.safetensors")):
        shutil.copy(RECORDED / "llama" / name, cache / "blobs" / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    assert_same_bits(placed(*opened(snapshot))[2], placed(*opened(RECORDED / "llama"))[2])
    with pytest.raises(ValueError, match=r"is a Hugging Face cache: give one of its snapshots: .*0123"):
        opened(cache)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_folders_and_fields_by_either_name(dtype, tmp_path):
    folder = copy_of("llama", tmp_path / "llama")
    rewritten(folder, lambda t: {name: x.astype(jnp.dtype(dtype)) for name, x in t.items()})
    rope = {"rope_parameters": "REMOVED", "rope_theta": 100.0, "dtype": "REMOVED", "torch_dtype": dtype}
    given = json.loads((folder / "config.json").read_text())["rope_parameters"]
    changed(folder, **rope, rope_scaling={name: given[name] for name in given if name != "rope_theta"})
    config, found = opened(folder)
    assert config.model.dtype == ("bfloat16" if dtype == "bfloat16" else "float32")
    assert found.model == opened(RECORDED / "llama")[1].model
    got = placed(Config(model=found.model), found)[2]["embedding"]["embedding"]
    want = safetensors_numpy.load_file(RECORDED / "llama" / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(got, want.astype(jnp.dtype(dtype)).astype(np.float32))


def test_numbers_that_do_not_fit_are_told_with_their_leaf(tmp_path):
    folder = rewritten(copy_of("gpt2", tmp_path / "f"), lambda t: t | {C_FC: t[C_FC] + 1e6})
    config, found = opened(folder)
    half = PrecisionConfig(params="float16", masters=True)
    with pytest.raises(FloatingPointError, match="blocks/mlp/up/kernel has numbers that are not finite in float16"):
        placed(dataclasses.replace(config, precision=half), found)


SAYS_NO = {
    "norm": ({"norm": "layer"}, "model.norm = layer: llama has norm rms"),
    "mlp": ({"mlp": "gelu"}, "model.mlp = gelu: llama has mlp swiglu"),
    "no bias": ({"positions": "learned", "mlp": "gelu", "norm": "layer"}, "model.bias = False: gpt2 has bias True"),
    "groups": (
        {"positions": "learned", "mlp": "gelu", "norm": "layer", "bias": True, "kv_heads": 3},
        "model.kv_heads = 3: gpt2 has kv_heads 6",
    ),
}


@pytest.mark.parametrize("name", SAYS_NO)
def test_a_model_that_hugging_face_cannot_say(name, tmp_path, capfd):
    options, words = SAYS_NO[name]
    model = dataclasses.replace(LLAMA, kv_heads=0, **options) if "kv_heads" not in options else None
    config = Config(model=model or dataclasses.replace(LLAMA, **options))
    run = saved_run(tmp_path / "run", config, LanguageModel(config.model).init(jax.random.key(0)))
    export(run, tmp_path / "out", status=2)
    assert words in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_is_told(tmp_path, capfd):
    with jaxshard.checkpoint.Checkpointer(tmp_path / "saves") as saves:
        saves.save(1, {"w": np.zeros(3)})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    config = Config(model=FAMILIES["gpt2"])
    saved_run(tmp_path / "run", config, fresh(config, 1e6)[1])
    for words, source, options in (
        ("writes the model of a run of jaxshard train", "saves", ["--huggingface", tmp_path / "out"]),
        ("already exists: give a new folder", "run", ["--huggingface", tmp_path / "full"]),
        ("create it first", "run", ["--huggingface", tmp_path / "no" / "out"]),
        ("give --safetensors FILE or --huggingface DIR", "run", []),
        ("writes the full model", "run", ["--huggingface", tmp_path / "out", "--only", "w"]),
        ("is for --huggingface", "run", ["--safetensors", tmp_path / "x.safetensors", "--dtype", "float16"]),
        ("values that are not finite in float16", "run", ["--huggingface", tmp_path / "out", "--dtype", "float16"]),
    ):
        assert main(["ckpt", "export", str(tmp_path / source), *map(str, options)]) == 2
        assert words in " ".join(capfd.readouterr().err.split())
    assert not [*tmp_path.glob("*out*"), *tmp_path.glob("*.safetensors")]


def test_special_tokens_and_the_tokenizer_of_the_start_stay_with_the_run(tmp_path):
    before = {"bos_token_id": 3, "eos_token_id": [5, 7], "max_position_embeddings": 99, "torch_dtype": "float16"}
    config = Config(model=FAMILIES["llama"])
    run = saved_run(tmp_path / "run", config, fresh(config)[1])
    (run / "huggingface").mkdir()
    (run / "huggingface" / "config.json").write_text(json.dumps(before))
    (run / "huggingface" / "tokenizer.json").write_text("{}")
    folder = export(run, tmp_path / "out")
    found = json.loads((folder / "config.json").read_text())
    assert found | {**before, "pad_token_id": None, "torch_dtype": "float32"} == found
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert json.loads((RECORDED / "llama" / "config.json").read_text())["bos_token_id"] == 1
    assert hf_config.described(config.model, "float32", {})["bos_token_id"] is None


def test_a_runs_own_tokenizer_goes_along_with_its_end_of_text(tmp_path):
    """`transformers` would write on for ever."""
    config = Config(model=FAMILIES["llama"])
    run = saved_run(tmp_path / "run", config, fresh(config)[1])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(["some text"], trainers.BpeTrainer(vocab_size=30, special_tokens=["<|endoftext|>"]))
    tokenizer.save(str(run / "tokenizer.json"))
    folder = export(run, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 0
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    assert (folder / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()


OPTIONS = ["--train.steps", "2", "--train.rows", "8", "--data.heldout-bytes", "200"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "train.bin"
    np.random.default_rng(0).integers(0, 260, 4000).astype("<u2").tofile(path)
    return path


def test_a_run_takes_its_model_from_the_folder_and_leaves_as_another(tokens, tmp_path, capfd):
    start = copy_of("gpt2", tmp_path / "gpt 2 [tiny]")
    options = ["--train.start", str(start), "--data", str(tokens), "--lora.rank", "2", "--out", str(tmp_path / "run")]
    assert main(["train", *options, *OPTIONS, "--optimizer.warmup-steps", "0"]) == 0
    assert "the model's options come from" in (out := " ".join(capfd.readouterr().out.split()))
    assert "model.positions = learned, model.norm = layer" in out
    shutil.rmtree(start)
    assert main(["train", "--resume", "--out", str(tmp_path / "run"), "--train.steps", "3"]) == 0
    folder = export(tmp_path / "run", tmp_path / "out")
    capfd.readouterr()
    config, _ = opened(RECORDED / "gpt2")
    assert opened(folder)[0] == config
    before, after = tensors_of(RECORDED / "gpt2"), tensors_of(folder)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if re.search(r"h\.\d\.(attn|mlp)\.c_.*weight", name)}
    shown = []
    for source in (tmp_path / "run", folder):
        assert main(["eval", str(source), "--data", str(tokens)]) == 0
        assert main(["generate", str(source), "--prompt", "7 200", "--tokens", "4", "--temperature", "0"]) == 0
        shown.append(capfd.readouterr().out)
    assert shown[0] == shown[1]
    assert len(shown[0].splitlines()[-1].split()) == 6


REFUSED = {
    "a number": (["--model.layers", "3"], "has a different model: model.layers = 3, there 2"),
    "a flag": (["--model.no-tied"], "model.tied = False, there True"),
    "length": (["--model.sequence-length", "8"], "model.sequence_length = 8, there 16"),
    "tensor": (
        ["--sharding.strategy", "tensor_parallel", "--sharding.tensor", "8"],
        "model.heads = 2 is not a multiple",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_is_another_in_the_folder_is_told(name, tokens, tmp_path, capfd):
    options, words = REFUSED[name]
    start = ["--train.start", str(RECORDED / "gpt2"), "--data", str(tokens), "--out", str(tmp_path / "run")]
    assert main(["train", *start, *OPTIONS, *options]) == 2
    assert words in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_plan_of_a_folder_has_its_bytes(name, tmp_path, capfd):
    options = ["--train.start", str(RECORDED / name), "--machine", "cpu:8", "--json", str(tmp_path / "plan.json")]
    assert main(["plan", *options, "--strategies", "ddp"]) == 0
    assert "the model's options come from" in capfd.readouterr().err
    (row,) = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert row["at_rest"]["params"] == sum(x.nbytes for x in tensors_of(RECORDED / name).values())


def test_a_folder_holds_no_text_back(capfd):
    assert main(["eval", str(RECORDED / "llama")]) == 2
    assert "give a text by --data" in capfd.readouterr().err


def test_a_folder_writes_by_its_own_tokenizer(tmp_path, capfd):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["some text"], trainers.BpeTrainer(vocab_size=260, initial_alphabet=alphabet))
    folder = copy_of("gpt2", tmp_path / "a folder")
    tokenizer.save(str(folder / "tokenizer.json"))
    assert main(["generate", str(folder), "--prompt", "some", "--tokens", "2"]) == 0
    assert "some" in capfd.readouterr().out
    assert main(["generate", str(RECORDED / "gpt2"), "--prompt", "some", "--tokens", "2"]) == 2
