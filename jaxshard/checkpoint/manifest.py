"""The index of a checkpoint: what its leaves are and the digest of each, and a digest of the whole."""

import hashlib
import json
from pathlib import Path
from typing import Any

FORMAT = 1
FILE = "_CHECKPOINT_METADATA"
DIGEST_BYTES = 32


class CorruptCheckpointError(RuntimeError):
    """What was read is not what was saved. `step` (None: bytes); `leaf`: the first path that shows it, if known."""

    def __init__(self, step: int | None, leaf: str | None, reason: str):
        what = "these bytes are" if step is None else f"checkpoint {step} is"
        super().__init__(f"{what} corrupt: {leaf + ': ' if leaf else ''}{reason}")
        self.step, self.leaf = step, leaf


def digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def check_format(found: Any) -> None:
    if found["format"] != FORMAT:
        raise ValueError(f"its format is {found['format']}, and this jaxshard reads {FORMAT}; update it")


def sealed(index: dict[str, Any]) -> dict[str, Any]:
    """With its digest."""
    return {**index, "digest": _digest(index)}


def opened(folder: Path) -> dict[str, Any]:
    """The index of the checkpoint in `folder`.

    Raises:
      OSError, ValueError, KeyError, TypeError, AttributeError: it is not one that was sealed.
    """
    index = json.loads((folder / FILE).read_text())["custom_metadata"]
    if index.pop("digest") != _digest(index):
        raise ValueError("its digest is another")
    check_format(index)
    return index


def _digest(index: dict[str, Any]) -> str:
    return digest_of(json.dumps(index, sort_keys=True).encode()).hex()
