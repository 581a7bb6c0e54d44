"""Draws what `jaxshard.zero2` does to memory and to training: `python scripts/draw_first_picture.py`.

Left: bytes that each of 8 devices holds of GPT-2 124M and AdamW in float32, from the layouts. Right: the losses of
the program of docs/first_steps.md under plain optax on one device, and under `zero2` on 8 simulated ones. It writes
docs/first_picture.svg.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxshard

PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "first_picture.svg"
COLOURS = {"params": "#1b3a57", "gradients": "#e4572e", "state": "#7fb7be"}
WIDTH, LAYERS, VOCABULARY, POSITIONS = 768, 12, 50304, 1024
SHAPES = {
    "embed": (VOCABULARY, WIDTH),
    "position": (POSITIONS, WIDTH),
    "layers": {
        "qkv": (LAYERS, WIDTH, 3 * WIDTH),
        "out": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
        "norms": (2 * LAYERS, WIDTH),
    },
}


def held(mesh):
    """By strategy: gigabytes on each device of params, of gradients while they are summed, and of state."""
    abstract = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    params = jax.tree.map(abstract, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    found = {}
    for name in ("ddp", "zero1", "zero2", "zero3"):
        layout = getattr(jaxshard, name)(optax.adamw(3e-4), mesh).layout(params).bytes_per_device
        sums = layout["params" if name == "zero1" else "grads"]  # zero1 cuts gradients when their sum is done
        found[name] = {"params": layout["params"], "gradients": sums, "state": layout["state"]}
    return {name: {what: size / 1e9 for what, size in sizes.items()} for name, sizes in found.items()}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)


def losses(mesh):
    """The losses of the same 60 steps: by plain optax on one device, and by `zero2`."""
    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(size=(64, 256)).astype("f") / 8, "w2": rng.normal(size=(256, 8)).astype("f") / 16}
    batches = [{"x": rng.normal(size=(32, 64)).astype("f")} for _ in range(60)]
    target = rng.normal(size=(64, 8)).astype("f") / 8
    batches = [{"x": batch["x"], "y": batch["x"] @ target} for batch in batches]
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    @jax.jit
    def plain_step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state, {"loss": loss}

    opt = jaxshard.zero2(inner, mesh)
    steps = {"optax, one device": (inner, plain_step), "zero2, 8 devices": (opt, jaxshard.train_step(loss_fn, opt))}
    found = {}
    for name, (optimizer, step) in steps.items():
        at = optimizer.place(params) if optimizer is opt else jax.tree.map(jnp.asarray, params)
        state, found[name] = optimizer.init(at), []
        for batch in batches:
            at, state, metrics = step(at, state, batch)
            found[name].append(float(metrics["loss"]))
    return found


def draw_memory(axes, table):
    left = np.zeros(len(table))
    for what, colour in COLOURS.items():
        sizes = np.array([sizes[what] for sizes in table.values()])
        axes.barh(list(table), sizes, left=left, color=colour, label=what, height=0.62)
        left += sizes
    for y, total in enumerate(left):
        axes.text(total, y, f" {total:.2f} GB", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set(xlabel="GB on each device", title="GPT-2 124M, AdamW, 8 devices")
    axes.legend(frameon=False, loc="lower right")


def draw_losses(axes, table):
    (plain, ours), (plain_name, our_name) = table.values(), table
    axes.plot(plain, color="#f2b134", linewidth=6, label=plain_name)
    axes.plot(ours, color="#1b3a57", linewidth=1.8, linestyle=(0, (4, 3)), label=our_name)
    axes.set(xlabel="step", ylabel="loss", title="The same training")
    axes.legend(frameon=False)


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jaxshard.make_mesh()
    found = losses(mesh)
    assert np.allclose(*found.values(), rtol=1e-4), "the curves differ: the picture would not be true"
    plt.rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "1"})
    figure, (memory, training) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    draw_memory(memory, held(mesh))
    draw_losses(training, found)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
