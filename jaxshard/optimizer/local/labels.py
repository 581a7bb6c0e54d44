"""Labels of pairs of values: one from an update of shards, the other from the update of whole leaves."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from jaxshard.base.types import Equation, Var

SAME, FILL = "same", "fill"
Trail: TypeAlias = tuple[Equation, ...]  # an equation, after the calls around it
Fault: TypeAlias = Literal["mixes elements", "is not known", "varies", "has an effect"]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of the leaf at `path`; `dims` are pairs (dim counted from the end, the axes that cut it)."""

    path: str
    dims: tuple[tuple[int, tuple[str, ...]], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed:
    """The pair is unrelated, since the update has a fault; `what` names its first place in words.

    The faults: an operation combines elements of different devices, or it is unknown whether it does; a value differs
    from device to device; an operation has an effect, which would happen on each device.
    """

    what: str
    trail: Trail = ()  # the equation that has the fault
    fault: Fault = "mixes elements"


Label = str | Shard | Mixed


def mixed(eqn: Equation, labels: Sequence[Label], trail: Trail, operation: str) -> Mixed:
    """The label Mixed for the results of `eqn`: the first Mixed one of `labels`, else a new one."""
    for label in labels:
        if isinstance(label, Mixed):
            return label if label.trail else dataclasses.replace(label, trail=trail)
    largest = max((*eqn.invars, *eqn.outvars), key=size_of, default=None)
    path = next((label.path for label in labels if isinstance(label, Shard)), None)
    to = (
        f"{path}, and each device holds only a part of it here"
        if path
        else f"an array with a shard's shape, {shape_of(largest) if largest else ()}"
    )
    return Mixed(f"it applies {operation} to {to}", trail)


def join(rows: Sequence[Sequence[Label]], eqn: Equation, trail: Trail) -> list[Label]:
    """Joins the labels of branches: FILL and another label give the other; two different relations give Mixed."""
    joined: list[Label] = []
    for column in zip(*rows, strict=True):
        known: list[Label] = list(dict.fromkeys(label for label in column if label != FILL))
        faults = [label for label in known if isinstance(label, Mixed)]
        alike = len({cut_of(label) for label in known}) <= 1
        if faults or not alike:
            joined.append(faults[0] if faults else mixed(eqn, known, trail, f"`{eqn.primitive.name}`"))
        else:
            joined.append(known[0] if known else FILL)
    return joined


def cut_of(label: Label) -> object:
    """The part of a label that must agree with another: how a shard is cut, whichever leaf it is from."""
    return label.dims if isinstance(label, Shard) else label


def is_same(label: Label, v: Var, w: Var) -> bool:
    """Whether the pair is equal, on every device."""
    return label == SAME or (label == FILL and shape_of(v) == shape_of(w))


def shape_of(v: Var) -> tuple[int, ...]:
    """The shape of a variable; () for what has none."""
    return tuple(getattr(v.aval, "shape", ()))


def size_of(v: Var) -> int:
    """The number of elements of a variable."""
    return math.prod(shape_of(v))
