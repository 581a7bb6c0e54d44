"""What a `Checkpointer` is given, checked."""

import errno
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import SupportsFloat, SupportsIndex

from jaxshard.checkpoint.storage.trouble import is_folder, mode_of


def folder_of(path: str | os.PathLike[str]) -> Path:
    """The folder of this path, whether it is there or not; an absolute path.

    Raises:
      TypeError, ValueError: it is no path of a folder.
      FileNotFoundError: it is relative to a working folder that was deleted.
      NotADirectoryError: it is a file.
      OSError: the system does not say what it is.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise TypeError(f"Checkpointer: {path!r:.80} is no path of a folder")
    if not str(path):
        raise ValueError("Checkpointer: '' is no folder; name one, or '.' for the working folder")
    if "://" in str(path):
        raise ValueError(
            f"Checkpointer: {str(path)!r} is no folder; mount the bucket (of a hierarchical namespace), and name it"
        )
    try:
        found = Path(path).expanduser().absolute()
    except RuntimeError as error:  # no such user
        raise ValueError(f"Checkpointer: {str(path)!r}: {error}") from None
    except FileNotFoundError as error:
        raise FileNotFoundError(
            error.errno, "Checkpointer: the working folder was deleted; name a folder from / on", str(path)
        ) from None
    if os.path.lexists(found) and not is_folder(found):
        what = "file" if mode_of(found) else "link to nothing"
        raise NotADirectoryError(errno.ENOTDIR, f"Checkpointer: this is a {what}; name a folder", str(found))
    return found


def whole_number(step: object) -> int:
    """The number of a step.

    >>> whole_number(7)
    7
    """
    if isinstance(step, bool | float) or not isinstance(step, SupportsIndex) or operator.index(step) < 0:
        raise ValueError(
            f"checkpoint: step {step!r:.80} must be a whole number, 0 or more; the calls are save(step, tree) and "
            "restore(template, step)"
        )
    return operator.index(step)


def measured(metrics: Mapping[str, SupportsFloat] | None, needed: str | None = None) -> dict[str, float] | None:
    """Metrics as Python's numbers; `needed` has to be among them, if there are any.

    >>> measured({"loss": 2})
    {'loss': 2.0}
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"checkpoint: metrics must be a dict of numbers, got {metrics!r:.200}")
    if metrics and needed is not None and needed not in metrics:
        raise ValueError(f"checkpoint: keep_best is by the metric {needed!r}, and metrics has {list(metrics)}")
    try:
        return {str(name): float(value) for name, value in metrics.items()} if metrics else None
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"checkpoint: metrics must be numbers, got {metrics!r:.200}: {error}") from None
