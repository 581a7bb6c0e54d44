"""Reads arrays of a checkpoint, computes their digests again on the devices, and compares."""

import errno
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.types import T
from jaxshard.checkpoint.step_folders import StepFolders
from jaxshard.checkpoint.storage import leaves, orbax_store, sizes
from jaxshard.checkpoint.storage.errors import CorruptCheckpointError, proven
from jaxshard.checkpoint.storage.leaves import Entry, Index, Leaf, Shaped, is_local, small
from jaxshard.digest import Fault, digests_and_faults, unwatched
from jaxshard.processes import agreement

_BYTES_AT_ONCE = 2**28  # of each group of arrays that is verified or read at once


@unwatched()
def read_leaves(
    folders: StepFolders, step: int, index: Index, wanted: Mapping[str, Leaf]
) -> tuple[dict[str, Leaf], dict[str, Fault]]:
    """Returns (leaves of a checkpoint, in their saved dtypes; those that are not finite).

    Args:
      folders: of the checkpoints.
      step: of the checkpoint.
      index: of the checkpoint.
      wanted: the leaves to read: path -> the template's leaf, which gives the sharding.

    Raises:
      FileNotFoundError: the checkpoint was deleted meanwhile.
      CorruptCheckpointError: names the first damaged leaf.
      OSError: it cannot be read now.
    """
    asked = {path: index[path] for path in wanted}
    numbers = {path: leaves.number(entry) for path, entry in asked.items() if "value" in entry}
    places = targets({path: x for path, x in wanted.items() if path not in numbers}, index)
    with jax.enable_x64(jax.config.read("jax_enable_x64") or leaves.need_x64(index)):
        stored = _read(folders, step, {path: x for path, x in places.items() if x.size})
        faults = _check_digests(step, index, stored)
    return {**numbers, **places, **stored}, faults


def verify(folders: StepFolders, step: int) -> dict[str, Fault]:
    """Reads every array of a step, and returns those that are not finite; raises as `read_leaves`."""
    index = read_index(folders, step)
    stored, faults = {path: entry for path, entry in index.items() if "digest" in entry}, dict[str, Fault]()
    check_sizes(folders, step, stored)
    for group in leaves.groups(stored, _BYTES_AT_ONCE):
        faults |= read_leaves(folders, step, index, {path: spread(index[path]) for path in group})[1]
    return faults


def read_arrays(folders: StepFolders, step: int, paths: Iterable[str] | None) -> Iterator[tuple[str, np.ndarray]]:
    """Reads leaves of a step into host memory, all of them where `paths` is None; raises as `read_leaves`."""
    index = read_index(folders, step)
    asked = {path: index[path] for path in (index if paths is None else paths)}
    check_sizes(folders, step, asked)
    for group in leaves.groups(asked, _BYTES_AT_ONCE):
        hosts = {path: np.zeros(index[path]["shape"], jnp.dtype(index[path]["dtype"])) for path in group}
        found, _ = read_leaves(folders, step, index, hosts)
        yield from ((path, np.asarray(found[path])) for path in group)


def targets(wanted: Mapping[str, Leaf], index: Index) -> dict[str, Shaped]:
    """What orbax loads each array as: a shape with the template's sharding, or a NumPy array, in the saved dtype. Small
    arrays are loaded to host memory first."""
    found = {path: _target(x, index[path]) for path, x in wanted.items()}
    return {**found, **{path: np.zeros(found[path].shape, found[path].dtype) for path in small(found)}}


def _target(x: Leaf, entry: Entry) -> Shaped:
    dtype = jnp.dtype(entry["dtype"])
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct) and not _loaded_to_host(x):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return np.zeros(np.shape(x), dtype)


def _loaded_to_host(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether to load the array to host memory first: its sharding is open, or each process has an array of its own."""
    if x.sharding is None or (isinstance(x, jax.Array) and not x.committed):
        return True
    return not agreement.is_alone() and is_local(x)


def spread(entry: Entry) -> jax.ShapeDtypeStruct:
    """The shape of a saved array, sharded over all devices along the first dim that they divide, or replicated."""
    shape, mesh = tuple(entry["shape"]), jax.sharding.Mesh(np.asarray(agreement.devices()), ("all",))
    cut = next((i for i, size in enumerate(shape) if size % mesh.size == 0), None)
    spec = P() if cut is None else P(*(None,) * cut, "all")
    return jax.ShapeDtypeStruct(shape, jnp.dtype(entry["dtype"]), sharding=NamedSharding(mesh, spec))


def _read(folders: StepFolders, step: int, targets: Mapping[str, Shaped]) -> dict[str, Any]:
    folder = folders.of(step)
    try:
        return agreed(step, lambda: proven(step, folder, lambda: orbax_store.read(folder, targets)))
    except CorruptCheckpointError:
        if step not in of_first(folders.steps):
            raise FileNotFoundError(
                errno.ENOENT, f"checkpoint {step} was deleted while it was read", str(folders.path)
            ) from None
        raise


def read_index(folders: StepFolders, step: int) -> Index:
    """The index of a checkpoint. If `StepFolders.manifest` raises on one process, all processes raise."""
    return agreed(step, lambda: folders.manifest(step))["leaves"]


def check_sizes(folders: StepFolders, step: int, index: Index) -> None:
    """Checks, before anything is allocated, that a checkpoint's files are large enough for the arrays of an index.

    Raises:
      CorruptCheckpointError: they are not.
      OSError: the file system refuses.
    """

    def check() -> None:
        try:
            sizes.check_index(folders.of(step), index)
        except ValueError as error:
            raise CorruptCheckpointError(step, None, str(error)) from error

    agreed(step, check)


def _check_digests(step: int, index: Index, arrays: Mapping[str, Any]) -> dict[str, Fault]:
    for path, x in arrays.items():
        if isinstance(x, jax.ShapeDtypeStruct):  # the target: nothing was stored under this path
            raise CorruptCheckpointError(step, path, "it is missing")
    digests, faults = digests_and_faults(arrays)
    for path, digest in digests.items():
        if digest != index[path].get("digest"):
            raise CorruptCheckpointError(step, path, "its bits differ from those saved")
    return faults


def agreed(step: int | None, attempt: Callable[[], T]) -> T:
    """Calls `attempt` on every process and returns its result; if it fails on one, all raise the same kind of error.

    Raises:
      OSError: the file system failed on some process.
      ProcessError: no file system failed, but another process had an error of another type.
      FileNotFoundError, CorruptCheckpointError: neither happened.
    """
    result, own_error = None, None
    try:
        result = attempt()
    except Exception as error:
        own_error = error
    failures = [_Failure(*json.loads(each)) for each in agreement.gathered("restore", json.dumps(_failure(own_error)))]
    of_process = dict(zip(agreement.present(), failures, strict=True))
    process, worst = max(of_process.items(), key=lambda each: each[1].rank)
    if own_error is not None and of_process[jax.process_index()].rank == worst.rank:
        raise own_error
    if worst.rank:
        raise _of_another(step, process, worst)
    return cast(T, result)


def of_first(attempt: Callable[[], T]) -> T:
    """Calls `attempt` on the first process alone, and returns its result on all; raises as `agreed`."""
    made = agreed(None, lambda: attempt() if agreement.is_first() else None)
    return cast(T, agreement.from_first("restore", lambda: made))


class _Failure(NamedTuple):
    """A process's error, as the others get it; the one with the highest `rank` is raised everywhere."""

    rank: int
    number: int | None = None
    text: str = ""
    path: str | None = None


_CORRUPT, _GONE, _OTHER, _SYSTEM = range(1, 5)


def _failure(error: Exception | None) -> _Failure:
    if isinstance(error, CorruptCheckpointError):
        return _Failure(_CORRUPT, text=str(error).partition("corrupt: ")[2])
    if isinstance(error, OSError):
        rank = _GONE if isinstance(error, FileNotFoundError) else _SYSTEM
        return _Failure(rank, error.errno, error.strerror or str(error), str(error.filename))
    return _Failure(0) if error is None else _Failure(_OTHER, text=f"{type(error).__name__}: {error}")


def _of_another(step: int | None, process: int, failure: _Failure) -> Exception:
    if failure.rank == _CORRUPT:
        assert step is not None  # no list of steps is corrupt
        return CorruptCheckpointError(step, None, f"process {process}: {failure.text}")
    if failure.rank == _OTHER:
        return agreement.ProcessError(process, failure.text)
    return OSError(failure.number, f"process {process}: {failure.text}", failure.path)
