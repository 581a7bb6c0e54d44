"""A call at the moment when Python begins to end, before it joins any thread.

What is registered with `atexit` runs too late: before it Python joins all threads, orbax's too, which may be waiting.
But the threads of a `ThreadPoolExecutor` are told to end before any thread is joined. So an `ExitNotice` has such a
thread, which is idle, and another one that waits for it to end.
"""

import concurrent.futures
import threading
from collections.abc import Callable


class ExitNotice:
    """Calls `told` in a thread once Python begins to end, unless `off` was called before.

    Args:
      told: from then on no `ThreadPoolExecutor` takes work. Python waits for it.
      name: of the thread.
    """

    def __init__(self, told: Callable[[], object], name: str):
        self._told, self._is_off = told, False
        self._pool = concurrent.futures.ThreadPoolExecutor(1)  # which would end if nothing held it
        self._idle = self._pool.submit(threading.current_thread).result()
        threading.Thread(target=self._wait, name=name).start()

    def off(self) -> None:
        """The call is no longer wanted."""
        self._is_off = True
        self._pool.shutdown(wait=False)

    def _wait(self) -> None:
        self._idle.join()
        if not self._is_off:
            self._told()
