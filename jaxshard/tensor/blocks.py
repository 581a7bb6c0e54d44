"""Layers with weights sharded over an axis, experts on several devices, sharded or replicated sequences."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard import collectives

TENSOR = "tensor"


def axis_size(axis: str = TENSOR) -> int:
    """The number of devices that share each layer; 1 outside of `shard_map`, or if the mesh has no such axis."""
    return collectives.axis_size(axis)


def per_device(what: str, count: int, axis: str = TENSOR) -> int:
    """`count` / T: for example, the number of attention heads that this device computes.

    Args:
      what: names the things in the message: "heads".
      count: their number in the full model.
      axis: the mesh axis that they are sharded over.

    Raises:
      ValueError: T does not divide `count`.

    >>> per_device("heads", 6)
    6
    """
    size = axis_size(axis)
    if count % size:
        raise ValueError(
            f"{what} {count} / {axis} {size} = {count / size:.4g} is not an integer: change one of them, for example "
            f"{what} to {-(-count // size) * size}"
        )
    return count // size


def column_parallel(x: jax.Array, kernels: Any, *, sequence: int | None = None, axis: str = TENSOR) -> Any:
    """`x @ kernel`, each device computing its columns; the first half of a pair that `row_parallel` ends.

    Args:
      x: (..., D), replicated; with `sequence`, sharded along that dim.
      kernels: (D, F/T), sharded by `specs` over its last dim, or a pytree of such kernels, which share one all-reduce
        (q, k and v, say).
      sequence: the dim along which `x` is sharded; it is gathered here.

    Returns:
      (..., F/T) for each kernel.

    Raises:
      TypeError: `x` or a kernel is not sharded as described.
    """
    for kernel in jax.tree.leaves(kernels):
        check_cut("column_parallel: the kernel", kernel, axis)
    x = entered("column_parallel", x, sequence, axis)
    return jax.tree.map(lambda kernel: x @ kernel, kernels)


def row_parallel(x: jax.Array, kernel: jax.Array, *, sequence: int | None = None, axis: str = TENSOR) -> jax.Array:
    """`x @ kernel`, each device multiplying its rows; sums over devices here, once.

    Args:
      x: (..., F/T), from `column_parallel`, perhaps after elementwise operations.
      kernel: (F/T, D), sharded by `specs` over its first dim. Add a bias (D,), replicated, to the result.
      sequence: the dim along which to shard the result.

    Returns:
      (..., D), replicated, or sharded along `sequence`.

    Raises:
      TypeError: `x` or the kernel is not sharded over the axis: their product would be summed T times.
      ValueError: T does not divide the dim `sequence`.
    """
    check_cut("row_parallel: x", x, axis)
    check_cut("row_parallel: the kernel", kernel, axis)
    return summed(x @ kernel, sequence, axis)


def split_sequence(x: jax.Array, dim: int, *, axis: str = TENSOR) -> jax.Array:
    """(..., L, ...), replicated -> (..., L/T, ...), this device's part of the dim, in the order of devices.

    Raises:
      TypeError: `x` is already sharded, or partial.
      ValueError: T does not divide the dim.
    """
    if axis_size(axis) == 1:
        return x
    _check_whole("split_sequence: x", x, axis)
    part = per_device("sequence length", x.shape[dim], axis)
    return lax.dynamic_slice_in_dim(collectives.vary(x, (axis,)), lax.axis_index(axis) * part, part, dim % x.ndim)


def join_sequence(x: jax.Array, dim: int, *, axis: str = TENSOR) -> jax.Array:
    """(..., L/T, ...) -> (..., L, ...), replicated; an `x` that is already replicated stays so."""
    if not is_cut(x, axis):
        return x
    return lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True, to="invarying")


def sum_shards(x: jax.Array, *, axis: str | tuple[str, ...] = TENSOR) -> jax.Array:
    """Sums a value that each device computed from its parameter shard; one of a replicated parameter is unchanged.

    For terms of the loss that read parameters: `lax.psum` would count replicated ones T times.

    Args:
      x: a sum over the elements of a parameter, such as `jnp.sum(w * w)`.
      axis: the axes that parameters are sharded over, such as `("tensor", "pipeline")`.

    Returns:
      The same shape, the same on every device of these axes.

    >>> sum_shards(jnp.float32(3))
    Array(3., dtype=float32)
    """
    axes = (axis,) if isinstance(axis, str) else axis
    for one in axes:
        x = summed(x, None, one)
    return x


# Experts.


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
    """A mixture of experts: sends each token to the devices of its experts, and the results back.

    `axis` must split the batch: "data", or another of the `data_axes`. `specs` shard the experts over it:
    [("experts/", P("data"))]; their gradients are then neither summed nor sharded over it. Tokens and results each take
    one all-to-all (Lepikhin et al. 2020, GShard, section 3.2).

    Each row gives each expert at most `capacity` tokens: first choices before second ones, then in order. Further
    tokens get 0 from this expert. So whether a token is dropped depends only on its row, not on the mesh.

    Args:
      fn: one expert: (its params, tokens (T, D)) -> (T, F).
      experts: params of all experts, stacked on the first dim, E; each of N devices has E/N of them.
      x: (B, L, D), rows of tokens.
      ids: (B, L, K), the experts of each token, from 0 to E - 1, each at most once.
      weights: (B, L, K), the factor of each expert's result.
      capacity: the most tokens of a row for an expert; None: L, so none is dropped, for E/K times the products.

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
    """(L, K) -> (L, K), each token's slot among those that its row sends; past the last slot if it is dropped."""
    by_choice = ids.T.reshape(-1)
    one_hot = jax.nn.one_hot(by_choice, num_experts, dtype=jnp.int32)
    place = jnp.sum((jnp.cumsum(one_hot, 0) - 1) * one_hot, -1)
    slots = jnp.where(place < capacity, by_choice * capacity + place, num_experts * capacity)
    return slots.reshape(ids.T.shape).T


def _put(x: jax.Array, slots: jax.Array, num_slots: int) -> jax.Array:
    """(L, D), (L, K) -> (slots, D), each token in its slots; 0 in empty ones."""
    empty = jnp.zeros((num_slots, x.shape[-1]), x.dtype)
    repeated = jnp.broadcast_to(x[:, None], (*slots.shape, x.shape[-1]))
    return empty.at[slots].add(repeated, mode="drop")


def _taken(made: jax.Array, slots: jax.Array, weights: jax.Array) -> jax.Array:
    """(slots, F), (L, K), (L, K) -> (L, F)."""
    each = made.at[slots].get(mode="fill", fill_value=0)
    return jnp.sum(each * weights[..., None].astype(made.dtype), -2)


# Checks whether a value is cut over an axis, and sums.


def entered(who: str, x: jax.Array, sequence: int | None, axis: str) -> jax.Array:
    """`x`, whole on every device, with a type whose gradient is summed (or scattered) over the axis once."""
    if axis_size(axis) == 1:
        return x
    if sequence is None:
        _check_whole(f"{who}: x", x, axis)
        return collectives.vary(x, (axis,))
    check_cut(f"{who}: x, with sequence={sequence},", x, axis)
    return lax.all_gather(x, axis, axis=sequence % x.ndim, tiled=True)


def summed(x: jax.Array, sequence: int | None, axis: str) -> jax.Array:
    """`x` summed over the axis, or, with `sequence`, this device's part of the sum; a whole `x` is unchanged."""
    if not is_cut(x, axis):
        return x
    if sequence is None:
        return lax.psum(x, axis)
    per_device("sequence length", x.shape[sequence], axis)
    return lax.psum_scatter(x, axis, scatter_dimension=sequence % x.ndim, tiled=True)


def first_index(count: int, axis: str) -> Any:
    """The index of this device's first element in the whole dim."""
    return lax.axis_index(axis) * count if axis_size(axis) > 1 else 0


def is_cut(x: jax.Array, axis: str) -> bool:
    """Whether the type of `x` varies over the axis; also for size 1, where a sum changes only the type."""
    return axis in collectives.varying(x)


def check_cut(what: str, x: jax.Array, axis: str) -> None:
    if axis_size(axis) > 1 and axis not in _varying(x, axis):
        raise TypeError(
            f"{what} of shape {x.shape} is replicated over {axis!r}, but must be sharded over it: name {axis!r} in the "
            "specs of its parameter"
        )


def _check_whole(what: str, x: jax.Array, axis: str) -> None:
    if axis_size(axis) > 1 and axis in _varying(x, axis):
        raise TypeError(
            f"{what} of shape {x.shape} differs over {axis!r}, but must be replicated: end the previous pair with "
            "row_parallel; or, if it is sharded along its sequence, pass sequence=dim"
        )


def _varying(x: jax.Array, axis: str) -> frozenset[str]:
    if not collectives.types_are_checked(axis):
        raise TypeError(
            "jaxshard.tensor: under shard_map(check_vma=False) it is unknown which values are sharded over the axis, "
            "and gradients would be wrong: use check_vma=True, the default"
        )
    return collectives.varying(x)
