"""Converts TOML to a configuration and back; errors name the key."""

from __future__ import annotations

import dataclasses
import difflib
import io
import reprlib
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import cattrs
import tomli_w
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError

from jaxshard.apps.config import paths, seal
from jaxshard.apps.config.config import Config
from jaxshard.system import small_files
from jaxshard.system.text import LinesError

T = TypeVar("T")

_MOST_BYTES = 1_000_000


def load(path: Path) -> Config:
    """Reads a configuration; options missing from the file have their defaults.

    Args:
      path: a TOML file with a table for each section.

    Raises:
      ValueError: the file cannot be read or is not TOML; keys are unknown or have the wrong type (each on a line of the
        message); or jaxshard wrote the file and it was cut short.
    """
    return parsed(path)[0]


def parsed(path: Path, pipes: bool = False) -> tuple[Config, frozenset[str]]:
    """Returns (the configuration as from `load`, the file's keys). `pipes`: whether the file may be a pipe."""
    table, _ = _table(path, pipes)
    try:
        return _converter().structure(table, Config), _keys(table)
    except ClassValidationError as error:
        raise LinesError("\n".join(f"{path}: {mistake}" for mistake in _mistakes(error, table))) from error


def looked_at(path: Path) -> tuple[seal.State, list[str]]:
    """Checks the configuration that a run wrote in its folder.

    Returns:
      (its state, sealed or, from an older jaxshard, unsealed; the options that it lacks).

    Raises:
      ValueError: it cannot be read, or was cut short.
    """
    table, state = _table(path)
    if state != "whole" and _LAST_SECTION not in table:
        raise ValueError(f"{path} is truncated: it lacks the section [{_LAST_SECTION}]")
    return state, [key for key in known_keys() if key not in _MAY_BE_NONE and key not in _keys(table)]


_MAY_BE_NONE = (
    *("data.path", "data.heldout_path", "optimizer.beta1", "optimizer.beta2", "optimizer.weight_decay"),
    *("sharding.devices", "train.start"),
)
_LAST_SECTION = dataclasses.fields(Config)[-1].name


def dump(config: Config) -> str:
    """Writes every option that is not None as TOML, from which `load` restores the same configuration.

    >>> print(dump(Config()).splitlines()[0])
    [data]
    """
    tables = dataclasses.asdict(config)
    return tomli_w.dumps({name: _without_none(options) for name, options in tables.items()})


def known_keys() -> list[str]:
    """Every key, as `section.name`.

    >>> known_keys()[0]
    'data.path'
    """
    sections = typing.get_type_hints(Config)
    return [f"{name}.{field.name}" for name, kind in sections.items() for field in dataclasses.fields(kind)]


def nearest(key: str, known: Sequence[str]) -> str:
    """The known key with the most similar spelling to `key`, with or without its section.

    >>> nearest("widht", known_keys())
    'model.width'
    """
    return max(known, key=lambda other: max(_likeness(key, other), _likeness(_last(key), _last(other))))


def _table(path: Path, pipes: bool = False) -> tuple[dict[str, Any], seal.State]:
    """The table of the file, or of the preset that `path` names, and whether it is as jaxshard wrote it."""
    path = paths.configuration(path)
    try:
        found = small_files.read(path, _MOST_BYTES, pipes)
        text = io.TextIOWrapper(io.BytesIO(found), encoding="utf-8-sig").read()
    except IsADirectoryError:
        inside = next(iter(sorted(path.glob("*.toml"))), None)
        cure = f"{str(inside)!r}, which is in it" if inside else "a TOML file"
        raise ValueError(f"cannot read the configuration {str(path)!r}: it is a folder: give {cure}") from None
    except FileNotFoundError:
        hint = paths.near_configuration(path)
        raise ValueError(f"cannot read the configuration {str(path)!r}: the file does not exist{hint}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the configuration {str(path)!r}: {error}") from error
    state = seal.state_of(text)
    if state == "cut short":
        raise ValueError(f"{path} is truncated: jaxshard wrote more")
    try:
        table = tomllib.loads(text)
        if state == "not sealed" and tomli_w.dumps(table) != text:
            state = "changed"  # older versions wrote it in this form without a seal
        return table, state
    except (ValueError, RecursionError) as error:  # also for a number with more digits than Python reads
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def _keys(table: Mapping[str, Any]) -> frozenset[str]:
    sections = ((name, section) for name, section in table.items() if isinstance(section, Mapping))
    return frozenset(f"{name}.{option}" for name, section in sections for option in section)


def _without_none(options: Mapping[str, T | None]) -> dict[str, T]:
    """Drops options that are None, which TOML lacks; `load` gives them their default, None."""
    return {name: value for name, value in options.items() if value is not None}


def _converter() -> cattrs.Converter:
    """A converter that converts nothing except an int for a float."""
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in (bool, int, str):
        converter.register_structure_hook(kind, _exactly)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook_func(lambda kind: typing.get_origin(kind) is Literal, _one_of)
    converter.register_structure_hook_func(lambda kind: typing.get_origin(kind) is tuple, _some_of)
    return converter


def _exactly(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        article = "an" if kind is int else "a"
        raise ValueError(f"is {article} {kind.__name__}, not the {type(value).__name__} {reprlib.repr(value)}")
    return typing.cast(T, value)


def _number(value: object, kind: type[float]) -> float:
    if type(value) is not int:
        return _exactly(value, kind)
    try:
        return float(value)
    except OverflowError:
        raise ValueError("is a float option, and this integer is too large for a float") from None


def _one_of(value: object, kind: object) -> object:
    choices = typing.get_args(kind)
    if value not in choices:
        raise ValueError(f"is one of {', '.join(map(repr, choices))}, not {reprlib.repr(value)}")
    return value


def _some_of(value: object, kind: object) -> tuple[object, ...]:
    choice, _ = typing.get_args(kind)
    if not isinstance(value, list):
        raise ValueError(f"is a list, not the {type(value).__name__} {reprlib.repr(value)}")
    return tuple(_one_of(each, choice) for each in value)


def _mistakes(error: ClassValidationError, table: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """A sentence for each error that cattrs found in the table at `where`."""
    wrong_values, others = error.group_exceptions()
    for unknown in others:
        assert isinstance(unknown, ForbiddenExtraKeysError), unknown
        yield from (_unknown(f"{where}{name}", table[name]) for name in table if name in unknown.extra_fields)
    for wrong, note in wrong_values:
        key, value = f"{where}{note.name}", table[note.name]
        if not dataclasses.is_dataclass(note.type):
            yield f"{key!r} {wrong}"
        elif not isinstance(value, dict):
            yield f"{key!r} is a section: write [{key}] and its options below, not {key} = {reprlib.repr(value)}"
        else:
            assert isinstance(wrong, ClassValidationError), wrong
            yield from _mistakes(wrong, value, f"{key}.")


def _unknown(key: str, value: object) -> str:
    is_section = isinstance(value, dict)
    known = sorted(typing.get_type_hints(Config)) if is_section else known_keys()
    return f"unknown {'section' if is_section else 'key'} {key!r}; the nearest known one is {nearest(key, known)!r}"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _likeness(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()
