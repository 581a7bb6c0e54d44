"""One run at a time writes in a folder, also where its lock or its notes were taken away."""

import contextlib
import gc
import json
import os
import shutil
import stat
import threading
import time

import jax.numpy as jnp
import pytest

from jaxshard.checkpoint import Checkpointer
from jaxshard.checkpoint.folder_lock import Lock
from jaxshard.checkpoint.storage import sizes

SAVED = {"w": jnp.arange(4.0)}


def run_of(folder):
    return json.loads((folder / "run.json").read_text())["id"]


def test_a_lock_that_was_taken_away_is_found_and_taken_again(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, SAVED, blocking=True)
        run = run_of(tmp_path)
        (tmp_path / ".lock").unlink()
        checkpoints.save(2, SAVED, blocking=True)
        with Checkpointer(tmp_path) as other, pytest.raises(OSError, match="is writing checkpoints here"):
            other.save(3, SAVED)
        assert checkpoints.steps() == [1, 2]
        assert checkpoints.info(2)["run"] == run_of(tmp_path) == run


@pytest.mark.parametrize("replaced", [False, True])
def test_two_writers_never_both_hold_it(tmp_path, replaced):
    """The first finds at its next save that another run writes now; when that one ends, it goes on."""
    with Checkpointer(tmp_path) as first:
        first.save(1, SAVED, blocking=True)
        (tmp_path / ".lock").unlink()
        if replaced:
            (tmp_path / ".lock").touch()
        with Checkpointer(tmp_path) as second:
            second.save(2, SAVED, blocking=True)
            for _ in range(2):
                with pytest.raises(OSError, match=rf"\(process {os.getpid()} on .*\) is writing checkpoints here"):
                    first.save(3, SAVED)
            second.save(3, SAVED, blocking=True)
        with pytest.raises(ValueError, match="step 0 is older than 3"):
            first.save(0, SAVED)
        first.save(4, SAVED, blocking=True)
        assert first.steps() == [2, 3, 4]


def test_who_has_lost_the_lock_deletes_nothing(tmp_path):
    with Checkpointer(tmp_path, keep_last=1) as first:
        first.save(1, SAVED, blocking=True)
        first.save(2, SAVED)
        (tmp_path / ".lock").unlink()
        with Checkpointer(tmp_path) as second:
            first.wait()
            assert second.steps() == [1, 2]


@pytest.mark.parametrize("notes", [None, "", "{", "[]", "[" * 10**5, '{"id": 7}'])
def test_notes_that_were_lost_are_written_again(tmp_path, notes):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, SAVED, blocking=True)
        run = run_of(tmp_path)
        if notes is None:
            (tmp_path / "run.json").unlink()
            checkpoints.save(2, SAVED, blocking=True)
            assert run_of(tmp_path) == run
        else:
            (tmp_path / "run.json").write_text(notes)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, SAVED, blocking=True)
        assert len(run_of(tmp_path)) == 32


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: sparse(path)])
def test_notes_that_never_end_are_not_read(tmp_path, make):
    make(tmp_path / "run.json")
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, SAVED, blocking=True)
        assert len(run_of(tmp_path)) == 32
    assert stat.S_ISREG((tmp_path / "run.json").lstat().st_mode)


def sparse(path):
    path.touch()
    os.truncate(path, 2**40)


def test_a_folder_that_was_deleted_is_made_again_for_the_same_run(tmp_path):
    with Checkpointer(tmp_path / "runs") as checkpoints:
        checkpoints.save(1, SAVED, blocking=True)
        run = run_of(tmp_path / "runs")
        shutil.rmtree(tmp_path / "runs")
        checkpoints.save(2, SAVED, blocking=True)
        assert run_of(tmp_path / "runs") == run
        assert checkpoints.steps() == [2]


def test_a_full_disk_leaves_the_notes(tmp_path, monkeypatch):
    lock = Lock(tmp_path)
    lock.release()
    before = (tmp_path / "run.json").read_text()

    def full(number):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*/run\.json'"):
            Lock(tmp_path)
    assert (tmp_path / "run.json").read_text() == before
    assert sorted(os.listdir(tmp_path)) == [".lock", "run.json"]
    assert Lock(tmp_path).run == lock.run  # and the lock is free


def test_a_checkpointer_that_nobody_holds_keeps_the_folder_until_it_has_saved(tmp_path, monkeypatch):
    """It gave up the lock, and the next one deleted what it was writing, in silence."""
    go, listed = threading.Event(), sizes.listed

    def late(folder):
        assert go.wait(60)
        return listed(folder)

    monkeypatch.setattr(sizes, "listed", late)  # what is written is read back: then it is saved
    Checkpointer(tmp_path).save(1, SAVED)
    gc.collect()
    with pytest.raises(OSError, match=r"this program \(process \d+ on .*\) is writing .*; close\(\) its other"):
        Checkpointer(tmp_path).save(2, SAVED)
    go.set()
    with Checkpointer(tmp_path) as checkpoints:
        for _ in range(200):
            with contextlib.suppress(OSError):
                checkpoints.save(2, SAVED, blocking=True)
                break
            gc.collect()
            time.sleep(0.05)
        assert checkpoints.steps() == [1, 2]
