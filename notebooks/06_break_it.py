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
# # Break a training run
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxshard/jaxshard/blob/main/notebooks/06_break_it.ipynb)
#
# Long runs meet preemption, crashes, bit flips on disks and in memory, and batches that make a gradient NaN. This
# notebook causes each of these in a small training run. You see what jaxshard detects, its messages, and that the run
# continues with the same bits as an undisturbed one.
#
# The notebook takes about a minute, on 8 simulated devices.

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
# The run that is killed needs its own process, so this is a complete training script. With `Preemption`, SIGTERM ends
# the run between two steps. `Checkpointer` stores checkpoints in a folder, `restore` continues from the newest, and
# `save` writes one every 20 steps, and one at the end.

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
# The script is stored in a temporary folder, so that this notebook and other processes can import it. `run` starts it
# in a process, reads the losses that it prints, and sends a signal after some steps.

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
# A scheduler sends SIGTERM before it takes a machine away. The run saves its step and ends.

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
# A process cannot react to SIGKILL: it ends at any instruction, perhaps while it writes a checkpoint. A checkpoint gets
# its name only when all of it is written, so every checkpoint is complete. Only later steps are lost.

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
# The same command resumes and runs to the end. A second, undisturbed run is for comparison.

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
# ## Resumed on other devices
#
# A restarted run often gets different machines. A checkpoint restores under any strategy, on any number of devices, and
# into plain optax, with the same bits, sharded as the template. On a different mesh, later steps sum in a different
# order, so rounding then differs.


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
# Disks and networks can flip bits, and the file stays readable. This code finds the bytes of a parameter in the newest
# checkpoint's files, and flips one bit of one of its numbers.

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
# `restore` checks the digest of each array. If you ask for the damaged step, it raises an error that names the leaf. If
# you ask for the newest, it warns, and restores the newest intact step.

# %%
with Checkpointer(folder / "broken") as checkpoints:
    error = error_of(CorruptCheckpointError, checkpoints.restore, template, last)
    print("error:", error)
    assert (error.step, error.leaf) == (last, "params/middle")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step, older = checkpoints.restore(template)
    print("warning:", caught[0].message)
    print("restored: step", step)
    assert step == checkpoints.latest_valid() == max(saved for saved in checkpoints.steps() if saved != last)
    assert digests(older) == {path: leaf["digest"] for path, leaf in checkpoints.info(step)["leaves"].items()}

# %% [markdown]
# ## A bit flips in memory
#
# Under data parallelism each device stores a replica of the parameters, and all replicas should be equal. If one is
# not, nothing fails: that device's gradients are slightly wrong from then on, and every update uses them. Here a bit
# flips in the replica on device 5.

# %%
opt = jaxshard.ddp(training.optimizer, jaxshard.make_mesh())
healthy = opt.place(older["params"])


def flipped(x, device, bit):
    """The array, with one bit flipped in the first number of one device's replica."""
    replicas = [np.array(shard.data) for shard in x.addressable_shards]
    replicas[device].reshape(-1).view(np.uint32)[0] ^= 1 << bit
    placed = [jax.device_put(data, shard.device) for data, shard in zip(replicas, x.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)


broken = healthy | {"middle": flipped(healthy["middle"], device=5, bit=20)}
error = error_of(ReplicaError, digests, broken)
print(error)
assert list(error.digests) == ["middle"]
assert " on device 5 of process 0 " in str(error)

# %% [markdown]
# `digests` costs one pass over the arrays. The trainer calls it every `train.check_every` steps. Each save calls it
# too, so a mixture of two states is never written. `synchronize` makes all replicas equal to the one on the first
# device. If that one is damaged, restore a checkpoint instead.

# %%
with Checkpointer(folder / "mixed") as checkpoints:
    error_of(ReplicaError, checkpoints.save, 1, {"params": broken})
    assert checkpoints.steps() == []

repaired = opt.synchronize(broken)
assert digests(repaired) == digests(healthy)

fig, panels = plt.subplots(1, 3, figsize=(10, 2.2), layout="constrained", sharey=True)
for axes, title, params in zip(
    panels, ("before", "a bit has flipped", "repaired"), (healthy, broken, repaired), strict=True
):
    found = replica_digests(params)
    for row, digest in enumerate(found.values()):
        usual = np.median(digest)
        for device, each in enumerate(digest.flat):
            axes.add_patch(plt.Rectangle((device, row), 0.9, 0.85, color=BLUE if each == usual else RED))
    axes.set(xlim=(-0.1, 8), ylim=(3, -0.1), title=title, xlabel="replica on device")
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
# checks loss and gradients on the devices. If any value is not finite, no device changes its params or state, and the
# step counts as skipped.

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

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    bits, found = train(range(STEPS))
print("warning:", caught[0].message)
print("steps skipped:", [i for i, skipped in enumerate(found["skipped"]) if skipped])

without_it, _ = train(i for i in range(STEPS) if i != BAD)
assert [i for i, skipped in enumerate(found["skipped"]) if skipped] == [BAD]
assert bits == without_it  # as without the bad batch
assert all(np.isnan(plain_losses[BAD:]))
assert len(caught) == 1

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
# A run that skips every step does not train. After `max_skips` skips in a row (default 20), the step raises an error.
# Params and state are those of the last good step, so you can save or inspect them.

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
# * **Hangs**: `jaxshard.guards.Watchdog` ends a process that takes no step for too long, and prints the stacks of all
#   its threads. With several processes, if one dies, the others end too, so that all can be restarted.
# * **All faults**: the page "Tested faults" lists more than 80, each with its result.
# * **Without code**: `jaxshard train` does all of this, and `jaxshard ckpt verify DIR` reads a folder's checkpoints and
#   names each damaged leaf.
