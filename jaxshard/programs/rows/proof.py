"""The proof that a loss is a mean over rows: a label for each value, from operation to operation."""

from collections.abc import Callable, Mapping, Sequence

from jaxshard.base.types import Equation
from jaxshard.programs.jaxprs import axes_of_equation, inner_jaxpr, open_jaxpr, scan_split
from jaxshard.programs.primitives import OWN_GRADIENT, SELECT, Kind, kind_of, takes_whole_ref
from jaxshard.programs.rows import arithmetic, indexing, microbatches, moves, products
from jaxshard.programs.rows.arithmetic import Pair
from jaxshard.programs.rows.labels import (
    ANY,
    ROW,
    SAME,
    Label,
    Trail,
    all_plain,
    as_total,
    joined,
    lost,
    near,
    worst,
)
from jaxshard.programs.rows.microbatches import Microbatched
from jaxshard.programs.rows.pairs import Labels, PairedWalk, same_params
from jaxshard.programs.rows.rules import Rule

_AWAY = lost("pairs", ())
_KEEP_PLACES: dict[Kind, str] = {
    "broadcast": "moves them",
    "concatenate": "makes them a column of indices",
    "gather": "reads by them",
    "pointwise": "casts them, or compares them with 0",
    "reshape": "moves them",
    "scatter": "writes by them",
    "slice": "moves them",
    "squeeze": "moves them",
    "transpose": "moves them",
}
"""What may be done with places in the batch; anything else gives numbers that depend on these."""
_COLLECTIVES: tuple[Kind, ...] = ("all_reduce", "all_gather", "exchange")

_RULES: dict[Kind, Callable[[Pair, Sequence[Label]], Label | Labels]] = {
    "batched": moves.batched,
    "broadcast": moves.broadcast,
    "concatenate": moves.concatenate,
    "conv": products.conv_general_dilated,
    "cumulative": moves.along,
    "dot": products.dot_general,
    "dynamic_slice": moves.dynamic_slice,
    "gather": indexing.gather,
    "iota": moves.iota,
    "pad": moves.pad,
    "pointwise": arithmetic.pointwise,
    "random": moves.random,
    "reduction": arithmetic.reduction,
    "reshape": moves.reshape,
    "rev": moves.rev,
    "scatter": indexing.scatter,
    "slice": moves.slice_,
    "sort": moves.along,
    "split": moves.split,
    "squeeze": moves.reshape,
    "stack": moves.stack,
    "tile": moves.tile,
    "top_k": moves.along,
    "trailing": moves.leading,
    "transpose": moves.transpose,
    "triangular_solve": moves.triangular_solve,
    "unstack": moves.unstack,
    "update": moves.dynamic_update_slice,
    "window": moves.window,
}


class Proof(PairedWalk):
    """Labels the values of a loss of each device's rows.

    Args:
      split: the mesh axes that split the rows, with their sizes.
      parts, num_rows: as for `PairedWalk`.

    Attributes:
      no_means: the results of parts that depend on their own number of microbatches.
    """

    def __init__(self, split: Mapping[str, int], parts: int, num_rows: int):
        super().__init__(parts, num_rows)
        self._split = split
        self._rules: dict[tuple[int, int, tuple[Label, ...]], Rule] = {}
        self._known: dict[tuple[int, int, tuple[Label, ...]], Labels] = {}
        self.no_means: list[Label] = []

    def wrong_rule(self, ratio: float) -> Trail:
        """The first custom derivative that may not be what the value of a loss of this ratio says; () if none."""
        rules = list(self._rules.values())
        return next((rule.trail for rule in rules if not rule.holds(ratio, self._parts, self.outputs)), ())

    # Single operations.

    def _equation(self, eqn: Equation, known: list[Label]) -> Sequence[Label]:
        return self.of(eqn, known) if kind_of(eqn) == "scatter" else super()._equation(eqn, known)

    def of(self, eqn: Equation, known: Sequence[Label]) -> Sequence[Label]:
        pair, kind, count = Pair(eqn, self._partner, self._parts, self._trail), kind_of(eqn), len(eqn.outvars)
        if eqn.primitive.name == SELECT and known[0].value is not None:  # whatever the others are
            return [known[1 + int(known[0].value)]]
        if kind == "barrier":
            return known
        if kind == "placement" or (kind == "access" and takes_whole_ref(eqn)):
            return known[:count]
        if kind == "pointwise" and any(map(_is_device_index, known)):
            return [arithmetic.with_index(pair, known)]
        indexed = (kind == "gather" or kind == "scatter") and known[1].columns
        if kind == "random" and any(map(_is_device_index, known)):  # folded into a key
            return [Label("same", own=True)]
        bad = worst([known[0], *known[2:]] if indexed else known)
        if bad is not None:
            return [bad] * count
        if any(x.place for x in known) and kind not in _KEEP_PLACES:
            return [pair.no("position")] * count
        if kind == "axis_index":
            found = pair.no("position").with_(first=1.0 if len(self._split) == 1 else None)
            return [SAME if self._split.keys().isdisjoint(axes_of_equation(eqn)) else found]
        if kind in _COLLECTIVES:
            return [products.collective(pair, label, self._split) for label in known][:count]
        if not same_params(pair):
            return [pair.no("count" if kind == "pointwise" else "unknown")] * count
        if kind is None:
            return [self.unknown(eqn, known)] * count
        if kind != "pointwise" and any(x.running for x in known):  # only terms may be added to it
            return [pair.no("statistic")] * count
        if any(x.kind == "rows" and x.dim == ROW for x in known):
            return self._in_each_row(pair, known)
        if kind not in _RULES:
            return [self.unknown(eqn, known)] * count
        found = _RULES[kind](pair, known)
        return found if isinstance(found, list) else [found] * count

    def _in_each_row(self, pair: Pair, known: Sequence[Label]) -> Labels:
        """The labels inside a scan over rows: what is done to one row is done to all."""
        if any(x.running for x in known):
            return [arithmetic.pointwise(pair, known)]
        if any(x.kind == "total" or (x.kind == "rows" and x.dim != ROW) for x in known):
            return [pair.no("pairs")] * len(pair.one.outvars)
        fixed = all(x.kind == "same" or x.fixed for x in known)
        outs = self.of(pair.one, [x.with_(kind="same", fixed=False) if x.kind == "rows" else x for x in known])
        return [Label("rows", x.ratio, ROW, fixed=fixed, own=x.own) if x.kind == "same" else x for x in outs]

    # What Walk asks.

    def _does_nothing(self, eqn: Equation) -> bool:
        axes = axes_of_equation(eqn)
        return kind_of(eqn) in _COLLECTIVES and bool(axes) and self._split.keys() >= {*axes}

    def join(self, one: Label, other: Label) -> Label:
        if one == other or one.kind == "other":
            return one
        if other.kind == "other":
            return other
        return joined([one, other], self._parts) or lost("statistic", self._trail, one.trail or other.trail)

    def unknown(self, eqn: Equation, known: Sequence[Label]) -> Label:
        plain = all(x.kind == "same" for x in known) and all_plain(known) and not eqn.effects
        own = any(x.own for x in known)
        return Label("same", own=own) if plain else worst(known) or lost("unknown", self._trail)

    def chosen(self, by: Label, values: Labels) -> Labels:
        if by.kind == "same" and near(by.ratio, 1.0):
            return values
        if by.kind == "rows" and by.dim == ROW and all(x.kind != "total" or x.running for x in values):
            own = {"kind": "rows", "dim": ROW, "fixed": False, "value": None}
            return [x if x.kind == "other" or x.running else x.with_(**own) for x in values]
        if by.kind == "rows" and near(by.ratio, 1.0):  # of a loop under `vmap`: each row ends when it will
            return [self._ended_apart(by, x) for x in values]
        return [worst([by]) or lost("statistic", self._trail, by.trail)] * len(values)

    def _ended_apart(self, by: Label, value: Label) -> Label:
        apart = value.kind == "rows" and value.dim == by.dim and {value.outer, by.outer} <= {ANY, 1}
        return value.with_(outer=1, fixed=False, value=None) if apart else self.join(value, _AWAY)

    def called(self, eqn: Equation, known: Sequence[Label]) -> Sequence[Label]:
        two = self._partner
        each = microbatches.microbatched(eqn), microbatches.microbatched(two)
        if each[0] and each[1]:
            return self._in_microbatches(each[0], each[1], known)
        key = id(inner_jaxpr(eqn)), id(inner_jaxpr(two)), tuple(known)
        if key not in self._known:
            outs = super().called(eqn, known)
            if worst(outs) is not None:
                return outs
            self._known[key] = list(outs)
        if eqn.primitive.name in OWN_GRADIENT:
            self._rules[key] = Rule(eqn, two, known, self._known[key], self._trail)
        return self._known[key]

    def _in_microbatches(self, one: Microbatched, two: Microbatched, known: Sequence[Label]) -> Labels:
        """The labels of the results of a part with microbatches of its own."""
        if one.program is None or two.program is None:
            return [worst(known) or lost("unknown", self._trail)] * len(self._partner.outvars)
        split, parts = {**self._split, microbatches.AXIS: one.count}, self._parts * one.count
        proof = Proof(split, parts, one.rows)
        outs = [*proof.outputs(one.program, two.program, microbatches.inputs(one, known))]
        if not microbatches.is_mean(outs, parts):
            self.no_means += [x for x in outs if x.trouble is None or x.trouble.cause != "unknown"][:1]
            return [x if x.kind == "other" else x.with_(ratio=microbatches.ratio_of(x, one)) for x in outs]
        rule = proof.wrong_rule(as_total(outs[0], parts).ratio or 0.0)
        return [lost("unknown", rule) if rule else x.with_(ratio=microbatches.ratio_of(x, one)) for x in outs]

    def solved(self, eqn: Equation, known: Sequence[Label]) -> Sequence[Label]:
        two = self._partner
        outs = super().solved(eqn, known)
        if worst(outs) is None:
            self._rules[id(eqn), id(two), tuple(known)] = Rule(eqn, two, known, outs, self._trail)
        return outs

    def scanned(self, eqn: Equation, known: Sequence[Label]) -> Labels:
        two = self._partner
        lengths = eqn.params["length"], two.params["length"]
        if lengths[0] == lengths[1]:
            return super().scanned(eqn, known)
        consts, num_carry = scan_split(eqn)
        begin, xs = known[consts : consts + num_carry], known[consts + num_carry :]
        by_rows = all(x.kind == "other" or (x.kind == "rows" and x.dim == 0) for x in xs)
        if lengths[1] != lengths[0] * self._parts or not by_rows or eqn.params["reverse"]:
            return [worst(known) or lost("unknown", self._trail)] * len(eqn.outvars)
        return self._over_rows(eqn, known[:consts], begin, xs)

    def slice(self, value: Label) -> Label:
        if value.kind != "rows" or value.dim == ROW:
            return value
        return value.with_(dim=value.dim - 1) if value.dim > 0 else lost("some", self._trail)

    def stack(self, value: Label) -> Label:
        return value.with_(dim=value.dim + 1) if value.kind == "rows" and value.dim != ROW else value

    def _over_rows(self, eqn: Equation, consts: Sequence[Label], begin: Sequence[Label], xs: Sequence[Label]) -> Labels:
        """The labels of a scan over rows, or groups of neighbours: its carries may be sums, or stay what they are."""
        body, count = open_jaxpr(inner_jaxpr(eqn)), len(begin)
        kept = [a is b for a, b in zip(body.invars[len(consts) : len(consts) + count], body.outvars, strict=False)]
        rows = [x if x.kind == "other" else _one_row(x, self._trail) for x in xs]
        running = [Label("total", None, running=i, trail=self._trail) for i in range(1, count + 1)]
        carry = [x if keeps else sums for x, sums, keeps in zip(begin, running, kept, strict=True)]
        while True:
            outs = self.through(inner_jaxpr(eqn), [*consts, *carry, *rows])
            ends = [
                x if keeps else self._still_running(x, y) for x, y, keeps in zip(carry, outs[:count], kept, strict=True)
            ]
            if ends == carry:
                break
            carry = ends
        last = [self._ended(x, y) for x, y in zip(begin, carry, strict=True)]
        return [*last, *(self._stacked(x) for x in outs[count:])]

    def _still_running(self, before: Label, after: Label) -> Label:
        if after.kind == "other":
            return after
        found = joined([before, after], self._parts) if after.running == before.running else None
        return found or lost("position", self._trail)

    def _ended(self, begin: Label, end: Label) -> Label:
        """The label of a scan's sum: what it began with, and all rows' terms."""
        if not end.running:
            return end
        return self.join(begin, end.with_(running=0)) if begin.ratio is not None else end.with_(running=0)

    def _stacked(self, label: Label) -> Label:
        if label.kind == "rows" and label.dim == ROW:
            return label.with_(dim=0, outer=1)
        if label.kind == "same":
            return label.with_(kind="rows", dim=0, outer=0, fixed=True)
        return label if label.kind == "other" else lost("statistic", self._trail, label.trail)


def _is_device_index(label: Label) -> bool:
    """Whether it is the device's index along an axis that splits the rows, or made from it."""
    return label.trouble is not None and bool(label.trouble.trail) and kind_of(label.trouble.trail[-1]) == "axis_index"


def _one_row(label: Label, trail: Trail) -> Label:
    whole = label.outer in (0, 1) and not label.place
    return label.with_(dim=ROW, outer=1) if whole else lost("position" if label.place else "unknown", trail)
