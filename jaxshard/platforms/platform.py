"""What differs between platforms. Each platform's file gives the reasons and the measurements."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax

Value: TypeAlias = str | bool | int | float  # of an XLA option

MOST_LAYERS = 256  # a larger first dim is not a stack of layers
_ROWS_OF_TABLE = 6  # a matrix with at least this many times as many rows as columns is a table


def is_table(shape: tuple[int, ...]) -> bool:
    """Whether this is the shape of an embedding table: a matrix with at least six times as many rows as columns."""
    return len(shape) == 2 and shape[0] >= _ROWS_OF_TABLE * shape[1]


@dataclasses.dataclass(frozen=True)
class StepKind:
    """The facts about a step that XLA options depend on.

    Attributes:
      params_cut: the strategy shards params over the batch axes.
      state_cut: it shards the state, and so the gradients.
      checked: an axis other than the batch axes is larger than 1.
      donates: params and state are taken over.
    """

    params_cut: bool
    state_cut: bool
    checked: bool
    donates: bool = True


@dataclasses.dataclass(frozen=True)
class CompilerOption:
    """An option for XLA that jaxshard sets.

    Attributes:
      name: XLA's name for it.
      value: the value to set.
      platform: the only platform on which it is set, "cpu", "gpu" or "tpu".
      where: the steps that it is set for, in words.
      applies: whether it is set for a step.
      reason: why it is set.
      renamed: its name and value from jax 0.11.1 on, if they changed.
    """

    name: str
    value: Value
    platform: str
    where: str
    applies: Callable[[StepKind], bool]
    reason: str
    renamed: tuple[str, Value] | None = None

    @property
    def setting(self) -> tuple[str, Value]:
        """Its name and value for this JAX."""
        return self.renamed if self.renamed and jax.__version_info__ >= (0, 11, 1) else (self.name, self.value)


@dataclasses.dataclass(frozen=True)
class Platform:
    """Choices that suit XLA on one platform. Each default means that the platform needs nothing special.

    Attributes:
      name: "cpu", "gpu" or "tpu".
      rank_of_cut: `(dim, shape, shard, tile, params_cut) -> rank` of cutting `dim` of an array into shards of `shard`
        elements along it, 0 is best; `tile` is what `tile` gives; `params_cut`: params are cut, not the state alone.
      tile: `itemsize -> n`: shards of the last dim should be multiples of n elements if an element of the reduced
        gradient has `itemsize` bytes; None where only the order of dims counts.
      compiler_options: options for XLA.
      product_dtypes: the dtypes to which products may round float32 operands.
      transforms_whole_rows: a Fourier transform's operands must not be cut.
      widens_sums: sums of 2-byte floats over some axes are made in float32 while other axes are left to XLA.
      blocks_threads: collectives and linear algebra share one pool of threads, in which they may wait for each other.
      parts_from_dots: the transpose of a weight's gradient is kept out of the dot that makes it.
      axis_by_axis: a collective over several mesh axes becomes one collective per axis.
      turns_narrow_scatters: 2-byte arrays are transposed around a scatter along the last dim that does not fit tiles.
      scatters_tiles: blocks along several dims are scattered as rows of whole tiles.
      orders_backward: the backward pass of the loss is ordered by barriers and rules.
      orders_products: the two gradients of each product are ordered, too.
      picks_by_sums: picking one element of each row is a masked sum.
      casts_in_loops: a stack of float32 layers is cast within the loop over it.
      gathers_late: a parameter used after a loop is gathered after it.
      holds_microbatches: a microbatch gathers nothing before the previous one has ended.
      sends_updates: updates, not new params, move to where the params live.
      selects_after_gather: old or new params are selected after the gather.
      holds_before_gather: new params are gathered only when all are computed.
    """

    name: str
    rank_of_cut: Callable[[int, tuple[int, ...], int, int | None, bool], int]
    tile: Callable[[int], int | None]
    compiler_options: tuple[CompilerOption, ...] = ()
    product_dtypes: tuple[str, ...] = ("float32",)
    transforms_whole_rows: bool = False
    widens_sums: bool = False
    blocks_threads: bool = False
    parts_from_dots: bool = False
    axis_by_axis: bool = False
    turns_narrow_scatters: bool = False
    scatters_tiles: bool = False
    orders_backward: bool = False
    orders_products: bool = False
    picks_by_sums: bool = False
    casts_in_loops: bool = False
    gathers_late: bool = False
    holds_microbatches: bool = False
    sends_updates: bool = False
    selects_after_gather: bool = False
    holds_before_gather: bool = False
