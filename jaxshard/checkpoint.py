"""Checkpoints that fit any strategy, mesh and device count, and that say so when a bit is not what was saved.

Storage is orbax's. A checkpoint is a flat set of arrays, named by their paths in the tree, and an index of each one's
shape, dtype and digest (`jaxshard.digest`); what is loaded is laid out as a template says, digested again on the
devices and compared. Structure comes from the template alone, so nothing is ever unpickled.
"""

import contextlib
import dataclasses
import errno
import os
import shutil
import urllib.parse
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxshard.digest import digests
from jaxshard.tree import is_key, named_leaves, path_of

_FORMAT = 1


class CorruptCheckpointError(RuntimeError):
    """What is on disk is not what was saved. `step`; `leaf`: the first path that shows it, if it is known."""

    def __init__(self, step: int, leaf: str | None, reason: str):
        super().__init__(f"checkpoint {step} is corrupt: {leaf + ': ' if leaf else ''}{reason}")
        self.step, self.leaf = step, leaf


@dataclasses.dataclass(frozen=True)
class Best:
    """Which checkpoints are the best: those of the smallest (or largest) `metrics[name]`, so many of them."""

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"


class Checkpointer:
    """Saves and restores trees of arrays in a folder, a sub-folder for each step.

    Every process must make the same calls.

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
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ValueError(f"Checkpointer: {name} {value} must be 1 or more")
        self.path = Path(path).absolute()
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Checkpointer: this is a file; name a folder", str(self.path))
        policies = ocp.training.preservation_policies
        kept: list[Any] = [policies.LatestN(keep_last)]
        kept += [policies.EveryNSteps(keep_every)] if keep_every else []
        kept += [_best(keep_best)] if keep_best else []
        self._policy: Any = policies.AnyPreservationPolicy(kept)
        self._orbax: ocp.training.Checkpointer | None = None
        self._saving: Any = None

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
            found = self._storage().metadata(step)
            index = found.custom_metadata
            assert isinstance(index, dict)
            return {"step": step, "metrics": found.metrics, "run": index["run"], "leaves": index["leaves"]}
        except Exception as error:
            raise CorruptCheckpointError(step, None, f"its index cannot be read: {_first_line(error)}") from error

    # Saving.

    def save(self, step: int, tree: Any, *, metrics: Mapping[str, float] | None = None, blocking: bool = False) -> None:
        """Saves `tree`; returns as soon as its arrays are copied off the devices, so that they may be donated.

        Args:
          step: its name; newer than what is there.
          tree: arrays (of any sharding) and numbers.
          metrics: for `keep_best`, and for those who look.
          blocking: wait until it is written.

        Raises:
          ValueError: the step is there already; names that collide.
          ReplicaError: copies of an array differ between devices.
          OSError: no space; and whatever an earlier save failed of, if it was not waited for.
        """
        self.wait()
        if step in self.steps():
            raise ValueError(f"checkpoint: step {step} is saved already in {self.path}; steps never change")
        arrays = _flat(tree)
        self._check_space(arrays)
        index = {"format": _FORMAT, "run": self._run_id(), "leaves": _index(arrays)}
        stored = {name: x for name, x in arrays.items() if np.size(x)}
        self._begin()
        self._saving = self._storage().save_async(
            step, stored, force=True, custom_metadata=index, metrics=dict(metrics) if metrics else None
        )
        if blocking:
            self.wait()

    def wait(self) -> None:
        """Until the last save is written. Raises what it failed of."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        """Waits, and ends background threads."""
        try:
            self.wait()
        finally:
            if self._orbax is not None:
                self._orbax.close()
                self._orbax = None

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
        if step is not None:
            return step, self._restored(template, step, cast)
        if not self.steps():
            raise FileNotFoundError(errno.ENOENT, "there is no checkpoint", str(self.path))
        errors = []
        for found in reversed(self.steps()):
            try:
                return found, self._restored(template, found, cast)
            except CorruptCheckpointError as error:
                warnings.warn(f"{error}; trying the one before", stacklevel=2)
                errors.append(error)
        raise errors[0]

    def verify(self, step: int) -> None:
        """Reads every array of a checkpoint on this machine, and compares digests.

        Raises:
          CorruptCheckpointError: the first leaf that is not what was saved.
        """
        leaves = self.info(step)["leaves"]
        template = {path: np.zeros(found["shape"], jnp.dtype(found["dtype"])) for path, found in leaves.items()}
        self._loaded(template, step, leaves)

    def latest_valid(self) -> int | None:
        """The newest step whose arrays are all as they were saved; it reads them."""
        for step in reversed(self.steps()):
            with contextlib.suppress(CorruptCheckpointError):
                self.verify(step)
                return step
        return None

    def _restored(self, template: Any, step: int, cast: bool) -> Any:
        wanted, leaves = _flat(template), self.info(step)["leaves"]
        _check_same(wanted, leaves, step, cast)
        arrays = self._loaded(wanted, step, leaves)
        return _unflat(template, arrays)

    def _loaded(self, wanted: dict[str, Any], step: int, leaves: dict[str, Any]) -> dict[str, Any]:
        """The arrays in the dtypes they were saved in, where `wanted` lie; digests checked."""
        stored = {_escaped(path): _target(x, leaves[path]) for path, x in wanted.items() if np.prod(x.shape)}
        try:
            loaded = self._storage().load(step, stored)
        except Exception as error:
            raise CorruptCheckpointError(step, None, f"it cannot be read: {_first_line(error)}") from error
        arrays = {_unescaped(name): loaded[name] for name in stored}
        for path, digest in digests(arrays).items():
            if digest != leaves[path]["digest"]:
                raise CorruptCheckpointError(step, path, "other bits than were saved")
        return {path: arrays.get(path, x) for path, x in wanted.items()}

    # The folder.

    def _storage(self) -> ocp.training.Checkpointer:
        if self._orbax is None:
            self._orbax = ocp.training.Checkpointer(str(self.path), preservation_policy=self._policy)
        return self._orbax

    def _begin(self) -> None:
        """Makes the folder; what has a step's name and was never committed is put aside."""
        if jax.process_index():
            return
        self.path.mkdir(parents=True, exist_ok=True)
        for entry in self.path.iterdir():
            if entry.name.isdecimal() and not _is_committed(entry):
                entry.rename(entry.with_name(f"{entry.name}.uncommitted.{uuid.uuid4().hex[:8]}"))

    def _run_id(self) -> str:
        """The same for all checkpoints of a folder."""
        known = self.path / "run"

        def read() -> str:
            if not known.exists():
                self.path.mkdir(parents=True, exist_ok=True)
                known.write_text(uuid.uuid4().hex)
            return known.read_text()

        return _from_first(read)

    def _check_space(self, arrays: dict[str, Any]) -> None:
        needed = sum(int(x.size) * x.dtype.itemsize for x in arrays.values())
        nearest = next(folder for folder in (self.path, *self.path.parents) if folder.exists())
        free = int(_from_first(lambda: str(shutil.disk_usage(nearest).free)))
        if free < needed:
            raise OSError(
                errno.ENOSPC,
                f"no space: the checkpoint takes {needed / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free; nothing was "
                "written",
                str(self.path),
            )


def _best(best: Best) -> Any:
    if best.mode not in ("min", "max") or best.count < 1:
        raise ValueError(f"Best: count {best.count} must be 1 or more, mode {best.mode!r} min or max")
    return ocp.training.preservation_policies.BestN(
        get_metric_fn=lambda metrics: metrics[best.metric],
        reverse=best.mode == "min",
        n=best.count,
        keep_checkpoints_without_metrics=False,
    )


def _is_committed(folder: Path) -> bool:
    """Whether orbax ended writing it: both files come last, before the folder gets its name."""
    return all((folder / name).is_file() for name in ("commit_success.txt", "_CHECKPOINT_METADATA"))


def _from_first(make: Any) -> str:
    """What the first process makes of it, on every process. Its error is everybody's."""
    if jax.process_count() == 1:
        return make()
    from jax.experimental import multihost_utils

    said = b""
    if jax.process_index() == 0:
        try:
            said = b"+" + make().encode()
        except OSError as error:
            said = b"-" + str(error).encode()
    buffer = np.zeros(1024, np.uint8)
    buffer[: len(said[:1024])] = np.frombuffer(said[:1024], np.uint8)
    said = bytes(np.asarray(multihost_utils.broadcast_one_to_all(buffer))).rstrip(b"\0")
    if said.startswith(b"-"):
        raise OSError(said[1:].decode(errors="replace"))
    return said[1:].decode()


# Trees as flat sets of arrays.


def _flat(tree: Any) -> dict[str, Any]:
    """Path -> array; of typed keys their data.

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
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        x = np.asarray(leaf)
        return x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        raise TypeError(f"checkpoint: {path} is a {type(leaf).__name__}; only arrays and numbers can be saved")
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        data = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _index(arrays: dict[str, Any]) -> dict[str, Any]:
    found = digests(arrays)
    return {
        path: {"shape": list(x.shape), "dtype": str(x.dtype), "digest": digest}
        for (path, x), digest in zip(arrays.items(), found.values(), strict=True)
    }


def _check_same(wanted: dict[str, Any], leaves: dict[str, Any], step: int, cast: bool) -> None:
    wrong = [f"{path} is not in the checkpoint" for path in wanted if path not in leaves]
    wrong += [f"{path} is not in the template" for path in leaves if path not in wanted]
    for path, x in wanted.items():
        saved = leaves.get(path, {"shape": list(x.shape), "dtype": str(x.dtype)})
        if list(x.shape) != saved["shape"]:
            wrong.append(f"{path} has shape {tuple(saved['shape'])}, the template {tuple(x.shape)}")
        elif str(x.dtype) != saved["dtype"] and not cast:
            wrong.append(f"{path} has dtype {saved['dtype']}, the template {x.dtype} (cast=True converts)")
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"checkpoint {step} does not fit the template: " + "; ".join(wrong[:5]) + more)


def _target(x: Any, saved: dict[str, Any]) -> Any:
    """Where orbax is to put an array, in the dtype it was saved in."""
    dtype = jnp.dtype(saved["dtype"])
    if isinstance(x, np.ndarray):
        return np.zeros(x.shape, dtype)
    sharding = x.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)


def _unflat(template: Any, arrays: dict[str, Any]) -> Any:
    leaves, treedef = jax.tree.flatten(template)
    return jax.tree.unflatten(treedef, [_like(leaf, x) for leaf, x in zip(leaves, arrays.values(), strict=True)])


def _like(leaf: Any, x: Any) -> Any:
    """An array that was loaded, as the kind of thing that the template has there."""
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)(x)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(leaf))
    if isinstance(x, jax.ShapeDtypeStruct):  # of no elements, so never stored
        return jnp.zeros(x.shape, x.dtype, device=x.sharding)
    return x if x.dtype == leaf.dtype else x.astype(leaf.dtype)


def _escaped(path: str) -> str:
    """A name without separators, which no file system takes for a way out of the folder."""
    return urllib.parse.quote(path, safe="").replace(".", "%2E")


def _unescaped(name: str) -> str:
    return urllib.parse.unquote(name)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
