"""The content of `jaxshard explain`: each parameter's placement, bytes and line; each collective's line and bytes."""

from __future__ import annotations

import collections
import dataclasses
import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxshard.base.tree import owner_of, parent_of, shape_of
from jaxshard.base.types import AnyMesh, AxisSizes, Names, Tree
from jaxshard.inspect.own_steps import Argument, OwnStep, excess
from jaxshard.inspect.peak import Held, peak
from jaxshard.inspect.reports import memory_of
from jaxshard.inspect.sources import Frame, frames
from jaxshard.inspect.traffic import Collective, collectives
from jaxshard.layout.cutting import Leaf
from jaxshard.layout.layout import Layout
from jaxshard.loss.params import leaf_plan
from jaxshard.programs.source import part_of, place_of
from jaxshard.step.step import TrainStep, loss_of


class Subject(NamedTuple):
    """A step, and the shapes of its arguments."""

    step: TrainStep
    params: Tree
    state: Tree
    batch: Tree
    more: Sequence[Tree] = ()

    @classmethod
    def of(cls, step: TrainStep, params: Tree, batch: Tree, *more: Tree) -> Subject:
        """Makes one from arrays or shapes. (Arrays, if the optimizer's init reads the params' values.)"""
        state = loss_of(step).setup.abstract_state(params)
        return cls(step, *(jax.tree.map(_shape, tree) for tree in (params, state, batch, more)))

    @property
    def mesh(self) -> AnyMesh:
        """The step's mesh."""
        return loss_of(self.step).setup.mesh

    def lower(self) -> jax.stages.Lowered:
        """The step, lowered for these shapes."""
        return self.step.lower(self.params, self.state, self.batch, *self.more)


def _shape(x: Any) -> Any:
    """An array's shape; other values unchanged, for the step to reject."""
    return shape_of(x) if hasattr(x, "shape") and hasattr(x, "dtype") else x


@dataclasses.dataclass(frozen=True)
class Param:
    """A parameter with its gradient and state.

    Attributes:
      path: its names, joined by slashes.
      shape, dtype: of the global array.
      spec: the PartitionSpec at rest, an entry for each dim that it names: None, an axis, or several.
      why: the reason for the spec.
      state_why: the reason for its gradient's and state's specs; "" if it has none, or they are the parameter's.
      bytes: on each device: of "params", of "gradient" as the optimizer gets it, of "state", and of the part of the
        state that is "state on host".
      gathered: how it is gathered, or its gradient reduced.
      lines: the source lines of that.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[Any, ...]
    why: str
    state_why: str
    bytes: Mapping[str, int]
    gathered: str
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Sent:
    """A collective of the compiled step.

    Attributes:
      line: its source line; "" if unknown.
      code: the text of that line, if the file exists.
      part: its part of the step, if no line is known.
      joined: further lines and parts, whose collectives the compiler merged into it.
      kind, axes, dtype: "all-gather", "data", "f32"; several axes are joined by " x ", several types by "+".
      bytes: payload of one execution on each device, as in `jaxshard.inspect.Collective`.
      times: executions in each step.
      wire_bytes: bytes that each device sends in each step.
      name: in the compiled program.
      is_covered: whether the schedule runs compute beside it, by the compiler's plan; else the devices wait for it.
    """

    line: str
    code: str
    part: str
    joined: tuple[str, ...]
    kind: str
    axes: str
    dtype: str
    bytes: int
    times: int
    wire_bytes: float
    name: str
    is_covered: bool = False


@dataclasses.dataclass(frozen=True)
class AtPeak:
    """What one source line holds at the peak.

    Attributes:
      line, code, part: as for `Sent`.
      bytes: of all together, on each device.
      shapes: of the arrays, each with how many there are, the largest first.
    """

    line: str
    code: str
    part: str
    bytes: int
    shapes: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of one device at the peak, in bytes.

    Attributes:
      peak: by the compiler's own account; None if it gives none.
      read: the same, as read from the program's schedule: the arguments, and all that is held beside them.
      arguments: params, state and batch.
      held: what is held beside them, by line, the largest first.
    """

    peak: int | None
    read: int
    arguments: int
    held: tuple[AtPeak, ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """All results about a step. `sent` is None if nothing was compiled; `memory` if it was not asked for.

    A step of the user's own has `arguments` in place of params, and `told`: what jaxshard has to say of it.
    """

    strategy: str
    sizes: AxisSizes
    platform: str
    microbatches: int
    params: tuple[Param, ...]
    totals: Mapping[str, int]
    loss_rows: str
    sent: tuple[Sent, ...] | None = None
    trips_known: bool = True
    memory: Memory | None = None
    arguments: tuple[Argument, ...] = ()
    told: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain dicts, lists, strings and numbers."""
        return dataclasses.asdict(self) | {"arguments": [each._asdict() for each in self.arguments]}


def explained(subject: Subject | OwnStep) -> Explanation:
    """The explanation from the layout and a trace of the loss; of a user's own step, from its arguments."""
    if isinstance(subject, OwnStep):
        mesh, listed = subject.mesh, subject.listed()
        platform = mesh.devices.flat[0].platform
        return Explanation("a step of your own", dict(mesh.shape), platform, 1, (), {}, "", arguments=listed)
    loss = loss_of(subject.step)
    plan = loss.plan(subject.params, subject.batch, *subject.more)
    layout = loss.planned_layout(subject.params, plan, subject.state)
    states = _states(layout)
    found = [
        _param(layout, leaf, states.get(leaf.names, []), lines)
        for leaf, lines in zip(layout.params, leaf_plan.lines(plan.program.jaxpr, plan.leaves), strict=True)
    ]
    return Explanation(
        strategy=layout.config.strategy,
        sizes=dict(layout.sizes),
        platform=layout.platform,
        microbatches=loss.options.microbatches,
        params=tuple(found),
        totals=layout.bytes_per_device,
        loss_rows=layout.loss_rows,
    )


def _states(layout: Layout) -> dict[Names, list[Leaf]]:
    """parameter -> its leaves of the state."""
    owners = {leaf.names: leaf for leaf in layout.params if not leaf.frozen}
    found: dict[Names, list[Leaf]] = {}
    for leaf in layout.state:
        owner = owner_of(leaf.names, owners) or parent_of(leaf.names, owners)
        if owner is not None:
            found.setdefault(owner.names, []).append(leaf)
    return found


def _param(layout: Layout, leaf: Leaf, states: Sequence[Leaf], lines: tuple[str, ...]) -> Param:
    def of_state(memory: str) -> int:
        return sum(each.bytes(each.cut, layout.sizes) for each in states if each.memory == memory)

    gradient = 0 if leaf.frozen else leaf.bytes(leaf.cut, layout.sizes)
    held = {"params": leaf.bytes(leaf.params.spec, layout.sizes), "gradient": gradient, "state": of_state("device")}
    held |= {"state on host": on_host} if (on_host := of_state("host")) else {}
    return Param(
        path=leaf.path,
        shape=leaf.shape,
        dtype=str(leaf.dtype),
        spec=tuple(leaf.params.spec),
        why=layout.why("params", leaf),
        state_why="" if leaf.frozen or not layout.config.cuts.state else layout.why("state", leaf),
        bytes=held,
        gathered=(layout.gathers or {}).get(leaf.names, ""),
        lines=lines,
    )


# The compiled step.


def with_compiled(found: Explanation, compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> Explanation:
    """Adds the collectives of the compiled step, in program order."""
    text = compiled.as_text()
    assert text is not None
    listed, known = collectives(text), frames(text)
    sent = tuple(_sent(each, known.get(each.name, []), mesh) for each in listed)
    known_trips = all(each.trips_known for each in listed)
    return dataclasses.replace(found, sent=sent, trips_known=known_trips, told=excess(compiled, listed))


def _sent(collective: Collective, known: Sequence[Sequence[Frame]], mesh: jax.sharding.Mesh) -> Sent:
    places = list(dict.fromkeys(map(_where, known))) or [("", "a collective added by the compiler")]
    (line, part), *others = places
    return Sent(
        line=line,
        code=_code(line) if line else "",
        part=part,
        joined=tuple(line or part for line, part in others),
        kind=collective.kind,
        axes=" x ".join(collective.axes(mesh)),
        dtype=collective.dtype,
        bytes=collective.bytes,
        times=collective.trips,
        wire_bytes=collective.wire_bytes,
        name=collective.name,
        is_covered=bool(collective.overlapped),
    )


def with_memory(found: Explanation, compiled: jax.stages.Compiled) -> Explanation:
    """Adds what the compiled step holds at its peak, by line of the source."""
    read = peak(compiled)
    groups: dict[tuple[str, str], list[Held]] = {}
    for each in read.held:
        groups.setdefault(_where(each.stack) if each.stack else ("", _UNKNOWN), []).append(each)
    held = sorted((_at_peak(*place, of_line) for place, of_line in groups.items()), key=lambda one: -one.bytes)
    memory = Memory(memory_of(compiled).get("peak_bytes"), read.bytes, read.argument_bytes, tuple(held))
    return dataclasses.replace(found, memory=memory)


_UNKNOWN = "copies added by the compiler"


def _at_peak(line: str, part: str, held: Sequence[Held]) -> AtPeak:
    shapes = collections.Counter(each.shape for each in held)
    return AtPeak(line, _code(line) if line else "", part, sum(each.bytes for each in held), tuple(shapes.items()))


def _where(stack: Sequence[Frame]) -> tuple[str, str]:
    """(the user's line, "") or ("", the part of the step, with a library's line if that caused it)."""
    place = place_of((frame.file, frame.line) for frame in stack)
    if place.own:
        return place.own, ""
    part = part_of((frame.file, frame.function) for frame in stack) or "the step"
    return "", f"{part} ({place.library})" if place.library else part


def _code(line: str) -> str:
    """The text of a line of a file in the current folder or in an installed package."""
    file, _, number = line.rpartition(":")
    found = (linecache.getline(os.path.join(folder, file), int(number)) for folder in (os.getcwd(), *sys.path))
    return next(filter(None, found), "").strip()
