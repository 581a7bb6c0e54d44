"""Early stopping, as a pure function of the held-out losses so far: every process that sees them decides the same."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """The rule, and the evaluations so far.

    Attributes:
      patience: evaluations in a row that may fail to improve; 0 never stops.
      min_improvement: an evaluation improves if it is below the best by more than this, in the loss's own unit.
      best: lowest loss that counted as an improvement.
      misses: evaluations since then.
    """

    patience: int
    min_improvement: float
    best: float = math.inf
    misses: int = 0

    def after(self, loss: float) -> EarlyStopping:
        """The rule after one more evaluation. NaN never improves."""
        if loss < self.best - self.min_improvement:
            return dataclasses.replace(self, best=loss, misses=0)
        return dataclasses.replace(self, misses=self.misses + 1)

    @property
    def stopped(self) -> bool:
        """Whether training is to stop now."""
        return 0 < self.patience <= self.misses
