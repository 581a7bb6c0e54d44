"""Reports a compiled step's collectives, wire bytes, memory and flops.

All figures are read from the compiled program, not predicted: `compiled.as_text()` is the optimized HLO of one device,
`compiled.memory_analysis()` the compiler's account of memory. Nothing runs. It reads the output of the CPU, GPU and TPU
compilers, also for hardware that you do not have.
"""

import dataclasses
import math
from typing import Any

import jax

from jaxshard.inspect.own_steps import excess
from jaxshard.inspect.traffic import Collective, collectives, inputs_of, needed
from jaxshard.system.users_lines import warn


@dataclasses.dataclass(frozen=True)
class Report:
    """The costs of one step of a compiled program on each device. `str(report)` is a table.

    Attributes:
        collectives: every collective of the program, in program order.
        wire_bytes: bytes that a device sends per step, the sum over `collectives`.
        argument_bytes: bytes of the inputs on one device; this and all below are None if the compiler gives no memory
            analysis.
        output_bytes: bytes of the outputs on one device, including those that reuse an input.
        temp_bytes: bytes of scratch memory on one device.
        alias_bytes: bytes of the outputs that reuse (donated) inputs.
        peak_bytes: peak memory of one device, in bytes, from the compiler; without a figure, on CPU, whose figure omits
            the scratch, and on TPU, whose figure counts VMEM and omits gaps: arguments + outputs + scratch - aliases.
        arguments: bytes on one device of each positional argument, summed over its leaves, without padding; for a
            `jaxshard.train_step`: params, state, batch. Leaves that the program does not use count 0. () if unknown.
        flops: the compiler's count of floating-point operations on one device. It counts a loop's body once, so it is
            far too low for a scan over layers. None if the compiler does not count (GPU).
        platform: "cpu", "gpu" or "tpu"; None if unknown.
    """

    collectives: tuple[Collective, ...]
    wire_bytes: float
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None
    peak_bytes: int | None = None
    arguments: tuple[int, ...] = ()
    flops: float | None = None
    platform: str | None = None

    @property
    def trips_known(self) -> bool:
        """False if the trip count of a loop around some collective cannot be read; the totals are then too low."""
        return all(c.trips_known for c in self.collectives)

    @property
    def wire_bytes_between_slices(self) -> float:
        """The part of `wire_bytes` that crosses the slow network between TPU slices."""
        return sum(c.wire_bytes for c in self.collectives if c.between_slices)

    def wire_bytes_by_axes(self, mesh: jax.sharding.Mesh) -> dict[str, float]:
        """Wire bytes by mesh axes: {"data": ..., "tensor": ..., "replica x data": ..., "between slices": ...}."""
        found: dict[str, float] = {}
        for c in self.collectives:
            if c.wire_bytes:
                axes = "between slices" if c.between_slices else " x ".join(c.axes(mesh))
                found[axes] = found.get(axes, 0.0) + c.wire_bytes
        return found

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists, strings and numbers, ready for `json.dumps`."""
        listed = [_plain(c) | {"wire_bytes": c.wire_bytes} for c in self.collectives]
        return {**_plain(self), "collectives": listed, "trips_known": self.trips_known}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Report":
        """The report that `to_dict` wrote, also after a round trip through JSON.

        Args:
            plain: what `to_dict` returned.

        Raises:
            ValueError: if `plain` is not such a dict, for example from another version of jaxshard.

        >>> Report.from_dict(Report((), 0.0, flops=8.0).to_dict()).flops
        8.0
        """
        try:
            listed = tuple(_made(Collective, c) for c in plain["collectives"])
            report = dataclasses.replace(_made(cls, plain), collectives=listed)
            same = report.to_dict() == plain
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"Report.from_dict needs what Report.to_dict returns, got {plain!r:.80}: {error}"
            ) from None
        if not same:
            raise ValueError(f"Report.from_dict needs what Report.to_dict returns, got different fields: {plain!r:.80}")
        return report

    def table(self) -> Any:
        """A `rich.table.Table` of the collectives, as in `str(report)`; needs `rich` (`jaxshard[train]`)."""
        from rich.table import Table

        table = Table(title="collectives per device and step", caption="\n".join(self._totals()))
        for heading in _HEADINGS:
            table.add_column(heading, justify="left" if heading in ("collective", "dtype") else "right")
        for row in self._rows():
            table.add_row(*row)
        return table

    def _rows(self) -> list[tuple[str, ...]]:
        """One row of cells for all collectives of one kind, group size and dtype."""
        groups: dict[tuple[str, int, str], list[Collective]] = {}
        for c in self.collectives:
            kind = f"{c.kind} between slices" if c.between_slices else c.kind
            groups.setdefault((kind, c.group_size, c.dtype), []).append(c)
        rows = []
        for (kind, size, dtype), members in sorted(groups.items()):
            sums = [len(members), _total(members, "trips"), sum(c.bytes * c.trips for c in members)]
            rows.append((kind, str(size), dtype, *map(_number, (*sums, _total(members, "wire_bytes")))))
        return rows

    def _totals(self) -> list[str]:
        lines = [f"wire bytes sent per device and step  {_number(self.wire_bytes)}"]
        if between := self.wire_bytes_between_slices:
            lines.append(f"{'wire bytes between slices':<35}  {_number(between)}")
        for field in ("argument", "output", "temp", "alias", "peak"):
            lines.append(f"{field + ' bytes per device':<35}  {_number(getattr(self, field + '_bytes'))}")
        overlapped = sum(bool(c.overlapped) for c in self.collectives)
        return [*lines, f"{'overlapped with compute':<35}  {overlapped} of {len(self.collectives)} collectives"]

    def __str__(self) -> str:
        rows = self._rows()
        line = "{:<{width}}  {:>5}  {:<8}  {:>5}  {:>10}  {:>18}  {:>18}".format
        width = max(len(cells[0]) for cells in [_HEADINGS, *rows])
        lines = [*(line(*cells, width=width) for cells in [_HEADINGS, *rows]), "", *self._totals()]
        if not self.trips_known:
            lines += [
                "",
                "Some loops have an unknown trip count and count as one iteration, so the totals are too low:",
            ]
            lines += [f"  {c.kind} {c.name} {c.op_name}".rstrip() for c in self.collectives if not c.trips_known]
        return "\n".join(lines)


_HEADINGS = ("collective", "group", "dtype", "count", "executions", "bytes", "wire bytes")


def _plain(value: Any) -> Any:
    """Converts dataclasses to dicts and tuples to lists, recursively."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [_plain(x) for x in value] if isinstance(value, tuple) else value


def _made(cls: Any, plain: dict[str, Any]) -> Any:
    """Makes a dataclass from the dict of `_plain`; ignores other entries."""
    return cls(**{f.name: _tuples(plain[f.name]) for f in dataclasses.fields(cls)})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(x) for x in value) if isinstance(value, list) else value


def report(compiled: jax.stages.Compiled) -> Report:
    """Reads collectives, wire bytes and memory of a compiled program.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returns.

    Returns:
        A `Report`; print it for a table. It warns of a step of your own that sends more than twice what ZeRO-3 sends
        with one microbatch, with the line and the cure.

    Raises:
        TypeError: if `compiled` is not a compiled program. Text is not enough, as it lacks the memory analysis.
        ValueError: as `collectives`.
    """
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(needed("a compiled program, `jax.jit(f).lower(...).compile()`", compiled))
    found = collectives(compiled)
    if text := excess(compiled, found):
        warn(f"inspect.report: {text}")
    return Report(
        found,
        _total(found, "wire_bytes"),
        **memory_of(compiled),
        arguments=tuple(sum(_shard_bytes(*leaf) for leaf in leaves) for leaves in inputs_of(compiled)),
        flops=_flops(compiled),
        platform=_platform(compiled),
    )


def memory_of(compiled: jax.stages.Compiled) -> dict[str, int]:
    """The fields of a `Report` that are of memory, from `argument_bytes` to `peak_bytes`; {} without an analysis."""
    memory = compiled.memory_analysis()
    if memory is None:
        return {}
    fields = ("argument", "output", "temp", "alias")
    sizes = {f"{field}_bytes": int(getattr(memory, f"{field}_size_in_bytes")) for field in fields}
    peak = int(getattr(memory, "peak_memory_in_bytes", 0))
    if not peak or _platform(compiled) in ("cpu", "tpu"):
        peak = sizes["argument_bytes"] + sizes["output_bytes"] + sizes["temp_bytes"] - sizes["alias_bytes"]
    else:  # the compiler's peak includes host memory
        peak -= sum(int(getattr(memory, f"host_{field}_size_in_bytes", 0)) for field in ("argument", "temp"))
    return sizes | {"peak_bytes": peak}


def _platform(compiled: jax.stages.Compiled) -> str | None:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((device.platform for sharding in shardings for device in sharding.device_set), None)


def _flops(compiled: jax.stages.Compiled) -> float | None:
    cost: Any = compiled.cost_analysis()  # a dict, a list of one, or None
    cost = cost[0] if isinstance(cost, list | tuple) and cost else cost
    flops = cost.get("flops") if isinstance(cost, dict) else None
    return None if flops is None or flops < 0 else float(flops)


def _shard_bytes(aval: Any, sharding: jax.sharding.Sharding | None) -> int:
    """Bytes of an array on each device; 0 for an argument that the program does not use."""
    if sharding is None:
        return 0
    return math.prod(sharding.shard_shape(aval.shape)) * aval.dtype.itemsize


def _total(found: Any, field: str) -> Any:
    return sum(getattr(c, field) for c in found)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"
