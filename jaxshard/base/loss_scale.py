"""Dynamic loss scaling for float16: the scale, its rules and its state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.base.types import is_whole


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2), as `loss_scale=` of a strategy.

    `train_step` multiplies the loss by the scale, and divides the reduced gradients by it before anything else
    reads them. A step whose gradients overflow is skipped.

    Args:
      initial: the first scale.
      growth_interval: the number of good steps in a row after which the scale is multiplied by `factor`.
      factor: multiplies the scale when it grows, and divides it when it shrinks; a power of two keeps gradients exact.
      hysteresis: overflows are counted since the scale last grew; from this number on, each one shrinks it.
      minimum: the scale never shrinks below it.
      maximum: the scale never grows above it.

    Raises:
      TypeError: an argument is not a number.
      ValueError: unless 0 < minimum <= initial <= maximum <= 2**127, factor > 1 and finite, and growth_interval and
        hysteresis are integers, 1 or more.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    factor: float = 2.0
    hysteresis: int = 2
    minimum: float = 1.0
    maximum: float = 2.0**24

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float | np.number) or isinstance(value, bool):
                raise TypeError(f"LossScale: {field.name}={value!r:.80} is a {type(value).__name__}; give a number")
        if not 0 < self.minimum <= self.initial <= self.maximum <= 2.0**127:
            raise ValueError(
                "LossScale: needs 0 < minimum <= initial <= maximum <= 2**127, got "
                f"{self.minimum}, {self.initial}, {self.maximum}"
            )
        counts = (self.growth_interval, self.hysteresis)
        if not 1 < self.factor < float("inf") or not all(is_whole(n, 1) for n in counts):
            raise ValueError(
                "LossScale: needs factor > 1, and integers growth_interval >= 1 and hysteresis >= 1, got "
                f"{self.factor}, {self.growth_interval}, {self.hysteresis}"
            )

    def start(self) -> dict[str, jax.Array]:
        """The state before the first step: scalars "scale", "good_steps" and "hysteresis"."""
        return {
            "scale": jnp.float32(self.initial),
            "good_steps": jnp.int32(0),
            "hysteresis": jnp.int32(self.hysteresis),
        }

    def after(self, state: dict[str, jax.Array], overflowed: jax.Array) -> dict[str, jax.Array]:
        """The state after a step; `overflowed`, a boolean scalar, says whether its gradients were not finite."""
        scale, hysteresis = state["scale"], state["hysteresis"]
        good_steps = jnp.where(overflowed, 0, state["good_steps"] + 1)
        grows = good_steps >= self.growth_interval
        hysteresis = jnp.maximum(hysteresis - overflowed.astype(jnp.int32), 0)
        shrinks = overflowed & (hysteresis == 0)
        grown = jnp.minimum(scale * self.factor, self.maximum)
        shrunk = jnp.maximum(scale / self.factor, self.minimum)
        return {
            "scale": jnp.where(shrinks, shrunk, jnp.where(grows, grown, scale)),
            "good_steps": jnp.where(grows, 0, good_steps),
            "hysteresis": jnp.where(grows, self.hysteresis, hysteresis),
        }
