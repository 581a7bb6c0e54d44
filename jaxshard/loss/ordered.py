"""An evaluation of the loss that orders its backward pass, for GPU and TPU (`platforms.backward` says how and why).

Its rules cover the backward pass alone, so forward-mode differentiation fails. (It does not rewrite the program
beforehand: barriers hold back the gradients of cut parameters, which exist only in an evaluation, and a rewritten
program would have to be traced again.)

Unrolled models on GPU: in a program without loops, XLA delays all reduce-scatters until the backward pass has ended,
joins them, and keeps all unsharded gradients until then. So parameters are grouped into buckets, in the order in which
the loss first uses them, as in Li et al. 2020 (PyTorch Distributed, section 3.2.3). The backward pass goes from one
bucket to the previous one only once the gradients of the bucket after it are reduced.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard import platforms
from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Tree, Var
from jaxshard.loss.evaluation import Evaluation
from jaxshard.loss.params import uses
from jaxshard.loss.params.unshard import AtFirstUse, Sharded, Value, deferred
from jaxshard.platforms import backward
from jaxshard.programs.jaxprs import inner_jaxpr, is_literal
from jaxshard.programs.primitives import INLINED, SCAN, WHOLE
from jaxshard.programs.questions import variables_that_vary_smoothly, varies_smoothly


def run(
    closed: Jaxpr,
    values: Sequence[Tree],
    weights: Iterable[int] = (),
    smooth: Sequence[bool] | None = None,
    *,
    regathers: bool = False,
) -> list[Value]:
    """Evaluates a program for differentiation; on GPU and TPU its backward pass is ordered.

    Args:
      closed, values: as for `Evaluation.run`.
      weights: which inputs are parameters. (Cut ones are known to be.)
      smooth: which inputs may have gradients; None: all.
      regathers: as for `Evaluation`.
    """
    if not platforms.here().orders_backward:
        return Evaluation.run(closed, values, regathers=regathers)
    return OrderedEvaluation.run(closed, values, weights=weights, smooth=smooth, regathers=regathers)


class OrderedEvaluation(Evaluation):
    """One evaluation of a program, with an ordered backward pass.

    Attributes:
      weights: the variables that are whole parameters, also cast or reshaped.
      smooth: the variables that may have gradients.
    """

    always_prevents_cse = True

    def __init__(
        self,
        closed: Jaxpr,
        values: Sequence[Tree],
        *,
        weights: Iterable[int] = (),
        smooth: Sequence[bool] | None = None,
        **how: Any,
    ):
        super().__init__(closed, values, **how)
        self.smooth = variables_that_vary_smoothly(self.jaxpr, [True] * len(values) if smooth is None else smooth)
        self.weights = {self.jaxpr.invars[i] for i in weights}
        self._reduced_before = {} if self.in_loop else self._buckets()

    @classmethod
    def concerns(cls, closed: Jaxpr) -> bool:
        """Whether a program has an equation with its own backward rule."""
        return backward.concerns(closed)

    def _run(self, place: int, eqn: Equation) -> None:
        if place in self._reduced_before:
            self._order(place)
        self._gather_first_used(eqn)
        later = self._gradients_before(place, eqn)
        if later or self._takes_cut(eqn):
            self._run_waiting()
            outs = self._run_with_cut(eqn)
            self.weights |= {eqn.outvars[0]} if uses.mark(eqn) else set()
            self._set(eqn, self._after_gradients_of(later, eqn.outvars, outs))
        elif self._run_again(eqn) or self._run_by_own_rule(eqn):
            pass
        else:
            self._waiting.append(eqn)
        if eqn.primitive.name in WHOLE and self._is_weight(eqn.invars[0]):
            self.weights.add(eqn.outvars[0])

    def _is_weight(self, v: Var) -> bool:
        return not is_literal(v) and v in self.weights

    def _gather(self, v: Var, value: AtFirstUse) -> None:
        super()._gather(v, value)
        self.weights.add(v)

    def _run_called(self, eqn: Equation) -> list[Value]:
        weights = [i for i, v in enumerate(eqn.invars) if self._is_weight(v)]
        smooth = [not is_literal(v) and v in self.smooth for v in eqn.invars]
        return self.run(inner_jaxpr(eqn), self._operands(eqn), weights=weights, smooth=smooth, **self._how(eqn))

    def _plain(self, eqn: Equation) -> Callable[..., list[Any]]:
        if not self._has_own_rule(eqn):
            return super()._plain(eqn)
        return lambda *operands: [backward.bind(eqn, operands, [self._is_weight(v) for v in eqn.invars])]

    def _has_own_rule(self, eqn: Equation) -> bool:
        return backward.has_own_rule(eqn) and not any(is_literal(v) for v in eqn.invars)

    def _run_by_own_rule(self, eqn: Equation) -> bool:
        """Runs an equation with its own backward rule, or a call of such; False if it is neither."""
        is_call = eqn.primitive.name in INLINED and deferred(eqn) is None and backward.concerns(inner_jaxpr(eqn))
        if not is_call and not self._has_own_rule(eqn):
            return False
        self._run_waiting()
        if is_call:
            self._set(eqn, self._run_called(eqn))
        else:
            self._set(eqn, self._plain(eqn)(*self._operands(eqn)))
        return True

    def _buckets(self) -> dict[int, list[Var]]:
        cut = {v: slot for v in self.jaxpr.invars if (slot := _gradient_slot(self.env[v])) is not None}
        return reduced_before(self.jaxpr, {v: v.aval.size * x.dtype.itemsize for v, x in cut.items()})

    def _order(self, place: int) -> None:
        """Adds a barrier: backward continues here only after the next bucket's reductions."""
        self._run_waiting()
        variables = live(self.jaxpr, place, self.weights)
        variables = [v for v in variables if isinstance(self.env[v], jax.Array)]
        tied = self._after_gradients_of(self._reduced_before[place], variables, [self.env[v] for v in variables])
        self.env |= dict(zip(variables, tied, strict=True))

    def _gradients_before(self, place: int, eqn: Equation) -> list[Var]:
        """The cut parameters used only after a scan, whose gradients must be reduced before its backward pass."""
        if eqn.primitive.name != SCAN:
            return []
        return [v for v in uses.first_used_after(self.jaxpr, place) if _gradient_slot(self._value(v)) is not None]

    def _after_gradients_of(self, params: list[Var], variables: list[Var], values: list[Value]) -> list[Value]:
        """The values of variables, whose backward pass starts only when these parameters' gradients are reduced.

        Values without gradients stay as they are; otherwise JAX would differentiate what depends on them, too.
        """
        places = [i for i, v in enumerate(variables) if v in self.smooth]
        if not params or not places:
            return values
        slots = [_gradient_slot(self.env[v]) for v in params]
        slots, floating = backward.before_the_rest(slots, [values[i] for i in places])
        for v, x in zip(params, slots, strict=True):
            cut = self.env[v]
            assert not isinstance(cut, jax.Array)
            self.env[v] = cut.with_stand_in(x)
        found = dict(zip(places, floating, strict=True))
        return [found.get(i, x) for i, x in enumerate(values)]

    @classmethod
    def rematerialized(cls, again: Callable[..., list[Value]], inner: OpenJaxpr, eqn: Equation, in_loop: bool) -> Any:
        """`again`, recomputed in the backward pass; in a loop only activations wait for the results' gradients."""
        if in_loop and eqn.params["policy"] is None and not eqn.effects:
            return backward.Recomputed(again, tuple(varies_smoothly(inner, [True] * len(inner.invars))))
        return super().rematerialized(again, inner, eqn, in_loop)


def _gradient_slot(value: Value | None) -> jax.Array | None:
    """The array that the loss is differentiated with respect to, in place of a cut parameter."""
    if isinstance(value, AtFirstUse):
        return _gradient_slot(value.sharded)
    return value.stand_in if isinstance(value, Sharded) and value.local is not None else None


BUCKET_BYTES = 32 * 2**20  # of unsharded gradients: enough for a fast collective


def reduced_before(jaxpr: OpenJaxpr, num_bytes: Mapping[Var, int]) -> dict[int, list[Var]]:
    """Equation index -> the parameters whose gradients are reduced before the backward pass goes past that equation.

    Args:
      jaxpr: the loss.
      num_bytes: the size of the unsharded gradient, for each parameter that is reduced where the loss uses it.
    """
    starts, buckets = _buckets(jaxpr, num_bytes)
    return dict(zip(starts, buckets[1:], strict=False))


def _buckets(jaxpr: OpenJaxpr, num_bytes: Mapping[Var, int]) -> tuple[list[int], list[list[Var]]]:
    """(The equation at which each bucket begins, its parameters.)"""
    starts: list[int] = []
    buckets: list[list[Var]] = []
    known: set[Var] = set()
    room = 0
    for place, eqn in enumerate(jaxpr.eqns):
        new = [] if eqn.primitive.name == SCAN else [v for v in eqn.invars if not is_literal(v) and v in num_bytes]
        new = [v for v in dict.fromkeys(new) if v not in known]
        known |= {v for v in eqn.invars if not is_literal(v) and v in num_bytes}
        if new and room <= 0:
            starts, buckets, room = [*starts, place], [*buckets, []], BUCKET_BYTES
        if new:
            buckets[-1] += new
            room -= sum(num_bytes[v] for v in new)
    return starts, buckets


def live(jaxpr: OpenJaxpr, place: int, but: Iterable[Var]) -> list[Var]:
    """The floating values computed before equation `place` and used at it or later, without `but`."""
    made = {v for eqn in jaxpr.eqns[:place] for v in eqn.outvars} - set(but)
    later = [v for eqn in jaxpr.eqns[place:] for v in eqn.invars] + jaxpr.outvars
    used = dict.fromkeys(v for v in later if not is_literal(v) and v in made)
    return [v for v in used if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
