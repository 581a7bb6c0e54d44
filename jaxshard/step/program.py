"""The compiled program of a step; checks that all processes run the same one, and that nothing repeats."""

import contextlib
import dataclasses
import gc
import hashlib
import itertools
import json
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxshard.base.tree import is_key, is_like_raw_key, named_leaves, path_of
from jaxshard.base.types import AnyMesh, Metrics, Params, State, Tree
from jaxshard.collectives import global_view
from jaxshard.digest import digests
from jaxshard.layout.host_memory import HOST
from jaxshard.processes import agreement
from jaxshard.programs.jaxprs import open_jaxpr
from jaxshard.programs.primitives import DRAWS
from jaxshard.programs.questions import reaches
from jaxshard.step.skips import Names
from jaxshard.system.users_lines import warn


def check_processes(program: "Program", params: Tree, state: Tree, batch: Tree, args: Tree) -> None:
    """Checks before the first step that all processes of the mesh run the same program, from the same params and state.

    Raises:
      ProcessError: the programs differ (a learning rate, a shape).
      ReplicaError: devices that should hold the same bits of a leaf do not.
    """
    with agreement.among(program.mesh):
        if agreement.is_alone():
            return
        text = program.run.lower(params, state, batch, *args).as_text()
        cure = "give all processes the same code, options and numbers (learning rate)"
        agreement.check_same("train_step: the step's program", text, cure)
        digests({"params": params, "state": state, "batch": batch})
        warn_of_same_rows(batch)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A jitted step (`run`), the shardings of its params and state, its mesh, and the paths of its leaves."""

    run: Tree
    params: Tree
    state: Tree
    mesh: AnyMesh
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


def donated_arguments(state: Tree, after: Tree) -> tuple[int, ...]:
    """The arguments that a step donates; not the state if one of its leaves matches no result in shape and dtype."""
    return (0, 1) if _kinds_of(state) <= _kinds_of(after) else (0,)


def _kinds_of(tree: Tree) -> Counter[tuple[Hashable, ...]]:
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


def placed(program: Program, params: Params, state: State) -> tuple[Params, State]:
    """Params and state under the program's shardings, checked to be the same on all processes of the mesh.

    An array that occurs twice is copied, since it cannot be donated twice.
    """
    with agreement.among(program.mesh):
        agreement.check_same_arrays("train_step", {"params": params, "state": state})
    taken: set[int] = set()

    def place(x: Tree, sharding: NamedSharding) -> jax.Array:
        found = placed_leaf(x, sharding)
        if id(found) in taken:
            found = global_view.copied(found)
        taken.add(id(found))
        return found

    return jax.tree.map(place, (params, state), (program.params, program.state))


def placed_leaf(x: Tree, sharding: NamedSharding) -> jax.Array:
    """`x` itself if it has this sharding, else a copy, so that a donating step consumes the copy, not `x`."""
    return x if isinstance(x, jax.Array) and x.sharding == sharding else global_view.copy_to(x, sharding)


def check_not_donated(args: tuple[Tree, ...], donated: Mapping[str, Tree]) -> None:
    """Refuses a further argument that is an array of the donated trees: the runtime (jax 0.10 to 0.12) would crash.

    Raises:
      ValueError: names the argument, the array that it is, and the cure.
    """
    arrays = {id(x) for x in jax.tree.leaves(args) if isinstance(x, jax.Array) and not is_key(x)}
    if not arrays or arrays.isdisjoint(map(id, jax.tree.leaves(donated))):
        return
    given = {id(x): names for names, x in named_leaves(args)}
    names, at = next((given[id(x)], at) for at, x in named_leaves(donated) if id(x) in given)
    raise ValueError(
        f"train_step: further argument {path_of(names)} is the array {path_of(at)} itself, which the step donates, so "
        "its memory is reused. Pass a copy first, such as target = jax.tree.map(jnp.copy, params); or give train_step "
        "donate=False"
    )


def run(program: Tree, params: Tree, state: Tree, batch: Tree, args: tuple[Tree, ...]) -> tuple[Tree, Tree, Metrics]:
    """Runs a compiled step; copies state on the host if someone holds a view of it.

    `np.asarray` of state on the host is a view, not a copy. While someone holds one (a checkpoint that is being
    written), the runtime on GPU refuses to overwrite the memory, before it touches anything. Within a trace that has
    closed over all arrays, JAX refuses a program with options; it is traced without them.
    """
    try:
        return program(params, state, batch, *args)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        if "compiler_options" in str(error) and "top-level" in str(error):
            return program.__wrapped__(params, state, batch, *args)
        if "external reference" not in str(error):
            raise
        return program(params, jax.tree.map(_own, state), batch, *args)


def _own(x: jax.Array) -> jax.Array:
    return jax.device_put(x, x.sharding, may_alias=False) if x.sharding.memory_kind == HOST else x


# Rows and keys that repeat.


_CALLS = 3
_SMALL = 64  # elements


class KeyWatch:
    """Compares the further arguments of a step's first calls; later calls cost nothing.

    A key counts as repeated only if all integers repeat too, since it may be folded with them (nnx counts draws).
    """

    def __init__(self):
        self._seen: list[tuple[Hashable, ...]] = []
        self._batches: list[list[Tree]] = []

    def look(self, batch: Tree, args: tuple[Tree, ...], is_drawn_from: Callable[[], Sequence[bool]]) -> None:
        """Warns at the third call if the keys among `args` were the same in all three.

        `is_drawn_from` returns for each leaf of `args` whether random numbers depend on it; it is called only then.
        """
        if len(self._seen) == _CALLS or not args:
            return
        self._seen.append(tuple(_value(leaf) for leaf in jax.tree.leaves(args) if _counts(leaf)))
        self._batches.append(jax.tree.leaves(batch))
        if len(self._seen) < _CALLS:
            return
        batches, self._batches = self._batches, []
        keys = [_is_key(leaf) for leaf in jax.tree.leaves(args)]
        if len(set(self._seen)) > 1 or _are_one(batches) or not any(keys):
            return
        used = [key and drawn for key, drawn in zip(keys, is_drawn_from(), strict=True)]
        if any(used):
            _warn(named_leaves(args)[used.index(True)][0])


def _warn(names: tuple[str, ...]) -> None:
    position, *rest = names
    warn(
        f"train_step: further argument {position}{': ' + '/'.join(rest) if rest else ''} is the same random key at "
        "every call, so that every step draws the same numbers (dropout masks). Pass another key at each step, such as "
        'jax.random.fold_in(key, i); or, if the loss returns its random state as aux, hand metrics["aux"] to the next '
        'step. To keep the same numbers on purpose, ignore this warning: warnings.filterwarnings("ignore", '
        '".*same random key")'
    )


def _is_key(leaf: Tree) -> bool:
    return is_key(leaf) or is_like_raw_key(leaf)


def _counts(leaf: Tree) -> bool:
    return isinstance(leaf, int) or is_key(leaf) or np.issubdtype(getattr(leaf, "dtype", np.float32), np.integer)


def _value(leaf: Tree) -> Hashable:
    """The numbers of a small leaf, or the identity of a large one."""
    if np.size(leaf) > _SMALL or not getattr(leaf, "is_fully_replicated", True):
        return id(leaf)
    data = jax.random.key_data(leaf) if is_key(leaf) else leaf
    return np.asarray(data).tobytes()


def _are_one(batches: list[list[Tree]]) -> bool:
    """Whether all calls had the very same arrays as their batch, as in a time measurement."""
    return all(len({id(leaf) for leaf in column}) == 1 for column in zip(*batches, strict=False))


def warn_of_same_rows(batch: Tree) -> None:
    """Warns, on the first process, if two processes gave equal rows for different places in the global batch.

    Processes that hold the same places, such as those of one pipeline, are not compared; nor are batches whose rows are
    all equal, such as ones for a measurement.
    """
    said = agreement.gathered("train_step: the batch's rows", json.dumps(_own_rows(batch)))
    found, present = [json.loads(text) for text in said], agreement.present()
    for (i, one), (j, two) in itertools.combinations(enumerate(found), 2):
        if one["digest"] == two["digest"] is not None and not set(one["places"]) & set(two["places"]):
            if agreement.is_first():
                warn(
                    f"train_step: processes {present[i]} and {present[j]} passed identical rows of the batch: each "
                    "process should load its own rows, with jax.process_index() as its seed or its part of the data, "
                    "and pass only these to jaxshard.shard_batch(rows, opt)"
                )
            return


def _own_rows(batch: Tree) -> dict[str, Tree]:
    """The places of this process's rows in the global batch, and their digest, None if all rows are equal."""
    digest, places, differ = hashlib.sha256(), set[int](), False
    for leaf in jax.tree.leaves(batch):
        x = jax.random.key_data(leaf) if is_key(leaf) else leaf
        shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
        rows = np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])
        places |= shards.keys()
        digest.update(rows.tobytes())
        differ |= bool((rows != rows[:1]).any()) or (len(rows) == 1 and len(set(rows.ravel().tolist()[:1000])) > 1)
    return {"places": sorted(places), "digest": digest.hexdigest() if differ else None}
