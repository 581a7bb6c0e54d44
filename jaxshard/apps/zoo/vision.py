"""Networks of images: convolutional, U-Net, vision transformer and diffusion transformer.

Names of arrays end in their dims: B rows, L patches, D width, H heads.
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
    rows: int = 16

    def shapes(self) -> Tree:
        """The parameters' shapes; kernels are (height, width, in, out)."""
        inputs = (self.channels[0], *self.channels)
        blocks = [
            _residual_shapes(count if place else before, count)
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
        return _cross_entropy(pooled @ params["head"].astype(self.dtype), batch["labels"])


def _residual_shapes(before: int, count: int) -> dict[str, Shape]:
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


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


@dataclasses.dataclass(frozen=True)
class UNet:
    """A U-Net that removes noise (Ronneberger et al. 2015): down, up, and a connection across at each size.

    A block is the image and those that wait for their connection, to the same.
    """

    channels: tuple[int, ...] = (128, 256, 512)
    depth: int = 2
    size: int = 32
    dtype: str = "float32"
    scanned: bool = False
    rows: int = 64

    def shapes(self) -> Tree:
        """The parameters' shapes; the only key of a block says what it does."""
        down, up, before = [], [], self.channels[0]
        for count in self.channels:
            for _ in range(self.depth):
                down.append({"down": _residual_shapes(before, count)})
                up.append({"up": _residual_shapes(2 * count, before)})
                before = count
            if count != self.channels[-1]:
                down.append({"shrink": (3, 3, count, count)})
                up.append({"grow": (3, 3, count, count)})
        first = self.channels[0]
        return {"stem": (3, 3, 3, first), "blocks": [*down, *up[::-1]], "norm": (first,), "head": (3, 3, first, 3)}

    def batch(self, rows: int) -> Tree:
        """The shapes of images and noise."""
        image = jax.ShapeDtypeStruct((rows, self.size, self.size, 3), jnp.float32)
        return {"images": image, "noise": image}

    def first(self, params: Tree, batch: Tree) -> Any:
        """The first convolution of the noisy images."""
        noisy = (batch["images"] + batch["noise"]).astype(self.dtype)
        return _convolved(noisy, params["stem"].astype(self.dtype)), ()

    def block(self, layer: Tree, x: Any) -> Any:
        """One block; its key is "down", "shrink", "grow" or "up"."""
        x, waiting = x
        if "down" in layer:
            x = _residual(x, layer["down"])
            return x, (*waiting, x)
        if "up" in layer:
            return _residual(jnp.concatenate([x, waiting[-1]], -1), layer["up"]), waiting[:-1]
        if "shrink" in layer:
            return _convolved(x, layer["shrink"], 2), waiting
        rows, height, width, count = x.shape
        return _convolved(jax.image.resize(x, (rows, 2 * height, 2 * width, count), "nearest"), layer["grow"]), waiting

    def last(self, params: Tree, x: Any, batch: Tree) -> jax.Array:
        """The mean squared error of the noise that it finds."""
        found = _convolved(_grouped_norm(x[0], params["norm"]), params["head"].astype(self.dtype))
        return jnp.mean((found.astype(jnp.float32) - batch["noise"]) ** 2)


def _residual(x: jax.Array, layer: Tree) -> jax.Array:
    y = _convolved(jax.nn.silu(_grouped_norm(x, layer["norm1"])), layer["conv1"])
    y = _convolved(jax.nn.silu(_grouped_norm(y, layer["norm2"])), layer["conv2"])
    return y + (_convolved(x, layer["widen"]) if "widen" in layer else x)


@dataclasses.dataclass(frozen=True)
class ViT:
    """A vision transformer (Dosovitskiy et al. 2021).

    Attributes:
      casts_first: blocks cast their params before `unshard`; else after it.
    """

    layers: int = 12
    width: int = 768
    hidden: int = 3072
    heads: int = 12
    patches: int = 256
    inputs: int = 768
    classes: int = 1000
    dtype: str = "float32"
    scanned: bool = True
    casts_first: bool = False
    rows: int = 64

    def shapes(self) -> Tree:
        """The parameters' shapes."""
        return {
            "patch": (self.inputs, self.width),
            "position": (self.patches, self.width),
            "blocks": {name: (self.layers, *shape) for name, shape in self.layer_shapes().items()},
            "norm": (self.width,),
            "head": (self.width, self.classes),
        }

    def layer_shapes(self) -> dict[str, Shape]:
        """Those of one block."""
        return {
            "norm1": (self.width,),
            "qkv": (self.width, 3 * self.width),
            "out": (self.width, self.width),
            "norm2": (self.width,),
            "up": (self.width, self.hidden),
            "up_bias": (self.hidden,),
            "down": (self.hidden, self.width),
            "down_bias": (self.width,),
        }

    def batch(self, rows: int) -> Tree:
        """The shapes of images, cut into patches, and labels."""
        images = jax.ShapeDtypeStruct((rows, self.patches, self.inputs), jnp.float32)
        return {"images": images, "labels": jax.ShapeDtypeStruct((rows,), jnp.int32)}

    def first(self, params: Tree, batch: Tree) -> Any:
        """(B, L, D)."""
        x = batch["images"].astype(self.dtype) @ params["patch"].astype(self.dtype)
        return x + params["position"].astype(self.dtype)

    def block(self, layer: Tree, x: Any) -> Any:
        """Attention and MLP."""
        x += self.attended(_standard(x) * layer["norm1"].astype(x.dtype), layer)
        return x + _mlp(_standard(x) * layer["norm2"].astype(x.dtype), layer)

    def attended(self, y: jax.Array, layer: Tree) -> jax.Array:
        """Attention of all patches to all."""
        query, key, value = jnp.split((y @ layer["qkv"]).reshape(*y.shape[:2], 3 * self.heads, -1), 3, 2)
        return jax.nn.dot_product_attention(query, key, value).reshape(y.shape) @ layer["out"]

    def last(self, params: Tree, x: Any, batch: Tree) -> jax.Array:
        """The mean cross-entropy in nats per image."""
        pooled = jnp.mean(_standard(x), 1) * params["norm"].astype(x.dtype)
        return _cross_entropy(pooled @ params["head"].astype(self.dtype), batch["labels"])


def _standard(x: jax.Array) -> jax.Array:
    """A layer norm without a scale."""
    return jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype)


def _mlp(y: jax.Array, layer: Tree) -> jax.Array:
    inner = jax.nn.gelu(y @ layer["up"] + layer["up_bias"].astype(y.dtype))
    return inner @ layer["down"] + layer["down_bias"].astype(y.dtype)


@dataclasses.dataclass(frozen=True)
class DiT(ViT):
    """A diffusion transformer (Peebles and Xie 2023): time and class set each block's scales, shifts and gates."""

    patches: int = 256
    inputs: int = 16
    rows: int = 32

    def shapes(self) -> Tree:
        """The parameters' shapes."""
        square = (self.width, self.width)
        time = {"time1": (256, self.width), "time2": square, "embed": (self.classes, self.width)}
        return super().shapes() | time | {"head": (self.width, self.inputs), "tune": (self.width, 2 * self.width)}

    def layer_shapes(self) -> dict[str, Shape]:
        """Those of one block."""
        plain = {name: shape for name, shape in super().layer_shapes().items() if not name.startswith("norm")}
        return plain | {"tune": (self.width, 6 * self.width), "tune_bias": (6 * self.width,)}

    def batch(self, rows: int) -> Tree:
        """The shapes of images, cut into patches, noise, times and labels."""
        found = super().batch(rows)
        return found | {"noise": found["images"], "times": jax.ShapeDtypeStruct((rows,), jnp.float32)}

    def first(self, params: Tree, batch: Tree) -> Any:
        """(B, L, D) of noisy images; (B, D) of times and classes."""
        share = batch["times"][:, None, None]
        noisy = (1 - share) * batch["images"] + share * batch["noise"]
        angles = 1000 * batch["times"][:, None] * 10_000.0 ** (-jnp.arange(128) / 128)
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1).astype(self.dtype)
        time = jax.nn.silu(waves @ params["time1"].astype(self.dtype)) @ params["time2"].astype(self.dtype)
        return super().first(params, {"images": noisy}), time + params["embed"][batch["labels"]].astype(self.dtype)

    def block(self, layer: Tree, x: Any) -> Any:
        """Attention and MLP."""
        x, how = x
        tuned = jax.nn.silu(how) @ layer["tune"] + layer["tune_bias"].astype(how.dtype)
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(tuned[:, None], 6, -1)
        x += gate1 * self.attended(_standard(x) * (1 + scale1) + shift1, layer)
        return x + gate2 * _mlp(_standard(x) * (1 + scale2) + shift2, layer), how

    def last(self, params: Tree, x: Any, batch: Tree) -> jax.Array:
        """The mean squared error of the flow from images to noise."""
        x, how = x
        shift, scale = jnp.split((jax.nn.silu(how) @ params["tune"].astype(self.dtype))[:, None], 2, -1)
        x = (_standard(x) * params["norm"].astype(x.dtype)) * (1 + scale) + shift
        found = (x @ params["head"].astype(self.dtype)).astype(jnp.float32)
        return jnp.mean((found - (batch["noise"] - batch["images"])) ** 2)


_TOY: dict[str, Any] = {"layers": 2, "width": 64, "hidden": 128, "heads": 4, "patches": 16, "classes": 16}
_SMALL: dict[str, Any] = {"layers": 4, "width": 256, "hidden": 1024, "heads": 8, "patches": 64, "classes": 64}
_CONV: dict[str, Any] = {"channels": (32, 64, 128), "depth": 2, "size": 32}
MODELS = {
    "conv": (ConvNet, {"channels": (16, 32), "depth": 1, "size": 8, "classes": 16}, _CONV | {"classes": 64}),
    "unet": (UNet, {"channels": (16, 32), "depth": 1, "size": 8}, _CONV),
    "vit": (ViT, _TOY | {"inputs": 48}, _SMALL | {"inputs": 192}),
    "vit-casts-first": (
        functools.partial(ViT, casts_first=True),
        _TOY | {"inputs": 48},
        _SMALL | {"inputs": 192},
    ),
    "dit": (DiT, _TOY, _SMALL),
}
"""By name: the model, and its toy and small sizes."""
