"""An equinox model with HSDP: 2 replicas, and within each its params, gradients and state are cut.

    python examples/equinox_model.py

A recurrent network (GRU) predicts the next byte of Python's own help texts. Expect on 8 simulated devices, in
17 s on 2 cores:

    each device: params 0.17 MB, grads 0.17 MB, state 0.33 MB
    one device alone: params 0.66 MB, grads 0.66 MB, state 1.32 MB
    step 1  loss 5.5790
    step 200  loss 1.6941
"""

import argparse
from pydoc_data.topics import topics

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard

LENGTH = 48


class Model(eqx.Module):
    table: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __init__(self, width, key):
        one, two, three = jax.random.split(key, 3)
        self.table = eqx.nn.Embedding(256, width, key=one)
        self.cell = eqx.nn.GRUCell(width, width, key=two)
        self.out = eqx.nn.Linear(width, 256, key=three)

    def __call__(self, tokens):  # of one row, as equinox has it
        def read(hidden, x):
            hidden = self.cell(x, hidden)
            return hidden, hidden

        _, hidden = jax.lax.scan(read, jnp.zeros(self.cell.hidden_size), jax.vmap(self.table)(tokens))
        return jax.vmap(self.out)(hidden)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64, help="in each step, on all devices together")
    args = parser.parse_args()
    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype(np.int32)
    model = Model(args.width, jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)  # the arrays that are trained, and all else

    def loss_fn(params, tokens):
        logits = jax.vmap(eqx.combine(params, static))(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    mesh, tx = jaxshard.make_mesh(replica=2), optax.adamw(3e-3)
    opt = jaxshard.hsdp(tx, mesh)  # was: opt = tx
    for where, each in (("each device", opt), ("one device alone", jaxshard.ddp(tx, mesh))):
        held = each.layout(params).bytes_per_device
        print(f"{where}:", ", ".join(f"{kind} {size / 1e6:.2f} MB" for kind, size in held.items()))

    params = opt.place(params)
    state = opt.init(params)
    step = jaxshard.train_step(loss_fn, opt)
    for i in range(args.steps):
        starts = np.random.default_rng([0, i]).integers(len(text) - LENGTH, size=(args.rows, 1))
        params, state, metrics = step(params, state, jaxshard.shard_batch(text[starts + np.arange(LENGTH + 1)], opt))
        if i % 25 == 0 or i == args.steps - 1:
            print(f"step {i + 1}  loss {float(metrics['loss']):.4f}")
    eqx.combine(params, static)  # the trained model


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # simulates 8 devices where there is no accelerator
    main()
