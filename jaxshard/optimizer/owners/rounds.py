"""Runs each unit of several jobs on one device, its owner, inside `jax.shard_map`.

Owners work in rounds; in each, a device owns one unit. Before a round, one all-to-all brings the shards of the operands
to the owners; after it, another sends the shards of the results back. In a full round all units run the same program;
the last rounds may run a different program on each device.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxshard.base.types import AxisSizes, axes_in, in_parts, num_along, size_of, split_axes
from jaxshard.optimizer.owners.jobs import (
    Buffers,
    Job,
    Kind,
    Share,
    concatenated,
    packed,
    padded,
    sizes_of,
    unpacked,
    unstacked,
    widest,
)

PART = "the update: matrices are sent to their owners and back"  # in a step, for `programs.source`

_AT_ONCE = 2**22  # the most elements of matrices that one device works on at a time


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The rounds in which the devices along `axes` run some jobs."""

    jobs: Sequence[Job]
    axes: tuple[str, ...]
    sizes: AxisSizes

    @functools.cached_property
    def num_devices(self) -> int:
        """The number of owners."""
        return math.prod(self.sizes[axis] for axis in self.axes)

    def run(self, operands: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """The shards of each job's operands -> the shards of its results."""
        found: dict[int, list[jax.Array]] = {}
        left: list[tuple[list[int], Share, list[list[jax.Array]]]] = []
        for places in self._alike():
            share = packed([self.jobs[i] for i in places], [operands[i] for i in places])
            full = share.num_units - share.num_units % self.num_devices
            done = [self._full(share.part(0, full))] if full else []
            left.append((places, share.part(full, share.num_units), done))
        rest = self._mixed([share for _, share, _ in left])
        for (places, _, done), last in zip(left, rest, strict=True):
            pieces = [*done, *([last] if last else [])]
            outs = [jnp.concatenate(column) for column in zip(*pieces, strict=True)]
            start = 0
            for i in places:
                job, stop = self.jobs[i], start + self.jobs[i].num_units
                found[i] = [unstacked(x[start:stop], kind) for x, kind in zip(outs, job.outs, strict=True)]
                start = stop
        return [found[i] for i in range(len(self.jobs))]

    def _alike(self) -> list[list[int]]:
        """The indices of the jobs, those of one program together."""
        groups: list[list[int]] = []
        for i, job in enumerate(self.jobs):
            mine = next((some for some in groups if job.is_like(self.jobs[some[0]])), None)
            groups.append([i]) if mine is None else mine.append(i)
        return groups

    # Full rounds: all devices run the same program.

    def _full(self, share: Share) -> list[jax.Array]:
        """(units, ...) of each result, from units that fill all rounds."""
        job, num_rounds = share.job, share.num_units // self.num_devices
        sent = {key: self._exchanged(x.reshape(num_rounds, self.num_devices, -1)) for key, x in share.rows.items()}
        whole = {k: self._own(x.reshape(num_rounds, self.num_devices, *x.shape[1:])) for k, x in share.whole.items()}
        one = functools.partial(self._one, share)
        together = max(1, _AT_ONCE // max(1, sum(kind.size * self.num_devices for kind in job.ins if kind.is_cut)))
        if together >= num_rounds:
            made, everywhere = jax.vmap(one)((sent, whole))
        else:
            made, everywhere = lax.map(one, (sent, whole), batch_size=together if together > 1 else None)
        returned = {key: self._exchanged(x).reshape(share.num_units, -1) for key, x in made.items()}
        gathered = {key: self._gathered(x).reshape(share.num_units, -1) for key, x in everywhere.items()}
        return unpacked(job.outs, returned, gathered)

    # A round in which devices run different programs.

    def _mixed(self, shares: Sequence[Share]) -> list[list[jax.Array] | None]:
        """(units, ...) of each result, for each share; None for a share without units."""
        units = [(i, row) for i, share in enumerate(shares) for row in range(share.num_units)]
        units.sort(key=lambda unit: -sum(kind.size for kind in shares[unit[0]].job.ins))
        rows: dict[int, dict[int, list[jax.Array]]] = {}
        for start in range(0, len(units), self.num_devices):
            some = units[start : start + self.num_devices]
            for (i, row), outs in zip(some, self._round([shares[i].part(r, r + 1) for i, r in some]), strict=True):
                rows.setdefault(i, {})[row] = outs
        return [self._in_order(rows.get(i)) for i in range(len(shares))]

    def _in_order(self, rows: dict[int, list[jax.Array]] | None) -> list[jax.Array] | None:
        if rows is None:
            return None
        return [jnp.concatenate(column) for column in zip(*(rows[row] for row in sorted(rows)), strict=True)]

    def _round(self, units: Sequence[Share]) -> list[list[jax.Array]]:
        """The results of at most one unit for each device, (1, ...) each."""
        sent = {key: self._exchanged(x) for key, x in self._side_by_side([unit.rows for unit in units]).items()}
        widths, wide = (
            widest([sizes_of(unit.job.outs, cut=cut, times=self.num_devices if cut else 1) for unit in units])
            for cut in (True, False)
        )

        def branch(unit: Share, sent: Buffers) -> tuple[Buffers, Buffers]:
            mine = {key: sent[key][:, : x.shape[1]] for key, x in unit.rows.items()}
            made, everywhere = self._one(unit, (mine, {k: x[0] for k, x in unit.whole.items()}))
            each = {key: (self.num_devices, n // self.num_devices) for key, n in widths.items()}
            return (
                {key: padded(made.get(key), shape, key) for key, shape in each.items()},
                {key: padded(everywhere.get(key), (n,), key) for key, n in wide.items()},
            )

        different = list[Share]()
        which = list[int]()
        for unit in units:
            twin = next((n for n, one in enumerate(different) if one.job is unit.job and not unit.whole), None)
            which.append(len(different) if twin is None else twin)
            if twin is None:
                different.append(unit)
        branches = [functools.partial(branch, unit) for unit in different]
        shapes = jax.eval_shape(branches[0], sent)
        idle = [len(branches)] * (self.num_devices - len(units))
        branches += [lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)] * bool(idle)
        mine = jnp.asarray([*which, *idle])[lax.axis_index(self.axes)] if len(branches) > 1 else 0
        made, everywhere = lax.switch(mine, branches, sent)
        returned = {key: self._exchanged(x) for key, x in made.items()}
        gathered = {key: self._gathered(x) for key, x in everywhere.items()}
        return [
            unpacked(unit.job.outs, *({key: x[n : n + 1] for key, x in some.items()} for some in (returned, gathered)))
            for n, unit in enumerate(units)
        ]

    def _side_by_side(self, units: Sequence[Buffers]) -> Buffers:
        """(devices, elements): each unit's row at its owner's index, padded to the longest."""
        widths = widest([{key: x.shape[1] for key, x in rows.items()} for rows in units])
        found: Buffers = {}
        for key, width in widths.items():
            rows = [padded(unit[key][0] if key in unit else None, (width,), key) for unit in units]
            found[key] = jnp.stack([*rows, *[rows[0]] * (self.num_devices - len(units))])
        return found

    # One unit, on its owner.

    def _one(self, share: Share, given: tuple[Buffers, dict[int, jax.Array]]) -> tuple[Buffers, Buffers]:
        """A unit's operands, from all devices -> (its results by destination device, its results for all devices)."""
        job, (sent, whole) = share.job, given
        whole = whole | share.common
        start, operands = dict.fromkeys(sent, 0), list[jax.Array]()
        for k, kind in enumerate(job.ins):
            if k in whole:
                operands.append(whole[k])
                continue
            begin = start[kind.dtype]
            start[kind.dtype] += kind.size
            operands.append(self._assembled(sent[kind.dtype][:, begin : begin + kind.size], kind))
        outs = job.run(operands)
        made, everywhere = dict[np.dtype, list[jax.Array]](), dict[np.dtype, list[jax.Array]]()
        for x, kind in zip(outs, job.outs, strict=True):
            if kind.is_cut:
                made.setdefault(kind.dtype, []).append(self._in_parts(x, kind))
            else:
                everywhere.setdefault(kind.dtype, []).append(x.reshape(-1))
        return concatenated(made, 1), concatenated(everywhere, 0)

    def _assembled(self, parts: jax.Array, kind: Kind) -> jax.Array:
        """(devices, elements of a shard) -> the whole array."""
        each = self._finest(kind)
        x = parts.reshape((*(size_of(axis, self.sizes) for axis in each), *kind.part))
        left = list(each)
        for axis in each:  # devices along an axis that does not cut the array have equal shards
            if all(axis not in self._along(kind, dim) for dim in range(len(kind.part))):
                x = lax.index_in_dim(x, 0, left.index(axis), keepdims=False)
                left.remove(axis)
        order, shape = list[int](), list[int]()
        for dim, size in enumerate(kind.part):
            axes = self._along(kind, dim)
            order += [*(left.index(axis) for axis in axes), len(left) + dim]
            shape.append(size * num_along(axes, self.sizes))
        return x.transpose(order).reshape(shape)

    def _in_parts(self, x: jax.Array, kind: Kind) -> jax.Array:
        """The inverse of `_assembled`: (devices, elements of a shard)."""
        shape, at = list[int](), dict[str, int]()
        dims: list[int] = []
        for dim, size in enumerate(kind.part):
            for axis in self._along(kind, dim):
                at[axis] = len(shape)
                shape.append(size_of(axis, self.sizes))
            dims.append(len(shape))
            shape.append(size)
        each = self._finest(kind)
        x = x.reshape(shape).transpose([*(at[axis] for axis in each if axis in at), *dims])
        for place, axis in enumerate(each):
            if axis not in at:
                x = jnp.broadcast_to(
                    jnp.expand_dims(x, place), (*x.shape[:place], size_of(axis, self.sizes), *x.shape[place:])
                )
        return x.reshape(self.num_devices, -1)

    def _finest(self, kind: Kind) -> tuple[str, ...]:
        """The axes, with its parts in place of each whose parts cut the array."""
        return in_parts(self.axes, split_axes(kind.spec), self.sizes)

    def _along(self, kind: Kind, dim: int) -> tuple[str, ...]:
        """The axes and parts that cut the array along a dim."""
        return axes_in(kind.spec[dim]) if dim < len(kind.spec) else ()

    # Between devices.

    def _exchanged(self, x: jax.Array) -> jax.Array:
        """(..., devices, elements) to send -> the same shape, received from each device."""
        return lax.all_to_all(x, self.axes, split_axis=x.ndim - 2, concat_axis=x.ndim - 2, tiled=True)

    def _gathered(self, x: jax.Array) -> jax.Array:
        """(..., elements) of each device -> (..., devices, elements)."""
        return lax.all_gather(x, self.axes, axis=x.ndim - 1)

    def _own(self, x: jax.Array) -> jax.Array:
        """(rounds, devices, ...) -> (rounds, ...), this device's slice."""
        return lax.dynamic_index_in_dim(x, lax.axis_index(self.axes), 1, keepdims=False)
