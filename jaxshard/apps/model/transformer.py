"""The modules of the reference model.

Names of arrays end in their dims: B rows, L positions, D width, H heads, K features of a head, G heads of
keys and values, P a group's queries, key and value.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxshard
from jaxshard.apps.config.config import FAST_TURNS, NO_LORA, SLOW_TURNS, LoraConfig, ModelConfig
from jaxshard.apps.model.attention import attention, attention_to_cached
from jaxshard.apps.model.linear import Linear

Cache = tuple[jax.Array, jax.Array]  # keys and values, (B, T, G, K); of all layers (layers, B, T, G, K)


class Transformer(nnx.Module):
    """Embedding, blocks, norm, head: the parameters and their initial values."""

    def __init__(self, config: ModelConfig, lora: LoraConfig, rngs: nnx.Rngs):
        self.config = config
        embed = functools.partial(nnx.Embed, features=config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.embedding = embed(config.vocabulary, embedding_init=nnx.initializers.normal(0.02))
        if config.positions == "learned":
            self.positions = embed(config.sequence_length, embedding_init=nnx.initializers.normal(0.02))
        self.blocks = _stacked_blocks(config, lora, rngs)
        self.norm = _norm(config, rngs)
        if not config.tied:
            self.head = _linear(config, config.width, config.vocabulary, NO_LORA, rngs, bias=False)

    def parts(self) -> dict[str, nnx.Module]:
        """The parts of this configuration by name."""
        names = ("embedding", "positions", "blocks", "norm", "head")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}


class Block(nnx.Module):
    """Pre-norm attention and MLP with residuals. `sequence`: the dim along which activations are sharded."""

    def __init__(self, config: ModelConfig, lora: LoraConfig, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, lora, rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = MLP(config, lora, rngs)

    def __call__(self, x_BxLxD: jax.Array, key: jax.Array | None = None, sequence: int | None = None) -> jax.Array:
        keys = (None, None) if key is None else jax.random.split(key)
        attended_BxLxD = self.attention(self.attention_norm(x_BxLxD), sequence)
        x_BxLxD += _dropped(attended_BxLxD, self.dropout, keys[0], sequence)
        return x_BxLxD + _dropped(self.mlp(self.mlp_norm(x_BxLxD), sequence), self.dropout, keys[1], sequence)

    def extended(self, x_BxLxD: jax.Array, cache: Cache, start: jax.Array | int) -> tuple[jax.Array, Cache]:
        """The same without dropout, for positions from `start` on; adds them to the cache of earlier ones."""
        attended_BxLxD, cache = self.attention.extended(self.attention_norm(x_BxLxD), cache, start)
        x_BxLxD += attended_BxLxD
        return x_BxLxD + self.mlp(self.mlp_norm(x_BxLxD), None), cache


class Attention(nnx.Module):
    """Causal attention, its heads sharded over the tensor axis.

    Each of `kv_heads` keys and values is shared by a group of queries (Ainslie et al. 2023). The columns of `qkv` are
    ordered by group: its queries, its key, its value. So no group is split over devices.
    """

    def __init__(self, config: ModelConfig, lora: LoraConfig, rngs: nnx.Rngs):
        self.kv_heads = config.kv_heads or config.heads
        self.queries = config.heads // self.kv_heads
        self.config, self.how = config, config.attention
        features = config.width // config.heads
        self.qkv = _linear(config, config.width, self.kv_heads * (self.queries + 2) * features, lora, rngs)
        self.out = _linear(config, config.width, config.width, lora, rngs, scale=0.5 / config.layers)

    def __call__(self, x_BxLxD: jax.Array, sequence: int | None = None) -> jax.Array:
        q_BxLxHxK, k_BxLxGxK, v_BxLxGxK = self._heads(x_BxLxD, None, sequence)
        y_BxLxHxK = attention(q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, self.how)
        return self.out.row_parallel(y_BxLxHxK.reshape(*y_BxLxHxK.shape[:2], -1), sequence)

    def extended(self, x_BxLxD: jax.Array, cache: Cache, start: jax.Array | int) -> tuple[jax.Array, Cache]:
        """Attention of positions from `start` on to the cached ones and to themselves."""
        q_BxLxHxK, *new = self._heads(x_BxLxD, start, None)
        at = (0, start, 0, 0)
        k_BxTxGxK, v_BxTxGxK = (jax.lax.dynamic_update_slice(c, n, at) for c, n in zip(cache, new, strict=True))
        y_BxLxHxK = attention_to_cached(q_BxLxHxK, k_BxTxGxK, v_BxTxGxK, start)
        return self.out.row_parallel(y_BxLxHxK.reshape(*x_BxLxD.shape[:2], -1), None), (k_BxTxGxK, v_BxTxGxK)

    def _heads(
        self, x_BxLxD: jax.Array, start: jax.Array | int | None, sequence: int | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries (B, L, H, K), keys and values (B, L, G, K), of positions from `start` on; None: from 0."""
        qkv_BxLxF = self.qkv.column_parallel(x_BxLxD, sequence)
        rows, length, _ = qkv_BxLxF.shape
        positions_L = jnp.arange(length, dtype=jnp.float32)
        positions_L = positions_L if start is None else positions_L + start
        groups = jaxshard.tensor.per_device("model.kv_heads" if self.queries > 1 else "model.heads", self.kv_heads)
        qkv_BxLxGxPxK = qkv_BxLxF.reshape(rows, length, groups, self.queries + 2, -1)
        q_BxLxHxK = qkv_BxLxGxPxK[:, :, :, :-2].reshape(rows, length, groups * self.queries, -1)
        k_BxLxGxK, v_BxLxGxK = qkv_BxLxGxPxK[:, :, :, -2], qkv_BxLxGxPxK[:, :, :, -1]
        if self.config.positions == "rotary":
            q_BxLxHxK, k_BxLxGxK = (_rotate(x, positions_L, self.config) for x in (q_BxLxHxK, k_BxLxGxK))
        return q_BxLxHxK, k_BxLxGxK, v_BxLxGxK


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020) or GELU; `config.hidden` features, sharded over the tensor axis.

    The columns of a gated `up` are ordered by feature: its gate, its value. So both are on the same device.
    """

    def __init__(self, config: ModelConfig, lora: LoraConfig, rngs: nnx.Rngs):
        self.gated = config.mlp == "swiglu"
        self.up = _linear(config, config.width, config.hidden * (2 if self.gated else 1), lora, rngs)
        self.down = _linear(config, config.hidden, config.width, lora, rngs, scale=0.5 / config.layers)

    def __call__(self, x_BxLxD: jax.Array, sequence: int | None = None) -> jax.Array:
        h_BxLxF = self.up.column_parallel(x_BxLxD, sequence)
        if self.gated:
            both_BxLxFx2 = h_BxLxF.reshape(*h_BxLxF.shape[:2], -1, 2)
            h_BxLxF = jax.nn.silu(both_BxLxFx2[..., 0]) * both_BxLxFx2[..., 1]
        else:
            h_BxLxF = jax.nn.gelu(h_BxLxF)
        return self.down.row_parallel(h_BxLxF, sequence)


def _stacked_blocks(config: ModelConfig, lora: LoraConfig, rngs: nnx.Rngs) -> Block:
    @nnx.split_rngs(splits=config.layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(config, lora, rngs)

    return make(rngs)


def _linear(
    config: ModelConfig,
    inputs: int,
    outputs: int,
    lora: LoraConfig,
    rngs: nnx.Rngs,
    scale: float = 1.0,
    bias: bool | None = None,
) -> Linear:
    """`bias`: by default the configuration's."""
    init = nnx.initializers.variance_scaling(scale, "fan_in", "normal")
    return Linear(inputs, outputs, config.dtype, init, lora, rngs, config.bias if bias is None else bias)


def _norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm | nnx.LayerNorm:
    how: dict[str, Any] = {"epsilon": config.norm_epsilon, "dtype": jnp.dtype(config.dtype), "rngs": rngs}
    if config.norm == "rms":
        return nnx.RMSNorm(config.width, **how)
    return nnx.LayerNorm(config.width, use_bias=config.bias, use_fast_variance=False, **how)


def _dropped(x_BxLxD: jax.Array, rate: float, key: jax.Array | None, sequence: int | None) -> jax.Array:
    """Dropout, which drops the same elements whether the sequence is sharded or not."""
    if key is None or rate == 0.0:
        return x_BxLxD
    shape = list(x_BxLxD.shape)
    if sequence is None:
        kept = jax.random.bernoulli(key, 1.0 - rate, shape)
    else:
        shape[sequence] *= jaxshard.tensor.axis_size()
        kept = jaxshard.tensor.split_sequence(jax.random.bernoulli(key, 1.0 - rate, shape), sequence)
    return jnp.where(kept, x_BxLxD / (1.0 - rate), 0.0)


def _rotate(x_BxLxHxK: jax.Array, positions_L: jax.Array, config: ModelConfig) -> jax.Array:
    """Rotary positions (Su et al. 2021): rotates the two halves of each head by an angle that grows with position."""
    frequencies_K2 = _frequencies(x_BxLxHxK.shape[-1] // 2, config)
    angles_Lx1xK2 = (positions_L[:, None] * frequencies_K2)[:, None, :]
    cos, sin = jnp.cos(angles_Lx1xK2), jnp.sin(angles_Lx1xK2)
    left, right = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x_BxLxHxK.dtype)


def _frequencies(half: int, config: ModelConfig) -> jax.Array:
    """Radians per position of each rotation, with Llama 3.1's scaling (Grattafiori et al. 2024)."""
    frequencies_K2 = config.rotary_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if config.rotary_factor == 1:
        return frequencies_K2
    turns_K2 = config.rotary_length * frequencies_K2 / (2 * jnp.pi)
    kept_K2 = jnp.clip((turns_K2 - SLOW_TURNS) / (FAST_TURNS - SLOW_TURNS), 0, 1)
    return frequencies_K2 * (kept_K2 + (1 - kept_K2) / config.rotary_factor)
