"""`jaxshard train`: from the command line to a trained and saved model."""

from __future__ import annotations

import dataclasses
import datetime
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from jax.experimental import multihost_utils
from rich.console import Console

import jaxshard.inspect
from jaxshard.cli import folder as folders
from jaxshard.cli import toml
from jaxshard.cli.config import Arguments, Config, check
from jaxshard.cli.data import zlib_bits_per_byte
from jaxshard.cli.folder import RunFolder, Snapshot
from jaxshard.cli.interrupt import Interrupt
from jaxshard.cli.loop import Hooks, Meter, fit
from jaxshard.cli.record import Recorder, draw
from jaxshard.cli.report import Display, axis_table, bits, make_console, memory_table
from jaxshard.cli.run import Run, prepare, reshaped

_DESCRIPTION = "Train a byte-level transformer with a sharded optimizer; every option can stand in CONFIG.toml too."

_ZLIB_BYTES = 2**24  # a second of work


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A run whose every option was checked; nothing is compiled or written."""

    run: Run
    folder: RunFolder
    resume: bool


def command(arguments: Sequence[str]) -> int:
    """Runs `jaxshard train`; returns the exit status. Bad input is told before anything is compiled or written."""
    try:
        job = make_job(parse(arguments))
    except ValueError as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written", 130)
    console = make_console()
    try:
        snapshot, interrupted = execute(job, compile_step(job, console), console)
    except FloatingPointError as error:
        return _fail(f"{error}; {_saved_so_far(job.folder)}", 1)
    except KeyboardInterrupt:
        return _fail(f"interrupted; {_saved_so_far(job.folder)}", 130)
    _conclude(console, job, snapshot, interrupted)
    return 130 if interrupted else 0


def parse(arguments: Sequence[str]) -> Arguments:
    """The command line over the TOML file (given, or of the run to resume) over the defaults.

    Raises:
      ValueError: an option is wrong; it is named. (What tyro finds wrong it prints, and raises SystemExit.)
    """
    given = _from_command_line(arguments, Arguments())
    file = given.config
    if given.resume:
        if given.out is None:
            raise ValueError("--resume needs --out DIR, the folder of the run to go on with")
        RunFolder(given.out).check_saved()
        file = file or RunFolder(given.out).config
    if file is not None:
        base = toml.load(file)
        sections = {section.name: getattr(base, section.name) for section in dataclasses.fields(Config)}
        given = _from_command_line(arguments, Arguments(**sections))
    check(given)
    return given


def make_job(given: Arguments) -> Job:
    """Reads the text, lays everything out and looks at the folder.

    Raises:
      ValueError: what was asked for cannot be.
    """
    config = Config(**{section.name: getattr(given, section.name) for section in dataclasses.fields(Config)})
    run = prepare(config)
    folder = RunFolder(given.out or _dated_folder())
    _agree(lambda: _check_same_model(folder, config) if given.resume else folder.check_free())
    return Job(run, folder, given.resume)


def compile_step(job: Job, console: Console) -> Any:
    """The step, which JAX compiles but once; shows what it holds and moves."""
    run = job.run
    _introduce(console, run)
    params, state, step = run.template.params, run.template.state, run.make_step()
    compiled = step.lower(params, state, run.batch(0), *run.keys(0)).compile()
    report, mesh = jaxshard.inspect.report(compiled), run.opt.mesh
    console.print(f"the compiled step\n{report}\n")
    if any(size > 1 for axis, size in mesh.shape.items() if axis != "data"):
        console.print(axis_table(mesh.shape, run.shares(), report.wire_bytes_by_axes(mesh)))
    return step


def execute(job: Job, step: Any, console: Console) -> tuple[Snapshot, bool]:
    """Trains and saves; returns what was saved last, and whether Ctrl-C ended it.

    Raises:
      FloatingPointError: too many steps in a row were skipped.
    """
    run, folder = job.run, job.folder
    writes = jax.process_index() == 0

    def save(snapshot: Snapshot) -> None:
        folders.save(folder, reshaped(snapshot, run.saved_template))

    snapshot = reshaped(folders.restore(folder, run.saved_template), run.template) if job.resume else run.start()
    if writes:
        folder.begin(toml.dump(run.config), snapshot.step)
    with (
        Recorder(folder, snapshot.step, writes) as recorder,
        Display(console, snapshot.step, run.config.train.steps) as display,
        Interrupt(console.print) as interrupt,
    ):
        hooks = Hooks(step, run.make_evaluate(), save, lambda: interrupt.asked)
        meter = Meter(run, recorder, display, snapshot)
        snapshot = fit(run, snapshot, hooks, meter)
        save(snapshot)
    if meter.skipped:
        console.print(f"skipped: {meter.skipped} of {snapshot.step} steps, for a loss or gradient that was not finite")
    if writes:
        draw(folder, {"zlib, held-out text": zlib_bits_per_byte(run.heldout)})
    return snapshot, interrupt.asked


def _from_command_line(arguments: Sequence[str], default: Arguments) -> Arguments:
    return tyro.cli(Arguments, args=arguments, default=default, prog="jaxshard train", description=_DESCRIPTION)


def _dated_folder() -> Path:
    if jax.process_count() > 1:
        raise ValueError("several processes need --out DIR, the same for each and on a file system that all share")
    return Path("runs") / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")


def _check_same_model(folder: RunFolder, config: Config) -> None:
    """Refuses what would change the saved arrays; their sums (precision.reduce) may change at any time."""
    saved, given = (_saved_as(each) for each in (toml.load(folder.config), config))
    changes = ", ".join(
        f"{name} = {given[name]!r}, saved {value!r}" for name, value in saved.items() if value != given[name]
    )
    if changes:
        raise ValueError(f"--resume: the model saved in {folder.path} is another one: {changes}; leave these as saved")


def _saved_as(config: Config) -> dict[str, Any]:
    """The options that decide which arrays are saved, and what they mean."""
    sections = {"model": dataclasses.asdict(config.model), "precision": dataclasses.asdict(config.precision)}
    del sections["precision"]["reduce"]
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


def _agree(check_folder: Callable[[], None]) -> None:
    """The first process checks the folder, before any other can see what the first one makes there."""
    error = None
    if jax.process_index() == 0:
        try:
            check_folder()
        except ValueError as found:
            error = found
    refused = error is not None
    if jax.process_count() > 1:
        refused = bool(multihost_utils.broadcast_one_to_all(np.asarray(refused)))
    if refused:
        raise error or ValueError("the first process refused the folder of the run; its message says why")


def _introduce(console: Console, run: Run) -> None:
    strategy = run.config.sharding.strategy
    num_params = sum(leaf.size for leaf in jax.tree.leaves(run.template.params))
    mesh = " x ".join(f"{axis} {size}" for axis, size in run.opt.mesh.shape.items() if size > 1) or "one device"
    kind = run.opt.mesh.devices.flat[0].device_kind
    console.print(
        f"{num_params:,} {run.config.precision.params} parameters, {strategy} on {run.opt.mesh.size} x {kind} ({mesh})"
    )
    console.print("\n".join(_marks(run)) + "\n", soft_wrap=True)
    console.print(memory_table(strategy, *run.bytes_per_device()))


def _marks(run: Run) -> Iterator[str]:
    source = run.config.data.path or "pydoc_data.topics, the English text that every Python carries"
    trained, heldout = len(run.batches.text), len(run.heldout)
    yield f"text: {source}: {len(run.text):,} bytes, {trained:,} to train on, the next {heldout:,} held out"
    yield f"zlib -9 on what is held out: {zlib_bits_per_byte(run.heldout):.2f} bits/byte"
    if len(run.text) <= _ZLIB_BYTES:
        yield f"zlib -9 on the whole text: {zlib_bits_per_byte(run.text):.2f} bits/byte"


def _conclude(console: Console, job: Job, snapshot: Snapshot, interrupted: bool) -> None:
    config, folder = job.run.config, job.folder
    best, mark = bits(snapshot.stopping.best), zlib_bits_per_byte(job.run.heldout)
    if interrupted:
        console.print(f"interrupted after step {snapshot.step}; the model is saved")
    elif snapshot.stopping.stopped:
        console.print(
            f"stopped early after step {snapshot.step}: {snapshot.stopping.misses} evaluations without improvement"
        )
    if math.isfinite(best):
        console.print(f"best held-out loss: {best:.3f} bits/byte (zlib -9: {mark:.2f})")
    console.print(f"in {folder.path}: model/{snapshot.step}, metrics.jsonl, loss.png, tensorboard, config.toml")
    more = "" if interrupted else f" --train.steps {2 * config.train.steps}"
    console.print(f"to go on: jaxshard train --resume --out {folder.path}{more}", soft_wrap=True)


def _saved_so_far(folder: RunFolder) -> str:
    step = folder.latest_step()
    return "nothing was saved" if step is None else f"the last save is step {step}"


def _fail(reason: object, status: int) -> int:
    print(f"jaxshard train: {reason}", file=sys.stderr)
    return status
