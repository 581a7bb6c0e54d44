"""Options for XLA: those that jaxshard sets, each with its reason, and those that a user gives besides.

Figures are of the step in `benchmarks/NOTES.md`: 12 layers of width 1024, float32, compiled for 8 x H100.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.types import AnyMesh
from jaxshard.mesh import platform_of

Value: TypeAlias = str | bool | int | float


@dataclasses.dataclass(frozen=True)
class CompilerOption:
    """An option that jaxshard sets.

    Attributes:
      name: as XLA knows it.
      value: what it is set to.
      platform: the only one on which it is set, "cpu", "gpu" or "tpu".
      where: which steps it is set for, in words.
      reason: why.
      renamed: its name and value from jax 0.11.1 on, where these are others.
    """

    name: str
    value: Value
    platform: str
    where: str
    reason: str
    renamed: tuple[str, Value] | None = None

    @property
    def setting(self) -> tuple[str, Value]:
        """Its name and value for this JAX."""
        return self.renamed if self.renamed and jax.__version_info__ >= (0, 11, 1) else (self.name, self.value)


IN_ORDER = CompilerOption(
    "xla_cpu_scheduler_type",
    "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "cpu",
    "where an axis other than the batch axes is larger than 1",
    "Keeps simulated devices from deadlocks. XLA for CPU schedules for the most concurrency. If loops hold collectives "
    "over several axes, each device then starts these beside others in its own order, and now and then the devices "
    "wait for each other forever. Scheduled for the least memory, thousands of runs finished.",
)
TWO_STEPS_IN_ONE = CompilerOption(
    "xla_gpu_enable_while_loop_double_buffering",
    True,
    "gpu",
    "always",
    "Makes two steps of each loop one, and so spares copies of what a loop carries. Kernels other than matrix products "
    "move 30.3 GB instead of 32.3 GB (zero2).",
)
SMALL_GATHERS = CompilerOption(
    "xla_gpu_all_gather_combine_threshold_bytes",
    8_000_000,
    "gpu",
    "where params are cut (zero3, fsdp, hsdp)",
    "Joins gathers only up to 8 MB. With XLA's own 30 MB a whole layer in bfloat16 is one gather, and its first matrix "
    "product waits for all of it; with 8 MB its second weight is gathered beside its first product. In bfloat16, "
    "products cover 802 MB instead of 368 MB of the 1046 MB that collectives take.",
)
SEVERAL_AT_ONCE = CompilerOption(
    "xla_gpu_experimental_parallel_collective_overlap_limit",
    4,
    "gpu",
    "where params are cut (zero3, fsdp, hsdp)",
    "Lets the output layer be gathered beside the last layers, which have collectives of their own. Products cover "
    "1638 MB instead of 1507 MB of 2091 MB.",
)
SUMS_BEHIND = CompilerOption(
    "xla_gpu_enable_pipelined_all_reduce",
    True,
    "gpu",
    "where gradients are summed whole (ddp)",
    "Sums a layer's gradients while the layer before it is computed. Products cover 685 MB instead of 131 MB of 866 "
    "MB.",
    renamed=("xla_gpu_pipeline_all_reduce", "COLLECTIVE_PIPELINING_MODE_ON"),
)
OURS = (IN_ORDER, TWO_STEPS_IN_ONE, SMALL_GATHERS, SEVERAL_AT_ONCE, SUMS_BEHIND)


def ours(mesh: AnyMesh, *, params_cut: bool, state_cut: bool, checked: bool) -> dict[str, Value]:
    """The options for a step.

    Args:
      mesh: its platform counts.
      params_cut, state_cut: what the strategy cuts over the batch axes.
      checked: whether an axis other than the batch axes is larger than 1.
    """
    wanted = {
        IN_ORDER: checked,
        TWO_STEPS_IN_ONE: True,
        SMALL_GATHERS: params_cut,
        SEVERAL_AT_ONCE: params_cut,
        SUMS_BEHIND: not state_cut,
    }
    platform = platform_of(mesh)
    return dict(option.setting for option, yes in wanted.items() if yes and option.platform == platform)


def check_given(who: str, given: Mapping[str, Value] | None) -> dict[str, Value]:
    """The options that a user gives, as a dict.

    Raises:
      TypeError: they are no mapping of names to strings, numbers and bools.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f'{who}: compiler_options {given!r:.80} is no mapping; give {{"xla_...": value}}')
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}
    for name, value in plain.items():
        if not isinstance(name, str) or not isinstance(value, str | bool | int | float):
            raise TypeError(
                f"{who}: compiler_options has {name!r:.80}: {value!r:.80}; names are strings, and values strings, "
                "numbers or bools"
            )
    return plain


def check_known(who: str, mesh: AnyMesh, given: Mapping[str, Value]) -> None:
    """Compiles a program of nothing with the options, for the mesh.

    Raises:
      ValueError: the compiler does not know an option, or refuses its value.
    """
    if not given or isinstance(mesh, AbstractMesh):
        return
    nothing = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    try:
        jax.jit(lambda x: x, compiler_options=dict(given)).lower(nothing).compile()
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        unknown = re.search(r"No such compile option: '([^']*)'", str(error))
        compiler = f"the {platform_of(mesh).upper()} compiler of jax {jax.__version__}"
        if unknown:
            raise ValueError(
                f"{who}: compiler_options names {unknown[1]!r}, which {compiler} does not know; look for another "
                "spelling, or leave it out"
            ) from None
        raise ValueError(f"{who}: compiler_options {dict(given)!r} is refused by {compiler}: {error}") from None
