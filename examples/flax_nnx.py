"""A flax.nnx model with ZeRO-3: split into params and the rest, trained by `jaxshard.train_step`.

    python examples/flax_nnx.py

A small transformer predicts the next byte of Python's own help texts. Expect on 8 simulated devices, in 30 s on
2 cores:

    each device: params 0.25 MB, grads 0.25 MB, state 0.50 MB
    one device alone: params 1.88 MB, grads 1.88 MB, state 3.77 MB
    step 1  loss 5.8792
    step 200  loss 2.3347
"""

import argparse
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxshard

LENGTH = 64


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Model(nnx.Module):
    def __init__(self, width, layers, rngs):
        self.tokens, self.positions = nnx.Embed(256, width, rngs=rngs), nnx.Embed(LENGTH, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm, self.out = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32, help="in each step, on all devices together")
    args = parser.parse_args()
    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype(np.int32)
    graph, params, rest = nnx.split(Model(args.width, args.layers, nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, tokens, rest):  # `rest`: the state of dropout, which comes back for the next step
        model = nnx.merge(graph, params, rest, copy=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
        return losses.mean(), nnx.state(model, nnx.Not(nnx.Param))

    mesh, tx = jaxshard.make_mesh(), optax.adamw(1e-3)
    opt = jaxshard.zero3(tx, mesh)  # was: opt = tx
    for where, each in (("each device", opt), ("one device alone", jaxshard.ddp(tx, mesh))):
        held = each.layout(params).bytes_per_device
        print(f"{where}:", ", ".join(f"{kind} {size / 1e6:.2f} MB" for kind, size in held.items()))

    params = opt.place(params)
    state = opt.init(params)
    step = jaxshard.train_step(loss_fn, opt, has_aux=True)
    for i in range(args.steps):
        starts = np.random.default_rng([0, i]).integers(len(text) - LENGTH, size=(args.rows, 1))
        batch = jaxshard.shard_batch(text[starts + np.arange(LENGTH + 1)], opt)
        params, state, metrics = step(params, state, batch, rest)
        rest = optax.tree.where(metrics["skipped"], rest, metrics["aux"])  # a skipped step changes nothing
        if i % 25 == 0 or i == args.steps - 1:
            print(f"step {i + 1}  loss {float(metrics['loss']):.4f}")
    model = nnx.merge(graph, params, rest)
    model.eval()  # turns dropout off; the params stay cut
    logits = nnx.jit(lambda model, tokens: model(tokens))(model, batch[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    print(f"without dropout  loss {losses.mean():.4f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # simulates 8 devices where there is no accelerator
    main()
