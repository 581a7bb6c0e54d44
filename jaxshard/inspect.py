"""What a compiled step costs: its collectives, the bytes they put on the wire, and its memory.

Everything here is read from the compiled program, not predicted: `compiled.as_text()` gives the optimized HLO
of one device, `compiled.memory_analysis()` the compiler's own account of memory. Nothing is run. It reads what
the CPU, GPU and TPU compilers write, so programs compiled for hardware that is not there can be read too.

The rings that turn payload into wire bytes are those of ZeRO (Rajbhandari et al. 2020, section 7), after
Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxshard import hlo

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program, as one device sees it.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
            "collective-permute" or "collective-broadcast". A TPU `all-reduce-scatter` fusion is a "reduce-scatter".
        bytes: payload of one execution, in bytes per device: the whole output of an all-gather, the whole input of
            a reduce-scatter, and the operands of every other kind (of a ragged all-to-all, the whole operand: an
            upper bound). Several arrays in one operation are added up. Types are those the compiler chose, which
            may be wider (CPU) or narrower than the program's.
        group_size: number of devices that work together, the largest if groups differ. For a permute: the number
            of devices linked by its source-target pairs.
        trips: executions per step: the product of the trip counts of the loops around it.
        dtypes: HLO element types of the payload, each once, such as `("f32",)`.
        name: the instruction's name in the HLO text.
        op_name: JAX's path to the operation (`metadata` in the HLO text), "" where there is none.
        replica_groups: the device ids of each group. For a permute: of each set of linked devices.
        trips_known: False if a loop around it has no trip count that can be read; it then counts as one trip.
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
    """

    collectives: tuple[Collective, ...]
    wire_bytes: float
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None
    peak_bytes: int | None = None

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
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        listed = [
            {**dataclasses.asdict(c), "dtypes": list(c.dtypes), "replica_groups": [list(g) for g in c.replica_groups]}
            | {"wire_bytes": c.wire_bytes}
            for c in self.collectives
        ]
        return {**fields, "collectives": listed, "trips_known": self.trips_known}

    def __str__(self) -> str:
        groups: dict[tuple[str, int, str], list[Collective]] = {}
        for c in self.collectives:
            groups.setdefault((c.kind, c.group_size, c.dtype), []).append(c)
        row = "{:<{width}}  {:>5}  {:<8}  {:>5}  {:>10}  {:>18}  {:>18}".format
        width = max([len("collective"), *(len(kind) for kind, _, _ in groups)])
        lines = [row("collective", "group", "dtype", "count", "executions", "bytes", "wire bytes", width=width)]
        for (kind, size, dtype), members in sorted(groups.items()):
            sums = [len(members), _total(members, "trips"), sum(c.bytes * c.trips for c in members)]
            cells = [_number(n) for n in (*sums, _total(members, "wire_bytes"))]
            lines.append(row(kind, size, dtype, *cells, width=width))
        lines += ["", f"wire bytes sent per device and step  {_number(self.wire_bytes)}"]
        for field in ("argument", "output", "temp", "alias", "peak"):
            lines.append(f"{field + ' bytes per device':<35}  {_number(getattr(self, field + '_bytes'))}")
        if not self.trips_known:
            lines += [
                "",
                "Some loops have no trip count that can be read and count as one trip, so the totals are too low:",
            ]
            lines += [f"  {c.kind} {c.name} {c.op_name}".rstrip() for c in self.collectives if not c.trips_known]
        return "\n".join(lines)


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
    return tuple(_walk(module, module.entry, 1, True, False))


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
    memory = compiled.memory_analysis()
    if memory is None:
        return Report(found, _total(found, "wire_bytes"))
    sizes = [int(getattr(memory, f"{field}_size_in_bytes")) for field in ("argument", "output", "temp", "alias")]
    peak = int(getattr(memory, "peak_memory_in_bytes", 0))
    if not peak or _platform(compiled) == "cpu":  # the CPU compiler's peak leaves the scratch memory out
        peak = sizes[0] + sizes[1] + sizes[2] - sizes[3]
    return Report(found, _total(found, "wire_bytes"), *sizes, peak_bytes=peak)


def _platform(compiled: jax.stages.Compiled) -> str | None:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((device.platform for sharding in shardings for device in sharding.device_set), None)


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


def _walk(module: hlo.Module, name: str, trips: int, known: bool, scatters: bool) -> Iterator[Collective]:
    """Yields the collectives under computation `name`, itself run `trips` times a step."""
    if name not in module.computations:
        raise ValueError(f"HLO text is incomplete: computation {name} is not defined.")
    for instruction in module.computations[name].values():
        opcode = instruction.opcode
        kind = opcode.removesuffix("-start")
        if opcode.endswith(("-done", "-update")):
            continue
        if kind in _KINDS:
            if not _is_continuation(module, name, instruction):
                yield _collective(module, name, instruction, trips, known, scatters)
        elif opcode == "while":
            count = hlo.trip_count(module, name, instruction)
            body, condition = (1, 1) if count is None else (count, count + 1)
            for key, times in (("condition", condition), ("body", body)):
                for callee in instruction.called(key):
                    yield from _walk(module, callee, trips * times, known and count is not None, False)
        else:
            for callee in instruction.called(*_CALLS):
                inside = scatters or "all-reduce-scatter" in callee or "all-reduce-scatter" in instruction.name
                yield from _walk(module, callee, trips, known, inside)


def _is_continuation(module: hlo.Module, name: str, instruction: hlo.Instruction) -> bool:
    """TPU spreads an async collective over several fusions, and repeats it in each. Only the start's counts."""
    if "async_collective_fusion_config" not in instruction.attributes:
        return False
    starts = (i for i in module.computations[name].values() if '"AsyncCollectiveStart"' in i.attributes)
    return not any(instruction.name in start.operand_names for start in starts)


def _collective(
    module: hlo.Module, computation: str, instruction: hlo.Instruction, trips: int, known: bool, scatters: bool
) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    kind = "reduce-scatter" if scatters and kind == "all-reduce" else kind
    size, dtypes = _operand_bytes(module, computation, instruction)
    groups = hlo.groups_of(instruction, module.num_devices)
    group_size = max(map(len, groups), default=1)
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.attributes)
    return Collective(
        kind=kind,
        bytes=size * group_size if kind == "all-gather" else size,
        group_size=group_size,
        trips=trips,
        dtypes=tuple(dtypes),
        name=instruction.name,
        op_name=op_name[1] if op_name else "",
        replica_groups=groups,
        trips_known=known,
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
    return hlo.bytes_of(" ".join(made[name].shape for name in names))
