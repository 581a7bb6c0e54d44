"""The findings of `check`: how a loss differs when its rows are distributed differently."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class LossDifference:
    """The distance of a loss and its gradients from those of the batch as given.

    Attributes:
      loss: `|difference| / |loss|`.
      gradients: path -> `|difference| / |gradient|` (norms), for each parameter.
      factor: the loss divided by that of the batch as given.
    """

    loss: float
    gradients: Mapping[str, float]
    factor: float

    @property
    def worst(self) -> tuple[str, float]:
        """(the parameter whose gradient differs most, its difference)."""
        return max(self.gradients.items(), key=lambda each: or_inf(each[1]), default=("", 0.0))

    def exceeds(self, tolerance: float) -> bool:
        """Whether the loss or a gradient differs by more than this, or is not finite."""
        return not (or_inf(self.loss) <= tolerance and or_inf(self.worst[1]) <= tolerance)


@dataclasses.dataclass(frozen=True)
class LossReport:
    """The report of `check`; `print(report)` shows it.

    Attributes:
      ok: whether the loss and all gradients stayed the same.
      loss: the loss of the batch as given.
      differences: way of distributing rows -> `Difference`.
      tolerance: the largest difference that rounding explains.
      causes: the likely causes, in words, the likeliest first.
      notes: the comparisons that were not made, and why.
    """

    ok: bool
    loss: float
    differences: Mapping[str, LossDifference]
    tolerance: float
    causes: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        head = "The loss is a mean over rows" if self.ok else "The loss is NOT what data parallelism averages"
        lines = [f"{head}: {self.loss:.6g}; relative differences up to {self.tolerance:.1e} are rounding."]
        for name, found in self.differences.items():
            path, far = found.worst
            sign = "differs" if found.exceeds(self.tolerance) else "same"
            lines.append(f"  {name}: {sign}; loss {found.loss:.1e}, gradients at most {far:.1e} ({path})")
        return "\n".join(
            [*lines, *(f"  likely: {cause}" for cause in self.causes), *(f"  note: {n}" for n in self.notes)]
        )


class RowsError(ValueError):
    """A loss is not a mean of independent rows. `report`: the report of `check`."""

    def __init__(self, report: LossReport):
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which would give `__init__` the message alone."""
        return BaseException.__new__, (type(self), *self.args), self.__dict__


def or_inf(x: float) -> float:
    return x if math.isfinite(x) else math.inf
