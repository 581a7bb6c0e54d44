"""Building blocks of tensor parallelism: layers whose weights are cut over a mesh axis, for use inside a loss function.

Weights come as this device's shards, as the optimizer's `specs` cut them. Activations between the blocks are whole on
every device of the axis (Shoeybi et al. 2020, Megatron-LM, section 3), or with `sequence=dim` cut along that dim, so
that norms and residuals take 1/T of the memory (Korthikanti et al. 2022, section 4.2.2); the wire bytes are the same.

Gradients need no sums by hand: JAX's types say which are needed, and autodiff makes each once. Outside of `shard_map`,
or if the mesh has no such axis, every block is the plain operation, so that one model serves every strategy.

Shapes: T devices on the axis, D features, F features cut T ways, V the vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard import collectives
from jaxshard.base.tree import sum_dtype

__all__ = [
    "axis_size",
    "column_parallel",
    "expert_parallel",
    "join_sequence",
    "per_device",
    "row_parallel",
    "split_sequence",
    "sum_shards",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_linear_cross_entropy",
]

TENSOR = "tensor"


def axis_size(axis: str = TENSOR) -> int:
    """The number of devices that share each layer: 1 outside of `shard_map`, and where the mesh has no such axis."""
    return collectives.axis_size(axis)


def per_device(what: str, count: int, axis: str = TENSOR) -> int:
    """`count` / T: the number of attention heads, say, that this device computes.

    Args:
      what: names the things in the message: "heads".
      count: the number of them in the whole model.
      axis: the mesh axis that they are cut over.

    Raises:
      ValueError: T does not divide `count`.

    >>> per_device("heads", 6)
    6
    """
    size = axis_size(axis)
    if count % size:
        raise ValueError(
            f"{what} {count} / {axis} {size} = {count / size:.4g} is no whole number: change one of them, {what} to "
            f"{-(-count // size) * size}, say"
        )
    return count // size


def column_parallel(x: jax.Array, kernels: Any, *, sequence: int | None = None, axis: str = TENSOR) -> Any:
    """`x @ kernel`, each device computing its columns; the first half of a pair that `row_parallel` ends.

    Args:
      x: (..., D), whole on every device; with `sequence`, cut along that dim.
      kernels: (D, F/T), cut by `specs` over its last dim, or a pytree of such kernels: q, k and v, say, then share one
        all-reduce.
      sequence: the dim along which `x` is cut; it is gathered here.

    Returns:
      (..., F/T) for each kernel.

    Raises:
      TypeError: `x` or a kernel is not cut as said.
    """
    for kernel in jax.tree.leaves(kernels):
        _check_cut("column_parallel: the kernel", kernel, axis)
    x = _entered("column_parallel", x, sequence, axis)
    return jax.tree.map(lambda kernel: x @ kernel, kernels)


def row_parallel(x: jax.Array, kernel: jax.Array, *, sequence: int | None = None, axis: str = TENSOR) -> jax.Array:
    """`x @ kernel`, each device multiplying its rows; the sum over devices is made here, once.

    Args:
      x: (..., F/T), as `column_parallel` makes it, or computed from that element by element.
      kernel: (F/T, D), cut by `specs` over its first dim. Add a bias (D,), whole, to the result.
      sequence: the dim along which the result is to be cut.

    Returns:
      (..., D), whole on every device, or cut along `sequence`.

    Raises:
      TypeError: `x` or the kernel is not cut over the axis: their product would be summed T times.
      ValueError: T does not divide the dim `sequence`.
    """
    _check_cut("row_parallel: x", x, axis)
    _check_cut("row_parallel: the kernel", kernel, axis)
    return _summed(x @ kernel, sequence, axis)


def vocab_parallel_embedding(
    tokens: jax.Array, table: jax.Array, *, sequence: int | None = None, axis: str = TENSOR
) -> jax.Array:
    """`table[tokens]`, each device holding the rows of its part of the vocabulary.

    Args:
      tokens: (...) whole numbers below V, the same on every device.
      table: (V/T, D), cut by `specs` over its first dim.
      sequence: the dim along which the result is to be cut.

    Returns:
      (..., D), whole on every device, or cut along `sequence`.

    Raises:
      TypeError: the table is not cut over the axis.
      ValueError: T does not divide the dim `sequence`.
    """
    _check_cut("vocab_parallel_embedding: the table", table, axis)
    rows = table.shape[0]
    mine = tokens.astype(jnp.int32) - _first(rows, axis)  # uint8 cannot hold 256, a number of rows
    here = (mine >= 0) & (mine < rows)
    found = jnp.where(here[..., None], table[jnp.where(here, mine, 0)], 0)
    return _summed(found, sequence, axis)


def vocab_parallel_cross_entropy(logits: jax.Array, targets: jax.Array, *, axis: str = TENSOR) -> jax.Array:
    """-log softmax(logits)[target]; no device holds the whole logits.

    Args:
      logits: (..., V/T), as `column_parallel` makes them.
      targets: (...) whole numbers below V, the same on every device.

    Returns:
      (...) nats, float32 at least, the same on every device.

    Raises:
      TypeError: the logits are not cut over the axis.
    """
    _check_cut("vocab_parallel_cross_entropy: the logits", logits, axis)
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
    """-log softmax(x @ kernel)[target], a chunk of positions at a time: no more logits than those of a chunk exist.

    The backward pass makes them again. It sums the kernel's gradient over chunks in float32 at least.

    Args:
      x: (..., L, D), as for `column_parallel`.
      kernel: (D, V/T), cut by `specs` over its last dim.
      targets: (..., L) whole numbers below V, the same on every device.
      chunk: positions of each row whose logits exist at once; it divides L. 0: all.
      sequence: the dim along which `x` is cut; it is gathered here.

    Returns:
      (..., L) nats, float32 at least, the same on every device.

    Raises:
      TypeError: `x` or the kernel is not cut as said.
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
    _check_cut(f"{who}: the kernel", kernel, axis)
    x = _entered(who, x, sequence, axis)
    axes = tuple(collectives.varying(x) | collectives.varying(kernel) | collectives.varying(targets))
    return _losses_by_chunks(chunk, axis, collectives.vary(x, axes), collectives.vary(kernel, axes), targets)


def expert_parallel(
    fn: Callable[[Any, jax.Array], jax.Array],
    experts: Any,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    *,
    axis: str,
    capacity: int | None = None,
) -> jax.Array:
    """A mixture of experts: each token goes to its experts, on whatever device these are, and comes back.

    `axis` splits the batch, as "data" does, or one more of the `data_axes`. `specs` cut the experts over it:
    [("experts/", P("data"))]. Their gradients are then neither summed nor cut over it. Tokens go there and back by an
    all-to-all each (Lepikhin et al. 2020, GShard, section 3.2).

    Each row gives each expert at most `capacity` tokens: first choices before second ones, then in order. Further
    tokens get 0 from this expert. So what is dropped depends on the row alone, not on the mesh.

    Args:
      fn: one expert: (its params, tokens (T, D)) -> (T, F).
      experts: params of all experts, stacked on the first dim, E; on each of N devices E/N of them.
      x: (B, L, D), rows of tokens.
      ids: (B, L, K), the experts of each token, from 0 to E - 1, each at most once.
      weights: (B, L, K), what multiplies each expert's result.
      capacity: tokens of a row for an expert; None: L, so that none is dropped, at the cost of E/K times the products.

    Returns:
      (B, L, F), the weighted sum over each token's experts.

    Raises:
      ValueError: shapes do not fit, or `capacity` is below 1.

    >>> x, ids = jnp.ones((1, 3, 2)), jnp.array([[[0], [1], [1]]])
    >>> scale = jnp.array([10.0, 20.0])
    >>> once = jnp.ones((1, 3, 1))
    >>> expert_parallel(jnp.multiply, scale, x, ids, once, axis="data", capacity=1)[0, :, 0].tolist()
    [10.0, 20.0, 0.0]
    """
    num, mine = axis_size(axis), _num_stacked(experts)
    if x.ndim != 3 or ids.shape[:2] != x.shape[:2] or ids.ndim != 3 or weights.shape != ids.shape:
        raise ValueError(
            f"expert_parallel: x {x.shape}, ids {ids.shape}, weights {weights.shape} must be (B, L, D), (B, L, K) and "
            "(B, L, K)"
        )
    if capacity is not None and capacity < 1:
        raise ValueError(f"expert_parallel: capacity {capacity} must be 1 or more; None drops no token")
    most = min(capacity or x.shape[1], x.shape[1])
    slots = jax.vmap(functools.partial(_slots, num_experts=num * mine, capacity=most))(ids)
    sent = jax.vmap(functools.partial(_put, num_slots=num * mine * most))(x, slots)
    sent = sent.reshape(x.shape[0], num * mine, most, x.shape[2])
    here = lax.all_to_all(sent, axis, split_axis=1, concat_axis=0, tiled=True) if num > 1 else sent
    tokens = jnp.moveaxis(here, 1, 0)
    made = jax.vmap(fn)(experts, tokens.reshape(mine, -1, x.shape[2]))
    made = jnp.moveaxis(made.reshape(*tokens.shape[:-1], made.shape[-1]), 0, 1)
    back = lax.all_to_all(made, axis, split_axis=0, concat_axis=1, tiled=True) if num > 1 else made
    return jax.vmap(_taken)(back.reshape(x.shape[0], num * mine * most, -1), slots, weights)


def _num_stacked(experts: Any) -> int:
    sizes = {x.shape[:1] for x in jax.tree.leaves(experts)}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(f"expert_parallel: experts must be stacked on one first dim, got {sorted(sizes)}")
    return sizes.pop()[0]


def _slots(ids: jax.Array, num_experts: int, capacity: int) -> jax.Array:
    """(L, K) -> (L, K), the place of each token among those that its row sends; past the last where it is dropped."""
    by_choice = ids.T.reshape(-1)
    one_hot = jax.nn.one_hot(by_choice, num_experts, dtype=jnp.int32)
    place = jnp.sum((jnp.cumsum(one_hot, 0) - 1) * one_hot, -1)
    slots = jnp.where(place < capacity, by_choice * capacity + place, num_experts * capacity)
    return slots.reshape(ids.T.shape).T


def _put(x: jax.Array, slots: jax.Array, num_slots: int) -> jax.Array:
    """(L, D), (L, K) -> (slots, D), each token at its places; 0 where there is none."""
    empty = jnp.zeros((num_slots, x.shape[-1]), x.dtype)
    repeated = jnp.broadcast_to(x[:, None], (*slots.shape, x.shape[-1]))
    return empty.at[slots].add(repeated, mode="drop")


def _taken(made: jax.Array, slots: jax.Array, weights: jax.Array) -> jax.Array:
    """(slots, F), (L, K), (L, K) -> (L, F)."""
    each = made.at[slots].get(mode="fill", fill_value=0)
    return jnp.sum(each * weights[..., None].astype(made.dtype), -2)


def split_sequence(x: jax.Array, dim: int, *, axis: str = TENSOR) -> jax.Array:
    """(..., L, ...) whole on every device -> (..., L/T, ...), this device's part of the dim, from the first device on.

    Raises:
      TypeError: `x` is cut, or partial, already.
      ValueError: T does not divide the dim.
    """
    if axis_size(axis) == 1:
        return x
    _check_whole("split_sequence: x", x, axis)
    part = per_device("sequence length", x.shape[dim], axis)
    return lax.dynamic_slice_in_dim(collectives.vary(x, (axis,)), lax.axis_index(axis) * part, part, dim % x.ndim)


def join_sequence(x: jax.Array, dim: int, *, axis: str = TENSOR) -> jax.Array:
    """(..., L/T, ...) -> (..., L, ...), whole on every device; an `x` that is whole already stays so."""
    if not _is_cut(x, axis):
        return x
    return lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True, to="invarying")


def sum_shards(x: jax.Array, *, axis: str | tuple[str, ...] = TENSOR) -> jax.Array:
    """Sums a value that each device made of its shard of a parameter; one made of a whole parameter stays as it is.

    For terms of the loss that read parameters: `lax.psum` would count whole ones T times.

    Args:
      x: a sum over the elements of a parameter, such as `jnp.sum(w * w)`.
      axis: the axes that parameters are cut over, `("tensor", "pipeline")`, say.

    Returns:
      The same shape, the same on every device of these axes.

    >>> sum_shards(jnp.float32(3))
    Array(3., dtype=float32)
    """
    axes = (axis,) if isinstance(axis, str) else axis
    for one in axes:
        x = _summed(x, None, one)
    return x


def _loss_and_norm(logits: jax.Array, targets: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """(...) nats, and the logarithm of the sum of the exponentials of all logits."""
    logits = logits.astype(sum_dtype(logits))
    highest = lax.stop_gradient(jnp.max(logits, -1))
    if _is_cut(logits, axis):
        highest = lax.pmax(highest, axis)
    total = _summed(jnp.sum(jnp.exp(logits - highest[..., None]), -1), None, axis)
    target = _summed(jnp.sum(jnp.where(_is_target(logits, targets, axis), logits, 0), -1), None, axis)
    norm = jnp.log(total) + highest
    return norm - target, norm


def _is_target(logits: jax.Array, targets: jax.Array, axis: str) -> jax.Array:
    """(..., V/T): True in the column of each target."""
    columns = jnp.arange(logits.shape[-1]) + _first(logits.shape[-1], axis)
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
    summed = "{0}ld,{0}lv->dv".format("abcdefgh"[:dim])

    def one(total, part):
        x, targets, norms, cotangent = part
        logits = (x @ kernel).astype(cotangent.dtype)
        gap = jnp.exp(logits - norms[..., None]) - _is_target(logits, targets, axis)
        gap = (gap * cotangent[..., None]).astype(x.dtype)
        return total + jnp.einsum(summed, x, gap, preferred_element_type=wide), gap @ kernel.T

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


def _entered(who: str, x: jax.Array, sequence: int | None, axis: str) -> jax.Array:
    """`x`, whole on every device, with a type whose gradient is summed (or scattered) over the axis once."""
    if axis_size(axis) == 1:
        return x
    if sequence is None:
        _check_whole(f"{who}: x", x, axis)
        return collectives.vary(x, (axis,))
    _check_cut(f"{who}: x, with sequence={sequence},", x, axis)
    return lax.all_gather(x, axis, axis=sequence % x.ndim, tiled=True)


def _summed(x: jax.Array, sequence: int | None, axis: str) -> jax.Array:
    if not _is_cut(x, axis):
        return x
    if sequence is None:
        return lax.psum(x, axis)
    per_device("sequence length", x.shape[sequence], axis)
    return lax.psum_scatter(x, axis, scatter_dimension=sequence % x.ndim, tiled=True)


def _first(count: int, axis: str) -> Any:
    """The index, in the whole dim, of this device's first element."""
    return lax.axis_index(axis) * count if axis_size(axis) > 1 else 0


def _is_cut(x: jax.Array, axis: str) -> bool:
    """Whether the type of `x` varies over the axis; on one device too, where a sum changes the type alone."""
    return axis in collectives.varying(x)


def _check_cut(what: str, x: jax.Array, axis: str) -> None:
    if axis_size(axis) > 1 and axis not in _varying(x, axis):
        raise TypeError(
            f"{what} of shape {x.shape} is whole on every device of {axis!r}, and should be cut over it: name {axis!r} "
            "in the specs of the parameter that it is made of"
        )


def _check_whole(what: str, x: jax.Array, axis: str) -> None:
    if axis_size(axis) > 1 and axis in _varying(x, axis):
        raise TypeError(
            f"{what} of shape {x.shape} differs over {axis!r}, and should be whole: end the pair before it with "
            "row_parallel; or, if it is cut along its sequence, say so with sequence=dim"
        )


def _varying(x: jax.Array, axis: str) -> frozenset[str]:
    if not collectives.types_are_checked(axis):
        raise TypeError(
            "jaxshard.tensor: under shard_map(check_vma=False) nothing says which values are cut over the axis, and "
            "gradients come out wrong: use check_vma=True, the default"
        )
    return collectives.varying(x)
