"""Models of sequences without attention: two state space models, and a transducer of LSTMs.

Names of arrays end in their dims: B rows, L positions, D width, E inner width, H heads, K features of a head, N states,
C chunks, Q positions of a chunk, T times, U tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.apps.zoo.decoders import normed

Tree = Any
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SSM:
    """A language model of selective state spaces, run by `associative_scan` (Mamba: Gu and Dao 2023)."""

    layers: int = 4
    width: int = 1024
    state: int = 8
    length: int = 512
    vocabulary: int = 16384
    dtype: str = "float32"
    scanned: bool = True
    rows: int = 16

    def shapes(self) -> Tree:
        """The parameters' shapes."""
        blocks = {name: (self.layers, *shape) for name, shape in self.layer_shapes().items()}
        table = (self.vocabulary, self.width)
        return {"embed": table, "blocks": blocks, "norm": (self.width,), "head": table[::-1]}

    def layer_shapes(self) -> dict[str, Shape]:
        """Those of one block."""
        inner = 2 * self.width
        return {
            "norm": (self.width,),
            "up": (self.width, 2 * inner),
            "step1": (self.width, 64),
            "step2": (64, inner),
            "step_bias": (inner,),
            "mixes": (inner, 2 * self.state),
            "decay": (inner, self.state),
            "skip": (inner,),
            "down": (inner, self.width),
        }

    def batch(self, rows: int) -> jax.ShapeDtypeStruct:
        """The shape of a batch of token ids."""
        return jax.ShapeDtypeStruct((rows, self.length + 1), jnp.int32)

    def first(self, params: Tree, batch: jax.Array) -> jax.Array:
        """(B, L, D), the rows of the table."""
        return params["embed"][batch[:, :-1]].astype(self.dtype)

    def block(self, layer: Tree, x: jax.Array) -> jax.Array:
        """A gated state space model."""
        y = normed(x, layer["norm"])
        inputs_BxLxE, gate = jnp.split(y @ layer["up"], 2, -1)
        step_BxLxE = jax.nn.softplus(y @ layer["step1"] @ layer["step2"] + layer["step_bias"].astype(y.dtype))
        write_BxLxN, read_BxLxN = jnp.split(inputs_BxLxE @ layer["mixes"], 2, -1)
        kept = jnp.exp(-step_BxLxE[..., None] * jnp.exp(layer["decay"]))
        added = (step_BxLxE * inputs_BxLxE)[..., None] * write_BxLxN[..., None, :]
        _, states = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (kept, added), axis=1)
        found = jnp.einsum("blen,bln->ble", states, read_BxLxN) + inputs_BxLxE * layer["skip"].astype(y.dtype)
        return x + (found * jax.nn.silu(gate)) @ layer["down"]

    def last(self, params: Tree, x: jax.Array, batch: jax.Array) -> jax.Array:
        """The mean cross-entropy in nats per token."""
        logits = normed(x, params["norm"]) @ params["head"].astype(self.dtype)
        return -jnp.mean(jnp.take_along_axis(_log_chances(logits), batch[:, 1:, None], -1))


@dataclasses.dataclass(frozen=True)
class Mamba2(SSM):
    """The same with one decay for a head, in chunks: products within each, a scan over them (SSD: Dao and Gu 2024).

    Attributes:
      head: the features of a head.
      chunk: the positions of a chunk.
    """

    state: int = 64
    head: int = 64
    chunk: int = 64

    def layer_shapes(self) -> dict[str, Shape]:
        """Those of one block."""
        inner, heads = 2 * self.width, 2 * self.width // self.head
        mixed = inner + 2 * self.state
        return {
            "norm": (self.width,),
            "up": (self.width, inner + mixed + heads),
            "conv": (4, mixed),
            "step_bias": (heads,),
            "decay": (heads,),
            "skip": (heads,),
            "inner_norm": (inner,),
            "down": (inner, self.width),
        }

    def block(self, layer: Tree, x: jax.Array) -> jax.Array:
        """A gated state space model, after a short convolution."""
        rows, length, _ = x.shape
        inner, mixed = 2 * self.width, 2 * self.width + 2 * self.state
        gate, mixes, step = jnp.split(normed(x, layer["norm"]) @ layer["up"], (inner, inner + mixed), -1)
        mixes = jax.nn.silu(_short_convolution(mixes, layer["conv"]))
        inputs, write, read = jnp.split(mixes, (inner, inner + self.state), -1)
        inputs = inputs.reshape(rows, length, -1, self.head)
        step_BxLxH = jax.nn.softplus(step.astype(jnp.float32) + layer["step_bias"])
        decay_BxLxH = -step_BxLxH * jnp.exp(layer["decay"].astype(jnp.float32))
        found = self.mixed(inputs * step_BxLxH[..., None].astype(x.dtype), decay_BxLxH, write, read)
        found += inputs * layer["skip"].astype(x.dtype)[:, None]
        return x + normed(found.reshape(rows, length, -1) * jax.nn.silu(gate), layer["inner_norm"]) @ layer["down"]

    def mixed(self, inputs: jax.Array, decay: jax.Array, write: jax.Array, read: jax.Array) -> jax.Array:
        """The outputs (B, L, H, K): what each position reads of earlier ones, in its chunk and before it."""
        rows, dtype = inputs.shape[0], inputs.dtype
        cut = lambda x: x.reshape(rows, -1, self.chunk, *x.shape[2:])  # noqa: E731
        x_BxCxQxHxK, write_BxCxQxN, read_BxCxQxN = cut(inputs), cut(write), cut(read)
        sums_BxCxQxH = jnp.cumsum(cut(decay), 2)
        gaps = sums_BxCxQxH[:, :, :, None] - sums_BxCxQxH[:, :, None]
        earlier = jnp.tril(jnp.ones((self.chunk, self.chunk), bool))[..., None]
        weights = jnp.exp(jnp.where(earlier, gaps, -jnp.inf)).astype(dtype)
        scores = jnp.einsum("bcqn,bckn->bcqk", read_BxCxQxN, write_BxCxQxN)
        within = jnp.einsum("bcqk,bcqkh,bckhp->bcqhp", scores, weights, x_BxCxQxHxK)
        to_end = jnp.exp(sums_BxCxQxH[:, :, -1:] - sums_BxCxQxH).astype(dtype)
        added = jnp.einsum("bcqn,bcqh,bcqhp->cbhnp", write_BxCxQxN, to_end, x_BxCxQxHxK)
        kept = jnp.moveaxis(jnp.exp(sums_BxCxQxH[:, :, -1]), 1, 0).astype(dtype)

        def next_chunk(state: jax.Array, both: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return state * both[0][..., None, None] + both[1], state

        _, before = jax.lax.scan(next_chunk, jnp.zeros_like(added[0]), (kept, added))
        since = jnp.exp(sums_BxCxQxH).astype(dtype)
        earlier_chunks = jnp.einsum("bcqn,bcqh,cbhnp->bcqhp", read_BxCxQxN, since, before)
        return (within + earlier_chunks).reshape(inputs.shape)


def _short_convolution(x_BxLxE: jax.Array, kernel: jax.Array) -> jax.Array:
    """Each channel's weighted sum of the last few positions."""
    size, count = kernel.shape
    return jax.lax.conv_general_dilated(
        x_BxLxE,
        kernel[:, None],
        (1,),
        [(size - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=count,
    )


def _log_chances(logits: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(logits.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Transducer:
    """An RNN-T (Graves 2012): LSTMs encode speech, one LSTM predicts tokens, and a joint network reads both."""

    layers: int = 5
    width: int = 1024
    joint: int = 512
    features: int = 80
    length: int = 160
    tokens: int = 24
    vocabulary: int = 1024
    dtype: str = "float32"
    scanned: bool = True
    rows: int = 16

    def shapes(self) -> Tree:
        """The parameters' shapes."""
        layer = {
            "inputs": (self.width, 4 * self.width),
            "states": (self.width, 4 * self.width),
            "bias": (4 * self.width,),
        }
        return {
            "frames": (self.features, self.width),
            "blocks": {name: (self.layers, *shape) for name, shape in layer.items()},
            "norm": (self.width,),
            "embed": (self.vocabulary, self.width),
            "predict": layer,
            "join_speech": (self.width, self.joint),
            "join_tokens": (self.width, self.joint),
            "head": (self.joint, self.vocabulary),
        }

    def batch(self, rows: int) -> Tree:
        """The shapes of frames of speech, and of their tokens; token 0 is the blank."""
        speech = jax.ShapeDtypeStruct((rows, self.length, self.features), jnp.float32)
        return {"speech": speech, "tokens": jax.ShapeDtypeStruct((rows, self.tokens), jnp.int32)}

    def first(self, params: Tree, batch: Tree) -> jax.Array:
        """(B, T, D)."""
        return batch["speech"].astype(self.dtype) @ params["frames"].astype(self.dtype)

    def block(self, layer: Tree, x: jax.Array) -> jax.Array:
        """One LSTM of the encoder."""
        return x + _lstm(layer, x)

    def last(self, params: Tree, x: jax.Array, batch: Tree) -> jax.Array:
        """The mean negative log-likelihood of a row's tokens, in nats."""
        use = lambda name: params[name].astype(self.dtype)  # noqa: E731
        before = jnp.pad(batch["tokens"], ((0, 0), (1, 0)))
        layer = jax.tree.map(lambda x: x.astype(self.dtype), params["predict"])
        predicted = _lstm(layer, use("embed")[before]) @ use("join_tokens")
        heard = normed(x, params["norm"]) @ use("join_speech")
        joined_BxTxUxJ = jnp.tanh(heard[:, :, None] + predicted[:, None])
        return jnp.mean(_transducer_loss(_log_chances(joined_BxTxUxJ @ use("head")), batch["tokens"]))


def _lstm(layer: Tree, x_BxTxD: jax.Array) -> jax.Array:
    inputs_TxBxG = jnp.swapaxes(x_BxTxD @ layer["inputs"] + layer["bias"].astype(x_BxTxD.dtype), 0, 1)

    def one(carry: tuple[jax.Array, jax.Array], inputs: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        cell, hidden = carry
        take, keep, give, new = jnp.split(inputs + hidden @ layer["states"], 4, -1)
        cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(take) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(give) * jnp.tanh(cell)
        return (cell, hidden), hidden

    zeros = jnp.zeros((x_BxTxD.shape[0], x_BxTxD.shape[2]), x_BxTxD.dtype)
    _, found = jax.lax.scan(one, (zeros, zeros), inputs_TxBxG)
    return jnp.swapaxes(found, 0, 1)


def _transducer_loss(log_BxTxUxV: jax.Array, tokens_BxU: jax.Array) -> jax.Array:
    """(B,): minus the log of the summed chances of all ways through the lattice, by a scan over times."""
    blank_TxBxU = jnp.swapaxes(log_BxTxUxV[..., 0], 0, 1)
    token = jnp.take_along_axis(log_BxTxUxV[:, :, :-1], tokens_BxU[:, None, :, None], -1)[..., 0]
    sums_TxBxU = jnp.swapaxes(jnp.pad(jnp.cumsum(token, -1), ((0, 0), (0, 0), (1, 0))), 0, 1)

    def next_time(ways: jax.Array, here: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        sums, blank_before = here
        return sums + jax.lax.cumlogsumexp(ways + blank_before - sums, axis=1), None

    ways, _ = jax.lax.scan(next_time, sums_TxBxU[0], (sums_TxBxU[1:], blank_TxBxU[:-1]))
    return -(ways + blank_TxBxU[-1])[:, -1]


_TOY: dict[str, Any] = {"layers": 2, "width": 64, "length": 32}
_SMALL: dict[str, Any] = {"layers": 4, "width": 256, "length": 128, "vocabulary": 512}
_LATTICE: dict[str, Any] = {"joint": 64, "tokens": 8, "features": 16}
MODELS = {
    "ssm": (SSM, _TOY | {"vocabulary": 256}, _SMALL),
    "mamba2": (Mamba2, _TOY | {"vocabulary": 256, "state": 16, "head": 16, "chunk": 8}, _SMALL | {"head": 32}),
    "transducer": (Transducer, _TOY | _LATTICE | {"vocabulary": 64}, _SMALL | _LATTICE),
}
"""By name: the model, and its toy and small sizes."""
