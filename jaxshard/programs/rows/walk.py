"""Walks through a traced loss and labels each value by what it has to do with the rows of the batch."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Var
from jaxshard.programs.jaxprs import (
    inner_jaxpr,
    is_literal,
    is_ref,
    linear_solver,
    open_jaxpr,
    scan_split,
    takes_whole_ref,
)
from jaxshard.programs.primitives import CALLS, LINEAR_ALGEBRA, POINTWISE, READS_REFS
from jaxshard.programs.rows import indexing, moves
from jaxshard.programs.rows.arithmetic import Arithmetic, over_parts, without_dims
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
    moved,
    scanned,
    stopped,
    worst,
)

Labels: TypeAlias = list[Label]
_MOVES: dict[str, moves.Rule] = {
    "iota": moves.iota,
    "broadcast_in_dim": moves.broadcast_in_dim,
    "reshape": moves.reshape,
    "transpose": moves.transpose,
    "squeeze": moves.squeeze,
    "rev": moves.rev,
    "slice": moves.slice_,
    "concatenate": moves.concatenate,
    "stack": moves.stack,
    "tile": moves.tile,
    "pad": moves.pad,
    "dot_general": moves.dot_general,
    "conv_general_dilated": moves.conv_general_dilated,
    "dynamic_slice": moves.dynamic_slice,
    "dynamic_update_slice": moves.dynamic_update_slice,
    "reduce_sum": moves.reduce_sum,
    **dict.fromkeys((f"reduce_{name}" for name in ("max", "min", "prod", "and", "or", "xor")), moves.reduce),
    **dict.fromkeys(("argmax", "argmin"), moves.reduce),
    **dict.fromkeys(("sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k"), moves.along),
    **dict.fromkeys((*LINEAR_ALGEBRA, "fft"), moves.leading),
    "fused_attention": moves.leading,
    "triangular_solve": moves.triangular_solve,
    **dict.fromkeys(
        (f"random_{name}" for name in ("bits", "gamma", "wrap", "unwrap", "fold_in", "seed", "split")), moves.random
    ),
    **dict.fromkeys((f"reduce_window_{name}" for name in ("sum", "max", "min")), moves.window),
}
_PIECES = {"split": moves.split, "unstack": moves.unstack}
_REDUCING = ("psum", "pmax", "pmin")
_COLLECTIVES = (*_REDUCING, "all_gather", "reduce_scatter", "ppermute", "all_to_all", "ragged_all_to_all", "pbroadcast")
_MOST_ROUNDS = 6


class Walk:
    """Labels the values of a traced loss.

    Args:
      arithmetic: for the batch that was traced.
      split_axes: the mesh axes over which rows are split.
      whole: whether the devices together see the whole batch at once; False: it is cut into microbatches.
    """

    def __init__(self, arithmetic: Arithmetic, split_axes: Sequence[str], whole: bool):
        self.arithmetic = arithmetic
        self._split, self._whole = frozenset(split_axes), whole
        self._known: dict[tuple[int, tuple[Label, ...]], Labels] = {}  # of calls without findings

    def through(self, jaxpr: Jaxpr, labels: Sequence[Label], trail: Trail = ()) -> Labels:
        """The labels of a program's outputs, from those of its inputs."""
        opened = open_jaxpr(jaxpr)
        env: dict[Var, Label] = {v: array_label(v) for v in opened.constvars}
        env |= dict(zip(opened.invars, labels, strict=True))
        columns: dict[Var, Labels] = {}
        for eqn in opened.eqns:
            found = [self._literal(eqn, i) if is_literal(v) else env[v] for i, v in enumerate(eqn.invars)]
            if eqn.primitive.name == "concatenate":
                columns[eqn.outvars[0]] = found
            here = (*trail, eqn)
            if eqn.primitive.name == "gather" or eqn.primitive.name.startswith("scatter"):
                known = columns.get(eqn.invars[1], [found[1]] * 16) if not is_literal(eqn.invars[1]) else [FREE] * 16
                rule = indexing.gather if eqn.primitive.name == "gather" else indexing.scatter
                outs = [rule(self.arithmetic, eqn, found, known, here)]
            else:
                outs = self._equation(eqn, found, here)
            env |= dict(zip(eqn.outvars, outs, strict=True))
            env |= self._written(eqn, found, outs, here)
        return [self._returned(opened, i) if is_literal(v) else env[v] for i, v in enumerate(opened.outvars)]

    def _written(self, eqn: Equation, labels: Labels, outs: Labels, trail: Trail) -> dict[Var, Label]:
        """The labels of mutable arrays after an equation: of what takes all of one's place, else not known."""
        refs = [v for v in eqn.invars if is_ref(v)]
        if not refs or eqn.primitive.name in READS_REFS:
            return {}
        if takes_whole_ref(eqn):
            return {eqn.invars[0]: labels[1]}
        free = all(isinstance(label, Free) for label in (*labels, *outs))
        return {} if free else dict.fromkeys(refs, Unknown(trail))

    def _literal(self, eqn: Equation, position: int) -> Label:
        partners = self.arithmetic.partners
        degree = 0 if partners is None else partners.degree_of_literal(eqn, position)
        return Free(value=_value(eqn.invars[position]), degree=degree)

    def _returned(self, jaxpr: OpenJaxpr, position: int) -> Label:
        partners = self.arithmetic.partners
        degree = 0 if partners is None else partners.degree_of_output(jaxpr, position)
        return Free(value=_value(jaxpr.outvars[position]), degree=degree)

    def _equation(self, eqn: Equation, labels: Labels, trail: Trail) -> Labels:
        name = eqn.primitive.name
        if name in CALLS:
            if name.startswith("custom_vjp") and any(not isinstance(label, Free) for label in labels):
                self.arithmetic.rules.append(trail)
            return self._called(eqn, labels, trail)
        if name in _MOVES:
            return [_MOVES[name](self.arithmetic, eqn, labels, trail)] * len(eqn.outvars)
        if name == "axis_index":
            return [Free(placed=True)]
        if name in _PIECES:
            return _PIECES[name](self.arithmetic, eqn, labels, trail)
        if name in ("optimization_barrier", "device_put", "new_ref", "freeze"):
            return labels
        if takes_whole_ref(eqn):
            return labels[:1]
        if name in POINTWISE and _same_rank(eqn):
            return [self.arithmetic.pointwise(eqn, labels, trail)] * len(eqn.outvars)
        controls = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "custom_linear_solve": self._linear_solve,
        }
        if name in controls:
            return controls[name](eqn, labels, trail)
        if name.startswith(_COLLECTIVES):
            return [self._collective(eqn, label, trail) for label in labels]
        frees = [label for label in labels if isinstance(label, Free)]
        free = Free(placed=any(label.placed for label in frees), given=any(label.given for label in frees))
        return [free if len(frees) == len(labels) else worst(labels) or Unknown(trail)] * len(eqn.outvars)

    def _called(self, eqn: Equation, labels: Labels, trail: Trail) -> Labels:
        """The labels of what a call returns; equal layers, which are one program, are walked once."""
        key = id(inner_jaxpr(eqn)), tuple(labels)
        if key not in self._known:
            before = self.arithmetic.num_findings
            outs = self.through(inner_jaxpr(eqn), labels, trail)
            if self.arithmetic.num_findings > before:
                return outs
            self._known[key] = outs
        return self._known[key]

    # Devices together.

    def _collective(self, eqn: Equation, label: Label, trail: Trail) -> Label:
        name, axes = eqn.primitive.name, eqn.params.get("axes", eqn.params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        label = self._over_dims(eqn, label, [axis for axis in axes if isinstance(axis, int)], trail)
        named = self._split & set(axes)
        if isinstance(label, Mixed) and label.extreme and named == self._split and self._whole:
            return Free(given=True) if label.trail[-1].primitive.name == f"reduce_{name[1:4]}" else label
        if isinstance(label, Free | Mixed | Unknown) or all(isinstance(axis, int) for axis in axes):
            return label
        if not named:
            return self._over_model_axes(eqn, label, trail)
        if named < self._split:
            return label if isinstance(label, Stat) and name.startswith("psum") else Unknown(trail)
        if name.startswith("all_gather") or (name.startswith("psum") and isinstance(label, Stat)):
            degree = label.degree if isinstance(label, Stat) else 0
            if degree and self.arithmetic.partners is None:
                degree = None  # a second trace tells whether what divides it is a number of rows
            summed = name.startswith("psum")
            degree = degree - 1 if summed and degree is not None else degree
            found = Free(given=True, degree=degree, summed=trail, fresh=summed)
            is_mean = isinstance(label, Stat) and label.degree == 0
            return found if self._whole else Mixed("microbatch", trail, () if is_mean else trail)
        return Mixed("statistic", trail, trail) if name.startswith(_REDUCING) else Unknown(trail)

    def _over_dims(self, eqn: Equation, label: Label, dims: Sequence[int], trail: Trail) -> Label:
        """The label after a collective's part over dims: what `vmap` makes of an axis that it names."""
        if not dims or not eqn.primitive.name.startswith(_REDUCING):
            return label
        shape = eqn.invars[0].aval.shape
        if eqn.primitive.name.startswith("psum"):
            label = self.arithmetic.summed(eqn, label, dims, [shape[d] for d in dims], trail)
        else:
            label = self.arithmetic.reduced(label, dims, trail)
        return without_dims(label, dims, len(shape))

    def _over_model_axes(self, eqn: Equation, label: PerRow | Stat, trail: Trail) -> Label:
        if eqn.primitive.name.startswith("all_gather") and not eqn.params.get("tiled", False):
            new = eqn.params["all_gather_dimension"]
            return moved(label, lambda d: d + (d >= new))
        shapes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        changed = len(shapes[0]) != len(shapes[1]) or any(
            shapes[0][d] != shapes[1][d] for d in dims_of(label) if d >= 0
        )
        return Unknown(trail) if changed else label

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
        """The label of a scan's carry, `old` before an iteration and `new` after it; dim -1 is the iteration's row."""
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
        """The labels of values that a predicate has chosen: a branch's results, a loop's after its last round."""
        if isinstance(chooses, Free):
            return labels
        if isinstance(chooses, Mixed | Unknown):
            return [chooses] * len(labels)
        if isinstance(chooses, Stat):
            return [Mixed("statistic", trail, chooses.trail)] * len(labels)
        return [self.arithmetic.pointwise(eqn, [chooses, label], trail) for label in labels]

    def _linear_solve(self, eqn: Equation, labels: Labels, trail: Trail) -> Labels:
        return self.through(*linear_solver(eqn, labels), trail)

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
    """The label of a carry that each iteration of a scan changes."""
    return dataclasses.replace(label, varied=label.varied | {-1}, value=None) if isinstance(label, Free) else label


def _value(literal: Var) -> float | None:
    try:
        return float(np.asarray(literal.val).item())
    except (TypeError, ValueError):
        return None


def array_label(v: Var) -> Free:
    """The label of an array that does not depend on the batch: a parameter, a constant."""
    return Free(frozenset(d for d, size in enumerate(getattr(v.aval, "shape", ())) if size > 1))


def _same_rank(eqn: Equation) -> bool:
    """Whether the result has the operands' dims (a bitcast may add one)."""
    rank = len(eqn.outvars[0].aval.shape)
    return all(len(v.aval.shape) in (0, rank) for v in eqn.invars if hasattr(v.aval, "shape"))
