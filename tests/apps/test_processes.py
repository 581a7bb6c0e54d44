"""Steps in processes of their own, beside one device."""

import json
import sys

import pytest

from jaxshard.apps.bench import jax_worker, processes
from jaxshard.apps.bench.step import UnfitError

SETTING = processes.setting("toy", 16, 1, None)

WORKER = """
import sys
print("gloo says something")
print("> ready", flush=True)
for line in sys.stdin:
    print(">", int(line) * float(sys.argv[1]), flush=True)
"""


def command(seconds):
    return [sys.executable, "-c", WORKER, str(seconds)]


def test_the_slowest_process_counts():
    with processes.Group([command(0.5), command(2.0), command(1.0)]) as group:
        assert group.run(1) == 2.0
        assert group.run(3) == 6.0


def test_one_device_and_several_are_paired(monkeypatch):
    """Of PyTorch, which is not here: one device takes 1 s a step, each of two 0.5 s."""
    seconds = {"torch-one": 1.0, "torch-ddp": 0.5}
    monkeypatch.setattr(processes, "_command", lambda name, *_: command(seconds[name]))
    (row,) = processes.rows(["torch-ddp"], 2, SETTING)
    assert (row.machine, row.step, row.note) == ("2 processes", "torch-ddp", "")
    assert (row.figures["step_seconds"], row.figures["step_ratio"]) == (0.5, 0.5)


@pytest.mark.nightly
def test_two_processes_of_jaxshard_train():
    two, together = processes.rows(["zero2"], 2, SETTING)
    assert (two.machine, together.machine) == ("2 processes", "2 devices in one process")
    for row in (two, together):
        assert not row.note
        assert row.figures["step_ratio"] > 0


def test_the_worker_trains(monkeypatch, capsys):
    """In this process: a step on all devices."""
    plain = {"kind": "zero2", "processes": 1, "devices": 8, "rows": 16, "sizes": SETTING.sizes}
    monkeypatch.setattr(jax_worker.sys, "argv", ["", json.dumps(plain)])
    monkeypatch.setattr(jax_worker.sys, "stdin", ["1\n", "2\n"])
    jax_worker.main()
    ready, one, two = capsys.readouterr().out.splitlines()
    assert ready == "> ready"
    assert float(one[2:]) > 0
    assert float(two[2:]) > 0


def test_what_cannot_run_is_told(monkeypatch):
    failing = "import sys; sys.exit('it is full')"
    with pytest.raises(UnfitError, match="it is full"):
        processes.Group([[sys.executable, "-c", failing]])
    with pytest.raises(UnfitError, match="/nowhere/python cannot be run"):
        processes.Group([["/nowhere/python"]])
    missing = "raise ModuleNotFoundError(\"No module named 'torch'\")"
    monkeypatch.setattr(processes, "_command", lambda *_: [sys.executable, "-c", missing])
    (row,) = processes.rows(["torch-zero"], 2, SETTING)
    assert row.note == "PyTorch is not installed: pip install torch, or give --torch"


def test_a_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(processes, "_LIMIT_SECONDS", 0.5)
    with pytest.raises(UnfitError, match="exited with status -9"):
        processes.Group([[sys.executable, "-c", "import time; time.sleep(60)"]])
