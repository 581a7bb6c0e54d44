"""Finds which values of a traced update belong to which gradient; runs an update with some pieces replaced."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Tree, Var
from jaxshard.programs.jaxprs import is_literal, open_jaxpr, run_equations

Component: TypeAlias = int  # the index of the one gradient that a value belongs to, or one of these two:
FREE, SHARED = -1, -2  # it belongs to none, or to several


def is_big(v: Var) -> bool:
    """Whether this is an array, not a scalar; one of a single element counts, as a stack may have one layer."""
    return len(getattr(v.aval, "shape", ())) > 0


class Components:
    """The components of a flat program without constants, whose first inputs are gradients.

    Attributes:
      maker: for each value, the index of the equation that computes it.
      users: for each value, the indices of the equations that read it.
      results: the program's outputs.
      component_of: of each big value.
      component: of each equation.
    """

    def __init__(self, jaxpr: OpenJaxpr, num_grads: int):
        self.jaxpr, self.eqns = jaxpr, list(jaxpr.eqns)
        self.maker = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.users: dict[Var, list[int]] = {}
        for i, eqn in enumerate(self.eqns):
            for v in eqn.invars:
                if not is_literal(v):
                    self.users.setdefault(v, []).append(i)
        self.results = {v for v in jaxpr.outvars if not is_literal(v)}
        self.component_of, self.component = self._components(num_grads)

    def _components(self, num_grads: int) -> tuple[dict[Var, Component], list[Component]]:
        """The component of each big value, and of each equation.

        A component is named by the gradient that its arrays depend on. A value that depends on no gradient (a power of
        the state, before it meets the gradient) joins its only reader's component.
        """
        grads = {v: frozenset([i]) for i, v in enumerate(self.jaxpr.invars[:num_grads]) if is_big(v)}
        of: dict[Var, frozenset[int]] = dict(grads)  # the gradients that a value depends on
        constant: set[Var] = set()
        for eqn in self.eqns:
            read = [v for v in eqn.invars if not is_literal(v)]
            big = [v for v in read if is_big(v)]
            every, arrays = (frozenset[int]().union(*(of.get(v, ()) for v in some)) for some in (read, big))
            of |= {v: (arrays or every) if is_big(v) and big else every for v in eqn.outvars}
            constant |= set(eqn.outvars if all(v in constant for v in read) else ())
        readers: dict[Var, frozenset[int]] = {}
        eqns: list[Component] = []
        for eqn in reversed(self.eqns):
            made = frozenset[int]().union(*(of[v] for v in eqn.outvars))
            found = made or frozenset[int]().union(*(readers.get(v, ()) for v in eqn.outvars))
            for v in () if made and not any(map(is_big, eqn.outvars)) else eqn.invars:
                if not is_literal(v):
                    readers[v] = readers.get(v, frozenset()) | found
            eqns.append(FREE if not found or eqn.outvars[0] in constant else _alone(found))
        eqns.reverse()
        variables = [*self.jaxpr.invars, *self.maker]
        whose = {v: of.get(v) or readers.get(v) or frozenset[int]() for v in variables if is_big(v)}
        return {v: _alone(ids) if ids else FREE for v, ids in whose.items()}, eqns

    def makers(self, i: int) -> list[int]:
        """The equations that make the operands of equation `i`."""
        return [self.maker[v] for v in self.eqns[i].invars if not is_literal(v) and v in self.maker]

    def phases(self, marked: Sequence[bool], component: Sequence[Component] | None = None) -> list[int]:
        """The phase of each equation: how many times its data crossed to another component after a marked equation.

        So every path between two equations of one component and phase stays within both. `component` may replace the
        components of the equations.
        """
        component, phase, after = component or self.component, list[int](), list[bool]()
        for i, yes in enumerate(marked):
            makers, own = self.makers(i), component[i]
            phase.append(max((phase[m] + (component[m] != own and after[m]) for m in makers), default=0))
            after.append(yes or any(after[m] for m in makers))
        return phase


def _alone(ids: frozenset[int]) -> Component:
    return next(iter(ids)) if len(ids) == 1 else SHARED


class Piece(NamedTuple):
    """Some equations of a program, by index, and `run`, which replaces them: it computes `outs` from `ins`."""

    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    replaces: frozenset[int]
    run: Callable[[list[Tree]], Sequence[Tree]]


def run_in_pieces(program: Jaxpr, values: Sequence[Tree], pieces: Sequence[Piece]) -> list[Tree]:
    """The results of a program without constants."""
    jaxpr = open_jaxpr(program)
    env: dict[Var, Tree] = dict(zip(jaxpr.invars, values, strict=True))
    replaced = frozenset[int]().union(*(piece.replaces for piece in pieces))
    left, waiting = [eqn for i, eqn in enumerate(jaxpr.eqns) if i not in replaced], list(pieces)
    while left or waiting:
        left = _run_ready(jaxpr, left, env)
        piece = next((one for one in waiting if all(v in env for v in one.ins)), None)
        if piece is None:
            break
        waiting.remove(piece)
        env |= dict(zip(piece.outs, piece.run([env[v] for v in piece.ins]), strict=True))
    return [v.val if is_literal(v) else env[v] for v in jaxpr.outvars]


def _run_ready(jaxpr: OpenJaxpr, eqns: Sequence[Equation], env: dict[Var, Tree]) -> list[Equation]:
    """Runs the equations whose operands are known; returns the others."""
    ready, later, known = list[Equation](), list[Equation](), set(env)
    for eqn in eqns:
        if all(is_literal(v) or v in known for v in eqn.invars):
            ready.append(eqn)
            known |= set(eqn.outvars)
        else:
            later.append(eqn)
    run_equations(jaxpr, ready, env)
    return later
