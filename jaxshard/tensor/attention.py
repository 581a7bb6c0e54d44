"""Attention over sequences that are cut along an axis: each device has a part of the positions of its rows.

Both functions compute the same: a device's queries meet the keys and values of one device after another, with a running
softmax (Milakov & Gimelshein 2018), and the backward pass computes the scores again (Dao et al. 2022, algorithm 4). So
a device never holds more than one block of scores.
"""

from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard import collectives
from jaxshard.tensor import score_blocks
from jaxshard.tensor.score_blocks import Blocks

Order: TypeAlias = Literal["contiguous", "zigzag"]
CONTEXT = "context"


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str = CONTEXT,
    causal: bool = True,
    segment_ids: jax.Array | None = None,
    order: Order = "contiguous",
    chunk: int = 0,
    scale: float | None = None,
) -> jax.Array:
    """Softmax attention; keys and values go around the devices in a ring, while each computes (Liu et al. 2023).

    A device holds the keys and values of two devices at a time. It sends (C-1)/C of all keys and values once in the
    forward pass, and in the backward pass again, with their gradients (float32 at least). Both passes need no other
    device's queries.

    Args:
      q: (B, L, H, D): this device's L positions of B rows. All C devices of the axis have the same L.
      k, v: (B, L, K, D) and (B, L, K, E), the same positions; K divides H (grouped queries: each K serves H/K heads).
      axis: the mesh axis along which sequences are cut. Outside of `shard_map`, or if the mesh has no such axis, a
        device has complete sequences.
      causal: a position sees itself and earlier ones only.
      segment_ids: (B, L) integers, for packed rows: positions see only those with the same number.
      order: which positions a device has. "contiguous": the i-th device the i-th part. "zigzag": parts i and 2C-1-i of
        2C, as `zigzag` arranges them, so that all devices compute equally much if `causal`.
      chunk: the number of queries that meet keys at a time; it divides L, or L/2 in zigzag order. 0: all. A device
        holds scores of (B, H, chunk, L), or (B, H, chunk, L/2) in zigzag order.
      scale: of the scores; None: 1 / sqrt(D).

    Returns:
      (B, L, H, E), in the dtype of `q`. Sums and the softmax are float32 at least.

    Raises:
      ValueError: shapes do not fit; L is odd and `order` is "zigzag"; `chunk` does not divide.
      TypeError: q, k or v is the same on all devices of the axis.

    >>> q = k = v = jnp.ones((1, 4, 2, 8))
    >>> ring_attention(q, k, v).shape
    (1, 4, 2, 8)
    """
    return _attention("ring_attention", q, k, v, segment_ids, axis, causal, order, chunk, scale, gathers=False)


def gathered_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str = CONTEXT,
    causal: bool = True,
    segment_ids: jax.Array | None = None,
    order: Order = "contiguous",
    chunk: int = 0,
    scale: float | None = None,
) -> jax.Array:
    """As `ring_attention`, with all keys and values gathered at once (Llama Team 2024, section 3.3.2).

    One all-gather, and in the backward pass another one and a reduce-scatter of the gradients (float32 at least): the
    bytes of the ring in fewer messages, but a device holds all C parts of keys and values, and of their gradients.

    Args, returns, raises: as for `ring_attention`.

    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 8))
    >>> bool(jnp.allclose(gathered_attention(q, k, v), ring_attention(q, k, v)))
    True
    """
    return _attention("gathered_attention", q, k, v, segment_ids, axis, causal, order, chunk, scale, gathers=True)


def positions(length: int, *, axis: str = CONTEXT, order: Order = "contiguous") -> jax.Array:
    """(L,) int32: where this device's L positions are in the complete sequence; for rotary embeddings, say.

    Args:
      length: L.
      axis, order: as for `ring_attention`.

    Raises:
      ValueError: L is odd and `order` is "zigzag", or `order` is neither.

    >>> positions(4)
    Array([0, 1, 2, 3], dtype=int32)
    """
    _check_order("positions", length, axis, order)
    size = collectives.axis_size(axis)
    if size == 1:
        return jnp.arange(length, dtype=jnp.int32)
    index, num = jax.lax.axis_index(axis), _num_parts(order)
    starts = (jnp.array([index]) if num == 1 else jnp.stack([index, 2 * size - 1 - index])) * (length // num)
    return (starts[:, None] + jnp.arange(length // num)).reshape(length).astype(jnp.int32)


def zigzag(tree: Any, num: int, *, dim: int = 1, inverse: bool = False) -> Any:
    """Arranges complete sequences so that, cut into `num` parts, each device gets parts i and 2 num - 1 - i of 2 num.

    Then causal attention takes all devices equally long. Call it on the batch before `shard_batch`; make next tokens
    (labels) and segment ids before. With `num` 1 nothing moves.

    Args:
      tree: arrays of (rows, S, ...), NumPy's or JAX's; 2 num divides S.
      num: the number of devices along the axis, C.
      dim: of the sequence.
      inverse: back into the usual order, for results per position.

    Raises:
      ValueError: 2 num does not divide a leaf's dim.

    >>> zigzag(np.arange(8)[None], 2).tolist()
    [[0, 1, 6, 7, 2, 3, 4, 5]]
    """

    def arranged(x: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        if np.ndim(x) <= dim or x.shape[dim] % (2 * num):
            raise ValueError(
                f"zigzag: dim {dim} of shape {np.shape(x)} must be divisible by {2 * num}, two parts for each of {num} "
                "devices: pad the sequences, or give other leaves apart"
            )
        parts = [part for i in range(num) for part in (i, 2 * num - 1 - i)]
        index = np.argsort(parts) if inverse else np.array(parts)
        split = x.reshape(*x.shape[:dim], 2 * num, -1, *x.shape[dim + 1 :])
        return split[(slice(None),) * dim + (index,)].reshape(x.shape)

    return jax.tree.map(arranged, tree)


def _num_parts(order: Order) -> int:
    """The number of parts of neighbouring positions that a device has."""
    return 2 if order == "zigzag" else 1


def _attention(
    who: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    axis: str,
    causal: bool,
    order: Order,
    chunk: int,
    scale: float | None,
    *,
    gathers: bool,
) -> jax.Array:
    _check_shapes(who, q, k, v, segment_ids)
    _check_order(who, q.shape[1], axis, order)
    _check_cut(who, axis, q=q, k=k, v=v)
    size = collectives.axis_size(axis)
    num = _num_parts(order) if size > 1 and causal else 1  # else the order of positions does not matter
    part = q.shape[1] // num
    if chunk < 0 or (chunk and part % chunk):
        raise ValueError(f"{who}: chunk {chunk} does not divide the {part} neighbouring positions of a device")
    chunks, scale = part // max(chunk or part, 1), float(q.shape[-1] ** -0.5 if scale is None else scale)
    how = Blocks(axis, size, causal, num, chunks, scale, gathers)
    q, k, v, segment_ids = _varied(axis, q, k, v, segment_ids)
    return score_blocks.attention(how, collectives.part_of_rows(q, axis), k, v, segment_ids)


def _varied(axis: str, *arrays: jax.Array | None) -> Any:
    """The arrays with types that vary over the same axes, so that loops keep them; a gradient is then summed once."""
    axes = frozenset().union(*(collectives.varying(x) for x in arrays if x is not None))
    return [x if x is None else collectives.vary(x, sorted(axes)) for x in arrays]


# Checks.


def _check_shapes(who: str, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> None:
    fits = q.ndim == k.ndim == v.ndim == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]
    fits = fits and q.shape[3] == k.shape[3] and k.shape[2] == v.shape[2] and q.shape[2] % max(k.shape[2], 1) == 0
    if not fits:
        raise ValueError(
            f"{who}: q {q.shape}, k {k.shape}, v {v.shape} must be (B, L, H, D), (B, L, K, D) and (B, L, K, E), where "
            "K divides H"
        )
    if segment_ids is None:
        return
    if segment_ids.shape != q.shape[:2] or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"{who}: segment_ids {segment_ids.dtype}{list(segment_ids.shape)} must be integers of (B, L), here "
            f"{q.shape[:2]}"
        )


def _check_order(who: str, length: int, axis: str, order: Order) -> None:
    if order not in get_args(Order):
        raise ValueError(f'{who}: order {order!r:.80} must be "contiguous" or "zigzag"')
    if order == "zigzag" and length % 2 and collectives.axis_size(axis) > 1:
        raise ValueError(
            f'{who}: with order="zigzag" each device has two parts of equal length, and here {length} positions: pad '
            f"the sequences to a multiple of {2 * collectives.axis_size(axis)}"
        )


def _check_cut(who: str, axis: str, **named: jax.Array) -> None:
    """Refuses, where types tell, what is the same on all devices of the axis."""
    if collectives.axis_size(axis) == 1 or not collectives.types_are_checked(axis):
        return
    for name, x in named.items():
        if axis not in collectives.varying(x):
            raise TypeError(
                f"{who}: {name} of shape {x.shape} is the same on all devices of {axis!r}, but must be each device's "
                f"own positions: cut the batch over {axis!r} (batch_specs=, or in_specs of your shard_map)"
            )
