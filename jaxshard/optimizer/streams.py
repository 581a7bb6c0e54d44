"""Streams state on the host through the devices: one leaf's loop over chunks."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxshard.base.types import AnyMesh, Equation, Jaxpr, Tree, Var, axes_of, local_shape
from jaxshard.collectives.global_view import shard_map
from jaxshard.programs.components import Piece, is_big
from jaxshard.programs.jaxprs import open_jaxpr
from jaxshard.programs.primitives import BROADCAST
from jaxshard.programs.rerun import anew

_CHUNK = 2**21  # the most elements of a chunk, if the dims divide so


@dataclasses.dataclass(frozen=True)
class Stream:
    """Elementwise equations on arrays of one shape, and counts over them, which run chunk by chunk.

    Attributes:
      mesh: the devices.
      spec: the layout of all these arrays.
      program: from `given`, then `read`, to `outs`.
      given: its operands in the devices' memory.
      read: its operands in the host's memory.
      outs: its results. A scalar is a count.
      buffers: for each result, the array on the host that it overwrites; None: it stays on the devices.
      places: the indices of the equations.
    """

    mesh: AnyMesh
    spec: P
    program: Jaxpr
    given: tuple[Var, ...]
    read: tuple[Var, ...]
    outs: tuple[Var, ...]
    buffers: tuple[Var | None, ...]
    places: frozenset[int]

    @property
    def host_outs(self) -> list[Var]:
        """The results that go to the host."""
        return [v for v, buffer in zip(self.outs, self.buffers, strict=True) if buffer is not None]

    def piece(self, there: Mapping[Var, jax.Array], done: list[list[jax.Array]]) -> Piece:
        """The stream as a piece of the update; `there` has the arrays on the host.

        It starts when the last stream in `done` has ended, and adds itself: otherwise XLA could hold chunks of many
        streams on the devices at a time.
        """
        kept = list(dict.fromkeys([*self.read, *(v for v in self.buffers if v is not None)]))
        loop = Loop(self, tuple(kept), local_shape(tuple(kept[0].aval.shape), self.spec, dict(self.mesh.shape)))
        specs = [self.spec if is_big(v) else P() for v in self.given]
        axes = axes_of(self.spec)
        of_counts = P(tuple(axis for axis in self.mesh.axis_names if axis in axes))  # one count per device

        def run(values: list[Tree]) -> Sequence[Tree]:
            body = shard_map(
                loop.run,
                mesh=self.mesh,
                in_specs=(specs, [self.spec] * len(kept)),
                out_specs=[self.spec if is_big(v) else of_counts for v in self.outs],
                check_vma=False,
            )
            far, _ = lax.optimization_barrier(([there[v] for v in kept], done[-1:]))
            outs = body(values, far)
            done.append(outs)
            return [x if is_big(v) else jnp.sum(x) for v, x in zip(self.outs, outs, strict=True)]

        return Piece(self.given, self.outs, self.places, run)


@dataclasses.dataclass(frozen=True)
class Loop:
    """The loop over a stream's chunks, on one device; `kept` are its arrays on the host, `shape` is a shard's shape."""

    stream: Stream
    kept: tuple[Var, ...]
    shape: tuple[int, ...]

    def run(self, given: list[jax.Array], kept: list[jax.Array]) -> list[jax.Array]:
        """This device's shards of the results."""
        stream, chunk = self.stream, _chunk(self.shape)
        values = dict(zip((*stream.given, *self.kept), (*given, *kept), strict=True))
        slots = self._slots()
        count = math.prod(n // m for n, m in zip(self.shape, chunk, strict=True))
        program = open_jaxpr(stream.program)
        changed = {id(eqn): {"shape": chunk} for eqn in program.eqns if spreads(eqn)}

        def body(i: jax.Array, outs: list[jax.Array]) -> list[jax.Array]:
            start = _start(i, self.shape, chunk)
            now = values | {v: x for v, x in zip(slots, outs, strict=True) if v is not None}
            parts = [now[v] if not is_big(v) else lax.dynamic_slice(now[v], start, chunk) for v in program.invars]
            here = [
                jax.device_put(x, jax.memory.Space.Device) if v in self.kept else x
                for v, x in zip(program.invars, parts, strict=True)
            ]
            made = anew(stream.program, here, changed)
            new = [
                x if buffer is None else jax.device_put(x, jax.memory.Space.Host)
                for x, buffer in zip(made, stream.buffers, strict=True)
            ]
            each = zip(stream.outs, outs, new, strict=True)
            return [lax.dynamic_update_slice(old, x, start) if is_big(v) else old + x for v, old, x in each]

        start = [
            jnp.zeros(self.shape if is_big(v) else (), v.aval.dtype) if slot is None else values[slot]
            for v, slot in zip(stream.outs, slots, strict=True)
        ]
        made = lax.fori_loop(0, count, body, start)
        return [x if is_big(v) else x[None] for v, x in zip(stream.outs, made, strict=True)]

    def _slots(self) -> list[Var | None]:
        """For each result, the operand that it overwrites chunk by chunk; None: it gets memory of its own."""
        free = [v for v in self.stream.given if is_big(v)]
        found: list[Var | None] = []
        for v, buffer in zip(self.stream.outs, self.stream.buffers, strict=True):
            fits = (one for one in free if is_big(v) and one.aval.dtype == v.aval.dtype)
            slot = buffer or next(fits, None)
            free = [one for one in free if one is not slot]
            found.append(slot)
        return found


def _chunk(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a chunk: the first dims are cut until it is small enough."""
    chunk = list(shape)
    for dim, size in enumerate(shape):
        rest = math.prod(chunk[dim + 1 :])
        if math.prod(chunk) <= _CHUNK:
            break
        fits = [n for n in range(1, size + 1) if size % n == 0 and n * rest <= _CHUNK]
        chunk[dim] = max(fits, default=1)
    return tuple(chunk)


def _start(i: jax.Array, shape: tuple[int, ...], chunk: tuple[int, ...]) -> list[jax.Array]:
    """The start index of chunk `i`, in row-major order."""
    start: list[jax.Array] = []
    for size, part in zip(reversed(shape), reversed(chunk), strict=True):
        start.append(i % (size // part) * part)
        i = i // (size // part)
    return start[::-1]


def spreads(eqn: Equation) -> bool:
    """Whether an equation broadcasts a scalar."""
    return eqn.primitive.name == BROADCAST and not is_big(eqn.invars[0])
