"""What jaxshard does differently from platform to platform. Each platform's file has the reasons and the figures."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax

Value: TypeAlias = str | bool | int | float  # of an option for XLA

MOST_LAYERS = 256  # a first dim of more is no stack of layers
_ROWS_OF_TABLE = 6  # a matrix of that many times more rows than columns is a table


def is_table(shape: tuple[int, ...]) -> bool:
    """Whether it is a matrix of at least six times as many rows as columns: an embedding."""
    return len(shape) == 2 and shape[0] >= _ROWS_OF_TABLE * shape[1]


@dataclasses.dataclass(frozen=True)
class StepKind:
    """What the options for XLA depend on.

    Attributes:
      params_cut: the strategy shards params over the batch axes.
      state_cut: it shards the state, and so the gradients.
      checked: an axis other than the batch axes is larger than 1.
    """

    params_cut: bool
    state_cut: bool
    checked: bool


@dataclasses.dataclass(frozen=True)
class CompilerOption:
    """An option for XLA that jaxshard sets.

    Attributes:
      name: as XLA knows it.
      value: what it is set to.
      platform: the only one on which it is set, "cpu", "gpu" or "tpu".
      where: which steps it is set for, in words.
      applies: the same, as a function.
      reason: why.
      renamed: its name and value from jax 0.11.1 on, where these are others.
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
    """What XLA for one platform wants. The defaults are what it leaves to us.

    Attributes:
      name: "cpu", "gpu" or "tpu".
      rank_of_cut: `(dim, shape, shard, tile) -> rank` of cutting `dim` of an array into shards of `shard` elements
        along it, 0 is best; `tile` is what `tile` gives.
      tile: the number of elements that should divide the last dim's shards of an array whose reduced gradient has
        elements of so many bytes; None where only the order of dims counts.
      compiler_options: options for XLA.
      product_dtypes: the dtypes in which products of float32 may be rounded.
      transforms_whole_rows: a Fourier transform's operands must not be cut.
      widens_sums: sums of 2-byte floats over some axes are made in float32 while other axes are left to XLA.
      blocks_threads: collectives and linear algebra share one pool of threads, in which they may wait for each other.
      parts_from_dots: the transpose of a weight's gradient is kept out of the dot that makes it.
      axis_by_axis: collectives over several mesh axes go over one after the other.
      turns_narrow_scatters: scatters of 2-byte elements along the last dim go along another where a tile does not fit.
      orders_backward: the backward pass of the loss is ordered by barriers and rules.
      orders_products: so are the two gradients of each product.
      picks_by_sums: one element of each row is taken by a sum.
      casts_in_loops: a stack of float32 layers is cast within the loop over it.
      holds_microbatches: a microbatch gathers nothing before the one before it has ended.
      sends_updates: updates, not new params, move to where the params live.
      selects_after_gather: old or new params are selected after they were gathered.
      holds_before_gather: new params are gathered when all are computed.
    """

    name: str
    rank_of_cut: Callable[[int, tuple[int, ...], int, int | None], int]
    tile: Callable[[int], int | None]
    compiler_options: tuple[CompilerOption, ...] = ()
    product_dtypes: tuple[str, ...] = ("float32",)
    transforms_whole_rows: bool = False
    widens_sums: bool = False
    blocks_threads: bool = False
    parts_from_dots: bool = False
    axis_by_axis: bool = False
    turns_narrow_scatters: bool = False
    orders_backward: bool = False
    orders_products: bool = False
    picks_by_sums: bool = False
    casts_in_loops: bool = False
    holds_microbatches: bool = False
    sends_updates: bool = False
    selects_after_gather: bool = False
    holds_before_gather: bool = False
