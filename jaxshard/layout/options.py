"""The options of a strategy, typed for editors; `checks` checks them.

`Config` has their defaults; `Options` has their types and documentation, for `**options: Unpack[Options]`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxshard.base.loss_scale import LossScale
from jaxshard.base.types import REPLICA_AXIS, AxisSizes, Tree

Rules: TypeAlias = Sequence[tuple[str, P]]
Float: TypeAlias = Literal["float64", "float32", "float16", "bfloat16"] | type[Any] | np.dtype[Any]
Zero: TypeAlias = Literal[0, 1, 2, 3]


class Cuts(NamedTuple):
    """Whether a strategy shards params, accumulators and state over batch axes."""

    params: bool
    accumulators: bool  # the sums of gradients over microbatches
    state: bool  # and the gradients that reach the inner optimizer


class CutAxes(NamedTuple):
    """The mesh axes over which params, accumulators and state are sharded, outermost first."""

    params: tuple[str, ...]
    accumulators: tuple[str, ...]
    state: tuple[str, ...]


STRATEGIES = {
    "ddp": Cuts(params=False, accumulators=False, state=False),
    "zero1": Cuts(params=False, accumulators=False, state=True),
    "zero2": Cuts(params=False, accumulators=True, state=True),
    "zero3": Cuts(params=True, accumulators=True, state=True),
    "hsdp": Cuts(params=True, accumulators=True, state=True),
    "tensor_parallel": Cuts(params=False, accumulators=False, state=False),
    "pipeline_parallel": Cuts(params=False, accumulators=False, state=False),
}
AXES_OPTIONS = {"data_axes", "replica_axes", "auto_axes", "params_axes", "grads_axes", "state_axes"}
_LEVELS = ("ddp", "zero1", "zero2", "zero3")  # of ZeRO, inside "hybrid"


class CommonOptions(TypedDict, total=False):
    """The options of every strategy; all are optional."""

    data_axes: str | tuple[str, ...]
    """The mesh axes that state, gradients and params are sharded over, outermost first; ("data",) by default. The batch
    is split over these, and over `replica_axes`."""

    replica_axes: str | tuple[str, ...]
    """The replica axes: the batch is split over them, too, and gradient shards are all-reduced over them, once per
    step. By default "replica", if the mesh has it. On a mesh ("dp", "fsdp"), replica_axes="dp" with data_axes="fsdp"
    makes HSDP."""

    params_axes: str | tuple[str, ...]
    """The mesh axes that params are sharded over, in place of the strategy's own choice; they must be among those of
    gradients."""

    grads_axes: str | tuple[str, ...]
    """The mesh axes that the sums of gradients are sharded over, in place of the strategy's own choice; they must be
    among those of the state."""

    state_axes: str | tuple[str, ...]
    """The mesh axes that the state is sharded over, in place of the strategy's own choice: data axes or replica axes.
    hsdp(..., state_axes=("data", "replica")) shards the state over all devices, params and the sums of gradients within
    each replica. By default, matrices that the update needs whole (Muon's) have their state over the replicas too."""

    regather: Literal["use", "step", "backward"]
    """When devices gather sharded params: "use", the default, wherever the loss uses them, in each microbatch, and
    again where `jax.checkpoint` recomputes that use; "backward", in the backward pass again, which then keeps none;
    "step", once per step, and devices keep them until the gradients are computed."""

    frozen: Tree | Sequence[str] | None
    """Params that are not trained, of any dtype: regular expressions on the '/'-joined path, or a tree (or prefix) of
    bools. They have no gradient and no state; they are sharded, gathered and saved like others. Their updates are 0."""

    min_shard_size: int
    """Leaves of fewer elements stay replicated; 2048 by default."""

    uneven: Literal["whole", "blocks"]
    """How a leaf lies that N devices divide along no single dim: "whole", the default, on every device; "blocks", cut
    along two dims or more (of 8 devices, 2 cut the first dim and 4 the second) where these divide. Params and state
    then lie on a mesh of the same devices with more axes."""

    reduce_dtype: Float | None
    """The dtype in which gradients are summed over microbatches and devices; None, the default: their own. Give float32
    for float16 params: sums come before the division, so in float16 sums over more devices overflow sooner. If the loss
    sees all rows (`loss_view`), XLA sums over devices, in the dtype in which the gradients are computed."""

    master_dtype: Float | None
    """Keeps masters in the state: copies of the params in this dtype, sharded like the state. The params are the
    rounded masters. If you change a parameter between steps (load, prune), its master changes with it."""

    moment_dtype: Literal["int8"] | Float | None
    """jnp.bfloat16 stores moments in bfloat16, "int8" in 8-bit codes with a scale for each block of 128, but for small
    leaves and tables; both are rounded stochastically, and the inner optimizer computes in its own dtype. Moments are
    state leaves with a parameter's shape that copy no param or gradient: mu, nu, sums."""

    state_memory: str | Sequence[tuple[str, str]]
    """"host" keeps the arrays of the state, moments and masters, in the host's memory, "host:0.5" half of their bytes;
    rules [(regex on the '/'-joined path in the state, "host" or "device"), ...] say which, first match wins. An update
    streams them through the devices. "device", the default."""

    stochastic_rounding: bool
    """Updates bfloat16 params in float32, without masters, and rounds them stochastically."""

    loss_scale: LossScale | None
    """Dynamic loss scaling for float16; works only in `train_step`."""

    auto_axes: str | tuple[str, ...]
    """Mesh axes over which XLA partitions the loss too, for models that have `specs` and no collectives of their own.
    Over other axes the loss gets this device's shards of the params that `specs` shard (see `jaxshard.tensor`)."""

    rows: Literal["apart", "mixed"]
    """Deprecated. "mixed" is `loss_view="local"`, for a loss that mixes the rows of each device on purpose."""


class Options(CommonOptions, total=False):
    """The options of `ddp`, `zero1`, `zero2`, `zero3` and `hsdp`: the common ones, and the model's specs.

    One line each; the site's reference has more:

    * specs: how the model's own axes (tensor, pipeline) shard the params.
    * data_axes, replica_axes: the mesh axes that shard, and those with replicas.
    * params_axes, grads_axes, state_axes: the axes that shard each of these, instead of the strategy's choice.
    * regather: "use", "backward" or "step": gathers params wherever the loss uses them; for the backward pass again,
      which then keeps none; or once per step.
    * frozen: params that are not trained, by rules or a tree of bools.
    * min_shard_size: leaves of fewer elements stay replicated; 2048.
    * uneven: how a leaf lies that the devices divide along no single dim: "blocks", cut along several; or "whole".
    * reduce_dtype: the dtype in which gradients are summed; by default the one in which the loss computes them.
    * master_dtype: the dtype of masters, copies of the params in the state.
    * moment_dtype: jnp.bfloat16 or "int8", for the optimizer's moments.
    * stochastic_rounding: updates bf16 params in float32, without masters.
    * state_memory: "host" keeps the state in the host's memory.
    * loss_scale: a `LossScale`, for fp16.
    * auto_axes: mesh axes that are left to XLA's partitioner.
    * rows: deprecated; see `loss_view` of `train_step`.
    """

    specs: Tree | Rules | None
    """How the model's own axes (tensor, pipeline) shard the params: a pytree (or prefix) of PartitionSpecs, or rules
    [(regex on the '/'-joined path, PartitionSpec), ...], first match wins. None, the default: they shard nothing."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A strategy and its options, as `zero2(...)` and its siblings take them; `Options` documents them."""

    strategy: str
    specs: Tree | Rules | None = dataclasses.field(default=None, hash=False)
    data_axes: tuple[str, ...] = ("data",)
    replica_axes: tuple[str, ...] = (REPLICA_AXIS,)
    params_axes: tuple[str, ...] | None = None
    grads_axes: tuple[str, ...] | None = None
    state_axes: tuple[str, ...] | None = None
    regather: Literal["use", "step", "backward"] = "use"
    frozen: Tree | Sequence[str] | None = dataclasses.field(default=None, hash=False)
    min_shard_size: int = 2**11
    uneven: Literal["whole", "blocks"] = "whole"
    reduce_dtype: Float | None = None
    master_dtype: Float | None = None
    moment_dtype: Literal["int8"] | Float | None = None
    state_memory: str | Sequence[tuple[str, str]] = "device"
    stochastic_rounding: bool = False
    loss_scale: LossScale | None = None
    auto_axes: tuple[str, ...] = ()
    rows: Literal["apart", "mixed"] = "apart"
    zero: int | None = None  # of "hybrid" alone

    @property
    def cuts(self) -> Cuts:
        """Which of params, accumulators and state are sharded over batch axes."""
        return Cuts(*(bool(axes) for axes in self.cut_axes))

    @property
    def cut_axes(self) -> CutAxes:
        """The axes that shard each; state axes start with accumulator axes, which start with param axes."""
        params, accumulators, state = self.asked_axes
        accumulators = (*params, *(axis for axis in accumulators if axis not in params))
        return CutAxes(params, accumulators, (*accumulators, *(axis for axis in state if axis not in accumulators)))

    def over_replicas(self, sizes: AxisSizes) -> "Config":
        """The same, its state cut over the replicas too; itself if it has no state axes of its own to extend."""
        more = tuple(axis for axis in self.replica_axes if sizes.get(axis, 1) > 1)
        if not more or self.state_axes is not None or not self.cuts.state:
            return self
        return dataclasses.replace(self, state_axes=(*self.cut_axes.state, *more))

    @property
    def asked_axes(self) -> CutAxes:
        """As `cut_axes`, in the order that the options give."""
        level = STRATEGIES[self.strategy if self.zero is None else _LEVELS[self.zero]]
        given = (self.params_axes, self.grads_axes, self.state_axes)
        usual = (self.data_axes if cut else () for cut in level)
        return CutAxes(*(own if axes is None else axes for axes, own in zip(given, usual, strict=True)))

    @property
    def given(self) -> list[str]:
        """The options that differ from their defaults, as `name=value`; `specs`, which may be long, are left out."""
        fields = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)[2:]]
        return [f"{field.name}={_in_short(value)}" for field, value in fields if value != field.default]

    @property
    def widens(self) -> bool:
        """Whether the inner optimizer gets params in a wider dtype; the new params are then its rounded results."""
        return self.master_dtype is not None or self.stochastic_rounding


def _in_short(value: object) -> str:
    """A dtype's name, or the first 80 characters of a value's repr."""
    return jnp.dtype(value).name if isinstance(value, type) else f"{value!r:.80}"
