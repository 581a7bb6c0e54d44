"""Programs compiled once for all tests here, and by all workers."""

import os

import group
import pytest


@pytest.fixture(autouse=True, scope="session")
def programs_are_kept(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    group.COMPILED = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    return group.COMPILED
