"""`value_and_grad`, `evaluate` and `predict`: the loss of the full batch, its gradients, each row's output."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp

from jaxshard.base.types import Params, Tree
from jaxshard.layout.layout import Layout
from jaxshard.loss.arguments import LossOptions, View, check_options
from jaxshard.loss.gradients import LossFn, LossFunction
from jaxshard.optimizer.optimizer import ShardedOptimizer, setup_of
from jaxshard.system.text import checks_names

Value = TypeVar("Value", covariant=True)
WithAux: TypeAlias = tuple[jax.Array, Any]


class ValueAndGrad(Protocol[Value]):
    """The result of `value_and_grad`: `f(params, batch, *args) -> (value, grads)`; call it inside or outside `jit`.

    The value is the loss, or with `has_aux` (loss, aux). Gradients are like the params.
    """

    @property
    def compiler_options(self) -> dict[str, str | bool | int | float]:
        """The options for XLA that it is compiled with; give them to a `jax.jit` of your own around it."""
        ...

    def __call__(self, params: Params, batch: Tree, *args: Tree) -> tuple[Value, Params]:
        """The loss of the full batch, the same on all devices, and its gradients, sharded by
        `opt.shardings(params).grads`."""
        ...

    def layout(self, params: Tree, batch: Tree, *args: Tree) -> Layout:
        """The layout, with where and why each parameter is gathered; takes arrays or shapes, compiles nothing."""
        ...


class Evaluate(Protocol[Value]):
    """The result of `evaluate`: `f(params, batch, *args) -> loss`, or with `has_aux` (loss, aux)."""

    @property
    def compiler_options(self) -> dict[str, str | bool | int | float]:
        """The options for XLA that it is compiled with; give them to a `jax.jit` of your own around it."""
        ...

    def __call__(self, params: Tree, batch: Tree, *args: Tree) -> Value:
        """The loss of the full batch, the same on all devices."""
        ...

    def layout(self, params: Tree, batch: Tree, *args: Tree) -> Layout:
        """As `ValueAndGrad.layout`."""
        ...


@overload
@checks_names
def value_and_grad(
    loss_fn: LossFn,
    opt: ShardedOptimizer,
    *,
    has_aux: Literal[False] = False,
    microbatches: int = 1,
    weighted: bool = False,
    fold_keys: bool = True,
    loss_view: View = "auto",
    batch_specs: Tree = None,
) -> ValueAndGrad[jax.Array]: ...
@overload
@checks_names
def value_and_grad(
    loss_fn: LossFn,
    opt: ShardedOptimizer,
    *,
    has_aux: Literal[True],
    microbatches: int = 1,
    weighted: bool = False,
    fold_keys: bool = True,
    loss_view: View = "auto",
    batch_specs: Tree = None,
) -> ValueAndGrad[WithAux]: ...
@checks_names
def value_and_grad(
    loss_fn: LossFn,
    opt: ShardedOptimizer,
    *,
    has_aux: bool = False,
    microbatches: int = 1,
    weighted: bool = False,
    fold_keys: bool = True,
    loss_view: View = "auto",
    batch_specs: Tree = None,
) -> ValueAndGrad[Any]:
    """`jax.value_and_grad` over the mesh: the loss and gradients of the full batch, reduced once, left sharded.

    Args:
      loss_fn: `(params, batch, *args) -> loss`, pure, any loss as it is written for one device; it gets full params.
      opt: the optimizer; it decides how params, batch and gradients are sharded.
      has_aux: `loss_fn` returns `(loss, aux)`. With several microbatches floating leaves of aux are averaged over them,
        leaves with the batch's rows come back with all rows, and others must not depend on the batch.
      microbatches: the number of parts into which each device's rows are split; their gradients are accumulated.
      weighted: `loss_fn` returns `(loss_sum, weight)` in place of the mean; the result is sum/weight over all devices
        and microbatches. The weight is not differentiated.
      fold_keys: fold the data shard's and the microbatch's index into the typed PRNG keys among `args`, so that each
        microbatch has its own. In the global view, only several microbatches fold theirs.
      loss_view: "local": each device computes the loss of its own rows of a microbatch, and results are averaged; right
        for a mean over rows, and sends the least. "global": the loss sees all rows of a microbatch, and XLA partitions
        it; right for any loss that names no axis of the mesh. "auto": local where the trace proves that this is right,
        or the loss names axes of the mesh; else global. `f.layout(...)` says which, why, and what it costs.
      batch_specs: how the batch is cut, if not by rows alone: a PartitionSpec, or a tree that is a prefix of the batch,
        such as `P("data", "context")` for sequences. They name the optimizer's batch axes (`data_axes`). The loss gets
        this device's part, and must name the axes that cut other dims than the first, as
        `jaxshard.tensor.ring_attention(..., axis="context")` does. Results are averaged over all devices: right if each
        has equally many terms; else use `weighted`. Leaves of aux with rows must be the same along these axes.

    Returns:
      `f(params, batch, *args) -> (loss, grads)` or `((loss, aux), grads)`. The loss is a replicated scalar; grads are
      global arrays shaped like the params, sharded as `opt.shardings(params).grads`. `f.layout(params, batch, *args)`
      says where each parameter is gathered, and why.

    Raises:
      TypeError: `opt` is not a `ShardedOptimizer`, the loss is not a floating scalar, or a parameter is not floating.
      ValueError: `microbatches` is not 1 or more, the batch's rows do not divide, or params were donated.
    """
    setup = setup_of(opt, "value_and_grad", loss_fn)
    options = LossOptions(
        loss_fn, setup, has_aux, microbatches, weighted, fold_keys, loss_view=loss_view, batch_specs=batch_specs
    )
    check_options("value_and_grad", options)
    return LossFunction(options)


@overload
@checks_names
def evaluate(
    loss_fn: LossFn,
    opt: ShardedOptimizer,
    *,
    has_aux: Literal[False] = False,
    weighted: bool = False,
    loss_view: View = "auto",
    batch_specs: Tree = None,
) -> Evaluate[jax.Array]: ...
@overload
@checks_names
def evaluate(
    loss_fn: LossFn,
    opt: ShardedOptimizer,
    *,
    has_aux: Literal[True],
    weighted: bool = False,
    loss_view: View = "auto",
    batch_specs: Tree = None,
) -> Evaluate[WithAux]: ...
@checks_names
def evaluate(
    loss_fn: LossFn,
    opt: ShardedOptimizer,
    *,
    has_aux: bool = False,
    weighted: bool = False,
    loss_view: View = "auto",
    batch_specs: Tree = None,
) -> Evaluate[Any]:
    """Only the loss, with params gathered as in training: `f(params, batch, *args) -> loss` or `(loss, aux)`.

    The arguments and errors are those of `value_and_grad`.

    Returns:
      The function. The loss is a replicated scalar over the full batch, and aux is averaged, as in training.
    """
    setup = setup_of(opt, "evaluate", loss_fn)
    options = LossOptions(
        loss_fn, setup, has_aux, 1, weighted, True, False, loss_view=loss_view, batch_specs=batch_specs
    )
    check_options("evaluate", options)
    return LossFunction(options)


@checks_names
def predict(
    fn: Callable[..., Tree], opt: ShardedOptimizer, *, loss_view: View = "auto", batch_specs: Tree = None
) -> "Predict":
    """Applies a function to a batch, each device to its own rows: logits, embeddings, per-row losses.

    Args:
      fn: `(params, batch, *args) -> outputs`, pure, as it is written for one device: a tree of arrays of (rows, ...),
        of any dtype. It gets full params (as in `value_and_grad`, gathered at `unshard` or first use).
      opt: the optimizer; it decides how params and batch are sharded.
      loss_view: as for `value_and_grad`; "auto" is global where an output is known to depend on other rows.
      batch_specs: as for `value_and_grad`. Outputs must be the same along axes that cut other dims than the first:
        gather them with `jax.lax.all_gather(x, "context", axis=1, tiled=True)`.

    Returns:
      `f(params, batch, *args) -> outputs`: arrays of (rows of the batch, ...), in the batch's order, sharded over the
      batch axes. Keys among `args` are folded with the data shard's index.

    Raises:
      TypeError: `opt` is not a `ShardedOptimizer`, or `fn` is not a function.
      ValueError: an output has no dim of rows; the batch's rows do not divide; params were donated.
    """
    setup = setup_of(opt, "predict", fn)
    options = LossOptions(
        fn, setup, True, 1, False, True, False, per_row=True, loss_view=loss_view, batch_specs=batch_specs
    )
    check_options("predict", options)
    return Predict(LossFunction(dataclasses.replace(options, loss_fn=_Outputs(fn))))


class Predict:
    """The result of `predict`: `f(params, batch, *args) -> outputs`; call it inside or outside `jit`."""

    def __init__(self, function: LossFunction):
        self._function = function

    @checks_names
    def __call__(self, params: Tree, batch: Tree, *args: Tree) -> Tree:
        _, outputs = self._function(params, batch, *args)
        return outputs


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """`fn` in the form of a loss, with its outputs as aux."""

    fn: Callable[..., Tree]

    def __call__(self, params: Tree, batch: Tree, *args: Tree) -> tuple[Tree, Tree]:
        return jnp.zeros(()), self.fn(params, batch, *args)
