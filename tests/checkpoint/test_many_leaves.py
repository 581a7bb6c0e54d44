"""What thousands of leaves cost: what is compiled depends on their kinds, not on their number."""

import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_same_bits

import jaxshard
from jaxshard.checkpoint import Checkpointer
from jaxshard.digest import digests

SHAPES = ((64,), (8, 16), (4, 4, 8), (3,), ())


def many(count):
    """Leaves of ten kinds, cut and whole."""
    mesh, rng = jaxshard.make_mesh(), np.random.default_rng(count)
    made = {}
    for i in range(count):
        shape = SHAPES[i // 2 % len(SHAPES)]
        cut = next((dim for dim, size in enumerate(shape) if size % 8 == 0), None) if i % 2 else None
        spec = P() if cut is None else P(*(None,) * cut, "data")
        made[f"leaf {i}"] = jax.device_put(rng.normal(size=shape).astype("f"), NamedSharding(mesh, spec))
    return jax.block_until_ready(made)


def costs(folder, count):
    """CPU seconds of digests, a save, restoring it, verifying and reading it."""
    tree, found = many(count), []

    def timed(call):
        start = time.process_time()
        result = call()
        found.append(time.process_time() - start)
        return result

    with Checkpointer(folder) as checkpoints:
        timed(lambda: digests(tree))
        timed(lambda: checkpoints.save(1, tree, blocking=True))
        assert_same_bits(timed(lambda: checkpoints.restore(tree))[1], tree)
        timed(lambda: checkpoints.verify(1))
        assert len(timed(lambda: dict(checkpoints.read(1)))) == count
    return np.asarray(found)


def test_hundreds_of_leaves_cost_little(tmp_path):
    """One program of 500 leaves took 5 s and more to compile: each time."""
    few, more = costs(tmp_path / "few", 50), costs(tmp_path / "more", 500)
    assert (more - few).max() < 2.5, (few, more)


@pytest.mark.nightly
@pytest.mark.optimized
def test_3000_leaves_cost_at_most_5_s_more_than_300(tmp_path):
    few, more = costs(tmp_path / "few", 300), costs(tmp_path / "more", 3000)
    print("CPU seconds of digests, save, restore, verify, read: 300 leaves", few.round(2), "3000 leaves", more.round(2))
    assert (more - few).max() < 5, (few, more)
