"""`ShardedOptimizer`, and the strategies side by side."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import is_key, is_traced, named_leaves, path_of
from jaxshard.core.layout import Config, Layout, Shardings
from jaxshard.core.precision import LossScale
from jaxshard.core.sharding import Engine
from jaxshard.core.specs import axes_in, axes_of, canonical
from jaxshard.mesh import REPLICA_AXIS, check_has_devices


class ShardedOptimizer(optax.GradientTransformationExtraArgs):
    """An optax optimizer whose state (and gradients, and params) are cut over a mesh; the training result is the same.

    A `GradientTransformationExtraArgs`, so it goes wherever optax takes one. Make it with `zero2` and its siblings.

    * `init(params)`: the state of `inner`, the same pytree, sharded from the start. NumPy, placed and abstract params
      all work; abstract ones give abstract state with its shardings.
    * `update(updates, state, params=None, **extra)`: global arrays under any sharding; the updates come back as the
      params lie. Inside a `jax.shard_map` over the data axes it takes this device's own gradients instead.
    """

    @property
    def _engine(self) -> Engine:
        return self.init.__self__  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def inner(self) -> optax.GradientTransformation:
        """The optax optimizer inside."""
        return self._engine.inner

    @property
    def mesh(self) -> Mesh:
        """A `jax.sharding.Mesh` (or, for plans, an `AbstractMesh`)."""
        return self._engine.mesh

    @property
    def config(self) -> Config:
        """The strategy and its options."""
        return self._engine.config

    @property
    def world_size(self) -> int:
        """The number of devices in the mesh."""
        return self.mesh.size

    @property
    def rank(self) -> int:
        """The mesh index of this process's first device."""
        check_has_devices("rank", self.mesh)
        here = jax.process_index()
        return next(i for i, device in enumerate(self.mesh.devices.flat) if device.process_index == here)

    def shardings(self, params: Any) -> Shardings:
        """Where params, grads (as `value_and_grad` returns them) and state live; `.specs` has the PartitionSpecs.

        Args:
          params: arrays or `ShapeDtypeStruct`s.

        Raises:
          TypeError: a leaf that is not floating.
          ValueError: specs that do not fit, or match nothing.
        """
        return self._engine.shardings(params)

    def layout(self, params: Any) -> Layout:
        """Where each leaf lives, with the reason and its bytes per device; print it."""
        return self._engine.layout(params, strict=True)

    def place(self, params: Any) -> Any:
        """A copy of the params at rest on the mesh; never an alias, so a donating step leaves the caller's alive.

        Raises:
          TypeError: a leaf that is not floating.
          ValueError: specs that do not fit, or match nothing.
        """
        return self._engine.place(params)

    def synchronize(self, tree: Any) -> Any:
        """Makes the copies of each array, on devices along the axes it is replicated over, equal: to the first's bits.

        Args:
          tree: params, state or any tree of arrays on the mesh.

        Raises:
          ValueError: an array that is not laid out over a mesh.
        """
        return self._engine.synchronize(tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardedOptimizer) and self._engine == other._engine

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._engine)

    def __repr__(self) -> str:
        shape = " x ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items() if size > 1) or "one device"
        return f"{self.config.strategy}({type(self.inner).__name__}, {shape})"


def engine_of(opt: Any, who: str) -> Engine:
    if not isinstance(opt, ShardedOptimizer):
        raise TypeError(
            f"{who} needs a ShardedOptimizer, got {type(opt).__name__}; put the chain inside: "
            "jaxshard.zero2(optax.chain(...), mesh)"
        )
    return opt._engine


def _make(strategy: str, inner: Any, mesh: Any, **options: Any) -> ShardedOptimizer:
    if not (isinstance(inner, tuple) and hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(f"{strategy}: needs an optax.GradientTransformation, got {type(inner).__name__}: {inner!r:.80}")
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{strategy}: needs a jax.sharding.Mesh, got {type(mesh).__name__}; see jaxshard.make_mesh")
    fixed = {"strategy"} if strategy == "hybrid" else {"strategy", "zero"}
    known = {field.name for field in dataclasses.fields(Config)} - fixed
    for name in options:
        if name not in known:
            raise TypeError(f"{strategy}: no option {name!r}; there are {sorted(known)}")
    for name, default in (("data_axes", ("data",)), ("auto_axes", ())):
        axes = options.get(name, default)
        options[name] = (axes,) if isinstance(axes, str) else tuple(axes)
    if options.get("moment_dtype") == "bfloat16":
        options["moment_dtype"] = jnp.bfloat16
    config = Config(strategy, **options)
    _check_mesh(mesh, config)  # pyright: ignore[reportArgumentType]
    engine = Engine(inner, mesh, config)  # pyright: ignore[reportArgumentType]
    return ShardedOptimizer(engine.init, engine.update)  # pyright: ignore[reportArgumentType]


def _check_mesh(mesh: Mesh, config: Config) -> None:
    needed = (*config.data_axes, *((REPLICA_AXIS,) if config.strategy == "hsdp" else ()))
    for axis in needed:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{config.strategy}: needs the mesh axis {axis!r}; the mesh has {tuple(mesh.axis_names)}. "
                "Make one with jaxshard.make_mesh, or name yours with data_axes="
            )
    if not config.data_axes or len(set(config.data_axes)) < len(config.data_axes) or REPLICA_AXIS in config.data_axes:
        raise ValueError(
            f"{config.strategy}: data_axes {config.data_axes} must name at least one axis, each once, and not "
            f"{REPLICA_AXIS!r}, which is never cut over"
        )
    _check_model_axes(mesh, config)
    kinds = {str(kind) for kind in mesh.axis_types}
    if len(kinds) > 1:
        raise ValueError(
            f"{config.strategy}: the mesh mixes axis types {sorted(kinds)}; make all Auto, or all Explicit"
        )
    if not isinstance(config.min_shard_size, int) or config.min_shard_size < 0:
        raise ValueError(
            f"{config.strategy}: min_shard_size {config.min_shard_size!r} must be a whole number, 0 or more"
        )
    _check_precision(config)


def _check_model_axes(mesh: Mesh, config: Config) -> None:
    for axis in config.auto_axes:
        if axis not in mesh.axis_names or axis in (*config.data_axes, REPLICA_AXIS):
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


def _check_precision(config: Config) -> None:
    for name in ("reduce_dtype", "master_dtype"):
        dtype = getattr(config, name)
        if dtype is not None and not _is_floating(dtype):
            raise ValueError(
                f"{config.strategy}: {name} {dtype!r} must be a floating dtype of 16 bits or more, such as jnp.float32"
            )
    if config.moment_dtype is not None and config.moment_dtype != jnp.bfloat16:
        raise ValueError(
            f"{config.strategy}: moment_dtype {config.moment_dtype!r} must be jnp.bfloat16, the one narrow dtype with "
            "the range that second moments need; or leave it out"
        )
    if config.stochastic_rounding and config.master_dtype is not None:
        raise ValueError(
            f"{config.strategy}: stochastic_rounding is for params without masters; drop it, or drop master_dtype"
        )
    if config.loss_scale is not None and not isinstance(config.loss_scale, LossScale):
        raise TypeError(
            f"{config.strategy}: loss_scale must be a jaxshard.LossScale, got {type(config.loss_scale).__name__}"
        )


def _is_floating(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16
    except TypeError:
        return False


_OPTIONS = """
    Args:
      inner: any optax optimizer or chain.
      mesh: a mesh with the data axes, of Auto or of Explicit axes; for plans an `AbstractMesh` will do.
      specs: how the model's own axes (tensor, pipeline) cut the params: a pytree, or prefix, of PartitionSpecs, or
        rules [(regex on the '/'-joined path, PartitionSpec), ...], first match wins. None: they do not.
      data_axes: the mesh axes that state, gradients and params are cut over, outermost first. The batch is split over
        these and over "replica", where the mesh has it.
      min_shard_size: leaves of fewer elements stay whole.
      reduce_dtype: the dtype in which gradients are summed over microbatches and devices; None: their own. Give float32
        for float16 params: sums come before the division, so in float16 they overflow the sooner the more devices.
      master_dtype: keeps masters of the params in this dtype in the state, cut like it; the params are their roundings.
        A parameter that is changed between steps (loaded, pruned) takes its master with it.
      moment_dtype: jnp.bfloat16 stores moments (state leaves shaped like a parameter, and no copy of params or of
        gradients: mu, nu, sums over steps) in it, rounded stochastically; the inner optimizer computes with them in its
        own dtype.
      stochastic_rounding: bfloat16 params, without masters, are updated in float32 and rounded up or down by chance.
      loss_scale: a `LossScale`, for float16; works in `train_step` alone.
      auto_axes: mesh axes that are left to XLA inside the loss too, for models written for its partitioner: `specs` and
        no collectives. Without it the loss sees this device's shards of what `specs` cut (see `jaxshard.tensor`).

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: `inner` is no gradient transformation, `mesh` is no mesh, or an option is unknown.
      ValueError: the mesh lacks an axis, or an option's value makes no sense.
"""


def ddp(inner: optax.GradientTransformation, mesh: Mesh, **options: Any) -> ShardedOptimizer:
    """Data parallel: all whole on each device; gradients are all-reduced once per step (Li et al. 2020)."""
    return _make("ddp", inner, mesh, **options)


def zero1(inner: optax.GradientTransformation, mesh: Mesh, **options: Any) -> ShardedOptimizer:
    """ZeRO-1: the state is cut 1/N; one reduce-scatter and one gather per step (Rajbhandari et al. 2020, 5.1)."""
    return _make("zero1", inner, mesh, **options)


def zero2(inner: optax.GradientTransformation, mesh: Mesh, **options: Any) -> ShardedOptimizer:
    """ZeRO-2: state and gradients are cut 1/N; a reduce-scatter per microbatch (Rajbhandari et al. 2020, 5.2)."""
    return _make("zero2", inner, mesh, **options)


def zero3(inner: optax.GradientTransformation, mesh: Mesh, **options: Any) -> ShardedOptimizer:
    """ZeRO-3 = FSDP: params too are cut 1/N, gathered where used (Rajbhandari et al. 2020, 5.3; Zhao et al. 2023)."""
    return _make("zero3", inner, mesh, **options)


def hsdp(inner: optax.GradientTransformation, mesh: Mesh, **options: Any) -> ShardedOptimizer:
    """Hybrid sharded: as zero3 over the data axes; copies over "replica" all-reduce their shards once per step."""
    return _make("hsdp", inner, mesh, **options)


def tensor_parallel(inner: optax.GradientTransformation, mesh: Mesh, specs: Any, **options: Any) -> ShardedOptimizer:
    """Layers cut as `specs` say (Shoeybi et al. 2020), for the blocks of `jaxshard.tensor`; data parallel around."""
    return _make("tensor_parallel", inner, mesh, specs=specs, **options)


def pipeline_parallel(inner: optax.GradientTransformation, mesh: Mesh, specs: Any, **options: Any) -> ShardedOptimizer:
    """Stacked layers cut into stages as `specs` say, run by `jaxshard.pipeline`; data parallel around."""
    return _make("pipeline_parallel", inner, mesh, specs=specs, **options)


def hybrid(
    inner: optax.GradientTransformation, mesh: Mesh, specs: Any = None, zero: int = 2, **options: Any
) -> ShardedOptimizer:
    """Tensor and pipeline parallel as `specs` say, and ZeRO level 0 (ddp), 1, 2 or 3 over the data axes."""
    if zero not in (0, 1, 2, 3) or isinstance(zero, bool):
        raise ValueError(f"hybrid: zero={zero!r} is no level of ZeRO; there are 0 (ddp), 1, 2 and 3")
    return _make("hybrid", inner, mesh, specs=specs, zero=zero, **options)


fsdp = zero3
for _strategy in (ddp, zero1, zero2, zero3, hsdp, tensor_parallel, pipeline_parallel, hybrid):
    _strategy.__doc__ = (_strategy.__doc__ or "") + "\n" + _OPTIONS


def specs_of(params: Any, data_axes: tuple[str, ...] = ("data",)) -> Any:
    """The PartitionSpecs that arrays carry now, data axes and "replica" left out: what to give as `specs=`.

    Args:
      params: arrays; those that lie on no mesh (NumPy, one device) have `PartitionSpec()`.
      data_axes: the axes to leave out.

    >>> specs_of({"w": jnp.ones((4, 4))})
    {'w': P()}
    """
    return jax.tree.map(lambda x: _model_spec(x, (*data_axes, REPLICA_AXIS)), params)


def _model_spec(x: Any, left_out: tuple[str, ...]) -> P:
    sharding = jax.typeof(x).sharding if is_traced(x) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return P()
    return canonical(tuple(a for a in axes_in(e) if a not in left_out) for e in sharding.spec)


def shard_batch(batch: Any, opt: ShardedOptimizer) -> Any:
    """This process's rows -> global arrays, split over the optimizer's batch axes.

    Args:
      batch: a pytree of arrays (rows of this process, ...); with one process, the whole batch.
      opt: says which mesh, and how it is split.

    Returns:
      Arrays of (rows of all processes, ...), each device holding its own rows.

    Raises:
      ValueError: rows that do not divide over this process's devices, named by leaf.
    """
    engine = engine_of(opt, "shard_batch")
    count = jax.process_count()
    for names, leaf in named_leaves(batch):
        rows = np.shape(leaf)[:1]
        if not rows or (rows[0] * count) % engine.num_batch_shards:
            raise ValueError(
                f"shard_batch: {path_of(names)} has shape {np.shape(leaf)}; its first dim x {count} processes "
                f"must be divisible by {engine.num_batch_shards} (the devices over {engine.batch_axes})"
            )
    sharding = NamedSharding(engine.mesh, P(engine.batch_axes))
    return jax.tree.map(lambda x: _from_local(x, sharding), batch)


def _from_local(x: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and is_key(x):
        data = _from_local(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.make_array_from_process_local_data(sharding, np.array(x))  # a copy: loaders use their buffers again
