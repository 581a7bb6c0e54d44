"""The collectives of a compiled program, read from its HLO text."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxshard.hardware.chips import ring_bytes
from jaxshard.inspect import hlo
from jaxshard.inspect.overlap import COLLECTIVES, overlapped


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program, on one device.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
            "collective-permute" or "collective-broadcast". A TPU `all-reduce-scatter` fusion is a "reduce-scatter".
        bytes: payload of one execution, in bytes per device, summed over its arrays: the full output of an all-gather,
            the full input of a reduce-scatter, else the operands (for an all-reduce in the type of the sum; for a
            ragged all-to-all the whole operand, an upper bound). The compiler's types count, which may be wider (CPU)
            or narrower than the program's.
        group_size: the number of devices in a group, the largest if groups differ. For a permute: the number of devices
            linked by its source-target pairs.
        trips: executions per step: the product of the trip counts of the loops around it.
        dtypes: HLO element types of the payload, each once, such as `("f32",)`.
        name: the instruction's name in the HLO text.
        op_name: JAX's path to the operation (`metadata` in the HLO text), "" if there is none.
        replica_groups: the device ids of each group. For a permute: of each set of linked devices.
        trips_known: False if the trip count of a loop around it cannot be read; that loop counts as one trip.
        overlapped: the names of the compute instructions (fusions, matrix products, loops; not copies) that the
            schedule places between its start and its done, and that can hide its time; () if there are none; None if
            the operation is synchronous. This is the compiler's plan, not a measurement.
        between_slices: it moves data between TPU slices, over the slow network; `group_size` is the number of slices,
            `bytes` what one device of a slice contributes or gets, and `replica_groups` is unknown.
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
    between_slices: bool = False

    @property
    def dtype(self) -> str:
        """The element types in one word, such as "f32" or "f32+bf16"."""
        return "+".join(self.dtypes)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends per step, by the ring formulas of `hardware.chips`, times `trips`."""
        return ring_bytes(self.kind, self.bytes * self.trips, self.group_size)

    def axes(self, mesh: jax.sharding.Mesh) -> tuple[str, ...]:
        """The mesh axes along which it moves data: those in which the devices of a group differ."""
        where = [np.unravel_index(group, mesh.devices.shape) for group in self.replica_groups if group]
        return tuple(axis for d, axis in enumerate(mesh.axis_names) if any(len(set(at[d])) > 1 for at in where))


def collectives(compiled_or_text: jax.stages.Compiled | str) -> tuple[Collective, ...]:
    """Lists the collectives of a compiled program, in program order.

    A collective in a loop's body or condition appears once, with its `trips` (one more in the condition). All branches
    of a conditional are listed, though only one runs: an upper bound. An operation that is split into a start and a
    done (or, on TPU, spread over several fusions) is listed once. If the compiler gives no trip count (TPU), it is
    computed from the loop counter's start, step and limit. Of `send` and `recv` only those are listed, as one, by which
    TPU slices exchange data.

    Args:
        compiled_or_text: what `jax.jit(f).lower(...).compile()` returns, or its `as_text()`.

    Returns:
        A tuple of `Collective`.

    Raises:
        TypeError: if given neither a compiled program nor HLO text.
        ValueError: if the HLO text is incomplete, or has an unknown notation of replica groups.

    >>> collectives("HloModule m\\n\\nENTRY e {\\n  ROOT p = f32[8]{0} parameter(0)\\n}")
    ()
    """
    module = hlo.parse(text_of(compiled_or_text))
    return tuple(_walk(module, module.entry, _Around()))


def wire_bytes(compiled_or_text: jax.stages.Compiled | str) -> float:
    """Bytes that each device sends per step in the collectives of a compiled program.

    Args:
        compiled_or_text: as for `collectives`.

    Returns:
        The sum of `Collective.wire_bytes`, in bytes per device and step.

    Raises:
        TypeError, ValueError: as `collectives`.
    """
    return sum(c.wire_bytes for c in collectives(compiled_or_text))


def needed(what: str, got: object) -> str:
    """The error message for an argument of the wrong type."""
    hint = ": call `.compile()` on it first" if isinstance(got, jax.stages.Lowered) else ""
    shown = repr(got if len(got) <= 40 else got[:40] + "...") if isinstance(got, str) else type(got).__name__
    return f"jaxshard.inspect needs {what}, got {shown}{hint}."


def text_of(compiled_or_text: jax.stages.Compiled | str) -> str:
    """The optimized HLO text, checked."""
    what = "a compiled program, `jax.jit(f).lower(...).compile()`, or its HLO text, `compiled.as_text()`"
    is_compiled = isinstance(compiled_or_text, jax.stages.Compiled)
    text = compiled_or_text.as_text() if is_compiled else compiled_or_text
    if not isinstance(text, str) or not re.search(r"^HloModule ", text, re.M) or not re.search(r"^ENTRY ", text, re.M):
        raise TypeError(needed(what, text if is_compiled else compiled_or_text))
    return text


def inputs_of(compiled: jax.stages.Compiled) -> list[list[tuple[Any, jax.sharding.Sharding | None]]]:
    """For each positional argument the types and shardings of its leaves; [] if this kind of executable lacks them.

    A sharding is None for a leaf that the program does not use.
    """
    try:
        avals, shardings = compiled.in_avals[0], compiled.input_shardings[0]
    except (AttributeError, NotImplementedError):
        return []
    leaves = (jax.tree.flatten(aval) for aval in avals)  # a tree may itself contain None
    each = zip(leaves, shardings, strict=True)
    return [list(zip(found, treedef.flatten_up_to(tree), strict=True)) for (found, treedef), tree in each]


# The walk: every collective in a computation and those it calls, with the trips of the loops around it.

_CALLS = ("calls", "to_apply", "branch_computations", "true_computation", "false_computation", "called_computations")


class _Around(NamedTuple):
    """The instructions around a computation: loops, fusions, asynchronous operations."""

    trips: int = 1  # runs per step
    known: bool = True  # whether the trip counts of all loops around it can be read
    scatters: bool = False  # whether it is inside a TPU `all-reduce-scatter`
    overlapped: tuple[str, ...] | None = None  # as in `Collective`, if it is inside an asynchronous operation


def _walk(module: hlo.Module, name: str, around: _Around) -> Iterator[Collective]:
    """Yields the collectives in computation `name` and those it calls."""
    if name not in module.computations:
        raise ValueError(f"HLO text is incomplete: computation {name} is not defined.")
    for instruction in module.computations[name].values():
        opcode = instruction.opcode
        if opcode.endswith(("-done", "-update")):
            continue
        if opcode.removesuffix("-start") in COLLECTIVES:
            if not _is_continuation(module, name, instruction):
                yield _collective(module, name, instruction, around)
        elif opcode == "send" and (exchange := _EXCHANGE.search(instruction.attributes)):
            yield _between_slices(module, name, instruction, around, exchange[1])
        elif opcode == "while":
            count = hlo.trip_count(module, name, instruction)
            body, condition = (1, 1) if count is None else (count, count + 1)
            for key, times in (("condition", condition), ("body", body)):
                inside = _Around(around.trips * times, around.known and count is not None)
                for callee in instruction.called(key):
                    yield from _walk(module, callee, inside)
        elif callees := instruction.called(*_CALLS):
            window = overlapped(module, name, instruction)
            for callee in callees:
                scatters = around.scatters or any("all-reduce-scatter" in n for n in (callee, instruction.name))
                inside = around._replace(scatters=scatters)
                yield from _walk(module, callee, inside if window is None else inside._replace(overlapped=window))


def _is_continuation(module: hlo.Module, name: str, instruction: hlo.Instruction) -> bool:
    """Whether this repeats an async collective: TPU spreads one over several fusions, and only the start counts."""
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
    window = overlapped(module, computation, instruction)
    more = {"replica_groups": groups, "overlapped": around.overlapped if window is None else window}
    return _listed(instruction, around, kind, size, dtypes, group_size, _OP_NAME, **more)


def _listed(
    instruction: hlo.Instruction,
    around: _Around,
    kind: str,
    size: int,
    dtypes: list[str],
    group_size: int,
    named: re.Pattern[str],
    **more: Any,
) -> Collective:
    """A collective of operands of `size` bytes on each device; `named` finds its name in the program's attributes."""
    op_name = named.search(instruction.attributes)
    return Collective(
        kind=kind,
        bytes=size * group_size if kind == "all-gather" else size,
        group_size=group_size,
        trips=around.trips,
        dtypes=tuple(dtypes),
        name=instruction.name,
        op_name=op_name[1] if op_name else "",
        trips_known=around.known,
        **more,
    )


_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_EXCHANGE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_EXCHANGES = {"ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER", "ALL_TO_ALL"}  # any other is sent to one slice


def _between_slices(
    module: hlo.Module, computation: str, send: hlo.Instruction, around: _Around, exchange: str
) -> Collective:
    """The exchange between slices of which this sends a device's part; its `recv` repeats it."""
    size, dtypes = hlo.bytes_of(module.computations[computation][send.operand_names[0]].shape)
    target = re.search(r'_xla_megascale_target="\{([^}]*)\}', send.attributes)
    slices = sum(_length(part) for part in target[1].split(",")) if target and exchange in _EXCHANGES else 2
    kind = exchange.lower().replace("_", "-") if exchange in _EXCHANGES else "collective-permute"
    return _listed(send, around, kind, size, dtypes, slices, _RENDEZVOUS, between_slices=True)


def _length(part: str) -> int:
    """The number of slices in "3", or in a range such as "0:3"."""
    first, _, last = part.partition(":")
    return int(last) - int(first) + 1 if last else 1


def _operand_bytes(module: hlo.Module, computation: str, instruction: hlo.Instruction) -> tuple[int, list[str]]:
    """Bytes and element types of a collective's operands; the form of results differs between compilers."""
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
