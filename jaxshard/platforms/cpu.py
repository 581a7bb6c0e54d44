"""XLA for CPU: settings that make simulated devices safe and fast. Leaves are cut as on TPU."""

from jaxshard.platforms import tpu
from jaxshard.platforms.platform import CompilerOption, Platform

IN_ORDER = CompilerOption(
    "xla_cpu_scheduler_type",
    "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "cpu",
    "if an axis other than the batch axes is larger than 1, or the step does not donate",
    lambda step: step.checked or not step.donates,
    "Prevents deadlocks of simulated devices. By default XLA for CPU schedules for concurrency. If loops contain "
    "collectives over several axes, devices may then start these in different orders and wait for each other forever. "
    "With jax 0.10.2 a zero3 step that does not donate also corrupts memory under that schedule.",
)

CPU = Platform(
    name="cpu",
    rank_of_cut=tpu.rank_of_cut,
    tile=tpu.tile,
    compiler_options=(IN_ORDER,),
    # The operands of a Fourier transform must lie in the order of rows (RET_CHECK in fft_thunk, jax 0.10 to 0.12).
    transforms_whole_rows=True,
    # XLA aborts at a sum of 2-byte floats over some axes while other axes are left to it.
    widens_sums=True,
    # Collectives block their threads, and linear algebra needs threads of the same pool (jax 0.10 to 0.12). Seen with
    # Shampoo: 7 of 8 threads waited in an all-to-all, and the last device's `eigh` found no thread.
    blocks_threads=True,
    # XLA folds a transpose into the dot before it; the dot then misses the fast kernels if activations have more than
    # two dims. A jit + NamedSharding step never folds. Compared with that step, a transformer's step took 1.09 to 1.15
    # times as long when folded, and takes 1.02 times now. MLPs on few rows lose time to the copies (up to 1.2 times).
    parts_from_dots=True,
)
