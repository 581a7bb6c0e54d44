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
import os
import shutil
import socket
import string
import threading
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import filelock
import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from jaxshard import processes
from jaxshard.digest import digests
from jaxshard.tree import is_key, named_leaves, path_of

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
        counts = {"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best and keep_best.count}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"Checkpointer: {name} {value} must be 1 or more")
        if keep_best and keep_best.mode not in ("min", "max"):
            raise ValueError(f"Checkpointer: keep_best has mode {keep_best.mode!r}, which must be min or max")
        self.path = Path(path).absolute()
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Checkpointer: this is a file; name a folder", str(self.path))
        self._keep_last, self._keep_every, self._keep_best = keep_last, keep_every, keep_best
        self._lock: _Lock | None = None
        self._saving: tuple[int, Any] | None = None
        self._corrupt: set[int] = set()  # found so by `restore`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What there is.

    def steps(self) -> list[int]:
        """The steps that were saved whole, the oldest first; what was never committed is not among them."""
        found = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(int(entry.name) for entry in found if entry.name.isdecimal() and _is_committed(entry))

    def info(self, step: int) -> dict[str, Any]:
        """`{"step", "metrics", "run", "leaves": {path: {"shape", "dtype", "digest"}}}`, arrays unread.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          CorruptCheckpointError: its index cannot be read.
        """
        if step not in self.steps():
            raise FileNotFoundError(
                errno.ENOENT, f"there is no checkpoint of step {step}; there are {self.steps()}", str(self.path)
            )
        try:
            index = json.loads((self.path / str(step) / _INDEX).read_text())["custom_metadata"]
            if index.pop("digest") != _digest_of(_canonical(index)).hex():
                raise ValueError("its digest is another")
            return {"step": step, **{name: index[name] for name in ("metrics", "run", "leaves")}}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(step, None, f"its index cannot be read: {_first_line(error)}") from error

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

        Raises:
          ValueError: the step is there already; names that collide.
          TypeError: a leaf that is no array and no number.
          ProcessError: processes save other steps or other trees.
          ReplicaError: copies of an array differ between devices.
          OSError: no space; another run writes here; and whatever an earlier save failed of, if it was not waited for.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"checkpoint: step {step!r} must be a whole number, 0 or more")
        leaves = processes.together("save", lambda: _flat(tree))
        processes.check_same("save", _described(step, leaves), "all must save the same step of the same tree")
        self.wait()
        run, arrays = self.claim(), _arrays(leaves)
        processes.from_first("save", lambda: self._prepare(step, arrays))
        leaves |= {path: _everywhere(x) for path, x in arrays.items()}
        measured: Any = dict(metrics) if metrics else None
        index: Any = {"format": _FORMAT, "run": run, "metrics": measured, "leaves": _index(leaves)}
        index["digest"] = _digest_of(_canonical(index)).hex()
        stored = {_escaped(path): x for path, x in _arrays(leaves).items() if np.size(x)}
        target = str(self.path / str(step))
        response = processes.together("save", lambda: _write(target, stored, index))
        self._saving = step, response
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
        processes.from_first("wait", self._prune)

    def close(self) -> None:
        """Waits, and lets others write here."""
        try:
            self.wait()
        finally:
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
        """
        self.wait()
        wanted = processes.together("restore", lambda: _flat(template))
        if step is not None:
            return step, _unflat(template, wanted, self._restored(wanted, step, cast))
        steps = processes.from_first("restore", self.steps)
        if not steps:
            raise FileNotFoundError(errno.ENOENT, "there is no checkpoint", str(self.path))
        errors = []
        for found in reversed(steps):
            try:
                return found, _unflat(template, wanted, self._restored(wanted, found, cast))
            except CorruptCheckpointError as error:
                warnings.warn(f"{error}; trying the one before", stacklevel=2)
                errors.append(error)
                self._corrupt.add(found)
        raise errors[0]

    def verify(self, step: int) -> None:
        """Reads every array of a checkpoint, a part at a time, spread over all devices, and compares digests.

        Raises:
          CorruptCheckpointError: the first leaf that is not what was saved.
        """
        leaves = self._leaves(step)
        for part in _parts({path: saved for path, saved in leaves.items() if "digest" in saved}):
            self._loaded({path: _spread(leaves[path]) for path in part}, step, leaves)

    def read(self, step: int, paths: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """(path, array) of all leaves or of some, in the order of `paths`, in host memory, digests checked.

        As much is read at a time as `verify` reads, or one leaf if that is larger.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          CorruptCheckpointError: the first leaf that is not what was saved.
        """
        leaves = self._leaves(step)
        for part in _parts({path: leaves[path] for path in (leaves if paths is None else paths)}):
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

    def _restored(self, wanted: dict[str, Any], step: int, cast: bool) -> dict[str, Any]:
        leaves = self._leaves(step)
        processes.together("restore", lambda: _check_same(wanted, leaves, step, cast))
        return self._loaded(wanted, step, leaves)

    def _loaded(self, wanted: dict[str, Any], step: int, leaves: dict[str, Any]) -> dict[str, Any]:
        """The leaves in the dtypes they were saved in, where `wanted` lie; digests checked."""
        numbers = {path: _number(leaves[path]) for path in wanted if "value" in leaves[path]}
        wanted = {path: _shape(x) for path, x in wanted.items() if path not in numbers}
        stored = {_escaped(path): _target(x, leaves[path]) for path, x in wanted.items() if np.prod(x.shape)}
        with jax.enable_x64(jax.config.read("jax_enable_x64") or _are_wide(leaves)):
            return {**numbers, **wanted, **self._digested(wanted, stored, step, leaves)}

    def _digested(self, wanted: Any, stored: Any, step: int, leaves: dict[str, Any]) -> dict[str, Any]:
        loaded, errors = processes.attempted("restore", lambda: _read(self.path / str(step), stored))
        if errors:
            first = next(iter(errors.values()))
            raise CorruptCheckpointError(step, None, f"it cannot be read: {_first_line(first)}") from first
        assert loaded is not None
        arrays = {path: loaded[_escaped(path)] for path in wanted if _escaped(path) in stored}
        for path, x in arrays.items():
            if isinstance(x, jax.ShapeDtypeStruct):  # as it was asked for
                raise CorruptCheckpointError(step, path, "it is not there")
        for path, digest in digests(arrays).items() if arrays else ():
            if digest != leaves[path]["digest"]:
                raise CorruptCheckpointError(step, path, "other bits than were saved")
        return arrays

    # The folder. These run on the first process alone.

    def _claim(self) -> str:
        if self._lock is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _Lock(self.path)
            for entry in (*self.path.glob("*.orbax-checkpoint-tmp*"), *self.path.glob("*.deleted.*")):
                shutil.rmtree(entry, ignore_errors=True)  # of a save, or of a deletion, that was cut off
        return self._lock.run

    def _prepare(self, step: int, arrays: dict[str, Any]) -> None:
        """Looks for what would be in the way of saving; puts aside what has a step's name and is none."""
        found = [entry for entry in self.path.iterdir() if entry.name.isdecimal()]
        bad = {entry: "uncommitted" for entry in found if not _is_committed(entry)}
        bad |= {entry: "corrupt" for entry in found if int(entry.name) in self._corrupt}
        self._corrupt.clear()
        for entry, why in bad.items():
            entry.rename(entry.with_name(f"{entry.name}.{why}.{uuid.uuid4().hex[:8]}"))
        if step in self.steps():
            raise ValueError(f"checkpoint: step {step} is saved already in {self.path}; steps never change")
        _check_space(self.path, sum(int(x.size) * x.dtype.itemsize for x in arrays.values()))

    def _prune(self) -> None:
        """Deletes what is not to be kept; a folder loses its name first, so that none is ever half there."""
        steps = self.steps()
        regular = {step for step in steps if self._keep_every and step % self._keep_every == 0}
        for step in set(steps) - {*steps[-self._keep_last :], *self._best(steps)} - regular:
            shutil.rmtree((self.path / str(step)).rename(self.path / f"{step}.deleted.{uuid.uuid4().hex[:8]}"))

    def _best(self, steps: list[int]) -> list[int]:
        if self._keep_best is None:
            return []
        best, found = self._keep_best, {}
        for step in steps:
            with contextlib.suppress(CorruptCheckpointError):
                found[step] = (self.info(step)["metrics"] or {}).get(best.metric)
        measured = [step for step, value in found.items() if value is not None and not math.isnan(value)]
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
    leaves = _flat(tree)
    for path, x in _arrays(leaves).items():
        if not _is_local(x):
            raise ValueError(f"to_bytes: {path} lies on devices of other processes, too; save it by a Checkpointer")
    raw = {path: _raw(jax.device_get(x)) for path, x in _arrays(leaves).items()}
    data = serialization.msgpack_serialize({"format": _FORMAT, "leaves": _index(leaves), "arrays": raw})
    return _digest_of(data) + data


def from_bytes(template: Any, data: bytes, *, cast: bool = False) -> Any:
    """The tree that `to_bytes` made `data` of, each array as `template` has it (see `Checkpointer.restore`).

    Raises:
      ValueError: the template has other leaves, shapes or dtypes.
      CorruptCheckpointError: the bytes are not what was made.
    """
    wanted = _flat(template)
    if _digest_of(data[_DIGEST_BYTES:]) != data[:_DIGEST_BYTES]:
        raise CorruptCheckpointError(None, None, "their digest is another; were they cut short, or made by to_bytes?")
    found: Any = serialization.msgpack_restore(data[_DIGEST_BYTES:])
    leaves = found["leaves"]
    _check_same(wanted, leaves, None, cast)
    raw = found["arrays"]
    return _unflat(template, wanted, {path: _from_raw(raw.get(path), leaves[path]) for path in wanted})


_DIGEST_BYTES = 32


def _digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _raw(x: Any) -> np.ndarray:
    """The bits of an array, of dtypes that msgpack does not know, too."""
    return np.frombuffer(np.asarray(x).tobytes(), np.uint8)


def _from_raw(raw: Any, leaf: dict[str, Any]) -> Any:
    if raw is None:
        return _number(leaf)
    return np.frombuffer(raw.tobytes(), jnp.dtype(leaf["dtype"])).reshape(leaf["shape"])


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
            return json.loads(self._notes.read_text())
        except (OSError, ValueError):
            return {}

    def release(self) -> None:
        self._lock.release()


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


def _ended(response: Any) -> dict[int, BaseException]:
    """Waits for a save. Where it fails for one process, the others' parts may wait for that one for ever: so nobody
    waits any longer than until one has failed."""
    ended = threading.Event()
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            response.result()
        except BaseException as error:
            failed.append(error)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    while True:
        ended.wait(None if jax.process_count() == 1 else 0.2)

        def look() -> bool:
            if failed:
                raise failed[0]
            return ended.is_set()

        done, errors = processes.attempted("wait", look)
        if errors:
            return errors
        if all(json.loads(said) for said in processes.gathered("wait", json.dumps(done))):
            return {}


def _unsaved(step: int, errors: dict[int, BaseException], path: Path) -> OSError:
    error = errors.get(jax.process_index()) or next(iter(errors.values()))
    text = _first_line(error)
    if "No space left" in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
        number, reason = errno.ENOSPC, "no space left on the disk"
    else:
        number, reason = getattr(error, "errno", None) or errno.EIO, "it could not be written"
    made = OSError(number, f"checkpoint {step} was not saved: {reason}; older ones are whole ({text})", str(path))
    made.__cause__ = error
    return made


# Trees as flat sets of arrays.


def _flat(tree: Any) -> dict[str, Any]:
    """Path -> array or Python's number; of typed keys their data.

    Raises:
      ValueError: there are no leaves, or two have the same path.
      TypeError: a leaf that is no array and no number.
    """
    found: dict[str, Any] = {}
    for names, leaf in named_leaves(tree):
        path = path_of(tuple(name.replace("%", "%25").replace("/", "%2F") for name in names))
        if path in found:
            raise ValueError(f"checkpoint: two leaves are called {path!r}; rename one")
        found[path] = _storable(path, leaf)
    if not found:
        raise ValueError("checkpoint: the tree has no leaves")
    return found


def _storable(path: str, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        return _as_on_devices(path, np.asarray(leaf))
    if isinstance(leaf, _NUMBERS):
        return leaf
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        raise TypeError(f"checkpoint: {path} is a {type(leaf).__name__}; only arrays and numbers can be saved")
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        data = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _as_on_devices(path: str, x: np.ndarray) -> np.ndarray:
    """NumPy's wide dtypes as JAX has them: float64 rounded to float32, unless x64 is on."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if jnp.issubdtype(dtype, jnp.integer) and x.size and not (x.astype(dtype) == x).all():
        raise ValueError(f"checkpoint: {path} has numbers too large for {dtype}; enable jax_enable_x64")
    return x.astype(dtype)


_NUMBERS = (bool, int, float, complex)


def _arrays(leaves: dict[str, Any]) -> dict[str, Any]:
    return {path: x for path, x in leaves.items() if not isinstance(x, _NUMBERS)}


_OF_KIND = {"b": "True".__eq__, "i": int, "f": float, "c": complex}


def _number(saved: dict[str, Any]) -> Any:
    """Python's number, to the last bit."""
    return _OF_KIND[np.dtype(saved["dtype"]).kind](saved["value"])


def _shape(x: Any) -> Any:
    """An array, or of a number what NumPy makes of it."""
    return np.asarray(x) if isinstance(x, _NUMBERS) else x


def _everywhere(x: Any) -> Any:
    """What each of several processes holds for itself, as one array with a copy on each device."""
    if jax.process_count() == 1 or not _is_local(x):
        return x
    whole = np.asarray(x)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("all",))
    return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P()), lambda index: whole[index])


def _is_local(x: Any) -> bool:
    """Whether it lies on devices of this process alone, or on none."""
    sharding = getattr(x, "sharding", None)
    return sharding is None or sharding.is_fully_addressable


def _index(leaves: dict[str, Any]) -> dict[str, Any]:
    found = digests(_arrays(leaves))
    return {
        path: {"shape": [], "dtype": str(np.asarray(x).dtype), "value": repr(x)}
        if isinstance(x, _NUMBERS)
        else {"shape": list(x.shape), "dtype": str(x.dtype), "digest": found[path]}
        for path, x in leaves.items()
    }


def _canonical(index: dict[str, Any]) -> bytes:
    return json.dumps(index, sort_keys=True).encode()


def _described(step: int, leaves: dict[str, Any]) -> str:
    lines = (
        f"{path} {x!r}" if isinstance(x, _NUMBERS) else f"{path} {x.dtype}{list(x.shape)}" for path, x in leaves.items()
    )
    return "\n".join([f"step {step}", *lines])


def _check_same(wanted: dict[str, Any], leaves: dict[str, Any], step: int | None, cast: bool) -> None:
    what = "these bytes do" if step is None else f"checkpoint {step} does"
    wrong = [f"{path} is not in the checkpoint" for path in wanted if path not in leaves]
    wrong += [f"{path} is not in the template" for path in leaves if path not in wanted]
    for path, x in wanted.items():
        saved, shape = leaves.get(path), np.shape(x)
        if saved and shape != tuple(saved["shape"]):
            wrong.append(f"{path} has shape {tuple(saved['shape'])}, the template {shape}")
        elif saved and not cast and not _same_dtype(x, saved):
            dtype = _shape(x).dtype
            wrong.append(f"{path} has dtype {saved['dtype']}, the template {dtype} (cast=True converts)")
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"{what} not fit the template: " + "; ".join(wrong[:5]) + more)


def _same_dtype(x: Any, saved: dict[str, Any]) -> bool:
    """Between numbers and arrays of no dims, their kinds alone count: both whole, say."""
    mine, other = np.asarray(x).dtype if isinstance(x, _NUMBERS) else x.dtype, jnp.dtype(saved["dtype"])
    if isinstance(x, _NUMBERS) or "value" in saved:
        kinds = {"u": "i", "V": "f"}  # V: bfloat16 and the like
        return kinds.get(mine.kind, mine.kind) == kinds.get(other.kind, other.kind)
    return mine == other


def _target(x: Any, saved: dict[str, Any]) -> Any:
    """Where orbax is to put an array, in the dtype it was saved in."""
    dtype = jnp.dtype(saved["dtype"])
    if isinstance(x, np.ndarray) or (jax.process_count() > 1 and _is_local(x)):
        return np.zeros(x.shape, dtype)
    sharding = x.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)


def _are_wide(leaves: dict[str, Any]) -> bool:
    """Whether some need 64 bits that JAX would take away."""
    dtypes = {jnp.dtype(saved["dtype"]) for saved in leaves.values() if "digest" in saved}
    return any(jax.dtypes.canonicalize_dtype(dtype) != dtype for dtype in dtypes)


def _spread(saved: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """A leaf cut over all devices, where they divide one of its dims."""
    shape, mesh = tuple(saved["shape"]), jax.sharding.Mesh(np.asarray(jax.devices()), ("all",))
    cut = next((i for i, size in enumerate(shape) if size % mesh.size == 0), None)
    spec = P() if cut is None else P(*(None,) * cut, "all")
    return jax.ShapeDtypeStruct(shape, jnp.dtype(saved["dtype"]), sharding=NamedSharding(mesh, spec))


def _parts(leaves: dict[str, Any]) -> Iterator[list[str]]:
    """The paths, in groups of so many bytes as are read at once."""
    part, total = [], 0
    for path, saved in leaves.items():
        size = int(np.prod(saved["shape"])) * jnp.dtype(saved["dtype"]).itemsize
        if part and total + size > _VERIFIED_BYTES:
            yield part
            part, total = [], 0
        part, total = [*part, path], total + size
    yield part


def _unflat(template: Any, wanted: dict[str, Any], found: dict[str, Any]) -> Any:
    """The leaves that were loaded, in the template's structure and each of its kind; `wanted`: its paths in order."""
    leaves, treedef = jax.tree.flatten(template)
    return jax.tree.unflatten(treedef, [_like(leaf, found[path]) for leaf, path in zip(leaves, wanted, strict=True)])


def _like(leaf: Any, x: Any) -> Any:
    """An array that was loaded, as the kind of thing that the template has there."""
    if isinstance(leaf, _NUMBERS) and not isinstance(leaf, np.generic):
        return type(leaf)(x)
    if isinstance(leaf, np.ndarray | np.generic):
        return np.asarray(x).astype(jax.dtypes.canonicalize_dtype(leaf.dtype))
    if isinstance(x, np.ndarray | bool | int | float | complex):
        x = jax.device_put(np.asarray(x), leaf.sharding, may_alias=False)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(x, impl=str(jax.random.key_impl(leaf)))
    if isinstance(x, jax.ShapeDtypeStruct):  # of no elements, so never stored
        return jnp.zeros(x.shape, x.dtype, device=x.sharding)
    return x if x.dtype == leaf.dtype else x.astype(leaf.dtype)


def _escaped(path: str) -> str:
    """A name of letters, digits, _ and -, which nothing takes for a way out of the folder; the rest as ~ and hex.

    >>> _escaped("../a")
    '~2E~2E~2Fa'
    """
    kept = string.ascii_letters + string.digits + "_-"
    return "".join(chr(byte) if chr(byte) in kept else f"~{byte:02X}" for byte in path.encode())


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:400]
