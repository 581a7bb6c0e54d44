"""Finds the moments among an optimizer's state, which may be stored in a narrower dtype than they are computed in."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxshard.base.tree import named_leaves, owner_of, path_of, shape_of
from jaxshard.base.types import Jaxpr, Names, Tree
from jaxshard.layout.options import Config
from jaxshard.optimizer.inner.update import Traced, fast, first_state, first_update
from jaxshard.platforms.platform import is_table
from jaxshard.programs.questions import depends, hands_on, linear, never_negative, subtracts

_LEAST_FOR_EIGHT_BITS = 4096  # elements (Dettmers et al. 2022, appendix)
_FOR_EIGHT_BITS = "4096 elements or more, not a table, and a mean of gradients or never negative"


def stored_dtypes(inner: optax.GradientTransformation, params: Tree, config: Config) -> Tree:
    """The dtype at rest of each leaf of the inner state.

    A moment is a float32 or float64 leaf with its parameter's shape, which init does not derive from params, and into
    which no update copies params or gradients. `mu` and `nu` are moments. Lookahead's slow params, the centre of a
    distance, and the arrays that L-BFGS takes differences from are not: they need full precision.

    Raises:
      ValueError: no leaf is a moment, or the optimizer cannot be traced.
    """
    shapes = jax.tree.map(shape_of, params)
    traced = _Traces.of(inner, shapes)
    in_codes = config.moment_dtype == jnp.int8
    moments = _moments(traced, shapes)
    unsigned = [False] * len(moments)
    if in_codes:
        large = [a and not _keeps_digits(leaf) for a, leaf in zip(moments, jax.tree.leaves(traced.state), strict=True)]
        moments, unsigned = _in_codes(traced, shapes, large)
    if not any(moments):
        kind = f" that 8 bits could hold ({_FOR_EIGHT_BITS})" if in_codes else ""
        raise ValueError(
            f"moment_dtype: this optimizer's state has no float32 moments{kind}, only "
            f"{_leaves_in_words(traced.state)}; leave the option out"
        )
    leaves, structure = jax.tree.flatten(traced.state)
    codes = {False: config.moment_dtype, True: jnp.dtype(jnp.uint8)}
    each = zip(leaves, moments, unsigned, strict=True)
    return jax.tree.unflatten(structure, [codes[a] if moment else leaf.dtype for leaf, moment, a in each])


class _Traces(NamedTuple):
    """An optimizer's traced init, the state that it makes, and its traced update."""

    init: Jaxpr
    state: Tree
    update: Traced

    @classmethod
    def of(cls, inner: optax.GradientTransformation, params: Tree) -> "_Traces":
        if why := first_state(inner, params).why:
            raise ValueError(
                "moment_dtype: this optimizer's init reads values of its params, so its moments cannot be identified; "
                f"leave the option out. JAX said: {why}"
            )
        updated = first_update(inner, params)
        if updated is None:
            raise ValueError(
                "moment_dtype: this optimizer's update cannot be traced without further arguments (or fails), so its "
                "moments cannot be identified; leave the option out"
            )
        return cls(*jax.make_jaxpr(inner.init, return_shape=True)(params), updated)


def _moments(traced: _Traces, params: Tree) -> list[bool]:
    """For each leaf of the state, whether it is a moment."""
    at_start = depends(traced.init, [True] * len(jax.tree.leaves(params)))
    copies = [a or b for a, b in zip(at_start, _handed_on(traced.update, params), strict=True)]
    owners = {names: tuple(leaf.shape) for names, leaf in named_leaves(params)}
    each = zip(named_leaves(traced.state), copies, strict=True)
    return [not copy and _is_moment(names, leaf, owners) for (names, leaf), copy in each]


def _in_codes(traced: _Traces, params: Tree, moments: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """(which of the moments 8 bits can hold, which of these have no sign)."""
    unsigned = _never_negative(traced.update, params, traced.init, moments)
    if _subtracts(traced.update, params, unsigned, moments):  # a variance needs the digits of both
        return [False] * len(moments), [False] * len(moments)
    linear_ones = _linear(traced.update, params, moments)
    return [a or b for a, b in zip(unsigned, linear_ones, strict=True)], unsigned


def _keeps_digits(leaf: jax.ShapeDtypeStruct) -> bool:
    """Whether a moment stays in float32 where others take 8 bits: it is small, or belongs to a table, whose rows are
    rarely seen (Dettmers et al. 2022, sections 2.3 and 3)."""
    return leaf.size < _LEAST_FOR_EIGHT_BITS or is_table(tuple(leaf.shape))


def _linear(updated: Traced, params: Tree, moments: Sequence[bool]) -> list[bool]:
    """For each leaf of the state, whether it is a moment that is a mean of gradients: linear in these and in itself.

    A signed leaf that is not linear may be an unproved second moment; rounding that to 0 blows up the update.
    """
    names, after = ([names for names, _ in named_leaves(state)] for state in (updated.before, updated.after))
    grads, rest = [1] * len(jax.tree.leaves(fast(params))), [0] * len(jax.tree.leaves(params))
    found = linear(updated.jaxpr, [*grads, *map(int, moments), *rest])[-len(after) :]
    degrees = dict(zip(after, found, strict=True))
    return [yes and degrees.get(name, 2) == 1 for yes, name in zip(moments, names, strict=True)]


def _subtracts(updated: Traced, params: Tree, unsigned: Sequence[bool], moments: Sequence[bool]) -> bool:
    """Whether the update subtracts a moment without sign and another moment."""
    grads, rest = [False] * len(jax.tree.leaves(fast(params))), [False] * len(jax.tree.leaves(params))
    return subtracts(updated.jaxpr, [*grads, *unsigned, *rest], [*grads, *moments, *rest])


def _never_negative(updated: Traced, params: Tree, init: Jaxpr, moments: Sequence[bool]) -> list[bool]:
    """For each leaf of the state, whether it is a moment that is never below 0."""
    names, after = ([names for names, _ in named_leaves(state)] for state in (updated.before, updated.after))
    grads, rest = [False] * len(jax.tree.leaves(fast(params))), [False] * len(jax.tree.leaves(params))
    at_start = never_negative(init, rest)
    now = [a and b for a, b in zip(moments, at_start, strict=True)]
    found: list[bool] = []
    while now != found:  # each iteration removes some, or is the last
        found = now
        outs = dict(zip(after, never_negative(updated.jaxpr, [*grads, *found, *rest])[-len(after) :], strict=True))
        now = [yes and outs.get(name, False) for yes, name in zip(found, names, strict=True)]
    return found


def _handed_on(updated: Traced, params: Tree) -> list[bool]:
    """For each leaf of the state, whether an update copies a param or a gradient into it."""
    num_grads, num_params = len(jax.tree.leaves(fast(params))), len(jax.tree.leaves(params))
    before = [names for names, _ in named_leaves(updated.before)]
    marks = [True] * num_grads + [False] * len(before) + [True] * num_params
    after = [names for names, _ in named_leaves(updated.after)]
    found = dict(zip(after, hands_on(updated.jaxpr, marks)[-len(after) :], strict=True)) if after else {}
    return [found.get(names, False) for names in before]


def _is_moment(names: Names, leaf: jax.ShapeDtypeStruct, owners: Mapping[Names, tuple[int, ...]]) -> bool:
    """Whether a float leaf has its parameter's shape, or any parameter's if its path has none (lookahead, a list)."""
    owner = owner_of(names, owners)
    alike = owner == tuple(leaf.shape) if owner is not None else tuple(leaf.shape) in owners.values()
    return leaf.dtype in (jnp.float32, jnp.float64) and bool(leaf.shape) and alike


def _leaves_in_words(state: Tree) -> str:
    return (
        ", ".join(f"{path_of(names)} {leaf.dtype}{list(leaf.shape)}" for names, leaf in named_leaves(state)) or "none"
    )
