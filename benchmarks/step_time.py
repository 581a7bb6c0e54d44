"""Step time of a strategy against the idiomatic `jit` + `NamedSharding` step, alternated in one run.

    python benchmarks/step_time.py --strategy zero2 --pairs 40

Both train the reference model with AdamW on the same simulated devices; the figure to quote is the median of the
paired ratios. Single times on a shared machine mean little.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard
from jaxshard.apps.config.config import ModelConfig
from jaxshard.apps.model.model import LanguageModel


def idiomatic_step(loss, tx, shardings, mesh):
    """What people write: everything placed once, gradients constrained, XLA does the rest."""

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads = jax.lax.with_sharding_constraint(grads, shardings.grads)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, {"loss": value, "grad_norm": optax.tree.norm(grads)}

    out = (shardings.params, shardings.state, NamedSharding(mesh, P()))
    return jax.jit(step, out_shardings=out, donate_argnums=(0, 1))


def timed(step, params, state, batch):
    start = time.perf_counter()
    params, state, metrics = step(params, state, batch)
    jax.block_until_ready((params, state, metrics))
    return time.perf_counter() - start, params, state, metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="zero2", choices=["ddp", "zero1", "zero2", "zero3"])
    parser.add_argument("--pairs", type=int, default=40, help="how many times both steps run")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)

    mesh = jaxshard.make_mesh()
    tx = optax.adamw(3e-4)
    opt = getattr(jaxshard, options.strategy)(tx, mesh)
    model = LanguageModel(ModelConfig(layers=options.layers, width=options.width))
    start = jax.jit(model.init)(jax.random.key(0))
    shardings = opt.shardings(start)
    tokens = np.random.default_rng(0).integers(0, 256, (options.rows, model.config.sequence_length + 1))
    batch = jaxshard.shard_batch({"tokens": tokens.astype(np.int32)}, opt)

    ours = jaxshard.train_step(model.loss, opt, donate=True)
    theirs = idiomatic_step(model.loss, tx, shardings, mesh)
    runs = {name: (step, opt.place(start), opt.init(start)) for name, step in (("ours", ours), ("theirs", theirs))}
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for pair in range(options.pairs + 3):
        for name in sorted(runs, reverse=bool(pair % 2)):
            step, params, state = runs[name]
            seconds, params, state, metrics = timed(step, params, state, batch)
            runs[name] = (step, params, state)
            if pair >= 3:
                times[name].append(seconds)
    difference = max(
        float(jnp.max(jnp.abs(a - b)))
        for a, b in zip(jax.tree.leaves(runs["ours"][1]), jax.tree.leaves(runs["theirs"][1]), strict=True)
    )
    ratios = [a / b for a, b in zip(times["ours"], times["theirs"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    print(f"{options.strategy}, {mesh.size} devices, {sum(x.size for x in jax.tree.leaves(start))} params")
    for name, values in times.items():
        print(f"  {name:6} median {1e3 * statistics.median(values):.1f} ms, fastest {1e3 * min(values):.1f} ms")
    print(f"  ratio ours/theirs: median {median:.3f}, quartiles {low:.3f} to {high:.3f}, {len(ratios)} pairs")
    print(f"  largest difference of a parameter afterwards: {difference:.2e}; last loss {float(metrics['loss']):.4f}")


if __name__ == "__main__":
    main()
