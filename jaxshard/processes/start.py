"""The start of a run of several processes: each joins the others, or is told who is missing."""

import math
import operator
import os
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex, TypedDict, Unpack, cast

import jax

from jaxshard.processes import lines
from jaxshard.processes.lines import Call
from jaxshard.processes.listening import Roll, listening_at

_MOST_PROCESSES = 1_000_000
_LAST_WORDS_SECONDS = 5  # when time is up, process 0 says who is missing
_PAUSE_SECONDS = 0.1  # between two calls


class InitializeOptions(TypedDict, total=False):
    """What `initialize` hands on to `jax.distributed.initialize`, where each is explained. Times are in seconds."""

    local_device_ids: int | Sequence[int] | None
    cluster_detection_method: str | None
    initialization_timeout: int
    heartbeat_timeout_seconds: int
    shutdown_timeout_seconds: int
    coordinator_bind_address: str | None
    partition_index: int | None


class _Place(NamedTuple):
    """One process's place in the run, as far as it is known."""

    coordinator_address: str | None
    num_processes: int | None
    process_id: int | None


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    **options: Unpack[InitializeOptions],
) -> None:
    """Joins this process to the others of a run; call it first, once, in every process.

    Takes what is given, else JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, else what
    `jax.distributed` detects (Slurm, Open MPI, TPU pods, Kubernetes). A lone process needs no call and is left alone.

    Args:
      coordinator_address: "host:port" of process 0.
      num_processes: how many processes there are.
      process_id: which one this is, from 0.
      **options: passed on to `jax.distributed.initialize`; `initialization_timeout`, 300 seconds by default, is how
        long to wait for others.

    Raises:
      ValueError: some of the three are known and others not, a number is out of range, or processes disagree.
      TimeoutError: some processes did not come; it says which. (Where JAX detects the processes, the error is JAX's.)
      OSError: the coordinator's port is taken.
      RuntimeError: JAX runs already, or was initialized.

    >>> initialize(num_processes=1)  # a lone process: nothing happens
    """
    place = _Place(
        coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        num_processes if num_processes is not None else _from_environment("JAX_NUM_PROCESSES"),
        process_id if process_id is not None else _from_environment("JAX_PROCESS_ID"),
    )
    if all(value is None for value in place):
        _detect(options)
    elif place.num_processes != 1 or place.process_id not in (None, 0):
        _join(place, options)


def _join(place: _Place, options: InitializeOptions) -> None:
    known = place._asdict()
    missing = [name for name, value in known.items() if value is None]
    if missing:
        raise ValueError(f"initialize: {known} lacks {', '.join(missing)}; give all three, or none to detect them")
    address, count, rank = place
    seconds = options.get("initialization_timeout", 300)
    _check_numbers(count, rank, seconds)
    assert count is not None
    assert rank is not None
    if not jax.distributed.is_initialized():
        roll_call(str(address), count, rank, seconds)
    jax.distributed.initialize(address, count, rank, **options)


def _check_numbers(count: object, rank: object, seconds: object) -> None:
    for name, number in (("num_processes", count), ("process_id", rank)):
        if isinstance(number, bool) or not isinstance(number, SupportsIndex):
            raise TypeError(f"initialize: {name} {number!r} must be a whole number")
    count, rank = operator.index(cast("SupportsIndex", count)), operator.index(cast("SupportsIndex", rank))
    if not 1 <= count <= _MOST_PROCESSES:
        raise ValueError(f"initialize: num_processes {count} must be from 1 to {_MOST_PROCESSES:,}")
    if not 0 <= rank < count:
        raise ValueError(f"initialize: process_id {rank} is not in 0 .. {count - 1} (num_processes {count})")
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"initialize: initialization_timeout {seconds!r} must be a number of seconds above 0")


def _from_environment(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"initialize: {name}={text!r} in the environment is no whole number") from None


def _detect(options: InitializeOptions) -> None:
    """Lets JAX find its cluster; a machine that is part of none stays alone."""
    try:
        jax.distributed.initialize(**options)
    except ValueError as error:
        if "coordinator_address should be defined" not in str(error):
            raise


# The roll call finds out who is there before JAX joins them: if one is missing, JAX ends the others and names none.
# Process 0 listens at the port that JAX's coordinator takes later, and the others tell it their number. When all have
# come, it answers "go" and frees the port; when time is up, it tells those that came which are missing.


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
