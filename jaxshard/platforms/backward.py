"""Orders the loss's backward pass on GPU and TPU, to save memory and to overlap collectives with products.

XLA for GPU delays products until something reads their results. Left alone, it keeps the operands of a weight's
gradient until the end of its layer, and attention's weights until their gradient is used. XLA for TPU schedules
products by memory, so it needs fewer rules: `before_the_rest` (for buckets too), the pick, and rematerialization.
Figures below: 12 layers of width 1024 in float32 under zero3 on 8 x H100; `benchmarks/NOTES.md` has more.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxshard import platforms
from jaxshard.base.types import Equation, Jaxpr, Tree, TreeDef, varying
from jaxshard.programs.jaxprs import equations
from jaxshard.programs.primitives import GATHER, PRODUCT, PRODUCTS


def has_own_rule(eqn: Equation) -> bool:
    """Whether we replace an equation's backward pass: a pick of one element per row, and on GPU a product."""
    is_product = eqn.primitive.name in PRODUCTS and eqn.invars[0] is not eqn.invars[1]
    return (is_product and platforms.here().orders_products and not _is_fused(eqn)) or _picks(eqn)


def _is_fused(eqn: Equation) -> bool:
    """Whether XLA makes a multiplication and a sum of a product, and may fuse these: it has a row or a column only.

    A barrier would write its gradients to memory. Peak of a state space model under zero3: 1060 MB with
    it, 960 MB without.
    """
    if eqn.primitive.name != PRODUCT:
        return False
    (contracted, batch), operands = eqn.params["dimension_numbers"], [v.aval.shape for v in eqn.invars]
    places = zip(operands, contracted, batch, strict=True)
    free = [math.prod(n for d, n in enumerate(shape) if d not in (*sums, *batch)) for shape, sums, batch in places]
    return 1 in free


def concerns(jaxpr: Jaxpr) -> bool:
    """Whether a program has an equation with a rule of its own."""
    return any(has_own_rule(eqn) for eqn in equations(jaxpr))


def bind(eqn: Equation, operands: Sequence[jax.Array], weights: Sequence[bool]) -> jax.Array:
    """The result of an equation that has a rule of its own.

    Args:
      eqn: the equation.
      operands: its operands.
      weights: for each of them, whether it is a parameter.
    """
    first, second = operands
    if _picks(eqn):
        return _picked(eqn, first, second)
    return _bind(eqn, *_together(*weights)(first, second))


def _bind(eqn: Equation, *operands: jax.Array) -> jax.Array:
    return eqn.primitive.bind(*operands, **eqn.params)


def held_together(values: Sequence[jax.Array]) -> list[jax.Array]:
    """The values behind an optimization barrier: no reader gets one before all are computed.

    Under checked types, a barrier gives all values the widest type. A value of a narrower type then skips the barrier,
    since autodiff needs its own type.
    """
    pairs = zip(values, lax.optimization_barrier(list(values)), strict=True)
    return [held if varying(held) == varying(x) else x for x, held in pairs]


def pullback(fn: Callable[..., list[Tree]], values: Sequence[jax.Array], wrt: Sequence[int]) -> Callable[..., Tree]:
    """The pullback of `fn(*values)`, for the gradients of the values at these places alone."""

    def of(*changed: jax.Array) -> list[Tree]:
        filled = dict(zip(wrt, changed, strict=True))
        return fn(*(filled.get(i, x) for i, x in enumerate(values)))

    return jax.vjp(of, *(values[i] for i in wrt))[1]


# The two gradients of a product.


@functools.cache
def _together(*is_weight: bool) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns both operands of a product; the backward pass uses neither gradient before both are computed.

    So neither operand is kept for later. Only a weight's gradient continues at once: it is reduced during the other
    product. Peak: 1235 MB without, 1148 MB with it. (All products share one function, so JAX traces it once.)
    """

    @jax.custom_vjp
    def same(a, b):
        return a, b

    def forward(a, b):
        return (a.value, b.value), () if a.perturbed and b.perturbed else None

    def backward(both, cotangents):
        if both is None or any(isinstance(x, SymbolicZero) for x in cotangents):
            return cotangents
        held = held_together(cotangents)
        return tuple(x if weight else y for x, y, weight in zip(cotangents, held, is_weight, strict=True))

    same.defvjp(forward, backward, symbolic_zeros=True)
    return same


@jax.custom_vjp
def before_the_rest(first: list[jax.Array], rest: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Both lists; the backward pass uses the gradients of `rest` only once those of `first` are computed.

    Otherwise XLA delays the output weight's gradient until the backward pass of all layers has ended, and keeps its
    operand, the gradient of all logits. Peak: 1203 MB without, 1148 MB with it.
    """
    return first, rest


def _before_the_rest_backward(_, cotangents):
    leaves, treedef = jax.tree.flatten(cotangents, is_leaf=lambda x: isinstance(x, SymbolicZero))
    held = iter(held_together([x for x in leaves if not isinstance(x, SymbolicZero)]))
    return jax.tree.unflatten(treedef, [x if isinstance(x, SymbolicZero) else next(held) for x in leaves])


before_the_rest.defvjp(
    lambda first, rest: (([x.value for x in first], [x.value for x in rest]), None),
    _before_the_rest_backward,
    symbolic_zeros=True,
)


# The gradient of a pick.


def _picks(eqn: Equation) -> bool:
    """Whether an equation takes one element of each row of floating numbers: (..., V), (..., 1, 1) -> (..., 1)."""
    if eqn.primitive.name != GATHER:
        return False
    rows, ids = (v.aval for v in eqn.invars)
    numbers, last = eqn.params["dimension_numbers"], rows.ndim - 1
    leading = tuple(range(last))
    return (
        jnp.issubdtype(rows.dtype, jnp.floating)
        and tuple(numbers.operand_batching_dims) == tuple(numbers.start_indices_batching_dims) == leading
        and tuple(numbers.start_index_map) == tuple(numbers.collapsed_slice_dims) == (last,)
        and not numbers.offset_dims
        and ids.shape == (*rows.shape[:-1], 1, 1)
        and eqn.params["mode"] != lax.GatherScatterMode.CLIP
    )


def _picked(eqn: Equation, rows: jax.Array, ids: jax.Array) -> jax.Array:
    """The picked elements; their gradient is a select: the cotangent where picked, else 0.

    JAX would scatter the gradient into an array of zeros. XLA can add the select to the rows' other gradient in one
    kernel, as if the loss multiplied logits by one-hot targets. The output layer's gradients: 524 MB without, 262 MB
    with it. On TPU the forward pass, too, is a masked sum.
    """

    @jax.custom_vjp
    def pick(rows, ids):
        return _summed_pick(eqn, rows, ids) if platforms.here().picks_by_sums else _bind(eqn, rows, ids)

    def backward(ids, cotangent):
        return jnp.where(_places(rows.shape, ids), cotangent, jnp.zeros_like(cotangent)), None

    pick.defvjp(lambda rows, ids: (pick(rows, ids), ids), backward)
    return pick(rows, ids)


def _places(shape: tuple[int, ...], ids: jax.Array) -> jax.Array:
    """A mask (..., V): True at the element that `ids`, (..., 1, 1), name."""
    ids = _countable(ids)
    return lax.broadcasted_iota(ids.dtype, shape, len(shape) - 1) == ids


def _countable(ids: jax.Array) -> jax.Array:
    """(..., 1, 1) -> (..., 1), in a dtype that can hold every class index (uint8 cannot)."""
    return ids[..., 0].astype(jnp.promote_types(ids.dtype, jnp.int32))


def _summed_pick(eqn: Equation, rows: jax.Array, ids: jax.Array) -> jax.Array:
    """The picked elements, as sums over rows that are masked to zero elsewhere; -0.0 becomes 0.0."""
    found = jnp.sum(jnp.where(_places(rows.shape, ids), rows, jnp.zeros_like(rows)), -1, keepdims=True)
    ids, fill = _countable(ids), eqn.params["fill_value"]
    known = (ids >= 0) & (ids < rows.shape[-1])
    return jnp.where(known, found, jnp.asarray(jnp.nan if fill is None else fill, rows.dtype))


# Rematerialization.


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """A function that the backward pass recomputes, keeping only its arguments.

    As `jax.checkpoint(fn)`, which makes either all arguments (`prevent_cse=True`) or none wait for the gradients of the
    results. Here only activations wait: XLA may gather parameters during the layer before. Of 2091 MB of collectives,
    products overlap 1923 MB; 1790 MB if parameters wait too. If nothing waits, the peak is 1465 MB, not 1174 MB.

    Attributes:
      fn: takes any arguments and returns a flat list.
      smooth: which results may have gradients; the others are stopped.
    """

    fn: Callable[..., list[Tree]]
    smooth: tuple[bool, ...]

    def __call__(self, *args: Tree) -> list[Tree]:
        leaves, treedef = jax.tree.flatten(args)
        waits = tuple(isinstance(x, jax.Array) for x in args for _ in jax.tree.leaves(x))
        outs = cast(list[Tree], _recomputed(_Call(self.fn, treedef, waits), *leaves))
        return [x if smooth else lax.stop_gradient(x) for x, smooth in zip(outs, self.smooth, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of `fn`: the tree structure of its arguments, and which leaves are activations."""

    fn: Callable[..., list[Tree]]
    treedef: TreeDef
    waits: tuple[bool, ...]

    def __call__(self, *leaves: jax.Array) -> list[Tree]:
        return self.fn(*jax.tree.unflatten(self.treedef, leaves))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recomputed(call: _Call, *leaves: jax.Array) -> list[Tree]:
    return _results(call, *leaves)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _results(call: _Call, *leaves: jax.Array) -> list[Tree]:
    return call(*leaves)


def _recomputed_forward(call, *leaves):
    marks = tuple(() if x.perturbed else None for x in leaves)  # no arrays: part of the structure
    values = [x.value for x in leaves]
    return _results(call, *values), (values, marks)


def _recomputed_backward(call, kept, cotangents):
    values, marks = kept
    outs = tuple(i for i, x in enumerate(cotangents) if not isinstance(x, SymbolicZero))
    wrt = tuple(i for i, mark in enumerate(marks) if mark == () and jnp.issubdtype(values[i].dtype, jnp.inexact))
    found = dict(zip(wrt, _gradients(call, outs, wrt, values, [cotangents[i] for i in outs]), strict=True))
    return tuple(found.get(i) for i in range(len(values)))


_recomputed.defvjp(_recomputed_forward, _recomputed_backward, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _gradients(
    call: _Call, outs: tuple[int, ...], wrt: tuple[int, ...], leaves: list[jax.Array], cotangents: list[jax.Array]
) -> list[jax.Array]:
    """The gradients of the results `outs`, given their cotangents, with respect to the leaves `wrt`."""
    waiting = [x for x, waits in zip(leaves, call.waits, strict=True) if waits]
    held = held_together([*waiting, *cotangents])
    tied, cotangents = iter(held[: len(waiting)]), held[len(waiting) :]
    leaves = [next(tied) if waits else x for x, waits in zip(leaves, call.waits, strict=True)]

    def of(*leaves: jax.Array) -> list[Tree]:
        results = call(*leaves)
        return [results[i] for i in outs]

    return list(pullback(of, leaves, wrt)(cotangents))
