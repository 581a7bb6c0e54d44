"""Sections of `jaxshard doctor`: packages, a folder, settings. Each has lines to show, and findings."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxshard.cli.doctor.apart import Told, last_words
from jaxshard.cli.doctor.findings import Environment, Finding, Here
from jaxshard.cli.doctor.setting_rules import FLAGS, FRACTIONS, VARIABLES
from jaxshard.system.text import size_in_words

_LEAST_FREE = 10**9  # bytes


class Section(NamedTuple):
    """A section of the output."""

    title: str
    lines: Sequence[str]
    findings: Sequence[Finding] = ()


def of(report: Told, key: str) -> list[Any]:
    """What was reported under a key, in order."""
    return [line[key] for line in report.lines if key in line]


def ended_early(report: Told, what: str, seconds: float, cures: tuple[str, str, str]) -> Iterator[Finding]:
    """A finding if a process was killed, crashed or raised an error.

    Args:
      report: its report.
      what: the subject of its check.
      seconds: its time limit.
      cures: what to do in each of the three cases.
    """
    late, crashed, failed = cures
    if not of(report, "stage"):
        what, late = "the start of Python and JAX", "the machine is busy, or its disk is slow; --seconds waits longer"
    if report.status is None:
        yield Finding(what, True, f"no answer within {seconds:g} s: {late}")
    elif report.status != 0:
        how = f"exit status {report.status}" if report.status > 0 else f"signal {-report.status}"
        words = last_words(report.errors)
        said = f", and the last message {words!r}" if words else ""
        yield Finding(what, True, f"the process ended with {how}{said}: {crashed}")
    for error in of(report, "error"):
        yield Finding(what, True, f"{error}: {failed}")


# Packages.


def packages(installed: Mapping[str, str], requirements: Iterable[str]) -> Section:
    """The versions of Python and of packages.

    Args:
      installed: name -> version, with "python".
      requirements: of jaxshard, as in its metadata.
    """
    listed = ", ".join(f"{name} {version}" for name, version in installed.items())
    return Section("Packages", [listed], [*_unmet(requirements), *_plugins(installed)])


def _unmet(requirements: Iterable[str]) -> Iterator[Finding]:
    """Packages whose installed version jaxshard does not support."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # not a dependency of jaxshard, though nearly all environments have it
        return
    reported: set[str] = set()
    for needed in map(Requirement, requirements):
        try:
            version = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if needed.name not in reported and not needed.specifier.contains(version, prereleases=True):
            reported.add(needed.name)
            advice = f'jaxshard needs a different version: pip install "{needed.name}{needed.specifier}"'
            yield Finding(f"{needed.name} {version}", True, advice, "pyproject.toml")


def _plugins(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Why JAX cannot use its CUDA plugins."""
    found = [name for name in ("jax-cuda12-plugin", "jax-cuda13-plugin") if name in installed]
    for name in found:
        if _number(installed[name]) != _number(installed.get("jaxlib", "")):
            advice = "JAX accepts a plugin only in jaxlib's version: install both in the same version"
            yield Finding(f"{name} {installed[name]}", True, advice, "jaxlib/plugin_support.py")
    if len(found) > 1:
        yield Finding(
            " and ".join(found),
            True,
            "JAX uses only one of them: uninstall the one for the CUDA version that you do not have",
        )


def _number(version: str) -> str:
    found = re.match(r"\d+(\.\d+)*", version)
    return found[0] if found else ""


# The folder.

_OF_TRIALS = {
    "make a folder": "give the training user write permission there, or choose a different folder (--out)",
    "write": "files cannot be written there: check whether the disk or a quota is full, or choose a different folder",
    "rename": "checkpoints are committed by a rename: a bucket needs a hierarchical namespace",
    "read back": "the bytes read differ from the bytes written: choose a different folder, and have the disk checked",
    "lock": "two runs could write there at once: mount it with locks, and give each run its own folder",
}


def folder(path: str, report: Told, seconds: float) -> Section:
    """The results of trying a folder."""
    (place, free), trials = _first(report), of(report, "trial")
    lines = [f"it does not exist yet; tested in {place}"] if place and Path(place) != Path(path) else []
    findings = [
        Finding(f"{each['what']} in {place}", True, f"{each['wrong']}: {_OF_TRIALS[each['what']]}", "docs/multihost.md")
        for each in trials
        if each["wrong"]
    ]
    done = [each["what"] for each in trials if not each["wrong"]]
    if done:
        lines.append(f"{', '.join(done)}: done; {size_in_words(free)} free")
    if done and free < _LEAST_FREE:
        advice = (
            "a checkpoint has 12 bytes per float32 parameter with Adam: free some space, or choose a different folder"
        )
        findings.append(Finding(f"{size_in_words(free)} free in {place}", True, advice))
    for reason in of(report, "no_checkpoints"):
        advice = f'{reason}; checkpoints need it, and locks were not tested: pip install "jaxshard[checkpoint]"'
        findings.append(Finding("checkpoints", False, advice))
    hangs = "the file system hangs: check whether its server answers, or choose a different folder"
    cures = (hangs, "run the doctor again, and report this if it persists", "choose a different folder (--out)")
    early = report._replace(status=0) if "compilers" in of(report, "stage") else report
    return Section(f"Folder {path}", lines or ["not tested"], [*findings, *ended_early(early, path, seconds, cures)])


def _first(report: Told) -> tuple[str, int]:
    """The folder that was tried, and its free bytes."""
    places, free = of(report, "tried"), of(report, "free_bytes")
    return (places[0], free[0]) if places else ("", 0)


# Settings.


def settings(environment: Mapping[str, str], here: Here) -> Section:
    """Findings about the environment's variables."""
    found = judged(environment, here)
    rest = others(environment, found)
    return Section("Settings", [f"also set: {', '.join(rest)}"] if rest else [], found)


_PREFIXES = ("JAX_", "XLA_", "NCCL_", "LIBTPU_", "TPU_", "CUDA_")


def judged(environment: Environment, here: Here) -> list[Finding]:
    """Findings about set variables, XLA's flags, and unset variables that matter here."""
    found = list(_of_variables(environment, here))
    return [*found, *_of_flags(environment, here), *_unset(environment, here)]


def others(environment: Environment, found: list[Finding]) -> list[str]:
    """Names of set variables of JAX, XLA and their libraries without a finding."""
    judged_names = {each.what.partition("=")[0] for each in found}
    return sorted(name for name in environment if name.startswith(_PREFIXES) and name not in judged_names)


def _of_variables(environment: Environment, here: Here) -> Iterator[Finding]:
    for rule in VARIABLES:
        for name in rule.names:
            if name in environment and here.platform in rule.platforms:
                verdict = rule.judge(environment[name].strip(), here, environment)
                if verdict:
                    yield Finding(f"{name}={environment[name]}", *verdict, rule.source)


def flags_in(text: str) -> dict[str, str]:
    """XLA's flags and their values; a flag without a value is true. (A text without flags names a file.)

    >>> flags_in("--xla_dump_to=/x --xla_gpu_deterministic_ops")
    {'xla_dump_to': '/x', 'xla_gpu_deterministic_ops': 'true'}
    """
    words = [word.lstrip("-").partition("=") for word in text.split() if word.startswith("-")]
    return {name: value if equals else "true" for name, equals, value in words}


def _of_flags(environment: Environment, here: Here) -> Iterator[Finding]:
    for name, value in flags_in(environment.get("XLA_FLAGS", "")).items():
        what = f"XLA_FLAGS=--{name}={value}"
        if name in here.own_flags:
            cure = "pass yours in train_step(compiler_options=...)"
            yield Finding(
                what, True, f"jaxshard sets this for its steps, and its value takes precedence: {cure}", _OPTIONS
            )
        for rule in FLAGS:
            if name in rule.names and here.platform in rule.platforms:
                verdict = rule.judge(value, here, environment)
                if verdict:
                    yield Finding(what, *verdict, rule.source)


_OPTIONS = "docs/compiler_options.md"


def _unset(environment: Environment, here: Here) -> Iterator[Finding]:
    """Findings about variables that are not set but matter."""
    if here.platform in ("gpu", "tpu") and not environment.get("JAX_COMPILATION_CACHE_DIR"):
        advice = "programs are compiled again at each start; set it to a folder to keep them"
        yield Finding("JAX_COMPILATION_CACHE_DIR", False, advice, "docs.jax.dev, persistent compilation cache")
    if here.platform == "gpu" and not any(map(environment.get, FRACTIONS)):
        advice = "JAX reserves 75% of a GPU's memory when it starts; .9 gives more to large models"
        yield Finding(FRACTIONS[0], False, advice, "docs.jax.dev, GPU memory allocation")
    wanted = 2 * here.num_devices
    if here.platform == "cpu" and here.num_devices > 1 and "NPROC" not in environment and here.cores < wanted:
        count = "unset; it is XLA's CPU thread count."
        advice = f"{count} `jaxshard train` sets it to {wanted}; set it in your own scripts for Muon or SOAP"
        yield Finding("NPROC", False, advice, "jaxshard/optimizer/owners/owners.py")
