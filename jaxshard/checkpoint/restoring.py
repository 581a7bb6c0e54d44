"""Restores the newest intact step, with a template or as nested dicts."""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from jaxshard.base.tree import names_in
from jaxshard.base.types import T
from jaxshard.checkpoint import other_options
from jaxshard.checkpoint.reading import check_sizes, of_first, read_arrays, read_index, read_leaves
from jaxshard.checkpoint.step_folders import StepFolders, folder_of, located, whole_number
from jaxshard.checkpoint.storage import leaves, manifest
from jaxshard.checkpoint.storage.errors import CorruptCheckpointError
from jaxshard.checkpoint.storage.leaves import FlatTree, Leaf, Number
from jaxshard.checkpoint.template import check_fits, fits
from jaxshard.processes import agreement
from jaxshard.system.users_lines import warn

Nested: TypeAlias = dict[str, "np.ndarray | Number | Nested"]


def restored(folders: StepFolders, wanted: FlatTree, step: int, *, cast: bool, only: str | None) -> dict[str, Leaf]:
    """Restores a step's wanted leaves, by path; warns of leaves that are not finite and of options that differ.

    Raises:
      ValueError: the template's leaves, shapes or dtypes differ; nothing was read.
      Exception: as `read_leaves`.
    """
    index = read_index(folders, step)
    part = {path: entry for path, entry in index.items() if re.search(only or "", path)}
    check_sizes(folders, step, part)
    planned = None if fits(wanted, part, cast) else other_options.plan(wanted, part)
    if planned is None:
        agreement.together("restore", lambda: check_fits(wanted, part, f"checkpoint {step} does", cast))
    found, faults = read_leaves(folders, step, part, planned.sources if planned else wanted.leaves)
    if words := manifest.faults_in_words(part, faults):
        newest = of_first(lambda: newest_finite(folders))
        finite = f"the newest finite one: restore(template, step={newest}), then save into a new folder"
        cure = "no checkpoint here is finite" if newest is None else finite
        warn(f"checkpoint {step} is not finite: {words}; {cure}")
    if planned is not None:
        warn(f"checkpoint {step} was saved with different options: {'; '.join(planned.changes) or 'it has more state'}")
        found = {path: make(found) for path, make in planned.made.items()}
    for line in other_options.changed_hyperparams(step, wanted.leaves, found):
        warn(line)
    return found


# Which step.


def newest_whole(
    folders: StepFolders, read: Callable[[int], T], corrupt: Callable[[int], object] = lambda step: None
) -> tuple[int, T]:
    """The newest step that can be read, and what `read` returns for it; warns of each step it skips.

    Args:
      folders: of the checkpoints.
      read: reads a step.
      corrupt: is called with each damaged step.

    Raises:
      FileNotFoundError: nothing is saved here.
      NewerFormatError: only a newer jaxshard can read the newest step that is not damaged.
      CorruptCheckpointError: no step can be read; the error is the newest step's.
    """
    tried: dict[int, Exception] = {}
    while left := [each for each in of_first(folders.steps) if each not in tried]:
        step = left[-1]
        try:
            found = read(step)
            _warn_of_damaged(folders, step)
            return step, found
        except FileNotFoundError as error:  # deleted meanwhile, by the run that writes here, which has newer ones
            tried[step] = error
        except CorruptCheckpointError as error:
            warn(f"{error}; trying the previous one")
            tried[step] = error
            corrupt(step)
    if tried:
        raise next(iter(tried.values()))
    if damaged := _damaged(folders):
        step, missing = damaged[-1]
        raise CorruptCheckpointError(step, None, f"{missing} is missing in {folders.of(step)}; no checkpoint is intact")
    raise FileNotFoundError(errno.ENOENT, "no checkpoint found", str(folders.path))


def newest_intact(listed: Callable[[], Sequence[int]], verify: Callable[[int], object]) -> int | None:
    """The newest step that `verify` accepts; None if it accepts none. If another program deletes one, lists them
    again."""
    for step in reversed(listed()):
        try:
            verify(step)
        except CorruptCheckpointError:
            continue
        except FileNotFoundError:
            return newest_intact(listed, verify)
        return step
    return None


def newest_finite(folders: StepFolders) -> int | None:
    """The newest step that is recorded as finite; None if none is. Damaged steps are skipped."""
    for step in reversed(folders.steps()):
        with contextlib.suppress(CorruptCheckpointError, FileNotFoundError):
            found = folders.manifest(step)
            if manifest.health(found["leaves"], found.get("not_finite")) == "finite":
                return step
    return None


def _warn_of_damaged(folders: StepFolders, taken: int) -> None:
    for step, missing in _damaged(folders):
        if step > taken:
            place = folders.of(step)
            warn(f"checkpoint {step} is skipped: {missing} is missing in {place}")


def _damaged(folders: StepFolders) -> list[tuple[int, str]]:
    return of_first(lambda: list(folders.damaged().items()))


# Without a template.


def read(path: str | os.PathLike[str], step: int | None = None, *, only: str | None = None) -> Nested:
    """Reads a checkpoint without a template, as nested dicts by its leaves' paths, and checks every digest.

    Lists and tuples become dicts with the keys "0", "1" and so on. Arrays become NumPy's, in host memory, in their
    saved dtypes; typed PRNG keys become their uint32 data. It reads 256 MiB at a time, or one larger array. With
    several processes, all must call it.

    Args:
      path: a folder of checkpoints, a run's folder (which has them in model/), or the folder of one step.
      step: None: the newest intact step; a warning names each damaged one.
      only: a regular expression such as "^params/": read only the leaves whose paths match it anywhere.

    Raises:
      FileNotFoundError: the checkpoint does not exist.
      ValueError: `only` is not a regular expression, or matches no leaf; `step` is given for the folder of one step.
      NewerFormatError: only a newer jaxshard can read it.
      CorruptCheckpointError: the checkpoint is damaged.
      OSError: the file system refuses to read it.

    >>> import tempfile
    >>> from jaxshard.checkpoint import Checkpointer
    >>> folder = tempfile.mkdtemp()
    >>> Checkpointer(folder).save(7, {"params": {"w": np.arange(3.0)}, "step": 7}, blocking=True)
    >>> read(folder, only="^params/")
    {'params': {'w': array([0., 1., 2.], dtype=float32)}}
    """
    folder, itself = located(Path(path).expanduser())
    if step is not None and itself is not None:
        raise ValueError(f"checkpoint: {path} is the folder of step {itself}; leave step={step} out")
    folders, asked = StepFolders(folder_of(folder)), itself if step is None else step
    if asked is not None:
        return _read(folders, whole_number(asked), only)
    return newest_whole(folders, lambda newest: _read(folders, newest, only))[1]


def _read(folders: StepFolders, step: int, only: str | None) -> Nested:
    index = read_index(folders, step)
    chosen = {path: index[path] for path in leaves.matching(index, only)}
    numbers = {path: leaves.number(entry) for path, entry in chosen.items() if "value" in entry}
    arrays = dict(read_arrays(folders, step, [path for path in chosen if path not in numbers]))
    return _nested({path: numbers[path] if path in numbers else arrays[path] for path in chosen})


def _nested(flat: Mapping[str, np.ndarray | Number]) -> Nested:
    made: Nested = {}
    for path, x in flat.items():
        *folders, name = names_in(path)
        inner = made
        for folder in folders:
            found = inner.setdefault(folder, {})
            if not isinstance(found, dict):
                raise ValueError(f"checkpoint: {path} is inside another leaf; read it with Checkpointer.read")
            inner = found
        if name in inner:
            raise ValueError(f"checkpoint: {path} contains other leaves; read it with Checkpointer.read")
        inner[name] = x
    return made
