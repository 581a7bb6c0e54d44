"""Tunix's PeftTrainer with a jaxshard optimizer on 8 simulated devices, compared with plain optax on one device.

pip install jaxshard google-tunix; python benchmarks/tunix_trainer.py
"""

from importlib.metadata import version

import jax

jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput  # noqa: E402

import jaxshard  # noqa: E402

LENGTH, TOKENS = 12, 64


class Model(nnx.Module):
    """One layer that averages the tokens so far, with the arguments that the trainer's loss gives."""

    def __init__(self, rngs):
        self.embed, self.up = nnx.Embed(TOKENS, 32, rngs=rngs), nnx.Linear(32, 128, rngs=rngs)
        self.down, self.out = nnx.Linear(128, 32, rngs=rngs), nnx.Linear(32, TOKENS, rngs=rngs)

    def __call__(self, tokens, positions, cache, attention_mask):
        x = self.embed(tokens)
        shares = attention_mask / attention_mask.sum(-1, keepdims=True)
        return self.out(x + self.down(nnx.gelu(self.up(shares @ x)))), cache


def model_input(x):
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH)))[None] * x.input_mask[:, None, :]
    names = {"input_tokens": x.input_tokens, "input_mask": x.input_mask}
    return names | {"positions": jnp.arange(LENGTH)[None], "attention_mask": mask}


def inputs():
    rng = np.random.default_rng(0)
    for _ in range(3):
        mask = (np.arange(LENGTH) < rng.integers(4, LENGTH + 1, (16, 1))).astype("f")
        yield TrainingInput(input_tokens=rng.integers(0, TOKENS, (16, LENGTH)), input_mask=mask)


def trained(strategy=None):
    """Params and optimizer state after three steps."""
    model, batches = Model(nnx.Rngs(0)), list(inputs())
    opt = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    if strategy:
        opt = getattr(jaxshard, strategy)(opt, jaxshard.make_mesh(), min_shard_size=1)
        nnx.update(model, opt.place(nnx.state(model, nnx.Param)))
        batches = [jaxshard.shard_batch(batch, opt) for batch in batches]
    trainer = PeftTrainer(model, opt, TrainingConfig(eval_every_n_steps=100, max_steps=3))
    trainer.with_gen_model_input_fn(model_input).train(batches)
    return nnx.state(model, nnx.Param), nnx.state(trainer.optimizer, nnx.optimizer.OptState)


def main():
    """Prints the largest difference and where params and state lie, or raises an AssertionError."""
    print({name: version(name) for name in ("google-tunix", "jax", "flax", "optax")})
    want = jax.tree.leaves(trained())
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        params, state = trained(strategy)
        got = jax.tree.leaves((params, state))
        for one, other in zip(want, got, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)
        most = max(float(np.abs(np.asarray(a, "f8") - b).max()) for a, b in zip(want, got, strict=True))
        places = [sorted({str(x.sharding.spec) for x in jax.tree.leaves(tree)}) for tree in (params, state)]
        print(f"{strategy}: largest difference {most:.1e}, params {places[0]}, state {places[1]}")


if __name__ == "__main__":
    main()
