"""Arrays in another dtype: rounded, where it must be, but no number becomes another one."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxshard.checkpoint.storage.leaves import Leaf, Number


def converted(path: str, x: jax.Array | np.ndarray, dtype: DTypeLike) -> jax.Array | np.ndarray:
    """The array in this dtype; floating-point numbers are rounded.

    Raises:
      ValueError: a number is too large for it; or it has a fraction, or is no number, and the dtype has whole ones.

    >>> converted("w", np.arange(3), np.float16)
    array([0., 1., 2.], dtype=float16)
    """
    if x.dtype == dtype:
        return x
    with jax.enable_x64(True), np.errstate(all="ignore"):  # or numbers of 64 bits were cut before they are compared
        made = x.astype(dtype)
        if not _holds(x, made):
            raise ValueError(f"checkpoint: {path} is {x.dtype}, with numbers that {made.dtype} cannot hold")
    return made


def as_array(x: Leaf) -> np.ndarray:
    """An array or a number as an array, a whole number of more than 64 bits as one of float64.

    Raises:
      OverflowError: not even that can hold it.
    """
    made = np.asarray(x)
    return made if made.dtype != object else made.astype(np.float64)


def as_number(path: str, x: np.ndarray, kind: type[Number]) -> Number:
    """An array of one element as a Python number of this type; raises as `converted` does."""
    value = x.item()
    try:
        made = cast(Any, kind)(value)
    except (TypeError, ValueError, OverflowError):  # a complex number, none, an infinite one
        made = None
    if made is None or (kind in (bool, int) and made != value):
        raise ValueError(f"checkpoint: {path} is {value}, which a Python {kind.__name__} cannot hold")
    return made


def _holds(x: jax.Array | np.ndarray, made: jax.Array | np.ndarray) -> bool:
    """Whether each number of `made` is that of `x`, but for rounding."""
    xp: Any = jnp if isinstance(x, jax.Array) else np
    if made.dtype == bool:
        fits = (x == 0) | (x == 1)
    elif jnp.issubdtype(made.dtype, jnp.inexact):
        fits = (xp.isfinite(x) == xp.isfinite(made)) & (xp.isnan(x) == xp.isnan(made))
    elif x.dtype == bool:
        return True
    else:
        fits = _are_in_range(x, jnp.iinfo(made.dtype), xp)
    return bool(xp.all(fits))


def _are_in_range(x: jax.Array | np.ndarray, whole: jnp.iinfo, xp: Any) -> Any:
    low, high = int(whole.min), int(whole.max)
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(np.float64)
        return (x == xp.floor(x)) & (x >= float(low)) & (x < float(high) + 1)
    own = jnp.iinfo(x.dtype)
    return (x >= max(low, int(own.min))) & (x <= min(high, int(own.max)))
