"""XLA for CPU: simulated devices, and what makes these safe and fast. Leaves are cut as on TPU."""

from jaxshard.platforms import tpu
from jaxshard.platforms.platform import CompilerOption, Platform

IN_ORDER = CompilerOption(
    "xla_cpu_scheduler_type",
    "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "cpu",
    "where an axis other than the batch axes is larger than 1",
    lambda step: step.checked,
    "Keeps simulated devices from deadlocks. XLA for CPU schedules for the most concurrency. If loops hold collectives "
    "over several axes, each device then starts these beside others in its own order, and now and then the devices "
    "wait for each other forever. Scheduled for the least memory, thousands of runs finished.",
)

CPU = Platform(
    name="cpu",
    rank_of_cut=tpu.rank_of_cut,
    tile=tpu.tile,
    compiler_options=(IN_ORDER,),
    # The operands of a Fourier transform must lie in the order of rows (RET_CHECK in fft_thunk, jax 0.10 to 0.12).
    transforms_whole_rows=True,
    # The program ends at a sum of 2-byte floats over some axes while other axes are left to XLA.
    widens_sums=True,
    # Collectives, which block, and the parts of linear algebra run on one pool of threads (jax 0.10 to 0.12). Seen with
    # Shampoo: 7 of 8 threads in an all-to-all, and an `eigh` of the last device without a thread.
    blocks_threads=True,
    # A dot that the transpose after it is folded into misses the fast kernels if activations have more than two dims;
    # the partitioner of a jit + NamedSharding step never folds it. Compared with that step, a transformer's whole step
    # took 1.09 to 1.15 times as long when folded, and takes 1.02 times now. Perceptrons on few rows lose time to the
    # copies (up to 1.2 times).
    parts_from_dots=True,
)
