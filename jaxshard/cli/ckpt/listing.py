"""Which checkpoints a folder stands for, which of them is meant, and what `ls` and `info` say of one."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxshard.checkpoint import Checkpointer, CorruptCheckpointError, NewerFormatError
from jaxshard.checkpoint.step_folders import located
from jaxshard.checkpoint.storage.leaves import Index
from jaxshard.checkpoint.storage.manifest import CheckpointInfo, faults_in_words, health
from jaxshard.cli.ckpt import export as files
from jaxshard.system.text import size_in_words


def row_of(checkpoints: Checkpointer, step: int) -> list[str]:
    folder, cells = checkpoints.path / str(step), [str(step)]
    try:
        cells += [saved_at(folder), size_in_words(_size(folder))]
        found = checkpoints.info(step)
    except CorruptCheckpointError:
        return [*cells, "", "", "", "unreadable", "", ""]
    except NewerFormatError as error:
        return [*cells, "", "", "", f"format {error.found}", "", ""]
    except FileNotFoundError:  # by the run that writes here
        return [str(step), "deleted", *[""] * 7]
    except OSError:
        return [str(step), "not read", *[""] * 7]
    leaves = found["leaves"]
    sizes = [f"{len(leaves)}", f"{num_elements(leaves):,}", size_in_words(num_bytes(leaves))]
    state = health(leaves, found["not_finite"])
    numbers = state if state in ("finite", "unknown") else "not finite"
    return [*cells, *sizes, "ok", numbers, metrics_in_words(found["metrics"])]


def finite_in_words(found: CheckpointInfo) -> str:
    if found["not_finite"] is None:
        return "unknown: jaxshard 0.1 saved it; `ckpt verify` finds out"
    words = faults_in_words(found["leaves"], found["not_finite"])
    return f"not finite: {words}" if words else "finite"


def saved_at(folder: Path) -> str:
    return datetime.datetime.fromtimestamp(folder.stat().st_mtime).strftime("%Y-%m-%d %H:%M")


def _size(folder: Path) -> int:
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names)


def metrics_in_words(metrics: Mapping[str, float] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (metrics or {}).items())


def num_elements(leaves: Index) -> int:
    return sum(int(np.prod(leaf["shape"])) for leaf in leaves.values())


def num_bytes(leaves: Index) -> int:
    return sum(map(files.num_bytes, leaves.values()))


def opened(folder: Path) -> tuple[Checkpointer, int | None]:
    """The checkpoints that a folder stands for, and the step if it is the folder of one."""
    if not folder.is_dir():
        raise ValueError(f"{folder} {'is a file' if folder.exists() else 'does not exist'}: name a folder")
    place, step = located(folder)
    return Checkpointer(place), step


def asked(folder: Path, step: int | None) -> tuple[Checkpointer, list[int]]:
    """The checkpoints of a folder, and the steps that are meant: all, or the one."""
    checkpoints, itself = opened(folder)
    if step is not None and itself is not None:
        raise ValueError(f"--step {step}: {folder} is the folder of step {itself}; leave --step out")
    one, steps, damaged = itself if step is None else step, checkpoints.steps(), checkpoints.damaged()
    if one in damaged or (damaged and not steps):
        number = max(damaged) if one is None else one
        raise CorruptCheckpointError(number, None, f"{damaged[number]} is missing in {checkpoints.path / str(number)}")
    if not steps:
        raise ValueError(none_in(checkpoints.path))
    if one is not None and one not in steps:
        newest = ", ".join(map(str, steps[-8:]))
        raise ValueError(f"--step {one}: no such checkpoint in {checkpoints.path}; the newest are {newest}")
    return checkpoints, steps if one is None else [one]


def chosen(folder: Path, step: int | None) -> tuple[Checkpointer, int]:
    checkpoints, steps = asked(folder, step)
    return checkpoints, steps[-1]


def none_in(folder: Path) -> str:
    return f"no checkpoint in {folder}: name a folder of checkpoints, or a run's folder, which has them in model/"
