"""`jaxshard train`: from the command line to a trained and saved model."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import math
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import tyro
from rich.console import Console

import jaxshard.inspect
from jaxshard.checkpoint.checkpointer import Checkpointer
from jaxshard.cli import several_processes
from jaxshard.digest import ReplicaError, digests
from jaxshard.guards import HUNG, Preemption, Watchdog
from jaxshard.processes import agreement
from jaxshard.trainer import run_folder as folders
from jaxshard.trainer import toml
from jaxshard.trainer.build import Run, prepare, reshaped
from jaxshard.trainer.config import Arguments, Config, check
from jaxshard.trainer.data import zlib_bits_per_byte
from jaxshard.trainer.display import Display, axis_table, bits, make_console, memory_table
from jaxshard.trainer.loop import Hooks, Meter, fit
from jaxshard.trainer.record import Recorder, draw
from jaxshard.trainer.run_folder import RunFolder, Snapshot, open_saves

_DESCRIPTION = "Train a byte-level transformer with a sharded optimizer; every option can stand in CONFIG.toml too."

_ZLIB_BYTES = 2**24  # a second of work


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A run whose every option was checked; nothing is compiled or written.

    `resume`: it goes on with what is saved. `again`: it was started by what starts it again and again.
    """

    run: Run
    folder: RunFolder
    resume: bool
    again: bool = False


def command(arguments: Sequence[str]) -> int:
    """Runs `jaxshard train`; returns the exit status. Bad input is told before anything is compiled or written."""
    try:
        status = _command(arguments)
    except BaseException as error:
        if jax.distributed.is_initialized():  # the others wait at an exchange, as would this one to take its leave
            traceback.print_exception(error)
            _leave_at_once(_status(error, 1), 10 if isinstance(error, Exception) else 0)
        raise
    if status and jax.distributed.is_initialized():  # it may be an error of this process alone
        _leave_at_once(status, _LEAVE_SECONDS)
    return status


_LEAVE_SECONDS = 60  # for the others to tell the same error, or to find that this process is missing


def _command(arguments: Sequence[str]) -> int:
    try:
        given = parse(arguments)
        if given.processes is not None:
            return several_processes.run(arguments, given)
        job = make_job(given)
    except _REFUSALS as error:
        return _fail(error, _status(error, 2))
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written", 130)
    return _trained(job)


_REFUSALS = (ValueError, agreement.ProcessError, OSError)


def _trained(job: Job) -> int:
    console = make_console()
    if jax.process_index() > 0:
        warnings.simplefilter("ignore")
    saves = open_saves(job.folder, job.run.config.train)
    try:
        saves.claim()
        agreement.check_same("start", _fingerprint(job), "start all processes by the same command")
    except _REFUSALS as error:
        busy = job.again and getattr(error, "errno", None) == errno.EBUSY  # by the one before, which still ends
        return _fail(error, HUNG if busy else _status(error, 2))
    try:
        with saves:
            snapshot, status = execute(job, compile_step(job, console), console, saves)
    except (FloatingPointError, OSError, ReplicaError) as error:
        return _fail(f"{error}; {_saved_so_far(job.folder)}", _status(error, 1))
    except KeyboardInterrupt:
        return _fail(f"interrupted; {_saved_so_far(job.folder)}", 130)
    _conclude(console, job, snapshot, status)
    return status


def _leave_at_once(status: int, seconds: float) -> NoReturn:
    """Ends this process, in order if the others end within `seconds`, too."""
    sys.stdout.flush()
    sys.stderr.flush()
    if seconds:
        agreement.take_leave(seconds)
    os._exit(status)


_LOST = 134  # as where JAX itself ends a process that has lost another


def _status(error: BaseException, otherwise: int) -> int:
    """The exit status after an error: it says whether the same command, started again, could do better."""
    lost = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)
    taken = getattr(error, "errno", None) == errno.EADDRINUSE
    return _LOST if lost or taken or isinstance(error, TimeoutError) else otherwise


def _fingerprint(job: Job) -> str:
    """What must be the same for all processes, but for the step's program, which `train_step` compares."""
    mesh = job.run.opt.mesh
    return f"{toml.dump(job.run.config)}text: {job.run.template.position.text}\n{mesh}: {mesh.device_ids.tolist()}\n"


def parse(arguments: Sequence[str]) -> Arguments:
    """The command line over the TOML file (given, or of the run to resume) over the defaults.

    Raises:
      ValueError: an option is wrong; it is named. (What tyro finds wrong it prints, and raises SystemExit.)
    """
    given = _from_command_line(arguments, Arguments())
    file = given.config
    if (given.resume or given.resume_if_saved) and given.out is None:
        raise ValueError("--resume needs --out DIR, the folder of the run to go on with")
    if given.out is not None:
        if given.resume:
            RunFolder(given.out).check_saved()
        if _goes_on(given):
            file = file or RunFolder(given.out).config
    if file is not None:
        given = _from_command_line(arguments, Arguments(**toml.sections(file)))
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
    resume = agreement.from_first("start", lambda: _check_folder(given, folder, config))
    return Job(run, folder, resume, given.resume_if_saved)


def _goes_on(given: Arguments) -> bool:
    """Whether there is a saved run to go on with, as was asked for."""
    return given.resume or (given.resume_if_saved and given.out is not None and RunFolder(given.out).is_saved())


def _check_folder(given: Arguments, folder: RunFolder, config: Config) -> bool:
    """Returns whether the run goes on with what is saved there."""
    goes_on = _goes_on(given)
    if goes_on:
        _check_same_model(folder, config)
    elif given.resume_if_saved:
        folder.check_unsaved()
    else:
        folder.check_free()
    return goes_on


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


def execute(job: Job, step: Any, console: Console, saves: Checkpointer) -> tuple[Snapshot, int]:
    """Trains and saves; returns what was saved last, and the exit status: 0, or that of the signal that ended it.

    Raises:
      FloatingPointError: too many steps in a row were skipped.
      ReplicaError: copies of an array differ between devices.
      OSError: a save failed.
    """
    run, folder = job.run, job.folder
    writes, train = jax.process_index() == 0, run.config.train
    snapshot = _resumed(run, saves, console) if job.resume else run.start()
    if writes:
        folder.begin(toml.dump(run.config), snapshot.step)
    with (
        Recorder(folder, snapshot.step, writes) as recorder,
        Display(console, snapshot.step, train.steps) as display,
        Preemption(console.print) as preemption,
        Watchdog(train.hang_seconds or math.inf) as watchdog,
    ):
        guarded = _Guarded(run, saves, console, preemption, snapshot.step if job.resume else None)
        evaluate = run.make_evaluate(watchdog.beat)
        hooks = Hooks(step, evaluate, guarded.save, guarded.checked, guarded.ended, watchdog.beat, guarded.back)
        meter = Meter(run, recorder, display, snapshot)
        snapshot = fit(run, snapshot, hooks, meter)
        guarded.save_last(snapshot)
    if meter.skipped:
        console.print(f"skipped: {meter.skipped} of {snapshot.step} steps, for a loss or gradient that was not finite")
    if writes:
        draw(folder, {"zlib, held-out text": zlib_bits_per_byte(run.heldout)})
    return snapshot, preemption.status if guarded.was_ended else 0


class _Guarded:
    """What keeps a run from losing anything: its saves, its checks, its ways to end."""

    def __init__(self, run: Run, saves: Checkpointer, console: Console, preemption: Preemption, saved: int | None):
        self._run, self._saves, self._console, self._preemption = run, saves, console, preemption
        self._times_back, self._saved = 0, saved
        self.was_ended = False

    def save(self, snapshot: Snapshot, heldout_loss: float | None) -> None:
        """Begins to save, once for each step."""
        if snapshot.step != self._saved:
            folders.save(self._saves, reshaped(snapshot, self._run.saved_template), heldout_loss)
            self._saved = snapshot.step

    def save_last(self, snapshot: Snapshot) -> None:
        """Saves, and waits; the loop has not looked at the copies before."""
        if self._run.config.train.mend_copies and snapshot.step != self._saved:
            snapshot = self.checked(snapshot)
        self.save(snapshot, None)
        self._saves.wait()

    def ended(self, step: int) -> bool:
        self.was_ended = self._preemption.reached(step)
        return self.was_ended

    def checked(self, snapshot: Snapshot) -> Snapshot:
        """Raises ReplicaError, or mends, where copies differ."""
        try:
            digests((snapshot.params, snapshot.state))
            return snapshot
        except ReplicaError as error:
            if not self._run.config.train.mend_copies:
                raise
            self._console.print(f"step {snapshot.step}: {error}. All copies are now as the first")
        params, state = (self._run.opt.synchronize(tree) for tree in (snapshot.params, snapshot.state))
        return dataclasses.replace(snapshot, params=params, state=state)

    def back(self, snapshot: Snapshot, why: str) -> Snapshot | None:
        """The last save, with rows that were not tried yet; None where the run has to end."""
        self._saves.wait()
        saved = agreement.from_first("back", self._saves.steps)
        if self._run.config.train.on_divergence == "end" or self._times_back >= _TIMES_BACK or not saved:
            self.save_last(snapshot)
            return None
        self._times_back += 1
        for leaf in jax.tree.leaves((snapshot.params, snapshot.state)):
            leaf.delete()  # there may be no room for both
        found = _resumed(self._run, self._saves, self._console)
        self._saved = found.step
        self._console.print(f"{why}; back to step {found.step}, and on with other rows", soft_wrap=True)
        return dataclasses.replace(found, position=snapshot.position)


_TIMES_BACK = 3


def _resumed(run: Run, saves: Checkpointer, console: Console) -> Snapshot:
    """The newest save that is whole, as this run has it."""
    snapshot = reshaped(folders.restore(saves, run.saved_template), run.template)
    if snapshot.position.text != run.template.position.text:
        console.print("the text is another one: it is read from its beginning")
    return dataclasses.replace(snapshot, position=snapshot.position.carried_over(run.template.position))


def _from_command_line(arguments: Sequence[str], default: Arguments) -> Arguments:
    return tyro.cli(Arguments, args=arguments, default=default, prog="jaxshard train", description=_DESCRIPTION)


def _dated_folder() -> Path:
    if jax.process_count() > 1:
        raise ValueError("several processes need --out DIR, the same for each and on a file system that all share")
    return Path("runs") / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")


def _check_same_model(folder: RunFolder, config: Config) -> None:
    """Refuses what would change the saved arrays or start chance anew; sums (precision.reduce) may change."""
    taken = folder.latest_step() or 0
    if config.train.steps < taken:
        raise ValueError(
            f"train.steps = {config.train.steps}: the run in {folder.path} has taken {taken} steps: give more"
        )
    saved, given = (_saved_as(each) for each in (toml.load(folder.config), config))
    changes = ", ".join(
        f"{name} = {given[name]!r}, saved {value!r}" for name, value in saved.items() if value != given[name]
    )
    if changes:
        raise ValueError(f"--resume: the run saved in {folder.path} is another one: {changes}; leave these as saved")


def _saved_as(config: Config) -> dict[str, Any]:
    """The options that decide which arrays are saved, what they mean, and what chance brings."""
    sections = {"model": dataclasses.asdict(config.model), "precision": dataclasses.asdict(config.precision)}
    sections["train"] = {"seed": config.train.seed}
    del sections["precision"]["reduce"]
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


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


def _conclude(console: Console, job: Job, snapshot: Snapshot, status: int) -> None:
    config, folder = job.run.config, job.folder
    best, mark = bits(snapshot.stopping.best), zlib_bits_per_byte(job.run.heldout)
    if status:
        console.print(f"interrupted after step {snapshot.step}; the model is saved")
    elif snapshot.stopping.stopped:
        console.print(
            f"stopped early after step {snapshot.step}: {snapshot.stopping.misses} evaluations without improvement"
        )
    if math.isfinite(best):
        console.print(f"best held-out loss: {best:.3f} bits/byte (zlib -9: {mark:.2f})")
    console.print(f"in {folder.path}: model/{snapshot.step}, metrics.jsonl, loss.png, tensorboard, config.toml")
    more = ""
    if not status:
        enough = "patience" if snapshot.stopping.stopped else "steps"  # what ended the run
        more = f" --train.{enough} {2 * getattr(config.train, enough)}"
    console.print(f"to go on: jaxshard train --resume --out {folder.path}{more}", soft_wrap=True)


def _saved_so_far(folder: RunFolder) -> str:
    step = folder.latest_step()
    return "nothing was saved" if step is None else f"the last save is step {step}"


def _fail(reason: object, status: int) -> int:
    print(f"jaxshard train: {reason}", file=sys.stderr)
    return status
