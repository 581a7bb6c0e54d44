"""The lines that processes exchange in a roll call: `jaxshard WORDS`, signed if the run has an id.

A signature proves that the sender knows the run's id. So a port scanner, another run's process, or a server that took
the port by mistake is not counted. Someone who can read the network can repeat a line, and is not kept out.
"""

import dataclasses
import hashlib
import hmac
import os
import re
from collections.abc import Mapping

LONGEST_CALL = 256  # bytes
LONGEST_ANSWER = 4096
RUN_ID = "JAXSHARD_RUN_ID"
_GREETING = b"jaxshard "
_JOB_IDS = ("SLURM_JOB_ID", "SKYPILOT_TASK_ID")  # the same in all processes of a job
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\]]+")
_CALL = re.compile(r"([0-9]{1,9}) ([0-9]{1,9})")
_ANSWER = re.compile(r"(go|(TimeoutError|ValueError|OSError) .+)", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Call:
    """A process's call: its number, from 1, and the number of processes."""

    rank: int
    count: int


def run_id(environment: Mapping[str, str] = os.environ) -> str:
    """The secret of this run's processes: `JAXSHARD_RUN_ID`, else the id of its job; "" if there is neither.

    >>> run_id({"SLURM_JOB_ID": "77"})
    '77'
    """
    of_job = () if "SLURM_HET_SIZE" in environment else _JOB_IDS  # parts of a heterogeneous job have their own ids
    return next(filter(None, (environment.get(name) for name in (RUN_ID, *of_job))), "")


def call_line(call: Call, run: str) -> bytes:
    """The line of a calling process.

    >>> call_line(Call(1, 2), "")
    b'jaxshard 1 2\\n'
    """
    return _line(f"{call.rank} {call.count}", run)


def answer_line(words: str, run: str) -> bytes:
    """The line of an answer: "go", or the name of an error and its message."""
    return _line(" ".join(words.split())[: LONGEST_ANSWER // 8], run)


def call_in(line: bytes, run: str) -> Call | None:
    """The call in a line; None if it is not from a process of this run. Process 0 does not call."""
    found = _CALL.fullmatch(_words_in(line, run))
    call = Call(*map(int, found.groups())) if found else None
    return call if call and 0 < call.rank < call.count else None


def answer_in(line: bytes, run: str) -> str | None:
    """The words of an answer; None if it is not from this run's process 0."""
    words = _words_in(line, run)
    return words if _ANSWER.fullmatch(words) and words.isprintable() else None


def may_become_one(line: bytes) -> bool:
    """Whether these first bytes may begin a line."""
    return line[: len(_GREETING)] == _GREETING[: len(line)]


def _line(words: str, run: str) -> bytes:
    return _GREETING + words.encode() + (b" " + _signature(words.encode(), run) if run else b"") + b"\n"


def _signature(words: bytes, run: str) -> bytes:
    return hmac.new(run.encode(errors="surrogateescape"), words, hashlib.sha256).hexdigest().encode()


def _words_in(line: bytes, run: str) -> str:
    """The words of a line; "" if it is not a line, or lacks this run's signature."""
    if not line.startswith(_GREETING) or not line.endswith(b"\n"):
        return ""
    words = line[len(_GREETING) : -1]
    if run:
        words, _, signature = words.rpartition(b" ")
        if not hmac.compare_digest(signature, _signature(words, run)):
            return ""
    return words.decode(errors="replace")


def is_http2(answer: bytes) -> bool:
    """Whether an answer is from a gRPC server, such as JAX's coordinator: HTTP/2 settings, or its preface."""
    return (answer[:2], answer[3:9]) == (b"\0\0", b"\4\0\0\0\0\0") or answer.startswith(b"PRI * HTTP/2.0")


def host_and_port(address: str, name: str) -> tuple[str, int]:
    """The parts of "host:port", or of "[::1]:port".

    Raises:
      ValueError: it is not such an address; `name` names it in the message.

    >>> host_and_port("[::1]:1234", "coordinator_address")
    ('::1', 1234)
    """
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 2**16
    if not _HOST.fullmatch(host) or not is_port:
        raise ValueError(f"initialize: {name} {address!r} must be host:port, with a port from 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)
