"""A configuration's model under each strategy: predicted, ranked (`--fit`), and compiled (`--compile`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from jaxshard import aot
from jaxshard.apps.config.checks import check
from jaxshard.apps.config.config import Config
from jaxshard.apps.config.memory import useful_flops
from jaxshard.apps.model.attention import why_not_fused
from jaxshard.apps.trainer.parts import check_rows, make_parts, make_step
from jaxshard.base.types import AnyMesh
from jaxshard.cli.plan import tables as plan_tables
from jaxshard.inspect import Report
from jaxshard.mesh import abstract_mesh, make_mesh
from jaxshard.optimizer.state import init
from jaxshard.plan import choices, search
from jaxshard.plan.choices import Candidate, Target
from jaxshard.plan.search import Build, Built, Row
from jaxshard.step.step import loss_of
from jaxshard.system.text import seconds_in_words, size_in_words


def building(config: Config) -> Build:
    """`build` for the configuration's model, as `plan.compare` takes it."""

    def build(candidate: Candidate, mesh: AnyMesh) -> Built:
        chosen = sharded_as(config, candidate)
        check(chosen)
        check_rows(chosen, mesh)
        model, _, opt, params = make_parts(chosen, mesh)
        batch = {"tokens": jax.ShapeDtypeStruct((chosen.train.rows, chosen.model.sequence_length + 1), np.int32)}
        keys = [jax.eval_shape(lambda: jax.random.key(0))] if chosen.model.dropout else []
        return (make_step(chosen, model, opt), params, batch, *keys)

    return build


def sharded_as(config: Config, candidate: Candidate) -> Config:
    """The configuration with another strategy and mesh."""
    chosen = {"strategy": candidate.strategy, "microbatches": candidate.microbatches, "devices": None}
    chosen |= {**candidate.sizes, "state_over": "+".join(candidate.state_axes) or "data"}
    chosen |= {"state_memory": candidate.state_memory}
    chosen |= {} if candidate.zero is None else {"zero": candidate.zero}
    chosen |= {} if candidate.pipeline > 1 else {"schedule": "1f1b", "virtual": 1}
    return dataclasses.replace(config, sharding=dataclasses.replace(config.sharding, **chosen))


def own(config: Config, target: Target) -> Candidate:
    """The configuration's own strategy on the target's devices.

    Raises:
      ValueError: its axes do not multiply to the number of devices.
    """
    sharding = config.sharding
    sizes = {axis: getattr(sharding, axis) for axis in ("data", "tensor", "pipeline", "replica")}
    try:
        mesh = abstract_mesh(target.num_devices, **sizes)
    except ValueError:
        given = ", ".join(f"--sharding.{axis} {size}" for axis, size in sizes.items())
        raise ValueError(
            f"{given} do not make {target.num_devices} devices: change one (-1 stands for what the others leave), or "
            "--machine or --devices"
        ) from None
    zero = sharding.zero if sharding.strategy == "hybrid" else None
    strategy = "zero3" if sharding.strategy == "fsdp" else sharding.strategy
    state_axes = ("data", "replica") if sharding.state_over == "data+replica" else ()
    sizes = dict(mesh.shape)
    return Candidate(
        strategy,
        **sizes,
        zero=zero,
        microbatches=sharding.microbatches,
        state_axes=state_axes,
        state_memory=sharding.state_memory,
    )


def candidates(config: Config, strategies: Sequence[str], target: Target) -> list[Candidate]:
    """The strategies of --strategies; by default all data-parallel ones, and the configuration's own."""
    all_data, mine = choices.side_by_side(target, config.sharding.microbatches), own(config, target)
    if not strategies:
        return all_data if mine in all_data else [*all_data, mine]
    named = {"hfsdp" if c.state_axes else c.strategy: c for c in all_data} | {"own": mine}
    missing = [name for name in strategies if name not in named]
    if missing:
        raise ValueError(
            f"--strategies {' '.join(missing)}: it needs several groups of devices that fast links join, and the "
            f"{target.num_devices} x {target.chip.name} are one"
        )
    return [named[name] for name in strategies]


def to_try(config: Config, target: Target) -> list[Candidate]:
    """The combinations of strategy, mesh and microbatches for --fit that the model's sizes allow."""
    model = config.model
    groups = model.kv_heads or model.heads
    tensors = [n for n in (1, 2, 4, 8) if groups % n == 0 and n <= target.chip.domain_size]
    pipelines = [n for n in (1, 2, 4, 8) if model.layers % n == 0]
    rows = config.train.rows
    microbatches = [m for m in (1, 4, 16) if rows % m == 0]
    return choices.candidates(target, microbatches=microbatches, tensors=tensors, pipelines=pipelines)


def rows_of(config: Config, wanted: Sequence[Candidate], target: Target) -> tuple[list[Row], list[str]]:
    """A row for each candidate, with the largest batch that fits, from one trace each; and why others are impossible.

    Raises:
      ValueError: no candidate is possible.
    """
    build, rows, refused = building(config), [], []
    for candidate in wanted:
        unit = config.sharding.stage_microbatches if candidate.pipeline > 1 else 1
        try:
            found = search.AnyRows(*build(candidate, candidate.mesh(target)), unit=unit)
            rows.append(Row(candidate, found.at(config.train.rows), target, search.largest_batch(found, target)))
        except ValueError as error:
            refused.append((candidate, error))
    if not rows:
        raise refused[0][1]
    return rows, [f"{candidate.name} cannot be: {error}" for candidate, error in refused]


def with_useful_seconds(config: Config, rows: Sequence[Row], target: Target) -> list[Row]:
    """Adds to each row the time that the step's useful operations take at the chip's peak."""
    each = useful_flops(config) / target.num_devices / target.chip.flops[config.model.dtype]
    return [dataclasses.replace(row, useful_seconds=each) for row in rows]


def unfused(config: Config, target: Target) -> list[str]:
    """A note if attention runs by plain operations, although a different shape or type would allow a kernel."""
    reason = why_not_fused(config.model, Candidate("ddp", data=target.num_devices).mesh(target))
    return [f"Attention is not fused: {reason}."] if reason else []


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


def too_large(config: Config, rows: Sequence[Row], target: Target) -> str:
    """A note: the bytes by which the smallest does not fit, and the fewest devices that suffice, with more rows if
    needed."""
    least = min(rows, key=lambda row: row.excess_bytes)
    text = (
        f"Too large for every strategy: {least.candidate.name} needs {size_in_words(least.peak_bytes)} on each device, "
        f"{size_in_words(least.excess_bytes)} more than its {size_in_words(target.memory_bytes)}."
    )
    build = _with_enough_rows(config)
    counts = [search.fewest_devices(build, target, row.candidate) for row in rows if row.candidate.strategy != "ddp"]
    enough = min((count for count in counts if count), default=None)
    more = f"{enough} devices would do." if enough else "More devices alone would not do."
    return f"{text} {more} {_cures(least)}"


def _with_enough_rows(config: Config) -> Build:
    """`building`, with enough rows for the microbatches of every device."""

    def build(candidate: Candidate, mesh: AnyMesh) -> Built:
        stages = config.sharding.stage_microbatches if candidate.pipeline > 1 else 1
        unit = candidate.data * candidate.replica * candidate.microbatches * stages
        rows = max(1, -(-config.train.rows // unit)) * unit
        wide = dataclasses.replace(config, train=dataclasses.replace(config.train, rows=rows))
        return building(wide)(candidate, mesh)

    return build


def _cures(row: Row) -> str:
    held = row.prediction.at_rest["params"] + row.prediction.at_rest["state"]
    if held < row.target.memory_bytes:
        return "Or fewer rows a step, or more microbatches: params and state fit."
    return f"Params and state alone take {size_in_words(held)}."


def compiled(
    console: Console, build: Build, rows: Sequence[Row], machine: aot.Machine, devices: Sequence[Any]
) -> list[tuple[Row, Report]]:
    """Compiles each row's step and prints predicted and compiled figures; returns the rows that compile."""
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
    """The bytes by which the compiled step exceeds a device's memory; at most 0 if it fits."""
    return (report.peak_bytes or row.peak_bytes) - row.target.memory_bytes


def _report(console: Console, build: Build, row: Row, mesh: Mesh, machine: aot.Machine) -> Report | None:
    """The compiler's report of a row; if the row does not fit, prints that and returns None."""
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
