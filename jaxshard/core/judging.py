"""An update is judged before it replaces anything: is all that it makes finite?

The verdict depends on every new value, and new values beside the old ones would take their memory once more. So what is
cheap to compute is computed twice: once to be judged alone, and again, over the old values, once all devices agree.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.base.jaxprs import is_literal, open_jaxpr, operands_of, run_equations
from jaxshard.base.primitives import POINTWISE
from jaxshard.base.rerun import flat
from jaxshard.base.tree import is_key, named_leaves, owner_of
from jaxshard.base.types import Equation, Tree, Var
from jaxshard.core.components import is_big

_CHEAP = POINTWISE | {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "sharding_constraint"}


class Verdict(NamedTuple):
    """Whether a step is taken, and the first leaf of (params, state) that would no longer be finite, or -1."""

    ok: jax.Array
    bad_leaf: jax.Array


class Twice:
    """A computation without arguments; `first` is its result."""

    def __init__(self, run: Callable[[], Tree]):
        traced, shapes = jax.make_jaxpr(run, return_shape=True)()
        program, values = flat(traced)
        self._jaxpr, self._treedef = open_jaxpr(program), jax.tree.structure(shapes)
        self._env: dict[Var, Tree] = dict(zip(self._jaxpr.invars, values, strict=True))
        run_equations(self._jaxpr, list(self._jaxpr.eqns), self._env)
        self.first = self._results(self._env)

    def again(self, after: jax.Array | None = None) -> Tree:
        """The result once more, from the same arguments, not before `after`.

        It is the first result where not all was cheap (matrix work): to keep what was not, beside the first result's
        parts, took more memory than the result itself (Muon under zero3 on 8 simulated devices: 698 or 614 kB).
        """
        eqns = self._cheap()
        kept = [v for v in operands_of(eqns) if is_big(v)]
        if not set(kept) <= set(self._jaxpr.invars):
            return self.first
        values = [self._env[v] for v in kept]
        if after is not None:
            values = [lax.optimization_barrier((x, after))[0] for x in values]  # together they would all live at once
        env = self._env | dict(zip(kept, values, strict=True))
        run_equations(self._jaxpr, eqns, env)
        return self._results(env)

    def _cheap(self) -> list[Equation]:
        """The equations of big arrays between the results and what is kept."""
        wanted, found = {v for v in self._jaxpr.outvars if not is_literal(v)}, list[Equation]()
        for eqn in reversed(self._jaxpr.eqns):
            if eqn.primitive.name in _CHEAP and any(v in wanted and is_big(v) for v in eqn.outvars):
                found.append(eqn)
                wanted |= {v for v in eqn.invars if not is_literal(v)}
        return found[::-1]

    def _results(self, env: dict[Var, Tree]) -> Tree:
        leaves = [v.val if is_literal(v) else env[v] for v in self._jaxpr.outvars]
        return jax.tree.unflatten(self._treedef, leaves)


def verdict(ok: jax.Array, new: tuple[Tree, Tree], old: tuple[Tree, Tree]) -> Verdict:
    """Judges new (params, state) by the old ones; `ok` says whether the step may be taken at all."""
    lost = _lost(new, old)
    if not lost:
        return Verdict(ok, jnp.int32(-1))
    bad = jnp.stack([_num(x) for x in lost.values()]) > 0
    first = jnp.where(bad.any(), jnp.asarray([*lost], jnp.int32)[jnp.argmax(bad)], -1)
    return Verdict(ok & ~bad.any(), first)


def _lost(new: tuple[Tree, Tree], old: tuple[Tree, Tree]) -> dict[int, jax.Array]:
    """Which elements were finite and are no longer, by the index of their leaf.

    What the state has in a parameter's shape (its moments) counts with the parameter: they are computed together, and
    looked at in one pass. Infinity may stay where it was (a mask among the params). A single number of the state may
    become infinite: the error of a search, the best loss so far. A moment must not, since it would stay so for ever.
    """
    before, num_params = dict(named_leaves(old)), len(jax.tree.leaves(new[0]))
    leaves, found = named_leaves(new), dict[int, jax.Array]()
    params = {names[1:]: (i, x.shape) for i, (names, x) in enumerate(leaves[:num_params])}
    for i, (names, x) in enumerate(leaves):
        if names not in before or not _is_judged(x, before[names]):
            continue
        owner, shape = owner_of(names[1:], params) or (i, None)
        belongs = shape == x.shape
        is_lost = _is_lost(x, before[names], may_be_infinite=x.ndim == 0 and not belongs)
        place = owner if belongs else i
        found[place] = found[place] | is_lost if place in found else is_lost
    return found


def _is_judged(new: jax.Array, old: jax.Array) -> bool:
    """Whether a leaf has floats, as many as before."""
    return not is_key(new) and jnp.issubdtype(new.dtype, jnp.inexact) and new.shape == old.shape


def _is_lost(new: jax.Array, old: jax.Array, may_be_infinite: bool) -> jax.Array:
    if may_be_infinite:
        return jnp.isnan(new) & ~jnp.isnan(old)
    return jnp.isfinite(old) & ~jnp.isfinite(new)


def _num(lost: jax.Array) -> jax.Array:
    """How many elements; a float32, for one reduction together with the sums of squares."""
    return lax.reduce_sum(lost.astype(jnp.float32), tuple(range(lost.ndim)))
