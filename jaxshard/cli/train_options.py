"""The command line of `jaxshard train`: its options over those of a TOML file, and whether its folder fits them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from jaxshard.trainer import toml
from jaxshard.trainer.config import Arguments, Config, check
from jaxshard.trainer.run_folder import RunFolder

_DESCRIPTION = "Train a byte-level transformer with a sharded optimizer; every option can stand in CONFIG.toml too."


def parse(arguments: Sequence[str]) -> Arguments:
    """The command line over the TOML file (given, or of the run to resume) over the defaults.

    Raises:
      ValueError: an option is wrong; it is named. (What tyro finds wrong it prints, and raises SystemExit.)
    """
    _check_options(arguments)
    given = _from_command_line(arguments, Arguments())
    file = given.config
    if (given.resume or given.resume_if_saved) and given.out is None:
        raise ValueError("--resume needs --out DIR, the folder of the run to go on with")
    if given.out is not None:
        if given.resume:
            RunFolder(given.out).check_saved()
        if _goes_on(given):
            file = file or RunFolder(given.out).config
    if file is not None:
        given = _from_command_line(arguments, Arguments(**toml.sections(file)))
    _check_encodable("--data", given.data.path)
    _check_encodable("--out", given.out)
    check(given)
    return given


def check_folder(given: Arguments, folder: RunFolder, config: Config) -> bool:
    """Returns whether the run goes on with what is saved there."""
    goes_on = _goes_on(given)
    if goes_on:
        _check_same_model(folder, config)
    elif given.resume_if_saved:
        folder.check_unsaved()
    else:
        folder.check_free()
    return goes_on


def _goes_on(given: Arguments) -> bool:
    """Whether the run is to go on with what is saved: it was asked for, and something is saved."""
    return given.resume or (given.resume_if_saved and given.out is not None and RunFolder(given.out).is_saved())


def _from_command_line(arguments: Sequence[str], default: Arguments) -> Arguments:
    given, unknown = tyro.cli(
        Arguments,
        args=arguments,
        default=default,
        prog="jaxshard train",
        description=_DESCRIPTION,
        return_unknown_args=True,
    )
    if unknown:
        print(f"jaxshard train: {_not_understood(unknown[0])}", file=sys.stderr)
        raise SystemExit(2)
    return given


def _check_options(arguments: Sequence[str]) -> None:
    """Refuses an unknown option before tyro parses, which takes its value for CONFIG.toml where none is given."""
    known = {*_OTHER_OPTIONS, *toml.known_keys()}
    for argument in arguments:
        name = argument[2:].partition("=")[0].replace("-", "_")
        positive = name.removeprefix("no_").replace(".no_", ".")
        if argument.startswith("--") and not {name, positive} & known and not name.startswith("tyro_"):
            print(f"jaxshard train: {_not_understood(argument)}", file=sys.stderr)
            raise SystemExit(2)


def _not_understood(argument: str) -> str:
    if not argument.startswith("-"):
        return f"unknown argument {argument!r}: give one CONFIG.toml, and the name of an option before its value"
    name = argument.lstrip("-").partition("=")[0]
    nearest = toml.nearest(name.replace("-", "_"), [*_OTHER_OPTIONS, *toml.known_keys()]).replace("_", "-")
    return f"unknown option --{name}; the nearest known one is --{nearest} (jaxshard train --help lists all)"


_OTHER_OPTIONS = ("data", "out", "resume", "resume_if_saved", "processes", "help")


def _check_encodable(name: str, path: str | Path | None) -> None:
    """Raises ValueError for a path that cannot be written to config.toml or shown."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} {str(path)!r}: this name is not UTF-8: rename it") from None


def _check_same_model(folder: RunFolder, config: Config) -> None:
    """Raises ValueError for options that would change the saved arrays or the random numbers.

    In which type sums are made (precision.reduce) may change.
    """
    taken = folder.latest_step() or 0
    if config.train.steps < taken:
        raise ValueError(
            f"train.steps = {config.train.steps}: the run in {folder.path} has taken {taken} steps: give more"
        )
    saved, given = (_saved_as(each) for each in (toml.load(folder.config), config))
    changes = ", ".join(
        f"{name} = {given[name]!r}, saved {value!r}" for name, value in saved.items() if value != given[name]
    )
    if changes:
        raise ValueError(f"--resume: the run saved in {folder.path} is another one: {changes}; leave these as saved")


def _saved_as(config: Config) -> dict[str, Any]:
    """The options that decide which arrays are saved, how they are read, and which random numbers come."""
    sections = {"model": dataclasses.asdict(config.model), "precision": dataclasses.asdict(config.precision)}
    sections["train"] = {"seed": config.train.seed}
    del sections["precision"]["reduce"]
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
