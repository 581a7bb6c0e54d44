"""Processes that die, hang, or are told to end."""

import random
import re
import signal
import time

import pytest
from clock import at_most
from group import Group, program


def test_a_process_that_hangs_ends_the_job_with_its_stacks(tmp_path):
    """F18."""
    with Group(program("hang", 4), tmp_path) as group:
        group.says("hangs", 1)
        with at_most(20):
            statuses = group.wait(60)
            assert 75 in statuses
            assert all(statuses), statuses
    assert "took no step for" in group.log(1)
    assert "a_lock_that_nobody_opens" in group.log(1)


def killed(tmp_path, index, number=signal.SIGKILL):
    """The exit statuses after one process is killed within a step, and how long that took."""
    with Group(program("steps", 10), tmp_path) as group:
        group.says("step 3", 0)
        group.signal(number, index)
        start = time.monotonic()
        return group.wait(60), time.monotonic() - start


def test_a_killed_process_ends_the_others(tmp_path):
    """F1: within the heartbeat (10 s here) and 5 s."""
    statuses, seconds = killed(tmp_path, 1)
    assert statuses[1] == -signal.SIGKILL
    assert statuses[0] not in (0, None)
    assert seconds < 15


def test_a_killed_coordinator_ends_the_others(tmp_path):
    """F2."""
    statuses, seconds = killed(tmp_path, 0)
    assert statuses[0] == -signal.SIGKILL
    assert statuses[1] not in (0, None)
    assert seconds < 15


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_second_signal_ends_at_once(tmp_path, number):
    """Also where the process waits for one that hangs, and runs no Python."""
    with Group(program("hang", 100), tmp_path) as group:
        group.says("hangs", 1)
        time.sleep(1)
        group.signal(number, 0)
        group.says(f"{number.name}: the model is saved after this step")
        assert group.processes[0].poll() is None
        group.signal(number, 0)
        assert group.processes[0].wait(10) == 128 + number


def test_processes_that_fail_one_after_the_other_all_say_why(tmp_path):
    """No process is cut off by one that ends before it, the coordinator above all."""
    with Group(program("unexpected_error"), tmp_path) as group:
        assert group.wait(60) == [1, 1], group.text()
    for index in range(2):
        assert f"nobody thought of this in process {index}" in group.log(index)


def test_a_signal_before_the_loop_ends_it_at_its_first_steps(tmp_path):
    """Whatever step the loop goes on from; and a second loop has signals of its own."""
    with Group(program("notice_at_start", 500), tmp_path) as group:
        assert group.wait(60) == [0, 0], group.text()
    for index in range(2):
        ends = re.search(r"loop 0 ends at \[(\d+)", group.log(index))
        assert ends, group.text()
        assert int(ends[1]) <= 502
        assert "loop 1 ends at []" in group.log(index)
        assert "not killed" in group.log(index)


def test_ctrl_c_in_one_of_two_processes_leaves_both_with_params_and_state(tmp_path):
    chance = random.Random(0)
    with Group(program("interrupted_again_and_again"), tmp_path) as group:
        group.says("whole 0", 0)
        for count in range(1, 21):
            group.says(f"whole {count - 1}\n", 1)
            time.sleep(chance.uniform(0, 0.1))
            group.signal(signal.SIGINT, 1)
        group.says("whole 20\n", 1)
        group.signal(signal.SIGINT, 0)
        group.says("whole 1\n", 0)
        assert "lost" not in group.text()
