"""The correspondence of our leaves with the tensors of Hugging Face's GPT-2 and Llama.

Dims: I inputs, O outputs, G heads of keys and values, P queries, key and value of a group, K features of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from jaxshard.apps.config.config import ModelConfig
from jaxshard.apps.config.memory import matrices
from jaxshard.apps.huggingface.hf_config import family_of


@dataclasses.dataclass(frozen=True)
class Rule:
    """One leaf and its tensors.

    Attributes:
      path: of the leaf.
      shape: of the leaf; of a stack, one layer's.
      names: of the tensors; `{}` stands for the layer's number, if the leaf is a stack of all layers.
      join: tensors to leaf, or to one layer of a stack.
      split: leaf, or one layer of a stack, to tensors.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    join: Callable[..., np.ndarray]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the tensors."""
        return [part.shape for part in self.split(np.broadcast_to(np.int8(0), self.shape))]

    @property
    def is_stacked(self) -> bool:
        """Whether the leaf is a stack of all layers."""
        return self.path.startswith("blocks/")


PREFIXES = {"gpt2": "transformer.", "llama": "model."}
"""Prefix of all names but the head's; files of a model without a head omit it."""

HEAD = "lm_head.weight"


def rules(model: ModelConfig) -> list[Rule]:
    """A rule for each leaf of the model.

    Raises:
      ValueError: Hugging Face has no architecture for this model.
    """
    family, shapes = family_of(model), _shapes(model)
    found, prefix = list(_gpt2(model) if family == "gpt2" else _llama(model)), PREFIXES[family]
    found = [(path, [prefix + name for name in names], how) for path, names, how in found]
    found += [] if model.tied else [("head/kernel", [HEAD], _TRANSPOSED)]
    return [Rule(path, shapes[path], tuple(names), *how) for path, names, how in found]


class Tensor(NamedTuple):
    """A tensor's place in the model: its leaf's rule, the layer if that is a stack, its index in the rule."""

    rule: Rule
    layer: int | None
    number: int
    shape: tuple[int, ...]


def tensors(model: ModelConfig) -> dict[str, Tensor]:
    """All tensors of the model by name, grouped by leaf and, within a leaf, by layer.

    Raises:
      ValueError: Hugging Face has no architecture for this model.
    """
    return {
        name.format(layer): Tensor(rule, layer, number, shape)
        for rule in rules(model)
        for layer in (range(model.layers) if rule.is_stacked else [None])
        for number, (name, shape) in enumerate(zip(rule.names, rule.shapes, strict=True))
    }


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all leaves that a model may have, in a stack of one layer."""
    width = model.width
    found = {"embedding/embedding": (model.vocabulary, width), "head/kernel": (width, model.vocabulary)}
    found |= {"positions/embedding": (model.sequence_length, width)}
    for name in ("norm", "blocks/attention_norm", "blocks/mlp_norm"):
        found |= {f"{name}/scale": (width,), f"{name}/bias": (width,)}
    for name, (inputs, outputs) in zip(
        ("attention/qkv", "attention/out", "mlp/up", "mlp/down"), matrices(model), strict=True
    ):
        found |= {f"blocks/{name}/kernel": (inputs, outputs), f"blocks/{name}/bias": (outputs,)}
    return found


_How = tuple[Callable[..., np.ndarray], Callable[[np.ndarray], tuple[np.ndarray, ...]]]
_Part = tuple[str, list[str], _How]  # a leaf's path, the names of its tensors, join and split

_SAME: _How = (lambda x: x, lambda y: (y,))
_TRANSPOSED: _How = (lambda x: x.T, lambda y: (y.T,))  # a bias has one dim, and does not change


def _gpt2(model: ModelConfig) -> Iterator[_Part]:
    """GPT-2; its matrices are (I, O), like ours."""
    yield "embedding/embedding", ["wte.weight"], _SAME
    yield "positions/embedding", ["wpe.weight"], _SAME
    for ours, theirs in (("norm", "ln_f"), ("blocks/attention_norm", "h.{}.ln_1"), ("blocks/mlp_norm", "h.{}.ln_2")):
        yield f"{ours}/scale", [f"{theirs}.weight"], _SAME
        yield f"{ours}/bias", [f"{theirs}.bias"], _SAME
    for ours, theirs, how in (
        ("attention/qkv", "attn.c_attn", _joint(model.heads)),
        ("attention/out", "attn.c_proj", _SAME),
        ("mlp/up", "mlp.c_fc", _SAME),
        ("mlp/down", "mlp.c_proj", _SAME),
    ):
        yield f"blocks/{ours}/kernel", [f"h.{{}}.{theirs}.weight"], how
        yield f"blocks/{ours}/bias", [f"h.{{}}.{theirs}.bias"], how


def _llama(model: ModelConfig) -> Iterator[_Part]:
    """Llama; its matrices are (O, I)."""
    yield "embedding/embedding", ["embed_tokens.weight"], _SAME
    yield "norm/scale", ["norm.weight"], _SAME
    yield "blocks/attention_norm/scale", ["layers.{}.input_layernorm.weight"], _SAME
    yield "blocks/mlp_norm/scale", ["layers.{}.post_attention_layernorm.weight"], _SAME
    groups = model.kv_heads or model.heads
    for ours, theirs, how in (
        ("attention/qkv", [f"self_attn.{name}_proj" for name in "qkv"], _grouped(groups, model.heads // groups)),
        ("attention/out", ["self_attn.o_proj"], _TRANSPOSED),
        ("mlp/up", ["mlp.gate_proj", "mlp.up_proj"], _GATED),
        ("mlp/down", ["mlp.down_proj"], _TRANSPOSED),
    ):
        yield f"blocks/{ours}/kernel", [f"layers.{{}}.{name}.weight" for name in theirs], how
        if model.bias:
            yield f"blocks/{ours}/bias", [f"layers.{{}}.{name}.bias" for name in theirs], how


def _joint(heads: int) -> _How:
    """All queries, then all keys, then all values: (..., 3, G, K); ours are (..., G, 3, K)."""

    def swapped(x: np.ndarray, first: int, second: int) -> np.ndarray:
        return x.reshape(*x.shape[:-1], first, second, -1).swapaxes(-3, -2).reshape(x.shape)

    return lambda x: swapped(x, 3, heads), lambda y: (swapped(y, heads, 3),)


def _grouped(groups: int, queries: int) -> _How:
    """Queries, keys and values as three tensors; ours are (..., G, P, K)."""

    def join(*tensors: np.ndarray) -> np.ndarray:
        parts = [x.T.reshape(*x.shape[:0:-1], groups, n, -1) for x, n in zip(tensors, (queries, 1, 1), strict=True)]
        joined = np.concatenate(parts, -2)
        return joined.reshape(*joined.shape[:-3], -1)

    def split(y: np.ndarray) -> tuple[np.ndarray, ...]:
        lead, y = y.shape[:-1], y.reshape(*y.shape[:-1], groups, queries + 2, -1)
        parts = (y[..., :queries, :], y[..., queries, :], y[..., queries + 1, :])
        return tuple(part.reshape(*lead, -1).T for part in parts)

    return join, split


def _pair(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    both = np.stack([gate.T, up.T], -1)
    return both.reshape(*both.shape[:-2], -1)


_GATED: _How = (_pair, lambda y: (y[..., ::2].T, y[..., 1::2].T))
