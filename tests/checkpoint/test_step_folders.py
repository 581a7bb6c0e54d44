"""What is in a folder of checkpoints, and who knows orbax."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxshard
from jaxshard.checkpoint import Checkpointer
from jaxshard.checkpoint.step_folders import StepFolders
from jaxshard.checkpoint.storage import orbax_store


def test_what_looks_like_a_checkpoint_and_is_none(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, {"w": jnp.arange(4.0)})
    for name in ("40", "5.uncommitted.0a1b2c3d", "6.corrupt.0a1b2c3d", "50.orbax-checkpoint-tmp", "notes"):
        (tmp_path / name).mkdir()
    folders = StepFolders(tmp_path)
    assert folders.steps() == [3]
    assert folders.others() == {
        "40": "uncommitted: it was not written completely",
        "5.uncommitted.0a1b2c3d": "moved aside, uncommitted",
        "50.orbax-checkpoint-tmp": "temporary: it is being written, or writing it was interrupted",
        "6.corrupt.0a1b2c3d": "moved aside, corrupt",
    }


@pytest.mark.parametrize(("looks", "found"), [("steps", [9]), ("damaged", {})])
def test_a_run_that_saves_and_deletes_while_it_is_listed(tmp_path, monkeypatch, looks, found):
    """Between the list and the look at its only step, which is deleted, the next one comes."""
    with Checkpointer(tmp_path) as checkpoints:
        for step in (8, 9):
            checkpoints.save(step, {"w": jnp.arange(4.0)})
    later = (tmp_path / "9").rename(tmp_path / "later")
    is_file = orbax_store.is_file

    def meanwhile(path):
        if later.exists():
            later.rename(tmp_path / "9")
            (tmp_path / "8").rename(tmp_path / "8.deleted.0a1b2c3d")
        return is_file(path)

    monkeypatch.setattr(orbax_store, "is_file", meanwhile)
    assert getattr(StepFolders(tmp_path), looks)() == found
    assert not later.exists()


def test_orbax_is_known_to_one_module_for_storage_and_to_one_for_its_barrier():
    package = Path(jaxshard.__file__).parent
    told = re.compile(r"^\s*(from|import) orbax|_CHECKPOINT_METADATA|commit_success|orbax-checkpoint-tmp", re.MULTILINE)
    knowing = {str(path.relative_to(package)) for path in package.rglob("*.py") if told.search(path.read_text())}
    assert knowing - {"cli/ckpt/command.py"} == {"checkpoint/storage/orbax_store.py", "processes/agreement.py"}
