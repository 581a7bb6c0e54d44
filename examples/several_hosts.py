"""A run on several hosts, with checkpoints: HSDP, one replica on each host. Start the same command on all.

Here, as two processes with 4 simulated devices each, which find each other as docs/multihost.md says:

    export JAX_PLATFORMS=cpu JAX_COORDINATOR_ADDRESS=127.0.0.1:9876 JAX_NUM_PROCESSES=2
    JAX_PROCESS_ID=1 python examples/several_hosts.py --out runs/hosts &
    JAX_PROCESS_ID=0 python examples/several_hosts.py --out runs/hosts

An MLP reads 16 bytes of Python's own help texts and predicts the next. Expect in 30 s on 2 cores:

    each device: params 0.27 MB, grads 0.27 MB, state 0.54 MB
    one device alone: params 1.08 MB, grads 1.08 MB, state 2.16 MB
    step 1  loss 5.5469
    step 200  loss 2.5659

With more `--steps` it goes on from its last checkpoint, on any number of hosts: also on one, without the variables.
"""

import argparse
import os
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard
from jaxshard.checkpoint import Checkpointer
from jaxshard.guards import Preemption, Watchdog

WINDOW = 16


def init(rng, width):
    shapes = {"table": (256, 32), "first": (WINDOW * 32, width), "second": (width, width), "last": (width, 256)}
    return {name: rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def loss_fn(params, batch):
    x = params["table"][batch["x"]].reshape(len(batch["x"]), -1)
    hidden = jnp.tanh(jnp.tanh(x @ params["first"]) @ params["second"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["last"], batch["y"]).mean()


def rows_here(text, step, rows):
    """This process's part of the step's rows: each process draws all, and takes its own."""
    starts = np.random.default_rng([0, step]).integers(len(text) - WINDOW, size=(rows, 1))
    starts = np.split(starts, jax.process_count())[jax.process_index()]
    return {"x": text[starts + np.arange(WINDOW)], "y": text[starts[:, 0] + WINDOW]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="the folder of the checkpoints, which all hosts see")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=256, help="in each step, on all devices together")
    args = parser.parse_args()
    jaxshard.initialize()  # first, before anything asks JAX for devices; a lone process goes on alone
    first = jax.process_index() == 0
    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype(np.int32)

    hosts, tx = jax.process_count(), optax.adamw(1e-3)
    mesh = jaxshard.make_mesh(replica=hosts)
    opt = jaxshard.hsdp(tx, mesh) if hosts > 1 else jaxshard.zero3(tx, mesh)  # a lone host has no replicas
    params = opt.place(init(np.random.default_rng(0), args.width))
    step, i, tree = jaxshard.train_step(loss_fn, opt), 0, {"params": params, "state": opt.init(params)}
    for where, each in (("each device", opt), ("one device alone", jaxshard.ddp(tx, mesh))) if first else ():
        held = each.layout(params).bytes_per_device
        print(f"{where}:", ", ".join(f"{kind} {size / 1e6:.2f} MB" for kind, size in held.items()))

    with Preemption() as preemption, Watchdog(600) as watchdog, Checkpointer(args.out) as checkpoints:
        if checkpoints.steps():  # saved by any number of processes
            i, tree = checkpoints.restore(tree)
        while i < args.steps and not preemption.reached(i):  # SIGTERM or Ctrl-C to one ends all, at the same step
            batch = jaxshard.shard_batch(rows_here(text, i, args.rows), opt)
            params, state, metrics = step(tree["params"], tree["state"], batch)
            i, tree = i + 1, {"params": params, "state": state}
            watchdog.beat()
            if i % 50 == 0:
                checkpoints.save(i, tree)
            if first and (i % 50 == 1 or i == args.steps):
                print(f"step {i}  loss {float(metrics['loss']):.4f}", flush=True)
        checkpoints.save(i, tree)


if __name__ == "__main__":
    # Simulates 8 devices, of all processes together, where there is no accelerator.
    jax.config.update("jax_num_cpu_devices", 8 // int(os.environ.get("JAX_NUM_PROCESSES", "1")))
    main()
