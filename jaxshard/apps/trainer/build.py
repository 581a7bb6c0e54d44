"""Builds a run from a configuration: devices, mesh, model, optimizer, batches, step. Writes no files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

import jaxshard
from jaxshard import ShardedOptimizer, TrainStep
from jaxshard.apps.config import memory
from jaxshard.apps.config.config import Config
from jaxshard.apps.config.devices import make_mesh, start_devices
from jaxshard.apps.data import data
from jaxshard.apps.data.batches import TrainingBatches, batches_of, heldout_batches
from jaxshard.apps.data.data import Rows
from jaxshard.apps.data.dataset import ElementBatches
from jaxshard.apps.data.token_file import TextError
from jaxshard.apps.data.token_files import out_of_range
from jaxshard.apps.model import linear
from jaxshard.apps.model.model import LanguageModel, Params
from jaxshard.apps.runs.snapshot import EarlyStopping, Position, Snapshot, in_one_stack, reshaped
from jaxshard.apps.trainer import finished_run, vocabulary
from jaxshard.apps.trainer.parts import check_rows, check_same_settings, initial, make_parts, make_step

Tree = Any

_DROPOUT_STREAM = 1  # separate from the parameters' key


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Everything that the loop needs, made by `prepare`.

    Attributes:
      config: as given, with `data.format` as detected.
      text: the training and the held-out text.
      batches: step -> rows.
      model: functions of parameters and batch.
      schedule: step -> learning rate.
      mesh: of the devices.
      opt: the sharded optimizer.
      template: abstract parameters and state with shardings.
    """

    config: Config
    text: data.Text
    batches: TrainingBatches | ElementBatches
    model: LanguageModel
    schedule: optax.Schedule
    mesh: jax.sharding.Mesh
    opt: ShardedOptimizer
    template: Snapshot

    def start(self) -> Snapshot:
        """Parameters, fresh or from `train.start`, and state; no device ever holds more than its shards.

        Raises:
          ValueError: `train.start` cannot be used; nothing was computed.
        """
        finished = finished_run.find(self.config)
        if finished is None:
            return self._begun(self._fresh(lambda path: True))
        if not self.config.precision.masters or self.config.lora.rank:
            found = finished.params(linear.by_path(self.saved_template.params))
            return self._begun(self._fresh(linear.is_adapter) | found)
        masters = finished.params(linear.by_path(self.saved_template.state.extra["master"]))
        start = self._begun(self._narrowed(masters, finished.who))
        state = start.state._replace(extra=start.state.extra | {"master": linear.nested(masters)})
        return reshaped(dataclasses.replace(start, state=state), self.template)

    def _begun(self, params: dict[str, jax.Array]) -> Snapshot:
        """The first snapshot, from parameters by path, with the layers in stages or in one stack."""
        start = reshaped(dataclasses.replace(self.template, params=linear.nested(params)), self.template)
        return dataclasses.replace(start, state=self.opt.init(start.params))

    def _narrowed(self, masters: dict[str, jax.Array], who: str) -> dict[str, jax.Array]:
        """Converts full-precision parameters, by path, to this run's types and shardings."""
        like = linear.by_path(self.saved_template.params)

        def narrow(wide: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return {path: leaf.astype(like[path].dtype) for path, leaf in wide.items()}

        shardings = {path: leaf.sharding for path, leaf in like.items()}
        return linear.finite(who, jax.jit(narrow, out_shardings=shardings)(masters))

    def _fresh(self, wanted: Callable[[str], bool]) -> dict[str, jax.Array]:
        """Fresh parameters, by path, for the wanted paths."""
        flat = linear.by_path(self.template.params)
        shardings = {path: leaf.sharding for path, leaf in flat.items() if wanted(path)}
        init = initial(self.model, self.config.precision)

        def made(key: jax.Array) -> dict[str, jax.Array]:
            fresh = linear.by_path(init(key))
            return {path: fresh[path] for path in shardings}

        return jax.jit(made, out_shardings=shardings)(jax.random.key(self.config.train.seed))

    @property
    def saved_template(self) -> Snapshot:
        """The template of saves, with the layers in one stack for any pipeline."""
        return self.template if self.model.virtual == 1 else in_one_stack(self.template)

    def batch(self, index: int) -> dict[str, jax.Array]:
        """The rows of one batch as global arrays; each process makes those of its own devices.

        Raises:
          TextError: the text has changed, or a token is outside the vocabulary.
          UsersError: reading a dataset's element failed.
        """
        first, last = self._my_rows(self.batches.rows)
        rows = self.batches(index, first, last)
        columns = rows["tokens"].shape[1]

        def place(token: int) -> str:
            return self.batches.place(index, first + token // columns, token % columns)

        if wrong := out_of_range(rows["tokens"], self.config.model.vocabulary, place):
            raise TextError(wrong)
        return self._global(rows, first, self.batches.rows)

    @property
    def _batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, jax.P(("replica", "data")))

    def _my_rows(self, rows: int) -> tuple[int, int]:
        """(start, stop) of the rows that this process's devices need; stages may need the same rows."""
        places = self._batch_sharding.addressable_devices_indices_map((rows,)).values()
        parts = [index[0].indices(rows) for index in places if index is not None]
        return min(part[0] for part in parts), max(part[1] for part in parts)

    def _global(self, batch: Rows, first: int, rows: int) -> dict[str, jax.Array]:
        """Makes global arrays of `rows` rows; `batch` has those that this process needs, from row `first` on."""

        def made(x: np.ndarray) -> jax.Array:
            def part(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None  # this process makes only its own shards
                start, stop, _ = index[0].indices(rows)
                return x[start - first : stop - first]

            return jax.make_array_from_callback((rows, *x.shape[1:]), self._batch_sharding, part)

        return jax.tree.map(made, batch)

    def keys(self, step: int) -> tuple[jax.Array, ...]:
        """The step's further arguments: a key, if the step is random."""
        if self.config.model.dropout == 0:
            return ()
        stream = jax.random.fold_in(jax.random.key(self.config.train.seed), _DROPOUT_STREAM)
        return (jax.random.fold_in(stream, step),)

    def make_step(self) -> TrainStep:
        """`step(params, state, batch, *keys) -> (params, state, metrics)`."""
        return make_step(self.config, self.model, self.opt)

    def make_evaluate(self, alive: Callable[[], None] = lambda: None) -> Callable[[Params], float]:
        """`evaluate(params)`: the mean loss in nats over the held-out text; calls `alive` after each batch."""
        evaluate = jaxshard.evaluate(self.model.weighted_loss, self.opt, weighted=True)
        rows, length = self.config.train.rows // self.config.sharding.microbatches, self.config.model.sequence_length

        def mean_loss(params: Params) -> float:
            total = 0.0
            first, last = self._my_rows(rows)
            for batch, weight in heldout_batches(self.text.heldout, rows, length, first, last):
                total += weight * float(evaluate(params, self._global(batch, first, rows)))
                alive()
            return float(np.float32(total / self.text.num_targets))  # exact in a save

        return mean_loss

    def bytes_per_device(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of params, grads (while summed) and state on each device, for the strategy and for DDP."""
        kinds = self._kinds()
        held = {kind: _num_bytes(tree, shardings) for kind, (tree, shardings) in kinds.items()}
        return held, {kind: _num_bytes(tree) for kind, (tree, _) in kinds.items()}

    def shares(self) -> dict[str, dict[str, float]]:
        """axis -> the fraction of the bytes of params, grads and state that is sharded over it, 0 to 1."""
        kinds = self._kinds()
        return {
            axis: {kind: _part_cut(tree, shardings, axis) for kind, (tree, shardings) in kinds.items()}
            for axis in self.mesh.axis_names
        }

    def _kinds(self) -> dict[str, tuple[Tree, Tree]]:
        """Params, grads (while summed) and state, each with its shardings."""
        params, reduce = self.template.params, self.config.precision.reduce
        shardings, trained = self.opt.shardings(params), self._trained(params)
        return {
            "params": (params, shardings.params),
            "grads": (
                _typed(trained, reduce) if reduce else trained,
                self._trained(shardings.grads if self.opt.config.cuts.accumulators else shardings.params),
            ),
            "state": (self.template.state, shardings.state),
        }

    def _trained(self, params: Params) -> Params:
        """The parameters with gradients: all, or the adapters."""
        if not self.config.lora.rank:
            return params
        return {path: leaf for path, leaf in linear.by_path(params).items() if linear.is_adapter(path)}


def prepare(config: Config, typed: Collection[str] = (), *, trains: bool = True) -> Run:
    """Finds the devices, reads the text and plans all shardings, from shapes alone.

    Args:
      config: all options.
      typed: the functions that the user typed; functions that only a file names are not called.
      trains: False: for evaluation, reads only the held-out tokens.

    Raises:
      ValueError: the options are impossible; nothing was compiled or written.
    """
    start_devices(config)
    check_same_settings(config)
    return jaxshard.processes.together("start", lambda: _prepared(config, typed, trains))


def _prepared(config: Config, typed: Collection[str], trains: bool) -> Run:
    vocabulary.check_start(config)
    config = vocabulary.chosen(config)
    model = config.model
    text = data.read(config.data, model.sequence_length, model.vocabulary, typed, heldout_alone=not trains)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, format=text.format))
    mesh = make_mesh(config.sharding)
    check_rows(config, mesh)
    model, schedule, opt, params = make_parts(config, mesh)
    unit = math.log(2) if text.is_bytes else 1.0  # of the losses shown, in nats
    stopping = EarlyStopping(config.train.patience, config.train.min_improvement * unit)
    rows, seed = config.train.rows, config.train.seed
    batches = batches_of(text, rows, config.model.sequence_length, seed)
    start = Snapshot(params, opt.init(params), 0, stopping, Position(0, rows, seed, text.fingerprint))
    run = Run(config, text, batches, model, schedule, mesh, opt, start)
    _check_memory(run)
    return run


_BATCH_BYTES = 12  # per byte of text: its index, and its token


def _check_memory(run: Run) -> None:
    """Raises ValueError if a batch, or the persistent arrays of a device, do not fit; allocates nothing."""
    train, (held, _) = run.config.train, run.bytes_per_device()
    first, last = run._my_rows(train.rows)
    rows = (last - first) * (run.config.model.sequence_length + 1) * _BATCH_BYTES
    memory.check(rows, f"train.rows = {train.rows}: a batch", "use fewer rows")
    what, cure = "params, gradients and state", "use a smaller model, or shard more over more devices"
    mine = run.mesh.local_devices
    if mine[0].platform == "cpu":
        memory.check(sum(held.values()) * len(mine), f"{what} on {len(mine)} CPU devices of this host", cure)
    else:
        limit = (mine[0].memory_stats() or {}).get("bytes_limit")
        memory.check(sum(held.values()), f"{what} on each device", cure, limit or float("inf"))


def num_updates(state: Tree) -> int:
    """The number of updates: steps taken without skipped ones."""
    inner = state.inner if isinstance(state, jaxshard.ShardedState) else state
    return int(max(count for _, count in optax.tree_utils.tree_get_all_with_path(inner, "count")))


def _typed(tree: Tree, dtype: str) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)


def _num_bytes(tree: Tree, shardings: Tree = None) -> int:
    """Bytes on one device; without shardings, of the global arrays."""
    leaves = jax.tree.leaves(tree)
    shapes = [leaf.shape for leaf in leaves]
    if shardings is not None:
        shapes = [s.shard_shape(shape) for s, shape in zip(jax.tree.leaves(shardings), shapes, strict=True)]
    return sum(int(np.prod(shape)) * leaf.dtype.itemsize for shape, leaf in zip(shapes, leaves, strict=True))


def _part_cut(tree: Tree, shardings: Tree, axis: str) -> float:
    """The fraction of the bytes in leaves that are sharded over `axis`."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    return _num_bytes([leaf for leaf, sharding in pairs if axis in jax.tree.leaves(tuple(sharding.spec))]) / _num_bytes(
        tree
    )
