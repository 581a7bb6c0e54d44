"""Errors of ours cross processes and are copied: a pool that cannot unpickle one waits forever."""

import copy
import dataclasses
import importlib
import inspect
import pickle  # noqa: TID251  (of our own bytes)
import pkgutil

import numpy as np
import pytest

import jaxshard
from jaxshard.checkpoint import CorruptCheckpointError, NewerFormatError
from jaxshard.digest import ReplicaError
from jaxshard.loss.loss_report import LossReport
from jaxshard.optimizer.local.elementwise import NotElementwise
from jaxshard.processes import ProcessError
from jaxshard.programs.paired import Unlike
from jaxshard.system.command import OutputGoneError

ERRORS = [
    jaxshard.NonFiniteError(3, "w", 2, broken="b"),
    CorruptCheckpointError(20, "w", "its digest differs"),
    NewerFormatError(None, 7, 3),
    ProcessError(1, "it has another learning rate"),
    jaxshard.RowsError(LossReport(False, 1.0, {}, 1e-4, ("a sum",), ())),
    OutputGoneError(OSError(32, "Broken pipe")),
]


def sent(error):
    """As another process gets it."""
    return pickle.loads(pickle.dumps(error))  # noqa: S301


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, sent])
def test_a_copy_has_type_message_and_attributes(error, how):
    found = how(error)
    assert (type(found), str(found), vars(found).keys()) == (type(error), str(error), vars(error).keys())
    for name, value in vars(error).items():
        assert getattr(found, name) == value or str(getattr(found, name)) == str(value), name


def test_an_error_with_devices_in_its_making_has_its_digests():
    error = ReplicaError.__new__(ReplicaError, "replicas differ")
    error.digests = {"w": np.arange(2)}
    found = sent(error)
    assert (str(found), found.digests["w"].tolist()) == ("replicas differ", [0, 1])


def test_every_error_with_a_maker_of_its_own_can_be_copied():
    made = {type(error) for error in ERRORS} | {ReplicaError}
    modules = pkgutil.walk_packages(jaxshard.__path__, "jaxshard.")
    skipped = ("__main__", "_worker", "nnx_peer")
    for module in (importlib.import_module(m.name) for m in modules if not m.name.endswith(skipped)):
        for _, kind in inspect.getmembers(module, inspect.isclass):
            ours = issubclass(kind, BaseException) and kind.__module__.startswith("jaxshard")
            if ours and "__init__" in vars(kind) and kind not in (NotElementwise, Unlike):  # we catch these
                assert kind in made, kind


def test_chips_and_targets_can_be_copied():
    target = jaxshard.plan.Target(jaxshard.plan.chip("h100"), num_devices=8, memory_bytes=80e9)
    assert copy.deepcopy(target) == sent(target) == target
    assert dataclasses.asdict(target)["num_devices"] == 8
