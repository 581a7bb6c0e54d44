"""Processes of `jaxshard train` that were started with other options, or another JAX configuration."""

import subprocess
import sys

import pytest
from group import Group, trainer

SMALL = [
    "--model.layers",
    "1",
    "--model.width",
    "16",
    "--model.heads",
    "2",
    "--model.hidden",
    "32",
    "--train.steps",
    "2",
]
SMALL += ["--train.rows", "8", "--model.sequence-length", "16", "--optimizer.warmup-steps", "1", "--out", "run"]
OTHER = {
    "optimizer.learning_rate": (["--optimizer.learning-rate", "0.2"], {}, "process 0 has 0.1, process 1 has 0.2"),
    "sharding.strategy": (["--sharding.strategy", "ddp"], {}, "process 0 has 'zero2', process 1 has 'ddp'"),
    "optimizer.arguments": (["--optimizer.arguments", "b1 = 0.8"], {}, "process 0 has '', process 1 has 'b1 = 0.8'"),
    "jax_default_matmul_precision": ([], {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}, "process 0 has None, process 1"),
}


class Differing(Group):
    """The second process has more arguments, or another environment."""

    def __init__(self, more, environment, folder):
        self.more, self.changed = more, environment
        super().__init__(trainer(*SMALL, "--optimizer.learning-rate", "0.1"), folder)

    def _environment(self, index, count, devices):
        return super()._environment(index, count, devices) | (self.changed if index else {})


@pytest.mark.parametrize("name", OTHER)
def test_options_that_differ_are_named_on_every_process(tmp_path, monkeypatch, name):
    more, environment, words = OTHER[name]
    start, seen = subprocess.Popen, []

    def started(command, **how):
        seen.append(command)
        return start([*command, *(more if len(seen) == 2 else [])], **how)

    monkeypatch.setattr(subprocess, "Popen", started)
    with Differing(more, environment, tmp_path) as group:
        assert group.wait() == [2, 2], group.text()
    for index in range(2):
        lines = [line for line in group.log(index).splitlines() if "jaxshard train:" in line]
        assert len(lines) == 1, group.text()
        assert f"{name}: {words}" in lines[0], group.text()
        assert "Traceback" not in group.log(index)
    assert not (tmp_path / "run").exists()
    assert sys.executable in seen[0]
