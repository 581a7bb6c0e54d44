"""Which process is the command: only there are signals and files of the process touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxshard.system import command

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("started", "given", "expected"),
    [
        (["python", "-m", "jaxshard", "train", "-x"], ["-m", "train", "-x"], True),
        (["python", "-W", "ignore", "-m", "jaxshard"], ["/lib/jaxshard/__main__.py"], True),
        (["python", "/venv/bin/jaxshard", "plan"], ["/venv/bin/jaxshard", "plan"], True),
        (["python", "-m", "mine", "-m", "jaxshard"], ["-m", "-m", "jaxshard"], False),
        (["python", "-m", "pytest"], ["/lib/pytest/__main__.py"], False),
        (["python", "train.py", "jaxshard"], ["train.py", "jaxshard"], False),
        (["python", "-c", "import jaxshard"], ["-c"], False),
        (["python"], [""], False),
        ([], [], False),
    ],
)
def test_the_command_is_known_by_how_it_was_started(monkeypatch, started, given, expected):
    monkeypatch.setattr(sys, "orig_argv", started)
    monkeypatch.setattr(sys, "argv", given)
    assert command.is_command() == expected


def test_a_program_that_imports_jaxshard_keeps_its_ctrl_c():
    own = "signal.default_int_handler"
    code = f"import signal; signal.signal(signal.SIGINT, {own}); import jaxshard; print(signal.getsignal(2) is {own})"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment) == b"True\n"


def test_looking_whether_a_file_can_be_written_leaves_a_dangling_link_as_it_was(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "there")
    command.check_file("--json", tmp_path / "link")
    assert os.listdir(tmp_path) == ["link"]


def test_the_command_begins_before_jax_is_imported():
    """Ctrl-C while JAX was being imported crashed it, and `environment` had what JAX adds."""
    code = "import sys, jaxshard; jaxshard.zero2; at = [*sys.modules].index; "
    code += "print(at('jaxshard.system.command') < at('jax'))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment) == b"True\n"
