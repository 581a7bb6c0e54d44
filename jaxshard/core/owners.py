"""Deals the matrix work of an update out to the devices: each unit runs whole on one of them, its owner.

Units that compute the same are a group. All devices send their parts of a group's operands to the owners in one
all-to-all, the owners compute, and one all-to-all sends the results home. The state stays cut at rest.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxshard.base.axes import axes_in, canonical
from jaxshard.base.jaxprs import core, is_literal, open_jaxpr, run_equations, without_consts
from jaxshard.base.tree import is_traced, named_leaves
from jaxshard.base.types import AnyMesh, AxisSizes, Equation, Jaxpr, T, Tree, Var
from jaxshard.core.matrix_units import Unit, batched, flat, is_stack, units
from jaxshard.inner.equal_params import same
from jaxshard.inner.trace import first_state, update_of
from jaxshard.inner.update import fast, update
from jaxshard.rows.arithmetic import Arithmetic
from jaxshard.rows.labels import Label, Part, PerRow
from jaxshard.rows.walk import Walk, array_label

_AT_ONCE = 2**22  # the elements of the matrices that one device works on at the same time
_WORTH_SENDING = 2**18  # the elements of a leaf that no axis cuts, whose results must be sent to all


@dataclasses.dataclass(frozen=True)
class Dealing:
    """What is dealt out, and how.

    Attributes:
      mesh: the devices.
      axes: the mesh axes that cut the state, larger than 1.
      grads, params: where these lie in the update, leaf by leaf.
      state: where the inner state lies, by path.
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
        """As `inner.update`, its matrix work by owners."""
        if not is_traced((grads, state, params, extra)):
            return update(inner, grads, state, params, extra)
        leaves, treedef = jax.tree.flatten((fast(grads), state, params, dict(extra)))
        arrays = [isinstance(x, jax.Array) for x in leaves]

        def run(*values: jax.Array) -> tuple[Tree, Tree]:
            given = iter(values)
            whole = [next(given) if is_array else x for x, is_array in zip(leaves, arrays, strict=True)]
            mine, state, params, extra = jax.tree.unflatten(treedef, whole)
            return update(inner, mine if params is None else _as_given(grads, mine), state, params, extra)

        values = [x for x, is_array in zip(leaves, arrays, strict=True) if is_array]
        program, shapes = jax.make_jaxpr(run, return_shape=True)(*values)
        opened, consts = without_consts(program)
        written = flat(opened)
        opened, more = without_consts(written)
        num_grads = len(jax.tree.leaves(fast(grads)))
        specs = self._specs(grads, state, params)
        specs = [*specs, *[P()] * (len(open_jaxpr(opened).invars) - len(specs))]
        out_specs = [*self.grads, *(self.state.get(names) for names, _ in named_leaves(shapes[1]))]
        found = [one for one in units(opened, num_grads, specs, out_specs) if self.leaves[one.leaf]]
        members = self._members(inner, found, fast(grads), state, params, num_grads)
        outs = _evaluated(opened, [*values, *consts, *more], _groups(members), self)
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
        """The units, each matrix of a stack by itself where the update treats these apart and alike."""
        wanted = {unit.leaf for unit in found if self.stacks[unit.leaf]}
        ones = _of_single_layers(inner, grads, state, params, num_grads, wanted) if wanted else {}
        members: list[_Member] = []
        for unit in found:
            size, several = self.stacks[unit.leaf], [one for one in ones.get(unit.leaf, ()) if one.phase == unit.phase]
            fits = len(several) == 1 and batched(unit, several[0], size)
            if fits and _is_apart(unit, several[0], size) and _alike(unit.program, several[0].program):
                members.append(_Member(unit, several[0], size))
            else:
                members.append(_Member(unit, unit, 0))
        return [one for one in members if one.axes_of_stack(self) is not None and one.is_worth(self)]


def _as_given(grads: Tree, leaves: Tree) -> Tree:
    return grads._replace(fast=leaves) if isinstance(grads, optax.LookaheadParams) else leaves


def _of_single_layers(
    inner: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, num_grads: int, wanted: set[int]
) -> dict[int, list[Unit]]:
    """The units of the same update where each stack has one layer."""
    like = grads if params is None else params
    if jax.tree.structure(like) != jax.tree.structure(grads):
        return {}
    leaves, treedef = jax.tree.flatten(like)
    shapes = [
        jax.ShapeDtypeStruct((1, *x.shape[1:]) if i in wanted else x.shape, x.dtype) for i, x in enumerate(leaves)
    ]
    smaller = jax.tree.unflatten(treedef, shapes)
    try:
        start = first_state(inner, smaller)
    except Exception:  # of any type: it is the user's own code, for params that it was not given
        return {}
    if start.why or jax.tree.structure(start.state) != jax.tree.structure(state):
        return {}
    traced = update_of(inner, smaller, start.state)
    if traced is None:
        return {}
    opened, _ = without_consts(flat(without_consts(traced.jaxpr)[0]))
    found: dict[int, list[Unit]] = {}
    for unit in units(opened, num_grads, [P()] * len(open_jaxpr(opened).invars)):
        found.setdefault(unit.leaf, []).append(unit)
    return found


def _is_apart(unit: Unit, one: Unit, size: int) -> bool:
    """Whether each layer's results depend on that layer alone, in order."""
    rows = PerRow((Part(0, 1, size, 1, 1),))
    pairs = zip(unit.ins, one.ins, strict=True)
    labels: list[Label] = [rows if is_stack(v, w, size) else array_label(v) for v, w in pairs]
    outs = Walk(Arithmetic(size, 1, None, lambda: frozenset()), (), True).through(unit.program, labels)
    return all(
        isinstance(label, PerRow) and label.parts == rows.parts and not label.order and not label.plus
        for label in outs
    )


_OF_SIZES = frozenset({"shape", "new_sizes", "sizes", "slice_sizes", "limit_indices", "dimension", "size"})


def _alike(x: Jaxpr, y: Jaxpr) -> bool:
    """Whether two programs have the same operations and numbers, whatever the sizes of their arrays."""
    one, two = open_jaxpr(x).eqns, open_jaxpr(y).eqns
    return len(one) == len(two) and all(map(_alike_equations, one, two))


def _alike_equations(a: Equation, b: Equation) -> bool:
    numbers = zip(a.invars, b.invars, strict=False)
    alike = a.primitive is b.primitive and len(a.invars) == len(b.invars) and a.params.keys() == b.params.keys()
    literal = all(is_literal(v) == is_literal(w) and (not is_literal(v) or same(v.val, w.val)) for v, w in numbers)
    return alike and literal and all(_alike_params(x, b.params[key]) for key, x in a.params.items() if key not in _OF_SIZES)


def _alike_params(x: object, y: object) -> bool:
    if hasattr(open_jaxpr(x), "eqns"):
        return hasattr(open_jaxpr(y), "eqns") and _alike(x, y)
    if isinstance(x, tuple) and isinstance(y, tuple):
        return len(x) == len(y) and all(map(_alike_params, x, y))
    return same(x, y)


class _Member(NamedTuple):
    """A unit in a group: `one` is what runs, once or, for a stack, for each of its `size` layers."""

    unit: Unit
    one: Unit
    size: int

    def in_stack(self, v: Var, w: Var) -> bool:
        """Whether `v`, a value of the unit, has a layer for each that `one` computes with."""
        return bool(self.size) and is_stack(v, w, self.size)

    def values(self) -> list[tuple[Var, Var, P]]:
        """(value, the same of `one`, where it lies) of all operands and results."""
        ins = zip(self.unit.ins, self.one.ins, self.unit.specs, strict=True)
        return [*ins, *zip(self.unit.outs, self.one.outs, self.unit.out_specs, strict=True)]

    def axes_of_stack(self, dealing: Dealing) -> tuple[str, ...] | None:
        """The mesh axes that cut the stacks, where devices have other layers; None: not all stacks are cut alike."""
        found = {axes_in(spec[0]) if spec else () for v, w, spec in self.values() if self.in_stack(v, w)}
        return None if len(found) > 1 else next(iter(found), ())

    def is_worth(self, dealing: Dealing) -> bool:
        """Whether it is cut, or large."""
        cut = any(set(dealing.axes) & {axis for entry in spec for axis in axes_in(entry)} for *_, spec in self.values())
        return cut or max(math.prod(v.aval.shape) for v in self.unit.ins) >= _WORTH_SENDING


@dataclasses.dataclass(frozen=True)
class _Group:
    """Members of one phase whose programs are equal, cut alike."""

    phase: int
    members: tuple[_Member, ...]

    @property
    def program(self) -> Jaxpr:
        """What each owner runs."""
        return self.members[0].one.program

    @property
    def ins(self) -> list[Var]:
        """All operands."""
        return [v for member in self.members for v in member.unit.ins]


def _groups(members: Sequence[_Member]) -> list[_Group]:
    groups: list[list[_Member]] = []
    for member in members:
        mine = next((some for some in groups if _belongs(member, some[0])), None)
        if mine is None:
            groups.append([member])
        else:
            mine.append(member)
    return [_Group(some[0].unit.phase, tuple(some)) for some in groups]


def _belongs(a: _Member, b: _Member) -> bool:
    cuts = [
        [(one.in_stack(v, w), spec[1:] if one.in_stack(v, w) else spec) for v, w, spec in one.values()] for one in (a, b)
    ]
    stacks = [{axes_in(s[0]) if s else () for v, w, s in one.values() if one.in_stack(v, w)} for one in (a, b)]
    return a.unit.phase == b.unit.phase and cuts[0] == cuts[1] and stacks[0] == stacks[1] and same(a.one.program, b.one.program)


# Running an update in which groups have owners.


def _evaluated(program: Jaxpr, values: Sequence[jax.Array], groups: Sequence[_Group], dealing: Dealing) -> list[Tree]:
    jaxpr = open_jaxpr(program)
    env: dict[Var, Tree] = dict(zip(jaxpr.invars, values, strict=True))
    replaced = frozenset[int]().union(*(one.unit.replaces for group in groups for one in group.members))
    left = [eqn for i, eqn in enumerate(jaxpr.eqns) if i not in replaced]
    waiting, dealt = list(groups), 0
    while left or waiting:
        ready, later, known = list[Equation](), list[Equation](), set(env)
        for eqn in left:
            if all(is_literal(v) or v in known for v in eqn.invars):
                ready.append(eqn)
                known |= set(eqn.outvars)
            else:
                later.append(eqn)
        run_equations(jaxpr, ready, env)
        left = later
        group = next((one for one in waiting if all(v in env for v in one.ins)), None)
        if group is None:
            break
        waiting.remove(group)
        dealt = _run(group, env, dealing, dealt)
    return [v.val if is_literal(v) else env[v] for v in jaxpr.outvars]


def _run(group: _Group, env: dict[Var, Tree], dealing: Dealing, dealt: int) -> int:
    """Runs a group; returns the place of the device that comes next, if the last round was not full."""
    work = _Work(group, dealing, dealt)
    specs = [[*member.unit.specs] for member in group.members]
    out_specs = [[*member.unit.out_specs] for member in group.members]
    operands = [[env[v] for v in member.unit.ins] for member in group.members]
    results = jax.shard_map(work.run, mesh=dealing.mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)(
        operands
    )
    for member, values in zip(group.members, results, strict=True):
        env |= dict(zip(member.unit.outs, values, strict=True))
    return work.next_place


class _Work:
    """The work of a group on one device, inside `shard_map`.

    Operands are stacked to (rounds, *axes, ...): the unit at a place of the axes belongs to the device there.
    """

    def __init__(self, group: _Group, dealing: Dealing, first: int):
        self.group, self.sizes = group, dict(dealing.mesh.shape)
        of_stack = group.members[0].axes_of_stack(dealing) or ()
        values = [value for member in group.members for value in member.values()]
        named = {axis for v, w, spec in values for entry in spec for axis in axes_in(entry)} | set(dealing.axes)
        self.axes = tuple(axis for axis in dealing.mesh.axis_names if axis in named and axis not in of_stack)
        self.counts = [
            member.size // math.prod(self.sizes[axis] for axis in of_stack) if member.size else 1
            for member in group.members
        ]
        self.num_units, self.num_devices = sum(self.counts), math.prod(self.sizes[axis] for axis in self.axes)
        self.first = first % self.num_devices
        self.rounds, self.rest = divmod(self.num_units, self.num_devices)
        self.next_place = (self.first + self.rest) % self.num_devices

    def run(self, operands: list[list[jax.Array]]) -> list[list[jax.Array]]:
        first = self.group.members[0]
        shared = [self._is_shared(k) for k in range(len(first.unit.ins))]
        owned = [
            x if shared[k] else self._to_owners([member[k] for member in operands], k)
            for k, x in enumerate(operands[0])
        ]
        outs = self._computed(owned, shared)
        homes = [self._home(out, k) for k, out in enumerate(outs)]
        return [list(column) for column in zip(*homes, strict=True)]

    def _is_shared(self, k: int) -> bool:
        """Whether an operand is one value for all units."""
        first = self.group.members[0]
        one = all(member.unit.ins[k] is first.unit.ins[k] for member in self.group.members)
        return one and not first.in_stack(first.unit.ins[k], first.one.ins[k]) and not first.unit.specs[k]

    def _to_owners(self, parts: list[jax.Array], k: int) -> jax.Array:
        """One operand of all units, a part of each -> (rounds, ...): whole, of the units of this device."""
        pieces, spec = list[jax.Array](), P()
        for part, member, count in zip(parts, self.group.members, self.counts, strict=True):
            v, w = member.unit.ins[k], member.one.ins[k]
            stacked = member.in_stack(v, w)
            spec = _inside(member.unit.specs[k], stacked=stacked, ndim=w.aval.ndim)
            shape = (1, *part.shape[1:]) if stacked else part.shape
            pieces.append(part.reshape((count, *shape)) if stacked else jnp.broadcast_to(part, (count, *shape)))
        return self._sent(self._in_rounds(jnp.concatenate(pieces)), spec)

    def _in_rounds(self, x: jax.Array) -> jax.Array:
        """(units, ...) -> (rounds, *axes, ...); a last round that is not full begins at device `first`."""
        full, last = x[: self.rounds * self.num_devices], x[self.rounds * self.num_devices :]
        if self.rest:
            spare = jnp.broadcast_to(x[:1], (self.num_devices - self.rest, *x.shape[1:]))
            last = jnp.roll(jnp.concatenate([last, spare]), self.first, 0)
        x = jnp.concatenate([full, last]) if self.rounds and self.rest else last if self.rest else full
        return x.reshape((-1, *(self.sizes[axis] for axis in self.axes), *x.shape[1:]))

    def _units(self, x: jax.Array) -> jax.Array:
        """The inverse of `_in_rounds`."""
        x = x.reshape((-1, *x.shape[1 + len(self.axes) :]))
        full, last = x[: self.rounds * self.num_devices], x[self.rounds * self.num_devices :]
        if self.rest:
            last = jnp.roll(last, -self.first, 0)[: self.rest]
        return jnp.concatenate([full, last]) if self.rounds and self.rest else last if self.rest else full

    def _sent(self, x: jax.Array, spec: P) -> jax.Array:
        left = list(self.axes)
        for dim, entry in enumerate(spec):
            axes = axes_in(entry)
            if not axes:
                continue
            x = self._in_front(x, left, axes)
            x = lax.all_to_all(x, axes, split_axis=0, concat_axis=1 + 1 + len(left) - len(axes) + dim, tiled=True)[0]
            left = [axis for axis in left if axis not in axes]
        for axis in [*left]:
            x = lax.dynamic_index_in_dim(x, lax.axis_index(axis), 1 + left.index(axis), keepdims=False)
            left.remove(axis)
        return x

    def _in_front(self, x: jax.Array, left: list[str], axes: Sequence[str]) -> jax.Array:
        """(rounds, *left, ...) -> (devices over `axes`, rounds, *others, ...)."""
        x = jnp.moveaxis(x, [1 + left.index(axis) for axis in axes], list(range(len(axes))))
        return x.reshape((-1, *x.shape[len(axes) :]))

    def _computed(self, owned: list[jax.Array], shared: list[bool]) -> list[jax.Array]:
        """The results of this device's units, (rounds, ...) each."""
        run = core().jaxpr_as_fun(self.group.program)
        mine = [x for x, yes in zip(owned, shared, strict=True) if not yes]

        def one(some: list[jax.Array]) -> list[jax.Array]:
            given = iter(some)
            return run(*(x if yes else next(given) for x, yes in zip(owned, shared, strict=True)))

        size = max(math.prod(x.shape[1:]) for x in mine)
        together = max(1, min(_AT_ONCE // max(size, 1), self.rounds))
        full = lax.map(one, [x[: self.rounds] for x in mine], batch_size=together) if self.rounds else None
        if self.rounds and together == self.rounds:
            full = jax.vmap(one)([x[: self.rounds] for x in mine])
        if not self.rest:
            return full or []
        last = [x[self.rounds] for x in mine]
        is_mine = (lax.axis_index(self.axes) - self.first) % self.num_devices < self.rest
        found = lax.cond(is_mine, one, lambda some: [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(one, some)], last)
        found = [x[None] for x in found]
        return found if full is None else [jnp.concatenate(pair) for pair in zip(full, found, strict=True)]

    def _home(self, x: jax.Array, k: int) -> list[jax.Array]:
        """One result of this device's units, (rounds, ...) -> each member's part of it."""
        first = self.group.members[0]
        v, w = first.unit.outs[k], first.one.outs[k]
        spec = _inside(first.unit.out_specs[k], stacked=first.in_stack(v, w), ndim=w.aval.ndim)
        front: list[str] = []  # the axes in front, the last sent first
        for dim, entry in enumerate(spec):
            axes = axes_in(entry)
            if axes:
                split = len(front) + 1 + dim
                x = lax.all_to_all(x[None], axes, split_axis=1 + split, concat_axis=0, tiled=True)
                x = x.reshape((*(self.sizes[axis] for axis in axes), *x.shape[1:]))
                front = [*axes, *front]
        missing = [axis for axis in self.axes if axis not in front]
        for axis in missing:
            x = lax.all_gather(x, axis)
            front = [axis, *front]
        x = jnp.moveaxis(x, len(front), 0)
        x = jnp.moveaxis(x, [1 + front.index(axis) for axis in self.axes], list(range(1, 1 + len(front))))
        return self._by_member(self._units(x), k)

    def _by_member(self, x: jax.Array, k: int) -> list[jax.Array]:
        parts, start = list[jax.Array](), 0
        for member, count in zip(self.group.members, self.counts, strict=True):
            part, start = x[start : start + count], start + count
            stacked = member.in_stack(member.unit.outs[k], member.one.outs[k])
            parts.append(part.reshape((count, *part.shape[2:])) if stacked else part[0])
        return parts


def _inside(spec: P, *, stacked: bool, ndim: int) -> P:
    """The spec of one layer of a stack, whose first dim is 1."""
    return canonical([None, *spec[1:]]) if stacked and ndim else spec
