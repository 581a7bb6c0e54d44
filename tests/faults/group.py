"""Processes of one run on this machine, which a test starts, watches, disturbs and always ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from compiled_once import fast_flags

ROOT = Path(__file__).parents[2]


class Group:
    """Processes that run the same arguments of `python`; each with a log of its own.

    Args:
      arguments: after `python`.
      folder: where the logs go.
      count: processes; 1 starts no coordinator.
      devices: simulated devices of each process.
      environment: further variables.
    """

    def __init__(
        self, arguments: Sequence[str], folder: Path, count: int = 2, devices: int = 2, environment: dict | None = None
    ):
        self.logs = [folder / f"log{index}.{time.monotonic_ns()}" for index in range(count)]
        self.folder, self.port = folder, free_port()
        self.processes = []
        for index, log in enumerate(self.logs):
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-W", "ignore", *arguments],
                    env=self._environment(index, count, devices) | (environment or {}),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    cwd=folder,
                    start_new_session=True,
                )
            self.processes.append(process)

    def _environment(self, index: int, count: int, devices: int) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
        made = {
            **kept,
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "faults"), str(ROOT / "tests" / "checkpoint")]
            ),
            "PYTHONUNBUFFERED": "1",
            "JAX_PLATFORMS": "cpu",
            # These tests are not about speed, and programs compile twice as fast with these flags.
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {fast_flags()}",
        }
        if count > 1:
            made |= {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{self.port}",
                "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{self.port}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
            }
        return made

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait(self, seconds: float = 120) -> list[int]:
        """The exit statuses; raises with the ends of the logs after `seconds`."""
        end = time.monotonic() + seconds
        for process in self.processes:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"not ended after {seconds} s:\n{self.text()}") from None
        return [process.returncode for process in self.processes]

    def log(self, index: int = 0) -> str:
        return self.logs[index].read_text(errors="replace")

    def text(self) -> str:
        return "\n\n".join(f"process {i}:\n{self.log(i)[-3000:]}" for i in range(len(self.logs)))

    def until(self, condition: Callable[[], object], what: str, seconds: float = 90) -> None:
        """Waits for a condition."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {seconds} s\n{self.text()}"
            assert any(process.poll() is None for process in self.processes), f"all ended before: {what}\n{self.text()}"
            time.sleep(0.02)

    def says(self, words: str, index: int = 0, seconds: float = 90) -> None:
        self.until(lambda: words in self.log(index), f"process {index} says {words!r}", seconds)

    def signal(self, number: int, index: int) -> None:
        self.processes[index].send_signal(number)


def program(name: str, *arguments: object) -> list[str]:
    """Arguments of `python` that call a function of `programs`."""
    return ["-c", f"import programs; programs.{name}(*{[str(argument) for argument in arguments]!r})"]


def trainer(*arguments: object) -> list[str]:
    return ["-m", "jaxshard", "train", *map(str, arguments)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
