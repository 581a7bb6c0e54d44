"""The folder of a run: `config.toml`, `metrics.jsonl`, `tensorboard/`, `loss.png`, `model/<step>/`.

Files are replaced whole or appended to by the line, and the model's folder appears in one move, so a reader never
meets half of anything.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from jaxshard.cli.stopping import EarlyStopping

_KEPT_SAVES = 2


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All that a run needs to go on: what is saved."""

    params: Any
    state: Any
    step: int  # how many steps were taken
    stopping: EarlyStopping


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths of one run's files, and the checks that keep runs apart."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def figure(self) -> Path:
        return self.path / "loss.png"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def check_free(self) -> None:
        """Raises ValueError if a new run would meet something that is already here."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out {self.path} is a file: name a folder")
        if self.latest_step() is not None:
            raise ValueError(
                f"--out {self.path} holds a run saved at step {self.latest_step()}: "
                f"go on with it by --resume, or name another folder"
            )
        if self.path.exists() and any(self.path.iterdir()):
            raise ValueError(f"--out {self.path} is not empty: name a new folder")
        nearest = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise ValueError(f"--out {self.path}: {nearest} is no folder that can be written to: name another one")

    def check_saved(self) -> None:
        """Raises ValueError if there is no saved run here."""
        if not self.config.is_file() or self.latest_step() is None:
            raise ValueError(f"--resume: no saved run in --out {self.path}: name the folder that the run printed")

    def latest_step(self) -> int | None:
        """The step of the newest saved model."""
        steps = [int(entry.name) for entry in self.model.glob("*") if entry.name.isdecimal()]
        return max(steps, default=None)

    def _write(self, path: Path, text: str) -> None:
        replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def records(self) -> list[dict[str, Any]]:
        """The metrics so far."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]

    def begin(self, config: str, step: int) -> None:
        """Makes the folder of a run, new or resumed, that has taken `step` steps."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._write(self.config, config)
        self._forget_after(step)

    def _forget_after(self, step: int) -> None:
        """Drops the metrics of steps beyond `step`: they were taken after the last save and will be taken again."""
        kept = [record for record in self.records() if record["step"] <= step]
        self._write(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))


def replace(path: Path, write: Any) -> None:
    """`write(temporary)` makes the new file beside `path`, which it then becomes in one move."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save(folder: RunFolder, snapshot: Snapshot) -> None:
    """Saves the model for `restore`, once per step; only the newest saves are kept. Every process must call it."""
    if folder.latest_step() == snapshot.step:
        return
    with _checkpointer(folder) as checkpointer:
        checkpointer.save(snapshot.step, _to_tree(snapshot))


def restore(folder: RunFolder, template: Snapshot) -> Snapshot:
    """The newest saved model, put where `template` says, whatever strategy and mesh it was saved from.

    Args:
      folder: of the run.
      template: `params` and `state` as `ShapeDtypeStruct`s with shardings; the rule of early stopping.
    """
    step = folder.latest_step()
    assert step is not None
    with _checkpointer(folder) as checkpointer:
        tree = checkpointer.load(step, jax.tree.map(_as_template, _to_tree(template)))
    best, misses = float(tree["stopping"]["best"]), int(tree["stopping"]["misses"])
    stopping = dataclasses.replace(template.stopping, best=best, misses=misses)
    return Snapshot(tree["params"], tree["state"], int(tree["step"]), stopping)


def _checkpointer(folder: RunFolder) -> ocp.training.Checkpointer:
    newest: Any = ocp.training.preservation_policies.LatestN(_KEPT_SAVES)
    return ocp.training.Checkpointer(str(folder.model.absolute()), preservation_policy=newest)


def _to_tree(snapshot: Snapshot) -> dict[str, Any]:
    """Orbax takes global arrays, no numbers. The loss was a float32, so nothing is lost."""
    everywhere = NamedSharding(_mesh_of(snapshot.params), P())
    stopping = {"best": np.float32(snapshot.stopping.best), "misses": np.int32(snapshot.stopping.misses)}
    numbers = jax.device_put({"step": np.int32(snapshot.step), "stopping": stopping}, everywhere)
    return {"params": snapshot.params, "state": snapshot.state, **numbers}


def _as_template(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _mesh_of(params: Any) -> Any:
    return jax.tree.leaves(params)[0].sharding.mesh
