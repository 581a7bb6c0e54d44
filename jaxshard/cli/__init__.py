"""The command `jaxshard`: it trains the reference model, plans, explains, benchmarks, and inspects checkpoints."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata

from jaxshard.apps.commands.help import Section, page
from jaxshard.system import command as process
from jaxshard.system.text import nearest, printable, shortened

_DESCRIPTION = "jaxshard shards any optax optimizer over a JAX device mesh."
_HELP = {
    "train [CONFIG.toml] [OPTIONS]": "Train a byte-level transformer with a sharded optimizer (with nothing given: 8 "
    "simulated devices, ZeRO-2, English text).",
    "tokenize INPUT... --out FOLDER": "Tokenize text with a new or an existing tokenizer.",
    "generate RUN [OPTIONS]": "Generate text with a run's newest model.",
    "eval RUN [--data PATH]": "Measure the held-out loss of a run's newest model.",
    "plan [CONFIG.toml] [OPTIONS]": "Predict what training costs each device, for all strategies, on machines you do "
    "not have; --compile uses their compilers.",
    "explain CONFIG.toml|MODULE:FUNCTION [OPTIONS]": "Show where a step's parameters are placed and gathered, and the "
    "source line of each collective of the compiled step.",
    "bench [OPTIONS]": "Compare jaxshard's steps with alternatives, with the machines' compilers and on simulated "
    "devices.",
    "ckpt ls DIR": "List the checkpoints of a folder or of a run.",
    "ckpt info DIR": "Show a checkpoint's leaves.",
    "ckpt verify DIR": "Read all arrays and compare their digests.",
    "ckpt diff DIR DIR2": "Compare two checkpoints.",
    "ckpt export DIR --safetensors FILE": "Write a checkpoint's arrays to one file, or to shards with an index.",
    "ckpt export RUN --huggingface DIR": "Write a run's model to a folder that transformers can load.",
    "doctor [OPTIONS]": "Check this machine: versions, devices, interconnect, disk and harmful settings, with advice "
    "for each problem.",
    "completion bash|zsh": "Print a script that completes commands, options and their values in your shell.",
}
_OPTIONS = {
    "-h, --help": "Show this text; `jaxshard COMMAND --help` lists a command's options.",
    "--version": "Show the version.",
}
_EXAMPLES = (
    "jaxshard train",
    "jaxshard train zero3 --data my_texts/ --out runs/mine",
    "jaxshard train --resume --out runs/mine",
    "jaxshard tokenize my_texts/ --out my_tokens",
    'jaxshard generate runs/mine --prompt "The "',
    "jaxshard plan llama3_8b --machine h100:8x8 --fit",
    "jaxshard plan gpt2_124m --compile v5e:2x4",
    "jaxshard explain train:build --compile v5e:2x4",
    "jaxshard bench --machines h100:8 --steps zero2 gspmd-zero-best",
    "jaxshard ckpt verify runs/mine",
    "jaxshard ckpt export runs/mine --safetensors model.safetensors",
    "jaxshard doctor --out /mnt/runs",
)
COMMANDS = {
    **{name: f"jaxshard.apps.commands.{name}" for name in ("train", "tokenize", "generate", "eval")},
    **{name: f"jaxshard.cli.{name}.command" for name in ("plan", "explain")},
    "bench": "jaxshard.apps.commands.bench",
    **{name: f"jaxshard.cli.{name}.command" for name in ("ckpt", "doctor", "completion")},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; `arguments` are by default those of the shell.

    Returns:
      The exit status. 0: done. 1: training failed, a checkpoint is corrupt, two checkpoints differ, the machine has a
      fault (`doctor`), or the compiler rejects a step (`explain`). 2: bad input; nothing was written. 75: a step hung.
      134: another process was lost. 129, 130, 143: interrupted by SIGHUP, Ctrl-C, SIGTERM. 141: the reader of the
      output has left (`train` goes on). After 75 and 134, run the same command again.
    """
    if process.is_command():
        _show_any_character()
        process.without_lines_of_gloo()
    status = _run(arguments)
    if status == process.INTERRUPTED and process.is_command():  # JAX crashes if Python exits while XLA compiles
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    return status


def _run(arguments: Sequence[str] | None) -> int:
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if command == "--version":
        print(f"jaxshard {metadata.version('jaxshard')}")
        return 0
    if command not in COMMANDS:
        return process.fail("jaxshard", printable(f"{unknown_command(command, [*COMMANDS])} (jaxshard --help)"), 2)
    try:
        module = importlib.import_module(COMMANDS[command])
    except ModuleNotFoundError as error:
        print(f'jaxshard {command}: {error}; install it with: pip install "jaxshard[train]"', file=sys.stderr)
        return 2
    try:
        with process.output_needed():
            return module.command(rest)
    except process.OutputGoneError as gone:
        if isinstance(gone.reason, BrokenPipeError):  # the reader of the output has left, as `head` does
            return 128 + signal.SIGPIPE
        print(f"jaxshard {command}: standard output cannot be written: {gone}", file=sys.stderr)
        return 2


def _help() -> str:
    sections = [Section("commands", [*_HELP.items()]), Section("options", [*_OPTIONS.items()])]
    examples = Section("examples", [(each, "") for each in _EXAMPLES])
    return page("jaxshard COMMAND [OPTIONS]", _DESCRIPTION, [*sections, examples])


def _show_any_character() -> None:
    """Escapes characters that the terminal's encoding lacks, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def unknown_command(name: str, known: Sequence[str]) -> str:
    """The message for an unknown command.

    >>> unknown_command("plann", ["train", "plan"]), unknown_command("x", ["train", "plan"])
    ("no command 'plann'; did you mean 'plan'?", "no command 'x'; the commands are train, plan")
    """
    name = shortened(name, 60)
    others = f"; the commands are {', '.join(known)}"
    return f"no command {name!r}{nearest(name, known) or others}"
