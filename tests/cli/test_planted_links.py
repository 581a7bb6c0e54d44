"""Links that somebody has planted where a command writes: nothing is written, emptied or deleted through one."""

import json
import os

import jax.numpy as jnp
import pytest

from jaxshard.apps.config import toml
from jaxshard.apps.config.config import Config
from jaxshard.apps.huggingface import hf_folder
from jaxshard.apps.records import trackers
from jaxshard.apps.records.profile import Profile
from jaxshard.apps.records.record import Lines, Recorder
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.checkpoint import Checkpointer
from jaxshard.cli import main


@pytest.fixture
def precious(tmp_path):
    """A folder elsewhere that nothing of ours may change."""
    folder = tmp_path / "precious"
    (folder / "deep").mkdir(parents=True)
    for name in ("file", "deep/file"):
        (folder / name).write_text("precious")
    yield folder
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == ["deep", "deep/file", "file"]
    assert {path.read_text() for path in folder.rglob("file")} == {"precious"}


TARGETS = pytest.mark.parametrize("target", ["", "deep", "file", "new"])


@TARGETS
@pytest.mark.parametrize("name", [".x.safetensors.jaxshard-export", "x.safetensors.index.json", "x.safetensors"])
def test_an_export_follows_no_planted_link(tmp_path, precious, target, name):
    """The folder that it made beside its file was emptied through a link."""
    place = tmp_path / "place"
    place.mkdir()
    (place / name).symlink_to(precious / target)
    with Checkpointer(tmp_path / "ck") as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(30.0)}, blocking=True)
    status = main(["ckpt", "export", str(tmp_path / "ck"), "--safetensors", str(place / "x.safetensors")])
    assert status == (2 if name.startswith("x.") else 0)
    assert (place / name).is_symlink()


@TARGETS
@pytest.mark.parametrize(
    "name",
    [
        *(f".{name}.PID" for name in ("config.toml", "metrics.jsonl", "trackers.json", "tokenizer.json")),
        "config.toml",
        "metrics.jsonl",
        "metrics.jsonl.others",
        "trackers.json",
        "tokenizer.json",
        "tensorboard",
        "huggingface",
        "profile",
        "wandb",
    ],
)
def test_a_run_follows_no_planted_link(tmp_path, precious, name, target):
    """What the folder's own link would lead to is moved aside or replaced, and told."""
    folder, start, name = RunFolder(tmp_path / "run"), tmp_path / "start", name.replace("PID", str(os.getpid()))
    for path in (folder.path, start):
        path.mkdir()
    (start / "config.json").write_text("{}")
    (tmp_path / "tokens.json").write_text("[]")
    if name != "metrics.jsonl":
        folder.metrics.write_text('no metric\n{"step": 1, "loss": 2.0}\n')
    (folder.path / name).symlink_to(precious / target)
    folder.begin(toml.dump(Config()), 1)
    folder.keep_tokenizer(tmp_path / "tokens.json")
    hf_folder.keep(start, folder.huggingface)
    with Recorder({"lines": lambda: Lines(folder, pytest.fail)}, pytest.fail) as recorder:
        recorder.write(2, {"loss": 1.0})
        recorder.rewind(1)
        recorder.write(2, {"loss": 3.0})
        recorder.sync()
    trackers.Tracker._keep(Tracked(folder), "0" * 8)
    folder.sync()
    assert toml.load(folder.config) == Config()
    assert json.loads(folder.metrics.read_text().splitlines()[-1]) == {"step": 2, "loss": 3.0}
    assert (folder.huggingface / "config.json").read_text() == "{}"
    assert not folder.metrics.is_symlink()


class Tracked:
    """As much of a `Tracker` as keeps its id."""

    _name, _ids = "trackio", staticmethod(dict)

    def __init__(self, folder):
        self._folder = folder


def test_a_models_folder_may_be_a_link_to_a_large_disk_and_that_is_told(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (tmp_path / "large").mkdir()
    folder.model.symlink_to(tmp_path / "large")
    with Checkpointer(folder.model) as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(3.0)})
    (note,) = folder.begin(toml.dump(Config()), 0)
    assert note == f"{folder.model} is a link: models are saved in {tmp_path / 'large'}"
    assert folder.latest_step() == 1
    assert (tmp_path / "large" / "1").is_dir()


@TARGETS
def test_tokens_follow_no_planted_link(tmp_path, precious, target):
    place = tmp_path / "place"
    place.mkdir()
    (tmp_path / "text").write_text("a text " * 99)
    for name in (f".tokens.{os.getpid()}.new", f".tokens.{os.getpid()}.old"):
        (place / name).symlink_to(precious / target)
    arguments = ["tokenize", str(tmp_path / "text"), "--vocabulary", "300", "--out", str(place / "tokens")]
    for more in ([], ["--overwrite"]):
        assert main([*arguments, *more]) == 0
    names = [f".tokens.{os.getpid()}.new", f".tokens.{os.getpid()}.old", "tokens"]
    assert sorted(os.listdir(place)) == names


@pytest.mark.parametrize("target", ["file", "new"])
def test_no_planted_link_in_a_folder_that_the_user_names_is_followed(tmp_path, precious, target):
    for name in ("plan.html", "plan.png"):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / name).symlink_to(precious / target)
    arguments = ["plan", "--machine", "v5e:2x4", "--strategies", "zero2", "--out", str(tmp_path / "out")]
    assert main(arguments) in (0, 1)
    assert sorted(os.listdir(tmp_path / "out")) == ["plan.html", "plan.png"]
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_what_the_user_names_may_be_a_link(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "there.json")
    (tmp_path / "folder").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "folder")
    arguments = ["plan", "--machine", "v5e:2x4", "--strategies", "zero2", "--json", str(tmp_path / "link.json")]
    assert main([*arguments, "--out", str(tmp_path / "out")]) in (0, 1)
    assert json.loads((tmp_path / "there.json").read_text())["rows"]
    assert (tmp_path / "link.json").is_symlink()
    assert sorted(os.listdir(tmp_path / "folder")) == ["plan.html", "plan.png"]


@pytest.mark.parametrize("name", ["", "plugins", "plugins/profile"])
def test_no_profile_is_written_through_a_link(tmp_path, precious, name):
    profile = tmp_path / "profile"
    (profile / name).parent.mkdir(parents=True, exist_ok=True)
    (profile / name).symlink_to(precious)
    lines = []
    with Profile(range(1), profile, lines.append) as traced:
        traced.before(())
        traced.after(())
    assert len(lines) == 1
    assert "no profile was written: " in lines[0]
    assert "is a link, and files are not written through links" in lines[0]
