"""Evaluates the traced loss with parameters that are cut: each is gathered, or looked up, where the loss needs it."""

import weakref
from collections.abc import Callable, Iterable, Sequence

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxshard import collectives, platforms
from jaxshard.base.source import as_written_at
from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Tree, Var
from jaxshard.loss import uses
from jaxshard.loss.lookup import Lookup
from jaxshard.loss.unshard import LOOKUP_MARK, MARK, AtFirstUse, Environment, Sharded, Value, deferred
from jaxshard.platforms import backward, buckets
from jaxshard.programs.jaxprs import closed_jaxpr, core, inner_jaxpr, is_literal, open_jaxpr, run_equations, scan_split
from jaxshard.programs.primitives import CASTS, INLINED, REMAT, SAME_NUMBERS
from jaxshard.programs.questions import variables_that_vary_smoothly, varies_smoothly

_KEEPS_WEIGHT = SAME_NUMBERS | {"transpose", "name"}
"""Make of a whole parameter the same one: cast, in another shape, or marked."""


def run(
    closed: Jaxpr,
    values: Sequence[Tree],
    weights: Iterable[int] = (),
    *,
    in_loop: bool = False,
    ordered: bool | None = None,
    smooth: Sequence[bool] | None = None,
) -> list[Value]:
    """Evaluates a traced program; inputs that are cut are gathered at their marks, or where they are first used.

    Args:
      closed: the program.
      values: its inputs; parameters may be `Sharded` or `AtFirstUse`.
      weights: which inputs are parameters. (Those that are cut are known to be.)
      in_loop: the program is the body of a scan.
      ordered: whether the backward pass is ordered; None: as it is on this platform. (An ordered program has rules for
        its backward pass alone, so that forward-mode differentiation fails.)
      smooth: which inputs may have gradients; None: all.
    """
    ordered = platforms.here().orders_backward if ordered is None else ordered
    is_cut = any(isinstance(value, Sharded | AtFirstUse) for value in values)
    if not is_cut and not (ordered and backward.concerns(closed)):
        return list(core().jaxpr_as_fun(closed_jaxpr(closed))(*values))
    return _Evaluation(closed, values, weights, in_loop, ordered, smooth or [True] * len(values)).results()


class _Evaluation:
    """One evaluation of a program.

    Attributes:
      env: the values of its variables.
      weights: the variables that are whole parameters, cast and reshaped ones too.
      smooth: if the backward pass is ordered, the variables that may have gradients.
    """

    def __init__(
        self,
        closed: Jaxpr,
        values: Sequence[Tree],
        weights: Iterable[int],
        in_loop: bool,
        ordered: bool,
        smooth: Sequence[bool],
    ):
        self.jaxpr, self.in_loop, self.is_ordered = open_jaxpr(closed), in_loop, ordered
        self.smooth = variables_that_vary_smoothly(self.jaxpr, smooth) if ordered else set()
        self.env: Environment = dict(zip(self.jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
        self.env |= dict(zip(self.jaxpr.invars, values, strict=True))
        self.weights = {self.jaxpr.invars[i] for i in weights}
        self._waiting: list[Equation] = []  # plain equations since the last one that is none
        self._reduced_before = self._buckets() if self.is_ordered and not in_loop else {}

    def results(self) -> list[Value]:
        """Runs the program; a result that waits for its first use is gathered."""
        for place, eqn in enumerate(self.jaxpr.eqns):
            with as_written_at(eqn):
                self._run(place, eqn)
        self._run_waiting()
        outs = [self._read(v) for v in self.jaxpr.outvars]
        return [x.whole() if isinstance(x, AtFirstUse) else x for x in outs]

    def _run(self, place: int, eqn: Equation) -> None:
        """Runs an equation, or has it wait for others to run with; first the gathers and the order that it needs."""
        if place in self._reduced_before:
            self._order(place)
        self._gather_first_used(eqn)
        later = self._gradients_before(place, eqn)
        if later or self._takes_cut(eqn):
            self._run_waiting()
            outs = self._run_with_cut(eqn)
            self._set(eqn, self._after_gradients_of(later, eqn.outvars, outs))
        elif self.is_ordered and self._run_ordered(eqn):
            return
        else:
            self._waiting.append(eqn)
        if eqn.primitive.name in _KEEPS_WEIGHT and self._is_weight(eqn.invars[0]):
            self.weights.add(eqn.outvars[0])

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
        if uses.looks_up(self.jaxpr, eqn, position, value.sharded.looked_up_by, asked=value.asked):
            return True
        is_call = eqn.primitive.name in INLINED and deferred(eqn) is None
        return is_call and uses.num_uses(self.jaxpr, eqn.invars[position]) == 1

    def _run_with_cut(self, eqn: Equation) -> list[Value]:
        values, name = [self._read(v) for v in eqn.invars], eqn.primitive.name
        if name == "name":
            self.weights.add(eqn.outvars[0])
            return [_marked(self.jaxpr, eqn, values[0], self.in_loop)]
        if (part := deferred(eqn)) is not None:
            return part.run(values)
        if name in CASTS:
            return [jax.tree.map(lambda x: collectives.vary(x, eqn.params["axes"]), values[0])]
        if name == "scan":
            return _run_scan(eqn, values, self.is_ordered)
        if name in REMAT:
            return _rematerialized(eqn, self.in_loop, self.is_ordered)(*values)
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
        values = [self._read(v) for v in eqn.invars]
        smooth = [not is_literal(v) and v in self.smooth for v in eqn.invars] if self.is_ordered else None
        return run(inner_jaxpr(eqn), values, weights, in_loop=self.in_loop, ordered=self.is_ordered, smooth=smooth)

    # The order of the backward pass, on GPU and TPU.

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

    def _buckets(self) -> dict[int, list[Var]]:
        """As `buckets.reduced_before`."""
        cut = {v: stand_in for v in self.jaxpr.invars if (stand_in := _stand_in(self.env[v])) is not None}
        return buckets.reduced_before(self.jaxpr, {v: v.aval.size * x.dtype.itemsize for v, x in cut.items()})

    def _order(self, place: int) -> None:
        """Has the backward pass go past an equation when the gradients of the next bucket are reduced."""
        self._run_waiting()
        variables = buckets.live(self.jaxpr, place, self.weights)
        variables = [v for v in variables if isinstance(self.env[v], jax.Array)]
        tied = self._after_gradients_of(self._reduced_before[place], variables, [self.env[v] for v in variables])
        self.env |= dict(zip(variables, tied, strict=True))

    def _gradients_before(self, place: int, eqn: Equation) -> list[Var]:
        """The cut parameters whose gradients are to be reduced before a scan's backward pass begins.

        That is, those that only equations after the scan use.
        """
        if not self.is_ordered or eqn.primitive.name != "scan":
            return []
        return [v for v in uses.first_used_after(self.jaxpr, place) if _stand_in(self._value(v)) is not None]

    def _after_gradients_of(self, params: list[Var], variables: list[Var], values: list[Value]) -> list[Value]:
        """The values of variables, whose backward pass begins when the gradients of these parameters are reduced.

        Only of those that have gradients: else JAX would differentiate what is made of the others, too.
        """
        places = [i for i, v in enumerate(variables) if v in self.smooth]
        if not params or not places:
            return values
        stand_ins = [_stand_in(self.env[v]) for v in params]
        stand_ins, floating = backward.before_the_rest(stand_ins, [values[i] for i in places])
        for v, x in zip(params, stand_ins, strict=True):
            cut = self.env[v]
            assert not isinstance(cut, jax.Array)
            self.env[v] = cut.with_stand_in(x)
        found = dict(zip(places, floating, strict=True))
        return [found.get(i, x) for i, x in enumerate(values)]


def _stand_in(value: Value | None) -> jax.Array | None:
    """The array by which the loss is differentiated in place of a cut parameter."""
    if isinstance(value, AtFirstUse):
        return _stand_in(value.sharded)
    return value.stand_in if isinstance(value, Sharded) and value.local is not None else None


def _rematerialized(eqn: Equation, in_loop: bool, ordered: bool) -> Callable[..., list[Value]]:
    """The function that a remat runs. One for all equations of one inner program, so that JAX traces it once."""
    inner = open_jaxpr(inner_jaxpr(eqn))
    policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
    known, how = _remats.setdefault(inner, {}), (policy, prevent_cse, ordered, in_loop)
    if how not in known:
        program = inner.replace()  # a copy, which JAX may keep to differentiate later, and which keeps no key alive

        def again(*values: Value) -> list[Value]:
            return run(program, values, in_loop=in_loop, ordered=ordered)

        if ordered and in_loop and policy is None and not eqn.effects:
            known[how] = backward.Recomputed(again, tuple(varies_smoothly(inner, [True] * len(inner.invars))))
        else:
            called = jax.jit(again) if policy is None else again  # so that JAX differentiates and lowers it once, too
            known[how] = jax.checkpoint(called, policy=policy, prevent_cse=prevent_cse or ordered)
    return known[how]


_remats: weakref.WeakKeyDictionary[OpenJaxpr, dict] = weakref.WeakKeyDictionary()


def _marked(jaxpr: OpenJaxpr, eqn: Equation, value: Value, in_loop: bool) -> Value:
    """A parameter after its mark: whole, unless lookups wait for it."""
    if isinstance(value, Sharded) and value.local is not None:
        asked = uses.mark(eqn) == LOOKUP_MARK
        if asked or uses.is_looked_up(jaxpr, eqn.outvars[0], value.looked_up_by):
            return AtFirstUse(value, asked=asked)
    if isinstance(value, AtFirstUse):
        return value.after(uses.mark(eqn))
    assert isinstance(value, Sharded)
    if in_loop and platforms.here().casts_in_loops:
        value = value.cast_later()
    return checkpoint_name(value.whole(), MARK)


def _run_scan(eqn: Equation, values: list[Value], ordered: bool) -> list[Value]:
    num_consts, num_carry = scan_split(eqn)
    consts = values[:num_consts]

    def body(carry, xs):
        outs = run(inner_jaxpr(eqn), [*consts, *carry, *xs], in_loop=True, ordered=ordered)
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
