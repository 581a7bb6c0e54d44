"""The compiled program of a step, and the check that all processes run the same one."""

import dataclasses
from collections import Counter
from collections.abc import Hashable

import jax
from jax.sharding import NamedSharding

from jaxshard.base.types import Tree
from jaxshard.digest import digests
from jaxshard.processes import agreement
from jaxshard.programs.jaxprs import open_jaxpr
from jaxshard.programs.primitives import DRAWS
from jaxshard.programs.questions import reaches
from jaxshard.step.repeats import warn_of_same_rows
from jaxshard.step.skips import Names


def check_processes(program: "Program", params: Tree, state: Tree, batch: Tree, args: Tree) -> None:
    """Checks before the first step that all processes run the same program, from the same params and state.

    Raises:
      ProcessError: the programs differ (a learning rate, a shape).
      ReplicaError: devices that should hold the same bits of a leaf do not.
    """
    text = program.run.lower(params, state, batch, *args).as_text()
    cure = "give the same code, options and numbers (learning rate) to all processes"
    agreement.check_same("train_step: the step's program", text, cure)
    digests({"params": params, "state": state, "batch": batch})
    warn_of_same_rows(batch)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A jitted step (`run`), the shardings of its params, state and batch, and the paths of its leaves."""

    run: Tree
    params: Tree
    state: Tree
    batch: NamedSharding
    names: Names

    def draws_from(self, params: Tree, state: Tree, batch: Tree, args: tuple[Tree, ...]) -> list[bool]:
        """For each leaf of the further arguments, whether random numbers depend on it."""
        program = self.run.trace(params, state, batch, *args).jaxpr
        num_inputs = len(open_jaxpr(program).invars)
        first = num_inputs - len(jax.tree.leaves(args))
        found = reaches(program, DRAWS, [i >= first for i in range(num_inputs)])
        return found[first:]


def kinds_of(tree: Tree) -> Counter[tuple[Hashable, ...]]:
    return Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))
