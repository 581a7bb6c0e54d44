"""The cost of several devices against one of the same framework, for jaxshard's and PyTorch's steps, in processes.

XLA for CPU is itself slower than PyTorch, so seconds of the two frameworks do not compare their sharding. The batch is
the same for any number of devices, and all devices share the same cores.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from jaxshard.apps.bench import models
from jaxshard.apps.bench.step import OURS, Row, UnfitError, alternated, beside

TORCH = ("torch-ddp", "torch-zero", "torch-fsdp2")
_LIMIT_SECONDS = 300  # for a group to start, and for a round
_STEPS = 3  # per round
_MARK = "> "  # begins each line of a worker
_WORDS = {
    "ModuleNotFoundError: No module named 'torch'": "PyTorch is not installed: pip install torch, or give --torch"
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """The training task.

    Attributes:
      sizes: of `decoders.Decoder`.
      rows: of the global batch.
      rounds: of timing one device and several alternately.
      torch: a Python with PyTorch.
    """

    sizes: dict[str, int]
    rows: int
    rounds: int
    torch: str = sys.executable


def setting(size: str, rows: int, rounds: int, torch: Path | None) -> Setting:
    """The setting for the decoder of that size: "small" or "toy"."""
    decoder = models.model("decoder", size)
    names = ("layers", "width", "hidden", "heads", "vocabulary", "length")
    return Setting({n: getattr(decoder, n) for n in names}, rows, rounds, str(torch or sys.executable))


def is_python(file: Path) -> bool:
    """Whether this is a working Python 3."""
    try:
        found = subprocess.run([file, "-c", "import sys; print(sys.version_info[0])"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0 and found.stdout.strip() == b"3"


def rows(names: Sequence[str], count: int, given: Setting) -> Iterator[Row]:
    """A row for each step on `count` devices, against one device of the same framework.

    Args:
      names: of jaxshard's strategies, each of which runs in `count` processes and in one process with `count` devices;
        and of `TORCH`.
      count: the number of devices.
      given: the training task.
    """
    for name in names:
        in_one = [False] if name in TORCH else [False, True]
        for together in in_one:
            where = f"{count} devices in one process" if together else f"{count} processes"
            try:
                yield Row(where, "decoder", name, _measured(name, count, together, given))
            except UnfitError as error:
                yield Row(where, "decoder", name, {}, str(error))


def _measured(name: str, count: int, together: bool, given: Setting) -> dict[str, float]:
    with ExitStack() as stack:
        one = stack.enter_context(Group([_command(_alone(name), 0, 1, 1, 0, given)]))
        port, num = free_port(), 1 if together else count
        devices = count if together else 1
        commands = [_command(name, rank, num, devices, port, given) for rank in range(num)]
        several = stack.enter_context(Group(commands))
        pairs = alternated(lambda: several.run(_STEPS), lambda: one.run(_STEPS), given.rounds)
    return beside([(a / _STEPS, b / _STEPS) for a, b in pairs], "step")


def _alone(name: str) -> str:
    """The same framework on one device."""
    return "torch-one" if name in TORCH else "optax"


def _command(name: str, rank: int, processes: int, devices: int, port: int, given: Setting) -> list[str]:
    kind = name.removeprefix("torch-")
    plain = {"kind": kind, "rank": rank, "processes": processes, "devices": devices, "port": port}
    text = json.dumps({**plain, "sizes": given.sizes, "rows": given.rows})
    if name.startswith("torch-"):
        return [given.torch, str(Path(__file__).with_name("torch_worker.py")), text]
    code = f"import sys; sys.path[:] = {sys.path!r}; from jaxshard.apps.bench.jax_worker import main; main()"
    return [sys.executable, "-P", "-c", code, text]  # -P: import no module of the current folder


def free_port() -> int:
    """A free port of 127.0.0.1."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Group:
    """Processes that run steps together; a context.

    Args:
      commands: one for each process.

    Raises:
      UnfitError: one cannot be started, ends early, or is not ready in time; the message has its last line of errors.
    """

    def __init__(self, commands: Sequence[Sequence[str]]):
        self._processes: list[subprocess.Popen[str]] = []
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the processes)
        try:
            for command in commands:
                self._processes.append(self._start(command))
            self._lines()
        except BaseException:
            self._end()
            raise

    def _start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        try:
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)
        except OSError as error:
            raise UnfitError(f"{command[0]} cannot be run: {error.strerror}") from None

    def run(self, count: int) -> float:
        """Runs steps; returns the seconds of the slowest process."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
        return max(map(float, self._lines()))

    def _lines(self) -> list[str]:
        """A line from each process."""
        late = threading.Timer(_LIMIT_SECONDS, self._kill)
        late.start()
        try:
            return [self._line(process) for process in self._processes]
        finally:
            late.cancel()

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith(_MARK)), "")  # gloo writes lines of its own
        if not line:
            process.wait()
            self._errors.seek(0)
            errors = [line for line in self._errors.read().splitlines() if line.strip()]
            last = errors[-1].strip() if errors else f"it exited with status {process.returncode}"
            raise UnfitError(_WORDS.get(last, last))
        return line.removeprefix(_MARK)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _end(self) -> None:
        self._kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()


NAMES = (*OURS, *TORCH)
