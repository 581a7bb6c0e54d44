"""Process 0's side of the roll call. A caller costs it a bounded number of bytes, and never blocks it."""

import contextlib
import errno
import os
import selectors
import socket
import time
from collections import deque

from jaxshard.processes import lines
from jaxshard.processes.lines import Call

_CALL_SECONDS = 5  # the time for a caller to identify itself
_MOST_STRANGERS = 256  # open connections that have not identified themselves yet


class Caller:
    """A connection and its bytes so far.

    Attributes:
      connection: the socket; it never blocks.
      until: the time by which it must identify itself.
      said: its bytes.
      rank: its process's number; 0 until it has identified itself.
    """

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.connection, self.until = connection, time.monotonic() + _CALL_SECONDS
        self.said, self.rank = b"", 0

    def hear(self) -> bool:
        """Reads received bytes; returns whether they may still become a call."""
        try:
            heard = self.connection.recv(lines.LONGEST_CALL)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.said += heard
        return bool(heard) and len(self.said) < lines.LONGEST_CALL and lines.may_become_one(self.said)

    def is_gone(self) -> bool:
        """Whether it has closed its connection; the process then calls again."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


class Roll:
    """The calls that have come to process 0.

    Args:
      server: the listening socket.
      count: the number of processes.
      run: the secret of this run's processes, or "".
    """

    def __init__(self, server: socket.socket, count: int, run: str):
        server.setblocking(False)
        self._server, self._count, self._run = server, count, run
        self._present: dict[int, Caller] = {}
        self._strangers: deque[Caller] = deque()  # the oldest first
        self._refused = False  # whether a call came from a process outside of this run
        self._trouble = ""

    def called(self, end: float, where: str) -> str:
        """Waits until all have called, or time is up, and answers all callers.

        Args:
          end: the last moment, by `time.monotonic`.
          where: for the message about missing processes.

        Returns:
          The name of an error and its message; "" if all have come.
        """
        with selectors.DefaultSelector() as self._ready:
            self._ready.register(self._server, selectors.EVENT_READ)
            while not self._trouble and not self._all_present():
                left = end - time.monotonic()
                if left > 0:
                    self._step(min(left, 0.5))
                else:
                    self._trouble = f"TimeoutError initialize: {self._missing()} did not connect {where}{self._hint()}"
        answer = lines.answer_line(self._trouble or "go", self._run)
        for caller in (*self._present.values(), *self._strangers):
            with contextlib.suppress(OSError), caller.connection:
                if caller.rank:
                    caller.connection.send(answer)
        return self._trouble

    def _all_present(self) -> bool:
        if len(self._present) == self._count - 1:
            self._step(0)  # drops closed connections, whose processes call again
        return len(self._present) == self._count - 1

    def _step(self, seconds: float) -> None:
        """Handles the events within this time."""
        for key, _ in self._ready.select(seconds):
            if key.data is None:
                self._accept()
            else:
                self._hear(key.data)
        while self._strangers and self._strangers[0].until < time.monotonic():
            self._drop(self._strangers[0])

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError as error:  # also if the caller has already left
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room()
            return
        if len(self._strangers) >= _MOST_STRANGERS:
            self._drop(self._strangers[0])
        caller = Caller(connection)
        self._strangers.append(caller)
        self._ready.register(connection, selectors.EVENT_READ, caller)

    def _make_room(self) -> None:
        """Frees a file descriptor, since this process has no more."""
        if self._strangers:
            self._drop(self._strangers[0])
        else:
            self._trouble = (
                f"OSError initialize: process 0 reached its limit of open files, and {self._count} processes connect "
                f"to it: raise the limit with `ulimit -n {self._count + 1024}`"
            )

    def _hear(self, caller: Caller) -> None:
        may_call = caller.hear()
        if caller.rank:  # it only waits for the answer, so an event means that it is gone
            self._drop(caller)
        elif b"\n" in caller.said:
            self._take(caller, lines.call_in(caller.said, self._run))
        elif not may_call:
            self._drop(caller)

    def _take(self, caller: Caller, call: Call | None) -> None:
        """Registers a caller as the process that it claims to be."""
        if call is None:
            self._refused |= lines.may_become_one(caller.said)
            self._drop(caller)
            return
        rank, count = call.rank, call.count
        if count != self._count:
            self._trouble = (
                f"ValueError initialize: process {rank} was started with num_processes {count}, process 0 with "
                f"{self._count}"
            )
        elif rank in self._present and not self._present[rank].is_gone():
            self._trouble = f"ValueError initialize: two processes have the process_id {rank} of {count}"
        elif rank in self._present:
            self._drop(self._present[rank])
        self._strangers.remove(caller)
        caller.rank = rank
        self._present[-1 if self._trouble else rank] = caller

    def _drop(self, caller: Caller) -> None:
        if caller.rank:
            del self._present[caller.rank]
        else:
            self._strangers.remove(caller)
        self._ready.unregister(caller.connection)
        caller.connection.close()

    def _missing(self) -> str:
        missing = [rank for rank in range(1, self._count) if rank not in self._present]
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        return f"process {', '.join(map(str, missing[:5]))}{more} of {self._count}"

    def _hint(self) -> str:
        if not self._refused:
            return "; check whether it was started, and its log"
        return f"; calls came from processes that do not know this run's id: {lines.RUN_ID} must be the same for all"


def listening_at(address: str, port: int) -> socket.socket:
    """A server at process 0's address, or at JAX_COORDINATOR_BIND_ADDRESS.

    Raises:
      OSError: the port is taken.
      ValueError: the variable does not hold an address.
    """
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    host, port = lines.host_and_port(bind, "JAX_COORDINATOR_BIND_ADDRESS") if bind else ("::", port)
    try:
        if host == "::" and socket.has_dualstack_ipv6():
            server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            family = socket.AF_INET6 if ":" in host and host != "::" else socket.AF_INET
            server = socket.create_server((host if host != "::" else "", port), family=family)
    except OSError as error:
        raise OSError(
            error.errno,
            f"initialize: process 0 cannot listen at {address}: {error}; another run may use the port. Choose a "
            "different port",
        ) from error
    server.listen(4096)
    return server
