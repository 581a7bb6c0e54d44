"""Sections of `jaxshard doctor`: devices, the links between them, and compilers for other machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxshard.cli.doctor.apart import Told
from jaxshard.cli.doctor.findings import Finding
from jaxshard.cli.doctor.sections import Section, ended_early, of
from jaxshard.hardware.chips import chip_of
from jaxshard.system.text import printable, seconds_in_words, size_in_words

_LEAST_SHARED = 10**9  # bytes
_LEAST_LINK = 0.1  # of the links' bandwidth by the data sheet
_INSTALL = {"gpu": 'pip install "jaxshard[cuda]"', "tpu": 'pip install "jaxshard[tpu]"'}
JAX_NAMES = {"gpu": "cuda", "tpu": "tpu"}


class Machine(NamedTuple):
    """The machine, seen without JAX.

    Attributes:
      accelerators: "gpu", "tpu".
      gpu_without_driver: whether there is a GPU that no program can use.
      memory_bytes, shared_bytes: sizes of host memory and of /dev/shm; None if unknown.
      cores: of the CPU.
    """

    accelerators: Sequence[str] = ()
    gpu_without_driver: bool = False
    memory_bytes: int | None = None
    shared_bytes: int | None = None
    cores: int = 1


def seen(report: Told) -> list[dict[str, Any]]:
    """The devices that JAX found."""
    return [device for devices in of(report, "devices") for device in devices]


def devices(report: Told, machine: Machine, environment: Mapping[str, str], seconds: float) -> Section:
    """The devices that JAX sees, or why it sees none or not all."""
    found, lines = seen(report), []
    if found:
        processes, taken = of(report, "num_processes")[0], of(report, "seconds")[0]
        where = f", of {processes} processes" if processes > 1 else ""
        lines = [*_kinds(found, machine), f"found in {seconds_in_words(taken)}{where}"]
    else:
        lines = ["JAX found none"]
    findings = [*_none(report, environment, seconds), *_unused(report, machine, environment), *_around(found, machine)]
    return Section("Devices", lines, findings)


def _kinds(found: Sequence[Mapping[str, Any]], machine: Machine) -> Iterator[str]:
    """A line for all devices of one kind and size."""
    if found[0]["platform"] == "cpu":
        kind = "CPU device" if len(found) == 1 else "simulated CPU devices"
        memory = "" if machine.memory_bytes is None else f" and {size_in_words(machine.memory_bytes)} of memory"
        yield f"{len(found)} {kind}, on {machine.cores} core{'s' if machine.cores > 1 else ''}{memory}"
        return
    for (kind, platform, size), count in Counter((x["kind"], x["platform"], x["memory_bytes"]) for x in found).items():
        memory = f", {size_in_words(size)} of memory for JAX on each" if size else ""
        yield f"{count} x {printable(kind)} ({platform}){memory}"


def _none(report: Told, environment: Mapping[str, str], seconds: float) -> Iterator[Finding]:
    """Why JAX finds no devices, or does not finish."""
    stage = (of(report, "stage") or ["devices"])[-1]
    others = "another process may use the devices (end it), or hosts are missing; --seconds waits longer"
    flags = "correct or unset the variables named above; XLA_FLAGS and LIBTPU_INIT_ARGS may have unknown flags"
    fails = "check that no other process uses them"
    if platforms := environment.get("JAX_PLATFORMS"):
        installs = [_INSTALL[kind] for kind, name in JAX_NAMES.items() if name in platforms]
        fails = " or ".join([f"unset JAX_PLATFORMS={platforms}", *installs])
    yield from ended_early(report, stage, seconds, (others, flags, fails))


def _unused(report: Told, machine: Machine, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Accelerators that JAX does not use, although no setting forbids it."""
    found = seen(report)
    if not found or environment.get("JAX_PLATFORMS") or environment.get("JAX_PLATFORM_NAME"):
        return
    reasons = {line["platform"]: line["why"] for line in report.lines if "why" in line}
    for kind in machine.accelerators:
        if found[0]["platform"] != kind:
            why = reasons.get(JAX_NAMES[kind], "")
            what = f"the {kind.upper()} of this machine"
            yield Finding(what, True, f"JAX does not use it ({why}): {_INSTALL[kind]}", "docs.jax.dev, installation")


def _around(found: Sequence[Mapping[str, Any]], machine: Machine) -> Iterator[Finding]:
    """Missing drivers and scarce shared memory."""
    is_gpu = bool(found) and found[0]["platform"] == "gpu"
    if machine.gpu_without_driver and not is_gpu:
        advice = "programs cannot use it: install its driver, or start the container with it (docker run --gpus all)"
        yield Finding("an NVIDIA GPU", True, advice)
    shared = machine.shared_bytes
    if is_gpu and len(found) > 1 and shared is not None and shared < _LEAST_SHARED:
        advice = "NCCL wants 1 GB there where a host has several processes: docker run --shm-size=1g"
        yield Finding(f"/dev/shm of {size_in_words(shared)}", True, advice, "docs/multihost.md")


# Links.


def links(report: Told) -> Section:
    """Collectives over all devices."""
    found, devices = of(report, "exchange"), seen(report)
    if len(devices) < 2:
        return Section("Collectives", ["not tested: they need two devices"])
    lines = [_line(each) for each in found]
    if devices[0]["platform"] == "cpu":
        lines.append("these are not real links: simulated devices communicate through memory")
    wrong = [
        Finding(f"{each['kind']} of {size_in_words(each['bytes'])}", True, f"{each['wrong']}: {_DISTRUST}")
        for each in found
        if each["wrong"]
    ]
    return Section(f"Collectives over all {len(devices)} devices", lines, [*wrong, *_slow(found, devices)])


_DISTRUST = "do not train on this machine; run the doctor again without XLA_FLAGS, then have the devices checked"


def _line(each: Mapping[str, Any]) -> str:
    right = "WRONG" if each["wrong"] else "right"
    size, rate = size_in_words(each["bytes"]), f"{size_in_words(each['bytes_per_second'])}/s"
    return f"{each['kind']:<15}{size:>9}{right:>8}{seconds_in_words(each['seconds']):>12}{rate:>13} from each device"


def _slow(found: Sequence[Mapping[str, Any]], devices: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Links within one fast domain that are much slower than they should be."""
    known = chip_of(devices[0]["kind"])
    best = max((each["bytes_per_second"] for each in found), default=0.0)
    if known is None or not found or len({each["process"] for each in devices}) > 1:
        return
    if len(devices) <= known.domain_size and best < _LEAST_LINK * known.link_bandwidth:
        rates = (
            f"{size_in_words(best)}/s at best, while {known.name}'s links carry {size_in_words(known.link_bandwidth)}/s"
        )
        cure = "NCCL_DEBUG=INFO and nvidia-smi topo -m show the route" if known.platform == "gpu" else _BUSY
        yield Finding("slow links", True, f"{rates}: {cure}", "jaxshard/hardware/chips.py")


_BUSY = "check whether another program uses the chips"


# Compilers.


def compilers(report: Told, installed: Mapping[str, str], seconds: float) -> Section:
    """The installed compilers for other machines, and whether they work."""
    lines: list[str] = []
    findings: list[Finding] = []
    for each in (line for line in report.lines if "compiler" in line):
        platform = each["compiler"]
        versions = [f"{name} {installed[name]}" for name in _PACKAGES[platform] if name in installed]
        if each["wrong"]:
            advice = f'it is installed, but fails: {each["wrong"]}: pip install --upgrade "jaxshard[aot-{platform}]"'
            findings.append(Finding(f"the {platform.upper()} compiler", True, advice))
        elif each["installed"]:
            lines.append(f"{platform.upper()}: {', '.join(versions) or 'it'} answers")
        else:
            lines.append(f'{platform.upper()}: not installed (pip install "jaxshard[aot-{platform}]")')
    if "compilers" in of(report, "stage"):
        early = report._replace(lines=[line for line in report.lines if "error" not in line])
        cures = ("--seconds waits longer", "unset XLA_FLAGS, or reinstall them", "")
        findings += ended_early(early, "compilers", seconds, cures)
    return Section("Compilers for other machines (AOT)", lines or ["not asked"], findings)


_PACKAGES = {"gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin"), "tpu": ("libtpu",)}
