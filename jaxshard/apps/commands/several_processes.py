"""`--processes N`: a run of several processes on this machine, to test multi-host behaviour."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from jaxshard.apps.config.config import Arguments
from jaxshard.system.command import python

_DEVICES = 8
_RUN_ID = "JAXSHARD_RUN_ID"
_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 60  # for the others, after one process has failed


def run(arguments: Sequence[str], given: Arguments) -> int:
    """Runs `jaxshard train` with these arguments in several processes; returns the first exit status that is not 0.

    Raises:
      ValueError: the devices do not divide.
    """
    count, devices = 1 if given.processes is None else given.processes, given.sharding.devices or _DEVICES
    if count < 1:
        raise ValueError(f"--processes {count}: it must be above 0")
    if devices % count:
        raise ValueError(f"--processes {count}: {devices} devices (sharding.devices) must be divisible by it")
    if count > 1 and given.out is None:
        raise ValueError("several processes need --out DIR, the same folder for all of them")
    address = f"127.0.0.1:{_free_port()}"
    run = os.environ.get(_RUN_ID) or secrets.token_hex(16)
    environments = [_environment(address, count, index, devices // count, run) for index in range(count)]
    command = python("-m", "jaxshard", "train", *_without_processes(arguments))
    children = [
        subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_end_with_parent)
        for environment in environments
    ]
    with _signals_passed_on(children) as received:
        status = _first_failure(children)
    others = received - {signal.SIGINT, signal.SIGTERM}
    return (
        128 + min(others) if others and status == 128 + signal.SIGTERM else status
    )  # the children get these as SIGTERM


def _environment(address: str, count: int, index: int, devices: int, run: str) -> dict[str, str]:
    return {
        **os.environ,
        _RUN_ID: run,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
    }


def _without_processes(arguments: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--processes" and not argument.startswith("--processes="):
            kept.append(argument)
        skip = argument == "--processes"
    return kept


def _first_failure(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for all; after one fails, gives the others a minute to end."""
    end = float("inf")
    status = 0
    while any(child.poll() is None for child in children):
        failed = [child.returncode for child in children if child.returncode]
        if failed and not status:
            status, end = failed[0], time.monotonic() + _GRACE_SECONDS
        if time.monotonic() > end:
            for child in children:
                child.kill()
        time.sleep(0.05)
    failed = [status, *(child.returncode for child in children)]
    status = next((one for one in failed if one), 0)
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _signals_passed_on(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[set[int]]:
    """Forwards Ctrl-C to all children, and other signals to the first, which tells the others. SIGHUP is forwarded
    once, as SIGTERM: a closing terminal sends several. Yields the set of signals received."""
    received: set[int] = set()

    def pass_on(number: int, _: object) -> None:
        again = number in received
        received.add(number)
        if number == signal.SIGHUP:
            to_whom, number = [] if again else children[:1], signal.SIGTERM
        else:
            to_whom = children if number == signal.SIGINT else children[:1]
        for child in to_whom:
            child.send_signal(number)

    numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """Has the kernel kill this child when its parent ends, so that it does not keep the folder locked."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
