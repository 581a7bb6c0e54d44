"""What a compiled step costs: its collectives, the bytes they put on the wire, its memory; and pictures of layouts.

Everything here is read from the compiled program, not predicted: `compiled.as_text()` gives the optimized HLO
of one device, `compiled.memory_analysis()` the compiler's own account of memory. Nothing is run. It reads what
the CPU, GPU and TPU compilers write, so programs compiled for hardware that is not there can be read too.

The rings that turn payload into wire bytes are those of ZeRO (Rajbhandari et al. 2020, section 7), after
Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxshard.inspect import hlo


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program, as one device sees it.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
            "collective-permute" or "collective-broadcast". A TPU `all-reduce-scatter` fusion is a "reduce-scatter".
        bytes: payload of one execution, in bytes per device: the whole output of an all-gather, the whole input of
            a reduce-scatter, and the operands of every other kind (of an all-reduce in the type that is summed in; of
            a ragged all-to-all, the whole operand: an upper bound). Several arrays in one operation are added up.
            Types are those the compiler chose, which may be wider (CPU) or narrower than the program's.
        group_size: number of devices that work together, the largest if groups differ. For a permute: the number
            of devices linked by its source-target pairs.
        trips: executions per step: the product of the trip counts of the loops around it.
        dtypes: HLO element types of the payload, each once, such as `("f32",)`.
        name: the instruction's name in the HLO text.
        op_name: JAX's path to the operation (`metadata` in the HLO text), "" where there is none.
        replica_groups: the device ids of each group. For a permute: of each set of linked devices.
        trips_known: False if a loop around it has no trip count that can be read; it then counts as one trip.
        overlapped: the names of the compute instructions (fusions, matrix products, loops; not copies) that the
            schedule places between its start and its done: what can hide its time. () where there are none; None if
            the operation is synchronous. That they overlap is the compiler's plan, not a measurement.
    """

    kind: str
    bytes: int
    group_size: int
    trips: int
    dtypes: tuple[str, ...]
    name: str
    op_name: str = ""
    replica_groups: tuple[tuple[int, ...], ...] = ()
    trips_known: bool = True
    overlapped: tuple[str, ...] | None = None

    @property
    def dtype(self) -> str:
        """The element types in one word, such as "f32" or "f32+bf16"."""
        return "+".join(self.dtypes)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends per step, on a ring of g devices, for a payload of b bytes, times `trips`.

        2(g-1)/g b for an all-reduce, b for a permute (its busiest device), (g-1)/g b for all others; 0 if g is 1.
        """
        if self.group_size <= 1:
            return 0.0
        factor = {"all-reduce": 2.0, "collective-permute": self.group_size / (self.group_size - 1)}.get(self.kind, 1.0)
        return factor * (self.group_size - 1) * self.bytes * self.trips / self.group_size

    def axes(self, mesh: jax.sharding.Mesh) -> tuple[str, ...]:
        """The axes of the program's mesh along which it moves data: in which the devices of a group differ."""
        where = [np.unravel_index(group, mesh.devices.shape) for group in self.replica_groups if group]
        return tuple(axis for d, axis in enumerate(mesh.axis_names) if any(len(set(at[d])) > 1 for at in where))


@dataclasses.dataclass(frozen=True)
class Report:
    """What one step of a compiled program costs each device. `str(report)` is a table.

    Attributes:
        collectives: every collective of the program, in program order.
        wire_bytes: bytes that a device sends per step, the sum over `collectives`.
        argument_bytes: size of the inputs on one device, in bytes; this and all below are None where the compiler
            gives no memory analysis.
        output_bytes: size of the outputs on one device, in bytes, those that reuse an input included.
        temp_bytes: scratch memory on one device, in bytes.
        alias_bytes: part of the outputs that reuses (donated) inputs, in bytes.
        peak_bytes: most memory that one device needs at once, in bytes, as the compiler says; on CPU, where its
            figure leaves the scratch out, and where it says nothing: arguments + outputs + scratch - aliases.
        arguments: bytes on one device of each positional argument, all leaves of a pytree summed, without padding;
            for a `jaxshard.train_step` these are params, state, batch. Leaves that the program does not use are not
            given to it and count 0. () where the compiled program does not say.
        flops: the compiler's own count of floating-point operations on one device. It counts the body of a loop once,
            whatever its trips, so for a scan over layers it is far too low. None where the compiler counts none (GPU).
        platform: "cpu", "gpu" or "tpu"; None if unknown.
    """

    collectives: tuple[Collective, ...]
    wire_bytes: float
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None
    peak_bytes: int | None = None
    arguments: tuple[int, ...] = ()
    flops: float | None = None
    platform: str | None = None

    @property
    def trips_known(self) -> bool:
        """False if some collective is in a loop whose trip count cannot be read: the totals are then too low."""
        return all(c.trips_known for c in self.collectives)

    def wire_bytes_by_axes(self, mesh: jax.sharding.Mesh) -> dict[str, float]:
        """Wire bytes by the mesh axes that they go along: {"data": ..., "tensor": ..., "replica x data": ...}."""
        found: dict[str, float] = {}
        for c in self.collectives:
            if c.wire_bytes:
                axes = " x ".join(c.axes(mesh))
                found[axes] = found.get(axes, 0.0) + c.wire_bytes
        return found

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists, strings and numbers, ready for `json.dumps`."""
        listed = [_plain(c) | {"wire_bytes": c.wire_bytes} for c in self.collectives]
        return {**_plain(self), "collectives": listed, "trips_known": self.trips_known}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Report":
        """The report that `to_dict` wrote, also after a round trip through JSON.

        Args:
            plain: what `to_dict` returned.

        Raises:
            ValueError: if `plain` is anything else, such as the dict of another version of jaxshard.

        >>> Report.from_dict(Report((), 0.0, flops=8.0).to_dict()).flops
        8.0
        """
        try:
            listed = tuple(_made(Collective, c) for c in plain["collectives"])
            report = dataclasses.replace(_made(cls, plain), collectives=listed)
            same = report.to_dict() == plain
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"Report.from_dict needs what Report.to_dict returns, got {plain!r:.80}: {error}"
            ) from None
        if not same:
            raise ValueError(f"Report.from_dict needs what Report.to_dict returns, got other fields: {plain!r:.80}")
        return report

    def table(self) -> Any:
        """A `rich.table.Table` of the collectives, as `str(report)` lists them; needs `rich` (`jaxshard[train]`)."""
        from rich.table import Table

        table = Table(title="collectives per device and step", caption="\n".join(self._totals()))
        for heading in _HEADINGS:
            table.add_column(heading, justify="left" if heading in ("collective", "dtype") else "right")
        for row in self._rows():
            table.add_row(*row)
        return table

    def _rows(self) -> list[tuple[str, ...]]:
        """One row of cells for all collectives of one kind, group size and dtype."""
        groups: dict[tuple[str, int, str], list[Collective]] = {}
        for c in self.collectives:
            groups.setdefault((c.kind, c.group_size, c.dtype), []).append(c)
        rows = []
        for (kind, size, dtype), members in sorted(groups.items()):
            sums = [len(members), _total(members, "trips"), sum(c.bytes * c.trips for c in members)]
            rows.append((kind, str(size), dtype, *map(_number, (*sums, _total(members, "wire_bytes")))))
        return rows

    def _totals(self) -> list[str]:
        lines = [f"wire bytes sent per device and step  {_number(self.wire_bytes)}"]
        for field in ("argument", "output", "temp", "alias", "peak"):
            lines.append(f"{field + ' bytes per device':<35}  {_number(getattr(self, field + '_bytes'))}")
        overlapped = sum(bool(c.overlapped) for c in self.collectives)
        return [*lines, f"{'overlapped with compute':<35}  {overlapped} of {len(self.collectives)} collectives"]

    def __str__(self) -> str:
        rows = self._rows()
        line = "{:<{width}}  {:>5}  {:<8}  {:>5}  {:>10}  {:>18}  {:>18}".format
        width = max(len(cells[0]) for cells in [_HEADINGS, *rows])
        lines = [*(line(*cells, width=width) for cells in [_HEADINGS, *rows]), "", *self._totals()]
        if not self.trips_known:
            lines += [
                "",
                "Some loops have no trip count that can be read and count as one trip, so the totals are too low:",
            ]
            lines += [f"  {c.kind} {c.name} {c.op_name}".rstrip() for c in self.collectives if not c.trips_known]
        return "\n".join(lines)


_HEADINGS = ("collective", "group", "dtype", "count", "executions", "bytes", "wire bytes")


def _plain(value: Any) -> Any:
    """A dataclass as a dict, and tuples as lists, all the way down."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [_plain(x) for x in value] if isinstance(value, tuple) else value


def _made(cls: Any, plain: dict[str, Any]) -> Any:
    """A dataclass from the dict that `_plain` made of it; other entries are left out."""
    return cls(**{f.name: _tuples(plain[f.name]) for f in dataclasses.fields(cls)})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(x) for x in value) if isinstance(value, list) else value


def collectives(compiled_or_text: jax.stages.Compiled | str) -> tuple[Collective, ...]:
    """Lists the collectives of a compiled program, in program order.

    A collective in a loop body appears once, with its `trips`; in a loop's condition too, with one more. Every
    branch of a conditional is listed, though only one runs: an upper bound. An operation that is split into a
    start and a done (or, on TPU, spread over several fusions) is listed once. Where the compiler names no trip
    count (TPU), it is worked out from the loop's counter: where it starts, its step, and the constant that the
    condition compares it with. Transfers by `send` and `recv` and through the host are not collectives.

    Args:
        compiled_or_text: what `jax.jit(f).lower(...).compile()` returns, or its `as_text()`.

    Returns:
        A tuple of `Collective`.

    Raises:
        TypeError: if given neither a compiled program nor HLO text.
        ValueError: if the HLO text is incomplete, or writes its replica groups in a form not known here.

    >>> collectives("HloModule m\\n\\nENTRY e {\\n  ROOT p = f32[8]{0} parameter(0)\\n}")
    ()
    """
    module = hlo.parse(_text(compiled_or_text))
    return tuple(_walk(module, module.entry, _Around()))


def wire_bytes(compiled_or_text: jax.stages.Compiled | str) -> float:
    """Bytes that each device sends per step through the collectives of a compiled program.

    Args:
        compiled_or_text: as for `collectives`.

    Returns:
        The sum of `Collective.wire_bytes`, in bytes per device and step.

    Raises:
        TypeError, ValueError: as `collectives`.
    """
    return _total(collectives(compiled_or_text), "wire_bytes")


def report(compiled: jax.stages.Compiled) -> Report:
    """Reads collectives, wire bytes and memory of a compiled program.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returns.

    Returns:
        A `Report`; print it for a table.

    Raises:
        TypeError: if `compiled` is not a compiled program. Text is not enough: it says nothing of memory.
        ValueError: as `collectives`.
    """
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(_needed("a compiled program, `jax.jit(f).lower(...).compile()`", compiled))
    found = collectives(compiled)
    known: dict[str, Any] = {
        "platform": _platform(compiled),
        "arguments": _arguments(compiled),
        "flops": _flops(compiled),
    }
    memory = compiled.memory_analysis()
    if memory is None:
        return Report(found, _total(found, "wire_bytes"), **known)
    sizes = [int(getattr(memory, f"{field}_size_in_bytes")) for field in ("argument", "output", "temp", "alias")]
    peak = int(getattr(memory, "peak_memory_in_bytes", 0))
    if not peak or known["platform"] == "cpu":  # the CPU compiler's peak leaves the scratch memory out
        peak = sizes[0] + sizes[1] + sizes[2] - sizes[3]
    return Report(found, _total(found, "wire_bytes"), *sizes, peak_bytes=peak, **known)


def _platform(compiled: jax.stages.Compiled) -> str | None:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((device.platform for sharding in shardings for device in sharding.device_set), None)


def _flops(compiled: jax.stages.Compiled) -> float | None:
    cost: Any = compiled.cost_analysis()  # a dict, a list of one, or None
    cost = cost[0] if isinstance(cost, list | tuple) and cost else cost
    flops = cost.get("flops") if isinstance(cost, dict) else None
    return None if flops is None or flops < 0 else float(flops)


def _arguments(compiled: jax.stages.Compiled) -> tuple[int, ...]:
    try:
        avals, shardings = compiled.in_avals[0], compiled.input_shardings[0]
    except (AttributeError, NotImplementedError):  # what an executable of another kind lacks
        return ()
    is_unused = lambda x: x is None  # noqa: E731
    return tuple(
        sum(map(_shard_bytes, jax.tree.leaves(aval), jax.tree.leaves(sharding, is_leaf=is_unused)))
        for aval, sharding in zip(avals, shardings, strict=True)
    )


def _shard_bytes(aval: Any, sharding: jax.sharding.Sharding | None) -> int:
    """Bytes of an array on each device; 0 for an argument that the program does not use."""
    if sharding is None:
        return 0
    return math.prod(sharding.shard_shape(aval.shape)) * aval.dtype.itemsize


def _total(found: Any, field: str) -> Any:
    return sum(getattr(c, field) for c in found)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"


def _needed(what: str, got: object) -> str:
    hint = ": call `.compile()` on it first" if isinstance(got, jax.stages.Lowered) else ""
    shown = repr(got if len(got) <= 40 else got[:40] + "...") if isinstance(got, str) else type(got).__name__
    return f"jaxshard.inspect needs {what}, got {shown}{hint}."


def _text(compiled_or_text: jax.stages.Compiled | str) -> str:
    """The optimized HLO text, checked to be one."""
    what = "a compiled program, `jax.jit(f).lower(...).compile()`, or its HLO text, `compiled.as_text()`"
    is_compiled = isinstance(compiled_or_text, jax.stages.Compiled)
    text = compiled_or_text.as_text() if is_compiled else compiled_or_text
    if not isinstance(text, str) or not re.search(r"^HloModule ", text, re.M) or not re.search(r"^ENTRY ", text, re.M):
        raise TypeError(_needed(what, text if is_compiled else compiled_or_text))
    return text


# The walk: every collective under a computation, with the trips of the loops around it.

_CALLS = ("calls", "to_apply", "branch_computations", "true_computation", "false_computation", "called_computations")


class _Around(NamedTuple):
    """What is around a computation: its runs a step, whether they are known, whether it is a TPU `all-reduce-scatter`,
    and what overlaps the asynchronous operation that it is the inside of."""

    trips: int = 1
    known: bool = True
    scatters: bool = False
    overlapped: tuple[str, ...] | None = None


def _walk(module: hlo.Module, name: str, around: _Around) -> Iterator[Collective]:
    """Yields the collectives under computation `name`."""
    if name not in module.computations:
        raise ValueError(f"HLO text is incomplete: computation {name} is not defined.")
    for instruction in module.computations[name].values():
        opcode = instruction.opcode
        if opcode.endswith(("-done", "-update")):
            continue
        if opcode.removesuffix("-start") in hlo.COLLECTIVES:
            if not _is_continuation(module, name, instruction):
                yield _collective(module, name, instruction, around)
        elif opcode == "while":
            count = hlo.trip_count(module, name, instruction)
            body, condition = (1, 1) if count is None else (count, count + 1)
            for key, times in (("condition", condition), ("body", body)):
                inside = _Around(around.trips * times, around.known and count is not None)
                for callee in instruction.called(key):
                    yield from _walk(module, callee, inside)
        elif callees := instruction.called(*_CALLS):
            window = hlo.overlapped(module, name, instruction)
            for callee in callees:
                scatters = around.scatters or any("all-reduce-scatter" in n for n in (callee, instruction.name))
                inside = around._replace(scatters=scatters)
                yield from _walk(module, callee, inside if window is None else inside._replace(overlapped=window))


def _is_continuation(module: hlo.Module, name: str, instruction: hlo.Instruction) -> bool:
    """TPU spreads an async collective over several fusions, and repeats it in each. Only the start's counts."""
    if "async_collective_fusion_config" not in instruction.attributes:
        return False
    starts = (i for i in module.computations[name].values() if '"AsyncCollectiveStart"' in i.attributes)
    return not any(instruction.name in start.operand_names for start in starts)


def _collective(module: hlo.Module, computation: str, instruction: hlo.Instruction, around: _Around) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    kind = "reduce-scatter" if around.scatters and kind == "all-reduce" else kind
    size, dtypes = _operand_bytes(module, computation, instruction)
    groups = hlo.groups_of(instruction, module.num_devices)
    group_size = max(map(len, groups), default=1)
    window = hlo.overlapped(module, computation, instruction)
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.attributes)
    return Collective(
        kind=kind,
        bytes=size * group_size if kind == "all-gather" else size,
        group_size=group_size,
        trips=around.trips,
        dtypes=tuple(dtypes),
        name=instruction.name,
        op_name=op_name[1] if op_name else "",
        replica_groups=groups,
        trips_known=around.known,
        overlapped=around.overlapped if window is None else window,
    )


def _operand_bytes(module: hlo.Module, computation: str, instruction: hlo.Instruction) -> tuple[int, list[str]]:
    """Bytes and element types of what a collective is given; results differ in form between compilers."""
    names, made = instruction.operand_names, module.computations[computation]
    if instruction.opcode.startswith("ragged"):  # the rest are an output buffer, offsets and sizes
        names = names[:1]
    missing = [name for name in names if name not in made]
    if missing or not names:
        raise ValueError(f"HLO text is incomplete: {instruction.name} takes {missing}, not defined in {computation}.")
    sliced = re.search(r"slice_sizes=\{(\{[\d,{}]*\})\}", instruction.attributes)
    if sliced and instruction.opcode.startswith("collective-permute"):  # sends slices of its first operand
        dtype = made[names[0]].shape.split("[")[0]
        return hlo.bytes_of(" ".join(f"{dtype}[{dims}]" for dims in re.findall(r"\{([\d,]*)\}", sliced[1])))
    given = hlo.bytes_of(" ".join(made[name].shape for name in names))
    if instruction.opcode == "all-reduce":  # TPU: may take bfloat16 and sum in float32; its partial sums travel
        return max(given, hlo.bytes_of(instruction.shape), key=lambda found: found[0])
    return given
