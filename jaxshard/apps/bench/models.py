"""The models of the benchmarks: plain functions of plain dicts, without a library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import jaxshard
from jaxshard.apps.bench.decoders import Decoder, Llama, cast

Tree = Any


def _same(tree: Tree) -> Tree:
    return tree


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Functions that a step applies inside the loss.

    Attributes:
      layer: to each block's parameters, at the start of the block.
      rows: to the activations between blocks.
      last: to (parameters, activations) after the last block.
      prevent_cse: of `jax.checkpoint`.
    """

    layer: Callable[[Tree], Tree] = jaxshard.unshard
    rows: Callable[[jax.Array], jax.Array] = _same
    last: Callable[[tuple[Tree, jax.Array]], tuple[Tree, jax.Array]] = _same
    prevent_cse: bool = True


class Model(Protocol):
    """A model in three parts: before the blocks, a block, and after the blocks."""

    @property
    def scanned(self) -> bool:
        """Whether the blocks are stacked and run in a `lax.scan`; else they are a list."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype of the computation."""
        ...

    def shapes(self) -> Tree:
        """The parameters' shapes, as tuples; those of the blocks are under "blocks"."""
        ...

    def batch(self, rows: int) -> Tree:
        """The shapes of a batch."""
        ...

    def first(self, params: Tree, batch: Tree) -> jax.Array:
        """The activations before the first block."""
        ...

    def block(self, layer: Tree, x: jax.Array) -> jax.Array:
        """One block."""
        ...

    def last(self, params: Tree, x: jax.Array, batch: Tree) -> jax.Array:
        """The mean loss."""
        ...


def loss(model: Model, params: Tree, batch: Tree, hooks: Hooks | None = None) -> jax.Array:
    """The mean loss in nats. Each block is rematerialized, and gathers its parameters by `unshard`.

    Outside jaxshard's steps, `unshard` is the identity.
    """
    hooks = hooks or Hooks()
    x = hooks.rows(model.first(params, batch))

    def block(x: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        x = hooks.rows(x)
        return model.block(hooks.layer(layer), x), None

    block = jax.checkpoint(block, prevent_cse=hooks.prevent_cse)
    if model.scanned:
        x, _ = jax.lax.scan(block, x, params["blocks"])
    else:
        for layer in params["blocks"]:
            x, _ = block(x, layer)
    params, x = hooks.last((params, x))
    return model.last(params, x, batch)


def init(model: Model, dtype: str = "float32") -> Tree:
    """The shapes of the parameters, as `jax.ShapeDtypeStruct`s."""
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), model.shapes(), is_leaf=is_shape)


def values(shapes: Tree, seed: int = 0) -> Tree:
    """Host arrays: small random floats, ones for vectors, and ids below 2 for integers."""
    random = np.random.default_rng(seed)

    def one(x: jax.ShapeDtypeStruct) -> np.ndarray:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return random.integers(0, 2, x.shape, dtype=x.dtype)
        if len(x.shape) < 2:
            return np.ones(x.shape, x.dtype)
        return (0.02 * random.standard_normal(x.shape, dtype="float32")).astype(x.dtype)

    return jax.tree.map(one, shapes)


_TOY: dict[str, Any] = {"layers": 2, "width": 64, "hidden": 128, "heads": 4, "vocabulary": 256, "length": 32}
_SMALL: dict[str, Any] = {"layers": 4, "width": 256, "hidden": 1024, "heads": 8, "vocabulary": 512, "length": 128}
_SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decoder": (_TOY, _SMALL),
    "llama": (_TOY | {"groups": 2}, _SMALL | {"groups": 4}),
    "unrolled": (_TOY, _SMALL),
    "conv": (
        {"channels": (16, 32), "depth": 1, "size": 8, "classes": 16},
        {"channels": (32, 64, 128), "depth": 2, "size": 32, "classes": 64},
    ),
}


def model(name: str, size: str = "full", **sizes: Any) -> Model:
    """The model of that name.

    Args:
      name: one of `MODELS`.
      size: "full", for compilers; "small", for simulated devices; "toy", for tests.
      sizes: override sizes.
    """
    toy, small = _SIZES[name]
    return MODELS[name](**({"full": {}, "small": small, "toy": toy}[size] | sizes))


Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ConvNet:
    """Stages of residual blocks; each stage after the first halves the image.

    Norms are over groups of channels, never over rows.
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
        """Two convolutions and a residual connection, which is widened if the channels change."""
        layer = cast(layer, self.dtype)
        stride = 2 if "widen" in layer else 1
        y = _convolved(jax.nn.relu(self.normed(x, layer["norm1"])), layer["conv1"], stride)
        y = _convolved(jax.nn.relu(self.normed(y, layer["norm2"])), layer["conv2"])
        return y + (_convolved(x, layer["widen"], stride) if "widen" in layer else x)

    def normed(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """The norm before each convolution of a block."""
        return _grouped_norm(x, scale)

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
    """Normalizes each row's channels in groups of 16, over the group and the image."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 16)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, (1, 2, 4), keepdims=True) + 1e-6)
    return (wide.reshape(x.shape) * scale).astype(x.dtype)


def _convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


MODELS: dict[str, Callable[..., Model]] = {
    "decoder": Decoder,
    "llama": Llama,
    "unrolled": lambda **sizes: Decoder(scanned=False, **sizes),
    "conv": ConvNet,
}
"""The models by name; each takes sizes to override."""
