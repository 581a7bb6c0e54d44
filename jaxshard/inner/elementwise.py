"""Decides whether a transformation may run on shards, from its traced update, not from names.

The update is traced twice, on shards and on whole leaves, and the two programs are walked side by side. Each pair of
values gets a label that says how the two are related:
  SAME   they are equal, on every device;
  FILL   every element of both is the same one number (scalars too); the shapes may differ;
  Shard  the first is this device's part of the second, cut as a leaf is;
  Mixed  nothing is known: an operation combined elements that lie on different devices.
The update must return a Shard for each leaf that is cut, and SAME for each leaf kept whole (FILL will do for both). An
operation that is not known to keep these relations gives Mixed, so anything that cannot be proved is refused.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from jaxshard.base.jaxprs import inner_jaxpr, is_literal, open_jaxpr, scan_split
from jaxshard.base.primitives import CALLS, FILL_IF_ANY, KEEPS_FILL, PER_DEVICE, POINTWISE
from jaxshard.base.types import Equation, Jaxpr, Var

SAME, FILL = "same", "fill"
Trail: TypeAlias = tuple[Equation, ...]  # an equation, after the calls around it


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of the leaf at `path`; `dims` are pairs (dim counted from the end, the axes that cut it)."""

    path: str
    dims: tuple[tuple[int, tuple[str, ...]], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed:
    """`what` says in words which operation first mixed elements; `trail` is its equation, after the calls around it."""

    what: str
    trail: Trail = ()


Label = str | Shard | Mixed

_CHECKED_APART = frozenset({"jaxpr", "branches", "cond_jaxpr", "body_jaxpr", "shape", "new_sizes"})


class NotElementwise(Exception):
    """The computation mixes elements; `mixed` says how, and where."""

    def __init__(self, mixed: Mixed):
        super().__init__(mixed.what)
        self.mixed = mixed


def check_elementwise(on_shards: Jaxpr, on_whole: Jaxpr, labels: list[Label]) -> None:
    """Checks that an update of shards returns the shards of the update of whole leaves.

    Args:
      on_shards: the closed jaxpr of the update, traced on shards.
      on_whole: the same, traced on whole leaves.
      labels: the relation of each pair of inputs; result i must be cut as input i is.

    Raises:
      NotElementwise: the check cannot prove it.
    """
    one, two = open_jaxpr(on_shards), open_jaxpr(on_whole)
    if len(one.outvars) > len(labels) or len(two.outvars) != len(one.outvars):
        raise NotElementwise(Mixed("it returns another structure than it was given"))
    for i, label in enumerate(_relate(on_shards, on_whole, labels, ())):
        pairs = ((one.outvars[i], one.invars[i]), (two.outvars[i], two.invars[i]))
        follows = label == FILL or _cut(label) == _cut(labels[i])
        if isinstance(label, Mixed):
            raise NotElementwise(label)
        if not follows or any(_shape(new) != _shape(old) for new, old in pairs):
            raise NotElementwise(Mixed(f"what it returns for {_name(labels[i], one.invars[i])} is not cut as that is"))


def _relate(on_shards: Jaxpr, on_whole: Jaxpr, labels: list[Label], trail: Trail) -> list[Label]:
    """The labels of two programs' outputs, from the labels of their inputs."""
    one, two = open_jaxpr(on_shards), open_jaxpr(on_whole)
    env = _Relations()
    for v, w, same in _constants(on_shards, on_whole):
        env.write(v, w, SAME if same else Mixed(f"it uses a constant of shape {_shape(v)} taken from the shape", trail))
    for v, w, label in zip(one.invars, two.invars, labels, strict=True):
        env.write(v, w, label)
    for a, b in itertools.zip_longest(one.eqns, two.eqns):
        if not _alike(a, b):  # the programs differ from here on, so later values are not related
            env.parted = _parted(a, b, env, trail)
            break
        found = [env.read(v, w, (*trail, a)) for v, w in zip(a.invars, b.invars, strict=True)]
        for v, w, label in zip(a.outvars, b.outvars, _through(a, b, found, (*trail, a)), strict=True):
            env.write(v, w, label)
    return [env.read(v, w, trail) for v, w in zip(one.outvars, two.outvars, strict=True)]


class _Relations:
    """For each variable of the first program, its partner in the second and the label of the pair."""

    parted: Mixed | None = None

    def __init__(self) -> None:
        self._of: dict[Var, tuple[Var | None, Label]] = {}

    def write(self, v: Var, w: Var, label: Label) -> None:
        one_number = label == SAME and _size(v) == 1 and _size(w) == 1
        self._of[v] = (w, FILL if one_number else label)

    def read(self, v: Var, w: Var, trail: Trail) -> Label:
        if is_literal(v) and is_literal(w):
            return FILL if _same(v.val, w.val) else Mixed(f"it uses a number taken from the shape, {v.val}", trail)
        if not is_literal(v) and not is_literal(w) and v in self._of and self._of[v][0] is w:
            return self._of[v][1]
        return self.parted or Mixed("what it computes depends on the shape", trail)

    def label(self, v: Var) -> Label:
        """The label of a variable of the first program, whatever its partner is."""
        return FILL if is_literal(v) else self._of.get(v, (None, SAME))[1]


def _parted(a: Equation, b: Equation, env: _Relations, trail: Trail) -> Mixed:
    eqn = b if a is None else a
    labels = [] if a is None else [env.label(v) for v in a.invars]
    names = " or ".join(f"`{e.primitive.name}`" for e in (b, a) if e is not None)
    return _mixed(eqn, labels, (*trail, eqn), f"{names}, as the shape has it,")


def _constants(on_shards: Jaxpr, on_whole: Jaxpr) -> Iterator[tuple[Var, Var, bool]]:
    one, two = open_jaxpr(on_shards).constvars, open_jaxpr(on_whole).constvars
    values = [list(getattr(jaxpr, "consts", ())) for jaxpr in (on_shards, on_whole)]
    known = len(values[0]) == len(one) == len(values[1]) == len(two)
    for i, (v, w) in enumerate(zip(one, two, strict=False)):
        yield v, w, known and _same(values[0][i], values[1][i])


def _through(a: Equation, b: Equation, labels: list[Label], trail: Trail) -> list[Label]:
    """The labels of the results of one pair of equations."""
    name = a.primitive.name
    if name in CALLS:
        return _relate(inner_jaxpr(a), inner_jaxpr(b), labels, trail)
    if name in KEEPS_FILL and all(label == FILL for label in labels):
        return [FILL]
    if not _same_params(a, b):
        return _mix(a, labels, trail, f"`{name}` with a number taken from the shape")
    if name == "optimization_barrier":
        return labels
    structured = {"cond": _through_cond, "while": _through_while, "scan": _through_scan}
    if name in structured:
        return structured[name](a, b, labels, trail)
    if any(isinstance(label, Mixed) for label in labels):
        return _mix(a, labels, trail, f"`{name}`")
    if all(_is_same(*of) for of in zip(labels, a.invars, b.invars, strict=True)) and _same_shapes(a, b):
        return [SAME] * len(a.outvars) if not name.startswith(PER_DEVICE) else _mix(a, labels, trail, f"`{name}`")
    return _through_parts(a, b, labels, trail)


def _through_parts(a: Equation, b: Equation, labels: list[Label], trail: Trail) -> list[Label]:
    """The labels of the results of an operation whose arrays differ in shape between the programs."""
    name, shards = a.primitive.name, [i for i, label in enumerate(labels) if isinstance(label, Shard)]
    if not shards:
        any_left = name in FILL_IF_ANY and all(map(_size, [*a.invars, *b.invars]))
        ok = (any_left or name in POINTWISE) and labels and all(label == FILL for label in labels)
        return [FILL] * len(a.outvars) if ok else _mix(a, labels, trail, f"`{name}`")
    first = shards[0]
    shapes = {(_shape(a.invars[i]), _shape(b.invars[i]), _cut(labels[i])) for i in shards}
    shapes |= {(_shape(v), _shape(w), _cut(labels[first])) for v, w in zip(a.outvars, b.outvars, strict=True)}
    if len(shapes) > 1 or not (name in POINTWISE or name in ("broadcast_in_dim", "reshape")):
        return _mix(a, labels, trail, f"`{name}`")
    if any(label == SAME for label in labels):
        return _mix(a, labels, trail, f"`{name}` with an array that is not cut alike")
    return [labels[first]] * len(a.outvars)


def _through_cond(a: Equation, b: Equation, labels: list[Label], trail: Trail) -> list[Label]:
    if labels[0] != FILL:
        return _mix(a, labels[:1], trail, "`cond`")
    branches = zip(a.params["branches"], b.params["branches"], strict=True)
    return _join([_relate(one, two, labels[1:], trail) for one, two in branches], a, b, trail)


def _through_while(a: Equation, b: Equation, labels: list[Label], trail: Trail) -> list[Label]:
    num_cond, num_body = a.params["cond_nconsts"], a.params["body_nconsts"]
    cond_consts, body_consts = labels[:num_cond], labels[num_cond : num_cond + num_body]

    def body(carry: list[Label]) -> list[Label]:
        return _relate(a.params["body_jaxpr"], b.params["body_jaxpr"], body_consts + carry, trail)

    carry = _fixed_point(body, labels[num_cond + num_body :], a, b, trail)
    (stop,) = _relate(a.params["cond_jaxpr"], b.params["cond_jaxpr"], cond_consts + carry, trail)
    return carry if stop == FILL else _mix(a, [stop], trail, "`while`")


def _through_scan(a: Equation, b: Equation, labels: list[Label], trail: Trail) -> list[Label]:
    num_consts, num_carry = scan_split(a)
    consts, xs = labels[:num_consts], labels[num_consts + num_carry :]
    xs = [_mixed(a, [label], trail, "`scan`") if isinstance(label, Shard) else label for label in xs]

    def body(carry: list[Label]) -> list[Label]:
        return _relate(inner_jaxpr(a), inner_jaxpr(b), consts + carry + xs, trail)

    carry = _fixed_point(lambda c: body(c)[:num_carry], labels[num_consts : num_consts + num_carry], a, b, trail)
    inner = [open_jaxpr(inner_jaxpr(eqn)).outvars[num_carry:] for eqn in (a, b)]
    each = zip(body(carry)[num_carry:], *inner, strict=True)
    return carry + [SAME if _is_same(*of) else _mixed(a, [of[0]], trail, "`scan`") for of in each]


def _fixed_point(
    step: Callable[[list[Label]], list[Label]], labels: list[Label], a: Equation, b: Equation, trail: Trail
) -> list[Label]:
    while (new := _join([labels, step(labels)], a, b, trail)) != labels:
        labels = new
    return labels


def _join(rows: list[list[Label]], a: Equation, b: Equation, trail: Trail) -> list[Label]:
    """Joins the labels of branches: FILL and another label give the other; two different relations give Mixed."""
    joined = []
    for column in zip(*rows, strict=True):
        known: list[Label] = list(dict.fromkeys(label for label in column if label != FILL))
        mixed = [label for label in known if isinstance(label, Mixed)]
        alike = len({_cut(label) for label in known}) <= 1
        if mixed or not alike:
            joined.append(mixed[0] if mixed else _mixed(a, known, trail, f"`{a.primitive.name}`"))
        else:
            joined.append(known[0] if known else FILL)
    return joined


def _mix(eqn: Equation, labels: list[Label], trail: Trail, operation: str) -> list[Label]:
    return [_mixed(eqn, labels, trail, operation)] * len(eqn.outvars)


def _mixed(eqn: Equation, labels: list[Label], trail: Trail, operation: str) -> Mixed:
    """The label Mixed for the results of `eqn`; if one of `labels` is Mixed already, that one."""
    for label in labels:
        if isinstance(label, Mixed):
            return label
    largest = max((*eqn.invars, *eqn.outvars), key=_size)
    path = next((label.path for label in labels if isinstance(label, Shard)), None)
    to = (
        f"{path}, and each device holds only a part of it here"
        if path
        else f"an array of a part's shape, {_shape(largest)}"
    )
    return Mixed(f"it applies {operation} to {to}", trail)


def _cut(label: Label) -> object:
    """The part of a label that must agree with another: how a shard is cut, whichever leaf it is from."""
    return label.dims if isinstance(label, Shard) else label


def _name(label: Label, v: Var) -> str:
    return label.path if isinstance(label, Shard) else f"an array of shape {_shape(v)}"


def _is_same(label: Label, v: Var, w: Var) -> bool:
    return label == SAME or (label == FILL and _shape(v) == _shape(w))


def _same_shapes(a: Equation, b: Equation) -> bool:
    return all(_shape(v) == _shape(w) for v, w in zip(a.outvars, b.outvars, strict=True))


def _alike(a: Equation, b: Equation) -> bool:
    if a is None or b is None:
        return False
    sizes = [(eqn.primitive.name, len(eqn.invars), len(eqn.outvars)) for eqn in (a, b)]
    return sizes[0] == sizes[1]


def _same_params(a: Equation, b: Equation) -> bool:
    """Whether two equations have equal parameters; shapes and inner programs are compared elsewhere."""
    return all(key in _CHECKED_APART or _same(x, b.params.get(key)) for key, x in a.params.items())


def _same(x: object, y: object) -> bool:
    """Whether two values are equal, arrays and floats bit for bit; an unreadable one (a tracer) equals only itself."""
    if x is y:
        return True
    try:
        if hasattr(open_jaxpr(x), "eqns"):
            return str(x) == str(y) and not getattr(x, "consts", ())
        if hasattr(x, "dtype") or isinstance(x, float | complex):
            x, y = np.asarray(x), np.asarray(y)
            return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        return bool(x == y)
    except Exception:  # a type that we do not know may raise anything; it is then not known to be equal
        return False


def _shape(v: Var) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def _size(v: Var) -> int:
    return math.prod(_shape(v))
