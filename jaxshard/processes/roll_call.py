"""Finds out which processes are there before JAX joins them: if one is missing, JAX ends the others and names none.

Process 0 listens at the port that JAX's coordinator takes later, and the others tell it their number. When all have
come, it answers "go" and frees the port; when time is up, it tells those that came which are missing.
"""

import contextlib
import os
import socket
import time

_GREETING = "jaxshard"


def roll_call(address: str, count: int, rank: int, seconds: float) -> None:
    """Waits until all processes have called this.

    Args:
      address: "host:port" of process 0's coordinator.
      count: how many processes there are.
      rank: the number of this one, from 0.
      seconds: the longest wait.

    Raises:
      TimeoutError: some are missing (it says which), or process 0 cannot be reached.
      OSError: the port is taken, on process 0.
      ValueError: two processes have the same number, or disagree on how many there are.
    """
    host, _, port = address.rpartition(":")
    if rank == 0:
        _listen(address, int(port), count, seconds)
    else:
        _call(address, host.strip("[]"), int(port), count, rank, seconds)


def _listen(address: str, port: int, count: int, seconds: float) -> None:
    end, callers = time.monotonic() + seconds, dict[int, socket.socket]()
    trouble = ""
    with _server(address, port) as server:
        while len(callers) < count - 1 and not trouble:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                trouble = _missing(callers, address, count, seconds)
            else:
                trouble = _received(connection, callers, count)
        _answer(callers, trouble or "go")
    _raise(trouble)


def _missing(callers: dict[int, socket.socket], address: str, count: int, seconds: float) -> str:
    missing = [i for i in range(1, count) if i not in callers]
    return (
        f"TimeoutError initialize: process {_listed(missing)} of {count} did not come to {address} within "
        f"{seconds:g} s; look whether it was started, and at its log"
    )


def _received(connection: socket.socket, callers: dict[int, socket.socket], count: int) -> str:
    """Adds a caller; once it may be the last, drops those that are gone and will call again. Returns the trouble."""
    rank, said = _heard(connection)
    if rank is None:
        connection.close()
        return ""
    trouble = ""
    if said != count:
        trouble = f"ValueError initialize: process {rank} says that there are {said} processes, 0 says {count}"
    elif rank in callers and not _dropped_if_gone(callers, rank):
        trouble = f"ValueError initialize: two processes say that they are process {rank} of {count}"
    callers[rank if rank not in callers else -1] = connection
    for each in list(callers) if len(callers) == count - 1 else ():
        _dropped_if_gone(callers, each)
    return trouble


def _answer(callers: dict[int, socket.socket], text: str) -> None:
    for connection in callers.values():
        with contextlib.suppress(OSError), connection:
            connection.sendall(f"{_GREETING} {text}\n".encode())


def _server(address: str, port: int) -> socket.socket:
    bound, _, bound_port = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{port}").rpartition(":")
    bound = bound.strip("[]")
    try:
        if bound == "::" and socket.has_dualstack_ipv6():
            server = socket.create_server(("", int(bound_port)), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            server = socket.create_server((bound if bound != "::" else "", int(bound_port)))
    except OSError as error:
        raise OSError(
            error.errno,
            f"initialize: process 0 cannot listen at {address}: {error}; is another run there? Take another port",
        ) from error
    server.listen(4096)
    return server


def _heard(connection: socket.socket) -> tuple[int | None, int]:
    """(the caller's number, how many processes it says there are); number None: it is no process of a run."""
    connection.settimeout(5)
    try:
        greeting, rank, count = connection.recv(100).decode().split()
        return (int(rank), int(count)) if greeting == _GREETING else (None, 0)
    except (OSError, ValueError):
        return None, 0


def _dropped_if_gone(callers: dict[int, socket.socket], rank: int) -> bool:
    """Whether a caller has closed its connection, in which case it calls again; if so, drops it."""
    callers[rank].settimeout(0)
    try:
        gone = callers[rank].recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        gone = False
    except OSError:
        gone = True
    callers[rank].settimeout(5)
    if gone:
        callers.pop(rank).close()
    return gone


def _call(address: str, host: str, port: int, count: int, rank: int, seconds: float) -> None:
    end, last = time.monotonic() + seconds, "no answer"
    while time.monotonic() < end:
        try:
            answer = _asked(host, port, f"{_GREETING} {rank} {count}\n", end)
        except OSError as error:
            last = str(error)
            time.sleep(0.1)
            continue
        if answer.startswith(_GREETING):
            _raise("" if answer.split()[1] == "go" else answer.removeprefix(_GREETING).strip())
            return
        if answer:  # from JAX's coordinator: process 0 has joined already, without a roll call
            return
        time.sleep(0.1)
    raise TimeoutError(
        f"initialize: process {rank} of {count} found no process 0 at {address} within {seconds:g} s ({last}); look "
        "whether it was started, and whether this host can reach it"
    )


def _asked(host: str, port: int, words: str, end: float) -> str:
    """The line that comes back from process 0."""
    with socket.create_connection((host, port), timeout=max(0.1, min(10, end - time.monotonic()))) as connection:
        connection.sendall(words.encode())
        connection.settimeout(max(0.1, end - time.monotonic()) + 5)  # when time is up, process 0 says who is missing
        return connection.makefile("rb").readline().decode(errors="replace")


def _raise(trouble: str) -> None:
    if trouble:
        kind, _, message = trouble.partition(" ")
        raise {"TimeoutError": TimeoutError, "ValueError": ValueError}[kind](message)


def _listed(numbers: list[int]) -> str:
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return ", ".join(map(str, numbers[:5])) + more
