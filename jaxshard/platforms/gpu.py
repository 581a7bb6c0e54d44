"""XLA for GPU.

The figures come from the step in `benchmarks/NOTES.md`: 12 layers of width 1024, float32, for 8 x H100.
"""

import math

from jaxshard.platforms.platform import MOST_LAYERS, CompilerOption, Platform, is_table


def rank_of_cut(dim: int, shape: tuple[int, ...], shard: int, tile: int | None, params_cut: bool) -> int:
    """The first dim after a stack of layers is best, then the next; for a table, the features.

    XLA for GPU gathers and scatters along the first dim in memory, and transposes arrays cut along another dim. A table
    cut by its features sends the rows that are looked up, and their gradients, with 1/N of the bytes. It is transposed
    where it is gathered, though, as whole params are after the update: a narrow one, of a recommender, is then cut by
    its rows.
    """
    del tile
    if len(shape) >= 3 and dim == 0 and shape[0] <= MOST_LAYERS:
        return len(shape)
    if not is_table(shape):
        return dim
    features = math.prod(shape[1:])
    return 1 - dim if params_cut or features * shard >= _NARROW * shape[dim] else dim


_NARROW = 32  # features of a shard: 128 bytes in float32, a line of the GPU's cache


TWO_STEPS_IN_ONE = CompilerOption(
    "xla_gpu_enable_while_loop_double_buffering",
    True,
    "gpu",
    "always",
    lambda step: True,
    "Merges two iterations of each loop, which avoids copies of loop-carried arrays. Kernels other than matrix "
    "products move 30.3 GB instead of 32.3 GB (zero2).",
)
SMALL_GATHERS = CompilerOption(
    "xla_gpu_all_gather_combine_threshold_bytes",
    8_000_000,
    "gpu",
    "if params are sharded (zero3, fsdp, hsdp)",
    lambda step: step.params_cut,
    "Combines gathers only up to 8 MB (XLA's default: 30 MB), so that the first matrix product of a layer does not "
    "wait for all of the layer's weights. In bfloat16, products cover 802 MB instead of 368 MB of 1046 MB.",
)
SEVERAL_AT_ONCE = CompilerOption(
    "xla_gpu_experimental_parallel_collective_overlap_limit",
    4,
    "gpu",
    "if params are sharded (zero3, fsdp, hsdp)",
    lambda step: step.params_cut,
    "Lets the gather of the output layer overlap with the collectives of the last layers. Products cover 1638 MB "
    "instead of 1507 MB of 2091 MB.",
)
SUMS_BEHIND = CompilerOption(
    "xla_gpu_enable_pipelined_all_reduce",
    True,
    "gpu",
    "if gradients are all-reduced in full (ddp)",
    lambda step: not step.state_cut,
    "All-reduces a layer's gradients while the layer before it is computed. Products cover 685 MB instead of 131 MB of "
    "866 MB.",
    renamed=("xla_gpu_pipeline_all_reduce", "COLLECTIVE_PIPELINING_MODE_ON"),
)

GPU = Platform(
    name="gpu",
    rank_of_cut=rank_of_cut,
    tile=lambda itemsize: None,
    compiler_options=(TWO_STEPS_IN_ONE, SMALL_GATHERS, SEVERAL_AT_ONCE, SUMS_BEHIND),
    product_dtypes=("float16",),  # tf32 has float16's bits
    orders_backward=True,
    # XLA delays products until something reads their results (platforms/backward.py).
    orders_products=True,
    # XLA would gather a microbatch's first weights (and its output layer) during the previous microbatch, which costs
    # 224 MB; the peak is 1208 MB (`benchmarks/NOTES.md`).
    holds_microbatches=True,
    # Otherwise XLA would fuse transposes into the optimizer's kernels, which overwrite the old state.
    holds_before_gather=True,
)
