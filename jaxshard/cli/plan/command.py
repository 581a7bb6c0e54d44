"""`jaxshard plan`: the predicted costs of training a configuration's model, and the compilers' figures for it."""

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

import tyro
from rich.console import Console

from jaxshard import aot
from jaxshard.apps.commands import arguments as words
from jaxshard.apps.commands.train_options import fitting_warmup, model_of_start
from jaxshard.apps.config import toml
from jaxshard.apps.config.checks import check
from jaxshard.apps.config.config import Config
from jaxshard.apps.config.devices import devices_of
from jaxshard.apps.records.display import make_console
from jaxshard.cli.plan import of_config, own_steps
from jaxshard.cli.plan import rows as plan_rows
from jaxshard.cli.plan import tables as plan_tables
from jaxshard.plan import Row, Target, search
from jaxshard.plan import chip as chip_named
from jaxshard.system import files
from jaxshard.system.command import check_room, fail
from jaxshard.system.text import printable, size_in_words
from jaxshard.system.users_code import names_function

_DESCRIPTION = """Predicts memory, traffic and time of a training step per device, for all strategies.

Nothing is compiled or allocated, and no accelerator is needed; --compile runs the machine's compiler. The model and all
options come from CONFIG.toml and the command line, as for `jaxshard train`. Exit status: 0 something fits, 1 nothing
does, 2 bad input."""

_ROWS = "train.rows"
_Strategy = Literal["ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp", "own"]


@dataclasses.dataclass(frozen=True)
class Arguments(Config):
    """The command line of `jaxshard plan`."""

    config: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[CONFIG.toml | MODULE:FUNCTION]")] = None
    """A TOML file with options as for `jaxshard train`, or the name of a preset; command-line options override it. Or
    your own step: a function without arguments that returns (step, params, batch, *more), as for `jaxshard explain`; of
    the options below, only --train.rows applies to it."""
    machine: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The devices to train on: h100:8, h100:4x8 (4 nodes), gb200:72*8 (8 racks), mi300x:8, v5e:2x4, v5p:8x8x8,
    v6e:16x16*4 (4 slices), cpu:8 (simulated devices, the default), and other chips."""
    devices: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """The number of devices, instead of --machine; see --chip and --memory."""
    chip: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The kind of the devices of --devices; by default h100."""
    memory: Annotated[float | None, tyro.conf.arg(metavar="GB")] = None
    """The memory of each device, in GB; by default the chip's."""
    strategies: tuple[_Strategy, ...] = ()
    """Only these; "own" is the configuration's. By default all data-parallel ones, and the configuration's own."""
    fit: tyro.conf.FlagCreatePairsOff[bool] = False
    """Rank all combinations of strategy, mesh and microbatches, and explain why the best is best."""
    compile: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Compile the step for this machine, which you need not have, and compare predicted with compiled figures, for the
    configuration's own strategy or --strategies."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write all figures to this file."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Write plan.png and plan.html to this folder: memory, traffic, and the sharding of every leaf."""


def command(arguments: Sequence[str]) -> int:
    """Runs `jaxshard plan`; returns the exit status."""

    def act() -> int:
        given = parse(arguments)
        _check_files(given)
        with warnings.catch_warnings(record=True, action="always") as warned:
            status = _compiled(given) if given.compile else _planned(given)
        for text in dict.fromkeys(str(one.message) for one in warned):
            print(f"jaxshard plan: {printable(text)}", file=sys.stderr)
        return status

    return words.run_on_cpu("jaxshard plan", act)


def _check_files(given: Arguments) -> None:
    """Raises ValueError for files that cannot be written, before planning."""
    if given.json is not None and (given.json.is_dir() or not given.json.absolute().parent.is_dir()):
        raise ValueError(f"--json {given.json}: give a file in an existing folder")
    if given.out is not None:
        check_room("--out", given.out)


_fail = functools.partial(fail, "jaxshard plan")


def parse(arguments: Sequence[str]) -> Arguments:
    """The command line over the TOML file over the defaults.

    Raises:
      ValueError: names the option that is wrong. (tyro prints its own errors and raises SystemExit.)
    """
    words.check(arguments, Arguments, "jaxshard plan", {"data": str})
    given, in_file = words.by_tyro(arguments, Arguments, "jaxshard plan", _DESCRIPTION, Arguments()), frozenset()
    if given.config is not None and names_function(given.config):
        words.refuse_options(arguments, Config, given.config, but=[_ROWS])
        _check(given)
        rows = given.train.rows if words.is_given(arguments, _ROWS) else 0  # 0: as many as the function gives
        return dataclasses.replace(given, train=dataclasses.replace(given.train, rows=rows))
    if given.config is not None:
        config, in_file = toml.parsed(Path(given.config), pipes=True)
        given = words.by_tyro(arguments, Arguments, "jaxshard plan", _DESCRIPTION, Arguments(**vars(config)))
    _check(given)
    warmup = "optimizer.warmup_steps"
    model, told = model_of_start(given, arguments, in_file)
    optimizer, notes = fitting_warmup(given, warmup in in_file or words.is_given(arguments, warmup))
    given = dataclasses.replace(given, model=model, optimizer=optimizer)
    check(given)
    compares = not (given.strategies or given.compile or given.fit)
    if compares and (why := of_config.why_left_out(given, target_of(given))):
        if any(words.is_given(arguments, f"sharding.{axis}") for axis in ("data", "tensor", "pipeline", "replica")):
            raise ValueError(why)
        notes = [*notes, f"{given.config}'s own mesh is left out: {why}"]
    for note in [*told, *notes]:
        print(f"jaxshard plan: {printable(note)}", file=sys.stderr)
    return given


def _check(given: Arguments) -> None:
    """Raises ValueError for options that exclude each other or are out of range."""
    if given.devices is not None and (given.machine or given.compile):
        raise ValueError("--devices replaces --machine and --compile: give only one of them")
    if given.compile and given.machine not in (None, given.compile):
        raise ValueError(f"--compile {given.compile} and --machine {given.machine} name two machines: give only one")
    if given.fit and (given.compile or given.strategies):
        raise ValueError("--fit tries all strategies and compiles nothing: leave out --compile and --strategies")
    if given.chip is not None:
        chip_named(given.chip)  # so that an unknown chip is reported before other errors
    if given.devices is None and given.chip is not None:
        raise ValueError(f"--chip {given.chip} is the kind of the devices of --devices N: give that too, or --machine")
    for name, value, most in (("--devices", given.devices, 2**31 - 1), ("--memory", given.memory, 1e9)):
        if value is not None and not 0 < value <= most:
            raise ValueError(f"{name} {value} must be above 0, and at most {most:,.0f}")


def target_of(given: Arguments) -> Target:
    """The devices to plan for; raises ValueError, which lists the known ones, for an unknown machine or chip."""
    if given.devices is not None:
        chip, count, torus = chip_named(given.chip or "h100"), given.devices, ()
    else:
        default = f"cpu:{given.sharding.devices or 8}"
        machine = aot.machine(given.compile or given.machine or default)
        chip, count = machine.chip, machine.num_devices
        if chip.platform == "gpu" and len(machine.shape) == 2:
            chip = dataclasses.replace(chip, domain_size=machine.shape[1])
        if machine.num_slices > 1:
            chip = dataclasses.replace(chip, domain_size=count // machine.num_slices)
        torus = machine.shape if chip.platform == "tpu" else ()
    return Target(chip, count, chip.memory_bytes if given.memory is None else given.memory * 1e9, torus)


def _planned(given: Arguments) -> int:
    target, model = target_of(given), _model(given)
    console = make_console()
    if given.fit:
        found = plan_rows.fit(model, target)
        rows, notes = list(found.rows[:12]), [found.why()]
    else:
        rows, notes = plan_rows.rows_of(model, model.candidates(given.strategies, target), target)
    if isinstance(model, of_config.OfConfig):
        rows = of_config.with_useful_seconds(given, rows, target)
        notes += of_config.unfused(given, target)
    notes += [*plan_rows.undivided(rows), *plan_rows.uncounted(rows)]
    if rows and not any(row.fits for row in rows):
        notes.append(plan_rows.too_large(model, rows, target))
    notes.append(plan_rows.verdict(rows))
    if rows:
        _show(console, model, rows, target)
        _write(given, model.title, rows, notes)
    for note in [*notes, *_written(given, bool(rows))]:
        console.print(note, soft_wrap=not console.is_terminal)  # a terminal would break it within a word
    return 0 if any(row.fits for row in rows) else 1


def _model(given: Arguments) -> plan_rows.Model:
    """What is planned."""
    if given.config is None or not names_function(given.config):
        return of_config.OfConfig(given, Path(given.config).stem if given.config else "default")
    return own_steps.read(given.config, given.train.rows or None)


# Output.


def _show(console: Console, model: plan_rows.Model, rows: Sequence[Row], target: Target) -> None:
    count = sum(math.prod(leaf.shape) for leaf in rows[0].prediction.layout.params)
    in_words = f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,}"
    console.print(
        f"{in_words} parameters, {model.heading}, on {target.num_devices} x {target.chip.name} of "
        f"{size_in_words(target.memory_bytes)}",
        soft_wrap=True,
    )
    plan_tables.show(console, rows)


def _write(given: Arguments, title: str, rows: Sequence[Row], notes: Sequence[str]) -> None:
    if given.json is not None:
        files.overwrite(
            given.json, json.dumps({"rows": [row.to_dict() for row in rows], "notes": list(notes)}, indent=1)
        )
    _write_pictures(given, title, rows, notes)


def _written(given: Arguments, any_rows: bool = True) -> list[str]:
    """A line that says which files were written."""
    pictures = [given.out / name for name in ("plan.png", "plan.html")] if given.out is not None else []
    found = [str(path) for path in (given.json, *pictures) if path is not None]
    return [f"wrote {printable(', '.join(found))}"] if found and any_rows else []


def _write_pictures(given: Arguments, title: str, rows: Sequence[Row], notes: Sequence[str]) -> None:
    if given.out is None:
        return
    from jaxshard.plan.pages import drawing, html

    files.make_folder(given.out)
    title = printable(f"{title} on {given.machine or given.compile or 'devices'}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font has not every character
        drawing.draw(rows, given.out / "plan.png", title=title)
    html.page(rows, given.out / "plan.html", title=title, notes=notes)


# Predicted and compiled.


def _compiled(given: Arguments) -> int:
    machine = aot.machine(str(given.compile))
    devices = devices_of(machine)  # first, so that an impossible machine is reported before other errors
    target, model = target_of(given), _model(given)
    console = make_console()
    rows = search.compare(model.build, model.candidates(given.strategies or ("own",), target), target)
    notes = [*plan_rows.undivided(rows), *plan_rows.uncounted(rows)]
    if isinstance(model, of_config.OfConfig):
        rows = of_config.with_useful_seconds(given, rows, target)
        notes += of_config.unfused(given, target)
    _show(console, model, rows, target)
    for note in notes:
        console.print(note, soft_wrap=True)
    found = plan_rows.compiled(console, model.build, rows, machine, devices)
    if given.json is not None:
        results = [
            {"name": row.candidate.name, "compiled": report.to_dict(), "predicted": row.to_dict()}
            for row, report in found
        ]
        files.overwrite(given.json, json.dumps({"machine": machine.name, "rows": results}, indent=1))
    _write_pictures(given, model.title, rows, [])
    for line in [plan_rows.verdict_on_compiled(found), *_written(given)]:
        console.print(line, soft_wrap=True)
    return 0 if any(plan_rows.excess_bytes(row, report) <= 0 for row, report in found) else 1
