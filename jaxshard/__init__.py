"""jaxshard: shard any optax optimizer over a JAX device mesh, with the same training result."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from jaxshard.base.loss_scale import LossScale
from jaxshard.base.types import Metrics
from jaxshard.layout.layout import Layout, Shardings
from jaxshard.layout.options import Options
from jaxshard.loss.arguments import whole
from jaxshard.loss.check import LossReport, RowsError, check
from jaxshard.loss.unshard import lookup, unshard
from jaxshard.loss.value_and_grad import Evaluate, Predict, ValueAndGrad, evaluate, predict, value_and_grad
from jaxshard.mesh import make_mesh
from jaxshard.optimizer.optimizer import ShardedOptimizer
from jaxshard.optimizer.precision import ShardedState
from jaxshard.pipelining.pipeline import pipeline
from jaxshard.processes.start import initialize
from jaxshard.programs.rows.verdict import RowsWarning
from jaxshard.step.batch import shard_batch, specs_of
from jaxshard.step.skips import NonFiniteError
from jaxshard.step.step import TrainStep, train_step
from jaxshard.strategies import ddp, fsdp, hsdp, hybrid, pipeline_parallel, tensor_parallel, zero1, zero2, zero3
from jaxshard.system.command import is_command as _is_command  # noqa: F401  (first: it acts before JAX is imported)

__version__ = "0.1.0"

__all__ = [
    "Evaluate",
    "Layout",
    "LossReport",
    "LossScale",
    "Metrics",
    "NonFiniteError",
    "Options",
    "Predict",
    "RowsError",
    "RowsWarning",
    "ShardedOptimizer",
    "ShardedState",
    "Shardings",
    "TrainStep",
    "ValueAndGrad",
    "check",
    "ddp",
    "evaluate",
    "fsdp",
    "hsdp",
    "hybrid",
    "initialize",
    "lookup",
    "make_mesh",
    "pipeline",
    "pipeline_parallel",
    "predict",
    "shard_batch",
    "specs_of",
    "tensor_parallel",
    "train_step",
    "unshard",
    "value_and_grad",
    "whole",
    "zero1",
    "zero2",
    "zero3",
]

_MODULES = ("aot", "checkpoint", "digest", "guards", "inspect", "mesh", "pipelining", "plan", "tensor")

if TYPE_CHECKING:
    from jaxshard import aot as aot
    from jaxshard import checkpoint as checkpoint
    from jaxshard import digest as digest
    from jaxshard import guards as guards
    from jaxshard import inspect as inspect
    from jaxshard import mesh as mesh
    from jaxshard import pipelining as pipelining
    from jaxshard import plan as plan
    from jaxshard import tensor as tensor
else:

    def __getattr__(name: str) -> ModuleType:
        """The public modules, imported when they are first asked for."""
        if name in _MODULES:
            return importlib.import_module(f"jaxshard.{name}")
        raise AttributeError(f"module 'jaxshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
