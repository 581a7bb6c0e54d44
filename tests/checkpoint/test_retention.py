"""What is kept holds for every run that opens the folder, and deleting what is too much takes nobody's time."""

import shutil
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.checkpoint import Best, Checkpointer, writer

SAVED = {"w": jnp.arange(4.0)}


def made(folder, count, losses=None):
    """A folder with steps 1 to `count`, as runs leave it that keep all."""
    with Checkpointer(folder, keep_last=10**6) as checkpoints:
        for step in range(1, count + 1):
            checkpoints.save(step, SAVED, metrics=losses and {"loss": losses[step - 1]})
    return folder


def copies(folder, count):
    """Folders like those of steps 1 to `count`, soon made."""
    made(folder, 1)
    for step in range(2, count + 1):
        (folder / str(step)).mkdir()
        for name in ("commit_success.txt", "_CHECKPOINT_METADATA"):
            (folder / str(step) / name).hardlink_to(folder / "1" / name)


@pytest.fixture
def slow_deletion(monkeypatch):
    """No folder is deleted until the event is set."""
    go, delete = threading.Event(), shutil.rmtree

    def late(path, *rest, **options):
        if "deleted" in str(path):
            assert go.wait(60)
        return delete(path, *rest, **options)

    monkeypatch.setattr(shutil, "rmtree", late)
    yield go
    go.set()


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_what_a_killed_run_left_is_pruned_when_the_next_one_opens_the_folder(tmp_path):
    made(tmp_path, 6)
    with Checkpointer(tmp_path, keep_last=2) as checkpoints:
        assert checkpoints.steps() == [1, 2, 3, 4, 5, 6]  # who only reads deletes nothing
        checkpoints.claim()
        assert checkpoints.steps() == [5, 6]
    assert names(tmp_path) == ["5", "6"]


def test_the_best_are_kept_then_too(tmp_path):
    made(tmp_path, 6, losses=[5.0, 1.0, 4.0, 0.5, 3.0, 2.0])
    with Checkpointer(tmp_path, keep_last=1, keep_best=Best("loss", 2)) as checkpoints:
        checkpoints.claim()
        assert checkpoints.steps() == [2, 4, 6]


def test_a_step_whose_metrics_cannot_be_read_now_may_be_the_best_and_is_kept(tmp_path):
    made(tmp_path, 4, losses=[1.0, 2.0, 3.0, 4.0])
    (tmp_path / "1" / "_CHECKPOINT_METADATA").write_text("{")
    with Checkpointer(tmp_path, keep_last=1, keep_best=Best("loss")) as checkpoints:
        checkpoints.claim()
        assert checkpoints.steps() == [1, 2, 4]


def test_pruning_thousands_takes_no_time(tmp_path, slow_deletion):
    """Their folders are renamed at once and deleted by a thread."""
    copies(tmp_path, 2000)
    with Checkpointer(tmp_path, keep_last=2) as checkpoints:
        start = time.process_time()
        checkpoints.claim()
        assert time.process_time() - start < 1
        checkpoints.save(2001, SAVED)
        checkpoints.wait()
        assert len(checkpoints.steps()) <= 500  # or all, where renaming takes less than half a second in all
        for step in range(2002, 2006):
            checkpoints.save(step, SAVED)
        checkpoints.wait()
        assert checkpoints.steps() == [2004, 2005]
        slow_deletion.set()
    assert names(tmp_path) == ["2004", "2005"]


def test_where_renaming_is_slow_each_save_does_a_part(tmp_path, monkeypatch):
    made(tmp_path, 8)
    ticks = iter(range(10**6))
    monkeypatch.setattr(writer.time, "monotonic", lambda: 0.2 * next(ticks))
    with Checkpointer(tmp_path, keep_last=1) as checkpoints:
        checkpoints.claim()
        assert checkpoints.steps() == [3, 4, 5, 6, 7, 8]
        checkpoints.save(9, SAVED, blocking=True)
        assert checkpoints.steps() == [5, 6, 7, 8, 9]


def test_a_deletion_that_was_cut_off_is_finished_by_the_next_run(tmp_path, slow_deletion):
    made(tmp_path, 2)
    for name in ("7.deleted.0a1b2c3d", "8.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("x")
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(8, SAVED)  # does not wait for the deletion of what has its name
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2, 8]
        slow_deletion.set()
    assert names(tmp_path) == ["1", "2", "8"]


def test_what_cannot_be_deleted_is_told(tmp_path, monkeypatch):
    made(tmp_path, 3)

    def refuse(path, *rest, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    checkpoints = Checkpointer(tmp_path, keep_last=2)
    checkpoints.claim()
    with pytest.warns(UserWarning, match="an old checkpoint could not be deleted: .*Permission denied"):
        checkpoints.close()
    assert Checkpointer(tmp_path).steps() == [2, 3]


def test_a_save_waits_for_deletions_only_where_the_disk_is_full(tmp_path, monkeypatch, slow_deletion):
    usage = shutil.disk_usage(tmp_path)
    made(tmp_path, 3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**9 if slow_deletion.is_set() else 7))
    with Checkpointer(tmp_path, keep_last=1) as checkpoints:
        checkpoints.claim()
        threading.Timer(0.5, slow_deletion.set).start()
        checkpoints.save(4, SAVED, blocking=True)
        assert checkpoints.steps() == [4]


def test_a_save_that_failed_can_be_tried_again(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, SAVED, blocking=True)
        with monkeypatch.context() as patch:
            patch.setattr("os.rename", refuse_commit)
            patch.setattr("os.replace", refuse_commit)
            checkpoints.save(2, SAVED)
            with pytest.raises(OSError, match="checkpoint 2 was not saved"):
                checkpoints.wait()
        assert names(tmp_path) == ["1", "2.orbax-checkpoint-tmp"]
        checkpoints.save(2, SAVED, blocking=True)
        assert checkpoints.steps() == [1, 2]
    assert names(tmp_path) == ["1", "2"]


def refuse_commit(*paths, **options):
    raise OSError(5, "Input/output error")


def test_metrics_of_a_second_save_of_the_step_count(tmp_path):
    """They were dropped, and the best checkpoint was deleted."""
    with Checkpointer(tmp_path, keep_last=1, keep_best=Best("loss")) as checkpoints:
        checkpoints.save(1, SAVED, metrics={"step": 1, "loss": 9.0})
        checkpoints.save(1, SAVED, metrics={"loss": 0.1}, blocking=True)
        assert checkpoints.info(1)["metrics"] == {"step": 1.0, "loss": 0.1}
        checkpoints.save(1, SAVED)
        checkpoints.verify(1)
        for step in (2, 3):
            checkpoints.save(step, SAVED, metrics={"loss": 0.5})
    assert Checkpointer(tmp_path).steps() == [1, 3]


def test_a_metric_that_keep_best_does_not_find_is_told_before_anything_is_deleted(tmp_path):
    with Checkpointer(tmp_path, keep_last=1, keep_best=Best("los")) as checkpoints:
        with pytest.raises(ValueError, match=r"keep_best needs the metric 'los', but metrics has \['loss'\]"):
            checkpoints.save(1, SAVED, metrics={"loss": 1.0})
        assert checkpoints.steps() == []
        checkpoints.save(1, SAVED)
        with pytest.warns(UserWarning, match="keep_best keeps nothing: no checkpoint has the metric 'los'"):
            checkpoints.save(2, SAVED, blocking=True)
    for wrong in (None, "", 3):
        with pytest.raises(ValueError, match="keep_best has metric"):
            Checkpointer(tmp_path, keep_best=Best(wrong))
    assert Checkpointer(tmp_path, keep_last=np.int64(3)).steps() == [2]
