"""LoRA: a small transformer learns English, is frozen, and then learns Python by adapters of low rank (Hu et al. 2021).

    python examples/lora.py

Expect on 8 simulated devices, in 45 s on 2 cores:

    each device, all params trained: params 0.22 MB, grads 0.22 MB, state 0.43 MB
    step 1  loss 5.4686
    step 200  loss 2.4426
    each device, adapters trained: params 0.23 MB, grads 0.02 MB, state 0.03 MB
    one device alone, adapters trained: params 1.87 MB, grads 0.13 MB, state 0.26 MB
    step 1  loss 2.4103
    step 200  loss 1.8007
    the base, on other Python: loss 2.4344
    the base with its adapters merged, on other Python: loss 1.9478
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard

LENGTH, HEADS = 64, 4


def init(rng, width, layers):
    def normal(*shape):
        return rng.normal(0, 0.5 * shape[-2] ** -0.5, shape).astype(np.float32)

    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    blocks = {name: normal(layers, *shape) for name, shape in shapes.items()}
    return {"tokens": normal(256, width), "positions": normal(LENGTH, width), "blocks": blocks}


def adapters(rng, blocks, rank):
    """For each matrix of (layers, D, F) an `a` of (layers, D, rank) and a `b` of (layers, rank, F), which is 0."""

    def pair(w):
        layers, fan_in, fan_out = w.shape
        a = rng.normal(0, fan_in**-0.5, (layers, fan_in, rank)).astype(np.float32)
        return {"a": a, "b": np.zeros((layers, rank, fan_out), np.float32)}

    return jax.tree.map(pair, blocks)


def product(pair):
    return np.asarray(pair["a"]) @ np.asarray(pair["b"])


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


@jax.checkpoint
def layer(x, weights):
    blocks, lora = jaxshard.unshard(weights)  # gathers this layer

    def matmul(x, name):
        y = x @ blocks[name]
        return y + x @ lora[name]["a"] @ lora[name]["b"] if lora else y

    q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in jnp.split(matmul(norm(x), "qkv"), 3, axis=-1))
    x = x + matmul(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape), "out")
    return x + matmul(jax.nn.gelu(matmul(norm(x), "up")), "down"), None


def loss_fn(params, tokens):
    base = params["base"]
    x = base["tokens"][tokens[:, :-1]] + base["positions"]
    x, _ = jax.lax.scan(layer, x, (base["blocks"], params["lora"]))
    logits = norm(x) @ base["tokens"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(params, opt, text, steps, rows):
    params = opt.place(params)
    state = opt.init(params)
    step = jaxshard.train_step(loss_fn, opt)
    for i in range(steps):
        starts = np.random.default_rng([0, i]).integers(len(text) - LENGTH, size=(rows, 1))
        params, state, metrics = step(params, state, jaxshard.shard_batch(text[starts + np.arange(LENGTH + 1)], opt))
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i + 1}  loss {float(metrics['loss']):.4f}")
    return params


def held(opt, params):
    sizes = opt.layout(params).bytes_per_device.items()
    return ", ".join(f"{kind} {size / 1e6:.2f} MB" for kind, size in sizes)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="of the base, and of the adapters")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32, help="in each step, on all devices together")
    args = parser.parse_args()
    english = np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype(np.int32)
    python = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)
    test, python = python[: 256 * (LENGTH + 1)].reshape(256, -1), python[256 * (LENGTH + 1) :]
    rng, mesh = np.random.default_rng(0), jaxshard.make_mesh()

    opt = jaxshard.zero3(optax.adamw(3e-3), mesh)
    params = {"base": init(rng, args.width, args.layers), "lora": {}}
    print("each device, all params trained:", held(opt, params))
    params = train(params, opt, english, args.steps, args.rows)

    base = jax.tree.map(np.asarray, params["base"])
    params = {"base": base, "lora": adapters(rng, base["blocks"], args.rank)}
    tx = optax.adamw(1e-2)
    opt = jaxshard.zero3(tx, mesh, frozen=["^base/"])  # no gradient and no state of what lies in "base"
    print("each device, adapters trained:", held(opt, params))
    print("one device alone, adapters trained:", held(jaxshard.ddp(tx, mesh, frozen=["^base/"]), params))
    params = train(params, opt, python, args.steps, args.rows)
    jax.tree.map(np.testing.assert_array_equal, params["base"], base)  # is what it was, bit for bit

    merged = base | {"blocks": {name: w + product(params["lora"][name]) for name, w in base["blocks"].items()}}
    for name, each in (("the base", base), ("the base with its adapters merged", merged)):
        loss = jax.jit(loss_fn)({"base": each, "lora": {}}, test)
        print(f"{name}, on other Python: loss {float(loss):.4f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # simulates 8 devices where there is no accelerator
    main()
