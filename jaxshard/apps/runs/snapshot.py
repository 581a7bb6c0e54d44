"""A run's saved state: parameters, optimizer state, and progress.

It is saved with the layers in one stack, (L, ...), even if the run has virtual stages, (v, L / v, ...). So a run can
resume from a save of any pipeline.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath, keystr

from jaxshard.apps.config.config import TrainConfig
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.checkpoint import Best, Checkpointer

Tree = Any


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Everything that a run needs to resume.

    Attributes:
      params: arrays, or shapes with shardings.
      state: the optimizer's, likewise.
      step: the number of steps taken.
      stopping: the rule of early stopping, and its state.
      position: the position in the text.
    """

    params: Tree
    state: Tree
    step: int
    stopping: EarlyStopping
    position: Position


@dataclasses.dataclass(frozen=True)
class Position:
    """The position in the text, and everything that determines the rows of a batch.

    Attributes:
      drawn: the number of batches drawn so far.
      rows: the number of rows of each batch.
      seed: of their order, and of dropout.
      text: the CRC-32 of the text, as a signed number.
    """

    drawn: int
    rows: int
    seed: int
    text: int

    def carried_over(self, to: Position) -> Position:
        """The position in a run with different `rows`, such that no row repeats; a different text starts at 0."""
        if self.text != to.text:
            return to
        return dataclasses.replace(to, drawn=-(-self.drawn * self.rows // to.rows))


def open_saves(folder: RunFolder, train: TrainConfig) -> Checkpointer:
    """The checkpointer of the run's models, with its retention."""
    best = Best("heldout_loss", train.keep_best) if train.keep_best else None
    return Checkpointer(folder.model, keep_last=train.keep_last, keep_every=train.keep_every or None, keep_best=best)


def save(saves: Checkpointer, snapshot: Snapshot, heldout_loss: float | None = None) -> None:
    """Starts to save the model, while training goes on. Every process must call it."""
    metrics = None if heldout_loss is None else {"heldout_loss": heldout_loss}
    saves.save(snapshot.step, _to_tree(snapshot), metrics=metrics)


def restore(saves: Checkpointer, template: Snapshot) -> Snapshot:
    """Restores the newest intact model, saved from any strategy and mesh, with the shardings of `template`.

    Args:
      saves: the checkpoints of the run.
      template: `params` and `state` as `ShapeDtypeStruct`s with shardings, and the rule of early stopping.
    """
    _, tree = saves.restore(_to_tree(template))
    stopping = dataclasses.replace(template.stopping, **tree["stopping"])
    return Snapshot(tree["params"], tree["state"], tree["step"], stopping, Position(**tree["data"]))


def _to_tree(snapshot: Snapshot) -> dict[str, Any]:
    """The snapshot as a tree for a checkpoint. The best loss is exact in float32."""
    return {
        "params": snapshot.params,
        "state": snapshot.state,
        "step": snapshot.step,
        "stopping": {"best": snapshot.stopping.best, "misses": snapshot.stopping.misses},
        "data": dataclasses.asdict(snapshot.position),
    }


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """The rule of early stopping, and its state.

    Attributes:
      patience: consecutive evaluations that may fail to improve; 0: never stop.
      min_improvement: an evaluation improves if it is below the best by more than this, in nats.
      best: lowest loss that counted as an improvement.
      misses: evaluations since then.
    """

    patience: int
    min_improvement: float
    best: float = math.inf
    misses: int = 0

    def after(self, loss: float) -> EarlyStopping:
        """The state after one more evaluation. NaN never improves."""
        if loss < self.best - self.min_improvement:
            return dataclasses.replace(self, best=loss, misses=0)
        return dataclasses.replace(self, misses=self.misses + 1)

    @property
    def stopped(self) -> bool:
        """Whether training is to stop now."""
        return 0 < self.patience <= self.misses


def in_one_stack(template: Snapshot) -> Snapshot:
    """The abstract snapshot with its layers in one stack, sharded over the same mesh axes."""
    params, state = jax.tree_util.tree_map_with_path(_in_one_stack, (template.params, template.state))
    return dataclasses.replace(template, params=params, state=state)


def reshaped(snapshot: Snapshot, template: Snapshot) -> Snapshot:
    """Reshapes each leaf to the template's shape and sharding."""
    trees, wanted = (snapshot.params, snapshot.state), (template.params, template.state)
    params, state = jax.tree.map(_reshaped, trees, wanted)
    return dataclasses.replace(snapshot, params=params, state=state)


def _reshaped(leaf: jax.Array, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Reshapes one leaf, which XLA gathers along the stages for that; so only one leaf at a time is gathered."""
    if leaf.shape == like.shape:
        return leaf
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    num_stacked = 2 if leaf.ndim > like.ndim else 1
    rest = (*sharding.spec, *(None,) * leaf.ndim)[num_stacked : leaf.ndim]
    whole = NamedSharding(sharding.mesh, jax.P(*(None,) * num_stacked, *rest))
    return jax.jit(lambda x: jax.device_put(x, whole).reshape(like.shape), out_shardings=like.sharding)(leaf)


def _in_one_stack(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Reshapes a leaf from (v, L / v, ...) to (L, ...)."""
    if "blocks" not in keystr(path, simple=True, separator="/").split("/"):
        return leaf
    old = leaf.sharding
    assert isinstance(old, NamedSharding)
    rounds, layers, *rest = (*old.spec, None, None)[: max(2, len(old.spec))]
    sharding = NamedSharding(old.mesh, jax.P(tuple(jax.tree.leaves((rounds, layers))), *rest))
    return jax.ShapeDtypeStruct((leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), leaf.dtype, sharding=sharding)
