"""`jaxshard doctor`: looks at this machine. It needs nothing but JAX, and never hangs."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxshard.apps.commands import help as pages
from jaxshard.cli.doctor import devices as doctor_devices
from jaxshard.cli.doctor import machine
from jaxshard.cli.doctor import sections as doctor_sections
from jaxshard.cli.doctor.apart import Told, told_by
from jaxshard.cli.doctor.devices import Machine
from jaxshard.cli.doctor.findings import Finding, Here
from jaxshard.cli.doctor.sections import Section
from jaxshard.platforms import OURS
from jaxshard.system.about import about
from jaxshard.system.command import INTERRUPTED, check_file, ended_at_once, environment, fail
from jaxshard.system.files import overwrite
from jaxshard.system.text import nearest, printable

_COMMAND = "jaxshard doctor"
_DESCRIPTION = """Checks this machine: versions, devices, interconnect, compilers for other machines, disk writes and
harmful settings. Without an accelerator, it simulates 8 devices, as `jaxshard train` does. Exit status: 0 no problems
found, 1 problems found, 2 bad input."""
_SIMULATED_DEVICES = 8
_MOST_SECONDS = 86_400
_WIDTH = 80


OPTIONS = {"out": Path, "seconds": float, "json": Path}
"""Each option's type."""
_ROWS = (
    ("--out DIR", "The folder to test; by default the one for temporary files."),
    ("--seconds N", "Seconds that the devices and the folder may take to answer. (default: 60)"),
    ("--json FILE", "Write the full report to this file, as JSON."),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def command(arguments: Sequence[str]) -> int:
    """Runs `jaxshard doctor`; returns the exit status."""
    try:
        with ended_at_once(lambda: f"{_COMMAND}: interrupted"):
            return _run(parse(arguments))
    except (ValueError, OSError) as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


_fail = functools.partial(fail, _COMMAND)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
      ValueError: an option is not known, or its value is wrong.
    """
    if not {"-h", "--help"}.isdisjoint(arguments):
        sections = [pages.Section("options", [*_ROWS, pages.HELP])]
        print(pages.page(f"{_COMMAND} [OPTIONS]", _DESCRIPTION, sections), end="")
        raise SystemExit(0)
    parser = _Parser(prog=_COMMAND, allow_abbrev=False, add_help=False)
    parser.add_argument("--out")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    given, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]!r}{nearest(unknown[0], [f'--{name}' for name in OPTIONS])}")
    if not 0 < given.seconds <= _MOST_SECONDS:
        raise ValueError(f"--seconds {given.seconds:g} must be above 0, and at most {_MOST_SECONDS}")
    if given.out is not None and (not given.out or (os.path.exists(given.out) and not os.path.isdir(given.out))):
        raise ValueError(f"--out {given.out}: it is not a folder: give one")
    if "://" in (given.out or ""):
        raise ValueError(f"--out {given.out!r} is not a local path: mount the bucket, and give the path of the mount")
    if given.json is not None:
        check_file("--json", given.json)
    return given


def _run(given: argparse.Namespace) -> int:
    start, facts, sections = about(), dict[str, object](), []
    for section in _sections(given, start, facts):
        _show(section)
        sections.append(section)
    wrong = [finding for section in sections for finding in section.findings if finding.wrong]
    count = f"{len(wrong)} problems" if len(wrong) > 1 else "1 problem"
    print(f"\n{count} found, marked by !" if wrong else "\nNo problems found.")
    if given.json is not None:
        listed = [each._asdict() | {"findings": [one._asdict() for one in each.findings]} for each in sections]
        text = json.dumps({**start, "num_wrong": len(wrong), "sections": listed, **facts}, indent=1)
        overwrite(given.json, text + "\n")
    return int(bool(wrong))


def _sections(given: argparse.Namespace, start: Mapping[str, Any], facts: dict[str, object]) -> Iterator[Section]:
    """Yields the sections, each as soon as it is known, and adds the facts behind them to `facts`."""
    given_by_user, here, seconds = environment(), _machine(), given.seconds
    yield doctor_sections.packages(start["versions"], _requirements())
    told = ask("devices", [doctor_devices.JAX_NAMES[kind] for kind in here.accelerators], seconds)
    yield doctor_devices.devices(told, here, given_by_user, seconds)
    yield doctor_devices.links(told)
    place = given.out or _temporary()
    rest = ask("without devices", [place], seconds, {"JAX_PLATFORMS": "cpu"})
    yield doctor_devices.compilers(rest, start["versions"], seconds)
    yield doctor_sections.folder(place, rest, seconds)
    facts |= {"host": here._asdict(), "devices": told._asdict(), "without_devices": rest._asdict()}
    yield doctor_sections.settings(given_by_user, _here(doctor_devices.seen(told), here))


def _temporary() -> str:
    """The folder for temporary files, which may not exist."""
    try:
        return tempfile.gettempdir()
    except OSError:
        return os.environ.get("TMPDIR", "/tmp")


def ask(task: str, arguments: Sequence[str], seconds: float, changed: Mapping[str, str] | None = None) -> Told:
    """Runs a task of `probe` in a process, with simulated devices unless the user chose their number."""
    variables = environment() | dict(changed or {})
    is_chosen = "host_platform_device_count" in variables.get("XLA_FLAGS", "")
    if not is_chosen and "JAX_NUM_CPU_DEVICES" not in variables:
        variables["JAX_NUM_CPU_DEVICES"] = str(_SIMULATED_DEVICES)
        variables.setdefault("NPROC", str(2 * _SIMULATED_DEVICES))  # threads of XLA (see optimizer/owners/owners.py)
    return told_by("jaxshard.cli.doctor.probe", [task, *arguments], variables, seconds)


def _machine() -> Machine:
    return Machine(
        accelerators=machine.accelerators(),
        gpu_without_driver=machine.has_gpu_without_driver(),
        memory_bytes=machine.memory_bytes(),
        shared_bytes=machine.shared_memory_bytes(),
        cores=os.cpu_count() or 1,
    )


def _here(devices: Sequence[Mapping[str, Any]], seen: Machine) -> Here:
    platform = devices[0]["platform"] if devices else ""
    return Here(
        platform=platform,
        num_devices=len(devices),
        cores=seen.cores,
        accelerators=seen.accelerators,
        interfaces=machine.interfaces(),
        own_flags=[option.setting[0] for option in OURS if option.platform == platform],
    )


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("jaxshard") or []
    except importlib.metadata.PackageNotFoundError:  # imported from a folder
        return []


# Output.


def _show(section: Section) -> None:
    print(f"\n{printable(section.title)}")
    for line in section.lines or ([] if section.findings else ["no findings"]):
        _say(line, "  ", "  ")
    for finding in section.findings:
        source = f" [{finding.source}]" if finding.source else ""
        _say(f"{_short(finding)}: {finding.advice}{source}", "! " if finding.wrong else "- ", "  ")


def _short(finding: Finding) -> str:
    """A finding's subject, with a long value shortened."""
    return finding.what if len(finding.what) <= _WIDTH else f"{finding.what[: _WIDTH - 4]} ..."


def _say(text: str, first: str, later: str) -> None:
    """Prints text in lines that fit the terminal; a word longer than a line is not broken."""
    width = min(shutil.get_terminal_size().columns, _WIDTH) if sys.stdout and sys.stdout.isatty() else _WIDTH
    lines = textwrap.wrap(
        printable(text),
        max(width, 20),
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
    print("\n".join(lines), flush=True)
