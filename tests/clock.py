"""Time limits that hold even if the machine stops for a while."""

import contextlib
import threading
import time

_TICK = 0.05  # seconds


@contextlib.contextmanager
def at_most(seconds):
    """Fails if the block takes longer, by a clock that stops while this process is not scheduled.

    A thread ticks; each tick counts for at most twice its length, however late it comes. CPU time of the process counts
    in full, since a call that holds the GIL stops the thread.
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
