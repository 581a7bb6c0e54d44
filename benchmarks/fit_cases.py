"""Whether `jaxshard plan --fit` picks the fastest of all candidates that truly run: small models, simulated devices.

    python benchmarks/fit_cases.py [ROUNDS]

For each model, every candidate is compiled, and all take steps in turn; a candidate's time is the median over rounds of
its time over that round's mean, so that what the machine does otherwise falls on all alike. The figures of the chip
"cpu" were fitted to these.
"""

import dataclasses
import statistics
import sys
import time

import jax
import numpy as np

import jaxshard
from jaxshard.apps.config.config import Config, ModelConfig, ShardingConfig, TrainConfig
from jaxshard.apps.trainer import parts
from jaxshard.cli.plan import rows as command

DEVICES = 8
CASES = {
    "many rows, few parameters": Config(
        model=ModelConfig(layers=2, width=128, heads=4, hidden=256, sequence_length=128), train=TrainConfig(rows=64)
    ),
    "few rows, many parameters": Config(
        model=ModelConfig(layers=4, width=512, heads=8, hidden=2048, sequence_length=32), train=TrainConfig(rows=16)
    ),
    "the default model": Config(train=TrainConfig(rows=16)),
    "another": Config(
        model=ModelConfig(layers=4, width=256, heads=4, hidden=1024, sequence_length=64), train=TrainConfig(rows=32)
    ),
}


def to_try(target: jaxshard.plan.Target) -> list[jaxshard.plan.Candidate]:
    """Strategy x mesh, tensor and pipeline of 2 among them."""
    return jaxshard.plan.candidates(target, microbatches=(1,), tensors=(1, 2), pipelines=(1, 2))


def runner(config: Config, candidate: jaxshard.plan.Candidate):
    """A function that takes one step of the candidate, for real."""
    chosen = command.sharded_as(config, candidate)
    mesh = jaxshard.make_mesh(**candidate.sizes)
    model, _, opt, shapes = parts.make_parts(chosen, mesh)
    init = jax.jit(model.init, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))
    params = init(jax.random.key(0))
    held = [params, opt.init(params)]
    tokens = np.random.default_rng(0).integers(0, 256, (config.train.rows, config.model.sequence_length + 1))
    batch = jaxshard.shard_batch({"tokens": tokens.astype(np.int32)}, opt)
    step = parts.make_step(chosen, model, opt)

    def take(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            held[0], held[1], metrics = step(held[0], held[1], batch)
        jax.block_until_ready(metrics["loss"])
        return (time.perf_counter() - start) / count

    take(2)
    return take


def measured(
    config: Config, candidates: list[jaxshard.plan.Candidate], rounds: int
) -> dict[jaxshard.plan.Candidate, float]:
    """Each candidate's seconds per step."""
    runners = {candidate: runner(config, candidate) for candidate in candidates}
    times = {candidate: [] for candidate in candidates}
    for _ in range(rounds):
        for candidate, take in runners.items():
            times[candidate].append(take(3))
    means = [statistics.mean(row) for row in zip(*times.values(), strict=True)]
    scale = statistics.median(means)
    return {
        candidate: scale * statistics.median(t / mean for t, mean in zip(row, means, strict=True))
        for candidate, row in times.items()
    }


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    target = jaxshard.plan.Target(jaxshard.plan.chip("cpu"), DEVICES, jaxshard.plan.chip("cpu").memory_bytes)
    for name, config in CASES.items():
        config = dataclasses.replace(config, sharding=ShardingConfig(stage_microbatches=2))
        found = jaxshard.plan.fit(command.building(config), to_try(target), target)
        ran = measured(config, [row.candidate for row in found.rows], rounds)
        print(f"\n### {name}\n\n| candidate | predicted ms | measured ms |\n|---|---|---|")
        for row in found.rows:
            print(f"| {row.candidate.name} | {row.seconds.total * 1e3:.1f} | {ran[row.candidate] * 1e3:.1f} |")
        fastest = min(ran, key=lambda candidate: ran[candidate])
        lost = ran[found.best.candidate] / ran[fastest] - 1 if found.best else float("nan")
        print(
            f"\npicked {found.best and found.best.candidate.name}; fastest {fastest.name}; lost {lost:.1%}", flush=True
        )


if __name__ == "__main__":
    main()
