"""Checks of `jaxshard doctor` that may hang or crash, and so run in processes of their own."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxshard.cli.doctor.apart import Lines, tell

_COMPILERS = {"gpu": "h100:8", "tpu": "v5e:2x4"}  # by platform, a machine to compile for
_SMALL = 2**16  # bytes of a payload
_LARGE = {"cpu": 2**22}
_LARGE_ELSEWHERE = 2**26


def main(arguments: Sequence[str]) -> None:
    """Runs one check of `WORK` and reports its findings."""
    tell(arguments, lambda rest: told_of(WORK[rest[0]], rest[1:]))


def told_of(work: Callable[..., Lines], arguments: Sequence[str]) -> Lines:
    """Yields a check's lines; an error becomes the last line."""
    try:
        yield from work(*arguments)
    except Exception as error:
        yield {"error": first_line(error)}


def first_line(error: BaseException) -> str:
    """An error's type, if informative, and the first line of its text."""
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def devices(*wanted: str) -> Lines:
    """JAX's devices, why it lacks the `wanted` platforms, and its collectives."""
    import jax

    yield {"stage": "devices"}
    start = time.perf_counter()
    try:
        found: list[Any] = jax.devices()
    except AssertionError:  # JAX gives no reason
        yield {"error": "this platform does not exist"}
        return
    taken = time.perf_counter() - start
    yield {"devices": list(map(_described, found)), "num_processes": jax.process_count(), "seconds": taken}
    yield from (_reason(platform) for platform in wanted if platform != found[0].platform)
    if len(found) > 1:
        yield {"stage": "links"}
        yield from _links(found)


def _described(device: Any) -> dict[str, object]:
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "process": device.process_index,
        "memory_bytes": _memory_bytes(device),
    }


def _memory_bytes(device: Any) -> int | None:
    """Bytes of the device's memory that JAX may use; None if unknown, as for other processes' devices."""
    with contextlib.suppress(Exception):  # of any type, by platform
        return device.memory_stats()["bytes_limit"]
    return None


def _reason(platform: str) -> dict[str, object]:
    """Why JAX does not use a platform."""
    import jax

    try:
        jax.devices(platform)
    except RuntimeError as error:
        return {"platform": platform, "why": str(error).strip().splitlines()[0]}
    return {"platform": platform, "why": "another platform has precedence"}


def _links(found: Sequence[Any]) -> Iterator[dict[str, object]]:
    from jaxshard.cli.doctor import links

    for each in links.exchanges(found, (_SMALL, _LARGE.get(found[0].platform, _LARGE_ELSEWHERE))):
        yield {"exchange": each._asdict()}


def _compiler(platform: str) -> dict[str, object]:
    """Whether a compiler for other machines works."""
    from jaxshard import aot

    try:
        aot.devices(aot.machine(_COMPILERS[platform]))
    except aot.CompilerMissingError:
        return {"compiler": platform, "installed": False, "wrong": ""}
    except Exception as error:
        return {"compiler": platform, "installed": True, "wrong": first_line(error)}
    return {"compiler": platform, "installed": True, "wrong": ""}


def without_devices(path: str) -> Lines:
    """Checks that need no devices: tries a folder, then the compilers for other machines."""
    yield {"stage": "folder"}
    yield from told_of(lambda: _folder(Path(path)), ())
    yield {"stage": "compilers"}
    yield from map(_compiler, _COMPILERS)


def _folder(path: Path) -> Lines:
    from jaxshard.cli.doctor.folder import trials
    from jaxshard.system.command import nearest_above

    place = nearest_above(path)
    yield {"tried": str(place), "free_bytes": shutil.disk_usage(place).free}
    try:
        from jaxshard.checkpoint.folder_lock import Lock
    except ImportError as error:
        Lock = None
        yield {"no_checkpoints": first_line(error)}
    for each in trials(place, Lock):
        yield {"trial": each._asdict()}


WORK: dict[str, Callable[..., Lines]] = {"devices": devices, "without devices": without_devices}
