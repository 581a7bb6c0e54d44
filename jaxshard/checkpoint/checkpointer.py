"""Checkpoints that fit any strategy, mesh and device count, and that detect each changed bit.

Orbax stores the arrays. A checkpoint is a flat set of arrays, named by their paths in the tree, and an index with each
one's shape, dtype and digest (`jaxshard.digest`). Restoring places the arrays as a template says, digests them again on
the devices, and compares. The tree's structure comes only from the template, so nothing is ever unpickled.
"""

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Self, SupportsFloat, SupportsIndex

import numpy as np

from jaxshard.base.types import T, Tree
from jaxshard.checkpoint.retention import Best, Retention, measured
from jaxshard.checkpoint.storage import leaves, manifest
from jaxshard.checkpoint.storage.errors import not_installed, not_saved
from jaxshard.checkpoint.storage.leaves import FlatTree
from jaxshard.checkpoint.storage.manifest import CheckpointInfo
from jaxshard.checkpoint.template import part_of, unflatten
from jaxshard.digest import Fault, unwatched
from jaxshard.processes import agreement
from jaxshard.system.users_lines import warn

try:
    from jaxshard.checkpoint import reading, restoring
    from jaxshard.checkpoint.step_folders import StepFolders, folder_of, whole_number
    from jaxshard.checkpoint.storage import orbax_store
    from jaxshard.checkpoint.storage.paths import PlainPath
    from jaxshard.checkpoint.writer import Writer, warn_of
except ModuleNotFoundError as error:
    raise not_installed(error) from error


class Checkpointer:
    """Saves trees of arrays in a folder, one sub-folder per step, and restores them.

    With several processes, all must make the same calls, and all must see the folder.

    Args:
      path: the folder; the first save makes it.
      keep_last: the number of newest checkpoints to keep.
      keep_every: keep each checkpoint whose step is a multiple of this.
      keep_best: keep the best checkpoints by a metric.

    Raises:
      ValueError: an option is invalid.
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
        retention = Retention(keep_last, keep_every, keep_best)
        self.path = folder_of(path)
        self._folders = StepFolders(self.path)
        self._writer, self._metric = Writer(self._folders, retention), keep_best and keep_best.metric
        self._saving: tuple[int, orbax_store.Save] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or agreement.is_alone():
            self.close()
        else:  # the other processes may lack this error and be in a different call
            self._abandon()

    # Looking.

    def steps(self) -> list[int]:
        """The steps that are complete, the oldest first."""
        return self._folders.steps()

    def damaged(self) -> dict[int, str]:
        """Steps that have lost a file: step -> the missing file. `restore` skips them with a warning."""
        return self._folders.damaged()

    def info(self, step: SupportsIndex) -> CheckpointInfo:
        """Describes a checkpoint without reading its arrays.

        Returns:
          A dict with "step", "metrics", "run"; "leaves": path -> a dict with "shape", "dtype", and "digest" or "value";
          and "not_finite": path -> "nan" or "inf" for each leaf with such elements (None if jaxshard 0.1 saved it).

        Raises:
          FileNotFoundError: the checkpoint does not exist.
          NewerFormatError: only a newer jaxshard can read it.
          CorruptCheckpointError: its index is damaged.
          OSError: the file system refuses to read it.
        """
        number = whole_number(step)
        return manifest.info(number, self._folders.manifest(number))

    # Saving.

    def claim(self) -> str:
        """Makes the folder and locks it for this run until `close`. `save` does this too.

        Returns:
          the folder's run id: 32 hex digits, which later runs in the same folder keep.

        Raises:
          ValueError: orbax cannot write under this path (never on Linux).
          OSError: the folder cannot be made or written to, or another run is writing there.
        """
        return agreement.from_first("claim", self._writer.claim)

    @unwatched()
    def save(
        self,
        step: SupportsIndex,
        tree: Tree,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        blocking: bool = False,
    ) -> None:
        """Saves `tree`. Returns once the arrays are copied off the devices; the caller may then donate them.

        If the step is already saved with the same bits, `save` only adds `metrics` to it.

        Args:
          step: its number, 0 or more.
          tree: arrays (of any sharding) and numbers.
          metrics: for `keep_best` and `info`.
          blocking: wait until the checkpoint is written.

        Raises:
          ValueError: this step is saved with different bits, or a newer step is saved; two leaves have the same path;
            `metrics` lacks the metric of `keep_best`; `processes.among` leaves this process alone.
          TypeError: a leaf is neither an array nor a number; a metric is not a number.
          ProcessError: the processes save different steps or trees.
          ReplicaError: copies of an array differ between devices.
          OSError: the disk is full; another run writes here; or an earlier save failed, and `wait` was not called.
        """
        if agreement.is_alone() and not agreement.are_all_present():
            raise ValueError(
                "save: one process of a job of several cannot save alone, since orbax would wait for the others; start "
                "a job of its own for each model, or give its mesh devices of two processes"
            )
        self.wait()
        number, numbers, flat = agreement.together(
            "save", lambda: (whole_number(step), measured(metrics, self._metric), leaves.flatten(tree))
        )
        what = f"{leaves.described(number, flat)}\n{numbers}\n{str(self.path)!r}"
        agreement.check_same("save", what, "all must save the same step of the same tree")
        self._begin(number, numbers, flat, self.claim())
        if blocking:
            self.wait()
            self._writer.settle()

    def _begin(self, step: int, metrics: dict[str, float] | None, tree: FlatTree, run: str) -> None:
        arrays = {path: leaves.on_all_devices(x) for path, x in tree.arrays().items()}
        index, faults = manifest.index_of(FlatTree({**tree.leaves, **arrays}, tree.keys))
        num_bytes = sum(int(x.size) * x.dtype.itemsize for x in arrays.values())
        if agreement.from_first("save", lambda: self._writer.prepare(step, index, num_bytes, metrics)):
            made = manifest.made(step, run, metrics, index, faults)
            place, check = PlainPath.of_all(self.path), functools.partial(self._writer.check_saved, step, index)
            begin = functools.partial(orbax_store.Save.begin, place, str(step), arrays, made, check)
            self._saving = step, agreement.together("save", begin)

    def wait(self) -> None:
        """Waits until the last save is written, then starts to delete the checkpoints that no `keep_` option keeps.

        Raises:
          OSError: on every process, if the save failed on any.
        """
        if self._saving is None:
            return
        step, saving = self._saving
        try:
            errors = saving.wait()
        except Exception:
            self._saving = None
            raise
        self._saving = None  # but not after Ctrl-C: `close` waits again
        if errors:
            if agreement.is_first():
                self._writer.fail(step, errors)
            raise not_saved(step, errors, self.path)
        warn_of(agreement.from_first("wait", lambda: self._writer.prune(step)))

    def close(self) -> None:
        """Waits for the last save, at most 10 s for deletions, and unlocks the folder."""
        try:
            self.wait()
        finally:
            warn_of(self._writer.close())

    def _abandon(self) -> None:
        """Waits a limited time for the last save, without asking other processes."""
        if self._saving is not None:
            (step, saving), self._saving = self._saving, None
            if why := saving.abandon():
                warn(f"checkpoint {step} was not saved: {why}")
        self._writer.release()

    # Restoring.

    @unwatched()
    def restore(
        self, template: T, step: SupportsIndex | None = None, *, cast: bool = False, only: str | None = None
    ) -> tuple[int, T]:
        """Loads a checkpoint, with the shardings and dtypes of `template`, and checks every digest.

        Args:
          template: a tree of arrays, or of `ShapeDtypeStruct`s with shardings, of any strategy and mesh, or of plain
            optax.
          step: None: the newest intact step; a warning names each damaged one. If a restored leaf is not finite, a
            warning names it and the newest finite step.
          cast: convert dtypes to the template's.
          only: a regular expression such as "^params/": restore only the leaves whose paths match it anywhere. Other
            leaves of the template stay as they are; the template may lack other leaves of the checkpoint.

        Returns:
          (the step, the tree).

        Raises:
          FileNotFoundError: nothing is saved here.
          ValueError: the template's leaves, shapes or dtypes differ. Nothing was read.
          NewerFormatError: only a newer jaxshard can read it.
          CorruptCheckpointError: the checkpoint is damaged.
          OSError: the file system refuses to read it (permissions, disk, open files, memory), also when retried.
            `restore` does not fall back to an older step.
        """
        self.wait()
        flat = agreement.together("restore", lambda: leaves.flatten(template, shapes=True))
        wanted = agreement.together("restore", lambda: part_of(flat, only))

        read = functools.partial(restoring.restored, self._folders, wanted, cast=cast, only=only)
        if step is not None:
            number = whole_number(step)
            return number, unflatten(template, flat, read(number))
        number, found = restoring.newest_whole(self._folders, read, self._writer.corrupt.add)
        return number, unflatten(template, flat, found)

    def verify(self, step: SupportsIndex) -> dict[str, Fault]:
        """Reads every array of a checkpoint, 256 MiB at a time over all devices, and compares digests.

        Returns:
          path -> "nan" or "inf" for each leaf with such elements.

        Raises:
          FileNotFoundError: the checkpoint does not exist.
          CorruptCheckpointError: names the first damaged leaf.
        """
        return reading.verify(self._folders, whole_number(step))

    def read(self, step: SupportsIndex, paths: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Reads leaves into host memory and checks their digests; 256 MiB at a time, or one larger leaf.

        Args:
          step: of the checkpoint.
          paths: of the leaves, as in `info`; None: all.

        Yields:
          (path, array), in the order of `paths`.

        Raises:
          FileNotFoundError: the checkpoint does not exist.
          CorruptCheckpointError: names the first damaged leaf.
        """
        yield from reading.read_arrays(self._folders, whole_number(step), paths)

    def latest_valid(self) -> int | None:
        """Reads checkpoints until one is intact, the newest first, and returns its step; None if none is.

        Raises:
          NewerFormatError: only a newer jaxshard can read a newer step.
        """
        return restoring.newest_intact(lambda: reading.of_first(self.steps), self.verify)

    def latest_finite(self) -> int | None:
        """The newest step whose arrays were all finite when saved; None if none is recorded so. No array is read.

        An array with a NaN is not finite; an infinity counts except in scalars. jaxshard 0.1 did not record this.

        Raises:
          NewerFormatError: only a newer jaxshard can read a newer step.
          OSError: the file system refuses to read an index.
        """
        return reading.of_first(lambda: restoring.newest_finite(self._folders))
