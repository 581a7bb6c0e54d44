"""`jaxshard train` where saved models are damaged: it never starts at step 0 in silence."""

import json
import shutil

import pytest
from test_train import TINY, records

from jaxshard.checkpoint import Checkpointer
from jaxshard.checkpoint.storage import manifest
from jaxshard.cli import main

MARK, INDEX = "commit_success.txt", "_CHECKPOINT_METADATA"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run with saves of the steps 1 and 2."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.toml").write_text(TINY)
    options = [
        "--train.steps",
        "2",
        "--train.save-every",
        "1",
        "--train.eval-every",
        "2",
        "--optimizer.warmup-steps",
        "0",
    ]
    assert main(["train", str(folder / "tiny.toml"), *options, "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def names(run):
    return sorted(path.name for path in (run / "model").iterdir())


@pytest.mark.parametrize("option", ["--resume-if-saved", "--resume"])
@pytest.mark.parametrize("lost", [MARK, INDEX])
def test_where_no_save_is_whole_it_says_so_and_changes_nothing(run, capsys, option, lost):
    for step in ("1", "2"):
        (run / "model" / step / lost).unlink()
    before = names(run)
    assert main(["train", str(run / "config.toml"), "--out", str(run), option]) == 2
    assert f"no saved model is complete: {lost} is missing in {run / 'model' / '2'}" in capsys.readouterr().err
    assert names(run) == before


def test_where_the_newest_is_not_whole_it_goes_on_from_the_one_before_and_says_so(run):
    (run / "model" / "2" / MARK).unlink()
    with pytest.warns(UserWarning, match=f"checkpoint 2 is skipped: {MARK} is missing"):
        assert main(["train", str(run / "config.toml"), "--out", str(run), "--resume-if-saved"]) == 0
    assert Checkpointer(run / "model").steps() == [1, 2]
    assert records(run)[-1]["step"] == 2


def test_where_no_save_can_be_read_it_ends_in_one_line(run, capsys):
    for step in ("1", "2"):
        (run / "model" / step / INDEX).write_text("{")
    with pytest.warns(UserWarning, match="is corrupt"):
        assert main(["train", str(run / "config.toml"), "--out", str(run), "--resume-if-saved"]) == 1
    assert "jaxshard train: checkpoint 2 is corrupt: its index cannot be read" in capsys.readouterr().err


def test_a_newer_format_ends_it_in_one_line(run, capsys):
    path = run / "model" / "2" / INDEX
    whole = json.loads(path.read_text())
    whole["custom_metadata"].pop("digest")
    whole["custom_metadata"] = manifest.sealed({**whole["custom_metadata"], "format": 9})
    path.write_text(json.dumps(whole))
    assert main(["train", str(run / "config.toml"), "--out", str(run), "--resume-if-saved"]) == 1
    assert "jaxshard train: checkpoint 2 has format 9, and this jaxshard reads" in capsys.readouterr().err
    assert names(run) == [".lock", "1", "2", "run.json"]
