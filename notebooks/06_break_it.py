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
# # Break it
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxshard/jaxshard/blob/main/notebooks/06_break_it.ipynb)
#
# Long runs meet everything: preemption, crashes, disks and memory that flip a bit, a batch that makes a gradient NaN.
# This notebook does each of these to a small training run. You see what jaxshard notices, what it says, and that the
# run goes on with the bits it would have had.
#
# It takes about a minute, on eight devices that are simulated on the CPU.

# %%
# On Colab: %pip install --quiet "jaxshard[checkpoint]" matplotlib
import importlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxshard
from jaxshard.checkpoint import Checkpointer, CorruptCheckpointError
from jaxshard.digest import ReplicaError, digests, replica_digests

# %matplotlib inline
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # before the first computation
assert jax.device_count() == 8
plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 90})
BLUE, RED, YELLOW = "#1b3a57", "#e4572e", "#f2b134"


def error_of(kind, function, *args):
    """The error of this kind that the function raises; it must raise one."""
    try:
        function(*args)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


# %% [markdown]
# ## A training run that survives
#
# What is to be killed must be a process of its own, so here is a whole training script. For its survival, `Preemption`
# turns SIGTERM into an end between two steps, `Checkpointer` keeps checkpoints in a folder, `restore` continues
# from the newest, and `save` writes one every 20 steps, and one at the end.

# %%
SCRIPT = """
import sys, jax, jax.numpy as jnp, numpy as np, optax, jaxshard
from jaxshard.checkpoint import Checkpointer
from jaxshard.guards import Preemption

optimizer, shapes = optax.adamw(2e-3), {"up": (32, 256), "middle": (256, 256), "down": (256, 8)}
rng = np.random.default_rng(0)
initial = {name: rng.normal(0, shape[0] ** -0.5, shape).astype("f") for name, shape in shapes.items()}

def batch_at(i):  # the rows depend on the step's number alone
    x = np.random.default_rng([1, i]).normal(size=(64, 32)).astype("f")
    return {"x": x, "y": np.sin(2 * x[:, :8])}

def loss_fn(params, batch):
    x = jnp.tanh(jnp.tanh(batch["x"] @ params["up"]) @ params["middle"])
    return jnp.mean((x @ params["down"] - batch["y"]) ** 2)

def main(folder, last):
    opt = jaxshard.zero2(optimizer, jaxshard.make_mesh())
    step = jaxshard.train_step(loss_fn, opt)
    i, tree = 0, {"params": opt.place(initial), "state": opt.init(initial)}
    with Preemption() as preemption, Checkpointer(folder) as checkpoints:
        if checkpoints.steps():
            i, tree = checkpoints.restore(tree)
        while i < last and not preemption.reached(i):
            params, state, metrics = step(tree["params"], tree["state"], batch_at(i))
            i, tree = i + 1, {"params": params, "state": state}
            print(i, float(metrics["loss"]), flush=True)
            if i % 20 == 0:
                checkpoints.save(i, tree)
        checkpoints.save(i, tree)
    sys.exit(0 if i == last else preemption.status)
"""

# %% [markdown]
# The script lies in a temporary folder, so that this notebook and other processes can import it. `run` starts it in a
# process, reads the losses that it prints, and sends a signal once it has taken some steps.

# %%
place = tempfile.TemporaryDirectory()
folder = Path(place.name)
(folder / "training.py").write_text(SCRIPT)
sys.path.insert(0, place.name)
training = importlib.import_module("training")

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
START = f"import sys; sys.path.insert(0, {place.name!r}); import training; training.main"


def run(name, last=10**9, number=None, after=75):
    """Trains in a process, until step `last`, or until a signal of this number some steps from now."""
    losses = {}
    command = [sys.executable, "-c", f"{START}({str(folder / name)!r}, {last})"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            step, loss = line.split()
            losses[int(step)] = float(loss)
            if number is not None and len(losses) == after:
                process.send_signal(number)
    return process.returncode, losses


# %% [markdown]
# ## Preempted
#
# SIGTERM is what a scheduler sends before it takes a machine away. The run has no end of its own here.

# %%
status, preempted = run("broken", number=signal.SIGTERM)
with Checkpointer(folder / "broken") as checkpoints:
    saved = checkpoints.steps()
print(f"exit status {status}, last step {max(preempted)}, saved steps {saved}")
assert status == 128 + signal.SIGTERM
assert saved[-1] == max(preempted)  # not a step is lost

# %% [markdown]
# ## Killed
#
# Nothing can be done about SIGKILL: the process is gone between two of its instructions, perhaps while it writes a
# checkpoint. A step counts as saved only when all of it is written, so what is there is whole. Only the steps since are
# lost.

# %%
status, killed = run("broken", number=signal.SIGKILL)
with Checkpointer(folder / "broken") as checkpoints:
    saved = checkpoints.steps()
    assert checkpoints.latest_valid() == saved[-1]  # reads all arrays and compares digests
print(f"went on at step {min(killed)}; exit status {status}, last step {max(killed)}, saved steps {saved}")
assert min(killed) == max(preempted) + 1
assert status == -signal.SIGKILL
assert 0 <= max(killed) - saved[-1] <= 40  # a save waits until the one before is written

# %% [markdown]
# ## Resumed, bit for bit
#
# The same command goes on to the end. Beside it, a run that nobody disturbed.

# %%
last = max(killed) + 40
status, resumed = run("broken", last)
_, undisturbed = run("undisturbed", last)
print(f"went on at step {min(resumed)} of {last}; exit status {status}")

index = {}
for name in ("broken", "undisturbed"):
    with Checkpointer(folder / name) as checkpoints:
        index[name] = checkpoints.info(last)["leaves"]
assert status == 0
assert min(resumed) == saved[-1] + 1
assert len(undisturbed) == last
for part in (preempted, killed, resumed):
    assert all(undisturbed[step] == loss for step, loss in part.items())  # every digit of every loss
assert index["broken"] == index["undisturbed"]  # params and state: shape, dtype and digest of each leaf
for path, leaf in list(index["broken"].items())[:4]:
    print(f"{path:<22} {leaf['shape']}, digest {leaf['digest']:08x} in both")

# %%
_, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
axes.plot(undisturbed.keys(), undisturbed.values(), color="#dddddd", linewidth=10, label="undisturbed")
for label, part, colour, width in (
    ("started", preempted, BLUE, 2),
    ("went on", killed, RED, 4),
    ("went on again", resumed, YELLOW, 2),
):
    axes.plot(part.keys(), part.values(), color=colour, linewidth=width, label=label)
for part, colour, name in ((preempted, BLUE, "SIGTERM"), (killed, RED, "SIGKILL")):
    axes.axvline(max(part), color=colour, linestyle=":")
    axes.annotate(name, (max(part), 0.83), (4, 0), textcoords="offset points", color=colour)
axes.set(xlabel="step", ylabel="loss", ylim=(0.2, 0.87), title="Killed twice, and not a bit lost")
axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.65))
plt.show()

# %% [markdown]
# ## Resumed elsewhere
#
# The machines that come back are rarely those that went. A checkpoint restores under any strategy, on any number of
# devices, and into plain optax: with the same bits, laid out as the template says. The steps that follow sum in another
# order on another mesh, so from there on rounding differs.


# %%
def continued(opt, number_of_steps=20):
    """Restores step `last` under a strategy, and trains on; returns the digests at the start, and the losses."""
    template = {"params": opt.place(training.initial), "state": opt.init(training.initial)}
    with Checkpointer(folder / "undisturbed") as checkpoints:
        first, tree = checkpoints.restore(template)
    found, losses, step = digests(tree), [], jaxshard.train_step(training.loss_fn, opt)
    params, state = tree["params"], tree["state"]
    for i in range(first, first + number_of_steps):
        params, state, metrics = step(params, state, training.batch_at(i))
        losses.append(float(metrics["loss"]))
    return found, losses


reference = None
for strategy, count in (("zero2", 8), ("ddp", 1), ("zero1", 2), ("zero3", 4), ("fsdp", 8)):
    mesh = jaxshard.make_mesh(devices=jax.devices()[:count])
    found, losses = continued(getattr(jaxshard, strategy)(training.optimizer, mesh))
    reference = reference or losses
    far = np.max(np.abs(np.divide(losses, reference) - 1))
    print(
        f"{strategy} on {count}: {len(found)} leaves with the bits that were saved; losses differ by {far:.0e} at most"
    )
    assert found == {path: leaf["digest"] for path, leaf in index["undisturbed"].items()}
    assert far < 1e-5

# %% [markdown]
# ## A bit flips in a file
#
# Disks and networks do that, and the file stays readable. So let us look in the newest checkpoint's files for the bytes
# of a parameter, and flip one bit of one of its numbers.

# %%
template = {"params": training.initial, "state": training.optimizer.init(training.initial)}
with Checkpointer(folder / "broken") as checkpoints:
    _, good = checkpoints.restore(template)
before = np.asarray(good["params"]["middle"])[0, :16]  # the first numbers of its first row

files = [path for path in (folder / "broken" / str(last)).rglob("*") if path.is_file()]
(file,) = (path for path in files if before.tobytes() in path.read_bytes())
data = bytearray(file.read_bytes())
data[data.index(before.tobytes()) + 3] ^= 1 << 5  # the fourth byte of the first number: bit 29, of its exponent
after = np.frombuffer(bytes(data), "f", 1, data.index(before[1:].tobytes()) - 4)
file.write_bytes(data)
print(f"{before[0]:.6g} has become {after[0]:.6g}")


# %%
def draw_bits(axes, row, number):
    bits = np.unpackbits(np.array([number], ">f4").view(np.uint8))
    colours = [RED if bit == 2 else "#7fb7be" if bit in range(1, 9) else "#e8e8e8" for bit in range(32)]
    for column, (bit, colour) in enumerate(zip(bits, colours, strict=True)):
        axes.add_patch(plt.Rectangle((column, row), 0.88, 0.8, color=colour))
        axes.text(column + 0.44, row + 0.42, bit, ha="center", va="center", color="white" if colour == RED else "black")
    axes.text(32.3, row + 0.42, f"{number:.4g}", va="center")


_, axes = plt.subplots(figsize=(9, 1.15), layout="constrained")
draw_bits(axes, 0, before[0])
draw_bits(axes, 1, after[0])
axes.text(-0.3, 0.42, "saved", ha="right", va="center")
axes.text(-0.3, 1.42, "in the file", ha="right", va="center")
axes.set(xlim=(-4, 37), ylim=(1.9, -0.1))
axes.axis("off")
plt.show()

# %% [markdown]
# The digest of each array is checked when it is loaded. Asked for this very step, `restore` raises an error that names
# the leaf. Asked for the newest, it warns, and takes the newest step without an error.

# %%
with Checkpointer(folder / "broken") as checkpoints:
    error = error_of(CorruptCheckpointError, checkpoints.restore, template, last)
    print("error:", error)
    assert (error.step, error.leaf) == (last, "params/middle")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step, older = checkpoints.restore(template)
    print("warning:", told[0].message)
    print("restored: step", step)
    assert step == checkpoints.latest_valid() == max(saved for saved in checkpoints.steps() if saved != last)
    assert digests(older) == {path: leaf["digest"] for path, leaf in checkpoints.info(step)["leaves"].items()}

# %% [markdown]
# ## A bit flips in memory
#
# Under data parallelism each device has a copy of the parameters, and all copies should be the same. If one is not,
# nothing fails: that device's gradients are a little wrong from then on, and all devices take part in them. Here a bit
# flips in the copy of device 5.

# %%
opt = jaxshard.ddp(training.optimizer, jaxshard.make_mesh())
healthy = opt.place(older["params"])


def flipped(x, device, bit):
    """The array, but for one bit of the first number of one device's copy."""
    copies = [np.array(shard.data) for shard in x.addressable_shards]
    copies[device].reshape(-1).view(np.uint32)[0] ^= 1 << bit
    placed = [jax.device_put(copy, shard.device) for copy, shard in zip(copies, x.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)


broken = healthy | {"middle": flipped(healthy["middle"], device=5, bit=20)}
error = error_of(ReplicaError, digests, broken)
print(error)
assert list(error.digests) == ["middle"]
assert " on device 5 of process 0 " in str(error)

# %% [markdown]
# `digests` costs one pass over the arrays. The trainer asks for it every so many steps (`train.check_every`), and each
# save does too, so a mixture of two states is never written. `synchronize` makes all copies equal to that of the first
# device. If that is the broken one, restore a checkpoint instead.

# %%
with Checkpointer(folder / "mixed") as checkpoints:
    error_of(ReplicaError, checkpoints.save, 1, {"params": broken})
    assert checkpoints.steps() == []

mended = opt.synchronize(broken)
assert digests(mended) == digests(healthy)

fig, panels = plt.subplots(1, 3, figsize=(10, 2.2), layout="constrained", sharey=True)
for axes, title, params in zip(
    panels, ("before", "a bit has flipped", "mended"), (healthy, broken, mended), strict=True
):
    found = replica_digests(params)
    for row, digest in enumerate(found.values()):
        usual = np.median(digest)
        for device, each in enumerate(digest.flat):
            axes.add_patch(plt.Rectangle((device, row), 0.9, 0.85, color=BLUE if each == usual else RED))
    axes.set(xlim=(-0.1, 8), ylim=(3, -0.1), title=title, xlabel="copy on device")
    axes.set_xticks(np.arange(8) + 0.45, range(8))
    axes.set_yticks(np.arange(3) + 0.43, found)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    assert sum(int(np.sum(digest != np.median(digest))) for digest in found.values()) == (params is broken)
plt.show()

# %% [markdown]
# ## A gradient that is not a number
#
# One bad row is enough: its NaN reaches the gradient, the moments and all parameters, and they stay NaN. jaxshard
# looks at loss and gradients on the devices. If anything is not finite, no device changes anything, and the step counts
# as skipped.

# %%
STEPS, BAD = 60, 25


def batch_at(i, bad=BAD):
    batch = training.batch_at(i)
    if i == bad:
        batch["x"][3, 7] = np.nan
    return batch


@jax.jit
def plain_step(params, state, batch):
    loss, grads = jax.value_and_grad(training.loss_fn)(params, batch)
    updates, state = training.optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def train(steps):
    opt = jaxshard.zero2(training.optimizer, jaxshard.make_mesh())
    step, params, state = (
        jaxshard.train_step(training.loss_fn, opt),
        opt.place(training.initial),
        opt.init(training.initial),
    )
    found = {"loss": [], "skipped": []}
    for i in steps:
        params, state, metrics = step(params, state, batch_at(i))
        for name, values in found.items():
            values.append(float(metrics[name]))
    return digests({"params": params, "state": state}), found


# %% [markdown]
# Three runs: plain optax on one device, jaxshard on eight, and jaxshard without the bad batch.

# %%
plain, state, plain_losses = training.initial, training.optimizer.init(training.initial), []
for i in range(STEPS):
    plain, state, loss = plain_step(plain, state, batch_at(i))
    plain_losses.append(float(loss))

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    bits, found = train(range(STEPS))
print("warning:", told[0].message)
print("steps skipped:", [i for i, skipped in enumerate(found["skipped"]) if skipped])

without_it, _ = train(i for i in range(STEPS) if i != BAD)
assert [i for i, skipped in enumerate(found["skipped"]) if skipped] == [BAD]
assert bits == without_it  # as if the bad batch had never come
assert all(np.isnan(plain_losses[BAD:]))
assert len(told) == 1

# %%
_, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
axes.plot(plain_losses, color=YELLOW, linewidth=6, label=f"plain optax, NaN from step {BAD} on")
axes.plot(found["loss"], color=BLUE, linewidth=1.8, label="jaxshard")
axes.axvline(BAD, color=RED, linestyle=":")
axes.annotate("a NaN in one row", (BAD, 0.68), (6, 0), textcoords="offset points", color=RED)
axes.set(xlabel="step", ylabel="loss", title="One step skipped, or all lost")
axes.legend(frameon=False, loc="upper right")
plt.show()

# %% [markdown]
# A run that skips each step does not train. After `max_skips` in a row, 20 if you do not say, there is an error. Params
# and state are as the last good step left them, to be saved or looked at.

# %%
opt = jaxshard.zero2(training.optimizer, jaxshard.make_mesh())
step = jaxshard.train_step(training.loss_fn, opt, max_skips=3)
tree = {"params": opt.place(training.initial), "state": opt.init(training.initial)}
start = digests(tree)


def train_on_nothing_else():
    for _ in itertools.count():
        tree["params"], tree["state"], _ = step(tree["params"], tree["state"], batch_at(BAD))


with warnings.catch_warnings(record=True):
    error = error_of(jaxshard.NonFiniteError, train_on_nothing_else)
print(error)
assert (error.step, error.leaf) == (4, "down")
assert digests(tree) == start
place.cleanup()

# %% [markdown]
# ## Where to go next
#
# * **Hangs**: `jaxshard.guards.Watchdog` ends a process that takes no step for too long, with the stacks of all its
#   threads. With several processes, one that dies ends the others within seconds, so that all can be started again.
# * **The whole list**: the page on faults has more than 60 that were tried, each with the answer and the test.
# * **Without code**: `jaxshard train` does all of this by itself, and `jaxshard ckpt verify DIR` reads a folder's
#   checkpoints and names the leaf that is not what was saved.
