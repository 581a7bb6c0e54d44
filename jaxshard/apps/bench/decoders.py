"""Decoder-only transformers with GPT-2's or Llama's blocks.

Names of arrays end in their dims: B rows, L positions, D width, H heads, K features of a head, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer like GPT-2: fused queries, keys and values, GELU.

    Attributes:
      scanned: the layers are stacked and run in a `lax.scan`; else they are in a list.
      one_hot: the cross-entropy selects the targets' logits by a product with one-hot rows, not by indices.
      dtype: of the computation.
      attention: the `implementation` of `jax.nn.dot_product_attention`.
      tied: the embedding is the output layer too.
    """

    layers: int = 12
    width: int = 1024
    hidden: int = 4096
    heads: int = 16
    vocabulary: int = 32000
    length: int = 1024
    scanned: bool = True
    one_hot: bool = False
    dtype: str = "float32"
    attention: Any = None
    tied: bool = False

    def shapes(self) -> Tree:
        """The parameters' shapes."""
        layer, table = self.layer_shapes(), (self.vocabulary, self.width)
        blocks = {k: (self.layers, *s) for k, s in layer.items()} if self.scanned else [layer] * self.layers
        head = {} if self.tied else {"head": table[::-1]}
        return {"embed": table, "blocks": blocks, "norm": (self.width,)} | head

    def layer_shapes(self) -> dict[str, Shape]:
        """Those of one block."""
        return {
            "norm1": (self.width,),
            "qkv": (self.width, 3 * self.width),
            "out": (self.width, self.width),
            "norm2": (self.width,),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }

    def batch(self, rows: int) -> jax.ShapeDtypeStruct:
        """The shape of a batch of token ids."""
        return jax.ShapeDtypeStruct((rows, self.length + 1), jnp.int32)

    def first(self, params: Tree, batch: jax.Array) -> jax.Array:
        """(B, L, D), the rows of the table."""
        return params["embed"][batch[:, :-1]].astype(self.dtype)

    def block(self, layer: Tree, x: jax.Array) -> jax.Array:
        """Attention and MLP, (B, L, D) to (B, L, D)."""
        layer = cast(layer, self.dtype)
        rows, length, width = x.shape
        qkv = (_normed(x, layer["norm1"]) @ layer["qkv"]).reshape(rows, length, 3, self.heads, -1)
        attended = _attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], self.attention)
        x += attended.reshape(rows, length, width) @ layer["out"]
        return x + jax.nn.gelu(_normed(x, layer["norm2"]) @ layer["up"]) @ layer["down"]

    def last(self, params: Tree, x: jax.Array, batch: jax.Array) -> jax.Array:
        """The mean cross-entropy in nats per token."""
        return _cross_entropy(params, x, batch[:, 1:], self.dtype, self.one_hot)


@dataclasses.dataclass(frozen=True)
class Llama(Decoder):
    """A decoder with Llama's blocks: rotary positions, grouped queries, SwiGLU. By default it has 1 G parameters.

    Attributes: as for `Decoder`; `groups` is the number of heads of keys and values.
    """

    layers: int = 16
    width: int = 2048
    hidden: int = 8192
    heads: int = 32
    groups: int = 8

    def layer_shapes(self) -> dict[str, Shape]:
        """Those of one block."""
        head = self.width // self.heads
        return {
            "norm1": (self.width,),
            "query": (self.width, self.width),
            "key": (self.width, self.groups * head),
            "value": (self.width, self.groups * head),
            "out": (self.width, self.width),
            "norm2": (self.width,),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }

    def block(self, layer: Tree, x: jax.Array) -> jax.Array:
        """Attention and gated MLP, (B, L, D) to (B, L, D)."""
        layer = cast(layer, self.dtype)
        rows, length, width = x.shape
        y = _normed(x, layer["norm1"])
        query, key, value = (
            (y @ layer[name]).reshape(rows, length, count, -1)
            for name, count in (("query", self.heads), ("key", self.groups), ("value", self.groups))
        )
        attended = _attention(_rotated(query), _rotated(key), value, self.attention)
        x += attended.reshape(rows, length, width) @ layer["out"]
        y = _normed(x, layer["norm2"])
        return x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]


def cast(layer: Tree, dtype: str) -> Tree:
    """Casts the weights to the dtype of the computation; vectors keep theirs."""
    return {name: x.astype(dtype) if x.ndim > 1 else x for name, x in layer.items()}


def _attention(query: jax.Array, key: jax.Array, value: jax.Array, implementation: Any) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)


def _rotated(x_BxLxHxK: jax.Array) -> jax.Array:
    """Rotary positions: rotates the two halves of each head's features by the position."""
    length, half = x_BxLxHxK.shape[1], x_BxLxHxK.shape[-1] // 2
    angles = jnp.arange(length)[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x_BxLxHxK.dtype)


def _cross_entropy(params: Tree, x: jax.Array, targets_BxL: jax.Array, dtype: str, one_hot: bool) -> jax.Array:
    x = _normed(x, params["norm"])
    head = params["head"] if "head" in params else params["embed"].T
    logits = (x @ head.astype(dtype)).astype(jnp.float32)
    if one_hot:
        picked = jnp.sum(logits * jax.nn.one_hot(targets_BxL, logits.shape[-1]), -1)
    else:
        picked = jnp.take_along_axis(logits, targets_BxL[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)
