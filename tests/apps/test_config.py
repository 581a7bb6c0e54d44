"""Options: defaults, TOML over them, the command line over both; a mistake is named with its key and its cure."""

import ast
import dataclasses
import math
import os
import subprocess
import sys
import threading
import typing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshard.apps.commands.train import parse
from jaxshard.apps.config import config as configs
from jaxshard.apps.config import toml
from jaxshard.apps.config.checks import check
from jaxshard.apps.config.config import Config, DataConfig, ModelConfig, OptimizerConfig, ShardingConfig, TrainConfig
from jaxshard.apps.trainer import build
from jaxshard.cli import main

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def written(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
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
    "text", ["\U0001f600", "\U0010ffff", "\ufeffé", "a\\b", '"', "'" * 3, '"' * 3, "\n", "\r\n\t\0\x7f"]
)
def test_dump_of_any_text_is_read_back(tmp_path, text):
    """An emoji was written as two halves of UTF-16, which TOML refuses."""
    config = Config(data=DataConfig(path=f"texts/{text}/here"))
    assert toml.load(written(tmp_path, toml.dump(config))) == config


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 1e300, 5e-324, -0.0])
def test_dump_of_any_number_is_read_back(tmp_path, number):
    """`inf` was written as `Infinity`, which TOML refuses."""
    config = Config(optimizer=OptimizerConfig(clip_norm=number))
    assert repr(toml.load(written(tmp_path, toml.dump(config)))) == repr(config)


def an_option(kind):
    """Any value of an option's type."""
    if typing.get_origin(kind) is typing.Annotated:
        return an_option(typing.get_args(kind)[0])
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return st.lists(an_option(typing.get_args(kind)[0]), max_size=3).map(tuple)
    if typing.get_args(kind):
        return st.one_of(*map(an_option, typing.get_args(kind)))
    kinds = {bool: st.booleans(), float: st.floats(), type(None): st.none()}
    kinds |= {int: st.integers(-(2**63), 2**63 - 1), str: st.text(st.characters(codec="utf-8"))}
    return kinds[kind]


def a_section(kind):
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: an_option(hint) for name, hint in hints.items()})


CONFIG_OF_ANYTHING = st.builds(
    Config, **{name: a_section(kind) for name, kind in typing.get_type_hints(Config).items()}
)


@settings(max_examples=100, deadline=None)
@given(CONFIG_OF_ANYTHING)
def test_dump_of_any_configuration_is_read_back(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(toml.dump(config), encoding="utf-8")
    assert repr(toml.load(path)) == repr(config)  # a nan equals nothing, but it is written as any other


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
        ("[train]\nlog_to = ['wandb', 'mlflow']", "'train.log_to' is one of 'tensorboard', .*, not 'mlflow'"),
        ("[train]\nlog_to = 'wandb'", "'train.log_to' is a list, not the str 'wandb'"),
        ("[train]\nlog_to = [['wandb']]", r"'train.log_to' is one of 'tensorboard', .*, not \['wandb'\]"),
        ("[sharding", "is not valid TOML: Expected"),
        ("train = 'steps'", r"'train' is a section: write \[train\]"),
        ("[[train]]\nsteps = 3", r"'train' is a section: write \[train\]"),
        ("[train.stepz]\na = 3", "unknown section 'train.stepz'; the nearest known one is 'train'"),
        ("[train]\nsteps = inf", "'train.steps' is an int, not the float inf"),
        ("[optimizer]\nbeta1 = false", "'optimizer.beta1' is a float, not the bool False"),
        ("[sharding]\nstrategy = ['zero2']", r"'sharding.strategy' is one of 'ddp', .*, not \['zero2'\]"),
        ("[sharding]\ndevices = '8'", "'sharding.devices' is an int, not the str '8'"),
        (
            f"[optimizer]\nbeta1 = {10**400}",
            "'optimizer.beta1' is a float option, and this integer is too large for a float",
        ),
        (f"[train]\nsteps = {'9' * 5000}", "is not valid TOML: "),
    ],
)
def test_mistake_in_the_file_is_named(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=message) as raised:
        toml.load(path)
    assert str(path) in str(raised.value)


def test_every_mistake_in_the_file_is_named(tmp_path):
    path = written(tmp_path, "[model]\nwidht = 3\nlayers = 'two'\n[trian]\n[data]\nheldout = true\n")
    with pytest.raises(ValueError, match="unknown section 'trian'") as raised:
        toml.load(path)
    lines = str(raised.value).splitlines()
    assert len(lines) == 4
    assert all(line.startswith(f"{path}: ") for line in lines)
    for key in ("'model.widht'", "'model.layers'", "'trian'", "'data.heldout'"):
        assert sum(key in line for line in lines) == 1


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the configuration .*none\.toml"):
        toml.load(tmp_path / "none.toml")


def test_of_a_folder_the_configuration_in_it_is_named(tmp_path):
    with pytest.raises(ValueError, match="it is a folder: give a TOML file"):
        toml.load(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(ValueError, match=r"it is a folder: give '.*config\.toml', which is in it"):
        toml.load(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.heads", "5"], "model.width = 192 is not a multiple of model.heads = 5"),
        (
            ["--model.kv-heads", "4"],
            "model.heads = 6 is not a multiple of model.kv_heads = 4, .* or set model.kv_heads = 0",
        ),
        (["--model.kv-heads", "-1"], "model.kv_heads = -1: it must be 0 or more"),
        (["--model.heads", "64"], "is odd, and rotary positions need pairs"),
        (["--model.vocabulary", "255"], "model.vocabulary = 255: it must be at least 256"),
        (["--model.dropout", "1"], "model.dropout = 1.0: it must be at least 0 and below 1"),
        (["--train.steps", "0"], "train.steps = 0: it must be above 0"),
        (["--train.patience", "-1"], "train.patience = -1: it must be 0 or more"),
        (["--data.heldout", "1"], "data.heldout = 1.0: it must be between 0 and 1"),
        (["--data.heldout-bytes", "1"], "data.heldout_bytes = 1: it must be at least 2"),
        (["--optimizer.learning-rate", "nan"], "optimizer.learning_rate = nan: it must be above 0"),
        (["--optimizer.learning-rate", "inf"], "optimizer.learning_rate = inf: it must be a finite number"),
        (["--optimizer.learning-rate", "1e39"], "learning_rate = 1e.39 is inf in float32: it must be a finite number"),
        (["--optimizer.clip-norm", "1e-60"], "optimizer.clip_norm = 1e-60 is 0.0 in float32: it must be above 0"),
        (["--optimizer.beta2", "0.99999999"], "optimizer.beta2 = 0.99999999 is 1.0 in float32: .* below 1"),
        (["--optimizer.weight-decay", "1e400"], "optimizer.weight_decay = inf: it must be a finite number"),
        (["--train.seed", str(2**63)], "train.seed = 9223372036854775808: it must be at most 9223372036854775807"),
        (["--train.seed", str(10**400)], r"train.seed = \(a number of 401 digits\): it must be at most"),
        (["--train.steps", str(2**31)], "train.steps = 2147483648: it must be at most 2147483647"),
        (["--train.hang-seconds", "1e-300"], "train.hang_seconds = 1e-300: it must be 0, or at least 1"),
        (["--optimizer.final-fraction", "2"], "optimizer.final_fraction = 2.0: it must be between 0 and 1"),
        (["--optimizer.warmup-steps", "9", "--train.steps", "9"], "is too long for train.steps = 9"),
        (["--sharding.devices", "0"], "sharding.devices = 0: it must be above 0"),
        (["--sharding.data", "-2"], "sharding.data = -2: it must be above 0, or -1"),
        (["--sharding.strategy", "hsdp"], "sharding.replica = 1: it must be at least 2 for the strategy hsdp"),
        (["--train.max-skips", "-1"], "train.max_skips = -1: it must be 0 or more"),
        (["--precision.masters"], "precision.masters: the parameters are already float32: leave it out"),
        (["--precision.stochastic-rounding"], "precision.params = float32: leave it out, or set precision.params = bf"),
        (
            ["--precision.params", "bfloat16", "--precision.stochastic-rounding", "--precision.masters"],
            "precision.stochastic_rounding replaces precision.masters: leave one of them out",
        ),
        (["--precision.params", "float16"], "AdamW's small values underflow to 0: add precision.masters = true"),
        (
            ["--precision.params", "bfloat16", "--precision.masters", "--precision.loss-scale"],
            "precision.loss_scale: bfloat16 has enough range for gradients: leave it out",
        ),
        (
            ["--precision.params", "bfloat16", "--precision.moments", "bfloat16"],
            "precision.moments = bfloat16: without masters.*add precision.masters",
        ),
        (["--resume"], "--resume needs --out DIR"),
        (["--resume", "--out", "nowhere"], "--resume: no saved run in --out nowhere"),
    ],
)
def test_impossible_value_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(arguments)


def test_a_short_run_warms_up_for_less_unless_the_user_said_how_long(tmp_path):
    """`--train.steps 30` was refused, for the default of 50 steps of warm-up."""
    given = parse(["--train.steps", "30"])
    assert given.optimizer.warmup_steps == 3
    assert given.notes == ("optimizer.warmup_steps = 3, since the default, 50, is too long for train.steps = 30",)
    assert (parse(["--train.steps", "51"]).optimizer.warmup_steps, parse(["--train.steps", "51"]).notes) == (50, ())
    assert parse(["--train.steps", "1"]).optimizer.warmup_steps == 0
    assert parse([str(written(tmp_path, "[train]\nsteps = 30\n"))]).optimizer.warmup_steps == 3
    for said in (["--optimizer.warmup-steps", "50"], [str(written(tmp_path, "[optimizer]\nwarmup_steps = 50\n"))]):
        with pytest.raises(ValueError, match=r"warmup_steps = 50 is too long for train.steps = 30"):
            parse(["--train.steps", "30", *said])


def test_a_configuration_from_a_pipe_is_read(tmp_path):
    """As in `jaxshard train <(make_options)`: a pipe can be read once."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread = threading.Thread(target=lambda: pipe.write_text("[train]\nsteps = 30\n"))
    thread.start()
    assert parse([str(pipe)]).train.steps == 30
    thread.join()


def test_a_configuration_without_an_end_is_refused():
    with pytest.raises(ValueError, match=r"cannot read the configuration '/dev/zero': .*it is a device, not a file"):
        parse(["/dev/zero"])


def test_a_mark_of_byte_order_is_no_part_of_the_configuration(tmp_path):
    path = tmp_path / "of_notepad.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 30\r\n")
    assert parse([str(path)]).train.steps == 30


def test_checked_is_what_results_not_what_the_file_says_alone(tmp_path):
    path = written(tmp_path, "[model]\nheads = 5\n")
    assert parse([str(path), "--model.width", "190"]).model.heads == 5


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_is_valid_and_tells_its_command_and_result(path):
    check(toml.load(path))
    comment = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert f"jaxshard train configs/{path.name}" in comment
    assert "Expect" in comment


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_is_written_and_read_back_the_same(tmp_path, path):
    config = toml.load(path)
    assert toml.load(written(tmp_path, toml.dump(config))) == config


def test_shipped_configs_are_all_there_and_default_says_the_defaults():
    strategies = {"ddp", "zero1", "zero2", "zero3", "hsdp", "tensor", "pipeline", "hybrid_2x2x2"}
    others = {
        "default",
        "beat_zlib",
        "gpt2_124m",
        "llama3_8b",
        "llama3_70b",
        "qlora",
        "llama3_70b_qlora",
        "shakespeare",
    }
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
    assert (
        num_options == len(toml.known_keys()) + 6
    )  # and CONFIG, --out, --resume, --resume-if-saved, --profile, --processes


def test_main_helps_and_refuses(capsys):
    assert main([]) == main(["--help"]) == 0
    assert "jaxshard train --resume --out" in capsys.readouterr().out
    assert main(["trian"]) == 2
    assert "no command 'trian'; did you mean 'train'?" in capsys.readouterr().err
    assert main(["ckpt", "lss"]) == 2
    assert "jaxshard ckpt: no command 'lss'; did you mean 'ls'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "plan", "ckpt"])
def test_a_reader_that_left_is_no_error(command):
    """As in `jaxshard train --help | head -1`."""
    asked = [sys.executable, "-m", "jaxshard", command, "--help"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        program.stdout.close()
        assert program.stderr.read() == ""
        assert program.wait() == 141


@pytest.mark.parametrize(("data", "nats"), [("stdlib", 0.01 * math.log(2)), ("tokens.bin", 0.01)])
def test_min_improvement_has_the_unit_of_the_losses_shown(tmp_path, monkeypatch, data, nats):
    """It was in bits per byte for tokens, too, whose losses are shown in nats per token."""
    monkeypatch.chdir(tmp_path)
    np.arange(4000, dtype=np.uint16).tofile("tokens.bin")
    model = ModelConfig(1, 16, 1, hidden=16, sequence_length=16, vocabulary=4096)
    config = Config(DataConfig(data), model, train=TrainConfig(min_improvement=0.01), sharding=ShardingConfig("ddp"))
    assert build.prepare(config, [data]).template.stopping.min_improvement == pytest.approx(nats)
