"""Chooses attention's kernel, and explains why none is used."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from jaxshard.apps.config.config import ModelConfig
from jaxshard.apps.model.fused_attention import fused_attention, plain

AnyMesh: TypeAlias = Mesh | AbstractMesh

_KERNELS = {"gpu": "cudnn", "tpu": "splash"}
_DTYPES = {"gpu": ("bfloat16", "float16"), "tpu": ("bfloat16", "float32")}
_OLD_GPUS = ("Tesla", "Quadro", "TITAN", "GTX", "RTX 20")  # before Ampere; drivers name later GPUs differently
_OTHER_GPUS = ("AMD", "gfx", "Radeon")


def attention(q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxK: jax.Array, how: str) -> jax.Array:
    """Causal attention on the platform of the current mesh, which `jax.shard_map` sets.

    Args:
      q_BxLxHxK: queries.
      k_BxLxGxK: keys, and
      v_BxLxGxK: values, each head shared by H / G queries.
      how: as `ModelConfig.attention`.

    Raises:
      ValueError: `how` is "fused", and no kernel supports these arrays.
    """
    mesh, (_, length, _, features) = jax.sharding.get_abstract_mesh(), q_BxLxHxK.shape
    if how == "xla" or _refused(how, _why_not(length, features, q_BxLxHxK.dtype, mesh)):
        return plain(q_BxLxHxK, k_BxLxGxK, v_BxLxGxK)
    return fused_attention(q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, _KERNELS[_platform_and_kind(mesh)[0]])


def attention_to_cached(
    q_BxLxHxK: jax.Array, k_BxTxGxK: jax.Array, v_BxTxGxK: jax.Array, start: jax.Array | int
) -> jax.Array:
    """(B, L, H, K): causal attention of the positions from `start` on to the T positions of a cache."""
    seen_LxT = jnp.arange(k_BxTxGxK.shape[1]) <= start + jnp.arange(q_BxLxHxK.shape[1])[:, None]
    return jax.nn.dot_product_attention(q_BxLxHxK, k_BxTxGxK, v_BxTxGxK, mask=seen_LxT[None, None])


def why_not_fused(model: ModelConfig, mesh: AnyMesh) -> str | None:
    """Why the model's attention does not run in a fused kernel on a mesh; None if it does, or need not.

    Raises:
      ValueError: `model.attention` is "fused", and no kernel supports it.
    """
    if model.attention == "xla":
        return None
    reason = _why_not(model.sequence_length, model.width // model.heads, jnp.dtype(model.dtype), mesh)
    return reason if _refused(model.attention, reason) and _platform_and_kind(mesh)[0] in _KERNELS else None


def _refused(how: str, reason: str | None) -> bool:
    """Whether there is a reason; raises it as ValueError if `how` is "fused"."""
    if reason is not None and how == "fused":
        raise ValueError(
            f"model.attention = fused: {reason}; change that, or set model.attention = auto, which falls back to plain "
            "operations"
        )
    return reason is not None


def _why_not(length: int, features: int, dtype: DTypeLike, mesh: AnyMesh) -> str | None:
    """Why no kernel supports attention of these sizes on the devices of a mesh; None if one does."""
    platform, kind = _platform_and_kind(mesh)
    if platform not in _KERNELS:
        return f"no kernel exists for the platform {platform}, only for GPU and TPU"
    if jnp.dtype(dtype).name not in _DTYPES[platform]:
        return f"the kernel for {platform} supports {' and '.join(_DTYPES[platform])}, and model.dtype = {dtype}"
    return _why_not_on_gpu(length, features, kind) if platform == "gpu" else _why_not_on_tpu(length)


def _why_not_on_gpu(length: int, features: int, kind: str) -> str | None:
    if length % 2:
        return f"cuDNN needs an even number of positions, and model.sequence_length = {length}"
    if features % 8 or features > 128:
        return f"cuDNN needs at most 128 features per head, a multiple of 8, and model.width / model.heads = {features}"
    if any(name in kind for name in _OLD_GPUS):
        return f"cuDNN needs an Ampere GPU (2020) or later, and this is a {kind}"
    return f"cuDNN is for NVIDIA GPUs, and this is a {kind}" if kind.startswith(_OTHER_GPUS) else None


def _why_not_on_tpu(length: int) -> str | None:
    if length % 128:
        return f"splash attention needs a multiple of 128 positions, and model.sequence_length = {length}"
    return None


def _platform_and_kind(mesh: AnyMesh) -> tuple[str, str]:
    """(JAX's name of the devices' platform, the driver's name of their kind or "")."""
    device = mesh.abstract_device if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    return (device.platform, device.device_kind) if device else ("cpu", "")
