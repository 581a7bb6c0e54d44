"""Layers with the vocabulary sharded over an axis: the embedding, and cross entropy with and without its product."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard import collectives
from jaxshard.base.tree import sum_dtype
from jaxshard.tensor.blocks import TENSOR, check_cut, column_parallel, entered, first_index, is_cut, summed


def vocab_parallel_embedding(
    tokens: jax.Array, table: jax.Array, *, sequence: int | None = None, axis: str = TENSOR
) -> jax.Array:
    """`table[tokens]`; each device holds the rows of its part of the vocabulary.

    Args:
      tokens: (...) integers below V, the same on every device.
      table: (V/T, D), sharded by `specs` over its first dim.
      sequence: the dim along which to shard the result.

    Returns:
      (..., D), replicated, or sharded along `sequence`.

    Raises:
      TypeError: the table is not sharded over the axis.
      ValueError: T does not divide the dim `sequence`.
    """
    check_cut("vocab_parallel_embedding: the table", table, axis)
    rows = table.shape[0]
    mine = tokens.astype(jnp.int32) - first_index(rows, axis)  # uint8 cannot hold 256, a possible number of rows
    here = (mine >= 0) & (mine < rows)
    found = jnp.where(here[..., None], table[jnp.where(here, mine, 0)], 0)
    return summed(found, sequence, axis)


def vocab_parallel_cross_entropy(logits: jax.Array, targets: jax.Array, *, axis: str = TENSOR) -> jax.Array:
    """-log softmax(logits)[target]; no device holds the full logits.

    Args:
      logits: (..., V/T), from `column_parallel`.
      targets: (...) integers below V, the same on every device.

    Returns:
      (...) nats, float32 at least, the same on every device.

    Raises:
      TypeError: the logits are not sharded over the axis.
    """
    check_cut("vocab_parallel_cross_entropy: the logits", logits, axis)
    return _loss_and_norm(logits, targets, axis)[0]


def vocab_parallel_linear_cross_entropy(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    chunk: int = 0,
    sequence: int | None = None,
    axis: str = TENSOR,
) -> jax.Array:
    """-log softmax(x @ kernel)[target], one chunk of positions at a time, so only one chunk's logits exist.

    The backward pass recomputes them. It sums the kernel's gradient over chunks, at least in float32.

    Args:
      x: (..., L, D), as for `column_parallel`.
      kernel: (D, V/T), sharded by `specs` over its last dim.
      targets: (..., L) integers below V, the same on every device.
      chunk: the number of positions of each row in a chunk; it divides L. 0: all.
      sequence: the dim along which `x` is sharded; it is gathered here.

    Returns:
      (..., L) nats, float32 at least, the same on every device.

    Raises:
      TypeError: `x` or the kernel is not sharded as described.
      ValueError: the chunk does not divide L.

    >>> x, kernel = jnp.ones((4, 2)), jnp.eye(2)
    >>> vocab_parallel_linear_cross_entropy(x, kernel, jnp.array([0, 1, 1, 0]), chunk=2)
    Array([0.6931472, 0.6931472, 0.6931472, 0.6931472], dtype=float32)
    """
    who, length = "vocab_parallel_linear_cross_entropy", targets.shape[-1]
    if chunk in (0, length):
        logits = column_parallel(x, kernel, sequence=sequence, axis=axis)
        return vocab_parallel_cross_entropy(logits, targets, axis=axis)
    if chunk < 0 or length % chunk:
        raise ValueError(f"{who}: chunk {chunk} does not divide the {length} positions of {targets.shape}")
    check_cut(f"{who}: the kernel", kernel, axis)
    x = entered(who, x, sequence, axis)
    axes = tuple(collectives.varying(x) | collectives.varying(kernel) | collectives.varying(targets))
    return _losses_by_chunks(chunk, axis, collectives.vary(x, axes), collectives.vary(kernel, axes), targets)


def _loss_and_norm(logits: jax.Array, targets: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """((...) nats, the log-sum-exp of all logits)."""
    logits = logits.astype(sum_dtype(logits))
    highest = lax.stop_gradient(jnp.max(logits, -1))
    if is_cut(logits, axis):
        highest = lax.pmax(highest, axis)
    total = summed(jnp.sum(jnp.exp(logits - highest[..., None]), -1), None, axis)
    target = summed(jnp.sum(jnp.where(_is_target(logits, targets, axis), logits, 0), -1), None, axis)
    norm = jnp.log(total) + highest
    return norm - target, norm


def _is_target(logits: jax.Array, targets: jax.Array, axis: str) -> jax.Array:
    """(..., V/T): True in the column of each target."""
    columns = jnp.arange(logits.shape[-1]) + first_index(logits.shape[-1], axis)
    return targets.astype(jnp.int32)[..., None] == columns


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _losses_by_chunks(chunk: int, axis: str, x: jax.Array, kernel: jax.Array, targets: jax.Array) -> jax.Array:
    """(..., L) nats; `x` and `kernel` vary over the same axes."""
    return _forward_by_chunks(chunk, axis, x, kernel, targets)[0]


def _forward_by_chunks(chunk, axis, x, kernel, targets):
    def one(part):
        return _loss_and_norm(part[0] @ kernel, part[1], axis)

    losses, norms = lax.map(one, (_chunks(x, chunk, x.ndim - 2), _chunks(targets, chunk, x.ndim - 2)))
    return _joined(losses, x.ndim - 2), (x, kernel, targets, norms)


def _backward_by_chunks(chunk, axis, kept, cotangent):
    x, kernel, targets, norms = kept
    dim, wide = x.ndim - 2, sum_dtype(kernel)
    over_rows = "{0}ld,{0}lv->dv".format("abcdefgh"[:dim])

    def one(total, part):
        x, targets, norms, cotangent = part
        logits = (x @ kernel).astype(cotangent.dtype)
        gap = jnp.exp(logits - norms[..., None]) - _is_target(logits, targets, axis)
        gap = (gap * cotangent[..., None]).astype(x.dtype)
        return total + jnp.einsum(over_rows, x, gap, preferred_element_type=wide), gap @ kernel.T

    total = collectives.vary(jnp.zeros(kernel.shape, wide), tuple(collectives.varying(kernel)))
    parts = (*(_chunks(one, chunk, dim) for one in (x, targets)), norms, _chunks(cotangent, chunk, dim))
    total, gradients = lax.scan(one, total, parts)
    return _joined(gradients, dim), total.astype(kernel.dtype), None


_losses_by_chunks.defvjp(_forward_by_chunks, _backward_by_chunks)


def _chunks(x: jax.Array, size: int, dim: int) -> jax.Array:
    """(..., L, ...) -> (L / size, ..., size, ...)."""
    return jnp.moveaxis(x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :]), dim, 0)


def _joined(parts: jax.Array, dim: int) -> jax.Array:
    """The inverse of `_chunks`."""
    return lax.collapse(jnp.moveaxis(parts, 0, dim), dim, dim + 2)
