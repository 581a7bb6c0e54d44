"""What a compiled program holds at its peak, and the source lines that made it, read from the scheduled HLO text.

Each instruction holds its result until the last one that reads it. What the compilers compute in place counts once: a
loop's carry, an update of a slice, an element-wise result over an operand that nothing reads later, a result over a
donated argument. The compilers' own plan (`Report.peak_bytes`) may differ: compare it with `Peak.bytes`.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence

import jax

from jaxshard.inspect import hlo
from jaxshard.inspect.buffers import Buffer, Value, buffers_of, element, flat
from jaxshard.inspect.sources import Frame, origins
from jaxshard.inspect.traffic import text_of


@dataclasses.dataclass(frozen=True)
class Held:
    """A result that is held at the peak.

    Attributes:
      bytes: on one device, padded as the compiler pads it.
      shape: in HLO's notation, such as "f32[8,1024]".
      name: of the instruction in the HLO text.
      op_name: JAX's path to the operation; "" if there is none.
      stack: the functions on the stack when it was traced, the innermost first; () if unknown.
    """

    bytes: int
    shape: str
    name: str
    op_name: str
    stack: tuple[Frame, ...]


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak of a program on one device.

    Attributes:
      bytes: those of the arguments and of everything else held at the peak.
      argument_bytes: those of the arguments.
      held: everything else held at the peak, the largest first.
    """

    bytes: int
    argument_bytes: int
    held: tuple[Held, ...]


def peak(compiled_or_text: jax.stages.Compiled | str) -> Peak:
    """What a compiled program holds at its peak in the device's main memory.

    A TPU's VMEM, which holds small programs, is not counted.

    Args:
        compiled_or_text: `step.lower(...).compile()`, for any platform, or its `as_text()`.

    Returns:
        A `Peak`.

    Raises:
        TypeError, ValueError: as `collectives`.
    """
    text = text_of(compiled_or_text)
    module = hlo.parse(text)
    stack_of, made = origins(module, text), module.computations[module.entry]
    inputs = {int(i.operands): buffers_of(i, module.entry, i.shape) for i in made.values() if i.opcode == "parameter"}
    run = _Run(module, module.entry, [inputs[number] for number in sorted(inputs)])
    run.put_over(_aliases(text, run.inputs, run.result))
    found = sorted(run.held(), key=lambda one: -one.bytes)
    arguments = sum(one.bytes for one in flat(run.inputs))
    held = [_held(one, stack_of(one.computation, one.maker.name)) for one in found]
    return Peak(arguments + sum(one.bytes for one in held), arguments, tuple(held))


def _held(buffer: Buffer, stack: tuple[Frame, ...]) -> Held:
    op_name = re.search(r'op_name="([^"]*)"', buffer.maker.attributes)
    return Held(buffer.bytes, buffer.shape, buffer.maker.name, op_name[1] if op_name else "", stack)


class _Run:
    """One computation, with the values of its parameters.

    Attributes:
      inputs: the values of its parameters.
      result: the value of its root.
    """

    def __init__(self, module: hlo.Module, computation: str, inputs: Sequence[Value]):
        self.inputs, self._module, self._computation = inputs, module, computation
        self._within: dict[int, list[Buffer]] = {}
        self._instructions = list(module.computations[computation].values())
        self._values: dict[str, Value] = {}
        self._own: list[Buffer] = []
        for place, instruction in enumerate(self._instructions):
            operands = [self._values.get(name, []) for name in instruction.operand_names]
            for one in flat(operands):
                one.read = place
            self._values[instruction.name] = self._value(place, instruction, operands)
        self.result = self._values.get(module.roots[computation], [])
        for one in flat(self.result):
            one.read = len(self._instructions)

    def put_over(self, pairs: Iterator[tuple[Buffer, Buffer]]) -> None:
        """Results that lie over inputs take no memory of their own, if nothing reads the input after they are made."""
        reads = self._last_reads()
        for result, given in pairs:
            if result is not given and result.made >= reads.get(id(given), -1):
                result.bytes = 0

    def _last_reads(self) -> dict[int, int]:
        found = {}
        for place, instruction in enumerate(self._instructions):
            if instruction.opcode not in _VIEWS:
                for name in instruction.operand_names:
                    found |= {id(one): place for one in flat(self._values.get(name, []))}
        return found

    def held(self) -> list[Buffer]:
        """All that is held at the peak, beside the inputs."""
        num = len(self._instructions) + 1
        sizes = [0] * (num + 1)
        last: dict[tuple[int, int], int] = {}  # (place, bytes) -> how many are read there for the last time
        for one in self._own:
            last[one.read, one.bytes] = last.get((one.read, one.bytes), 0) + 1
        for one in self._own:
            if _is_pointwise(one.maker) and last.get((one.made, one.bytes), 0):
                last[one.made, one.bytes] -= 1  # it is written over an operand
                one.first = one.made + 1
            sizes[one.first] += one.bytes
            sizes[max(min(one.read, num - 1), one.first - 1) + 1] -= one.bytes
        total = list(itertools.accumulate(sizes))
        for place, buffers in self._within.items():
            total[place] += sum(one.bytes for one in buffers)
        at = max(range(num), key=lambda place: total[place])
        return [one for one in self._own if one.bytes and one.first <= at <= one.read] + self._within.get(at, [])

    def _value(self, place: int, instruction: hlo.Instruction, operands: list[Value]) -> Value:
        opcode = instruction.opcode
        if opcode == "parameter":
            return self.inputs[int(instruction.operands)] if self.inputs else []
        if opcode == "constant":
            return []
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element":
            return element(operands[0], int(re.findall(r"index=(\d+)", instruction.attributes)[0]))
        if opcode.endswith("-done"):
            return _of_done(opcode, operands[0])
        if opcode in _VIEWS or opcode.endswith("-update"):
            return operands[0]
        if opcode == "while":
            self._enter(place, instruction.called("body"), [operands[0]], is_loop=True)
            return operands[0]
        if opcode == "call":
            return self._enter(place, instruction.called("to_apply"), operands, is_loop=False)
        if opcode == "conditional":
            branches = instruction.called("branch_computations", "true_computation", "false_computation")
            self._enter(place, branches, [], is_loop=False)
        return self._new(place, instruction, operands)

    def _enter(self, place: int, callees: Sequence[str], inputs: Sequence[Value], *, is_loop: bool) -> Value:
        """Runs the computations that an instruction calls; what the largest holds at its peak is held there, too."""
        result: Value = []
        for callee in callees:
            run = _Run(self._module, callee, _copies(inputs))
            if is_loop:
                run.put_over(zip(flat(run.result), flat(run.inputs), strict=False))
            held, result = run.held(), run.result
            if sum(one.bytes for one in held) > sum(one.bytes for one in self._within.get(place, [])):
                self._within[place] = held
        return self._adopted(place, result) if not is_loop else []

    def _adopted(self, place: int, value: Value) -> Value:
        if isinstance(value, list):
            return [self._adopted(place, one) for one in value]
        one = dataclasses.replace(value, made=place, read=place, first=place)
        self._own.append(one)
        return one

    def _new(self, place: int, instruction: hlo.Instruction, operands: Sequence[Value] = ()) -> Value:
        value = buffers_of(instruction, self._computation, instruction.shape)
        if instruction.opcode.endswith("-start") and isinstance(value, list) and len(value) > 1:
            given = 1 if instruction.opcode == "copy-start" else 0  # beside the result; the operation only reads it
            value[given] = operands[0] if len(operands) == 1 else list(operands)
        over = self._written_over(instruction, operands)
        leaves = [value] if not isinstance(value, list) else value
        found = [over.get(i, one) for i, one in enumerate(leaves)]
        read = set(map(id, flat(operands)))
        for one in flat(found):
            if id(one) not in read:
                one.made = one.read = one.first = place
                self._own.append(one)
        return found if isinstance(value, list) else found[0]

    def _written_over(self, instruction: hlo.Instruction, operands: Sequence[Value]) -> dict[int, Value]:
        """Index of a result -> the operand over which it is written: that of an update."""
        if instruction.opcode in _UPDATES:
            return {0: operands[0]}
        callees = instruction.called("calls") if instruction.opcode == "fusion" else []
        inside = self._module.computations.get(callees[0], {}) if callees else {}
        root = inside.get(self._module.roots.get(callees[0], "")) if callees else None
        if root is None:
            return {}
        roots = [inside.get(name) for name in root.operand_names] if root.opcode == "tuple" else [root]
        found = {}
        for i, one in enumerate(roots):
            update = _uncast(inside, one)
            if update is None or update.opcode not in _UPDATES:
                continue
            given = _uncast(inside, inside.get(update.operand_names[0]))
            if given is not None and given.opcode == "parameter":
                operand = operands[int(given.operands)]
                found |= {} if isinstance(operand, list) else {i: operand}
        return found


def _uncast(inside: dict[str, hlo.Instruction], one: hlo.Instruction | None) -> hlo.Instruction | None:
    """What an instruction of a fusion only casts or copies; itself, if it does more."""
    while one is not None and one.opcode in ("bitcast", "convert", "copy"):
        one = inside.get(one.operand_names[0])
    return one


_UPDATES = {"dynamic-update-slice", "scatter"}
_VIEWS = {"bitcast", "opt-barrier", "optimization-barrier", "add-dependency", "tuple", "get-tuple-element", "domain"}


def _is_pointwise(instruction: hlo.Instruction) -> bool:
    return instruction.opcode in ("add", "multiply", "select", "copy") or "kind=kLoop" in instruction.attributes


def _of_done(opcode: str, started: Value) -> Value:
    """The value of the end of an asynchronous operation."""
    if not isinstance(started, list) or opcode == "all-reduce-done":
        return started
    return started[0] if opcode == "copy-done" else element(started, 1)


def _copies(value: Value) -> Value:
    """The inputs of a computation: buffers that its caller holds."""
    if isinstance(value, list | tuple):
        return [_copies(one) for one in value]
    return dataclasses.replace(value, made=-1, read=-1, first=-1)


def _aliases(text: str, inputs: Sequence[Value], result: Value) -> Iterator[tuple[Buffer, Buffer]]:
    """(result, argument) of the program, where the one is written over the other."""
    header = text[text.index("HloModule ") :].split("\n", 1)[0]
    for output, number in re.findall(r"\{([\d, ]*)\}: \((\d+),", header):
        value = result
        for index in re.findall(r"\d+", output):
            value = element(value, int(index))
        yield from zip(flat(value), flat(inputs[int(number)]), strict=False)
