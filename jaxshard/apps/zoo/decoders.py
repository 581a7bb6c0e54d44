"""Decoder-only transformers: with GPT-2's blocks, with Llama's, and with mixtures of experts.

Names of arrays end in their dims: B rows, L positions, D width, H heads, K features of a head, V vocabulary, E experts,
C slots of an expert.
"""

from __future__ import annotations

import dataclasses
import functools
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
    rows: int = 16

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
        x = self.attended(layer, x)
        return x + jax.nn.gelu(normed(x, layer["norm2"]) @ layer["up"]) @ layer["down"]

    def attended(self, layer: Tree, x: jax.Array) -> jax.Array:
        """The first half of a block."""
        rows, length, width = x.shape
        qkv = (normed(x, layer["norm1"]) @ layer["qkv"]).reshape(rows, length, 3, self.heads, -1)
        attended = _attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], self.attention)
        return x + attended.reshape(rows, length, width) @ layer["out"]

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
        rows, length, width = x.shape
        y = normed(x, layer["norm1"])
        query, key, value = (
            (y @ layer[name]).reshape(rows, length, count, -1)
            for name, count in (("query", self.heads), ("key", self.groups), ("value", self.groups))
        )
        attended = _attention(_rotated(query), _rotated(key), value, self.attention)
        x += attended.reshape(rows, length, width) @ layer["out"]
        y = normed(x, layer["norm2"])
        return x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]


@dataclasses.dataclass(frozen=True)
class Experts(Decoder):
    """A decoder whose MLPs are mixtures of experts, dispatched by one-hot products (GShard: Lepikhin et al. 2020).

    Every device holds all experts. The loss has a term that balances them, a mean over rows.

    Attributes: as for `Decoder`; `experts` is their number, of which each token uses the best `top`.
    """

    layers: int = 4
    width: int = 768
    hidden: int = 2048
    heads: int = 12
    vocabulary: int = 16384
    length: int = 512
    experts: int = 8
    top: int = 2

    def layer_shapes(self) -> dict[str, Shape]:
        """Those of one block."""
        wide = {"up": (self.experts, self.width, self.hidden), "down": (self.experts, self.hidden, self.width)}
        return super().layer_shapes() | wide | {"router": (self.width, self.experts)}

    def first(self, params: Tree, batch: jax.Array) -> Any:
        """(B, L, D), the rows of the table; and (B,), the imbalance so far."""
        return super().first(params, batch), jnp.zeros(batch.shape[0])

    def block(self, layer: Tree, x: Any) -> Any:
        """Attention and experts."""
        x, imbalance = x
        x = self.attended(layer, x)
        y = normed(x, layer["norm2"])
        chances_BxLxE = jax.nn.softmax((y @ layer["router"]).astype(jnp.float32))
        takes, gives = self.dispatched(chances_BxLxE)
        inner = jax.nn.gelu(jnp.einsum("blec,bld,edf->becf", takes.astype(y.dtype), y, layer["up"]))
        y = jnp.einsum("blec,becf,efd->bld", gives.astype(y.dtype), inner, layer["down"])
        used_BxE = jnp.mean(jnp.sum(takes, -1), 1)
        return x + y, imbalance + jnp.sum(used_BxE * jnp.mean(chances_BxLxE, 1), -1)

    def dispatched(self, chances_BxLxE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which token takes which slot of which expert, and that times its weight: (B, L, E, C). The rest is cut."""
        rows, length, experts = chances_BxLxE.shape
        size = max(1, length * self.top * 5 // (experts * 4))
        weights, chosen = jax.lax.top_k(chances_BxLxE, self.top)
        to_expert = jax.nn.one_hot(chosen, experts)  # (B, L, top, E)
        before = jnp.cumsum(to_expert.reshape(rows, -1, experts), 1).reshape(to_expert.shape) - 1
        slot = jax.nn.one_hot(jnp.sum(before * to_expert, -1).astype(int), size)  # (B, L, top, C)
        takes = jnp.einsum("blke,blkc->blec", to_expert, slot)
        return takes, jnp.einsum("blke,blkc,blk->blec", to_expert, slot, weights)

    def last(self, params: Tree, x: Any, batch: jax.Array) -> jax.Array:
        """The mean cross-entropy in nats per token, plus a hundredth of the imbalance."""
        x, imbalance = x
        return super().last(params, x, batch) + 0.01 * jnp.mean(imbalance)


@dataclasses.dataclass(frozen=True)
class SharedExperts(Decoder):
    """A decoder with many small experts and one that all tokens share, dispatched by sorting (DeepSeekMoE, 2024).

    Attributes: as for `Experts`; `shared` is the hidden width of the shared expert.
    """

    layers: int = 4
    width: int = 768
    hidden: int = 512
    heads: int = 12
    vocabulary: int = 16384
    length: int = 512
    experts: int = 16
    top: int = 4
    shared: int = 1024

    def layer_shapes(self) -> dict[str, Shape]:
        """Those of one block."""
        wide = (self.experts, self.width, self.hidden)
        return super().layer_shapes() | {
            "up": wide,
            "gate": wide,
            "down": (self.experts, self.hidden, self.width),
            "router": (self.width, self.experts),
            "shared_up": (self.width, self.shared),
            "shared_gate": (self.width, self.shared),
            "shared_down": (self.shared, self.width),
        }

    def block(self, layer: Tree, x: jax.Array) -> jax.Array:
        """Attention, the shared expert, and the chosen ones."""
        x = self.attended(layer, x)
        y = normed(x, layer["norm2"])
        shared = (jax.nn.silu(y @ layer["shared_gate"]) * (y @ layer["shared_up"])) @ layer["shared_down"]
        weights, chosen = jax.lax.top_k(jax.nn.sigmoid((y @ layer["router"]).astype(jnp.float32)), self.top)
        weights = weights / jnp.sum(weights, -1, keepdims=True)
        inputs, tokens, slots, order = jax.vmap(self.sorted)(y, chosen)
        inner = jax.nn.silu(jnp.einsum("becd,edf->becf", inputs, layer["gate"]))
        inner *= jnp.einsum("becd,edf->becf", inputs, layer["up"])
        outputs = jnp.einsum("becf,efd->becd", inner, layer["down"])
        return x + shared + jax.vmap(_put_back)(outputs, tokens, slots, order, weights)

    def sorted(self, y_LxD: jax.Array, chosen: jax.Array) -> tuple[jax.Array, ...]:
        """One row's tokens by expert, (E, C, D); each choice's token and slot, in the order of experts; that order."""
        length, width = y_LxD.shape
        size = max(1, length * self.top * 3 // (self.experts * 2))
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        expert, tokens = chosen.reshape(-1)[order], order // self.top
        place = jnp.arange(expert.size) - jnp.searchsorted(expert, jnp.arange(self.experts))[expert]
        slots = jnp.where(place < size, expert * size + place, self.experts * size)  # those beyond are dropped
        inputs = jnp.zeros((self.experts * size, width), y_LxD.dtype).at[slots].set(y_LxD[tokens], mode="drop")
        return inputs.reshape(self.experts, size, width), tokens, slots, order


def _put_back(
    outputs: jax.Array, tokens: jax.Array, slots: jax.Array, order: jax.Array, weights: jax.Array
) -> jax.Array:
    """(L, D), each token's weighted sum over its experts."""
    flat = outputs.reshape(-1, outputs.shape[-1])
    found = flat.at[slots].get(mode="fill", fill_value=0) * weights.reshape(-1)[order][:, None].astype(flat.dtype)
    return jnp.zeros((weights.shape[0], flat.shape[-1]), flat.dtype).at[tokens].add(found)


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
    x = normed(x, params["norm"])
    head = params["head"] if "head" in params else params["embed"].T
    logits = (x @ head.astype(dtype)).astype(jnp.float32)
    if one_hot:
        picked = jnp.sum(logits * jax.nn.one_hot(targets_BxL, logits.shape[-1]), -1)
    else:
        picked = jnp.take_along_axis(logits, targets_BxL[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """An RMS norm, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


_TOY: dict[str, Any] = {"layers": 2, "width": 64, "hidden": 128, "heads": 4, "vocabulary": 256, "length": 32}
_SMALL: dict[str, Any] = {"layers": 4, "width": 256, "hidden": 1024, "heads": 8, "vocabulary": 512, "length": 128}
_FEW: dict[str, Any] = {"hidden": 256, "experts": 4}
MODELS = {
    "decoder": (Decoder, _TOY, _SMALL),
    "llama": (Llama, _TOY | {"groups": 2}, _SMALL | {"groups": 4}),
    "unrolled": (functools.partial(Decoder, scanned=False), _TOY, _SMALL),
    "moe": (Experts, _TOY | {"experts": 4}, _SMALL | _FEW),
    "shared-moe": (SharedExperts, _TOY | {"experts": 8, "shared": 64}, _SMALL | _FEW | {"shared": 256}),
}
"""By name: the model, and its toy and small sizes."""
