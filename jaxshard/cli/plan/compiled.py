"""What the compilers say of a plan (`jaxshard plan --compile`), beside what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxshard import aot
from jaxshard.cli.plan import tables as plan_tables
from jaxshard.inspect import Report
from jaxshard.mesh import make_mesh
from jaxshard.optimizer.state import init
from jaxshard.plan import Build, Row
from jaxshard.step.step import loss_of
from jaxshard.system.text import size_in_words


def compiled(
    console: Console, build: Build, rows: Sequence[Row], machine: aot.Machine, devices: Sequence[Any]
) -> list[tuple[Row, Report]]:
    """Compiles each row's step and prints predicted beside compiled; returns the rows that the compiler takes."""
    found: list[tuple[Row, Report]] = []
    for row in rows:
        mesh = make_mesh(**row.candidate.sizes, devices=devices)
        report = _report(console, build, row, mesh, machine)
        if report is None:
            continue
        found.append((row, report))
        plan_tables.show_beside(console, row, report, mesh)
        if (excess := excess_bytes(row, report)) > 0:
            words = f"{row.candidate.name} compiles, and is {size_in_words(excess)} too large."
            console.print(words, soft_wrap=True)
    return found


def excess_bytes(row: Row, report: Report) -> float:
    """By how many bytes the compiled step is too large for a device; at most 0 if it fits."""
    return (report.peak_bytes or row.peak_bytes) - row.target.memory_bytes


def _report(console: Console, build: Build, row: Row, mesh: Mesh, machine: aot.Machine) -> Report | None:
    """What the compiler says of a row; None if it says that the row does not fit, which is printed."""
    step, params, *rest = build(row.candidate, mesh)
    lowered = step.lower(params, init(loss_of(step).setup, params), *rest)
    try:
        return aot.report(lowered, machine)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        console.print(f"{row.candidate.name}: the compiler says that it does not fit: {reason}", soft_wrap=True)
        return None
