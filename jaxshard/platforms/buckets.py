"""Unrolled models on GPU: in which order the gradients of their layers are to be reduced.

XLA for GPU puts all reduce-scatters of a program without loops off until the backward pass has ended, joins them, and
keeps all whole gradients until then. So parameters are grouped into buckets, in the order in which the loss first uses
them, as in Li et al. 2020 (PyTorch Distributed, section 3.2.3). The backward pass does not go on from one bucket to the
bucket before until the gradients of the bucket after it are reduced.
"""

from collections.abc import Iterable, Mapping

import jax.numpy as jnp

from jaxshard.base.types import OpenJaxpr, Var
from jaxshard.programs.jaxprs import is_literal
from jaxshard.programs.primitives import SCAN

BUCKET_BYTES = 32 * 2**20  # of whole gradients: enough for a collective to be fast


def reduced_before(jaxpr: OpenJaxpr, num_bytes: Mapping[Var, int]) -> dict[int, list[Var]]:
    """By the index of an equation: the parameters whose gradients are reduced before the backward pass goes past it.

    Args:
      jaxpr: the loss.
      num_bytes: of the whole gradient of each parameter that is reduced where the loss uses it.
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
    """The floating results of the equations before the one at `place` that are used at it or after, without `but`."""
    made = {v for eqn in jaxpr.eqns[:place] for v in eqn.outvars} - set(but)
    later = [v for eqn in jaxpr.eqns[place:] for v in eqn.invars] + jaxpr.outvars
    used = dict.fromkeys(v for v in later if not is_literal(v) and v in made)
    return [v for v in used if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
