"""`cast=True` rounds; it never makes another number of one, in silence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard
from jaxshard.checkpoint import Checkpointer, from_bytes, to_bytes
from jaxshard.digest import digests

LOST = {
    "too large": (jnp.int32(300), jnp.int8(0)),
    "below zero": (jnp.int32(-1), jnp.uint8(0)),
    "a fraction": (jnp.float32(1.5), jnp.int32(0)),
    "no number": (jnp.float32(np.nan), jnp.int32(0)),
    "as large as the largest, and one": (jnp.float32(2.0**31), jnp.int32(0)),
    "beyond float16": (jnp.float32(1e10), jnp.float16(0)),
    "beyond float8": (jnp.float32(500), jnp.zeros((), jnp.float8_e4m3fn)),
    "two as a truth": (jnp.int32(2), jnp.bool_(False)),
    "imaginary": (jnp.complex64(1j), jnp.float32(0)),
    "a whole number's fraction": (np.float32(1.5), 2),
    "no whole number": (float("nan"), 3),
    "Python's to float16": (1e10, jnp.float16(0)),
    "Python's to NumPy's": (500, np.zeros((), np.int8)),
    "seven as a truth": (7, True),
}
KEPT = {
    "whole": (jnp.float32(3), jnp.int32(0), 3),
    "rounded": (jnp.float32(0.1), jnp.bfloat16(0), jnp.bfloat16(0.1)),
    "infinite": (jnp.float32(np.inf), jnp.float16(0), np.inf),
    "a truth": (jnp.int32(1), jnp.bool_(False), True),
    "more than 64 bits": (2**100, jnp.float32(0), np.float32(2.0**100)),
    "complex": (jnp.float32(2), jnp.complex64(0), 2),
    "Python's": (3, 0.5, 3.0),
}


@pytest.mark.parametrize("name", LOST)
def test_a_number_that_would_be_another_one_is_an_error_that_names_it(name):
    saved, template = LOST[name]
    with pytest.raises(ValueError, match=r"c is .*cannot hold"):
        from_bytes({"c": template}, to_bytes({"c": saved}), cast=True)


@pytest.mark.parametrize("name", KEPT)
def test_numbers_that_fit_are_converted(name):
    saved, template, wanted = KEPT[name]
    found = from_bytes({"c": template}, to_bytes({"c": saved}), cast=True)["c"]
    assert found == wanted
    assert type(found) is type(template)


def test_64_bits_are_compared_before_they_are_cut():
    """2**40 came back as 0."""
    with jax.enable_x64(True):
        saved = to_bytes({"n": jnp.int64(2**40)}), to_bytes({"n": jnp.int64(7)})
    with pytest.raises(ValueError, match="n is int64, with values that int32 cannot hold"):
        from_bytes({"n": jnp.int32(0)}, saved[0], cast=True)
    assert from_bytes({"n": jnp.int32(0)}, saved[1], cast=True)["n"] == 7


def test_arrays_that_are_cut_over_devices_are_compared_there(tmp_path):
    cut = NamedSharding(jaxshard.make_mesh(), P("data"))
    size = 2**19  # too large to be read to the host first
    saved = jax.device_put(jnp.arange(size), cut)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"n": saved})
        _, found = checkpoints.restore({"n": jax.ShapeDtypeStruct((size,), jnp.uint32, sharding=cut)}, cast=True)
        assert found["n"].sharding == cut
        assert found["n"][-1] == size - 1
        with pytest.raises(ValueError, match="n is int32, with values that uint16 cannot hold"):
            checkpoints.restore({"n": jax.ShapeDtypeStruct((size,), jnp.uint16, sharding=cut)}, cast=True)


def test_what_cannot_be_stored_is_refused_in_numpys_arrays_too(tmp_path):
    import ml_dtypes

    for name in ("uint4", "float8_e4m3", "float6_e2m3fn"):
        with pytest.raises(TypeError, match=f"w is {name}, which cannot be stored"):
            Checkpointer(tmp_path).save(1, {"w": np.zeros(3).astype(getattr(ml_dtypes, name))})


def test_a_users_watches_are_not_over_what_a_checkpoint_does(tmp_path):
    """A transfer guard stopped `restore`, and debug_nans a state with a NaN."""
    key = jax.random.key(0)
    tree = {"w": jnp.array([np.nan, 1.0]), "n": 3, "key": key, "host": np.arange(3)}
    with Checkpointer(tmp_path) as checkpoints, jax.transfer_guard("disallow"), jax.debug_nans(True):
        checkpoints.save(1, tree)
        with pytest.warns(UserWarning, match="checkpoint 1 is not finite: w has NaN"):
            step, found = checkpoints.restore(tree)
        checkpoints.verify(1)
        assert [path for path, _ in checkpoints.read(1)] == ["host", "key", "n", "w"]
        assert digests(tree) == digests(found)
    assert step == 1
