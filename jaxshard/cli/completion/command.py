"""`jaxshard completion`: a script by which a shell completes commands, options and their values."""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxshard.apps.commands import help as pages
from jaxshard.apps.commands.arguments import asks_for_help, options_of
from jaxshard.apps.config.config import Arguments
from jaxshard.apps.config.paths import presets
from jaxshard.cli import COMMANDS
from jaxshard.system.command import fail
from jaxshard.system.text import nearest, printable, shortened

_COMMAND = "jaxshard completion"
_DESCRIPTION = """Prints a script that lets your shell complete commands, options, values and the names of presets.

Put one of these lines into ~/.bashrc or ~/.zshrc (there below compinit), or write the script to a file and source that,
so that a new shell need not start Python."""
_LINES = {shell: f'eval "$(jaxshard completion {shell})"' for shell in ("bash", "zsh")}
_FUNCTION = """\
_jaxshard() {
  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" name="${COMP_WORDS[1]}" words="" files=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="@commands@"
  else
    if [ "$name" = ckpt ] && [ "$COMP_CWORD" -gt 2 ]; then name="ckpt ${COMP_WORDS[2]}"; fi
    case "$name $prev" in
@values@
      *)
        files=yes
        case "$cur:$name" in
@options@
@names@
        esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  if [ -n "$files" ]; then COMPREPLY+=($(compgen -f -- "$cur")); fi
}
complete -o filenames -F _jaxshard jaxshard
"""
_BEFORE = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}


def command(arguments: Sequence[str]) -> int:
    """Runs `jaxshard completion`; returns the exit status."""
    if asks_for_help(arguments):
        rows = list(_LINES.items())
        sections = [pages.Section("arguments", rows), pages.Section("options", [pages.HELP])]
        print(pages.page(f"{_COMMAND} {'|'.join(_LINES)}", _DESCRIPTION, sections), end="")
        return 0
    if len(arguments) != 1 or arguments[0] not in _LINES:
        given = shortened(" ".join(arguments), 60)
        hint = nearest(given, _LINES) or f"; give one of {', '.join(_LINES)}"
        return fail(_COMMAND, printable(f"{given!r} is not a supported shell{hint}"), 2)
    print(script(arguments[0]), end="")
    return 0


def script(shell: str) -> str:
    """The script for a shell, bash or zsh."""
    options = {command: dict(_options(command)) for command in _commands()}
    values = [
        f'      "{command} {option}") {_values(kind)} ;;'
        for command, kinds in options.items()
        for option, kind in kinds.items()
        if _values(kind)
    ]
    listed = [f'          -*:"{command}") words="{" ".join(kinds)}" ;;' for command, kinds in options.items()]
    known = " ".join(presets())
    names = [f'          *:{command}) words="{known}" ;;' for command in ("train", "plan", "explain")]
    names += [f'          *:ckpt) words="{" ".join(_of_ckpt())}" files="" ;;']
    names += [f'          *:completion) words="{" ".join(_LINES)}" files="" ;;']
    parts = {"commands": " ".join([*COMMANDS, "--help", "--version"]), "values": "\n".join(values)}
    parts |= {"options": "\n".join(listed), "names": "\n".join(names)}
    text = _FUNCTION
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return f"# Completion of jaxshard for {shell}: {_LINES[shell]}\n{_BEFORE[shell]}{text}"


def _commands() -> list[str]:
    return [*COMMANDS, *(f"ckpt {name}" for name in _of_ckpt())]


def _of_ckpt() -> Mapping[str, Any]:
    return importlib.import_module(COMMANDS["ckpt"]).COMMANDS


def _options(command: str) -> Iterator[tuple[str, object]]:
    """(option, the type of its value) of a command; bool for a flag."""
    name, _, inner = command.partition(" ")
    module = importlib.import_module(COMMANDS[name])
    known: dict[str, object] = dict(getattr(module, "OPTIONS", {}))
    if inner:
        hints, parameters = typing.get_type_hints(_of_ckpt()[inner]), inspect.signature(_of_ckpt()[inner]).parameters
        known |= {each: hints[each] for each, one in parameters.items() if one.default is not one.empty}
    elif name == "train" or hasattr(module, "Arguments"):
        known |= options_of(Arguments if name == "train" else module.Arguments)
    if command in ("train", "plan", "explain", "eval"):
        known = {"data": Path, **known}
    for option, kind in known.items():
        yield f"--{option.replace('_', '-')}", kind
    yield "--help", bool


def _values(kind: object) -> str:
    """What completes an option's value, in the script; "" for a flag."""
    if kind is bool:
        return ""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (kind,) = (each for each in typing.get_args(kind) if each is not type(None))
    one = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
    choices = [str(each) for each in typing.get_args(one) if each] if typing.get_origin(one) is Literal else []
    return f'words="{" ".join(choices)}"' if choices else "files=" if one in (int, float) else "files=yes"
