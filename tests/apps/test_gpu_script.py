"""`benchmarks/gpu.py`, on CPU at toy size."""

import importlib.util
import json
import pathlib
import sys

import pytest

SPEC = importlib.util.spec_from_file_location("gpu", pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu.py")
gpu = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu)


def test_a_training_is_measured_and_foretold():
    found = gpu.result_of("gpt2", True, 1)
    assert found["note"] == ""
    assert found["tokens_per_second"] == pytest.approx(8 * 32 / found["step_seconds"])
    assert found["chip"] == "cpu"
    assert found["compiled_peak_bytes"] > 0
    assert found["planned_peak_bytes"] > 0
    assert found["clock_over_plan"] == pytest.approx(found["step_seconds"] / found["planned_seconds"])


def test_overhead_is_a_ratio():
    found = gpu.result_of("overhead", True, 1)
    assert found["note"] == ""
    assert found["step_ratio"] > 0
    assert found["update_ratio"] > 0


def test_a_case_that_fails_says_why_and_the_rest_runs(monkeypatch, tmp_path, capsys):
    def failing(toy, rounds):
        raise MemoryError("it is full\nand more")

    monkeypatch.setattr(gpu, "CASES", {"first": failing, "second": lambda toy, rounds: {"mfu": 0.5}})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--toy", "--json", str(tmp_path / "x.json")])
    monkeypatch.setattr(gpu.jax.config, "update", lambda *_: None)
    assert gpu.main() == 1
    first, second = json.loads((tmp_path / "x.json").read_text())["cases"]
    assert first["note"] == "MemoryError: it is full"
    assert (second["mfu"], second["note"]) == (0.5, "")
    assert "mfu 0.5" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    assert gpu.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_sizes_and_operations_are_those_of_the_models():
    """124.3 M parameters of GPT-2 without positions and offsets; 1.1 G of the Llama."""
    count = lambda model: sum(map(gpu.math.prod, gpu.leaves_of(model.shapes())))  # noqa: E731
    assert count(gpu.gpt2(False)) == 12 * (12 * 768**2 + 2 * 768) + 50304 * 768 + 768
    assert count(gpu.llama(False)) == pytest.approx(1.1e9, rel=0.02)
    model = gpu.gpt2(False)
    assert gpu.flops_per_token(model) == pytest.approx(6 * count(model) + 12 * 12 * 768 * 1024, rel=1e-4)
