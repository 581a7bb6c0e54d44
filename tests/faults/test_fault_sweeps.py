"""Faults at many random moments and places. Each prints its seed, and what it did: `pytest -m nightly -s` shows it."""

import random
import re
import shutil
import signal
import time
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from group import Group, program, trainer
from oracle import assert_same_bits
from programs import TX, numbers, numbers_placed
from test_checkpointer import SPECS, noise, state_under, template_under
from test_fault_train import TINY, losses, state_bytes, train

import jaxshard
from jaxshard.checkpoint import Checkpointer, CorruptCheckpointError


def told(*words):
    print(*words, flush=True)


# F4: killed while it saves.


def kill_while_saving(folder, tmp_path, count, rng):
    """SIGKILL to one of the processes at a random moment of a save: the step that it was saving.

    None: by the process's own log, that save had just ended.
    """
    with Group(program("saves", folder, count), tmp_path, count) as group:
        group.until(lambda: len(ended(group, 0)) > 2, "three saves")
        step, seconds = ended(group, 0)[-1]
        group.says(f"begin {int(step) + 2}\n")
        time.sleep(rng.uniform(0, float(seconds)))
        index = rng.randrange(count)
        group.signal(signal.SIGKILL, index)
        statuses = group.wait(60)
        assert statuses[index] == -signal.SIGKILL
        assert all(statuses), statuses
        step = int(re.findall(r"begin (\d+)\n", group.log(index))[-1])
        left = sorted(path.name for path in folder.iterdir() if "tmp" in path.name or "deleted" in path.name)
        within = int(ended(group, index)[-1][0]) < step
        told(f"process {index} of {count} killed in save {step}: {within}; statuses {statuses}; left {left}")
        return step if within else None


def ended(group, index):
    """(step, seconds) of the saves that a process saw the end of."""
    return re.findall(r"end (\d+) ([\d.]+)\n", group.log(index))


def look_after_a_kill(folder, step):
    """A process that knows nothing finds the step before or this one, whole, and saves the next; which did it find?"""
    mesh = jaxshard.make_mesh(devices=jax.devices()[:4])
    template = {**numbers_placed(0, mesh), "step": 0}
    with Checkpointer(folder) as checkpoints:
        steps = checkpoints.steps()
        newest = steps[-1]
        assert newest in (step - 1, step)
        assert_is_step(newest, checkpoints.restore(template))
        for each in steps:
            assert_is_step(each, checkpoints.restore(template, each))
        checkpoints.save(newest + 1, {**numbers_placed(newest + 1, mesh), "step": newest + 1}, blocking=True)
        assert not [path for path in folder.iterdir() if "tmp" in path.name or "deleted" in path.name]
        assert_is_step(newest + 1, checkpoints.restore(template))
    return "the one being saved" if newest == step else "the one before"


def assert_is_step(step, found):
    assert found[0] == found[1].pop("step") == step
    assert_same_bits(found[1], numbers(step))


def killed_while_saving(tmp_path, count, moments, seed):
    """Which step was found, after each of so many kills within a save."""
    rng, found = random.Random(seed), []
    told(f"seed {seed}")
    while len(found) < moments:
        step = kill_while_saving(tmp_path / "ck", tmp_path, count, rng)
        if step is not None:
            found.append(look_after_a_kill(tmp_path / "ck", step))
    told(count, "processes:", dict(Counter(found)))
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_a_process_killed_within_a_save_leaves_the_old_step_or_the_new_one(tmp_path, count):
    """F4."""
    killed_while_saving(tmp_path, count, 1, seed=4)


@pytest.mark.nightly
def test_processes_killed_at_20_moments_of_a_save_leave_the_old_step_or_the_new_one(tmp_path):
    """F4: 10 moments of one process, 10 of two; each goes on in the folder that the one before left."""
    for count in (1, 2):
        (tmp_path / str(count)).mkdir()
        assert len(killed_while_saving(tmp_path / str(count), count, 10, seed=count)) == 10


# F5: restored on other devices, under other strategies.


def places():
    """A name and an optimizer for each strategy on each number of devices that it fits."""
    yield "plain optax", None
    for count in (1, 2, 3, 4, 8):
        devices = jax.devices()[:count]
        for strategy in ("ddp", "zero1", "zero2", "zero3"):
            mesh = jaxshard.make_mesh(devices=devices)
            yield f"{strategy} on {count}", getattr(jaxshard, strategy)(TX, mesh, min_shard_size=1)
        if count % 2 == 0:
            mesh = jaxshard.make_mesh(devices=devices, tensor=2)
            yield f"tensor=2 on {count}", jaxshard.tensor_parallel(TX, mesh, SPECS, min_shard_size=1)
    mesh = jaxshard.make_mesh(pipeline=2, tensor=2)
    yield "hybrid 2x2x2", jaxshard.hybrid(TX, mesh, SPECS, 3, min_shard_size=1)


def assert_laid_out(found, template):
    for x, like in zip(jax.tree.leaves(found), jax.tree.leaves(template), strict=True):
        assert like.sharding is None or x.sharding.is_equivalent_to(like.sharding, x.ndim)


@pytest.mark.nightly
def test_every_place_restores_what_every_other_saved(tmp_path):
    """F5."""
    made, cells = dict(places()), 0
    for i, (saver, opt) in enumerate(made.items()):
        saved = state_under(opt, seed=i)
        with Checkpointer(tmp_path / str(i)) as checkpoints:
            checkpoints.save(1, saved)
            for other in made.values():
                template = template_under(other)
                _, found = checkpoints.restore(template)
                assert_same_bits(found, noise(seed=i))
                assert_laid_out(found, template)
                cells += 1
        told(f"saved by {saver}: {len(made)} restored")
    assert cells == 25**2
    told(cells, "cells")


def test_two_processes_restore_what_one_saved_and_one_what_two_did(tmp_path):
    """F5: 2 processes x 2 devices, 1 x 4 and 1 x 1."""
    lone = {
        f"{n} devices": jaxshard.zero2(TX, jaxshard.make_mesh(devices=jax.devices()[:n]), min_shard_size=1)
        for n in (1, 4)
    }
    for name, opt in lone.items():
        with Checkpointer(tmp_path / name) as checkpoints:
            checkpoints.save(1, state_under(opt, seed=2))
    names = [tmp_path / name for name in lone]
    with Group(program("noise_saved_and_restored", "zero3", tmp_path / "two", *names), tmp_path) as group:
        assert group.wait() == [0, 0], group.text()
        assert all(f"whole {name}" in group.log(i) for name in names for i in range(2))
    for opt in (*lone.values(), None):
        template = template_under(opt)
        _, found = Checkpointer(tmp_path / "two").restore(template)
        assert_same_bits(found, noise(seed=1))
        assert_laid_out(found, template)


# F6: flipped bits.

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "uint32", "bool", "complex64")


def leaves_of_many_types(seed):
    """Some cut over 8 devices, so that there are several pieces of each."""
    rng, mesh = np.random.default_rng(seed), jaxshard.make_mesh()
    whole = {name: np.asarray(jnp.asarray(rng.normal(size=(64, 960)) * 50).astype(name)) for name in DTYPES}
    cut = {f"{name} cut": x for name, x in whole.items()}
    return jax.tree.map(jnp.asarray, whole) | jax.device_put(cut, jax.NamedSharding(mesh, jax.P("data")))


def outcome(folder, saved, older):
    """What restoring says: the leaf that is corrupt, "unreadable", or None where it gives exactly what was saved."""
    checkpoints = Checkpointer(folder)
    try:
        assert_same_bits(checkpoints.restore(saved, 2)[1], saved)
        return None
    except CorruptCheckpointError as error:
        found = error.leaf or "unreadable"
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", UserWarning)
        step, earlier = checkpoints.restore(saved)
    assert any("checkpoint 2 is corrupt" in str(warning.message) for warning in heard)
    assert step == 1
    assert_same_bits(earlier, older)
    return found


def flipped(path, rng):
    """Flips one bit of a file, and returns its place."""
    data = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return bit


def found_of(files, count, good, trees, rng):
    """How each of so many flips, one in each copy of a folder and spread over its files, shows."""
    found = []
    for i in range(count):
        copy, name = good.with_name(f"bad{i}"), files[i % len(files)]  # nothing may come from what was read before
        shutil.copytree(good, copy)
        bit = flipped(copy / name, rng)
        found.append(outcome(copy, *trees))
        told(f"bit {bit} of {name}: {found[-1] or 'nothing is wrong'}")
        shutil.rmtree(copy)
    return found


@pytest.mark.nightly
def test_every_one_of_200_flipped_bits_is_found(tmp_path):
    """F6; and 200 more in all other files, which never make a restored bit another."""
    seed, good, older, saved = 6, tmp_path / "good", leaves_of_many_types(1), leaves_of_many_types(2)
    told(f"seed {seed}")
    rng = random.Random(seed)
    with Checkpointer(good) as checkpoints:
        checkpoints.save(1, older)
        checkpoints.save(2, saved)
    files = [
        path.relative_to(good) for path in sorted((good / "2").rglob("*")) if path.is_file() and path.stat().st_size
    ]
    data = [name for name in files if name.parent.name == "d"]
    found = found_of(data, 200, good, (saved, older), rng)
    told("data:", dict(Counter(found)))
    others = found_of([name for name in files if name not in data], 200, good, (saved, older), rng)
    told("other files:", dict(Counter(others)))
    assert None not in found
    assert set(found) - {"unreadable"} <= set(saved)
    assert len(set(found)) > len(saved) / 2


# F26: killed and told to end, again and again.

SOAK_STEPS, SOAK_EVENTS, SOAK_STARTS = 200, 30, 6


def saved_step(folder):
    return max(Checkpointer(folder / "model").steps(), default=0)


class Soak:
    """A run that is started again after each event, as a launcher would do it."""

    def __init__(self, tmp_path, options, seed):
        self.arguments = trainer(*options, "--out", tmp_path / "parts", "--resume-if-saved")
        self.tmp_path, self.out, self.random = tmp_path, tmp_path / "parts", random.Random(seed)

    def killed_while_starting(self):
        """SIGKILL at a random moment before or soon after the first step; what is left of the group is ended, too."""
        before, index, after = self._now(), self.random.randrange(2), self.random.uniform(0.5, 12)
        with Group(self.arguments, self.tmp_path, devices=2) as group:
            end = time.monotonic() + after
            while time.monotonic() < end and not self._taken(before):
                assert all(process.poll() is None for process in group.processes), group.text()
                time.sleep(0.02)
            group.signal(signal.SIGKILL, index)
            assert group.processes[index].wait(10) == -signal.SIGKILL
        told(f"start from {before[0]}: process {index} killed after {after:.1f} s, {self._taken(before)} steps taken")

    def harmed(self, event, at):
        """A signal to a random process, once step `at` and one step of this start are taken."""
        number = self.random.choice([signal.SIGKILL, signal.SIGTERM])
        before, index = self._now(), self.random.randrange(2)
        delay, start = self.random.uniform(0, 0.3), time.monotonic()
        with Group(self.arguments, self.tmp_path, devices=2) as group:
            group.until(lambda: self._taken(before) and max(losses(self.out)) >= at, f"step {at}", 120)
            time.sleep(delay)
            step, started = max(losses(self.out)), time.monotonic()
            group.signal(number, index)
            statuses = group.wait(60)
            ended = time.monotonic() - started
        saved = saved_step(self.out)
        told(
            f"event {event}: {number.name} to process {index} at step {step} (from {before[0]}): statuses {statuses} "
            f"after {ended:.1f} s, saved {saved}; {started - start:.1f} s until then"
        )
        assert step > before[0]
        assert saved < SOAK_STEPS, "it ended before all events"
        if number == signal.SIGTERM:
            assert statuses == [143, 143], group.text()
            assert saved >= step
        else:
            assert statuses[index] == -signal.SIGKILL, group.text()
            assert statuses[1 - index] in (-signal.SIGABRT, 134), group.text()  # it lost the other: start again
            assert saved > step - 2 * 3, group.text()  # of saves every 3 steps, one may have been under way
        return number

    def _now(self):
        """The newest save, and which file holds the records: each start makes another, without what is taken again."""
        records = self.out / "metrics.jsonl"
        return saved_step(self.out), records.stat().st_ino if records.exists() else None

    def _taken(self, before):
        """How many steps are recorded of the start after `before`."""
        if self._now()[1] == before[1]:
            return 0
        return max(0, max(losses(self.out), default=0) - before[0])


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_run_that_is_killed_and_told_to_end_again_and_again_ends_as_if_nothing_had_been(tmp_path):
    """F26: 30 signals at random steps, and 6 kills while it starts."""
    seed = 26
    told(f"seed {seed}")
    (tmp_path / "tiny.toml").write_text(TINY)
    options = [tmp_path / "tiny.toml", "--train.steps", SOAK_STEPS, "--train.save-every", 3]
    options += ["--train.rows", 64]
    train(tmp_path, *options, "--out", tmp_path / "whole")
    soak, chosen = Soak(tmp_path, options, seed), random.Random(seed + 1)
    moments = sorted(chosen.sample(range(2, SOAK_STEPS - 25), SOAK_EVENTS))
    starts = {0, *chosen.sample(range(1, SOAK_EVENTS), SOAK_STARTS - 1)}
    numbers = []
    for event, at in enumerate(moments):
        if event in starts:
            soak.killed_while_starting()
        numbers.append(soak.harmed(event + 1, at))
    assert len(numbers) == SOAK_EVENTS
    assert len(set(numbers)) == 2
    train(tmp_path, *options, "--out", tmp_path / "parts", "--resume-if-saved")
    assert state_bytes(tmp_path / "parts") == state_bytes(tmp_path / "whole")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    told(f"{len(numbers)} events and {len(starts)} kills while starting: the same to the last bit, and every loss")
