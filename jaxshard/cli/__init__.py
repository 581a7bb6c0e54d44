"""The command `jaxshard`: `jaxshard train` trains the reference model. Its parts load when they are needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata

_HELP = """\
jaxshard shards any optax optimizer over a JAX device mesh.

usage: jaxshard COMMAND [OPTIONS]

commands:
  train [CONFIG.toml] [OPTIONS]   train a byte-level transformer with a sharded optimizer
                                  (with nothing given: 8 simulated devices, ZeRO-2, English text)

options:
  -h, --help                      show this text; `jaxshard train --help` lists all of its options
  --version                       show the version

examples:
  jaxshard train
  jaxshard train configs/zero3.toml --data my_texts/ --train.steps 2000 --out runs/mine
  jaxshard train --resume --out runs/mine
"""
_COMMANDS = ("train",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; `arguments` are those of the shell by default.

    Returns:
      The exit status: 0 done, 1 training failed, 2 bad input (nothing was written), 130 or 143 interrupted
        (saved, unless it says otherwise), 75 hung (worth another try).
    """
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if command == "--version":
        print(f"jaxshard {metadata.version('jaxshard')}")
        return 0
    if command not in _COMMANDS:
        print(f"jaxshard: no command {command!r}; there is {', '.join(_COMMANDS)}\n\n{_HELP}", end="", file=sys.stderr)
        return 2
    try:
        from jaxshard.cli import train
    except ModuleNotFoundError as error:
        print(f'jaxshard {command}: {error}; it comes with: pip install "jaxshard[train]"', file=sys.stderr)
        return 2
    return train.command(rest)
