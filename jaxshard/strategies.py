"""The strategies: each decides what is sharded over the data axes. All take the arguments of `ddp`."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import optax

from jaxshard.base.types import AnyMesh, Tree
from jaxshard.layout.options import CommonOptions, Options, Rules, Zero
from jaxshard.optimizer.optimizer import ShardedOptimizer, make

Strategy = TypeVar("Strategy", bound=Callable[..., Any])


def _with_options(strategy: Strategy) -> Strategy:
    """Appends the list of options, written once in `Options`, to the docstring of a strategy."""
    listed = (inspect.getdoc(Options) or "").partition("One line each")[2]
    strategy.__doc__ = f"{inspect.getdoc(strategy) or ''}\n\nThe options, one line each{listed}"
    return strategy


@_with_options
def ddp(
    inner: optax.GradientTransformation, mesh: AnyMesh | None = None, **options: Unpack[Options]
) -> ShardedOptimizer:
    """Data parallel: everything is replicated; gradients are all-reduced once per step (Li et al. 2020).

    Args:
      inner: any optax optimizer or chain.
      mesh: a mesh with the data axes (and the replica axes, for `hsdp`), of Auto or Explicit axes; an `AbstractMesh` is
        enough for plans. None: `jaxshard.make_mesh()`, all devices on the data axis.
      **options: see `jaxshard.Options`.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: `inner` is not a gradient transformation, `mesh` is not a mesh, or an option is unknown.
      ValueError: the mesh lacks an axis, or an option has an invalid value.

    >>> from jaxshard.mesh import abstract_mesh
    >>> ddp(optax.adamw(1e-3), abstract_mesh(8))
    ddp(GradientTransformationExtraArgs, data 8)
    """
    return make("ddp", inner, mesh, **options)


@_with_options
def zero1(
    inner: optax.GradientTransformation, mesh: AnyMesh | None = None, **options: Unpack[Options]
) -> ShardedOptimizer:
    """ZeRO-1: the state has N shards; one reduce-scatter and one gather per step (Rajbhandari et al. 2020, 5.1).

    Arguments, options and errors are those of `ddp`.

    >>> from jaxshard.mesh import abstract_mesh
    >>> zero1(optax.adamw(1e-3), abstract_mesh(8))
    zero1(GradientTransformationExtraArgs, data 8)
    """
    return make("zero1", inner, mesh, **options)


@_with_options
def zero2(
    inner: optax.GradientTransformation, mesh: AnyMesh | None = None, **options: Unpack[Options]
) -> ShardedOptimizer:
    """ZeRO-2: state and gradients have N shards; a reduce-scatter per microbatch (Rajbhandari et al. 2020, 5.2).

    Arguments, options and errors are those of `ddp`.

    >>> from jaxshard.mesh import abstract_mesh
    >>> zero2(optax.adamw(1e-3), abstract_mesh(8))
    zero2(GradientTransformationExtraArgs, data 8)
    """
    return make("zero2", inner, mesh, **options)


@_with_options
def zero3(
    inner: optax.GradientTransformation, mesh: AnyMesh | None = None, **options: Unpack[Options]
) -> ShardedOptimizer:
    """ZeRO-3 = FSDP: params have N shards, too, and are gathered at use (Rajbhandari et al. 2020, 5.3; Zhao et al.
    2023).

    Arguments, options and errors are those of `ddp`.

    >>> from jaxshard.mesh import abstract_mesh
    >>> zero3(optax.adamw(1e-3), abstract_mesh(8))
    zero3(GradientTransformationExtraArgs, data 8)
    """
    return make("zero3", inner, mesh, **options)


fsdp = zero3


@_with_options
def hsdp(
    inner: optax.GradientTransformation, mesh: AnyMesh | None = None, **options: Unpack[Options]
) -> ShardedOptimizer:
    """Hybrid sharded: as zero3 over the data axes; replicas all-reduce gradient shards once per step.

    Arguments, options and errors are those of `ddp`.

    >>> from jaxshard.mesh import abstract_mesh
    >>> hsdp(optax.adamw(1e-3), abstract_mesh(8, replica=2))
    hsdp(GradientTransformationExtraArgs, replica 2 x data 4)
    """
    return make("hsdp", inner, mesh, **options)


@_with_options
def tensor_parallel(
    inner: optax.GradientTransformation, mesh: AnyMesh, specs: Tree | Rules, **options: Unpack[CommonOptions]
) -> ShardedOptimizer:
    """Layers sharded by `specs` (Shoeybi et al. 2020), for the blocks of `jaxshard.tensor`; data parallel around.

    Arguments, options and errors are those of `ddp`; `specs` is the option of `jaxshard.Options`, needed here.

    >>> from jax.sharding import PartitionSpec as P
    >>> from jaxshard.mesh import abstract_mesh
    >>> tensor_parallel(optax.adamw(1e-3), abstract_mesh(8, tensor=2), [("kernel", P(None, "tensor"))])
    tensor_parallel(GradientTransformationExtraArgs, data 4 x tensor 2)
    """
    return make("tensor_parallel", inner, mesh, specs=specs, **options)


@_with_options
def pipeline_parallel(
    inner: optax.GradientTransformation, mesh: AnyMesh, specs: Tree | Rules, **options: Unpack[CommonOptions]
) -> ShardedOptimizer:
    """Stacked layers, sharded into stages by `specs`, run by `jaxshard.pipeline`; data parallel around.

    Arguments, options and errors are those of `ddp`; `specs` is the option of `jaxshard.Options`, needed here.

    >>> from jax.sharding import PartitionSpec as P
    >>> from jaxshard.mesh import abstract_mesh
    >>> pipeline_parallel(optax.adamw(1e-3), abstract_mesh(8, pipeline=2), [("blocks", P("pipeline"))])
    pipeline_parallel(GradientTransformationExtraArgs, pipeline 2 x data 4)
    """
    return make("pipeline_parallel", inner, mesh, specs=specs, **options)


@_with_options
def hybrid(
    inner: optax.GradientTransformation,
    mesh: AnyMesh | None = None,
    specs: Tree | Rules | None = None,
    zero: Zero = 2,
    **options: Unpack[CommonOptions],
) -> ShardedOptimizer:
    """Tensor and pipeline parallel by `specs`, and ZeRO level 0 (ddp), 1, 2 or 3 (`zero`) over the data axes.

    Arguments, options and errors are those of `ddp`; `specs` is the option of `jaxshard.Options`.

    >>> from jax.sharding import PartitionSpec as P
    >>> from jaxshard.mesh import abstract_mesh
    >>> hybrid(optax.adamw(1e-3), abstract_mesh(8, tensor=2), [("kernel", P(None, "tensor"))], zero=3)
    hybrid(GradientTransformationExtraArgs, data 4 x tensor 2, zero=3)
    """
    return make("hybrid", inner, mesh, specs=specs, zero=zero, **options)
