"""Distributes the matrix work of an update: each unit runs on one device, its owner.

All devices send their shards of the operands to the owners, the owners compute, and the results go back (see
`rounds`). The state stays sharded at rest.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxshard import platforms
from jaxshard.base.tree import is_traced, named_leaves
from jaxshard.base.types import AnyMesh, AxisSizes, Jaxpr, Tree, Var, axes_in, axes_of, canonical, is_part, local_shape
from jaxshard.collectives import global_view
from jaxshard.optimizer.inner.update import fast, first_state, update, update_of, with_fast
from jaxshard.optimizer.owners.layers import OneLayer, one_layer
from jaxshard.optimizer.owners.matrix_units import Unit, units
from jaxshard.optimizer.owners.rounds import Job, Kind, Rounds
from jaxshard.programs.components import Piece, run_in_pieces
from jaxshard.programs.jaxprs import equations, open_jaxpr
from jaxshard.programs.primitives import LINEAR_ALGEBRA
from jaxshard.programs.rerun import anew, flat
from jaxshard.system.users_lines import warn

_WORTH_SENDING = 2**18  # elements: a replicated leaf needs as many, since its results must be sent to all devices


@dataclasses.dataclass(frozen=True)
class Dealing:
    """How matrix work is distributed.

    Attributes:
      mesh: the devices.
      axes: the mesh axes of size above 1 that cut the state.
      grads, params: the layout of each leaf in the update.
      state: path -> the layout of the inner state's leaf.
      leaves: for each gradient, whether its units have owners.
      stacks: for each gradient, the number of matrices along its first dim, or 0.
    """

    mesh: AnyMesh
    axes: tuple[str, ...]
    grads: tuple[P, ...]
    params: tuple[P, ...]
    state: Mapping[tuple[str, ...], P]
    leaves: tuple[bool, ...]
    stacks: tuple[int, ...]

    def update(
        self, inner: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, extra: Mapping[str, Tree]
    ) -> tuple[Tree, Tree]:
        """As `inner.update`, with its matrix work done by owners."""
        if not is_traced((grads, state, params, extra)):
            return update(inner, grads, state, params, extra)
        leaves, treedef = jax.tree.flatten((fast(grads), state, params, dict(extra)))
        arrays = [isinstance(x, jax.Array) for x in leaves]

        def run(*values: jax.Array) -> tuple[Tree, Tree]:
            given = iter(values)
            whole = [next(given) if is_array else x for x, is_array in zip(leaves, arrays, strict=True)]
            mine, state, params, extra = jax.tree.unflatten(treedef, whole)
            return update(inner, mine if params is None else with_fast(grads, mine), state, params, extra)

        values = [x for x, is_array in zip(leaves, arrays, strict=True) if is_array]
        program, shapes = jax.make_jaxpr(run, return_shape=True)(*values)
        program, consts = flat(program)
        num_grads = len(jax.tree.leaves(fast(grads)))
        specs = self._specs(grads, state, params)
        specs = [*specs, *[P()] * (len(open_jaxpr(program).invars) - len(specs))]
        out_specs = [*self.grads, *(self.state.get(names) for names, _ in named_leaves(shapes[1]))]
        found = [one for one in units(program, num_grads, specs, out_specs) if self.leaves[one.leaf]]
        members = self._members(inner, found, fast(grads), state, params, num_grads)
        _warn_if_short_of_threads(self.mesh, members)
        outs = _evaluated(program, [*values, *consts], members, self)
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    def _specs(self, grads: Tree, state: Tree, params: Tree) -> list[P | None]:
        of_params = [] if params is None else self.params
        return [*self.grads, *(self.state.get(names) for names, _ in named_leaves(state)), *of_params]

    def _members(
        self,
        inner: optax.GradientTransformation,
        found: Sequence[Unit],
        grads: Tree,
        state: Tree,
        params: Tree,
        num_grads: int,
    ) -> list["_Member"]:
        """The units; each matrix of a stack is one if the update runs the same program on each, independently."""
        wanted = {unit.leaf: _OTHER[self.stacks[unit.leaf] == _OTHER[0]] for unit in found if self.stacks[unit.leaf]}
        others = _of_other_stacks(inner, grads, state, params, num_grads, wanted) if wanted else {}
        members: list[_Member] = []
        for unit in found:
            some = [one for one in others.get(unit.leaf, ()) if one.phase == unit.phase]
            size, layer = self.stacks[unit.leaf], None
            if len(some) == 1:
                layer = one_layer(unit, some[0], size, wanted[unit.leaf])
            members.append(_Member(unit, layer, size if layer else 0))
        return [one for one in members if one.axes_of_stack() is not None and one.is_worth(self)]


_OTHER = (2, 3)  # the numbers of layers to compare a stack with


def _of_other_stacks(
    inner: optax.GradientTransformation,
    grads: Tree,
    state: Tree,
    params: Tree,
    num_grads: int,
    layers: Mapping[int, int],
) -> dict[int, list[Unit]]:
    """Gradient index -> the units of the same update for other numbers of layers."""
    like = grads if params is None else params
    if jax.tree.structure(like) != jax.tree.structure(grads):
        return {}
    leaves, treedef = jax.tree.flatten(like)
    shapes = [
        jax.ShapeDtypeStruct((layers[i], *x.shape[1:]) if i in layers else x.shape, x.dtype)
        for i, x in enumerate(leaves)
    ]
    other = jax.tree.unflatten(treedef, shapes)
    try:
        start = first_state(inner, other)
    except Exception:  # of any type: it is the user's own code, for params of other shapes
        return {}
    if start.why or jax.tree.structure(start.state) != jax.tree.structure(state):
        return {}
    traced = update_of(inner, other, start.state)
    if traced is None:
        return {}
    program, _ = flat(traced.jaxpr)
    found: dict[int, list[Unit]] = {}
    for unit in units(program, num_grads, [P()] * len(open_jaxpr(program).invars)):
        if unit.leaf in layers:
            found.setdefault(unit.leaf, []).append(unit)
    return found


class _Member(NamedTuple):
    """A unit to distribute: it runs once, or, with `layer`, for each of the `size` layers of its stacks."""

    unit: Unit
    layer: OneLayer | None
    size: int

    def values(self) -> list[tuple[Var, P, bool]]:
        """(value, its layout, whether it is a stack) of all operands and results."""
        variables, specs = (*self.unit.ins, *self.unit.outs), (*self.unit.specs, *self.unit.out_specs)
        return list(zip(variables, specs, self.layer.stacked if self.layer else [False] * len(specs), strict=True))

    def axes_of_stack(self) -> tuple[str, ...] | None:
        """The mesh axes that cut the stacks, so that devices have different layers; None if not all are cut alike."""
        found = {axes_in(spec[0]) if spec else () for _, spec, stacked in self.values() if stacked}
        in_blocks = any(is_part(name) for names in found for name in names)
        return None if len(found) > 1 or in_blocks else next(iter(found), ())

    def _named(self) -> set[str]:
        """The mesh axes that cut any of its values."""
        return axes_of([spec for _, spec, _ in self.values()])

    def axes(self, dealing: Dealing) -> tuple[str, ...]:
        """The mesh axes over which it is distributed."""
        of_stack = self.axes_of_stack() or ()
        used = (self._named() | set(dealing.axes)) - set(of_stack)
        return tuple(axis for axis in dealing.mesh.axis_names if axis in used)

    def is_worth(self, dealing: Dealing) -> bool:
        """Whether it is worth distributing: it is cut, or large."""
        return (
            bool(set(dealing.axes) & self._named())
            or max(math.prod(v.aval.shape) for v in self.unit.ins) >= _WORTH_SENDING
        )

    def job(self, sizes: AxisSizes) -> Job:
        """The unit as a job for owners."""
        num_shards = math.prod(sizes[axis] for axis in self.axes_of_stack() or ())
        kinds = []
        for v, spec, stacked in self.values():
            shape = (1, *v.aval.shape[1:]) if stacked else tuple(v.aval.shape)
            inside = canonical([None, *spec[1:]]) if stacked else spec
            kinds.append(Kind(local_shape(shape, inside, sizes), inside, v.aval.dtype, stacked, id(v)))
        num_ins = len(self.unit.ins)
        run = self.layer.run if self.layer else functools.partial(anew, self.unit.program)
        return Job(
            self.unit.program,
            run,
            self.size // num_shards if self.size else 1,
            tuple(kinds[:num_ins]),
            tuple(kinds[num_ins:]),
        )


def _warn_if_short_of_threads(mesh: AnyMesh, members: Sequence[_Member]) -> None:
    """Warns if simulated devices, which share one pool of threads, may wait for each other forever."""
    if not platforms.of(mesh).blocks_threads or not isinstance(mesh, Mesh):
        return
    names = {eqn.primitive.name for one in members for eqn in equations(one.unit.program)} & LINEAR_ALGEBRA
    here = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    cores = os.environ.get("NPROC", "")
    threads = max(int(cores) if cores.isdigit() else os.cpu_count() or 1, jax.local_device_count())
    if names and here > 1 and threads < 2 * here:
        warn(
            f"update: {here} simulated devices may hang in {' and '.join(sorted(names))}, since XLA for CPU has only "
            f"{threads} threads for these and for collectives: set NPROC={2 * here} in the environment before Python "
            f"starts, or use at most {threads // 2} devices",
            RuntimeWarning,
        )


# Running an update in which units have owners.


def _evaluated(program: Jaxpr, values: Sequence[jax.Array], members: Sequence[_Member], dealing: Dealing) -> list[Tree]:
    groups: dict[tuple[int, tuple[str, ...], tuple[str, ...]], list[_Member]] = {}
    for member in members:
        key = member.unit.phase, member.axes(dealing), member.axes_of_stack() or ()
        groups.setdefault(key, []).append(member)
    return run_in_pieces(program, values, [_deal(some, dealing) for some in groups.values()])


def _deal(members: Sequence[_Member], dealing: Dealing) -> Piece:
    """The piece that has owners compute these members, which do not depend on each other."""
    sizes = dict(dealing.mesh.shape)
    rounds = Rounds([member.job(sizes) for member in members], members[0].axes(dealing), sizes)
    counts = [len(member.unit.ins) for member in members]

    def run(values: list[Tree]) -> list[Tree]:
        given = iter(values)
        operands = [[next(given) for _ in range(count)] for count in counts]
        specs = [[*member.unit.specs] for member in members]
        out_specs = [[*member.unit.out_specs] for member in members]
        mesh = jax.sharding.get_abstract_mesh() if global_view.is_explicit(dealing.mesh) else dealing.mesh
        run_rounds = global_view.shard_map(
            rounds.run, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False
        )
        return [x for outs in run_rounds(operands) for x in outs]

    ins = tuple(v for one in members for v in one.unit.ins)
    outs = tuple(v for one in members for v in one.unit.outs)
    return Piece(ins, outs, frozenset[int]().union(*(one.unit.replaces for one in members)), run)
