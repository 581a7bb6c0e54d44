"""A model under each strategy: predicted, and compiled (`--compile`)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxshard import aot
from jaxshard.base.types import AnyMesh
from jaxshard.cli.plan import tables as plan_tables
from jaxshard.inspect import Report
from jaxshard.mesh import make_mesh
from jaxshard.optimizer.state import init
from jaxshard.plan import search
from jaxshard.plan.choices import Candidate, Target
from jaxshard.plan.search import Build, Built, Row
from jaxshard.step.step import loss_of
from jaxshard.system.text import seconds_in_words, size_in_words
from jaxshard.system.users_lines import warn


class Model(Protocol):
    """What is planned: a configuration's model (`OfConfig`), or a user's own step."""

    @property
    def title(self) -> str: ...
    @property
    def heading(self) -> str: ...
    @property
    def rows(self) -> int: ...
    def with_rows(self, rows: int) -> Model: ...
    def build(self, candidate: Candidate, mesh: AnyMesh) -> Built: ...
    def row(self, candidate: Candidate, target: Target) -> Row: ...
    def candidates(self, names: Sequence[str], target: Target) -> list[Candidate]: ...
    def to_try(self, target: Target) -> list[Candidate]: ...
    def unit(self, candidate: Candidate) -> int: ...


@contextlib.contextmanager
def progress(count: int) -> Iterator[Callable[[Candidate], None]]:
    """Shows on standard error, if that is a terminal, which of `count` candidates is traced; call it for each."""
    names: list[str] = []
    with Console(stderr=True, markup=False).status("starting") as status:

        def show(candidate: Candidate) -> None:
            names.append(candidate.name)
            status.update(f"{len(names)} of {max(len(names), count)}: {candidate.name}")

        yield show


def fit(model: Model, target: Target) -> search.Fit:
    """All combinations ranked, as `plan.fit`."""
    wanted = model.to_try(target)
    with progress(len(wanted)) as show:

        def build(candidate: Candidate, mesh: AnyMesh) -> Built:
            show(candidate)
            return model.build(candidate, mesh)

        return search.fit(build, wanted, target)


def rows_of(model: Model, wanted: Sequence[Candidate], target: Target) -> tuple[list[Row], list[str]]:
    """A row for each candidate, and why others are impossible; a warning names the candidates that it is about.

    Raises:
      ValueError: no candidate is possible.
    """
    rows: list[Row] = []
    refused: list[tuple[Candidate, ValueError]] = []
    warned: dict[str, list[str]] = {}
    for candidate in wanted:
        with warnings.catch_warnings(record=True, action="always") as found:
            try:
                rows.append(model.row(candidate, target))
            except ValueError as error:
                refused.append((candidate, error))
        for text in dict.fromkeys(str(one.message) for one in found):
            warned.setdefault(text, []).append(candidate.name)
    for text, names in warned.items():
        warn(text if len(names) == len(wanted) else f"{', '.join(names)}: {text}")
    if not rows:
        raise refused[0][1]
    return rows, [f"{candidate.name} is not possible: {error}" for candidate, error in refused]


def undivided(rows: Sequence[Row]) -> list[str]:
    """Notes about params that the devices do not divide, each with the strategies that it is about."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if text := row.prediction.layout.undivided:
            found.setdefault(text, []).append(row.candidate.name)
    return [f"{', '.join(dict.fromkeys(names))}: {text}." for text, names in found.items()]


def uncounted(rows: Sequence[Row]) -> list[str]:
    """Notes about kernels whose arithmetic is unknown, and about while loops, whose number of iterations is."""
    names = dict.fromkeys(name for row in rows for name in row.prediction.costs.uncounted)
    notes = [] if all(row.prediction.costs.trips_known for row in rows) else [_LOOPS]
    if names:
        notes.append(
            f"Unknown operation counts: {', '.join(names)}. The least times do not include them; give a Pallas kernel "
            "a cost_estimate."
        )
    return notes


_LOOPS = (
    "A while loop counts as one iteration, as its number is unknown: times and traffic are higher if it runs more. Use "
    "lax.scan or fori_loop with a fixed number to plan all iterations."
)


def verdict(rows: Sequence[Row]) -> str:
    """The last line of a plan: how many fit, and the fastest of them."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return "Verdict: nothing fits."
    best = min(fitting, key=lambda row: (row.seconds.total, row.peak_bytes))
    return (
        f"Verdict: {len(fitting)} of {len(rows)} fit. The fastest is {best.candidate.name}: at least "
        f"{seconds_in_words(best.seconds.total)} a step, {_peak_of(best.peak_bytes, best)}."
    )


def verdict_on_compiled(found: Sequence[tuple[Row, Report]]) -> str:
    """The last line of a plan that compiled: which rows fit, by the compiler's figures."""
    fitting = [(row, report) for row, report in found if excess_bytes(row, report) <= 0]
    if not fitting:
        return "Verdict: nothing fits."
    each = [f"{row.candidate.name}, {_peak_of(report.peak_bytes or row.peak_bytes, row)}" for row, report in fitting]
    return f"Verdict: by the compiler {'; '.join(each)}: fits."


def _peak_of(num_bytes: float, row: Row) -> str:
    return f"{size_in_words(num_bytes)} of {size_in_words(row.target.memory_bytes)} at the peak"


def too_large(model: Model, rows: Sequence[Row], target: Target) -> str:
    """A note: the bytes by which the smallest does not fit, and the fewest devices that suffice, with more rows if
    needed."""
    least = min(rows, key=lambda row: row.excess_bytes)
    text = (
        f"Too large for every strategy: {least.candidate.name} needs {size_in_words(least.peak_bytes)} on each device, "
        f"{size_in_words(least.excess_bytes)} more than its {size_in_words(target.memory_bytes)}."
    )
    build = _with_enough_rows(model)
    counts = [search.fewest_devices(build, target, row.candidate) for row in rows if row.candidate.strategy != "ddp"]
    enough = min((count for count in counts if count), default=None)
    more = f"{enough} devices would be enough." if enough else "More devices alone would not be enough."
    return f"{text} {more} {_cures(least)}"


def _with_enough_rows(model: Model) -> Build:
    """The model's `build`, with enough rows for the microbatches of every device."""

    def build(candidate: Candidate, mesh: AnyMesh) -> Built:
        unit = candidate.data * candidate.replica * candidate.microbatches * model.unit(candidate)
        return model.with_rows(max(1, -(-model.rows // unit)) * unit).build(candidate, mesh)

    return build


def _cures(row: Row) -> str:
    held = row.prediction.at_rest["params"] + row.prediction.at_rest["state"]
    if held < row.target.memory_bytes:
        return "Or use fewer rows per step, or more microbatches (--fit tries 1, 4 and 16): params and state fit."
    return f"Params and state alone take {size_in_words(held)}."


def compiled(
    console: Console, build: Build, rows: Sequence[Row], machine: aot.Machine, devices: Sequence[Any]
) -> list[tuple[Row, Report]]:
    """Compiles each row's step and prints predicted and compiled figures; returns the rows that compile."""
    found: list[tuple[Row, Report]] = []
    for row in rows:
        built = build(row.candidate, make_mesh(**row.candidate.sizes, devices=devices, slice_axes=()))
        mesh = loss_of(built[0]).setup.mesh
        report = _report(console, built, row, machine)
        if report is None:
            continue
        assert isinstance(mesh, Mesh)
        found.append((row, report))
        plan_tables.show_beside(console, row, report, mesh)
        if (excess := excess_bytes(row, report)) > 0:
            words = f"{row.candidate.name} compiles, and is {size_in_words(excess)} too large."
            console.print(words, soft_wrap=True)
    return found


def excess_bytes(row: Row, report: Report) -> float:
    """The bytes by which the compiled step exceeds a device's memory; at most 0 if it fits."""
    return (report.peak_bytes or row.peak_bytes) - row.target.memory_bytes


def _report(console: Console, built: Built, row: Row, machine: aot.Machine) -> Report | None:
    """The compiler's report of a row; if the row does not fit, prints that and returns None."""
    step, params, *rest = built
    lowered = step.lower(params, init(loss_of(step).setup, params), *rest)
    try:
        return aot.report(lowered, machine)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        console.print(f"{row.candidate.name}: the compiler says that it does not fit: {reason}", soft_wrap=True)
        return None
