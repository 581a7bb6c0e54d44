"""Prints a summary of a run before its first step and after its last one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

import jaxshard
from jaxshard.apps.data.data import zlib_bits_per_byte
from jaxshard.apps.data.text_files import STDLIB
from jaxshard.apps.model import linear
from jaxshard.apps.model.model import LanguageModel
from jaxshard.apps.records import trackers
from jaxshard.apps.records.display import axis_table, loss_in_words, memory_table, say, step_table, step_totals
from jaxshard.apps.records.record import draw
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.apps.runs.snapshot import Snapshot, reshaped
from jaxshard.apps.trainer import generate
from jaxshard.apps.trainer.build import Run
from jaxshard.apps.trainer.vocabulary import kept_tokenizer
from jaxshard.system.text import printable, shell_command

_ZLIB_BYTES = 2**24  # takes a second


def introduce(console: Console, run: Run) -> None:
    """Prints model, devices and text, and the memory of each device."""
    strategy, mesh = run.config.sharding.strategy, run.mesh
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    kind = mesh.devices.flat[0].device_kind
    say(console, f"{_parameters(run)}, {strategy} on {mesh.size} x {kind} ({axes})")
    say(console, "\n".join(_marks(run)) + "\n")
    console.print(memory_table(strategy, *run.bytes_per_device()))


def show_step(console: Console, run: Run, report: jaxshard.inspect.Report) -> None:
    """Prints the compiled step's traffic and memory on each device."""
    mesh = run.mesh
    if report.collectives:
        console.print(step_table(report))
    say(console, step_totals(report) + "\n")
    if any(size > 1 for axis, size in mesh.shape.items() if axis != "data"):
        console.print(axis_table(mesh.shape, run.shares(), report.wire_bytes_by_axes(mesh)))


def conclude(console: Console, run: Run, folder: RunFolder, snapshot: Snapshot, interrupted: bool) -> bool:
    """Prints how the run ended, where its files are, and the command to resume it; returns whether the model exists."""
    best = _lowest(folder, snapshot)
    if interrupted:
        say(console, f"interrupted after step {snapshot.step}; the model is saved")
    elif snapshot.stopping.stopped:
        say(console, _end(run, snapshot))
    if math.isfinite(best):
        mark = f" (zlib -9: {zlib_bits_per_byte(run.text.heldout):.2f})" if run.text.is_bytes else ""
        say(console, f"best held-out loss: {loss_in_words(best, run.text.is_bytes)}{mark}")
    files = [f"model/{snapshot.step}", "metrics.jsonl", "loss.png", "config.toml"]
    files += trackers.folders(run.config.train.log_to)
    there = [name for name in files if (folder.path / name).exists()]
    missing = f"; missing: {', '.join(sorted(set(files) - set(there)))}" if len(there) < len(files) else ""
    say(console, f"in {printable(str(folder.path))}: {', '.join(there) or 'nothing'}{missing}")
    if "tensorboard" in there:
        say(console, f"to see the curves: {shell_command('tensorboard', '--logdir', _as_argument(folder.tensorboard))}")
    say(console, _to_go_on(run, folder, snapshot, interrupted))
    return files[0] in there


def resumes(console: Console, run: Run, folder: RunFolder, snapshot: Snapshot) -> bool:
    """Prints from where a run resumes and returns True; False if no step is left, and prints why."""
    if snapshot.stopping.stopped or snapshot.step >= run.config.train.steps:
        say(console, f"nothing to do: {_end(run, snapshot)}; {_to_go_on(run, folder, snapshot)}")
        return False
    place = printable(str(folder.model / str(snapshot.step)))
    say(console, f"resumes after step {snapshot.step} of {run.config.train.steps}, from {place}")
    return True


def _end(run: Run, snapshot: Snapshot) -> str:
    """What ended a run that is done."""
    if snapshot.stopping.stopped:
        misses = snapshot.stopping.misses
        return f"stopped early after step {snapshot.step}: {misses} evaluations without improvement"
    return f"all {run.config.train.steps} steps are done"


def _to_go_on(run: Run, folder: RunFolder, snapshot: Snapshot, interrupted: bool = False) -> str:
    """The command that resumes the run."""
    command = ["jaxshard", "train", "--resume", "--out", _as_argument(folder.path)]
    if not interrupted:
        enough = "patience" if snapshot.stopping.stopped else "steps"  # what ended the run
        command += [f"--train.{enough}", str(2 * getattr(run.config.train, enough))]
    return f"to continue: {shell_command(*command)}"


def _as_argument(path: Path) -> str:
    return f"./{path}" if str(path).startswith("-") else str(path)


def _lowest(folder: RunFolder, snapshot: Snapshot) -> float:
    """The lowest held-out loss, in nats. The rule of early stopping knows only those that count as improvements."""
    try:
        records = folder.records()
    except OSError:
        records = []
    losses = [record.get("heldout_loss") for record in records if record["step"] <= snapshot.step]
    return min([snapshot.stopping.best, *(loss for loss in losses if isinstance(loss, float) and math.isfinite(loss))])


def _parameters(run: Run) -> str:
    """The number of parameters, and of trained ones."""
    lora, dtype = run.config.lora, run.config.precision.params
    sizes = {path: leaf.size for path, leaf in linear.by_path(run.template.params).items()}
    if not lora.rank:
        return f"{sum(sizes.values()):,} {dtype} parameters"
    trained = sum(size for path, size in sizes.items() if linear.is_adapter(path))
    frozen = sum(size for path, size in sizes.items() if path.rpartition("/")[2] not in linear.ADDED)
    base = "matrices in int8" if lora.base == "int8" else lora.base or dtype
    return f"{trained:,} {dtype} parameters of rank {lora.rank} and {frozen:,} frozen ones ({base})"


def _marks(run: Run) -> Iterator[str]:
    source = _source(run.config.data.path)
    train, heldout, whole = run.text.train, run.text.heldout, run.text.whole
    counted = "bytes" if run.text.is_bytes else f"{train.dtype.name} tokens"
    counted = "rows of tokens" if heldout.ndim == 2 else counted
    if whole is None:
        yield f"text: {source}: {len(train):,} {counted} to train on, {len(heldout):,} held out"
    else:
        yield f"text: {source}: {len(whole):,} bytes, {len(train):,} to train on, the next {len(heldout):,} held out"
    if run.text.is_bytes:
        yield f"zlib -9 on the held-out text: {zlib_bits_per_byte(heldout):.2f} bits/byte"
    if whole is not None and len(whole) <= _ZLIB_BYTES:
        yield f"zlib -9 on the whole text: {zlib_bits_per_byte(whole):.2f} bits/byte"


def _source(path: str | None) -> str:
    if path is None:
        return "pydoc_data.topics, an English text that comes with Python"
    return f"{path}, the source of Python's standard library" if path == STDLIB else printable(path)


def sample(run: Run, folder: RunFolder, snapshot: Snapshot) -> str:
    """Text that the model writes after a newline, or after token 0."""
    stacked = reshaped(snapshot, run.saved_template)
    model = LanguageModel(run.config.model, lora=run.config.lora)
    prompt = [ord("\n") if run.text.is_bytes else 0]
    tokens = generate.generated(model, stacked.params, prompt, generate.Sampling(seed=run.config.train.seed))
    found = list(itertools.islice(tokens, run.config.train.sample))
    try:
        _, decode = generate.coded(kept_tokenizer(folder.path), run.config)
    except (ImportError, ValueError) as error:
        return f"({error})\n" + "".join(generate.as_numbers(iter(found)))
    return "".join(decode(iter(found)))


def draw_curves(run: Run, folder: RunFolder, console: Console) -> None:
    """Draws the curves. An error here does not fail the run, as the model is saved."""
    try:
        is_bytes = run.text.is_bytes
        draw(folder, {"zlib, held-out text": zlib_bits_per_byte(run.text.heldout)} if is_bytes else {}, is_bytes)
    except Exception as error:
        say(console, printable(f"{folder.figure} was not drawn: {error}"))
