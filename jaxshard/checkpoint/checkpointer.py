"""Checkpoints that fit any strategy, mesh and device count, and that say so when a bit is not what was saved.

Orbax stores the arrays. A checkpoint is a flat set of arrays, named by their paths in the tree, and an index with each
one's shape, dtype and digest (`jaxshard.digest`). What is loaded is laid out as a template says, digested again on the
devices, and compared. The structure of the tree comes from the template alone, so nothing is ever unpickled.
"""

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Self, SupportsFloat, SupportsIndex

import jax
import numpy as np

from jaxshard.base.types import T, Tree
from jaxshard.checkpoint.retention import Best, Retention, measured
from jaxshard.checkpoint.storage import leaves, manifest
from jaxshard.checkpoint.storage.errors import CorruptCheckpointError, not_installed, not_saved
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
    from jaxshard.checkpoint.writer import Writer, tell
except ModuleNotFoundError as error:
    raise not_installed(error) from error


class Checkpointer:
    """Saves and restores trees of arrays in a folder, a sub-folder for each step.

    With several processes all must make the same calls, in a folder that all of them see.

    Args:
      path: the folder; it is made when something is saved.
      keep_last: how many of the newest checkpoints are kept.
      keep_every: checkpoints of steps that it divides are kept for ever.
      keep_best: the best checkpoints by a metric are kept.

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
        retention = Retention(keep_last, keep_every, keep_best)
        self.path = folder_of(path)
        self._folders = StepFolders(self.path)
        self._writer, self._metric = Writer(self._folders, retention), keep_best and keep_best.metric
        self._saving: tuple[int, orbax_store.Save] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or jax.process_count() == 1:
            self.close()
        else:  # the others may not have this error, and be at another call
            self._abandon()

    # What there is.

    def steps(self) -> list[int]:
        """The steps that were written to their end, the oldest first."""
        return self._folders.steps()

    def damaged(self) -> dict[int, str]:
        """The steps that are no longer whole: step -> which file of theirs is missing. `restore` passes them over, with
        a warning."""
        return self._folders.damaged()

    def info(self, step: SupportsIndex) -> CheckpointInfo:
        """What a checkpoint says of itself; no array is read.

        Returns:
          A dict with "step", "metrics", "run"; "leaves", which has for each path a dict with "shape", "dtype", and
          "digest" or "value"; and "not_finite": path -> "nan" or "inf", of the leaves that have such elements, or None
          if jaxshard 0.1 saved it.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          NewerFormatError: only a newer jaxshard reads it.
          CorruptCheckpointError: its index is not what was saved.
          OSError: the system does not let us read it.
        """
        number = whole_number(step)
        return manifest.info(number, self._folders.manifest(number))

    # Saving.

    def claim(self) -> str:
        """Makes the folder and locks it for this run until `close`. `save` does it too.

        Returns:
          the run's id: 32 hex digits, the same for all runs that write in this folder one after the other.

        Raises:
          ValueError: orbax cannot write under this path; on Linux it can under all.
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
        """Saves `tree`; returns as soon as its arrays are copied off the devices, so that they may be donated.

        A step that is there already with the same bits is left alone, but that `metrics` are added to what it has.

        Args:
          step: its number, 0 or more.
          tree: arrays (of any sharding) and numbers.
          metrics: for `keep_best`, and to be read later.
          blocking: wait until it is written.

        Raises:
          ValueError: the step is there already with other bits, or newer ones are; names that collide; `metrics` lacks
            the one that `keep_best` names.
          TypeError: a leaf that is no array and no number; a metric that is no number.
          ProcessError: processes save other steps or other trees.
          ReplicaError: copies of an array differ between devices.
          OSError: no space; another run writes here; or an earlier save failed and nobody has waited for it.
        """
        self.wait()
        number, numbers, flat = agreement.together(
            "save", lambda: (whole_number(step), measured(metrics, self._metric), leaves.flatten(tree))
        )
        what = f"{leaves.described(number, flat)}\n{numbers}"
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
        """Waits until the last save is written, and begins to delete the checkpoints that are not to be kept.

        Raises:
          OSError: on every process, if the save failed on one.
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
            if jax.process_index() == 0:
                self._writer.fail(step, errors)
            raise not_saved(step, errors, self.path)
        tell(agreement.from_first("wait", lambda: self._writer.prune(step)))

    def close(self) -> None:
        """Waits for the last save, and a while for what is being deleted; lets other runs write here."""
        try:
            self.wait()
        finally:
            tell(self._writer.close())

    def _abandon(self) -> None:
        """Gives the last save some time, and asks no other process about it."""
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
        """Loads a checkpoint, each array as `template` has it, and checks every digest.

        Args:
          template: a tree of arrays, or of `ShapeDtypeStruct`s with shardings, under any strategy and mesh, or as
            plain optax has it.
          step: None: the newest that is whole; where one is not, there is a warning and the one before is tried. If
            what is restored is not finite, a warning names the leaf and the newest step that is.
          cast: let dtypes be converted to the template's.
          only: a regular expression: only leaves in whose paths it has a match are restored, such as "^params/". The
            template's other leaves stay as they are; it may lack the checkpoint's other leaves.

        Returns:
          (its step, the tree).

        Raises:
          FileNotFoundError: nothing is saved here.
          ValueError: the template has other leaves, shapes or dtypes. Nothing was read.
          NewerFormatError: only a newer jaxshard reads it.
          CorruptCheckpointError: what is on disk is not what was saved.
          OSError: the system does not let us read it (its rights, its disk, too many files, memory): after a few
            tries where that may pass. No older one is taken for it.
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
        """Reads every array of a checkpoint and compares digests; at a time 256 MiB, spread over all devices.

        Returns:
          path -> "nan" or "inf", of the leaves that have such elements.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          CorruptCheckpointError: the first leaf that is not what was saved.
        """
        return reading.verify(self._folders, whole_number(step))

    def read(self, step: SupportsIndex, paths: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Reads leaves into host memory, and checks their digests; 256 MiB at a time, or one leaf if that is larger.

        Args:
          step: which checkpoint.
          paths: of the leaves, as in `info`; None: all.

        Yields:
          (path, array), in the order of `paths`.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          CorruptCheckpointError: the first leaf that is not what was saved.
        """
        yield from reading.read_arrays(self._folders, whole_number(step), paths)

    def latest_valid(self) -> int | None:
        """The newest step whose arrays are all as they were saved; it reads them. None: there is none.

        Raises:
          NewerFormatError: a step that is newer can only be read by a newer jaxshard.
        """
        for step in reversed(reading.of_first(self.steps)):
            with contextlib.suppress(CorruptCheckpointError):
                self.verify(step)
                return step
        return None

    def latest_finite(self) -> int | None:
        """The newest step whose arrays were all finite when it was saved; no array is read. None: there is none.

        A NaN in any array counts, infinity in any that has a dim. What jaxshard 0.1 saved does not say.

        Raises:
          NewerFormatError: a step that is newer can only be read by a newer jaxshard.
          OSError: the system does not let us read an index.
        """
        return reading.of_first(lambda: restoring.newest_finite(self._folders))
