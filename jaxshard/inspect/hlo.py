"""Parses HLO text: computations, instructions, shapes, replica groups, and loops' trip counts.

One instruction is one line: `ROOT %name = f32[8,1024]{1,0:T(8,128)} opcode(%operand, f32[] %typed), attribute=v, ...`
"""

import functools
import itertools
import math
import re
from typing import NamedTuple

import numpy as np


class Instruction(NamedTuple):
    """One line of HLO text."""

    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str

    @property
    def operand_names(self) -> list[str]:
        """The operands' names, without `/*index=5*/` comments and shapes."""
        bare = re.sub(r"/\*.*?\*/|\w+\[[^\]]*\](\{[^}]*\})?|[()\s]", "", self.operands)
        return re.findall(r"%?([\w.\-]+)(?=,|$)", bare)

    def called(self, *keys: str) -> list[str]:
        """The computations named in the attributes `keys`, each `key=%name` or `key={%name, %name}`."""
        found = re.findall(rf"\b(?:{'|'.join(keys)})=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return [name for value in found for name in re.findall(r"[\w.\-]+", value)]


class Module(NamedTuple):
    """A parsed program."""

    computations: dict[str, dict[str, Instruction]]  # in the order of execution
    roots: dict[str, str]  # computation -> the name of its root instruction
    entry: str
    num_devices: int


_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_BALANCED = r"(?:[^()]++|\((?:[^()]++|\((?:[^()]++|\([^()]*+\))*+\))*+\))*+"
_INSTRUCTION = re.compile(rf"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(({_BALANCED})\)(.*)")


def parse(text: str) -> Module:
    computations, roots, entry, current = {}, {}, "", ""
    for line in text.splitlines():
        if line[:1].isspace() and current and (found := _INSTRUCTION.match(line)):
            computations[current][found[2]] = Instruction(*found.groups()[1:])
            roots[current] = found[2] if found[1] else roots.get(current, "")
        elif not line.startswith("HloModule") and (found := _COMPUTATION.match(line)):
            current = found[2]
            entry = current if found[1] else entry
            computations[current] = {}
    header = text[text.index("HloModule ") :].split("\n", 1)[0]
    counts = [int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)]
    return Module(computations, roots, entry, math.prod(counts))


def bytes_of(shape: str) -> tuple[int, list[str]]:
    """Total bytes and element types of a shape, or of a tuple of shapes."""
    total, dtypes = 0, []
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<= ]*)\]", shape):
        width = re.search(r"\d+", dtype)  # f32, bf16, c64, s4, f8e4m3fn: the first number is the width in bits
        bits = 8 if dtype == "pred" else int(width[0]) if width else 0
        total += math.ceil(math.prod(map(int, re.findall(r"\d+", dims))) * bits / 8)
        dtypes += [dtype] if bits and dtype not in dtypes else []
    return total, dtypes


# Replica groups, in every notation that compilers use.

_GROUPS = re.compile(
    r"replica_groups=(?:(?P<lists>\{(?:\{[\d,]*\},?)*\})"
    r"|\[(?P<dims>[\d,]+)\]<=\[(?P<iota>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?"
    r"|mesh\[(?P<mesh>[^\]]*)\](?:, ?device_ids=\((?P<ids>(?:[^()]|\([^()]*\))*)\))? ?\{(?P<axes>[^}]*)\})"
)
Groups = tuple[tuple[int, ...], ...]


def _ints(text: str | None) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text or "")]


def groups_of(instruction: Instruction, num_devices: int) -> Groups:
    """The device ids of each group of a collective; for a permute, of each set of linked devices."""
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
def _expand(written: str, num_devices: int) -> Groups:
    """Expands a notation of groups such as `[4,2]<=[2,4]T(1,0)`."""
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
    """One row per group. An axis may be split: `'x':(2)4` is the middle factor of x = 2 x 4 x rest."""
    sizes = {name.strip("' "): int(size) for name, size in (axis.rsplit("=", 1) for axis in mesh.split(","))}
    iota = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids or f"[{math.prod(sizes.values())}]")
    devices = _iota(iota[1], iota[2]) if iota else np.array(_ints(ids))
    spans = _spans(axes, sizes)
    factors = []  # (axis, where in it the factor starts, its size)
    for name, size in sizes.items():
        edges = sorted({1, size}.union(*(span[1:] for span in spans if span[0] == name)))
        factors += [(name, start, stop // start) for start, stop in itertools.pairwise(edges)]
    named = [(axis, start) for axis, start, _ in factors]
    inside = [i for axis, lo, hi in spans for i, (name, at) in enumerate(named) if axis == name and lo <= at < hi]
    outside = [i for i in range(len(factors)) if i not in inside]
    shape = [size for *_, size in factors]
    return devices.reshape(shape).transpose(outside + inside).reshape(-1, math.prod(shape[i] for i in inside))


def _spans(axes: str, sizes: dict[str, int]) -> list[tuple[str, int, int]]:
    """(axis, start, end) of each axis in `axes`; start and end are products of the axis's factors up to there."""
    found = []
    for axis, before, size in re.findall(r"'?([^',: ]+)'?(?::\((\d+)\)(\d+))?", axes):
        start = int(before or 1)
        found.append((axis, start, start * int(size or sizes[axis])))
    return found


@functools.cache
def _linked(pairs: str) -> Groups:
    """The sets of devices that source-target pairs `{{0,1},{1,0},...}` link."""
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


# Trip counts, if the compiler gives none: from the counter's start, step and limit.


class _Value(NamedTuple):
    """An integer: element `slot` of a loop's carry plus `offset`; just `offset` if `slot` is None."""

    slot: int | None
    offset: int


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """The trip count of a while loop in `computation`; None if it cannot be read."""
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


def _element(module: Module, computation: str, name: str, index: int) -> _Value | None:
    """Element `index` of the tuple that instruction `name` makes."""
    made = module.computations[computation].get(name)
    if made is None or made.opcode != "tuple":
        return None
    return _value(module, computation, made.operand_names[index], None)


def _compared(module: Module, computation: str, name: str, given: list | None) -> tuple:
    """(direction, left, right) of the comparison that ends a loop's condition, also inside a fusion."""
    made = module.computations[computation][name]
    sides = [_value(module, computation, operand, given) for operand in made.operand_names]
    if made.opcode == "compare":
        return re.findall(r"direction=(\w\w)", made.attributes)[0], *sides
    for callee in made.called("calls", "to_apply"):
        return _compared(module, callee, module.roots[callee], sides)
    return "", None, None


def _value(module: Module, computation: str, name: str, given: list | None) -> _Value | None:
    """An integer's value, if known. `given`: the arguments of a fusion; None in a loop's own body."""
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
