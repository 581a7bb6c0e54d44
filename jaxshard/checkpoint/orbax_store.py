"""What orbax does for a checkpoint: one step's arrays, written and read; and how it is heard whether that went well."""

import errno
import json
import math
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxshard.checkpoint import manifest
from jaxshard.checkpoint.flat import first_line
from jaxshard.processes import agreement

NOTHING = {"~nothing": np.zeros(1, np.uint8)}  # orbax wants at least one array; no path is escaped like this

_READ_BYTES = 2**28  # in flight at once, from the disk to the devices
_ABANDONED_SECONDS = 60
# What keeps a checkpoint from being read, and says nothing of its bits.
_NOT_CORRUPT = ("RESOURCE_EXHAUSTED", "MemoryError", "PERMISSION_DENIED", "Permission denied", "Too many open files")


def is_committed(folder: Path) -> bool:
    """Whether orbax ended writing it: both files come last, before the folder gets its name."""
    return all((folder / name).is_file() for name in ("commit_success.txt", manifest.FILE))


def write(target: str, stored: dict[str, Any], sealed: dict[str, Any]) -> Any:
    """Starts it. Uncompressed: zstd would save a tenth of the bytes of float32 numbers, at two to three times
    the processor's time, and hold as much more memory as is written."""
    plain = ocp.Context()
    plain.array.saving.use_compression = False
    with plain:
        return ocp.save_async(target, stored, custom_metadata=sealed)


def read(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """This process's parts; no process waits for another, so that one that fails can say so.

    So much at a time: where shards are cut otherwise than they were saved, each read takes in more than it keeps.
    """
    alone = ocp.Context()
    alone.multiprocessing.active_processes = {jax.process_index()}
    alone.multiprocessing.primary_host = jax.process_index()
    alone.pytree.loading.partial_load = True
    largest = max((math.prod(x.shape) * x.dtype.itemsize for x in wanted.values()), default=0)
    alone.memory.read_concurrent_bytes = max(_READ_BYTES, largest + 1)  # more than any one read takes
    with alone:
        return ocp.load(str(folder), wanted) if wanted else {}


def is_corruption(error: BaseException) -> bool:
    """Whether `read` failed of what is there, and not of who reads."""
    return not any(word in f"{type(error).__name__}: {error}" for word in _NOT_CORRUPT)


def ended(response: Any) -> dict[int, BaseException]:
    """Waits for what `write` started; returns what failed, by process.

    Where it fails for one process, the others' parts may wait for that one for ever: so nobody waits any longer than
    until one has failed.
    """
    over, failed = _heard_of(response)
    pause = 0.05
    while True:
        over.wait(None if jax.process_count() == 1 else pause)
        pause = min(2.0, 1.5 * pause)  # each round is an exchange between all processes
        mine = f"{type(failed[0]).__name__}: {failed[0]}" if failed else ""
        said = [json.loads(each) for each in agreement.gathered("wait", json.dumps([over.is_set(), mine]))]
        errors: dict[int, BaseException] = {
            i: agreement.ProcessError(i, text) for i, (_, text) in enumerate(said) if text
        }
        if errors and jax.process_count() > 1:
            _leave_in_order()
        if errors or all(done for done, _ in said):
            return errors | ({jax.process_index(): failed[0]} if failed else {})


def abandoned(response: Any) -> str | None:
    """Gives what `write` started some time, and asks no other process; returns why it was not written, if so."""
    over, failed = _heard_of(response)
    if over.wait(_ABANDONED_SECONDS) and not failed:
        return None
    _leave_in_order()
    return first_line(failed[0]) if failed else "it was not written in time"


def unsaved(step: int, errors: dict[int, BaseException], path: Path) -> OSError:
    """The error for a save of which `errors` came."""
    error = errors.get(jax.process_index()) or next(iter(errors.values()))
    text = first_line(error)
    if "No space left" in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
        number, reason = errno.ENOSPC, "no space left on the disk"
    else:
        number, reason = getattr(error, "errno", None) or errno.EIO, "it could not be written"
    made = OSError(number, f"checkpoint {step} was not saved: {reason}; older ones are whole ({text})", str(path))
    made.__cause__ = error
    return made


def _heard_of(response: Any) -> tuple[threading.Event, list[BaseException]]:
    """(when a save has ended, what it failed of): this process's part."""
    over = threading.Event()
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            response.result()
        except BaseException as error:
            failed.append(error)
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    return over, failed


def _leave_in_order() -> None:
    """Lets Python end although a part of the save may wait for other processes: its thread is waited for at the end,
    and is cut off once all processes have taken their leave. (By the one hook that comes before the waiting.)"""
    threading._register_atexit(jax.distributed.shutdown)  # pyright: ignore[reportAttributeAccessIssue]
