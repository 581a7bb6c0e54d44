"""What is saved is on the disk before it is reported, and before an older step goes. The power is really cut in
`tests/faults/test_fault_cuts.py`."""

import errno
import os
import re
import stat
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from syncs import Recorder

from jaxshard.checkpoint import Best, Checkpointer
from jaxshard.checkpoint.storage import orbax_store

TREE = {"w": np.arange(3000.0, dtype="f"), "v": jnp.ones((5, 5)), "n": 3}


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


def rows_of(recorder, kind):
    return [number for number, event in enumerate(recorder.events) if event[0] == kind]


def everything(folder, recorder):
    return {recorder.identity(path) for path in (folder, *folder.rglob("*"))}


def renamed(recorder, target):
    """When a folder got this name."""
    return next(
        n
        for n, event in enumerate(recorder.events)
        if event[0] == "rename" and re.fullmatch(target, Path(event[2]).name)
    )


def saved(recorder, path, step, blocking, **options):
    """The identities of all files and folders of a step, as it was when it got its name."""
    with Checkpointer(path, **options) as checkpoints:
        checkpoints.save(step, TREE, blocking=blocking)
        if not blocking:
            checkpoints.wait()
        reported = len(recorder.events)
        return everything(path / str(step), recorder), reported


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("name", ["runs", "runs[1]"])
def test_a_step_is_on_the_disk_before_it_has_its_name_and_its_name_before_it_is_reported(
    tmp_path, recorder, name, blocking
):
    """Also under a path that orbax misreads. Nothing of orbax's is left out: the index, the commit, the folders."""
    path = tmp_path / "new" / name
    whole, reported = saved(recorder, path, 1, blocking)
    events, at = recorder.events, renamed(recorder, "1")
    synced = {event[1] for event in events[:at] if event[0] == "sync"}
    assert whole <= synced
    assert len(whole) > 10
    after = [event[1] for event in events[at:reported] if event[0] == "sync"]
    assert recorder.identity(path) in after
    assert {recorder.identity(folder) for folder in (tmp_path, tmp_path / "new")} <= synced  # new folders' names


@pytest.mark.parametrize("blocking", [True, False])
def test_an_older_step_goes_after_the_newer_ones_name_is_on_the_disk(tmp_path, recorder, blocking):
    with Checkpointer(tmp_path, keep_last=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, TREE, blocking=blocking)
    named, gone = renamed(recorder, "2"), renamed(recorder, r"1\.deleted\..*")
    folder = ("sync", recorder.identity(tmp_path))
    assert folder in recorder.events[named:gone]
    first = next(
        n for n, event in enumerate(recorder.events) if event[0] == "delete" and Path(event[1]).name.startswith("1.")
    )
    assert folder in recorder.events[gone:first]  # and its new name before its files go: no half of a step is left
    assert checkpoints.steps() == [2]


def test_steps_of_a_process_that_was_killed_have_their_names_before_older_ones_go(tmp_path, recorder):
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, TREE, blocking=True)
    recorder.events.clear()
    with Checkpointer(tmp_path, keep_last=1) as checkpoints:
        checkpoints.claim()
    gone = renamed(recorder, r"1\.deleted\..*")
    syncs = [n for n in rows_of(recorder, "sync") if recorder.events[n][1] == recorder.identity(tmp_path)]
    last_replaced = renamed(recorder, "run.json")
    assert any(last_replaced + 1 < n < gone for n in syncs)


def test_the_same_step_saved_again_is_synced_once_more(tmp_path, recorder):
    """A process may have ended between the rename and the report."""
    whole, _ = saved(recorder, tmp_path, 1, True)
    recorder.events.clear()
    saved(recorder, tmp_path, 1, True)
    assert whole <= recorder.synced()
    assert recorder.identity(tmp_path) in recorder.synced()


def test_metrics_and_names_of_what_is_put_aside_are_synced(tmp_path, recorder):
    saved(recorder, tmp_path, 1, True)
    recorder.events.clear()
    with Checkpointer(tmp_path, keep_best=Best("loss", 1)) as checkpoints:
        checkpoints.save(1, TREE, metrics={"loss": 1.0}, blocking=True)
        assert recorder.identity(tmp_path / "1" / "_CHECKPOINT_METADATA") in recorder.synced()
        assert checkpoints.info(1)["metrics"] == {"loss": 1.0}
        (tmp_path / "2" / "state").mkdir(parents=True)
        checkpoints.save(2, TREE, metrics={"loss": 1.0}, blocking=True)
    aside = renamed(recorder, r"2\.uncommitted\..*")
    assert ("sync", recorder.identity(tmp_path)) in recorder.events[aside : renamed(recorder, "2")]


# A disk that cannot take it.


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("what", ["a file", "a folder", "the name", "the name, twice"])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_save_that_cannot_be_synced_has_failed(tmp_path, monkeypatch, recorder, what, blocking, number):
    """With the error; no step has its name, the older one stays, and the next save of the step works."""
    with Checkpointer(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, TREE, blocking=True)
        fail_at(recorder, tmp_path, what, number)
        with monkeypatch.context() as patch:
            if what == "the name, twice":  # nor can it get its first name back
                patch.setattr(Path, "rename", once_only(Path.rename))
            if not blocking:
                checkpoints.save(2, TREE)
            with pytest.raises(OSError, match=rf"checkpoint 2 was not saved: .*{os.strerror(number)}"):
                checkpoints.save(2, TREE, blocking=True) if blocking else checkpoints.wait()
        recorder.work()
        assert checkpoints.steps() == [1]
        assert checkpoints.restore(TREE)[0] == 1
        assert Checkpointer(tmp_path).steps() == [1]
        checkpoints.save(2, TREE, blocking=True)
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.steps() == [2]
        assert checkpoints.restore(TREE)[0] == 2


def fail_at(recorder, path, what, number):
    if what.startswith("the name"):
        recorder.fail(number, lambda mode: stat.S_ISDIR(mode) and (path / "2").exists())
    else:
        recorder.fail(number, stat.S_ISREG if what == "a file" else stat.S_ISDIR)


def once_only(rename):
    """The step's folder gets its name, and never another one by this function."""

    def renames(path, target):
        if path.name == "2" and ".orbax" in Path(target).name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    return renames


def test_nothing_is_deleted_where_its_new_name_cannot_be_synced(tmp_path, recorder):
    checkpoints = Checkpointer(tmp_path, keep_last=1)
    for step in (1, 2):
        checkpoints.save(step, TREE, blocking=True)
    recorder.fail(errno.EIO, lambda mode: stat.S_ISDIR(mode) and any(tmp_path.glob("2.deleted.*")))

    def save_and_close():  # either of the two tells it
        checkpoints.save(3, TREE, blocking=True)
        checkpoints.close()

    with pytest.warns(UserWarning, match="an old checkpoint could not be deleted: .*Input/output error"):
        save_and_close()
    assert len(list(tmp_path.glob("2.deleted.*/state"))) == 1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_syncs_no_folders_saves(tmp_path, recorder, number):
    recorder.fail(number, stat.S_ISDIR)
    with Checkpointer(tmp_path, keep_last=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, TREE)
    assert checkpoints.steps() == [2]
    assert checkpoints.restore(TREE)[0] == 2


def test_where_orbax_renames_in_another_way_the_step_is_synced_all_the_same(tmp_path, monkeypatch, recorder):
    monkeypatch.setattr(orbax_store.Written, "paths", lambda written: type(ocp_path("/")))
    whole, reported = saved(recorder, tmp_path, 1, True)
    assert {*whole, recorder.identity(tmp_path)} <= {e[1] for e in recorder.events[:reported] if e[0] == "sync"}


def ocp_path(path):
    return orbax_store.ocp.Context().file_options.path_class(path)


# Links that were planted.


@pytest.fixture
def precious(tmp_path):
    folder = tmp_path / "precious"
    (folder / "1").mkdir(parents=True)
    (folder / "file").write_text("precious")
    (folder / "1" / "file").write_text("precious")
    yield folder
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == ["1", "1/file", "file"]
    assert {path.read_text() for path in folder.rglob("file")} == {"precious"}


@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        ".run.json.PID",
        "3",
        "3.orbax-checkpoint-tmp",
        "3.orbax-checkpoint-tmp-1",
        "2.deleted.01234567",
        "1.deleted.01234567",
        "3.corrupt.01234567",
    ],
)
@pytest.mark.parametrize("target", ["", "1", "file", "new"])
def test_no_planted_link_is_written_through_or_followed_to_delete(tmp_path, precious, name, target):
    folder, name = tmp_path / "ck", name.replace("PID", str(os.getpid()))
    with Checkpointer(folder, keep_last=1) as checkpoints:
        checkpoints.save(1, TREE, blocking=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(precious / target)
    with Checkpointer(folder, keep_last=1) as checkpoints:
        for step in (2, 3, 4):
            checkpoints.save(step, TREE)
    assert checkpoints.steps() == [4]
    assert checkpoints.restore(TREE)[0] == 4


@pytest.mark.parametrize("target", ["file", "new", "1"])
def test_a_lock_that_is_a_link_is_refused(tmp_path, precious, target):
    folder = tmp_path / "ck"
    folder.mkdir()
    (folder / ".lock").symlink_to(precious / target)
    with pytest.raises(OSError, match=r"\.lock"):
        Checkpointer(folder).claim()
    assert os.listdir(folder) == [".lock"]


def test_a_step_that_is_a_link_is_read_and_not_written(tmp_path):
    """Its metrics lie elsewhere; when it is not kept any more, the link goes, and not what it points to."""
    with Checkpointer(tmp_path / "other") as checkpoints:
        checkpoints.save(1, TREE, blocking=True)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "other").rglob("*")}
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "1").symlink_to(tmp_path / "other" / "1")
    with Checkpointer(tmp_path / "ck", keep_last=1) as checkpoints:
        assert checkpoints.restore(TREE)[0] == 1
        with pytest.raises(OSError, match=r"ck/1.*link|link.*ck/1"):
            checkpoints.save(1, TREE, metrics={"loss": 1.0}, blocking=True)
        checkpoints.save(2, TREE, blocking=True)
    assert checkpoints.steps() == [2]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "other").rglob("*")} == before


def test_the_folder_itself_may_be_a_link_and_may_lie_behind_one(tmp_path):
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "ck").symlink_to(tmp_path / "disk" / "deep")
    (tmp_path / "there").symlink_to(tmp_path / "disk")
    for path in (tmp_path / "ck", tmp_path / "there" / "other"):
        with Checkpointer(path) as checkpoints:
            checkpoints.save(1, TREE, blocking=True)
        assert Checkpointer(path).restore(TREE)[0] == 1
    assert (tmp_path / "disk" / "deep" / "1").is_dir()
