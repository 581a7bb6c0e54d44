"""Cuts an update into units: per leaf, everything between its first and last matrix operation, for one device.

Muon, Shampoo and SOAP treat each leaf by itself, but for a few scalars (a global norm). The equations before and after
a unit are elementwise, or couple leaves, and stay in the global view.
"""

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import PartitionSpec as P

from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Var, axes_of, canonical
from jaxshard.programs.components import FREE, Component, Components, is_big
from jaxshard.programs.jaxprs import equations_inside, is_literal, open_jaxpr, operands_of, part_of
from jaxshard.programs.primitives import BROADCAST, CONTROL, LINEAR_ALGEBRA, POINTWISE, PRODUCT, RESHAPES, TRANSPOSE


@dataclasses.dataclass(frozen=True)
class Unit:
    """Work that one device can do: `program` computes `outs` from `ins`.

    Attributes:
      leaf: the index of its gradient.
      phase: units of one phase do not depend on each other.
      specs, out_specs: the layouts of `ins`, and the wanted layouts of `outs`.
      replaces: the indices of the equations that it replaces.
    """

    leaf: int
    phase: int
    program: Jaxpr
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    specs: tuple[P, ...]
    out_specs: tuple[P, ...]
    replaces: frozenset[int]


def units(
    program: Jaxpr, num_grads: int, specs: Sequence[P | None], out_specs: Sequence[P | None] | None = None
) -> list[Unit]:
    """The units of an update, in the order of their first equations.

    Args:
      program: a flat program without constants; its first inputs are the gradients.
      specs, out_specs: the layouts of its inputs, and the wanted layouts of its outputs.
    """
    eqns = open_jaxpr(program).eqns
    if not any(map(_is_heavy, eqns)) or any(eqn.effects for eqn in eqns):  # whose order counts
        return []
    return _Finder(open_jaxpr(program), num_grads, specs, out_specs).found()


def _is_heavy(eqn: Equation) -> bool:
    """Whether an equation is, or contains, a product of two matrices or linear algebra."""
    name = eqn.primitive.name
    if name == PRODUCT:
        return bool(eqn.outvars[0].aval.ndim) and all(v.aval.ndim >= 2 for v in eqn.invars)
    if name in CONTROL:
        return any(map(_is_heavy, (e for e in equations_inside(eqn) if e.primitive.name not in CONTROL)))
    return name in LINEAR_ALGEBRA


class _Finder(Components):
    """Finds the units of one program; equations are given by index."""

    def __init__(
        self, jaxpr: OpenJaxpr, num_grads: int, specs: Sequence[P | None], out_specs: Sequence[P | None] | None
    ):
        super().__init__(jaxpr, num_grads)
        self.phase, self.forwards = self._phases()
        self.spec = self._specs(specs)
        asked = zip(jaxpr.outvars, out_specs or (), strict=False)
        self.asked = {v: spec for v, spec in asked if not is_literal(v) and spec is not None}
        self.by_shape = self._by_shape()

    def found(self) -> list[Unit]:
        cores: dict[tuple[int, int], set[int]] = {}
        for i in self._between():
            if self.component[i] >= 0:
                cores.setdefault((self.component[i], self.phase[i]), set()).add(i)
        taken = frozenset[int]().union(*cores.values())
        made = [self._unit(*key, inside, taken - inside) for key, inside in cores.items()]
        return sorted((unit for unit in made if unit is not None), key=lambda unit: min(unit.replaces))

    # Which equations belong together.

    def _phases(self) -> tuple[list[int], list[bool]]:
        """The phase of each equation; whether it is, or depends on, a matrix operation of its component and phase."""
        heavy = [_is_heavy(eqn) for eqn in self.eqns]
        phase, after = self.phases(heavy), list[bool]()
        for i, yes in enumerate(heavy):
            here = [m for m in self.makers(i) if (self.component[m], phase[m]) == (self.component[i], phase[i])]
            after.append(yes or any(after[m] for m in here))
        return phase, after

    def _between(self) -> list[int]:
        """The equations between the first and the last matrix operation of their component and phase."""
        before = [_is_heavy(eqn) for eqn in self.eqns]
        for i in reversed(range(len(self.eqns))):
            for m in self.makers(i) if before[i] else ():
                if (self.component[m], self.phase[m]) == (self.component[i], self.phase[i]):
                    before[m] = True
        return [i for i in range(len(self.eqns)) if before[i] and self.forwards[i]]

    # Where values lie.

    def _specs(self, specs: Sequence[P | None]) -> dict[Var, P | None]:
        """The layout of each array; None if unknown."""
        found: dict[Var, P | None] = dict(zip(self.jaxpr.invars, specs, strict=True))
        for eqn in self.eqns:
            name, big = eqn.primitive.name, [v for v in eqn.invars if not is_literal(v) and is_big(v)]
            spec = None
            if big and name in POINTWISE:
                spec = max((one for v in big if (one := found.get(v)) is not None), key=_num_axes, default=None)
            elif big and name == TRANSPOSE and (one := found.get(big[0])) is not None:
                entries = [*one, *[None] * (big[0].aval.ndim - len(one))]
                spec = canonical(entries[d] for d in eqn.params["permutation"])
            found |= dict.fromkeys(eqn.outvars, spec)
        return found

    def _by_shape(self) -> dict[tuple[Component, tuple[int, ...]], P]:
        """(component, shape) -> the layout of its arguments of that shape."""
        found: dict[tuple[Component, tuple[int, ...]], P] = {}
        for v in self.jaxpr.invars:
            spec, key = self.spec.get(v), (self.component_of.get(v, FREE), tuple(getattr(v.aval, "shape", ())))
            if spec is not None and (key not in found or _num_axes(spec) > _num_axes(found[key])):
                found[key] = spec
        return found

    # One unit.

    def _unit(self, own: Component, phase: int, inside: set[int], others: set[int] | frozenset[int]) -> Unit | None:
        inside = self._with_readers(own, phase, set(inside), others)
        copied = self._made_again(own, inside, others)
        places = sorted(inside | copied)
        eqns = [self.eqns[i] for i in places]
        ins = tuple(operands_of(eqns))
        outs = tuple(v for i in sorted(inside) for v in self.eqns[i].outvars if self._leaves(v, inside))
        if any(self.maker.get(v, -1) in copied for v in outs) or not outs:
            return None
        specs = tuple(self._place(own, v) for v in ins)
        return Unit(
            own,
            phase,
            part_of(self.jaxpr, eqns, ins, outs),
            ins,
            outs,
            specs,
            tuple(self.asked.get(v, self._place(own, v)) for v in outs),
            frozenset(inside),
        )

    def _place(self, own: Component, v: Var) -> P:
        if not is_big(v):
            return P()
        known = self.spec.get(v)
        return self.by_shape.get((own, tuple(v.aval.shape)), P()) if known is None else known

    def _leaves(self, v: Var, inside: set[int]) -> bool:
        """Whether a value is read outside of these equations."""
        return v in self.results or any(user not in inside for user in self.users.get(v, ()))

    def _with_readers(
        self, own: Component, phase: int, inside: set[int], others: set[int] | frozenset[int]
    ) -> set[int]:
        """Adds the equations that read a result as a whole (its transpose, its norm), up to elementwise ones."""
        while True:
            added = {
                user
                for i in inside
                for v in self.eqns[i].outvars
                for user in self.users.get(v, ())
                if user not in inside
                and user not in others
                and (self.component[user], self.phase[user]) == (own, phase)
                and (self._reads_whole(user) or not self._is_placed(own, v))
            }
            if not added:
                return inside
            inside = self._closed(own, phase, inside | added)

    def _reads_whole(self, i: int) -> bool:
        eqn = self.eqns[i]
        return eqn.primitive.name not in POINTWISE | {BROADCAST} and any(
            not is_literal(v) and is_big(v) for v in eqn.invars
        )

    def _is_placed(self, own: Component, v: Var) -> bool:
        return not is_big(v) or v in self.asked or (own, tuple(v.aval.shape)) in self.by_shape

    def _closed(self, own: Component, phase: int, inside: set[int]) -> set[int]:
        """Adds every equation of this component and phase that lies on a path between two of these."""
        mine = [i for i in range(len(self.eqns)) if (self.component[i], self.phase[i]) == (own, phase)]
        after, before = set(inside), set(inside)
        for i in mine:
            if any(m in after for m in self.makers(i)):
                after.add(i)
        for i in reversed(mine):
            if any(user in before for v in self.eqns[i].outvars for user in self.users.get(v, ())):
                before.add(i)
        return after & before

    def _made_again(self, own: Component, inside: set[int], others: set[int] | frozenset[int]) -> set[int]:
        """The equations that a unit repeats: constants, broadcast scalars, operands of unknown layout, and values made
        from one array if that is less to send."""
        again: set[int] = set()
        while True:
            ins = [v for v in operands_of([self.eqns[i] for i in sorted(inside | again)]) if is_big(v)]
            found = {self.maker[v] for v in ins if v in self.maker and self._must_be_made(own, v)}
            found = {i for i in found if i not in others and not self.forwards[i]}
            if not found:
                origins: dict[Var, list[tuple[Var, list[int]]]] = {}
                for v in ins:
                    origin, steps = self._origin(own, v)
                    origins.setdefault(origin, []).append((v, steps))
                for origin, some in origins.items():
                    if _bytes(origin) < sum(_bytes(v) for v, _ in some):
                        found |= {i for _, steps in some for i in steps}
            if not found:
                return again
            again |= found

    def _must_be_made(self, own: Component, v: Var) -> bool:
        maker = self.maker[v]
        small = not any(not is_literal(one) and is_big(one) for one in self.eqns[maker].invars)
        unknown = self.spec.get(v) is None and self.component[maker] == own
        return self.component[maker] == FREE or small or unknown

    def _origin(self, own: Component, v: Var) -> tuple[Var, list[int]]:
        """(the one array that a value is made from by moves and elementwise operations, these equations)."""
        steps: list[int] = []
        while (i := self.maker.get(v)) is not None and self.component[i] == own and not self.forwards[i]:
            eqn = self.eqns[i]
            big = {one for one in eqn.invars if not is_literal(one) and is_big(one)}
            if len(big) != 1 or eqn.primitive.name not in POINTWISE | RESHAPES | {TRANSPOSE}:
                break
            steps.append(i)
            (v,) = big
        return v, steps


def _bytes(v: Var) -> int:
    return math.prod(v.aval.shape) * getattr(v.aval.dtype, "itemsize", 4)


def _num_axes(spec: P) -> int:
    return len(axes_of(spec))
