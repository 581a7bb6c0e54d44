"""What a run saves and restores: parameters, state, and how far it is.

It is saved with the layers in one stack, (L, ...), and may train with them in virtual stages, (v, L / v, ...). So a run
can go on from any save, whatever pipeline it was saved from.
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
    """All that a run needs to go on: what is saved.

    Attributes:
      params: arrays, or shapes with shardings.
      state: the optimizer's, in the same way.
      step: how many steps were taken.
      stopping: the rule of early stopping, and where it stands.
      position: how far the text is read.
    """

    params: Tree
    state: Tree
    step: int
    stopping: EarlyStopping
    position: Position


@dataclasses.dataclass(frozen=True)
class Position:
    """How far the text is read, and all that decides the rows of a batch.

    Attributes:
      drawn: the number of batches drawn so far.
      rows: the rows of each batch.
      seed: of their order, and of dropout.
      text: the CRC-32 of the text, as a signed number.
    """

    drawn: int
    rows: int
    seed: int
    text: int

    def carried_over(self, to: Position) -> Position:
        """The position in a run with other `rows`: no row comes twice. Another text is read from its beginning."""
        if self.text != to.text:
            return to
        return dataclasses.replace(to, drawn=-(-self.drawn * self.rows // to.rows))


def open_saves(folder: RunFolder, train: TrainConfig) -> Checkpointer:
    """Where the run's models are saved, and which of them are kept."""
    best = Best("heldout_loss", train.keep_best) if train.keep_best else None
    return Checkpointer(folder.model, keep_last=train.keep_last, keep_every=train.keep_every or None, keep_best=best)


def save(saves: Checkpointer, snapshot: Snapshot, heldout_loss: float | None = None) -> None:
    """Saves the model for `restore`, while training goes on. Every process must call it."""
    metrics = None if heldout_loss is None else {"heldout_loss": heldout_loss}
    saves.save(snapshot.step, _to_tree(snapshot), metrics=metrics)


def restore(saves: Checkpointer, template: Snapshot) -> Snapshot:
    """The newest saved model that is whole, put where `template` says, whatever strategy and mesh it was saved from.

    Args:
      saves: the checkpoints of the run.
      template: `params` and `state` as `ShapeDtypeStruct`s with shardings; the rule of early stopping.
    """
    _, tree = saves.restore(_to_tree(template))
    stopping = dataclasses.replace(template.stopping, **tree["stopping"])
    return Snapshot(tree["params"], tree["state"], tree["step"], stopping, Position(**tree["data"]))


def _to_tree(snapshot: Snapshot) -> dict[str, Any]:
    """The snapshot as a checkpoint has it. The best loss is a number that float32 holds exactly."""
    return {
        "params": snapshot.params,
        "state": snapshot.state,
        "step": snapshot.step,
        "stopping": {"best": snapshot.stopping.best, "misses": snapshot.stopping.misses},
        "data": dataclasses.asdict(snapshot.position),
    }


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """The rule, and the evaluations so far.

    Attributes:
      patience: evaluations in a row that may fail to improve; 0 never stops.
      min_improvement: an evaluation improves if it is below the best by more than this, in the loss's own unit.
      best: lowest loss that counted as an improvement.
      misses: evaluations since then.
    """

    patience: int
    min_improvement: float
    best: float = math.inf
    misses: int = 0

    def after(self, loss: float) -> EarlyStopping:
        """The rule after one more evaluation. NaN never improves."""
        if loss < self.best - self.min_improvement:
            return dataclasses.replace(self, best=loss, misses=0)
        return dataclasses.replace(self, misses=self.misses + 1)

    @property
    def stopped(self) -> bool:
        """Whether training is to stop now."""
        return 0 < self.patience <= self.misses


def in_one_stack(template: Snapshot) -> Snapshot:
    """The abstract snapshot with its layers in one stack, cut over the same mesh axes."""
    params, state = jax.tree_util.tree_map_with_path(_in_one_stack, (template.params, template.state))
    return dataclasses.replace(template, params=params, state=state)


def reshaped(snapshot: Snapshot, template: Snapshot) -> Snapshot:
    """The snapshot, each leaf in the shape and sharding that the template has for it."""
    trees, wanted = (snapshot.params, snapshot.state), (template.params, template.state)
    params, state = jax.tree.map(_reshaped, trees, wanted)
    return dataclasses.replace(snapshot, params=params, state=state)


def _reshaped(leaf: jax.Array, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """XLA reshapes a leaf that is whole along the stages; called for one leaf at a time, no more than one is."""
    if leaf.shape == like.shape:
        return leaf
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    num_stacked = 2 if leaf.ndim > like.ndim else 1
    rest = (*sharding.spec, *(None,) * leaf.ndim)[num_stacked : leaf.ndim]
    whole = NamedSharding(sharding.mesh, jax.P(*(None,) * num_stacked, *rest))
    return jax.jit(lambda x: jax.device_put(x, whole).reshape(like.shape), out_shardings=like.sharding)(leaf)


def _in_one_stack(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """A leaf of (v, L / v, ...) as (L, ...)."""
    if "blocks" not in keystr(path, simple=True, separator="/").split("/"):
        return leaf
    old = leaf.sharding
    assert isinstance(old, NamedSharding)
    rounds, layers, *rest = (*old.spec, None, None)[: max(2, len(old.spec))]
    sharding = NamedSharding(old.mesh, jax.P(tuple(jax.tree.leaves((rounds, layers))), *rest))
    return jax.ShapeDtypeStruct((leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), leaf.dtype, sharding=sharding)
