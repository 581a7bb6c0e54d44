"""A small transformer of `jaxshard.tensor`'s blocks and `jaxshard.pipeline`, for any mesh or none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxshard
from jaxshard import tensor


@dataclasses.dataclass(frozen=True)
class Model:
    """`schedule` None: the layers in one scan, without a pipeline; `unshard`: where to unshard params, if anywhere."""

    layers: int = 8
    width: int = 8
    heads: int = 4
    hidden: int = 16
    vocabulary: int = 12
    length: int = 4
    sequence: bool = False
    tied: bool = False
    unshard: bool = False
    schedule: str | None = None
    num_microbatches: int = 1
    virtual: int = 1
    remat: str = "tick"
    dim_of_sequence: int = 1

    def params(self, dtype=np.float64):
        rng = np.random.default_rng(0)

        def normal(*shape):
            return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(dtype)

        def gain(*shape):
            return (1 + 0.1 * rng.normal(size=shape)).astype(dtype)

        n, d, f = self.layers, self.width, self.hidden
        blocks = {"norm1": gain(n, d), "norm2": gain(n, d), "bias": 0.1 * normal(n, d)}
        blocks |= {"qkv": normal(n, d, 3 * d), "out": normal(n, d, d), "up": normal(n, d, f), "down": normal(n, f, d)}
        if self.virtual > 1:
            blocks = jax.tree.map(lambda x: x.reshape(self.virtual, -1, *x.shape[1:]), blocks)
        shared = {"embed": normal(self.vocabulary, d), "norm": gain(d)}
        return {"blocks": blocks, "shared": shared | ({} if self.tied else {"head": normal(d, self.vocabulary)})}

    @property
    def specs(self):
        """Rules for any mesh of `jaxshard.make_mesh`."""
        stage = (*(None,) * (self.virtual > 1), "pipeline" if self.schedule else None)
        columns, rows = P(*stage, None, "tensor"), P(*stage, "tensor")
        rules = [(r"blocks/(qkv|up)$", columns), (r"blocks/(out|down)$", rows), (r"blocks", P(*stage))]
        rules += [] if self.tied else [(r"head$", P(None, "tensor"))]
        return [*rules, (r"embed$", P("tensor"))]

    def batch(self, seed=0, rows=16):
        rng = np.random.default_rng(100 + seed)
        shape = (rows, self.length)
        return {name: rng.integers(0, self.vocabulary, shape).astype(np.int32) for name in ("x", "y")}

    @property
    def dim(self):
        """The dim along which activations are sharded between the blocks."""
        return self.dim_of_sequence if self.sequence else None

    def _asked(self, tree):
        return jaxshard.unshard(tree) if self.unshard else tree

    def layer(self, x, block):
        block = self._asked(block)
        heads = tensor.per_device("heads", self.heads)
        qkv = tensor.column_parallel(_normed(x, block["norm1"]), block["qkv"], sequence=self.dim)
        q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], heads, 3, -1), 3, 0)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*qkv.shape[:2], -1)
        x = x + tensor.row_parallel(y, block["out"], sequence=self.dim) + block["bias"]
        h = jnp.tanh(tensor.column_parallel(_normed(x, block["norm2"]), block["up"], sequence=self.dim))
        return x + tensor.row_parallel(h, block["down"], sequence=self.dim), None

    def stage(self, blocks, x, info):
        return jax.lax.scan(self.layer, x, blocks)[0]

    def first(self, shared, microbatch, info):
        return tensor.vocab_parallel_embedding(microbatch["x"], self._asked(shared["embed"]), sequence=self.dim)

    def last(self, shared, x, microbatch, info):
        head = self._asked(shared["embed"]).T if self.tied else self._asked(shared["head"])
        logits = tensor.column_parallel(_normed(x, self._asked(shared["norm"])), head, sequence=self.dim)
        return jnp.mean(tensor.vocab_parallel_cross_entropy(logits, microbatch["y"]))

    def loss(self, params, batch):
        blocks, shared = params["blocks"], params["shared"]
        if self.schedule is None:
            return self.last(shared, self.stage(blocks, self.first(shared, batch, None), None), batch, None)
        how = {"schedule": self.schedule, "num_microbatches": self.num_microbatches, "virtual": self.virtual}
        return jaxshard.pipeline(self.stage, self.first, self.last, blocks, shared, batch, **how, **self._remat)

    @property
    def _remat(self):
        return {"remat": self.remat} if self.schedule == "gpipe" else {}

    def plain(self):
        """The same on one device: layers in one stack, without a pipeline."""
        return dataclasses.replace(self, schedule=None, virtual=1, sequence=False, unshard=False, num_microbatches=1)

    def stacked(self, tree):
        """Converts a tree like the params to that of `plain()`, with its layers in one stack."""
        if self.virtual == 1:
            return tree
        return tree | {"blocks": jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree["blocks"])}


def _normed(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * gain
