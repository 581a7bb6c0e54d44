"""Evaluates the traced loss with parameters that are cut: each is gathered, or looked up, where the loss needs it."""

import weakref
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxshard.base.jaxprs import closed_jaxpr, core, inner_jaxpr, is_literal, open_jaxpr, run_equations, scan_split
from jaxshard.base.primitives import CASTS, INLINED, REMAT
from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Tree, Var
from jaxshard.core import collectives, uses
from jaxshard.core.lookup import Lookup
from jaxshard.core.unshard import LOOKUP_MARK, MARK, AtFirstUse, Environment, Sharded, Value, deferred


def run(closed: Jaxpr, values: Sequence[Tree]) -> list[Value]:
    """Evaluates a traced program; inputs that are `Sharded` are gathered at their marks."""
    jaxpr = open_jaxpr(closed)
    if not any(isinstance(value, Sharded | AtFirstUse) for value in values):
        return list(core().jaxpr_as_fun(closed_jaxpr(closed))(*values))
    env: Environment = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    env |= dict(zip(jaxpr.invars, values, strict=True))
    plain: list[Equation] = []  # equations since the last one with a parameter that is cut
    for place, eqn in enumerate(jaxpr.eqns):
        _gather_first_used(jaxpr, eqn, env)
        later = _gradients_after(jaxpr, place, env) if eqn.primitive.name == "scan" else []
        if later or any(isinstance(env.get(v), Sharded | AtFirstUse) for v in eqn.invars if not is_literal(v)):
            run_equations(jaxpr, plain, env)
            plain = []
            outs = _run_sharded(jaxpr, eqn, [_read(env, v) for v in eqn.invars])
            env |= dict(zip(eqn.outvars, _after_gradients_of(later, outs, env), strict=True))
        else:
            plain.append(eqn)
    run_equations(jaxpr, plain, env)
    return [_whole_or_cut(_read(env, v)) for v in jaxpr.outvars]


def _whole_or_cut(x: Value) -> Value:
    """A result: one that waits for its first use is gathered."""
    return x.whole() if isinstance(x, AtFirstUse) else x


def _gather_first_used(jaxpr: OpenJaxpr, eqn: Equation, env: Environment) -> None:
    """Gathers what `eqn` is the first to use whole; a call that alone uses it does so itself, inside."""
    for position, v in enumerate(eqn.invars):
        value = None if is_literal(v) else env.get(v)
        if isinstance(value, AtFirstUse) and not _stays_cut(jaxpr, eqn, position, value):
            env[v] = value.whole()


def _stays_cut(jaxpr: OpenJaxpr, eqn: Equation, position: int, value: AtFirstUse) -> bool:
    """Whether the equation takes its operand as it is."""
    if uses.looks_up(jaxpr, eqn, position, value.sharded.dims, asked=value.asked):
        return True
    is_call = eqn.primitive.name in INLINED and deferred(eqn) is None
    return is_call and uses.num_uses(jaxpr, eqn.invars[position]) == 1


def _run_sharded(jaxpr: OpenJaxpr, eqn: Equation, values: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    if name == "name":
        return [_marked(jaxpr, eqn, values[0])]
    if (part := deferred(eqn)) is not None:
        return part.run(values)
    if name in CASTS:
        return [jax.tree.map(lambda x: collectives.vary(x, eqn.params["axes"]), values[0])]
    if name == "scan":
        return _run_scan(eqn, values)
    if name in REMAT:
        return _rematerialized(eqn)(*values)
    if name in INLINED:
        return run(inner_jaxpr(eqn), values)
    table = AtFirstUse(values[0]) if isinstance(values[0], Sharded) else values[0]
    assert isinstance(table, AtFirstUse), name
    if name == "convert_element_type":
        return [table.as_dtype(eqn.params["new_dtype"])]
    ids = values[1]
    assert isinstance(ids, jax.Array)
    return [table.rows(ids, Lookup.of(eqn))]


def _rematerialized(eqn: Equation) -> Callable[..., list[Value]]:
    """The function that a remat runs. One for all equations of one inner program, so that JAX traces it once."""
    inner = open_jaxpr(inner_jaxpr(eqn))
    policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
    known = _remats.setdefault(inner, {})
    if (policy, prevent_cse) not in known:
        program = weakref.ref(inner)
        known[policy, prevent_cse] = jax.checkpoint(
            lambda *values: run(program(), values), policy=policy, prevent_cse=prevent_cse
        )
    return known[policy, prevent_cse]


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


def _read(env: Environment, v: Var) -> Value:
    return v.val if is_literal(v) else env[v]


# The order of the backward pass.


def _gradients_after(jaxpr: OpenJaxpr, place: int, env: Environment) -> list[Var]:
    """The cut parameters that only equations after the one at `place` use, and that have gradients."""
    return [v for v in uses.first_used_after(jaxpr, place) if _stand_in(env.get(v)) is not None]


def _stand_in(value: Value | None) -> jax.Array | None:
    """The array by which the loss is differentiated in place of a cut parameter."""
    if isinstance(value, AtFirstUse):
        return _stand_in(value.sharded)
    return value.stand_in if isinstance(value, Sharded) and value.local is not None else None


def _after_gradients_of(later: list[Var], outs: list[Value], env: Environment) -> list[Value]:
    """The results of a scan, but its backward pass begins when the gradients of the parameters `later` are reduced.

    Otherwise XLA for GPU puts these off until that pass has ended, and keeps what they are made of: the gradient of all
    logits.
    """
    places = [i for i, x in enumerate(outs) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)]
    if not later or not places:
        return outs
    stand_ins = [_stand_in(env[v]) for v in later]
    floating, stand_ins = collectives.together([outs[i] for i in places], stand_ins)
    for v, x in zip(later, stand_ins, strict=True):
        cut = env[v]
        assert not isinstance(cut, jax.Array)
        env[v] = cut.with_stand_in(x)
    outs = list(outs)
    for i, x in zip(places, floating, strict=True):
        outs[i] = x
    return outs
