"""What one GPU says: the optimizer's overhead, fused attention, tokens per second, and what was foretold of them.

    python benchmarks/gpu.py --json gpu.json     # whole in 10 minutes
    python benchmarks/gpu.py --toy               # on CPU, in seconds: that the script works

Each case has a process of its own, since JAX tells the peak of a process. A case that fails says why, and the rest
runs.
"""

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxshard
from jaxshard.apps.bench import models, steps
from jaxshard.apps.bench.step import Running, Task, alternated, beside, ours, peak_bytes, timed
from jaxshard.system.about import about

SECONDS = 600  # for all cases
CHIPS = ("h200", "h100", "b200", "a100")
Figures = dict[str, float | str]


def gpt2(toy: bool, attention: Any = None) -> models.Model:
    """GPT-2 124M, whose table is the output layer too; it computes in bfloat16."""
    full = {} if toy else {"width": 768, "hidden": 3072, "heads": 12, "vocabulary": 50304}
    return models.model("decoder", _size(toy), **full, dtype="bfloat16", tied=True, attention=attention)


def llama(toy: bool) -> models.Model:
    """Llama's blocks, 16 x 2048: 1.1 G parameters with table and output layer."""
    return models.model("llama", _size(toy), dtype="bfloat16", attention=None if toy else "cudnn")


def _size(toy: bool) -> str:
    return "toy" if toy else "full"


def task(model: Any, rows: int, masters: bool = False) -> Task:
    """A task for one device."""
    return Task(model, jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",)), rows, masters=masters)


def running(name: str, of: Task) -> Running:
    """A step with its arrays."""
    return Running(steps.build(name, of), of)


# The cases.


def overhead(toy: bool, rounds: int) -> Figures:
    """zero2 on one GPU beside plain optax: the whole step, and the optimizer alone, by turns."""
    of = task(gpt2(toy), 8)
    return dict(timed(running("zero2", of), running("optax", of), rounds))


def attention(toy: bool, rounds: int) -> Figures:
    """The step with cuDNN's fused attention beside the step with XLA's plain one. (On CPU both are plain.)"""
    fused, plain = (task(gpt2(toy, kind), 8) for kind in (None if toy else "cudnn", "xla"))
    pairs = alternated(running("zero2", fused).train, running("zero2", plain).train, rounds)
    return dict(beside(pairs, "step"))


def gpt2_training(toy: bool, rounds: int) -> Figures:
    """GPT-2 124M: tokens per second, MFU, and what was foretold."""
    return trained(task(gpt2(toy, None if toy else "cudnn"), 8 if toy else 32), rounds)


def llama_training(toy: bool, rounds: int) -> Figures:
    """A Llama of 1.1 G bfloat16 parameters with float32 masters."""
    return trained(task(llama(toy), 8, masters=True), rounds)


def host_state(toy: bool, rounds: int) -> Figures:
    """That Llama with its state in the host's memory, judged and not, and on the device."""
    of, found = task(llama(toy), 8, masters=True), Figures()
    options: dict[str, dict[str, Any]] = {"host": {}, "host_not_judged": {"max_skips": None}, "device": {}}
    for name, more in options.items():
        memory = "device" if name == "device" else "host"
        step = ours("zero2", of, state_memory=memory, **more)
        found[f"{name}_seconds"] = seconds_of(Running(step, of), max(rounds // 4, 1))
        if peak := (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"):  # of all so far
            found[f"{name}_peak_bytes"] = peak
    return found


def trained(of: Task, rounds: int) -> Figures:
    """A training's speed, its peak, and both as foretold by the compiler and by the plan."""
    step = ours("zero2", of)
    foretold = peak_bytes(step.lower().compile())
    run = Running(step, of)
    seconds = seconds_of(run, rounds)
    tokens, chip = of.rows * of.model.length, chip_here()
    found: Figures = {
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": flops_per_token(of.model) * tokens / seconds / chip.flops["bfloat16"],
        "chip": chip.name,
        "compiled_peak_bytes": foretold,
    }
    if peak := (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"):
        found |= {"measured_peak_bytes": peak, "measured_over_compiled": peak / foretold}
    return found | planned(of, seconds, chip)


def planned(of: Task, seconds: float, chip: jaxshard.plan.Chip) -> Figures:
    """What the plan foretells, with attention as plain operations, which it can read."""
    plain = dataclasses.replace(of, model=dataclasses.replace(of.model, attention=None))
    step = ours("zero2", plain)
    foretold = jaxshard.plan.predict(step.run, step.params, step.batch)
    roofline = foretold.seconds(chip)
    return {
        "planned_peak_bytes": foretold.peak_bytes,
        "planned_seconds": roofline.total,
        "planned_bound": roofline.bound,
        "clock_over_plan": seconds / roofline.total,
    }


def seconds_of(run: Running, rounds: int) -> float:
    """Seconds of a step, several in a row, as a training loop runs them; the median of three measurements."""
    run.train(), run.train()

    def once() -> float:
        start = time.perf_counter()
        for _ in range(rounds):
            run.params, run.state, metrics = run.step.run(run.params, run.state, run.batch)
        jax.block_until_ready((run.params, metrics))
        return (time.perf_counter() - start) / rounds

    return statistics.median(once() for _ in range(3))


def flops_per_token(model: Any) -> float:
    """6 for each parameter in a product, and the products of attention (Chowdhery et al. 2022, "PaLM", appendix B)."""
    sizes = {name: sum(map(math.prod, leaves_of(tree))) for name, tree in model.shapes().items()}
    in_products = sizes["blocks"] + sizes.get("head", sizes["embed"])
    return 6 * in_products + 12 * model.layers * model.width * model.length


def leaves_of(tree: Any) -> list[tuple[int, ...]]:
    """The shapes in a tree."""
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, tuple))


def chip_here() -> jaxshard.plan.Chip:
    """The chip of the first device, by JAX's name of it; a CPU's figures where there is none."""
    kind = jax.devices()[0].device_kind.lower()
    return jaxshard.plan.chip(next((name for name in CHIPS if name in kind), "cpu"))


CASES: dict[str, Callable[[bool, int], Figures]] = {
    "overhead": overhead,
    "attention": attention,
    "gpt2": gpt2_training,
    "llama": llama_training,
    "host": host_state,
}


# Running them.


def result_of(name: str, toy: bool, rounds: int) -> dict[str, Any]:
    """A case's figures, or why there are none."""
    start = time.perf_counter()
    try:
        figures, note = CASES[name](toy, rounds), ""
    except Exception as error:
        figures, note = {}, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    device = jax.devices()[0].device_kind
    return {"case": name, "device": device, **figures, "note": note, "seconds": time.perf_counter() - start}


def in_a_process(name: str, rounds: int, left: float) -> dict[str, Any]:
    """The same, in a process of its own, within the seconds that are left."""
    command = [sys.executable, __file__, "--case", name, "--rounds", str(rounds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(left, 1), check=False)
    except subprocess.TimeoutExpired:
        return {"case": name, "note": f"not done within the {left:.0f} s that were left"}
    if done.returncode:
        return {"case": name, "note": (done.stderr.strip() or "it ended").splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def has_gpu() -> bool:
    """Whether JAX sees a GPU; asked in another process, since JAX takes most of its memory at once."""
    command = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.split()[-1:] in (["gpu"], ["cuda"], ["rocm"])


def in_words(result: dict[str, Any]) -> str:
    """One line."""
    told = [f"{k} {v:.4g}" if isinstance(v, float | int) else f"{k} {v}" for k, v in result.items() if v != ""]
    return ", ".join(told)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="on CPU, models of a few thousand parameters")
    parser.add_argument("--rounds", type=int, default=20, help="how often each step is timed")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--case", choices=CASES, help="only this one, in this process")
    return parser.parse_args()


def main() -> int:
    """Runs all cases; returns 1 if one has no figures, 2 if there is no GPU."""
    options, start, found = parsed(), time.monotonic(), []
    if options.toy:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_disable_most_optimizations", True)  # compiles in a third of the time
    if options.case:
        print(json.dumps(result_of(options.case, options.toy, options.rounds)))
        return 0
    if not options.toy and not has_gpu():
        print("there is no GPU here: --toy tries the script on CPU", file=sys.stderr)
        return 2
    for name in CASES:
        left = SECONDS - (time.monotonic() - start)
        toy = options.toy and result_of(name, True, min(options.rounds, 3))
        found.append(toy or in_a_process(name, options.rounds, left))
        print(in_words(found[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({**about(), "cases": found}, indent=1) + "\n")
    return 1 if any(result["note"] for result in found) else 0


if __name__ == "__main__":
    sys.exit(main())
