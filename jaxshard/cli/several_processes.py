"""`--processes N`: a run of several processes on this machine, to try a cluster's ways."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from jaxshard.trainer.config import Arguments

_DEVICES = 8
_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 60  # for the others, when one process has failed


def run(arguments: Sequence[str], given: Arguments) -> int:
    """Runs `jaxshard train` with these arguments in several processes; returns the first exit status that is not 0.

    Raises:
      ValueError: the devices do not divide.
    """
    count, devices = given.processes or 1, given.sharding.devices or _DEVICES
    if count < 1 or devices % count:
        raise ValueError(f"--processes {count}: {devices} devices (sharding.devices) must be divisible by it")
    if count > 1 and given.out is None:
        raise ValueError("several processes need --out DIR, the folder that all of them use")
    address = f"127.0.0.1:{_free_port()}"
    environments = [_environment(address, count, index, devices // count) for index in range(count)]
    command = [sys.executable, "-m", "jaxshard", "train", *_without_processes(arguments)]
    children = [
        subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_end_with_parent)
        for environment in environments
    ]
    with _signals_passed_on(children):
        return _first_failure(children)


def _environment(address: str, count: int, index: int, devices: int) -> dict[str, str]:
    return {
        **os.environ,
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
    """Waits for all; once one has failed, the others have a minute to see it and end."""
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
def _signals_passed_on(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Passes Ctrl-C on to all children, and SIGTERM to the first, which tells the others."""

    def pass_on(number: int, _: object) -> None:
        for child in children if number == signal.SIGINT else children[:1]:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """Called in a child: it is killed when its parent ends, so that it does not keep the folder locked."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
