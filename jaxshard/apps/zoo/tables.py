"""Recommenders with many tables, a network of graphs, and a newcomer's MLP.

Names of arrays end in their dims: B rows, F fields, D width, N nodes, E edges.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


@dataclasses.dataclass(frozen=True)
class DLRM:
    """Tables, products of all pairs of their rows, and an MLP (Naumov et al. 2019).

    Attributes:
      plain: neither remat nor `unshard`.
    """

    tables: int = 16
    entries: int = 200_000
    width: int = 64
    inputs: int = 16
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (1024, 512, 256)
    dtype: str = "float32"
    scanned: bool = False
    plain: bool = True
    rows: int = 4096

    def shapes(self) -> Tree:
        """The parameters' shapes."""
        bottom, top = (
            (self.inputs, *self.bottom, self.width),
            (self.width + (self.tables + 1) * self.tables // 2, *self.top),
        )
        return {
            "embed": [(self.entries, self.width)] * self.tables,
            "bottom": [{"w": both} for both in itertools.pairwise(bottom)],
            "blocks": [{"w": both} for both in itertools.pairwise(top)],
            "head": (top[-1], 1),
        }

    def batch(self, rows: int) -> Tree:
        """The shapes of numbers, ids and clicks."""
        return {
            "dense": jax.ShapeDtypeStruct((rows, self.inputs), jnp.float32),
            "ids": jax.ShapeDtypeStruct((rows, self.tables), jnp.int32),
            "clicks": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }

    def first(self, params: Tree, batch: Tree) -> jax.Array:
        """The products of all pairs of fields."""
        x = batch["dense"].astype(self.dtype)
        for layer in params["bottom"]:
            x = self.block(jax.tree.map(lambda w: w.astype(self.dtype), layer), x)
        found = [table[batch["ids"][:, place]].astype(self.dtype) for place, table in enumerate(params["embed"])]
        fields_BxFxD = jnp.stack([x, *found], 1)
        products = jnp.einsum("bid,bjd->bij", fields_BxFxD, fields_BxFxD)
        one, other = jnp.triu_indices(self.tables + 1, 1)
        return jnp.concatenate([x, products[:, one, other]], 1)

    def block(self, layer: Tree, x: jax.Array) -> jax.Array:
        """One layer of an MLP."""
        return jax.nn.relu(x @ layer["w"])

    def last(self, params: Tree, x: jax.Array, batch: Tree) -> jax.Array:
        """The mean cross-entropy of clicks, in nats."""
        return _of_clicks((x @ params["head"].astype(self.dtype))[:, 0], batch["clicks"])


def _of_clicks(logits_B: jax.Array, clicks_B: jax.Array) -> jax.Array:
    logits_B = logits_B.astype(jnp.float32)
    return jnp.mean(jnp.maximum(logits_B, 0) - logits_B * clicks_B + jnp.log1p(jnp.exp(-jnp.abs(logits_B))))


@dataclasses.dataclass(frozen=True)
class CrossNet:
    """Forty tables of four sizes, bags of their rows, and layers that cross all fields (DCN: Wang et al. 2021)."""

    tables: int = 40
    entries: tuple[int, ...] = (200_000, 50_000, 5_000, 500)
    width: int = 32
    bag: int = 4
    inputs: int = 16
    layers: int = 3
    dtype: str = "float32"
    scanned: bool = False
    plain: bool = True
    rows: int = 4096

    def shapes(self) -> Tree:
        """The parameters' shapes."""
        sizes = [self.entries[place % len(self.entries)] for place in range(self.tables)]
        full = (self.tables + 1) * self.width
        return {
            "embed": {f"field{place:02}": (size, self.width) for place, size in enumerate(sizes)},
            "dense": (self.inputs, self.width),
            "blocks": [{"w": (full, full), "bias": (full,)}] * self.layers,
            "deep": (full, 1024),
            "head": (1024, 1),
        }

    def batch(self, rows: int) -> Tree:
        """The shapes of numbers, bags of ids, and clicks."""
        return {
            "dense": jax.ShapeDtypeStruct((rows, self.inputs), jnp.float32),
            "ids": jax.ShapeDtypeStruct((rows, self.tables, self.bag), jnp.int32),
            "clicks": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }

    def first(self, params: Tree, batch: Tree) -> Any:
        """All fields side by side, twice: as they are, and to be crossed."""
        bags = [
            jnp.mean(jnp.take(table, batch["ids"][:, place], axis=0).astype(self.dtype), 1)
            for place, table in enumerate(params["embed"].values())
        ]
        dense = batch["dense"].astype(self.dtype) @ params["dense"].astype(self.dtype)
        x = jnp.concatenate([dense, *bags], -1)
        return x, x

    def block(self, layer: Tree, x: Any) -> Any:
        """One crossing with the fields as they are."""
        start, x = x
        return start, start * (x @ layer["w"] + layer["bias"].astype(x.dtype)) + x

    def last(self, params: Tree, x: Any, batch: Tree) -> jax.Array:
        """The mean cross-entropy of clicks, in nats."""
        inner = jax.nn.relu(x[1] @ params["deep"].astype(self.dtype))
        return _of_clicks((inner @ params["head"].astype(self.dtype))[:, 0], batch["clicks"])


@dataclasses.dataclass(frozen=True)
class GraphNet:
    """Messages along the edges of each row's graph (Gilmer et al. 2017), summed by `segment_sum`."""

    layers: int = 8
    width: int = 1024
    nodes: int = 128
    edges: int = 512
    features: int = 64
    classes: int = 128
    dtype: str = "float32"
    scanned: bool = True
    rows: int = 64

    def shapes(self) -> Tree:
        """The parameters' shapes."""
        two = {"message1": (2 * self.width, self.width), "message2": (self.width, self.width)}
        two |= {"update1": (2 * self.width, self.width), "update2": (self.width, self.width), "norm": (self.width,)}
        return {
            "enter": (self.features, self.width),
            "blocks": {name: (self.layers, *shape) for name, shape in two.items()},
            "norm": (self.width,),
            "head": (self.width, self.classes),
        }

    def batch(self, rows: int) -> Tree:
        """The shapes of nodes, of edges as (from, to), and of graphs' labels."""
        return {
            "nodes": jax.ShapeDtypeStruct((rows, self.nodes, self.features), jnp.float32),
            "edges": jax.ShapeDtypeStruct((rows, self.edges, 2), jnp.int32),
            "labels": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }

    def first(self, params: Tree, batch: Tree) -> Any:
        """(B, N, D), and the edges."""
        return batch["nodes"].astype(self.dtype) @ params["enter"].astype(self.dtype), batch["edges"]

    def block(self, layer: Tree, x: Any) -> Any:
        """A message along each edge, and an update of each node."""
        nodes, edges = x

        def of_graph(nodes_NxD: jax.Array, edges_Ex2: jax.Array) -> jax.Array:
            ends = nodes_NxD[edges_Ex2].reshape(len(edges_Ex2), -1)
            sent = jax.nn.relu(ends @ layer["message1"]) @ layer["message2"]
            got = jax.ops.segment_sum(sent, edges_Ex2[:, 1], num_segments=len(nodes_NxD))
            both = jnp.concatenate([nodes_NxD, got], -1)
            return nodes_NxD + jax.nn.relu(both @ layer["update1"]) @ layer["update2"]

        nodes = jax.vmap(of_graph)(nodes, edges)
        return jax.nn.standardize(nodes.astype(jnp.float32)).astype(nodes.dtype) * layer["norm"].astype(
            nodes.dtype
        ), edges

    def last(self, params: Tree, x: Any, batch: Tree) -> jax.Array:
        """The mean cross-entropy in nats per graph."""
        pooled = jnp.mean(x[0], 1) * params["norm"].astype(self.dtype)
        chances = jax.nn.log_softmax((pooled @ params["head"].astype(self.dtype)).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(chances, batch["labels"][:, None], -1))


@dataclasses.dataclass(frozen=True)
class Newcomer:
    """An MLP as a newcomer writes it: neither remat nor `unshard`."""

    layers: int = 6
    width: int = 4096
    dtype: str = "float32"
    scanned: bool = False
    plain: bool = True
    rows: int = 1024

    def shapes(self) -> Tree:
        """The parameters' shapes."""
        return {"blocks": [{"w": (self.width, self.width), "bias": (self.width,)}] * self.layers}

    def batch(self, rows: int) -> Tree:
        """The shapes of inputs and targets."""
        one = jax.ShapeDtypeStruct((rows, self.width), jnp.float32)
        return {"x": one, "y": one}

    def first(self, params: Tree, batch: Tree) -> jax.Array:
        """The inputs."""
        return batch["x"].astype(self.dtype)

    def block(self, layer: Tree, x: jax.Array) -> jax.Array:
        """One layer."""
        return jnp.tanh(x @ layer["w"] + layer["bias"].astype(x.dtype))

    def last(self, params: Tree, x: jax.Array, batch: Tree) -> jax.Array:
        """The mean squared error."""
        return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)


_SMALL_TOP: dict[str, Any] = {"bottom": (64,), "top": (128, 64)}
MODELS = {
    "dlrm": (
        DLRM,
        {"tables": 3, "entries": 64, "width": 16, "rows": 16} | _SMALL_TOP,
        {"tables": 8, "entries": 8192, "rows": 512} | _SMALL_TOP,
    ),
    "crossnet": (
        CrossNet,
        {"tables": 8, "entries": (64, 32, 16, 20), "width": 16, "rows": 16},
        {"entries": (8192, 2048, 512, 100), "rows": 512},
    ),
    "graph": (
        GraphNet,
        {"layers": 2, "width": 64, "nodes": 16, "edges": 32, "features": 16, "classes": 16, "rows": 16},
        {"layers": 4, "width": 256, "nodes": 64, "edges": 256, "rows": 32},
    ),
    "mlp": (Newcomer, {"layers": 3, "width": 64, "rows": 16}, {"layers": 5, "width": 768, "rows": 256}),
}
"""By name: the model, and its toy and small sizes."""
