"""The reference model: a decoder-only transformer over bytes, its layers stacked on a leading dim and scanned.

Names of arrays end in their dims: B rows, L positions, D width, H heads, K features of a head, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxshard
from jaxshard.cli.config import ModelConfig

Params = dict[str, Any]
Batch = dict[str, jax.Array]

_ROTARY_BASE = 10_000.0


class LanguageModel:
    """`Transformer` as pure functions of a plain nested dict of float32 arrays.

    Args:
      config: sizes and choices of the model.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self._graphdef = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))), nnx.Param)[0]

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters. Runs under `jit` and `eval_shape`, so that they can be made sharded from the start."""
        return nnx.to_pure_dict(nnx.state(Transformer(self.config, nnx.Rngs(key)), nnx.Param))

    def loss(self, params: Params, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """Mean loss in nats per byte.

        Args:
          params: as `init` makes them.
          batch: `{"tokens": (B, L + 1) int32}`; each position predicts the next.
          key: for dropout; without it nothing is dropped.
        """
        return jnp.mean(self._losses(params, batch["tokens"], key))

    def weighted_loss(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Sum of `weights * loss` in nats, and the sum of `weights`, where `batch["weights"]` is `(B, L)` float32."""
        losses_BxL = self._losses(params, batch["tokens"], None)
        return jnp.sum(losses_BxL * batch["weights"]), jnp.sum(batch["weights"])

    def _losses(self, params: Params, tokens_BxL1: jax.Array, key: jax.Array | None) -> jax.Array:
        model = nnx.merge(self._graphdef, nnx.State(params))
        logits_BxLxV = model(tokens_BxL1[:, :-1], key)
        return _cross_entropy(logits_BxLxV, tokens_BxL1[:, 1:])


class Transformer(nnx.Module):
    """Embedding, blocks, norm, head. Each part asks for its own parameters, whole, at the moment it needs them."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        embed = functools.partial(nnx.Embed, features=config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.embedding = embed(config.vocabulary, embedding_init=nnx.initializers.normal(0.02))
        if config.positions == "learned":
            self.positions = embed(config.sequence_length, embedding_init=nnx.initializers.normal(0.02))
        self.blocks = _stacked_blocks(config, rngs)
        self.norm = _norm(config, rngs)
        if not config.tied:
            self.head = _linear(config, config.width, config.vocabulary, rngs)

    def __call__(self, tokens_BxL: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits `(B, L, V)` in float32."""
        embedding = _unsharded(self.embedding)
        x_BxLxD = embedding(tokens_BxL)
        if self.config.positions == "learned":
            x_BxLxD += _unsharded(self.positions)(jnp.arange(tokens_BxL.shape[1]))
        x_BxLxD = _unsharded(self.norm)(self._scan_blocks(x_BxLxD, key))
        logits_BxLxV = embedding.attend(x_BxLxD) if self.config.tied else _unsharded(self.head)(x_BxLxD)
        return logits_BxLxV.astype(jnp.float32)

    def _scan_blocks(self, x_BxLxD: jax.Array, key: jax.Array | None) -> jax.Array:
        graphdef, stacked = nnx.split(self.blocks)
        keys = None if key is None else jax.random.split(key, self.config.layers)

        def body(x_BxLxD: jax.Array, layer: tuple[Any, jax.Array | None]) -> tuple[jax.Array, None]:
            state, key = layer
            block = nnx.merge(graphdef, jaxshard.unshard(state))  # one layer is whole, inside what is recomputed
            return block(x_BxLxD, key), None

        if self.config.remat:
            body = jax.checkpoint(body, prevent_cse=False)
        return jax.lax.scan(body, x_BxLxD, (stacked, keys))[0]


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to what came in."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x_BxLxD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        keys = (None, None) if key is None else jax.random.split(key)
        x_BxLxD += _dropped(self.attention(self.attention_norm(x_BxLxD)), self.dropout, keys[0])
        x_BxLxD += _dropped(self.mlp(self.mlp_norm(x_BxLxD)), self.dropout, keys[1])
        return x_BxLxD


class Attention(nnx.Module):
    """Causal attention of `heads` heads."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.heads = config.heads
        self.rotary = config.positions == "rotary"
        self.qkv = _linear(config, config.width, 3 * config.width, rngs)
        self.out = _linear(config, config.width, config.width, rngs, scale=0.5 / config.layers)

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        rows, length, width = x_BxLxD.shape
        qkv_BxLx3xHxK = self.qkv(x_BxLxD).reshape(rows, length, 3, self.heads, width // self.heads)
        q_BxLxHxK, k_BxLxHxK, v_BxLxHxK = (qkv_BxLx3xHxK[:, :, part] for part in range(3))
        if self.rotary:
            q_BxLxHxK, k_BxLxHxK = _rotate(q_BxLxHxK), _rotate(k_BxLxHxK)
        y_BxLxHxK = jax.nn.dot_product_attention(q_BxLxHxK, k_BxLxHxK, v_BxLxHxK, is_causal=True)
        return self.out(y_BxLxHxK.reshape(rows, length, width))


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020) or GELU; `config.hidden` features between."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.gated = config.mlp == "swiglu"
        self.up = _linear(config, config.width, config.hidden * (2 if self.gated else 1), rngs)
        self.down = _linear(config, config.hidden, config.width, rngs, scale=0.5 / config.layers)

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        h_BxLxF = self.up(x_BxLxD)
        if not self.gated:
            return self.down(jax.nn.gelu(h_BxLxF))
        gate_BxLxF, value_BxLxF = jnp.split(h_BxLxF, 2, axis=-1)
        return self.down(jax.nn.silu(gate_BxLxF) * value_BxLxF)


def _unsharded(module: Any) -> Any:
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jaxshard.unshard(state))


def _stacked_blocks(config: ModelConfig, rngs: nnx.Rngs) -> Block:
    @nnx.split_rngs(splits=config.layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs)

    return make(rngs)


def _linear(config: ModelConfig, inputs: int, outputs: int, rngs: nnx.Rngs, scale: float = 1.0) -> nnx.Linear:
    init = nnx.initializers.variance_scaling(scale, "fan_in", "normal")
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=jnp.dtype(config.dtype), kernel_init=init, rngs=rngs)


def _norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)


def _dropped(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    if key is None or rate == 0.0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1.0 - rate, x.shape), x / (1.0 - rate), 0.0)


def _rotate(x_BxLxHxK: jax.Array) -> jax.Array:
    """Rotary positions (Su et al. 2021): the two halves of each head turned by an angle that grows with position."""
    length, half = x_BxLxHxK.shape[1], x_BxLxHxK.shape[-1] // 2
    frequencies_K2 = _ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_Lx1xK2 = (jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies_K2)[:, None, :]
    cos, sin = jnp.cos(angles_Lx1xK2), jnp.sin(angles_Lx1xK2)
    left, right = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x_BxLxHxK.dtype)


def _cross_entropy(logits_BxLxV: jax.Array, targets_BxL: jax.Array) -> jax.Array:
    """Nats per position. The target's logit is picked by comparison, not by a gather: less memory in ZeRO-3."""
    is_target_BxLxV = targets_BxL[..., None] == jnp.arange(logits_BxLxV.shape[-1])
    target_BxL = jnp.sum(jnp.where(is_target_BxLxV, logits_BxLxV, 0.0), axis=-1)
    return jax.nn.logsumexp(logits_BxLxV, axis=-1) - target_BxL
