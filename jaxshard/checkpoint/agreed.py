"""What one process meets as it reads, all of them raise: none goes on with another step than the rest."""

import json
from collections.abc import Callable
from typing import NamedTuple, cast

import jax

from jaxshard.base.types import T
from jaxshard.checkpoint.storage.errors import CorruptCheckpointError
from jaxshard.processes import agreement


def agreed(step: int | None, attempt: Callable[[], T]) -> T:
    """Calls `attempt` on every process and returns its result; if it fails on one, all raise the same kind of error.

    Raises:
      OSError: the system failed on some process, whatever the others met.
      ProcessError: another process met an error that is about no file.
      FileNotFoundError, CorruptCheckpointError: the system failed on none.
    """
    result, mine = None, None
    try:
        result = attempt()
    except Exception as error:
        mine = error
    said = [_Failure(*json.loads(each)) for each in agreement.gathered("restore", json.dumps(_failure(mine)))]
    process, worst = max(enumerate(said), key=lambda each: each[1].rank)
    if mine is not None and said[jax.process_index()].rank == worst.rank:
        raise mine
    if worst.rank:
        raise _of_another(step, process, worst)
    return cast(T, result)


def of_first(attempt: Callable[[], T]) -> T:
    """What `attempt` returns on the first process, which may list and read folders for all; raises as `agreed`."""
    made = agreed(None, lambda: attempt() if jax.process_index() == 0 else None)
    return cast(T, agreement.from_first("restore", lambda: made))


class _Failure(NamedTuple):
    """What a process tells the others of its error; the highest `rank` counts for all."""

    rank: int
    number: int | None = None
    text: str = ""
    path: str | None = None


_CORRUPT, _GONE, _OTHER, _SYSTEM = range(1, 5)


def _failure(error: Exception | None) -> _Failure:
    if isinstance(error, CorruptCheckpointError):
        return _Failure(_CORRUPT, text=str(error).partition("corrupt: ")[2])
    if isinstance(error, OSError):
        rank = _GONE if isinstance(error, FileNotFoundError) else _SYSTEM
        return _Failure(rank, error.errno, error.strerror or str(error), str(error.filename))
    return _Failure(0) if error is None else _Failure(_OTHER, text=f"{type(error).__name__}: {error}")


def _of_another(step: int | None, process: int, failure: _Failure) -> Exception:
    if failure.rank == _CORRUPT:
        assert step is not None  # no list of steps is corrupt
        return CorruptCheckpointError(step, None, f"process {process}: {failure.text}")
    if failure.rank == _OTHER:
        return agreement.ProcessError(process, failure.text)
    return OSError(failure.number, f"process {process}: {failure.text}", failure.path)
