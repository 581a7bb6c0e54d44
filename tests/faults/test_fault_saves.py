"""Several processes that save: all the same, or nothing."""

import contextlib
import re
import subprocess

import jax.numpy as jnp
import pytest
from group import Group, program

from jaxshard.checkpoint import Checkpointer


@pytest.mark.parametrize("name", ["ck", "ck[1]"])
def test_two_processes_save_and_restore_together(tmp_path, name):
    """Also under a path that orbax misreads (F27)."""
    with Group(program("saved_and_restored", tmp_path / name), tmp_path) as group:
        assert group.wait() == [0, 0], group.text()
    assert all("whole" in group.log(i) for i in range(2))


@pytest.mark.parametrize("what", ["steps", "trees", "one", "no step"])
def test_processes_that_save_other_things_are_refused(tmp_path, what):
    """F19, F20, F21."""
    with Group(program("other_saves", tmp_path / "ck", what), tmp_path) as group:
        group.wait()
    logs = [group.log(i) for i in range(2)]
    assert not list(tmp_path.glob("ck/1*"))
    if what == "one":
        assert "refused: TimeoutError save: not all 2 processes made this call within 5 s" in logs[0], group.text()
        return
    assert all("then None" in log for log in logs), group.text()
    if what == "no step":
        assert "refused: ProcessError process 1: ValueError: checkpoint: step -9 must be" in logs[0]
        assert "refused: ValueError checkpoint: step -9 must be an integer, 0 or more" in logs[1]
    else:
        words = {"steps": ("'step 2'", "'step 1'"), "trees": ("'v float32[4]'", "'w float32[4]'")}[what]
        said = "refused: ProcessError process 1: save: this process has {}, process 0 has {}".format(*words)
        assert all(said in log for log in logs), group.text()


@pytest.mark.parametrize("bad", [0, 1])
def test_what_one_process_cannot_read_both_refuse(tmp_path, bad):
    """F75: EIO, EACCES and EMFILE on the index, the list of arrays and an array, of one process only."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o755)
    with Group(program("one_cannot_read", tmp_path / "ck", bad), tmp_path) as group:
        assert group.wait() == [0, 0], group.text()
    for i in range(2):
        cases = group.log(i).split("case ")[1:]
        assert len(cases) == 9
        for case in cases:
            kind = {"disk": "EIO", "rights": "EACCES", "too": "EMFILE"}[case.partition("_")[0]]
            assert case.count("refused") == case.count(kind) == 2, group.text()
            assert "restored" not in case, group.text()
            assert "then 20\n" in case, group.text()
        assert "steps 10 20\n" in group.log(i), group.text()


def mount(*arguments):
    """None, or the reason why this user may not."""
    tried = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    return tried.stderr if tried.returncode else None


@contextlib.contextmanager
def small_disk(folder):
    """A file system of 6 MB, where this user may mount one; else nothing, and the reason why."""
    folder.mkdir()
    refusal = mount("-t", "tmpfs", "-o", "size=6m", "tmpfs", folder)
    try:
        yield refusal
    finally:
        if refusal is None:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_folder_that_is_only_for_reading_is_told_and_still_read(tmp_path):
    """F23: by the mount, or by its mode for a user who is bound by modes."""
    folder, tree = tmp_path / "disk", {"w": jnp.arange(4.0)}
    with small_disk(folder) as refusal:
        with Checkpointer(folder) as checkpoints:
            checkpoints.save(1, tree)
        if refusal or mount("-o", "remount,ro", folder):
            folder.chmod(0o555)
        before = sorted(path.name for path in folder.iterdir())
        with Checkpointer(folder) as checkpoints:
            with pytest.raises(OSError, match=r"Read-only|Permission denied"):
                checkpoints.save(2, tree)
            assert checkpoints.restore(tree)[0] == 1
        assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", ["limit", "disk"])
def test_a_full_disk_is_named_by_every_process_and_the_old_step_loads(tmp_path, how, count):
    """F9: it fails while the save is under way."""
    words = {"limit": "File too large", "disk": "no space left on the disk"}[how]
    with small_disk(tmp_path / "disk") if how == "disk" else contextlib.nullcontext() as refusal:
        if refusal:
            how, words = "limit", "File too large"
        with Group(program("disk_full", tmp_path / "disk" / "ck", count, how), tmp_path, count) as group:
            assert group.wait() == [0] * count, group.text()
    for index in range(count):
        log = group.log(index)
        assert re.search(f"refused: .* checkpoint 2 was not saved: .*{words}", log), group.text()
        assert float(re.search(r"seconds ([\d.]+)", log)[1]) < 30
        assert "restored 1" in log
