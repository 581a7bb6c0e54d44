"""The peers: steps by `jit`, `NamedSharding` and sharding constraints alone, which XLA partitions.

`plain` is what people write: each leaf is cut along its first dim that the devices divide and that is no stack. `best`
has every trick known to us.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Tree = Any


@dataclasses.dataclass(frozen=True)
class Peer:
    """How a GSPMD step is laid out.

    Attributes:
      zero: 0: all whole; 2: gradients and state cut; 3: params too.
      cut: which free dim of a leaf is cut: "first", "last".
      table: the dim of the embedding table that is cut; None: as any leaf's.
      in_loop: layers' gradients are constrained inside the scan, by a rule of their own.
      early_head: the backward pass of the layers waits for the gradient of the output weight.
    """

    zero: int
    cut: str = "first"
    table: int | None = None
    in_loop: bool = False
    early_head: bool = False


def spec_of(path: str, shape: tuple[int, ...], num: int, peer: Peer) -> P:
    """The cut of one leaf over the axis "data"."""
    stacked = path.startswith("blocks") and len(shape) > 0
    dims = [d for d in range(len(shape)) if shape[d] % num == 0 and not (stacked and d == 0)]
    if not dims or len(shape) - stacked < 2:
        return P()
    dim = dims[0] if peer.cut == "first" else dims[-1]
    if path == "embed" and peer.table is not None:
        dim = peer.table
    return P(*(None,) * dim, "data")


def specs_of(params: Tree, num: int, peer: Peer) -> Tree:
    """The cuts of all leaves."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: spec_of("/".join(str(getattr(k, "key", k)) for k in path), x.shape, num, peer), params
    )


def _like(tx: optax.GradientTransformation, params: Tree, specs: Tree) -> tuple[Tree, Tree]:
    """The abstract state, and its specs: those of the params where it has their shapes."""
    state = jax.eval_shape(tx.init, params)
    return state, optax.tree.map_params(tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P())


def _sliced(spec: P) -> P:
    """The spec of a slice of a stacked leaf."""
    return P(*tuple(spec)[1:])


def _cast_grad(mesh: Mesh, specs: Tree) -> Callable[[Tree], Tree]:
    """The identity, whose cotangent is laid out by `specs`."""

    @jax.custom_vjp
    def same(tree):
        return tree

    def backward(_, grads):
        return (_laid(grads, mesh, specs),)

    same.defvjp(lambda tree: (tree, None), backward)
    return same


@jax.custom_vjp
def _together(tree: Tree) -> Tree:
    """The identity; no cotangent of the tree goes on before all are there."""
    return tree


_together.defvjp(lambda tree: (tree, None), lambda _, cotangents: (jax.lax.optimization_barrier(cotangents),))


def _laid(tree: Tree, mesh: Mesh, specs: Tree) -> Tree:
    return jax.tree.map(lambda x, s: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, s)), tree, specs)


def lowered(
    model: Any,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    peer: Peer,
    rows: int,
    *,
    microbatches: int = 1,
    masters: bool = False,
) -> jax.stages.Lowered:
    """The lowered step of a peer."""
    num = mesh.size
    params = model.init("float32")
    cuts = specs_of(params, num, peer)
    whole = jax.tree.map(lambda _: P(), params)
    at_rest = cuts if peer.zero == 3 else whole
    state_cuts = cuts if peer.zero else whole
    state, state_specs = _like(tx, params, state_cuts)
    rest_dtype = "bfloat16" if masters else "float32"
    block_cuts = jax.tree.map(_sliced, cuts["blocks"])
    block_whole = jax.tree.map(lambda _: P(), block_cuts)

    def at_layer(layer):
        if peer.zero == 3:
            layer = _laid(layer, mesh, block_whole)
        if peer.in_loop and peer.zero >= 2:
            layer = _cast_grad(mesh, block_cuts)(layer)
        return layer

    def loss_of(params, tokens):
        def at_end(params, x):
            last = {"norm": params["norm"], "head": params["head"]}
            if peer.early_head:
                last, x = _together((last, x))
                last["head"] = _cast_grad(mesh, cuts["head"])(last["head"])
            return params | last, x

        return _loss(model, params, tokens, at_layer, at_end, mesh)

    def grads_of(params, tokens):
        if microbatches == 1:
            return jax.value_and_grad(loss_of)(params, tokens)
        split = tokens.reshape(num, microbatches, -1, tokens.shape[-1]).swapaxes(0, 1)
        split = split.reshape(microbatches, -1, tokens.shape[-1])
        split = jax.lax.with_sharding_constraint(split, NamedSharding(mesh, P(None, "data")))

        def one(sums, tokens):
            loss, grads = jax.value_and_grad(loss_of)(params, tokens)
            grads = _laid(grads, mesh, state_cuts)
            return jax.tree.map(jnp.add, sums, (loss, grads)), None

        zeros = (jnp.zeros(()), _laid(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params), mesh, state_cuts))
        sums, _ = jax.lax.scan(one, zeros, split)
        return jax.tree.map(lambda x: x / microbatches, sums)

    def step(params, state, tokens):
        loss, grads = grads_of(params, tokens)
        grads = _laid(grads, mesh, state_cuts)
        if masters:
            inner, kept = state
            grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        else:
            inner, kept = state, _laid(params, mesh, state_cuts)
        updates, inner = tx.update(grads, inner, kept)
        kept = optax.apply_updates(kept, updates)
        new = jax.tree.map(lambda x: x.astype(rest_dtype), kept)
        norm = optax.tree.norm(grads)
        return _laid(new, mesh, at_rest), (inner, kept) if masters else inner, {"loss": loss, "grad_norm": norm}

    named = lambda tree: jax.tree.map(lambda s: NamedSharding(mesh, s), tree)  # noqa: E731
    shaped = lambda tree, specs, dtype=None: jax.tree.map(  # noqa: E731
        lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=NamedSharding(mesh, s)), tree, specs
    )
    held, held_specs = shaped(state, state_specs), state_specs
    if masters:
        held, held_specs = (held, shaped(params, state_cuts)), (state_specs, state_cuts)
    tokens = jax.ShapeDtypeStruct(model.batch(rows).shape, jnp.int32, sharding=NamedSharding(mesh, P("data")))
    out = (named(at_rest), named(held_specs), NamedSharding(mesh, P()))
    run = jax.jit(step, out_shardings=out, donate_argnums=(0, 1))
    return run.lower(shaped(params, at_rest, rest_dtype), held, tokens)


def _loss(
    model: Any,
    params: Tree,
    tokens: jax.Array,
    at_layer: Callable[[Tree], Tree],
    at_end: Callable[[Tree, jax.Array], tuple[Tree, jax.Array]],
    mesh: Mesh,
) -> jax.Array:
    """The model's loss, its activations cut along the batch, its layers laid out by `at_layer` inside the remat."""
    rows = NamedSharding(mesh, P("data"))
    x = jax.lax.with_sharding_constraint(model.embedded(params["embed"], tokens[:, :-1]), rows)

    def block(x, layer):
        x = jax.lax.with_sharding_constraint(x, rows)
        return model.block(at_layer(layer), x), None

    block = jax.checkpoint(block, prevent_cse=True)
    if model.scanned:
        x, _ = jax.lax.scan(block, x, params["blocks"])
    else:
        for layer in params["blocks"]:
            x, _ = block(x, layer)
    params, x = at_end(params, x)
    return model.losses(params, x, tokens[:, 1:])
