"""Digests: the same wherever an array lies, another one for every flipped bit, and one for each replica."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard
from jaxshard.digest import ReplicaError, digests, digests_and_faults, replica_digests

DTYPES = ["float32", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "uint32", "bool", "float8_e4m3fn"]


def some(dtype, shape=(8, 12), seed=0):
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), dtype=np.uint8)
    return (bits[..., 0] % 2).astype(bool) if dtype == "bool" else bits.view(jnp.dtype(dtype))[..., 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_on_every_mesh_and_sharding(dtype):
    """NaNs of all kinds, too: bits count, not values."""
    x = some(dtype)
    want = digests({"x": x})["x"]
    for sizes in ({}, {"tensor": 2}, {"pipeline": 2, "tensor": 2}):
        mesh = jaxshard.make_mesh(**sizes)
        for spec in (P(), P("data"), P(None, "tensor"), P("data", "tensor"), P(("data", "tensor"))):
            assert digests({"x": jax.device_put(x, NamedSharding(mesh, spec))})["x"] == want
    for count in (1, 2, 4):
        mesh = jaxshard.make_mesh(devices=jax.devices()[:count])
        assert digests({"x": jax.device_put(x, NamedSharding(mesh, P("data")))})["x"] == want


def test_wide_types_and_keys():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(4, 3))
        for given in (x, x.astype(complex), np.arange(7), jax.random.key(3)):
            assert digests([given]) == digests([jnp.array(given)])
        assert digests([x])["0"] != digests([np.nextafter(x, 9)])["0"]


def test_every_flipped_bit_shows():
    rng = np.random.default_rng(0)
    mesh = jaxshard.make_mesh(tensor=2)
    x = some("float32", (16, 64))
    want = digests([x])["0"]
    found = set()
    for _ in range(300):
        flipped = x.copy().view(np.uint32)
        flipped[tuple(rng.integers(0, flipped.shape))] ^= np.uint32(1) << np.uint32(rng.integers(32))
        placed = jax.device_put(flipped.view(np.float32), NamedSharding(mesh, P("data", "tensor")))
        found.add(digests([placed])["0"])
    assert want not in found
    assert len(found) > 250  # of 300 places in 32768, some twice


def test_moved_elements_show():
    x = some("float32", (6, 10))
    seen = {digests([y])["0"] for y in (x, x[::-1].copy(), x[:, ::-1].copy(), np.roll(x, 1), x.reshape(10, 6), x.T)}
    assert len(seen) == 6
    zeros = {digests([np.zeros(shape, "f")])["0"] for shape in ((4,), (5,), (2, 2), (1, 4), (4, 1))}
    assert len(zeros) == 5


def test_empty_and_scalar():
    assert digests({"a": np.zeros((0, 3), "f"), "b": np.float32(2)}) == {"a": 0, "b": digests([np.float32(2)])["0"]}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_several_empty_leaves_on_a_mesh(kind):
    """As the states of some optimizers have them; XLA could not compile their sums."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    some = [jax.device_put(jnp.zeros((0, 3)), NamedSharding(mesh, P())) for _ in range(3)]
    assert digests(some) == {"0": 0, "1": 0, "2": 0}


def one_copy_differs(x, mesh, spec, device):
    """A global array of which one device's part has one bit flipped."""
    sharding = NamedSharding(mesh, spec)
    parts = []
    for d, index in sharding.addressable_devices_indices_map(x.shape).items():
        part = np.array(x[index])
        if d == device:
            part.view(np.uint32).flat[3] ^= 1
        parts.append(jax.device_put(part, d))
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def test_a_replica_that_differs_is_found_and_named():
    """Also a shard that is repeated over another axis."""
    mesh = jaxshard.make_mesh(tensor=2)
    x, bad = some("float32"), mesh.devices.flat[5]
    tree = {"whole": jax.device_put(x, NamedSharding(mesh, P())), "w": one_copy_differs(x, mesh, P("tensor"), bad)}
    assert len(np.unique(replica_digests(tree)["whole"])) == 1
    with pytest.raises(
        ReplicaError, match=r"replicas differ: w has different bits on device .* of process 0 .*synchronize"
    ) as raised:
        digests(tree)
    found = raised.value.digests["w"]
    assert found.shape == mesh.devices.shape
    assert np.unique(found, return_counts=True)[1].min() == 2  # the row of the mesh whose copy has that shard
    whole = one_copy_differs(x, mesh, P(), bad)
    with pytest.raises(ReplicaError, match=r"0 has different bits on device 5 of process 0 than"):
        digests([whole])


def test_synchronize_mends_it():
    import optax

    opt = jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh())
    x = some("int32")
    broken = {"w": one_copy_differs(x, opt.mesh, P(), opt.mesh.devices.flat[3])}
    assert digests(opt.synchronize(broken)) == digests({"w": x})


# Whether it is finite.


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64", "complex64"]
)
def test_one_element_that_is_not_finite_shows(dtype):
    """Wherever it is, on every mesh; numbers of the largest size are finite."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        for shape in ((16, 24), (5, 7), (8,), (), (3, 16, 4)):
            good = np.full(shape, jnp.finfo(dtype).max).astype(jnp.dtype(dtype))
            assert digests_and_faults({"x": good})[1] == {}
            for value, fault in ((np.nan, "nan"), (np.inf, "inf"), (-np.inf, "inf"), (complex(0, np.nan), "nan")):
                if (dtype == "float8_e4m3fn" and fault == "inf") or (
                    isinstance(value, complex) and dtype != "complex64"
                ):
                    continue  # it has none
                x = good.copy()
                x[tuple(int(rng.integers(size)) for size in shape)] = value
                assert digests_and_faults({"x": x})[1] == {"x": fault}
                assert digests_and_faults({f"{i}": x for i in range(40)})[1] == {f"{i}": fault for i in range(40)}
                if shape == (16, 24):
                    mesh = jaxshard.make_mesh(tensor=2)
                    for spec in (P(), P("data"), P("data", "tensor"), P(("data", "tensor"))):
                        placed = jax.device_put(x, NamedSharding(mesh, spec))
                        assert digests_and_faults({"x": placed, "n": 7})[1] == {"x": fault}


def test_nan_is_told_before_infinity_and_whole_numbers_are_finite():
    both = jnp.array([jnp.inf, jnp.nan, 1.0])
    found = digests_and_faults({"both": both, "whole": jnp.arange(9), "bits": some("uint8"), "b": jnp.array([True])})[1]
    assert found == {"both": "nan"}
    odd = jnp.array([0x7FF0000000000001 & 0xFFFFFFFF, 0x7FF00000], jnp.uint32)
    with jax.enable_x64(True):  # a NaN whose upper half is infinity's
        assert digests_and_faults({"x": jax.lax.bitcast_convert_type(odd, jnp.float64)[None]})[1] == {"x": "nan"}


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz", "float8_e4m3", "float8_e3m4"]
)
def test_eight_bits_of_each_kind_are_as_finite_as_they_say(dtype):
    """Some have no infinity; some have NaN where others have negative zero."""
    each = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype))
    wide = each.astype(np.float32)
    faults = {f"{i}": "nan" if np.isnan(x) else "inf" for i, x in enumerate(wide) if not np.isfinite(x)}
    assert faults
    assert digests_and_faults({f"{i}": x[None] for i, x in enumerate(each)})[1] == faults


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(125, 33), (32768,), (40001,), (9, 9, 9), (17, 1), (5, 70, 2)])
def test_rows_that_eight_does_not_divide_are_counted_once(dtype, shape):
    x = some(dtype, shape)
    assert digests({"x": x})["x"] == by_hand(x)


def by_hand(x):
    """The digest as the module says it, of elements of at most 32 bits."""
    with np.errstate(over="ignore"):
        place = np.zeros(x.shape, np.uint32)
        for here in np.indices(x.shape, np.uint32):
            place = mixed(place * np.uint32(31) + here + np.uint32(1))
        bits = x.astype(np.int32) if x.dtype == np.int8 else x.view(f"uint{8 * x.dtype.itemsize}")
        return int(mixed(bits.astype(np.uint32) ^ place).sum(dtype=np.uint32))


def mixed(x):
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
