"""Paths of all kinds: orbax misreads some of them, and is given another path of the same folder."""

import contextlib
import os

import jax.numpy as jnp
import pytest
from oracle import assert_same_bits

import jaxshard.checkpoint
from jaxshard.checkpoint import Checkpointer
from jaxshard.checkpoint.storage.paths import PlainPath
from jaxshard.cli import main

SAVED = {"w": jnp.arange(4.0), "cut": jnp.arange(64.0).reshape(8, 8)}
MISREAD = ["exp[lr=3]", "a*b", "a?b", "a\\b", "[", "gs:", "name\udce4"]


def open_below(folder):
    """The files and folders below this one that the process holds open."""
    paths = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            paths.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in paths if path.startswith(str(folder))]


@pytest.mark.parametrize("name", [*MISREAD, "a]b", "a b", "a{b}", "ä#%20,:'\"|@$~", "line\nbreak", "-rf", "~"])
def test_everything_works_under_every_path(tmp_path, name):
    with Checkpointer(tmp_path / name, keep_last=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {**SAVED, "step": step})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
        checkpoints.verify(3)
        assert checkpoints.latest_valid() == 3
        assert checkpoints.info(3)["leaves"]["w"]["shape"] == [4]
        step, found = Checkpointer(tmp_path / name).restore({**SAVED, "step": 0})
        assert step == found["step"] == 3
        assert_same_bits({"w": found["w"], "cut": found["cut"]}, SAVED)
    assert jaxshard.checkpoint.read(tmp_path / name, only="step") == {"step": 3}
    assert sorted(os.listdir(tmp_path / name)) == [".lock", "2", "3", "run.json"]
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert not open_below(tmp_path)


@pytest.mark.parametrize("name", ["a[b]", "a\\b"])
def test_the_working_folder_may_have_such_a_path(tmp_path, monkeypatch, capsys, name):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with Checkpointer("runs") as checkpoints:
        checkpoints.save(1, SAVED)
        assert_same_bits(checkpoints.restore(SAVED)[1], SAVED)
    assert main(["ckpt", "verify", "runs"]) == 0
    assert main(["ckpt", "export", "runs", "--safetensors", "model[1].safetensors"]) == 0
    assert "step 1: intact" in capsys.readouterr().out
    assert sorted(os.listdir()) == ["model[1].safetensors", "runs"]


@pytest.mark.parametrize("name", ["a[b]", "a*b", "a?b", "a\\b"])
def test_a_checkpoint_may_be_moved_under_such_a_path_and_away(tmp_path, name):
    with Checkpointer(tmp_path / "plain") as checkpoints:
        checkpoints.save(1, SAVED)
    (tmp_path / "plain").rename(tmp_path / name)
    with Checkpointer(tmp_path / name) as checkpoints:
        assert_same_bits(checkpoints.restore(SAVED)[1], SAVED)
        checkpoints.save(2, SAVED)
    (tmp_path / name).rename(tmp_path / "plain")
    assert_same_bits(Checkpointer(tmp_path / "plain").restore(SAVED, 2)[1], SAVED)


def test_a_folder_may_be_renamed_while_it_is_written(tmp_path):
    with Checkpointer(tmp_path / "a[b]") as checkpoints:
        checkpoints.save(1, SAVED)
        (tmp_path / "a[b]").rename(tmp_path / "c[d]")
        (tmp_path / "a[b]").mkdir()
        with pytest.raises(OSError, match="checkpoint 1 was not saved"):  # it is not where it should be
            checkpoints.wait()
    assert not list((tmp_path / "a[b]").glob("1*"))
    assert_same_bits(Checkpointer(tmp_path / "c[d]").restore(SAVED)[1], SAVED)


def test_where_a_folder_has_no_other_path_saves_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    """On macOS, say."""
    monkeypatch.setattr("jaxshard.checkpoint.storage.paths._OPEN_FOLDERS", tmp_path / "none")
    with Checkpointer(tmp_path / "a[b]") as checkpoints, pytest.raises(ValueError, match="orbax lose checkpoints"):
        checkpoints.save(1, SAVED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a[b]", "a\\b"])
def test_what_orbax_loses_is_no_checkpoint(tmp_path, monkeypatch, name):
    """What is written is read back: orbax, given the path itself, says nothing."""
    with Checkpointer(tmp_path / name) as checkpoints:
        checkpoints.save(1, SAVED, blocking=True)
        with monkeypatch.context() as patch:
            patch.setattr(PlainPath, "of_all", classmethod(lambda cls, folder: cls(folder)))
            checkpoints.save(2, SAVED)
            with pytest.raises(OSError, match=r"checkpoint 2 was not saved: .* cannot be read back: "):
                checkpoints.wait()
        assert checkpoints.steps() == [1]
        assert checkpoints.restore(SAVED)[0] == 1
        checkpoints.save(2, SAVED, blocking=True)
        assert checkpoints.steps() == [1, 2]
    assert len(list((tmp_path / name).glob("2.unreadable.*"))) == 1
