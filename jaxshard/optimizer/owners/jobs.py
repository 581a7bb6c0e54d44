"""Work for owners: jobs of several units, the layout of their arrays, and the packing of operands to send."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxshard.base.types import Jaxpr, axes_in
from jaxshard.programs.paired import same

Buffers: TypeAlias = dict[np.dtype, jax.Array]  # flat arrays by dtype, all with the same leading dims


class Kind(NamedTuple):
    """An operand or result of one unit: the shape of a device's shard (`part`), its spec, and its dtype.

    `stacked`: a job has a stack of these on each device, one for each of its units. If it is not stacked, several jobs
    may share one `value`.
    """

    part: tuple[int, ...]
    spec: P
    dtype: np.dtype
    stacked: bool
    value: int

    @property
    def size(self) -> int:
        """The number of elements of a shard."""
        return math.prod(self.part)

    @property
    def is_cut(self) -> bool:
        """Whether devices have different shards of it."""
        return any(axes_in(entry) for entry in self.spec)


@dataclasses.dataclass(frozen=True)
class Job:
    """`num_units` units of one program, each for one device; stacks of operands have one shard for each unit.

    `run` computes one unit, from operands whose stacks have size 1.
    """

    program: Jaxpr
    run: Callable[[Sequence[jax.Array]], list[jax.Array]]
    num_units: int
    ins: tuple[Kind, ...]
    outs: tuple[Kind, ...]

    def is_like(self, other: "Job") -> bool:
        """Whether units of both can share a full round."""
        plain = [[kind._replace(stacked=False, value=0) for kind in (*job.ins, *job.outs)] for job in (self, other)]
        several = [any(kind.stacked for kind in job.ins) for job in (self, other)]
        return plain[0] == plain[1] and several[0] == several[1] and same(self.program, other.program)


class Share(NamedTuple):
    """Some units of one program, packed to send: a row of each buffer for each unit, and the replicated operands."""

    job: Job
    num_units: int
    rows: Buffers
    whole: dict[int, jax.Array]  # by operand index, a row for each unit
    common: dict[int, jax.Array]  # by operand index, one value for all units

    def part(self, start: int, stop: int) -> "Share":
        """The units from `start` to `stop`."""
        rows = {key: x[start:stop] for key, x in self.rows.items()}
        whole = {k: x[start:stop] for k, x in self.whole.items()}
        return Share(self.job, stop - start, rows, whole, self.common)


def packed(jobs: Sequence[Job], operands: Sequence[Sequence[jax.Array]]) -> Share:
    """The units of jobs of one program, in order, from this device's shards of their operands."""
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
    return Share(jobs[0], num_units, concatenated(rows, 1), whole, common)


def _for_units(x: jax.Array, job: Job, kind: Kind) -> jax.Array:
    """(units, *part), from a job's operand."""
    return jnp.broadcast_to(x.reshape((-1, *kind.part)), (job.num_units, *kind.part))


def unpacked(kinds: Sequence[Kind], returned: Buffers, gathered: Buffers) -> list[jax.Array]:
    """(units, *part) of each result."""
    start, outs = {True: dict.fromkeys(returned, 0), False: dict.fromkeys(gathered, 0)}, list[jax.Array]()
    for kind in kinds:
        begin = start[kind.is_cut][kind.dtype]
        start[kind.is_cut][kind.dtype] += kind.size
        x = (returned if kind.is_cut else gathered)[kind.dtype][:, begin : begin + kind.size]
        outs.append(x.reshape(x.shape[0], *kind.part))
    return outs


def unstacked(x: jax.Array, kind: Kind) -> jax.Array:
    """(units, *part) -> the shard of a job's result."""
    return x.reshape((x.shape[0], *kind.part[1:])) if kind.stacked else x[0]


def concatenated(pieces: dict[np.dtype, list[jax.Array]], axis: int) -> Buffers:
    return {key: some[0] if len(some) == 1 else jnp.concatenate(some, axis) for key, some in pieces.items()}


def sizes_of(kinds: Sequence[Kind], *, cut: bool, times: int = 1) -> dict[np.dtype, int]:
    """dtype -> the number of elements in a unit's row."""
    found: dict[np.dtype, int] = {}
    for kind in kinds:
        if kind.is_cut == cut:
            found[kind.dtype] = found.get(kind.dtype, 0) + kind.size * times
    return found


def widest(rows: Sequence[dict[np.dtype, int]]) -> dict[np.dtype, int]:
    return {key: max(row.get(key, 0) for row in rows) for key in dict.fromkeys(key for row in rows for key in row)}


def padded(x: jax.Array | None, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """`x`, padded with zeros along its last dim."""
    if x is None:
        return jnp.zeros(shape, dtype)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, shape[-1] - x.shape[-1])])
