"""Any bytes: a tree whose every digest is right, or one of two errors."""

import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from oracle import assert_same_bits
from test_fuzz_index import with_other_bytes

from jaxshard.checkpoint import CorruptCheckpointError, from_bytes, to_bytes
from jaxshard.checkpoint.storage.manifest import DIGEST_BYTES, digest_of

SAVED = {"w": jnp.arange(6.0), "h": jnp.ones(3, jnp.bfloat16), "k": jax.random.key(1), "n": 3, "e": jnp.ones((2, 0))}
DATA = to_bytes(SAVED)
VALUES = (
    None,
    True,
    0,
    -1,
    2**63,
    0.5,
    "",
    "w",
    b"",
    b"\0" * 24,
    [],
    {},
    [1],
    {"w": 1},
    np.zeros(3),
    np.zeros(24, np.uint8),
)


def resealed(content):
    return digest_of(content) + content


def with_other_values(rng):
    """Something in the tree of what is packed is another thing."""
    tree = serialization.msgpack_restore(DATA[DIGEST_BYTES:])
    place = rng.choice([("format",), ("leaves",), ("arrays",), *(("leaves", path) for path in tree["leaves"])])
    place = rng.choice([place, *(("arrays", path) for path in tree["arrays"])])
    inner = tree
    for key in place[:-1]:
        inner = inner[key]
    entry, value = inner[place[-1]], rng.choice(VALUES)
    if isinstance(entry, dict) and entry and rng.random() < 0.8:
        key = rng.choice(list(entry))
        entry[key] = value
    elif rng.random() < 0.3:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return resealed(serialization.msgpack_serialize(tree))


def fuzzed(count, seed):
    rng, found = random.Random(seed), Counter()
    for i in range(count):
        how = rng.randrange(3)
        if how == 0:
            data = with_other_bytes(DATA, rng)[0]
        elif how == 1:
            data = resealed(with_other_bytes(DATA[DIGEST_BYTES:], rng)[0])
        else:
            data = with_other_values(rng)
        try:
            tree = from_bytes(SAVED, data)
            found["tree"] += 1
            assert_same_bits({"w": tree["w"], "h": tree["h"]}, {"w": SAVED["w"], "h": SAVED["h"]})
        except (ValueError, CorruptCheckpointError) as error:
            found[type(error).__name__] += 1
        except BaseException:
            print("seed", seed, "input", i, repr(data[:2000]))
            raise
    return found


def test_bytes_that_were_changed():
    """400 of the 5,000; of those half have a digest that is right again."""
    found = fuzzed(400, seed=8)
    assert found["CorruptCheckpointError"] > 200


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_1000_bytes_that_were_changed(seed):
    print(f"seed {seed}:", dict(fuzzed(1000, seed)))


def test_the_digests_that_it_carries_are_compared():
    tree = serialization.msgpack_restore(DATA[DIGEST_BYTES:])
    tree["arrays"]["w"] = tree["arrays"]["w"] ^ np.uint8(1)
    with pytest.raises(
        CorruptCheckpointError, match="these bytes are corrupt: w: its bits differ from those saved"
    ) as raised:
        from_bytes(SAVED, resealed(serialization.msgpack_serialize(tree)))
    assert raised.value.leaf == "w"


def test_64_bits_are_compared_too():
    with jax.enable_x64(True):
        data = to_bytes({"x": np.linspace(0, 1, 5)})
        assert from_bytes({"x": jnp.zeros(5)}, data)["x"].dtype == jnp.float64
    assert from_bytes({"x": jnp.zeros(5)}, data, cast=True)["x"].dtype == jnp.float32
