"""Evaluates the traced loss with cut parameters: each is gathered, or its rows exchanged, where the loss needs it."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxshard import collectives, platforms
from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Tree, Var
from jaxshard.loss.params import uses
from jaxshard.loss.params.again import Again, made_again, once_computed
from jaxshard.loss.params.unshard import LOOKUP_MARK, MARK, AtFirstUse, Environment, Sharded, Value, deferred
from jaxshard.programs.jaxprs import (
    closed_jaxpr,
    core,
    inner_jaxpr,
    is_literal,
    open_jaxpr,
    run_equations,
    scan_split,
    subprograms,
)
from jaxshard.programs.primitives import CASTS, CONVERT, INLINED, REMAT, SCAN, WHOLE, mark_of
from jaxshard.programs.source import as_written_at


class Evaluation:
    """One evaluation of a program; `loss.ordered` has another, which orders the backward pass, too.

    Attributes:
      env: the values of its variables.
      regathers: the backward pass gathers parameters again, instead of keeping them (`regather="backward"`).
      again: for variables that are whole parameters, also cast or reshaped: how to make them again of a shard.
      always_prevents_cse: recomputation waits for the gradients of later operations, whatever a remat's `prevent_cse`.
    """

    always_prevents_cse = False

    def __init__(
        self,
        closed: Jaxpr,
        values: Sequence[Tree],
        *,
        in_loop: bool = False,
        regathers: bool = False,
        again: Mapping[int, Again] | None = None,
    ):
        self.jaxpr, self.in_loop, self.regathers = open_jaxpr(closed), in_loop, regathers
        self.again = {self.jaxpr.invars[i]: how for i, how in (again or {}).items()}
        self.env: Environment = dict(zip(self.jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
        self.env |= dict(zip(self.jaxpr.invars, values, strict=True))
        self._waiting: list[Equation] = []  # plain equations, queued to run as one call
        self._looped: jax.Array | None = None  # a result of the last scan

    @classmethod
    def run(cls, closed: Jaxpr, values: Sequence[Tree], **how: Any) -> list[Value]:
        """Evaluates a traced program; inputs that are cut are gathered at their marks, or where they are first used.

        Args:
          closed: the program.
          values: its inputs; parameters may be `Sharded` or `AtFirstUse`.
          how: arguments of the class: `in_loop`, the program is the body of a scan; `regathers`; and `again`, by the
            places of inputs.
        """
        is_cut = any(isinstance(value, Sharded | AtFirstUse) for value in values) or bool(how.get("again"))
        if not is_cut and not cls.concerns(closed):
            return list(core().jaxpr_as_fun(closed_jaxpr(closed))(*values))
        return cls(closed, values, **how).results()

    @classmethod
    def concerns(cls, closed: Jaxpr) -> bool:
        """Whether even a program without cut parameters must be evaluated equation by equation."""
        del closed
        return False

    def results(self) -> list[Value]:
        """The program's outputs; a parameter that still waits for its first use is gathered."""
        for place, eqn in enumerate(self.jaxpr.eqns):
            with as_written_at(eqn):
                self._run(place, eqn)
        self._run_waiting()
        outs = [self._read(v) for v in self.jaxpr.outvars]
        return [x.whole() if isinstance(x, AtFirstUse) else x for x in outs]

    def _run(self, place: int, eqn: Equation) -> None:
        """Runs an equation, or queues it so that plain equations run as one call; gathers its operands first."""
        del place
        self._gather_first_used(eqn)
        if self._takes_cut(eqn):
            self._run_waiting()
            self._set(eqn, self._run_with_cut(eqn))
        elif not self._run_again(eqn):
            self._waiting.append(eqn)

    def _read(self, v: Var) -> Value:
        return v.val if is_literal(v) else self.env[v]

    def _set(self, eqn: Equation, outs: Sequence[Value]) -> None:
        self.env |= dict(zip(eqn.outvars, outs, strict=True))
        if eqn.primitive.name == SCAN:
            self._looped = max((x for x in outs if isinstance(x, jax.Array)), key=lambda x: x.size, default=None)

    def _run_waiting(self) -> None:
        run_equations(self.jaxpr, self._waiting, self.env)
        self._waiting = []

    def _value(self, v: Var) -> Value | None:
        """The value of a variable; None for a literal, and for a result of a queued equation."""
        return None if is_literal(v) else self.env.get(v)

    # Equations with cut parameters as operands.

    def _takes_cut(self, eqn: Equation) -> bool:
        return any(isinstance(self._value(v), Sharded | AtFirstUse) for v in eqn.invars)

    def _gather_first_used(self, eqn: Equation) -> None:
        """Gathers parameters that `eqn` is the first to use whole; a call that is the only user gathers inside."""
        for position, v in enumerate(eqn.invars):
            value = self._value(v)
            if isinstance(value, AtFirstUse) and not self._stays_cut(eqn, position, value):
                self._gather(v, value)

    def _gather(self, v: Var, value: AtFirstUse) -> None:
        sharded = self._after_loop(value.sharded)
        self.env[v] = sharded.whole()
        self._note_again(v, sharded)

    def _after_loop(self, sharded: Sharded) -> Sharded:
        """The same parameter, which XLA gathers only after the last scan."""
        if self._looped is None or sharded.local is None or not (sharded.held and platforms.here().gathers_late):
            return sharded
        return dataclasses.replace(sharded, local=once_computed(self._looped, sharded.local))

    # Parameters that the backward pass gathers again.

    def _note_again(self, v: Var, sharded: Sharded) -> None:
        if self.regathers and sharded.held:
            self.again[v] = Again(sharded.without_slot(), lambda sharded: sharded.whole())

    def _of_again(self, eqn: Equation) -> dict[int, Again]:
        """The operands that the backward pass can make again, by their places."""
        return {i: self.again[v] for i, v in enumerate(eqn.invars) if not is_literal(v) and v in self.again}

    def _run_again(self, eqn: Equation) -> bool:
        """Runs an equation with parameters that the backward pass gathers again; False if it has none, or is a loop."""
        again = self._of_again(eqn)
        if not again or any(isinstance(v, core().DropVar) for v in eqn.outvars):
            return False
        if eqn.primitive.name in WHOLE and len(eqn.invars) == 1:
            self.again[eqn.outvars[0]] = again[0].then(lambda x: self._plain(eqn)(x)[0])
            return False
        is_call = eqn.primitive.name in INLINED and deferred(eqn) is None
        if not is_call and next(subprograms(eqn), None) is not None:
            return False
        self._run_waiting()
        if is_call:
            self._set(eqn, self._run_called(eqn))
        else:
            self._set(eqn, made_again(self._plain(eqn), self._operands(eqn), again))
        return True

    def _operands(self, eqn: Equation) -> list[Any]:
        return [self._read(v) for v in eqn.invars]

    def _plain(self, eqn: Equation) -> Callable[..., list[Any]]:
        """The operation of an equation, on other operands."""

        def run(*operands: jax.Array) -> list[Any]:
            env: Environment = {v: x for v, x in zip(eqn.invars, operands, strict=True) if not is_literal(v)}
            run_equations(self.jaxpr, [eqn], env)
            return [env[v] for v in eqn.outvars]

        return run

    def _stays_cut(self, eqn: Equation, position: int, value: AtFirstUse) -> bool:
        """Whether the equation takes its operand without a gather."""
        if uses.looks_up(self.jaxpr, eqn, position, value.sharded.looked_up_by, asked=value.asked):
            return True
        is_call = eqn.primitive.name in INLINED and deferred(eqn) is None
        is_cast = eqn.primitive.name == CONVERT and value.sharded.computed_in is not None
        enters = self.regathers and (eqn.primitive.name in REMAT or _slices(eqn, position, value.sharded))
        return (is_call or is_cast or enters) and uses.num_uses(self.jaxpr, eqn.invars[position]) == 1

    def _run_with_cut(self, eqn: Equation) -> list[Value]:
        values, name = self._operands(eqn), eqn.primitive.name
        if mark_of(eqn):
            return [self._marked(eqn, values[0])]
        if (part := deferred(eqn)) is not None:
            return part.run(values)
        if name in CASTS:
            return [jax.tree.map(lambda x: collectives.vary(x, eqn.params["axes"]), values[0])]
        if name == SCAN:
            return self._run_scan(eqn, values)
        if name in REMAT:
            return _rematerialized(type(self), eqn, self.in_loop)(*values)
        if name in INLINED:
            return self._run_called(eqn)
        cut = values[0]
        assert isinstance(cut, Sharded | AtFirstUse), name
        if name == CONVERT:
            return [cut.as_dtype(eqn.params["new_dtype"])]
        ids, table = values[1], AtFirstUse(cut) if isinstance(cut, Sharded) else cut
        assert isinstance(ids, jax.Array)
        return [table.rows(ids, eqn)]

    def _marked(self, eqn: Equation, value: Value) -> Value:
        """A parameter after its mark: whole, unless lookups follow."""
        if isinstance(value, Sharded) and (value.local is not None or value.looked_up_by):
            asked = uses.mark(eqn) == LOOKUP_MARK
            if asked or uses.is_looked_up(self.jaxpr, eqn.outvars[0], value.looked_up_by):
                return AtFirstUse(value, asked=asked)
        if isinstance(value, AtFirstUse):
            return value.after(uses.mark(eqn))
        assert isinstance(value, Sharded)
        value = self._after_loop(value)
        if self.in_loop and platforms.here().casts_in_loops:
            value = value.cast_later()
        self._note_again(eqn.outvars[0], value)
        return value.cast(checkpoint_name(value.gathered(), MARK))

    def _run_called(self, eqn: Equation) -> list[Value]:
        return self.run(inner_jaxpr(eqn), self._operands(eqn), **self._how(eqn))

    def _how(self, eqn: Equation) -> dict[str, Any]:
        """How a call is evaluated."""
        return {"in_loop": self.in_loop, "regathers": self.regathers, "again": self._of_again(eqn)}

    def _run_scan(self, eqn: Equation, values: list[Value]) -> list[Value]:
        num_consts, num_carry = scan_split(eqn)
        consts, run = values[:num_consts], functools.partial(self.run, in_loop=True, regathers=self.regathers)

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

    @classmethod
    def rematerialized(cls, again: Callable[..., list[Value]], inner: OpenJaxpr, eqn: Equation, in_loop: bool) -> Any:
        """`again`, which evaluates the program `inner` of a remat, wrapped so that the backward pass recomputes it."""
        del inner, in_loop
        policy = eqn.params["policy"]
        called = jax.jit(again) if policy is None else again  # so JAX differentiates and lowers it once, too
        return jax.checkpoint(called, policy=policy, prevent_cse=eqn.params["prevent_cse"] or cls.always_prevents_cse)


def _rematerialized(kind: type[Evaluation], eqn: Equation, in_loop: bool) -> Callable[..., list[Value]]:
    """The function that a remat runs: one for all equations with the same inner program, so that JAX traces it once."""
    inner = open_jaxpr(inner_jaxpr(eqn))
    known, how = _remats.setdefault(inner, {}), (eqn.params["policy"], eqn.params["prevent_cse"], kind, in_loop)
    if how not in known:
        program = inner.replace()  # a copy: JAX may keep it, and that must not keep the key of `_remats` alive
        regathers = uses.refuses(eqn.params["policy"], MARK)  # else what is gathered would be saved, without its name

        def again(*values: Value) -> list[Value]:
            return kind.run(program, values, in_loop=in_loop, regathers=regathers)

        known[how] = kind.rematerialized(again, inner, eqn, in_loop)
    return known[how]


_remats: weakref.WeakKeyDictionary[OpenJaxpr, dict] = weakref.WeakKeyDictionary()


def _slices(eqn: Equation, position: int, sharded: Sharded) -> bool:
    """Whether an equation is a scan that slices this operand, along a dim that is not cut."""
    is_sliced = eqn.primitive.name == SCAN and position >= sum(scan_split(eqn))
    return is_sliced and all(-dim != eqn.invars[position].aval.ndim for dim, _ in (*sharded.held, *sharded.dims))
