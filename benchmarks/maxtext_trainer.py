"""MaxText's trainer on 8 simulated devices with its own optimizer, and with that optimizer sharded by jaxshard.

pip install jaxshard "maxtext[tpu]"; python benchmarks/maxtext_trainer.py
"""

import subprocess
import sys
import tempfile
from importlib.metadata import version

OPTIONS = {
    "run_name": "compared",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "enable_checkpointing": False,
    "dataset_type": "synthetic",
    "dtype": "float32",
    "matmul_precision": "highest",
    "steps": 4,
    "learning_rate": 0.05,
    "warmup_steps_fraction": 0.0,
    "base_emb_dim": 32,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_target_length": 16,
    "per_device_batch_size": 1,
    "ici_data_parallelism": -1,
    "ici_fsdp_parallelism": 1,
    "enable_goodput_recording": False,
}


def trained(strategy, folder):
    """Runs MaxText's own trainer on 8 simulated devices, and saves its final state."""
    import jax
    import numpy as np

    jax.config.update("jax_num_cpu_devices", 8)
    from maxtext.trainers.pre_train import train
    from maxtext.utils import train_utils

    import jaxshard

    plain = train_utils.create_training_optimizer

    def sharded(config, model, mesh=None):
        schedule, tx = plain(config, model, mesh)
        return schedule, jaxshard.zero1(tx, mesh or model.mesh, data_axes="data", min_shard_size=1)

    if strategy == "zero1":
        train_utils.create_training_optimizer = sharded
    options = [f"{name}={value}" for name, value in OPTIONS.items()]
    config, recorder = train.initialize(["train", *options, f"base_output_directory={folder}"])
    state = train.train_loop(config, recorder)
    leaves = [x for x in jax.tree.leaves(state) if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)]
    np.savez(f"{folder}/{strategy}.npz", *map(np.asarray, leaves))
    parts = sum(x.addressable_shards[0].data.nbytes for x in leaves) / sum(x.nbytes for x in leaves)
    print(f"RESULT {strategy}: each device stores {parts:.3f} of params and state", flush=True)


def main():
    """Prints the largest difference, relative to each array's largest element."""
    import numpy as np

    print({name: version(name) for name in ("maxtext", "jax", "flax", "optax")})
    with tempfile.TemporaryDirectory() as folder:
        for strategy in ("plain", "zero1"):
            subprocess.run([sys.executable, __file__, strategy, folder], check=True)
        want, got = (np.load(f"{folder}/{name}.npz") for name in ("plain", "zero1"))
        off = [np.abs(got[x] - want[x]).max() / (np.abs(want[x]).max() + 1e-30) for x in want.files]
        print(f"zero1: {len(off)} arrays, largest difference {max(off):.1e}")


if __name__ == "__main__":
    trained(*sys.argv[1:]) if len(sys.argv) > 1 else main()
