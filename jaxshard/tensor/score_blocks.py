"""Attention block by block: this device's queries with the keys and values of one device after another.

Shapes: a device's positions are n parts of l neighbouring ones (one part, or two in zigzag order). Queries are (m, B,
K, G, c, D), for K heads of keys with G heads of queries each, in m = n l / c chunks of c neighbouring positions; keys
and values are one array, (n, B, K, l, D + E), so that one collective moves both.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.base.tree import sum_dtype

Index: TypeAlias = jax.Array | int


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Which blocks of scores a device computes, and how keys and values reach it.

    Attributes:
      axis, size: the mesh axis, and the number of devices along it, C.
      num: the number of parts of neighbouring positions that a device has, n; 2 only if `causal`.
      chunks: the number of chunks of a part's queries; these meet keys one after another.
      gathers: all-gather keys and values; else send them around.
    """

    axis: str
    size: int
    causal: bool
    num: int
    chunks: int
    scale: float
    gathers: bool

    def owner(self, step: Index) -> Index:
        """The device whose keys and values are here at a step: its own at step 0, then the previous device's."""
        return (lax.axis_index(self.axis) - step) % self.size if self.size > 1 else 0

    def shifted(self, x: jax.Array) -> jax.Array:
        """What the previous device has."""
        return lax.ppermute(x, self.axis, [(i, (i + 1) % self.size) for i in range(self.size)])


class Pair(NamedTuple):
    """Queries and a part of the keys that meet.

    Attributes:
      of_queries, of_keys: their indices; first those of a part of the queries, then (`_in_chunks`) of a chunk.
      is_diagonal: the part of the queries has the positions of the keys.
      first: the place of the chunk in its part.
    """

    of_queries: Index
    of_keys: Index
    is_diagonal: bool = False
    first: Index = 0


class Running(NamedTuple):
    """A softmax over the keys so far: sums of values and of weights, relative to the highest score."""

    values: jax.Array  # (m, B, K, G, c, E)
    weights: jax.Array  # without E
    highest: jax.Array


class Grads(NamedTuple):
    """The gradients of a device's queries, and of the keys and values that are here."""

    q: jax.Array
    kv: jax.Array


class Place(NamedTuple):  # of a step, in a ring
    is_first: bool = False
    is_last: bool = False


Visit: TypeAlias = Callable[[Any, jax.Array, Index, Pair], Any]
"""(what is carried, the keys and values that are here, their device, the parts that meet) -> what is carried on."""


def attention(how: Blocks, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """(B, L, H, D), (B, L, K, D), (B, L, K, E), (B, L) -> (B, L, H, E)."""
    rows, length, num_keys = k.shape[:3]
    dtype = jnp.promote_types(k.dtype, v.dtype)
    chunks = how.num * how.chunks
    q = q.reshape(rows, chunks, length // chunks, num_keys, -1, q.shape[-1]).transpose(1, 0, 3, 4, 2, 5)
    kv = jnp.concatenate([k.astype(dtype), v.astype(dtype)], -1)
    kv = kv.reshape(rows, how.num, length // how.num, num_keys, -1).transpose(1, 0, 3, 2, 4)
    if segment_ids is not None:  # all devices': they are few bytes
        segment_ids = segment_ids.reshape(rows, how.num, -1).swapaxes(0, 1)[None]
        segment_ids = lax.all_gather(segment_ids, how.axis, tiled=True) if how.size > 1 else segment_ids
    out: jax.Array = _attended(how, q, kv, segment_ids)
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(rows, length, -1, out.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attended(how: Blocks, q: jax.Array, kv: jax.Array, segments: jax.Array | None) -> jax.Array:
    """(m, B, K, G, c, E), in the dtype of `q`; `segments` are (C, n, B, l)."""
    return _forward(how, q, kv, segments)[0]


def _forward(how, q, kv, segments):
    def meet(running: Running, kv: jax.Array, owner: Index, pair: Pair) -> Running:
        scores = _scores(how, q, kv, segments, owner, pair)
        return _added(running, scores, _part(kv, pair.of_keys)[..., q.shape[-1] :], pair.of_queries)

    visit = _in_chunks(how, meet, q.shape[-2])
    running = visit_own(how, visit, _nothing(q, kv.shape[-1] - q.shape[-1]), kv)
    if how.size > 1:
        running = (_forward_gathered if how.gathers else _forward_in_ring)(how, visit, running, kv)
    out = (running.values / running.weights[..., None]).astype(q.dtype)
    return out, (q, kv, segments, out, jnp.log(running.weights) + running.highest)


def _backward(how, kept, cotangent):
    q, kv, segments, out, norms = kept
    kv, cotangent = lax.optimization_barrier((kv, cotangent))  # else XLA keeps what the forward pass has received
    wide, dim = norms.dtype, q.shape[-1]
    from_out = jnp.sum(cotangent.astype(wide) * out.astype(wide), -1)

    def meet(grads: Grads, kv: jax.Array, owner: Index, pair: Pair) -> Grads:
        keys, values = jnp.split(_part(kv, pair.of_keys), [dim], -1)
        mine, queries = _part(cotangent, pair.of_queries), _part(q, pair.of_queries)
        weights = jnp.exp(_scores(how, q, kv, segments, owner, pair) - _part(norms, pair.of_queries)[..., None])
        product = functools.partial(jnp.einsum, preferred_element_type=wide)
        slopes = product("bkgqe,bkse->bkgqs", mine, values) - _part(from_out, pair.of_queries)[..., None]
        slopes = (weights * slopes * how.scale).astype(q.dtype)
        of_keys = product("bkgqs,bkgqd->bksd", slopes, queries)
        of_values = product("bkgqs,bkgqe->bkse", weights.astype(mine.dtype), mine)
        of_queries, of_kv = product("bkgqs,bksd->bkgqd", slopes, keys), jnp.concatenate([of_keys, of_values], -1)
        return Grads(_plus(grads.q, of_queries, pair.of_queries), _plus(grads.kv, of_kv, pair.of_keys))

    visit = _in_chunks(how, meet, q.shape[-2])
    grads = visit_own(how, visit, Grads(jnp.zeros_like(q, wide), jnp.zeros_like(kv, wide)), kv)
    if how.size > 1:
        grads = (_backward_gathered if how.gathers else _backward_in_ring)(how, visit, grads, kv)
    return grads.q.astype(q.dtype), grads.kv.astype(kv.dtype), None


_attended.defvjp(_forward, _backward)


# Which blocks a device computes.


def visit_own(how: Blocks, visit: Visit, carry: Any, kv: jax.Array) -> Any:
    """`carry` after the queries have met this device's own keys. Each then has seen a key: itself."""
    owner = how.owner(0)
    for part in range(how.num):
        carry = visit(carry, kv, owner, Pair(part, part, how.causal))
    return visit(carry, kv, owner, Pair(1, 0)) if how.num == 2 else carry


def visit_others(how: Blocks, visit: Visit, carry: Any, kv: jax.Array, owner: Index) -> Any:
    """`carry` after the queries have met another device's keys.

    In zigzag order the second part of the queries is later than the first part of the keys, and of the other two pairs
    that may meet, one does: the first parts if the keys' device comes before, else the second parts.
    """
    if not how.causal:
        return visit(carry, kv, owner, Pair(0, 0))
    mine = lax.axis_index(how.axis)
    if how.num == 1:
        return lax.cond(owner < mine, lambda carry: visit(carry, kv, owner, Pair(0, 0)), lambda carry: carry, carry)
    later = jnp.where(owner > mine, 1, 0)
    return visit(visit(carry, kv, owner, Pair(1, 0)), kv, owner, Pair(later, later))


def _in_chunks(how: Blocks, visit: Visit, size: int) -> Visit:
    """`visit`, with each pair's queries in chunks of `size`, one after another."""
    if how.chunks == 1:
        return visit

    def visits(carry: Any, kv: jax.Array, owner: Index, pair: Pair) -> Any:
        def one(i: jax.Array, carry: Any) -> Any:
            chunk = pair._replace(of_queries=pair.of_queries * how.chunks + i, first=i * size)
            return visit(carry, kv, owner, chunk)

        return lax.fori_loop(0, how.chunks, one, carry)

    return visits


# How keys and values reach a device.


def _forward_gathered(how: Blocks, visit: Visit, running: Running, kv: jax.Array) -> Running:
    everywhere = lax.all_gather(kv, how.axis)

    def step(running: Running, i: jax.Array) -> tuple[Running, None]:
        owner = how.owner(i)
        return visit_others(how, visit, running, _part(everywhere, owner), owner), None

    return lax.scan(step, running, jnp.arange(1, how.size))[0]


def _backward_gathered(how: Blocks, visit: Visit, grads: Grads, kv: jax.Array) -> Grads:
    everywhere = lax.all_gather(kv, how.axis)
    of_all = jnp.zeros_like(everywhere, grads.kv.dtype)
    of_all = lax.dynamic_update_index_in_dim(of_all, grads.kv, how.owner(0), 0)

    def step(state: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        of_queries, of_all = state
        owner, nothing = how.owner(i), jnp.zeros_like(grads.kv)
        found = visit_others(how, visit, Grads(of_queries, nothing), _part(everywhere, owner), owner)
        return (found.q, lax.dynamic_update_index_in_dim(of_all, found.kv, owner, 0)), None

    (of_queries, of_all), _ = lax.scan(step, (grads.q, of_all), jnp.arange(1, how.size))
    return Grads(of_queries, lax.psum_scatter(of_all, how.axis))


def _forward_in_ring(how: Blocks, visit: Visit, running: Running, kv: jax.Array) -> Running:
    def step(state: tuple[Running, jax.Array], i: Index, place: Place) -> tuple[Running, jax.Array]:
        running, kv = state
        following = kv if place.is_last else how.shifted(kv)  # on its way while this device computes
        return visit_others(how, visit, running, kv, how.owner(i)), following

    return _in_steps(how, step, (running, how.shifted(kv)))[0]


def _backward_in_ring(how: Blocks, visit: Visit, grads: Grads, kv: jax.Array) -> Grads:
    """The gradients of keys and values follow these around the ring, and end where they belong."""

    def step(state: tuple[jax.Array, ...], i: Index, place: Place) -> tuple[jax.Array, ...]:
        of_queries, kv, of_kv = state
        following = kv if place.is_last else how.shifted(kv)
        arrived = of_kv if place.is_first else how.shifted(of_kv)
        found = visit_others(how, visit, Grads(of_queries, jnp.zeros_like(of_kv)), kv, how.owner(i))
        return found.q, following, arrived + found.kv

    first = (grads.q, how.shifted(kv), jnp.zeros_like(grads.kv))
    of_queries, _, of_kv = _in_steps(how, step, first)
    return Grads(of_queries, grads.kv + how.shifted(of_kv))


def _in_steps(how: Blocks, step: Callable[[Any, Index, Place], Any], state: Any) -> Any:
    """`state` after the steps from 1 to C - 1; all but the first and the last are a loop."""
    last = how.size - 1
    state = step(state, 1, Place(is_first=True, is_last=last == 1))
    if last > 2:
        state = lax.scan(lambda state, i: (step(state, i, Place()), None), state, jnp.arange(2, last))[0]
    return step(state, last, Place(is_last=True)) if last > 1 else state


# One block.


def _scores(
    how: Blocks, q: jax.Array, kv: jax.Array, segments: jax.Array | None, owner: Index, pair: Pair
) -> jax.Array:
    """(B, K, G, c, l); -inf where a query does not see a key."""
    queries, keys = _part(q, pair.of_queries), _part(kv, pair.of_keys)[..., : q.shape[-1]]
    scores = how.scale * jnp.einsum("bkgqd,bksd->bkgqs", queries, keys, preferred_element_type=sum_dtype(q))
    if pair.is_diagonal:
        is_past = jnp.arange(scores.shape[-1]) <= pair.first + jnp.arange(scores.shape[-2])[:, None]
        scores = jnp.where(is_past, scores, -jnp.inf)
    if segments is None:
        return scores
    own = _part(segments, how.owner(0)).swapaxes(0, 1).reshape(q.shape[1], q.shape[0], -1)  # (B, m, c)
    mine = lax.dynamic_index_in_dim(own, pair.of_queries, 1, keepdims=False)
    theirs = _part(_part(segments, owner), pair.of_keys)
    return jnp.where((mine[:, :, None] == theirs[:, None])[:, None, None], scores, -jnp.inf)


def _added(running: Running, scores: jax.Array, values: jax.Array, of_queries: Index) -> Running:
    """The running softmax after one more block of scores; each query has seen a key, or does now."""
    before = Running(*(_part(x, of_queries) for x in running))
    highest = jnp.maximum(before.highest, jnp.max(scores, -1))
    weights, fade = jnp.exp(scores - highest[..., None]), jnp.exp(before.highest - highest)
    more = jnp.einsum("bkgqs,bkse->bkgqe", weights.astype(values.dtype), values, preferred_element_type=scores.dtype)
    found = Running(before.values * fade[..., None] + more, before.weights * fade + jnp.sum(weights, -1), highest)
    put = functools.partial(lax.dynamic_update_index_in_dim, index=of_queries, axis=0)
    return Running(*(put(x, new) for x, new in zip(running, found, strict=True)))


def _nothing(q: jax.Array, dim: int) -> Running:
    values = jnp.repeat(jnp.zeros_like(q[..., :1], sum_dtype(q)), dim, -1)
    return Running(values, values[..., 0], values[..., 0] - jnp.inf)


def _part(x: jax.Array, index: Index) -> jax.Array:
    return lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _plus(total: jax.Array, more: jax.Array, index: Index) -> jax.Array:
    return lax.dynamic_update_index_in_dim(total, _part(total, index) + more, index, 0)
