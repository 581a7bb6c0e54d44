"""Starts of a run: a finished run's newest saved parameters, of any types and mesh, or a Hugging Face folder's."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

import jaxshard
from jaxshard.apps.config import paths, toml
from jaxshard.apps.config.checks import check
from jaxshard.apps.config.config import Config, DataConfig, LoraConfig, ModelConfig
from jaxshard.apps.data.token_files import TOKENIZER
from jaxshard.apps.huggingface import hf_folder
from jaxshard.apps.huggingface.hf_folder import HuggingFaceFolder
from jaxshard.apps.model import linear
from jaxshard.apps.model.model import LanguageModel
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.checkpoint import Checkpointer, CorruptCheckpointError, NewerFormatError

FREE = ("sequence_length", "dropout", "dtype", "remat", "attention", "loss_chunk")
"""Options of the model that do not affect its parameters, except that learned positions have a length."""


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A finished run to read parameters from.

    Attributes:
      path: its folder.
      lora: its adapters.
      who: begins messages.
    """

    path: Path
    lora: LoraConfig
    who: str

    def params(self, template: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Its newest intact parameters, by path, as a new run has them before its first step.

        It reads the masters, if the run has any.

        Args:
          template: shapes with types and shardings by path, the layers in one stack. Its adapters are skipped;
            matrices with scales are quantized to 8 bits.

        Raises:
          FloatingPointError: a number is not finite, or overflows the template's type.
          OSError: it cannot be read, or all saves are damaged.
        """
        corrupt: list[int] = []
        while True:
            step = jaxshard.processes.from_first("start", lambda: self._newest(corrupt))
            try:
                return self._all(template, step)
            except CorruptCheckpointError as error:
                corrupt.append(step)
                if set(self._saves.steps()) <= set(corrupt):
                    raise OSError(f"{self.who}: no save is intact: {error}") from error
                warnings.warn(f"{self.who}: {error}; the previous save is used", stacklevel=1)
            except ValueError as error:
                raise FloatingPointError(f"{self.who}: {error}") from error
            except FileNotFoundError:  # the run is still training, and has deleted it
                if step in self._saves.steps():
                    raise

    @property
    def _saves(self) -> Checkpointer:
        return Checkpointer(RunFolder(self.path).model)

    def _newest(self, without: Sequence[int]) -> int:
        return max(step for step in self._saves.steps() if step not in without)

    def _all(self, template: Mapping[str, jax.ShapeDtypeStruct], step: int) -> dict[str, jax.Array]:
        found: dict[str, jax.Array] = {}
        saved = self._saves.info(step)["leaves"]
        for path in template:
            if path.rpartition("/")[2] not in linear.ADDED:
                found |= self._read(path, template, step, saved)
        return found

    def _read(
        self, path: str, template: Mapping[str, jax.ShapeDtypeStruct], step: int, saved: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        """One leaf, and its scales if the template has them. Only one leaf at a time is in float32."""
        layer = path.removesuffix("kernel")
        root = MASTERS if f"{MASTERS}/{path}" in saved else "params"
        beside = [name for name in linear.ADDED if f"params/{layer}{name}" in saved]
        made = [path, *([f"{layer}kernel_scale"] if f"{layer}kernel_scale" in template else [])]
        if not beside and len(made) == 1:
            return linear.finite(self.who, self._restored({path: template[path]}, step, root))
        whole, like = NamedSharding(template[path].sharding.mesh, jax.P()), {}
        for name in ("kernel", *beside):
            entry = saved[f"params/{layer}{name}"]
            dtype = entry["dtype"] if entry["dtype"] == "int8" else "float32"
            sharding = template[path].sharding if name == "kernel" else whole
            like[f"{layer}{name}"] = jax.ShapeDtypeStruct(tuple(entry["shape"]), dtype, sharding=sharding)

        def make(parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
            kernel = linear.merged({name.removeprefix(layer): part for name, part in parts.items()}, self.lora)
            new = linear.quantized(kernel) if len(made) > 1 else (kernel,)
            return {name: leaf.astype(template[name].dtype) for name, leaf in zip(made, new, strict=True)}

        shardings = {name: template[name].sharding for name in made}
        parts = linear.finite(self.who, self._restored(like, step, root if len(like) == 1 else "params"))
        return linear.finite(self.who, jax.jit(make, out_shardings=shardings)(parts))

    def _restored(self, like: Mapping[str, jax.ShapeDtypeStruct], step: int, root: str) -> dict[str, jax.Array]:
        """Leaves by path below `root`."""
        only = f"^{root}/(" + "|".join(map(re.escape, like)) + ")$"
        template = linear.nested({f"{root}/{path}": leaf for path, leaf in like.items()})
        _, tree = self._saves.restore(template, step, cast=True, only=only)
        return {path.removeprefix(f"{root}/"): leaf for path, leaf in linear.by_path(tree).items()}


MASTERS = "state/extra/master"


Start = FinishedRun | HuggingFaceFolder


def find(config: Config) -> Start | None:
    """The start that `train.start` names; None without one.

    Raises:
      ValueError: nothing is saved there, the model differs, or adapters are given but no start.
    """
    if config.train.start is None:
        if config.lora.rank:
            raise ValueError(
                f"lora.rank = {config.lora.rank} without train.start: adapters need a trained model: give the folder "
                "of its run by --train.start"
            )
        return None
    before, found = opened(Path(config.train.start), "train.start =")
    check_same_model(found, before.model, config.model)
    return found


def opened(path: Path, option: str) -> tuple[Config, Start]:
    """(configuration, start) of a run or a Hugging Face folder.

    Raises:
      ValueError: nothing is saved there, or it is unknown what; the message begins with `option` and the path.
    """
    if hf_folder.is_one(path):
        found = hf_folder.opened(path, option)
        return _as_config(found), found
    folder, who = RunFolder(path), f"{option} {path}"
    if folder.latest_step() is None:
        hint = "" if path.exists() else paths.near_path(path)
        raise ValueError(f"{who}: no saved run: give the folder that the run printed, or a Hugging Face folder{hint}")
    if not folder.config.is_file():
        raise ValueError(f"{who}: {folder.config.name}, which describes the model, is missing")
    before, (seal, _) = toml.load(folder.config), toml.looked_at(folder.config)
    if seal == "changed":
        raise ValueError(f"{who}: {folder.config.name} was changed after the run wrote it: undo the change")
    try:
        check(before)
    except ValueError as error:
        raise ValueError(f"{who}: {folder.config.name}: {error}") from error
    check_saved_sizes(folder, before.model, who)
    return before, FinishedRun(path, before.lora, who)


def check_saved_sizes(folder: RunFolder, model: ModelConfig, who: str) -> None:
    """Compares a configuration's model with the newest save whose index can be read.

    Raises:
      ValueError: the save's parameters differ; nothing of the model's size was allocated.
    """
    leaves = _saved_leaves(folder)
    if leaves is None:
        return
    elements = sum(math.prod(leaf["shape"]) for leaf in leaves.values())
    sizes = ("layers", "width", "heads", "hidden", "vocabulary")
    large = [f"model.{name} = {getattr(model, name)}" for name in sizes if getattr(model, name) > elements]
    if large:
        raise ValueError(f"{who}: the configuration says {', '.join(large)}, but the save has {elements:,} numbers")
    init = LanguageModel(model).init
    for path, leaf in linear.by_path(jax.eval_shape(init, jax.random.key(0))).items():
        saved = leaves.get(f"params/{path}")
        if saved is None or tuple(saved["shape"]) != leaf.shape:
            there = "is not saved" if saved is None else f"is saved with the shape {tuple(saved['shape'])}"
            raise ValueError(f"{who}: by its configuration {path} has the shape {leaf.shape}, but it {there}")


def _saved_leaves(folder: RunFolder) -> Mapping[str, Any] | None:
    saves = Checkpointer(folder.model)
    for step in sorted(saves.steps(), reverse=True):
        try:
            return saves.info(step)["leaves"]
        except NewerFormatError:  # `restore` reports it
            return None
        except (CorruptCheckpointError, OSError):
            continue
    return None


def _as_config(folder: HuggingFaceFolder) -> Config:
    """The configuration of a run equivalent to the folder; of bytes, if there is no tokenizer."""
    model = dataclasses.replace(folder.model, dtype=folder.dtype)  # pyright: ignore[reportArgumentType]
    of_bytes = model.vocabulary == 256 and not (folder.path / TOKENIZER).is_file()
    wide = "uint32" if model.vocabulary > 2**16 else "uint16"
    return Config(DataConfig(format="bytes" if of_bytes else wide), model)


def check_same_model(run: Start, before: ModelConfig, now: ModelConfig) -> None:
    """Raises ValueError, which names each differing option, if the parameters would be a different model's."""
    free = FREE if now.positions == "rotary" else FREE[1:]
    fixed = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in free]
    before, now = (dataclasses.replace(each, kv_heads=each.kv_heads or each.heads) for each in (before, now))
    others = [name for name in fixed if getattr(before, name) != getattr(now, name)]
    if others:
        changes = ", ".join(f"model.{name} = {getattr(now, name)}, there {getattr(before, name)}" for name in others)
        raise ValueError(f"{run.who} has a different model: {changes}; set these to its values")
