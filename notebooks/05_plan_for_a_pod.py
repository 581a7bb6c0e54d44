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
# # Plan for a pod
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxshard/jaxshard/blob/main/notebooks/05_plan_for_a_pod.ipynb)
#
# You want to train a model of 8 billion parameters on 512 chips, and have a laptop. This notebook predicts each
# strategy's memory, traffic and time there, before you rent anything. Then the TPU's own compiler compiles a step for
# 512 chips, and its figures are compared with the plan's.
#
# The notebook takes about a minute, most of it in that compiler. It allocates no array and needs no accelerator.

# %%
# On Colab: %pip install --quiet "jaxshard[aot-tpu]" matplotlib
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from IPython.display import Image

import jaxshard
from jaxshard import aot, inspect, plan

# %matplotlib inline
jax.config.update("jax_platforms", "cpu")  # so that JAX looks for no accelerator
plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 90})
N = 512

# %% [markdown]
# ## A model like Llama
#
# The shapes are those of Llama 3 8B: RMS norms, rotary positions, queries that share keys and values, a gated MLP. The
# layers are stacked and scanned, each recomputed in the backward pass. `unshard` marks where a layer needs its
# full parameters.

# %%
LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, VOCABULARY = 32, 4096, 14_336, 32, 8, 128_256
FEATURES = WIDTH // HEADS  # of each head


def norm(x, gain):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(x.dtype) * gain


def rotated(x):
    places, frequencies = jnp.arange(x.shape[1])[:, None, None], 5e5 ** -jnp.linspace(0, 1, FEATURES // 2, False)
    sin, cos = (wave(places * frequencies).astype(x.dtype) for wave in (jnp.sin, jnp.cos))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def layer(x, w):
    w = jaxshard.unshard(w)
    qkv = (norm(x, w["gain_1"]) @ w["qkv"]).reshape(*x.shape[:2], -1, FEATURES)
    q, k, v = jnp.split(qkv, [HEADS, HEADS + KV_HEADS], axis=2)
    attended = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    x += attended.reshape(x.shape) @ w["out"]
    gate, up = jnp.split(norm(x, w["gain_2"]) @ w["gate_up"], 2, axis=-1)
    return x + (jax.nn.silu(gate) * up) @ w["down"], None


def loss_fn(params, tokens):
    x = params["embedding"][tokens[:, :-1]]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = (norm(x, params["gain"]) @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# %% [markdown]
# A plan needs shapes only. A step reads 1024 rows of 4096 tokens, two rows for each chip.

# %%
LENGTH, ROWS = 4096, 1024


def half(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


params = {
    "embedding": half(VOCABULARY, WIDTH),
    "layers": {
        "gain_1": half(LAYERS, WIDTH),
        "qkv": half(LAYERS, WIDTH, (HEADS + 2 * KV_HEADS) * FEATURES),
        "out": half(LAYERS, WIDTH, WIDTH),
        "gain_2": half(LAYERS, WIDTH),
        "gate_up": half(LAYERS, WIDTH, 2 * HIDDEN),
        "down": half(LAYERS, HIDDEN, WIDTH),
    },
    "gain": half(WIDTH),
    "head": half(WIDTH, VOCABULARY),
}
batch = jax.ShapeDtypeStruct((ROWS, LENGTH + 1), jnp.int32)
num_params = sum(x.size for x in jax.tree.leaves(params))
print(f"{num_params / 1e9:.2f} billion parameters, {ROWS * LENGTH / 1e6:.1f} million tokens in each step")
assert num_params == 8_030_261_248

# %% [markdown]
# The parameters are bfloat16, and AdamW keeps float32 masters and two moments: 14 bytes for each parameter. One device
# would need 112 GB for these alone, and 32 GB more for gradients, which are summed in float32.

# %%
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
precision = {"master_dtype": jnp.float32, "reduce_dtype": jnp.float32}

# %% [markdown]
# ## A mesh of 512 devices that do not exist
#
# An abstract mesh has axes and a kind of chip, and no devices. A strategy takes it like any other. Here `place` and
# `init` return shapes with shardings.

# %%
mesh = jaxshard.mesh.abstract_mesh(N, platform="gpu", device_kind="h100")
opt = jaxshard.zero3(optimizer, mesh, **precision)
placed, state = opt.place(params), opt.init(params)

print(inspect.picture({name: placed["layers"][name] for name in ("gain_1", "qkv", "down")}, width=110))
held = opt.layout(params).bytes_per_device
print(f"\non each device: {held['params']:,} bytes of parameters, {held['state']:,} of state")

assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((placed, state)))
assert abs((held["params"] + held["state"]) * N / (14 * num_params) - 1) < 0.01

# %% [markdown]
# ## All strategies, on two machines
#
# `plan.compare` traces a step of each strategy, reads the traced program, and adds up what one device holds, sends and
# computes. The machines are 64 nodes of 8 H100, and a TPU v5p of 8 x 8 x 8 chips. Nodes are joined by a network that is
# 9 times slower than the links inside. There, `hsdp` is compared too: it shards over the GPUs of a node and replicates
# over nodes.

# %%
build = plan.building(loss_fn, optimizer, params, batch, **precision)
targets = {
    "h100": plan.Target(plan.chip("h100"), N, plan.chip("h100").memory_bytes),
    "v5p": plan.Target(plan.chip("v5p"), N, plan.chip("v5p").memory_bytes, torus=(8, 8, 8)),
}
rows = {name: plan.compare(build, plan.side_by_side(target), target) for name, target in targets.items()}

for name, compared in rows.items():
    print(f"{N} x {name}{'peak, GB':>60}{'sent, GB':>10}{'least time, s':>15}")
    for row in compared:
        figures = f"{row.peak_bytes / 1e9:>10.1f}{row.prediction.wire_bytes / 1e9:>10.1f}{row.seconds.total:>15.2f}"
        print(f"{row.candidate.name:<60}{figures}{'' if row.fits else '   too large'}")
    print()

assert [row.candidate.name for row in rows["h100"] + rows["v5p"] if not row.fits] == ["ddp", "ddp"]

# %% [markdown]
# ## Memory by part
#
# jaxshard draws these figures. Under `zero1` and `zero2` each device stores 1/512 of the state, and all parameters.
# Under `zero3` it stores 1/512 of the parameters too. Most of the rest are activations of two rows, whose logits alone
# take 4.2 GB in float32.


# %%
def show_plan(name):
    with tempfile.TemporaryDirectory() as folder:
        plan.draw(rows[name], picture := Path(folder) / "plan.png", title="Llama 3 8B, 1024 rows of 4096 tokens")
        return Image(picture.read_bytes(), width=900)


assert abs(4 * ROWS // N * LENGTH * VOCABULARY / 1e9 - 4.2) < 0.1
show_plan("h100")

# %%
show_plan("v5p")

# %% [markdown]
# ## Time by part
#
# The predicted time of a step is a roofline: matrix products at the chip's peak, all else at the speed of its memory,
# and traffic at the speed of its links, with nothing overlapped. It ranks strategies; a real step takes longer.

# %%
TIMES = {"products": "#1b3a57", "memory": "#7fb7be", "links": "#e4572e", "waits": "#f2b134"}


def draw_times(axes, names, seconds):
    left = np.zeros(len(names))
    for part, colour in TIMES.items():
        widths = np.array([getattr(each, part) for each in seconds])
        axes.barh(names, widths, 0.62, left, color=colour, label=part)
        left += widths
    for y, total in enumerate(left):
        axes.text(total, y, f" {total:.2f}", va="center")
    axes.set_xlim(0, 1.12 * left.max())
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


fig, panels = plt.subplots(
    2, 1, figsize=(8.5, 4.6), layout="constrained", sharex=True, height_ratios=[len(rows[name]) for name in rows]
)
for axes, (name, compared) in zip(panels, rows.items(), strict=True):
    names = [row.candidate.name.replace(f"{N // 8} x replica, 8 x data", "8 x 64") for row in compared]
    draw_times(axes, names, [row.seconds for row in compared])
    axes.set_title(f"{N} x {name}", loc="left")
panels[0].set_xlim(0, 3)
panels[1].get_legend().remove()
panels[1].set_xlabel("seconds per step, at the least")
plt.show()

# %% [markdown]
# On H100, the path of the bytes decides, not their number. `hsdp` sends about as much as `zero3`, but nearly all of it
# inside a node. On v5p the links hardly matter.

# %%
h100, v5p = ({row.candidate.strategy: row for row in reversed(rows[name])} for name in ("h100", "v5p"))
for strategy in ("zero3", "hsdp"):
    sent = h100[strategy].prediction.costs.wire_bytes_by_axes()
    along = ", ".join(f"{size / 1e9:.1f} GB along {axes}" for axes, size in sent.items() if size > 1e8)
    print(f"{strategy}: {along}; {h100[strategy].seconds.links:.2f} s on links")

assert 0.9 < h100["hsdp"].prediction.wire_bytes / h100["zero3"].prediction.wire_bytes < 1.1
assert h100["hsdp"].seconds.links < 0.3 * h100["zero3"].seconds.links
assert max(row.seconds.links / row.seconds.total for row in rows["v5p"]) < 0.15

# %% [markdown]
# `memory` takes long on both. A large part of it is attention by plain operations, which write a weight for each pair
# of positions. So plan rows of different lengths, with the same number of tokens in each step:

# %%
lengths, by_length = (1024, 2048, 4096, 8192), []
for length in lengths:
    tokens = jax.ShapeDtypeStruct((ROWS * LENGTH // length, length + 1), jnp.int32)
    of_length = plan.building(loss_fn, optimizer, params, tokens, **precision)
    (row,) = plan.compare(of_length, [v5p["zero3"].candidate], targets["v5p"])
    by_length.append(row.seconds)

fig, axes = plt.subplots(figsize=(8.5, 2.6), layout="constrained")
draw_times(axes, [f"rows of {length}" for length in lengths], by_length)
axes.set(xlabel="seconds per step, at the least", title=f"zero3 on {N} x v5p, {ROWS * LENGTH / 1e6:.1f} million tokens")
plt.show()

memory = [seconds.memory for seconds in by_length]
assert 1.8 < (memory[3] - memory[2]) / (memory[2] - memory[1]) < 2.2  # twice the length, twice the weights per token
share = {length: seconds.memory / seconds.total for length, seconds in zip(lengths, by_length, strict=True)}
print("of the least time, memory takes", ", ".join(f"{part:.0%} at {length}" for length, part in share.items()))
assert share[8192] > 1.5 * share[1024]

# %% [markdown]
# The longer the rows, the more a kernel saves that keeps these weights on the chip. The reference model of `jaxshard
# train` has one, and `jaxshard plan --model.sequence-length 8192` shows what it saves.
#
# ## The largest batch
#
# `plan.AnyRows` predicts any number of rows from one trace, and `plan.largest_batch` finds the most that fit.

# %%
fig, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
most = {}
for name, row, colour in (("h100", h100["hsdp"], "#e4572e"), ("v5p", v5p["zero3"], "#1b3a57")):
    target = targets[name]
    any_rows = plan.AnyRows(*build(row.candidate, row.candidate.mesh(target)))
    most[name] = plan.largest_batch(any_rows, target)
    counts = np.arange(1, most[name] // N + 3)
    peaks = [any_rows.at(int(count) * N).peak_bytes / 1e9 for count in counts]
    axes.plot(counts, peaks, "o-", color=colour, markersize=4, label=f"{row.candidate.strategy} on {name}")
    axes.axhline(target.memory_bytes / 1e9, color=colour, linestyle=":")
    axes.text(0.6, target.memory_bytes / 1e9 + 1.5, f"memory of {name}", color=colour, fontsize=9)
    print(f"{row.candidate.name} on {name}: at most {most[name]:,} rows, {most[name] // N} on each device")
    assert any_rows.at(most[name]).peak_bytes <= target.memory_bytes < any_rows.at(most[name] + N).peak_bytes
    assert any_rows.at(ROWS).peak_bytes == row.peak_bytes  # as the trace of just so many rows foretold
axes.set(xlabel="rows on each device", ylabel="peak, GB", ylim=(0, None))
axes.legend(frameon=False, loc="lower right")
plt.show()

# %% [markdown]
# ## Search
#
# `plan.fit` ranks candidates: here each strategy with one microbatch and with two. `why` explains what the best one
# gains, and what the next ones cost.

# %%
found = {}
for name, target in targets.items():
    found[name] = plan.fit(build, plan.candidates(target, microbatches=(1, 2)), target)
    print(f"{name}:\n{found[name].why()}\n")

assert found["h100"].best.candidate.strategy == "hsdp"
assert found["h100"].best.candidate.state_axes == ("data", "replica")
assert found["h100"].best.seconds.total < 0.7 * h100["zero3"].seconds.total

# %%
COLOURS = {"zero1": "#f2b134", "zero2": "#7fb7be", "zero3": "#1b3a57", "hsdp": "#e4572e"}
fig, panels = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained", sharey=True)
for axes, (name, ranked) in zip(panels, found.items(), strict=True):
    for row in sorted(ranked.rows, key=lambda row: (row.candidate.strategy, row.candidate.microbatches)):
        strategy, m = row.candidate.strategy, row.candidate.microbatches
        size = 190 if strategy == "zero1" else 80  # so that it is seen around zero2, where both are equal
        place = row.seconds.total, row.peak_bytes / 1e9
        axes.scatter(*place, size, COLOURS[strategy], marker="os"[m - 1], label=f"{strategy}, m {m}")
        if row is ranked.best:
            axes.annotate("the pick", place, (-10, -4), textcoords="offset points", fontsize=10, ha="right")
    axes.set(title=f"{N} x {name}", xlabel="seconds per step, at the least", xlim=(0.7, 3))
panels[0].set_ylabel("peak, GB")
handles = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
panels[1].legend(handles.values(), handles, frameon=False, loc="upper left", bbox_to_anchor=(1, 1), markerscale=0.8)
plt.show()

# %% [markdown]
# Each mark is a candidate that fits, and m is its number of microbatches. With one microbatch `zero1` and `zero2` are
# the same.
#
# ## Compile for the pod
#
# A plan is a prediction. libtpu, the compiler of TPUs, runs on ordinary Linux machines, and compiles for pods that you
# do not have. On a torus, make the data axis of two mesh axes, each along sides of the torus. Otherwise XLA replaces
# reduce-scatters by all-reduces, which send twice as much.

# %%
machine = aot.machine("v5p:8x8x8")
two_axes = ("slice", "data")


def step_on(mesh):
    opt = jaxshard.zero3(optimizer, mesh, data_axes=two_axes, **precision)
    return jaxshard.train_step(loss_fn, opt), opt.init(params)


auto = (jax.sharding.AxisType.Auto,) * 2
device = jax.sharding.AbstractDevice(device_kind=machine.name, num_cores=None, platform="tpu")
step, _ = step_on(jax.sharding.AbstractMesh((8, N // 8), two_axes, auto, abstract_device=device))
foretold = plan.predict(step, params, batch)
print(f"sent along one axis of {N}: {v5p['zero3'].prediction.wire_bytes / 1e9:.1f} GB")
print(f"along two axes, 8 x {N // 8}: {foretold.wire_bytes / 1e9:.1f} GB")
assert foretold.wire_bytes < 0.55 * v5p["zero3"].prediction.wire_bytes

# %%
try:
    mesh = jax.make_mesh((8, N // 8), two_axes, devices=aot.devices(machine), axis_types=auto)
    step, state = step_on(mesh)
    compiled = aot.report(step.lower(params, state, batch), machine)
except aot.CompilerMissingError as missing:
    compiled = None
    print(missing)
else:
    print(f"compiled for {machine.num_devices} chips, {machine.name}\n")
    print(compiled)

# %% [markdown]
# The memory that each device stores between steps, its peak, and the bytes it sends, predicted and compiled, on a
# logarithmic scale. The stored bytes are equal. The plan knows only the traced program, so the peak may be off by a
# fifth, and the traffic by a tenth.

# %%
if compiled is not None:
    at_rest = sum(foretold.at_rest[kind] for kind in ("params", "state"))
    figures = {
        "at rest": (at_rest, sum(compiled.arguments[:2])),
        "peak": (foretold.peak_bytes, compiled.peak_bytes),
        "sent in a step": (foretold.wire_bytes, compiled.wire_bytes),
    }
    fig, axes = plt.subplots(figsize=(7.5, 2.8), layout="constrained")
    for shift, source, colour in ((-0.19, "the plan", "#7fb7be"), (0.19, "the compiler", "#1b3a57")):
        values = [pair[source == "the compiler"] / 1e9 for pair in figures.values()]
        axes.barh(np.arange(3) + shift, values, 0.36, color=colour, label=source)
        for y, value in enumerate(values):
            axes.text(value * 1.05, y + shift, f"{value:.3g} GB", va="center")
    axes.set(
        yticks=range(3), yticklabels=figures, xscale="log", xlim=(0.05, 400), title=f"Per device of {machine.name}"
    )
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="center right")
    plt.show()
    for name, (plan_bytes, compiler_bytes) in figures.items():
        print(f"{name:<15} {plan_bytes:>14,.0f} {compiler_bytes:>14,.0f}   ratio {plan_bytes / compiler_bytes:.3f}")
    assert figures["at rest"][0] == figures["at rest"][1]
    assert 0.8 < foretold.peak_bytes / compiled.peak_bytes < 1.2
    assert 0.9 < foretold.wire_bytes / compiled.wire_bytes < 1.1

# %% [markdown]
# Nothing was allocated: JAX lists no array in this process.

# %%
assert not jax.live_arrays()

# %% [markdown]
# ## Where to go next
#
# * **Without Python**: `jaxshard plan --machine v5p:8x8x8` plans the reference model, whose sizes are options;
#   `--fit` searches tensor and pipeline axes as well, and `--compile v5p:8x8x8` is the last section in one command.
# * **How accurate are such plans?** The page "Plan accuracy" compares them with the compilers of TPUs and GPUs.
# * **Too large for any strategy?** `plan.fewest_devices` returns the number of chips that suffice.
# * **On real devices**: use the same `zero3` on `jaxshard.make_mesh()`; nothing else changes.
