"""The reference model: a decoder-only transformer over bytes, its layers stacked on a leading dim and scanned.

Names of arrays end in their dims: B rows, L positions, D width, H heads, K features of a head, G heads of
keys and values, P a group's queries, key and value, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxshard
from jaxshard.apps.config.config import NO_LORA, LoraConfig, ModelConfig
from jaxshard.apps.model.transformer import Cache, Transformer
from jaxshard.pipelining import Info

Tree = Any
T = TypeVar("T")

Params = dict[str, Any]
Batch = dict[str, jax.Array]

_MOST_LOGITS = 2**27  # of a row, in float32 512 MB


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """The layers' pipeline by `jaxshard.pipeline`.

    Attributes:
      schedule: the order in which stages process microbatches.
      num_microbatches: of each device's rows.
      virtual: stages on each device.
      gather: when a stage gathers parameters that ZeRO shards: once per "step", or per "microbatch".
    """

    schedule: str = "1f1b"
    num_microbatches: int = 1
    virtual: int = 1
    gather: str = "step"


class LanguageModel:
    """`Transformer` as pure functions of a plain nested dict of float32 arrays.

    Its layers consist of `jaxshard.tensor`'s blocks, so that they can be sharded over the tensor axis, by `specs`.

    Args:
      config: of the model.
      pipelined: run the layers as pipeline stages; None: without a pipeline.
      sequence_parallel: shard activations between the layers along the sequence, over the tensor axis.
      lora: adapters of the blocks' matrices.
    """

    def __init__(
        self,
        config: ModelConfig,
        pipelined: Pipelined | None = None,
        sequence_parallel: bool = False,
        lora: LoraConfig = NO_LORA,
    ):
        self.config, self.pipelined, self.lora = config, pipelined, lora
        self._sequence = 1 if sequence_parallel else None
        model = nnx.eval_shape(lambda: Transformer(config, lora, nnx.Rngs(0)))
        self._graphdefs = {name: nnx.split(part)[0] for name, part in model.parts().items()}

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters. Works under `jit` and `eval_shape`, to make them sharded from the start."""
        params = nnx.to_pure_dict(nnx.state(Transformer(self.config, self.lora, nnx.Rngs(key)), nnx.Param))
        if self.virtual > 1:
            params["blocks"] = jax.tree.map(lambda x: x.reshape(self.virtual, -1, *x.shape[1:]), params["blocks"])
        return params

    @property
    def specs(self) -> list[tuple[str, P]]:
        """Rules for strategies: how the tensor and pipeline axes shard the parameters."""
        stage = (*(None,) * (self.virtual > 1), "pipeline" if self.pipelined else None)
        scales = [(r"^blocks/.*(qkv|up)/kernel_scale$", P(*stage, "tensor"))] if self.lora.base == "int8" else []
        biases = [(r"^blocks/.*(qkv|up)/bias$", P(*stage, "tensor"))] if self.config.bias else []
        rules = [
            (r"^blocks/.*(qkv|up)/(kernel|lora_b)$", P(*stage, None, "tensor")),
            (r"^blocks/.*(out|down)/(kernel|lora_a)$", P(*stage, "tensor")),
            *scales,
            *biases,
            (r"^blocks/", P(*stage)),
            (r"^embedding/", P("tensor")),
        ]
        return rules if self.config.tied else [*rules, (r"^head/kernel$", P(None, "tensor"))]

    @property
    def virtual(self) -> int:
        """Stages on each device; above 1, the layers' arrays are (virtual, layers / virtual, ...)."""
        return self.pipelined.virtual if self.pipelined else 1

    def loss(self, params: Params, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """Mean loss in nats per byte.

        Args:
          params: from `init`.
          batch: `{"tokens": (B, L + 1) int32}`; each position predicts the next.
          key: for dropout; None: no dropout.
        """
        return self._reduced(params, batch, key, lambda losses_BxL, _: jnp.mean(losses_BxL))

    def empty_cache(self, rows: int) -> Cache:
        """An empty cache for `extended`."""
        config = self.config
        shape = (
            config.layers,
            rows,
            config.sequence_length,
            config.kv_heads or config.heads,
            config.width // config.heads,
        )
        return jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)

    def extended(
        self, params: Params, tokens_BxL: jax.Array, cache: Cache, start: jax.Array | int
    ) -> tuple[jax.Array, Cache]:
        """Appends tokens to each row, in the global view; the layers are in one stack.

        Args:
          params: from `init`, replicated or sharded.
          tokens_BxL: the next L tokens.
          cache: keys and values of the `start` positions before these.
          start: `start + L` is at most `sequence_length`.

        Returns:
          (logits of the next token, (B, V) float32; the cache with these positions).
        """
        dtype, (_, length) = jnp.dtype(self.config.dtype), tokens_BxL.shape
        x_BxLxD = params["embedding"]["embedding"][tokens_BxL].astype(dtype)
        if self.config.positions == "learned":
            x_BxLxD += params["positions"]["embedding"][start + jnp.arange(length)].astype(dtype)

        def body(x_BxLxD: jax.Array, layer: tuple[Tree, Cache]) -> tuple[jax.Array, Cache]:
            state, cached = layer
            return self._part("blocks", state).extended(x_BxLxD, cached, start)

        x_BxLxD, cache = jax.lax.scan(body, x_BxLxD, (params["blocks"], cache))
        x_BxD = self._part("norm", params["norm"])(x_BxLxD[:, -1])
        head_DxV = params["embedding"]["embedding"].T if self.config.tied else params["head"]["kernel"]
        return (x_BxD.astype(dtype) @ head_DxV.astype(dtype)).astype(jnp.float32), cache

    def weighted_loss(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """(sum of `weights * loss` in nats, sum of `weights`); `batch["weights"]` is `(B, L)` float32."""

        def totals(losses_BxL: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
            return jnp.sum(losses_BxL * batch["weights"]), jnp.sum(batch["weights"])

        return self._reduced(params, batch, None, totals)

    def _reduced(self, params: Params, batch: Batch, key: jax.Array | None, reduce: Callable[..., Any]) -> Any:
        """`reduce(losses, batch)`, with losses (B, L): in a pipeline the mean over microbatches, or sums of a pair."""
        shared = {name: part for name, part in params.items() if name != "blocks"}

        def stage(blocks: Tree, x_BxLxD: jax.Array, info: Info) -> jax.Array:
            return self._layers(blocks, x_BxLxD, info, key)

        def last(shared: Params, x_BxLxD: jax.Array, batch: Batch, info: Info) -> jax.Array:
            return reduce(self._losses(shared, x_BxLxD, batch), batch)

        if self.pipelined is None:
            alone = Info(0, 0)
            x_BxLxD = stage(params["blocks"], self._embedded(shared, batch, alone), alone)
            return last(shared, x_BxLxD, batch, alone)
        how = {name: getattr(self.pipelined, name) for name in ("schedule", "num_microbatches", "virtual")}
        return jaxshard.pipeline(stage, self._embedded, last, params["blocks"], shared, batch, **how)

    def _part(self, name: str, params: Tree) -> Any:
        """A part of the model with gathered parameters."""
        return nnx.merge(self._graphdefs[name], nnx.State(self._asked(params)))

    def _asked(self, params: T) -> T:
        early = self.pipelined is not None and self.pipelined.gather == "step"
        return params if early else jaxshard.unshard(params)

    def _embedded(self, shared: Params, batch: Batch, info: Info) -> jax.Array:
        del info
        tokens_BxL, dtype = batch["tokens"][:, :-1], jnp.dtype(self.config.dtype)
        table_VxD = self._part("embedding", shared["embedding"]).embedding[...].astype(dtype)
        x_BxLxD = jaxshard.tensor.vocab_parallel_embedding(tokens_BxL, table_VxD, sequence=self._sequence)
        if self.config.positions == "rotary":
            return x_BxLxD
        positions_LxD = self._part("positions", shared["positions"])(jnp.arange(tokens_BxL.shape[1]))
        return x_BxLxD + (positions_LxD if self._sequence is None else jaxshard.tensor.split_sequence(positions_LxD, 0))

    def _layers(self, blocks: Tree, x_BxLxD: jax.Array, info: Info, key: jax.Array | None) -> jax.Array:
        """The layers of one stage; each has its own key, by its index in the model and the microbatch."""
        count = jax.tree.leaves(blocks)[0].shape[0]
        numbers = info.chunk * count + jnp.arange(count)

        def body(x_BxLxD: jax.Array, layer: tuple[Tree, jax.Array]) -> tuple[jax.Array, None]:
            state, number = layer
            block = self._part("blocks", state)  # gathered inside the remat, one layer at a time
            own = None if key is None else jax.random.fold_in(jax.random.fold_in(key, number), info.microbatch)
            return block(x_BxLxD, own, self._sequence), None

        if self.config.remat:
            body = jax.checkpoint(body, prevent_cse=False)
        return jax.lax.scan(body, x_BxLxD, (blocks, numbers))[0]

    def _losses(self, shared: Params, x_BxLxD: jax.Array, batch: Batch) -> jax.Array:
        """The losses, (B, L), in nats."""
        dtype = jnp.dtype(self.config.dtype)
        x_BxLxD = self._part("norm", shared["norm"])(x_BxLxD)
        if self.config.tied:
            head_DxV = self._part("embedding", shared["embedding"]).embedding[...].T
        else:
            head_DxV = self._part("head", shared["head"]).kernel[...]
        return jaxshard.tensor.vocab_parallel_linear_cross_entropy(
            x_BxLxD.astype(dtype),
            head_DxV.astype(dtype),
            batch["tokens"][:, 1:],
            chunk=self._loss_chunk(batch["tokens"].shape[1] - 1, head_DxV.shape[1]),
            sequence=self._sequence,
        )

    def _loss_chunk(self, length: int, columns: int) -> int:
        """Positions (of `length`) whose logits over `columns` of the vocabulary are in memory at once; 0: all."""
        if self.config.loss_chunk >= 0:
            return self.config.loss_chunk
        return next(n for n in range(length, 0, -1) if length % n == 0 and n * columns <= max(_MOST_LOGITS, columns))
