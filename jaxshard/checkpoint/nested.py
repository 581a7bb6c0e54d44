"""A checkpoint without a template: a dict of dicts by the leaves' paths, in host memory."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from jaxshard.checkpoint.arguments import whole_number
from jaxshard.checkpoint.checkpointer import Checkpointer
from jaxshard.checkpoint.reading import newest_whole, read_index
from jaxshard.checkpoint.step_folders import StepFolders, located
from jaxshard.checkpoint.storage import leaves
from jaxshard.checkpoint.storage.leaves import Number

Nested: TypeAlias = "dict[str, np.ndarray | Number | Nested]"


def read(path: str | os.PathLike[str], step: int | None = None, *, only: str | None = None) -> Nested:
    """A checkpoint as nested dicts by its leaves' paths, without a template; every digest is checked.

    Lists and tuples are dicts, too, with the keys "0", "1" and so on. Arrays are NumPy's, in host memory, in the dtypes
    that were saved; typed PRNG keys are their uint32 data. 256 MiB are read at a time, or one array if it is larger.
    With several processes all must call it.

    Args:
      path: a folder of checkpoints, a run's folder (which has them in model/), or the folder of one step.
      step: None: the newest that is whole; where one is not, there is a warning and the one before is tried.
      only: a regular expression: only leaves in whose paths it has a match are read, such as "^params/".

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: `only` is no regular expression, or matches none; `step` where the folder is that of one step.
      NewerFormatError: only a newer jaxshard reads it.
      CorruptCheckpointError: what is on disk is not what was saved.
      OSError: the system does not let us read it.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> Checkpointer(folder).save(7, {"params": {"w": np.arange(3.0)}, "step": 7}, blocking=True)
    >>> read(folder, only="^params/")
    {'params': {'w': array([0., 1., 2.], dtype=float32)}}
    """
    folder, itself = located(Path(path).expanduser())
    if step is not None and itself is not None:
        raise ValueError(f"checkpoint: {path} is the folder of step {itself}; leave step={step} out")
    checkpoints, asked = Checkpointer(folder), itself if step is None else step
    if asked is not None:
        return _read(checkpoints, whole_number(asked), only)
    return newest_whole(StepFolders(folder), lambda newest: _read(checkpoints, newest, only))[1]


def _read(checkpoints: Checkpointer, step: int, only: str | None) -> Nested:
    index = read_index(StepFolders(checkpoints.path), step)
    chosen = {path: index[path] for path in leaves.matching(index, only)}
    numbers = {path: leaves.number(entry) for path, entry in chosen.items() if "value" in entry}
    arrays = dict(checkpoints.read(step, [path for path in chosen if path not in numbers]))
    return _nested({path: numbers[path] if path in numbers else arrays[path] for path in chosen})


def _nested(flat: Mapping[str, np.ndarray | Number]) -> Nested:
    made: Nested = {}
    for path, x in flat.items():
        *folders, name = [
            re.sub("%2F|%25", lambda code: {"%2F": "/", "%25": "%"}[code[0]], part) for part in path.split("/")
        ]
        inner = made
        for folder in folders:
            found = inner.setdefault(folder, {})
            if not isinstance(found, dict):
                raise ValueError(f"checkpoint: {path} lies within another leaf; read it by Checkpointer.read")
            inner = found
        if name in inner:
            raise ValueError(f"checkpoint: other leaves lie within {path}; read it by Checkpointer.read")
        inner[name] = x
    return made
