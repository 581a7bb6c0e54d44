"""The models of the benchmarks: plain functions of plain dicts, without a library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import jaxshard
from jaxshard.apps.zoo import attention, decoders, recurrent, tables, vision

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
    rows: Callable[[Tree], Tree] = _same
    last: Callable[[tuple[Tree, Tree]], tuple[Tree, Tree]] = _same
    prevent_cse: bool = True


class Model(Protocol):
    """A model in three parts: before the blocks, a block, and after the blocks.

    It may have two more attributes. `plain`: neither remat nor `unshard`. `casts_first`: a block's parameters are cast
    before the step's hook gets them; else after it. Both are False if missing.
    """

    @property
    def scanned(self) -> bool:
        """Whether the blocks are a stack, or a list of stacks, each run in a `lax.scan`; else they are a list."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype of the computation."""
        ...

    @property
    def rows(self) -> int:
        """The rows of a batch over all devices, unless others are asked for."""
        ...

    def shapes(self) -> Tree:
        """The parameters' shapes, as tuples; those of blocks are under "blocks", tables' under "embed"."""
        ...

    def batch(self, rows: int) -> Tree:
        """The shapes of a batch."""
        ...

    def first(self, params: Tree, batch: Tree) -> Any:
        """The activations before the first block; the first dim of each is the rows."""
        ...

    def block(self, layer: Tree, x: Any) -> Any:
        """One block; the matrices of `layer` have the dtype of the computation."""
        ...

    def last(self, params: Tree, x: Any, batch: Tree) -> jax.Array:
        """The mean loss."""
        ...


def loss(model: Model, params: Tree, batch: Tree, hooks: Hooks | None = None) -> jax.Array:
    """The mean loss. Unless the model is plain, each block is rematerialized, and gathers its params by `unshard`.

    Outside jaxshard's steps, `unshard` is the identity.
    """
    is_plain, casts_first = getattr(model, "plain", False), getattr(model, "casts_first", False)
    hooks = hooks or (Hooks(layer=_same) if is_plain else Hooks())
    x = hooks.rows(model.first(params, batch))

    def block(x: Tree, layer: Tree) -> tuple[Tree, None]:
        x = hooks.rows(x)
        layer = hooks.layer(cast(layer, model.dtype)) if casts_first else cast(hooks.layer(layer), model.dtype)
        return model.block(layer, x), None

    if not is_plain:
        block = jax.checkpoint(block, prevent_cse=hooks.prevent_cse)
    if model.scanned:
        stacks = params["blocks"]
        for stack in stacks if isinstance(stacks, list) else [stacks]:
            x, _ = jax.lax.scan(block, x, stack)
    else:
        for layer in params["blocks"]:
            x, _ = block(x, layer)
    params, x = hooks.last((params, x))
    return model.last(params, x, batch)


def cast(layer: Tree, dtype: str) -> Tree:
    """Casts the weights to the dtype of the computation; vectors keep theirs."""
    return jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 1 else x, layer)


def init(model: Model, dtype: str = "float32") -> Tree:
    """The shapes of the parameters, as `jax.ShapeDtypeStruct`s."""
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), model.shapes(), is_leaf=is_shape)


def values(shapes: Tree, seed: int = 0, ids: int = 2) -> Tree:
    """Host arrays: small random floats, ones for vectors, and integers below `ids`."""
    random = np.random.default_rng(seed)

    def one(x: jax.ShapeDtypeStruct) -> np.ndarray:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return random.integers(0, ids, x.shape, dtype=x.dtype)
        if len(x.shape) < 2:
            return np.ones(x.shape, x.dtype)
        return (0.02 * random.standard_normal(x.shape, dtype="float32")).astype(x.dtype)

    return jax.tree.map(one, shapes)


_SIZED: dict[str, tuple[Callable[..., Model], dict[str, Any], dict[str, Any]]] = {
    **decoders.MODELS,
    **vision.MODELS,
    **attention.MODELS,
    **recurrent.MODELS,
    **tables.MODELS,
}
MODELS: dict[str, Callable[..., Model]] = {name: make for name, (make, _, _) in _SIZED.items()}
"""The models by name; each takes sizes to override."""


def model(name: str, size: str = "full", /, **sizes: Any) -> Model:
    """The model of that name.

    Args:
      name: one of `MODELS`.
      size: "full", for compilers; "small", for simulated devices; "toy", for tests.
      sizes: override sizes.
    """
    make, toy, small = _SIZED[name]
    return make(**({"full": {}, "small": small, "toy": toy}[size] | sizes))
