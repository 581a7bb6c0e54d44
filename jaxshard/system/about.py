"""The date, versions and machine of a measurement."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
from pathlib import Path

_PACKAGES = (
    *("jaxshard", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "optax", "flax", "numpy"),
    *("orbax-checkpoint", "torch"),
)


def about() -> dict[str, object]:
    """The date, the versions and the machine, without its name."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | versions(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cores": os.cpu_count(),
            "load": [round(x, 2) for x in os.getloadavg()],
        },
    }


def versions() -> dict[str, str]:
    """Package -> version, for installed packages."""
    found: dict[str, str] = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor()
