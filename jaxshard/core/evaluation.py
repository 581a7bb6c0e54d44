"""Evaluates the traced loss with parameters that are cut: each is gathered, or looked up, where the loss needs it."""

import weakref
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxshard.base.jaxprs import closed_jaxpr, core, inner_jaxpr, is_literal, open_jaxpr, run_equations, scan_split
from jaxshard.base.primitives import CASTS, INLINED, REMAT, SAME_NUMBERS
from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Tree, Var
from jaxshard.core import backward, collectives, uses
from jaxshard.core.lookup import Lookup
from jaxshard.core.unshard import LOOKUP_MARK, MARK, AtFirstUse, Environment, Sharded, Value, deferred


def run(closed: Jaxpr, values: Sequence[Tree], weights: Iterable[int] = ()) -> list[Value]:
    """Evaluates a traced program; inputs that are cut are gathered at their marks, or where they are first used.

    Args:
      closed: the program.
      values: its inputs; parameters may be `Sharded` or `AtFirstUse`.
      weights: which inputs are parameters. (Those that are cut are known to be.)
    """
    is_cut = any(isinstance(value, Sharded | AtFirstUse) for value in values)
    if not is_cut and not (backward.is_ordered() and backward.concerns(closed)):
        return list(core().jaxpr_as_fun(closed_jaxpr(closed))(*values))
    return _Evaluation(closed, values, weights).results()


class _Evaluation:
    """One evaluation of a program.

    Attributes:
      env: the values of its variables.
      weights: the variables that are whole parameters, cast and reshaped ones too.
    """

    def __init__(self, closed: Jaxpr, values: Sequence[Tree], weights: Iterable[int]):
        self.jaxpr, self.is_ordered = open_jaxpr(closed), backward.is_ordered()
        self.env: Environment = dict(zip(self.jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
        self.env |= dict(zip(self.jaxpr.invars, values, strict=True))
        self.weights = {self.jaxpr.invars[i] for i in weights}
        self._waiting: list[Equation] = []  # plain equations since the last one that is none

    def results(self) -> list[Value]:
        """Runs the program; a result that waits for its first use is gathered."""
        for place, eqn in enumerate(self.jaxpr.eqns):
            self._gather_first_used(eqn)
            later = self._gradients_before(place, eqn)
            if later or self._takes_cut(eqn):
                self._run_waiting()
                outs = self._run_with_cut(eqn)
                self._set(eqn, self._after_gradients_of(later, outs))
            elif self.is_ordered and self._run_ordered(eqn):
                continue
            else:
                self._waiting.append(eqn)
            if eqn.primitive.name in SAME_NUMBERS | {"transpose", "name"} and self._is_weight(eqn.invars[0]):
                self.weights.add(eqn.outvars[0])
        self._run_waiting()
        outs = [self._read(v) for v in self.jaxpr.outvars]
        return [x.whole() if isinstance(x, AtFirstUse) else x for x in outs]

    def _read(self, v: Var) -> Value:
        return v.val if is_literal(v) else self.env[v]

    def _set(self, eqn: Equation, outs: Sequence[Value]) -> None:
        self.env |= dict(zip(eqn.outvars, outs, strict=True))

    def _run_waiting(self) -> None:
        run_equations(self.jaxpr, self._waiting, self.env)
        self._waiting = []

    def _is_weight(self, v: Var) -> bool:
        return not is_literal(v) and v in self.weights

    def _value(self, v: Var) -> Value | None:
        """The value of a variable; None of a literal, and of a result of an equation that waits."""
        return None if is_literal(v) else self.env.get(v)

    # Equations that take parameters that are cut.

    def _takes_cut(self, eqn: Equation) -> bool:
        return any(isinstance(self._value(v), Sharded | AtFirstUse) for v in eqn.invars)

    def _gather_first_used(self, eqn: Equation) -> None:
        """Gathers what `eqn` is the first to use whole; a call that alone uses it does so itself, inside."""
        for position, v in enumerate(eqn.invars):
            value = self._value(v)
            if isinstance(value, AtFirstUse) and not self._stays_cut(eqn, position, value):
                self.env[v] = value.whole()
                self.weights.add(v)

    def _stays_cut(self, eqn: Equation, position: int, value: AtFirstUse) -> bool:
        """Whether the equation takes its operand as it is."""
        if uses.looks_up(self.jaxpr, eqn, position, value.sharded.dims, asked=value.asked):
            return True
        is_call = eqn.primitive.name in INLINED and deferred(eqn) is None
        return is_call and uses.num_uses(self.jaxpr, eqn.invars[position]) == 1

    def _run_with_cut(self, eqn: Equation) -> list[Value]:
        values, name = [self._read(v) for v in eqn.invars], eqn.primitive.name
        if name == "name":
            self.weights.add(eqn.outvars[0])
            return [_marked(self.jaxpr, eqn, values[0])]
        if (part := deferred(eqn)) is not None:
            return part.run(values)
        if name in CASTS:
            return [jax.tree.map(lambda x: collectives.vary(x, eqn.params["axes"]), values[0])]
        if name == "scan":
            return _run_scan(eqn, values)
        if name in REMAT:
            return _rematerialized(eqn)(*values)
        if name in INLINED:
            return self._run_called(eqn)
        table = AtFirstUse(values[0]) if isinstance(values[0], Sharded) else values[0]
        assert isinstance(table, AtFirstUse), name
        if name == "convert_element_type":
            return [table.as_dtype(eqn.params["new_dtype"])]
        ids = values[1]
        assert isinstance(ids, jax.Array)
        return [table.rows(ids, Lookup.of(eqn))]

    def _run_called(self, eqn: Equation) -> list[Value]:
        weights = [i for i, v in enumerate(eqn.invars) if self._is_weight(v)]
        return run(inner_jaxpr(eqn), [self._read(v) for v in eqn.invars], weights)

    # The order of the backward pass, on GPU.

    def _run_ordered(self, eqn: Equation) -> bool:
        """Runs an equation whose backward pass has rules of its own, or a call of such; False if it is neither."""
        is_call = eqn.primitive.name in INLINED and deferred(eqn) is None and backward.concerns(inner_jaxpr(eqn))
        if not is_call and (not backward.has_own_rule(eqn) or any(is_literal(v) for v in eqn.invars)):
            return False
        self._run_waiting()
        if is_call:
            self._set(eqn, self._run_called(eqn))
        else:
            operands: list[Tree] = [self.env[v] for v in eqn.invars]
            self._set(eqn, [backward.bind(eqn, operands, [self._is_weight(v) for v in eqn.invars])])
        return True

    def _gradients_before(self, place: int, eqn: Equation) -> list[Var]:
        """The cut parameters whose gradients are to be reduced before a scan's backward pass begins.

        That is, those that only equations after the scan use.
        """
        if not self.is_ordered or eqn.primitive.name != "scan":
            return []
        return [v for v in uses.first_used_after(self.jaxpr, place) if _stand_in(self._value(v)) is not None]

    def _after_gradients_of(self, later: list[Var], outs: list[Value]) -> list[Value]:
        """The results of a scan, whose backward pass begins when the gradients of `later` are reduced."""
        places = [i for i, x in enumerate(outs) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)]
        if not later or not places:
            return outs
        stand_ins = [_stand_in(self.env[v]) for v in later]
        stand_ins, floating = backward.before_the_rest(stand_ins, [outs[i] for i in places])
        for v, x in zip(later, stand_ins, strict=True):
            cut = self.env[v]
            assert not isinstance(cut, jax.Array)
            self.env[v] = cut.with_stand_in(x)
        found = dict(zip(places, floating, strict=True))
        return [found.get(i, x) for i, x in enumerate(outs)]


def _stand_in(value: Value | None) -> jax.Array | None:
    """The array by which the loss is differentiated in place of a cut parameter."""
    if isinstance(value, AtFirstUse):
        return _stand_in(value.sharded)
    return value.stand_in if isinstance(value, Sharded) and value.local is not None else None


def _rematerialized(eqn: Equation) -> Callable[..., list[Value]]:
    """The function that a remat runs. One for all equations of one inner program, so that JAX traces it once."""
    inner, ordered = open_jaxpr(inner_jaxpr(eqn)), backward.is_ordered()
    policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
    known = _remats.setdefault(inner, {})
    if (policy, prevent_cse, ordered) not in known:
        program = weakref.ref(inner)

        def again(*values: Value) -> list[Value]:
            return run(program(), values)

        if ordered and policy is None and not eqn.effects:
            found = backward.Recomputed(again)
        else:
            found = jax.checkpoint(again, policy=policy, prevent_cse=prevent_cse or ordered)
        known[policy, prevent_cse, ordered] = found
    return known[policy, prevent_cse, ordered]


_remats: weakref.WeakKeyDictionary[OpenJaxpr, dict] = weakref.WeakKeyDictionary()


def _marked(jaxpr: OpenJaxpr, eqn: Equation, value: Value) -> Value:
    """A parameter after its mark: whole, unless lookups wait for it."""
    if isinstance(value, Sharded) and value.local is not None:
        asked = uses.mark(eqn) == LOOKUP_MARK
        if asked or uses.is_looked_up(jaxpr, eqn.outvars[0], value.dims):
            return AtFirstUse(value, asked=asked)
    if isinstance(value, AtFirstUse):
        return value.after(uses.mark(eqn))
    assert isinstance(value, Sharded)
    return checkpoint_name(value.whole(), MARK)


def _run_scan(eqn: Equation, values: list[Value]) -> list[Value]:
    num_consts, num_carry = scan_split(eqn)
    consts = values[:num_consts]

    def body(carry, xs):
        outs = run(inner_jaxpr(eqn), [*consts, *carry, *xs])
        return outs[:num_carry], outs[num_carry:]

    carry, stacked = lax.scan(
        body,
        values[num_consts : num_consts + num_carry],
        values[num_consts + num_carry :],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *stacked]
