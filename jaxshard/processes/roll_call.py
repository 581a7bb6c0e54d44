"""Who is there, asked before JAX joins the processes: JAX itself ends the process when one is missing, and names none.

Process 0 listens where its coordinator will, and the others tell it their number. When all have come it sends them on
their way and frees the port; when time is up it tells those who came who is missing.
"""

import contextlib
import os
import socket
import time

_GREETING = "jaxshard"


def roll_call(address: str, count: int, rank: int, seconds: float) -> None:
    """Returns on all processes once all are there.

    Args:
      address: "host:port" of process 0's coordinator.
      count, rank: of processes, and of this one.
      seconds: to wait.

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
                missing = [i for i in range(1, count) if i not in callers]
                trouble = (
                    f"TimeoutError initialize: process {_listed(missing)} of {count} did not come to {address} within "
                    f"{seconds:g} s; look whether it was started, and at its log"
                )
                break
            rank, said = _heard(connection)
            if rank is None:
                connection.close()
                continue
            if said != count:
                trouble = f"ValueError initialize: process {rank} says that there are {said} processes, 0 says {count}"
            elif rank in callers and not _dropped_if_gone(callers, rank):
                trouble = f"ValueError initialize: two processes say that they are process {rank} of {count}"
            callers[rank if rank not in callers else -1] = connection
            for each in list(callers) if len(callers) == count - 1 else ():
                _dropped_if_gone(callers, each)
        for connection in callers.values():
            with contextlib.suppress(OSError), connection:
                connection.sendall(f"{_GREETING} {trouble or 'go'}\n".encode())
    _raise(trouble)


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
    """(number, how many there are) of a caller; None: it is no process of ours."""
    connection.settimeout(5)
    try:
        greeting, rank, count = connection.recv(100).decode().split()
        return (int(rank), int(count)) if greeting == _GREETING else (None, 0)
    except (OSError, ValueError):
        return None, 0


def _dropped_if_gone(callers: dict[int, socket.socket], rank: int) -> bool:
    """Whether the caller's end was closed: it then calls again."""
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
            with socket.create_connection(
                (host, port), timeout=max(0.1, min(10, end - time.monotonic()))
            ) as connection:
                connection.sendall(f"{_GREETING} {rank} {count}\n".encode())
                connection.settimeout(max(0.1, end - time.monotonic()) + 5)  # process 0 says who is missing
                answer = connection.makefile("rb").readline().decode(errors="replace")
        except OSError as error:
            last = str(error)
            time.sleep(0.1)
            continue
        if answer.startswith(_GREETING):
            _raise("" if answer.split()[1] == "go" else answer.removeprefix(_GREETING).strip())
            return
        if answer:  # JAX's own coordinator: process 0 asks nobody
            return
        time.sleep(0.1)
    raise TimeoutError(
        f"initialize: process {rank} of {count} found no process 0 at {address} within {seconds:g} s ({last}); look "
        "whether it was started, and whether this host can reach it"
    )


def _raise(trouble: str) -> None:
    if trouble:
        kind, _, message = trouble.partition(" ")
        raise {"TimeoutError": TimeoutError, "ValueError": ValueError}[kind](message)


def _listed(numbers: list[int]) -> str:
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return ", ".join(map(str, numbers[:5])) + more
