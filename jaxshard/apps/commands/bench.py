"""`jaxshard bench`: compares jaxshard's training steps with alternatives, by compilers and on simulated devices."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console

from jaxshard import aot
from jaxshard.apps.bench import models, processes, steps
from jaxshard.apps.bench.step import OURS, Row, Running, Step, Task, UnfitError, compiled, timed
from jaxshard.apps.commands import arguments as words
from jaxshard.apps.commands import bench_tables
from jaxshard.apps.config.devices import devices_of
from jaxshard.apps.records.display import make_console, say
from jaxshard.system import files
from jaxshard.system.about import about
from jaxshard.system.command import check_file, check_room, fail
from jaxshard.system.text import nearest

_DESCRIPTION = """Compares jaxshard's training steps with alternatives: memory, traffic and overlap from the
compilers, times on simulated devices.

Steps for TPUs and GPUs are compiled, not run: you need no such machine. On cpu:N a smaller model is trained and timed.
A row that fails states the reason. Exit status: 0 done, 1 no row has figures, 2 bad input."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The command line of `jaxshard bench`."""

    machines: tuple[str, ...] = ("h100:8", "v5e:2x4", "cpu:8")
    """The machines to compile for. On cpu:N (simulated devices) steps are timed too."""
    models: tuple[str, ...] = ("decoder",)
    """Language models: decoder (12 x 1024), llama (1 G parameters), unrolled (the decoder's layers in a list), moe,
    shared-moe, ssm, mamba2. Of images: conv, unet, vit, vit-casts-first, dit. Others: translator, clip, conformer,
    transducer, dlrm, crossnet, graph, mlp."""
    steps: tuple[str, ...] = steps.NAMES
    """ddp, zero1, zero2, zero3 are jaxshard's; the others are peers. By default all."""
    microbatches: int = 1
    """Number of microbatches, whose gradients are summed before one update."""
    masters: tyro.conf.FlagCreatePairsOff[bool] = False
    """bfloat16 parameters and computation, with float32 masters in the state."""
    rows: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Rows of a microbatch, over all devices; by default as many as suit the model, 16 for most."""
    against: Annotated[str, tyro.conf.arg(metavar="STEP")] = "optax"
    """The step that the other steps' times are divided by."""
    rounds: Annotated[int, tyro.conf.arg(metavar="N")] = 10
    """Rounds of timing two steps alternately; 0: do not time."""
    processes: tuple[int, ...] = ()
    """Also measure the cost of this many devices (such as 2 8) against one, for jaxshard's --steps and for PyTorch's
    DDP, ZeroRedundancyOptimizer and FSDP2 over gloo, in processes of their own."""
    torch: Annotated[Path | None, tyro.conf.arg(metavar="PYTHON")] = None
    """A Python with PyTorch; by default this one."""
    options: Annotated[str, tyro.conf.arg(metavar="JSON")] = "{}"
    """Compiler options, for all machines but cpu:N."""
    toy: tyro.conf.FlagCreatePairsOff[bool] = False
    """Tiny models, whose figures mean nothing, to try the command."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write all figures to this file, with versions, date and machine."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Write bench.json and a plot for each machine and model to this folder."""


def command(arguments: Sequence[str]) -> int:
    """Runs `jaxshard bench`; returns the exit status."""
    return words.run_on_cpu("jaxshard bench", lambda: _run(parse(arguments)))


_fail = functools.partial(fail, "jaxshard bench")


def parse(arguments: Sequence[str]) -> Arguments:
    """The command line.

    Raises:
      ValueError: a name is unknown, or a number out of range.
    """
    given = words.parsed(arguments, Arguments, "jaxshard bench", _DESCRIPTION)
    _check_names("--models", given.models, models.MODELS)
    _check_names("--steps", given.steps, steps.NAMES)
    _check_names("--against", [given.against], steps.NAMES)
    if not given.machines:
        raise ValueError("--machines is empty: give some, such as h100:8, v5e:2x4 or cpu:8")
    for machine in given.machines:
        aot.machine(machine)
    for name, value in (("microbatches", given.microbatches), ("rows", given.rows)):
        if value is not None and not 1 <= value <= 2**20:
            raise ValueError(f"--{name} {value} must be from 1 to {2**20}")
    if not 0 <= given.rounds <= 10**6:
        raise ValueError(f"--rounds {given.rounds} must be from 0 to {10**6}")
    for count in given.processes:
        if not 2 <= count <= 64 or _rows_of_decoder(given) % count:
            raise ValueError(f"--processes {count} must be from 2 to 64, and divide --rows {_rows_of_decoder(given)}")
    if given.processes and not given.rounds:
        raise ValueError("--processes only measures times, and --rounds 0 measures none: give only one of them")
    if given.torch is not None and not given.processes:
        raise ValueError(f"--torch {given.torch} needs --processes: add --processes 2 or 8")
    if given.torch is not None and not processes.is_python(given.torch):
        raise ValueError(
            f"--torch {given.torch} is not a working Python: give one that has PyTorch, such as venv/bin/python"
        )
    _compiler_options(given)
    _check_files(given)
    return given


def _rows_of_decoder(given: Arguments) -> int:
    return given.rows or models.model("decoder").rows


def _check_names(option: str, names: Sequence[str], known: Sequence[str] | dict[str, Any]) -> None:
    if not names:
        raise ValueError(f"{option} is empty: choose from {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ValueError(f"{option} {name!r} is unknown{nearest(name, known)}; choose from {', '.join(known)}")


def _compiler_options(given: Arguments) -> dict[str, Any]:
    try:
        options = json.loads(given.options)
    except ValueError as error:
        raise ValueError(f"--options {given.options}: it must be JSON ({error})") from None
    if not isinstance(options, dict):
        raise ValueError(f"--options {given.options}: it must be a JSON object of names and values")
    return options


def _check_files(given: Arguments) -> None:
    if given.json is not None:
        check_file("--json", given.json)
    if given.out is not None:
        check_room("--out", given.out)


def _simulate(given: Arguments) -> None:
    """Makes the simulated devices, before JAX starts."""
    machines = [aot.machine(name) for name in given.machines if name.startswith("cpu:")]
    if machines:
        devices_of(max(machines, key=lambda machine: machine.num_devices))


def _run(given: Arguments) -> int:
    _simulate(given)
    console, found = make_console(), []
    start = about()
    say(console, bench_tables.made_in_words(start))
    for machine in given.machines:
        for model in given.models:
            rows = []
            for row in _rows(given, machine, model):
                rows.append(row)
                say(console, bench_tables.line(row))
            bench_tables.show(console, rows, given.against)
            found += rows
    for count in given.processes:
        found += _beside_one_device(console, given, count)
    _write(given, start, found)
    return 0 if any(row.figures for row in found) else 1


def _beside_one_device(console: Console, given: Arguments, count: int) -> list[Row]:
    """Measures and shows the cost of `count` devices against one."""
    names = [name for name in given.steps if name in OURS] + list(processes.TORCH)
    setting = processes.setting("toy" if given.toy else "small", _rows_of_decoder(given), given.rounds, given.torch)
    found = []
    for row in processes.rows(names, count, setting):
        found.append(row)
        say(console, bench_tables.line(row))
    bench_tables.show_beside_one(console, found)
    return found


def _rows(given: Arguments, machine: str, model: str) -> Iterator[Row]:
    """Yields the rows of one machine and model."""
    is_here = machine.startswith("cpu:")
    try:
        task = _task(given, machine, model)
    except (aot.CompilerMissingError, UnfitError) as error:
        yield from (Row(machine, model, step, {}, str(error)) for step in given.steps)
        return
    other = _Once(lambda: Running(steps.build(given.against, task), task))
    for name in given.steps:
        try:
            step, figures = compiled(_building(name, task), {} if is_here else _compiler_options(given))
        except UnfitError as error:
            yield Row(machine, model, name, {}, str(error))
            continue
        except jax.errors.JaxRuntimeError as error:
            yield Row(machine, model, name, {}, f"the compiler rejects it: {str(error).splitlines()[0]}")
            continue
        if is_here and given.rounds:
            figures |= timed(other() if name == given.against else Running(step, task), other(), given.rounds)
        yield Row(machine, model, name, figures)


def _building(name: str, task: Task) -> Callable[[], Step]:
    return lambda: steps.build(name, task)


class _Once:
    """Makes a value at the first call."""

    def __init__(self, make: Callable[[], Running]):
        self._make, self._made = make, None

    def __call__(self) -> Running:
        self._made = self._made or self._make()
        return self._made


def _task(given: Arguments, machine: str, model: str) -> Task:
    """The task for a machine and a model; raises UnfitError if the rows do not divide over the devices."""
    described = aot.machine(machine)
    mesh = jax.sharding.Mesh(devices_of(described), ("data",))
    size = "toy" if given.toy else "small" if described.chip.platform == "cpu" else "full"
    built = models.model(model, size, dtype="bfloat16" if given.masters else "float32")
    rows = given.rows or built.rows
    if rows % mesh.size:
        raise UnfitError(
            f"{rows} rows cannot be split over {mesh.size} devices: set --rows to a multiple of {mesh.size}"
        )
    return Task(built, mesh, rows * given.microbatches, given.microbatches, given.masters)


def _write(given: Arguments, start: dict[str, object], rows: Sequence[Row]) -> None:
    asked = {"microbatches": given.microbatches, "masters": given.masters, "rows": given.rows, "toy": given.toy}
    asked |= {"against": given.against, "rounds": given.rounds, "options": _compiler_options(given)}
    text = json.dumps({**start, "asked": asked, "rows": [row.to_dict() for row in rows]}, indent=1)
    if given.json is not None:
        files.overwrite(given.json, text + "\n")
    if given.out is not None:
        files.make_folder(given.out)
        files.replace(given.out / "bench.json", text + "\n")
        bench_tables.draw(rows, given.out)
