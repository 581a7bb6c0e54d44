"""Labels of the results of collectives."""

from collections.abc import Sequence

from jaxshard.base.types import Equation
from jaxshard.programs.primitives import ADDS_UP, OVER_DEVICES, kind_of
from jaxshard.programs.rows.arithmetic import Arithmetic, without_dims
from jaxshard.programs.rows.labels import Free, Label, Mixed, PerRow, Stat, Trail, Unknown, dims_of, moved


class Devices:
    """Labels of the results of collectives, where the mesh axes `split` cut the rows.

    Args:
      whole: as for `walk.Walk`.
    """

    def __init__(self, arithmetic: Arithmetic, split: frozenset[str], whole: bool):
        self._arithmetic, self._split, self._whole = arithmetic, split, whole

    def label(self, eqn: Equation, label: Label, trail: Trail) -> Label:
        """The label of a collective's result, from that of its operand."""
        is_sum, axes = eqn.primitive.name in ADDS_UP, eqn.params.get("axes", eqn.params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        label = self._over_dims(eqn, label, [axis for axis in axes if isinstance(axis, int)], trail)
        named = self._split & set(axes)
        if isinstance(label, Mixed) and label.extreme and named == self._split and self._whole:
            over_all = OVER_DEVICES[label.trail[-1].primitive.name]
            return Free(given=True) if eqn.primitive.name == over_all else label
        if isinstance(label, Free | Mixed | Unknown) or all(isinstance(axis, int) for axis in axes):
            return label
        if not named:
            return self._over_model_axes(eqn, label, trail)
        if named < self._split:
            return label if isinstance(label, Stat) and is_sum else Unknown(trail)
        if kind_of(eqn) == "all_gather" or (is_sum and isinstance(label, Stat)):
            degree = label.degree if isinstance(label, Stat) else 0
            if degree and self._arithmetic.partners is None:
                degree = None  # a second trace shows whether its divisor is a number of rows
            degree = degree - 1 if is_sum and degree is not None else degree
            found = Free(given=True, degree=degree, summed=trail, fresh=is_sum)
            is_mean = isinstance(label, Stat) and label.degree == 0
            return found if self._whole else Mixed("microbatch", trail, () if is_mean else trail)
        return Mixed("statistic", trail, trail) if kind_of(eqn) == "all_reduce" else Unknown(trail)

    def _over_dims(self, eqn: Equation, label: Label, dims: Sequence[int], trail: Trail) -> Label:
        """The label after a collective's reduction over array dims, which `vmap` makes of a named axis."""
        if not dims or kind_of(eqn) != "all_reduce":
            return label
        shape = eqn.invars[0].aval.shape
        if eqn.primitive.name in ADDS_UP:
            label = self._arithmetic.summed(eqn, label, dims, [shape[d] for d in dims], trail)
        else:
            label = self._arithmetic.reduced(label, dims, trail)
        return without_dims(label, dims, len(shape))

    def _over_model_axes(self, eqn: Equation, label: PerRow | Stat, trail: Trail) -> Label:
        if kind_of(eqn) == "all_gather" and not eqn.params.get("tiled", False):
            new = eqn.params["all_gather_dimension"]
            return moved(label, lambda d: d + (d >= new))
        shapes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        changed = len(shapes[0]) != len(shapes[1]) or any(
            shapes[0][d] != shapes[1][d] for d in dims_of(label) if d >= 0
        )
        return Unknown(trail) if changed else label
