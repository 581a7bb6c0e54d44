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
# # Your loss
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxshard/jaxshard/blob/main/notebooks/07_your_loss.ipynb)
#
# With data parallelism each device computes the loss of its own rows, and the results are averaged. For some losses
# this average is not the loss of the full batch, and no error appears. If jaxshard cannot prove that it is, the loss
# sees all rows and XLA partitions it: this is correct for any loss, and may send more.
#
# This notebook has five losses for which averaging is wrong: jaxshard's message for each, the wrong numbers
# (`loss_view="local"`), and the one or two lines that make averaging correct.
#
# The notebook takes about a minute, on 8 simulated devices.

# %%
# On Colab: %pip install --quiet jaxshard matplotlib
import textwrap

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxshard

# %matplotlib inline
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # before the first computation
N = jax.device_count()
assert N == 8
plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 90})
BLUE, RED, GREY = "#1b3a57", "#e4572e", "#bbbbbb"

# %% [markdown]
# ## A batch, and a correct loss
#
# The batch has 64 rows of four kinds, in the order in which a file might have them. So the eight devices see different
# rows: two devices have kind 0 only, two have kind 1, and so on.

# %%
ROWS, FEATURES, WIDTH, KINDS = 64, 16, 32, 4
rng = np.random.default_rng(0)
kinds = np.repeat(np.arange(KINDS), ROWS // KINDS)
x = rng.normal(size=(ROWS, FEATURES)) + 2 * rng.normal(size=(KINDS, FEATURES))[kinds]
batch = {"x": x.astype("f"), "kind": kinds}
params = {
    "w": rng.normal(0, FEATURES**-0.5, (FEATURES, WIDTH)).astype("f"),
    "head": rng.normal(0, WIDTH**-0.5, (WIDTH, KINDS)).astype("f"),
}
opt = jaxshard.zero2(optax.adamw(1e-3), jaxshard.make_mesh())


def cross_entropy(logits, kind):
    return optax.softmax_cross_entropy_with_integer_labels(logits, kind)


def mean_loss(params, batch):
    return cross_entropy(jnp.tanh(batch["x"] @ params["w"]) @ params["head"], batch["kind"]).mean()


# %% [markdown]
# jaxshard follows the rows through the traced loss, before anything is compiled. The line `rows:` of the layout has the
# result. `jaxshard.check` computes loss and gradients with the rows on different devices and in different orders, and
# compares. The code records the largest difference of a gradient from that of one device.

# %%
ERRORS = {}


def averaged(loss_fn, *args, batch=batch, opt=opt, **options):
    """(loss, gradients, what is wrong with averaging) on eight devices that average; the verdict is printed."""
    f = jaxshard.value_and_grad(loss_fn, opt, loss_view="local", **options)
    value, grads = f(params, batch, *args)
    verdict = str(f.layout(params, batch, *args)).splitlines()[-1]
    print(textwrap.fill(verdict, 115))
    return value, grads, "" if verdict.startswith("rows: the loss is a mean over rows") else verdict


def assert_right(loss_fn, batch=batch):
    """By default, the unchanged loss on eight devices equals that on one."""
    value, _ = jaxshard.value_and_grad(loss_fn, opt)(params, batch)
    one = loss_fn(params, batch)
    print(f"by default: {value:.4f} on eight devices, {one:.4f} on one")
    assert abs(value / one - 1) < 1e-5


def checked(name, loss_fn, batch=batch, **options):
    report = jaxshard.check(loss_fn, opt, params, batch, **options)
    ERRORS[name] = report.differences["all rows on one device"].worst[1]
    return report


averaged(mean_loss)
report = checked("mean over rows", mean_loss)
print(report)
assert report.ok

# %% [markdown]
# ## BatchNorm
#
# BatchNorm subtracts the mean of the rows, and each device would use the mean of its own rows. The message names the
# lines and the fix.


# %%
def normalized(h):
    mean = h.mean(0)
    return (h - mean) / jnp.sqrt(((h - mean) ** 2).mean(0) + 1e-5)


def batchnorm_loss(params, batch, normalized=normalized):
    hidden = normalized(batch["x"] @ params["w"])
    return cross_entropy(jnp.tanh(hidden) @ params["head"], batch["kind"]).mean()


assert_right(batchnorm_loss)
_, _, text = averaged(batchnorm_loss)
report = checked("BatchNorm", batchnorm_loss)
print("\nchecked by numbers:")
for way, far in report.differences.items():
    print(f"  {way:<40} the loss is {far.loss:.0e} off, the gradient of {far.worst[0]} {far.worst[1]:.0e}")
assert "jax.lax.pmean" in text
assert not report.ok

# %% [markdown]
# The fix averages the mean and the mean square over the devices. In flax it is `BatchNorm(axis_name="data")`.


# %%
def synchronized(h):
    mean, square = jax.lax.pmean((h.mean(0), (h**2).mean(0)), "data")
    return (h - mean) / jnp.sqrt(square - mean**2 + 1e-5)


def fixed_batchnorm_loss(params, batch):
    return batchnorm_loss(params, batch, normalized=synchronized)


_, _, text = averaged(fixed_batchnorm_loss)
assert text == ""
assert checked("BatchNorm, fixed", fixed_batchnorm_loss).ok

# %% [markdown]
# One feature of the norm's output. If each device normalizes alone, the kinds are no longer distinguishable: their
# difference has been subtracted.

# %%
outputs = {"one device": np.asarray(normalized(batch["x"] @ params["w"]))}
for title, function in (("8 devices, each alone", normalized), ("8 devices, fixed", synchronized)):
    alone = jaxshard.predict(lambda p, b, function=function: function(b["x"] @ p["w"]), opt, loss_view="local")
    outputs[title] = np.asarray(alone(params, batch))

feature = np.argmax(np.abs(outputs["one device"].reshape(KINDS, -1, WIDTH).mean(1)).max(0))
fig, panels = plt.subplots(1, 3, figsize=(10, 2.8), layout="constrained", sharey=True)
for axes, (title, output) in zip(panels, outputs.items(), strict=True):
    for edge in range(0, ROWS + 1, ROWS // N):
        axes.axvline(edge - 0.5, color="#e8e8e8", linewidth=1)
    axes.scatter(np.arange(ROWS), output[:, feature], 22, kinds, cmap="viridis")
    axes.set(title=title, xlabel="row")
    axes.title.set_color(RED if "alone" in title else BLUE)
panels[0].set_ylabel("normalized feature")
plt.show()

spread = {title: float(output[:, feature].reshape(KINDS, -1).mean(1).std()) for title, output in outputs.items()}
print("spread of the kinds' means:", ", ".join(f"{title} {size:.2f}" for title, size in spread.items()))
assert spread["8 devices, each alone"] < 1e-5 < 0.5 < spread["one device"]
np.testing.assert_allclose(outputs["8 devices, fixed"], outputs["one device"], atol=1e-4)

# %% [markdown]
# ## Contrastive losses
#
# InfoNCE classifies which of all rows is a row's partner. A device that sees only 8 rows classifies among 8, which is
# far easier: an untrained model has a loss of log 8, not of log 64.


# %%
def embedded(x, w):
    y = x @ w
    return y / jnp.linalg.norm(y, axis=-1, keepdims=True)


def infonce(params, batch):
    one, two = embedded(batch["x"], params["w"]), embedded(jnp.cos(batch["x"]), params["w"])
    similar = one @ two.T / 0.1
    return cross_entropy(similar, jnp.arange(len(one))).mean()


assert_right(infonce)
wrong, _, text = averaged(infonce)
right = infonce(params, batch)
print(f"\nthe loss: {wrong:.3f} on eight devices, {right:.3f} on one")
assert not checked("InfoNCE", infonce).ok
assert "jax.lax.all_gather" in text
assert wrong < right - 1

# %% [markdown]
# The fix gathers one side. Each device then compares its 8 rows with all 64, and a row's partner has the row's index in
# the full batch.


# %%
def fixed_infonce(params, batch):
    one, two = embedded(batch["x"], params["w"]), embedded(jnp.cos(batch["x"]), params["w"])
    similar = one @ jax.lax.all_gather(two, "data", tiled=True).T / 0.1
    return cross_entropy(similar, jax.lax.axis_index("data") * len(one) + jnp.arange(len(one))).mean()


value, _, text = averaged(fixed_infonce)
print(f"the loss: {value:.3f} on eight devices")
assert text == ""
assert abs(value / right - 1) < 1e-5
assert checked("InfoNCE, fixed", fixed_infonce).ok

# %%
similar = np.asarray(embedded(batch["x"], params["w"]) @ embedded(np.cos(batch["x"]), params["w"]).T)
same_device = np.kron(np.eye(N), np.ones((ROWS // N, ROWS // N))) > 0
fig, panels = plt.subplots(1, 2, figsize=(8, 3.9), layout="constrained", sharey=True)
for axes, seen, title, colour in zip(
    panels, (same_device, np.full_like(same_device, True)), ("each device alone", "fixed"), (RED, BLUE), strict=True
):
    image = axes.imshow(np.where(seen, similar, np.nan), cmap="RdBu_r", vmin=-0.8, vmax=0.8)
    axes.hlines(np.arange(0, ROWS + 1, ROWS // N) - 0.5, -0.5, ROWS - 0.5, color=GREY, linewidth=0.6)
    axes.set_title(f"{title}: {seen.sum():,} pairs", color=colour)
    axes.set(xlabel="row, other side", ylabel="row" if axes is panels[0] else "")
fig.colorbar(image, ax=panels, label="similarity", shrink=0.8)
plt.show()

# %% [markdown]
# ## A sum
#
# The average of the devices' sums is the batch's sum divided by the number of devices. AdamW hides this, because it
# divides by the gradient's size; clipping and SGD do not.


# %%
def sum_loss(params, batch):
    return cross_entropy(jnp.tanh(batch["x"] @ params["w"]) @ params["head"], batch["kind"]).sum()


assert_right(sum_loss)
_, _, text = averaged(sum_loss)
assert not checked("sum", sum_loss).ok
assert "Return the mean" in text

# %%
counts = (1, 2, 4, 8)
norms = {"the sum": [], "the mean, times 64": []}
for count in counts:
    mesh = jaxshard.make_mesh(devices=jax.devices()[:count])
    some = jaxshard.zero2(optax.adamw(1e-3), mesh)
    for name, loss_fn, factor in (("the sum", sum_loss, 1), ("the mean, times 64", mean_loss, ROWS)):
        _, grads = jaxshard.value_and_grad(loss_fn, some, loss_view="local")(params, batch)
        norms[name].append(factor * float(optax.tree.norm(jax.device_get(grads))))

_, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for (name, values), colour in zip(norms.items(), (RED, BLUE), strict=True):
    axes.plot(counts, values, "o-", color=colour, label=name)
axes.set(xlabel="devices", ylabel="norm of the gradient", ylim=(0, None), xticks=counts)
axes.legend(frameon=False)
plt.show()
np.testing.assert_allclose(np.multiply(norms["the sum"], counts), norms["the sum"][0], rtol=1e-5)
np.testing.assert_allclose(norms["the mean, times 64"], norms["the sum"][0], rtol=1e-5)

# %% [markdown]
# ## Padding
#
# Rows of different lengths are padded, and the mean is over real tokens. Devices have different numbers of these, so
# the mean of the devices' means gives tokens of short rows more weight. The rows here are sorted by length, as many
# loaders do.

# %%
LENGTH = 24
lengths = np.sort(rng.integers(2, LENGTH + 1, ROWS))
padded = {
    "x": rng.normal(size=(ROWS, LENGTH, FEATURES)).astype("f"),
    "kind": rng.integers(0, KINDS, (ROWS, LENGTH)),
    "mask": (np.arange(LENGTH) < lengths[:, None]).astype("f"),
}


def token_losses(params, batch):
    return cross_entropy(jnp.tanh(batch["x"] @ params["w"]) @ params["head"], batch["kind"]) * batch["mask"]


def padded_loss(params, batch):
    return token_losses(params, batch).sum() / batch["mask"].sum()


assert_right(padded_loss, padded)
wrong, _, text = averaged(padded_loss, batch=padded)
assert not checked("padding", padded_loss, padded).ok
assert "weighted=True" in text

# %% [markdown]
# The fix leaves the division to jaxshard: with `weighted=True` the loss returns both sums. jaxshard adds them over all
# devices and microbatches, then divides.


# %%
def fixed_padded_loss(params, batch):
    return token_losses(params, batch).sum(), batch["mask"].sum()


value, _, text = averaged(fixed_padded_loss, batch=padded, weighted=True)
assert text == ""
assert checked("padding, fixed", fixed_padded_loss, padded, weighted=True).ok

own = padded["mask"].reshape(N, -1).sum(1)  # real tokens of each device
weights = {
    "each device alone": padded["mask"] / (N * np.repeat(own, ROWS // N)[:, None]),
    "fixed": padded["mask"] / padded["mask"].sum(),
}
losses = np.asarray(token_losses(params, padded))
for each, measured in zip(weights.values(), (wrong, value), strict=True):
    assert abs((losses * each).sum() / measured - 1) < 1e-5  # these are the weights that the devices gave

# %%
fig, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
for axes, (title, each), colour in zip(panels, weights.items(), (RED, BLUE), strict=True):
    relative = np.where(padded["mask"], each * padded["mask"].sum(), np.nan)
    image = axes.imshow(relative, cmap="viridis", aspect="auto", vmin=0, vmax=4.5)
    axes.hlines(np.arange(0, ROWS + 1, ROWS // N) - 0.5, -0.5, LENGTH - 0.5, color=GREY, linewidth=0.6)
    axes.set_title(f"{title}: {np.nanmin(relative):.2f} to {np.nanmax(relative):.2f}", color=colour)
    axes.set(xlabel="position", ylabel="row" if axes is panels[0] else "")
fig.colorbar(image, ax=panels, label="weight of a token (1: fair)", shrink=0.9)
plt.show()

# %% [markdown]
# ## Random numbers
#
# A key that the loss closes over is a constant of the program. In the local view, every device then drops the same
# positions in its rows, at every step.

# %%
key = jax.random.key(0)


def dropout_loss(params, batch, key=key):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    kept = 2 * hidden * jax.random.bernoulli(key, 0.5, hidden.shape)
    return cross_entropy(kept @ params["head"], batch["kind"]).mean(), kept  # this shows the mask


_, _, text = averaged(lambda params, batch: dropout_loss(params, batch)[0])
assert "Pass the key as a further argument" in text

# %% [markdown]
# The fix passes a new key at each step, as an argument. jaxshard folds the device's index into it.

# %%
drawn = jaxshard.predict(lambda params, batch: dropout_loss(params, batch)[1], opt, loss_view="local")
masks = {"closed over, any step": np.asarray(drawn(params, batch)) != 0}
for i in range(2):
    (_, kept), _, text = averaged(dropout_loss, jax.random.fold_in(key, i), has_aux=True)
    masks[f"an argument, step {i}"] = np.asarray(kept) != 0
    assert text == ""

fig, panels = plt.subplots(1, 3, figsize=(9, 4.2), layout="constrained", sharey=True)
for axes, (title, mask), colour in zip(panels, masks.items(), (RED, BLUE, BLUE), strict=True):
    axes.imshow(mask, cmap="Greys", aspect="auto")
    axes.hlines(np.arange(0, ROWS + 1, ROWS // N) - 0.5, -0.5, WIDTH - 0.5, color=colour, linewidth=1)
    axes.set_title(title, color=colour)
    axes.set(xlabel="feature", ylabel="row" if axes is panels[0] else "")
plt.show()

parts = {title: mask.reshape(N, -1) for title, mask in masks.items()}
assert (parts["closed over, any step"] == parts["closed over, any step"][0]).all()
for step in (0, 1):
    assert len(np.unique(parts[f"an argument, step {step}"], axis=0)) == N  # every device has its own mask
assert (masks["an argument, step 0"] != masks["an argument, step 1"]).any()

# %% [markdown]
# ## Custom derivatives
#
# A custom derivative may do anything. `limited` is the identity in the forward pass, and limits the norm of its
# gradient in the backward pass. jaxshard traces the rule too: it cannot prove that each row's gradient depends on this
# row only, so the loss sees all rows.


# %%
@jax.custom_vjp
def limited(h):
    return h


def forward(h):
    return h, None


def backward(_, gradient):
    return (gradient / jnp.maximum(1, jnp.linalg.norm(gradient) / 0.01),)


limited.defvjp(forward, backward)


def limited_loss(params, batch):
    return cross_entropy(jnp.tanh(limited(batch["x"] @ params["w"])) @ params["head"], batch["kind"]).mean()


_, _, text = averaged(limited_loss)
assert "not known" in text
_, grads = jaxshard.value_and_grad(limited_loss, opt)(params, batch)
one = jax.grad(limited_loss)(params, batch)
np.testing.assert_allclose(jax.device_get(grads["w"]), one["w"], rtol=1e-4, atol=1e-6)

# %% [markdown]
# In the local view each device would limit the norm of its own rows' gradient. `jaxshard.check` detects this: call it
# once for each loss that you run with `loss_view="local"`.

# %%
report = checked("custom gradient", limited_loss)
print(report)
assert not report.ok
assert "custom derivatives" in report.causes[0]

# %% [markdown]
# ## Errors before and after the fixes
#
# The largest difference of a gradient from that of one device, before and after the fix. The rest is rounding.

# %%
ERRORS["sum, fixed"] = ERRORS["mean over rows"]  # the mean of the same rows
names = ("BatchNorm", "InfoNCE", "sum", "padding")
_, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
for shift, suffix, colour, label in ((-0.19, "", RED, "as one writes it"), (0.19, ", fixed", BLUE, "fixed")):
    values = [ERRORS[name + suffix] for name in names]
    axes.barh(np.arange(len(names)) + shift, values, 0.36, color=colour, label=label)
    for y, value in enumerate(values):
        axes.text(value * 1.3, y + shift, f"{value:.0e}" if value < 0.01 else f"{value:.0%}", va="center")
axes.set(
    yticks=range(len(names)),
    yticklabels=names,
    xscale="log",
    xlim=(1e-8, 300),
    xlabel="difference, relative to the gradient on eight devices",
)
axes.invert_yaxis()
axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()
assert all(ERRORS[name] > 0.01 and ERRORS[f"{name}, fixed"] < 1e-4 for name in names)

# %% [markdown]
# ## Where to go next
#
# * **Any other loss**: it is correct unchanged. The page "Your loss" lists equivalent forms for the local view.
# * **Batch statistics and other state**: return them as `aux`, and pass them to the next step as an extra argument, as
#   in the example with BatchNorm.
# * **In your own test**: `jaxshard.check(..., raises=True)` raises an error if averaging a loss is wrong.
# * **On purpose**: if BatchNorm shall use the statistics of each device, pass `loss_view="local"`.
