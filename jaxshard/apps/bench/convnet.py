"""A residual convolutional net."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.apps.bench.decoders import cast

Tree = Any
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ConvNet:
    """Stages of residual blocks; each stage after the first halves the image.

    Norms are over groups of channels, not over rows.
    """

    channels: tuple[int, ...] = (128, 256, 512, 1024)
    depth: int = 3
    size: int = 64
    classes: int = 1000
    dtype: str = "float32"
    scanned: bool = False

    def shapes(self) -> Tree:
        """The parameters' shapes; kernels are (height, width, in, out)."""
        inputs = (self.channels[0], *self.channels)
        blocks = [
            _residual(count if place else before, count)
            for before, count in zip(inputs, self.channels, strict=False)
            for place in range(self.depth)
        ]
        last = self.channels[-1]
        return {"stem": (3, 3, 3, inputs[0]), "blocks": blocks, "norm": (last,), "head": (last, self.classes)}

    def batch(self, rows: int) -> Tree:
        """The shapes of a batch of images and labels."""
        images = jax.ShapeDtypeStruct((rows, self.size, self.size, 3), jnp.float32)
        return {"images": images, "labels": jax.ShapeDtypeStruct((rows,), jnp.int32)}

    def first(self, params: Tree, batch: Tree) -> jax.Array:
        """The first convolution."""
        return _convolved(batch["images"].astype(self.dtype), params["stem"].astype(self.dtype))

    def block(self, layer: Tree, x: jax.Array) -> jax.Array:
        """Two convolutions beside the identity, which is widened where the channels change."""
        layer = cast(layer, self.dtype)
        stride = 2 if "widen" in layer else 1
        y = _convolved(jax.nn.relu(_grouped_norm(x, layer["norm1"])), layer["conv1"], stride)
        y = _convolved(jax.nn.relu(_grouped_norm(y, layer["norm2"])), layer["conv2"])
        return y + (_convolved(x, layer["widen"], stride) if "widen" in layer else x)

    def last(self, params: Tree, x: jax.Array, batch: Tree) -> jax.Array:
        """The mean cross-entropy in nats per image."""
        pooled = jnp.mean(_grouped_norm(x, params["norm"]), (1, 2))
        logits = (pooled @ params["head"].astype(self.dtype)).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, batch["labels"][:, None], -1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def _residual(before: int, count: int) -> dict[str, Shape]:
    convolutions = {"conv1": (3, 3, before, count), "conv2": (3, 3, count, count)}
    widened = {} if before == count else {"widen": (1, 1, before, count)}
    return {"norm1": (before,), "norm2": (count,), **convolutions, **widened}


def _grouped_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Each row's channels in groups of 16, normed over the group and the image."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 16)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, (1, 2, 4), keepdims=True) + 1e-6)
    return (wide.reshape(x.shape) * scale).astype(x.dtype)


def _convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
