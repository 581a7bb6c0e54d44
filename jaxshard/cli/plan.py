"""`jaxshard plan`: what training a configuration's model costs, before anything runs, and what compilers say of it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
import tyro
from rich.console import Console

from jaxshard import aot
from jaxshard.base.command import INTERRUPTED
from jaxshard.base.files import check_room
from jaxshard.base.text import printable
from jaxshard.base.types import AnyMesh
from jaxshard.base.units import size_in_words
from jaxshard.cli import arguments as words
from jaxshard.cli import plan_compiled, plan_tables
from jaxshard.cli.interrupts import ended_at_once
from jaxshard.cli.streams import fail
from jaxshard.cli.train_options import fitting_warmup, model_of_start
from jaxshard.mesh import abstract_mesh
from jaxshard.plan import chip as chip_named
from jaxshard.plan import choices, search
from jaxshard.plan.choices import Candidate, Target
from jaxshard.plan.search import Build, Built, Row
from jaxshard.trainer import toml
from jaxshard.trainer.arithmetic import useful_flops
from jaxshard.trainer.attention import why_not_fused
from jaxshard.trainer.build import check_rows, make_parts, make_step
from jaxshard.trainer.config import Config, check
from jaxshard.trainer.display import make_console

_DESCRIPTION = """What a training step will cost each device: memory, traffic and time of all strategies side by side.

Nothing is compiled or allocated, and no accelerator is needed; --compile asks the machine's own compiler. Model and all
else come from CONFIG.toml and options, as for `jaxshard train`. Exit status: 0 something fits, 1 nothing does, 2 bad
input."""

_Strategy = Literal["ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp", "own"]


@dataclasses.dataclass(frozen=True)
class Arguments(Config):
    """The command line of `jaxshard plan`."""

    config: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[CONFIG.toml]")] = None
    """Options in TOML, as for `jaxshard train`; the command line has the last word."""
    machine: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """What to train on: h100:8, h100:4x8 (4 nodes), a100:8, h200:8, b200:8, v5e:2x4, v5p:8x8x8, v6e:16x16, v4:4x4x4,
    cpu:8 (simulated devices, the default)."""
    devices: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """The number of devices, in place of a machine ..."""
    chip: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """... the kind of them (by default h100) ..."""
    memory: Annotated[float | None, tyro.conf.arg(metavar="GB")] = None
    """... and the memory of each, in GB; by default the chip's."""
    strategies: tuple[_Strategy, ...] = ()
    """Only these; "own" is the configuration's. By default all that cut over data, and the configuration's own."""
    fit: tyro.conf.FlagCreatePairsOff[bool] = False
    """Rank strategy x mesh x microbatches, and say why the best is best."""
    compile: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Compile the step for this machine, which need not be here, and show predicted beside compiled: the
    configuration's own strategy, or --strategies."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write all figures to this file."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Write plan.png and plan.html to this folder: memory, traffic, and the sharding of every leaf."""


def command(arguments: Sequence[str]) -> int:
    """Runs `jaxshard plan`; returns the exit status."""
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", "cpu")  # nothing runs, so no accelerator is started or taken from others
    try:
        with ended_at_once(lambda: "jaxshard plan: interrupted"):
            given = parse(arguments)
            _check_files(given)
            return _compiled(given) if given.compile else _planned(given)
    except (ValueError, OSError, ImportError) as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    finally:
        jax.config.update("jax_platforms", before)


def _check_files(given: Arguments) -> None:
    """Raises ValueError for files that could not be written, before anything is planned."""
    if given.json is not None and (given.json.is_dir() or not given.json.absolute().parent.is_dir()):
        raise ValueError(f"--json {given.json}: name a file in a folder that is there")
    if given.out is not None:
        check_room("--out", given.out)


_fail = functools.partial(fail, "jaxshard plan")


def parse(arguments: Sequence[str]) -> Arguments:
    """The command line over the TOML file over the defaults.

    Raises:
      ValueError: an option is wrong; it is named. (What tyro finds wrong it prints, and raises SystemExit.)
    """
    words.check(arguments, Arguments, "jaxshard plan", {"data": str})
    given, in_file = _from_command_line(arguments, Arguments()), frozenset()
    if given.config is not None:
        config, in_file = toml.parsed(given.config)
        given = _from_command_line(arguments, Arguments(**vars(config)))
    _check(given)
    warmup = "optimizer.warmup_steps"
    model, told = model_of_start(given, arguments, in_file)
    optimizer, notes = fitting_warmup(given, warmup in in_file or words.is_given(arguments, warmup))
    given = dataclasses.replace(given, model=model, optimizer=optimizer)
    check(given)
    for note in [*told, *notes]:
        print(f"jaxshard plan: {printable(note)}", file=sys.stderr)
    return given


def _check(given: Arguments) -> None:
    """Raises a ValueError for options that exclude each other, or are out of range."""
    if given.devices is not None and (given.machine or given.compile):
        raise ValueError("--devices counts devices in place of --machine and --compile: give one of them")
    if given.compile and given.machine not in (None, given.compile):
        raise ValueError(f"--compile {given.compile} and --machine {given.machine} are two machines: give one of them")
    if given.fit and (given.compile or given.strategies):
        raise ValueError("--fit tries all strategies and compiles nothing: leave out --compile and --strategies")
    if given.chip is not None:
        chip_named(given.chip)  # an unknown one is told before all else that is wrong
    if given.devices is None and given.chip is not None:
        raise ValueError(f"--chip {given.chip} says of what kind --devices N are: give that too, or --machine")
    for name, value, most in (("--devices", given.devices, 2**31 - 1), ("--memory", given.memory, 1e9)):
        if value is not None and not 0 < value <= most:
            raise ValueError(f"{name} {value} must be above 0, and at most {most:,.0f}")


def _from_command_line(arguments: Sequence[str], default: Arguments) -> Arguments:
    how = {"prog": "jaxshard plan", "description": _DESCRIPTION, "return_unknown_args": True}
    given, unknown = tyro.cli(Arguments, args=list(arguments), default=default, **how)
    words.check_none_left(unknown, Arguments, "jaxshard plan")
    return given


def target_of(given: Arguments) -> Target:
    """What is planned for.

    Raises:
      ValueError: the machine or chip is not known; those that are are listed.
    """
    if given.devices is not None:
        chip, count, torus = chip_named(given.chip or "h100"), given.devices, ()
    else:
        default = f"cpu:{given.sharding.devices or 8}"
        machine = aot.machine(given.compile or given.machine or default)
        chip, count = machine.chip, machine.num_devices
        if chip.platform == "gpu" and len(machine.shape) == 2:
            chip = dataclasses.replace(chip, domain_size=machine.shape[1])
        torus = machine.shape if chip.platform == "tpu" else ()
    return Target(chip, count, chip.memory_bytes if given.memory is None else given.memory * 1e9, torus)


# What is planned.


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
      ValueError: its axes do not make so many devices.
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


def candidates(given: Arguments, target: Target) -> list[Candidate]:
    """The strategies that --strategies names; by default all that cut over data, and the configuration's own."""
    all_data = choices.side_by_side(target, given.sharding.microbatches)
    if not given.strategies:
        mine = own(given, target)
        return all_data if mine in all_data else [*all_data, mine]
    named = {"hfsdp" if c.state_axes else c.strategy: c for c in all_data} | {"own": own(given, target)}
    missing = [name for name in given.strategies if name not in named]
    if missing:
        raise ValueError(
            f"--strategies {' '.join(missing)}: it needs several groups of devices that fast links join, and the "
            f"{target.num_devices} x {target.chip.name} are one"
        )
    return [named[name] for name in given.strategies]


def to_try(given: Arguments, target: Target) -> list[Candidate]:
    """Strategy x mesh x microbatches for --fit: what the model's sizes allow."""
    model = given.model
    groups = model.kv_heads or model.heads
    tensors = [n for n in (1, 2, 4, 8) if groups % n == 0 and n <= target.chip.domain_size]
    pipelines = [n for n in (1, 2, 4, 8) if model.layers % n == 0]
    rows = given.train.rows
    microbatches = [m for m in (1, 4, 16) if rows % m == 0]
    return choices.candidates(target, microbatches=microbatches, tensors=tensors, pipelines=pipelines)


def _planned(given: Arguments) -> int:
    target, console = target_of(given), make_console()
    build = building(given)
    if given.fit:
        found = search.fit(build, to_try(given, target), target)
        rows, notes = list(found.rows[:12]), [found.why()]
    else:
        rows, notes = rows_of(given, candidates(given, target), target)
    rows = _with_useful_seconds(given, rows, target)
    notes += _unfused(given, target)
    if rows and not any(row.fits for row in rows):
        notes.append(too_large(given, rows, target))
    if rows:
        _show(console, given, rows, target)
        _write(given, rows, notes)
    for note in notes:
        console.print(note, soft_wrap=not console.is_terminal)  # a terminal would break it within a word
    return 0 if any(row.fits for row in rows) else 1


def rows_of(given: Config, wanted: Sequence[Candidate], target: Target) -> tuple[list[Row], list[str]]:
    """A row for each candidate, with the largest batch that fits, from one trace each; and why others cannot be.

    Raises:
      ValueError: none can be.
    """
    build, rows, refused = building(given), [], []
    for candidate in wanted:
        unit = given.sharding.stage_microbatches if candidate.pipeline > 1 else 1
        try:
            found = search.AnyRows(*build(candidate, candidate.mesh(target)), unit=unit)
            rows.append(Row(candidate, found.at(given.train.rows), target, search.largest_batch(found, target)))
        except ValueError as error:
            refused.append((candidate, error))
    if not rows:
        raise refused[0][1]
    return rows, [f"{candidate.name} cannot be: {error}" for candidate, error in refused]


def _with_useful_seconds(given: Config, rows: Sequence[Row], target: Target) -> list[Row]:
    each = useful_flops(given) / target.num_devices / target.chip.flops[given.model.dtype]
    return [dataclasses.replace(row, useful_seconds=each) for row in rows]


def _unfused(given: Config, target: Target) -> list[str]:
    """A note where attention runs by plain operations, which another shape or type would spare."""
    reason = why_not_fused(given.model, Candidate("ddp", data=target.num_devices).mesh(target))
    return [f"Attention is not fused: {reason}."] if reason else []


def too_large(given: Config, rows: Sequence[Row], target: Target) -> str:
    """A note: how much too large the smallest is, and the fewest devices that would do, with more rows if need be."""
    least = min(rows, key=lambda row: row.excess_bytes)
    text = (
        f"Too large for every strategy: {least.candidate.name} needs {size_in_words(least.peak_bytes)} on each device, "
        f"{size_in_words(least.excess_bytes)} more than its {size_in_words(target.memory_bytes)}."
    )
    build = _with_enough_rows(given)
    counts = [search.fewest_devices(build, target, row.candidate) for row in rows if row.candidate.strategy != "ddp"]
    enough = min((count for count in counts if count), default=None)
    more = f"{enough} devices would do." if enough else "More devices alone would not do."
    return f"{text} {more} {_cures(least)}"


def _with_enough_rows(config: Config) -> Build:
    """`building`, with rows enough for the microbatches of every device."""

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


# What is shown.


def _show(console: Console, given: Arguments, rows: Sequence[Row], target: Target) -> None:
    count = sum(math.prod(leaf.shape) for leaf in rows[0].prediction.layout.params)
    in_words = f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,}"
    console.print(
        f"{in_words} parameters, {given.train.rows} rows of {given.model.sequence_length} a step, on "
        f"{target.num_devices} x {target.chip.name} of {size_in_words(target.memory_bytes)}",
        soft_wrap=True,
    )
    plan_tables.show(console, rows)


def _write(given: Arguments, rows: Sequence[Row], notes: Sequence[str]) -> None:
    if given.json is not None:
        given.json.write_text(json.dumps({"rows": [row.to_dict() for row in rows], "notes": list(notes)}, indent=1))
    _write_pictures(given, rows, notes)


def _write_pictures(given: Arguments, rows: Sequence[Row], notes: Sequence[str]) -> None:
    if given.out is None:
        return
    from jaxshard.plan import drawing, html

    given.out.mkdir(parents=True, exist_ok=True)
    title = f"{given.config.stem if given.config else 'default'} on {given.machine or given.compile or 'devices'}"
    title = printable(title)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font has not every character
        drawing.draw(rows, given.out / "plan.png", title=title)
    html.page(rows, given.out / "plan.html", title=title, notes=notes)


# Predicted beside compiled.


def _compiled(given: Arguments) -> int:
    machine, build = aot.machine(str(given.compile)), building(given)
    devices = plan_compiled.devices_of(machine)  # first: a machine that cannot be is told before what is wrong on it
    target, console = target_of(given), make_console()
    wanted = candidates(given, target) if given.strategies else [own(given, target)]
    rows = _with_useful_seconds(given, search.compare(build, wanted, target), target)
    _show(console, given, rows, target)
    for note in _unfused(given, target):
        console.print(note, soft_wrap=True)
    found = plan_compiled.compiled(console, build, rows, machine, devices)
    if given.json is not None:
        results = [
            {"name": row.candidate.name, "compiled": report.to_dict(), "predicted": row.to_dict()}
            for row, report in found
        ]
        given.json.write_text(json.dumps({"machine": machine.name, "rows": results}, indent=1))
    _write_pictures(given, rows, [])
    return 0 if any(plan_compiled.excess_bytes(row, report) <= 0 for row, report in found) else 1
