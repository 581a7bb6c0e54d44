"""A checkpoint's index, changed in all ways: what is wrong is told as what it is, and no other data is taken for it."""

import json
import os
import random
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clock import at_most
from oracle import assert_same_bits

import jaxshard.checkpoint
from jaxshard.checkpoint import Checkpointer, CorruptCheckpointError, NewerFormatError
from jaxshard.checkpoint.storage import manifest

SAVED = {"w": jnp.arange(6.0), "k": jax.random.key(1), "n": 3, "x": {"y": jnp.ones((2, 0))}, "z": 0.5}
INDEX = "_CHECKPOINT_METADATA"
ALLOWED = (FileNotFoundError, CorruptCheckpointError, ValueError)  # of which NewerFormatError is one
VALUES = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        7,
        2**31,
        2**63,
        -(10**30),
        10**400,
        0.5,
        -0.0,
        1e308,
        float("inf"),
        float("nan"),
    ),
    *("", "0", "float32", "int64", "w", "\0", "\ud800", "x" * 5000, [], {}, [[]], [0], {"a": 1}, [1, 2, 3], ["w"]),
)


def nodes(x, path=()):
    """The paths of all values in a JSON value."""
    yield path
    inner = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, value in inner:
        yield from nodes(value, (*path, key))


def with_other_values(data, rng):
    """Values replaced, removed, added or renamed; half of these are sealed again, as one could who knows how."""
    whole = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        path = rng.choice([path for path in nodes(whole) if path])
        inner = whole
        for key in path[:-1]:
            inner = inner[key]
        how, value = rng.randrange(4), rng.choice(VALUES)
        if how < 2:
            inner[path[-1]] = value
        elif how == 2:
            del inner[path[-1]]
        elif isinstance(inner, dict):
            inner[rng.choice(("extra", "w", "leaves", "format"))] = inner.get(path[-1], value)
    sealed = rng.random() < 0.5 and isinstance(index := whole.get("custom_metadata"), dict)
    if sealed:
        index.pop("digest", None)
        whole["custom_metadata"] = manifest.sealed(index)
    return json.dumps(whole).encode(), sealed


def with_other_text(data, rng):
    """Keys that stand there twice, deep nesting, huge numbers."""
    text = data.decode()
    place = rng.choice([i for i, c in enumerate(text) if c in "{[,:"]) + 1
    piece = rng.choice(
        (
            '"format": 2,',
            '"leaves": {},',
            '"digest": "0",',
            '"w": 1,',
            "[" * 10**4,
            '{"a":' * 10**4,
            "9" * 6000,
            "1e999,",
        )
    )
    return (text[:place] + piece + text[place:]).encode(), False


def with_other_bytes(data, rng):
    """Bits flipped, bytes cut out, doubled, overwritten by NULs or by anything."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 3, 20))):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((0, 1, 2, 16, 400)))
        how = rng.randrange(6)
        if how < 2 and start < len(data):
            data[start] ^= 1 << rng.randrange(8)
        elif how == 2:
            data[start:] = b""
        elif how == 3:
            data[start:end] = b""
        elif how == 4:
            data[start:start] = data[start:end] * 2
        else:
            data[start:end] = rng.choice((bytes(end - start), rng.randbytes(end - start)))
    return bytes(data), False


def outcomes(checkpoints, sealed):
    """What each way to read a checkpoint says; raises for what none may say."""

    def restored():
        step, found = checkpoints.restore(SAVED, 2)
        assert step == 2
        if not sealed:  # else it may say other numbers
            assert_same_bits({"w": found["w"]}, {"w": SAVED["w"]})
            assert (found["n"], found["z"]) == (3, 0.5)
            assert jnp.array_equal(jax.random.key_data(found["k"]), jax.random.key_data(SAVED["k"]))

    def all_read():
        found = jaxshard.checkpoint.read(checkpoints.path, 2)
        assert sealed or (found["n"], found["w"].tolist()) == (3, np.arange(6.0).tolist())

    for call in (restored, all_read, lambda: checkpoints.info(2), lambda: checkpoints.verify(2)):
        try:
            call()
            yield "as saved"
        except ALLOWED as error:
            yield type(error).__name__


def fuzzed(folder, count, seed):
    """Reads a checkpoint under so many indexes; how often each outcome came."""
    rng, found = random.Random(seed), Counter()
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, SAVED)
        checkpoints.save(2, SAVED, blocking=True)
        path = folder / "2" / INDEX
        good = path.read_bytes()
        for i in range(count):
            change = rng.choice((with_other_values, with_other_text, with_other_bytes))
            data, sealed = change(good, rng)
            path.write_bytes(data)
            with at_most(20):
                try:
                    assert checkpoints.steps() == [1, 2]
                    found.update(outcomes(checkpoints, sealed))
                    if i % 10 == 0:
                        found.update([taken(checkpoints, sealed)])
                except BaseException:
                    print("seed", seed, "input", i, repr(data[:3000]))
                    raise
        path.write_bytes(good)
        assert checkpoints.restore(SAVED)[0] == 2
    return found


def taken(checkpoints, sealed):
    """Which step is taken as the newest; the older one only with a warning."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            step, _ = checkpoints.restore(SAVED)
        except NewerFormatError:
            return "newest: a newer format"
        except ValueError:
            assert sealed  # another checkpoint, which the template does not fit
            return "newest: does not fit"
    assert step == 2 or any("checkpoint 2 is corrupt" in str(warning.message) for warning in heard)
    return f"newest: {step}"


def test_indexes_that_were_changed(tmp_path):
    """150 of the 10,000."""
    found = fuzzed(tmp_path, 150, seed=int(os.environ.get("JAXSHARD_SEED", 8)))
    assert found["CorruptCheckpointError"] > 100


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_1000_indexes_that_were_changed(tmp_path, seed):
    """10,000 in all."""
    print(f"seed {seed}:", dict(fuzzed(tmp_path, 1000, seed)))
