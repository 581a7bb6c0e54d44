"""The manifest of a checkpoint: the index of its leaves, its run and metrics, and a digest of all of these."""

import hashlib
import json
from typing import NotRequired, TypedDict

from jaxshard.checkpoint.leaves import Entry

FORMAT = 1
DIGEST_BYTES = 32


class Manifest(TypedDict):
    """What is saved beside the arrays. `run`: the id of the run; `digest`: SHA-256, in hex, of the rest as JSON."""

    format: int
    run: str
    metrics: dict[str, float] | None
    leaves: dict[str, Entry]
    digest: NotRequired[str]


class CheckpointInfo(TypedDict):
    """What a checkpoint says of itself; `leaves`: path -> shape, dtype, and digest or number."""

    step: int
    metrics: dict[str, float] | None
    run: str
    leaves: dict[str, Entry]


def digest_of(data: bytes) -> bytes:
    """SHA-256: `DIGEST_BYTES` bytes."""
    return hashlib.sha256(data).digest()


def check_format(found: int) -> None:
    """Raises ValueError for the number of a format that this version does not read."""
    if found != FORMAT:
        raise ValueError(f"its format is {found}, and this jaxshard reads {FORMAT}; update it")


def sealed(manifest: Manifest) -> Manifest:
    """The manifest with its digest."""
    return {**manifest, "digest": _digest(manifest)}


def opened(manifest: Manifest) -> Manifest:
    """The manifest without its digest, which was compared.

    Raises:
      ValueError, KeyError, TypeError, AttributeError: it is not one that was sealed.
    """
    rest: Manifest = {**manifest}
    if rest.pop("digest") != _digest(rest):
        raise ValueError("its digest is another")
    check_format(rest["format"])
    return rest


def _digest(manifest: Manifest) -> str:
    return digest_of(json.dumps(manifest, sort_keys=True).encode()).hex()
