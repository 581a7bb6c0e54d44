"""Replicates the operands that XLA handles wrongly, or not at all, when they are sharded.

XLA for CPU needs a Fourier transform's operands in row-major order (RET_CHECK in fft_thunk, jax 0.10 to 0.12), which
its own resharding does not keep. XLA of jax 0.10.2 gives wrong numbers if one sharded array enters two kinds of
cumulative operations, a sum and a maximum.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from jaxshard.base.types import Equation, Jaxpr, T, Tree
from jaxshard.programs.jaxprs import equations, equations_inside
from jaxshard.programs.primitives import CUMULATIVE, FOURIER
from jaxshard.programs.rerun import bound, rerun

Whole = Callable[[jax.Array], jax.Array]
ALL = CUMULATIVE | FOURIER


class _Mend(NamedTuple):
    whole: Whole
    names: frozenset[str]

    def has_work_in(self, eqn: Equation) -> bool:
        return eqn.primitive.name in self.names or any(
            inner.primitive.name in self.names for inner in equations_inside(eqn)
        )

    def done(self, eqn: Equation, operands: Sequence[jax.Array]) -> list[jax.Array] | None:
        if eqn.primitive.name not in self.names:
            return None
        return [self.whole(x) for x in bound(eqn, [self.whole(x) for x in operands])]


def fragile(program: Jaxpr) -> frozenset[str]:
    """The names of the operations in the program, at any depth, whose operands must not be cut."""
    found = {eqn.primitive.name for eqn in equations(program)} & ALL
    cumulative = frozenset(found & CUMULATIVE)
    return frozenset(found & FOURIER) | (cumulative if len(cumulative) > 1 else frozenset())


def with_whole_operands(fn: Callable[..., T], whole: Whole, names: frozenset[str]) -> Callable[..., T]:
    """`fn`, with `whole` applied to the operands and the results of its operations of these names."""

    def run(*args: Tree) -> T:
        program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        mend = _Mend(whole, names)
        outs = rerun(program, jax.tree.leaves(args), mend.has_work_in, mend.done)
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return run
