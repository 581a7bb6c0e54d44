"""`jaxshard ckpt`: lists, checks, compares and exports checkpoints. It uses the CPU, and takes no GPU from a run."""

from __future__ import annotations

import functools
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, ParamSpec

import tyro

from jaxshard.apps.commands import help as pages
from jaxshard.apps.commands.arguments import asks_for_help, on_cpu, one_line
from jaxshard.checkpoint import CorruptCheckpointError, NewerFormatError
from jaxshard.checkpoint.step_folders import StepFolders
from jaxshard.checkpoint.storage.leaves import Entry, Index
from jaxshard.checkpoint.storage.manifest import faults_in_words
from jaxshard.cli import unknown_command
from jaxshard.cli.ckpt import export as files
from jaxshard.cli.ckpt import huggingface as ckpt_huggingface
from jaxshard.cli.ckpt.tables import (
    asked,
    chosen,
    differences,
    finite_in_words,
    make_console,
    metrics_in_words,
    none_in,
    num_bytes,
    num_elements,
    opened,
    row_of,
    saved_at,
    say,
    show,
)
from jaxshard.system.command import INTERRUPTED, is_command
from jaxshard.system.text import printable, shortened, size_from_words, size_in_words

_DESCRIPTION = """Inspects checkpoints, on the CPU.

DIR is a folder of checkpoints, a run's folder (which has them in model/), or the folder of one step.
Exit status: 0 done, all intact, no difference; 1 corrupt, or a difference; 2 bad input, or diff of a corrupt one."""

_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
_NewDir = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
_Size = Annotated[str, tyro.conf.arg(metavar="SIZE")]
_Regex = Annotated[str | None, tyro.conf.arg(metavar="REGEX")]
_Step = Annotated[int | None, tyro.conf.arg(metavar="INT")]
_Dir = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
_P = ParamSpec("_P")


def command(arguments: Sequence[str]) -> int:
    """Runs `jaxshard ckpt`; returns the exit status."""
    if is_command() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # so that an interrupted export removes its files
    if not arguments or (not arguments[0].startswith("-") and arguments[0] not in COMMANDS):
        problem = unknown_command(arguments[0], [*COMMANDS]) if arguments else f"give a command: {', '.join(COMMANDS)}"
        return _fail(f"{problem} (jaxshard ckpt --help)", 2)
    if asks_for_help(arguments):
        print(_help(arguments[0] if arguments[0] in COMMANDS else None), end="")
        return 0
    try:
        with one_line("jaxshard ckpt"):
            act = tyro.extras.subcommand_cli_from_dict(
                {name: _later(command) for name, command in COMMANDS.items()},
                prog="jaxshard ckpt",
                description=_DESCRIPTION,
                args=list(arguments),
                config=(tyro.conf.FlagCreatePairsOff,),
            )
        with on_cpu(jax_enable_x64=True):  # some checkpoints have 64 bits
            return act()
    except CorruptCheckpointError as error:
        return _fail(error, 2 if arguments[0] == "diff" else 1)
    except OSError as error:
        return _fail(f"{error.strerror}: {error.filename}" if error.strerror else error, 2)
    except ValueError as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written", INTERRUPTED)


def _later(command: Callable[_P, int]) -> Callable[_P, Callable[[], int]]:
    """Makes a function that parses as the command, but returns the call instead of running it."""

    @functools.wraps(command)
    def parsed(*args: _P.args, **kwargs: _P.kwargs) -> Callable[[], int]:
        return lambda: command(*args, **kwargs)

    return parsed


def ls(folder: _Dir) -> int:
    """List checkpoints, and sub-folders that are not complete checkpoints.

    Args:
      folder: a folder of checkpoints, of a run, or of one step.
    """
    checkpoints, step = opened(folder)
    steps = checkpoints.steps() if step is None else [step]
    others = StepFolders(checkpoints.path).others() if step is None else {}
    if not steps and not others:
        raise ValueError(none_in(checkpoints.path))
    console = make_console()
    if steps:
        headings = ("step", "saved", "on disk", "leaves", "elements", "in arrays", "index", "numbers", "metrics")
        show(console, headings, [row_of(checkpoints, each) for each in steps], long="metrics")
    for name, what in others.items():
        say(console, f"{name}: not a checkpoint: {what}")
    return 0


def info(folder: _Dir, step: _Step = None) -> int:
    """Show a checkpoint's leaves: path, shape, dtype, bytes and digest (or value). Reads no array.

    Args:
      folder: a folder of checkpoints, of a run, or of one step.
      step: the step to take; by default the newest.
    """
    checkpoints, step = chosen(folder, step)
    found, console = checkpoints.info(step), make_console()
    say(console, f"step {step} in {checkpoints.path}, saved {saved_at(checkpoints.path / str(step))}")
    say(console, f"run: {found['run']}")
    say(console, f"metrics: {metrics_in_words(found['metrics']) or 'none'}")
    say(console, f"numbers: {finite_in_words(found)}")
    rows, leaves = [], found["leaves"]
    for path, leaf in leaves.items():
        shape, mark = str(tuple(leaf["shape"])), leaf["value"] if "value" in leaf else f"{leaf['digest']:08x}"
        rows.append([path, shape, leaf["dtype"], f"{files.num_bytes(leaf):,}", mark])
    show(console, ("path", "shape", "dtype", "bytes", "digest or number"), rows, long="path")
    say(console, f"leaves: {len(leaves)}, elements: {num_elements(leaves):,}, bytes: {num_bytes(leaves):,}")
    return 0


def verify(folder: _Dir, step: _Step = None) -> int:
    """Read every array and compare its digest with the saved one; show whether all are finite.

    Args:
      folder: a folder of checkpoints, of a run, or of one step.
      step: the step to take; by default all.
    """
    checkpoints, steps = asked(folder, step)
    corrupt, unread, console = False, False, make_console()
    for each in steps:
        try:
            faults = checkpoints.verify(each)
            words = faults_in_words(checkpoints.info(each)["leaves"], faults) if faults else ""
            found = f"intact, not finite: {words}" if words else "intact"
        except NewerFormatError as error:
            unread, found = True, f"not read: {error}"
        except (CorruptCheckpointError, FileNotFoundError) as error:
            gone = each not in checkpoints.steps()
            corrupt |= not gone
            found = "deleted by its run" if gone else str(error).removeprefix(f"checkpoint {each} is ")
        except OSError as error:
            unread, found = True, f"not read: {error.strerror}: {error.filename}"
        say(console, f"step {each}: {found}")
    damaged = checkpoints.damaged() if step is None and opened(folder)[1] is None else {}
    for each, missing in damaged.items():
        say(console, f"step {each}: corrupt: {missing} is missing")
    return 1 if corrupt or damaged else 2 if unread else 0


def diff(left: _Dir, right: _Dir, values: bool = False) -> int:
    """Compare two checkpoints by shapes, dtypes and digests: a line for each leaf that is only in the first (-), only
    in the second (+), or different (!). Of a folder with several, the newest is compared; give a step's folder to
    choose:
    `jaxshard ckpt diff runs/mine/model/100 runs/mine/model/200`.

    Args:
      left: one checkpoint.
      right: the other.
      values: read the leaves that differ, and show their largest absolute difference.
    """
    console = make_console()
    one, two = chosen(left, None), chosen(right, None)
    for sign, (checkpoints, step) in (("-", one), ("+", two)):
        say(console, f"{sign} step {step} in {checkpoints.path}")
    num_apart = 0
    for line in differences(one, two, values):
        say(console, line)
        num_apart += 1
    say(console, f"leaves that differ: {num_apart}")
    return int(num_apart > 0)


def export(
    folder: _Dir,
    safetensors: _File = None,
    huggingface: _NewDir = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    shard_size: _Size = "5GB",
    step: _Step = None,
    only: _Regex = None,
) -> int:
    """Write a checkpoint's arrays to a .safetensors file, or a run's model to a folder for Hugging Face's transformers.
    Every digest is checked before a file appears.

    In a file, arrays are named by their paths, as `info` shows them; typed keys are written as uint32 data. In a folder
    (config.json, model.safetensors, the tokenizer that the run started from), the model is a GPT-2 or Llama with merged
    adapters.

    Arrays of more than --shard-size in all are written to several files, as Hugging Face's loaders expect: instead of
    model.safetensors, model-00001-of-00003.safetensors and so on, and model.safetensors.index.json.

    Args:
      folder: a folder of checkpoints, of a run, or of one step.
      safetensors: the file to write; it must be new. One of this and --huggingface is required.
      huggingface: the folder to write, instead of a file; it must be new or empty.
      dtype: of the tensors in that folder; by default the parameters'.
      shard_size: the largest file, such as 500MB; the export needs about as much host memory.
      step: the step to take; by default the newest.
      only: a regular expression such as ^params/: only leaves whose paths match it anywhere
    """
    most = _shard_bytes(shard_size)
    if (safetensors is None) == (huggingface is None):
        raise ValueError("export writes a file or a folder: give --safetensors FILE or --huggingface DIR")
    if huggingface is not None:
        if only is not None:
            raise ValueError(f"--only {only}: --huggingface writes the full model: leave it out")
        return _export_model(folder, huggingface, dtype, most, step)
    if dtype is not None:
        raise ValueError(f"--dtype {dtype} is for --huggingface: --safetensors writes arrays as they are")
    assert safetensors is not None
    checkpoints, step = chosen(folder, step)
    files.check_free(safetensors)
    found = checkpoints.info(step)
    leaves, notes = _only(found["leaves"], only), {"step": str(step), "run": str(found["run"])}
    num_shards = files.write(safetensors, leaves, lambda paths: checkpoints.read(step, paths), notes, most)
    size = size_in_words(num_bytes(leaves))
    made = safetensors if num_shards == 1 else f"{files.index_of(safetensors)} and {num_shards} shards"
    say(make_console(), f"wrote {made}: step {step}, leaves: {len(leaves)}, {size}; all digests match")
    return 0


def _export_model(folder: Path, target: Path, dtype: str | None, most_bytes: float, step: int | None) -> int:
    checkpoints, step = chosen(folder, step)
    ckpt_huggingface.check_free(target)
    names = ckpt_huggingface.write(checkpoints, step, target, dtype, most_bytes)
    say(make_console(), f"wrote {target}: step {step}: {', '.join(names)}; all digests match")
    return 0


def _shard_bytes(given: str) -> int:
    try:
        most = size_from_words(given)
    except ValueError as error:
        raise ValueError(f"--shard-size: {error}") from None
    if most < 1:
        raise ValueError(f"--shard-size {given}: it must be at least 1 B")
    return most


def _only(leaves: Index, pattern: str | None) -> dict[str, Entry]:
    try:
        found = {path: leaf for path, leaf in leaves.items() if re.search(pattern or "", path)}
    except re.error as error:
        raise ValueError(f"--only {pattern}: not a regular expression: {error}") from None
    if not found:
        raise ValueError(f"--only {pattern}: none of {len(leaves)} leaves matches; the first is {next(iter(leaves))}")
    return found


COMMANDS: dict[str, Callable[..., int]] = {"ls": ls, "info": info, "verify": verify, "diff": diff, "export": export}


def _help(name: str | None) -> str:
    """The help page of a command, or of all."""
    if name is not None:
        return pages.of_function(COMMANDS[name], f"jaxshard ckpt {name}")
    rows = [(each, (act.__doc__ or "").partition("\n\n")[0]) for each, act in COMMANDS.items()]
    options = [(pages.HELP[0], "Show this text; `jaxshard ckpt COMMAND --help` lists a command's options.")]
    sections = [pages.Section("commands", rows), pages.Section("options", options)]
    return pages.page("jaxshard ckpt COMMAND [OPTIONS] DIR", _DESCRIPTION, sections)


def _fail(reason: object, status: int) -> int:
    print(f"jaxshard ckpt: {printable(shortened(str(reason)))}", file=sys.stderr)
    return status
