"""XLA for TPU."""

from jaxshard.platforms.platform import Platform, is_table

_LANES = 128  # columns of a tile
_TILE_BYTES = 512  # of a reduced gradient


def tile(itemsize: int) -> int:
    """The number of elements that should divide the last dim's shards: 512 bytes of a reduced gradient, 128 at least.

    Measured: the TPU compiler all-reduces bfloat16 shards with an odd multiple of 128 columns, at twice the bytes,
    instead of reduce-scattering them.
    """
    return max(_LANES, _TILE_BYTES // itemsize)


def rank_of_cut(dim: int, shape: tuple[int, ...], shard: int, tile: int | None, params_cut: bool) -> int:
    """The last dim is best if its shards are whole tiles, then the second last, then any other; layers come last."""
    del params_cut
    lanes = _LANES if is_table(shape) or tile is None else tile  # rows of a table are exchanged, not scattered
    if dim == len(shape) - 1:
        return 0 if shard % lanes == 0 else 4
    if dim == 0 and len(shape) >= 3:
        return 5  # stacked layers: cutting these would gather all layers at once
    if dim == len(shape) - 2:
        return 1 if shard % 8 == 0 else 2
    return 3


TPU = Platform(
    name="tpu",
    rank_of_cut=rank_of_cut,
    tile=tile,
    product_dtypes=("bfloat16",),
    # A scatter or gather over a whole torus becomes an all-reduce of twice the bytes (v5p:4x4x4, 8 x 8).
    axis_by_axis=True,
    # A scatter of 2-byte elements becomes an all-reduce of twice the bytes if the shards' last dim is an odd multiple
    # of 128. Transposed before and after, which XLA does by layouts alone, it stays a scatter.
    turns_narrow_scatters=True,
    # XLA would all-reduce blocks that are no whole tiles: zero3 in blocks of 257 x 1029 sent 8% more bytes (v5e:2x4).
    scatters_tiles=True,
    orders_backward=True,
    # To gather the elements, XLA would write all logits to memory in float32, beside those in bfloat16 that are kept
    # (zero2 with masters: 1205 MB, 1008 MB with sums).
    picks_by_sums=True,
    # TPU products take bfloat16, so XLA would cast a whole stack of layers before their loop, and keep the copy from
    # the forward pass to the backward pass. Peak of 12 layers of width 1024 in float32, without and with this: zero2
    # 1908 and 1726 MB; zero3, where shards are cast and then gathered, 924 and 892 MB.
    casts_in_loops=True,
    # XLA would gather the head first of all, and keep it through the forward loop. Peak of Llama 3 8B under zero3 on
    # 512 v5p: 12.4 GB without, 11.4 GB with it.
    gathers_late=True,
    # Peak of a step whose updates or params are gathered: 1896 or 2782 MB.
    sends_updates=True,
    # Peak of a model with masters, selecting after or before: 438 or 625 MB (zero1), 436 or 500 MB (zero2): selecting
    # before the gather copied all old params, unsharded.
    selects_after_gather=True,
)
