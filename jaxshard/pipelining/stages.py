"""Functions for all schedules: the user's functions, indexing by round and microbatch, checks of activations."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard import collectives
from jaxshard.base.tree import named_leaves, path_of
from jaxshard.base.types import Jaxpr, Scalar, Tree
from jaxshard.pipelining.timetable import Info, Plan
from jaxshard.programs.jaxprs import without_consts


class Parts(NamedTuple):
    """The user's three functions, and `const`, the further argument of `stage_fn`, or None."""

    stage_fn: Callable[..., Tree]
    first_fn: Callable[..., Tree]
    last_fn: Callable[..., Tree]
    const: Tree

    def stage(self, blocks: Tree, x: Tree, info: Info) -> Tree:
        """Runs `stage_fn`, with `const` if there is one."""
        return self.stage_fn(blocks, x, info) if self.const is None else self.stage_fn(blocks, x, info, self.const)


class Function(NamedTuple):
    """A traced function of flat inputs; its constants, `consts`, are its last inputs."""

    jaxpr: Jaxpr
    consts: list[Tree]
    outs: Tree

    @classmethod
    def trace(cls, fn: Callable[..., Tree], *args: Tree) -> "Function":
        leaves, treedef = jax.tree.flatten(args)
        closed, outs = jax.make_jaxpr(lambda *x: fn(*jax.tree.unflatten(treedef, x)), return_shape=True)(*leaves)
        return cls(*without_consts(closed), outs)


def of_round(tree: Tree, index: Scalar, plan: Plan) -> Tree:
    """The blocks that this device runs in round `index`."""
    return tree if plan.virtual == 1 else at(tree, index)


def at(tree: Tree, index: Scalar) -> Tree:
    """Row `index` of each leaf."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def put(x: Tree, row: Tree, index: Scalar) -> Tree:
    """The array with row `index` replaced."""
    return lax.dynamic_update_index_in_dim(x, row, index, 0)


def select(which: Scalar, one: Tree, other: Tree) -> Tree:
    """`one` if `which` is True, else `other`."""
    return jax.tree.map(lambda a, b: jnp.where(which, a, b), one, other)


def passed(tree: Tree, axis: str, plan: Plan, step: int) -> Tree:
    """Sends a tree to the next stage (`step` 1) or the previous one (-1); with virtual stages, around a ring."""
    num = plan.num_stages
    pairs = [(i, (i + step) % num) for i in range(num) if plan.virtual > 1 or 0 <= i + step < num]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), tree)


def axes_of_sums(microbatches: Tree, axis: str) -> tuple[str, ...]:
    """The axes of stages and batch: params cast to vary over them get their gradients summed once, outside."""
    return tuple(sorted({axis, *(a for x in jax.tree.leaves(microbatches) for a in collectives.varying(x))}))


def cast(tree: Tree, axes: tuple[str, ...]) -> Tree:
    """The tree with types that vary over these axes, too."""
    return jax.tree.map(lambda x: collectives.vary(x, axes), tree)


def floats(x: Tree) -> list[Tree]:
    """The floating leaves of an activation, which have gradients; others (masks, segment ids) have none."""
    return [leaf for leaf in jax.tree.leaves(x) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def with_floats(x: Tree, floats: list[Tree]) -> Tree:
    new = iter(floats)
    return jax.tree.map(lambda leaf: next(new) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, x)


def settled(parts: Parts, axis: str, blocks: Tree, shared: Tree, microbatch: Tree, info: Info) -> Tree:
    """The activation's shapes, dtypes and varying axes, which are the same before and after every stage.

    Raises:
      ValueError: a stage changes the shape or dtype.
    """
    x = collectives.shapes_of(lambda *args: cast(parts.first_fn(*args), (axis,)), shared, microbatch, info)
    while True:
        y = collectives.shapes_of(parts.stage, blocks, x, info)
        _check_activation(x, y)
        wider = collectives.shapes_of(lambda x: jax.tree.map(collectives.vary_as, x, y), x)
        if wider == x:
            return x
        x = wider


def _check_activation(x: Tree, y: Tree) -> None:
    if jax.tree.structure(x) != jax.tree.structure(y):
        raise ValueError(
            f"pipeline: stage_fn turns {jax.tree.structure(x)} into {jax.tree.structure(y)}; it must keep the structure"
        )
    for (names, a), b in zip(named_leaves(x), jax.tree.leaves(y), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"pipeline: stage_fn turns {a.dtype}{list(a.shape)} into {b.dtype}{list(b.shape)}"
                + (f" ({path_of(names)})" if names else "")
                + "; the activation must keep its shape and dtype, so change them only in first_fn and last_fn"
            )


def losses(out: Tree, axes: tuple[str, ...] | None = None) -> list[jax.Array]:
    """What `last_fn` returned: [the loss], or [its sum, its weight, which needs no gradient].

    Raises:
      TypeError: it is neither a floating scalar that varies only over `axes`, if given, nor such a pair of scalars.
    """
    several: list[Tree] = [*out] if isinstance(out, tuple) and len(out) == 2 else [out]
    loss, *weight = several
    if not hasattr(loss, "shape"):
        raise TypeError(
            f"pipeline: last_fn must return the loss, a floating scalar, or (its sum, its weight), got a "
            f"{type(out).__name__}"
        )
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"pipeline: last_fn must return a floating scalar, got {loss.dtype}{list(loss.shape)}; take its mean"
        )
    weight = [lax.stop_gradient(jnp.asarray(x, jnp.result_type(float))) for x in weight]
    if any(x.shape for x in weight):
        raise TypeError(
            f"pipeline: the weight that last_fn returns must be a scalar, got shape {weight[0].shape}; sum it over the "
            "microbatch's rows"
        )
    for x in (loss, *weight):
        if axes is not None and (others := sorted(collectives.varying(x) - set(axes))):
            raise TypeError(
                f"pipeline: the loss of last_fn differs over {others}; sum or average it over these (jax.lax.psum, "
                "jax.lax.pmean, or jaxshard.tensor's blocks)"
            )
    return [loss, *weight]


def combined(totals: list[jax.Array], plan: Plan) -> Tree:
    """What a pipeline returns, from sums over microbatches: the mean loss, or (the sum, the weight)."""
    return totals[0] / plan.num_microbatches if len(totals) == 1 else tuple(totals)
