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
# # Any optimizer: sharded equals unsharded
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxshard/jaxshard/blob/main/notebooks/04_any_optimizer.ipynb)
#
# You see which errors LAMB, Muon and gradient clipping make when they run on each device's shard, as in many other
# libraries, and that the same optimizers, and two that are written here, are exact under `jaxshard.zero2`. You also
# measure Muon's traffic. The notebook takes about a minute, on 8 simulated devices.

# %%
# On Colab: %pip install --quiet jaxshard matplotlib
import os
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax import P

import jaxshard
from jaxshard import inspect

# %matplotlib inline
os.environ.setdefault("NPROC", "16")  # XLA's threads, enough for 8 devices that wait for each other
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # before the first computation; leave all three out on real devices
jax.config.update("jax_enable_x64", True)  # so that rounding cannot hide an error
N = jax.device_count()
assert N == 8
plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 90})
NAVY, ORANGE, TEAL, YELLOW = "#1b3a57", "#e4572e", "#7fb7be", "#f2b134"

# %% [markdown]
# ## A model with three matrices

# %%
WIDTH = 64
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(0, shape[-2] ** -0.5, shape)


initial = {"first": normal(WIDTH, WIDTH), "hidden": normal(WIDTH, WIDTH), "last": normal(WIDTH, WIDTH // 2)}
teacher = normal(WIDTH, WIDTH // 2)
inputs = [rng.normal(size=(64, WIDTH)) for _ in range(5)]
batches = [(x, np.sin(2 * x @ teacher)) for x in inputs]


def loss_fn(params, batch):
    x, y = batch
    x = jnp.tanh(x @ params["first"])
    x = x + jnp.tanh(x @ params["hidden"])
    return jnp.mean((x @ params["last"] - y) ** 2)


# %% [markdown]
# ## The optimizers
#
# Five come from optax. Only AdamW works on each element alone. Clipping needs the norm of all gradients, LAMB the norm
# of each parameter, Adafactor means over rows and columns, Muon full matrices.
#
# SOAP is not in optax, so it is written here, for matrices: Adam in the eigenbasis of Shampoo's two factors, which one
# QR step per update tracks. The last one is invented: momentum with centred columns, scaled to the parameter's norm.
# Neither contains code for several devices.


# %%
class Soap(NamedTuple):
    leaves: Any  # for each parameter: (mu, nu, left, right, left basis, right basis)


def soap(rate):
    def init(params):
        def start(p):
            left, right = (np.diag(np.linspace(1, 3, size)) for size in p.shape)
            return jnp.zeros_like(p), jnp.zeros_like(p), left, right, np.eye(p.shape[0]), np.eye(p.shape[1])

        return Soap(jax.tree.map(start, params))

    def update(grads, state, params=None):
        def leaf(g, kept):
            mu, nu, left, right, a, b = kept
            mu = 0.9 * mu + 0.1 * g
            nu = 0.95 * nu + 0.05 * (a.T @ g @ b) ** 2
            rotated = (a.T @ mu @ b) / (jnp.sqrt(nu) + 1e-8)
            left, right = 0.95 * left + 0.05 * g @ g.T, 0.95 * right + 0.05 * g.T @ g
            bases = jnp.linalg.qr(left @ a)[0], jnp.linalg.qr(right @ b)[0]
            return -rate * a @ rotated @ b.T, (mu, nu, left, right, *bases)

        found = jax.tree.map(leaf, grads, state.leaves)
        updates, leaves = (jax.tree.map(lambda _, x, i=i: x[i], grads, found) for i in range(2))
        return updates, Soap(leaves)

    return optax.GradientTransformation(init, update)


# %%
def whim(rate):
    def direct(updates, params):
        def leaf(m, p):
            m = m - m.mean(0)
            return -rate * m * jnp.linalg.norm(p) / jnp.linalg.norm(m)

        return jax.tree.map(leaf, updates, params)

    return optax.chain(optax.trace(0.9), optax.stateless(direct))


optimizers = {
    "AdamW": optax.adamw(1e-2),
    "clipped SGD": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0, momentum=0.9)),
    "LAMB": optax.lamb(1e-2),
    "Adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "Muon": optax.contrib.muon(1e-2),
    "SOAP": soap(1e-2),
    "own": whim(1e-2),
}

# %% [markdown]
# ## By hand, shard by shard
#
# The usual way to shard an optimizer: each device stores a shard of the parameters, gradients and state, and calls
# `update` on its shards. Here it is in a few lines, with correct gradients. It raises no error.


# %%
def by_hand(tx, num_devices):
    """A step whose update runs on each device's rows."""
    mesh = jaxshard.make_mesh(devices=jax.devices()[:num_devices])
    part = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // num_devices, x.shape[1]), x.dtype), initial)
    specs = jax.tree.map(lambda x: P("data") if x.ndim else P(), jax.eval_shape(tx.init, part))
    options = {"mesh": mesh, "check_vma": False}  # JAX's types would reject some of the updates
    init = jax.shard_map(tx.init, in_specs=P("data"), out_specs=specs, **options)
    shards = (P("data"), specs, P("data"))
    update = jax.shard_map(tx.update, in_specs=shards, out_specs=shards[:2], **options)
    return init, update


def train(init, update):
    def step(carry, batch):
        params, state = carry
        updates, state = update(jax.grad(loss_fn)(params, batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params, batches):
        return jax.lax.scan(step, (params, init(params)), batches)[0][0]

    return jax.device_get(run(initial, jax.tree.map(lambda *x: np.stack(x), *batches)))


def difference(got, want):
    """The distance between two results, relative to the distance from the start: the largest of the parameters'."""
    leaves = zip(*map(jax.tree.leaves, (got, want, initial)), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b - start)) for a, b, start in leaves)


# %% [markdown]
# The distance of the parameters from those of one device, after five steps. 1 is the distance that they have moved.

# %%
one_device = {name: train(tx.init, tx.update) for name, tx in optimizers.items()}
sizes = (2, 8)
wrong = {name: [difference(train(*by_hand(tx, n)), one_device[name]) for n in sizes] for name, tx in optimizers.items()}
print("by hand, on   " + "".join(f"{n:>6} devices" for n in sizes))
for name, found in wrong.items():
    print(f"{name:<14}" + "".join(f"{x:>14.1e}" for x in found))
    assert (max(found) < 1e-12) if name == "AdamW" else (found[-1] > found[0] > 1e-3)
assert wrong["clipped SGD"][-1] > 1
assert wrong["Muon"][-1] > 1

# %% [markdown]
# Only AdamW is correct. The others train, but each number of devices trains a different model. With clipping and Muon
# on eight devices, the difference is larger than the distance that the parameters moved. A learning rate found on two
# devices does not suit eight.
#
# Muon shows the cause. It replaces a gradient by the nearest orthogonal matrix, whose singular values are all about 1.
# From shards it makes eight small orthogonal matrices, which together are not orthogonal: directions that the shards
# share are scaled by up to $\sqrt 8$, others nearly vanish.

# %%
numbers = optax.contrib.MuonDimensionNumbers(0, 1)
direction = optax.contrib.scale_by_muon(weight_dimension_numbers=numbers, ns_steps=10)
gradient = np.asarray(jax.grad(loss_fn)(initial, batches[0])["hidden"])
full = direction.update(gradient, direction.init(gradient))[0]
shards = [direction.update(g, direction.init(g))[0] for g in np.split(gradient, N)]

singular = {"full": np.linalg.svd(full)[1], "shard by shard": np.linalg.svd(np.concatenate(shards))[1]}
_, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
for (name, values), colour in zip(singular.items(), (NAVY, ORANGE), strict=True):
    axes.plot(np.arange(1, WIDTH + 1), values, ".-", color=colour, linewidth=2, markersize=7, label=name)
    print(f"{name:<16} singular values from {values.min():.2f} to {values.max():.2f}")
axes.axhline(N**0.5, color="#999999", linestyle=":")
axes.text(WIDTH, N**0.5 - 0.06, r"$\sqrt{8}$", ha="right", va="top", color="#666666")
axes.set(ylim=(0, 3.1), xlabel="number of the singular value", title="What Muon makes of one gradient")
axes.legend(frameon=False)
plt.show()

assert singular["full"].max() < 1.3
assert singular["shard by shard"].max() > 1.3 * singular["full"].max()

# %% [markdown]
# ## In `shard_map`, jaxshard raises an error
#
# Inside your own `shard_map`, `opt.update` gets shards too. It reads the traced update, and accepts only updates that
# work element by element. AdamW is accepted; LAMB is not, and the message names the operation.

# %%
mesh = jaxshard.make_mesh()


def local_step(opt):
    def step(params, state, batch):
        partial = jax.lax.pcast(params, "data", to="varying")  # makes the gradients this device's own
        updates, state = opt.update(jax.grad(loss_fn)(partial, batch), state, params)
        return optax.apply_updates(params, updates), state

    at = jax.tree.map(lambda x: x.spec, opt.shardings(initial).state)
    return jax.shard_map(step, mesh=mesh, in_specs=(P(), at, P("data")), out_specs=(P(), at))


refused = {}
for name, tx in optimizers.items():
    opt = jaxshard.zero2(tx, mesh)
    try:
        jax.eval_shape(local_step(opt), initial, jax.eval_shape(opt.init, initial), batches[0])
    except ValueError as error:
        refused[name] = str(error)
print("refused:", *refused, sep="\n  ")
print()
print(refused["LAMB"])
assert refused.keys() == optimizers.keys() - {"AdamW"}

# %% [markdown]
# ## Outside `shard_map`, every optimizer is exact
#
# Outside `shard_map` every optimizer works. It gets full logical arrays, of which each device stores 1/8: XLA adds the
# sums over devices that a norm needs, and jaxshard sends each full matrix to the device that updates it.


# %%
def train_sharded(strategy, tx):
    opt = strategy(tx, mesh)
    step = jaxshard.train_step(loss_fn, opt)
    params, state = opt.place(initial), opt.init(initial)
    for batch in batches:
        params, state, _ = step(params, state, batch)
    return jax.device_get(params)


right = {name: [difference(train_sharded(jaxshard.zero2, tx), one_device[name])] for name, tx in optimizers.items()}
for name in ("LAMB", "Muon", "SOAP", "own"):
    right[name].append(difference(train_sharded(jaxshard.zero3, optimizers[name]), one_device[name]))
for name, found in right.items():
    print(f"{name:<14} zero2 {found[0]:.0e}" + "".join(f"   zero3 {x:.0e}" for x in found[1:]))
    assert max(found) < 1e-10

# %%
_, axes = plt.subplots(figsize=(8.5, 3.8), layout="constrained")
for row, name in enumerate(optimizers):
    axes.axhline(row, color="#eeeae0", zorder=0)
    for found, n, alpha in zip(wrong[name], sizes, (0.45, 1.0), strict=True):
        label = f"by hand, {n} devices" if row == 0 else None
        axes.plot(max(found, 1e-17), row, "o", color=ORANGE, alpha=alpha, markersize=10, label=label)
    for found in right[name]:
        label = "jaxshard, 8 devices" if row == 0 else None
        axes.plot(max(found, 1e-17), row, "D", color=NAVY, markersize=7, label=label)
axes.set_xscale("log")
axes.set(xlim=(1e-17, 10), yticks=range(len(optimizers)), yticklabels=optimizers)
axes.axvline(1, color="#999999", linestyle=":", zorder=0)
axes.set(xlabel="distance from one device / distance moved", title="Parameters after five steps")
axes.invert_yaxis()
axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# ## Owners of matrices
#
# Muon's work on one matrix cannot be sharded, so jaxshard distributes the matrices: each has an owner, one device. With
# stacked layers, owners store the state of their layers from the start. This is a stack of eight matrices:

# %%
WIDE, LAYERS = 512, 8
stack = {"up": np.zeros((LAYERS, WIDE, 2 * WIDE), np.float32)}


def last_two_dims(params):
    return jax.tree.map(lambda p: optax.contrib.MuonDimensionNumbers(p.ndim - 2, p.ndim - 1), params)


adamw, muon = optax.adamw(1e-2), optax.contrib.muon(1e-2, muon_weight_dimension_numbers=last_two_dims)


# %%
def draw_momentum(axes, tx, title):
    state = jaxshard.zero2(tx, mesh).init(stack)
    momentum = next(x for x in jax.tree.leaves(state) if x.shape == stack["up"].shape)
    for device, shard in enumerate(momentum.addressable_shards):
        (low, high, _), (top, bottom, _), (left, right, _) = (
            s.indices(size) for s, size in zip(shard.index, momentum.shape, strict=True)
        )
        for number in range(LAYERS):
            axes.add_patch(plt.Rectangle((device, number), 0.86, 0.8, color="#eeeae0"))
        for number in range(low, high):
            corner = device + 0.86 * left / (2 * WIDE), number + 0.8 * top / WIDE
            size = 0.86 * (right - left) / (2 * WIDE), 0.8 * (bottom - top) / WIDE
            axes.add_patch(plt.Rectangle(corner, *size, color=NAVY))
    axes.set(xlim=(-0.1, N), ylim=(LAYERS, -0.1), title=title, xlabel="device", ylabel="layer")
    axes.set_xticks(np.arange(N) + 0.43, range(N))
    axes.set_yticks(np.arange(LAYERS) + 0.4, range(LAYERS))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return momentum.sharding.spec


_, panels = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
print("AdamW's first moment of up:", draw_momentum(panels[0], adamw, "AdamW's first moment of up"))
muons = draw_momentum(panels[1], muon, "Muon's momentum of up")
print("Muon's momentum of up:", muons)
plt.show()
assert muons[0] == "data"  # full layers

# %% [markdown]
# With separate layers, each matrix's state stays sharded. In each update, one all-to-all sends a matrix's shards to its
# owner, and another returns the results. The layout lists the owners:

# %%
layers = {f"layer {i}": {"up": stack["up"][i]} for i in range(LAYERS)}
for row in jaxshard.zero2(muon, mesh).layout(layers).rows():
    if "layer 0" in row[1]:
        print(" | ".join(str(cell) for cell in row))

# %% [markdown]
# ## Muon's traffic
#
# Counted in the compiled step, for Muon and AdamW. For comparison, XLA partitions the same updates: `jax.jit` with the
# same shardings of parameters, gradients and state.

# %%
rows = np.ones((8, WIDE), np.float32)


def forward(x, w):
    return x + jnp.tanh(x @ w["up"])[:, :WIDE]


def stacked_loss(params, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (forward(x, w), None), x, params)[0] ** 2)


def separate_loss(params, x):
    for w in params.values():
        x = forward(x, w)
    return jnp.mean(x**2)


# %%
def sent(tx, loss, params):
    opt = jaxshard.zero2(tx, mesh)
    step = jaxshard.train_step(loss, opt)
    return inspect.report(step.lower(opt.place(params), opt.init(params), rows).compile())


def sent_by_xla(tx, loss, params):
    at = jaxshard.zero2(tx, mesh).shardings(params)

    def step(params, state, x):
        grads = jax.lax.with_sharding_constraint(jax.grad(loss)(params, x), at.grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    places = at.params, at.state
    of_rows = jax.NamedSharding(mesh, P("data"))
    jitted = jax.jit(step, in_shardings=(*places, of_rows), out_shardings=places)
    compiled = jitted.lower(params, jax.eval_shape(tx.init, params), rows).compile()
    with warnings.catch_warnings(action="ignore"):  # `report` warns of traffic over twice ZeRO-3's; the figures show it
        return inspect.report(compiled)


# %%
models = {"stacked": (stacked_loss, stack), "separate": (separate_loss, layers)}
reports = {
    (way, name, model): count(tx, *models[model])
    for way, count in {"jaxshard": sent, "left to XLA": sent_by_xla}.items()
    for name, tx in {"AdamW": adamw, "Muon": muon}.items()
    for model in models
}
wire = {key: report.wire_bytes for key, report in reports.items()}
base = {model: wire["jaxshard", "AdamW", model] for model in models}
for (way, name, model), found in wire.items():
    print(f"{model + ' layers':<18}{name:<7}{way:<12}{found / 1e6:>8.1f} MB, {found / base[model]:.2f} x AdamW")
work = {way: reports[way, "Muon", "separate"].flops / 1e9 for way in ("jaxshard", "left to XLA")}
print("Muon's GFLOP on each device, separate layers:", *(f"{way} {flops:.1f}" for way, flops in work.items()))

# %%
_, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
bars = [
    ("jaxshard", "AdamW", TEAL),
    ("jaxshard", "Muon", NAVY),
    ("left to XLA", "AdamW", YELLOW),
    ("left to XLA", "Muon", ORANGE),
]
for i, (way, name, colour) in enumerate(bars):
    heights = [wire[way, name, model] / 1e6 for model in models]
    drawn = axes.bar(np.arange(2) + 0.2 * i, heights, 0.18, color=colour, label=f"{name}, {way}")
    axes.bar_label(drawn, [f"{h:.0f}" for h in heights])
axes.set_xticks(np.arange(2) + 0.3, [f"{model} layers" for model in models])
axes.set(ylabel="MB", title="Sent by each device in a step")
axes.legend(frameon=False)
plt.show()

for model in models:
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(models[model][1]))
    assert abs(base[model] / (2 * (N - 1) / N * num_bytes) - 1) < 0.01  # a reduce-scatter and an all-gather
    assert wire["jaxshard", "Muon", model] < 1.15 * base[model]
assert wire["left to XLA", "Muon", "separate"] > 3 * base["separate"]
assert work["left to XLA"] > 1.5 * work["jaxshard"]

# %% [markdown]
# For separate matrices, XLA alone partitions each product over the devices, and sums partial products in each of Muon's
# iterations: more bytes, and more arithmetic. With AdamW it sends 1.5 times the bytes on CPUs, where it all-reduces
# gradients and then slices them.
#
# ## Where to go next
#
# * **Muon for matrices, AdamW for the rest**: `optax.partition`, as in `examples/muon_and_adamw.py`.
# * **Which optimizers are tested?** All of optax and optax.contrib, in every strategy: `docs/matrix.md`.
# * **Your own**: write it for full arrays, wrap it, and compare five steps with one device's, as above.
# * **SOAP's traffic**: stack a number of layers that N divides; its factors then stay on their devices.
