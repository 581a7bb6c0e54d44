"""Expands a traced step: inlines calls, drops dead code, and gives each value its size on one device.

Inside `jax.shard_map`, shapes are already one device's. Around it, in the global view, the inner optimizer runs and XLA
partitions: specs are propagated from operation to operation, as XLA's partitioner does.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.types import (
    AxisSizes,
    DType,
    Equation,
    Jaxpr,
    Var,
    axes_in,
    axes_of_parts,
    axis_of,
    in_axes,
    size_of,
)
from jaxshard.plan.fusion import scatter_sums
from jaxshard.plan.program import Block, Moved, OnHost, Op, Value, followed, pruned
from jaxshard.programs.jaxprs import inner_jaxpr, is_literal, open_jaxpr, scan_split
from jaxshard.programs.primitives import (
    BARRIER,
    CALLS,
    COLLECTIVE_KINDS,
    COND,
    CONSTRAINT,
    PLATFORM_INDEX,
    RESHARD,
    SCAN,
    SHARD_MAP,
    VIEWS,
    WHILE,
)


def written_out(jaxpr: Jaxpr, in_specs: Sequence[P], sizes: AxisSizes, platform: str) -> Block:
    """The program of `jaxpr` on each device.

    Args:
      jaxpr: of a step traced in the global view.
      in_specs: the PartitionSpec of each of its inputs.
      sizes: devices along each axis of the mesh.
      platform: "cpu", "gpu" or "tpu"; selects the branch of `platform_dependent`.
    """
    writer = _Writer(sizes, platform)
    ins = [writer.value(v.aval, spec) for v, spec in zip(open_jaxpr(jaxpr).invars, in_specs, strict=True)]
    ops: list[Op] = []
    outs = writer.inline(jaxpr, ins, ops, True)
    block, _ = pruned(Block(ins, ops, outs), [True] * len(outs))
    if platform != "cpu":
        scatter_sums(block)
    return block


# Expansion.


class _Writer:
    def __init__(self, sizes: AxisSizes, platform: str):
        self.sizes, self.platform = sizes, platform

    def value(self, aval: Any, spec: Iterable[Any] = (), root: Value | None = None) -> Value:
        shape = getattr(aval, "shape", ())
        cut = tuple(in_axes([a for a in axes_in(e) if self._size([a]) > 1], self.sizes) for e in spec)
        cut += ((),) * (len(shape) - len(cut))
        dtype = _with_memory(getattr(aval, "dtype", np.dtype(np.int32)), aval)
        return Value(shape, dtype, cut, self._size(a for e in cut for a in e), root)

    def _size(self, axes: Iterable[str]) -> int:
        return math.prod(size_of(axis, self.sizes) for axis in axes if axis_of(axis) in self.sizes)

    def inline(self, jaxpr: Jaxpr, ins: Sequence[Any], ops: list[Op], in_global_view: bool) -> list[Any]:
        """Appends the operations of `jaxpr` to `ops`; returns its outputs."""
        opened = open_jaxpr(jaxpr)
        env: dict[Any, Any] = dict(zip(opened.invars, ins, strict=True))
        for var in opened.constvars:
            env[var] = self.value(var.aval)
        for eqn in opened.eqns:
            given = [self._read(env, v) for v in eqn.invars]
            outs = self._eqn(eqn, given, ops, in_global_view)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [self._read(env, v) for v in opened.outvars]

    def _read(self, env: dict[Any, Any], v: Var) -> Any:
        return self.value(v.aval) if is_literal(v) else env[v]

    def _eqn(self, eqn: Equation, ins: list[Any], ops: list[Op], in_global_view: bool) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name == PLATFORM_INDEX:
            return [_Known(_platform_index(params["platforms"], self.platform))]
        if name in CALLS:
            return self.inline(inner_jaxpr(eqn), ins, ops, in_global_view)
        if name == COND:
            return self._cond(eqn, ins, ops, in_global_view)
        if name == SCAN:
            return self._scan(eqn, ins, ops, in_global_view)
        if name == WHILE:
            return self._while(eqn, ins, ops, in_global_view)
        if name == SHARD_MAP:
            return self._shard_map(eqn, ins, ops)
        if any(isinstance(x, _Known) for x in ins):  # JAX casts, clamps and reshapes the branch index
            return [next(x for x in ins if isinstance(x, _Known))] * len(eqn.outvars)
        if name in (CONSTRAINT, RESHARD):
            sharding: NamedSharding = params["sharding" if "sharding" in params else "dst_sharding"]
            return [self._resharded(ins[0], sharding.spec, ops)]
        if in_global_view:
            return self._global(eqn, ins, ops)
        return self._local(eqn, ins, ops)

    # Control flow.

    def _cond(self, eqn: Equation, ins: list[Any], ops: list[Op], in_global_view: bool) -> list[Value]:
        branches = eqn.params["branches"]
        if isinstance(ins[0], _Known):
            return self.inline(branches[min(ins[0].index, len(branches) - 1)], ins[1:], ops, in_global_view)
        blocks = tuple(self._block(branch, ins[1:], in_global_view) for branch in branches)
        specs = [tuple(out.spec for out in block.outs) for block in blocks][-1]
        outs = [self.value(v.aval, spec) for v, spec in zip(eqn.outvars, specs, strict=True)]
        ops.append(Op(COND, list(ins[1:]), outs, blocks=blocks, in_global_view=in_global_view))
        return outs

    def _block(self, jaxpr: Jaxpr, like: Sequence[Value], in_global_view: bool) -> Block:
        """A block of its own; its inputs have the specs of `like`."""
        avals = [v.aval for v in open_jaxpr(jaxpr).invars]
        pairs = zip(avals, like, strict=True)
        ins = [x if isinstance(x, _Known) else self.value(aval, x.spec) for aval, x in pairs]
        ops: list[Op] = []
        outs = self.inline(jaxpr, ins, ops, in_global_view)
        return Block([x for x in ins if not isinstance(x, _Known)], ops, outs)

    def _scan(self, eqn: Equation, ins: list[Any], ops: list[Op], in_global_view: bool) -> list[Value]:
        jaxpr, length = inner_jaxpr(eqn), eqn.params["length"]
        consts, carries = scan_split(eqn)
        rows = [self._row(x) for x in ins[consts + carries :]]
        if length == 1:
            outs = self.inline(jaxpr, [*ins[: consts + carries], *rows], ops, in_global_view)
            stacked = zip(outs[carries:], eqn.outvars[carries:], strict=True)
            return [*outs[:carries], *(Value(_shape(v), x.dtype, ((), *x.spec), x.parts, x) for x, v in stacked)]
        block = self._block(jaxpr, [*ins[: consts + carries], *rows], in_global_view)
        specs = [x.spec for x in block.outs[:carries]] + [((), *x.spec) for x in block.outs[carries:]]
        outs = [self.value(v.aval, spec) for v, spec in zip(eqn.outvars, specs, strict=True)]
        given = [x for x in ins if not isinstance(x, _Known)]
        split = (consts - (len(ins) - len(given)), carries)
        loop = Op(SCAN, given, outs, blocks=(block,), trips=length, split=split)
        loop.in_global_view = in_global_view
        ops.append(loop)
        return outs

    def _row(self, x: Value) -> Value:
        return Value(x.shape[1:], x.dtype, x.spec[1:], self._size(a for e in x.spec[1:] for a in e), x)

    def _while(self, eqn: Equation, ins: list[Any], ops: list[Op], in_global_view: bool) -> list[Value]:
        """A while loop. Its trip count is unknown, so it counts once."""
        skip = eqn.params["cond_nconsts"]
        block = self._block(eqn.params["body_jaxpr"], ins[skip:], in_global_view)
        outs = [self.value(v.aval, x.spec) for v, x in zip(eqn.outvars, block.outs, strict=True)]
        given = [x for x in ins[skip:] if not isinstance(x, _Known)]
        loop = Op(WHILE, given, outs, blocks=(block,), split=(len(given) - len(outs), len(outs)))
        loop.in_global_view = in_global_view
        ops.append(loop)
        return outs

    # Into and out of the local view.

    def _shard_map(self, eqn: Equation, ins: list[Value], ops: list[Op]) -> list[Value]:
        inner = open_jaxpr(inner_jaxpr(eqn))
        local: list[Value | _Known] = []
        for x, var, spec in zip(ins, inner.invars, eqn.params["in_specs"], strict=True):
            placed = x if isinstance(x, _Known) else self._resharded(x, spec, ops)
            local.append(x if isinstance(x, _Known) else Value(_shape(var), x.dtype, root=placed))
        outs = self.inline(inner, local, ops, False)
        whole: list[Any] = []
        for x, var, spec in zip(outs, eqn.outvars, eqn.params["out_specs"], strict=True):
            cut = self.value(var.aval, spec)
            whole.append(x if isinstance(x, _Known) else Value(cut.shape, x.dtype, cut.spec, cut.parts, x))
        return whole

    def _resharded(self, x: Value, spec: P, ops: list[Op]) -> Value:
        """`x` with another spec. Adding axes moves nothing."""
        wanted = self.value(x, spec)
        if wanted.spec == x.spec:
            return x
        lost = tuple(a for e in x.spec for a in e if not any(a in f for f in wanted.spec))
        elsewhere = {a for e, f in zip(x.spec, wanted.spec, strict=True) for a in e if a not in f and a not in lost}
        moved: list[Moved] = []
        if elsewhere:
            moved.append(self._moved("all-to-all", x.bytes, tuple(elsewhere), x.dtype))
        if lost:
            moved.append(self._moved("all-gather", x.bytes * self._size(lost), lost, x.dtype))
        ops.append(Op(RESHARD, [x], [wanted], moved=tuple(moved), in_global_view=True))
        return wanted

    def _moved(self, kind: str, num_bytes: int, axes: tuple[str, ...], dtype: DType) -> Moved:
        whole = axes_of_parts(axes)
        ordered = tuple(axis for axis in self.sizes if axis in whole)
        return Moved(kind, num_bytes, ordered, self._size(axes), str(dtype))

    # Single operations.

    def _local(self, eqn: Equation, ins: list[Value], ops: list[Op]) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        kind = COLLECTIVE_KINDS.get(name)
        if name in VIEWS:
            outs = [Value(_shape(v), x.dtype, root=x) for v, x in zip(eqn.outvars, ins, strict=False)]
            return _tied(outs, ins) if name == BARRIER else outs
        if kind is None:
            outs = [Value(_shape(v), _dtype(v)) for v in eqn.outvars]
            ops.append(Op(name, list(ins), outs, params))
            return outs
        axes: str | Sequence[str] = params["axes" if "axes" in params else "axis_name"]
        axes = tuple(a for a in ((axes,) if isinstance(axes, str) else axes) if self.sizes.get(a, 1) > 1)
        if not axes or (kind == "collective-permute" and not params["perm"]):
            return list(ins)
        results: list[Value] = []
        for x, var in zip(ins, eqn.outvars, strict=False):
            out = Value(_shape(var), _dtype(var))
            payload = out.bytes if kind == "all-gather" else x.bytes
            ops.append(Op(name, [x], [out], params, moved=(self._moved(kind, payload, axes, x.dtype),)))
            results.append(out)
        return results

    def _global(self, eqn: Equation, ins: list[Value], ops: list[Op]) -> list[Value]:
        name = eqn.primitive.name
        shapes = [_shape(v) for v in eqn.outvars]
        specs, summed = followed(name, eqn.params, ins, shapes)
        outs = [self.value(v.aval, spec) for v, spec in zip(eqn.outvars, specs, strict=True)]
        if name in VIEWS and all(o.parts == x.parts for o, x in zip(outs, ins, strict=False)):
            pairs = zip(outs, ins, strict=False)
            return [Value(o.shape, o.dtype, o.spec, o.parts, x) for o, x in pairs]
        moved = tuple(self._moved("all-reduce", o.bytes, summed, o.dtype) for o in outs if summed)
        ops.append(Op(name, list(ins), outs, eqn.params, moved=moved, in_global_view=True, cut=self._size(summed)))
        return outs


def _tied(outs: list[Value], ins: Sequence[Value]) -> list[Value]:
    """The results of a barrier, each of which waits for all its operands."""
    tied = tuple(dict.fromkeys(y for x in ins for y in (x.root, *x.tied)))
    for out in outs:
        out.tied = tied
    return outs


def _shape(v: Var) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def _dtype(v: Var) -> Any:
    return _with_memory(getattr(v.aval, "dtype", None), v.aval)


def _with_memory(dtype: Any, aval: Any) -> Any:
    """The dtype, or `OnHost` for an array in host memory."""
    space = getattr(aval, "memory_space", None)  # an enumeration of JAX
    return OnHost(str(dtype)) if getattr(space, "name", "") == "Host" else dtype


@dataclasses.dataclass(frozen=True)
class _Known:
    """The index of the branch of `platform_dependent` that runs."""

    index: int


def _platform_index(platforms: Sequence[Sequence[str] | None], platform: str) -> int:
    names = {"gpu": ("gpu", "cuda", "rocm")}.get(platform, (platform,))
    for i, group in enumerate(platforms):
        if group is None or any(name in group for name in names):
            return i
    return len(platforms)
