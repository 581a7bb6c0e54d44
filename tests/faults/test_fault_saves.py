"""Several processes that save: all the same, or nothing."""

import contextlib
import re
import subprocess

import pytest
from group import Group, program


def test_two_processes_save_and_restore_together(tmp_path):
    with Group(program("saved_and_restored", tmp_path / "ck"), tmp_path) as group:
        assert group.wait() == [0, 0], group.text()
    assert all("whole" in group.log(i) for i in range(2))


@pytest.mark.parametrize("what", ["steps", "trees", "one"])
def test_processes_that_save_other_things_are_refused(tmp_path, what):
    """F19, F20, F21."""
    with Group(program("other_saves", tmp_path / "ck", what), tmp_path) as group:
        group.wait()
    logs = [group.log(i) for i in range(2)]
    if what == "one":
        assert "refused: TimeoutError save: not all 2 processes came within 5 s" in logs[0], group.text()
    else:
        words = {"steps": "'step 2', process 0 'step 1'", "trees": "'v float32[4]', process 0 'w float32[4]'"}[what]
        assert all(f"refused: ProcessError process 1: save: it has {words}" in log for log in logs), group.text()
    assert not list(tmp_path.glob("ck/1*"))


@contextlib.contextmanager
def small_disk(folder):
    """A file system of 6 MB, where this user may mount one; else nothing, and the reason why."""
    folder.mkdir()
    tried = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        yield tried.stderr
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


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
