"""TOML to configuration and back; a mistake is named with its key."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import cattrs
import tomli_w
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError

from jaxshard.base.types import T
from jaxshard.trainer.config import Config


def load(path: Path) -> Config:
    """Reads a configuration; each option that the file leaves out has its default.

    Args:
      path: a TOML file with a table for each section.

    Raises:
      ValueError: the file cannot be read or is no TOML, or a key is unknown or of the wrong type. Every such key is
        named, on a line of its own.
    """
    table = _table(path)
    try:
        return _converter().structure(table, Config)
    except ClassValidationError as error:
        raise ValueError("\n".join(f"{path}: {mistake}" for mistake in _mistakes(error, table))) from error


def sections(path: Path) -> dict[str, Any]:
    """Reads a configuration as `load` does; returns each section by its name, for a command line to change."""
    config = load(path)
    return {section.name: getattr(config, section.name) for section in dataclasses.fields(Config)}


def dump(config: Config) -> str:
    """Writes every option that is not None in TOML, so that `load` gives the same configuration back.

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
    """The known key that is spelled most like `key`, with its section or without.

    >>> nearest("widht", known_keys())
    'model.width'
    """
    return max(known, key=lambda other: max(_likeness(key, other), _likeness(_last(key), _last(other))))


def _table(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the configuration {str(path)!r}: {error}") from error
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also a number of more digits than Python reads
        raise ValueError(f"{path} is no TOML: {error}") from error


def _without_none(options: Mapping[str, T | None]) -> dict[str, T]:
    """TOML has no None: an option that is None is left out, and `load` gives it its default, None."""
    return {name: value for name, value in options.items() if value is not None}


def _converter() -> cattrs.Converter:
    """Takes each value as it is, without conversion; only an int is taken for a float."""
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in (bool, int, str):
        converter.register_structure_hook(kind, _exactly)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook_func(lambda kind: typing.get_origin(kind) is Literal, _one_of)
    return converter


def _exactly(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        article = "an" if kind is int else "a"
        raise ValueError(f"is {article} {kind.__name__}, not the {type(value).__name__} {value!r}")
    return typing.cast(T, value)


def _number(value: object, kind: type[float]) -> float:
    if type(value) is not int:
        return _exactly(value, kind)
    try:
        return float(value)
    except OverflowError:
        raise ValueError("is a float, and this int is larger than any float") from None


def _one_of(value: object, kind: object) -> object:
    choices = typing.get_args(kind)
    if value not in choices:
        raise ValueError(f"is one of {', '.join(map(repr, choices))}, not {value!r}")
    return value


def _mistakes(error: ClassValidationError, table: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """A sentence for each mistake that cattrs found in the table whose keys begin with `where`."""
    wrong_values, others = error.group_exceptions()
    for unknown in others:
        assert isinstance(unknown, ForbiddenExtraKeysError), unknown
        yield from (_unknown(f"{where}{name}", table[name]) for name in table if name in unknown.extra_fields)
    for wrong, note in wrong_values:
        key, value = f"{where}{note.name}", table[note.name]
        if not dataclasses.is_dataclass(note.type):
            yield f"{key!r} {wrong}"
        elif not isinstance(value, dict):
            yield f"{key!r} is a section: write [{key}] and its options below, not {key} = {value!r}"
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
