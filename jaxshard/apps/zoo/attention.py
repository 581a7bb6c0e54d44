"""Transformers with two inputs, or with convolutions: encoder and decoder, two towers, and a speech encoder.

Names of arrays end in their dims: B rows, L positions, D width, H heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxshard.apps.zoo.decoders import normed

Tree = Any
Shape = tuple[int, ...]


def _layer_shapes(width: int, hidden: int) -> dict[str, Shape]:
    """Those of attention and an MLP."""
    return {
        "norm1": (width,),
        "qkv": (width, 3 * width),
        "out": (width, width),
        "norm2": (width,),
        "up": (width, hidden),
        "down": (hidden, width),
    }


def _stacked(layers: int, shapes: dict[str, Shape]) -> dict[str, Shape]:
    return {name: (layers, *shape) for name, shape in shapes.items()}


def _attended(layer: Tree, x: jax.Array, heads: int, is_causal: bool = False) -> jax.Array:
    y = (normed(x, layer["norm1"]) @ layer["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
    found = jax.nn.dot_product_attention(y[:, :, 0], y[:, :, 1], y[:, :, 2], is_causal=is_causal)
    return x + found.reshape(x.shape) @ layer["out"]


def _mlp(layer: Tree, x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(normed(x, layer["norm2"]) @ layer["up"]) @ layer["down"]


@dataclasses.dataclass(frozen=True)
class EncoderDecoder:
    """A translator: blocks that read one text, then blocks that write another and attend to the first."""

    layers: int = 4
    width: int = 768
    hidden: int = 3072
    heads: int = 12
    vocabulary: int = 32000
    length: int = 256
    dtype: str = "float32"
    scanned: bool = True
    rows: int = 32

    def shapes(self) -> Tree:
        """The parameters' shapes; the blocks are two stacks."""
        square, layer = (self.width, self.width), _layer_shapes(self.width, self.hidden)
        across = {"norm3": (self.width,), "query": square, "key": square, "value": square, "give": square}
        table = (self.vocabulary, self.width)
        blocks = [_stacked(self.layers, layer), _stacked(self.layers, layer | across)]
        return {"embed": table, "blocks": blocks, "norm": (self.width,), "head": table[::-1]}

    def batch(self, rows: int) -> Tree:
        """The shapes of both texts."""
        return {
            "source": jax.ShapeDtypeStruct((rows, self.length), jnp.int32),
            "target": jax.ShapeDtypeStruct((rows, self.length + 1), jnp.int32),
        }

    def first(self, params: Tree, batch: Tree) -> Any:
        """(B, L, D) of both texts."""
        look_up = lambda ids: params["embed"][ids].astype(self.dtype)  # noqa: E731
        return look_up(batch["source"]), look_up(batch["target"][:, :-1])

    def block(self, layer: Tree, x: Any) -> Any:
        """A block of the encoder or, with "query", of the decoder."""
        source, target = x
        if "query" not in layer:
            return _mlp(layer, _attended(layer, source, self.heads)), target
        target = _attended(layer, target, self.heads, is_causal=True)
        cut = lambda x: x.reshape(*x.shape[:2], self.heads, -1)  # noqa: E731
        query = cut(normed(target, layer["norm3"]) @ layer["query"])
        found = jax.nn.dot_product_attention(query, cut(source @ layer["key"]), cut(source @ layer["value"]))
        return source, _mlp(layer, target + found.reshape(target.shape) @ layer["give"])

    def last(self, params: Tree, x: Any, batch: Tree) -> jax.Array:
        """The mean cross-entropy in nats per token."""
        logits = (normed(x[1], params["norm"]) @ params["head"].astype(self.dtype)).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"][:, 1:]))


@dataclasses.dataclass(frozen=True)
class TwoTowers:
    """CLIP (Radford et al. 2021): transformers of patches and of words; the loss compares all images with all texts."""

    layers: int = 4
    patches: int = 256
    inputs: int = 768
    words: int = 64
    widths: tuple[int, int] = (768, 512)
    joint: int = 512
    vocabulary: int = 49408
    dtype: str = "float32"
    scanned: bool = True
    rows: int = 64

    def shapes(self) -> Tree:
        """The parameters' shapes."""
        images, texts = self.widths
        towers = [_stacked(self.layers, _layer_shapes(width, 4 * width)) for width in self.widths]
        return {
            "patch": (self.inputs, images),
            "embed": (self.vocabulary, texts),
            "blocks": {"images": towers[0], "texts": towers[1]},
            "norm": (images,),
            "head": (images, self.joint),
            "text_norm": (texts,),
            "text_head": (texts, self.joint),
        }

    def batch(self, rows: int) -> Tree:
        """The shapes of images, cut into patches, and texts."""
        return {
            "images": jax.ShapeDtypeStruct((rows, self.patches, self.inputs), jnp.float32),
            "texts": jax.ShapeDtypeStruct((rows, self.words), jnp.int32),
        }

    def first(self, params: Tree, batch: Tree) -> Any:
        """The two inputs of the blocks."""
        images = batch["images"].astype(self.dtype) @ params["patch"].astype(self.dtype)
        return images, params["embed"][batch["texts"]].astype(self.dtype)

    def block(self, layer: Tree, x: Any) -> Any:
        """A block of each tower."""
        both = zip((layer["images"], layer["texts"]), x, self.widths, strict=True)
        images, texts = (_mlp(of, _attended(of, y, max(1, width // 64), is_causal=True)) for of, y, width in both)
        return images, texts

    def last(self, params: Tree, x: Any, batch: Tree) -> jax.Array:
        """The symmetric cross-entropy of all pairs, in nats."""
        images = _unit(jnp.mean(x[0], 1) * params["norm"] @ params["head"])
        texts = _unit(jnp.mean(x[1], 1) * params["text_norm"] @ params["text_head"])
        logits = 10.0 * images @ texts.T
        both = jax.nn.logsumexp(logits, 0) + jax.nn.logsumexp(logits, 1) - 2 * jnp.diagonal(logits)
        return jnp.mean(both) / 2


def _unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


@dataclasses.dataclass(frozen=True)
class Conformer:
    """A speech encoder: convolutions of raw sound, then blocks of attention and convolution (Gulati et al. 2020).

    The loss is CTC's. The first convolutions make a frame of 20 samples.
    """

    layers: int = 4
    width: int = 768
    hidden: int = 3072
    heads: int = 12
    channels: int = 256
    window: int = 15
    frames: int = 512
    letters: int = 32
    vocabulary: int = 128
    dtype: str = "float32"
    scanned: bool = True
    rows: int = 16

    def shapes(self) -> Tree:
        """The parameters' shapes; kernels are (length, in, out)."""
        layer = _layer_shapes(self.width, self.hidden) | {
            "norm3": (self.width,),
            "widen": (self.width, 2 * self.width),
            "along": (self.window, 1, self.width),
            "narrow": (self.width, self.width),
            "norm4": (self.width,),
            "up2": (self.width, self.hidden),
            "down2": (self.hidden, self.width),
        }
        return {
            "sound": [(10, 1, self.channels), (3, self.channels, self.channels), (3, self.channels, self.channels)],
            "enter": (self.channels, self.width),
            "blocks": _stacked(self.layers, layer),
            "norm": (self.width,),
            "head": (self.width, self.vocabulary),
        }

    def batch(self, rows: int) -> Tree:
        """The shapes of sound and letters; letter 0 is the blank."""
        sound = jax.ShapeDtypeStruct((rows, 20 * self.frames), jnp.float32)
        return {"sound": sound, "letters": jax.ShapeDtypeStruct((rows, self.letters), jnp.int32)}

    def first(self, params: Tree, batch: Tree) -> jax.Array:
        """(B, L, D)."""
        x = batch["sound"][..., None].astype(self.dtype)
        for kernel, stride in zip(params["sound"], (5, 2, 2), strict=True):
            x = jax.nn.gelu(_convolved(x, kernel.astype(self.dtype), stride))
        return x @ params["enter"].astype(self.dtype)

    def block(self, layer: Tree, x: jax.Array) -> jax.Array:
        """Half an MLP, attention, a convolution of each channel, and half an MLP."""
        x = (x + _mlp(layer, x)) / 2
        x = _attended(layer, x, self.heads)
        y = jax.nn.glu(normed(x, layer["norm3"]) @ layer["widen"])
        x += jax.nn.silu(_convolved(y, layer["along"], groups=self.width)) @ layer["narrow"]
        return (x + _mlp({"norm2": layer["norm4"], "up": layer["up2"], "down": layer["down2"]}, x)) / 2

    def last(self, params: Tree, x: jax.Array, batch: Tree) -> jax.Array:
        """The mean negative log-likelihood of a row's letters, in nats."""
        logits = (normed(x, params["norm"]) @ params["head"].astype(self.dtype)).astype(jnp.float32)
        all_there = jnp.zeros(logits.shape[:2]), jnp.zeros(batch["letters"].shape)
        return jnp.mean(optax.ctc_loss(logits, all_there[0], batch["letters"], all_there[1]))


def _convolved(x: jax.Array, kernel: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
    )


_TOY: dict[str, Any] = {"layers": 2, "width": 64, "hidden": 128, "heads": 4}
_SMALL: dict[str, Any] = {"layers": 4, "width": 256, "hidden": 1024, "heads": 8}
MODELS = {
    "translator": (
        EncoderDecoder,
        _TOY | {"vocabulary": 256, "length": 32},
        _SMALL | {"vocabulary": 512, "length": 128},
    ),
    "clip": (
        TwoTowers,
        {"layers": 2, "patches": 16, "inputs": 48, "words": 8, "widths": (64, 64), "joint": 32, "vocabulary": 256},
        {"patches": 64, "inputs": 192, "words": 32, "widths": (256, 128), "joint": 128, "vocabulary": 512},
    ),
    "conformer": (
        Conformer,
        _TOY | {"channels": 32, "frames": 32, "letters": 4, "vocabulary": 16},
        _SMALL | {"channels": 64, "frames": 128, "letters": 16},
    ),
}
"""By name: the model, and its toy and small sizes."""
