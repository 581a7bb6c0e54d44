"""Small files that others may have written: kinds, sizes, and what never ends."""

import json
import os
import threading

import pytest
from clock import at_most

from jaxshard.apps.huggingface import hf_folder
from jaxshard.system import small_files


@pytest.fixture
def place(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.mknod(tmp_path / "socket", 0o140600)
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "large").write_bytes(b"")
    os.truncate(tmp_path / "large", 2**40)
    (tmp_path / "small").write_bytes(b"[1, 2]")
    (tmp_path / "link").symlink_to("small")
    return tmp_path


KINDS = {"pipe": "a pipe", "socket": "a socket", "folder": "a folder", "zero": "a device"}


def test_small_files_are_bounded(place):
    for read in (small_files.read, small_files.check):
        with at_most(5):
            for name, words in {
                "pipe": "a pipe",
                "socket": "a socket",
                "folder": "a folder",
                "zero": "a device",
            }.items():
                with pytest.raises(OSError, match=f"it is {words}, not a file"):
                    read(place / name, 100)
            with pytest.raises(OSError, match="it has more than 100 bytes"):
                read(place / "large", 100)
            for name in ("loop", "nowhere"):
                with pytest.raises(OSError, match=name):
                    read(place / name, 100)
    assert small_files.read_json(place / "link", 6) == [1, 2]
    with pytest.raises(OSError, match="it has more than 5 bytes"):
        small_files.read(place / "small", 5)
    (place / "deep").write_bytes(b"[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        small_files.read_json(place / "deep", 10**6)


def test_a_pipe_is_read_where_it_may_be_and_not_waited_for(place):
    writer = threading.Thread(target=lambda: (place / "pipe").write_bytes(b"x" * 200_000))
    writer.start()
    assert len(small_files.read(place / "pipe", 10**6, pipes=True)) == 200_000
    writer.join()
    with at_most(10), pytest.raises(TimeoutError, match="it sent nothing within 2 s"):
        small_files.read(place / "pipe", 10**6, pipes=True)


def test_what_a_run_keeps_of_a_start_is_the_starts_own(tmp_path):
    """A link to a file of the user's would be copied to the run, and to what it exports."""
    (tmp_path / "secret").write_text("a key")
    cache, plain = tmp_path / "models--x" / "snapshots" / "0a", tmp_path / "plain"
    for folder in (cache, plain, tmp_path / "models--x" / "blobs"):
        folder.mkdir(parents=True)
    (tmp_path / "models--x" / "blobs" / "b1").write_text("{}")
    (cache / "config.json").symlink_to("../../blobs/b1")
    (plain / "config.json").write_text(json.dumps({}))
    for folder in (cache, plain):
        hf_folder.keep(folder, tmp_path / f"kept {folder.name}")
        assert (tmp_path / f"kept {folder.name}" / "config.json").read_text() == "{}"
        (folder / "vocab.json").symlink_to(tmp_path / "secret")
        with pytest.raises(OSError, match=r"it is a link to .*secret: replace it by the file itself"):
            hf_folder.keep(folder, tmp_path / f"kept {folder.name}")
        assert not (tmp_path / f"kept {folder.name}" / "vocab.json").exists()
