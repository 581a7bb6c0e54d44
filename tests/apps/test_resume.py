"""`jaxshard train --resume` where files of the run were harmed: it goes on, or says what is wrong, and the cure."""

import json
import os
import shutil
import subprocess
import sys

import matplotlib.figure
import numpy as np
import pytest
from compiled_once import fast_environment

from jaxshard.apps.config import seal, toml
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.checkpoint import Checkpointer
from jaxshard.cli import main

TINY = """
[model]
layers = 1
width = 16
heads = 2
hidden = 16
sequence_length = 16
[optimizer]
learning_rate = 1e-4
warmup_steps = 1
[sharding]
strategy = "ddp"
devices = 2
[train]
steps = 4
log_every = 1
save_every = 2
[data]
heldout_bytes = 700
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("finished")
    (root / "tiny.toml").write_text(TINY)
    assert main(["train", str(root / "tiny.toml"), "--out", str(root / "run")]) == 0
    return root


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a finished run, to be harmed."""
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.copy(finished / "tiny.toml", tmp_path)
    return tmp_path / "run"


def arrays(folder):
    saves = Checkpointer(folder / "model")
    return {path: np.asarray(x).tobytes() for path, x in saves.read(saves.steps()[-1])}


def resumed(run, *options):
    return main(["train", *options, "--resume", "--out", str(run)])


def steps_recorded(run):
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_metrics_that_were_harmed_do_not_stop_a_run(run, capsys):
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 5
    (run / "metrics.jsonl").write_bytes(
        b"".join([b"\0" * 99 + b"\n", lines[0], b"{}\n[]\n\xff\n", *lines[2:], b"\0\0"])
    )
    assert resumed(run, "--train.steps", "5") == 0
    assert (
        "metrics.jsonl: 5 of its lines are not metrics, and are now in metrics.jsonl.others" in capsys.readouterr().out
    )
    assert steps_recorded(run) == [1, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("name", ["metrics.jsonl", "loss.png"])
def test_folders_in_place_of_files_do_not_stop_a_run(run, capsys, name):
    (run / name).unlink()
    (run / name / "mine").mkdir(parents=True)
    shutil.rmtree(run / "tensorboard")
    (run / "tensorboard").write_text("no folder")
    assert resumed(run) == 0
    printed = capsys.readouterr().out
    assert f"{name} is not a file: it is now {name}.aside" in printed
    assert "tensorboard is not a folder: it is now tensorboard.aside" in printed
    assert (run / f"{name}.aside" / "mine").is_dir()
    assert {path.name for path in run.iterdir()} >= {"metrics.jsonl", "loss.png", "tensorboard"}


def test_events_that_were_harmed_do_not_stop_a_run(run):
    for path in (run / "tensorboard").iterdir():
        path.write_bytes(b"\0" * 1000)
    (run / "loss.png").write_bytes(b"")
    assert resumed(run) == 0
    assert (run / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_a_figure_that_cannot_be_drawn_is_told_and_the_run_has_succeeded(run, capsys, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", fails)
    assert resumed(run) == 0
    assert "loss.png was not drawn: no fonts" in capsys.readouterr().out


@pytest.mark.parametrize("harm", ["cut", "gone", "edited", "unreadable", "a folder"])
def test_a_configuration_that_was_harmed_stops_a_run_until_its_options_are_given(run, capsys, harm):
    """Cut short where a line ends, it gave defaults in silence: lr 3e-3 for 1e-4, zero2 for ddp."""
    config, given, before = run / "config.toml", str(run.parent / "tiny.toml"), arrays(run)
    text = config.read_text()
    if harm == "cut":
        config.write_text("".join(text.splitlines(keepends=True)[:20]))
    elif harm == "edited":
        config.write_text(text.replace("steps = 4", "steps = 5"))
    elif harm == "unreadable":
        config.write_bytes(b"\0" * len(text))
    else:
        config.unlink()
        if harm == "a folder":
            config.mkdir()
    assert resumed(run) == 2
    error = capsys.readouterr().err
    assert f"{config} " in error
    assert f"--resume --out {run}" in error
    assert (arrays(run), error.count("\n")) == (before, 1)
    assert resumed(run, str(config) if harm == "edited" else given) == 0
    assert seal.state_of(config.read_text()) == "whole"
    found = toml.load(config)
    assert (found.optimizer.learning_rate, found.sharding.strategy) == (1e-4, "ddp")
    assert found.train.steps == (5 if harm == "edited" else 4)
    assert ("the options are not compared" in capsys.readouterr().out) == (harm != "edited")


def test_a_configuration_without_a_seal_is_read(run, capsys):
    """What an older jaxshard wrote."""
    config = toml.load(run / "config.toml")
    text = toml.dump(config).replace("heartbeat_seconds = 60\n", "")
    (run / "config.toml").write_text(text)
    assert resumed(run) == 0
    assert "config.toml lacks train.heartbeat_seconds: an older jaxshard wrote it" in capsys.readouterr().out
    assert toml.load(run / "config.toml") == config


def test_another_part_that_is_held_out_is_told(run, capsys):
    assert resumed(run, "--data.heldout", "0.2", "--data.heldout-bytes", "600") == 0
    printed = capsys.readouterr().out
    assert "data.heldout = 0.2, saved 0.1, data.heldout_bytes = 600, saved 700: the held-out text differs" in printed
    assert "the model was trained on some of it" in printed
    assert resumed(run) == 0
    assert "the held-out text differs" not in capsys.readouterr().out


def test_the_configuration_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    events, move, sync = [], os.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (events.append("sync"), sync(number)))
    monkeypatch.setattr(
        os, "replace", lambda a, b, **folders: (events.append(os.path.basename(b)), move(a, b, **folders))
    )
    RunFolder(tmp_path / "run").begin(TINY, 0)
    assert events == ["sync", "sync", "config.toml", "sync", "sync", "metrics.jsonl", "sync"]


def test_a_run_whose_models_are_gone_is_not_started_anew_over_its_configuration(run, capsys):
    """--resume-if-saved began at step 0 with the defaults, and wrote these over config.toml."""
    before = (run / "config.toml").read_bytes()
    shutil.rmtree(run / "model")
    assert main(["train", "--resume-if-saved", "--out", str(run)]) == 2
    assert "config.toml but not model/: restore that, or give a different folder" in capsys.readouterr().err
    assert (run / "config.toml").read_bytes() == before
    assert not (run / "model").exists()


def test_a_backend_of_matplotlib_that_is_not_there_stops_no_run(run):
    command = [sys.executable, "-m", "jaxshard", "train", "--resume", "--out", str(run)]
    environment = fast_environment(MPLBACKEND="nope")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr


def test_platforms_that_are_not_there_are_one_line(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    command = [sys.executable, "-m", "jaxshard", "train", "--out", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("jaxshard train: JAX found no devices with JAX_PLATFORMS='cuda'")
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()
