"""State in the host's memory, which an update streams through the devices.

The elementwise work of an update on one leaf runs in a loop over chunks: each comes from the host, is updated, and goes
back. So a device holds a chunk or two of such state at a time. If an update needs a leaf as a whole, all of that leaf's
state comes to the device; so does all state on a mesh of Explicit axes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import is_traced, named_leaves
from jaxshard.base.types import AnyMesh, Equation, Jaxpr, Names, Tree, Var, sharding_on
from jaxshard.collectives.global_view import is_explicit
from jaxshard.layout.host_memory import HOST
from jaxshard.optimizer.streams import Stream, spreads
from jaxshard.programs.components import SHARED, Components, is_big, run_in_pieces
from jaxshard.programs.jaxprs import is_literal, open_jaxpr, operands_of, part_of
from jaxshard.programs.primitives import BARRIER, CONVERT, POINTWISE, REDUCE_SUM
from jaxshard.programs.rerun import flat

_BY_ELEMENT = POINTWISE | {BARRIER}

Step = Callable[..., tuple[Tree, Tree]]


@dataclasses.dataclass(frozen=True)
class HostState:
    """A state with some leaves in the host's memory.

    Attributes:
      mesh: the devices.
      specs: path -> PartitionSpec, for each leaf of the state.
      on_host: the paths of the leaves on the host.
      over_params: results are new params, which may overwrite the old ones; else updates may overwrite gradients.
    """

    mesh: AnyMesh
    specs: Mapping[Names, P]
    on_host: frozenset[Names]
    over_params: bool

    def around(self, step: Step) -> Step:
        """`step(grads, state, params, ...) -> (out, state)` for this state."""

        def run(grads: Tree, state: Tree, *rest: Tree) -> tuple[Tree, Tree]:
            if is_traced((grads, state, rest)):
                return self._streamed(step, grads, state, *rest)
            out, state = step(grads, self._at(state, None), *rest)
            return out, self._at(state, HOST)

        return run

    def _at(self, state: Tree, kind: str | None) -> Tree:
        """The concrete state with its host leaves moved to this memory; None: the device's."""

        def move(names: Names, x: Tree) -> Tree:
            if names not in self.on_host:
                return x
            return jax.device_put(x, sharding_on(self.mesh, self.specs[names], memory_kind=kind))

        leaves = [move(names, x) for names, x in named_leaves(state)]
        return jax.tree.unflatten(jax.tree.structure(state), leaves)

    def _streamed(self, step: Step, grads: Tree, state: Tree, *rest: Tree) -> tuple[Tree, Tree]:
        leaves, treedef = jax.tree.flatten((grads, state, *rest))
        shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]

        def run(*values: jax.Array) -> tuple[Tree, Tree]:
            return step(*jax.tree.unflatten(treedef, values))

        program, outs = jax.make_jaxpr(run, return_shape=True)(*shapes)
        program, consts = flat(program)
        before, after = ([names for names, _ in named_leaves(tree)] for tree in (state, outs[1]))
        num_grads = len(jax.tree.leaves(grads))
        for i, names in enumerate(before, num_grads):
            leaves[i] = _on_host(leaves[i]) if names in self.on_host else leaves[i]
        streams = _Streams(self, program, num_grads, before, after)
        return jax.tree.unflatten(jax.tree.structure(outs), streams.run([*leaves, *consts]))


def _on_host(x: jax.Array) -> jax.Array:
    """Moves an array of the state to the host, where `jax.jit(opt.init)` left it on the devices."""
    is_there = jax.typeof(x).memory_space == jax.memory.Space.Host
    return x if is_there else jax.device_put(x, jax.memory.Space.Host)


class _Streams:
    """Runs one update; `before` and `after` are the paths of its state's leaves."""

    def __init__(
        self, host: HostState, program: Jaxpr, num_grads: int, before: Sequence[Names], after: Sequence[Names]
    ):
        self.host, self.program, self.jaxpr = host, program, open_jaxpr(program)
        self.parts = Components(self.jaxpr, num_grads)
        states = zip(before, self.jaxpr.invars[num_grads:], strict=False)
        self.ins = {names: v for names, v in states if names in host.on_host}
        self.paths = {v: names for names, v in self.ins.items()}
        results = zip(after, self.jaxpr.outvars[len(self.jaxpr.outvars) - len(after) :], strict=True)
        self.outs = {v: names for names, v in results if names in host.on_host and not is_literal(v)}
        self.is_host_result = [False] * (len(self.jaxpr.outvars) - len(after)) + [n in host.on_host for n in after]
        each = zip(self.jaxpr.outvars, self.is_host_result, strict=True)
        self.plain = [v for v, yes in each if not yes and not is_literal(v)]

    def run(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """The results for gradients, state, params and further values."""
        streams = self._streams()
        there = dict(zip(self.jaxpr.invars, values, strict=True))
        replaced = frozenset[int]().union(*(one.places for one in streams))
        plain = (eqn for i, eqn in enumerate(self.parts.eqns) if i not in replaced)
        needed = self._of_host([v for eqn in plain for v in eqn.invars] + self.plain)
        here = [jax.device_put(x, jax.memory.Space.Device) if v in needed else x for v, x in there.items()]
        stored = {v for one in streams for v in one.host_outs}
        done = list[list[jax.Array]]()
        pieces = [one.piece(there, done) for one in streams]
        outs = run_in_pieces(self.program, here, pieces)
        each = zip(self.jaxpr.outvars, outs, self.is_host_result, strict=True)
        return [self._result(v, x, there, stored) if on_host else x for v, x, on_host in each]

    def _result(self, v: Var, x: jax.Array, there: Mapping[Var, jax.Array], stored: set[Var]) -> jax.Array:
        if not is_literal(v) and (v in stored or v in self.paths):
            return x if v in stored else there[v]
        return jax.device_put(jnp.asarray(x), jax.memory.Space.Host)

    def _of_host(self, variables: Sequence[Var]) -> set[Var]:
        return {v for v in variables if not is_literal(v) and v in self.paths}

    def _streams(self) -> list["Stream"]:
        if is_explicit(self.host.mesh):  # inside `jax.sharding.auto_axes` no shard_map takes arrays on the host
            return []
        each = zip(self.parts.component, self.parts.eqns, strict=True)
        component = [one if _is_by_element(eqn) or self._is_count(eqn) else SHARED for one, eqn in each]
        phases = self._late(self.parts.phases([one >= 0 for one in component], component), component)
        groups: dict[tuple[int, int], set[int]] = {}
        for i, key in enumerate(zip(component, phases, strict=True)):
            if key[0] >= 0:
                groups.setdefault(key, set()).add(i)
        found = (self._stream(places) for places in groups.values())
        return [one for one in found if one is not None]

    def _late(self, phases: list[int], component: Sequence[int]) -> list[int]:
        """The phases, as late as possible for equations that only their own component reads, so state comes late."""
        late, parts = [*phases], self.parts
        for i in reversed(range(len(late))):
            outs = parts.eqns[i].outvars
            users = [user for v in outs for user in parts.users.get(v, ())]
            alone = component[i] >= 0 and all(component[user] == component[i] for user in users)
            if users and alone and not any(v in parts.results for v in outs):
                late[i] = min(late[user] for user in users)
        return late

    def _stream(self, places: set[int]) -> "Stream | None":
        """The stream of these equations; None if they use no state on the host, or arrays of several shapes."""
        eqns, parts = self.parts.eqns, self.parts
        makes = dict.fromkeys(v for i in sorted(places) for v in eqns[i].outvars)
        outs = tuple(v for v in makes if v in parts.results or self._is_read(v, places))
        makers = {parts.maker[v] for v in operands_of([eqns[i] for i in sorted(places)]) if v in parts.maker}
        spread = {i for i in makers if spreads(eqns[i])}
        run = [eqns[i] for i in sorted(places | spread)]
        made = {v for eqn in run for v in eqn.outvars}
        ins = operands_of(run)
        given, from_host = (tuple(v for v in ins if (v in self.paths) == yes) for yes in (False, True))
        to_host = [v in self.outs and not self._is_read(v, places) and v not in self.plain for v in outs]
        buffers = tuple(self._buffer(v) if yes else None for v, yes in zip(outs, to_host, strict=True))
        kept = [*from_host, *(v for v in buffers if v is not None)]
        if not kept or any(yes and v is None for yes, v in zip(to_host, buffers, strict=True)):
            return None
        shape, spec = tuple(kept[0].aval.shape), self.host.specs[self.paths[kept[0]]]
        alike = all(tuple(v.aval.shape) == shape for v in (*ins, *made) if is_big(v))
        if not alike or any(self.host.specs[self.paths[v]] != spec for v in kept):
            return None
        arguments = {v: i for i, v in enumerate(self.jaxpr.invars)}  # gradients, state, params
        sign = -1 if self.host.over_params else 1
        given = tuple(sorted(given, key=lambda v: sign * arguments[v] if v in arguments else len(arguments)))
        program = part_of(self.jaxpr, run, [*given, *from_host], outs)
        return Stream(self.host.mesh, spec, program, given, from_host, outs, buffers, frozenset(places))

    def _is_count(self, eqn: Equation) -> bool:
        """Whether an equation counts True elements, so that chunk counts may be added."""
        if eqn.primitive.name != REDUCE_SUM or is_big(eqn.outvars[0]) or is_literal(eqn.invars[0]):
            return False
        maker = self.parts.maker.get(eqn.invars[0])
        made = self.parts.eqns[maker] if maker is not None else None
        return made is not None and made.primitive.name == CONVERT and made.invars[0].aval.dtype == bool

    def _is_read(self, v: Var, places: set[int]) -> bool:
        return any(i not in places for i in self.parts.users.get(v, ()))

    def _buffer(self, v: Var) -> Var | None:
        """The old array on the host that a new one overwrites."""
        old = self.ins.get(self.outs[v])
        return old if old is not None and (old.aval.shape, old.aval.dtype) == (v.aval.shape, v.aval.dtype) else None


def _is_by_element(eqn: Equation) -> bool:
    """Whether an equation makes an array element by element."""
    return (eqn.primitive.name in _BY_ELEMENT and any(map(is_big, eqn.outvars))) or spreads(eqn)
