"""Values that go wrong: a run that diverges, copies that differ. In this process, through `jaxshard train`."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxshard import NonFiniteError
from jaxshard.apps.trainer.build import Run
from jaxshard.checkpoint import Checkpointer
from jaxshard.cli import main
from jaxshard.digest import ReplicaError

TINY = """
[model]
layers = 1
width = 16
heads = 1
hidden = 16
sequence_length = 16
[optimizer]
warmup_steps = 2
[sharding]
min_shard_size = 64
[train]
steps = 9
log_every = 1
eval_every = 9
save_every = 2
[data]
heldout_bytes = 300
"""


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    return str(tmp_path / "tiny.toml")


def spoilt(monkeypatch, spoil):
    """Each call of the step goes through `spoil(number, params) -> params`."""
    make = Run.make_step

    @dataclasses.dataclass
    class Step:
        step: object
        calls: int = 0

        def lower(self, *args):
            return self.step.lower(*args)

        def __call__(self, params, *args):
            self.calls += 1
            return self.step(spoil(self.calls, params), *args)

    monkeypatch.setattr(Run, "make_step", lambda run: Step(make(run)))


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def diverges_at(*numbers):
    def spoil(number, params):
        if number in numbers:
            raise NonFiniteError(number, "the loss", 21)
        return params

    return spoil


def test_a_divergence_goes_back_to_the_last_save_and_on_with_other_rows(tiny, tmp_path, monkeypatch, capsys):
    """F14. Steps after the save are taken again, with rows that no step has seen."""
    drawn, make = [], Run.batch
    monkeypatch.setattr(Run, "batch", lambda run, index: drawn.append(index) or make(run, index))
    spoilt(monkeypatch, diverges_at(6))
    assert main(["train", tiny, "--out", str(tmp_path / "run"), "--train.on-divergence", "roll-back"]) == 0
    assert "the run returns to step 4, and continues with different rows" in capsys.readouterr().out
    assert drawn[1:] == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9]  # the first is of the lowered step
    assert [r["step"] for r in records(tmp_path / "run") if "loss" in r] == list(range(1, 10))


def test_a_run_that_diverges_again_and_again_ends(tiny, tmp_path, monkeypatch, capsys):
    spoilt(monkeypatch, diverges_at(*range(6, 40)))
    assert main(["train", tiny, "--out", str(tmp_path / "run"), "--train.on-divergence", "roll-back"]) == 1
    printed = capsys.readouterr()
    assert printed.out.count("the run returns to step 4") == 3
    assert "more than train.max_skips = 20 steps in a row were skipped" in printed.err


def one_copy_flipped(tree):
    """The same, but for one bit of one element of one leaf's copy on the sixth device."""
    leaves, treedef = jax.tree.flatten(tree)
    index = next(i for i, leaf in enumerate(leaves) if leaf.sharding.is_fully_replicated)
    copies = [np.array(shard.data) for shard in leaves[index].addressable_shards]
    copies[5].reshape(-1).view(np.uint32)[0] ^= 1
    placed = [jax.device_put(x, s.device) for x, s in zip(copies, leaves[index].addressable_shards, strict=True)]
    leaves[index] = jax.make_array_from_single_device_arrays(leaves[index].shape, leaves[index].sharding, placed)
    return jax.tree.unflatten(treedef, leaves)


DDP = ["--sharding.strategy", "ddp"]  # under ZeRO, params gathered after the update are all the owner's


def flips_at(number):
    return lambda call, params: one_copy_flipped(params) if call == number else params


def test_copies_that_differ_end_the_run_at_the_next_check(tiny, tmp_path, monkeypatch, capsys):
    """F15: found by the check, and the saves before it are as good as ever."""
    spoilt(monkeypatch, flips_at(3))
    assert main(["train", tiny, "--out", str(tmp_path / "run"), "--train.check-every", "3", *DDP]) == 1
    assert "replicas differ: 0/" in capsys.readouterr().err
    assert Checkpointer(tmp_path / "run" / "model").latest_valid() == 2


def test_copies_that_differ_are_never_saved(tiny, tmp_path, monkeypatch, capsys):
    """F15, without checks in between."""
    spoilt(monkeypatch, flips_at(3))
    assert main(["train", tiny, "--out", str(tmp_path / "run"), "--train.check-every", "0", *DDP]) == 1
    assert "of process 0 than on the rest" in capsys.readouterr().err
    assert Checkpointer(tmp_path / "run" / "model").steps() == [2]


def test_copies_that_differ_are_mended_if_that_is_asked_for(tiny, tmp_path, monkeypatch, capsys):
    spoilt(monkeypatch, flips_at(3))
    options = ["--train.check-every", "3", "--train.mend-copies", *DDP]
    assert main(["train", tiny, "--out", str(tmp_path / "run"), *options]) == 0
    printed = capsys.readouterr().out
    assert "All copies are now equal to the first" in printed
    assert "step 3: replicas differ" in printed


def test_copies_are_mended_before_a_save_too(tiny, tmp_path, monkeypatch, capsys):
    spoilt(monkeypatch, flips_at(3))
    options = ["--train.check-every", "0", "--train.mend-copies", *DDP]
    assert main(["train", tiny, "--out", str(tmp_path / "run"), *options]) == 0
    assert "step 4: replicas differ" in capsys.readouterr().out
    assert Checkpointer(tmp_path / "run" / "model").latest_valid() == 9


def test_nothing_is_saved_while_steps_are_skipped(tiny, tmp_path, monkeypatch):
    """Their params may be the cause, and would take the place of good ones; the first good step is saved instead."""

    def skipped_at(*numbers):
        make = Run.make_step

        def step_of(run):
            step, calls = make(run), iter(range(1, 100))

            class Step:
                lower = step.lower

                def __call__(self, *args):
                    params, state, metrics = step(*args)
                    return params, state, {**metrics, "skipped": metrics["skipped"] | (next(calls) in numbers)}

            return Step()

        monkeypatch.setattr(Run, "make_step", step_of)

    skipped_at(3, 4, 5, 6)
    assert main(["train", tiny, "--out", str(tmp_path / "run"), "--train.keep-last", "9"]) == 0
    assert Checkpointer(tmp_path / "run" / "model").steps() == [2, 7, 8, 9]


def test_a_flipped_copy_is_one(monkeypatch):
    """The flip really makes replicas differ."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(np.ones((4, 4), np.float32), jax.sharding.NamedSharding(mesh, jax.P()))
    from jaxshard.digest import digests

    with pytest.raises(ReplicaError, match="on device 5 of process 0"):
        digests(one_copy_flipped({"x": x}))
