"""Faults at many random moments and places. Each prints its seed, and what it did."""

import random
import signal
import time

import pytest
from group import Group, trainer
from test_fault_train import TINY, losses, state_bytes, train

from jaxshard.checkpoint import Checkpointer

SOAK_STEPS, SOAK_EVENTS, SOAK_STARTS = 200, 30, 6


def told(*words):
    print(*words, flush=True)


def saved_step(folder):
    return max(Checkpointer(folder / "model").steps(), default=0)


class Soak:
    """A run that is started again after each event, as a launcher would do it."""

    def __init__(self, tmp_path, options, seed):
        self.arguments = trainer(*options, "--out", tmp_path / "parts", "--resume-if-saved")
        self.tmp_path, self.out, self.random = tmp_path, tmp_path / "parts", random.Random(seed)

    def killed_while_starting(self):
        """SIGKILL at a random moment before the first step; what is left of the group is ended, too."""
        before, index, after = saved_step(self.out), self.random.randrange(2), self.random.uniform(0.5, 12)
        with Group(self.arguments, self.tmp_path, devices=2) as group:
            end = time.monotonic() + after
            while time.monotonic() < end and not self._taken(before):
                assert all(process.poll() is None for process in group.processes), group.text()
                time.sleep(0.02)
            group.signal(signal.SIGKILL, index)
            assert group.processes[index].wait(10) == -signal.SIGKILL
        told(f"start: process {index} killed after {after:.1f} s at step {before}, {self._taken(before)} steps taken")

    def harmed(self, event, at):
        """A signal to a random process, once step `at` and one step of this start are taken."""
        number = self.random.choice([signal.SIGKILL, signal.SIGTERM])
        before, index = saved_step(self.out), self.random.randrange(2)
        delay, start = self.random.uniform(0, 0.3), time.monotonic()
        with Group(self.arguments, self.tmp_path, devices=2) as group:
            group.until(lambda: self._taken(before) and max(losses(self.out)) >= at, f"step {at}", 120)
            time.sleep(delay)
            step, started = max(losses(self.out)), time.monotonic()
            group.signal(number, index)
            statuses = group.wait(60)
            ended = time.monotonic() - started
        saved = saved_step(self.out)
        told(
            f"event {event}: {number.name} to process {index} at step {step} (from {before}): statuses {statuses} "
            f"after {ended:.1f} s, saved {saved}; {started - start:.1f} s until then"
        )
        assert step > before
        assert saved < SOAK_STEPS, "it ended before all events"
        if number == signal.SIGTERM:
            assert statuses == [143, 143], group.text()
            assert saved >= step
        else:
            assert statuses[index] == -signal.SIGKILL, group.text()
            assert statuses[1 - index] != 0, group.text()
            assert saved > step - 2 * 3, group.text()  # of saves every 3 steps, one may have been under way
        return number

    def _taken(self, before):
        """How many steps are recorded of this start."""
        return max(0, max(losses(self.out), default=0) - before)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_run_that_is_killed_and_told_to_end_again_and_again_ends_as_if_nothing_had_been(tmp_path):
    """F26: 30 signals at random steps, and 6 kills while it starts."""
    seed = 26
    told(f"seed {seed}")
    (tmp_path / "tiny.toml").write_text(TINY)
    options = [tmp_path / "tiny.toml", "--train.steps", SOAK_STEPS, "--train.save-every", 3]
    options += ["--train.rows", 64]
    train(tmp_path, *options, "--out", tmp_path / "whole")
    soak, chosen = Soak(tmp_path, options, seed), random.Random(seed + 1)
    moments = sorted(chosen.sample(range(2, SOAK_STEPS - 25), SOAK_EVENTS))
    starts = {0, *chosen.sample(range(1, SOAK_EVENTS), SOAK_STARTS - 1)}
    numbers = []
    for event, at in enumerate(moments):
        if event in starts:
            soak.killed_while_starting()
        numbers.append(soak.harmed(event + 1, at))
    assert len(numbers) == SOAK_EVENTS
    assert len(set(numbers)) == 2
    train(tmp_path, *options, "--out", tmp_path / "parts", "--resume-if-saved")
    assert state_bytes(tmp_path / "parts") == state_bytes(tmp_path / "whole")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    told(f"{len(numbers)} events and {len(starts)} kills while starting: the same to the last bit, and every loss")
