"""The options of a strategy, typed for editors, and every check of them.

`Config` has their defaults; `Options` has their types and meaning, for `**options: Unpack[Options]`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, cast

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxshard.base.axes import REPLICA_AXIS, axes_of
from jaxshard.base.loss_scale import LossScale
from jaxshard.base.types import AnyMesh, DType, Tree, is_whole
from jaxshard.layout import memory_option
from jaxshard.system.text import nearest

Rules: TypeAlias = Sequence[tuple[str, P]]
Float: TypeAlias = Literal["float64", "float32", "float16", "bfloat16"] | type[Any] | np.dtype[Any]
Zero: TypeAlias = Literal[0, 1, 2, 3]


class Cuts(NamedTuple):
    """Whether a strategy cuts each of these over batch axes."""

    params: bool
    accumulators: bool  # the sums of gradients over microbatches
    state: bool  # and the gradients that reach the inner optimizer


class CutAxes(NamedTuple):
    """The mesh axes over which each of these is cut, outermost first."""

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
_AXES_OPTIONS = {"data_axes", "replica_axes", "auto_axes", "params_axes", "grads_axes", "state_axes"}
_LEVELS = ("ddp", "zero1", "zero2", "zero3")  # of ZeRO, inside "hybrid"


class CommonOptions(TypedDict, total=False):
    """The options of every strategy; all may be left out."""

    data_axes: str | tuple[str, ...]
    """The mesh axes that state, gradients and params are cut over, outermost first; ("data",) by default. The batch is
    split over these, and over `replica_axes`."""

    replica_axes: str | tuple[str, ...]
    """The mesh axes over which there are copies: the batch is split over them too, and what the data axes cut is
    all-reduced over them, once per step. By default "replica", where the mesh has it: on a mesh ("dp", "fsdp"),
    replica_axes="dp" with data_axes="fsdp" makes HSDP."""

    params_axes: str | tuple[str, ...]
    """The mesh axes that params are cut over, in place of the strategy's own choice; they must be among those of
    gradients."""

    grads_axes: str | tuple[str, ...]
    """The mesh axes that the sums of gradients are cut over, in place of the strategy's own choice; they must be among
    those of the state."""

    state_axes: str | tuple[str, ...]
    """The mesh axes that the state is cut over, in place of the strategy's own choice: data axes or replica axes.
    hsdp(..., state_axes=("data", "replica")) cuts the state over all devices, params and the sums of gradients within
    each replica."""

    regather: Literal["use", "step"]
    """Where params are cut, when a device gathers them: "use", the default, wherever the loss uses them, in each
    microbatch, forwards and backwards; "step", once per step, and it holds them whole until the gradients are made."""

    frozen: Tree | Sequence[str] | None
    """Params that are not trained, of any dtype: regular expressions on the '/'-joined path, or a tree, or prefix, of
    bools. They have no gradient and no state; they are cut, gathered and saved as others are. Their updates are 0."""

    min_shard_size: int
    """Leaves of fewer elements stay whole; 2048 by default."""

    reduce_dtype: Float | None
    """The dtype in which gradients are summed over microbatches and devices; None, the default: their own. Give float32
    for float16 params: sums come before the division, so in float16 sums over more devices overflow sooner."""

    master_dtype: Float | None
    """Keeps masters in the state: copies of the params in this dtype, cut as the state is. The params are the masters,
    rounded. If a parameter is changed between steps (loaded, pruned), its master changes with it."""

    moment_dtype: Literal["int8"] | Float | None
    """jnp.bfloat16 stores moments in bfloat16, "int8" in 8-bit codes with a scale for each block of 128, but for small
    leaves and tables; both are rounded stochastically, and the inner optimizer computes in its own dtype. Moments are
    state leaves with a parameter's shape that copy no param or gradient: mu, nu, sums."""

    state_memory: str | Sequence[tuple[str, str]]
    """"host" keeps the arrays of the state, moments and masters, in the host's memory, "host:0.5" half of their bytes;
    rules [(regex on the '/'-joined path in the state, "host" or "device"), ...] say which, first match wins. An update
    streams them through the devices. "device", the default."""

    stochastic_rounding: bool
    """bfloat16 params, without masters, are updated in float32 and rounded up or down by chance."""

    loss_scale: LossScale | None
    """Dynamic loss scaling for float16; works in `train_step` alone."""

    auto_axes: str | tuple[str, ...]
    """Mesh axes over which XLA partitions the loss too, for models that have `specs` and no collectives of their own.
    Over other axes the loss gets this device's shards of the params that `specs` cut (see `jaxshard.tensor`)."""

    rows: Literal["apart", "mixed"]
    """"apart", the default: a loss that is no mean over rows, each by itself, gets a warning. "mixed": it is meant so
    (a BatchNorm with statistics of each device, a sum)."""


class Options(CommonOptions, total=False):
    """The options of `ddp`, `zero1`, `zero2`, `zero3` and `hsdp`: the common ones, and the model's specs.

    In a line each; the site's reference has more:

    * specs: how the model's own axes (tensor, pipeline) cut the params.
    * data_axes, replica_axes: the mesh axes that cut, and those over which there are copies.
    * params_axes, grads_axes, state_axes: the axes that cut each of these, in place of the strategy's choice.
    * regather: "use" or "step": gathers params wherever they are used, or once per step.
    * frozen: params that are not trained, by rules or a tree of bools.
    * min_shard_size: leaves of fewer elements stay whole; 2048.
    * reduce_dtype: the dtype in which gradients are summed.
    * master_dtype: the dtype of masters, copies of the params in the state.
    * moment_dtype: jnp.bfloat16 or "int8", for the optimizer's moments.
    * stochastic_rounding: updates bf16 params in float32, without masters.
    * state_memory: "host" keeps the state in the host's memory.
    * loss_scale: a `LossScale`, for fp16.
    * auto_axes: mesh axes that XLA's partitioner has.
    * rows: "mixed" for a loss that is meant to mix rows of a device.
    """

    specs: Tree | Rules | None
    """How the model's own axes (tensor, pipeline) cut the params: a pytree, or prefix, of PartitionSpecs, or rules
    [(regex on the '/'-joined path, PartitionSpec), ...], first match wins. None, the default: they cut nothing."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A strategy and its options, as `zero2(...)` and its siblings take them; `Options` says what each means."""

    strategy: str
    specs: Tree | Rules | None = dataclasses.field(default=None, hash=False)
    data_axes: tuple[str, ...] = ("data",)
    replica_axes: tuple[str, ...] = (REPLICA_AXIS,)
    params_axes: tuple[str, ...] | None = None
    grads_axes: tuple[str, ...] | None = None
    state_axes: tuple[str, ...] | None = None
    regather: Literal["use", "step"] = "use"
    frozen: Tree | Sequence[str] | None = dataclasses.field(default=None, hash=False)
    min_shard_size: int = 2**11
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
        """Which of params, accumulators and state are cut over batch axes."""
        return Cuts(*(bool(axes) for axes in self.cut_axes))

    @property
    def cut_axes(self) -> CutAxes:
        """The axes that params, accumulators and state are cut over, each of them after those that come before it."""
        params, accumulators, state = self.asked_axes
        accumulators = (*params, *(axis for axis in accumulators if axis not in params))
        return CutAxes(params, accumulators, (*accumulators, *(axis for axis in state if axis not in accumulators)))

    @property
    def asked_axes(self) -> CutAxes:
        """As `cut_axes`, in the order in which the options name them."""
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
        """Whether the inner optimizer gets params in a wider dtype, so that new params are its results, rounded."""
        return self.master_dtype is not None or self.stochastic_rounding


def checked_config(strategy: str, inner: object, mesh: object, options: dict[str, Any]) -> Config:
    """The config of a strategy, after every check that needs no params.

    Raises:
      TypeError: `inner` is no gradient transformation, `mesh` is no mesh, or an option is unknown.
      ValueError: the mesh lacks an axis, or an option's value makes no sense.
    """
    check_inner(strategy, inner)
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{strategy}: needs a jax.sharding.Mesh, got {type(mesh).__name__}; see jaxshard.make_mesh")
    _check_names(strategy, options)
    options = dict(options)
    for name in options.keys() & _AXES_OPTIONS:
        options[name] = _axis_names(strategy, name, options[name])
    for name, dtype in (("bfloat16", jnp.bfloat16), ("int8", jnp.int8)):
        if options.get("moment_dtype") == name:
            options["moment_dtype"] = dtype
    if isinstance(options.get("frozen"), str):
        options["frozen"] = (options["frozen"],)
    if "state_memory" in options:
        options["state_memory"] = memory_option.checked(strategy, options["state_memory"], mesh)
    config = Config(strategy, **options)
    _check_zero(config)
    _check_data_axes(mesh, config)
    _check_nested(mesh, config)
    _check_model_axes(mesh, config)
    _check_mesh_types(mesh, config)
    _check_numbers(config)
    return config


def check_inner(who: str, inner: object) -> None:
    """Raises a TypeError unless `inner` is an optax optimizer."""
    if not (issubclass(type(inner), tuple) and hasattr(inner, "init") and hasattr(inner, "update")):
        cure = "; give its .gradient_transformation()" if hasattr(inner, "gradient_transformation") else ""
        raise TypeError(
            f"{who}: needs an optax.GradientTransformation, got {type(inner).__name__}: {inner!r:.80}{cure}"
        )


def check_flag(who: str, name: str, value: object) -> None:
    """Raises a TypeError unless `value` is True or False: the text "False" would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{who}: {name}={value!r:.80} is a {type(value).__name__}; give True or False")


def _axis_names(strategy: str, name: str, axes: object) -> tuple[str, ...]:
    names = cast("Sequence[object]", axes if isinstance(axes, list | tuple) else (axes,))
    found = tuple(axis for axis in names if isinstance(axis, str))
    if len(found) < len(names):
        raise TypeError(f"{strategy}: {name}={axes!r:.80} must be a mesh axis's name, or a tuple of such names")
    return found


def _check_names(strategy: str, options: dict[str, Any]) -> None:
    own = {"zero"} if strategy == "hybrid" else set[str]()
    known = sorted(Options.__annotations__.keys() | own)
    for name in options:
        if name not in known:
            hint = nearest(name, known)
            raise TypeError(f"{strategy}: no option {name!r}{hint or ';'} There are {known}")


def _check_zero(config: Config) -> None:
    if config.strategy == "hybrid" and not (is_whole(config.zero, 0) and config.zero in (0, 1, 2, 3)):
        raise ValueError(f"hybrid: zero={config.zero!r} is no level of ZeRO; there are 0 (ddp), 1, 2 and 3")


def _check_data_axes(mesh: AnyMesh, config: Config) -> None:
    given = config.strategy == "hsdp" or config.replica_axes != (REPLICA_AXIS,)
    for axis in (*config.data_axes, *(config.replica_axes if given else ())):
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{config.strategy}: needs the mesh axis {axis!r}; the mesh has {tuple(mesh.axis_names)}. "
                "Make one with jaxshard.make_mesh, or name yours with data_axes= and replica_axes="
            )
    both = (*config.replica_axes, *config.data_axes)
    if not config.data_axes or len(set(both)) < len(both):
        raise ValueError(
            f"{config.strategy}: data_axes {config.data_axes} and replica_axes {config.replica_axes} must name at "
            "least one data axis, and each axis once: an axis with copies is never cut over"
        )
    if config.strategy == "hsdp" and not config.replica_axes:
        raise ValueError("hsdp: replica_axes () names no axis with copies; name one, or take zero3")


def _check_nested(mesh: AnyMesh, config: Config) -> None:
    """Raises a ValueError unless params' axes are among gradients', these among state's, and all split the batch."""
    known = tuple(axis for axis in (*config.replica_axes, *config.data_axes) if axis in mesh.axis_names)
    for name in ("params_axes", "grads_axes", "state_axes"):
        for axis in getattr(config, name) or ():
            if axis not in known:
                raise ValueError(
                    f"{config.strategy}: {name} {getattr(config, name)} names {axis!r}, over which the batch is not "
                    f"split; there are {known}. Name it in data_axes= or replica_axes=, too, or leave it out"
                )
    names, wanted = ("params_axes", "grads_axes", "state_axes"), config.asked_axes
    for inner, outer, few, many in zip(names, names[1:], wanted, wanted[1:], strict=False):
        if missing := [axis for axis in few if axis not in many]:
            raise ValueError(
                f"{config.strategy}: {inner} {few} must be among {outer} {many}, which lack {missing}: give "
                f"{outer}={(*few, *(axis for axis in many if axis not in few))}, or {inner}="
                f"{tuple(axis for axis in few if axis in many)}"
            )


def _check_model_axes(mesh: AnyMesh, config: Config) -> None:
    for axis in config.auto_axes:
        if axis not in mesh.axis_names or axis in (*config.data_axes, *config.replica_axes):
            raise ValueError(
                f"{config.strategy}: auto_axes {config.auto_axes} must be axes of the mesh {tuple(mesh.axis_names)} "
                "that the model is cut over, such as 'tensor'"
            )
    if config.auto_axes and AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            f"{config.strategy}: auto_axes needs a mesh of Auto axes; jaxshard.make_mesh makes one (jax.make_mesh with "
            "axis_types=)"
        )
    if config.strategy in ("tensor_parallel", "pipeline_parallel") and not axes_of(config.specs):
        raise ValueError(
            f"{config.strategy}: the specs {config.specs!r:.80} name no axis, so nothing would be cut; give a "
            "PartitionSpec for each leaf that is, or rules [(regex, PartitionSpec), ...]"
        )


def _check_mesh_types(mesh: AnyMesh, config: Config) -> None:
    if AxisType.Manual in mesh.axis_types:
        manual = [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual]
        raise ValueError(
            f"{config.strategy}: the mesh's axes {manual} are Manual, as inside a shard_map; give the mesh itself, of "
            "Auto or of Explicit axes (jaxshard.make_mesh)"
        )
    kinds = {str(kind) for kind in mesh.axis_types}
    if len(kinds) > 1:
        raise ValueError(
            f"{config.strategy}: the mesh mixes axis types {sorted(kinds)}; make all Auto, or all Explicit"
        )


def _check_numbers(config: Config) -> None:
    check_flag(config.strategy, "stochastic_rounding", config.stochastic_rounding)
    if config.rows not in ("apart", "mixed"):
        raise ValueError(
            f'{config.strategy}: rows={config.rows!r:.80} is unknown; give "mixed" for a loss that is meant to mix '
            'the rows of a device, or leave it out ("apart")'
        )
    if config.regather not in ("use", "step"):
        raise ValueError(f'{config.strategy}: regather={config.regather!r:.80} is unknown; give "step" or "use"')
    if config.regather == "step" and not config.cuts.params:
        raise ValueError(f'{config.strategy}: regather="step" is for params that are cut (zero3, hsdp); leave it out')
    if not is_whole(config.min_shard_size, 0):
        raise ValueError(
            f"{config.strategy}: min_shard_size {config.min_shard_size!r} must be a whole number, 0 or more"
        )
    for name, dtype in (("reduce_dtype", config.reduce_dtype), ("master_dtype", config.master_dtype)):
        if dtype is not None and not _is_floating(dtype):
            raise ValueError(
                f"{config.strategy}: {name} {dtype!r} must be a floating dtype of 16 bits or more, such as jnp.float32"
            )
    if config.moment_dtype is not None and config.moment_dtype not in (jnp.bfloat16, jnp.int8):
        raise ValueError(
            f"{config.strategy}: moment_dtype {config.moment_dtype!r} must be jnp.bfloat16, which has the range that "
            'second moments need, or "int8", for codes that have it; or leave it out'
        )
    if config.stochastic_rounding and config.master_dtype is not None:
        raise ValueError(
            f"{config.strategy}: stochastic_rounding is for params without masters; drop it, or drop master_dtype"
        )
    if not _is_loss_scale(config.loss_scale):
        raise TypeError(
            f"{config.strategy}: loss_scale must be a jaxshard.LossScale, got {type(config.loss_scale).__name__}"
        )


def _in_short(value: object) -> str:
    """A dtype's name, or the first 80 characters of a value's repr."""
    return jnp.dtype(value).name if isinstance(value, type) else f"{value!r:.80}"


def _is_loss_scale(value: object) -> bool:
    return value is None or isinstance(value, LossScale)


def _is_floating(dtype: DType) -> bool:
    try:
        return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize >= 2
    except TypeError:
        return False
