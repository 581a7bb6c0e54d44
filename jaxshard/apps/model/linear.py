"""The blocks' matrices, cut over the tensor axis; with LoRA a frozen matrix, maybe in 8 bits, and two thin ones.

Names of arrays end in their dims: B rows, L positions, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

import jaxshard
from jaxshard.apps.config.config import LoraConfig

ADAPTERS = ("lora_a", "lora_b")
ADDED = ("kernel_scale", *ADAPTERS)
"""What a layer may have beside its kernel."""
MATRICES = ("kernel", *ADAPTERS)
FROZEN = r"^(?!.*/lora_[ab]$)"
"""A rule for what LoRA leaves as it is: all but its thin matrices."""


def by_path(params: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a nested dict, by their '/'-joined paths."""
    return dict(traverse_util.flatten_dict(params, sep="/"))


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict of leaves by their paths."""
    return traverse_util.unflatten_dict(dict(leaves), sep="/")


def is_adapter(path: str) -> bool:
    """Whether a parameter, by its '/'-joined path, is one of the thin matrices."""
    return path.rpartition("/")[2] in ADAPTERS


class Linear(nnx.Linear):
    """x W, maybe with a bias. With LoRA (Hu et al. 2021) x A B alpha / rank is added; A and B alone are trained.

    W in 8 bits has a scale for each output (as in QLoRA, Dettmers et al. 2023, whose own code has 4 bits).

    Args:
      inputs: features of x.
      outputs: features of the result.
      dtype: of the computation.
      init: makes W.
      lora: rank 0 has W alone.
      rngs: for W, and then for A.
      bias: whether there is one.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        dtype: str,
        init: nnx.Initializer,
        lora: LoraConfig,
        rngs: nnx.Rngs,
        bias: bool = False,
    ):
        super().__init__(inputs, outputs, use_bias=bias, dtype=jnp.dtype(dtype), kernel_init=init, rngs=rngs)
        self.has_adapters, self.in_8_bits, self.factor = lora.rank > 0, lora.base == "int8", lora.factor
        if self.has_adapters:
            narrow = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")
            self.lora_a = nnx.Param(narrow(rngs.params(), (inputs, lora.rank)))
            self.lora_b = nnx.Param(jnp.zeros((lora.rank, outputs)))
        if self.in_8_bits:
            self.kernel_scale = nnx.Param(jnp.ones(outputs))

    def column_parallel(self, x_BxLxI: jax.Array, sequence: int | None) -> jax.Array:
        """(B, L, O); W and B are cut along O, `x` along the dim `sequence`."""
        y_BxLxO = self._scaled(jaxshard.tensor.column_parallel(x_BxLxI, self._as("kernel"), sequence=sequence))
        if not self.has_adapters:
            return y_BxLxO
        x_BxLxR = x_BxLxI @ self._as("lora_a")
        return y_BxLxO + self.factor * jaxshard.tensor.column_parallel(x_BxLxR, self._as("lora_b"), sequence=sequence)

    def row_parallel(self, x_BxLxI: jax.Array, sequence: int | None) -> jax.Array:
        """(B, L, O), cut along the dim `sequence`; W, A and `x` are cut along I."""
        y_BxLxO = self._scaled(jaxshard.tensor.row_parallel(x_BxLxI, self._as("kernel"), sequence=sequence))
        if not self.has_adapters:
            return y_BxLxO
        x_BxLxR = jaxshard.tensor.row_parallel(x_BxLxI, self._as("lora_a"), sequence=sequence)
        return y_BxLxO + self.factor * (x_BxLxR @ self._as("lora_b"))

    def _scaled(self, y_BxLxO: jax.Array) -> jax.Array:
        """With the scales of W, and the bias."""
        if self.in_8_bits:
            y_BxLxO = (y_BxLxO * self.kernel_scale[...]).astype(self.dtype)
        return y_BxLxO + self._as("bias") if self.use_bias else y_BxLxO

    def _as(self, name: str) -> jax.Array:
        """A parameter, in the type of the computation."""
        return getattr(self, name)[...].astype(self.dtype)


def finite(who: str, leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The leaves; a FloatingPointError, which begins with `who`, if a number is not finite."""
    for path, leaf in leaves.items():
        if not jnp.all(jnp.isfinite(leaf)):
            raise FloatingPointError(f"{who}: {path} has numbers that are not finite in {leaf.dtype}")
    return leaves


def quantized(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A matrix (..., I, O) in 8 bits, and its float32 scales (..., O): the largest of each output is 127."""
    largest = jnp.max(jnp.abs(kernel.astype(jnp.float32)), axis=-2)
    scale = jnp.where(largest > 0, largest / 127, 1.0)
    return jnp.round(kernel / scale[..., None, :]).astype(jnp.int8), scale


def merged(layer: Mapping[str, Any], lora: LoraConfig) -> jax.Array:
    """The one matrix (..., I, O), in float32, that does what a `Linear`'s parameters do together."""
    kernel = layer["kernel"].astype(jnp.float32)
    if "kernel_scale" in layer:
        kernel *= layer["kernel_scale"].astype(jnp.float32)[..., None, :]
    if "lora_a" not in layer:
        return kernel
    a, b = (layer[name].astype(jnp.float32) for name in ADAPTERS)
    return kernel + lora.factor * jnp.matmul(a, b, precision="highest")


def stored(params: dict[str, Any], lora: LoraConfig, dtype: str) -> dict[str, Any]:
    """A model's fresh parameters, in the types in which they are kept.

    Args:
      params: a nested dict, all of it floats.
      lora: the base's type, where there is a base.
      dtype: of what is trained.
    """
    if not lora.rank:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return {name: _stored(name, node, lora, dtype) for name, node in params.items()}


def _stored(name: str, node: Any, lora: LoraConfig, dtype: str) -> Any:
    if not isinstance(node, dict):
        return node.astype(dtype if name in ADAPTERS else lora.float_base(dtype))
    found = {key: _stored(key, child, lora, dtype) for key, child in node.items()}
    if "kernel_scale" not in node:
        return found
    return found | dict(zip(("kernel", "kernel_scale"), quantized(node["kernel"]), strict=True))
