"""The bound on time that other tests hold code to."""

import threading
import time

import pytest
from clock import at_most


def test_what_takes_longer_fails():
    with at_most(2):
        time.sleep(0.2)
    with pytest.raises(AssertionError, match=r"took 0\.\d s"), at_most(0.2):
        time.sleep(0.6)


def test_a_clock_that_jumps_counts_little(monkeypatch):
    """As where a machine stopped for an hour."""
    real, jumped = time.monotonic, threading.Event()
    with at_most(2):
        monkeypatch.setattr(time, "monotonic", lambda: real() + 3600 * jumped.is_set())
        jumped.set()
        time.sleep(0.2)
