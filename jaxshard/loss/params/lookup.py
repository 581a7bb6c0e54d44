"""Lookups in cut tables: each device looks up all devices' ids in its shard, and devices exchange what they found.

With T ids on each of N devices, of a table cut along its features each device exchanges T rows, and their gradients,
in an all-to-all. Of one cut along its rows it finds some of N * T rows: a reduce-scatter gives each device its T, and
an all-gather returns their gradients, N * T rows. Gathering a table of V rows and scattering its gradient would move V
rows. No device computes the whole gradient.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard import collectives
from jaxshard.base.tree import sum_dtype
from jaxshard.base.types import AxisSizes, Dims, Equation
from jaxshard.programs.primitives import GATHER


@dataclasses.dataclass(frozen=True)
class Lookup:
    """The parameters of a `lax.gather` of rows of a table."""

    numbers: lax.GatherDimensionNumbers
    mode: lax.GatherScatterMode
    fill_value: Any

    @classmethod
    def of(cls, eqn: Equation) -> "Lookup":
        """The lookup of a gather equation."""
        return cls(*(eqn.params[name] for name in ("dimension_numbers", "mode", "fill_value")))

    def rows(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """(V, ...), (B, ..., 1) -> (B, ..., ...), the rows of the table; under `jax.vmap`, (B, ..., 1, ...)."""
        sizes = (1, *table.shape[1:])
        return lax.gather(table, ids, self.numbers, sizes, mode=self.mode, fill_value=self.fill_value)

    def filled(self, rows: jax.Array, ids: jax.Array, num_rows: int) -> jax.Array:
        """The rows of these ids, those that a table of `num_rows` does not have filled as `rows` fills them."""
        if self.mode != lax.GatherScatterMode.FILL_OR_DROP:
            return rows
        fill = jnp.zeros(1, rows.dtype).at[1].get(mode="fill", fill_value=self.fill_value)
        return jnp.where(_beside(rows, (ids[..., 0] >= 0) & (ids[..., 0] < num_rows)), rows, fill)


@contextlib.contextmanager
def in_global_view(sizes: AxisSizes) -> Iterator[None]:
    """Within it, programs are of all rows, and mesh axes have these sizes."""
    token = _global_sizes.set(sizes)
    try:
        yield
    finally:
        _global_sizes.reset(token)


_global_sizes: contextvars.ContextVar[AxisSizes | None] = contextvars.ContextVar("global_sizes", default=None)


@dataclasses.dataclass
class AsIf:
    """Within it, programs are of `traced` rows, a prime, but tables are exchanged as they would be for `meant` rows.

    Attributes:
      limits: for each table whose ids depend on the rows, the most rows for which it is exchanged.
    """

    traced: int
    meant: int
    limits: set[int] = dataclasses.field(default_factory=set)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Traces as if there were `meant` rows."""
        token = _as_if.set(self)
        try:
            yield
        finally:
            _as_if.reset(token)

    def holds_for(self, rows: int) -> bool:
        """Whether each table is exchanged for `rows` rows if and only if it was within."""
        return all((rows <= limit) == (self.meant <= limit) for limit in self.limits)

    def pays(self, ids: Sequence[int], cost: int, saved: int) -> bool:
        """Whether `cost` is at most `saved`, where it grows with ids of this shape."""
        power = sum(size > 0 and size % self.traced == 0 for size in ids)
        if not power:
            return cost <= saved
        limit = 1 + int(self.traced * (saved / cost) ** (1 / power))
        while cost * limit**power > saved * self.traced**power:
            limit -= 1
        self.limits.add(limit)
        return self.meant <= limit


_as_if: contextvars.ContextVar[AsIf | None] = contextvars.ContextVar("as_if", default=None)


def is_worth_it(eqn: Equation, position: int, dims: Dims, *, asked: bool) -> bool:
    """Whether an equation looks rows up in its operand at `position`, a table cut by `dims`, and should exchange rows.

    It should if that moves less than half of the bytes, or if `lookup` asked for it.
    """
    if eqn.primitive.name != GATHER or position != 0 or len(dims) != 1:
        return False
    table, ids = (v.aval for v in eqn.invars)
    ((_, axes),) = dims
    if not _takes_rows(eqn) or ids.ndim < 2:
        return False
    sizes = _global_sizes.get()
    num = math.prod(sizes[axis] if sizes else collectives.axis_size(axis) for axis in axes)
    of_all = ids.size if sizes else num * ids.size
    row = table.size // table.shape[0] * table.dtype.itemsize
    looked_up = of_all // ids.shape[-1]
    moved = looked_up if is_cut_by_rows(table, dims) else looked_up // num
    cost, saved = 2 * (moved * row + of_all * ids.dtype.itemsize), table.shape[0] * row
    as_if = _as_if.get()
    return asked or (as_if.pays(ids.shape, cost, saved) if as_if else cost <= saved)


def is_cut_by_rows(table: jax.Array, dims: Dims) -> bool:
    """Whether a table that is cut along one dim is cut along its rows, not its features."""
    return dims[0][0] == -table.ndim


def _takes_rows(eqn: Equation) -> bool:
    """Whether a gather takes whole rows, as `table[ids]` does, or `table[i]` under `jax.vmap`.

    In the latter, ids have one start per dim, all but the first clipped to 0, and each row keeps a dim of size 1.
    """
    table, ids = (v.aval for v in eqn.invars)
    numbers, starts = eqn.params["dimension_numbers"], eqn.params["dimension_numbers"].start_index_map
    one_row = tuple(eqn.params["slice_sizes"]) == (1, *table.shape[1:])
    in_order = tuple(starts) == (0,) or (starts[0] == 0 and eqn.params["mode"] == lax.GatherScatterMode.CLIP)
    collapsed, batch = tuple(numbers.collapsed_slice_dims), ids.ndim - 1
    rows_last = tuple(numbers.offset_dims) == tuple(range(batch, batch + table.ndim - len(collapsed)))
    return one_row and in_order and rows_last and collapsed in ((), (0,)) and not numbers.operand_batching_dims


def exchanged(local: jax.Array, ids: jax.Array, lookup: Lookup, dims: Dims, is_shard: bool) -> jax.Array:
    """The rows of this device's ids.

    Args:
      local: this device's shard of the table (`is_shard`), or the whole table.
      ids: (..., 1) or (..., 1 + more starts), as for `lax.gather`.
    """
    return _exchanged(local, ids, _all(ids, dims), lookup, dims) if is_shard else lookup.rows(local, ids)


def _exchanged(local: jax.Array, ids: jax.Array, of_all: jax.Array, lookup: Lookup, dims: Dims) -> jax.Array:
    if is_cut_by_rows(local, dims):
        return _from_owners(local, ids, of_all, lookup, dims)
    return _to_own_rows(lookup.rows(local, of_all), dims)


def looked_up(
    local: jax.Array, stand_in: jax.Array, ids: jax.Array, lookup: Lookup, dims: Dims, is_shard: bool
) -> jax.Array:
    """As `exchanged`; this device's shard of the table's gradient comes out as the gradient of `stand_in`.

    `stand_in`, the gradient slot, is zeros of the shard's shape, in the dtype in which gradients are reduced.
    """
    return _looked_up(local, stand_in, ids, _all(ids, dims), lookup, dims, is_shard)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _looked_up(local, stand_in, ids, of_all, lookup, dims, is_shard):
    del stand_in
    return _exchanged(local, ids, of_all, lookup, dims) if is_shard else lookup.rows(local, ids)


def _forward(local, stand_in, ids, of_all, lookup, dims, is_shard):
    return _looked_up(local, stand_in, ids, of_all, lookup, dims, is_shard), (local, stand_in, ids, of_all)


def _backward(lookup, dims, is_shard, kept, cotangent):
    local, stand_in, ids, of_all = kept
    wide = sum_dtype(cotangent)
    zeros = collectives.vary(jnp.zeros(stand_in.shape, wide), tuple(collectives.varying(cotangent)))
    by_rows = is_cut_by_rows(stand_in, dims)
    rows = (_all if by_rows else _to_own_features)(cotangent, dims).astype(wide)
    find = functools.partial(_own, lookup=lookup, dims=dims) if by_rows else lookup.rows
    (scattered,) = jax.vjp(lambda table: find(table, of_all), zeros)[1](rows)
    if is_shard:
        of_local = scattered.astype(local.dtype)
    else:
        (of_local,) = jax.vjp(lambda table: lookup.rows(table, ids), local)[1](cotangent)
    return of_local, scattered.astype(stand_in.dtype), None, None


_looked_up.defvjp(_forward, _backward)


def _all(ids: jax.Array, dims: Dims) -> jax.Array:
    """(B, ...) -> (N * B, ...), the ids of all devices, or what each of them has for its ids."""
    return lax.all_gather(ids, _axes(dims), axis=0, tiled=True)


def _from_owners(local: jax.Array, ids: jax.Array, of_all: jax.Array, lookup: Lookup, dims: Dims) -> jax.Array:
    """The rows of this device's ids, from a table of which each device has some rows."""
    found = _own(local, of_all, lookup, dims)
    rows = lax.psum_scatter(found, _axes(dims), scatter_dimension=0, tiled=True)
    return lookup.filled(rows, ids, local.shape[0] * _num_parts(dims))


def _own(local: jax.Array, ids: jax.Array, lookup: Lookup, dims: Dims) -> jax.Array:
    """The rows of these ids that this device has, and zeros for the others."""
    held, num_rows = local.shape[0], local.shape[0] * _num_parts(dims)
    given = ids[..., :1].astype(jnp.promote_types(ids.dtype, jnp.int32))
    fills = lookup.mode == lax.GatherScatterMode.FILL_OR_DROP
    here = (given if fills else jnp.clip(given, 0, num_rows - 1)) - lax.axis_index(_axes(dims)) * held
    is_own = (here >= 0) & (here < held)
    starts = jnp.concatenate([jnp.where(is_own, here, 0), ids[..., 1:].astype(here.dtype)], -1)
    rows = lookup.rows(local, starts)
    if lookup.mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS:  # XLA clips other ids, and drops their gradients
        is_kept = (given >= 0) & (given < num_rows)
        rows = jnp.where(_beside(rows, is_kept[..., 0]), rows, lax.stop_gradient(rows))
    return jnp.where(_beside(rows, is_own[..., 0]), rows, jnp.zeros((), rows.dtype))


def _beside(rows: jax.Array, of_ids: jax.Array) -> jax.Array:
    """An array with a number for each id, with as many dims as the array of their rows."""
    return of_ids.reshape(*of_ids.shape, *(1,) * (rows.ndim - of_ids.ndim))


def _num_parts(dims: Dims) -> int:
    return math.prod(collectives.axis_size(axis) for axis in _axes(dims))


def _to_own_rows(x: jax.Array, dims: Dims) -> jax.Array:
    """(N * B, ..., D/N), this device's features of all rows -> (B, ..., D), this device's rows."""
    ((dim, _),) = dims
    return lax.all_to_all(x, _axes(dims), split_axis=0, concat_axis=x.ndim + dim, tiled=True)


def _to_own_features(x: jax.Array, dims: Dims) -> jax.Array:
    """(B, ..., D), this device's rows -> (N * B, ..., D/N), this device's features of all rows."""
    ((dim, _),) = dims
    return lax.all_to_all(x, _axes(dims), split_axis=x.ndim + dim, concat_axis=0, tiled=True)


def _axes(dims: Dims) -> Sequence[str]:
    ((_, axes),) = dims
    return tuple(axes)
