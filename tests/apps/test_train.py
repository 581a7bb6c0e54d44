"""`jaxshard train`, end to end and in this process: a tiny model on eight simulated devices."""

import dataclasses
import json
import math
import os
import re
import shlex
import signal
import struct

import chex
import jax
import numpy as np
import pytest
import tensorboardX.proto.event_pb2 as events
from rich.console import Console

import jaxshard
from jaxshard.apps.commands import train
from jaxshard.apps.commands.train_options import parse
from jaxshard.apps.config import toml
from jaxshard.apps.config.config import Config
from jaxshard.apps.records.record import tag_of
from jaxshard.apps.runs import snapshot as snapshots
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.apps.runs.snapshot import EarlyStopping, Position
from jaxshard.apps.trainer.build import Run, num_updates, prepare
from jaxshard.checkpoint import Checkpointer
from jaxshard.cli import main

TINY = """
[model]
layers = 2
width = 32
heads = 2
hidden = 48
sequence_length = 16
[optimizer]
warmup_steps = 2
[sharding]
min_shard_size = 64
[train]
steps = 6
log_every = 2
eval_every = 3
[data]
heldout_bytes = 700
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


def saved_snapshot(folder, *, devices=8):
    """The newest saved model, read by a fresh run of the folder's own configuration."""
    config = toml.load(RunFolder(folder).config)
    config = dataclasses.replace(config, sharding=dataclasses.replace(config.sharding, devices=devices))
    with snapshots.open_saves(RunFolder(folder), config.train) as saves:
        return snapshots.restore(saves, prepare(config).template)


def saved(folder, *, devices=8):
    """The same, each leaf as NumPy."""
    return jax.tree.map(np.asarray, dataclasses.asdict(saved_snapshot(folder, devices=devices)))


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def interrupt_after(monkeypatch, step):
    """Ctrl-C arrives while the batch after `step` steps is made."""
    make = Run.batch

    def batch(run, index):
        if index == step - 1:
            signal.raise_signal(signal.SIGINT)
        return make(run, index)

    monkeypatch.setattr(Run, "batch", batch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of the tiny model, and what it printed."""
    import contextlib
    import io

    assert len(jax.devices()) == 8
    root = tmp_path_factory.mktemp("trained")
    (root / "tiny.toml").write_text(TINY)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["train", str(root / "tiny.toml"), "--out", str(root / "run"), "--train.seed", "3"]) == 0
    return root / "run", printed.getvalue()


def test_run_shows_memory_wire_and_marks(trained):
    _, printed = trained
    assert "zero2 on 8 x cpu (data 8)" in printed
    for word in ("params", "grads", "state", "reduce-scatter", "all-gather", "wire bytes sent per device and step"):
        assert word in printed
    assert "zlib -9 on the whole text: 2." in printed
    assert "step 6/6  held out: " in printed
    assert "to continue: jaxshard train --resume --out" in printed


def test_run_leaves_its_files(trained):
    folder, _ = trained
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.toml", "metrics.jsonl", "loss.png", "tensorboard", "model"}
    assert {path.name for path in (folder / "model").iterdir()} == {"6", ".lock", "run.json"}
    assert toml.load(folder / "config.toml").train.seed == 3


def test_metrics_are_json_lines(trained):
    training = [record for record in records(trained[0]) if "loss" in record]
    heldout = [record for record in records(trained[0]) if "heldout_loss" in record]
    assert [record["step"] for record in training] == [2, 4, 6]
    assert [record["step"] for record in heldout] == [3, 6]
    assert heldout[1]["heldout_loss"] < heldout[0]["heldout_loss"] < math.log(256) + 0.5
    for record in training:
        assert record["bits_per_byte"] == pytest.approx(record["loss"] / math.log(2))
        assert record["tokens_per_second"] * record["step_seconds"] == pytest.approx(16 * 16, rel=2e-3)
        for name, value in record.items():
            assert value == float(f"{value:.7g}"), name
        assert record["grad_norm"] > 0
    assert training[0]["learning_rate"] == pytest.approx(3e-3 / 2)  # the second of two steps of warm-up, from zero


def test_tensorboard_events_hold_the_same(trained):
    (path,) = (trained[0] / "tensorboard").iterdir()
    content, found = path.read_bytes(), {}
    while content:  # each record: its length, a checksum of that, the event, a checksum of it
        (length,) = struct.unpack("<Q", content[:8])
        event = events.Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]
        for value in event.summary.value:
            found[value.tag, event.step] = value.simple_value
    for record in records(trained[0]):
        for name in set(record) - {"step"}:
            assert found[tag_of(name), record["step"]] == pytest.approx(record[name], rel=1e-6)


def test_figure_is_a_png(trained):
    from matplotlib import image

    pixels = image.imread(trained[0] / "loss.png")
    assert pixels.shape[:2] == (540, 960)
    assert pixels.std() > 0.01


def test_training_equals_one_device(trained, tiny, tmp_path):
    """The same rows, one device, no strategy: the same model but for the order of sums."""
    alone = ["--sharding.devices", "1", "--sharding.strategy", "ddp", "--train.seed", "3"]
    assert main(["train", tiny, "--out", str(tmp_path / "run"), *alone]) == 0
    sharded, single = records(trained[0]), records(tmp_path / "run")
    for left, right in zip(sharded, single, strict=True):
        key = "loss" if "loss" in left else "heldout_loss"
        assert left[key] == pytest.approx(right[key], rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        ["--sharding.strategy", "zero3", "--model.dropout", "0.1"],
        ["--sharding.strategy", "hsdp", "--sharding.replica", "2", "--sharding.microbatches", "2"],
        [
            "--precision.params",
            "bfloat16",
            "--precision.masters",
            "--precision.moments",
            "bfloat16",
            "--model.no-remat",
        ],
        ["--precision.params", "float16", "--precision.masters", "--precision.loss-scale", "--model.no-remat"],
        [
            "--precision.params",
            "bfloat16",
            "--precision.stochastic-rounding",
            "--precision.reduce",
            "float32",
            "--model.no-remat",
        ],
    ],
    ids=["zero3", "hsdp", "bf16 masters", "fp16 loss scale", "bf16 stochastic"],
)
def test_resumed_run_equals_the_uninterrupted_one(tiny, tmp_path, monkeypatch, capsys, options):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["train", tiny, "--out", str(whole), *options]) == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        assert main(["train", tiny, "--out", str(parts), *options]) == 130
    assert "interrupted after step 3; the model is saved" in capsys.readouterr().out
    assert saved(parts)["step"] == 3
    assert main(["train", "--resume", "--out", str(parts)]) == 0
    chex.assert_trees_all_equal(saved(whole), saved(parts))
    assert [record["step"] for record in records(parts)] == [2, 3, 4, 6, 6]


def test_resume_goes_on_under_another_strategy_and_mesh_and_longer(tiny, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        assert main(["train", tiny, "--out", str(run)]) == 130
    assert "best" not in capsys.readouterr().out  # nothing was evaluated yet
    before = saved(run)
    chex.assert_trees_all_equal(before, saved(run, devices=2))
    other = ["--sharding.strategy", "zero3", "--sharding.devices", "4", "--train.steps", "7"]
    assert main(["train", "--resume", "--out", str(run), *other]) == 0
    assert (before["step"], saved(run, devices=4)["step"]) == (2, 7)
    assert toml.load(run / "config.toml").sharding.strategy == "zero3"


HYBRID = ["--sharding.strategy", "hybrid", "--sharding.pipeline", "2", "--sharding.tensor", "2"]


def test_a_run_over_all_axes_shows_their_shares_and_goes_on_in_other_stages(tiny, tmp_path, monkeypatch, capsys):
    """Saved as one stack of layers: a run of virtual stages goes on in plain ones, and as the same on one device."""
    run, alone = tmp_path / "run", tmp_path / "alone"
    interleaved = ["--sharding.virtual", "2", "--sharding.schedule", "interleaved", "--model.layers", "4"]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        assert main(["train", tiny, "--out", str(run), *HYBRID, *interleaved]) == 130
    printed = capsys.readouterr().out.replace("│", " ")
    assert "hybrid on 8 x cpu (pipeline 2 x data 2 x tensor 2)" in printed
    for axis, params in (("pipeline", r"[5-9]\d"), ("data", "0"), ("tensor", r"9\d")):
        assert re.search(rf"{axis} +2 +{params}% +(100|[5-9]\d)% +(100|[5-9]\d)% +[\d.]+ [kM]B", printed)
    plain = ["--sharding.virtual", "1", "--sharding.schedule", "1f1b", "--sharding.zero", "3"]
    assert main(["train", "--resume", "--out", str(run), *plain]) == 0
    single = ["--sharding.strategy", "ddp", "--sharding.devices", "1", "--model.layers", "4"]
    assert main(["train", tiny, "--out", str(alone), *single]) == 0
    assert records(run)[-1]["heldout_loss"] == pytest.approx(records(alone)[-1]["heldout_loss"], rel=1e-5)
    blocks = saved_snapshot(run).params["blocks"]
    assert {leaf.shape[0] for leaf in jax.tree.leaves(blocks)} == {4}


def test_metrics_beyond_the_last_save_are_taken_again(tiny, tmp_path, monkeypatch):
    """Killed after step 5, saved at 3: the records of 4 and 5 are dropped, and there once after resuming."""
    run = tmp_path / "run"

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        make = Run.batch
        patch.setattr(Run, "batch", lambda run, step: die() if step == 5 else make(run, step))
        assert main(["train", tiny, "--out", str(run), "--train.save-every", "3", "--train.log-every", "1"]) == 130
    assert [record["step"] for record in records(run)] == [1, 2, 3, 3, 4]
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert [record["step"] for record in records(run)] == [1, 2, 3, 3, 4, 5, 6, 6]


def test_a_record_that_was_cut_off_is_dropped(tmp_path):
    """The disk was full: `--resume` must go on from there."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5}\n{"step": 2, "lo')
    RunFolder(tmp_path).forget_after(9)
    assert records(tmp_path) == [{"step": 1, "loss": 5.5}]


def test_a_run_that_was_killed_before_its_configuration_was_written_starts_anew(tiny, tmp_path):
    """The lock of the saves comes first, then the compilation, which takes long."""
    run = tmp_path / "run"
    with Checkpointer(run / "model") as saves:
        saves.claim()
    (run / f".jaxshard-{12 * '0f'}").write_text("[mod")
    assert main(["train", tiny, "--out", str(run), "--resume-if-saved"]) == 0
    assert records(run)[-1]["step"] == 6
    (run / "config.toml").unlink()
    assert main(["train", tiny, "--out", str(run), "--resume-if-saved"]) == 2  # saves of who knows which model


def test_a_finished_run_has_nothing_left_to_do(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", tiny, "--out", str(run)]) == 0
    first = saved(run)
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "compile_step", None)  # it ends before
        assert main(["train", "--resume", "--out", str(run)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("nothing to do: all 6 steps are done; to continue: jaxshard train --resume --out ")
    assert line.endswith(" --train.steps 12")
    chex.assert_trees_all_equal(first, saved(run))


def test_position_is_carried_over_so_that_no_row_comes_twice():
    here = Position(drawn=5, rows=16, seed=1, text=7)
    for rows, drawn in ((16, 5), (8, 10), (32, 3), (80, 1)):
        to = Position(0, rows, 1, 7)
        assert here.carried_over(to) == Position(drawn, rows, 1, 7)
    assert here.carried_over(Position(0, 16, 1, 8)).drawn == 0  # another text


def test_resume_with_other_rows_and_another_text(tiny, tmp_path, monkeypatch, capsys):
    run, drawn, make = tmp_path / "run", [], Run.batch
    monkeypatch.setattr(Run, "batch", lambda run, index: drawn.append(index) or make(run, index))
    assert main(["train", tiny, "--out", str(run)]) == 0
    drawn.clear()
    assert main(["train", "--resume", "--out", str(run), "--train.rows", "32", "--train.steps", "8"]) == 0
    assert f"resumes after step 6 of 8, from {run / 'model' / '6'}\n" in capsys.readouterr().out
    assert drawn == [0, 3, 4]  # the first is of the step that is shown
    (tmp_path / "text").write_text("a quick brown fox " * 200)
    drawn.clear()
    more = ["--train.rows", "16", "--train.steps", "9", "--data", str(tmp_path / "text")]
    assert main(["train", "--resume", "--out", str(run), *more]) == 0
    assert drawn == [0, 0]
    assert "the text differs: it is read from its beginning" in capsys.readouterr().out
    assert main(["train", "--resume", "--out", str(run), "--train.seed", "9"]) == 2
    assert "train.seed = 9, saved 0" in capsys.readouterr().err


def test_the_best_saves_are_kept(tiny, tmp_path):
    run = tmp_path / "run"
    options = ["--train.save-every", "1", "--train.eval-every", "2", "--train.keep-last", "1", "--train.keep-best", "2"]
    assert main(["train", tiny, "--out", str(run), *options, "--train.keep-every", "3"]) == 0
    saves = snapshots.open_saves(RunFolder(run), Config().train)
    evaluated = {r["step"]: r["heldout_loss"] for r in records(run) if "heldout_loss" in r}
    best = sorted(evaluated, key=evaluated.get)[:2]
    assert saves.steps() == sorted({3, 6, *best})
    assert saves.info(best[0])["metrics"]["heldout_loss"] == pytest.approx(evaluated[best[0]], rel=1e-6)


def test_the_same_command_starts_and_goes_on(tiny, tmp_path, monkeypatch):
    run = tmp_path / "run"
    command = ["train", tiny, "--out", str(run), "--resume-if-saved"]
    with monkeypatch.context() as patch:
        make = Run.batch
        patch.setattr(Run, "batch", lambda run, step: 1 / 0 if step == 1 else make(run, step))
        with pytest.raises(ZeroDivisionError):
            main(command)  # ended before its first save
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        assert main(command) == 130
    assert main(command) == 0
    assert saved(run)["step"] == 6
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").write_text("x")
    assert main(["train", tiny, "--out", str(other), "--resume-if-saved"]) == 2


def test_stopping_rule():
    rule = EarlyStopping(patience=2, min_improvement=0.1)
    course = [rule := rule.after(loss) for loss in (3.0, 2.95, 2.85, 2.8, math.nan)]
    assert [(stage.best, stage.misses, stage.stopped) for stage in course] == [
        (3.0, 0, False),
        (3.0, 1, False),
        (2.85, 0, False),
        (2.85, 1, False),
        (2.85, 2, True),
    ]
    assert not EarlyStopping(patience=0, min_improvement=0.0, best=1.0, misses=99).stopped


def test_run_stops_early_and_remembers_it(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    options = ["--train.patience", "2", "--train.min-improvement", "9", "--train.eval-every", "1"]
    assert main(["train", tiny, "--out", str(run), *options]) == 0
    printed = capsys.readouterr().out
    assert "stopped early after step 3: 2 evaluations without improvement" in printed
    losses = [record["heldout_loss"] for record in RunFolder(run).records() if "heldout_loss" in record]
    assert min(losses) < losses[0]  # the rule knows the first, since no later one improved by enough
    assert f"best held-out loss: {min(losses) / math.log(2):.3f} bits/byte" in printed
    assert saved(run)["step"] == 3  # the first evaluation improves on nothing at all
    assert main(["train", "--resume", "--out", str(run)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("nothing to do: stopped early after step 3: 2 evaluations without improvement; to continue")
    assert saved(run)["step"] == 3
    assert main(["train", "--resume", "--out", str(run), "--train.patience", "3"]) == 0
    assert saved(run)["step"] == 4


def test_bfloat16_learned_positions_gelu_and_tied_head_train(tiny, tmp_path):
    run = tmp_path / "run"
    model = [
        "--sharding.devices",
        "2",
        "--model.dtype",
        "bfloat16",
        "--model.positions",
        "learned",
        "--model.mlp",
        "gelu",
        "--model.tied",
    ]
    assert main(["train", tiny, "--out", str(run), *model, "--model.no-remat", "--model.vocabulary", "300"]) == 0
    losses = [record["loss"] for record in records(run) if "loss" in record]
    assert losses[-1] < losses[0]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(saved(run)["params"])} == {"float32"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "missing.txt"], "data.path: 'missing.txt' does not exist: give a file or a folder of text"),
        (["--data", "short.txt"], "the text has 20 bytes, 18 to train on and 2 held out"),
        (["--data", "empty"], "data.path: 'empty' is empty (0 files)"),
        (
            ["--train.rows", "12"],
            "train.rows = 12 is not a multiple of replica 1 x data 8 x microbatches 1 = 8: 16 would be",
        ),
        (["--sharding.data", "3"], "does not make 8 devices"),
        (["--sharding.devices", "9"], "sharding.devices = 9, but JAX has 8"),
        (["--model.heads", "5"], "model.width = 32 is not a multiple of model.heads = 5"),
        (["--out", "taken"], "--out taken is not empty: give a new folder"),
        (["--out", "short.txt"], "--out short.txt is a file: give a folder"),
        (["--out", "short.txt/run"], "is not a writable folder"),
        (["--out", "odd"], "this is a file; give a folder: "),
        (["--resume", "--out", "taken"], "--resume: no saved run in --out taken"),
        (["--resume-if-saved"], "--resume needs --out DIR"),
        (["--resume-if-saved", "--out", "taken"], "--out taken is not empty: give a new folder"),
        (["--data", ""], "--data '': it must be non-empty; leave the option out for its default"),
        (["--out", ""], "--out '': it must be non-empty"),
        ([""], "an argument is empty: leave it out, or give a file"),
        (["--train.rows", "8e12"], "--train.rows '8e12': it must be an integer"),
        (["--train.rows", str(2 * 10**9)], "train.rows = 2000000000: a batch would take 408 GB, and only"),
        (["--model.width", str(2**24)], "params, gradients and state on 8 CPU devices of this host would take"),
        (["--sharding.devices", "100000"], "sharding.devices = 100000, but JAX has 8"),
        (["--train.rows"], "--train.rows needs a value"),
        (["--train.rows", "--resume"], "--train.rows needs a value"),
        (["--sharding.strategy", "zero9"], "--sharding.strategy 'zero9': it must be one of 'ddp', 'zero1'"),
        (["--resume=yes"], "--resume takes no value"),
        (["--processes", "0", "--out", "new"], "--processes 0: it must be above 0"),
        (["--processes", "-2", "--out", "new"], "--processes -2: it must be above 0"),
        (["--processes", str(2**63), "--out", "new"], "8 devices (sharding.devices) must be divisible by it"),
        (["--processes", "3", "--out", "new"], "--processes 3: 8 devices (sharding.devices) must be divisible by it"),
        (["--processes", "2"], "several processes need --out DIR"),
    ],
)
def test_bad_input_is_told_and_nothing_is_written(tiny, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("mine")
    (tmp_path / "short.txt").write_text("twenty bytes of text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "model").write_text("no folder")
    before = sorted(tmp_path.rglob("*"))
    try:
        status = main(["train", tiny, *options])
    except SystemExit as end:  # of an option that does not parse
        status = end.code
    error = capsys.readouterr().err
    assert (status, error.count("\n")) == (2, 1)
    assert message in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_a_refused_run_has_locked_is_free(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ".lock").touch()
    RunFolder(tmp_path).check_free()


def test_unknown_option_is_refused_with_a_guess(tiny, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["train", tiny, "--model.widht", "3"])
    assert raised.value.code == 2
    assert "--model.width" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--widht", "3"], "unknown option --widht; the nearest known one is --model.width"),
        (["--train.step=3"], "unknown option --train.step; the nearest known one is --train.steps"),
        (["--resume-if-save"], "the nearest known one is --resume-if-saved"),
        (["--dta", "x"], "the nearest known one is --data"),
        (["another.toml"], "unknown argument 'another.toml': give one CONFIG.toml"),
    ],
)
def test_an_unknown_option_names_the_nearest(tiny, capsys, arguments, message):
    with pytest.raises(SystemExit) as raised:
        main(["train", tiny, *arguments])
    assert raised.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.err.count("\n"), printed.out) == (1, "")


@pytest.mark.parametrize("arguments", [["--train.step", "3"], ["--trian.steps", "3"], ["--train.step=3"]])
def test_an_unknown_option_is_named_without_a_config_too(capsys, arguments):
    """Its value was taken for CONFIG.toml, and told as "expected str, bytes or os.PathLike object, not list"."""
    with pytest.raises(SystemExit) as raised:
        main(["train", *arguments])
    assert raised.value.code == 2
    assert "the nearest known one is --train.steps" in capsys.readouterr().err


def test_flags_may_be_negated():
    assert parse(["--model.no-remat", "--optimizer.learning-rate", "1e-4"]).model.remat is False


def test_names_are_shown_as_they_are_and_the_command_to_go_on_is_quoted(tiny, tmp_path, monkeypatch, capsys):
    """`[i]` in a name was taken for markup and left out, and a name with a space could not be copied."""
    monkeypatch.chdir(tmp_path)
    name, text = "it's my runs/😀 :smile: lr=3", tmp_path / "[i]\U0001f600 my text"
    text.write_text("a quick brown fox " * 200)
    assert main(["train", tiny, "--out", name, "--data", str(text)]) == 0
    shown = capsys.readouterr().out
    assert f"in {name}: model/6, metrics.jsonl" in shown
    assert f"text: {text}: 3,600 bytes" in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("to continue: "))
    command = shlex.split(line.removeprefix("to continue: "))
    assert command == ["jaxshard", "train", "--resume", "--out", name, "--train.steps", "12"]
    assert main(command[1:]) == 0
    assert toml.load(RunFolder(tmp_path / name).config).data.path == str(text)
    assert main(["train", tiny, "--out=-x"]) == 0
    assert "to continue: jaxshard train --resume --out ./-x " in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--data", "--out"])
def test_a_name_that_is_not_utf8_is_refused(tiny, tmp_path, capsys, option):
    path = tmp_path / os.fsdecode(b"caf\xe9")
    path.write_text("a quick brown fox " * 200)
    assert main(["train", tiny, option, str(path)]) == 2
    assert "the name is not UTF-8: rename it" in capsys.readouterr().err


def test_folder_of_another_run_is_not_touched(trained, tiny, capsys):
    folder, _ = trained
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main(["train", tiny, "--out", str(folder)]) == 2
    assert "holds a run saved at step 6: resume it with --resume, or give a different folder" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(folder), "--model.width", "64"]) == 2
    assert "model.width = 64, saved 32; keep these as saved" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(folder), "--precision.moments", "bfloat16"]) == 2
    assert "precision.moments = 'bfloat16', saved 'float32'; keep these as saved" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_diverging_run_ends_with_the_cure_and_saves_the_last_good_step(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    options = ["--optimizer.learning-rate", "1e38", "--train.max-skips", "1", "--train.eval-every", "5"]
    with pytest.warns(UserWarning, match="was skipped"):
        assert main(["train", tiny, "--out", str(run), *options]) == 1
    error = capsys.readouterr().err
    assert "step 4: " in error  # steps 1 and 2 are good, and leave parameters near 1e38
    assert "is not finite, and more than train.max_skips = 1 steps in a row were skipped" in error
    assert "lower optimizer.learning_rate" in error
    assert "the last save is step 5" in error  # one was on its way
    assert num_updates(saved_snapshot(run).state) == 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(saved(run)["params"]))


def test_skipped_steps_are_counted_and_shown(tiny, tmp_path, monkeypatch, capsys):
    """A loss scale that starts too high: its first steps overflow, change nothing, and halve it."""
    run, options = tmp_path / "run", ["--precision.params", "float16", "--precision.masters", "--precision.loss-scale"]
    high = jaxshard.LossScale(initial=2.0**14, hysteresis=1)
    monkeypatch.setattr(jaxshard, "LossScale", lambda: high)
    assert main(["train", tiny, "--out", str(run), "--train.log-every", "1", *options]) == 0
    shown = capsys.readouterr().out
    assert main(["train", "--resume", "--out", str(run), "--train.steps", "7", "--train.log-every", "1"]) == 0
    found = [record for record in records(run) if "loss_scale" in record]
    overflowed = ["loss" not in record for record in found]
    assert len(found) == 7
    assert overflowed[0]
    assert not all(overflowed[:6])
    assert [record["skipped_steps"] for record in found] == list(np.cumsum(overflowed))  # resumed at step 6
    assert [record["loss_scale"] for record in found] == list(2.0 ** (14 - np.cumsum([0, *overflowed[:-1]])))
    assert found[overflowed.index(False)]["learning_rate"] == 0.0  # the warm-up waited
    assert f"skipped: {sum(overflowed[:6])} of 6 steps" in shown
    assert num_updates(saved_snapshot(run).state) == 7 - sum(overflowed)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Connection reset by peer"), 134),
        (TimeoutError("initialize: process 1 of 2 did not connect"), 134),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes"), 1),
        (OSError("checkpoint 3 was not saved"), 1),
    ],
)
def test_only_what_another_process_is_to_blame_for_is_worth_a_new_start(error, status):
    """Recipes take 1 for the end of the job: a process that loses another must not say so."""
    assert train.status_of(error, 1) == status


def test_the_step_that_was_shown_is_not_compiled_again(tiny, tmp_path, count_compilations):
    job = train.make_job(train.parse([tiny, "--out", str(tmp_path / "run")]))
    count, step = count_compilations(lambda: train.compile_step(job, Console(quiet=True)))
    assert count > 0
    start = job.run.start()
    assert count_compilations(step, start.params, start.state, job.run.batch(0))[0] == 0


def test_default_folder_is_named_by_date(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", tiny]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "model" / "6").is_dir()


def test_defaults_are_those_of_the_issue():
    config = Config()
    assert (config.sharding.strategy, config.sharding.devices, config.data.path) == ("zero2", None, None)
    assert config.data.heldout == 0.1
