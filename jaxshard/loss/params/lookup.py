"""Lookups in tables cut along their features: each device looks up all ids in its shard, and devices exchange rows.

With T ids per device, each device exchanges T rows, and their gradients, in an all-to-all; gathering a table of V rows
and scattering its gradient would move V rows. No device computes the whole gradient.
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
from jaxshard.base.axes import Dims
from jaxshard.base.tree import sum_dtype
from jaxshard.base.types import AxisSizes, Equation
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


@contextlib.contextmanager
def in_global_view(sizes: AxisSizes) -> Iterator[None]:
    """Within it, programs are of all rows, and mesh axes have these sizes."""
    token = _global_sizes.set(sizes)
    try:
        yield
    finally:
        _global_sizes.reset(token)


_global_sizes: contextvars.ContextVar[AxisSizes | None] = contextvars.ContextVar("global_sizes", default=None)


def is_worth_it(eqn: Equation, position: int, dims: Dims, *, asked: bool) -> bool:
    """Whether an equation looks rows up in its operand at `position`, a table cut by `dims`, and should exchange rows.

    It should if that moves less than half of the bytes, or if `lookup` asked for it.
    """
    if eqn.primitive.name != GATHER or position != 0 or len(dims) != 1:
        return False
    table, ids = (v.aval for v in eqn.invars)
    ((dim, axes),) = dims
    if not _takes_rows(eqn) or ids.ndim < 2 or dim == -table.ndim:
        return False
    sizes = _global_sizes.get()
    num = math.prod(sizes[axis] if sizes else collectives.axis_size(axis) for axis in axes)
    of_all = ids.size if sizes else num * ids.size
    row = table.size // table.shape[0] * table.dtype.itemsize
    own = of_all // ids.shape[-1] // num  # ids that each device looks up
    return asked or 2 * (own * row + of_all * ids.dtype.itemsize) <= table.shape[0] * row


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
    if not is_shard:
        return lookup.rows(local, ids)
    return _to_own_rows(lookup.rows(local, _all(ids, dims)), dims)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def looked_up(
    local: jax.Array, stand_in: jax.Array, ids: jax.Array, lookup: Lookup, dims: Dims, is_shard: bool
) -> jax.Array:
    """As `exchanged`; this device's shard of the table's gradient comes out as the gradient of `stand_in`.

    `stand_in`, the gradient slot, is zeros of the shard's shape, in the dtype in which gradients are reduced.
    """
    del stand_in
    return exchanged(local, ids, lookup, dims, is_shard)


def _forward(local, stand_in, ids, lookup, dims, is_shard):
    return looked_up(local, stand_in, ids, lookup, dims, is_shard), (local, stand_in, ids)


def _backward(lookup, dims, is_shard, kept, cotangent):
    local, stand_in, ids = kept
    wide = sum_dtype(cotangent)
    zeros = collectives.vary(jnp.zeros(stand_in.shape, wide), tuple(collectives.varying(cotangent)))
    rows = _to_own_features(cotangent, dims).astype(wide)
    (scattered,) = jax.vjp(lambda table: lookup.rows(table, _all(ids, dims)), zeros)[1](rows)
    if is_shard:
        of_local = scattered.astype(local.dtype)
    else:
        (of_local,) = jax.vjp(lambda table: lookup.rows(table, ids), local)[1](cotangent)
    return of_local, scattered.astype(stand_in.dtype), None


looked_up.defvjp(_forward, _backward)


def _all(ids: jax.Array, dims: Dims) -> jax.Array:
    """(B, ...) -> (N * B, ...), the ids of all devices."""
    return lax.all_gather(ids, _axes(dims), axis=0, tiled=True)


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
