"""The source lines of a compiled program's operations, read from its HLO text."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax

from jaxshard.inspect import hlo
from jaxshard.inspect.traffic import COLLECTIVES, text_of


class Frame(NamedTuple):
    """A function on the stack when an operation was traced, and its line."""

    file: str
    line: int
    function: str


def frames(compiled_or_text: jax.stages.Compiled | str) -> dict[str, list[tuple[Frame, ...]]]:
    """The stack from which each collective was traced, the innermost function first.

    JAX keeps the innermost 10 functions, or `jax_traceback_in_locations_limit`.

    Args:
        compiled_or_text: as for `collectives`.

    Returns:
        `Collective.name` -> stacks, its own first. If a collective has several operands, because the compiler merged
        several collectives, or no stack of its own, because the compiler added it, the stacks of its operands follow.
        [] if nothing is known.

    Raises:
        TypeError: as `collectives`.
    """
    text = text_of(compiled_or_text)
    program = _Program(hlo.parse(text), _Stacks(text))
    found: dict[str, list[tuple[Frame, ...]]] = {}
    for computation, made in program.module.computations.items():
        for instruction in made.values():
            if instruction.opcode.removesuffix("-start") in COLLECTIVES:
                own, given = program.stacks.of(instruction), instruction.operand_names
                theirs = [] if own and len(given) == 1 else [program.origin(computation, name) for name in given]
                found[instruction.name] = list(dict.fromkeys(filter(None, [own, *theirs])))
    return found


def origins(module: hlo.Module, text: str) -> Callable[[str, str], tuple[Frame, ...]]:
    """A function of a computation and an instruction: the stack from which its value was traced.

    It is that of an operand, if the compiler added the instruction; () if unknown. `module` is the parsed text.
    """
    return _Program(module, _Stacks(text)).origin


_MOST_STEPS = 8  # from a value back to its origin


class _Program:
    """A parsed program, and the stacks of its instructions."""

    def __init__(self, module: hlo.Module, stacks: "_Stacks"):
        self.module, self.stacks = module, stacks
        calls = ((place, call) for place, made in module.computations.items() for call in made.values())
        self._fusions = {
            callee: (place, call) for place, call in calls if call.opcode == "fusion" for callee in call.called("calls")
        }

    def origin(self, computation: str, name: str, steps: int = _MOST_STEPS) -> tuple[Frame, ...]:
        """The stack of a value, or of its operands if it has none, like the compiler's own pads and slices."""
        made = self.module.computations[computation].get(name)
        if made is None or not steps:
            return ()
        if found := self.stacks.of(made):
            return found
        if made.opcode == "parameter":
            if computation not in self._fusions:
                return ()
            place, call = self._fusions[computation]
            return self.origin(place, call.operand_names[int(made.operands)], steps - 1)
        return next(filter(None, (self.origin(computation, one, steps - 1) for one in made.operand_names)), ())


class _Stacks:
    """The stack tables at the head of HLO text, to which operations' metadata refer.

    `parent_frame_id` counts from 1 in some versions of XLA, where 1 means no frame, and from 0 in others.
    """

    def __init__(self, text: str):
        self._files = {number: name.strip('"') for number, name in _table(text, "FileNames")}
        self._functions = {number: name.strip('"') for number, name in _table(text, "FunctionNames")}
        self._locations = {number: _fields(line) for number, line in _table(text, "FileLocations")}
        self._frames = {number: _fields(line) for number, line in _table(text, "StackFrames")}
        parents = [fields.get("parent_frame_id", 0) for fields in self._frames.values()]
        self._none = min(parents, default=0)

    def of(self, instruction: hlo.Instruction) -> tuple[Frame, ...]:
        """An instruction's stack, the innermost function first; () if unknown."""
        number = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        if number:
            return tuple(self._from(int(number[1])))
        written = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        return (Frame(written[1], int(written[2]), ""),) if written else ()

    def _from(self, number: int) -> Iterator[Frame]:
        seen: set[int] = set()
        while number in self._frames and number not in seen:
            seen.add(number)
            fields = self._frames[number]
            place = self._locations.get(fields.get("file_location_id", 0), {})
            file = self._files.get(place.get("file_name_id", 0), "")
            yield Frame(file, place.get("line", 0), self._functions.get(place.get("function_name_id", 0), ""))
            number = fields.get("parent_frame_id", 0) - self._none


def _table(text: str, name: str) -> Iterator[tuple[int, str]]:
    """The numbered lines below a heading."""
    found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.M)
    for line in found[1].splitlines() if found else ():
        number, _, rest = line.partition(" ")
        yield int(number), rest


def _fields(line: str) -> Mapping[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)}
