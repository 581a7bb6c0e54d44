"""The models that the benchmarks train: plain functions of plain dicts, which no library had a hand in.

Names of arrays end in their dims: B rows, L positions, D width, F hidden features, H heads, K features of a head,
V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jaxshard


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer; `scanned` layers are stacked and run in a `lax.scan`, else kept in a list.

    Attributes:
      one_hot: the cross-entropy takes the targets' logits by a product with one-hot rows, not by indices.
      dtype: of the computation.
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

    def init(self, dtype: str = "float32") -> dict:
        """The shapes of the parameters."""
        layer = {
            "norm1": (self.width,),
            "qkv": (self.width, 3 * self.width),
            "out": (self.width, self.width),
            "norm2": (self.width,),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }
        blocks = {k: (self.layers, *s) for k, s in layer.items()} if self.scanned else [layer] * self.layers
        shapes = {
            "embed": (self.vocabulary, self.width),
            "blocks": blocks,
            "norm": (self.width,),
            "head": (self.width, self.vocabulary),
        }
        is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
        return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=is_shape)

    def batch(self, rows: int) -> jax.ShapeDtypeStruct:
        """The shape of a batch of token ids."""
        return jax.ShapeDtypeStruct((rows, self.length + 1), jnp.int32)

    def loss(self, params: dict, tokens_BxL: jax.Array) -> jax.Array:
        """Mean loss in nats per token. Blocks call `unshard` first, which a GSPMD step takes for the identity."""
        x_BxLxD = self.embedded(params["embed"], tokens_BxL[:, :-1])

        def block(x_BxLxD, layer):
            return self.block(jaxshard.unshard(layer), x_BxLxD), None

        block = jax.checkpoint(block, prevent_cse=True)
        if self.scanned:
            x_BxLxD, _ = jax.lax.scan(block, x_BxLxD, params["blocks"])
        else:
            for layer in params["blocks"]:
                x_BxLxD, _ = block(x_BxLxD, layer)
        return self.losses(params, x_BxLxD, tokens_BxL[:, 1:])

    def embedded(self, table_VxD: jax.Array, ids_BxL: jax.Array) -> jax.Array:
        """(B, L, D), the rows of the table."""
        return table_VxD[ids_BxL].astype(self.dtype)

    def losses(self, params: dict, x_BxLxD: jax.Array, targets_BxL: jax.Array) -> jax.Array:
        """The mean cross-entropy."""
        x_BxLxD = _normed(x_BxLxD, params["norm"])
        logits_BxLxV = (x_BxLxD @ params["head"].astype(self.dtype)).astype(jnp.float32)
        if self.one_hot:
            picked_BxL = jnp.sum(logits_BxLxV * jax.nn.one_hot(targets_BxL, self.vocabulary), -1)
        else:
            picked_BxL = jnp.take_along_axis(logits_BxLxV, targets_BxL[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits_BxLxV, -1) - picked_BxL)

    def block(self, layer: dict, x_BxLxD: jax.Array) -> jax.Array:
        """One layer."""
        weight = functools.partial(_cast, layer, self.dtype)
        rows, length, width = x_BxLxD.shape
        qkv = (_normed(x_BxLxD, layer["norm1"]) @ weight("qkv")).reshape(rows, length, 3, self.heads, -1)
        attended = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x_BxLxD += attended.reshape(rows, length, width) @ weight("out")
        return x_BxLxD + jax.nn.gelu(_normed(x_BxLxD, layer["norm2"]) @ weight("up")) @ weight("down")


def _cast(layer: dict, dtype: str, name: str) -> jax.Array:
    return layer[name].astype(dtype)


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)
