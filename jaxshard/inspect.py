"""What a compiled step costs: its collectives, the bytes they put on the wire, and its memory.

Everything here is read from the compiled program, not predicted: `compiled.as_text()` gives the optimized HLO
of one device, `compiled.memory_analysis()` the compiler's own account of memory. Nothing is run. It reads what
the CPU, GPU and TPU compilers write, so programs compiled for hardware that is not there can be read too.

The rings that turn payload into wire bytes are those of ZeRO (Rajbhandari et al. 2020, section 7), after
Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

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
    module = _parse(_text(compiled_or_text))
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


# The parser: HLO text -> computations of instructions. One instruction is one line,
#   ROOT %name = f32[8,1024]{1,0:T(8,128)} opcode(%operand, f32[] %typed_operand), attribute=value, ...


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str

    @property
    def operand_names(self) -> list[str]:
        """The operands without `/*index=5*/` marks and without their shapes."""
        bare = re.sub(r"/\*.*?\*/|\w+\[[^\]]*\](\{[^}]*\})?|[()\s]", "", self.operands)
        return re.findall(r"%?([\w.\-]+)(?=,|$)", bare)

    def called(self, *keys: str) -> list[str]:
        """Names of the computations in the attributes `keys`, each `key=%name` or `key={%name, %name}`."""
        found = re.findall(rf"\b(?:{'|'.join(keys)})=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return [name for value in found for name in re.findall(r"[\w.\-]+", value)]


class _Module(NamedTuple):
    computations: dict[str, dict[str, _Instruction]]  # in the order of execution
    roots: dict[str, str]  # computation -> the name of its root instruction
    entry: str
    num_devices: int


_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_BALANCED = r"(?:[^()]++|\((?:[^()]++|\((?:[^()]++|\([^()]*+\))*+\))*+\))*+"
_INSTRUCTION = re.compile(rf"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(({_BALANCED})\)(.*)")


def _parse(text: str) -> _Module:
    computations, roots, entry, current = {}, {}, "", ""
    for line in text.splitlines():
        if line[:1].isspace() and current and (found := _INSTRUCTION.match(line)):
            computations[current][found[2]] = _Instruction(*found.groups()[1:])
            roots[current] = found[2] if found[1] else roots.get(current, "")
        elif not line.startswith("HloModule") and (found := _COMPUTATION.match(line)):
            current = found[2]
            entry = current if found[1] else entry
            computations[current] = {}
    header = text[text.index("HloModule ") :].split("\n", 1)[0]
    counts = [int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)]
    return _Module(computations, roots, entry, math.prod(counts))


def _bytes_of(shape: str) -> tuple[int, list[str]]:
    """Bytes and element types of a shape, or of every array in a tuple of shapes."""
    total, dtypes = 0, []
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<= ]*)\]", shape):
        width = re.search(r"\d+", dtype)  # f32, bf16, c64, s4, f8e4m3fn: the first number is the width in bits
        bits = 8 if dtype == "pred" else int(width[0]) if width else 0
        total += math.ceil(math.prod(map(int, re.findall(r"\d+", dims))) * bits / 8)
        dtypes += [dtype] if bits and dtype not in dtypes else []
    return total, dtypes


# The walk: every collective under a computation, with the trips of the loops around it.

_CALLS = ("calls", "to_apply", "branch_computations", "true_computation", "false_computation", "called_computations")


def _walk(module: _Module, name: str, trips: int, known: bool, scatters: bool) -> Iterator[Collective]:
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
            count = _trip_count(module, name, instruction)
            body, condition = (1, 1) if count is None else (count, count + 1)
            for key, times in (("condition", condition), ("body", body)):
                for callee in instruction.called(key):
                    yield from _walk(module, callee, trips * times, known and count is not None, False)
        else:
            for callee in instruction.called(*_CALLS):
                inside = scatters or "all-reduce-scatter" in callee or "all-reduce-scatter" in instruction.name
                yield from _walk(module, callee, trips, known, inside)


def _is_continuation(module: _Module, name: str, instruction: _Instruction) -> bool:
    """TPU spreads an async collective over several fusions, and repeats it in each. Only the start's counts."""
    if "async_collective_fusion_config" not in instruction.attributes:
        return False
    starts = (i for i in module.computations[name].values() if '"AsyncCollectiveStart"' in i.attributes)
    return not any(instruction.name in start.operand_names for start in starts)


def _collective(
    module: _Module, computation: str, instruction: _Instruction, trips: int, known: bool, scatters: bool
) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    kind = "reduce-scatter" if scatters and kind == "all-reduce" else kind
    size, dtypes = _operand_bytes(module, computation, instruction)
    groups = _groups(instruction, module.num_devices)
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


def _operand_bytes(module: _Module, computation: str, instruction: _Instruction) -> tuple[int, list[str]]:
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
        return _bytes_of(" ".join(f"{dtype}[{dims}]" for dims in re.findall(r"\{([\d,]*)\}", sliced[1])))
    return _bytes_of(" ".join(made[name].shape for name in names))


# Replica groups, in each form that a compiler writes.

_GROUPS = re.compile(
    r"replica_groups=(?:(?P<lists>\{(?:\{[\d,]*\},?)*\})"
    r"|\[(?P<dims>[\d,]+)\]<=\[(?P<iota>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?"
    r"|mesh\[(?P<mesh>[^\]]*)\](?:, ?device_ids=\((?P<ids>(?:[^()]|\([^()]*\))*)\))? ?\{(?P<axes>[^}]*)\})"
)
_Groups = tuple[tuple[int, ...], ...]


def _ints(text: str | None) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text or "")]


def _groups(instruction: _Instruction, num_devices: int) -> _Groups:
    pairs = re.search(r"source_target_pairs=(\{[\d,{}]*\})", instruction.attributes)
    if pairs:
        return _linked(pairs[1])
    written = re.search(r"replica_groups=.*", instruction.attributes)
    if not written:
        return (tuple(range(num_devices)),)
    found = _GROUPS.match(written[0])
    if not found:
        raise ValueError(f"Unknown form of replica groups in {instruction.name}: {written[0][:120]}")
    return _expand(found[0], num_devices)


@functools.cache
def _expand(written: str, num_devices: int) -> _Groups:
    """All groups that `written` stands for, such as `[4,2]<=[2,4]T(1,0)`."""
    found = _GROUPS.match(written)
    assert found
    if found["lists"]:
        groups = [_ints(group) for group in re.findall(r"\{([\d,]+)\}", found["lists"])] or [range(num_devices)]
        return tuple(tuple(group) for group in groups)
    if found["iota"]:
        ids = _iota(found["iota"], found["perm"]).reshape(_ints(found["dims"]))
    else:
        ids = _mesh_groups(found["mesh"], found["ids"], found["axes"])
    return tuple(tuple(group) for group in ids.tolist())


def _iota(dims: str, perm: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return ids.transpose(_ints(perm)) if perm else ids


def _mesh_groups(mesh: str, ids: str | None, axes: str) -> np.ndarray:
    """One row per group. An axis may be cut: `'x':(2)4` is the middle factor of x seen as 2 x 4 x rest."""
    sizes = {name.strip("' "): int(size) for name, size in (axis.rsplit("=", 1) for axis in mesh.split(","))}
    iota = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids or f"[{math.prod(sizes.values())}]")
    devices = _iota(iota[1], iota[2]) if iota else np.array(_ints(ids))
    spans = []  # (axis, where in it the span starts, where it ends), as products of the factors so far
    for axis, before, size in re.findall(r"'?([^',: ]+)'?(?::\((\d+)\)(\d+))?", axes):
        spans.append((axis, int(before or 1), int(before or 1) * int(size or sizes[axis])))
    factors = []
    for name, size in sizes.items():
        edges = sorted({1, size}.union(*(span[1:] for span in spans if span[0] == name)))
        factors += [(name, start, stop) for start, stop in itertools.pairwise(edges)]
    inside = [
        i
        for axis, lo, hi in spans
        for i, (name, start, stop) in enumerate(factors)
        if axis == name and lo <= start < hi
    ]
    outside = [i for i in range(len(factors)) if i not in inside]
    shape = [stop // start for _, start, stop in factors]
    return devices.reshape(shape).transpose(outside + inside).reshape(-1, math.prod(shape[i] for i in inside))


@functools.cache
def _linked(pairs: str) -> _Groups:
    """The sets of devices that source-target pairs, `{{0,1},{1,0},...}`, link together."""
    parent: dict[int, int] = {}

    def first(device: int) -> int:
        while parent.setdefault(device, device) != device:
            parent[device] = parent[parent[device]]
            device = parent[device]
        return device

    ids = _ints(pairs)
    for source, target in zip(ids[::2], ids[1::2], strict=True):
        parent[first(target)] = first(source)
    groups: dict[int, list[int]] = {}
    for device in sorted(parent):
        groups.setdefault(first(device), []).append(device)
    return tuple(tuple(group) for group in groups.values())


# Trip counts, where the compiler names none: from the counter's start, its step and the limit.


class _Value(NamedTuple):
    """An integer known as element `slot` of a loop's carry plus `offset`; as `offset` alone if `slot` is None."""

    slot: int | None
    offset: int


def _trip_count(module: _Module, computation: str, loop: _Instruction) -> int | None:
    """How often the body of a while loop in `computation` runs; None if that cannot be read."""
    named = re.search(r"known_trip_count\W+n\W+(\d+)", loop.attributes)
    if named:
        return int(named[1])
    (condition,), (body,) = loop.called("condition"), loop.called("body")
    if condition not in module.roots or body not in module.roots:
        return None
    direction, counter, limit = _compared(module, condition, module.roots[condition], None)
    if counter and limit and counter.slot is None:
        counter, limit = limit, counter
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if not counter or not limit or counter.slot is None or limit.slot is not None:
        return None
    start = _element(module, computation, loop.operand_names[0], counter.slot)
    next_ = _element(module, body, module.roots[body], counter.slot)
    if not start or start.slot is not None or not next_ or next_.slot != counter.slot:
        return None
    span, step = limit.offset - counter.offset - start.offset, next_.offset
    if direction in ("GT", "GE"):
        span, step = -span, -step
    if step <= 0 or direction not in ("LT", "GT", "LE", "GE", "NE"):
        return None
    return max(0, span // step + 1 if direction in ("LE", "GE") else -(-span // step))


def _element(module: _Module, computation: str, name: str, index: int) -> _Value | None:
    """Element `index` of the tuple that instruction `name` makes."""
    made = module.computations[computation].get(name)
    if made is None or made.opcode != "tuple":
        return None
    return _value(module, computation, made.operand_names[index], None)


def _compared(module: _Module, computation: str, name: str, given: list | None) -> tuple:
    """Direction and both sides of the comparison that a loop's condition ends in, also inside a fusion."""
    made = module.computations[computation][name]
    sides = [_value(module, computation, operand, given) for operand in made.operand_names]
    if made.opcode == "compare":
        return re.findall(r"direction=(\w\w)", made.attributes)[0], *sides
    for callee in made.called("calls", "to_apply"):
        return _compared(module, callee, module.roots[callee], sides)
    return "", None, None


def _value(module: _Module, computation: str, name: str, given: list | None) -> _Value | None:
    """What an integer is, if it can be told. `given`: the arguments of a fusion, None in a loop's own body."""
    made = module.computations[computation].get(name)
    if made is None:
        return None
    names = made.operand_names
    match made.opcode:
        case "constant" if re.fullmatch(r"-?\d+", made.operands):
            return _Value(None, int(made.operands))
        case "parameter" if given is not None:
            return given[int(made.operands)]
        case "get-tuple-element" if given is None:
            source = module.computations[computation].get(names[0])
            index = int(re.findall(r"index=(\d+)", made.attributes)[0])
            if source and source.opcode == "parameter":
                return _Value(index, 0)
            return _element(module, computation, names[0], index)
        case "copy" | "convert" | "bitcast" | "reshape":
            return _value(module, computation, names[0], given)
        case "add" | "subtract":
            left, right = (_value(module, computation, operand, given) for operand in names)
            if made.opcode == "add" and left and left.slot is None:
                left, right = right, left
            if left and right and right.slot is None:
                return _Value(left.slot, left.offset + (right.offset if made.opcode == "add" else -right.offset))
        case "fusion" | "call":
            inside = [_value(module, computation, operand, given) for operand in names]
            callee = made.called("calls", "to_apply")[0]
            return _value(module, callee, module.roots[callee], inside)
    return None
