"""`jaxshard train`: from the command line to a trained and saved model."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import functools
import math
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from rich.console import Console

import jaxshard
from jaxshard.apps.commands import several_processes
from jaxshard.apps.commands.ending import FAILED_SECONDS, LEAVE_SECONDS, end_within, leave_at_once, status_of
from jaxshard.apps.commands.train_options import Given, check_folder, parse
from jaxshard.apps.config import toml
from jaxshard.apps.config.config import Config
from jaxshard.apps.huggingface import hf_folder
from jaxshard.apps.model.attention import why_not_fused
from jaxshard.apps.records import trackers
from jaxshard.apps.records.display import Display, make_console, say
from jaxshard.apps.records.profile import Profile, steps_in
from jaxshard.apps.records.record import Logger, Recorder, loggers
from jaxshard.apps.runs.place import Place
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.apps.runs.snapshot import Snapshot, open_saves
from jaxshard.apps.trainer import finished_run
from jaxshard.apps.trainer.build import Run, prepare
from jaxshard.apps.trainer.loop import Hooks, Meter, fit
from jaxshard.apps.trainer.safekeeping import MovedError, Safekeeping, resumed
from jaxshard.apps.trainer.summary import conclude, draw_curves, introduce, resumes, sample, show_step
from jaxshard.apps.trainer.vocabulary import tokenizer_of
from jaxshard.checkpoint import Checkpointer, CorruptCheckpointError, NewerFormatError
from jaxshard.guards import HUNG, Preemption, Watchdog
from jaxshard.system.command import INTERRUPTED, ended_at_once, fail, is_command, output_not_needed
from jaxshard.system.text import printable, printable_lines
from jaxshard.system.users_code import UsersError


def command(arguments: Sequence[str]) -> int:
    """Runs `jaxshard train`; returns the exit status. Bad input is reported before anything is compiled or written."""
    try:
        status = _command(arguments)
    except BaseException as error:
        if jax.distributed.is_initialized():  # at exit, this process and the others may wait for each other
            traceback.print_exception(error)
            leave_at_once(status_of(error, 1), 10 if isinstance(error, Exception) else 0)
        raise
    if status and jax.distributed.is_initialized():  # the other processes may lack this error
        leave_at_once(status, LEAVE_SECONDS)
    if is_command():
        end_within(FAILED_SECONDS if status else LEAVE_SECONDS, status)
    return status


def _command(arguments: Sequence[str]) -> int:
    interrupted = "interrupted; nothing was written"
    try:
        with ended_at_once(lambda: f"jaxshard train: {interrupted}"):
            given = parse(arguments)
            if given.processes is not None:
                return several_processes.run(arguments, given)
            job = make_job(given)
    except _REFUSALS as error:
        return _fail(error, status_of(error, 2))
    except KeyboardInterrupt:
        return _fail(interrupted, INTERRUPTED)
    with output_not_needed("jaxshard train"), ended_at_once(lambda: f"jaxshard train: {_interrupted(job.folder)}"):
        return _trained(job)


_REFUSALS = (ValueError, jaxshard.processes.ProcessError, OSError)


def _trained(job: Job) -> int:
    console = make_console()
    if jax.process_index() > 0:
        warnings.simplefilter("ignore")
    saves = open_saves(job.folder, job.run.config.train)
    try:
        run_id = saves.claim()
        jaxshard.processes.check_same("start", _fingerprint(job), "start all processes with the same command")
    except _REFUSALS as error:
        busy = job.again and getattr(error, "errno", None) == errno.EBUSY  # its predecessor has not quite ended
        return _fail(error, HUNG if busy else status_of(error, 2))
    for note in job.notes:
        say(console, printable(note))
    try:
        with saves, _placed(job, run_id) as place:
            snapshot = resumed(job.run, saves, console) if job.resume else job.run.start()
            if job.resume and not resumes(console, job.run, job.folder, snapshot):
                _repair(job, snapshot.step, console)
                return 0
            snapshot, status = execute(job, compile_step(job, console), console, saves, place, snapshot)
    except MovedError as error:
        return _fail(error, 1)
    except (
        FloatingPointError,
        OSError,
        jaxshard.processes.ProcessError,
        jaxshard.digest.ReplicaError,
        UsersError,
        CorruptCheckpointError,
        NewerFormatError,
    ) as error:
        return _fail(f"{error}; {_saved_so_far(job.folder)}", status_of(error, 1))
    except KeyboardInterrupt:
        return _fail(_interrupted(job.folder), INTERRUPTED)
    is_there = conclude(console, job.run, job.folder, snapshot, interrupted=bool(status))
    return status if is_there else status or 1


def _placed(job: Job, run_id: str) -> contextlib.AbstractContextManager[Place | None]:
    """The run's `Place`, in process 0."""
    if jax.process_index() > 0:
        return contextlib.nullcontext()
    config = job.run.config

    def complete(folder: RunFolder) -> list[str]:
        notes = folder.complete(toml.dump(config), job.tokenizer)
        if config.train.start and not folder.huggingface.exists():
            hf_folder.keep(Path(config.train.start), folder.huggingface)
        return notes

    return Place(job.folder, run_id, complete)


def _fingerprint(job: Job) -> str:
    """Everything that must be the same in all processes, except the step's program, which `train_step` compares."""
    mesh = job.run.mesh
    return f"{toml.dump(job.run.config)}text: {job.run.template.position.text}\n{mesh}: {mesh.device_ids.tolist()}\n"


def _interrupted(folder: RunFolder) -> str:
    return f"interrupted; {_saved_so_far(folder)}"


def _saved_so_far(folder: RunFolder) -> str:
    step = folder.latest_step()
    return "nothing was saved" if step is None else f"the last save is step {step}"


_fail = functools.partial(fail, "jaxshard train")


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A run with checked options; nothing is compiled or written yet.

    Attributes:
      run: the prepared run.
      folder: to save it in.
      resume: whether the run resumes from a save.
      again: whether the same command starts and restarts the run (--resume-if-saved).
      notes: to print before it starts.
      profiled: the steps of this process to trace.
      tokenizer: the file beside the text that made its tokens.
    """

    run: Run
    folder: RunFolder
    resume: bool
    again: bool = False
    notes: Sequence[str] = ()
    profiled: range = range(0)
    tokenizer: Path | None = None


def make_job(given: Given) -> Job:
    """Reads the text, plans all shardings and checks the folder; raises ValueError if the options are impossible."""
    config = Config(**{section.name: getattr(given, section.name) for section in dataclasses.fields(Config)})
    run = prepare(config, given.typed)
    config = run.config
    folder = RunFolder(given.out or _dated_folder())
    resume, notes = jaxshard.processes.from_first("start", lambda: check_folder(given, folder, config))
    jaxshard.processes.from_first("start", lambda: trackers.check(config.train.log_to))
    if not resume:
        jaxshard.processes.together("start", lambda: finished_run.find(config))
    reason = why_not_fused(config.model, run.mesh)
    notes = [*notes, f"attention is not fused: {reason}"] if reason else notes
    profiled = range(0) if given.profile is None else steps_in(given.profile)
    return Job(run, folder, resume, given.resume_if_saved, [*given.notes, *notes], profiled, tokenizer_of(config))


def compile_step(job: Job, console: Console) -> jaxshard.TrainStep:
    """Compiles the step, once for the whole run, and shows its memory and traffic."""
    run = job.run
    introduce(console, run)
    params, state, step = run.template.params, run.template.state, run.make_step()
    compiled = step.lower(params, state, run.batch(0), *run.keys(0)).compile()
    show_step(console, run, jaxshard.inspect.report(compiled))
    return step


def execute(
    job: Job, step: jaxshard.TrainStep, console: Console, saves: Checkpointer, place: Place | None, snapshot: Snapshot
) -> tuple[Snapshot, int]:
    """Trains from `snapshot` and saves.

    Returns:
      (the last snapshot saved, the exit status): 0, or the status of the signal that ended the run.

    Raises:
      FloatingPointError: too many steps in a row were skipped.
      ReplicaError: copies of an array differ between devices.
      TextError, UsersError: the text can no longer be read.
      MovedError: the run's folder was moved or replaced.
      OSError: a save failed.
    """
    run, folder, train = job.run, job.folder, job.run.config.train
    if moved := jaxshard.processes.from_first("start", lambda: place and place.moved()):
        raise MovedError(f"{moved[0]}; no step was taken")
    writes = jax.process_index() == 0
    makers = _begun(job, snapshot.step, console) if writes else {}
    with Recorder(makers, lambda text: say(console, text)) as recorder:
        snapshot, status = _fitted(job, step, console, (saves, place, recorder), snapshot)
        if train.sample and not status:
            text = printable_lines(sample(run, folder, snapshot))
            say(console, f"a sample:\n{text}")
            recorder.text(snapshot.step, "sample", text)
    if writes:
        draw_curves(run, folder, console)
        folder.sync()
    return snapshot, status


def _fitted(
    job: Job,
    step: jaxshard.TrainStep,
    console: Console,
    keep: tuple[Checkpointer, Place | None, Recorder],
    snapshot: Snapshot,
) -> tuple[Snapshot, int]:
    """Trains and saves, and reports skipped steps; returns as `execute`."""
    run, folder, train, (saves, place, recorder) = job.run, job.folder, job.run.config.train, keep
    with (
        Display(console, snapshot.step, train.steps) as display,
        Preemption(lambda text: say(console, text)) as preemption,
        Watchdog(train.hang_seconds or math.inf) as watchdog,
        Profile(job.profiled, folder.profile, lambda text: say(console, text)) as profile,
    ):
        keeping = Safekeeping(run, saves, console, place, preemption, snapshot.step if job.resume else None)

        def save(snapshot: Snapshot, loss: float | None) -> None:
            keeping.save(snapshot, loss)
            recorder.sync()

        hooks = Hooks(
            step=step,
            evaluate=run.make_evaluate(watchdog.beat),
            save=save,
            save_alone=keeping.save_alone,
            checked=keeping.checked,
            ended=keeping.ended,
            alive=watchdog.beat,
            back=keeping.back,
            profile=profile,
        )
        meter = Meter(run, recorder, display, snapshot)
        snapshot = fit(run, snapshot, hooks, meter)
        keeping.save_last(snapshot)
    if meter.skipped:
        say(console, f"skipped: {meter.skipped} of {snapshot.step} steps, because the loss or gradient was not finite")
    return snapshot, preemption.status if keeping.was_ended else 0


def _begun(job: Job, step: int, console: Console) -> dict[str, Callable[[], Logger]]:
    """Makes the folder of a run that has taken `step` steps; returns the factories of its loggers."""
    config, folder = job.run.config, job.folder
    makers = loggers(folder, config, trackers.before(folder, config, step), lambda text: say(console, text))
    for note in folder.begin(toml.dump(config), step):
        say(console, printable(note))
    folder.keep_tokenizer(job.tokenizer)
    if config.train.start and not job.resume:
        hf_folder.keep(Path(config.train.start), folder.huggingface)
    return makers


def _repair(job: Job, step: int, console: Console) -> None:
    """Writes what the folder of a finished run lacks, and its options."""
    if jax.process_index() > 0:
        return
    makers = {name: make for name, make in _begun(job, step, console).items() if name not in trackers.TRACKERS}
    with Recorder(makers, lambda text: say(console, text)):
        draw_curves(job.run, job.folder, console)
    job.folder.sync()


def _dated_folder() -> Path:
    if jax.process_count() > 1:
        raise ValueError("several processes need --out DIR, the same folder for all, on a shared file system")
    return Path("runs") / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
