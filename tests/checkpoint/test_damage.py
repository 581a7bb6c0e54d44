"""What was lost or changed on disk is told, once, and nothing older is taken for it in silence."""

import gc
import json
import logging
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_same_bits
from test_checkpointer import data_files

import jaxshard.checkpoint
from jaxshard.checkpoint import Checkpointer, CorruptCheckpointError, NewerFormatError, from_bytes, to_bytes
from jaxshard.checkpoint.storage import manifest
from jaxshard.checkpoint.storage.quiet import quietly
from jaxshard.cli import main

SAVED = {"w": jnp.arange(4096.0), "n": 3}
INDEX, MARK = "_CHECKPOINT_METADATA", "commit_success.txt"


@pytest.fixture
def saves(tmp_path):
    """A folder with the steps 10 and 20."""
    with Checkpointer(tmp_path / "saves") as checkpoints:
        checkpoints.save(10, SAVED)
        checkpoints.save(20, SAVED)
    return tmp_path / "saves"


def edited(folder, edit, seal=False):
    """Changes the index of a step; `seal`: as one who knows how to."""
    path = folder / INDEX
    whole = json.loads(path.read_text())
    edit(whole["custom_metadata"])
    if seal:
        whole["custom_metadata"].pop("digest", None)
        whole["custom_metadata"] = manifest.sealed(whole["custom_metadata"])
    path.write_text(json.dumps(whole))


# Files that are lost.


@pytest.mark.parametrize("lost", [[MARK], [INDEX], [MARK, INDEX]])
def test_a_step_that_lost_its_mark_or_index_is_passed_over_with_a_warning(saves, lost):
    for name in lost:
        (saves / "20" / name).unlink()
    with Checkpointer(saves) as checkpoints:
        with pytest.warns(UserWarning, match=f"checkpoint 20 is skipped: {' and '.join(lost)} is missing in .*20"):
            step, found = checkpoints.restore(SAVED)
        assert step == 10
        assert_same_bits({"w": found["w"]}, {"w": SAVED["w"]})
        with pytest.warns(UserWarning, match="checkpoint 20 is skipped"):
            assert jaxshard.checkpoint.read(saves)["n"] == 3
        assert checkpoints.damaged() == {20: " and ".join(lost)}
        for call in (checkpoints.info, checkpoints.verify, lambda step: checkpoints.restore(SAVED, step)):
            with pytest.raises(CorruptCheckpointError, match=f"checkpoint 20 is corrupt: {lost[0]}"):
                call(20)
        checkpoints.save(20, SAVED, blocking=True)
        assert checkpoints.restore(SAVED)[0] == 20  # and no warning
    assert len(list(saves.glob("20.uncommitted.*"))) == 1


def test_where_none_is_whole_it_is_an_error(saves):
    (saves / "20" / MARK).unlink()
    (saves / "10" / INDEX).unlink()
    for load in (lambda: Checkpointer(saves).restore(SAVED), lambda: jaxshard.checkpoint.read(saves)):
        with pytest.raises(
            CorruptCheckpointError, match=r"20 is corrupt: commit_success.txt is missing in .*no checkpoint is intact"
        ):
            load()


def test_a_save_that_was_killed_is_no_such_case(tmp_path):
    for name in ("20.orbax-checkpoint-tmp", "30", "10.deleted.0a1b2c3d"):
        (tmp_path / name).mkdir()
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        Checkpointer(tmp_path).restore(SAVED)


def test_ckpt_tells_it(saves, capsys):
    (saves / "20" / MARK).unlink()
    assert main(["ckpt", "verify", str(saves)]) == 1
    assert capsys.readouterr().out.splitlines() == ["step 10: intact", f"step 20: corrupt: {MARK} is missing"]
    assert main(["ckpt", "ls", str(saves)]) == 0
    assert f"20: not a checkpoint: damaged: {MARK} is missing" in capsys.readouterr().out
    assert main(["ckpt", "info", str(saves / "20")]) == 1
    assert f"checkpoint 20 is corrupt: {MARK} is missing" in capsys.readouterr().err
    (saves / "10" / MARK).unlink()
    assert main(["ckpt", "info", str(saves)]) == 1


# The index.


def test_a_step_is_sealed_in_its_index(saves):
    """A folder that was renamed is no checkpoint of the step that its name says."""
    (saves / "20").rename(saves / "30")
    with Checkpointer(saves) as checkpoints:
        with pytest.raises(CorruptCheckpointError, match=r"checkpoint 30 is corrupt: .* it is of step 20"):
            checkpoints.restore(SAVED, 30)
        with pytest.warns(UserWarning, match="it is of step 20.*; trying the previous one"):
            assert checkpoints.restore(SAVED)[0] == 10


@pytest.mark.parametrize("harm", ["deep", "no JSON", "NUL", "other bytes", "a list", "a number", "empty"])
def test_an_index_that_is_none_is_corrupt(saves, harm):
    data = {
        "deep": b'{"custom_metadata": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
        "no JSON": b"{",
        "NUL": bytes(300),
        "other bytes": bytes(range(256)),
        "a list": b"[]",
        "a number": b"7",
        "empty": b"",
    }[harm]
    (saves / "20" / INDEX).write_bytes(data)
    with pytest.warns(UserWarning, match="checkpoint 20 is corrupt: its index cannot be read"):
        assert Checkpointer(saves).restore(SAVED)[0] == 10


def test_what_is_sealed_is_checked_too(saves):
    """By one who knows how: then it is corrupt, and no other error."""
    wrong = [
        lambda index: index["leaves"]["w"].update(shape=[-1]),
        lambda index: index["leaves"]["w"].update(shape=[2.5]),
        lambda index: index["leaves"]["w"].update(shape="4096"),
        lambda index: index["leaves"]["w"].update(dtype="float33"),
        lambda index: index["leaves"]["w"].update(dtype=None),
        lambda index: index["leaves"]["w"].update(digest="0"),
        lambda index: index["leaves"]["w"].pop("digest"),
        lambda index: index["leaves"]["w"].update(key=7),
        lambda index: index["leaves"]["n"].update(value="three"),
        lambda index: index["leaves"]["n"].update(value=3),
        lambda index: index.update(leaves=[]),
        lambda index: index.update(metrics=[]),
        lambda index: index.update(step="20"),
        lambda index: index.pop("run"),
        lambda index: index.update(format=True),
        lambda index: index.update(format=0),
    ]
    for edit in wrong:
        with pytest.MonkeyPatch.context():
            before = (saves / "20" / INDEX).read_bytes()
            edited(saves / "20", edit, seal=True)
            with pytest.raises(CorruptCheckpointError, match="checkpoint 20 is corrupt: its index cannot be read"):
                Checkpointer(saves).info(20)
            (saves / "20" / INDEX).write_bytes(before)
    assert Checkpointer(saves).restore(SAVED)[0] == 20


# Formats.


@pytest.mark.parametrize("seal", [True, False])
def test_a_newer_format_stops_and_says_so(saves, seal):
    """It is not taken for corrupt, nothing older is taken for it, and nothing renames it."""

    def newer(index):
        index |= {"format": 2, "blobs": [1, 2]}

    edited(saves / "20", newer, seal)
    said = "checkpoint 20 has format 2, and this jaxshard reads formats up to 1: update jaxshard"
    with Checkpointer(saves) as checkpoints:
        calls = [
            lambda: checkpoints.restore(SAVED),
            lambda: checkpoints.restore(SAVED, 20),
            lambda: checkpoints.info(20),
            lambda: checkpoints.verify(20),
            lambda: checkpoints.latest_valid(),
            lambda: jaxshard.checkpoint.read(saves),
            lambda: checkpoints.save(20, SAVED),
        ]
        for call in calls:
            with pytest.raises(NewerFormatError, match=said) as raised:
                call()
            assert raised.value.found == 2
        assert checkpoints.steps() == [10, 20]
        assert checkpoints.restore(SAVED, 10)[0] == 10
    assert sorted(path.name for path in saves.iterdir() if path.is_dir()) == ["10", "20"]


def test_ckpt_tells_a_newer_format(saves, capsys):
    edited(saves / "20", lambda index: index.update(format=2), seal=True)
    assert main(["ckpt", "ls", str(saves)]) == 0
    assert "format 2" in capsys.readouterr().out
    assert main(["ckpt", "verify", str(saves)]) == 2
    assert "step 20: not read: checkpoint 20 has format 2" in capsys.readouterr().out
    assert main(["ckpt", "info", str(saves)]) == 2
    assert "update jaxshard" in capsys.readouterr().err


def test_a_flipped_bit_in_the_number_of_the_format_is_no_newer_one(saves):
    edited(saves / "20", lambda index: index.update(format=3))
    with pytest.raises(CorruptCheckpointError, match="its digest differs"):
        Checkpointer(saves).info(20)


def test_bytes_of_a_newer_format(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("jaxshard.checkpoint.as_bytes.FORMAT", 2)
        data = to_bytes(SAVED)
    with pytest.raises(NewerFormatError, match="these bytes have format 2"):
        from_bytes(SAVED, data)


def test_what_the_first_release_wrote_is_read(tmp_path):
    """A folder, and bytes, that jaxshard 0.1.0 wrote; its index has no step."""
    with zipfile.ZipFile(pathlib.Path(__file__).with_name("written_by_0.1.0.zip")) as written:
        written.extractall(tmp_path)
    saved = first_release()
    with Checkpointer(tmp_path / "saves") as checkpoints:
        checkpoints.verify(7)
        step, found = checkpoints.restore(jax.tree.map(jnp.zeros_like, saved))
        assert step == 7
        checkpoints.save(8, saved, blocking=True)
        assert checkpoints.info(7)["leaves"] == checkpoints.info(8)["leaves"]
    for tree in (found, from_bytes(saved, (tmp_path / "bytes").read_bytes())):
        assert tree["number"] == 7
        assert_same_bits(tree["arrays"], saved["arrays"])
        assert jnp.array_equal(jax.random.key_data(tree["key"]), jax.random.key_data(saved["key"]))
    (tmp_path / "saves" / "8").rename(tmp_path / "saves" / "9")
    (tmp_path / "saves" / "7").rename(tmp_path / "saves" / "10")
    assert Checkpointer(tmp_path / "saves").restore(saved)[0] == 10  # nothing says that it is another


def first_release():
    cut = NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
    arrays = {
        "cut": jax.device_put(jnp.arange(128.0).reshape(16, 8), cut),
        "whole": jnp.linspace(0, 1, 9).astype(jnp.bfloat16),
        "a.b": {"c/d": jnp.int8(-3)},
        "none": jnp.zeros((0, 3)),
    }
    return {"arrays": arrays, "key": jax.random.key(5), "number": 7}


# What is printed.

LOAD = """
import gc, sys, warnings
import jax, jax.numpy as jnp
from jaxshard.checkpoint import Checkpointer
warnings.simplefilter("always")
print(Checkpointer(sys.argv[1]).restore({"w": jnp.zeros(4096), "n": 0})[0])
gc.collect()
"""


@pytest.mark.parametrize("harm", ["gone", "zeros", "short", "empty", "manifest", "list"])
def test_a_corrupt_load_prints_one_warning(saves, harm):
    files = {
        "manifest": saves / "20" / "state" / "manifest.ocdbt",
        "list": saves / "20" / "state" / "_METADATA",
    }
    path = files.get(harm, data_files(saves / "20")[-1])
    if harm in ("gone", "manifest"):
        path.unlink()
    elif harm == "zeros":
        path.write_bytes(bytes(path.stat().st_size))
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 if harm == "short" else 0])
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-c", LOAD, str(saves)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=True,
    )
    lines = [line for line in run.stderr.splitlines() if "ResourceWarning" not in line]
    assert run.stdout == "10\n"
    assert re.search("UserWarning: checkpoint 20 is corrupt: .*; trying the previous one", lines[0]), run.stderr
    assert len(run.stderr) < 1200, run.stderr
    assert "Traceback" not in run.stderr


def test_what_others_log_meanwhile_is_heard(saves, caplog):
    def load():
        logging.getLogger("asyncio").error("Task exception was never retrieved: of a web server")
        logging.getLogger("absl").warning("unrelated")
        logging.getLogger("asyncio").error("Task exception was never retrieved: cannot read %s", saves / "20" / "d")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        quietly(load, saves / "20")
    assert [record.getMessage() for record in caplog.records] == [
        "Task exception was never retrieved: of a web server",
        "unrelated",
    ]


def test_a_load_that_fails_collects_no_garbage_of_the_rest_of_the_program(saves):
    """That takes seconds in a process that has traced many programs; what a program has frozen itself stays frozen."""
    counts = []

    def load():
        counts.append(gc.get_freeze_count())
        raise ValueError("no")

    for frozen in (False, True):
        if frozen:
            gc.freeze()
        try:
            before = gc.get_freeze_count()
            with pytest.raises(ValueError, match="no"):
                quietly(load, saves / "20")
            assert (before > 0) == (gc.get_freeze_count() > 0) == frozen
        finally:
            gc.unfreeze()
    assert min(counts) > 1000
