"""What the compilers make of the global view, beside the best GSPMD step that we know, for machines that are not here.

    python benchmarks/global_view.py --machine h100:8

The TPU or GPU compiler must be installed. Nothing runs. Three losses: of a network whose BatchNorm takes the
statistics of all rows, of CLIP's two towers, which compares each image with each text, and of a transformer, whose
loss is a mean over rows and which is forced to the global view.
"""

import argparse

import jax
import jax.numpy as jnp

import jaxshard
from jaxshard.apps.bench import gspmd, models
from jaxshard.apps.bench.step import Task, figures, ours
from jaxshard.apps.zoo.vision import ConvNet

BEST = {"zero2": "gspmd-zero-best", "zero3": "gspmd-fsdp-best"}


class BatchNormNet(ConvNet):
    """The convolutional network of the benchmarks; the norms in its blocks are over rows."""

    def normed(self, x, scale):
        """Normalizes each channel over the batch and the image, as `flax.linen.BatchNorm` without `axis_name`."""
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, (0, 1, 2))
        variance = jnp.mean(wide * wide, (0, 1, 2)) - mean * mean
        return ((wide - mean) * jax.lax.rsqrt(variance + 1e-5) * scale).astype(x.dtype)


MODELS = {"batchnorm": BatchNormNet, "clip": models.MODELS["clip"], "decoder": models.MODELS["decoder"]}


def main():
    """Prints a line for each step and two ratios for each strategy."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--machine", default="h100:8")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--strategies", nargs="+", default=[*BEST], choices=BEST)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--masters", action="store_true", help="bfloat16 params with float32 masters")
    parser.add_argument("--layers", type=int, help="of the transformers")
    parser.add_argument("--rows", type=int, default=64, help="rows of a microbatch, of all devices")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # nothing runs
    mesh = jax.sharding.Mesh(jaxshard.aot.devices(jaxshard.aot.machine(options.machine)), ("data",))
    for name in options.models:
        sizes = {"layers": options.layers} if options.layers and name != "batchnorm" else {}
        model = MODELS[name](dtype="bfloat16" if options.masters else "float32", **sizes)
        task = Task(model, mesh, options.rows * options.microbatches, options.microbatches, options.masters)
        for strategy in options.strategies:
            own = figures(ours(strategy, task, loss_view="global").lower().compile())
            best = figures(gspmd.build(BEST[strategy], task).lower().compile())
            peak, wire = own.peak_bytes / best.peak_bytes, own.wire_bytes / best.wire_bytes
            print(f"{name} {strategy}: peak {peak:.3f}, wire {wire:.3f}\n  {own}\n  {best}", flush=True)


if __name__ == "__main__":
    main()
