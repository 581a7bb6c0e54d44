"""Writes a run's model to a folder as Hugging Face's `save_pretrained` does, for `from_pretrained`.

It reads the masters, if there are any, and merges adapters. The folder is written to a hidden one beside it, and moved
when complete. At most one leaf and one shard are in memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxshard.apps.config.config import Config, LoraConfig
from jaxshard.apps.data.token_files import MOST_TOKENIZER_BYTES, TOKENIZER
from jaxshard.apps.huggingface import hf_config, hf_folder, hf_names
from jaxshard.apps.huggingface.hf_names import Tensor
from jaxshard.apps.model import linear
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.apps.trainer import finished_run, vocabulary
from jaxshard.checkpoint import Checkpointer
from jaxshard.checkpoint.storage.leaves import Entry
from jaxshard.cli.ckpt import export as files
from jaxshard.system import small_files
from jaxshard.system.files import rename, replace, sync_tree, workplace


def check_free(folder: Path) -> None:
    """Raises ValueError if `folder` exists and is not empty, or its parent does not exist."""
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"--huggingface {folder} already exists: give a new folder")
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"--huggingface {folder}: the folder {folder.parent} does not exist: create it first")


def write(checkpoints: Checkpointer, step: int, folder: Path, dtype: str | None, most_bytes: float) -> list[str]:
    """Writes the configuration, the weights, and the tokenizer that the run kept.

    Args:
      checkpoints: of a run.
      step: of the checkpoint.
      folder: new or empty.
      dtype: of all tensors; by default the parameters', with adapters the base's.
      most_bytes: the most bytes of tensors in one file.

    Returns:
      The names of the files.

    Raises:
      ValueError: the checkpoint is not a run's, Hugging Face has no such architecture, or a number overflows `dtype`.
      OSError: the folder cannot be written.
    """
    config, run = _config_of(checkpoints), checkpoints.path.parent
    dtype = dtype or config.lora.float_base(config.precision.params)
    tensors = hf_names.tensors(config.model)
    leaves: dict[str, Entry] = {
        name: {"shape": list(tensor.shape), "dtype": dtype, "digest": 0} for name, tensor in tensors.items()
    }
    reader = _Reader(checkpoints, step, config.lora, tensors, dtype)
    described = hf_config.described(config.model, dtype, _known_before(RunFolder(run)))
    with workplace(folder.absolute().parent) as place:
        made = place / "made"
        made.mkdir()
        hf_folder.keep(run, made)
        _add_tokenizer(RunFolder(run), made, described["eos_token_id"])
        replace(made / hf_folder.CONFIG, json.dumps(described, indent=2, sort_keys=True) + "\n")
        files.write(made / hf_folder.WEIGHTS, leaves, reader, {"step": str(step)}, most_bytes)
        check_free(folder)
        sync_tree(made)
        rename(made, folder)
    return sorted(file.name for file in folder.iterdir())


def _known_before(run: RunFolder) -> dict[str, Any]:
    """The config.json that the run started from; else the fields that the run's own tokenizer gives."""
    before = run.huggingface / hf_folder.CONFIG
    if before.is_file():
        return hf_config.read(before)
    end = vocabulary.end_of(run.tokenizer) if run.tokenizer.is_file() else None
    return {"eos_token_id": end[1]} if end else {}


def _add_tokenizer(run: RunFolder, folder: Path, end: object) -> None:
    """Copies the run's own tokenizer, with the configuration that `transformers` needs, unless the start has these."""
    config = folder / "tokenizer_config.json"
    if not run.tokenizer.is_file():
        return
    hf_folder.check_inside(run.tokenizer)
    replace(folder / TOKENIZER, small_files.read(run.tokenizer, MOST_TOKENIZER_BYTES))
    own = vocabulary.end_of(run.tokenizer)
    if not config.is_file() and own is not None and own[1] == end:
        said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": own[0]}
        replace(config, json.dumps(said, indent=2) + "\n")


def _config_of(checkpoints: Checkpointer) -> Config:
    """The configuration of the checkpoints' run."""
    run = RunFolder(checkpoints.path.parent)
    if checkpoints.path != run.model.resolve() or not run.config.is_file():
        raise ValueError(f"--huggingface writes the model of a run of jaxshard train, not {checkpoints.path}")
    return finished_run.opened(run.path, "DIR")[0]


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads a saved model's tensors by name; in one call, each leaf is read once."""

    checkpoints: Checkpointer
    step: int
    lora: LoraConfig
    tensors: Mapping[str, Tensor]
    dtype: str

    def __call__(self, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        for path, of_leaf in itertools.groupby(names, lambda name: self.tensors[name].rule.path):
            parts = self._parts(path)
            for layer, of_layer in itertools.groupby(of_leaf, lambda name: self.tensors[name].layer):
                whole = self._merged({n: part if layer is None else part[layer] for n, part in parts.items()})
                for name in of_layer:
                    tensor = self.tensors[name]
                    yield name, self._typed(tensor.rule.split(whole)[tensor.number], name)

    def _parts(self, path: str) -> dict[str, np.ndarray]:
        """A leaf and its companions (scales, adapters), by their own names."""
        saved, layer = self.checkpoints.info(self.step)["leaves"], path.removesuffix("kernel")
        beside = [f"params/{layer}{name}" for name in linear.ADDED if f"params/{layer}{name}" in saved]
        master = f"{finished_run.MASTERS}/{path}"
        asked = [f"params/{path}", *beside] if beside or master not in saved else [master]
        return {found.rpartition("/")[2]: x for found, x in self.checkpoints.read(self.step, asked)}

    def _merged(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        if len(parts) > 1:
            return np.asarray(linear.merged({name: jnp.asarray(part) for name, part in parts.items()}, self.lora))
        return next(iter(parts.values()))

    def _typed(self, x: np.ndarray, name: str) -> np.ndarray:
        with np.errstate(over="ignore"):
            found = x.astype(jnp.dtype(self.dtype), copy=False)
        if not np.isfinite(found).all():
            raise ValueError(
                f"{name} has values that are not finite in {self.dtype}: use a different --dtype or --step"
            )
        return found
