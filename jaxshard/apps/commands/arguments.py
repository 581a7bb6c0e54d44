"""Checks the words of a command line before tyro parses them, and reports an error in one line.

Also `run_on_cpu`, for commands that compute on the CPU alone and so do not occupy an accelerator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import jax
import tyro

from jaxshard.apps.commands import help as pages
from jaxshard.apps.config import paths, toml
from jaxshard.system.command import INTERRUPTED, ended_at_once, fail
from jaxshard.system.text import printable, shortened

T = TypeVar("T")

_LONGEST = 60  # the most characters of a value to show


def options_of(kind: type) -> dict[str, object]:
    """The options of a command line: `section.name` or `name` -> type (X for `X | None`).

    Args:
      kind: a dataclass, with dataclasses for sections.
    """
    found: dict[str, object] = {}
    marked = typing.get_type_hints(kind, include_extras=True)
    for name, hint in typing.get_type_hints(kind).items():
        if tyro.conf.Positional in getattr(marked[name], "__metadata__", ()):
            continue
        if dataclasses.is_dataclass(hint):
            found |= {f"{name}.{option}": inner for option, inner in options_of(typing.cast(type, hint)).items()}
        else:
            found[name] = _without_none(hint)
    return found


def check(words: Sequence[str], kind: type, command: str, further: Mapping[str, object] | None = None) -> None:
    """Checks that every option is known and that its value has its type.

    Args:
      words: of the command line.
      kind: the dataclass to parse to.
      command: as the user types it.
      further: other names of options, each with its type.

    Raises:
      SystemExit: with status 2, after one line on standard error with the option and what it needs.
    """
    options = {**(further or {}), **options_of(kind), "help": bool}
    for option, values in _options_in(words, options, command):
        _check_values(option, values, options[_key(option)], command)
    if "" in words and _positional(words, options):
        refuse(command, "an argument is empty: leave it out, or give a file")
    for before, word in zip(["", *words], words, strict=False):
        option, value = (word.partition("=")[::2]) if word.startswith("--") else (before, word)
        if _URL.match(value) and options.get(_key(option)) is not str:
            refuse(command, f"{value!r} is not a local path: mount the bucket, and give the path of the mount")


_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def parsed(
    words: Sequence[str], kind: type[T], command: str, description: str, further: Mapping[str, object] | None = None
) -> T:
    """Checks a command line (see `check`) and parses it to `kind`, a dataclass."""
    check(words, kind, command, further)
    return by_tyro(words, kind, command, description)


def by_tyro(words: Sequence[str], kind: type[T], command: str, description: str, default: T | None = None) -> T:
    """Parses a checked command line by tyro.

    Args:
      words, kind, command: as for `check`.
      description: of the command, for `--help`.
      default: values for options that are not given; None: the dataclass's defaults.

    Raises:
      SystemExit: with status 0 after `--help`; with status 2, after one line on standard error, if words are left over.
    """
    if asks_for_help(words):
        is_plan = command.endswith(_PLANS)
        more = [f"Presets: {', '.join(paths.presets())}."] if is_plan or command.endswith(" train") else []
        more += [_UNREAD] if is_plan else []
        shows = _read_by_a_plan if is_plan else lambda option: True
        print(pages.of_dataclass(kind, command, "\n\n".join([description, *more]), shows), end="")
        raise SystemExit(0)
    how: dict[str, Any] = {"prog": command, "description": description, "return_unknown_args": True}
    how |= {} if default is None else {"default": default}
    with one_line(command):
        given, unknown = tyro.cli(kind, args=list(words), **how)
    if unknown:
        refuse(command, _not_understood(unknown[0], options_of(kind), command))
    return given


def refuse_options(words: Sequence[str], kind: type, what: str, but: Sequence[str] = ()) -> None:
    """Raises a ValueError for an option of the reference model, other than those in `but`: `what` makes its own."""
    for name in (*options_of(kind), "data"):
        if is_given(words, name) and name not in but:
            raise ValueError(f"--{name.replace('_', '-')} is for the reference model: {what} makes its own")


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether `-h` or `--help` is among the words."""
    return not {"-h", "--help"}.isdisjoint(words)


_PLANS = (" plan", " explain")
_UNREAD = "It also accepts the other options of `jaxshard train`, about data, logging and saving, and ignores them."


def _read_by_a_plan(option: str) -> bool:
    """Whether an option of the trainer changes a step's cost or layout."""
    section, _, name = option.partition(".")
    return section != "data" and (section != "train" or name in ("steps", "rows", "start"))


@contextlib.contextmanager
def one_line(command: str) -> Iterator[None]:
    """Within the block, prints tyro's boxed errors in one line."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as end:
        lines = [line.strip(_FRAME) for line in printed.getvalue().splitlines()]
        kept = [line for line in lines if line]
        if end.code:
            refuse(command, f"{kept[0]}: {' '.join(kept[1:])}" if kept else f"exit status {end.code}")
        raise


_FRAME = " -\u2500\u2502\u256d\u256e\u256f\u2570"  # lines and corners of a box


def is_given(words: Sequence[str], name: str) -> bool:
    """Whether the option `section.name` is among the words."""
    return any(word.startswith("--") and _key(word) == name for word in words)


def refuse(command: str, reason: str) -> NoReturn:
    """Ends the command with status 2, after one line on standard error."""
    print(f"{command}: {printable(shortened(reason))}", file=sys.stderr)
    raise SystemExit(2)


def _options_in(
    words: Sequence[str], options: Mapping[str, object], command: str
) -> Iterator[tuple[str, Sequence[str]]]:
    """Each option with its values."""
    for place, word in enumerate(words):
        if not word.startswith("--") or word.startswith("--tyro-"):
            continue
        option, equals, value = word.partition("=")
        positive = _key(option).removeprefix("no_").replace(".no_", ".")
        if bool in (options.get(positive), options.get(_key(option))) and not equals:
            continue
        if _key(option) not in options:
            refuse(command, _not_understood(option, options, command))
        following = [value] if equals else words[place + 1 :]
        ends = (number for number, each in enumerate(following) if each.startswith("--") and not equals)
        yield option, following[: next(ends, len(following))]


def _check_values(option: str, values: Sequence[str], kind: object, command: str) -> None:
    several = typing.get_origin(kind) is tuple
    if kind is bool:
        refuse(command, f"{option} takes no value")
    if not values and not several:
        refuse(command, f"{option} needs a value")
    for value in values if several else values[:1]:
        needed = _needed(value, typing.get_args(kind)[0] if several else kind)
        if needed:
            shown = repr(value) if len(value) <= _LONGEST else f"{value[:_LONGEST]!r}..."
            refuse(command, f"{option} {shown}: it must be {needed}")


def _needed(value: str, kind: object) -> str:
    """What the value must be; "" if it is right."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        return "" if value in choices else f"one of {', '.join(map(repr, choices))}"
    if kind in (int, float):
        try:
            typing.cast(type, kind)(value)
        except ValueError:
            return "an integer" if kind is int else "a number"
    if kind in (str, Path) and not value:
        return "non-empty; leave the option out for its default"
    return ""


def _positional(words: Sequence[str], options: Mapping[str, object]) -> bool:
    """Whether an empty word is not an option's value."""
    pairs = zip(["", *words], words, strict=False)
    return any(not word and not options.get(_key(before)) for before, word in pairs)


_TAKES = {"train": "CONFIG.toml", "plan": "CONFIG.toml", "explain": "CONFIG.toml or MODULE:FUNCTION"}
_TAKES |= dict.fromkeys(("eval", "generate"), "RUN")


def _not_understood(word: str, options: Mapping[str, object], command: str) -> str:
    if not word.startswith("-"):
        file = _TAKES.get(command.rpartition(" ")[2])
        one = f"give one {file}, and " if file else ""
        return f"unknown argument {word!r}: {one}write the option's name before its value"
    name = word.lstrip("-").partition("=")[0]
    nearest = toml.nearest(_key(word), list(options)).replace("_", "-")
    return f"unknown option --{name}; the nearest known one is --{nearest} ({command} --help lists all)"


def _key(option: str) -> str:
    return option.lstrip("-").partition("=")[0].replace("-", "_")


def _without_none(hint: object) -> object:
    if isinstance(hint, types.UnionType):
        (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
    return hint


def run_on_cpu(command: str, act: Callable[[], int], **options: object) -> int:
    """Runs a command on the CPU with these options of JAX; returns the exit status, 2 for bad input."""
    try:
        with on_cpu(**options), ended_at_once(lambda: f"{command}: interrupted"):
            return act()
    except (ValueError, OSError, ImportError) as error:
        return fail(command, error, 2)
    except KeyboardInterrupt:
        return fail(command, "interrupted", INTERRUPTED)


@contextlib.contextmanager
def on_cpu(**options: object) -> Iterator[None]:
    """Within the block, JAX has these options and, unless it has already started, uses the CPU."""
    options = {"jax_platforms": "cpu", **options}
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
