"""docs/parity.md names a test for each thing that it promises."""

import ast
import re

from pages import ROOT

ROWS = [line for line in (ROOT / "docs" / "parity.md").read_text().splitlines() if line.startswith("| ")][1:]
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")


def test_every_row_names_a_test_that_is_there():
    assert len(ROWS) > 15
    for row in ROWS:
        found = TEST.findall(row)
        assert found, row
        for file, name in found:
            tree = ast.parse((ROOT / file).read_text())
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert not name or name in names, f"{file}::{name}"
