"""The steps by name."""

from __future__ import annotations

import importlib
import importlib.util

from jaxshard.apps.bench import gspmd
from jaxshard.apps.bench.step import OURS, Step, Task, UnfitError, ours

NNX = "nnx"
PEERS = (*gspmd.PLAIN, *gspmd.BEST, NNX)
NAMES = (*OURS, *PEERS)


def build(name: str, task: Task) -> Step:
    """The step of that name.

    Raises:
      UnfitError: it cannot do the task, or a package is not installed.
    """
    if name in OURS:
        return ours(name, task)
    if name != NNX:
        return gspmd.build(name, task)
    if importlib.util.find_spec("flax") is None:
        raise UnfitError("flax is not installed: pip install flax")
    return importlib.import_module("jaxshard.apps.bench.nnx_peer").build(task)
