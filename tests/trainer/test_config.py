"""Options: defaults, TOML over them, the command line over both; a mistake is named with its key and its cure."""

import ast
import dataclasses
from pathlib import Path

import pytest

from jaxshard.cli import main
from jaxshard.cli.train import parse
from jaxshard.trainer import config as configs
from jaxshard.trainer import toml
from jaxshard.trainer.config import Config, ModelConfig, TrainConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def written(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_command_line_over_file_over_defaults(tmp_path):
    path = written(tmp_path, "[train]\nsteps = 300\nrows = 24\n[optimizer]\nlearning_rate = 1\n")
    given = parse(["--train.rows", "32", str(path), "--data", "text/"])
    assert (given.train.steps, given.train.rows, given.train.eval_every) == (300, 32, TrainConfig().eval_every)
    assert given.optimizer.learning_rate == 1.0
    assert isinstance(given.optimizer.learning_rate, float)
    assert given.data.path == "text/"
    assert parse([str(path), "--data.path", "text/"]).data.path == "text/"


def test_dump_is_read_back_as_it_was(tmp_path):
    given = Config(model=ModelConfig(dtype="bfloat16", tied=True), train=TrainConfig(seed=7))
    assert toml.load(written(tmp_path, toml.dump(given))) == given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nwidht = 3", "unknown key 'model.widht'; the nearest known one is 'model.width'"),
        ("[train]\nwidth = 3", "unknown key 'train.width'; the nearest known one is 'model.width'"),
        ("steps = 3", "unknown key 'steps'; the nearest known one is 'train.steps'"),
        ("[trian]\nsteps = 3", "unknown section 'trian'; the nearest known one is 'train'"),
        ("train = 3", r"'train' is a section: write \[train\]"),
        ("[train]\nsteps = 3.5", "'train.steps' is an int, not the float 3.5"),
        ("[train]\nsteps = true", "'train.steps' is an int, not the bool True"),
        ("[train]\nsteps = '3'", "'train.steps' is an int, not the str '3'"),
        ("[optimizer]\nbeta1 = '0.9'", "'optimizer.beta1' is a float, not the str '0.9'"),
        ("[model]\ntied = 1", "'model.tied' is a bool, not the int 1"),
        ("[data]\npath = 1", "'data.path' is a str, not the int 1"),
        ("[sharding]\nstrategy = 'zero4'", "'sharding.strategy' is one of 'ddp', .*, not 'zero4'"),
        ("[sharding", "is no TOML: Expected"),
    ],
)
def test_mistake_in_the_file_is_named(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=message) as raised:
        toml.load(path)
    assert str(path) in str(raised.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the configuration .*none\.toml"):
        toml.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.heads", "5"], "model.width = 192 is no multiple of model.heads = 5"),
        (
            ["--model.kv-heads", "4"],
            "model.heads = 6 is no multiple of model.kv_heads = 4, .* or set model.kv_heads = 0",
        ),
        (["--model.kv-heads", "-1"], "model.kv_heads = -1: it must be 0 or more"),
        (["--model.heads", "64"], "is odd, and rotary positions turn pairs"),
        (["--model.vocabulary", "255"], "model.vocabulary = 255: it must be at least 256"),
        (["--model.dropout", "1"], "model.dropout = 1.0: it must be at least 0 and below 1"),
        (["--train.steps", "0"], "train.steps = 0: it must be above 0"),
        (["--train.patience", "-1"], "train.patience = -1: it must be 0 or more"),
        (["--data.heldout", "1"], "data.heldout = 1.0: it must be between 0 and 1"),
        (["--data.heldout-bytes", "1"], "data.heldout_bytes = 1: it must be at least 2"),
        (["--optimizer.learning-rate", "nan"], "optimizer.learning_rate = nan: it must be above 0"),
        (["--optimizer.final-fraction", "2"], "optimizer.final_fraction = 2.0: it must be between 0 and 1"),
        (["--optimizer.warmup-steps", "9", "--train.steps", "9"], "leaves no step of the train.steps = 9"),
        (["--sharding.devices", "0"], "sharding.devices = 0: it must be above 0"),
        (["--sharding.data", "-2"], "sharding.data = -2: it must be above 0, or -1"),
        (["--sharding.strategy", "hsdp"], "sharding.replica = 1: it must be at least 2 for the strategy hsdp"),
        (["--train.max-skips", "-1"], "train.max_skips = -1: it must be 0 or more"),
        (["--precision.masters"], "precision.masters: the parameters are float32 themselves: leave it out"),
        (["--precision.stochastic-rounding"], "precision.params = float32: leave it out, or set precision.params = bf"),
        (
            ["--precision.params", "bfloat16", "--precision.stochastic-rounding", "--precision.masters"],
            "precision.stochastic_rounding does without precision.masters: leave one of them out",
        ),
        (["--precision.params", "float16"], "AdamW's small numbers vanish in it: add precision.masters = true"),
        (
            ["--precision.params", "bfloat16", "--precision.masters", "--precision.loss-scale"],
            "precision.loss_scale: bfloat16 has the range that gradients need: leave it out",
        ),
        (
            ["--precision.params", "bfloat16", "--precision.moments", "bfloat16"],
            "precision.moments = bfloat16: nothing here is kept wider.*add precision.masters",
        ),
        (["--resume"], "--resume needs --out DIR"),
        (["--resume", "--out", "nowhere"], "--resume: no saved run in --out nowhere"),
    ],
)
def test_impossible_value_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(arguments)


def test_checked_is_what_results_not_what_the_file_says_alone(tmp_path):
    path = written(tmp_path, "[model]\nheads = 5\n")
    assert parse([str(path), "--model.width", "190"]).model.heads == 5


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_is_valid_and_tells_its_command_and_result(path):
    configs.check(toml.load(path))
    comment = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert f"jaxshard train configs/{path.name}" in comment
    assert "Expect" in comment


def test_shipped_configs_are_all_there_and_default_says_the_defaults():
    strategies = {"ddp", "zero1", "zero2", "zero3", "hsdp", "tensor", "pipeline", "hybrid_2x2x2"}
    others = {"default", "beat_zlib", "gpt2_124m", "llama3_8b", "llama3_70b"}
    assert {path.stem for path in CONFIGS} == strategies | others
    assert toml.load(next(path for path in CONFIGS if path.stem == "default")) == Config()


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as raised:
        parse(["--help"])
    assert raised.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.type if isinstance(section.type, type) else type(section.default)):
            assert f"--{section.name}.{field.name.replace('_', '-')}" in text
    assert "Sequences per step, over all devices and microbatches." in text


def test_every_option_has_a_sentence():
    sections = [node for node in ast.parse(Path(configs.__file__).read_text()).body if isinstance(node, ast.ClassDef)]
    num_options = 0
    for section in sections:
        for option, sentence in zip(section.body, section.body[1:], strict=False):
            if isinstance(option, ast.AnnAssign) and section.name != "Config":
                assert isinstance(sentence, ast.Expr), ast.unparse(option)
                assert ast.literal_eval(sentence.value).endswith(".")
                num_options += 1
    assert num_options == len(toml.known_keys()) + 5  # and CONFIG, --out, --resume, --resume-if-saved, --processes


def test_main_helps_and_refuses(capsys):
    assert main([]) == main(["--help"]) == 0
    assert "jaxshard train --resume --out" in capsys.readouterr().out
    assert main(["trian"]) == 2
    assert "no command 'trian'; there is train" in capsys.readouterr().err
