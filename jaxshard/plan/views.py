"""What a loss costs in its two views: on each device's rows, and on all rows at once (`loss_view`)."""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import shape_of
from jaxshard.base.types import Tree
from jaxshard.loss.arguments import View
from jaxshard.loss.gradients import LossFunction
from jaxshard.plan.costs import Costs, costs_of
from jaxshard.plan.prediction import block_of


def costs_of_views(loss: LossFunction, params: Tree, batch: Tree, args: Sequence[Tree]) -> tuple[Costs, Costs] | None:
    """(the costs in the local view, those in the global one) of a loss and its gradients on each device.

    Takes arrays or shapes; compiles nothing. None if either view cannot be traced or read.
    """
    try:
        local, whole = (_costs(loss, view, params, batch, args) for view in ("local", "global"))
    except Exception:  # of any type: it is the user's own code, perhaps written for one view alone
        return None
    return local, whole


def _costs(loss: LossFunction, view: View, params: Tree, batch: Tree, args: Sequence[Tree]) -> Costs:
    setup = loss.setup
    run = LossFunction(dataclasses.replace(loss.options, loss_view=view))
    inputs = jax.tree.map(shape_of, (params, batch, *args))
    program = jax.make_jaxpr(lambda *xs: run.measure(xs[0], xs[1], xs[2:])[:4])(*inputs)
    others = [P(setup.batch_axes)] * len(jax.tree.leaves(batch)) + [P()] * len(jax.tree.leaves(args))
    specs = [*jax.tree.leaves(setup.layout(inputs[0]).param_specs), *others]
    block, platform = block_of(program, specs, setup)
    return costs_of(block, [False] * len(specs), platform)
