"""Files that are on the disk before they have their name, and links that nothing follows."""

import contextlib
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest
from syncs import Recorder

from jaxshard.system import files


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


@pytest.fixture
def precious(tmp_path):
    """A folder beside the one that is written to; nothing in it may ever change."""
    folder = tmp_path / "precious"
    (folder / "deep").mkdir(parents=True)
    (folder / "file").write_text("precious")
    yield folder
    assert sorted(path.name for path in folder.rglob("*")) == ["deep", "file"]
    assert (folder / "file").read_text() == "precious"


@pytest.fixture
def place(tmp_path):
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


# What is on the disk.


@pytest.mark.parametrize("content", ["text", b"text", lambda file: file.write(b"text")])
def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_after(place, recorder, content):
    (place / "x").write_text("before")
    files.replace(place / "x", content)
    assert (place / "x").read_bytes() == b"text"
    kinds = [event[0] for event in recorder.events]
    assert kinds == ["sync", "rename", "sync"]
    assert recorder.events[0][1] == recorder.identity(place / "x")
    assert recorder.events[2][1] == recorder.identity(place)
    assert os.listdir(place) == ["x"]


def test_what_a_user_names_for_output_is_written_and_synced(place, recorder):
    (place / "link").symlink_to("there")
    files.overwrite(place / "link", "text")
    assert (place / "link").is_symlink()
    assert (place / "there").read_text() == "text"
    assert recorder.synced() == {recorder.identity(place / "there"), recorder.identity(place)}
    files.overwrite(type(place)("/dev/null"), "text")


def test_folders_that_are_made_are_on_the_disk_with_those_above(place, recorder):
    files.make_folder(place / "a" / "b")
    assert recorder.synced() == {recorder.identity(path) for path in (place, place / "a")}


def test_a_whole_tree_is_synced_and_no_link_is_followed(place, precious, recorder):
    (place / "a" / "b").mkdir(parents=True)
    (place / "skipped").mkdir()
    (place / "a" / "skipped").mkdir()
    for name in ("x", "a/y", "a/b/z", "skipped/w", "a/skipped/v"):
        (place / name).write_text(name)
    os.mkfifo(place / "pipe")
    (place / "link").symlink_to(precious)
    (place / "to a file").symlink_to(precious / "file")
    files.sync_tree(place, but=["skipped"])
    names = ("", "x", "a", "a/y", "a/b", "a/b/z", "a/skipped", "a/skipped/v")
    assert recorder.synced() == {recorder.identity(place / name) for name in names}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("what", [stat.S_ISREG, stat.S_ISDIR])
def test_a_disk_that_could_not_take_it_is_an_error_with_the_path(place, recorder, number, what):
    (place / "x").write_text("before")
    recorder.fail(number, what)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        files.replace(place / "x", "after")
    assert (raised.value.errno, raised.value.filename) == (number, str(place / "x"))
    assert os.listdir(place) == ["x"]
    if what is stat.S_ISREG:
        assert (place / "x").read_text() == "before"
    with pytest.raises(OSError, match=os.strerror(number)):
        files.sync_tree(place)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_syncs_no_folders_is_no_error(place, recorder, number):
    recorder.fail(number, stat.S_ISDIR)
    files.replace(place / "x", "after")
    files.sync_tree(place)
    recorder.fail(number, stat.S_ISREG)
    with pytest.raises(OSError, match="x"):
        files.replace(place / "x", "again")
    assert (place / "x").read_text() == "after"


def test_a_folder_that_may_not_be_read_is_written_to(place):
    """By a user who is bound by modes; root is not."""
    place.chmod(0o333)
    code = (
        "import os, pathlib; from jaxshard.system import files\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "files.replace(pathlib.Path('place', 'x'), 'text')\n"
    )
    place.parent.chmod(0o711)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=place.parent)
    place.chmod(0o755)
    assert (place / "x").read_text() == "text"


# Links.


def test_a_link_is_replaced_and_never_written_through(place, precious):
    for target in (precious / "file", precious / "new", precious):
        (place / "x").unlink(missing_ok=True)
        (place / "x").symlink_to(target)
        files.replace(place / "x", "mine")
        assert not (place / "x").is_symlink()
        assert (place / "x").read_text() == "mine"


def test_nothing_is_appended_through_a_link_or_to_what_is_no_file(place, precious):
    (place / "x").symlink_to(precious / "file")
    (place / "new").symlink_to(precious / "new")
    os.mkfifo(place / "pipe")
    for name in ("x", "new", "pipe"):
        with pytest.raises(OSError, match=name):
            files.append(place / name)
    with files.append(place / "mine") as file:
        file.write(b"a")
    with files.append(place / "mine") as file:
        file.write(b"b")
    assert (place / "mine").read_text() == "ab"


def test_of_a_link_the_link_alone_is_deleted(place, precious):
    os.mkfifo(place / "pipe")
    (place / "file").write_text("x")
    (place / "folder").mkdir()
    for name in ("link", "folder/link"):
        (place / name).symlink_to(precious)
    for path in list(place.iterdir()):
        files.delete(path)
    assert not os.listdir(place)


def test_names_of_new_files_cannot_be_guessed_and_are_never_taken_over(place, precious, monkeypatch):
    """Even where a name is known, a link that was planted there is an error, not a way out."""
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "0f" * count)
    name = f".jaxshard-{24 * '0f'}"[: len(".jaxshard-") + 24]
    (place / name).symlink_to(precious / "file")
    with pytest.raises(FileExistsError):
        files.replace(place / "x", "mine")
    with pytest.raises(FileExistsError), files.workplace(place):
        raise AssertionError
    (place / name).unlink()
    (place / f"{name}.d").symlink_to(precious)
    with pytest.raises(FileExistsError), files.workplace(place):
        raise AssertionError


def test_a_file_takes_no_name_that_another_has(place, monkeypatch):
    def no_links(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    for how in (os.link, no_links):
        monkeypatch.setattr(os, "link", how)
        (place / "new").write_text("new")
        (place / "taken").write_text("taken")
        with pytest.raises(FileExistsError):
            files.publish(place / "new", place / "taken")
        files.publish(place / "new", place / "free")
        assert (place / "taken").read_text() == "taken"
        assert (place / "free").read_text() == "new"
        assert sorted(os.listdir(place)) == ["free", "taken"]
        (place / "free").unlink()


# What a killed process leaves.

_WRITES = """
import pathlib, sys, time
from jaxshard.system import files
def wait(file):
    print("writes", flush=True)
    time.sleep(60)
path = pathlib.Path(sys.argv[1])
if sys.argv[2] == "file":
    files.replace(path / "x", wait)
with files.workplace(path) as place:
    (place / "new").mkdir()
    (place / "new" / "y").write_text("y")
    wait(None)
"""


@pytest.mark.parametrize("what", ["file", "folder"])
def test_the_next_writer_deletes_what_a_killed_one_left_and_nothing_of_a_living_one(place, precious, what):
    command = [sys.executable, "-c", _WRITES, str(place), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        left = sorted(os.listdir(place))
        assert len(left) == (1 if what == "file" else 2)
        assert all(map(files.is_temporary, left))
        files.replace(place / "mine", "mine")
        assert sorted(os.listdir(place)) == sorted([*left, "mine"])
        process.send_signal(signal.SIGKILL)
    files.replace(place / "mine", "mine")
    assert os.listdir(place) == ["mine"]


def test_what_only_looks_like_ours_is_left_alone(place, precious):
    """Links, pipes and folders that no file of ours stands beside."""
    names = [f".jaxshard-{number:024x}" for number in range(4)]
    (place / names[0]).symlink_to(precious / "file")
    os.mkfifo(place / names[1])
    (place / names[2]).mkdir()
    (place / f"{names[3]}.d").mkdir()
    with files.workplace(place):
        pass
    assert sorted(os.listdir(place)) == [*names[:3], f"{names[3]}.d"]


def test_a_link_beside_a_file_that_was_left_is_not_followed(place, precious):
    name = f".jaxshard-{7:024x}"
    (place / name).write_text("")
    (place / f"{name}.d").symlink_to(precious)
    files.replace(place / "x", "mine")
    assert os.listdir(place) == ["x"]


def test_many_writers_at_once_never_lose_a_file(place):
    code = (
        "import pathlib, sys; from jaxshard.system import files\n"
        "for i in range(100): files.replace(pathlib.Path(sys.argv[1]) / sys.argv[2], f'{i}')\n"
    )
    command = [sys.executable, "-c", code, str(place)]
    processes = [subprocess.Popen([*command, str(number % 2)]) for number in range(4)]
    end = time.monotonic() + 60
    assert [process.wait(max(1, end - time.monotonic())) for process in processes] == [0] * 4
    assert sorted(os.listdir(place)) == ["0", "1"]
    assert {(place / name).read_text() for name in "01"} == {"99"}


def test_a_new_file_that_another_writer_takes_for_a_dead_ones_is_made_again(place, monkeypatch):
    """It has the lock before the maker of the file has, and deletes the file a little later."""
    opened, taken = os.open, []

    def open_and_lose(path, flags, *mode, **options):
        number = opened(path, flags, *mode, **options)
        if flags & os.O_CREAT and not taken:
            taken.append(opened(path, os.O_RDWR, **options))
            fcntl.flock(taken[0], fcntl.LOCK_EX)
            folder = os.dup(options["dir_fd"])
            threading.Timer(0.2, lambda: (os.unlink(path, dir_fd=folder), os.close(taken[0]))).start()
        return number

    monkeypatch.setattr(os, "open", open_and_lose)
    files.replace(place / "x", "mine")
    assert taken
    assert os.listdir(place) == ["x"]
    assert (place / "x").read_text() == "mine"


def test_a_place_to_work_is_empty_ours_alone_and_gone_at_its_end(place):
    with files.workplace(place) as made:
        assert made.parent == place
        assert not os.listdir(made)
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        (made / "x").write_text("x")
    with contextlib.suppress(KeyError), files.workplace(place) as made:
        (made / "deep").mkdir()
        (made / "deep" / "link").symlink_to(place)
        raise KeyError
    assert not os.listdir(place)
