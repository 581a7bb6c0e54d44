"""Exact figures of small steps by the TPU's compiler: a change is seen, and has to be committed with its reason."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import gate  # noqa: E402

EXPECTED = json.loads(gate.EXPECTED.read_text())


def test_the_file_has_these_cases_and_a_reason():
    assert list(EXPECTED["figures"]) == list(gate.CASES)
    assert EXPECTED["reason"].strip()
    assert EXPECTED["machine"] == gate.MACHINE


@pytest.mark.optimized
@pytest.mark.filterwarnings(
    "ignore:each device keeps up to .* of gathered params:UserWarning"
)  # a newcomer's model is told so
@pytest.mark.parametrize("case", gate.CASES)
def test_figures_are_as_expected(case):
    lines = gate.differences(case, gate.CASES[case](), EXPECTED)
    assert not lines, "\n".join([*lines, 'If that is meant: python benchmarks/gate.py --write "the reason"'])


def test_a_changed_figure_is_told_with_both_numbers():
    case, wanted = next(iter(EXPECTED["figures"].items()))
    found = wanted | {"wire_bytes": wanted["wire_bytes"] + 1}
    (line,) = gate.differences(case, found, EXPECTED)
    assert str(wanted["wire_bytes"]) in line
    assert str(wanted["wire_bytes"] + 1) in line


def test_the_compilers_own_figures_count_with_the_compiler_that_the_file_names(monkeypatch):
    case, wanted = next(iter(EXPECTED["figures"].items()))
    found = wanted | {"peak_bytes": 0}
    monkeypatch.setattr(gate, "versions", lambda: {"jax": "0", "libtpu": "0"})
    assert not gate.differences(case, found, EXPECTED)
    monkeypatch.setattr(gate, "versions", lambda: EXPECTED["versions"])
    assert len(gate.differences(case, found, EXPECTED)) == 1
