"""The power is cut: what was reported is on the disk. By a real cut of an ext4 where this user may mount one; elsewhere
the order of syncs, renames and deletions is recorded (as `tests/checkpoint/test_durable.py` does everywhere)."""

import json
import random
import re
import shutil
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from disk import disk
from group import ROOT, Group, program, trainer
from programs import small_numbers, small_numbers_placed
from syncs import Recorder
from test_fault_train import TINY

import jaxshard
from jaxshard.apps.data import tokenizing
from jaxshard.checkpoint import Checkpointer
from jaxshard.cli import main
from jaxshard.system import files


def told(*words):
    print(*words, flush=True)


# Steps of checkpoints.


def cut_while_saving(made, tmp_path, count, how, keep_last, seconds):
    """The power is cut some time after two saves were reported; the last step that was reported by then."""
    arguments = program("reported_saves", made.path / "ck", count, keep_last, how)
    with Group(arguments, tmp_path, count) as group:
        before = max(Checkpointer(made.path / "ck").steps(), default=-1)
        group.says(f"reported {before + 2}\n")
        time.sleep(seconds)
        reported = max(int(step) for i in range(count) for step in re.findall(r"reported (\d+)\n", group.log(i)))
        made.cut()
    made.start_again()
    return reported


def look_after_a_cut(folder, reported):
    """The step that is found, whole: the one that was reported last, or a newer one. The folder can be gone on with."""
    mesh = jaxshard.make_mesh(devices=jax.devices()[:4])
    with Checkpointer(folder, keep_last=2) as checkpoints:
        step, tree = checkpoints.restore(small_numbers_placed(0, mesh))
        assert step >= reported
        assert not checkpoints.damaged()
        assert_numbers(step, tree)
        for each in checkpoints.steps():
            checkpoints.verify(each)
        checkpoints.save(step + 1, small_numbers_placed(step + 1, mesh), blocking=True)
        assert checkpoints.restore(small_numbers_placed(0, mesh))[0] == step + 1
    return step


def assert_numbers(step, tree):
    for name, x in small_numbers(step).items():
        assert np.asarray(tree[name]).tobytes() == x.tobytes()


@pytest.mark.parametrize(("count", "how"), [(1, "blocking"), (1, "async"), (2, "async")])
def test_what_was_reported_outlasts_a_power_cut(tmp_path, monkeypatch, count, how):
    """F70. With `keep_last=1` the step before is deleted as soon as the new one is reported."""
    with disk(tmp_path) as made:
        if made is None:
            recorded(tmp_path / "ck", monkeypatch, how)
            return
        reported = cut_while_saving(made, tmp_path, count, how, 1, 0.1)
        look_after_a_cut(made.path / "ck", reported)


def test_each_process_has_synced_what_it_wrote_before_a_save_is_reported(tmp_path):
    """F70"""
    with Group(program("synced_parts", tmp_path / "ck"), tmp_path) as group:
        assert group.wait() == [0, 0], group.text()
    assert all("not synced: []" in group.log(index) for index in range(2)), group.text()


def recorded(folder, monkeypatch, how):
    """Where no disk may be mounted: at each report all of the step is synced, and nothing older gone before."""
    recorder = Recorder(monkeypatch)
    with Checkpointer(folder, keep_last=1) as checkpoints:
        for step in range(3):
            checkpoints.save(step, {"w": jnp.arange(100.0)}, blocking=how == "blocking")
            checkpoints.wait()
            whole = [folder, *(folder / str(step)).rglob("*"), folder / str(step)]
            assert {recorder.identity(path) for path in whole} <= recorder.synced()
            named = [event[0] for event in recorder.events].index("rename")
            assert "delete" not in [event[0] for event in recorder.events[:named]]
            recorder.events.clear()


# A run.


def contents(folder):
    """Of all files; that a temporary one is deleted again may be lost, and the next writer deletes it."""
    found = (path for path in folder.rglob("*") if path.is_file() and not files.is_temporary(path.name))
    return {path.relative_to(folder): path.read_bytes() for path in found}


def trained(folder, tmp_path):
    """Where a run ended with status 0."""
    (tmp_path / "tiny.toml").write_text(TINY)
    shutil.copy(ROOT / "README.md", tmp_path / "text.md")
    arguments = ["tiny.toml", "--data", "text.md", "--out", folder, "--train.keep-last", 1]
    with Group(trainer(*arguments), tmp_path, 1) as group:
        assert group.wait() == [0], group.text()


def test_a_run_that_ended_with_status_0_outlasts_a_power_cut(tmp_path, monkeypatch, capsys):
    """F71: its model, configuration, metrics, figure and folders."""
    with disk(tmp_path) as made:
        if made is None:
            recorder = Recorder(monkeypatch)
            (tmp_path / "tiny.toml").write_text(TINY)
            assert main(["train", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "new" / "run")]) == 0
            of_run = {recorder.identity(path) for path in (tmp_path / "new").rglob("*") if path.name != ".lock"}
            assert of_run - recorder.synced() == set()
            return
        run = made.path / "new" / "run"
        trained(run, tmp_path)
        before = contents(run)
        made.cut()
        made.start_again()
        after = contents(run)
        assert after == before
        assert {"config.toml", "metrics.jsonl", "loss.png"} <= {path.name for path in after}
        assert main(["ckpt", "verify", str(run)]) == 0


def test_tokens_and_exports_outlast_a_power_cut(tmp_path, monkeypatch, capsys):
    """F72"""
    text = tmp_path / "text.txt"
    text.write_text("some words of a text " * 500)
    tree = {"w": jnp.arange(3000.0), "v": jnp.ones(5)}
    with Checkpointer(tmp_path / "ck") as checkpoints:
        checkpoints.save(1, tree, blocking=True)
    with disk(tmp_path) as made:
        place = tmp_path / "place" if made is None else made.path
        place.mkdir(exist_ok=True)
        recorder = Recorder(monkeypatch)
        tokenizer = tokenizing.learned([text], 300)
        tokenizing.write([text], tokenizer, place / "deep" / "tokens", 0.1)
        export = ["ckpt", "export", str(tmp_path / "ck"), "--shard-size", "10kB", "--safetensors"]
        assert main([*export, str(place / "x.safetensors")]) == 0
        written = contents(place)
        assert len(written) == 6
        if made is None:
            names = [place, *(path for path in place.rglob("*"))]
            assert {recorder.identity(path) for path in names} <= recorder.synced()
            return
        made.cut()
        made.start_again()
        assert contents(place) == written


# Many moments.


@pytest.mark.nightly
@pytest.mark.parametrize(("count", "how"), [(1, "blocking"), (1, "async"), (2, "blocking"), (2, "async")])
def test_13_cuts_at_random_moments_leave_the_last_reported_step_or_a_newer_one(tmp_path, count, how):
    """F70: the folder goes on from cut to cut. 8 more are of `jaxshard train`."""
    rng, found = random.Random(f"{count} {how}"), Counter()
    with disk(tmp_path) as made:
        assert made is not None, "run this as root, who may mount a disk"
        for _ in range(13):
            keep_last, seconds = rng.choice([1, 1, 2, 3]), rng.uniform(0, 1.5)
            reported = cut_while_saving(made, tmp_path, count, how, keep_last, seconds)
            step = look_after_a_cut(made.path / "ck", reported)
            found["reported" if step == reported else "newer"] += 1
    told(count, "processes,", how, dict(found))
    assert found.total() == 13


@pytest.mark.nightly
def test_8_cuts_at_random_moments_of_a_training_run_lose_no_reported_save(tmp_path, capsys):
    """F71: half of them after it has ended with status 0, half while it trains and saves."""
    rng = random.Random(71)
    (tmp_path / "tiny.toml").write_text(TINY)
    with disk(tmp_path) as made:
        assert made is not None, "run this as root, who may mount a disk"
        for number in range(8):
            run = made.path / f"run{number}"
            arguments = ["tiny.toml", "--out", run, "--train.save-every", 2, "--train.keep-last", 1]
            arguments += ["--train.steps", 400 if number % 2 else 10, "--train.sample", 0]
            with Group(trainer(*arguments), tmp_path, 1) as group:
                if number % 2:
                    group.until(lambda run=run: Checkpointer(run / "model").steps(), "a save")
                    time.sleep(rng.uniform(0, 2))
                else:
                    assert group.wait() == [0], group.text()
                before = max(Checkpointer(run / "model").steps())
                made.cut()
            made.start_again()
            newest = Checkpointer(run / "model").latest_valid()
            told("run", number, "newest before", before, "after", newest)
            assert newest is not None
            assert newest >= before - 2 * (number % 2)  # the newest that is seen there may not be reported yet
            if number % 2 == 0:
                steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
                assert max(steps) == 10
            more = ["train", "--resume", "--out", str(run), "--train.steps", str(newest + 2), "--train.sample", "0"]
            assert main(more) == 0
            shutil.rmtree(run)
            files.sync_folder(made.path)
