"""Skipped steps: devices judge whether a step is finite; the host counts the skips, warns and raises."""

import atexit
import contextlib
import math
import weakref

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.base.loss_scale import LossScale
from jaxshard.base.source import warn
from jaxshard.base.tree import sum_dtype
from jaxshard.base.types import Metrics, Tree
from jaxshard.base.units import ordinal

_LOSS = "the loss"


def _what(leaf: str) -> str:
    return leaf if leaf == _LOSS else f"the gradient of {leaf}"


class NonFiniteError(FloatingPointError):
    """Too many steps in a row had a loss or gradient that is not finite.

    `step` is the number of the last of them, where the first call of that `train_step` is 1; `leaf` is the path of its
    first gradient that is not finite ("the loss", if that alone was not), and `what` names it in words.
    """

    def __init__(self, step: int, leaf: str, count: int):
        self.step, self.leaf, self.what = step, leaf, _what(leaf)
        super().__init__(
            f"train_step: call {step}: {self.what} is not finite, for the {ordinal(count)} time in a row. Params and "
            "state are as the last good step left them: lower the learning rate, look at the batch, or allow more "
            "(max_skips)"
        )


def judged(loss: jax.Array, grads: Tree) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(norm of the whole gradient, index of its first leaf that is not finite or -1, whether all is finite).

    A gradient whose square overflows counts as not finite: the infinity would stay in second moments for ever.
    """
    squares = [_sum_of_squares(g) for g in jax.tree.leaves(grads)]
    if not squares:
        return jnp.zeros(()), jnp.int32(-1), jnp.isfinite(loss)
    widest = jnp.result_type(*{x.dtype for x in squares})
    bad = ~jnp.isfinite(jnp.stack([x.astype(widest) for x in squares]))
    first = jnp.where(bad.any(), jnp.argmax(bad).astype(jnp.int32), -1)
    return jnp.sqrt(sum(squares)), first, jnp.isfinite(loss) & ~bad.any()


def _sum_of_squares(x: jax.Array) -> jax.Array:
    """The sum of squares in float32 at least: in bf16 a sum of many squares would stop growing."""
    x = x.astype(sum_dtype(x))
    squares = lax.square(x.real) + lax.square(x.imag) if jnp.iscomplexobj(x) else lax.square(x)
    return lax.reduce_sum(squares, tuple(range(x.ndim)))


class Verdicts:
    """The outcomes of past steps. Each is read once the next step is dispatched, so that devices never wait.

    Every call reads exactly the outcome of the one before, so that several processes raise at the same call. What is
    still unread when the program ends is told then.

    Args:
      max_skips: how many steps in a row may be skipped; None: any number.
      scaling: the loss scale, whose overflows do not count.
    """

    def __init__(self, max_skips: int | None, scaling: LossScale | None):
        self._max_skips, self._scaling = max_skips, scaling
        self._calls, self._bad_in_a_row = 0, 0
        self._pending: list[tuple[int, list[str], Metrics]] = []
        self._due: Exception | None = None
        atexit.register(_tell_at_exit, weakref.ref(self))  # before JAX, which registered earlier, takes devices down

    def check(self) -> None:
        """Raises what is due, before a step is dispatched: a `NonFiniteError`, or a warning that is to be an error."""
        due, self._due = self._due, None
        if due is not None:
            if isinstance(due, NonFiniteError):
                self._pending.clear()  # the later step had the same params, so its outcome says nothing new
            raise due

    def expect(self, names: list[str], metrics: Metrics) -> None:
        """Notes a step that was dispatched, and warns if the one before was skipped; `names` are its params' paths."""
        self._calls += 1
        kept = {name: metrics[name] for name in ("skipped", "bad_leaf", "loss", "loss_scale") if name in metrics}
        self._pending.append((self._calls, names, kept))
        self.tell(but=1)

    def tell(self, *, but: int = 0) -> None:
        """Reads all outcomes, but for the last `but`, and warns of each skipped step."""
        while len(self._pending) > but and not isinstance(self._due, NonFiniteError):
            call, names, metrics = self._pending.pop(0)
            if bool(metrics["skipped"]):
                self._skipped(call, names, metrics)
            else:
                self._bad_in_a_row = 0

    def _skipped(self, call: int, names: list[str], metrics: Metrics) -> None:
        bad, scaling = int(metrics["bad_leaf"]), self._scaling
        if bad < 0 and math.isfinite(float(metrics["loss"])):
            self._warn(call, "the whole batch has weight 0")
            return
        if scaling is not None and float(metrics["loss_scale"]) > scaling.minimum:
            return  # an overflow, which a smaller scale will cure
        self._bad_in_a_row += 1
        leaf = _LOSS if bad < 0 else names[bad]
        if self._max_skips is not None and self._bad_in_a_row > self._max_skips:
            count, self._bad_in_a_row = self._bad_in_a_row, 0
            self._due = NonFiniteError(call, leaf, count)
        else:
            self._warn(call, f"{_what(leaf)} is not finite")

    def _warn(self, call: int, why: str) -> None:
        try:
            warn(f"train_step: call {call} changed nothing: {why}")
        except Warning as error:  # where warnings are errors: raised now, it would lose the step that was dispatched
            self._due = error


def _tell_at_exit(found: "weakref.ref[Verdicts]") -> None:
    verdicts = found()
    if verdicts is not None:
        with contextlib.suppress(Exception):  # devices may be lost
            verdicts.tell()
