"""The models that benchmarks train: plain functions of plain dicts, which no library had a hand in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import jaxshard
from jaxshard.apps.bench.convnet import ConvNet
from jaxshard.apps.bench.decoders import Decoder, Llama

Tree = Any


def _same(tree: Tree) -> Tree:
    return tree


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What a step does with a loss from within.

    Attributes:
      layer: of each block's parameters, first thing in the block.
      rows: of the activations between blocks.
      last: of (parameters, activations) after the last block.
      prevent_cse: as `jax.checkpoint` takes it.
    """

    layer: Callable[[Tree], Tree] = jaxshard.unshard
    rows: Callable[[jax.Array], jax.Array] = _same
    last: Callable[[tuple[Tree, jax.Array]], tuple[Tree, jax.Array]] = _same
    prevent_cse: bool = True


class Model(Protocol):
    """A model in three parts: what comes before the blocks, a block, and what comes after them."""

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
    """The mean loss in nats. Each block is rematerialized, and asks for its parameters by `unshard`.

    Outside of jaxshard's steps `unshard` is the identity.
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
    """Arrays on the host: small numbers for floats, ones for vectors, and ids below 2 for integers."""
    random = np.random.default_rng(seed)

    def one(x: jax.ShapeDtypeStruct) -> np.ndarray:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return random.integers(0, 2, x.shape, dtype=x.dtype)
        if len(x.shape) < 2:
            return np.ones(x.shape, x.dtype)
        return (0.02 * random.standard_normal(x.shape, dtype="float32")).astype(x.dtype)

    return jax.tree.map(one, shapes)


MODELS: dict[str, Callable[..., Model]] = {
    "decoder": Decoder,
    "llama": Llama,
    "unrolled": lambda **sizes: Decoder(scanned=False, **sizes),
    "conv": ConvNet,
}
"""The models by name; each takes the sizes that differ from its own."""

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
      size: "full", for compilers; "small", to be run on simulated devices; "toy", for tests.
      sizes: what differs from that.
    """
    toy, small = _SIZES[name]
    return MODELS[name](**({"full": {}, "small": small, "toy": toy}[size] | sizes))
