"""Checkpoints that fit any strategy, mesh and device count, and that say so when a bit is not what was saved.

Storage is orbax's. A checkpoint is a flat set of arrays, named by their paths in the tree, and an index of each one's
shape, dtype and digest (`jaxshard.digest`); what is loaded is laid out as a template says, digested again on the
devices and compared. Structure comes from the template alone, so nothing is ever unpickled.
"""

import contextlib
import dataclasses
import errno
import math
import operator
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.checkpoint import flat, manifest
from jaxshard.checkpoint.flat import Flat, first_line
from jaxshard.checkpoint.manifest import CorruptCheckpointError
from jaxshard.digest import named_digests
from jaxshard.processes import agreement

try:
    from jaxshard.checkpoint import orbax_store
    from jaxshard.checkpoint.folder_lock import Lock
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}; it comes with: pip install "jaxshard[checkpoint]"', name=error.name) from error


_VERIFIED_BYTES = 2**28  # read at once by `verify`
_CUT_OFF = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleted\.[0-9a-f]{8})")  # of a save, or of a deletion


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
        self._lock: Lock | None = None
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
        return sorted(int(entry.name) for entry in found if _is_step(entry.name) and orbax_store.is_committed(entry))

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
            found = manifest.opened(self.path / str(step))
            return {"step": step, **{name: found[name] for name in ("metrics", "run", "leaves")}}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(step, None, f"its index cannot be read: {first_line(error)}") from error

    # Saving.

    def claim(self) -> str:
        """Makes the folder and locks it for this run until `close`; returns the run's id. `save` does it too.

        Raises:
          OSError: the folder cannot be made or written to, or another run is writing there.
        """
        return agreement.from_first("claim", self._claim)

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
        step, measured, tree = agreement.together("save", lambda: _asked(step, metrics, tree))
        what = f"{flat.described(step, tree)}\n{measured}"
        agreement.check_same("save", what, "all must save the same step of the same tree")
        run = self.claim()
        tree = Flat(tree.leaves | {path: flat.everywhere(x) for path, x in flat.arrays(tree.leaves).items()}, tree.keys)
        leaves, arrays = flat.index_of(tree), flat.arrays(tree.leaves)
        if agreement.from_first("save", lambda: self._prepare(step, leaves, arrays)):
            made = manifest.sealed({"format": manifest.FORMAT, "run": run, "metrics": measured, "leaves": leaves})
            stored = {flat.escaped(path): x for path, x in arrays.items() if np.size(x)} or orbax_store.NOTHING
            target = str(self.path / str(step))
            self._saving = step, agreement.together("save", lambda: orbax_store.write(target, stored, made))
        if blocking:
            self.wait()

    def wait(self) -> None:
        """Until the last save is written. Raises what it failed of, on every process."""
        if self._saving is None:
            return
        (step, response), self._saving = self._saving, None
        errors = orbax_store.ended(response)
        if errors:
            raise orbax_store.unsaved(step, errors, self.path)
        for trouble in agreement.from_first("wait", lambda: self._prune(step)):
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
            if why := orbax_store.abandoned(response):
                warnings.warn(f"checkpoint {step} was not saved: {why}", stacklevel=3)
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
        wanted = agreement.together("restore", lambda: flat.flatten(template, shapes=True))
        if step is not None:
            step = _step(step)
            return step, flat.unflatten(template, wanted, self._restored(wanted, step, cast))
        tried: dict[int, Exception] = {}
        while left := [each for each in agreement.from_first("restore", self.steps) if each not in tried]:
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
        for step in reversed(agreement.from_first("latest_valid", self.steps)):
            with contextlib.suppress(CorruptCheckpointError):
                self.verify(step)
                return step
        return None

    def _leaves(self, step: int) -> dict[str, Any]:
        return agreement.together("restore", lambda: self.info(step))["leaves"]

    def _restored(self, wanted: Flat, step: int, cast: bool) -> dict[str, Any]:
        leaves = self._leaves(step)
        what = f"checkpoint {step} does"
        agreement.together("restore", lambda: flat.check_same(wanted, leaves, what, cast))
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
        loaded, errors = agreement.attempted("restore", lambda: orbax_store.read(self.path / str(step), stored))
        if errors:
            first = next(iter(errors.values()))
            if step not in agreement.from_first("restore", self.steps):
                raise FileNotFoundError(errno.ENOENT, f"checkpoint {step} was deleted meanwhile", str(self.path))
            if not all(map(orbax_store.is_corruption, errors.values())):
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
            self._lock = Lock(self.path)
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
        why = "corrupt" if step in self._corrupt else "uncommitted" if not orbax_store.is_committed(target) else None
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


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and name == str(int(name))


def _check_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"no space: the checkpoint takes {needed / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free; nothing was "
            "written",
            str(path),
        )
