"""Finds the dims along which a leaf can be cut into whole matrices, so that Muon updates each matrix on one device.

The answer comes from the traced update, not from names: a dim of a leaf is a batch dim if it is one in every matrix
operation that the leaf's values enter. It affects only speed: the update runs in the global view, so every layout gives
the same result.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import optax

from jaxshard.base.tree import by_shapes, named_leaves, owner_of, structure, unflatten
from jaxshard.base.types import Equation, Tree, Var
from jaxshard.optimizer.inner.update import fast, first_update
from jaxshard.programs.dims import moved_dims
from jaxshard.programs.primitives import LINEAR_ALGEBRA, PRODUCT, RESHAPE
from jaxshard.programs.walk import Walk


@by_shapes
def batch_dims(inner: optax.GradientTransformation, params: Tree) -> list[tuple[int, ...] | None]:
    """For each leaf of params (arrays or shapes), the dims over which its matrices are batched in `inner.update`.

    None for a leaf that enters no matrix operation, and for all if the update needs further arguments to be traced.
    """
    named, traced = named_leaves(params), first_update(inner, params)
    if traced is None:
        return [None] * len(named)
    places = [_Place(i, tuple(range(len(leaf.shape)))) for i, (_, leaf) in enumerate(named)]
    owners = {names: (leaf.shape, place) for (names, leaf), place in zip(named, places, strict=True)}
    found = [(leaf.shape, owner_of(names, owners)) for names, leaf in named_leaves(traced.before)]
    of_state = [owner[1] if owner and owner[0] == shape else None for shape, owner in found]
    of_grads = jax.tree.leaves(fast(unflatten(structure(params), places)))
    walk = _Matrices()
    walk.through(traced.jaxpr, [*of_grads, *of_state, *places])
    touched = {leaf for leaf, _ in walk.batched | walk.mixed}
    return [
        tuple(d for d in range(len(leaf.shape)) if (i, d) in walk.batched - walk.mixed) if i in touched else None
        for i, (_, leaf) in enumerate(named)
    ]


@dataclasses.dataclass(frozen=True)
class _Place:
    """A value computed from one leaf; `dims[i]` is the value's dim that corresponds to the leaf's dim i, or None."""

    leaf: int
    dims: tuple[int | None, ...]

    def moved(self, new: Callable[[int], int | None]) -> "_Place":
        """The place of a value computed from this one; `new` maps this value's dims to the new value's, or to None."""
        return _Place(self.leaf, tuple(None if d is None else new(d) for d in self.dims))


class _Matrices(Walk[_Place | None]):
    """Follows leaves; collects the (leaf, dim) pairs that matrix operations batch over, and those that they mix."""

    nothing = None

    def __init__(self):
        self.batched: set[tuple[int, int]] = set()
        self.mixed: set[tuple[int, int]] = set()

    def join(self, one: _Place | None, other: _Place | None) -> _Place | None:
        if one is None or other is None or one.leaf != other.leaf:
            return one or other
        return _Place(one.leaf, tuple(a if a == b else None for a, b in zip(one.dims, other.dims, strict=True)))

    def unknown(self, eqn: Equation, known: Sequence[_Place | None]) -> _Place | None:
        return None

    def kept(self, v: Var, value: _Place | None) -> _Place | None:
        return value if value and any(d is not None for d in value.dims) else None

    def slice(self, value: _Place | None) -> _Place | None:
        return value and value.moved(lambda d: d - 1 if d else None)

    def stack(self, value: _Place | None) -> _Place | None:
        return value and value.moved(lambda d: d + 1)

    def of(self, eqn: Equation, known: Sequence[_Place | None]) -> list[_Place | None]:
        operand, place = next(((i, place) for i, place in enumerate(known) if place), (0, None))
        if place is None:
            return [None] * len(eqn.outvars)
        if eqn.primitive.name == PRODUCT:
            return [self._dot(eqn, known)]
        moved = self._moves(eqn, operand, place)
        return [moved(v.aval.shape) for v in eqn.outvars]

    def _dot(self, eqn: Equation, known: Sequence[_Place | None]) -> _Place | None:
        contracted, batch = eqn.params["dimension_numbers"]
        outs = []
        for operand, place in enumerate(known):
            if place and eqn.outvars[0].aval.ndim:  # a scalar result is an inner product, which counts as a sum
                ndim = eqn.invars[operand].aval.ndim
                self._note(place, [d for d in range(ndim) if d in batch[operand]], ndim)
                free = [d for d in range(ndim) if d not in batch[operand] and d not in contracted[operand]]
                before = eqn.outvars[0].aval.ndim - len(free) if operand else len(batch[0])
                where = {d: i for i, d in enumerate(batch[operand])} | {d: before + i for i, d in enumerate(free)}
                outs.append(place.moved(where.get))
        return outs[0] if outs else None

    def _note(self, place: _Place, batch: list[int], ndim: int) -> None:
        for dim, now in enumerate(place.dims):
            if now is not None:
                (self.batched if now in batch else self.mixed).add((place.leaf, dim))

    def _moves(self, eqn: Equation, operand: int, place: _Place) -> Callable[[tuple[int, ...]], _Place]:
        """For any other operation, a function from an output's shape to the operand's `_Place` in that output."""
        name, shape = eqn.primitive.name, eqn.invars[operand].aval.shape
        if name in LINEAR_ALGEBRA:
            self._note(place, list(range(len(shape) - 2)), len(shape))
            return lambda out: place.moved(lambda d: d if d < min(len(shape) - 2, len(out)) else None)
        if (where := moved_dims(name, eqn.params, len(shape))) is not None:
            return lambda out: place.moved(where.get)
        if name == RESHAPE:
            return lambda out: place.moved(lambda d: _after_reshape(shape, out, d))
        return lambda out: place.moved(lambda d: d if len(out) == len(shape) and out[d] == shape[d] else None)


def _after_reshape(old: tuple[int, ...], new: tuple[int, ...], dim: int) -> int | None:
    """The new dim that starts where `dim` did, if one size divides the other (kept, split or merged); else None."""
    before = 1
    for i, size in enumerate(new):
        alike = max(size, old[dim]) % max(min(size, old[dim]), 1) == 0
        if before == math.prod(old[:dim]) and alike and (size > 1 or old[dim] == 1):
            return i
        before *= size
    return None
