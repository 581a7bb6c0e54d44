"""jaxshard: shard any optax optimizer over a JAX device mesh, with the same training result."""
# ruff: noqa: F403, F405 (public.py has the names)

import importlib
from typing import TYPE_CHECKING, Any

from jaxshard.system.command import is_command as _is_command  # noqa: F401  (it acts before JAX is imported)

__version__ = "0.1.0"

__all__ = [
    "Evaluate",
    "Layout",
    "LossDifference",
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
    "Whole",
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
    "reshard",
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

_MODULES = (
    "aot",
    "checkpoint",
    "digest",
    "guards",
    "inspect",
    "layout",
    "mesh",
    "pipelining",
    "plan",
    "processes",
    "tensor",
)


def _connect() -> None:
    """Lets losses tell what they cost: `plan`, which knows, stands above them, and is imported when it is asked."""
    from jaxshard.loss.gradients import LossFunction

    def price_of(*args: Any) -> Any:
        from jaxshard.plan.prediction import price_of

        return price_of(*args)

    LossFunction.price_of = staticmethod(price_of)


if TYPE_CHECKING:
    from jaxshard import aot as aot
    from jaxshard import checkpoint as checkpoint
    from jaxshard import digest as digest
    from jaxshard import guards as guards
    from jaxshard import inspect as inspect
    from jaxshard import layout as layout
    from jaxshard import mesh as mesh
    from jaxshard import pipelining as pipelining
    from jaxshard import plan as plan
    from jaxshard import processes as processes
    from jaxshard import tensor as tensor
    from jaxshard.public import *
else:

    def __getattr__(name: str) -> object:
        """The public modules and names, imported when the first is used: `jaxshard --help` does not wait for JAX."""
        if name in _MODULES:
            return importlib.import_module(f"jaxshard.{name}")
        if name in __all__:
            public = importlib.import_module("jaxshard.public")
            _connect()
            globals().update({each: getattr(public, each) for each in __all__ if each not in globals()})
            return globals()[name]
        raise AttributeError(f"module 'jaxshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
