"""A plain MLP, its params in a dict, with ZeRO-2.

    python examples/plain_mlp.py

It learns from generated rows what a random network makes of them. Expect on 8
simulated devices, in 7 s on 2 cores:

    each device: params 1.20 MB, grads 0.15 MB, state 0.31 MB
    one device alone: params 1.20 MB, grads 1.20 MB, state 2.40 MB
    step 1  loss 0.4920
    step 300  loss 0.0220
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard

INPUTS, OUTPUTS = 64, 8


def init(rng, width):
    def dense(fan_in, fan_out):
        w = rng.normal(0, fan_in**-0.5, (fan_in, fan_out)).astype(np.float32)
        return {"w": w, "b": np.zeros(fan_out, np.float32)}

    return {"first": dense(INPUTS, width), "second": dense(width, width), "last": dense(width, OUTPUTS)}


def forward(params, x):
    for name in ("first", "second"):
        x = jnp.tanh(x @ params[name]["w"] + params[name]["b"])
    return x @ params["last"]["w"] + params["last"]["b"]


def loss_fn(params, batch):  # the mean loss of the rows that it is given
    return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=256, help="in each step, on all devices together")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    teacher, params = init(rng, 16), init(rng, args.width)

    mesh = jaxshard.make_mesh()  # all devices on one data axis
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    opt = jaxshard.zero2(tx, mesh)  # was: opt = tx
    for where, each in (("each device", opt), ("one device alone", jaxshard.ddp(tx, mesh))):
        held = each.layout(params).bytes_per_device
        print(f"{where}:", ", ".join(f"{kind} {size / 1e6:.2f} MB" for kind, size in held.items()))

    params = opt.place(params)
    state = opt.init(params)
    step = jaxshard.train_step(loss_fn, opt)
    for i in range(args.steps):
        x = rng.normal(size=(args.rows, INPUTS)).astype(np.float32)
        batch = jaxshard.shard_batch({"x": x, "y": np.asarray(forward(teacher, x))}, opt)
        params, state, metrics = step(params, state, batch)
        if i % 50 == 0 or i == args.steps - 1:
            print(f"step {i + 1}  loss {float(metrics['loss']):.4f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # simulates 8 devices where there is no accelerator
    main()
