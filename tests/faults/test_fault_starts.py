"""What must not even start: processes that differ."""

import re

import pytest
from group import Group, program

REFUSED = {
    "learning rate": "ProcessError process 1: train_step: the step's program: this process has .* the same code",
    "params": r"ReplicaError replicas differ: params/b has different bits on device \d+ of process \d",
    "placed params": r"ProcessError process 1: place: this process has 'b: float32.24. with .*, process 0 has .* seed",
    "local batch": "ValueError batch: x has only this process's rows; make global arrays with",
    "rows of one shard": r"ReplicaError replicas differ: batch/x has different bits on device \d+ of process \d",
}


@pytest.mark.parametrize("what", REFUSED)
def test_processes_that_differ_are_refused_before_the_first_step(tmp_path, what):
    """F16."""
    with Group(program("differing", what), tmp_path) as group:
        group.wait()
    for index in range(2):
        assert re.search(f"refused: .*{REFUSED[what]}", group.log(index)), group.text()


def test_callbacks_are_no_difference(tmp_path):
    with Group(program("with_callbacks"), tmp_path) as group:
        assert group.wait() == [0, 0], group.text()


@pytest.mark.parametrize("what", ["the same", "other rows", "all alike", "a pipeline's"])
def test_processes_that_give_the_same_rows_are_warned_of(tmp_path, what):
    """F85: only where each holds other rows of the batch, and they tell."""
    with Group(program("first_step", what), tmp_path) as group:
        assert group.wait() == [0, 0], group.text()
    assert ("warned: 1 train_step: processes 0 and 1 passed identical rows" in group.log(0)) == (what == "the same")
    assert "warned: 0" in group.log(1)
