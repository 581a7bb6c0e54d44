"""What the processes of a run agree on, before one of them does what the others do not. A lone process agrees at once.

Every function here must be called by all processes alike. They meet at a barrier of `jax.distributed` that knows who is
missing, and then exchange a few bytes through their devices.
"""

import contextlib
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from jaxshard.base.tree import is_key, named_leaves, path_of

T = TypeVar("T")
MEETING_SECONDS = 600  # so much longer one process may take than another, to read its shards, say
_meetings = itertools.count()


class ProcessError(RuntimeError):
    """Another process could not do its part, or said something else. `process`: its index."""

    def __init__(self, process: int, reason: str):
        super().__init__(f"process {process}: {reason}")
        self.process = process


def meet(what: str) -> None:
    """Waits until all processes are here.

    Raises:
      TimeoutError: some did not come within MEETING_SECONDS; it says which.
    """
    if jax.process_count() == 1:
        return
    name = f"jaxshard.{next(_meetings)}"
    try:
        _wait_for_all(name, MEETING_SECONDS)
    except ModuleNotFoundError:  # then without a time limit
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
    except Exception as error:
        raise TimeoutError(
            f"{what}: not all {jax.process_count()} processes came within {MEETING_SECONDS:g} s; all of them must make "
            f"this call: {error}"
        ) from error


def take_leave(seconds: float) -> None:
    """Leaves the others in order, if all of them come to do so within `seconds`; else it changes nothing.

    A process that just ends cuts off whatever others still do, and the coordinator cuts off the others themselves.
    """
    with contextlib.suppress(Exception):
        _wait_for_all("jaxshard.end", seconds)
        jax.distributed.shutdown()


def _wait_for_all(name: str, seconds: float) -> None:
    from orbax.checkpoint import multihost

    wait: Any = multihost.get_barrier_sync_fn(processes=set(range(jax.process_count())))
    wait(key=name, timeout_ms=int(seconds * 1000))


def gathered(what: str, said: str) -> list[str]:
    """What each process said, in their order."""
    if jax.process_count() == 1:
        return [said]
    from jax.experimental import multihost_utils

    meet(what)
    mine = np.frombuffer(json.dumps([what, said]).encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(mine)))).ravel()
    padded = np.zeros((int(lengths.max()) // 1024 + 1) * 1024, np.uint8)  # few sizes: each is a program
    padded[: len(mine)] = mine
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(lengths), -1)
    everyone = [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]
    for process, (other, _) in enumerate(everyone):
        if other != everyone[0][0]:
            raise ProcessError(
                process, f"it is at {other!r}, process 0 at {everyone[0][0]!r}: all must make the same calls"
            )
    return [text for _, text in everyone]


def attempted(what: str, attempt: Callable[[], T]) -> tuple[T | None, dict[int, BaseException]]:
    """(what it returned here, process -> error): this process's own error, and the others' as `ProcessError`."""
    result, mine = None, None
    try:
        result = attempt()
    except Exception as error:
        mine = error
    said = gathered(what, f"{type(mine).__name__}: {mine}" if mine else "")
    errors: dict[int, BaseException] = {i: ProcessError(i, text) for i, text in enumerate(said) if text}
    return result, errors | ({jax.process_index(): mine} if mine else {})


def together(what: str, attempt: Callable[[], T]) -> T:
    """What `attempt` returns, on every process; where it fails for one, it fails for all."""
    result, errors = attempted(what, attempt)
    raise_first(errors)
    return result  # pyright: ignore[reportReturnType]


def raise_first(errors: dict[int, BaseException]) -> None:
    """This process's own error before another's."""
    for error in (errors.get(jax.process_index()), *errors.values()):
        if error is not None:
            raise error


def from_first(what: str, make: Callable[[], Any]) -> Any:
    """What the first process makes (anything that JSON can say), on every process; so too its error."""
    made = together(what, lambda: json.dumps(make()) if jax.process_index() == 0 else "")
    return json.loads(gathered(what, made)[0])


def check_same(what: str, said: str, cure: str) -> None:
    """Raises ProcessError, on every process, unless all say the same; it names the first line that differs.

    `cure` tells what to do.
    """
    digests = gathered(what, hashlib.sha256(said.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everyone = gathered(what, said)
    process = next(i for i, digest in enumerate(digests) if digest != digests[0])
    lines = itertools.zip_longest(everyone[0].splitlines(), everyone[process].splitlines(), fillvalue="nothing")
    first, other = next((a.strip(), b.strip()) for a, b in lines if a != b)
    raise ProcessError(process, f"{what}: it has {_part(other)!r}, process 0 {_part(first)!r}: {cure}")


def check_same_arrays(what: str, tree: Any) -> None:
    """Raises ProcessError, on every process, where they hold other values in what is not on the devices of all."""
    if jax.process_count() == 1:
        return
    lines = []
    for names, leaf in named_leaves(tree):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            x = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
            lines.append(f"{path_of(names)}: {x.dtype}{list(x.shape)} with CRC-32 {zlib.crc32(x.tobytes()):08x}")
    if lines:
        check_same(what, "\n".join(lines), "give the same values to all processes (from the same seed, say)")


def _part(line: str) -> str:
    return line if len(line) <= 160 else f"{line[:160]}..."
