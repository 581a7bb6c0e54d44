"""A run's folder that changes while the run writes there; by real processes it is in tests/faults."""

import errno
import json
import os
import re
import shutil

import numpy as np
import pytest
from tensorboardX.event_file_writer import EventsWriter

from jaxshard.apps.commands.train import command
from jaxshard.apps.records.record import Recorder, TensorBoard
from jaxshard.apps.runs import folder_watch
from jaxshard.apps.runs import snapshot as snapshots
from jaxshard.apps.runs.folder_watch import FolderWatch
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.checkpoint import Checkpointer

SMALL = ["--model.layers", "1", "--model.width", "16", "--model.heads", "2", "--model.hidden", "32"]
SMALL += ["--model.sequence-length", "16", "--train.rows", "8", "--train.log-every", "1", "--train.steps", "6"]
SMALL += ["--train.save-every", "2", "--data.heldout-bytes", "700", "--optimizer.warmup-steps", "1"]


def trained(run, monkeypatch, change):
    """The exit status of a run of 6 steps, where `change(run)` comes once step 2 is saved."""
    save, calls = snapshots.save, []

    def then_change(saves, *arguments):
        save(saves, *arguments)
        calls.append(saves)
        if len(calls) == 1:
            saves.wait()
            change(run)

    monkeypatch.setattr(snapshots, "save", then_change)
    return command([*SMALL, "--out", str(run)])


def replaced(run):
    shutil.rmtree(run)
    run.mkdir()
    (run / "others").write_text("another's")


def others_model(run):
    shutil.rmtree(run / "model")
    with Checkpointer(run / "model") as others:
        others.save(3, {"w": np.zeros(3)})


MOVES = {
    "renamed": (lambda run: run.rename(run.with_name("new")), "it is now {0}/new; step 4 is saved in {0}/new", "new"),
    "deleted": (shutil.rmtree, "it was deleted or unmounted; step 4 is saved in {0}/run", "run"),
    "replaced": (replaced, "it was deleted or unmounted; step 4 is saved in {0}/run.rescued", "run.rescued"),
    "another's": (
        others_model,
        "model was replaced, and does not belong to this run; step 4 is saved in",
        "run.rescued",
    ),
    "a file": (
        lambda run: (shutil.rmtree(run / "model"), (run / "model").write_text("x")),
        "model was replaced, and does not belong to this run; step 4 is saved in",
        "run.rescued",
    ),
}


@pytest.mark.parametrize("how", MOVES)
def test_a_run_whose_folder_changes_saves_and_says_so(how, tmp_path, monkeypatch, capfd):
    """It ended with status 0, and a list of files that did not exist."""
    change, words, where = MOVES[how]
    assert trained(tmp_path / "run", monkeypatch, change) == 1
    printed = capfd.readouterr()
    (line,) = printed.err.splitlines()
    assert words.format(tmp_path) in line
    assert line.endswith(f"; to resume: jaxshard train --resume --out {tmp_path / where}")
    assert "to resume" not in printed.out
    assert Checkpointer(tmp_path / where / "model").steps()[-1] == 4
    if how == "replaced":
        assert os.listdir(tmp_path / "run") == ["others"]
    assert command(["--resume", "--out", str(tmp_path / where)]) == 0
    assert Checkpointer(tmp_path / where / "model").steps()[-1] == 6


def test_what_is_missing_in_the_folder_is_written_anew(tmp_path, monkeypatch, capfd):
    def change(run):
        shutil.rmtree(run / "model")
        shutil.rmtree(run / "tensorboard")
        (run / "metrics.jsonl").unlink()
        (run / "config.toml").unlink()

    run = tmp_path / "run"
    assert trained(run, monkeypatch, change) == 0
    out = capfd.readouterr().out
    assert f"{run}/model was moved, deleted or replaced: earlier saves may be lost" in out
    assert f"{run}/config.toml was missing: it is written again" in out
    for name in ("metrics.jsonl", "tensorboard"):
        assert re.search(f"{run}/{name} was moved, deleted or replaced: a new file begins at step [23]\n", out)
    assert f"in {run}: model/6, metrics.jsonl, loss.png, config.toml, tensorboard\n" in out
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 6
    assert command(["--resume", "--out", str(run), "--train.steps", "7"]) == 0


def test_no_link_in_the_folder_is_followed_to_write(tmp_path, monkeypatch, capfd):
    def change(run):
        for name in ("metrics.jsonl", "tensorboard"):
            (run / name).rename(run / f"{name}.old")
        (run / "metrics.jsonl").symlink_to(tmp_path / "precious")
        (run / "tensorboard").symlink_to(tmp_path / "folder")

    (tmp_path / "precious").write_text("precious")
    (tmp_path / "folder").mkdir()
    assert trained(tmp_path / "run", monkeypatch, change) == 0
    out = capfd.readouterr().out
    for name in ("metrics.jsonl", "tensorboard"):
        assert f"{name} lacks metrics from here on (OSError: [Errno {errno.ELOOP}]" in out
    assert (tmp_path / "precious").read_text() == "precious"
    assert os.listdir(tmp_path / "folder") == []


def test_the_list_of_files_has_only_those_that_exist(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("jaxshard.apps.trainer.summary.draw", lambda *_: None)
    assert command([*SMALL, "--out", str(tmp_path / "run")]) == 0
    assert "/run: model/6, metrics.jsonl, config.toml, tensorboard; missing: loss.png\n" in capfd.readouterr().out


def test_events_on_a_full_disk_do_not_stop_a_run(tmp_path, monkeypatch):
    """tensorboardX's thread ended at the first error; after ten more events the run waited for it, for ever."""
    told = []

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Recorder({"tensorboard": lambda: TensorBoard(RunFolder(tmp_path), 0, told.append)}, told.append) as recorder:
        monkeypatch.setattr(EventsWriter, "write_event", full)
        for step in range(30):
            recorder.write(step, {"loss": 1.0})
        monkeypatch.undo()
    (line,) = told
    assert line.startswith("tensorboard lacks metrics from here on (OSError: [Errno 28] No space left on device)")


def test_a_folder_is_known_by_any_name(tmp_path, monkeypatch):
    folder, other = tmp_path / "a", tmp_path / "b"
    folder.mkdir()
    watch = FolderWatch(folder)
    assert watch.where() == folder
    folder.rename(other)
    assert watch.where() == other
    folder.symlink_to(other)
    assert watch.where() == folder
    folder.unlink()
    folder.mkdir()
    assert watch.where() == other
    with monkeypatch.context() as elsewhere:  # where the system does not say where an open folder is
        elsewhere.setattr(folder_watch, "_path_of", lambda handle: None)
        assert watch.where() is None
    other.rmdir()
    assert watch.where() is None
    watch.close()
