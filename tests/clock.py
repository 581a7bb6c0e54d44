"""Bounds on time that a machine which stops for a while does not break."""

import contextlib
import threading
import time

_TICK = 0.05  # seconds


@contextlib.contextmanager
def at_most(seconds):
    """Fails where the block takes longer, by a clock that stands still while this process may not run.

    A thread ticks; a tick counts for at most twice its length, however late it comes. Time in which the process
    computes counts in full, since a call that holds Python's lock lets no thread tick.
    """
    end, passed = threading.Event(), [0.0]

    def tick():
        before = time.monotonic()
        while not end.wait(_TICK):
            now = time.monotonic()
            passed[0] += min(now - before, 2 * _TICK)
            before = now

    computed, thread = time.process_time(), threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
    took = max(passed[0], time.process_time() - computed)
    assert took < seconds, f"took {took:.1f} s"
