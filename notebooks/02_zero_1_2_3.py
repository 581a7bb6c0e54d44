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
# # ZeRO 1, 2 and 3: what each saves and sends
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxshard/jaxshard/blob/main/notebooks/02_zero_1_2_3.ipynb)
#
# You learn what `ddp`, `zero1`, `zero2` and `zero3` store on each device, what they send at which time in a step, and
# what additional microbatches cost. Every figure is read from arrays, the traced loop or the compiled step, and
# compared with its formula. The notebook takes about a minute, on 8 simulated devices.
#
# N is the number of devices, $\Psi$ the number of parameters, m the number of microbatches.

# %%
# On Colab: %pip install --quiet jaxshard matplotlib
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxshard
from jaxshard import inspect

# %matplotlib inline
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # before the first computation; leave both lines out on real devices
N = jax.device_count()
assert N == 8
plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 90})
NAVY, ORANGE, TEAL, YELLOW, PURPLE = "#1b3a57", "#e4572e", "#7fb7be", "#f2b134", "#8d6a9f"

# %% [markdown]
# ## A model with its layers in a loop
#
# Six residual blocks, stacked, between an input and an output matrix. Each block begins with `jaxshard.unshard` and is
# recomputed in the backward pass: every strategy works best in this form.

# %%
WIDTH, LAYERS = 128, 6
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(0, shape[-2] ** -0.5, shape).astype(np.float32)


def model(layers):
    stack = {"up": normal(layers, WIDTH, 4 * WIDTH), "down": normal(layers, 4 * WIDTH, WIDTH)}
    return {"first": normal(64, WIDTH), "layers": stack, "last": normal(WIDTH, 64)}


def block(x, w):
    w = jaxshard.unshard(w)
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def loss_fn(params, batch, block=block):
    x, y = batch
    x, _ = jax.lax.scan(jax.checkpoint(block), x @ params["first"], params["layers"])
    return jnp.mean((x @ params["last"] - y) ** 2)


initial, batch = model(LAYERS), (normal(64, 64), normal(64, 64))
PSI = sum(x.size for x in jax.tree.leaves(initial))
print(f"{PSI:,} parameters, {4 * PSI:,} bytes")

# %% [markdown]
# ## Memory of each strategy
#
# Parameters and state are arrays, so the code counts their shards on one device. The sums of gradients exist only
# inside the step: its loop carries them from one microbatch to the next. The code reads this carry from the traced
# program, inside `shard_map`, where shapes are those of one device.

# %%
MICROBATCHES = 4
optimizer = optax.adamw(1e-3)


def bytes_on_first(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def loops(jaxpr):
    """All scans of a traced program, outermost first."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from loops(getattr(inner, "jaxpr", inner))


def bytes_carried(opt):
    """Bytes of the sums that a device carries through the loop over the microbatches."""
    gradients = jaxshard.value_and_grad(loss_fn, opt, microbatches=MICROBATCHES)
    traced = jax.make_jaxpr(gradients)(initial, batch)
    loop = next(scan for scan in loops(traced.jaxpr) if scan.params["length"] == MICROBATCHES)
    carried = loop.outvars[: loop.params["num_carry"]]
    return sum(x.aval.size * x.aval.dtype.itemsize for x in carried)


def held(name, num_devices):
    opt = getattr(jaxshard, name)(optimizer, jaxshard.make_mesh(devices=jax.devices()[:num_devices]))
    return bytes_on_first(opt.place(initial)), bytes_carried(opt), bytes_on_first(opt.init(initial))


# %%
formulas = {
    "ddp": lambda n: (4, 4, 8),
    "zero1": lambda n: (4, 4, 8 / n),
    "zero2": lambda n: (4, 4 / n, 8 / n),
    "zero3": lambda n: (4 / n, 4 / n, 8 / n),
}
sizes = (2, 4, 8)
measured = {name: {n: np.divide(held(name, n), PSI) for n in sizes} for name in formulas}

print("bytes per parameter on each of 8 devices (formula)")
print(f"{'':<8}{'params':>16}{'sums of gradients':>22}{'AdamW state':>16}")
for name, formula in formulas.items():
    cells = [f"{got:.2f} ({want:g})" for got, want in zip(measured[name][N], formula(N), strict=True)]
    print(f"{name:<8}{cells[0]:>16}{cells[1]:>22}{cells[2]:>16}")
    for n in sizes:
        np.testing.assert_allclose(measured[name][n], formula(n), rtol=0.01, atol=0.001)

# %%
COLOURS = {"ddp": PURPLE, "zero1": YELLOW, "zero2": TEAL, "zero3": NAVY}
_, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
devices = np.geomspace(1, 64, 100)
for name, formula in formulas.items():
    axes.plot(devices, [sum(formula(n)) for n in devices], color=COLOURS[name], linewidth=2.5)
    axes.plot(sizes, [sum(measured[name][n]) for n in sizes], "o", color=COLOURS[name], markersize=8)
    axes.text(70, sum(formula(64)), name, va="center", color=COLOURS[name], weight="bold")
axes.set_xscale("log", base=2)
axes.set_xticks([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16, 32, 64])
axes.set(xlim=(1, 64), ylim=(0, 17), xlabel="devices", ylabel="bytes per parameter")
axes.set_title("On each device: formulas (lines), counted (dots)")
plt.show()

# %% [markdown]
# ## Traffic of each strategy
#
# Now the whole training steps, compiled with one microbatch and with four. A fifth strategy joins: `zero3` with
# `regather="step"`, which gathers all parameters once and keeps them for the step.

# %%
mesh = jaxshard.make_mesh()
strategies = {
    "ddp": jaxshard.ddp(optimizer, mesh),
    "zero1": jaxshard.zero1(optimizer, mesh),
    "zero2": jaxshard.zero2(optimizer, mesh),
    "zero3": jaxshard.zero3(optimizer, mesh),
    'zero3, regather="step"': jaxshard.zero3(optimizer, mesh, regather="step"),
}


def read(opt, m, params=initial, loss=loss_fn):
    step = jaxshard.train_step(loss, opt, microbatches=m, donate=True)
    return inspect.report(step.lower(opt.place(params), opt.init(params), batch).compile())


reports = {(name, m): read(opt, m) for name, opt in strategies.items() for m in (1, MICROBATCHES)}
print(reports["zero3", MICROBATCHES])

# %% [markdown]
# Each collective carries JAX's path to the operation that it came from (`op_name`): `jvp` for the forward pass,
# `transpose` for the backward pass, neither for what runs once per step. It also has the number of its executions
# (`trips`). Both together give its place in the step.


# %%
def phases(report):
    """Yields (phase, collective) in program order."""
    reduced = False
    for c in report.collectives:
        reduced |= c.kind != "all-gather"
        if "jvp" in c.op_name:
            yield "backward" if "transpose" in c.op_name else "forward", c
        elif c.kind == "all-gather":
            yield "new params" if reduced else "start", c
        else:
            yield "norm" if c.bytes < 100 else "sums", c


for name in strategies:
    print(name)
    for phase, c in phases(reports[name, MICROBATCHES]):
        print(f"  {phase:<11}{c.kind:<15}{c.bytes:>10,} bytes, {c.trips:>2} times")

# %% [markdown]
# A bar is what a device sends at that time in the step. `zero1` sends nothing until the last microbatch ends, then
# everything. `zero2` reduce-scatters the gradients of each layer as soon as the backward pass has computed them.
# `zero3` also gathers each layer before its use, in the forward and in the backward pass, so it gathers nothing at the
# end.

# %%
PER_PASS = 1 + LAYERS  # places of a pass: the matrices outside of the layers, and each layer
COLUMNS = (
    ["start"] + [(m, p) for m in range(MICROBATCHES) for p in range(2 * PER_PASS)] + ["sums", "norm", "new params"]
)


def places(phase, trips):
    """The columns of the timeline in which a collective runs."""
    if phase not in ("forward", "backward"):
        assert trips == 1
        return [phase]
    assert trips in (MICROBATCHES, MICROBATCHES * LAYERS)
    of_layers = trips > MICROBATCHES
    if phase == "forward":
        inside = range(1, PER_PASS) if of_layers else [0]
    else:
        inside = range(PER_PASS, 2 * PER_PASS - 1) if of_layers else [2 * PER_PASS - 1]
    return [(m, p) for m in range(MICROBATCHES) for p in inside]


def bars(report):
    """{kind: MB that a device sends in each column}."""
    found = {}
    for phase, c in phases(report):
        columns = places(phase, c.trips)
        for column in columns:
            heights = found.setdefault(c.kind, np.zeros(len(COLUMNS)))
            heights[COLUMNS.index(column)] += c.wire_bytes / len(columns) / 1e6
    return found


# %%
KINDS = {"all-reduce": PURPLE, "reduce-scatter": ORANGE, "all-gather": NAVY}


def draw_step(axes, name, report):
    bottom = np.zeros(len(COLUMNS))
    for kind, heights in bars(report).items():
        axes.bar(range(len(COLUMNS)), heights, 0.85, bottom, color=KINDS[kind])
        bottom += heights
    np.testing.assert_allclose(bottom.sum() * 1e6, report.wire_bytes)  # every byte is in the picture
    for m in range(MICROBATCHES):
        middle = 0.5 + 2 * PER_PASS * m + PER_PASS
        axes.axvspan(middle - PER_PASS, middle, color="#f4f1ea", zorder=0)
        axes.axvspan(middle, middle + PER_PASS, color="#e6e1d5", zorder=0)
    axes.text(0, 5.0, f"{name}: {bottom.sum():.1f} MB in all", weight="bold")
    axes.set(xlim=(-1, len(COLUMNS)), ylim=(0, 6.4), yticks=[0, 2, 4], ylabel="MB")
    axes.tick_params(bottom=False, labelbottom=False)


fig, panels = plt.subplots(len(strategies), 1, figsize=(11, 8.2), layout="constrained", sharex=True)
for axes, name in zip(panels, strategies, strict=True):
    draw_step(axes, name, reports[name, MICROBATCHES])
for m in range(MICROBATCHES):
    panels[-1].text(0.5 + 2 * PER_PASS * (m + 0.5), -1.3, f"microbatch {m}\nforward | backward", ha="center", va="top")
panels[-1].text(len(COLUMNS) - 2, -1.3, "sum,\nupdate", ha="center", va="top")
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in KINDS.values()]
fig.legend(handles, KINDS, loc="outside upper center", ncols=3, frameon=False)
plt.show()

# %% [markdown]
# ## Traffic formulas
#
# On a ring, each device sends $\frac{N-1}{N}\Psi$ elements to gather or reduce-scatter $\Psi$ elements, and twice as
# many for an all-reduce. In units of $\frac{N-1}{N}\Psi$:
#
# * `ddp` and `zero1` sum gradients locally, so m does not matter: 2.
# * `zero2` scatters in each microbatch, and gathers new parameters once: m + 1.
# * `zero3` gathers twice and scatters once in each microbatch: 3 m. The two matrices outside the layers are not
#   recomputed, so they are gathered once per microbatch.
# * `regather="step"` gathers once, and scatters in each microbatch: 1 + m.

# %%
unit = (N - 1) / N * 4 * PSI
outside = (initial["first"].size + initial["last"].size) / PSI
wire = {
    "ddp": lambda m: 2,
    "zero1": lambda m: 2,
    "zero2": lambda m: m + 1,
    "zero3": lambda m: (3 - outside) * m,
    'zero3, regather="step"': lambda m: 1 + m,
}
print(f"{'in units of (N-1)/N Ψ':<26}{'m = 1':>18}{f'm = {MICROBATCHES}':>20}")
for name, formula in wire.items():
    found = [(reports[name, m].wire_bytes / unit, formula(m)) for m in (1, MICROBATCHES)]
    print(f"{name:<26}" + "".join(f"{got:>10.3f} ({want:.3f})" for got, want in found))
    for got, want in found:
        assert abs(got / want - 1) < 0.001

# %% [markdown]
# For more traffic, `zero2` saves memory: its sums are sharded 1/N, those of `zero1` are replicated. The compiler's
# scratch memory shows this.

# %%
scratch = {name: reports[name, MICROBATCHES].temp_bytes for name in strategies}
saved = scratch["zero1"] - scratch["zero2"]
print(f"scratch of zero1: {scratch['zero1']:,} bytes, of zero2: {scratch['zero2']:,} bytes")
print(f"saved: {saved:,} bytes; (N-1)/N of the gradients: {unit:,.0f} bytes")
assert saved > unit

# %% [markdown]
# It saves more than the sums: `zero1` also stores the full gradients of the current microbatch.
#
# ## `unshard` and the depth of the model
#
# `zero3` stores 1/N between steps. Within a step, memory depends on how much is gathered *at the same time*. For a loss
# without `unshard`, all parameters are gathered at the start and stay. With `unshard`, one block is gathered at a time,
# whatever their number. The same model with 2, 6 and 12 blocks:


# %%
def plain_block(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def plain_loss(params, batch):
    return loss_fn(params, batch, block=plain_block)


depths = (2, 6, 12)
ways = {
    "zero3, no unshard": ("zero3", plain_loss, ORANGE),
    'zero3, regather="step"': ('zero3, regather="step"', loss_fn, YELLOW),
    "zero3, unshard": ("zero3", loss_fn, NAVY),
}
scratch_of = {
    way: [read(strategies[name], MICROBATCHES, model(depth), loss).temp_bytes for depth in depths]
    for way, (name, loss, _) in ways.items()
}
block_bytes = 4 * sum(x[0].size for x in jax.tree.leaves(initial["layers"]))
print(f"a block has {block_bytes:,} bytes; with each further block the scratch memory grows by")
growth = {way: (found[-1] - found[0]) / (depths[-1] - depths[0]) for way, found in scratch_of.items()}
for way, found in growth.items():
    print(f"  {way:<24}{found:>10,.0f} bytes, {found / block_bytes:.2f} blocks")

# %%
_, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
for way, (_, _, colour) in ways.items():
    axes.plot(depths, np.divide(scratch_of[way], 1e6), "o-", color=colour, linewidth=2.5, markersize=8, label=way)
whole = [4 * sum(x.size for x in jax.tree.leaves(model(depth))) / 1e6 for depth in depths]
axes.plot(depths, whole, color="black", linestyle=":", label="all parameters, gathered")
axes.set(xlabel="blocks", ylabel="MB of scratch memory", xticks=depths, ylim=(0, None))
axes.set_title(f"During a step of {MICROBATCHES} microbatches, on each device")
axes.legend(frameon=False)
plt.show()

assert growth["zero3, no unshard"] > block_bytes
assert growth['zero3, regather="step"'] > 0.9 * block_bytes
assert growth["zero3, unshard"] < 0.5 * block_bytes

# %% [markdown]
# With `unshard`, two parts still grow: 1/N of the gradients' sums, and the input of each block, which `jax.checkpoint`
# keeps.
#
# ## Memory against traffic
#
# Left means less traffic, lower means less memory. Each strategy that stores less sends more, except
# `regather="step"`: during the step it is like `zero2`, and it saves the parameters' memory between steps.

# %%
_, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
for name in strategies:
    r = reports[name, MICROBATCHES]
    axes.plot(r.wire_bytes / unit, r.peak_bytes / 1e6, "o", color=COLOURS.get(name, ORANGE), markersize=12)
    axes.annotate(name, (r.wire_bytes / unit, r.peak_bytes / 1e6), (9, 6), textcoords="offset points")
axes.set(xlim=(0, 14), ylim=(0, None), ylabel="MB at the peak of a step")
axes.set(xlabel=r"sent per step, in units of $\frac{N-1}{N}\Psi$", title=f"{MICROBATCHES} microbatches, 8 devices")
plt.show()

peaks = {name: reports[name, MICROBATCHES].peak_bytes for name in strategies}
assert peaks["zero3"] == min(peaks.values())
assert peaks["zero2"] < peaks["zero1"] < peaks["ddp"]
assert reports["zero1", MICROBATCHES].wire_bytes < reports["zero2", MICROBATCHES].wire_bytes
alike = reports["zero1", 1], reports["zero2", 1]
assert alike[0].wire_bytes == alike[1].wire_bytes
assert alike[0].temp_bytes == alike[1].temp_bytes

# %% [markdown]
# All five steps train the same model. Their gradients, summed over the microbatches, equal those of one device:

# %%
want = jax.grad(plain_loss)(jax.tree.map(jnp.asarray, initial), batch)
for name, opt in strategies.items():
    _, got = jaxshard.value_and_grad(loss_fn, opt, microbatches=MICROBATCHES)(opt.place(initial), batch)
    pairs = zip(*map(jax.tree.leaves, jax.device_get((got, want))), strict=True)
    difference = max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs)
    print(f"{name:<24} gradients differ by {difference:.0e} of their norm")
    assert difference < 1e-5

# %% [markdown]
# ## Choose a strategy
#
# * The parameters fit on each device: `zero1` with several microbatches, or `zero2` if the sums of gradients do not fit
#   beside them. With one microbatch the two are the same step.
# * They do not fit: `zero3` with `unshard`.
# * They fit during a step, but their memory is needed for something else between steps: `zero3` with
#   `regather="step"`.
# * The links between some devices are slow: `hsdp` keeps the gathers within a host.
# * `jaxshard plan --fit` ranks all of them for a machine that you do not have yet.
