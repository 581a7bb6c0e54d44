"""The machine without JAX: its accelerators, memory and network interfaces."""

import os
from pathlib import Path

_TPU_IDS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
"""PCI ids of v3, v4i, v4, v5p, v5e, v6e, v7x, as JAX looks for them (jax/_src/hardware_utils.py)."""
_GOOGLE, _NVIDIA, _DISPLAY = "0x1ae0", "0x10de", "0x03"
_NVIDIA_FILES = ("dev/nvidiactl", "dev/nvidia0", "dev/dxg")  # the last: on WSL


def accelerators(root: Path = Path("/")) -> list[str]:
    """Usable accelerators: "gpu" if NVIDIA's driver has made its device files, "tpu" by PCI ids."""
    found = ["gpu"] if any((root / file).exists() for file in _NVIDIA_FILES) else []
    tpus = any(vendor == _GOOGLE and device in _TPU_IDS for vendor, device, _ in _pci(root))
    return [*found, *(["tpu"] if tpus else [])]


def has_gpu_without_driver(root: Path = Path("/")) -> bool:
    """Whether there is an NVIDIA GPU without device files: no driver, or a container without GPUs."""
    there = any(vendor == _NVIDIA and kind.startswith(_DISPLAY) for vendor, _, kind in _pci(root))
    return there and "gpu" not in accelerators(root)


def _pci(root: Path) -> list[tuple[str, str, str]]:
    """(vendor, device, class) of each PCI device."""
    folders = sorted((root / "sys/bus/pci/devices").glob("*"))
    return [tuple(_read(folder / name) for name in ("vendor", "device", "class")) for folder in folders]  # pyright: ignore


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def interfaces(root: Path = Path("/")) -> list[str]:
    """Names of the network interfaces."""
    folder = root / "sys/class/net"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def memory_bytes() -> int | None:
    """Size of the host's memory, in bytes; None if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def shared_memory_bytes(root: Path = Path("/")) -> int | None:
    """Size of /dev/shm in bytes, which NCCL uses between processes of a host; None if there is none."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks
