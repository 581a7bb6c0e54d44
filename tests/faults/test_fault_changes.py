"""A run whose folder or text changes under it: nothing is lost, nothing is silent (F95 to F98)."""

import os

import pytest
from changes import CHANGES, try_out

NEEDS_ROOT = {name for name, change in CHANGES.items() if change.disk or change.bound}
ALWAYS = ["two processes, renamed", "tokens cut short"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in CHANGES if name not in NEEDS_ROOT or os.geteuid() == 0])
def test_every_change_under_a_run(name, tmp_path):
    print(f"{name}: {try_out(CHANGES[name], tmp_path)}", flush=True)


@pytest.mark.parametrize("name", ALWAYS)
def test_some_changes_under_a_run(name, tmp_path):
    try_out(CHANGES[name], tmp_path)
