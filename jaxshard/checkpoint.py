"""Checkpoints that fit any strategy, mesh and device count, and that say so when a bit is not what was saved.

Storage is orbax's. A checkpoint is a flat set of arrays, named by their paths in the tree, and an index of each one's
shape, dtype and digest (`jaxshard.digest`); what is loaded is laid out as a template says, digested again on the
devices and compared. Structure comes from the template alone, so nothing is ever unpickled.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import operator
import os
import re
import shutil
import socket
import threading
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from jaxshard import flat, processes
from jaxshard.digest import named_digests
from jaxshard.flat import Flat, first_line

try:
    import filelock
    from orbax.checkpoint import v1 as ocp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}; it comes with: pip install "jaxshard[checkpoint]"', name=error.name) from error

_FORMAT = 1
_INDEX = "_CHECKPOINT_METADATA"
_VERIFIED_BYTES = 2**28  # read at once by `verify`
_READ_BYTES = 2**28  # in flight at once, from the disk to the devices


class CorruptCheckpointError(RuntimeError):
    """What was read is not what was saved. `step` (None: bytes); `leaf`: the first path that shows it, if known."""

    def __init__(self, step: int | None, leaf: str | None, reason: str):
        what = "these bytes are" if step is None else f"checkpoint {step} is"
        super().__init__(f"{what} corrupt: {leaf + ': ' if leaf else ''}{reason}")
        self.step, self.leaf = step, leaf


@dataclasses.dataclass(frozen=True)
class Best:
    """Which checkpoints are the best: those of the smallest (or largest) `metrics[name]`, so many of them."""

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"


class Checkpointer:
    """Saves and restores trees of arrays in a folder, a sub-folder for each step.

    With several processes all must make the same calls, in a folder that all of them see.

    Args:
      path: the folder; it is made when something is saved.
      keep_last: so many of the newest checkpoints are kept.
      keep_every: those of steps divisible by it are kept for ever.
      keep_best: the best by a metric are kept.

    Raises:
      ValueError: options that make no sense.
      NotADirectoryError: `path` is a file.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> with Checkpointer(tempfile.mkdtemp()) as checkpoints:
    ...     checkpoints.save(7, {"w": jnp.arange(3.0)})
    ...     checkpoints.restore({"w": jnp.zeros(3)})
    (7, {'w': Array([0., 1., 2.], dtype=float32)})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        keep_best: Best | None = None,
    ):
        if keep_best is not None and not isinstance(keep_best, Best):
            raise ValueError(f"Checkpointer: keep_best {keep_best!r} must be a Best(metric)")
        counts = {"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best and keep_best.count}
        for name, value in counts.items():
            if (value is not None or name == "keep_last") and (type(value) is not int or value < 1):
                raise ValueError(f"Checkpointer: {name} {value} must be a whole number, 1 or more")
        if keep_best and keep_best.mode not in ("min", "max"):
            raise ValueError(f"Checkpointer: keep_best has mode {keep_best.mode!r}, which must be min or max")
        if "://" in str(path) or not str(path):
            raise ValueError(
                f"Checkpointer: {str(path)!r} is no folder; mount the bucket (of a hierarchical namespace), and name it"
            )
        self.path = Path(path).expanduser().absolute()
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Checkpointer: this is a file; name a folder", str(self.path))
        self._keep_last, self._keep_every, self._keep_best = keep_last, keep_every, keep_best
        self._lock: _Lock | None = None
        self._saving: tuple[int, Any] | None = None
        self._corrupt: set[int] = set()  # found so by `restore`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or jax.process_count() == 1:
            self.close()
        else:  # it may be this process's alone, and then the others are elsewhere
            self._abandon()

    # What there is.

    def steps(self) -> list[int]:
        """The steps that were saved whole, the oldest first; what was never committed is not among them."""
        found = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(int(entry.name) for entry in found if _is_step(entry.name) and _is_committed(entry))

    def info(self, step: int) -> dict[str, Any]:
        """`{"step", "metrics", "run", "leaves": {path: {"shape", "dtype", "digest"}}}`, arrays unread.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          CorruptCheckpointError: its index cannot be read.
        """
        step = _step(step)
        if step not in self.steps():
            raise FileNotFoundError(
                errno.ENOENT, f"there is no checkpoint of step {step}; there are {self.steps()}", str(self.path)
            )
        try:
            index = json.loads((self.path / str(step) / _INDEX).read_text())["custom_metadata"]
            if index.pop("digest") != _digest_of(_canonical(index)).hex():
                raise ValueError("its digest is another")
            _check_format(index)
            return {"step": step, **{name: index[name] for name in ("metrics", "run", "leaves")}}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(step, None, f"its index cannot be read: {first_line(error)}") from error

    # Saving.

    def claim(self) -> str:
        """Makes the folder and locks it for this run until `close`; returns the run's id. `save` does it too.

        Raises:
          OSError: the folder cannot be made or written to, or another run is writing there.
        """
        return processes.from_first("claim", self._claim)

    def save(self, step: int, tree: Any, *, metrics: Mapping[str, float] | None = None, blocking: bool = False) -> None:
        """Saves `tree`; returns as soon as its arrays are copied off the devices, so that they may be donated.

        Args:
          step: its name, 0 or more.
          tree: arrays (of any sharding) and numbers.
          metrics: for `keep_best`, and for those who look.
          blocking: wait until it is written.

        A step that is there already with the same bits is left alone.

        Raises:
          ValueError: the step is there already with other bits, or newer ones are; names that collide.
          TypeError: a leaf that is no array and no number; a metric that is no number.
          ProcessError: processes save other steps or other trees.
          ReplicaError: copies of an array differ between devices.
          OSError: no space; another run writes here; and whatever an earlier save failed of, if it was not waited for.
        """
        self.wait()
        step, measured, tree = processes.together("save", lambda: _asked(step, metrics, tree))
        what = f"{flat.described(step, tree)}\n{measured}"
        processes.check_same("save", what, "all must save the same step of the same tree")
        index: Any = {"format": _FORMAT, "run": self.claim(), "metrics": measured}
        tree = Flat(tree.leaves | {path: flat.everywhere(x) for path, x in flat.arrays(tree.leaves).items()}, tree.keys)
        index["leaves"] = flat.index_of(tree)
        arrays = flat.arrays(tree.leaves)
        if processes.from_first("save", lambda: self._prepare(step, index["leaves"], arrays)):
            index["digest"] = _digest_of(_canonical(index)).hex()
            stored = {flat.escaped(path): x for path, x in arrays.items() if np.size(x)} or _NOTHING
            target = str(self.path / str(step))
            self._saving = step, processes.together("save", lambda: _write(target, stored, index))
        if blocking:
            self.wait()

    def wait(self) -> None:
        """Until the last save is written. Raises what it failed of, on every process."""
        if self._saving is None:
            return
        (step, response), self._saving = self._saving, None
        errors = _ended(response)
        if errors:
            raise _unsaved(step, errors, self.path)
        for trouble in processes.from_first("wait", lambda: self._prune(step)):
            warnings.warn(f"an old checkpoint could not be deleted: {trouble}", stacklevel=2)

    def close(self) -> None:
        """Waits, and lets others write here."""
        try:
            self.wait()
        finally:
            self._unlock()

    def _abandon(self) -> None:
        """Gives the last save some time, and asks no other process about it."""
        if self._saving is not None:
            (step, response), self._saving = self._saving, None
            ended, failed = _heard_of(response)
            if not ended.wait(_ABANDONED_SECONDS) or failed:
                why = first_line(failed[0]) if failed else "it was not written in time"
                warnings.warn(f"checkpoint {step} was not saved: {why}", stacklevel=3)
                _leave_in_order()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # Restoring.

    def restore(self, template: Any, step: int | None = None, *, cast: bool = False) -> tuple[int, Any]:
        """(its step, the tree), each array as `template` has it, every digest checked.

        Args:
          template: a tree of arrays, or of `ShapeDtypeStruct`s with shardings, of any strategy, mesh or none: of
            plain optax's state, too.
          step: None: the newest that is whole; older ones are tried, with a warning, if it is not.
          cast: let dtypes be converted to the template's.

        Raises:
          FileNotFoundError: nothing is saved here.
          ValueError: the template has other leaves, shapes or dtypes; all are named, and nothing was read.
          CorruptCheckpointError: what is on disk is not what was saved.
          OSError: what is there cannot be read now: it is another user's, memory ran out.
        """
        self.wait()
        wanted = processes.together("restore", lambda: flat.flatten(template, shapes=True))
        if step is not None:
            step = _step(step)
            return step, flat.unflatten(template, wanted, self._restored(wanted, step, cast))
        tried: dict[int, Exception] = {}
        while left := [each for each in processes.from_first("restore", self.steps) if each not in tried]:
            found = left[-1]
            try:
                return found, flat.unflatten(template, wanted, self._restored(wanted, found, cast))
            except FileNotFoundError as error:  # deleted meanwhile, by the run that writes here, which has newer ones
                tried[found] = error
            except CorruptCheckpointError as error:
                warnings.warn(f"{error}; trying the one before", stacklevel=2)
                tried[found] = error
                self._corrupt.add(found)
        raise next(iter(tried.values()), FileNotFoundError(errno.ENOENT, "there is no checkpoint", str(self.path)))

    def verify(self, step: int) -> None:
        """Reads every array of a checkpoint, a part at a time, spread over all devices, and compares digests.

        Raises:
          CorruptCheckpointError: the first leaf that is not what was saved.
        """
        leaves = self._leaves(step)
        stored = {path: saved for path, saved in leaves.items() if "digest" in saved}
        for part in flat.parts(stored, _VERIFIED_BYTES):
            self._loaded({path: flat.spread(leaves[path]) for path in part}, step, leaves)

    def read(self, step: int, paths: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """(path, array) of all leaves or of some, in the order of `paths`, in host memory, digests checked.

        As much is read at a time as `verify` reads, or one leaf if that is larger.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          CorruptCheckpointError: the first leaf that is not what was saved.
        """
        leaves = self._leaves(step)
        asked = {path: leaves[path] for path in (leaves if paths is None else paths)}
        for part in flat.parts(asked, _VERIFIED_BYTES):
            hosts = {path: np.zeros(leaves[path]["shape"], jnp.dtype(leaves[path]["dtype"])) for path in part}
            found = self._loaded(hosts, step, leaves)
            yield from ((path, np.asarray(found[path])) for path in part)

    def latest_valid(self) -> int | None:
        """The newest step whose arrays are all as they were saved; it reads them."""
        for step in reversed(processes.from_first("latest_valid", self.steps)):
            with contextlib.suppress(CorruptCheckpointError):
                self.verify(step)
                return step
        return None

    def _leaves(self, step: int) -> dict[str, Any]:
        return processes.together("restore", lambda: self.info(step))["leaves"]

    def _restored(self, wanted: Flat, step: int, cast: bool) -> dict[str, Any]:
        leaves = self._leaves(step)
        what = f"checkpoint {step} does"
        processes.together("restore", lambda: flat.check_same(wanted, leaves, what, cast))
        return self._loaded(wanted.leaves, step, leaves)

    def _loaded(self, wanted: Mapping[str, Any], step: int, leaves: dict[str, Any]) -> dict[str, Any]:
        """The leaves in the dtypes they were saved in, where `wanted` lie; digests checked."""
        numbers = {path: flat.number(leaves[path]) for path in wanted if "value" in leaves[path]}
        rest = {path: flat.target(x, leaves[path]) for path, x in wanted.items() if path not in numbers}
        with jax.enable_x64(jax.config.read("jax_enable_x64") or flat.are_wide(leaves)):
            return {**numbers, **rest, **self._digested(rest, step, leaves)}

    def _digested(self, wanted: Mapping[str, Any], step: int, leaves: dict[str, Any]) -> dict[str, Any]:
        """The arrays that have elements."""
        paths = [path for path, x in wanted.items() if math.prod(x.shape)]
        stored = {flat.escaped(path): wanted[path] for path in paths}
        loaded, errors = processes.attempted("restore", lambda: _read(self.path / str(step), stored))
        if errors:
            first = next(iter(errors.values()))
            if step not in processes.from_first("restore", self.steps):
                raise FileNotFoundError(errno.ENOENT, f"checkpoint {step} was deleted meanwhile", str(self.path))
            if any(word in f"{type(error).__name__}: {error}" for error in errors.values() for word in _NOT_CORRUPT):
                made = OSError(errno.EIO, f"checkpoint {step} cannot be read: {first_line(first)}", str(self.path))
                raise made from first
            raise CorruptCheckpointError(step, None, f"it cannot be read: {first_line(first)}") from first
        assert loaded is not None
        arrays = {path: loaded[flat.escaped(path)] for path in paths}
        for path, x in arrays.items():
            if isinstance(x, jax.ShapeDtypeStruct):  # as it was asked for
                raise CorruptCheckpointError(step, path, "it is not there")
        for path, digest in named_digests(arrays).items():
            if digest != leaves[path]["digest"]:
                raise CorruptCheckpointError(step, path, "other bits than were saved")
        return arrays

    # The folder. These run on the first process alone.

    def _claim(self) -> str:
        if self._lock is not None and not self._lock.is_there():  # the folder was deleted
            self._lock.release()
            self._lock = None
        if self._lock is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _Lock(self.path)
            for entry in self.path.iterdir():
                if _CUT_OFF.fullmatch(entry.name):
                    shutil.rmtree(entry, ignore_errors=True)
        return self._lock.run

    def _prepare(self, step: int, leaves: dict[str, Any], arrays: dict[str, Any]) -> bool:
        """Looks for what would be in the way of saving; puts aside what has the step's name and is none.

        Returns:
          whether there is anything to save.
        """
        target = self.path / str(step)
        why = "corrupt" if step in self._corrupt else "uncommitted" if not _is_committed(target) else None
        if why and os.path.lexists(target):
            target.rename(target.with_name(f"{step}.{why}.{uuid.uuid4().hex[:8]}"))
        self._corrupt.discard(step)
        steps = [each for each in self.steps() if each not in self._corrupt]
        if step in steps:
            if self.info(step)["leaves"] == leaves:
                return False
            raise ValueError(
                f"checkpoint: step {step} is saved already in {self.path}, with other bits; steps never change"
            )
        if steps and step < steps[-1]:
            raise ValueError(
                f"checkpoint: step {step} is older than {steps[-1]}, which is in {self.path}: to go on from an older "
                "step, save in a new folder, or take the newer ones away"
            )
        _check_space(self.path, sum(int(x.size) * x.dtype.itemsize for x in arrays.values()))
        return True

    def _prune(self, saved: int) -> list[str]:
        """Deletes what is not to be kept; a folder loses its name first, so that none is ever half there.

        Returns:
          what could not be deleted, and why.
        """
        steps, failed = [step for step in self.steps() if step not in self._corrupt], []
        regular = {step for step in steps if self._keep_every and step % self._keep_every == 0}
        for step in set(steps) - {saved, *steps[-self._keep_last :], *self._best(steps)} - regular:
            try:
                shutil.rmtree((self.path / str(step)).rename(self.path / f"{step}.deleted.{uuid.uuid4().hex[:8]}"))
            except OSError as error:
                failed.append(str(error))
        return failed

    def _best(self, steps: list[int]) -> list[int]:
        if self._keep_best is None:
            return []
        best, found = self._keep_best, {}
        for step in steps:
            with contextlib.suppress(CorruptCheckpointError):
                found[step] = (self.info(step)["metrics"] or {}).get(best.metric)
        measured = [step for step, x in found.items() if isinstance(x, int | float) and not math.isnan(x)]
        return sorted(measured, key=lambda step: found[step], reverse=best.mode == "max")[: best.count]


def to_bytes(tree: Any) -> bytes:
    """A tree of arrays and numbers, its digests with it, as one string of bytes (msgpack, by flax).

    All of it goes through this process's memory: a `Checkpointer` is for what is large, or lies on several processes.

    Raises:
      ValueError: names that collide; an array that lies on other processes, too.
      TypeError: a leaf that is no array and no number.

    >>> import jax.numpy as jnp
    >>> from_bytes({"w": jnp.zeros(3)}, to_bytes({"w": jnp.arange(3.0)}))
    {'w': Array([0., 1., 2.], dtype=float32)}
    """
    found = flat.flatten(tree)
    arrays = flat.arrays(found.leaves)
    for path, x in arrays.items():
        if not flat.is_local(x):
            raise ValueError(f"to_bytes: {path} lies on devices of other processes, too; save it by a Checkpointer")
    raw = {path: _raw(jax.device_get(x)) for path, x in arrays.items()}
    data = serialization.msgpack_serialize({"format": _FORMAT, "leaves": flat.index_of(found), "arrays": raw})
    return _digest_of(data) + data


def from_bytes(template: Any, data: bytes, *, cast: bool = False) -> Any:
    """The tree that `to_bytes` made `data` of, each array as `template` has it (see `Checkpointer.restore`).

    Raises:
      ValueError: the template has other leaves, shapes or dtypes.
      CorruptCheckpointError: the bytes are not what was made.
    """
    wanted = flat.flatten(template, shapes=True)
    if _digest_of(data[_DIGEST_BYTES:]) != data[:_DIGEST_BYTES]:
        raise CorruptCheckpointError(None, None, "their digest is another; were they cut short, or made by to_bytes?")
    found: Any = serialization.msgpack_restore(data[_DIGEST_BYTES:])
    _check_format(found)
    leaves, raw = found["leaves"], found["arrays"]
    flat.check_same(wanted, leaves, "these bytes do", cast)
    return flat.unflatten(template, wanted, {path: _from_raw(raw.get(path), leaves[path]) for path in wanted.leaves})


_DIGEST_BYTES = 32


def _digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _raw(x: Any) -> np.ndarray:
    """The bits of an array, of dtypes that msgpack does not know, too."""
    return np.frombuffer(np.asarray(x).tobytes(), np.uint8)


def _from_raw(raw: Any, leaf: dict[str, Any]) -> Any:
    if raw is None:
        return flat.number(leaf)
    return np.frombuffer(raw.tobytes(), jnp.dtype(leaf["dtype"])).reshape(leaf["shape"])


def _canonical(index: dict[str, Any]) -> bytes:
    return json.dumps(index, sort_keys=True).encode()


def _check_format(found: Any) -> None:
    if found["format"] != _FORMAT:
        raise ValueError(f"its format is {found['format']}, and this jaxshard reads {_FORMAT}; update it")


def _step(step: Any) -> int:
    if isinstance(step, bool | float) or not hasattr(step, "__index__") or operator.index(step) < 0:
        raise ValueError(f"checkpoint: step {step!r} must be a whole number, 0 or more")
    return operator.index(step)


def _asked(step: Any, metrics: Mapping[str, Any] | None, tree: Any) -> tuple[int, dict[str, float] | None, Flat]:
    """What is to be saved, if it can be."""
    try:
        measured = {str(name): float(value) for name, value in metrics.items()} if metrics else None
    except (TypeError, ValueError) as error:
        raise TypeError(f"checkpoint: metrics must be numbers, got {metrics!r:.200}: {error}") from None
    return _step(step), measured, flat.flatten(tree)


_NOTHING = {"~nothing": np.zeros(1, np.uint8)}  # orbax wants at least one array; no path is escaped like this
_CUT_OFF = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleted\.[0-9a-f]{8})")  # of a save, or of a deletion


class _Lock:
    """This process's right to write in a folder, which the system takes back when the process ends.

    Raises:
      OSError: another run has it.
    """

    def __init__(self, path: Path):
        self._lock, self._notes = filelock.FileLock(path / ".lock"), path / "run.json"
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            writer = self._noted().get("writer", "another process")
            raise OSError(
                errno.EBUSY, f"{writer} is writing checkpoints here; end it, or give each run its own folder", str(path)
            ) from None
        self.run: str = self._noted().get("id") or uuid.uuid4().hex
        writer = f"process {os.getpid()} on {socket.gethostname()}"
        self._notes.write_text(json.dumps({"id": self.run, "writer": writer}))

    def _noted(self) -> dict[str, str]:
        try:
            found = json.loads(self._notes.read_text())
        except (OSError, ValueError):
            return {}
        return {name: str(value) for name, value in found.items()} if isinstance(found, dict) else {}

    def is_there(self) -> bool:
        return self._notes.exists()

    def release(self) -> None:
        self._lock.release()


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and name == str(int(name))


def _is_committed(folder: Path) -> bool:
    """Whether orbax ended writing it: both files come last, before the folder gets its name."""
    return all((folder / name).is_file() for name in ("commit_success.txt", _INDEX))


def _check_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"no space: the checkpoint takes {needed / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free; nothing was "
            "written",
            str(path),
        )


# What orbax does.


def _write(target: str, stored: dict[str, Any], index: Any) -> Any:
    """Starts it. Uncompressed: zstd would save a tenth of the bytes of float32 numbers, at two to three times
    the processor's time, and hold as much more memory as is written."""
    plain = ocp.Context()
    plain.array.saving.use_compression = False
    with plain:
        return ocp.save_async(target, stored, custom_metadata=index)


def _read(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
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


# What keeps a checkpoint from being read, and says nothing of its bits.
_NOT_CORRUPT = ("RESOURCE_EXHAUSTED", "MemoryError", "PERMISSION_DENIED", "Permission denied", "Too many open files")
_ABANDONED_SECONDS = 60


def _heard_of(response: Any) -> tuple[threading.Event, list[BaseException]]:
    """(when a save has ended, what it failed of): this process's part."""
    ended = threading.Event()
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            response.result()
        except BaseException as error:
            failed.append(error)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended, failed


def _ended(response: Any) -> dict[int, BaseException]:
    """Waits for a save. Where it fails for one process, the others' parts may wait for that one for ever: so nobody
    waits any longer than until one has failed."""
    ended, failed = _heard_of(response)
    pause = 0.05
    while True:
        ended.wait(None if jax.process_count() == 1 else pause)
        pause = min(2.0, 1.5 * pause)  # each round is an exchange between all processes
        mine = f"{type(failed[0]).__name__}: {failed[0]}" if failed else ""
        said = [json.loads(each) for each in processes.gathered("wait", json.dumps([ended.is_set(), mine]))]
        errors: dict[int, BaseException] = {
            i: processes.ProcessError(i, text) for i, (_, text) in enumerate(said) if text
        }
        if errors and jax.process_count() > 1:
            _leave_in_order()
        if errors or all(done for done, _ in said):
            return errors | ({jax.process_index(): failed[0]} if failed else {})


def _leave_in_order() -> None:
    """Lets Python end although a part of the save may wait for other processes: its thread is waited for at the end,
    and is cut off once all processes have taken their leave. (By the one hook that comes before the waiting.)"""
    threading._register_atexit(jax.distributed.shutdown)  # pyright: ignore[reportAttributeAccessIssue]


def _unsaved(step: int, errors: dict[int, BaseException], path: Path) -> OSError:
    error = errors.get(jax.process_index()) or next(iter(errors.values()))
    text = first_line(error)
    if "No space left" in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
        number, reason = errno.ENOSPC, "no space left on the disk"
    else:
        number, reason = getattr(error, "errno", None) or errno.EIO, "it could not be written"
    made = OSError(number, f"checkpoint {step} was not saved: {reason}; older ones are whole ({text})", str(path))
    made.__cause__ = error
    return made
