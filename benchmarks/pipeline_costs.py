"""Memory and traffic of pipeline schedules, as the compilers count them; nothing is run.

    python benchmarks/pipeline_costs.py               # by the TPU compiler; needs `pip install libtpu`, and no TPU
    python benchmarks/pipeline_costs.py --remat       # layers recomputed one by one inside the stages, too
    python benchmarks/pipeline_costs.py --platform cpu

The gradients of the reference model (16 layers of width 512, vocabulary 8192, float32) on 4 stages x 2 data devices, an
activation being 4 MiB: temporary and peak MiB on each device by the number M of microbatches, and wire MB by axis; then
ZeRO-2 and 3 inside, where parameters are gathered and gradients scattered once per step, or once per microbatch.

Expect by libtpu 0.0.51, v5e 2x4: see docs/results.md.
"""

import argparse
import dataclasses
import os
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies

import jaxshard
from jaxshard.apps.config.config import ModelConfig
from jaxshard.apps.model.model import LanguageModel, Pipelined

STAGES, DATA, ROWS = 4, 2, 4  # rows of a microbatch on each device
MODEL = ModelConfig(layers=16, width=512, heads=8, hidden=2048, sequence_length=512, vocabulary=8192, mlp="gelu")
SCHEDULES = {
    "1f1b": {},
    "interleaved, v = 2": {"schedule": "interleaved", "virtual": 2},
    "gpipe": {"schedule": "gpipe"},
}


def devices(platform: str) -> Any:
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", STAGES * DATA)
        return jax.devices()
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices


def cost(mesh: Any, config: ModelConfig, num_microbatches: int, zero: int, **how: Any) -> jaxshard.inspect.Report:
    """What one step needs and sends."""
    model = LanguageModel(config, Pipelined(num_microbatches=num_microbatches, **how))
    opt = jaxshard.hybrid(optax.sgd(0.1), mesh, model.specs, zero)
    params = jax.eval_shape(model.init, jax.random.key(0))
    places = opt.shardings(params).params
    params = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), params, places)
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    shape = (ROWS * DATA * num_microbatches, config.sequence_length + 1)
    batch = {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)}
    step = jax.jit(jaxshard.value_and_grad(model.loss, opt))
    return jaxshard.inspect.report(step.lower(params, batch).compile())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=("tpu", "cpu"), default="tpu")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 24, 32])
    parser.add_argument("--remat", action="store_true")
    options = parser.parse_args()
    config = dataclasses.replace(MODEL, remat=options.remat)
    mesh = jaxshard.make_mesh(pipeline=STAGES, data=DATA, devices=np.asarray(devices(options.platform)).tolist())

    def show(name: str, num_microbatches: int, zero: int, **how: Any) -> None:
        found = cost(mesh, config, num_microbatches, zero, **how)
        temp, peak = (num_bytes / 2**20 for num_bytes in (found.temp_bytes or 0, found.peak_bytes or 0))
        wire = sorted(found.wire_bytes_by_axes(mesh).items())
        sent = ", ".join(f"{axes} {moved / 1e6:.1f}" for axes, moved in wire)
        print(f"{name:32} M {num_microbatches:3}  temp {temp:8.1f}  peak {peak:8.1f} MiB  wire MB: {sent}", flush=True)

    for name, how in SCHEDULES.items():
        for num_microbatches in options.microbatches:
            show(name, num_microbatches, 0, **how)
    for zero in (2, 3):
        for gather in ("step", "microbatch"):
            for num_microbatches in options.microbatches[:2]:
                show(f"1f1b, zero {zero}, once per {gather}", num_microbatches, zero, gather=gather)


if __name__ == "__main__":
    main()
