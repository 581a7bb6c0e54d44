"""Matrix optimizers beside AdamW, by the compilers of machines that are not here: peak, wire and compile time.

    PYTHONPATH=tests:. python benchmarks/owners.py --machine h100:8
    PYTHONPATH=tests:. python benchmarks/owners.py --machine v5e:2x4 --models unrolled --strategies zero2

The model is that of `jaxshard bench`, 12 layers of width 1024: "decoder" stacks its layers, "unrolled" has each by
itself. Matrices of the layers are updated by the matrix optimizer, all else by AdamW.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import jax
import matrix_optimizers
import optax

import jaxshard
from jaxshard.apps.bench import models

TXS = {"muon": matrix_optimizers.muon, "shampoo": matrix_optimizers.shampoo, "soap": matrix_optimizers.soap}


def optimizer(name: str) -> optax.GradientTransformation:
    """AdamW, or the matrix optimizer for what lies in "blocks"."""
    adamw = optax.adamw(1e-3)
    if name == "adamw":
        return adamw

    def labels(params: Any) -> Any:
        def label(path: Any, leaf: Any) -> str:
            del leaf
            return "matrix" if "blocks" in jax.tree_util.keystr(path) else "other"

        return jax.tree_util.tree_map_with_path(label, params)

    return optax.partition({"matrix": TXS[name](), "other": adamw}, labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--machine", default="h100:8")
    parser.add_argument("--models", default="decoder,unrolled")
    parser.add_argument("--strategies", default="zero2,zero3")
    parser.add_argument("--optimizers", default="adamw,muon")
    given = parser.parse_args()
    machine = jaxshard.aot.machine(given.machine)
    mesh = jaxshard.make_mesh(devices=jaxshard.aot.devices(machine))
    print("model strategy optimizer | peak MB | wire MB | GFLOP | compiled in s")
    for name in given.models.split(","):
        model = models.model(name)
        params, batch = models.init(model), model.batch(16)
        for strategy in given.strategies.split(","):
            for tx in given.optimizers.split(","):
                opt = getattr(jaxshard, strategy)(optimizer(tx), mesh)
                step = jaxshard.train_step(lambda p, b, model=model: models.loss(model, p, b), opt, donate=True)
                start = time.time()
                found = jaxshard.aot.report(step.lower(params, opt.init(params), batch), machine)
                peak, wire = found.peak_bytes / 1e6, found.wire_bytes / 1e6
                print(
                    f"{name} {strategy} {tx} | {peak:.0f} | {wire:.1f} | {(found.flops or 0) / 1e9:.0f} | "
                    f"{time.time() - start:.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    sys.exit(main())
