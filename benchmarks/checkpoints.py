"""What checkpoints cost: the steps that run while one is written, the caller of `save`, and memory.

    python benchmarks/checkpoints.py step --pairs 15 --apart
    python benchmarks/checkpoints.py memory --gigabytes 1.6
    python benchmarks/checkpoints.py syncs --pairs 25

`step` trains the reference model with AdamW on 8 simulated devices and alternates steps during an asynchronous save
with as many without one; quote the medians. Here the devices are threads, and share the processor's cores with those
that write, as no accelerator does; and they lend their memory to `save`, so that the next step must copy what it would
have overwritten. `--apart` is nearer to an accelerator: one core is kept for writing, and what is saved is a copy that
was made before. `memory` saves and restores a state that is cut over two processes, and tells how much more each of
them ever held. `syncs` alternates saves that sync what they write with saves that do not.
"""

import argparse
import ctypes
import gc
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard
from jaxshard.apps.config.config import ModelConfig
from jaxshard.apps.model.model import LanguageModel
from jaxshard.system import files

LEAVES = 16


class Clock:
    """Seconds since it was made: of a clock on the wall, and of this process on all cores."""

    def __init__(self):
        self._start = self._now()

    def _now(self) -> np.ndarray:
        return np.asarray([time.perf_counter(), time.process_time()])

    def read(self) -> np.ndarray:
        return self._now() - self._start


class Training:
    """The reference model; it trains by donated buffers, as trainers do."""

    def __init__(self, options: argparse.Namespace):
        jax.config.update("jax_num_cpu_devices", 8)
        opt = getattr(jaxshard, options.strategy)(optax.adamw(3e-4), jaxshard.make_mesh())
        config = ModelConfig(options.layers, options.width, heads=12, hidden=2048, sequence_length=options.length)
        model = LanguageModel(config)
        start = jax.jit(model.init)(jax.random.key(0))
        self.params, self.state = opt.place(start), opt.init(start)
        tokens = np.random.default_rng(0).integers(0, 256, (8, options.length + 1)).astype(np.int32)
        self.batch = jaxshard.shard_batch({"tokens": tokens}, opt)
        self.step = jaxshard.train_step(model.loss, opt, donate=True)

    @property
    def tree(self):
        return {"params": self.params, "state": self.state}

    def run(self) -> None:
        self.params, self.state, metrics = self.step(self.params, self.state, self.batch)
        jax.block_until_ready((self.params, self.state, metrics))


def keep_apart() -> None:
    """The devices' threads on all cores but the last, and what starts later on that one."""
    last = os.cpu_count() - 1
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), set(range(last)))
    os.sched_setaffinity(0, {last})


def pair(training: Training, checkpoints: Any, number: int, copy: Any) -> dict[str, np.ndarray]:
    """One save with nothing beside it, one with steps until it has ended, and as many steps alone.

    `copy`: saved instead of what is trained.
    """
    found = {}
    clock = Clock()
    jaxshard.digest.digests(training.tree)
    found["digests"] = clock.read()
    clock = Clock()
    checkpoints.save(2 * number, training.tree, blocking=True)
    found["save, blocking"] = clock.read()
    training.run()
    clock = Clock()
    checkpoints.save(2 * number + 1, copy or training.tree)
    found["save returns after"] = clock.read()
    writing, clock, steps = threading.Thread(target=checkpoints.wait), Clock(), 0
    writing.start()
    while writing.is_alive():
        training.run()
        steps += 1
    found["steps during it"] = clock.read()
    training.run()
    clock = Clock()
    for _ in range(steps):
        training.run()
    found["as many alone"] = clock.read()
    print(f"  {number}:", ", ".join(f"{name} {wall:.2f} s" for name, (wall, _) in found.items()), flush=True)
    return found | {"steps": np.asarray([steps, steps])}


def measure_steps(options: argparse.Namespace) -> None:
    training = Training(options)
    for _ in range(3):
        training.run()
    if options.apart:
        keep_apart()
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        jaxshard.checkpoint.Checkpointer(folder, keep_last=1) as checkpoints,
    ):
        copy = jax.block_until_ready(jax.tree.map(jnp.copy, training.tree)) if options.apart else None
        pairs = [pair(training, checkpoints, number, copy) for number in range(options.pairs + 1)][1:]
    numbers = sum(x.size for x in jax.tree.leaves(training.tree))
    print(f"{options.strategy}, 8 devices, {numbers / 1e6:.0f}M numbers in params and state, {options.pairs} pairs")
    for name in pairs[0]:
        wall, cpu = np.median([found[name] for found in pairs], axis=0)
        print(f"  {name:20} {wall:.2f} s, {cpu:.2f} CPU s" if name != "steps" else f"  {name:20} {wall:.0f}")
    tell("digests / save", [found["digests"] / found["save, blocking"] for found in pairs])
    tell("steps during / alone", [found["steps during it"] / found["as many alone"] for found in pairs])


def tell(name: str, ratios: list[np.ndarray]) -> None:
    for what, values in zip(("time", "CPU time"), np.transpose(ratios), strict=True):
        low, median, high = statistics.quantiles(values, n=4)
        print(f"  {name}, {what}: median {median:.3f}, quartiles {low:.3f} to {high:.3f}")


def measure_memory(options: argparse.Namespace) -> None:
    """Starts both processes, and prints what they say."""
    with socket.socket() as s, tempfile.TemporaryDirectory(dir=options.folder) as folder:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
        s.close()
        shared = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, __file__, "process", "--folder", folder, "--gigabytes", str(options.gigabytes)]
        started = [
            subprocess.Popen(command, env={**os.environ, **shared, "JAX_PROCESS_ID": str(i)}, stdout=subprocess.PIPE)
            for i in range(2)
        ]
        for i, process in enumerate(started):
            print(f"process {i}:\n{process.communicate()[0].decode()}", end="")


def hold_memory(options: argparse.Namespace) -> None:
    """One of the processes; half of each array is on its devices."""
    jax.config.update("jax_num_cpu_devices", 4)
    jaxshard.initialize()
    rows = int(options.gigabytes * 1e9 / LEAVES / 4 / 4096) // 64 * 64
    sharding = NamedSharding(jaxshard.make_mesh(), P("data"))
    shape = jax.ShapeDtypeStruct((rows, 4096), jnp.float32, sharding=sharding)
    template = {str(i): shape for i in range(LEAVES)}
    make = jax.jit(lambda key: jax.random.normal(key, shape.shape), out_shardings=sharding)
    print(f"  {LEAVES * rows * 4096 * 4 / 1e9:.2f} GB in all, half of it here")
    with jaxshard.checkpoint.Checkpointer(options.folder) as checkpoints:
        checkpoints.save(0, {"0": jnp.zeros(shape.shape, device=sharding)}, blocking=True)  # compiles, starts threads
        with Peak("made"):
            tree = {name: jax.block_until_ready(make(jax.random.key(int(name)))) for name in template}
        with Peak("digests"):
            jaxshard.digest.digests(tree)
        with Peak("save"):
            checkpoints.save(1, tree)
            checkpoints.wait()
        del tree
        for name, spec in (("restore", P("data")), ("restore, cut otherwise", P(None, "data"))):
            sharding = NamedSharding(sharding.mesh, spec)
            wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in template.items()}
            with Peak(name):
                tree = checkpoints.restore(wanted, 1)[1]
            del tree


class Peak:
    """Prints how much more memory this process held in a block than before, at most and at its end."""

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free is given back
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is now what is held
        self._before = held("VmRSS")

    def __exit__(self, *_: object) -> None:
        most, after = held("VmHWM") - self._before, held("VmRSS") - self._before
        print(f"  {self._name:22} at most {most:5.2f} GB more than before, {after:5.2f} at the end")


def held(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024 / 1e9


def measure_syncs(options: argparse.Namespace) -> None:
    """What syncs add to an asynchronous save: to the loop, by `save` and a `wait` after the end, and until that end."""
    for leaves, num_bytes in ((100, 16_000), (300, 4_000), (20, 1_000_000), (1, 64_000_000)):
        tree = {f"w{n}": jnp.full(num_bytes // 4, float(n)) for n in range(leaves)}
        jax.block_until_ready(tree)
        took: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        checkpointer = jaxshard.checkpoint.Checkpointer
        with tempfile.TemporaryDirectory(dir=options.folder) as folder, checkpointer(folder, keep_last=1) as saves:
            for number in range(2 * options.pairs + 2):
                syncs = number % 4 in (0, 3)
                took[syncs].append(timed_save(saves, number, tree, syncs))
        for part, what in enumerate(("the loop", "until it is reported")):
            pairs = [(a[part], b[part]) for a, b in zip(took[True][1:], took[False][1:], strict=True)]
            medians = [1e3 * statistics.median(times) for times in zip(*pairs, strict=True)]
            ratio = statistics.median(a / b for a, b in pairs)
            times = f"{medians[0]:.0f} ms, without syncs {medians[1]:.0f} ms"
            print(f"{leaves} x {num_bytes} bytes, {what}: {times}, median of the pairs' ratios {ratio:.2f}", flush=True)


def timed_save(saves: Any, step: int, tree: Any, syncs: bool) -> tuple[float, float]:
    """Seconds of the loop, and until the save is reported."""
    sync = files._sync
    if not syncs:
        files._sync = lambda number: None
    try:
        start = time.perf_counter()
        saves.save(step, tree)
        loop = time.perf_counter() - start
        saves._saving[1]._over.wait()
        reported = time.perf_counter()
        saves.wait()
        return loop + time.perf_counter() - reported, reported - start
    finally:
        files._sync = sync


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["step", "memory", "syncs", "process"], help="process: one of memory's two")
    parser.add_argument("--strategy", default="zero2", choices=["ddp", "zero1", "zero2", "zero3"])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--apart", action="store_true", help="the devices and the writing on different cores")
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=64, help="bytes in each of the 8 rows")
    parser.add_argument("--gigabytes", type=float, default=1.6)
    parser.add_argument("--folder", help="where to save; it needs the state's size twice")
    options = parser.parse_args()
    measures = {"step": measure_steps, "memory": measure_memory, "syncs": measure_syncs, "process": hold_memory}
    measures[options.what](options)


if __name__ == "__main__":
    main()
