"""`predict`: what a function makes of each row, in the batch's order."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from jaxshard.base.types import Tree
from jaxshard.loss.gradients import LossFunction, check_options
from jaxshard.loss.loss_program import LossOptions
from jaxshard.optimizer.optimizer import ShardedOptimizer, setup_of


def predict(fn: Callable[..., Tree], opt: ShardedOptimizer) -> "Predict":
    """Applies a function to the rows of a batch, each device to its own: logits, embeddings, losses of each row.

    Args:
      fn: `(params, batch, *args) -> outputs`, pure, written for one device's share of the batch: params come whole
        (as in `value_and_grad`, gathered at `unshard` or first use), the batch's leaves as (rows of this device, ...).
        Its outputs are a tree of arrays of (rows of this device, ...), of any dtype.
      opt: the optimizer; it decides how params and batch are sharded.

    Returns:
      `f(params, batch, *args) -> outputs`: arrays of (rows of the batch, ...), in the batch's order, cut over the batch
      axes. Keys among `args` are folded with the data shard's index.

    Raises:
      TypeError: `opt` is not a `ShardedOptimizer`, or `fn` is no function.
      ValueError: an output has no dim of rows; the batch's rows do not divide; params were donated.
    """
    setup = setup_of(opt, "predict")
    options = LossOptions(fn, setup, True, 1, False, fold_keys=True, differentiate=False, per_row=True)
    check_options("predict", options)
    return Predict(LossFunction(dataclasses.replace(options, loss_fn=_Outputs(fn))))


class Predict:
    """What `predict` returns: `f(params, batch, *args) -> outputs`, to be called inside or outside `jit`."""

    def __init__(self, function: LossFunction):
        self._function = function

    def __call__(self, params: Tree, batch: Tree, *args: Tree) -> Tree:
        _, outputs = self._function(params, batch, *args)
        return outputs


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """`fn` in the form of a loss, with its outputs as aux."""

    fn: Callable[..., Tree]

    def __call__(self, params: Tree, batch: Tree, *args: Tree) -> tuple[Tree, Tree]:
        return jnp.zeros(()), self.fn(params, batch, *args)
