"""Arrays read from a checkpoint: each digest is computed again, on the devices, and compared."""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxshard.checkpoint import leaves, orbax_store, template
from jaxshard.checkpoint.errors import CorruptCheckpointError, first_line
from jaxshard.checkpoint.leaves import Index, Leaf, Shaped
from jaxshard.checkpoint.step_folders import StepFolders
from jaxshard.digest import named_digests
from jaxshard.processes import agreement


def read_leaves(folders: StepFolders, step: int, index: Index, wanted: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Leaves of a checkpoint, in the dtypes they were saved in.

    Args:
      folders: where it is.
      step: which one.
      index: of the checkpoint.
      wanted: the leaves to read, by path, as they are in the template: they say where arrays go.

    Raises:
      FileNotFoundError: the checkpoint was deleted meanwhile.
      CorruptCheckpointError: the first leaf that is not what was saved.
      OSError: it cannot be read now.
    """
    asked = {path: index[path] for path in wanted}
    numbers = {path: leaves.number(entry) for path, entry in asked.items() if "value" in entry}
    targets = {path: template.target(x, index[path]) for path, x in wanted.items() if path not in numbers}
    with jax.enable_x64(jax.config.read("jax_enable_x64") or leaves.need_x64(index)):
        stored = _read(folders, step, {path: x for path, x in targets.items() if x.size})
        _check_digests(step, index, stored)
    return {**numbers, **targets, **stored}


def _read(folders: StepFolders, step: int, targets: Mapping[str, Shaped]) -> dict[str, Any]:
    found, errors = agreement.attempted("restore", lambda: orbax_store.read(folders.of(step), targets))
    if errors:
        first = next(iter(errors.values()))
        if step not in agreement.from_first("restore", folders.steps):
            raise _deleted(step, folders.path)
        if not all(map(orbax_store.is_corruption, errors.values())):
            raise OSError(
                errno.EIO, f"checkpoint {step} cannot be read: {first_line(first)}", str(folders.path)
            ) from first
        raise CorruptCheckpointError(step, None, f"it cannot be read: {first_line(first)}") from first
    assert found is not None
    return found


def _deleted(step: int, path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, f"checkpoint {step} was deleted meanwhile", str(path))


def _check_digests(step: int, index: Index, arrays: Mapping[str, Any]) -> None:
    for path, x in arrays.items():
        if isinstance(x, jax.ShapeDtypeStruct):  # the target: nothing was stored under this path
            raise CorruptCheckpointError(step, path, "it is not there")
    for path, digest in named_digests(arrays).items():
        if digest != index[path].get("digest"):
            raise CorruptCheckpointError(step, path, "other bits than were saved")
