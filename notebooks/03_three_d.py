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
# # Three dimensions: data x tensor x pipeline
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxshard/jaxshard/blob/main/notebooks/03_three_d.ipynb)
#
# You shard a small transformer over two pipeline stages, two tensor devices and two data devices, with ZeRO-2, and see
# that it trains as on one device. You see where each part is stored, in which order the stages work, and how many bytes
# each axis sends. The notebook takes about a minute, on 8 simulated devices.

# %%
# On Colab: %pip install --quiet jaxshard matplotlib
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax import P

import jaxshard
from jaxshard import inspect, tensor
from jaxshard.pipelining import Plan, cells, chart

# %matplotlib inline
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # before the first computation; leave both lines out on real devices
jax.config.update("jax_enable_x64", True)  # so that rounding hides no error
assert jax.device_count() == 8
plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 90})
NAVY, ORANGE, TEAL, YELLOW = "#1b3a57", "#e4572e", "#7fb7be", "#f2b134"

# %% [markdown]
# ## The model, for one device
#
# A layer is attention and an MLP. It uses `column_parallel(x, w)` or `row_parallel(x, w)` in place of `x @ w`: each
# tensor device then multiplies by its columns, or its rows, of `w`. They are used in pairs, with one sum over devices
# at the end of each pair. Without a mesh they are plain products, so this is also the model for one device.

# %%
WIDTH, LAYERS, HEADS, LENGTH, VOCABULARY = 64, 8, 4, 32, 256


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attention(q, k, v):
    heads = tensor.per_device("heads", HEADS)  # all of them, or this device's
    q, k, v = (y.reshape(*y.shape[:-1], heads, WIDTH // HEADS) for y in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(*q.shape[:2], -1)


def layer(x, w):
    q, k, v = tensor.column_parallel(norm(x) * w["gain"], (w["q"], w["k"], w["v"]))
    x = x + tensor.row_parallel(attention(q, k, v), w["out"])
    hidden = jax.nn.gelu(tensor.column_parallel(norm(x), w["up"]))
    return x + tensor.row_parallel(hidden, w["down"]), None


def plain_loss(params, rows):
    x = params["embed"][rows[:, :-1]] + params["position"]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = norm(x) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


# %%
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(0, 0.5 * shape[-2] ** -0.5, shape)


square, wide, tall = (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH, 4 * WIDTH), (LAYERS, 4 * WIDTH, WIDTH)
layers = {name: normal(*square) for name in ("q", "k", "v", "out")} | {"up": normal(*wide), "down": normal(*tall)}
layers["gain"] = np.ones((LAYERS, WIDTH))
initial = {"embed": normal(VOCABULARY, WIDTH), "position": normal(LENGTH, WIDTH), "layers": layers}
batches = [rng.integers(0, VOCABULARY // 4, (32, LENGTH + 1)) for _ in range(3)]  # so that there is something to learn

x, w = rng.normal(size=(8, WIDTH)), initial["layers"]["up"][0]
np.testing.assert_array_equal(tensor.column_parallel(x, w), x @ w)
print(f"{sum(x.size for x in jax.tree.leaves(initial)):,} parameters, {LAYERS} layers")

# %% [markdown]
# ## The same model in stages
#
# `jaxshard.pipeline` takes three functions: what the first stage does before its layers, what each stage does with its
# layers, and what the last stage does after its own. `shared` parameters are needed by the first and the last; here the
# embedding is also the head. Its rows are sharded over the tensor axis.

# %%
MICROBATCHES = 4


def first(shared, rows, info):
    return tensor.vocab_parallel_embedding(rows[:, :-1], shared["embed"]) + shared["position"]


def stage(blocks, x, info):
    return jax.lax.scan(layer, x, blocks)[0]


def last(shared, x, rows, info):
    logits = tensor.column_parallel(norm(x), shared["embed"].T)
    return tensor.vocab_parallel_cross_entropy(logits, rows[:, 1:]).mean()


def make_loss(schedule, virtual=1):
    def loss_fn(params, rows):
        shared = {"embed": params["embed"], "position": params["position"]}
        how = {"num_microbatches": MICROBATCHES, "schedule": schedule, "virtual": virtual}
        return jaxshard.pipeline(stage, first, last, params["layers"], shared, rows, **how)

    return loss_fn


# %% [markdown]
# ## The mesh and the specs
#
# `specs` are rules on a parameter's path: they shard it over the tensor and pipeline axes. ZeRO shards over the data
# axis: with `zero=2`, the optimizer's state and the gradients.

# %%
mesh = jaxshard.make_mesh(pipeline=2, tensor=2)  # and data 2: the remaining devices
specs = [
    ("layers/(q|k|v|up)", P("pipeline", None, "tensor")),  # (layers, in, out): columns
    ("layers/(out|down)", P("pipeline", "tensor")),  # rows
    ("layers/gain", P("pipeline")),
    ("embed", P("tensor")),
]
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
opt = jaxshard.hybrid(optimizer, mesh, specs, zero=2)
params, state = opt.place(initial), opt.init(initial)
print(dict(mesh.shape))
print(opt.layout(initial).bytes_per_device)

# %% [markdown]
# `up` is a stack of eight matrices. In the picture each device has a column, each layer a box, and the filled part is
# stored on the device. The pipeline axis shards the layers, the tensor axis the columns, and the data axis the rows, of
# Adam's moments only.


# %%
def draw_held(axes, x, title):
    coordinates = dict(zip(mesh.devices.flat, np.ndindex(mesh.devices.shape), strict=True))
    for number, shard in enumerate(x.addressable_shards):
        place = dict(zip(mesh.axis_names, coordinates[shard.device], strict=True))
        parts = [s.indices(size) for s, size in zip(shard.index, x.shape, strict=True)]
        (low, high, _), (top, bottom, _), (left, right, _) = parts
        for number_of_layer in range(LAYERS):
            axes.add_patch(plt.Rectangle((number, number_of_layer), 0.86, 0.8, color="#eeeae0"))
        for number_of_layer in range(low, high):
            corner = number + 0.86 * left / x.shape[2], number_of_layer + 0.8 * top / x.shape[1]
            size = 0.86 * (right - left) / x.shape[2], 0.8 * (bottom - top) / x.shape[1]
            axes.add_patch(plt.Rectangle(corner, *size, color=(NAVY, ORANGE)[place["pipeline"]]))
        label = f"stage {place['pipeline']}\ndata {place['data']}\ntensor {place['tensor']}"
        axes.text(number + 0.43, LAYERS + 0.1, label, ha="center", va="top", fontsize=9)
    axes.set(xlim=(-0.1, 8), ylim=(LAYERS, -0.1), title=title, yticks=np.arange(LAYERS) + 0.4, xticks=[])
    axes.set_yticklabels(f"layer {i}" for i in range(LAYERS))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


mu = state[1][0].mu["layers"]["up"]
fig, panels = plt.subplots(2, 1, figsize=(9, 7.6), layout="constrained")
draw_held(panels[0], params["layers"]["up"], f"up: {params['layers']['up'].sharding.spec}")
draw_held(panels[1], mu, f"its first moment: {mu.sharding.spec}")
plt.show()

assert params["layers"]["up"].addressable_shards[0].data.size * 4 == params["layers"]["up"].size  # 2 stages x 2 tensor
assert mu.addressable_shards[0].data.size * 8 == mu.size  # and x 2 data

# %% [markdown]
# ## Order of the stages
#
# The batch passes through the stages in microbatches, and a stage waits for its first one. The library has a timetable
# for each schedule. This one is for 2 stages:

# %%
print(chart(Plan(num_stages=2, num_microbatches=MICROBATCHES), "1f1b"))

# %% [markdown]
# The schedules differ more clearly with 4 stages and 8 microbatches. Each box of the timetable has the number of its
# microbatch; a backward pass is drawn twice as long as a forward pass. All devices work in lockstep, tick by tick.
# With two virtual stages on each device (`interleaved`) a box is half as long, and lighter boxes are the second half of
# the device's layers.

# %%
LONG = {"forward": 1, "backward": 2}


def in_time(plan, schedule):
    """[(cell, start, length)]: ticks laid one after the other; a tick lasts as long as what is done in it."""
    found, now = [], 0.0
    done = cells(plan, schedule)
    for tick in range(1 + max(cell.tick for cell in done)):
        for direction, long in LONG.items():
            here = [cell for cell in done if (cell.tick, cell.direction) == (tick, direction)]
            found += [(cell, now, long / plan.virtual) for cell in here]
            now += long / plan.virtual if here else 0
    return found, now


# %%
def draw_schedule(axes, plan, schedule):
    boxes, end = in_time(plan, schedule)
    for cell, start, length in boxes:
        colour = NAVY if cell.direction == "forward" else ORANGE
        alpha = 0.55 if cell.chunk >= plan.num_stages else 1.0
        axes.barh(cell.stage, length, left=start, height=0.86, color=colour, alpha=alpha, edgecolor="white")
        axes.text(start + length / 2, cell.stage, cell.microbatch, color="white", ha="center", va="center", fontsize=8)
    busy = sum(length for _, _, length in boxes) / plan.num_stages
    formula = (plan.num_stages - 1) / plan.num_ticks
    assert abs(1 - busy / end - formula) < 1e-12  # (S - 1) / (v M + S - 1)
    axes.set(yticks=range(plan.num_stages), ylabel="stage", title=f"{schedule}: {formula:.0%} of the time lost")
    axes.set_facecolor("#f4f1ea")
    axes.invert_yaxis()
    axes.tick_params(bottom=False, labelbottom=False)


SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
_, panels = plt.subplots(3, 1, figsize=(11, 6.6), layout="constrained", sharex=True)
for axes, (schedule, virtual) in zip(panels, SCHEDULES.items(), strict=True):
    draw_schedule(axes, Plan(4, 8, virtual), schedule)
panels[-1].set_xlabel("time   (blue: forward, red: backward)")
plt.show()

# %% [markdown]
# `1f1b` loses as much time as `gpipe`, and saves memory: a stage frees a microbatch's input as soon as its backward
# pass is done. So the number of stored inputs does not depend on the number of microbatches. `interleaved` loses less
# time, and stores the inputs of more but shorter stages. The figures are counted from the timetable, for 4 stages. The
# program reserves memory for `Plan.num_kept` = 2 v S - 1 inputs, which is enough for every stage.


# %%
def kept(plan, schedule):
    """The most inputs that a stage holds at once."""
    end = {(c.stage, c.chunk, c.microbatch): c.tick for c in cells(plan, schedule) if c.direction == "backward"}
    spans = [(c.stage, c.tick, end[c.stage, c.chunk, c.microbatch]) for c in cells(plan, schedule) if c[2] == "forward"]
    return max(sum(s == stage and a <= tick <= b for s, a, b in spans) for stage, tick, _ in spans)


numbers = (4, 8, 16, 24)
_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for (schedule, virtual), colour in zip(SCHEDULES.items(), (YELLOW, TEAL, NAVY), strict=True):
    plans = [Plan(4, number, virtual) for number in numbers]
    style = {"color": colour, "linewidth": 2.5, "label": schedule, "linestyle": ":" if schedule == "gpipe" else "-"}
    left.plot(numbers, [100 * 3 / plan.num_ticks for plan in plans], "o", zorder=3 + (schedule == "gpipe"), **style)
    right.plot(numbers, [kept(plan, schedule) for plan in plans], "o", **style)
left.set(xlabel="microbatches", xticks=numbers, ylim=(0, None), title="% of the time lost")
right.set(xlabel="microbatches", xticks=numbers, ylim=(0, None), title="inputs that a stage keeps")
right.legend(frameon=False)
plt.show()

assert [kept(Plan(4, number), "gpipe") for number in numbers] == list(numbers)
assert {kept(Plan(4, number), "1f1b") for number in numbers[1:]} == {2 * 4 - 1}
assert kept(Plan(4, 24, 2), "interleaved") > 2 * 4 - 1
assert all(kept(Plan(4, number, 2), "interleaved") <= Plan(4, number, 2).num_kept for number in numbers)

# %% [markdown]
# ## The same training
#
# Three steps on one device, in plain JAX and optax, and three under each schedule. The optimizer clips by the norm of
# *all* gradients, although they are sharded over eight devices. `interleaved` needs its layers reshaped to
# (2, layers / 2, ...), and sharded on the second dim.


# %%
@jax.jit
def plain_step(params, state, rows):
    loss, grads = jax.value_and_grad(plain_loss)(params, rows)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, {"loss": loss, "grad_norm": optax.tree.norm(grads)}


def train(step, params, state):
    losses = []
    for rows in batches:
        params, state, metrics = step(params, state, rows)
        assert metrics["grad_norm"] > 0.5  # so that there is something to clip
        losses.append(float(metrics["loss"]))
    return jax.device_get(params), losses


want, losses = train(plain_step, initial, optimizer.init(initial))
print("one device  ", *(f"{loss:.6f}" for loss in losses))
assert losses[-1] < losses[0] - 0.3

# %%
reports = {}
for schedule, virtual in SCHEDULES.items():
    start, rules = initial, specs
    if virtual > 1:
        stacked = jax.tree.map(lambda x, v=virtual: x.reshape(v, -1, *x.shape[1:]), layers)
        start = initial | {"layers": stacked}
        rules = [(path, P(None, *spec) if path.startswith("layers") else spec) for path, spec in specs]
    opt = jaxshard.hybrid(optimizer, mesh, rules, zero=2)
    step = jaxshard.train_step(make_loss(schedule, virtual), opt, donate=False)
    compiled = step.lower(opt.place(start), opt.init(start), batches[0]).compile()
    reports[schedule] = inspect.report(compiled)
    got, losses = train(compiled, opt.place(start), opt.init(start))
    pairs = zip(*map(jax.tree.leaves, (got, want)), strict=True)
    difference = max(np.linalg.norm(a.ravel() - b.ravel()) / np.linalg.norm(b) for a, b in pairs)
    print(
        f"{schedule:<12}", *(f"{loss:.6f}" for loss in losses), f" parameters differ by {difference:.0e} of their norm"
    )
    assert difference < 1e-11

# %% [markdown]
# ## Traffic of each axis
#
# Each axis has its own traffic, and its own formula. A is the bytes of one activation, a microbatch's rows on one data
# device; a step has $t = vM + S - 1$ ticks in each direction.
#
# * pipeline: in each tick one A to the next stage, $2tA$, and an all-reduce of the shared parameters' gradients.
# * tensor: all-reduces of A. In each tick, and each layer of the stage, two forward, two backward, and two more since
#   the backward pass computes the stage again. Also one for each embedding, and one for each head.
# * data: gradients are reduce-scattered and new parameters gathered, half of the device's parameters each, since the
#   axis has size 2.

# %%
ITEM = 8  # bytes of a float64
A = 32 // 2 // MICROBATCHES * LENGTH * WIDTH * ITEM
on_device = opt.layout(initial | {"layers": stacked}).bytes_per_device["params"]
shared_bytes = (VOCABULARY // 2 + LENGTH) * WIDTH * ITEM


def formulas(schedule, virtual):
    plan = Plan(2, MICROBATCHES, virtual)
    ticks, of_stage = plan.num_ticks, LAYERS // 2 // virtual
    extra = 2 * ticks + (ticks + 1) if schedule == "gpipe" else 2 * ticks - plan.delay  # embeddings and heads
    tensor_bytes = (6 * of_stage * ticks + extra) * A
    return {"pipeline": 2 * ticks * A + shared_bytes, "tensor": tensor_bytes, "data": on_device}


print(f"{'kB sent by each device (formula)':<34}" + "".join(f"{axis:>18}" for axis in ("pipeline", "tensor", "data")))
for schedule, virtual in SCHEDULES.items():
    sent = reports[schedule].wire_bytes_by_axes(mesh)
    want_sent = formulas(schedule, virtual)
    figures = [f"{sent[axis] / 1e3:,.0f} ({want_sent[axis] / 1e3:,.0f})" for axis in want_sent]
    print(f"{schedule:<34}" + "".join(f"{figure:>18}" for figure in figures))
    passed = sum(c.trips for c in reports[schedule].collectives if c.kind == "collective-permute")
    assert 2 * Plan(2, MICROBATCHES, virtual).num_ticks - passed in (0, 1)
    assert abs(sent["pipeline"] - want_sent["pipeline"]) < 1.01 * A
    assert abs(sent["tensor"] / want_sent["tensor"] - 1) < 0.02
    assert abs(sent["data"] / want_sent["data"] - 1) < 0.02

# %% [markdown]
# No stage needs what the last tick of the last loop sends. If that loop has one tick, XLA removes this transfer: one A
# less than the formula.

# %%
_, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
left = np.zeros(3)
for axis, colour in {"pipeline": ORANGE, "tensor": NAVY, "data": TEAL}.items():
    widths = np.array([r.wire_bytes_by_axes(mesh)[axis] / 1e6 for r in reports.values()])
    axes.barh(list(reports), widths, left=left, color=colour, label=axis, height=0.6)
    left += widths
axes.set(xlabel="MB sent by each device in a step", title="Read from the compiled steps, by axis")
axes.invert_yaxis()
axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

for r in reports.values():
    assert r.wire_bytes_by_axes(mesh)["tensor"] > 0.7 * r.wire_bytes

# %% [markdown]
# The tensor axis sends by far the most: place it where links are fastest, within a host. The pipeline axis sends
# little, and may span hosts. `make_mesh` orders the axes in this way.
#
# ## Where to go next
#
# * **Longer sequences**: `sequence=1` in the blocks shards norms and residuals along the sequence; the traffic is the
#   same.
# * **ZeRO-3 inside**: `zero=3`, and `jaxshard.unshard(blocks)` in the stage to gather in each tick, not once per step.
# * **A model without blocks**: `auto_axes="tensor"` leaves the tensor axis to XLA.
# * **Sizes**: `jaxshard plan CONFIG --machine h100:8x8 --fit` ranks meshes and schedules by memory and time.
