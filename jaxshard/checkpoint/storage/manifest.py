"""The manifest of a checkpoint: the index of its leaves, its step, run and metrics, and a digest of all of these.

All versions so far write format 1. Since 0.2 its manifests contain their step; 0.1 ignores it, and manifests without it
stay readable. The number grows only when an older jaxshard could no longer read new checkpoints.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Literal, NotRequired, TypeAlias, TypedDict, cast, get_args

import jax.numpy as jnp

from jaxshard.checkpoint.storage.errors import NewerFormatError
from jaxshard.checkpoint.storage.leaves import (
    NUMBERS,
    ArrayEntry,
    Entry,
    FlatTree,
    Index,
    Leaf,
    Number,
    dtype_of_number,
    number,
)
from jaxshard.digest import Fault, digests_and_faults

FORMAT = 1
DIGEST_BYTES = 32
_FORMATS = 1000  # a larger number is not a format


class Manifest(TypedDict):
    """Saved beside the arrays. `step`, `not_finite`: missing if jaxshard 0.1 wrote it; `run`: the run's id;
    `not_finite`: path -> "nan" or "inf" for each leaf with such elements; `digest`: SHA-256, in hex, of the rest as
    JSON."""

    format: int
    step: NotRequired[int]
    run: str
    metrics: dict[str, float] | None
    leaves: dict[str, Entry]
    not_finite: NotRequired[dict[str, Fault]]
    digest: NotRequired[str]


class CheckpointInfo(TypedDict):
    """A checkpoint's description. `leaves`: path -> shape, dtype, and digest or number; `not_finite`: path -> "nan" or
    "inf" for each leaf with such elements; None: unknown, since jaxshard 0.1 wrote it."""

    step: int
    metrics: dict[str, float] | None
    run: str
    leaves: dict[str, Entry]
    not_finite: dict[str, Fault] | None


def info(step: int, manifest: Manifest) -> CheckpointInfo:
    """Describes a step, from its manifest."""
    return {
        "step": step,
        "metrics": manifest["metrics"],
        "run": manifest["run"],
        "leaves": manifest["leaves"],
        "not_finite": manifest.get("not_finite"),
    }


def digest_of(data: bytes) -> bytes:
    """SHA-256: `DIGEST_BYTES` bytes."""
    return hashlib.sha256(data).digest()


def check_format(found: object, step: int | None = None) -> None:
    """Checks a format's number; the error names `step`.

    Raises:
      NewerFormatError: only a newer jaxshard can read it.
      ValueError: the format does not exist.
    """
    _check_not_newer(found, step)
    if type(found) is not int or found != FORMAT:
        raise ValueError(f"its format is {found!r:.40}, which no version of jaxshard writes")


def index_of(tree: FlatTree) -> tuple[dict[str, Entry], dict[str, Fault]]:
    """Returns (the index of a tree's leaves, those that are not finite); one pass on the devices computes both."""
    digests, faults = digests_and_faults(tree.arrays())
    index = {path: _entry(x, digests.get(path), tree.keys.get(path)) for path, x in tree.leaves.items()}
    return index, faults


def _entry(x: Leaf, digest: int | None, key: str | None) -> Entry:
    if isinstance(x, NUMBERS):
        return {"shape": [], "dtype": dtype_of_number(x), "value": repr(_plain(x))}
    assert digest is not None
    entry: ArrayEntry = {"shape": list(x.shape), "dtype": str(x.dtype), "digest": digest}
    return entry if key is None else {**entry, "key": key}


def _plain(x: Number) -> Number:
    """The plain Python number of a subclass such as an enumeration."""
    if isinstance(x, bool):
        return x
    return int(x) if isinstance(x, int) else float(x) if isinstance(x, float) else complex(x)


def made(
    step: int, run: str, metrics: dict[str, float] | None, leaves: dict[str, Entry], not_finite: dict[str, Fault]
) -> Manifest:
    """The manifest of a step, with its digest."""
    return sealed(Manifest(format=FORMAT, step=step, run=run, metrics=metrics, leaves=leaves, not_finite=not_finite))


def sealed(manifest: Manifest) -> Manifest:
    """The manifest with its digest."""
    return {**manifest, "digest": _digest(manifest)}


def opened(found: object, step: int) -> Manifest:
    """Checks everything in a step's manifest, and returns it without its digest.

    Raises:
      NewerFormatError: only a newer jaxshard can read it.
      ValueError, KeyError, TypeError, AttributeError: it was not sealed for this step.
    """
    rest = cast(Manifest, dict(cast(dict[str, object], found)))
    digest = rest.pop("digest")
    if digest != _digest(rest):
        if digest != _digest({**rest, "format": FORMAT}):  # perhaps only the number is wrong
            _check_not_newer(rest["format"], step)
        raise ValueError("its digest differs")
    check_format(rest["format"], step)
    if rest.get("step", step) != step:
        raise ValueError(f"it is of step {rest.get('step')}, but its folder is named after another step")
    check_entries(rest["leaves"])
    if not isinstance(rest["run"], str) or not isinstance(rest["metrics"], dict | None):
        raise ValueError("its run or its metrics are invalid")
    for path, fault in rest.get("not_finite", {}).items():
        if path not in rest["leaves"] or fault not in get_args(Fault):
            raise ValueError(f"{path} is {fault!r:.40}, which is not a known fault")
    return rest


def check_entries(index: Index) -> None:
    """Checks that an index describes leaves; raises ValueError, KeyError, TypeError or AttributeError if not."""
    for path, entry in index.items():
        if not isinstance(path, str) or not _is_entry(entry):
            raise ValueError(f"{path!r:.200} is described by {entry!r:.200}")


def _check_not_newer(found: object, step: int | None) -> None:
    if type(found) is int and FORMAT < found < _FORMATS:
        raise NewerFormatError(step, found, FORMAT)


_MOST_DIMS = 64  # of NumPy's arrays


def _is_entry(entry: Entry) -> bool:
    """Whether this describes a leaf; it does, unless someone sealed a hand-written index."""
    shape, dtype = entry["shape"], jnp.dtype(entry["dtype"])
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        return False
    if str(dtype) != entry["dtype"] or not (dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number)):
        return False
    if "value" in entry:
        return shape == [] and isinstance(entry["value"], str) and repr(number(entry)) == entry["value"]
    if len(shape) > _MOST_DIMS or (0 in shape and entry["digest"] != 0):  # nothing is stored to compare with
        return False
    return isinstance(entry.get("key", ""), str) and type(entry["digest"]) is int and 0 <= entry["digest"] < 2**32


def _digest(manifest: Manifest) -> str:
    return digest_of(json.dumps(manifest, sort_keys=True).encode()).hex()


# Whether a checkpoint is finite.

Health: TypeAlias = Literal["finite", "unknown", "inf", "nan"]
HEALTHS: tuple[Health, ...] = get_args(Health)  # the best first


def health(index: Index, faults: Mapping[str, Fault] | None) -> Health:
    """A checkpoint's health, from its leaves that are not finite; `faults` is None if those are unknown.

    A NaN counts in any array, an infinity except in scalars: optimizers may start from an infinite "best so far".

    >>> health({"best": {"shape": [], "dtype": "float32", "digest": 0}}, {"best": "inf"})
    'finite'
    """
    if faults is None:
        return "unknown"
    counted = _counted(index, faults)
    return "nan" if "nan" in counted.values() else "inf" if counted else "finite"


def faults_in_words(index: Index, faults: Mapping[str, Fault]) -> str:
    """Names the first leaf with NaN, else with infinity, and counts the others; "" if all leaves are finite."""
    counted = _counted(index, faults)
    if not counted:
        return ""
    path = next((path for path, fault in counted.items() if fault == "nan"), next(iter(counted)))
    more = f", and {len(counted) - 1} more leaves are not finite" if len(counted) > 1 else ""
    return f"{path} has {'NaN' if counted[path] == 'nan' else 'infinite numbers'}{more}"


def _counted(index: Index, faults: Mapping[str, Fault]) -> dict[str, Fault]:
    return {path: fault for path, fault in faults.items() if fault == "nan" or index[path]["shape"]}
