"""Has each of several jobs done whole on one device, its owner; all this runs inside `jax.shard_map`.

Owners work in rounds, in which each device owns one unit of work. Before a round, one all-to-all brings the parts of
the operands together at the owners; after it, another takes the parts of the results home. In a full round all units
run the same program; what is left over of all programs shares the last rounds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxshard.base.axes import axes_in
from jaxshard.base.types import AxisSizes, Jaxpr
from jaxshard.programs.paired import same

_AT_ONCE = 2**22  # the elements of the matrices that one device works on at the same time

Buffers: TypeAlias = dict[np.dtype, jax.Array]  # flat arrays by dtype, all of the same leading dims


class Kind(NamedTuple):
    """An operand or result of one unit: the shape of a device's part of it, where it lies, and its dtype.

    `stacked`: a job has a stack of these on each device, one for each of its units. One that is not stacked may be the
    same `value` for several jobs.
    """

    part: tuple[int, ...]
    spec: P
    dtype: np.dtype
    stacked: bool
    value: int

    @property
    def size(self) -> int:
        """The elements of a part."""
        return math.prod(self.part)

    @property
    def is_cut(self) -> bool:
        """Whether devices have different parts of it."""
        return any(axes_in(entry) for entry in self.spec)


@dataclasses.dataclass(frozen=True)
class Job:
    """`num_units` units of one program, each for one device; stacks of operands have one part for each.

    `run` computes one unit, from operands whose stacks are of one; jobs of equal programs compute the same.
    """

    program: Jaxpr
    run: Callable[[Sequence[jax.Array]], list[jax.Array]]
    num_units: int
    ins: tuple[Kind, ...]
    outs: tuple[Kind, ...]

    def is_like(self, other: "Job") -> bool:
        """Whether a round can have units of both."""
        plain = [[kind._replace(stacked=False, value=0) for kind in (*job.ins, *job.outs)] for job in (self, other)]
        several = [any(kind.stacked for kind in job.ins) for job in (self, other)]
        return plain[0] == plain[1] and several[0] == several[1] and same(self.program, other.program)


class _Share(NamedTuple):
    """Some units of one program, on their way: a row of each buffer for each unit, and what every device has whole."""

    job: Job
    num_units: int
    rows: Buffers
    whole: dict[int, jax.Array]  # by place among the operands, a row for each unit
    common: dict[int, jax.Array]  # the same, of one value for all

    def part(self, start: int, stop: int) -> "_Share":
        """Its units from `start` to `stop`."""
        rows = {key: x[start:stop] for key, x in self.rows.items()}
        whole = {k: x[start:stop] for k, x in self.whole.items()}
        return _Share(self.job, stop - start, rows, whole, self.common)


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The rounds in which the devices along `axes` do some jobs."""

    jobs: Sequence[Job]
    axes: tuple[str, ...]
    sizes: AxisSizes

    @functools.cached_property
    def num_devices(self) -> int:
        """The number of owners."""
        return math.prod(self.sizes[axis] for axis in self.axes)

    def run(self, operands: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """The parts of each job's operands -> the parts of its results."""
        found: dict[int, list[jax.Array]] = {}
        left: list[tuple[list[int], _Share, list[list[jax.Array]]]] = []
        for places in self._alike():
            share = _packed([self.jobs[i] for i in places], [operands[i] for i in places])
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
                found[i] = [_unstacked(x[start:stop], kind) for x, kind in zip(outs, job.outs, strict=True)]
                start = stop
        return [found[i] for i in range(len(self.jobs))]

    def _alike(self) -> list[list[int]]:
        """The places of the jobs, those of one program together."""
        groups: list[list[int]] = []
        for i, job in enumerate(self.jobs):
            mine = next((some for some in groups if job.is_like(self.jobs[some[0]])), None)
            groups.append([i]) if mine is None else mine.append(i)
        return groups

    # A full round, and those after it: all devices run the same program.

    def _full(self, share: _Share) -> list[jax.Array]:
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
        home = {key: self._exchanged(x).reshape(share.num_units, -1) for key, x in made.items()}
        gathered = {key: self._gathered(x).reshape(share.num_units, -1) for key, x in everywhere.items()}
        return _unpacked(job.outs, home, gathered)

    # A round in which devices run different programs.

    def _mixed(self, shares: Sequence[_Share]) -> list[list[jax.Array] | None]:
        """(units, ...) of each result of each share, together; None for one without units."""
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

    def _round(self, units: Sequence[_Share]) -> list[list[jax.Array]]:
        """The results of at most one unit for each device, (1, ...) each."""
        sent = {key: self._exchanged(x) for key, x in self._side_by_side([unit.rows for unit in units]).items()}
        widths, wide = (
            _widths([_sizes(unit.job.outs, cut=cut, times=self.num_devices if cut else 1) for unit in units])
            for cut in (True, False)
        )

        def branch(unit: _Share, sent: Buffers) -> tuple[Buffers, Buffers]:
            mine = {key: sent[key][:, : x.shape[1]] for key, x in unit.rows.items()}
            made, everywhere = self._one(unit, (mine, {k: x[0] for k, x in unit.whole.items()}))
            each = {key: (self.num_devices, n // self.num_devices) for key, n in widths.items()}
            return (
                {key: _padded(made.get(key), shape, key) for key, shape in each.items()},
                {key: _padded(everywhere.get(key), (n,), key) for key, n in wide.items()},
            )

        different = list[_Share]()
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
        home = {key: self._exchanged(x) for key, x in made.items()}
        gathered = {key: self._gathered(x) for key, x in everywhere.items()}
        return [
            _unpacked(unit.job.outs, *({key: x[n : n + 1] for key, x in some.items()} for some in (home, gathered)))
            for n, unit in enumerate(units)
        ]

    def _side_by_side(self, units: Sequence[Buffers]) -> Buffers:
        """(devices, elements): the row of each unit in front of its owner, filled up to the longest."""
        widths = _widths([{key: x.shape[1] for key, x in rows.items()} for rows in units])
        found: Buffers = {}
        for key, width in widths.items():
            rows = [_padded(unit[key][0] if key in unit else None, (width,), key) for unit in units]
            found[key] = jnp.stack([*rows, *[rows[0]] * (self.num_devices - len(units))])
        return found

    # One unit, on its owner.

    def _one(self, share: _Share, given: tuple[Buffers, dict[int, jax.Array]]) -> tuple[Buffers, Buffers]:
        """A unit's operands, from all devices -> its results: by the device they go to; those for all devices."""
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
        return _concatenated(made, 1), _concatenated(everywhere, 0)

    def _assembled(self, parts: jax.Array, kind: Kind) -> jax.Array:
        """(devices, elements of a part) -> the whole array."""
        x = parts.reshape((*(self.sizes[axis] for axis in self.axes), *kind.part))
        left = list(self.axes)
        for axis in self.axes:  # devices along an axis that does not cut it have equal parts
            if all(axis not in axes_in(entry) for entry in kind.spec):
                x = lax.index_in_dim(x, 0, left.index(axis), keepdims=False)
                left.remove(axis)
        order, shape = list[int](), list[int]()
        for dim, size in enumerate(kind.part):
            axes = axes_in(kind.spec[dim]) if dim < len(kind.spec) else ()
            order += [*(left.index(axis) for axis in axes), len(left) + dim]
            shape.append(size * math.prod(self.sizes[axis] for axis in axes))
        return x.transpose(order).reshape(shape)

    def _in_parts(self, x: jax.Array, kind: Kind) -> jax.Array:
        """The inverse: (devices, elements of a part)."""
        shape, at = list[int](), dict[str, int]()
        dims: list[int] = []
        for dim, size in enumerate(kind.part):
            for axis in axes_in(kind.spec[dim]) if dim < len(kind.spec) else ():
                at[axis] = len(shape)
                shape.append(self.sizes[axis])
            dims.append(len(shape))
            shape.append(size)
        x = x.reshape(shape).transpose([*(at[axis] for axis in self.axes if axis in at), *dims])
        for place, axis in enumerate(self.axes):
            if axis not in at:
                x = jnp.broadcast_to(jnp.expand_dims(x, place), (*x.shape[:place], self.sizes[axis], *x.shape[place:]))
        return x.reshape(self.num_devices, -1)

    # Between devices.

    def _exchanged(self, x: jax.Array) -> jax.Array:
        """(..., devices, elements), for each device -> the same, from each device."""
        return lax.all_to_all(x, self.axes, split_axis=x.ndim - 2, concat_axis=x.ndim - 2, tiled=True)

    def _gathered(self, x: jax.Array) -> jax.Array:
        """(..., elements) of each device -> (..., devices, elements)."""
        return lax.all_gather(x, self.axes, axis=x.ndim - 1)

    def _own(self, x: jax.Array) -> jax.Array:
        """(rounds, devices, ...) -> (rounds, ...), this device's."""
        return lax.dynamic_index_in_dim(x, lax.axis_index(self.axes), 1, keepdims=False)


def _packed(jobs: Sequence[Job], operands: Sequence[Sequence[jax.Array]]) -> _Share:
    """The units of jobs of one program, in order, from the parts of their operands on this device."""
    rows, whole, common = dict[np.dtype, list[jax.Array]](), dict[int, jax.Array](), dict[int, jax.Array]()
    for k, kind in enumerate(jobs[0].ins):
        if not kind.is_cut and len({job.ins[k].value for job in jobs}) == 1 and not kind.stacked:
            common[k] = operands[0][k]
            continue
        parts = jnp.concatenate(
            [_for_units(some[k], job, job.ins[k]) for some, job in zip(operands, jobs, strict=True)]
        )
        if kind.is_cut:
            rows.setdefault(kind.dtype, []).append(parts.reshape(len(parts), -1))
        else:
            whole[k] = parts
    num_units = sum(job.num_units for job in jobs)
    return _Share(jobs[0], num_units, _concatenated(rows, 1), whole, common)


def _for_units(x: jax.Array, job: Job, kind: Kind) -> jax.Array:
    """(units, *part), from a job's operand."""
    return jnp.broadcast_to(x.reshape((-1, *kind.part)), (job.num_units, *kind.part))


def _unpacked(kinds: Sequence[Kind], home: Buffers, gathered: Buffers) -> list[jax.Array]:
    """(units, *part) of each result."""
    start, outs = {True: dict.fromkeys(home, 0), False: dict.fromkeys(gathered, 0)}, list[jax.Array]()
    for kind in kinds:
        begin = start[kind.is_cut][kind.dtype]
        start[kind.is_cut][kind.dtype] += kind.size
        x = (home if kind.is_cut else gathered)[kind.dtype][:, begin : begin + kind.size]
        outs.append(x.reshape(x.shape[0], *kind.part))
    return outs


def _unstacked(x: jax.Array, kind: Kind) -> jax.Array:
    """(units, *part) -> the part of a job's result."""
    return x.reshape((x.shape[0], *kind.part[1:])) if kind.stacked else x[0]


def _concatenated(pieces: dict[np.dtype, list[jax.Array]], axis: int) -> Buffers:
    return {key: some[0] if len(some) == 1 else jnp.concatenate(some, axis) for key, some in pieces.items()}


def _sizes(kinds: Sequence[Kind], *, cut: bool, times: int = 1) -> dict[np.dtype, int]:
    """The elements of a unit's row, by dtype."""
    found: dict[np.dtype, int] = {}
    for kind in kinds:
        if kind.is_cut == cut:
            found[kind.dtype] = found.get(kind.dtype, 0) + kind.size * times
    return found


def _widths(rows: Sequence[dict[np.dtype, int]]) -> dict[np.dtype, int]:
    return {key: max(row.get(key, 0) for row in rows) for key in dict.fromkeys(key for row in rows for key in row)}


def _padded(x: jax.Array | None, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """`x`, filled up with zeros along its last dim."""
    if x is None:
        return jnp.zeros(shape, dtype)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, shape[-1] - x.shape[-1])])
