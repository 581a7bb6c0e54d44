"""The start of a run of several processes: each joins the others, or gets an error that names missing ones."""

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
_LAST_WORDS_SECONDS = 5  # the time for process 0's answer about missing processes, after time is up
_PAUSE_SECONDS = 0.1  # between two calls


class InitializeOptions(TypedDict, total=False):
    """Options that `initialize` passes on to `jax.distributed.initialize`, which documents them. Times in seconds."""

    local_device_ids: int | Sequence[int] | None
    cluster_detection_method: str | None
    initialization_timeout: int
    heartbeat_timeout_seconds: int
    shutdown_timeout_seconds: int
    coordinator_bind_address: str | None
    partition_index: int | None


class _Place(NamedTuple):
    """One process's place in the run, as far as known."""

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

    Uses its arguments, else JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, else the cluster that
    `jax.distributed` detects (Slurm, Open MPI, TPU pods, Kubernetes). In a lone process it does nothing.

    Args:
      coordinator_address: "host:port" of process 0.
      num_processes: the number of processes.
      process_id: this process's index, from 0.
      **options: passed on to `jax.distributed.initialize`; `initialization_timeout`, 300 seconds by default, is the
        longest wait for others.

    Raises:
      ValueError: some of the three are known and others not, a number is out of range, or processes disagree.
      TimeoutError: some processes did not connect; the message names them. (If JAX detects the processes, JAX raises.)
      OSError: the coordinator's port is taken.
      RuntimeError: JAX already runs, or was already initialized.

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
            raise TypeError(f"initialize: {name} {number!r} must be an integer")
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
        raise ValueError(f"initialize: {name}={text!r} in the environment is not an integer") from None


def _detect(options: InitializeOptions) -> None:
    """Lets JAX detect a cluster; without one, the process stays alone."""
    try:
        jax.distributed.initialize(**options)
    except ValueError as error:
        if "coordinator_address should be defined" not in str(error):
            raise


# The roll call checks that all processes are there before JAX joins them: if one is missing, JAX ends the others
# without naming it. Process 0 listens at the port that JAX's coordinator uses later, and the others send it their
# numbers. When all have come, it answers "go" and frees the port; when time is up, it answers with the missing ones.


def roll_call(address: str, count: int, rank: int, seconds: float) -> None:
    """Waits until all processes have called this.

    If the environment has JAXSHARD_RUN_ID, or the id of a job, only processes with the same one are counted.

    Args:
      address: "host:port" of process 0's coordinator.
      count: the number of processes.
      rank: this process's index, from 0.
      seconds: the longest wait.

    Raises:
      TimeoutError: some are missing (the message names them), or process 0 cannot be reached.
      OSError: the port is taken, on process 0.
      ValueError: the address is invalid; two processes have the same number, or disagree on the number of processes.
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
                "check whether it was started, and whether this host can reach it"
            )
    if answer not in ("", "go"):
        kind, _, message = answer.partition(" ")
        raise {"TimeoutError": TimeoutError, "ValueError": ValueError, "OSError": OSError}[kind](message)


def _answer(host: str, port: int, call: Call, run: str, end: float) -> tuple[str, str]:
    """(process 0's answer, or "" if none came in time; the result of the last call)."""
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
            last = f"the server there answered {line[:40]!r}" if line else "the server there does not answer"
            last += f"; {lines.RUN_ID} must be the same for all" if run or not line else ""
        time.sleep(min(_PAUSE_SECONDS, left))
    return "", last


def _asked(host: str, port: int, words: bytes, end: float) -> bytes:
    """The reply to a call: a line, or the first bytes of something else."""
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
