"""Finds out which processes are there before JAX joins them: if one is missing, JAX ends the others and names none.

Process 0 listens at the port that JAX's coordinator takes later, and the others tell it their number. When all have
come, it answers "go" and frees the port; when time is up, it tells those that came which are missing.
"""

import socket
import time

from jaxshard.processes import lines
from jaxshard.processes.lines import Call
from jaxshard.processes.listening import Roll, listening_at

_LAST_WORDS_SECONDS = 5  # when time is up, process 0 says who is missing
_PAUSE_SECONDS = 0.1  # between two calls


def roll_call(address: str, count: int, rank: int, seconds: float) -> None:
    """Waits until all processes have called this.

    Where the environment has JAXSHARD_RUN_ID, or the id of a job, only processes with the same one are counted.

    Args:
      address: "host:port" of process 0's coordinator.
      count: how many processes there are.
      rank: the number of this one, from 0.
      seconds: the longest wait.

    Raises:
      TimeoutError: some are missing (it says which), or process 0 cannot be reached.
      OSError: the port is taken, on process 0.
      ValueError: the address is none; two processes have the same number, or disagree on how many there are.
    """
    host, port = lines.host_and_port(address, "coordinator_address")
    end, run = time.monotonic() + seconds, lines.run_id()
    if rank == 0:
        with listening_at(address, port) as server:
            answer = Roll(server, count, run).called(end, f"to {address} within {seconds:g} s")
    else:
        answer, last = _answer(host, port, Call(rank, count), run, end)
        if not answer:
            raise TimeoutError(
                f"initialize: process {rank} of {count} found no process 0 at {address} within {seconds:g} s ({last}); "
                "look whether it was started, and whether this host can reach it"
            )
    if answer not in ("", "go"):
        kind, _, message = answer.partition(" ")
        raise {"TimeoutError": TimeoutError, "ValueError": ValueError, "OSError": OSError}[kind](message)


def _answer(host: str, port: int, call: Call, run: str, end: float) -> tuple[str, str]:
    """(process 0's answer, "" if none came in time; what came of the last call)."""
    last = "no answer"
    while (left := end - time.monotonic()) > 0:
        try:
            line = _asked(host, port, lines.call_line(call, run), end)
        except OSError as error:
            last = str(error)
        else:
            answer = lines.answer_in(line, run)
            if answer or lines.is_http2(line):  # JAX's coordinator: process 0 has joined already, without a roll call
                return answer or "go", ""
            last = f"what is there says {line[:40]!r}" if line else "what is there does not answer"
            last += f"; {lines.RUN_ID} must be the same for all" if run or not line else ""
        time.sleep(min(_PAUSE_SECONDS, left))
    return "", last


def _asked(host: str, port: int, words: bytes, end: float) -> bytes:
    """What comes back: a line, or the first bytes of something else."""
    answer = b""
    with socket.create_connection((host, port), timeout=max(0.1, min(10, end - time.monotonic()))) as connection:
        connection.sendall(words)
        while not answer.endswith(b"\n") and len(answer) < lines.LONGEST_ANSWER and lines.may_become_one(answer):
            left = end + _LAST_WORDS_SECONDS - time.monotonic()
            connection.settimeout(min(max(0.001, left), 1e6))
            heard = connection.recv(lines.LONGEST_ANSWER)
            if not heard:
                break
            answer += heard
    return answer
