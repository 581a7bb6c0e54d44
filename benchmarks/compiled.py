"""What the compilers make of a step: jaxshard's beside those of a jit with shardings, for machines that are not here.

    python benchmarks/compiled.py --machine h100:8 --steps zero2 zero3 gspmd-zero gspmd-fsdp

The TPU or GPU compiler must be installed. Nothing runs.
"""

import argparse
import json
import time

import gspmd
import jax
import optax
from hlo_figures import Figures, figures
from models import Transformer

import jaxshard

PEERS = {
    "gspmd-ddp": gspmd.Peer(0),
    "gspmd-zero": gspmd.Peer(2),
    "gspmd-zero-best": gspmd.Peer(2, table=1, in_loop=True, early_head=True),
    "gspmd-fsdp": gspmd.Peer(3),
    "gspmd-fsdp-best": gspmd.Peer(3, table=1, in_loop=True, early_head=True),
}
OURS = ("ddp", "zero1", "zero2", "zero3")


def optimizer() -> optax.GradientTransformation:
    """What most people train with."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def lowered(
    name: str, model: Transformer, machine: jaxshard.aot.Machine, rows: int, microbatches: int, masters: bool
) -> jax.stages.Lowered:
    """The lowered step of that name."""
    mesh = jaxshard.make_mesh(devices=jaxshard.aot.devices(machine))
    if name in PEERS:
        return gspmd.lowered(
            model, optimizer(), jax.sharding.Mesh(mesh.devices.reshape(-1), ("data",)), PEERS[name], rows,
            microbatches=microbatches, masters=masters,
        )  # fmt: skip
    more = {"master_dtype": "float32"} if masters else {}
    opt = getattr(jaxshard, name)(optimizer(), mesh, **more)
    params = model.init("bfloat16" if masters else "float32")
    step = jaxshard.train_step(model.loss, opt, microbatches=microbatches)
    return step.lower(params, opt.init(params), model.batch(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--machine", default="h100:8", help="8 devices: h100:8 or v5e:2x4")
    parser.add_argument("--steps", nargs="+", default=[*OURS, *PEERS], help=f"of {[*OURS, *PEERS]}")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--masters", action="store_true", help="bfloat16 params with float32 masters")
    parser.add_argument("--one-hot", action="store_true", help="one-hot cross-entropy")
    parser.add_argument("--unrolled", action="store_true", help="layers in a list, not in a scan")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=16, help="rows of a microbatch, of all devices")
    parser.add_argument("--options", type=json.loads, default={}, help="compiler options, as JSON")
    parser.add_argument("--text", help="write the compiled program of the last step to this file")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # nothing runs
    model = Transformer(
        layers=options.layers,
        scanned=not options.unrolled,
        one_hot=options.one_hot,
        dtype="bfloat16" if options.masters else "float32",
    )
    machine, m = jaxshard.aot.machine(options.machine), options.microbatches
    for name in options.steps:
        start = time.perf_counter()
        program = lowered(name, model, machine, options.rows * m, m, options.masters)
        traced = time.perf_counter() - start
        compiled = program.compile(compiler_options=options.options or None)
        found: Figures = figures(compiled)
        seconds = time.perf_counter() - start - traced
        print(f"{name:16} {found}; traced in {traced:.1f} s, compiled in {seconds:.1f} s", flush=True)
        if options.text:
            with open(options.text, "w") as file:
                file.write(compiled.as_text())


if __name__ == "__main__":
    main()
