"""The arrays that an instruction of a compiled program makes, and the memory that each takes."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

from jaxshard.inspect import hlo

Value: TypeAlias = Any  # of an instruction: a `Buffer`, or a list of values, as its tuples are


@dataclasses.dataclass(eq=False)
class Buffer:
    """One array: who made it, and from which instruction of a computation to which it is held."""

    maker: hlo.Instruction
    computation: str
    shape: str
    bytes: int
    made: int = -1
    read: int = -1
    first: int = -1  # where it takes memory of its own; after `made`, if it is written over an operand


_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](?:\{([^}]*)\})?")


def buffers_of(instruction: hlo.Instruction, computation: str, shape: str) -> Value:
    """A buffer for each array of a shape, in lists as its tuples are."""
    shape = re.sub(r"/\*.*?\*/", "", shape).strip()
    if not shape.startswith("("):
        if (found := _ARRAY.match(shape)) is None:
            return []
        dtype, dims, layout = found.groups("")
        return Buffer(instruction, computation, f"{dtype}[{dims}]", _padded(dtype, dims, layout))
    return [buffers_of(instruction, computation, part) for part in _parts(shape[1:-1])]


def _parts(text: str) -> Iterator[str]:
    """The parts between commas that stand in no brackets."""
    depth, start = 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            yield text[start:i]
            start = i + 1
    if text[start:].strip():
        yield text[start:]


def _padded(dtype: str, dims: str, layout: str) -> int:
    """Bytes of an array in main memory, its last dims padded to the layout's tile; 0 in another memory."""
    if re.search(r"S\([1-9]\d*\)", layout):
        return 0
    sizes = [int(n) for n in re.findall(r"\d+", dims)]
    order, tile = re.findall(r"\d+", layout.split(":")[0]), re.search(r"T\(([\d,]+)\)", layout)
    if tile and len(order) == len(sizes):
        for number, dim in zip(reversed(tile[1].split(",")), map(int, order), strict=False):
            sizes[dim] = -(-sizes[dim] // int(number)) * int(number)
    return hlo.bytes_of(f"{dtype}[{','.join(map(str, sizes))}]")[0] if math.prod(sizes) else 0


def element(value: Value, index: int) -> Value:
    return value[index] if isinstance(value, list) and index < len(value) else []


def flat(value: Value) -> list[Buffer]:
    if not isinstance(value, list | tuple):
        return [value]
    return [one for each in value for one in flat(each)]
