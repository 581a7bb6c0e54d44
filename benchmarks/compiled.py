"""What the compilers make of a step: jaxshard's beside those of a jit with shardings, for machines that are not here.

    python benchmarks/compiled.py --machine h100:8 --steps zero2 zero3 gspmd-zero gspmd-fsdp

The TPU or GPU compiler must be installed. Nothing runs. `jaxshard bench` makes tables of the same figures; this is one
line a step, with the compiler's options and its text, for those who work on a step.
"""

import argparse
import json
import time
from pathlib import Path

import jax

import jaxshard
from jaxshard.apps.bench import models, steps
from jaxshard.apps.bench.step import Task, figures


def task_of(options: argparse.Namespace) -> Task:
    """What the steps are to do."""
    sizes = {name: value for name in ("layers", "one_hot") if (value := getattr(options, name)) is not None}
    sizes["dtype"] = "bfloat16" if options.masters or options.cast else "float32"
    name = "unrolled" if options.unrolled and options.model == "decoder" else options.model
    model = models.model(name, options.size, **sizes)
    rows = options.rows or model.rows
    mesh = jax.sharding.Mesh(jaxshard.aot.devices(jaxshard.aot.machine(options.machine)), ("data",))
    return Task(model, mesh, rows * options.microbatches, options.microbatches, options.masters)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--machine", default="h100:8", help="h100:8, v5e:2x4 or any other that compiles")
    parser.add_argument("--model", default="decoder", choices=models.MODELS)
    parser.add_argument("--steps", nargs="+", default=steps.NAMES, choices=steps.NAMES, metavar="STEP")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--masters", action="store_true", help="bfloat16 params with float32 masters")
    parser.add_argument("--cast", action="store_true", help="float32 params, which the loss casts to bfloat16")
    parser.add_argument("--one-hot", action="store_true", default=None, help="one-hot cross-entropy, of decoders")
    parser.add_argument("--unrolled", action="store_true", help="layers in a list, not in a scan")
    parser.add_argument("--size", default="full", choices=("full", "small", "toy"))
    parser.add_argument("--layers", type=int, help="of a model that has them, by default its own")
    parser.add_argument("--rows", type=int, help="of a microbatch, of all devices; by default the model's own")
    parser.add_argument("--options", type=json.loads, default={}, help="compiler options, as JSON")
    parser.add_argument("--text", type=Path, help="write the compiled program of the last step to this file")
    return parser.parse_args()


def main() -> None:
    """Prints a line for each step."""
    options = parsed()
    jax.config.update("jax_platforms", "cpu")  # nothing runs
    task = task_of(options)
    for name in options.steps:
        start = time.perf_counter()
        program = steps.build(name, task).lower()
        traced = time.perf_counter() - start
        compiled = program.compile(compiler_options=options.options or None)
        seconds = time.perf_counter() - start - traced
        print(f"{name:16} {figures(compiled)}; traced in {traced:.1f} s, compiled in {seconds:.1f} s", flush=True)
        if options.text:
            options.text.write_text(compiled.as_text())


if __name__ == "__main__":
    main()
