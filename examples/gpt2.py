"""GPT-2 in plain JAX, on token files as nanoGPT and llm.c write them. Every strategy trains the same model.

    python examples/gpt2.py --size toy --rows 16 --steps 300 --rate 3e-3
    python examples/gpt2.py --data train_*.bin --strategy zero1 --rows 512 --microbatches 8 --steps 19000 --bfloat16

The second is for one host's accelerators. With 124M params, 10 steps on 8 rows of 128 tokens go from 10.8641 to 4.4574
under zero2 and zero3, within 2e-6 of plain optax. Expect of the first, on 8 simulated devices, in 25 s on 2 cores:

    each device: params 1.8 MB, grads 0.2 MB, state 0.5 MB
    one device alone: params 1.8 MB, grads 1.8 MB, state 3.5 MB
    step 1  loss 5.5159
    step 300  loss 2.1324
"""

import argparse
import collections
import functools
import time
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard

# GPT-2's vocabulary of 50257 is padded to a multiple of 128; its heads are 64 wide in all sizes.
Size = collections.namedtuple("Size", "layers width vocabulary length", defaults=(50304, 1024))
SIZES = {"124M": Size(12, 768), "350M": Size(24, 1024), "774M": Size(36, 1280), "1558M": Size(48, 1600)}
SIZES["toy"] = Size(2, 128, vocabulary=256, length=64)


def init(key, size, dtype=float):
    """Fresh params, the layers stacked on the first dim."""
    keys, n, d = iter(jax.random.split(key, 6)), size.layers, size.width

    def normal(*shape, std=0.02):
        return std * jax.random.normal(next(keys), shape, dtype)

    def dense(fan_in, fan_out, std=0.02):
        return {"w": normal(n, fan_in, fan_out, std=std), "b": jnp.zeros((n, fan_out), dtype)}

    def norm(*shape):
        return {"gain": jnp.ones(shape, dtype), "bias": jnp.zeros(shape, dtype)}

    small = 0.02 / (2 * n) ** 0.5  # of what is added to the residual stream, 2 n times
    attention = {"norm1": norm(n, d), "qkv": dense(d, 3 * d), "out": dense(d, d, small)}
    mlp = {"norm2": norm(n, d), "up": dense(d, 4 * d), "down": dense(4 * d, d, small)}
    tables = {"wte": normal(size.vocabulary, d), "wpe": normal(size.length, d)}
    return tables | {"blocks": attention | mlp, "norm": norm(d)}


def layer_norm(x, w):
    x = jax.nn.standardize(x.astype(float), epsilon=1e-5)  # `float`: float32
    return (x * w["gain"] + w["bias"]).astype(w["gain"].dtype)


def dense(x, w):
    return x @ w["w"] + w["b"]


@jax.checkpoint
def layer(x, w):
    w = jaxshard.unshard(w)  # here zero3 gathers a layer's params, and zero2 and zero3 scatter its gradients
    qkv = dense(layer_norm(x, w["norm1"]), w["qkv"])
    q, k, v = (y.reshape(*y.shape[:2], -1, 64) for y in jnp.split(qkv, 3, axis=-1))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + dense(attended.reshape(x.shape), w["out"])
    return x + dense(jax.nn.gelu(dense(layer_norm(x, w["norm2"]), w["up"])), w["down"]), None


def loss_fn(params, tokens):
    """The mean loss in nats per token; tokens: (rows, length + 1)."""
    table = jaxshard.unshard(params["wte"])
    x = table[tokens[:, :-1]] + params["wpe"]
    x, _ = jax.lax.scan(layer, x, params["blocks"])
    logits = layer_norm(x, params["norm"]) @ table.T
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(float), tokens[:, 1:]).mean()


def adamw(steps, rate):
    """GPT-2's recipe, as nanoGPT and llm.c have it; matrices and tables decay, biases and gains do not."""
    warmup = max(1, min(700, steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(rate / warmup, rate, warmup, steps + 1, 0.1 * rate)
    decays = functools.partial(jax.tree_util.tree_map_with_path, lambda path, _: path[-1].key in ("w", "wte", "wpe"))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decays))


def read_tokens(path):
    """A token file, mapped and not read: uint16, bare (nanoGPT) or behind a header of 256 int32 (llm.c)."""
    header = np.fromfile(path, "<i4", 256)
    return np.memmap(path, "<u2", "r", offset=1024 if header[0] == 20240520 else 0)


def batch_at(step, files, rows, size, seed=0):
    """Random windows of the files, (rows, length + 1): a pure function of seed and step."""
    ends = np.cumsum([max(0, len(tokens) - size.length) for tokens in files])  # windows of a file and those before it
    if not ends[-1]:
        raise ValueError(f"no file has more than {size.length} tokens: give a longer one")
    batch = np.empty((rows, size.length + 1), np.int32)
    for row, window in enumerate(np.random.default_rng([seed, step]).integers(ends[-1], size=rows)):
        file = np.searchsorted(ends, window, side="right")
        start = len(files[file]) - size.length + window - ends[file]
        batch[row] = files[file][start : start + size.length + 1]
    if batch.max() >= size.vocabulary:
        raise ValueError(f"token {batch.max()} is none of this size's {size.vocabulary}: give another --size")
    return batch


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="124M")
    parser.add_argument("--data", nargs="+", default=[], help="token files; without any, Python's help texts as bytes")
    parser.add_argument("--strategy", choices=["ddp", "zero1", "zero2", "zero3", "hsdp"], default="zero2")
    parser.add_argument("--replicas", type=int, default=1, help="for hsdp: groups of devices, each with all params")
    parser.add_argument("--bfloat16", action="store_true", help="params in bfloat16, float32 masters in the state")
    parser.add_argument("--rows", type=int, default=8, help="in each step, on all devices together")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of the rows, taken one after the other")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=6e-4, help="the highest learning rate")
    args = parser.parse_args(argv)
    size, tx, mesh = SIZES[args.size], adamw(args.steps, args.rate), jaxshard.make_mesh(replica=args.replicas)
    files = [read_tokens(path) for path in args.data] or [np.frombuffer("\n".join(topics.values()).encode(), np.uint8)]
    batch_at(0, files, args.rows, size)  # tells wrong files before anything is compiled

    fresh = functools.partial(init, size=size, dtype=jnp.bfloat16 if args.bfloat16 else float)
    wide = {"master_dtype": jnp.float32, "reduce_dtype": jnp.float32} if args.bfloat16 else {}
    opt = getattr(jaxshard, args.strategy)(tx, mesh, **wide)
    shapes = jax.eval_shape(fresh, jax.random.key(0))
    layout, alone = opt.layout(shapes), jaxshard.ddp(tx, mesh, **wide).layout(shapes)
    print(*str(layout).splitlines()[: 1 + len(layout.params)], sep="\n")  # without the rows of the state
    for where, each in (("each device", layout), ("one device alone", alone)):
        print(f"{where}:", ", ".join(f"{kind} {held / 1e6:,.1f} MB" for kind, held in each.bytes_per_device.items()))

    params = jax.jit(fresh, out_shardings=opt.shardings(shapes).params)(jax.random.key(0))
    state, step, losses = opt.init(params), jaxshard.train_step(loss_fn, opt, microbatches=args.microbatches), []
    for i in range(args.steps):
        batch, start = jaxshard.shard_batch(batch_at(i, files, args.rows, size), opt), time.time()
        params, state, metrics = step(params, state, batch)
        losses.append(float(metrics["loss"]))
        speed = args.rows * size.length / (time.time() - start)
        print(f"step {i + 1}  loss {losses[-1]:.4f}  {speed:,.0f} tokens/s", flush=True)
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # simulates 8 devices where there is no accelerator
    main()
