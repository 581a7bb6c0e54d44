"""Processes whose strings and objects have other hashes lower the same programs: no order comes from a set."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_programs_do_not_depend_on_hashes():
    names = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    how = os.environ | {"PYTHONPATH": os.pathsep.join(names), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, str(TESTS / "step/lowered.py")]
    runs = [
        subprocess.Popen(command, env=how | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for seed in ("1", "2")
    ]
    one, two = [run.communicate()[0].splitlines() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert len(one) == 24
    assert one == two
