"""Configurations are found by the name of a preset, and a mistyped path gets the nearest name."""

from pathlib import Path

import pytest

from jaxshard.apps.config import paths, toml
from jaxshard.cli import main

ROOT = Path(__file__).parents[2]


def test_every_configuration_of_the_repository_is_a_preset():
    assert {file.name for file in paths.presets().values()} == {file.name for file in (ROOT / "configs").iterdir()}


def test_a_preset_is_read_by_its_name_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero3").mkdir()  # as the folder of a run; a folder is no configuration
    assert toml.load(Path("zero3")) == toml.load(ROOT / "configs" / "zero3.toml")


def test_a_file_of_the_users_takes_precedence_over_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero3").write_text("[train]\nsteps = 7\n")
    assert toml.load(Path("zero3")).train.steps == 7


@pytest.mark.parametrize("package", ["installed", "neither"])
def test_the_installed_package_has_its_presets_inside(tmp_path, monkeypatch, package):
    module = tmp_path / "jaxshard" / "apps" / "config" / "paths.py"
    monkeypatch.setattr(paths, "__file__", str(module))
    if package == "installed":
        (tmp_path / "jaxshard" / "presets").mkdir(parents=True)
        (tmp_path / "jaxshard" / "presets" / "mine.toml").touch()
    (tmp_path / "configs").mkdir(exist_ok=True)  # beside an installed package: of another one
    assert list(paths.presets()) == (["mine"] if package == "installed" else [])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "zero33"], "'zero33': the file does not exist; did you mean the preset 'zero3'?"),
        (["plan", "configs/zero3.toml"], "the file does not exist; did you mean the preset 'zero3'?"),
        (["plan", "mine/zoro.toml"], "'mine/zoro.toml': the file does not exist; did you mean 'mine/zero.toml'?"),
        (["train", "mime/zero.toml"], "'mime/zero.toml': the file does not exist; did you mean 'mine/zero.toml'?"),
        (["train", "qqqqqqq"], "the file does not exist; the presets are beat_zlib, ddp, default, "),
        (["explain", "zero33"], "zero33: the file does not exist; write a function as MODULE:FUNCTION; did you mean"),
        (["train", "--data", "textt"], "give a file or a folder of text; did you mean 'text'?"),
        (["train", "--train.start", "mne"], "or a Hugging Face folder; did you mean 'mine'?"),
        (
            ["train", "--resume", "--out", "mne"],
            "give the folder that the run printed; did you mean 'mine'?",
        ),
        (["eval", "mne"], "did you mean 'mine'?"),
        (["generate", "mne"], "did you mean 'mine'?"),
        (["ckpt", "ls", "mne"], "mne does not exist: give a folder; did you mean 'mine'?"),
        (["tokenize", "textt", "--out", "new"], "folder of text; did you mean 'text'?"),
    ],
)
def test_a_mistyped_path_gets_the_nearest_name(tmp_path, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "zero.toml").touch()
    (tmp_path / "text").write_text("text")
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert status == 2
    assert told in captured.err
    assert captured.err.count("\n") == 1


def test_a_path_that_resembles_nothing_gets_no_name(tmp_path):
    (tmp_path / "text").touch()
    assert paths.near_path(tmp_path / "qqqqqq") == ""
    assert paths.near_path(tmp_path / "text" / "more") == ""
    assert paths.near_path(Path()) == ""
