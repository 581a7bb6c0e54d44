"""The compiled program of a step, and the check that all processes run the same one."""

import contextlib
import dataclasses
import gc
import operator
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxshard.base.types import Metrics, T, Tree
from jaxshard.collectives import global_view
from jaxshard.digest import digests
from jaxshard.layout.host_memory import HOST
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


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Keeps Python's garbage collector from running: a trace makes objects that stay, and each pass walks them all.

    The first trace of 1,000 leaves takes 5 s so, and 10 to 12 s with the collector.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def kinds_of(tree: Tree) -> Counter[tuple[Hashable, ...]]:
    return Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))


_is_deleted = operator.methodcaller("is_deleted")


class Returned:
    """The (params, state) that a step returned last: if it gets the very same arrays, it skips all checks.

    It holds only weak references, so dropping the arrays frees their memory.
    """

    def __init__(self):
        self._program: Any = None
        self._takes_its_own = False  # whether the program accepts its own results without placing them
        self._treedef: Any = None
        self._arrays: list[weakref.ref[jax.Array]] = []

    def note(self, program: object, params: Tree, state: Tree) -> None:
        """Notes the results that `program` has just returned."""
        leaves, self._treedef = jax.tree.flatten((params, state))
        self._takes_its_own &= program is self._program
        self._program, self._arrays = program, list(map(weakref.ref, leaves))

    def program_for(self, params: Tree, state: Tree) -> Any:
        """The program that accepts these as they are; None if unknown."""
        return self._program if self._takes_its_own and self._are(params, state) else None

    def found(self, program: object, given: tuple[Tree, Tree], taken: tuple[Tree, Tree]) -> None:
        """Notes that `program` was given `given`, and got `taken` after placement."""
        stayed = all(map(operator.is_, jax.tree.leaves(given), jax.tree.leaves(taken)))
        self._takes_its_own = stayed and program is self._program and self._are(*given)

    def _are(self, params: Tree, state: Tree) -> bool:
        """Whether these are the noted arrays, none of them deleted since."""
        leaves, treedef = jax.tree.flatten((params, state))
        if len(leaves) != len(self._arrays) or not all(map(operator.is_, [ref() for ref in self._arrays], leaves)):
            return False
        return treedef == self._treedef and not any(map(_is_deleted, leaves))


def placed(tree: T, shardings: Tree) -> T:
    """The tree under `shardings`; an array that occurs twice is copied, since it cannot be donated twice."""
    taken: set[int] = set()

    def place(x: Tree, sharding: NamedSharding) -> jax.Array:
        found = placed_leaf(x, sharding)
        if id(found) in taken:
            found = global_view.copied(found)
        taken.add(id(found))
        return found

    return jax.tree.map(place, tree, shardings)


def placed_leaf(x: Tree, sharding: NamedSharding) -> jax.Array:
    """`x` itself if it has this sharding, else a copy, so that a donating step consumes the copy, not `x`."""
    return x if isinstance(x, jax.Array) and x.sharding == sharding else global_view.copy_to(x, sharding)


def run(program: Tree, params: Tree, state: Tree, batch: Tree, args: tuple[Tree, ...]) -> tuple[Tree, Tree, Metrics]:
    """Runs a compiled step; copies state on the host if someone holds a view of it.

    `np.asarray` of state on the host is a view, not a copy. While someone holds one (a checkpoint that is being
    written), the runtime on GPU refuses to overwrite the memory, before it touches anything.
    """
    try:
        return program(params, state, batch, *args)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        if "external reference" not in str(error):
            raise
        return program(params, jax.tree.map(_own, state), batch, *args)


def _own(x: jax.Array) -> jax.Array:
    return jax.device_put(x, x.sharding, may_alias=False) if x.sharding.memory_kind == HOST else x
