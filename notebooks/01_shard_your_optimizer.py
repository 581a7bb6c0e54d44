# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Shard your optimizer
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxshard/jaxshard/blob/main/notebooks/01_shard_your_optimizer.ipynb)
#
# You train with JAX and optax on several devices, and run out of memory. With AdamW in float32 and everything
# replicated, each device stores 16 bytes per parameter: the parameter, its gradient and two moments.
#
# This notebook changes one line, `optimizer = jaxshard.zero2(optimizer, mesh)`, and the call of the training step. It
# then measures the result: the loss stays the same, the memory per device shrinks. The code asserts what the text
# claims.
#
# Eight devices are simulated on the CPU, so the notebook runs anywhere in about a minute. With real devices, leave out
# the two lines of `jax.config.update`; nothing else changes.

# %%
# On Colab: %pip install --quiet jaxshard matplotlib
import functools
import pydoc_data.topics

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxshard
from jaxshard import inspect

# %matplotlib inline
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # before the first computation
N = jax.device_count()
assert N == 8

# %% [markdown]
# ## A model, a loss, a training step
#
# A small transformer predicts the next byte of Python's own help texts. Its layers are stacked and run by `lax.scan`,
# each under `jax.checkpoint`, as is usual when memory is short. It does not use jaxshard.

# %%
WIDTH, LAYERS, HEADS, LENGTH = 128, 4, 4, 32


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attention(q, k, v):
    q, k, v = (y.reshape(*y.shape[:-1], HEADS, WIDTH // HEADS) for y in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(-1, LENGTH, WIDTH)


def layer(x, w):
    x = x + attention(*jnp.split((norm(x) * w["gain"]) @ w["qkv"], 3, axis=-1)) @ w["out"]
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None


def loss_fn(params, batch, layer=layer):
    x = params["embed"][batch[:, :-1]] + params["position"]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = norm(x) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


# %%
shapes = {
    "embed": (256, WIDTH),
    "position": (LENGTH, WIDTH),
    "layers": {
        "gain": (LAYERS, WIDTH),
        "qkv": (LAYERS, WIDTH, 3 * WIDTH),
        "out": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
    },
}
rng = np.random.default_rng(0)


def random_weights(shape):
    return rng.normal(0, 0.5 / shape[-2] ** 0.5, shape).astype(np.float32)


initial = jax.tree.map(random_weights, shapes, is_leaf=lambda x: isinstance(x, tuple))
initial["layers"]["gain"] = np.ones((LAYERS, WIDTH), np.float32)
num_params = sum(x.size for x in jax.tree.leaves(initial))

text = np.frombuffer("".join(pydoc_data.topics.topics.values()).encode(), np.uint8).astype(np.int32)


def batch_at(step, rows=16):
    starts = np.random.default_rng([0, step]).integers(0, len(text) - LENGTH, rows)
    return text[starts[:, None] + np.arange(LENGTH + 1)]


print(f"{num_params:,} parameters, {len(text):,} bytes of text")

# %% [markdown]
# The training step on one device, as in optax's documentation:

# %%
STEPS = 40
optimizer = optax.adamw(1e-3)


@jax.jit
def plain_step(params, state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def train_plain(row_order=1):
    params, losses = jax.tree.map(jnp.asarray, initial), []
    state = optimizer.init(params)
    for i in range(STEPS):
        params, state, loss = plain_step(params, state, batch_at(i)[::row_order])
        losses.append(float(loss))
    return losses


plain_losses = train_plain()
control_losses = train_plain(row_order=-1)  # the same rows in reverse order: the effect of rounding alone

# %% [markdown]
# ## One line
#
# `jaxshard.zero2` wraps the optimizer. `jaxshard.train_step` is the step above for a mesh: it takes the same
# `loss_fn`, written for one device. `place` copies the parameters to the mesh, and `init` creates the state
# already sharded.

# %%
mesh = jaxshard.make_mesh()  # all devices on the axis "data"
opt = jaxshard.zero2(optimizer, mesh)  # <- the line
step = jaxshard.train_step(loss_fn, opt)

params, state = opt.place(initial), opt.init(initial)
sharded_losses = []
for i in range(STEPS):
    params, state, metrics = step(params, state, batch_at(i))
    sharded_losses.append(float(metrics["loss"]))

# %% [markdown]
# The curves agree. The remaining difference is rounding: it is as small as the one between two orders of the same rows
# on one device.

# %%
difference = np.abs(np.subtract(plain_losses, sharded_losses)).max()
control = np.abs(np.subtract(plain_losses, control_losses)).max()
print(f"loss: {plain_losses[0]:.3f} -> {plain_losses[-1]:.3f}")
print(f"largest difference of the losses: {difference:.1e}")
print(f"the same for rows in a different order on one device: {control:.1e}")
assert plain_losses[-1] < plain_losses[0] - 1
assert difference < 1e-4

plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 90})
_, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
axes.plot(plain_losses, color="#f2b134", linewidth=6, label="optax, one device")
axes.plot(sharded_losses, color="#1b3a57", linewidth=1.8, linestyle=(0, (4, 3)), label="zero2, eight devices")
axes.set(xlabel="step", ylabel="loss (nats per byte)", title="The same training")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# The state is the pytree that `optax.adamw` makes, with the same shapes; only the shardings differ. Your code for it
# does not change.

# %%
plain_state = jax.eval_shape(optimizer.init, initial)
assert jax.tree.structure(state) == jax.tree.structure(plain_state)
assert all(
    a.shape == b.shape and a.dtype == b.dtype for a, b in zip(*map(jax.tree.leaves, (state, plain_state)), strict=True)
)

mu = state[0].mu["layers"]["up"]
print(f"mu of layers/up: shape {mu.shape}, on each device {mu.addressable_shards[0].data.shape}, {mu.sharding.spec}")
assert mu.addressable_shards[0].data.size * N == mu.size

# %% [markdown]
# ## Memory per device
#
# Now all four strategies, in a step written by hand: `jaxshard.value_and_grad` replaces `jax.value_and_grad`, the rest
# is as in optax. Use this form if you have your own training step; here it also returns the gradients.


# %%
def run_once(opt):
    def step(params, state, batch):
        _, grads = jaxshard.value_and_grad(loss_fn, opt)(params, batch)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), grads, state

    arguments = opt.place(initial), opt.init(initial), jaxshard.shard_batch(batch_at(0), opt)
    compiled = jax.jit(step).lower(*arguments).compile()
    return compiled, dict(zip(("params", "grads", "state"), compiled(*arguments), strict=True))


def bytes_on(device, tree):
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


strategies = {name: getattr(jaxshard, name)(optimizer, mesh) for name in ("ddp", "zero1", "zero2", "zero3")}
compiled, trees, held = {}, {}, {}
for name, opt in strategies.items():
    compiled[name], trees[name] = run_once(opt)
    on_each = [{kind: bytes_on(d, tree) for kind, tree in trees[name].items()} for d in mesh.devices.flat]
    held[name] = on_each[0]
    assert all(on_device == held[name] for on_device in on_each)  # every device holds the same number of bytes
    assert held[name] == opt.layout(initial).bytes_per_device  # and exactly what the layout predicts

print(f"{'bytes per device':<18}" + "".join(f"{kind:>12}" for kind in held["ddp"]) + f"{'all':>12}")
for name, kinds in held.items():
    print(f"{name:<18}" + "".join(f"{n:>12,}" for n in kinds.values()) + f"{sum(kinds.values()):>12,}")

# %%
COLOURS = {"params": "#1b3a57", "grads": "#e4572e", "state": "#7fb7be"}
MB = 1e6


def stacked_bars(axes, table, colours, unit=MB):
    names, left = list(table), np.zeros(len(table))
    for kind, colour in colours.items():
        widths = np.array([table[name].get(kind, 0) for name in names]) / unit
        axes.barh(names, widths, left=left, color=colour, label=kind, height=0.62)
        left += widths
    for y, total in enumerate(left):
        axes.text(total, y, f" {total:.1f}", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.legend(frameon=False, loc="lower right")


_, axes = plt.subplots(figsize=(7, 2.9), layout="constrained")
stacked_bars(axes, held, COLOURS)
axes.set(xlabel="MB on each device", title="Measured from the arrays' shards")
plt.show()

for name, bytes_per_param in {"ddp": 16, "zero1": 4 + 12 / N, "zero2": 4 + 12 / N, "zero3": 16 / N}.items():
    assert abs(sum(held[name].values()) / num_params / bytes_per_param - 1) < 0.01

# %% [markdown]
# `zero1` and `zero2` look the same here, because in both the optimizer gets 1/8 of the gradients. They differ before
# that: over the microbatches, `zero1` sums full gradients, and `zero2` sums 1/8 of them. The section "Layer by layer"
# measures this.
#
# ## Shards on each device
#
# Each box is an array (for stacked layers, each layer); the filled part is the shard on the device of that column.
# A completely filled box is a replicated array. `gain` is small and stays replicated: sharding leaves below
# `min_shard_size` elements saves nothing.


# %%
def draw_holdings(axes, tree, title):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    colours = plt.get_cmap("turbo")(np.linspace(0.08, 0.92, N))
    for row, (_, x) in enumerate(leaves):
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            column = list(mesh.devices.flat).index(device)
            starts, stops, _ = zip(*(s.indices(size) for s, size in zip(index, x.shape, strict=True)), strict=True)
            assert stops[:-2] == x.shape[:-2]  # the box shows the last two dims, so no other may be sharded
            (y, left), (bottom, right) = (np.divide(edge[-2:], x.shape[-2:]) * 0.84 for edge in (starts, stops))
            axes.add_patch(plt.Rectangle((column, row), 0.84, 0.84, facecolor="#eeeeee"))
            axes.add_patch(plt.Rectangle((column + left, row + y), right - left, bottom - y, color=colours[column]))
    axes.set(xlim=(-0.16, N), ylim=(len(leaves), -0.16), aspect="equal", title=title, xlabel="device")
    axes.set_xticks(np.arange(N) + 0.42, range(N))
    axes.set_yticks(np.arange(len(leaves)) + 0.42, [path[-1].key for path, _ in leaves])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


fig, panels = plt.subplots(1, 3, figsize=(11, 3.9), layout="constrained", sharey=True)
draw_holdings(panels[0], trees["zero2"]["params"], "parameters, zero2")
draw_holdings(panels[1], trees["zero2"]["state"][0].mu, "Adam's mu, zero2")
draw_holdings(panels[2], trees["zero3"]["params"], "parameters, zero3")
plt.show()

# %% [markdown]
# The shards of a leaf are disjoint, and together they are the full array:

# %%
for x in jax.tree.leaves(trees["zero3"]["params"]):
    together, times_held = np.zeros(x.shape, x.dtype), np.zeros(x.shape, int)
    for shard in x.addressable_shards:
        together[shard.index] = shard.data
        times_held[shard.index] += 1
    np.testing.assert_array_equal(together, np.asarray(x))
    assert (times_held == (N if x.sharding.is_fully_replicated else 1)).all()

# %% [markdown]
# `opt.layout` lists the same from shapes alone, before any array is allocated:

# %%
print(strategies["zero3"].layout(jax.eval_shape(lambda: initial)))

# %% [markdown]
# ## What the step sends
#
# `inspect.report` reads the compiled program. Data parallel training all-reduces gradients of $\Psi$ elements, and on
# a ring of $N$ devices each sends $2\frac{N-1}{N}\Psi$. ZeRO separates its two halves: gradients are
# reduce-scattered, and parameters are gathered after the update (`zero3`: before the forward pass). So with one
# microbatch all four strategies send the same.

# %%
formula = 2 * (N - 1) / N * 4 * num_params
sent = {}
for name in strategies:
    found = inspect.collectives(compiled[name])
    sent[name] = {kind: sum(c.wire_bytes for c in found if c.kind == kind) for kind in {c.kind for c in found}}
    ratio = inspect.wire_bytes(compiled[name]) / formula
    print(
        f"{name}: {inspect.wire_bytes(compiled[name]):,.0f} bytes sent per device and step, {ratio:.4f} x the formula"
    )
    assert abs(ratio - 1) < 0.01

print()
print(inspect.report(compiled["zero2"]))

# %%
_, axes = plt.subplots(figsize=(7, 2.9), layout="constrained")
kinds = {"all-reduce": "#8d6a9f", "reduce-scatter": "#e4572e", "all-gather": "#1b3a57"}
stacked_bars(axes, sent, kinds)
axes.axvline(formula / MB, color="black", linestyle=":", linewidth=1.5)
axes.set_xlim(0, 1.12 * formula / MB)
axes.set(xlabel="MB sent by each device in a step", title=r"Read from the compiled step; dotted: $2\frac{N-1}{N}\Psi$")
axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# ## Layer by layer
#
# Between steps `zero3` stores 1/8. But the loss above does not mark where it needs its parameters, so the step gathers
# all of them at its start. `jaxshard.unshard`, at the start of a layer, marks this. Then one layer after the other is
# gathered, again in the backward pass (because of `jax.checkpoint`), and its gradients are reduce-scattered at once.
# The embeddings, which are used without `unshard`, are still gathered at the start.


# %%
def layer_by_layer(x, w):
    return layer(x, jaxshard.unshard(w))


unsharding_loss = functools.partial(loss_fn, layer=layer_by_layer)
np.testing.assert_array_equal(unsharding_loss(initial, batch_at(0)), loss_fn(initial, batch_at(0)))  # alone: identity

# %% [markdown]
# The compiler's `memory_analysis()` of a step of two microbatches:

# %%
MICROBATCHES = 2
reports = {}
for title, strategy, loss in (
    ("zero1", jaxshard.zero1, loss_fn),
    ("zero2 + unshard", jaxshard.zero2, unsharding_loss),
    ("zero3", jaxshard.zero3, loss_fn),
    ("zero3 + unshard", jaxshard.zero3, unsharding_loss),
):
    opt = strategy(optimizer, mesh)
    step = jaxshard.train_step(loss, opt, microbatches=MICROBATCHES, donate=True)
    lowered = step.lower(opt.place(initial), opt.init(initial), batch_at(0))
    reports[title] = inspect.report(lowered.compile())

memory = {name: {"at rest": r.argument_bytes, "scratch": r.temp_bytes} for name, r in reports.items()}
for name, r in reports.items():
    print(f"{name:<16} at rest {r.argument_bytes:>10,}   scratch {r.temp_bytes:>10,}   sent {r.wire_bytes:>12,.0f}")
    assert r.alias_bytes > 0.99 * r.argument_bytes - 4 * batch_at(0).size  # donated: the old state's memory is reused

_, axes = plt.subplots(figsize=(7.4, 2.9), layout="constrained")
stacked_bars(axes, memory, {"at rest": "#7fb7be", "scratch": "#f2b134"})
axes.set(xlabel="MB on each device", title="During the step, by memory_analysis()")
plt.show()

# %% [markdown]
# With `unshard`, all scratch memory together is smaller than the full gradients, which never exist.
#
# The price is traffic. `zero2` reduce-scatters gradients in every microbatch, and gathers once. `zero3` also gathers in
# every microbatch; with `unshard`, each layer twice.

# %%
whole_bytes = 4 * num_params
print(f"full gradients: {whole_bytes:,} bytes")
layers_bytes = 4 * sum(x.size for x in jax.tree.leaves(initial["layers"]))
for name in ("zero2 + unshard", "zero3 + unshard"):
    assert reports[name].temp_bytes < whole_bytes < reports["zero1"].temp_bytes
assert reports["zero3 + unshard"].peak_bytes < 0.5 * reports["zero3"].peak_bytes

part = (N - 1) / N
expected = {
    "zero1": 2 * part * whole_bytes,
    "zero2 + unshard": (MICROBATCHES + 1) * part * whole_bytes,
    "zero3": MICROBATCHES * 2 * part * whole_bytes,
    "zero3 + unshard": MICROBATCHES * part * (2 * whole_bytes + layers_bytes),  # only layers are gathered again
}
for name, formula_bytes in expected.items():
    ratio = reports[name].wire_bytes / formula_bytes
    print(f"{name:<16} sends {ratio:.4f} x its formula")
    assert abs(ratio - 1) < 0.01

# %% [markdown]
# ## Exact, for any optimizer
#
# Some optimizers need more than one element at a time: clipping needs the norm of *all* gradients, LAMB the norm of
# each full parameter. On one device's shard they would run without an error and give wrong results. If each of eight
# devices saw only its own shard, they would clip by these norms:

# %%
grads = trees["zero2"]["grads"]


def norm_on(device):
    shards = [shard.data for x in jax.tree.leaves(grads) for shard in x.addressable_shards if shard.device == device]
    return float(np.sqrt(sum(np.square(shard).sum() for shard in shards)))


per_device = [norm_on(device) for device in mesh.devices.flat]
true_norm = float(optax.tree.norm(jax.device_get(grads)))
print("of its shards, on each device:", *(f"{n:.2f}" for n in per_device))
print(f"of the full gradient: {true_norm:.2f}")
assert max(per_device) < true_norm

# %% [markdown]
# jaxshard runs the optimizer on full logical arrays, and XLA partitions the work. Clipping and LAMB do not depend on
# the devices, and are exact. In float64, rounding cannot hide an error:

# %%
chain = optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(1e-2))


@jax.jit
def plain_chain_step(params, state, batch):
    grads = jax.grad(loss_fn)(params, batch)
    updates, state = chain.update(grads, state, params)
    return optax.apply_updates(params, updates), state, optax.tree.norm(grads)


def relative_difference(a, b):
    return float(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b))


with jax.enable_x64(True):
    initial64 = jax.tree.map(np.float64, initial)
    plain_params = jax.tree.map(jnp.asarray, initial64)
    plain_state = chain.init(plain_params)

    opt = jaxshard.zero3(chain, mesh)
    step = jaxshard.train_step(unsharding_loss, opt, donate=True)
    params, state = opt.place(initial64), opt.init(initial64)
    for i in range(5):
        plain_params, plain_state, plain_norm = plain_chain_step(plain_params, plain_state, batch_at(i))
        params, state, metrics = step(params, state, batch_at(i))
        assert plain_norm > 0.5  # so that there is something to clip
        assert abs(metrics["grad_norm"] / plain_norm - 1) < 1e-12

    largest = max(jax.tree.leaves(jax.tree.map(relative_difference, *jax.device_get((params, plain_params)))))
    moved = max(jax.tree.leaves(jax.tree.map(relative_difference, jax.device_get(plain_params), initial64)))
print(f"in 5 steps a parameter moved by up to {moved:.0%} of its norm")
print(f"largest relative difference to one device, in float64: {largest:.0e}")
assert moved > 0.01
assert largest < 1e-12

# %% [markdown]
# ## Where to go next
#
# * **Which strategy?** `zero1` if parameters and gradients fit on each device, `zero2` if parameters do; `zero3` (the
#   same as `fsdp`) with `unshard` if they do not; `hsdp` to shard over the devices of one host and replicate over
#   hosts, with `make_mesh(replica=...)`.
# * **Larger batches**: `train_step(..., microbatches=m)`. **Padded or packed rows**: `weighted=True`, the exact mean
#   over all tokens. **bfloat16 parameters**: `master_dtype=jnp.float32`.
# * **Held-out loss**: `jaxshard.evaluate(loss_fn, opt)`. **Several hosts**: `jaxshard.initialize()` first, and
#   `jaxshard.shard_batch(rows, opt)` for each host's rows.
# * **Your own model**: `print(step.layout(params, batch))` lists every leaf: how it is sharded, where it is gathered,
#   and the reasons.
# * **A complete training run**: `jaxshard train` in a terminal trains a larger model of this kind; `jaxshard train
#   --help` lists its options.
