"""The command `jaxshard`: it trains the reference model, plans, and looks at checkpoints."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata

_HELP = """\
jaxshard shards any optax optimizer over a JAX device mesh.

usage: jaxshard COMMAND [OPTIONS]

commands:
  train [CONFIG.toml] [OPTIONS]   train a byte-level transformer with a sharded optimizer
                                  (with nothing given: 8 simulated devices, ZeRO-2, English text)
  plan [CONFIG.toml] [OPTIONS]    what training will cost each device, all strategies side by side, on
                                  machines that are not there; --compile asks their own compilers
  ckpt ls DIR                     list the checkpoints of a folder or of a run
  ckpt info DIR                   show a checkpoint's leaves
  ckpt verify DIR                 read all arrays and compare their digests
  ckpt diff DIR DIR2              compare two checkpoints
  ckpt export DIR --safetensors FILE
                                  write a checkpoint's arrays to one file, or to shards with an index

options:
  -h, --help                      show this text; `jaxshard COMMAND --help` lists a command's options
  --version                       show the version

examples:
  jaxshard train
  jaxshard train configs/zero3.toml --data my_texts/ --train.steps 2000 --out runs/mine
  jaxshard train --resume --out runs/mine
  jaxshard plan configs/llama3_8b.toml --machine h100:8x8 --fit
  jaxshard plan configs/gpt2_124m.toml --compile v5e:2x4
  jaxshard ckpt verify runs/mine
  jaxshard ckpt export runs/mine --safetensors model.safetensors --only ^params/
"""
_COMMANDS = ("train", "plan", "ckpt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; `arguments` are those of the shell by default.

    Returns:
      The exit status. 0: done. 1: training failed, or a checkpoint is corrupt, or two of them differ. 2: bad input,
      and nothing was written. 75: a step hung. 134: another process was lost. 130, 143: interrupted by Ctrl-C, by
      SIGTERM. After 75 and 134 the same command is worth another try.
    """
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if command == "--version":
        print(f"jaxshard {metadata.version('jaxshard')}")
        return 0
    if command not in _COMMANDS:
        print(f"jaxshard: {unknown_command(command, _COMMANDS)}\n\n{_HELP}", end="", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(f"jaxshard.cli.{command}")
    except ModuleNotFoundError as error:
        print(f'jaxshard {command}: {error}; it comes with: pip install "jaxshard[train]"', file=sys.stderr)
        return 2
    try:
        return module.command(rest)
    except BrokenPipeError:  # who read the output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def unknown_command(name: str, known: Sequence[str]) -> str:
    """The message for a command that is not there.

    >>> unknown_command("plann", ["train", "plan"])
    "no command 'plann'; did you mean 'plan'? There is train, plan"
    """
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}? There" if near else "; there"
    return f"no command {name!r}{hint} is {', '.join(known)}"
