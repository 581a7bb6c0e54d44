"""The blocks' matrices, sharded over the tensor axis; with LoRA a frozen matrix, perhaps in 8 bits, and two thin ones.

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
"""Parameters that a layer may have beside its kernel."""
MATRICES = ("kernel", *ADAPTERS)
FROZEN = r"^(?!.*/lora_[ab]$)"
"""Matches the paths that LoRA freezes: all but its thin matrices."""


def by_path(params: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a nested dict by '/'-joined path."""
    return dict(traverse_util.flatten_dict(params, sep="/"))


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `by_path`."""
    return traverse_util.unflatten_dict(dict(leaves), sep="/")


def is_adapter(path: str) -> bool:
    """Whether a '/'-joined path is that of a thin matrix."""
    return path.rpartition("/")[2] in ADAPTERS


class Linear(nnx.Linear):
    """x W, perhaps with a bias. LoRA (Hu et al. 2021) adds x A B alpha / rank, and trains only A and B.

    An 8-bit W has a scale per output (similar to QLoRA, Dettmers et al. 2023, which has 4 bits).

    Args:
      inputs: features of x.
      outputs: features of the result.
      dtype: of the computation.
      init: initializer of W.
      lora: rank 0: W alone.
      rngs: for W, then for A.
      bias: whether to add one.
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
        """(B, L, O); W and B are sharded along O, `x` along the dim `sequence`."""
        y_BxLxO = self._scaled(jaxshard.tensor.column_parallel(x_BxLxI, self._as("kernel"), sequence=sequence))
        if not self.has_adapters:
            return y_BxLxO
        x_BxLxR = x_BxLxI @ self._as("lora_a")
        return y_BxLxO + self.factor * jaxshard.tensor.column_parallel(x_BxLxR, self._as("lora_b"), sequence=sequence)

    def row_parallel(self, x_BxLxI: jax.Array, sequence: int | None) -> jax.Array:
        """(B, L, O), sharded along the dim `sequence`; W, A and `x` are sharded along I."""
        y_BxLxO = self._scaled(jaxshard.tensor.row_parallel(x_BxLxI, self._as("kernel"), sequence=sequence))
        if not self.has_adapters:
            return y_BxLxO
        x_BxLxR = jaxshard.tensor.row_parallel(x_BxLxI, self._as("lora_a"), sequence=sequence)
        return y_BxLxO + self.factor * (x_BxLxR @ self._as("lora_b"))

    def _scaled(self, y_BxLxO: jax.Array) -> jax.Array:
        """Applies the scales of W and the bias."""
        if self.in_8_bits:
            y_BxLxO = (y_BxLxO * self.kernel_scale[...]).astype(self.dtype)
        return y_BxLxO + self._as("bias") if self.use_bias else y_BxLxO

    def _as(self, name: str) -> jax.Array:
        """A parameter in the computation's type."""
        return getattr(self, name)[...].astype(self.dtype)


def finite(who: str, leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the leaves; raises FloatingPointError, which begins with `who`, if a number is not finite."""
    for path, leaf in leaves.items():
        if not jnp.all(jnp.isfinite(leaf)):
            raise FloatingPointError(f"{who}: {path} has numbers that are not finite in {leaf.dtype}")
    return leaves


def quantized(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes a matrix (..., I, O) to 8 bits with float32 scales (..., O); each output's largest code is 127."""
    largest = jnp.max(jnp.abs(kernel.astype(jnp.float32)), axis=-2)
    scale = jnp.where(largest > 0, largest / 127, 1.0)
    return jnp.round(kernel / scale[..., None, :]).astype(jnp.int8), scale


def merged(layer: Mapping[str, Any], lora: LoraConfig) -> jax.Array:
    """The single float32 matrix (..., I, O) that is equivalent to a `Linear`'s parameters."""
    kernel = layer["kernel"].astype(jnp.float32)
    if "kernel_scale" in layer:
        kernel *= layer["kernel_scale"].astype(jnp.float32)[..., None, :]
    if "lora_a" not in layer:
        return kernel
    a, b = (layer[name].astype(jnp.float32) for name in ADAPTERS)
    return kernel + lora.factor * jnp.matmul(a, b, precision="highest")


def stored(params: dict[str, Any], lora: LoraConfig, dtype: str) -> dict[str, Any]:
    """Converts a model's fresh parameters to their storage types.

    Args:
      params: a nested dict of floats.
      lora: has the base's type, if there is a base.
      dtype: of the trained parameters.
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
