"""Writes and reads one step's arrays by orbax. Other modules do not call orbax.

Exceptions: `processes.agreement` uses its barrier, `paths` makes its paths, `sizes` parses its files, `quiet` silences
its logs, `errors` interprets its errors.
"""

import contextlib
import errno
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, cast

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxshard.checkpoint.storage import sizes
from jaxshard.checkpoint.storage.errors import check_files_free, first_line, is_file, is_folder, read_description
from jaxshard.checkpoint.storage.leaves import Shaped, small
from jaxshard.checkpoint.storage.manifest import Manifest
from jaxshard.checkpoint.storage.paths import PlainPath, Written, among_those_present, of_those_present
from jaxshard.checkpoint.storage.quiet import NO_MORE_WORK, forgotten, quiet, quietly, while_python_runs
from jaxshard.checkpoint.storage.sizes import ARRAY_NAMES, ARRAYS
from jaxshard.processes import agreement
from jaxshard.system import files
from jaxshard.system.interrupts import ExitNotice

_METADATA_FILE = "_CHECKPOINT_METADATA"
_LAST_FILES = ("commit_success.txt", _METADATA_FILE)  # written before the folder gets its name
_TEMPORARY = re.compile(r"\d+\.orbax-checkpoint-tmp.*")
_NOTHING = {"~nothing": np.zeros(1, np.uint8)}  # orbax requires at least one array; `stored_name` never makes this name

_READ_BYTES = 2**28  # read concurrently
_ABANDONED_SECONDS, _ENDING_SECONDS = 60, 5
_SLICE_BYTES = 2**20  # devices with copies of an array share its writing if each writes at least this much
_ONE_AT_A_TIME = threading.Lock()  # orbax numbers a process's operations; concurrent threads would mix them up
_LEAVES = "jaxshard leaves jax.distributed at exit"  # a thread's name


# Folders.


def is_committed(folder: Path) -> bool:
    """Whether orbax has written a folder completely."""
    return all(is_file(folder / name) for name in _LAST_FILES)


def lacks(folder: Path) -> str | None:
    """The file that a partial step lacks; None: the step is complete, or the folder has no part of a step.

    Orbax gives a folder its step's name only when complete, so a missing file was lost later.
    """
    missing = [name for name in _LAST_FILES if not is_file(folder / name)]
    if not missing or (missing == list(_LAST_FILES) and not is_folder(folder / ARRAYS)):
        return None
    return " and ".join(missing)


def is_temporary(name: str) -> bool:
    """Whether orbax names a folder like this while writing it.

    >>> is_temporary("7.orbax-checkpoint-tmp"), is_temporary("7")
    (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def read_manifest(folder: Path) -> object:
    """The manifest saved beside the arrays, unchecked.

    Raises:
      OSError, ValueError, KeyError, TypeError, RecursionError: it does not exist, or cannot be decoded.
    """
    path = folder / _METADATA_FILE
    return json.loads(read_description(path))["custom_metadata"]


def replace_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the saved manifest atomically."""
    path = folder / _METADATA_FILE
    found = json.loads(read_description(path))
    text = json.dumps({**found, "custom_metadata": manifest})
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, and metrics are not written through links", str(folder))
    files.replace(path, text)


def stored_name(path: str) -> str:
    """A leaf's path as orbax stores it: letters, digits, _ and - unchanged, other bytes as ~ and two hex digits.

    Such a name cannot point outside the folder.

    >>> stored_name("../a")
    '~2E~2E~2Fa'
    """
    return re.sub(rb"[^A-Za-z0-9_-]", lambda byte: b"~%02X" % byte[0][0], path.encode(errors="surrogatepass")).decode()


# Writing.


class Save:
    """A step that orbax is writing, or has written."""

    def __init__(
        self,
        path: Path,
        response: ocp.AsyncResponse[None],
        place: PlainPath,
        written: Written,
        unheard: ExitStack,
        check: Callable[[], None],
    ):
        self._response, self._place, self._unheard, self._check = response, place, unheard, check
        self._path, self._written = path, written
        self._is_first = agreement.is_first()  # here, since threads do not inherit `agreement.among`
        self._over = threading.Event()
        self._failed: list[BaseException] = []
        self._notice = ExitNotice(lambda: self._cut_off(path), "jaxshard tells of a save that is cut off")
        threading.Thread(target=self._listen, daemon=True).start()

    @classmethod
    def begin(
        cls,
        place: PlainPath,
        name: str,
        arrays: Mapping[str, Shaped],
        manifest: Manifest,
        check: Callable[[], None] = lambda: None,
    ) -> Self:
        """Starts to write arrays, by path, in the sub-folder `name`; returns once they are copied off the devices.

        They are not compressed, to save CPU time and host memory (figures: docs/checkpoints.md, "Costs").

        Args:
          place: the folder, under the same path on all processes; it is closed when all is written.
          name: of the step.
          arrays: of all processes.
          manifest: saved beside the arrays.
          check: the first process calls it once all is written; if it raises, the save fails.
        """
        stored = {stored_name(path): x for path, x in _on_host_if_small(arrays).items() if x.size}
        path, tree, notes, written = place.path / name, cast(Any, stored or _NOTHING), cast(Any, manifest), Written()
        with ExitStack() as unheard:
            unheard.enter_context(quiet(path))
            with _ONE_AT_A_TIME, of_those_present(), _writing(written), while_python_runs(place.folder / name):
                response = quietly(
                    lambda: ocp.save_async(str(path), tree, checkpointable_name=ARRAYS, custom_metadata=notes), path
                )
            return cls(place.folder / name, response, place, written, unheard.pop_all(), check)

    def wait(self) -> dict[int, BaseException]:
        """Waits until all processes have written their parts, or one has failed; returns the errors by process.

        The processes poll each other, because after a failure of one, orbax in the others may wait for it forever.
        """
        pause = 0.05
        while True:
            self._over.wait(None if agreement.is_alone() else pause)
            pause = min(2.0, 1.5 * pause)  # each round is an exchange between all processes
            over, errors = self._exchanged()
            if errors and not agreement.is_alone():
                _leave_at_exit()
            if errors or over:
                self._notice.off()
                return errors

    def _exchanged(self) -> tuple[bool, dict[int, BaseException]]:
        """(whether all processes have finished, process -> its error), the same on all processes."""
        mine = f"{type(self._failed[0]).__name__}: {self._failed[0]}" if self._failed else ""
        said = [json.loads(each) for each in agreement.gathered("wait", json.dumps([self._over.is_set(), mine]))]
        errors: dict[int, BaseException] = {
            process: agreement.ProcessError(process, text)
            for process, (_, text) in zip(agreement.present(), said, strict=True)
            if text
        }
        if errors and self._failed:  # not if it failed only just now: the others do not know it yet
            errors[jax.process_index()] = self._failed[0]
        return all(over for over, _ in said), errors

    def abandon(self) -> str | None:
        """Waits at most 60 s without asking other processes; returns why the save failed, None if it succeeded."""
        over = self._over.wait(_ABANDONED_SECONDS)
        self._notice.off()
        if over and not self._failed:
            return None
        _leave_at_exit()
        return first_line(self._failed[0]) if self._failed else "it was not written in time"

    def _listen(self) -> None:
        """Runs in a thread: waits for this process's part, keeps its error, and has the save checked."""
        try:
            self._response.result()
            self._place.close()  # not after an error, when other threads of orbax may still write there
            self._sync()
            if self._is_first:
                self._check()
        except BaseException as error:
            first = next(iter(self._written.failed), error)
            self._failed.append(self._place.named_in(forgotten(first, self._place.path / self._path.name)))
        self._unheard.close()
        self._over.set()
        if not self._failed:
            self._notice.off()

    def _sync(self) -> None:
        """Syncs what this process wrote to disk, unless `DurablePath` has done so at the rename."""
        if self._is_first:
            if self._path.name not in self._written.named:
                files.sync_tree(self._path)
                files.sync_folder(self._path.parent)
            return
        for folder in self._path.glob(f"*/*process_{jax.process_index()}"):
            files.sync_tree(folder)

    def _cut_off(self, path: Path) -> None:
        """Reports that Python exits before the save is done, and ends the process: orbax's threads can no longer work,
        and some would wait for others for minutes."""
        failed = self._failed and NO_MORE_WORK not in str(self._failed[0])
        why = first_line(self._failed[0]) if failed else "Python ended first"
        if self._over.wait(_ENDING_SECONDS) and not self._failed:
            return
        print(
            f"jaxshard: {path} was NOT saved: {why}. Call close() before your program ends, or use `with "
            "Checkpointer(...)`",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        os._exit(1)


def _writing(written: Written) -> ocp.Context:
    made = ocp.Context()
    made.file.path_class = written.paths()
    among_those_present(made)
    saving = made.array.saving
    saving.use_ocdbt = saving.use_zarr3 = saving.use_replica_parallel = True
    saving.min_slice_bytes_for_replica_parallel = _SLICE_BYTES
    saving.use_compression = saving.enable_post_merge_validation = saving.enable_write_sharding_file = False
    return made


def _on_host_if_small(arrays: Mapping[str, Shaped]) -> dict[str, Any]:
    """Moves small arrays to host memory: orbax then writes each in one piece, not one per device. With several
    processes they stay, since none may hold a whole array."""
    fetched = small(arrays) if jax.process_count() == 1 else []
    return {**arrays, **jax.device_get({path: arrays[path] for path in fetched})}


def _leave_at_exit() -> None:
    """Lets Python exit although orbax may be waiting for another process: orbax gives up when this process leaves
    `jax.distributed`."""
    if not any(thread.name == _LEAVES for thread in threading.enumerate()):
        ExitNotice(jax.distributed.shutdown, _LEAVES)


# Reading.


def read(folder: Path, targets: Mapping[str, Shaped]) -> dict[str, Any]:
    """Reads a step's arrays by path, with the shardings of `targets`; returns a target that is not stored unchanged.

    Each process reads its parts without waiting for others, so that one that fails can tell them. The bytes in flight
    are limited, because an array that was saved in different shards needs more bytes read than kept.
    """
    wanted = {stored_name(path): x for path, x in targets.items()}
    if not wanted:
        return {}
    alone = ocp.Context()
    alone.multiprocessing.active_processes = {jax.process_index()}
    alone.multiprocessing.primary_host = jax.process_index()
    alone.pytree.loading.partial_load = True
    largest = max(math.prod(x.shape) * x.dtype.itemsize for x in wanted.values())
    alone.memory.read_concurrent_bytes = max(_READ_BYTES, largest + 1)  # more than the largest read
    check_files_free()
    with contextlib.closing(PlainPath.of(folder.parent)) as plain:
        path = plain.path / folder.name
        try:
            read_description(path / ARRAYS / ARRAY_NAMES)  # orbax would read a file of any size, or block on a pipe
            sizes.check_arrays(path / ARRAYS, wanted)
            found: Any = quietly(lambda: _load(alone, path, wanted), path)
        except Exception as error:
            raise plain.named_in(error) from None
    return {path: found[stored_name(path)] for path in targets}


def _load(context: ocp.Context, folder: Path, wanted: Mapping[str, Shaped]) -> object:
    with _ONE_AT_A_TIME, context:
        return ocp.load(str(folder), cast(Any, wanted), checkpointable_name=ARRAYS)
