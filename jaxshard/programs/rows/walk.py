"""Walks through a traced loss and labels each value by how it depends on the rows of the batch."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Var
from jaxshard.programs.jaxprs import (
    inner_jaxpr,
    is_literal,
    is_ref,
    linear_solver,
    number_of,
    open_jaxpr,
    scan_split,
)
from jaxshard.programs.primitives import ONLY_READS, OWN_BACKWARD, Kind, kind_of, takes_whole_ref
from jaxshard.programs.rows import indexing, moves
from jaxshard.programs.rows.arithmetic import Arithmetic, over_parts
from jaxshard.programs.rows.devices import Devices
from jaxshard.programs.rows.labels import (
    FREE,
    Free,
    Label,
    Mixed,
    PerRow,
    Stat,
    Trail,
    Unknown,
    coarsest,
    deeper,
    dims_of,
    is_running,
    scanned,
    stopped,
    worst,
)

Labels: TypeAlias = list[Label]
_MOVES: dict[Kind, moves.Rule] = {
    "broadcast": moves.broadcast_in_dim,
    "concatenate": moves.concatenate,
    "conv": moves.conv_general_dilated,
    "cumulative": moves.along,
    "dot": moves.dot_general,
    "dynamic_slice": moves.dynamic_slice,
    "iota": moves.iota,
    "pad": moves.pad,
    "random": moves.random,
    "reduction": moves.reduction,
    "reshape": moves.reshape,
    "rev": moves.rev,
    "slice": moves.slice_,
    "sort": moves.along,
    "squeeze": moves.squeeze,
    "stack": moves.stack,
    "tile": moves.tile,
    "top_k": moves.along,
    "trailing": moves.leading,
    "transpose": moves.transpose,
    "triangular_solve": moves.triangular_solve,
    "update": moves.dynamic_update_slice,
    "window": moves.window,
}
_INDEXING: dict[Kind, indexing.Rule] = {"gather": indexing.gather, "scatter": indexing.scatter}
_PIECES: dict[Kind, moves.PiecesRule] = {"split": moves.split, "unstack": moves.unstack}
_MOST_ROUNDS = 6


class Walk:
    """Labels the values of a traced loss.

    Args:
      arithmetic: for the traced batch.
      split_axes: the mesh axes over which rows are split.
      whole: whether the devices together see the whole batch at once; False: there are microbatches.
    """

    def __init__(self, arithmetic: Arithmetic, split_axes: Sequence[str], whole: bool):
        self.arithmetic = arithmetic
        self._devices = Devices(arithmetic, frozenset(split_axes), whole)
        self._known: dict[tuple[int, tuple[Label, ...]], Labels] = {}  # of calls without findings

    def through(self, jaxpr: Jaxpr, labels: Sequence[Label], trail: Trail = ()) -> Labels:
        """The labels of a program's outputs, from those of its inputs."""
        opened = open_jaxpr(jaxpr)
        env: dict[Var, Label] = {v: array_label(v) for v in opened.constvars}
        env |= dict(zip(opened.invars, labels, strict=True))
        columns: dict[Var, Labels] = {}
        for eqn in opened.eqns:
            found = [self._literal(eqn, i) if is_literal(v) else env[v] for i, v in enumerate(eqn.invars)]
            kind, here = kind_of(eqn), (*trail, eqn)
            if kind == "concatenate":
                columns[eqn.outvars[0]] = found
            if kind in _INDEXING:
                known = columns.get(eqn.invars[1], [found[1]] * 16) if not is_literal(eqn.invars[1]) else [FREE] * 16
                outs = [_INDEXING[kind](self.arithmetic, eqn, found, known, here)]
            else:
                outs = self._equation(eqn, found, here)
            env |= dict(zip(eqn.outvars, outs, strict=True))
            env |= self._written(eqn, found, outs, here)
        return [self._returned(opened, i) if is_literal(v) else env[v] for i, v in enumerate(opened.outvars)]

    def _written(self, eqn: Equation, labels: Labels, outs: Labels, trail: Trail) -> dict[Var, Label]:
        """The labels of mutable arrays after an equation: that of a value that replaces all of one, else unknown."""
        refs = [v for v in eqn.invars if is_ref(v)]
        if not refs or eqn.primitive.name in ONLY_READS:
            return {}
        if takes_whole_ref(eqn):
            return {eqn.invars[0]: labels[1]}
        free = all(isinstance(label, Free) for label in (*labels, *outs))
        return {} if free else dict.fromkeys(refs, Unknown(trail))

    def _literal(self, eqn: Equation, position: int) -> Label:
        partners = self.arithmetic.partners
        degree = 0 if partners is None else partners.degree_of_literal(eqn, position)
        return Free(value=number_of(eqn.invars[position]), degree=degree)

    def _returned(self, jaxpr: OpenJaxpr, position: int) -> Label:
        partners = self.arithmetic.partners
        degree = 0 if partners is None else partners.degree_of_output(jaxpr, position)
        return Free(value=number_of(jaxpr.outvars[position]), degree=degree)

    def _equation(self, eqn: Equation, labels: Labels, trail: Trail) -> Labels:
        kind = kind_of(eqn)
        if kind == "call":
            if eqn.primitive.name in OWN_BACKWARD and any(not isinstance(label, Free) for label in labels):
                self.arithmetic.rules.append(trail)
            return self._called(eqn, labels, trail)
        if kind in _MOVES:
            return [_MOVES[kind](self.arithmetic, eqn, labels, trail)] * len(eqn.outvars)
        if kind in _PIECES:
            return _PIECES[kind](self.arithmetic, eqn, labels, trail)
        if kind == "barrier" or kind == "placement":
            return labels
        if takes_whole_ref(eqn):
            return labels[:1]
        if kind == "pointwise" and _same_rank(eqn):
            return [self.arithmetic.pointwise(eqn, labels, trail)] * len(eqn.outvars)
        if kind == "axis_index":
            return [Free(placed=True)]
        if kind == "all_reduce" or kind == "all_gather" or kind == "exchange":
            return [self._devices.label(eqn, label, trail) for label in labels]
        return self._controlled(eqn, labels, trail)

    def _controlled(self, eqn: Equation, labels: Labels, trail: Trail) -> Labels:
        kind = kind_of(eqn)
        if kind == "scan":
            return self._scan(eqn, labels, trail)
        if kind == "while":
            return self._while(eqn, labels, trail)
        if kind == "cond":
            return self._cond(eqn, labels, trail)
        if kind == "solve":
            return self.through(*linear_solver(eqn, labels), trail)
        frees = [label for label in labels if isinstance(label, Free)]
        free = Free(placed=any(label.placed for label in frees), given=any(label.given for label in frees))
        return [free if len(frees) == len(labels) else worst(labels) or Unknown(trail)] * len(eqn.outvars)

    def _called(self, eqn: Equation, labels: Labels, trail: Trail) -> Labels:
        """The labels of a call's results; equal layers share one program, which is walked once."""
        key = id(inner_jaxpr(eqn)), tuple(labels)
        if key not in self._known:
            before = self.arithmetic.num_findings
            outs = self.through(inner_jaxpr(eqn), labels, trail)
            if self.arithmetic.num_findings > before:
                return outs
            self._known[key] = outs
        return self._known[key]

    # Control flow.

    def _scan(self, eqn: Equation, labels: Labels, trail: Trail) -> Labels:
        num_consts, num_carry = scan_split(eqn)
        split = num_consts + num_carry
        consts = [deeper(label, -1) for label in labels[:num_consts]]
        slices = [scanned(label, -1) for label in labels[split:]]
        inside = len(self.arithmetic.groups)

        def body(carry: Labels) -> Labels:
            del self.arithmetic.groups[inside:]
            return self.through(inner_jaxpr(eqn), [*consts, *carry, *slices], trail)

        def after(old: Label, new: Label) -> Label:
            return self._carried(old, new, eqn.params["length"], trail)

        opened = open_jaxpr(inner_jaxpr(eqn))
        kept = [a is b for a, b in zip(opened.invars[num_consts:split], opened.outvars, strict=False)]
        begin = [deeper(label, -1) for label in labels[num_consts:split]]
        carry = self._settled(body, begin, num_carry, after, trail)
        frees = [isinstance(label, Free) and not label.placed for label in carry]
        differ = [free and not same for free, same in zip(frees, kept, strict=True)]
        if any(differ):
            begin = [_differing(label) if yes else label for label, yes in zip(begin, differ, strict=True)]
            carry = self._settled(body, begin, num_carry, after, trail)
        outs = [Mixed("statistic", trail, trail) if is_running(out) else out for out in body(carry)[num_carry:]]
        starts = labels[num_consts:split]
        ends = [end if is_running(start) else stopped(end) for start, end in zip(starts, carry, strict=True)]
        return [*(deeper(label, 1) for label in ends), *(scanned(label, 1) for label in outs)]

    def _carried(self, old: Label, new: Label, length: int, trail: Trail) -> Label:
        """The label of a scan's carry, `old` before an iteration and `new` after it; dim -1 is the scan's own."""
        if not isinstance(new, PerRow) or -1 not in dims_of(new):
            return self._either([old, new], trail)
        if not isinstance(old, Free):
            return old if new.running else Mixed("some", trail)
        total = over_parts(dataclasses.replace(new, plus=()), {-1}, length, trail)
        if not isinstance(total, PerRow | Stat):
            return total
        return dataclasses.replace(total, running=True, degree=total.degree if old.value == 0 else None)

    def _while(self, eqn: Equation, labels: Labels, trail: Trail) -> Labels:
        num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts, start = labels[num_cond : num_cond + num_body], labels[num_cond + num_body :]

        def body(carry: Labels) -> Labels:
            return self.through(eqn.params["body_jaxpr"], [*consts, *carry], trail)

        carry = self._settled(body, start, len(start), lambda old, new: self._either([old, new], trail), trail)
        (goes_on,) = self.through(eqn.params["cond_jaxpr"], [*labels[:num_cond], *carry], trail)
        return self._chosen(eqn, goes_on, carry, trail)

    def _settled(
        self,
        body: Callable[[Labels], Labels],
        carry: Labels,
        num_carry: int,
        after: Callable[[Label, Label], Label],
        trail: Trail,
    ) -> Labels:
        for _ in range(_MOST_ROUNDS):
            new = [after(old, label) for old, label in zip(carry, body(carry)[:num_carry], strict=True)]
            if new == carry:
                return carry
            carry = new
        return [label if isinstance(label, Free) else Unknown(trail) for label in carry]

    def _cond(self, eqn: Equation, labels: Labels, trail: Trail) -> Labels:
        branches = [self.through(branch, labels[1:], trail) for branch in eqn.params["branches"]]
        joined = [self._either(column, trail) for column in zip(*branches, strict=True)]
        return self._chosen(eqn, labels[0], joined, trail)

    def _chosen(self, eqn: Equation, chooses: Label, labels: Labels, trail: Trail) -> Labels:
        """The labels of values that a predicate chose: results of a branch, or of a loop after its last iteration."""
        if isinstance(chooses, Free):
            return labels
        if isinstance(chooses, Mixed | Unknown):
            return [chooses] * len(labels)
        if isinstance(chooses, Stat):
            return [Mixed("statistic", trail, chooses.trail)] * len(labels)
        return [self.arithmetic.pointwise(eqn, [chooses, label], trail) for label in labels]

    def _either(self, labels: Sequence[Label], trail: Trail) -> Label:
        """The label of a value that is one of several."""
        if (bad := worst(labels)) is not None:
            return bad
        known = [x for x in labels if isinstance(x, PerRow | Stat)]
        frees = [x for x in labels if isinstance(x, Free)]
        degrees = {x.degree for x in known} | {x.degree for x in frees if x.value != 0}
        degree = degrees.pop() if len(degrees) == 1 else None if degrees else 0
        if not known:
            same = len(set(frees)) == 1
            varied = frozenset[int]().union(*(x.varied for x in frees))
            flags = {name: any(getattr(x, name) for x in frees) for name in ("placed", "given", "drawn", "scaled")}
            summed = next((x.summed for x in frees if x.summed), ())
            other = Free(varied, degree=degree, summed=summed, **flags)
            return frees[0] if same else other
        per_row = [x for x in known if isinstance(x, PerRow)]
        if per_row and len(per_row) < len(known) and not all(x.running for x in known):
            return Mixed("statistic", trail, next(x.trail for x in known if isinstance(x, Stat)))
        if not per_row:
            return dataclasses.replace(known[0], degree=degree)
        found = coarsest(per_row)
        if found is None:
            return Mixed("pairs", trail)
        plus = next((x.plus for x in per_row if x.plus), ())
        summed = next((x.summed for x in per_row if x.summed), ())
        running = any(x.running for x in known)
        return dataclasses.replace(found, degree=degree, plus=plus, summed=summed, running=running)


def _differing(label: Label) -> Label:
    """The label of a carry that differs between a scan's iterations."""
    return dataclasses.replace(label, varied=label.varied | {-1}, value=None) if isinstance(label, Free) else label


def array_label(v: Var) -> Free:
    """The label of an array that does not depend on the batch: a parameter, a constant."""
    return Free(frozenset(d for d, size in enumerate(getattr(v.aval, "shape", ())) if size > 1))


def _same_rank(eqn: Equation) -> bool:
    """Whether the result has the operands' dims (a bitcast may add one)."""
    rank = len(eqn.outvars[0].aval.shape)
    return all(len(v.aval.shape) in (0, rank) for v in eqn.invars if hasattr(v.aval, "shape"))
