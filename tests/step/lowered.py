"""Prints the digest of a few steps' programs, each in a line: `test_one_program.py` compares processes by it."""

import hashlib
import sys
import warnings

import jax
import matrix
import parallel

import jaxshard

SOME = ("adamw", "adafactor", "lamb", "contrib.muon", "adaptive_grad_clip", "partition of muon", "MultiSteps of adamw")


def steps(names):
    """(name, optimizer, loss, params, batch), for meshes of one, two and three axes."""
    three = jaxshard.make_mesh(tensor=2, pipeline=2)
    tree, batch = matrix.params("float32"), matrix.batches(1, "float32")[0]
    del tree["empty"]  # Muon divides by its size
    for name in names:
        tx = matrix.cases()[name].make()
        yield name, jaxshard.zero3(tx, jaxshard.make_mesh(), min_shard_size=8), matrix.loss, tree, batch
        opt = jaxshard.hsdp(tx, jaxshard.make_mesh(replica=2), min_shard_size=8)
        yield f"{name} hsdp", opt, matrix.loss, tree, batch
        opt = jaxshard.hybrid(tx, three, matrix.HYBRID_SPECS, zero=2, min_shard_size=8)
        yield f"{name} hybrid", opt, matrix.hybrid_loss, tree, batch
    for schedule, zero in (("gpipe", 3), ("1f1b", 2), (None, 1)):
        model = parallel.Model(schedule=schedule, num_microbatches=2, tied=zero == 1)
        opt = jaxshard.hybrid(matrix.cases()["adamw"].make(), three, model.specs, zero=zero, min_shard_size=8)
        yield f"{schedule} zero{zero}", opt, model.loss, model.params("float32"), model.batch()


def main():
    warnings.simplefilter("ignore")
    for name, opt, loss, params, batch in steps(sys.argv[1:] or SOME):
        params = opt.place(params)
        step = jaxshard.train_step(loss, opt)
        text = step.lower(params, opt.init(params), jaxshard.shard_batch(batch, opt)).as_text()
        print(f"{name}: {hashlib.sha256(text.encode()).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
