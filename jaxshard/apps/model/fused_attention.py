"""Causal attention in one kernel, which never writes the (L, L) matrix of weights to memory (Dao et al. 2022).

The traced program has two primitives, `fused_attention` and `fused_attention_backward`, so that it can be planned where
no such kernel is installed. They are lowered to cuDNN's flash attention on NVIDIA GPUs, Pallas's splash attention on
TPUs, and plain operations elsewhere.

The backward pass saves only queries, keys and values, and runs the forward kernel again. Under `jax.checkpoint`, the
compilers merge that with the recomputation.

Names of arrays end in their dims: B rows, L positions, H heads, G heads of keys and values, K features of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(B, L, H, K) queries, (B, L, G, K) keys and values -> (B, L, H, K)."""

_BLOCKS = (1024, 512, 256, 128)  # positions per block of splash attention


def fused_attention(q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxK: jax.Array, kernel: str) -> jax.Array:
    """Causal attention, each head of keys and values shared by H / G queries.

    Args:
      q_BxLxHxK: queries.
      k_BxLxGxK: keys, and
      v_BxLxGxK: values.
      kernel: "cudnn" or "splash", by platform; `jaxshard.plan` uses it for the costs.

    Returns:
      (B, L, H, K), in the dtype of the queries.
    """
    given = (q_BxLxHxK, k_BxLxGxK, v_BxLxGxK)
    axes = frozenset[str]().union(*map(_varying, given))
    return _attention(kernel, *(_varying_over(x, axes) for x in given))


def _varying(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which `x` varies, by its type."""
    return jax.typeof(x).manual_axis_type.varying


def _varying_over(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """`x` with a type that varies over these axes, too."""
    missing = axes - _varying(x)
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x


_forward = Primitive("fused_attention")
_backward = Primitive("fused_attention_backward")
_backward.multiple_results = True
_forward.def_abstract_eval(lambda q, k, v, **_: q)
_backward.def_abstract_eval(lambda q, k, v, cotangent, **_: (q, k, v))

_PRODUCTS = {"cudnn": (2, 5), "splash": (2, 7)}
"""kernel -> its matrix products per pair of positions of a head, forward and backward. The backward pass recomputes the
weights; splash attention does so twice, for the queries' gradient and for that of keys and values.
"""


def _bound(primitive: Primitive, kernel: str, *given: jax.Array) -> Any:
    """Binds a primitive, with the params that the plan and the check of rows need (`jaxshard.programs.primitives`)."""
    is_backward = primitive is _backward
    flops = _PRODUCTS[kernel][is_backward] * given[0].shape[1]  # of half of the pairs
    about = {"mixed_dims": 3, "flops_per_element": flops, "linear_in_last": is_backward}
    return primitive.bind(*given, kernel=kernel, **about)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(kernel: str, *qkv: jax.Array) -> jax.Array:
    return _bound(_forward, kernel, *qkv)


_attention.defvjp(
    lambda kernel, *qkv: (_bound(_forward, kernel, *qkv), qkv),
    lambda kernel, qkv, cotangent: tuple(_bound(_backward, kernel, *qkv, cotangent)),
)


# The kernels.


def plain(q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxK: jax.Array) -> jax.Array:
    """Causal attention by plain operations, which write the matrix of weights to memory."""
    return jax.nn.dot_product_attention(q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, is_causal=True)


def _cudnn(q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxK: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, is_causal=True, implementation="cudnn")


def splash(q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxK: jax.Array, interpret: bool = False) -> jax.Array:
    """Causal attention by the Pallas kernel for TPUs.

    Args:
      q_BxLxHxK, k_BxLxGxK, v_BxLxGxK: L a multiple of 128.
      interpret: interpret the kernel, on any platform.
    """
    (rows, length, heads, features), groups = q_BxLxHxK.shape, k_BxLxGxK.shape[2]
    q_BxLxHxK = (q_BxLxHxK / features**0.5).astype(q_BxLxHxK.dtype)
    q_BxHxLxK, k_BxGxLxK, v_BxGxLxK = (jnp.swapaxes(x, 1, 2) for x in (q_BxLxHxK, k_BxLxGxK, v_BxLxGxK))
    q_BxGxPxLxK = q_BxHxLxK.reshape(rows, groups, heads // groups, length, features)
    kernel = _splash_kernel(length, heads // groups, interpret)
    y_BxGxPxLxK = jax.vmap(jax.vmap(kernel))(q_BxGxPxLxK, k_BxGxLxK, v_BxGxLxK)
    return jnp.swapaxes(y_BxGxPxLxK.reshape(rows, heads, length, features), 1, 2)


def _splash_kernel(length: int, queries: int, interpret: bool) -> Callable[..., Any]:
    """Attention of `queries` heads that share keys and values: (P, L, K), (L, K), (L, K) -> (P, L, K).

    The backward pass is two kernels. A single one would hold a (L, K) gradient of the queries for each block of keys.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas  # importing it takes a second

    size = next(block for block in _BLOCKS if length % block == 0)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    at_once: dict[str, Any] = dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), min(size, 512))
    blocks = pallas.BlockSizes(**dict.fromkeys(names, size), **at_once)
    mask = pallas.MultiHeadMask([pallas.CausalMask((length, length))] * queries)
    return pallas.make_splash_mqa_single_device(mask, block_sizes=blocks, interpret=interpret)


# Lowering of the primitives.


def _value(attention: Attention, *qkv: jax.Array) -> list[jax.Array]:
    """The result, computed as in the forward pass of a gradient, so that compilers can merge both."""
    return [jax.vjp(attention, *qkv)[0]]


def _gradients(attention: Attention, *given: jax.Array) -> Sequence[jax.Array]:
    *qkv, cotangent = given
    return jax.vjp(attention, *qkv)[1](cotangent)


@functools.cache
def _traced(fn: Callable[..., Any], attention: Attention, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> ClosedJaxpr:
    """The program of a kernel on one device.

    It is traced in a thread of its own, where no mesh is set, because Pallas cannot be traced under
    `shard_map(check_vma=True)`. The types have been checked before.
    """
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(lambda: jax.make_jaxpr(functools.partial(fn, attention))(*shapes)).result()


def _compiled_as(primitive: Primitive, fn: Callable[..., Any], attention: Attention, platform: str | None) -> None:
    """Lowers the primitive to `fn(attention, *operands)` on a platform (None: on all others)."""

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **_: Any) -> Any:
        avals: Sequence[Any] = ctx.avals_in
        closed = _traced(fn, attention, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals))
        lowered = mlir.lower_fun(jaxpr_as_fun(closed))
        return lowered(ctx.replace(avals_in=closed.in_avals), *operands)

    mlir.register_lowering(primitive, rule, platform=platform)


for _primitive, _fn in ((_forward, _value), (_backward, _gradients)):
    _compiled_as(_primitive, _fn, plain, None)
    _compiled_as(_primitive, _fn, _cudnn, "cuda")
    _compiled_as(_primitive, _fn, splash, "tpu")
