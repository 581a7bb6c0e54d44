"""Steps by `jit`, `NamedSharding` and sharding constraints alone, which XLA partitions.

`plain` peers are what people write: each leaf is sharded along its first divisible dim that is not a stack of layers.
`best` peers use every trick that we know; see `best`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.apps.bench import models
from jaxshard.apps.bench.step import Step, Task, UnfitError, optimizer

Tree = Any


@dataclasses.dataclass(frozen=True)
class Peer:
    """The shardings and options of a GSPMD step.

    Attributes:
      zero: 0: all replicated; 2: gradients and state sharded; 3: params too.
      cut: the dim of a leaf to shard: "first", "last", or "lanes", the last one whose shards are multiples of 128.
      table: the dim of the tables to shard, which are under "embed"; None: as for any leaf.
      constrained: constrain activations to be sharded along the batch; else XLA decides.
      in_loop: constrain layers' gradients inside the scan, by a custom gradient rule.
      early_head: the backward pass of the layers waits for the gradient of the output weight.
      prevent_cse: of `jax.checkpoint`.
      over_old: compute new replicated params from the old ones, so that XLA overwrites those without a copy: updates
        are gathered and added; with masters, gathered params are selected if the gradients are finite.
      multi_steps: `optax.MultiSteps` sums the microbatches, with one update each.
    """

    zero: int
    cut: str = "first"
    table: int | None = None
    constrained: bool = True
    in_loop: bool = False
    early_head: bool = False
    prevent_cse: bool = True
    over_old: bool = False
    multi_steps: bool = False


PLAIN = {
    "optax": Peer(0, constrained=False),
    "optax-multisteps": Peer(0, constrained=False, multi_steps=True),
    "gspmd-ddp": Peer(0),
    "gspmd-zero": Peer(2),
    "gspmd-fsdp": Peer(3),
}
BEST = {"gspmd-zero-best": 2, "gspmd-fsdp-best": 3}


def peer_named(name: str, task: Task) -> Peer:
    """The peer of that name; the best one depends on the platform and the task."""
    return PLAIN[name] if name in PLAIN else best(BEST[name], task.platform)


def best(zero: int, platform: str) -> Peer:
    """The peer with the least peak memory that we know, by the compilers for 8 x H100 and TPU v5e 2x4.

    For the H100 we compiled, with cut "first", in float32 and in bfloat16 with masters, with 1 and 4 microbatches:
    gradients sharded inside the loop or after it, with and without the early head, `prevent_cse`, and XLA's double
    buffering of loops (+0 to 11%). `over_old` gains nothing there in float32. For the v5e we compiled fewer
    combinations: cuts "first" and "lanes", the early head, `prevent_cse`, and `over_old` (ZeRO: 2804 to 1938 MB; with
    masters 1594 to 1227 MB); not bfloat16 with 4 microbatches.
    """
    if platform == "tpu":
        return Peer(zero, cut="lanes", table=1, in_loop=True, prevent_cse=False, over_old=True)
    return Peer(zero, table=1, in_loop=True, early_head=True, prevent_cse=False)


def spec_of(path: str, shape: tuple[int, ...], num: int, peer: Peer, stacked: bool) -> P:
    """The spec of one leaf over the axis "data"; `stacked`: its first dim counts layers."""
    dims = [d for d in range(len(shape)) if shape[d] % num == 0 and not (stacked and d == 0)]
    if not dims or len(shape) - stacked < 2:
        return P()
    lanes = [d for d in dims if shape[d] // num % 128 == 0] if peer.cut == "lanes" else []
    dim = dims[0] if peer.cut == "first" else (lanes or dims)[-1]
    if path.startswith("embed") and peer.table in dims:
        dim = peer.table
    return P(*(None,) * dim, "data")


def specs_of(params: Tree, num: int, peer: Peer, scanned: bool) -> Tree:
    """The specs of all leaves; `scanned`: those under "blocks" are stacked."""

    def spec(keys: Any, x: Any) -> P:
        path = "/".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in keys)
        return spec_of(path, x.shape, num, peer, scanned and path.startswith("blocks"))

    return jax.tree_util.tree_map_with_path(spec, params)


def laid(tree: Tree, mesh: Mesh, specs: Tree) -> Tree:
    """Constrains the tree to the specs."""
    return jax.tree.map(lambda x, s: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, s)), tree, specs)


def shaped(tree: Tree, mesh: Mesh, specs: Tree, dtype: str | None = None) -> Tree:
    """The tree's shapes, with shardings."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=NamedSharding(mesh, s)), tree, specs
    )


def build(name: str, task: Task) -> Step:
    """The step of a peer.

    Raises:
      UnfitError: the peer does not support masters.
    """
    return build_peer(peer_named(name, task), task)


def build_peer(peer: Peer, task: Task) -> Step:
    """The step of a peer."""
    if peer.multi_steps and task.masters:
        raise UnfitError("optax.MultiSteps does not support masters")
    parts = _Parts(peer, task)
    mesh = task.mesh
    state = parts.abstract_state()
    params = shaped(parts.params, mesh, parts.at_rest, task.dtype)
    batch = task.model.batch(task.rows)
    batch = shaped(batch, mesh, jax.tree.map(lambda _: P("data"), batch))
    named = lambda tree: jax.tree.map(lambda x: x.sharding, tree)  # noqa: E731
    run = jax.jit(
        parts.step,
        out_shardings=(named(params), named(state), NamedSharding(mesh, P())),
        donate_argnums=(0, 1),
    )
    optimize = jax.jit(parts.optimize, out_shardings=(named(params), named(state)), donate_argnums=(1, 2))
    return Step(
        lower=lambda: run.lower(params, state, batch),
        run=run,
        optimize=optimize,
        params=params,
        state=state,
        batch=batch,
        grads=shaped(parts.params, mesh, parts.cuts if peer.zero else parts.whole, task.dtype),
        init=jax.jit(parts.init, out_shardings=named(state)),
    )


class _Parts:
    """The parts of a peer's step, as pure functions."""

    def __init__(self, peer: Peer, task: Task):
        self.peer, self.task, self.mesh = peer, task, task.mesh
        self.params = models.init(task.model)
        self.cuts = specs_of(self.params, task.mesh.size, peer, task.model.scanned)
        self.whole = jax.tree.map(lambda _: P(), self.params)
        self.at_rest = self.cuts if peer.zero == 3 else self.whole
        self.state_cuts = self.cuts if peer.zero else self.whole
        inner = optimizer()
        every = task.microbatches
        self.tx = optax.MultiSteps(inner, every).gradient_transformation() if peer.multi_steps else inner

    def abstract_state(self) -> Tree:
        """The state's shapes and shardings: the params' shardings for leaves of their shapes."""
        state = jax.eval_shape(self.tx.init, self.params)
        specs = optax.tree.map_params(
            self.tx, lambda _, spec: spec, state, self.state_cuts, transform_non_params=lambda _: P()
        )
        state = shaped(state, self.mesh, specs)
        return (state, shaped(self.params, self.mesh, self.state_cuts)) if self.task.masters else state

    def init(self, params: Tree) -> Tree:
        if not self.task.masters:
            return self.tx.init(params)
        masters = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return self.tx.init(masters), masters

    def step(self, params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree, Tree]:
        """One step."""
        if self.peer.multi_steps:
            return self._step_by_step(params, state, batch)
        value, grads = self._grads(params, batch)
        grads = laid(grads, self.mesh, self.state_cuts)
        norm = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))
        params, state = self.optimize(grads, state, params)
        return params, state, {"loss": value, "grad_norm": norm}

    def optimize(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """The update alone."""
        if self.task.masters:
            inner, kept = state
            grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        else:
            inner, kept = state, laid(params, self.mesh, self.state_cuts)
        updates, inner = self.tx.update(grads, inner, kept)
        if self.peer.over_old and not self.task.masters:
            return optax.apply_updates(params, laid(updates, self.mesh, self.at_rest)), inner
        kept = optax.apply_updates(kept, updates)
        new = laid(jax.tree.map(lambda x: x.astype(self.task.dtype), kept), self.mesh, self.at_rest)
        if self.peer.over_old and self.peer.zero < 3:
            is_finite = jnp.isfinite(optax.tree.norm(grads))
            new = jax.tree.map(lambda x, old: jnp.where(is_finite, x, old), new, params)
        return new, (inner, kept) if self.task.masters else inner

    def _step_by_step(self, params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree, Tree]:
        """`MultiSteps`: an update for each microbatch; the last one changes the params."""

        def one(carry: Tree, part: Tree) -> tuple[Tree, Tree]:
            value, grads = jax.value_and_grad(self._loss)(carry[0], part)
            return self.optimize(grads, carry[1], carry[0]), (value, optax.tree.norm(grads))

        (params, state), (values, norms) = jax.lax.scan(one, (params, state), self._split(batch))
        return params, state, {"loss": jnp.mean(values), "grad_norm": norms[-1]}

    def _grads(self, params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        """The mean loss and its gradient, over all microbatches."""
        if self.task.microbatches == 1:
            return jax.value_and_grad(self._loss)(params, batch)

        def one(sums: Tree, part: Tree) -> tuple[Tree, None]:
            value, grads = jax.value_and_grad(self._loss)(params, part)
            grads = laid(grads, self.mesh, self.state_cuts)
            return jax.tree.map(jnp.add, sums, (value, grads)), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
        start = (jnp.zeros(()), laid(zeros, self.mesh, self.state_cuts))
        sums, _ = jax.lax.scan(one, start, self._split(batch))
        return jax.tree.map(lambda x: x / self.task.microbatches, sums)

    def _split(self, batch: Tree) -> Tree:
        """Adds a leading dim of microbatches; each row stays on its device."""
        num, parts = self.mesh.size, self.task.microbatches

        def split(x: jax.Array) -> jax.Array:
            x = x.reshape(num, parts, -1, *x.shape[1:]).swapaxes(0, 1).reshape(parts, -1, *x.shape[1:])
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(None, "data")))

        return jax.tree.map(split, batch)

    def _loss(self, params: Tree, batch: Tree) -> jax.Array:
        rows = NamedSharding(self.mesh, P("data"))
        hooks = models.Hooks(
            layer=self._at_layer,
            rows=lambda x: jax.lax.with_sharding_constraint(x, rows) if self.peer.constrained else x,
            last=self._at_end,
            prevent_cse=self.peer.prevent_cse,
        )
        return models.loss(self.task.model, params, batch, hooks)

    def _at_layer(self, layer: Tree) -> Tree:
        """A block's params, inside its remat: cast, gathered if sharded, with their gradients sharded at once."""
        cuts = specs_of_layer(layer, self.mesh.size, self.peer)
        layer = models.cast(layer, self.task.model.dtype)
        if self.peer.zero == 3:
            layer = laid(layer, self.mesh, jax.tree.map(lambda _: P(), cuts))
        if self.peer.in_loop and self.peer.zero >= 2:
            layer = _with_laid_grad(self.mesh, cuts)(layer)
        return layer

    def _at_end(self, both: tuple[Tree, jax.Array]) -> tuple[Tree, jax.Array]:
        """Params and activations after the blocks."""
        if not self.peer.early_head:
            return both
        params, x = both
        last, x = _together(({name: params[name] for name in ("norm", "head") if name in params}, x))
        cuts = {name: self.cuts[name] for name in last}
        return params | _with_laid_grad(self.mesh, cuts)(last), x


def specs_of_layer(layer: Tree, num: int, peer: Peer) -> Tree:
    """The specs of one block's leaves, without the dim that counts layers."""
    return specs_of(layer, num, peer, scanned=False)


def _with_laid_grad(mesh: Mesh, specs: Tree) -> Callable[[Tree], Tree]:
    """The identity, whose cotangent is constrained to `specs`."""

    @jax.custom_vjp
    def same(tree: Tree) -> Tree:
        return tree

    def backward(_: None, grads: Tree) -> tuple[Tree]:
        return (laid(grads, mesh, specs),)

    same.defvjp(lambda tree: (tree, None), backward)
    return same


@jax.custom_vjp
def _together(tree: Tree) -> Tree:
    """The identity; in the backward pass, no cotangent of the tree continues before all are computed."""
    return tree


_together.defvjp(lambda tree: (tree, None), lambda _, cotangents: (jax.lax.optimization_barrier(cotangents),))
