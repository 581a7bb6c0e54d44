"""What orbax does for a checkpoint: it writes and reads the arrays of one step. No other module here knows its ways.

Its barrier, which is another matter, is in `jaxshard.processes.barrier`.
"""

import concurrent.futures
import errno
import json
import math
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxshard.checkpoint.errors import first_line
from jaxshard.checkpoint.leaves import Shaped
from jaxshard.checkpoint.manifest import Manifest
from jaxshard.processes import agreement

_METADATA_FILE = "_CHECKPOINT_METADATA"
_LAST_FILES = ("commit_success.txt", _METADATA_FILE)  # written before the folder gets its name
_TEMPORARY = re.compile(r"\d+\.orbax-checkpoint-tmp.*")
_NOTHING = {"~nothing": np.zeros(1, np.uint8)}  # orbax wants at least one array; `stored_name` makes no such name

_READ_BYTES = 2**28  # in flight at once, from the disk to the devices
_ABANDONED_SECONDS = 60
_LEAVES = "jaxshard leaves jax.distributed at exit"  # a thread's name
# Errors with these words keep a checkpoint from being read, and say nothing of its bits.
_BACKSLASH = "a backslash in a path"
_NOT_CORRUPT = (
    "RESOURCE_EXHAUSTED",
    "MemoryError",
    "PERMISSION_DENIED",
    "Permission denied",
    "Too many open files",
    _BACKSLASH,
)


# Folders.


def check_path(folder: Path) -> None:
    """Raises ValueError for a folder in which orbax would lose what it is to write.

    Its last step looks for files by a pattern that begins with the path, so that * ? and [ in it stand for other names;
    and a backslash becomes a slash where arrays are written.
    """
    if wrong := sorted(set("*?[\\") & set(str(folder))):
        raise ValueError(
            f"Checkpointer: orbax loses what is saved under a path with {' '.join(wrong)}, as {folder} has; name "
            "another folder"
        )


def is_committed(folder: Path) -> bool:
    """Whether orbax has written a folder to its end."""
    return all((folder / name).is_file() for name in _LAST_FILES)


def is_temporary(name: str) -> bool:
    """Whether a folder of this name is one that orbax is writing, or that it did not write to its end.

    >>> is_temporary("7.orbax-checkpoint-tmp"), is_temporary("7")
    (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def read_manifest(folder: Path) -> Manifest:
    """What was saved beside the arrays, unchecked.

    Raises:
      OSError, ValueError, KeyError, TypeError: there is none, or it cannot be decoded.
    """
    return json.loads((folder / _METADATA_FILE).read_text())["custom_metadata"]


def stored_name(path: str) -> str:
    """A leaf's path as orbax stores it: letters, digits, _ and - as they are, other bytes as ~ and two hex digits.

    Nothing takes such a name for a way out of the folder.

    >>> stored_name("../a")
    '~2E~2E~2Fa'
    """
    return re.sub(rb"[^A-Za-z0-9_-]", lambda byte: b"~%02X" % byte[0][0], path.encode(errors="surrogatepass")).decode()


# Writing.


class Save:
    """A step that orbax is writing, or has written."""

    def __init__(self, response: ocp.AsyncResponse[None]):
        self._response = response
        self._over = threading.Event()
        self._failed: list[BaseException] = []

    @classmethod
    def begin(cls, folder: Path, arrays: Mapping[str, Shaped], manifest: Manifest) -> Self:
        """Starts to write arrays, by path, in `folder`; returns once they are copied off the devices.

        They are not compressed: zstd would save a tenth of the bytes of float32 numbers, take two to three times the
        processor's time, and hold as much more memory as is written.
        """
        stored = {stored_name(path): x for path, x in arrays.items() if x.size}
        plain = ocp.Context()
        plain.array.saving.use_compression = False
        with plain:
            written: Any = stored or _NOTHING
            return cls(ocp.save_async(str(folder), written, custom_metadata=cast(dict[str, Any], manifest)))

    def wait(self) -> dict[int, BaseException]:
        """Waits until all processes have written their parts, or one has failed; returns the errors by process.

        The processes ask each other again and again, because where one has failed, orbax in the others may wait for
        it without end.
        """
        self._listen()
        pause = 0.05
        while True:
            self._over.wait(None if jax.process_count() == 1 else pause)
            pause = min(2.0, 1.5 * pause)  # each round is an exchange between all processes
            over, errors = self._exchanged()
            if errors and jax.process_count() > 1:
                _leave_at_exit()
            if errors or over:
                return errors

    def _exchanged(self) -> tuple[bool, dict[int, BaseException]]:
        """(whether all processes have ended, process -> its error), as all of them say."""
        mine = f"{type(self._failed[0]).__name__}: {self._failed[0]}" if self._failed else ""
        said = [json.loads(each) for each in agreement.gathered("wait", json.dumps([self._over.is_set(), mine]))]
        errors: dict[int, BaseException] = {
            process: agreement.ProcessError(process, text) for process, (_, text) in enumerate(said) if text
        }
        if errors and self._failed:  # not where it failed only now: the others do not know it yet
            errors[jax.process_index()] = self._failed[0]
        return all(over for over, _ in said), errors

    def abandon(self) -> str | None:
        """Waits for 60 s at most and asks no other process; returns why it was not written, or None if it was."""
        self._listen()
        if self._over.wait(_ABANDONED_SECONDS) and not self._failed:
            return None
        _leave_at_exit()
        return first_line(self._failed[0]) if self._failed else "it was not written in time"

    def _listen(self) -> None:
        """Hears from orbax, in a thread, when this process's part has ended, and of its error."""

        def listen() -> None:
            try:
                self._response.result()
            except BaseException as error:
                self._failed.append(error)
            self._over.set()

        threading.Thread(target=listen, daemon=True).start()


def _leave_at_exit() -> None:
    """Lets Python end although orbax may be waiting for another process.

    Before Python ends it joins all threads, orbax's too. Orbax gives up waiting when this process leaves
    `jax.distributed`, which must therefore happen before threads are joined. What is registered with `atexit` runs too
    late; but the threads of a `ThreadPoolExecutor` are told to end before any thread is joined. So this makes such a
    thread, which is idle, and another one that waits for it to end and then leaves.
    """
    if any(thread.name == _LEAVES for thread in threading.enumerate()):
        return
    pool = concurrent.futures.ThreadPoolExecutor(1)
    idle = pool.submit(threading.current_thread).result()

    def leave() -> None:
        with pool:  # which would end if nothing held it
            idle.join()
        jax.distributed.shutdown()

    threading.Thread(target=leave, name=_LEAVES).start()


# Reading.


def read(folder: Path, targets: Mapping[str, Shaped]) -> dict[str, Any]:
    """The arrays of a step by path, laid out as `targets` are; a target that is not stored comes back as it is.

    Each process reads its parts and waits for no other, so that one that fails can tell the others. What is read at a
    time is limited: where an array was saved in other parts than are asked for, more is read than kept.
    """
    if "\\" in str(folder):
        raise OSError(errno.EINVAL, f"orbax takes {_BACKSLASH} for a slash; rename the folder", str(folder))
    wanted = {stored_name(path): x for path, x in targets.items()}
    if not wanted:
        return {}
    alone = ocp.Context()
    alone.multiprocessing.active_processes = {jax.process_index()}
    alone.multiprocessing.primary_host = jax.process_index()
    alone.pytree.loading.partial_load = True
    largest = max(math.prod(x.shape) * x.dtype.itemsize for x in wanted.values())
    alone.memory.read_concurrent_bytes = max(_READ_BYTES, largest + 1)  # more than any one read takes
    with alone:
        found: Any = ocp.load(str(folder), cast(Any, wanted))
    return {path: found[stored_name(path)] for path in targets}


def is_corruption(error: BaseException) -> bool:
    """Whether an error of `read` comes from what is stored; False: this process may not read it, or has no memory."""
    return not any(word in f"{type(error).__name__}: {error}" for word in _NOT_CORRUPT)
