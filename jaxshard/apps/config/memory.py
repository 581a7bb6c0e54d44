"""What a run needs of the memory that there is, told before any of it is taken."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jaxshard.system.text import size_in_words

_LIMIT_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def host_bytes() -> float:
    """The memory of this host, or of its container; infinite where nobody knows.

    >>> host_bytes() > 2**28
    True
    """
    try:
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return float("inf")
    try:
        return min(host, int(_LIMIT_OF_CONTAINER.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return host


def peak_bytes(devices: Iterable[Any]) -> int | None:
    """The most that any of the devices has held since the process began; None where the backend does not say.

    Args:
      devices: `jax.Device`s of this process.
    """
    found = [_stats(device).get("peak_bytes_in_use") for device in devices]
    return max((peak for peak in found if peak is not None), default=None)


def _stats(device: Any) -> dict[str, int]:
    with contextlib.suppress(jax.errors.JaxRuntimeError, NotImplementedError):  # by platform
        return device.memory_stats() or {}
    return {}


def check(needed: float, what: str, cure: str, most: float | None = None) -> None:
    """Checks that something fits.

    Args:
      needed: bytes.
      what: takes them.
      cure: what to do where they are too many.
      most: bytes that there are; by default this host's.

    Raises:
      ValueError: it does not fit.
    """
    most = host_bytes() if most is None else most
    if needed > most:
        raise ValueError(f"{what} would take {size_in_words(needed)}, and there are {size_in_words(most)}: {cure}")
