"""`ShardedOptimizer`, and the strategies side by side."""

import dataclasses
from typing import Any, Unpack

import jax
import optax

from jaxshard.base.tree import check_alive, check_same_structure
from jaxshard.base.types import AnyMesh, Params, T, Tree
from jaxshard.core import state as states
from jaxshard.core.layout import Layout, Shardings
from jaxshard.core.local_view import local_update
from jaxshard.core.options import CommonOptions, Config, Options, Rules, Zero, checked_config
from jaxshard.core.sharding import Setup
from jaxshard.core.update import advance
from jaxshard.inner.update import fast
from jaxshard.mesh import check_has_devices


@dataclasses.dataclass(frozen=True)
class _Methods:
    """The two functions of a `ShardedOptimizer`, bound to its setup, so that it can be copied and pickled."""

    setup: Setup

    def init(self, params: Tree) -> optax.OptState:
        return states.init(self.setup, params)

    def update(
        self, updates: Params, state: optax.OptState, params: Params | None = None, **extra: Tree
    ) -> tuple[Params, optax.OptState]:
        setup = self.setup
        if params is not None:
            check_same_structure("update: the gradients", fast(updates), fast(params), "parameter")
        elif setup.config.widens:
            raise ValueError(
                "update: master weights (master_dtype) and stochastic_rounding need the params: "
                "update(updates, state, params)"
            )
        if setup.config.loss_scale is not None:
            raise ValueError("update: the loss is scaled, and the scale kept up, by train_step alone; use that")
        for what, tree in (("the gradients", updates), ("the state", state), ("the params", params)):
            check_alive(f"update: {what}", tree)
        if states.is_local(setup):
            return local_update(setup, updates, state, params, extra)
        expected = setup.expected_state(state, updates if params is None else params)
        states.check_state("update", state, expected)
        return advance(setup, updates, state, params, extra, want="updates")


class ShardedOptimizer(optax.GradientTransformationExtraArgs):
    """An optax optimizer whose state (and gradients, and params) are cut over a mesh; the training result is the same.

    A `GradientTransformationExtraArgs`, so it goes wherever optax takes one. Make it with `zero2` and its siblings.

    * `init(params)`: the state of `inner`, the same pytree, sharded from the start. NumPy, placed and abstract params
      all work; abstract ones give abstract state with its shardings.
    * `update(updates, state, params=None, **extra)`: takes global arrays under any sharding; the updates are laid out
      as the params are. Inside a `jax.shard_map` over the data axes it takes this device's own gradients instead.
    """

    @property
    def setup(self) -> Setup:
        """The inner optimizer, mesh and strategy, and what follows from them for given params."""
        return self.init.__self__.setup  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def inner(self) -> optax.GradientTransformation:
        """The optax optimizer inside."""
        return self.setup.inner

    @property
    def mesh(self) -> AnyMesh:
        """A `jax.sharding.Mesh` (or, for plans, an `AbstractMesh`)."""
        return self.setup.mesh

    @property
    def config(self) -> Config:
        """The strategy and its options."""
        return self.setup.config

    @property
    def world_size(self) -> int:
        """The number of devices in the mesh."""
        return self.mesh.size

    @property
    def rank(self) -> int:
        """The index in the mesh of this process's first device; a ValueError for an abstract mesh."""
        devices, here = check_has_devices("rank", self.mesh).devices, jax.process_index()
        return next(i for i, device in enumerate(devices.flat) if device.process_index == here)

    def shardings(self, params: Tree) -> Shardings:
        """Where params, grads (as `value_and_grad` returns them) and state live; `.specs` has the PartitionSpecs.

        Args:
          params: arrays or `ShapeDtypeStruct`s.

        Raises:
          TypeError: a leaf that is not floating.
          ValueError: specs that do not fit their leaf, or match no leaf.
        """
        return self.setup.shardings(params)

    def layout(self, params: Tree) -> Layout:
        """Where each leaf lives, with the reason and its bytes per device, as a table to print.

        Raises:
          TypeError: a leaf that is not floating.
          ValueError: specs that do not fit, or match nothing.
        """
        self.setup.strictly(params)
        return self.setup.with_state(params)

    def place(self, params: Params) -> Params:
        """Copies the params to where they live on the mesh; no alias, so a donating step leaves the caller's alive.

        Raises:
          TypeError: a leaf that is not floating.
          ValueError: specs that do not fit, or match nothing.
        """
        return states.place(self.setup, params)

    def synchronize(self, tree: T) -> T:
        """Makes all copies of each replicated array equal, bit for bit, to the copy on the first device that has one.

        Args:
          tree: params, state or any tree of arrays on the mesh.

        Raises:
          ValueError: an array that is not laid out over a mesh.
        """
        return states.synchronize(self.setup, tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardedOptimizer) and self.setup == other.setup

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.setup)

    def __repr__(self) -> str:
        shape = " x ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items() if size > 1) or "one device"
        return f"{self.config.strategy}({type(self.inner).__name__}, {shape})"


def setup_of(opt: object, who: str) -> Setup:
    """The setup of a `ShardedOptimizer`; `who` names the caller in the error.

    Raises:
      TypeError: it is another kind of optimizer.
    """
    if not isinstance(opt, ShardedOptimizer):
        raise TypeError(
            f"{who} needs a ShardedOptimizer, got {type(opt).__name__}; put the chain inside: "
            "jaxshard.zero2(optax.chain(...), mesh)"
        )
    return opt.setup


def _make(strategy: str, inner: optax.GradientTransformation, mesh: AnyMesh, **options: Any) -> ShardedOptimizer:
    methods = _Methods(Setup(inner, mesh, checked_config(strategy, inner, mesh, options)))
    return ShardedOptimizer(methods.init, methods.update)  # pyright: ignore[reportArgumentType]


def ddp(inner: optax.GradientTransformation, mesh: AnyMesh, **options: Unpack[Options]) -> ShardedOptimizer:
    """Data parallel: each device has everything whole; gradients are all-reduced once per step (Li et al. 2020).

    Args:
      inner: any optax optimizer or chain.
      mesh: a mesh with the data axes, of Auto or of Explicit axes; for plans an `AbstractMesh` will do.
      **options: specs, data_axes, min_shard_size, reduce_dtype, master_dtype, moment_dtype, stochastic_rounding,
        loss_scale, auto_axes; `jaxshard.Options` says what each does.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: `inner` is no gradient transformation, `mesh` is no mesh, or an option is unknown.
      ValueError: the mesh lacks an axis, or an option's value makes no sense.

    >>> from jaxshard.mesh import abstract_mesh
    >>> ddp(optax.adamw(1e-3), abstract_mesh(8))
    ddp(GradientTransformationExtraArgs, data 8)
    """
    return _make("ddp", inner, mesh, **options)


def zero1(inner: optax.GradientTransformation, mesh: AnyMesh, **options: Unpack[Options]) -> ShardedOptimizer:
    """ZeRO-1: the state is cut N ways; one reduce-scatter and one gather per step (Rajbhandari et al. 2020, 5.1).

    Args:
      inner: any optax optimizer or chain.
      mesh: a mesh with the data axes, of Auto or of Explicit axes; for plans an `AbstractMesh` will do.
      **options: specs, data_axes, min_shard_size, reduce_dtype, master_dtype, moment_dtype, stochastic_rounding,
        loss_scale, auto_axes; `jaxshard.Options` says what each does.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: `inner` is no gradient transformation, `mesh` is no mesh, or an option is unknown.
      ValueError: the mesh lacks an axis, or an option's value makes no sense.

    >>> from jaxshard.mesh import abstract_mesh
    >>> zero1(optax.adamw(1e-3), abstract_mesh(8))
    zero1(GradientTransformationExtraArgs, data 8)
    """
    return _make("zero1", inner, mesh, **options)


def zero2(inner: optax.GradientTransformation, mesh: AnyMesh, **options: Unpack[Options]) -> ShardedOptimizer:
    """ZeRO-2: state and gradients are cut N ways; a reduce-scatter per microbatch (Rajbhandari et al. 2020, 5.2).

    Args:
      inner: any optax optimizer or chain.
      mesh: a mesh with the data axes, of Auto or of Explicit axes; for plans an `AbstractMesh` will do.
      **options: specs, data_axes, min_shard_size, reduce_dtype, master_dtype, moment_dtype, stochastic_rounding,
        loss_scale, auto_axes; `jaxshard.Options` says what each does.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: `inner` is no gradient transformation, `mesh` is no mesh, or an option is unknown.
      ValueError: the mesh lacks an axis, or an option's value makes no sense.

    >>> from jaxshard.mesh import abstract_mesh
    >>> zero2(optax.adamw(1e-3), abstract_mesh(8))
    zero2(GradientTransformationExtraArgs, data 8)
    """
    return _make("zero2", inner, mesh, **options)


def zero3(inner: optax.GradientTransformation, mesh: AnyMesh, **options: Unpack[Options]) -> ShardedOptimizer:
    """ZeRO-3 = FSDP: params too are cut N ways, gathered where used (Rajbhandari et al. 2020, 5.3; Zhao et al. 2023).

    Args:
      inner: any optax optimizer or chain.
      mesh: a mesh with the data axes, of Auto or of Explicit axes; for plans an `AbstractMesh` will do.
      **options: specs, data_axes, min_shard_size, reduce_dtype, master_dtype, moment_dtype, stochastic_rounding,
        loss_scale, auto_axes; `jaxshard.Options` says what each does.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: `inner` is no gradient transformation, `mesh` is no mesh, or an option is unknown.
      ValueError: the mesh lacks an axis, or an option's value makes no sense.

    >>> from jaxshard.mesh import abstract_mesh
    >>> zero3(optax.adamw(1e-3), abstract_mesh(8))
    zero3(GradientTransformationExtraArgs, data 8)
    """
    return _make("zero3", inner, mesh, **options)


fsdp = zero3


def hsdp(inner: optax.GradientTransformation, mesh: AnyMesh, **options: Unpack[Options]) -> ShardedOptimizer:
    """Hybrid sharded: as zero3 over the data axes; copies over "replica" all-reduce their shards once per step.

    Args:
      inner: any optax optimizer or chain.
      mesh: a mesh with the data axes and "replica", of Auto or of Explicit axes, or an `AbstractMesh`.
      **options: specs, data_axes, min_shard_size, reduce_dtype, master_dtype, moment_dtype, stochastic_rounding,
        loss_scale, auto_axes; `jaxshard.Options` says what each does.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: `inner` is no gradient transformation, `mesh` is no mesh, or an option is unknown.
      ValueError: the mesh lacks an axis, or an option's value makes no sense.

    >>> from jaxshard.mesh import abstract_mesh
    >>> hsdp(optax.adamw(1e-3), abstract_mesh(8, replica=2))
    hsdp(GradientTransformationExtraArgs, replica 2 x data 4)
    """
    return _make("hsdp", inner, mesh, **options)


def tensor_parallel(
    inner: optax.GradientTransformation, mesh: AnyMesh, specs: Tree | Rules, **options: Unpack[CommonOptions]
) -> ShardedOptimizer:
    """Layers cut as `specs` say (Shoeybi et al. 2020), for the blocks of `jaxshard.tensor`; data parallel around.

    Args:
      inner: any optax optimizer or chain.
      mesh: a mesh with the data axes, of Auto or of Explicit axes; for plans an `AbstractMesh` will do.
      specs: how the model's own axes cut the params: a pytree, or prefix, of PartitionSpecs, or rules
        [(regex on the '/'-joined path, PartitionSpec), ...], first match wins.
      **options: data_axes, min_shard_size, reduce_dtype, master_dtype, moment_dtype, stochastic_rounding, loss_scale,
        auto_axes; `jaxshard.Options` says what each does.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: `inner` is no gradient transformation, `mesh` is no mesh, or an option is unknown.
      ValueError: the mesh lacks an axis, or an option's value makes no sense.

    >>> from jax.sharding import PartitionSpec as P
    >>> from jaxshard.mesh import abstract_mesh
    >>> tensor_parallel(optax.adamw(1e-3), abstract_mesh(8, tensor=2), [("kernel", P(None, "tensor"))])
    tensor_parallel(GradientTransformationExtraArgs, data 4 x tensor 2)
    """
    return _make("tensor_parallel", inner, mesh, specs=specs, **options)


def pipeline_parallel(
    inner: optax.GradientTransformation, mesh: AnyMesh, specs: Tree | Rules, **options: Unpack[CommonOptions]
) -> ShardedOptimizer:
    """Stacked layers cut into stages as `specs` say, run by `jaxshard.pipeline`; data parallel around.

    Args:
      inner: any optax optimizer or chain.
      mesh: a mesh with the data axes, of Auto or of Explicit axes; for plans an `AbstractMesh` will do.
      specs: how the model's own axes cut the params: a pytree, or prefix, of PartitionSpecs, or rules
        [(regex on the '/'-joined path, PartitionSpec), ...], first match wins.
      **options: data_axes, min_shard_size, reduce_dtype, master_dtype, moment_dtype, stochastic_rounding, loss_scale,
        auto_axes; `jaxshard.Options` says what each does.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: `inner` is no gradient transformation, `mesh` is no mesh, or an option is unknown.
      ValueError: the mesh lacks an axis, or an option's value makes no sense.

    >>> from jax.sharding import PartitionSpec as P
    >>> from jaxshard.mesh import abstract_mesh
    >>> pipeline_parallel(optax.adamw(1e-3), abstract_mesh(8, pipeline=2), [("blocks", P("pipeline"))])
    pipeline_parallel(GradientTransformationExtraArgs, pipeline 2 x data 4)
    """
    return _make("pipeline_parallel", inner, mesh, specs=specs, **options)


def hybrid(
    inner: optax.GradientTransformation,
    mesh: AnyMesh,
    specs: Tree | Rules | None = None,
    zero: Zero = 2,
    **options: Unpack[CommonOptions],
) -> ShardedOptimizer:
    """Tensor and pipeline parallel as `specs` say, and ZeRO level 0 (ddp), 1, 2 or 3 over the data axes.

    Args:
      inner: any optax optimizer or chain.
      mesh: a mesh with the data axes, of Auto or of Explicit axes; for plans an `AbstractMesh` will do.
      specs: how the model's own axes cut the params: a pytree, or prefix, of PartitionSpecs, or rules
        [(regex on the '/'-joined path, PartitionSpec), ...], first match wins; None: they cut nothing.
      zero: the level of ZeRO over the data axes.
      **options: data_axes, min_shard_size, reduce_dtype, master_dtype, moment_dtype, stochastic_rounding, loss_scale,
        auto_axes; `jaxshard.Options` says what each does.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: `inner` is no gradient transformation, `mesh` is no mesh, or an option is unknown.
      ValueError: the mesh lacks an axis, or an option's value makes no sense.

    >>> from jax.sharding import PartitionSpec as P
    >>> from jaxshard.mesh import abstract_mesh
    >>> hybrid(optax.adamw(1e-3), abstract_mesh(8, tensor=2), [("kernel", P(None, "tensor"))], zero=3)
    hybrid(GradientTransformationExtraArgs, data 4 x tensor 2)
    """
    return _make("hybrid", inner, mesh, specs=specs, zero=zero, **options)
