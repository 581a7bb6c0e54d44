"""`jaxshard train` over several processes, killed and told to end; what is resumed equals what never stopped."""

import json
import os
import re
import resource
import signal
import time

import filelock
import numpy as np
import pytest
from group import Group, program, trainer

from jaxshard.cli import main

TINY = """
[model]
layers = 1
width = 32
heads = 2
hidden = 48
sequence_length = 16
dropout = 0.1
[optimizer]
warmup_steps = 2
[sharding]
min_shard_size = 64
[train]
steps = 60
log_every = 1
eval_every = 30
save_every = 7
heartbeat_seconds = 10
[data]
heldout_bytes = 700
"""


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path / "tiny.toml"


def losses(folder):
    """Step -> loss, as far as they are recorded."""
    if not (folder / "metrics.jsonl").exists():
        return {}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {r["step"]: r["loss"] for r in map(json.loads, lines) if "loss" in r}


def state_bytes(folder):
    """Every array of the newest save, by its path."""
    from jaxshard.checkpoint import Checkpointer

    checkpoints = Checkpointer(folder / "model")
    step = checkpoints.steps()[-1]
    return step, {path: x.tobytes() for path, x in checkpoints.read(step)}


def train(tmp_path, *arguments, count=2, devices=4, seconds=100, status=0):
    with Group(trainer(*arguments), tmp_path, count, devices // count) as group:
        assert group.wait(seconds) == [status] * count, group.text()
        return [group.log(i) for i in range(count)]


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of a run of two processes that nothing disturbed, made once for all workers."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with filelock.FileLock(base / "whole.lock"):
        if not (base / "whole").exists():
            (base / "tiny.toml").write_text(TINY)
            made = tmp_path_factory.mktemp("whole")
            logs = train(made, base / "tiny.toml", "--out", made / "run")
            assert "held out" in logs[0]
            assert "step" not in logs[1]  # only the first process prints
            (made / "run").rename(base / "whole")
    return base / "whole"


def test_two_processes_of_two_devices_train_as_one_of_four(tmp_path, tiny, whole):
    train(tmp_path, tiny, "--out", tmp_path / "one", count=1)
    two, one = losses(whole), losses(tmp_path / "one")
    assert list(two) == list(one) == list(range(1, 61))
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=2e-5)


def test_stages_on_other_processes_train_as_on_one(tmp_path, tiny):
    options = ["--sharding.strategy", "hybrid", "--sharding.pipeline", 2, "--model.layers", 2, "--model.width", 16]
    options += ["--model.heads", 1, "--model.dropout", 0, "--model.no-remat", "--train.steps", 6]  # soon compiled
    train(tmp_path, tiny, *options, "--out", tmp_path / "two")
    assert main(["train", *map(str, [tiny, *options, "--sharding.devices", 4, "--out", tmp_path / "one"])]) == 0
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert list(two) == list(one) == list(range(1, 7))
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=2e-5)


def test_sigterm_to_one_process_saves_the_same_step_on_all_and_what_goes_on_is_the_same(tmp_path, tiny, whole):
    """F11, and bit for bit."""
    with Group(trainer(tiny, "--out", tmp_path / "parts", "--resume-if-saved"), tmp_path, devices=2) as group:
        group.until(lambda: len(losses(tmp_path / "parts")) > 8, "eight steps")
        group.signal(signal.SIGTERM, 1)
        assert group.wait(60) == [143, 143], group.text()
        assert "the model is saved" in group.log(0)
    step, _ = state_bytes(tmp_path / "parts")
    assert 8 < step < 60
    train(tmp_path, tiny, "--out", tmp_path / "parts", "--resume-if-saved")
    assert state_bytes(tmp_path / "parts") == state_bytes(whole)
    assert losses(tmp_path / "parts") == losses(whole)


def test_processes_started_here(tmp_path, tiny):
    """`--processes 2`, ended by Ctrl-C from the terminal, which reaches all."""
    arguments = trainer(tiny, "--out", tmp_path / "run", "--processes", 2, "--sharding.devices", 4)
    with Group(arguments, tmp_path, 1) as group:
        group.until(lambda: len(losses(tmp_path / "run")) > 14, "steps")
        os.killpg(group.processes[0].pid, signal.SIGINT)
        assert group.wait(60) == [130], group.text()
        assert group.log().count("the model is saved") >= 1
        assert "zero2 on 4 x cpu" in group.log()  # of both processes together
    assert 15 <= state_bytes(tmp_path / "run")[0] < 60


def test_a_second_run_in_the_same_folder_is_refused(tmp_path, tiny, capsys):
    """F23."""
    options = [tiny, "--out", tmp_path / "run", "--train.steps", 4000]
    with Group(trainer(*options), tmp_path, 1, devices=2) as first:
        saves = tmp_path / "run" / "model"  # a save has its step's name alone once it is complete
        first.until(lambda: [x for x in saves.glob("*/commit_success.txt") if x.parent.name.isdigit()], "a save")
        assert main(["train", *map(str, options), "--sharding.devices", "2", "--resume"]) == 2
        assert "is writing checkpoints here; end it, or give each run its own folder" in capsys.readouterr().err
        assert first.processes[0].poll() is None
        first.signal(signal.SIGTERM, 0)
        assert first.wait(60) == [143]


def test_a_save_that_fails_for_one_process_ends_all_with_what_is_whole(tmp_path, tiny):
    """F9 under the trainer: the second process can write no more than 16 kB of a file."""
    with Group(trainer(tiny, "--out", tmp_path / "run"), tmp_path, 2, devices=2) as group:
        group.until(lambda: list((tmp_path / "run" / "model").glob("7/commit_success.txt")), "a first save")
        resource.prlimit(group.processes[1].pid, resource.RLIMIT_FSIZE, (2**14, 2**14))
        assert group.wait(60) == [1, 1], group.text()
    for index in range(2):
        assert re.search(r"checkpoint \d+ was not saved: .*File too large", group.log(index)), group.text()
    step = int(re.search(r"the last save is step (\d+)", group.log(0))[1])
    assert state_bytes(tmp_path / "run")[0] == step


def test_an_error_of_one_process_alone_is_told_and_ends_all(tmp_path, tiny):
    """Not hidden by the wait for the others, who know nothing of it."""
    with Group(program("record_fails", tiny, "--out", tmp_path / "run"), tmp_path, devices=2) as group:
        start = time.monotonic()
        statuses = group.wait(100)
        assert statuses[0] == 1, group.text()
        assert statuses[1] not in (0, None), group.text()
        assert time.monotonic() - start < 95
    assert "no space for records; the last save is step 7" in group.log(0), group.text()
