"""Decides whether a transformation may run on shards, from its traced update, not from names.

The update is traced twice, on shards and on whole leaves, and the two programs are walked side by side. Each pair of
values gets a label, the relation between the two:
  SAME   they are equal, on every device;
  FILL   all elements of both are one number (scalars too); the shapes may differ;
  Shard  the first is this device's shard of the second, cut like a leaf;
  Mixed  nothing is known.
The update must return a Shard for each cut leaf, and SAME for each whole leaf (FILL is right for both). An operation
without a known rule gives Mixed, so anything unproven is refused. So is any operation with an effect.

If no leaf is cut, the update is traced once, and compared with itself: SAME then means equal on every device.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxshard.base.types import Equation, Jaxpr, Var, varying
from jaxshard.optimizer.local.labels import (
    FILL,
    SAME,
    Label,
    Mixed,
    Shard,
    Trail,
    cut_of,
    is_same,
    join,
    mixed,
    shape_of,
    size_of,
)
from jaxshard.programs.jaxprs import inner_jaxpr, is_literal, open_jaxpr, scan_split, subprograms
from jaxshard.programs.paired import Partners, Unlike, paired, same
from jaxshard.programs.primitives import (
    ALL_REDUCES,
    BARRIER,
    BROADCAST,
    CALLS,
    COND,
    CONTROL,
    DEBUGGING,
    FILL_IF_ANY,
    KEEPS_FILL,
    POINTWISE,
    PURE,
    RESHAPE,
    SCAN,
)

_SHAPES = frozenset({"shape", "new_sizes"})  # parameters that repeat the results' shapes, which are compared anyway
_FOLLOWED = frozenset({"jaxpr", "branches", "cond_jaxpr", "body_jaxpr"})  # programs, which are walked themselves
KNOWN = POINTWISE | PURE
"""Operations that the rules below know; `CALLS` and `CONTROL` are followed, others are refused."""


class NotElementwise(Exception):
    """The computation mixes elements, varies or has an effect; `mixed` tells how and where."""

    def __init__(self, mixed: Mixed):
        super().__init__(mixed.what)
        self.mixed = mixed


class Result(NamedTuple):
    """The requirement for a result: the leaf it belongs to, how that is cut, and the shape of a device's shard."""

    path: str
    label: Label
    shape: tuple[int, ...]


def check_elementwise(
    on_shards: Jaxpr, on_whole: Jaxpr, labels: Sequence[Label], results: Sequence[Result], axes: frozenset[str]
) -> None:
    """Checks that an update of shards returns the shards of the update of whole leaves.

    Args:
      on_shards: the closed jaxpr of the update, traced on shards.
      on_whole: the same, traced on whole leaves; or `on_shards` itself, if nothing is cut.
      labels: the relation of each pair of inputs.
      results: the requirement for each result.
      axes: the mesh axes along which devices hold different shards of leaves and batch.

    Raises:
      NotElementwise: the check cannot prove it.
    """
    for program in (on_shards, on_whole):
        _check_effects(program, ())
    one, two = open_jaxpr(on_shards), open_jaxpr(on_whole)
    if not len(one.outvars) == len(two.outvars) == len(results):
        raise NotElementwise(Mixed("it returns a different structure on shards"))
    found = _Comparison(axes, on_shards is on_whole).relate(on_shards, on_whole, labels, ())
    for v, label, wanted in zip(one.outvars, found, results, strict=True):
        if isinstance(label, Mixed):
            raise NotElementwise(label)
        if shape_of(v) != wanted.shape or (label != FILL and cut_of(label) != cut_of(wanted.label)):
            raise NotElementwise(Mixed(f"its result for {wanted.path} is not sharded like that leaf"))


def _check_effects(program: Jaxpr, trail: Trail) -> None:
    """Raises NotElementwise for an equation with an effect, at any depth; debugging callbacks are allowed."""
    for eqn in open_jaxpr(program).eqns:
        inside = list(subprograms(eqn)) if eqn.primitive.name in CALLS | CONTROL else []
        for inner in inside:
            _check_effects(inner, (*trail, eqn))
        has_one = any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)  # it names an axis
        if has_one and not inside and eqn.primitive.name not in DEBUGGING:
            what = f"it applies `{eqn.primitive.name}`, which has an effect"
            raise NotElementwise(Mixed(what, (*trail, eqn), "has an effect"))


class _Comparison(NamedTuple):
    """Two programs side by side. `is_one`: they are one program, so only differences between devices matter."""

    axes: frozenset[str]
    is_one: bool

    def relate(self, on_shards: Jaxpr, on_whole: Jaxpr, labels: Sequence[Label], trail: Trail) -> list[Label]:
        """The labels of two programs' outputs, from the labels of their inputs."""
        one, two = open_jaxpr(on_shards), open_jaxpr(on_whole)
        env = _Relations()
        for v, w, label in self._constants(on_shards, on_whole, trail):
            env.write(v, w, label)
        for v, w, label in zip(one.invars, two.invars, labels, strict=True):
            env.write(v, w, label)
        try:
            for a, b in paired(on_shards, on_whole, env.partners):
                found = [env.read(v, w, (*trail, a)) for v, w in zip(a.invars, b.invars, strict=True)]
                for v, w, label in zip(a.outvars, b.outvars, self._through(a, b, found, (*trail, a)), strict=True):
                    env.write(v, w, label)
        except Unlike as parted:  # values after this point are unrelated
            env.parted = _parted(parted.one, parted.two, env, trail)
        return [env.read(v, w, trail) for v, w in zip(one.outvars, two.outvars, strict=True)]

    def _constants(self, on_shards: Jaxpr, on_whole: Jaxpr, trail: Trail) -> Iterator[tuple[Var, Var, Label]]:
        """The labels of the programs' constants; a tracer's type says whether it differs between devices."""
        one, two = open_jaxpr(on_shards).constvars, open_jaxpr(on_whole).constvars
        values = [list(getattr(jaxpr, "consts", ())) for jaxpr in (on_shards, on_whole)]
        known = len(values[0]) == len(one) == len(values[1]) == len(two)
        for i, (v, w) in enumerate(zip(one, two, strict=False)):
            varies = sorted(self.axes & varying(values[0][i])) if known else []
            label: Label = SAME
            if varies:
                what = f"it uses a value of shape {shape_of(v)} from outside the optimizer that varies over {varies}"
                label = Mixed(what, trail, "varies")
            elif not known or not same(values[0][i], values[1][i]):
                label = Mixed(f"it uses a constant of shape {shape_of(v)} taken from the shape", trail)
            yield v, w, label

    def _through(self, a: Equation, b: Equation, labels: list[Label], trail: Trail) -> list[Label]:
        """The labels of the results of one pair of equations."""
        name = a.primitive.name
        if name in CALLS:
            return self.relate(inner_jaxpr(a), inner_jaxpr(b), labels, trail)
        if name in KEEPS_FILL and all(label == FILL for label in labels):
            return [FILL] * len(a.outvars)
        if name not in KNOWN | CONTROL | {BARRIER} and not self._reduces_to_one(a):
            return [_unknown(a, labels, trail)] * len(a.outvars)
        if not _same_params(a, b):
            return _mix(a, labels, trail, f"`{name}` with a parameter taken from the shape")
        if name == BARRIER:
            return labels
        if name in CONTROL:
            through = (
                self._through_cond if name == COND else self._through_scan if name == SCAN else self._through_while
            )
            return through(a, b, labels, trail)
        if name in ALL_REDUCES:
            return [SAME] * len(a.outvars)
        if any(isinstance(label, Mixed) for label in labels):
            return _mix(a, labels, trail, f"`{name}`")
        if all(is_same(*of) for of in zip(labels, a.invars, b.invars, strict=True)) and _same_shapes(a, b):
            return [SAME] * len(a.outvars)
        return _through_parts(a, b, labels, trail)

    def _reduces_to_one(self, eqn: Equation) -> bool:
        """Whether an equation gives all devices one result, which is right if nothing is cut."""
        everywhere = self.is_one and eqn.params.get("axis_index_groups") is None
        return everywhere and eqn.primitive.name in ALL_REDUCES and self.axes <= set(eqn.params["axes"])

    def _through_cond(self, a: Equation, b: Equation, labels: list[Label], trail: Trail) -> list[Label]:
        if labels[0] != FILL:
            return _mix(a, labels[:1], trail, "`cond`")
        branches = zip(a.params["branches"], b.params["branches"], strict=True)
        return join([self.relate(one, two, labels[1:], trail) for one, two in branches], a, trail)

    def _through_while(self, a: Equation, b: Equation, labels: list[Label], trail: Trail) -> list[Label]:
        num_cond, num_body = a.params["cond_nconsts"], a.params["body_nconsts"]
        cond_consts, body_consts = labels[:num_cond], labels[num_cond : num_cond + num_body]

        def body(carry: list[Label]) -> list[Label]:
            return self.relate(a.params["body_jaxpr"], b.params["body_jaxpr"], body_consts + carry, trail)

        carry = _fixed_point(body, labels[num_cond + num_body :], a, trail)
        (stop,) = self.relate(a.params["cond_jaxpr"], b.params["cond_jaxpr"], cond_consts + carry, trail)
        return carry if stop == FILL else _mix(a, [stop], trail, "`while`")

    def _through_scan(self, a: Equation, b: Equation, labels: list[Label], trail: Trail) -> list[Label]:
        num_consts, num_carry = scan_split(a)
        consts, xs = labels[:num_consts], labels[num_consts + num_carry :]
        xs = [mixed(a, [label], trail, "`scan`") if isinstance(label, Shard) else label for label in xs]

        def body(carry: list[Label]) -> list[Label]:
            return self.relate(inner_jaxpr(a), inner_jaxpr(b), consts + carry + xs, trail)

        carry = _fixed_point(lambda c: body(c)[:num_carry], labels[num_consts : num_consts + num_carry], a, trail)
        inner = [open_jaxpr(inner_jaxpr(eqn)).outvars[num_carry:] for eqn in (a, b)]
        each = zip(body(carry)[num_carry:], *inner, strict=True)
        return carry + [SAME if is_same(*of) else mixed(a, [of[0]], trail, "`scan`") for of in each]


class _Relations:
    """For each variable of the first program, its partner in the second and the label of the pair."""

    parted: Mixed | None = None

    def __init__(self) -> None:
        self.partners = Partners()
        self._of: dict[Var, Label] = {}

    def write(self, v: Var, w: Var, label: Label) -> None:
        one_number = label == SAME and size_of(v) == 1 and size_of(w) == 1
        self._of[v] = FILL if one_number else label

    def read(self, v: Var, w: Var, trail: Trail) -> Label:
        if is_literal(v) and is_literal(w):
            return FILL if same(v.val, w.val) else Mixed(f"it uses a number taken from the shape, {v.val}", trail)
        if not is_literal(v) and v in self._of and self.partners.are(v, w):
            return self._of[v]
        return self.parted or Mixed("its computation depends on the shape", trail)

    def label(self, v: Var) -> Label:
        """The label of a variable of the first program, whatever its partner is."""
        return FILL if is_literal(v) else self._of.get(v, SAME)


def _through_parts(a: Equation, b: Equation, labels: list[Label], trail: Trail) -> list[Label]:
    """The labels of the results of an operation whose arrays differ in shape between the programs."""
    name, shards = a.primitive.name, [i for i, label in enumerate(labels) if isinstance(label, Shard)]
    keeps_shape = all(len({shape_of(v) for v in (*e.invars, *e.outvars)} - {()}) <= 1 for e in (a, b))
    if not shards:
        any_left = name in FILL_IF_ANY and all(map(size_of, [*a.invars, *b.invars]))
        ok = any_left or (name in POINTWISE and keeps_shape)
        return [FILL] * len(a.outvars) if ok and _all_fill(labels) else _mix(a, labels, trail, f"`{name}`")
    first = shards[0]
    shapes = {(shape_of(a.invars[i]), shape_of(b.invars[i]), cut_of(labels[i])) for i in shards}
    shapes |= {(shape_of(v), shape_of(w), cut_of(labels[first])) for v, w in zip(a.outvars, b.outvars, strict=True)}
    identity = name == BROADCAST or (name == RESHAPE and a.params.get("dimensions") is None)
    if len(shapes) > 1 or not (name in POINTWISE or identity):
        return _mix(a, labels, trail, f"`{name}`")
    if any(label == SAME for label in labels):
        return _mix(a, labels, trail, f"`{name}` with an array that is sharded differently")
    return [labels[first]] * len(a.outvars)


def _all_fill(labels: Sequence[Label]) -> bool:
    return bool(labels) and all(label == FILL for label in labels)


def _parted(a: Equation | None, b: Equation | None, env: _Relations, trail: Trail) -> Mixed:
    eqn = b if a is None else a
    if eqn is None:
        return Mixed("its computation depends on the shape", trail)
    labels = [] if a is None else [env.label(v) for v in a.invars]
    names = " or ".join(f"`{e.primitive.name}`" for e in (b, a) if e is not None)
    return mixed(eqn, labels, (*trail, eqn), f"{names}, depending on the shape,")


def _fixed_point(
    step: Callable[[list[Label]], list[Label]], labels: list[Label], eqn: Equation, trail: Trail
) -> list[Label]:
    while (new := join([labels, step(labels)], eqn, trail)) != labels:
        labels = new
    return labels


def _mix(eqn: Equation, labels: Sequence[Label], trail: Trail, operation: str) -> list[Label]:
    return [mixed(eqn, labels, trail, operation)] * len(eqn.outvars)


def _unknown(eqn: Equation, labels: Sequence[Label], trail: Trail) -> Mixed:
    """The label of the results of an operation that may give different results for equal operands."""
    for label in labels:
        if isinstance(label, Mixed):
            return label
    to = "".join(dict.fromkeys(f" to {label.path}" for label in labels if isinstance(label, Shard)))
    return Mixed(f"it applies `{eqn.primitive.name}`{to}", trail, "is not known")


def _same_shapes(a: Equation, b: Equation) -> bool:
    return all(shape_of(v) == shape_of(w) for v, w in zip(a.outvars, b.outvars, strict=True))


def _same_params(a: Equation, b: Equation) -> bool:
    """Whether two equations of one primitive have equal parameters, except result shapes and loops' programs."""
    apart = _FOLLOWED if a.primitive.name in CONTROL else _SHAPES
    return all(key in apart or same(x, b.params.get(key)) for key, x in a.params.items())
