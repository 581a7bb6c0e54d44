"""TOML to configuration and back; a mistake is named with its key."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

from jaxshard.trainer.config import Config


def load(path: Path) -> Config:
    """The configuration in the TOML file `path`; what it does not say keeps its default.

    Raises:
      ValueError: the file cannot be read or is no TOML, or a key is unknown or of the wrong type.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the configuration {str(path)!r}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from error
    try:
        return _from_table(Config, table, "")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def sections(path: Path) -> dict[str, Any]:
    """As `load`, each section by its name: what a command line is laid over."""
    config = load(path)
    return {section.name: getattr(config, section.name) for section in dataclasses.fields(Config)}


def dump(config: Config) -> str:
    """`config` in TOML, all of it but what is None, so that `load` gives it back."""
    lines: list[str] = []
    for section in dataclasses.fields(Config):
        lines.append(f"[{section.name}]")
        for name, value in dataclasses.asdict(getattr(config, section.name)).items():
            if value is not None:
                lines.append(f"{name} = {json.dumps(value)}")  # of str, bool, int and float, JSON is TOML
        lines.append("")
    return "\n".join(lines)


def known_keys() -> list[str]:
    """Every key, as `section.name`."""
    sections = typing.get_type_hints(Config)
    return [f"{name}.{field.name}" for name, kind in sections.items() for field in dataclasses.fields(kind)]


def _from_table(cls: type, table: dict[str, Any], where: str) -> Any:
    kinds = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{where}{name}"
        if name not in kinds:
            raise ValueError(_unknown(key, value))
        values[name] = _checked(key, kinds[name], value)
    return cls(**values)


def _checked(key: str, kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{key!r} is a section: write [{key}] and its options below, not {key} = {value!r}")
        return _from_table(typing.cast(type, kind), value, f"{key}.")
    if typing.get_origin(kind) is typing.Literal:
        if value not in typing.get_args(kind):
            choices = ", ".join(map(repr, typing.get_args(kind)))
            raise ValueError(f"{key!r} is one of {choices}, not {value!r}")
        return value
    if typing.get_origin(kind) in (types.UnionType, typing.Union):  # X | None; TOML has no None
        kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{key!r} is {_with_article(kind)}, not the {type(value).__name__} {value!r}")
    return value


def _with_article(kind: type) -> str:
    return f"an {kind.__name__}" if kind is int else f"a {kind.__name__}"


def _unknown(key: str, value: Any) -> str:
    known = sorted(typing.get_type_hints(Config)) if isinstance(value, dict) else known_keys()
    nearest = max(known, key=lambda other: max(_likeness(key, other), _likeness(_last(key), _last(other))))
    return f"unknown {'section' if isinstance(value, dict) else 'key'} {key!r}; the nearest known one is {nearest!r}"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _likeness(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()
