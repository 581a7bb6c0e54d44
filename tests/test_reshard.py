"""`reshard`: values, dtypes and shardings, bytes as foretold, at most a chunk beside the tree and the result."""

import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxshard
from jaxshard import plan
from jaxshard.layout import resharding

SHAPE = (24, 48)


def mesh(ids, **sizes):
    return Mesh(np.array([jax.devices()[i] for i in ids]).reshape(*sizes.values()), tuple(sizes))


ALL, TWO = mesh(range(8), data=8), mesh(range(8), a=2, b=4)
HALF, THREE, FOUR = mesh(range(4, 8), t=4), mesh([3, 1, 2], x=3), mesh(range(4), u=2, v=2)
SHARDINGS = {
    "rows": NamedSharding(ALL, P("data")),
    "columns": NamedSharding(ALL, P(None, "data")),
    "both": NamedSharding(TWO, P("b", "a")),
    "half": NamedSharding(HALF, P("t")),
    "copies": NamedSharding(HALF, P()),
    "three": NamedSharding(THREE, P(None, "x")),
    "some": NamedSharding(FOUR, P("v")),
    "joined": NamedSharding(FOUR, P(("u", "v"))),
    "one": SingleDeviceSharding(jax.devices()[5]),
}


def numbers(seed=0, shape=SHAPE):
    return np.random.default_rng(seed).normal(size=shape).astype("f")


@pytest.mark.parametrize("after", SHARDINGS)
@pytest.mark.parametrize("before", [*SHARDINGS, "numpy"])
def test_values_dtypes_and_shardings(before, after):
    """In one piece and in several; the tree stays."""
    x = numbers()
    source = x if before == "numpy" else jax.device_put(x, SHARDINGS[before])
    tree = {"w": source, "n": [jnp.arange(8), 3]}
    shardings = {"w": SHARDINGS[after], "n": SHARDINGS["copies"]}
    for chunk_bytes, dtype in itertools.product((2**28, 999), (None, jnp.bfloat16)):
        found = jaxshard.reshard(tree, shardings, dtype=dtype, chunk_bytes=chunk_bytes)
        assert found["w"].sharding == SHARDINGS[after]
        assert found["w"].dtype == (dtype or np.float32)
        np.testing.assert_array_equal(np.asarray(found["w"]), x.astype(dtype or np.float32))
        assert found["n"][0].dtype == jnp.int32
        assert (found["n"][0].tolist(), int(found["n"][1])) == (list(range(8)), 3)
    np.testing.assert_array_equal(np.asarray(source), x)


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (7,), (5, 1, 3), (2, 3, 4, 5)])
def test_awkward_shapes(shape):
    x = numbers(shape=shape)
    for chunk_bytes in (1, 8, 2**20):
        found = jaxshard.reshard({"x": x}, NamedSharding(THREE, P()), chunk_bytes=chunk_bytes)
        np.testing.assert_array_equal(np.asarray(found["x"]), x)


def test_keys_and_nothing():
    keys = jax.random.split(jax.random.key(3), 8)
    found = jaxshard.reshard({"keys": keys, "none": None}, NamedSharding(ALL, P("data")), chunk_bytes=16)
    assert (jax.random.key_data(found["keys"]) == jax.random.key_data(keys)).all()
    assert plan.resharding({"keys": keys}, NamedSharding(ALL, P("data"))).moved_bytes == 7 * 8  # one stays
    assert jaxshard.reshard({}, NamedSharding(ALL, P())) == {}


def test_from_training_to_rollout():
    """zero3 on all devices to tensor parallelism on some, with the specs that a rollout has."""
    params = {"up": numbers(1, (64, 128)), "down": numbers(2, (128, 64))}
    opt = jaxshard.zero3(optax.adam(1e-3), jaxshard.make_mesh(), min_shard_size=1)
    rollout = mesh(range(2), tensor=2)
    shardings = {"up": NamedSharding(rollout, P(None, "tensor")), "down": NamedSharding(rollout, P("tensor"))}
    found = jaxshard.reshard(opt.place(params), shardings, dtype="bfloat16")
    for name, x in params.items():
        np.testing.assert_array_equal(np.asarray(found[name]), x.astype(jnp.bfloat16))
    back = jaxshard.reshard(found, opt.shardings(params).params, dtype="float32")
    assert jax.tree.map(lambda x: x.sharding, back) == opt.shardings(params).params


def live_bytes():
    """Bytes of all live arrays on each device; several arrays may have one buffer."""
    buffers = {
        (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for x in jax.live_arrays()
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        for shard in x.addressable_shards
    }
    found = dict.fromkeys(jax.devices(), 0)
    for (device, _), num_bytes in buffers.items():
        found[device] += num_bytes
    return found


@pytest.mark.parametrize("after", ["columns", "half", "three", "one"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_never_more_than_a_chunk_beside_the_tree_and_the_result(monkeypatch, after, dtype):
    source = {f"w{i}": jax.device_put(numbers(i, (96, 240)), SHARDINGS["rows"]) for i in range(4)}
    chunk, worst = 20_000, 0
    gc.collect()
    before, put = live_bytes(), jax.device_put
    itemsize = 4 if dtype is None else 2
    shards = SHARDINGS[after].shard_shape((96, 240))

    def watched(x, *args, **options):
        nonlocal worst
        made = put(x, *args, **options)
        now = live_bytes()
        result = 4 * int(np.prod(shards)) * itemsize  # all of the result, which may not be there yet
        worst = max(worst, *(now[d] - before[d] - (result if d in SHARDINGS[after].device_set else 0) for d in now))
        return made

    monkeypatch.setattr(resharding.jax, "device_put", watched)
    found = jaxshard.reshard(source, SHARDINGS[after], dtype=dtype, chunk_bytes=chunk)
    assert worst <= chunk
    np.testing.assert_array_equal(np.asarray(found["w3"]), numbers(3, (96, 240)).astype(dtype or "f"))


@pytest.mark.parametrize("before", SHARDINGS)
@pytest.mark.parametrize("after", SHARDINGS)
def test_the_bytes_that_each_device_gets_are_foretold(monkeypatch, before, after):
    """In pieces, each copy is seen: a device gets what it has not, from one that has it."""
    x = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=SHARDINGS[before])
    told = plan.resharding({"w": x}, SHARDINGS[after], dtype="bfloat16")
    have = {shard.device: shard.index for shard in jax.device_put(numbers(), SHARDINGS[before]).addressable_shards}
    expected = {}
    for shard in jax.device_put(numbers(), SHARDINGS[after]).addressable_shards:
        missing = np.zeros(SHAPE, bool)
        missing[shard.index] = True
        if shard.device in have:
            missing[have[shard.device]] = False
        expected[shard.device.id] = 2 * int(missing.sum())
    assert told.received == expected
    assert told.moved_bytes == sum(expected.values())
    assert told.result_bytes == 2 * int(np.prod(SHARDINGS[after].shard_shape(SHAPE)))
    assert "move" in str(told)


W = {"layers": {"w": np.ones((6, 4), "f")}}


@pytest.mark.parametrize(
    ("tree", "shardings", "options", "error", "says"),
    [
        (W, P("data"), {}, TypeError, ("PartitionSpec", "NamedSharding(mesh")),
        (W, {"layers": {"w": "data"}}, {}, TypeError, ("str at layers/w",)),
        (W, {"other": SHARDINGS["rows"]}, {}, ValueError, ("not a prefix",)),
        (W, SHARDINGS["rows"], {}, ValueError, ("layers/w", "(6, 4)", "does not fit")),
        (W, SHARDINGS["copies"], {"dtype": "int32"}, TypeError, ("int32 is not floating",)),
        (W, SHARDINGS["copies"], {"chunk_bytes": 0}, ValueError, ("chunk_bytes=0",)),
        (W, SHARDINGS["copies"], {"chunk_bytes": 2.5}, ValueError, ("chunk_bytes=2.5",)),
    ],
)
def test_bad_input_is_refused_before_anything_moves(monkeypatch, tree, shardings, options, error, says):
    monkeypatch.setattr(resharding.jax, "device_put", None)
    for call in (jaxshard.reshard, plan.resharding):
        with pytest.raises(error) as raised:
            call(tree, shardings, **options)
        assert all(word in str(raised.value) for word in says), str(raised.value)


def test_donated_arrays_and_traced_ones_are_refused():
    x = jax.device_put(numbers(), SHARDINGS["rows"])
    x.delete()
    with pytest.raises(ValueError, match="reshard: w"):
        jaxshard.reshard({"w": x}, SHARDINGS["copies"])
    with pytest.raises(TypeError, match="with_sharding_constraint"):
        jax.jit(lambda x: jaxshard.reshard(x, SHARDINGS["copies"]))(numbers())
