"""The output of `jaxshard explain`: lines of at most 80 columns, unless names are longer. Nothing is cut off."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

from rich.console import Console

from jaxshard.cli.explain.explanation import Argument, AtPeak, Explanation, Param, Sent
from jaxshard.system.text import printable, size_in_words

_WIDTH, _CELL = 80, 10  # columns of a line, and of a number in it
_INDENT = "    "
_MOST_LINES, _MOST_SHAPES = 12, 4  # that are shown of the peak


def show_params(console: Console, what: str, found: Explanation) -> None:
    """Prints each parameter: its placement, bytes on each device, the reason, and where it is gathered."""
    axes = " x ".join(f"{axis} {size}" for axis, size in found.sizes.items() if size > 1) or "one device"
    batches = f", {found.microbatches} microbatches" if found.microbatches > 1 else ""
    _say(console, f"{what}: {found.strategy} over {axes} ({found.platform}){batches}")
    if found.loss_rows:
        _say(console, f"rows: {found.loss_rows}")
    _say(console, "")
    if found.arguments:
        _show_arguments(console, found.arguments)
        return
    _row(console, "Parameters, and bytes on each device", ("params", "gradient", "state"))
    for param in found.params:
        sizes = (size_in_words(param.bytes[kind]) for kind in ("params", "gradient", "state"))
        _row(console, f"{param.path}  {_shape(param)}", sizes)
        for note in _notes(param):
            _say(console, note, _INDENT)
    totals = (size_in_words(found.totals[kind]) for kind in ("params", "grads", "state"))
    _row(console, "total, including state without a parameter", totals)
    if on_host := found.totals.get("state on host", 0):
        _say(console, f"and {size_in_words(on_host)} of state in the host's memory, for each device", _INDENT)


def _show_arguments(console: Console, arguments: Iterable[Argument]) -> None:
    _row(console, "Arguments, and bytes on each device", ("",))
    for each in arguments:
        _row(console, f"{each.path}  {_shape(each)}", (size_in_words(each.bytes),))
        _say(console, "as the compiler chooses" if each.spec is None else f"P({_entries(each.spec)})", _INDENT)
    _row(console, "all", (size_in_words(sum(each.bytes for each in arguments)),))


def _entries(spec: Iterable[object]) -> str:
    return ", ".join(map(repr, spec))


def _shape(param: Param | Argument) -> str:
    return f"{param.dtype}[{','.join(map(str, param.shape))}]"


def _notes(param: Param) -> Iterable[str]:
    yield f"at rest P({_entries(param.spec)}): {param.why}"
    if param.state_why and param.state_why != param.why:
        yield f"its gradient and state: {param.state_why}"
    if param.gathered:
        yield f"{param.gathered} ({', '.join(param.lines)})" if param.lines else param.gathered


def show_sent(console: Console, found: Explanation, compiled_for: str) -> None:
    """Prints the collectives of the compiled step by source line, then those without a line."""
    assert found.sent is not None
    _say(console, "")
    _say(console, f"Collectives of a step, compiled for {compiled_for}, by line of the source")
    if not found.sent:
        _say(console, "none: the devices do not communicate")
        return
    _row(console, "", ("times", "payload", "sent"))
    for place, members in _by_place(found.sent).items():
        _say(console, _headed(console, place, members[0].code))
        for (label, size, joined), alike in _alike(members).items():
            times, sent = sum(each.times for each in alike), sum(each.wire_bytes for each in alike)
            _row(console, f"{_INDENT}{label}", (f"{times:,} x", size_in_words(size), size_in_words(sent)))
            if joined:
                _say(console, f"combined by the compiler with: {', '.join(joined)}", 2 * _INDENT)
    _row(console, "sent by each device in a step", ("", "", size_in_words(sum(each.wire_bytes for each in found.sent))))
    for axes, sent in _by_axes(found.sent).items():
        _row(console, f"{_INDENT}over {axes}", ("", "", size_in_words(sent)))
    if not found.trips_known:
        _say(console, "Some loops have an unknown trip count: they count once, so the real traffic is higher.")
    if found.told:
        _say(console, found.told, _INDENT)


def show_memory(console: Console, found: Explanation, compiled_for: str) -> None:
    """Prints what a device holds at the peak of the compiled step, by source line, the largest first."""
    assert found.memory is not None
    memory = found.memory
    _say(console, "")
    _row(console, f"Held at the peak, compiled for {compiled_for}", ("bytes",))
    _row(console, "params, state and batch", (size_in_words(memory.arguments),))
    for one in memory.held[:_MOST_LINES]:
        _row(console, _headed(console, one.line or one.part, one.code), (size_in_words(one.bytes),))
        _say(console, _shapes(one), _INDENT)
    rest = memory.held[_MOST_LINES:]
    if rest:
        _row(console, f"{len(rest)} more lines", (size_in_words(sum(one.bytes for one in rest)),))
    _row(console, "total, read from the schedule", (size_in_words(memory.read),))
    if memory.peak is not None:
        _row(console, "the peak, as reported by the compiler", (size_in_words(memory.peak),))


def _shapes(one: AtPeak) -> str:
    told = [f"{num} x {shape}" if num > 1 else shape for shape, num in one.shapes[:_MOST_SHAPES]]
    return ", ".join(told) + (f", {len(one.shapes) - _MOST_SHAPES} more" if len(one.shapes) > _MOST_SHAPES else "")


def _by_place(sent: Iterable[Sent]) -> Mapping[str, list[Sent]]:
    """Collectives by line, in source order; then those of the step's own parts, in program order."""
    found: dict[str, list[Sent]] = {}
    for each in sorted(sent, key=lambda each: _order(each.line)):
        found.setdefault(each.line or each.part, []).append(each)
    return found


def _order(line: str) -> tuple[bool, str, int]:
    file, _, number = line.partition(" ")[0].rpartition(":")
    return not line, file, int(number or 0)


def _headed(console: Console, place: str, code: str) -> str:
    """A place and, as far as there is room, its code."""
    room = min(console.width, _WIDTH) - len(place) - 2
    shown = code if len(code) <= room else f"{code[: room - 4]} ..."
    return f"{place}  {shown}" if code and room > 20 else place


def _alike(members: Iterable[Sent]) -> Mapping[tuple[str, int, tuple[str, ...]], list[Sent]]:
    """Collectives that share one line, by (description, bytes of each, lines joined to each)."""
    found: dict[tuple[str, int, tuple[str, ...]], list[Sent]] = {}
    for each in members:
        beside = ", overlapped with compute" if each.is_covered else ""
        label = f"{each.kind} over {each.axes or 'no axis'}, {each.dtype}{beside}"
        found.setdefault((label, each.bytes, each.joined), []).append(each)
    return found


def _by_axes(sent: Iterable[Sent]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for each in sent:
        if each.axes:
            found[each.axes] = found.get(each.axes, 0.0) + each.wire_bytes
    return found if len(found) > 1 else {}


# Lines.


def _row(console: Console, label: str, cells: Iterable[str]) -> None:
    """Prints a label with numbers at the right end, or on the next line if the label is too long."""
    numbers = "".join(f"{cell:>{_CELL}}" for cell in cells)
    room = min(console.width, _WIDTH) - len(numbers)
    if len(label) > room:
        _say(console, label)
        label = ""
    _say(console, f"{label:<{max(room, 0)}}{numbers}")


def _say(console: Console, text: str, indent: str = "") -> None:
    """Prints wrapped lines with an indent, or one unwrapped line without an indent."""
    lines = [text]
    if indent:
        width = max(min(console.width, _WIDTH), 2 * len(indent))
        lines = textwrap.wrap(
            text,
            width,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    for line in lines:
        console.print(printable(line), soft_wrap=True)
