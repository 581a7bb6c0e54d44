"""A process that trains the decoder in JAX: `python -m jaxshard.apps.bench.jax_worker JSON`.

It prints "> ready". Then, for each number on standard input, it runs that many steps and prints "> SECONDS".
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax

import jaxshard
from jaxshard.apps.bench import steps
from jaxshard.apps.bench.step import Running, Task
from jaxshard.apps.zoo.decoders import Decoder


def made(given: dict[str, Any]) -> Running:
    """The step and its arrays, on the devices of all processes."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", given["devices"])
    if given["processes"] > 1:
        jaxshard.initialize(f"127.0.0.1:{given['port']}", given["processes"], given["rank"])
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    task = Task(Decoder(**given["sizes"]), mesh, given["rows"])
    return Running(steps.build(given["kind"], task), task)


def train(running: Running, count: int) -> float:
    """Runs `count` steps; returns their seconds."""
    start = time.perf_counter()
    for _ in range(count):
        running.train()
    return time.perf_counter() - start


def main() -> None:
    """Serves the parent process until it closes standard input."""
    running = made(json.loads(sys.argv[1]))
    train(running, 2)
    print("> ready", flush=True)
    for line in sys.stdin:
        print(">", train(running, int(line)), flush=True)
