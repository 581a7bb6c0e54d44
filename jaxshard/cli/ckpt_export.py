"""Writes .safetensors files array by array: the package's own writer wants all of them in memory at once.

The format: eight bytes, the length of the header; the header in JSON; the arrays' bytes. The package then reads the
header back.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open

_NOTES = "__metadata__"


def check_free(file: Path) -> None:
    """Raises ValueError if `file` cannot be written, as something is there or its folder is not."""
    if os.path.lexists(file):
        raise ValueError(f"--safetensors {file} is there already: name a new file")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"--safetensors {file}: there is no folder {file.parent}: make it first")


def num_bytes(leaf: Mapping[str, Any]) -> int:
    """Of a leaf of a checkpoint's index."""
    return int(np.prod(leaf["shape"])) * jnp.dtype(leaf["dtype"]).itemsize


def ordered(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """As they lie in the file: the widest elements first, so that each array is aligned."""
    return dict(sorted(leaves.items(), key=lambda item: (-jnp.dtype(item[1]["dtype"]).itemsize, item[0])))


def write(
    file: Path, leaves: Mapping[str, Any], arrays: Iterable[tuple[str, np.ndarray]], notes: Mapping[str, str]
) -> None:
    """Writes a file beside `file` and moves it there once it is whole.

    Args:
      file: that is not there yet.
      leaves: path -> shape and dtype.
      arrays: (path, array) in the same order; one at a time is held.
      notes: for the header.

    Raises:
      ValueError: a dtype or a name that such files cannot hold.
      OSError: it cannot be written, or `file` came to be meanwhile.
    """
    header = _header(leaves, notes)
    _check_space(file, len(header) + sum(map(num_bytes, leaves.values())))
    part = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with part.open("xb") as out:
            out.write(header)
            for _, x in arrays:
                out.write(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
            out.flush()
            os.fsync(out.fileno())
        _check_opens(part, leaves)
        check_free(file)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _header(leaves: Mapping[str, Any], notes: Mapping[str, str]) -> bytes:
    codes = {path: _code(leaf["dtype"]) for path, leaf in leaves.items()}
    wrong = [f"{path} ({leaves[path]['dtype']})" for path, code in codes.items() if not code]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"a .safetensors file cannot hold {', '.join(wrong[:5])}{more}: choose others with --only REGEX"
        )
    if _NOTES in leaves:
        raise ValueError(f"a .safetensors file cannot hold a leaf called {_NOTES}: choose others with --only REGEX")
    entries: dict[str, Any] = {_NOTES: dict(notes)}
    end = 0
    for path, leaf in leaves.items():
        start, end = end, end + num_bytes(leaf)
        entries[path] = {"dtype": codes[path], "shape": leaf["shape"], "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _code(dtype: str) -> str | None:
    """The format's name of a dtype; None: it has none."""
    try:
        return TensorSpec(dtype=dtype, shape=[0], data_ptr=0, data_len=0).dtype
    except SafetensorError:
        return None


def _check_space(file: Path, needed: int) -> None:
    free = shutil.disk_usage(file.absolute().parent).free
    if free < needed:
        reason = f"no space: the file takes {needed / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free"
        raise OSError(errno.ENOSPC, reason, str(file))


def _check_opens(file: Path, leaves: Mapping[str, Any]) -> None:
    """That the package takes the header, and that it fits the bytes."""
    with safe_open(file, framework="numpy") as opened:
        assert set(opened.keys()) == set(leaves)
