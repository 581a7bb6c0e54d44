"""Processes of a run exchange what they are about to do, and stop together if they differ.

All processes must call each function here, in the same order; inside `among`, all processes of a mesh. They meet at a
barrier that names missing processes, and then exchange a few bytes through their devices. A lone process agrees with
itself at once.
"""

import collections
import contextlib
import contextvars
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import is_key, named_leaves, path_of
from jaxshard.base.types import AnyMesh, T, Tree, processes_of

MEETING_SECONDS = 600  # the longest wait of the first process for the last one, which may read larger shards
_Processes = tuple[int, ...]
_meetings: dict[_Processes, Iterator[int]] = collections.defaultdict(
    itertools.count
)  # a barrier's name works only once
_among: contextvars.ContextVar[_Processes | None] = contextvars.ContextVar("among", default=None)


class ProcessError(RuntimeError):
    """Another process failed, or differs from this one. `process`: its index."""

    def __init__(self, process: int, reason: str):
        super().__init__(f"process {process}: {reason}")
        self.process = process

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which would give `__init__` the message alone."""
        return BaseException.__new__, (type(self), *self.args), self.__dict__


@contextlib.contextmanager
def among(processes: AnyMesh | _Processes) -> Iterator[None]:
    """While entered, only these processes, or those of a mesh's devices, must make the calls of this module.

    The first of them takes the part of process 0. Other threads are not affected.

    Raises:
      ValueError: this process is not one of them.

    >>> with among(jax.sharding.Mesh(jax.devices()[:2], ("data",))):
    ...     gathered("hosts", "node-7")
    ['node-7']
    """
    found = tuple(sorted(processes)) if isinstance(processes, tuple) else processes_of(processes)
    if jax.process_index() not in found:
        raise ValueError(
            f"process {jax.process_index()} has no device in this mesh, which is of the processes {list(found)}: call "
            "this only on those"
        )
    token = _among.set(found)
    try:
        yield
    finally:
        _among.reset(token)


def present() -> _Processes:
    """The processes that must make the calls of this module: all, but inside `among`."""
    found = _among.get()
    return tuple(range(jax.process_count())) if found is None else found


def is_alone() -> bool:
    """Whether this process need not ask others: the job, or `among`, has no further one."""
    return len(present()) == 1


def are_all_present() -> bool:
    """Whether all processes of the job must make the calls of this module."""
    return len(present()) == jax.process_count()


def devices() -> list[Any]:
    """The devices of the processes that are present, in JAX's order."""
    found = set(present())
    return [device for device in jax.devices() if device.process_index in found]


def is_first() -> bool:
    """Whether this is process 0, or the first inside `among`."""
    return jax.process_index() == present()[0]


def meet(what: str) -> None:
    """Waits until all processes are here. `what` names the call in messages.

    Raises:
      TimeoutError: some did not come within MEETING_SECONDS; the message names them.
    """
    processes = present()
    if is_alone():
        return
    group = "" if are_all_present() else f"{'_'.join(map(str, processes))}."
    name = f"jaxshard.{group}{next(_meetings[processes])}"
    try:
        _wait_for_all(name, MEETING_SECONDS)
    except ModuleNotFoundError:  # without orbax: a barrier that has no time limit
        _exchanged(np.zeros(1, np.uint8))
    except Exception as error:
        raise TimeoutError(
            f"{what}: not all {len(processes)} processes made this call within {MEETING_SECONDS:g} s; all must "
            f"make it: {error}"
        ) from error


def _wait_for_all(name: str, seconds: float) -> None:
    """Waits until all processes have called this with the same name. Each name works only once.

    JAX has this barrier in the client of its coordination service, but no public access: `sync_global_devices` has no
    time limit and names no process. Orbax gives public access; only `checkpoint.storage` also uses orbax.

    Raises:
      ModuleNotFoundError: orbax is not installed.
      Exception: not all came within `seconds`. The coordination service's message names the missing processes; the
        type depends on the version of JAX.
    """
    from orbax.checkpoint import multihost

    wait = multihost.get_barrier_sync_fn(processes=set(present()))
    wait(key=name, timeout_ms=int(seconds * 1000))


def take_leave(seconds: float) -> None:
    """Leaves `jax.distributed` in order if all processes call this within `seconds`; otherwise it changes nothing.

    A process that ends without it interrupts the others' work; if it is the coordinator, it ends them.
    """
    with contextlib.suppress(Exception):
        _wait_for_all("jaxshard.end", seconds)
        jax.distributed.shutdown()


def gathered(what: str, said: str) -> list[str]:
    """The texts of all processes, in the order of the processes.

    Args:
      what: names the call in messages; all processes give the same.
      said: this process's text.

    Raises:
      TimeoutError: not all processes came within 600 seconds; the message names them.
      ProcessError: a process came from another call, with another `what`.

    >>> gathered("hosts", "node-7")  # in a lone process
    ['node-7']
    """
    processes = present()
    if is_alone():
        return [said]
    meet(what)
    mine = np.frombuffer(json.dumps([what, said]).encode(), np.uint8)
    lengths = _exchanged(np.array([len(mine)], np.int32)).ravel()
    padded = np.zeros((int(lengths.max()) // 1024 + 1) * 1024, np.uint8)  # few sizes: each is compiled
    padded[: len(mine)] = mine
    everyone = [json.loads(row[:length].tobytes()) for row, length in zip(_exchanged(padded), lengths, strict=True)]
    for process, (other, _) in zip(processes, everyone, strict=True):
        if other != everyone[0][0]:
            raise ProcessError(
                process,
                f"it is at {other!r}, process {processes[0]} at {everyone[0][0]!r}: all must make the same calls",
            )
    return [text for _, text in everyone]


def _exchanged(row: np.ndarray) -> np.ndarray:
    """(processes, elements): the rows of all processes, in their order, through one device of each."""
    first = {device.process_index: device for device in reversed(devices())}
    mesh = Mesh([first[process] for process in present()], ("processes",))
    rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("processes")), row[None])
    return np.asarray(jax.jit(_same, out_shardings=NamedSharding(mesh, P()))(rows))


def _same(x: jax.Array) -> jax.Array:
    return x


def attempted(what: str, attempt: Callable[[], T]) -> tuple[T | None, dict[int, BaseException]]:
    """Calls `attempt` on every process, and exchanges the errors.

    Returns:
      (its result here, or None if it failed; process -> error: this process's own, the others' as `ProcessError`).
    """
    result, mine = None, None
    try:
        result = attempt()
    except Exception as error:
        mine = error
    said = gathered(what, f"{type(mine).__name__}: {mine}" if mine else "")
    failed = [(process, text) for process, text in zip(present(), said, strict=True) if text]
    errors: dict[int, BaseException] = {process: ProcessError(process, text) for process, text in failed}
    return result, errors | ({jax.process_index(): mine} if mine else {})


def together(what: str, attempt: Callable[[], T]) -> T:
    """Calls `attempt` on every process and returns its result; if it fails on one process, all raise.

    Args:
      what: names the call in messages; all processes give the same.
      attempt: the work of each process.

    Raises:
      Exception: this process's own error, of its own type.
      ProcessError: it failed on another process.
      TimeoutError: as `gathered`.

    >>> together("read", lambda: 7)
    7
    """
    result, errors = attempted(what, attempt)
    raise_first(errors)
    return cast(T, result)


def raise_first(errors: dict[int, BaseException]) -> None:
    """Raises this process's own error, else the first of another process, if any."""
    for error in (errors.get(jax.process_index()), *errors.values()):
        if error is not None:
            raise error


def from_first(what: str, make: Callable[[], T]) -> T:
    """Calls `make` on process 0 alone (inside `among`, on the first); all return its result, or raise its error.

    Args:
      what: names the call in messages; all processes give the same.
      make: its result is sent as JSON, so it must consist of strings, numbers, booleans, None, lists and dicts.

    Raises:
      Exception: on process 0 the error of `make`; on the others ProcessError.
      TimeoutError: as `gathered`.

    >>> from_first("resume", lambda: {"step": 100})
    {'step': 100}
    """
    made = together(what, lambda: json.dumps(make()) if is_first() else "")
    return json.loads(gathered(what, made)[0])


def check_same(what: str, said: str, cure: str) -> None:
    """Checks that all processes give the same text.

    Args:
      what: names the call in messages; all processes give the same.
      said: this process's text, of one or more lines.
      cure: how the user can repair it; ends the message.

    Raises:
      ProcessError: on every process, with the first line that differs.
      TimeoutError: as `gathered`.

    >>> # A lone process agrees with itself.
    >>> check_same("start", "seed 0", "start all processes by the same command")
    """
    digests = gathered(what, hashlib.sha256(said.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everyone = gathered(what, said)
    i = next(i for i, digest in enumerate(digests) if digest != digests[0])
    lines = itertools.zip_longest(everyone[0].splitlines(), everyone[i].splitlines(), fillvalue="nothing")
    first, other = next((a.strip(), b.strip()) for a, b in lines if a != b)
    processes = present()
    raise ProcessError(
        processes[i],
        f"{what}: this process has {_part(other)!r}, process {processes[0]} has {_part(first)!r}: {cure}",
    )


def check_same_arrays(what: str, tree: Tree) -> None:
    """Checks that all processes hold the same values in process-local leaves: NumPy arrays, numbers, and arrays on one
    process's devices. Arrays on the devices of several processes are not checked.

    Raises:
      ProcessError: on every process, with the first leaf that differs.
    """
    if is_alone():
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
