"""A walk over two programs side by side: the loss of each device's rows, and the loss of all rows."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxshard.base.types import Equation, Jaxpr, Var
from jaxshard.programs.jaxprs import is_literal, is_ref, number_of, open_jaxpr, subprograms
from jaxshard.programs.paired import Partners, Unlike, paired, same
from jaxshard.programs.primitives import BROADCAST, ONLY_READS, OWN_GRADIENT, RESHAPES, Kind, kind_of, takes_whole_ref
from jaxshard.programs.rows.arithmetic import Pair
from jaxshard.programs.rows.labels import ANY, ROW, SAME, Label, Trail, lost, number
from jaxshard.programs.rows.rules import backward
from jaxshard.programs.walk import Walk

Labels: TypeAlias = list[Label]

_SIZED: dict[Kind, tuple[str, ...]] = {
    "broadcast": ("shape",),
    "dynamic_slice": ("slice_sizes",),
    "gather": ("slice_sizes",),
    "iota": ("shape",),
    "random": ("shape",),
    "reshape": ("new_sizes",),
    "slice": ("start_indices", "limit_indices"),
    "split": ("sizes",),
    "tile": ("reps",),
}
"""Parameters that may differ between the two programs; the rules compare them."""

_NOT_COMPARED = ("sharding", "out_sharding")


class PairedWalk(Walk[Label]):
    """Labels the values of a loss of each device's rows, with its partner in the loss of all rows beside each equation.

    Args:
      parts: the number of devices that the rows are split over.
      num_rows: the rows of each.

    Attributes:
      group: the number of neighbouring rows that are computed with together, as far as shapes show.
    """

    nothing = SAME

    def __init__(self, parts: int, num_rows: int):
        self._parts, self._num_rows = parts, num_rows
        self._twins: dict[int, Jaxpr] = {}
        self._alive: list[Jaxpr] = []  # whose ids are keys
        self._trail: Trail = ()
        self._two: Equation | None = None
        self.group = 1

    @property
    def _partner(self) -> Equation:
        """The partner of the equation that is labelled."""
        assert self._two is not None
        return self._two

    def outputs(self, one: Jaxpr, two: Jaxpr, labels: Sequence[Label]) -> Labels:
        """The labels of the outputs of two programs, from those of their inputs.

        Raises:
          paired.Unlike: the two have different operations.
        """
        self._alive += [one, two]
        with self._inside([(one, two)]):
            return self.through(one, labels)

    @contextlib.contextmanager
    def _inside(self, pairs: Sequence[tuple[Jaxpr, Jaxpr]]) -> Iterator[None]:
        """Within it, `through` finds the partners of these programs."""
        before, self._twins = self._twins, {id(open_jaxpr(a)): b for a, b in pairs}
        try:
            yield
        finally:
            self._twins = before

    def through(self, program: Jaxpr, values: Sequence[Label]) -> Labels:
        """The labels of a program's outputs, from those of its inputs."""
        twin = self._twins[id(open_jaxpr(program))]
        one, two, partners = open_jaxpr(program), open_jaxpr(twin), Partners()
        env: dict[Var, Label] = self._constants(program, twin) | dict(zip(one.invars, values, strict=True))
        for a, b in paired(program, twin, partners, self._does_nothing):
            _check_wired(a.invars, b.invars, partners, (a, b))
            known = [_number(v, w) if is_literal(v) else env[v] for v, w in zip(a.invars, b.invars, strict=True)]
            env |= dict(zip(a.outvars, self._pair(a, b, known), strict=True))
            env |= self._written(a, known)
        _check_wired(one.outvars, two.outvars, partners, (None, None))
        outs = zip(one.outvars, two.outvars, strict=True)
        return [_number(v, w) if is_literal(v) else env[v] for v, w in outs]

    def _does_nothing(self, eqn: Equation) -> bool:
        """Whether an operation does nothing in the loss of all rows: a collective along axes of size 1 there."""
        return False

    def _constants(self, one: Jaxpr, two: Jaxpr) -> dict[Var, Label]:
        mine, others = (list(getattr(program, "consts", ())) for program in (one, two))
        names = open_jaxpr(one).constvars
        if len(mine) != len(others) or len(mine) != len(names):
            return dict.fromkeys(names, lost("unknown", self._trail))
        return {v: self._constant(x, y) for v, x, y in zip(names, mine, others, strict=True)}

    def _constant(self, x: object, y: object) -> Label:
        if same(x, y):
            return SAME
        if np.shape(x) == np.shape(y) == () and not isinstance(x, jax.core.Tracer):  # pyright: ignore
            return number(float(np.asarray(x)), float(np.asarray(y))) or lost("count", self._trail)
        return self._equal_rows(x, y) or lost("position", self._trail)

    def _equal_rows(self, x: Any, y: Any) -> Label | None:
        """The label of constants of equal elements, of which one has more: ones for each row."""
        one, two = np.shape(x), np.shape(y)
        if len(one) != len(two) or isinstance(x, jax.core.Tracer) or 0 in one:  # pyright: ignore
            return None
        grown, values = [d for d in range(len(one)) if one[d] != two[d]], (np.asarray(x), np.asarray(y))
        if len(grown) != 1 or any((v != v.flat[0]).any() for v in values):
            return None
        label = number(*(float(v.flat[0]) for v in values))
        return label and label.with_(kind="rows", dim=grown[0], outer=ANY, fixed=True)

    def _pair(self, a: Equation, b: Equation, known: Labels) -> Sequence[Label]:
        before = self._trail
        self._trail = (*before, a)
        programs = [*subprograms(a)], [*subprograms(b)]
        if len(programs[0]) != len(programs[1]):
            raise Unlike(a, b)
        try:
            with self._inside([*zip(*programs, strict=True)]):
                self._two = b
                outs = self._equation(a, known)
            return [self._checked(Pair(a, b, self._parts, self._trail), i, x) for i, x in enumerate(outs)]
        finally:
            self._trail = before

    def _checked(self, pair: Pair, position: int, label: Label) -> Label:
        """The label, if the shapes in the two programs agree with it."""
        if label.kind == "other" or is_ref(pair.one.outvars[position]):
            return label
        if not hasattr(pair.one.outvars[position].aval, "shape"):
            return label
        rows = [label.dim] if label.kind == "rows" and label.dim != ROW else []
        one, two = pair.out_shapes(position)
        if len(one) != len(two) or pair.grown(position) != rows:
            return pair.no("unknown")
        for dim in rows:
            if two[dim] != one[dim] * self._parts or one[dim] % max(label.outer, 1):
                return pair.no("unknown")
            block = one[dim] // max(label.outer, 1)
            if label.outer and not label.fixed and self._num_rows % block == 0:
                self.group = int(np.lcm(self.group, self._num_rows // block))
        return label

    def _written(self, a: Equation, known: Labels) -> dict[Var, Label]:
        """The labels of mutable arrays after an equation: of a value that replaces all of one, else unknown."""
        refs = [v for v in a.invars if is_ref(v)]
        if not refs or a.primitive.name in ONLY_READS:
            return {}
        if takes_whole_ref(a):
            return {refs[0]: known[1]}
        return dict.fromkeys(refs, lost("unknown", (*self._trail, a)))


def _number(one: Var, two: Var) -> Label:
    """The label of a number that is written into the programs."""
    a, b = number_of(one), number_of(two)
    if a is None or b is None:
        return SAME if same(one.val, two.val) else lost("count", ())
    return number(a, b) or lost("count", ())


def _check_wired(
    vs: Sequence[Var], ws: Sequence[Var], partners: Partners, eqns: tuple[Equation | None, Equation | None]
) -> None:
    """Raises `Unlike` unless operands are partners, or both numbers."""
    for v, w in zip(vs, ws, strict=True):
        if is_literal(v) != is_literal(w) or (not is_literal(v) and not partners.are(v, w)):
            raise Unlike(*eqns)


def same_params(pair: Pair) -> bool:
    """Whether both operations have the same parameters, programs and shardings aside."""
    one, two, kind = pair.one.params, pair.two.params, kind_of(pair.one)
    if one.keys() != two.keys():
        return False
    sized = (*_NOT_COMPARED, *(_SIZED.get(kind, ()) if kind else ()))
    keys = [key for key in one if key not in sized]
    return all(same(one[key], two[key]) for key in keys if not hasattr(open_jaxpr(one[key]), "eqns"))


def scale_alike(programs: Sequence[Jaxpr], rows: Sequence[int]) -> bool:
    """Whether three programs, of ever more rows, are one function of their number: so that a proof about the second
    and the third is one about the first and the third.

    They have the same operations on the same values, reshapes aside, for which a dim of one row needs not to be the
    same; and all numbers in them, and all sizes, are powers of the number of rows times a constant.
    """
    try:
        return _Triple(rows).alike(programs)
    except Exception:  # of any type: a user's own rule may be traced anew
        return False


class _Triple:
    """A comparison of three programs."""

    def __init__(self, rows: Sequence[int]):
        self._logs = math.log(rows[1] / rows[0]), math.log(rows[2] / rows[1])
        self._in_rule = False  # a backward pass, which is not differentiated again; it has its own forward pass in it

    def alike(self, programs: Sequence[Jaxpr]) -> bool:
        """Whether the programs have the same operations, numbers and sizes, as functions of the number of rows."""
        if len({(len(open_jaxpr(x).constvars), len(open_jaxpr(x).invars)) for x in programs}) > 1:
            return False
        steps, outs = zip(*map(_steps, programs), strict=True)
        if len({*map(len, steps)}) > 1 or not self._operands(outs):
            return False
        consts = zip(*(getattr(x, "consts", ()) for x in programs), strict=True)
        return all(map(self._step, zip(*steps, strict=True))) and all(map(self._constant, consts))

    def _step(self, steps: Sequence[tuple[Equation, list[object]]]) -> bool:
        eqns = [eqn for eqn, _ in steps]
        if len({(x.primitive.name, len(x.invars), len(x.outvars)) for x in eqns}) > 1:
            return False
        if not self._operands([operands for _, operands in steps]):
            return False
        sizes = zip(*([_size(v) for v in eqn.outvars] for eqn in eqns), strict=True)
        words = [{key: x for key, x in eqn.params.items() if isinstance(x, str | bool | float)} for eqn in eqns]
        wholes = [[x for x in eqn.params.values() if type(x) is int] for eqn in eqns]
        if not all(map(self._follows, sizes)) or any(x != words[0] for x in words[1:]):
            return False
        if len({*map(len, wholes)}) > 1 or not all(map(self._follows, zip(*wholes, strict=True))):
            return False
        inner = [list(subprograms(eqn)) for eqn in eqns]
        if len({*map(len, inner)}) > 1 or not all(map(self.alike, zip(*inner, strict=True))):
            return False
        if eqns[0].primitive.name not in OWN_GRADIENT or self._in_rule:
            return True
        self._in_rule = True
        try:
            return self.alike([backward(eqn) for eqn in eqns])
        finally:
            self._in_rule = False

    def _operands(self, operands: Sequence[Sequence[object]]) -> bool:
        if len({*map(len, operands)}) > 1:
            return False
        return all(map(self._operand, zip(*operands, strict=True)))

    def _operand(self, each: Sequence[object]) -> bool:
        numbers = [isinstance(x, float) for x in each]
        return self._follows(each) if all(numbers) else not any(numbers) and each[0] == each[1] == each[2]  # pyright: ignore

    def _constant(self, each: Sequence[object]) -> bool:
        if any(isinstance(x, jax.core.Tracer) for x in each):  # pyright: ignore
            return each[0] is each[1] is each[2]
        return same(each[0], each[1]) and same(each[1], each[2])

    def _follows(self, numbers: Sequence[float]) -> bool:
        """Whether three numbers are a constant times a power of the number of rows."""
        a, b, c = map(float, numbers)
        if a == b == c or all(map(math.isnan, (a, b, c))):
            return True
        if not (a * b > 0 and b * c > 0 and math.isfinite(a * b * c)):
            return False
        return math.isclose(math.log(b / a) * self._logs[1], math.log(c / b) * self._logs[0], abs_tol=1e-6)


def _steps(program: Jaxpr) -> tuple[list[tuple[Equation, list[object]]], list[object]]:
    """(the operations but reshapes, each with its operands; the results): numbers, or where they come from."""
    opened = open_jaxpr(program)
    origin: dict[Var, object] = {v: ("input", i) for i, v in enumerate([*opened.constvars, *opened.invars])}
    steps = list[tuple[Equation, list[object]]]()

    def of(v: Var) -> object:
        if not is_literal(v):
            return origin[v]
        number = number_of(v)
        return str(v.val) if number is None else number

    for eqn in opened.eqns:
        if _is_view(eqn):
            origin[eqn.outvars[0]] = of(eqn.invars[0])
            continue
        origin |= {v: (len(steps), i) for i, v in enumerate(eqn.outvars)}
        steps.append((eqn, [of(v) for v in eqn.invars]))
    return steps, [of(v) for v in opened.outvars]


def _size(v: Var) -> int:
    return math.prod(getattr(v.aval, "shape", ()))


def _is_view(eqn: Equation) -> bool:
    return eqn.primitive.name == BROADCAST or eqn.primitive.name in RESHAPES
