"""Skipped steps: devices judge whether a step is finite; the host counts the skips, warns and raises."""

import atexit
import contextlib
import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.base.loss_scale import LossScale
from jaxshard.base.tree import named_leaves, path_of, sum_dtype
from jaxshard.base.types import Metrics, Tree
from jaxshard.system.text import ordinal
from jaxshard.system.users_lines import warn

PART = "the check that all is finite"  # in a step, for `programs.source`

_LOSS = "the loss"
_CURES = (
    "Params and state are those of the last good step: lower the learning rate, check the batch, or allow more skips "
    "(max_skips)"
)


class Names(NamedTuple):
    """The paths of the leaves of the trained params, and of the state."""

    params: list[str]
    state: list[str]


def check_may_be_skipped(binding: Sequence[tuple[str, ...]]) -> None:
    """Raises a ValueError if the first update changes which leaves the state has, or their shapes."""
    if binding:
        raise ValueError(
            f"train_step: the first update adds or drops {path_of(binding[0])} in the state, or changes its shape, so "
            "it cannot be skipped: create this leaf in the optimizer's init, or disable skipping (max_skips=None, and "
            "no weighted=True)"
        )


def rescaled(
    scaling: LossScale, state: Tree, after: Tree, skipped: jax.Array, finite: jax.Array, weight: jax.Array | None
) -> Tree:
    """The new state with the loss scale of the next step; `weight` is the batch's, if the loss is weighted."""
    stays = skipped & finite  # a batch of weight 0, or a bad update, is no reason to change the scale
    if weight is not None:
        stays |= weight == 0
    following = next_scale(scaling, state.extra["loss_scale"], ~finite, stays)
    return after._replace(extra=after.extra | {"loss_scale": following})


def next_scale(scaling: LossScale, old: Tree, overflowed: jax.Array, stays: jax.Array) -> Tree:
    """The state of the loss scale after a step; where `stays` is true, as it was."""
    return jax.tree.map(lambda new, was: jnp.where(stays, was, new), scaling.after(old, overflowed), old)


class NonFiniteError(FloatingPointError):
    """Too many steps in a row had a loss, a gradient or an update that is not finite.

    `step` is the number of the last of them, counted from 1 for each `train_step`; `leaf` is the path of its first leaf
    whose gradient or new value is not finite ("the loss", if only that was not), and `what` names it in words. `broken`
    is the path of a parameter that was not finite before that step, or None.
    """

    def __init__(self, step: int, leaf: str, count: int, what: str | None = None, broken: str | None = None):
        self.step, self.leaf, self.broken = step, leaf, broken
        self.what = what or (leaf if leaf == _LOSS else f"the gradient of {leaf}")
        cures = _CURES if broken is None else _of_broken(broken)
        super().__init__(
            f"train_step: step {step}: {self.what} is not finite, for the {ordinal(count)} time in a row. {cures}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which would give `__init__` the message alone."""
        return BaseException.__new__, (type(self), *self.args), self.__dict__


def _of_broken(path: str) -> str:
    return (
        f"Params were already not finite before this step ({path}), so no batch can help: go back to the last finite "
        "checkpoint with Checkpointer(path).latest_finite()"
    )


def judged(loss: jax.Array, grads: Tree) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(norm of the whole gradient, index of its first leaf that is not finite or -1, whether all is finite).

    A gradient whose square overflows counts as not finite: the infinity would stay in second moments forever.
    """
    squares = [_sum_of_squares(g) for g in jax.tree.leaves(grads)]
    if not squares:
        return jnp.zeros(()), jnp.int32(-1), jnp.isfinite(loss)
    widest = jnp.result_type(*{x.dtype for x in squares})
    bad = ~jnp.isfinite(jnp.stack([x.astype(widest) for x in squares]))
    first = jnp.where(bad.any(), jnp.argmax(bad).astype(jnp.int32), -1)
    return jnp.sqrt(sum(squares)), first, jnp.isfinite(loss) & ~bad.any()


def _sum_of_squares(x: jax.Array) -> jax.Array:
    """The sum of squares, at least in float32: in bf16 a sum of many squares would stop growing."""
    x = x.astype(sum_dtype(x))
    squares = lax.square(x.real) + lax.square(x.imag) if jnp.iscomplexobj(x) else lax.square(x)
    return lax.reduce_sum(squares, tuple(range(x.ndim)))


class Verdicts:
    """The outcomes of past steps. Call n + 2 reads that of step n before it dispatches: devices have work meanwhile,
    and nothing raises after a dispatch, which would lose its results.

    Every call reads exactly one outcome, so that several processes raise at the same call. Outcomes that are unread
    when the program ends are reported then.

    Args:
      max_skips: the most steps in a row that may be skipped; None: any number.
      scaling: the loss scale, whose overflows do not count.
    """

    def __init__(self, max_skips: int | None, scaling: LossScale | None):
        self._max_skips, self._scaling = max_skips, scaling
        self._calls, self._bad_in_a_row = 0, 0
        self._pending: list[tuple[int, Names, Metrics]] = []
        atexit.register(_tell_at_exit, weakref.ref(self))  # runs before JAX's own handler, registered earlier

    def expect(self, names: Names, metrics: Metrics) -> None:
        """Notes a step that was dispatched; `names` are its leaves' paths."""
        self._calls += 1
        kept = metrics.copy()
        kept.pop("aux", None)  # it may be large
        self._pending.append((self._calls, names, kept))

    def tell(self, params: Tree = None, *, but: int = 0) -> None:
        """Reads all outcomes except the last `but`, and warns of each skipped step.

        `params`: those of the next call, which a skipped step has left unchanged.

        Raises:
          NonFiniteError: too many steps in a row were skipped.
        """
        while len(self._pending) > but:
            call, names, metrics = self._pending[0]
            skipped = bool(metrics["skipped"])  # waits; an interrupt leaves the outcome unread
            del self._pending[0]
            if skipped:
                self._skipped(call, names, metrics, params)
            else:
                self._bad_in_a_row = 0

    def _skipped(self, call: int, names: Names, metrics: Metrics, params: Tree) -> None:
        bad, scaling, finite = int(metrics["bad_leaf"]), self._scaling, _finite_before(metrics)
        scale = metrics.get("loss_scale")
        if bad < 0 and finite:
            self._warn(call, "the whole batch has weight 0")
            return
        if scaling is not None and scale is not None and not finite and float(scale) > scaling.minimum:
            return  # an overflow, which a smaller scale will cure
        self._bad_in_a_row += 1
        leaf, what = _named(names, bad, finite)
        broken = None if finite else _not_finite(params)
        if self._max_skips is not None and self._bad_in_a_row > self._max_skips:
            count, self._bad_in_a_row = self._bad_in_a_row, 0
            self._pending.clear()  # the later step had the same params, so its outcome adds nothing
            raise NonFiniteError(call, leaf, count, what, broken)
        more = "" if broken is None else f". {_of_broken(broken)}"
        self._warn(call, f"{what} is not finite{more}")

    def _warn(self, call: int, why: str) -> None:
        warn(f"train_step: step {call} was skipped: {why}")


def _finite_before(metrics: Metrics) -> bool:
    """Whether loss and gradients were finite, so that the update caused the skip."""
    return math.isfinite(float(metrics["loss"])) and math.isfinite(float(metrics["grad_norm"]))


def _named(names: Names, bad: int, finite: bool) -> tuple[str, str]:
    """(path, in words) of the leaf that is not finite."""
    if bad < 0:
        return _LOSS, _LOSS
    if bad >= len(names.params):
        leaf = names.state[bad - len(names.params)]
        return leaf, f"the new optimizer state's {leaf}"
    leaf = names.params[bad]
    return leaf, f"the {'update' if finite else 'gradient'} of {leaf}"


def _not_finite(params: Tree) -> str | None:
    """The path of the first parameter that is not finite."""
    for names, leaf in named_leaves(params):
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.isfinite(leaf).all()):
            return path_of(names)
    return None


def _tell_at_exit(found: "weakref.ref[Verdicts]") -> None:
    verdicts = found()
    if verdicts is not None:
        with contextlib.suppress(Exception):  # devices may be lost
            verdicts.tell()
