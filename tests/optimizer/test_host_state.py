"""State in the host's memory: streamed through the devices in each update, equal to state on devices."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from oracle import assert_close, batches, hostile_params, model_loss, one_device, sharded

import jaxshard
from jaxshard.apps.config.config import ModelConfig
from jaxshard.apps.model.model import LanguageModel, Pipelined
from jaxshard.digest import digests
from jaxshard.layout import host_memory
from jaxshard.optimizer import host_state, streams


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(streams, "_CHUNK", 64)


def memories(state):
    return {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim}


TXS = {
    "adamw, clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "clipped after": lambda: optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.1), optax.scale(-0.1)),
    "sgd with momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "skips": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
}
MESHES = {"zero2": {"data": 8}, "zero3": {"data": 3}, "ddp": {"data": 2}, "hsdp": {"data": 2, "replica": 2}}


@pytest.mark.filterwarnings("ignore:.*cannot be sharded")
@pytest.mark.parametrize("strategy", list(MESHES))
@pytest.mark.parametrize("name", list(TXS))
def test_equals_one_device(x64, name, strategy):
    sizes = MESHES[strategy]
    mesh = jaxshard.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    options = {"state_axes": ("data", "replica")} if strategy == "hsdp" else {}
    opt = getattr(jaxshard, strategy)(TXS[name](), mesh, min_shard_size=2, state_memory="host", **options)
    params, steps = hostile_params(np.float64), batches(3)
    got, want = sharded(model_loss, opt, params, steps), one_device(model_loss, TXS[name](), params, steps)
    assert "pinned_host" in memories(got[1])
    for a, b in zip(got[:2], want[:2], strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize(
    "options",
    [{"master_dtype": jnp.float32}, {"moment_dtype": jnp.bfloat16}, {"moment_dtype": "int8"}],
    ids=["masters", "bfloat16 moments", "8 bits"],
)
def test_is_what_devices_would_hold(options):
    """The same values, on the host or not, but for the last digit, where a * b + c may be rounded once or twice."""

    def loss(params, x):
        return sum(jnp.mean((x @ params[k].astype(jnp.float32) * params["gain"]) ** 2) for k in "ab")

    rng = np.random.default_rng(1)
    params = {name: rng.normal(size=(64, 128)).astype(np.float32) / 8 for name in "ab"}
    params["gain"] = np.ones(128, np.float32)
    if "master_dtype" in options:
        params = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), params)
    steps = [np.random.default_rng(i).normal(size=(16, 64)).astype(np.float32) for i in range(3)]
    opts = [make(memory, **options) for memory in ("host", "device")]
    results = [sharded(loss, opt, params, steps) for opt in opts]
    assert "pinned_host" in memories(results[0][1])
    assert "pinned_host" not in memories(results[1][1])
    chex.assert_trees_all_close(results[0][0], results[1][0], rtol=1e-3, atol=1e-6)
    for a, b in zip(*(jax.tree.leaves(result[1]) for result in results), strict=True):
        assert a.dtype == b.dtype
        a, b, narrow = np.asarray(a, np.float64), np.asarray(b, np.float64), a.dtype.itemsize < 4
        apart = np.abs(a - b) > 1e-6 * np.max(np.abs(b))
        assert np.mean(apart) <= 0.01 * narrow  # a rounding by chance may fall the other way


def small():
    return {"w": np.ones((64, 128), np.float32), "b": np.ones(128, np.float32)}


def small_loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


ROWS = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)


def make(memory="host", tx=None, strategy="zero2", **options):
    mesh = options.pop("mesh", None) or jaxshard.make_mesh()
    return getattr(jaxshard, strategy)(tx or optax.adam(1e-2), mesh, min_shard_size=16, state_memory=memory, **options)


@pytest.mark.parametrize("max_skips", [None, 100])
def test_adams_state_is_streamed_and_once_more_to_be_judged(monkeypatch, max_skips):
    found = []
    found_streams = host_state._Streams._streams
    monkeypatch.setattr(host_state._Streams, "_streams", lambda self: found.append(found_streams(self)) or found[-1])
    opt = make(tx=TXS["adamw, clipped"](), strategy="zero3")
    jaxshard.train_step(small_loss, opt, max_skips=max_skips).lower(small(), opt.init(small()), ROWS)
    judged = max_skips is not None
    assert [len(one.read) for one in found[0]] == [2, 2] * (1 + judged)
    assert sorted(len(one.host_outs) for one in found[0]) == [0, 0] * judged + [2, 2]


def test_updates_outside_of_a_step():
    opt, plain = make(), make("device")
    grads = jax.tree.map(lambda p: 0.1 * p, small())
    want, state = plain.update(grads, plain.init(small()), small())
    for update in (opt.update, jax.jit(opt.update)):
        got, kept = update(grads, opt.init(small()), opt.place(small()))
        chex.assert_trees_all_close((got, kept), (want, state), rtol=1e-6)
    assert memories(opt.init(small())) == {"pinned_host"}


def test_compiles_once_and_donates(count_compilations):
    opt = make(strategy="zero3")
    step = jaxshard.train_step(small_loss, opt, donate=True)
    params, state, _ = step(opt.place(small()), opt.init(small()), ROWS)

    def again(params=params, state=state):
        for _ in range(3):
            params, state, _ = step(params, state, ROWS)
        assert memories(state) == {"pinned_host"}

    old = jax.tree.leaves(state)
    assert count_compilations(again)[0] == 0
    assert all(x.is_deleted() for x in old)


def test_explicit_meshes():
    mesh = jax.make_mesh((8,), ("data",))
    got = sharded(small_loss, make(mesh=mesh), small(), [ROWS] * 2)
    want = sharded(small_loss, make("device"), small(), [ROWS] * 2)
    chex.assert_trees_all_close(got[:2], want[:2], rtol=1e-6)


def test_tensor_parallel():
    mesh = jaxshard.make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    specs = {"w": P("tensor"), "b": P()}

    def loss(params, x):
        mine = jax.lax.dynamic_slice_in_dim(x, 32 * jax.lax.axis_index("tensor"), 32, 1)
        return jnp.mean((jax.lax.psum(mine @ params["w"], "tensor") + params["b"]) ** 2)

    tx = optax.adam(1e-2)
    got = [
        sharded(loss, jaxshard.hybrid(tx, mesh, specs, min_shard_size=16, state_memory=memory), small(), [ROWS] * 2)
        for memory in ("host", "device")
    ]
    chex.assert_trees_all_close(got[0][:2], got[1][:2], rtol=1e-6)


@pytest.mark.parametrize(
    ("pipelined", "sizes", "zero"),
    [
        (Pipelined("1f1b", 2), {"pipeline": 2, "tensor": 2}, 3),
        (Pipelined("gpipe", 2), {"pipeline": 2}, 2),
        (Pipelined("interleaved", 2, 2), {"pipeline": 2, "tensor": 2}, 1),
    ],
    ids=["1f1b", "gpipe", "interleaved"],
)
def test_pipelines(pipelined, sizes, zero):
    config = ModelConfig(layers=4, width=16, heads=4, hidden=32, sequence_length=8)
    model, found = LanguageModel(config, pipelined), []
    for memory in ("host", "device"):
        mesh = jaxshard.make_mesh(**sizes)
        opt = jaxshard.hybrid(optax.adamw(1e-2), mesh, model.specs, zero, min_shard_size=2, state_memory=memory)
        params = opt.place(model.init(jax.random.key(0)))
        state, step = opt.init(params), jaxshard.train_step(model.loss, opt)
        for seed in range(2):
            tokens = np.random.default_rng(seed).integers(0, 256, (16, 9)).astype(np.int32)
            params, state, _ = step(params, state, {"tokens": tokens})
        assert memories(state) == {{"host": "pinned_host", "device": "device"}[memory]}
        found.append(jax.device_get(params))
    assert_close(*found, 1e-6)


def test_digests_and_copies():
    host, device = make(), make("device", strategy="zero3")
    _, state, _ = sharded(small_loss, host, small(), [ROWS])
    assert digests(state) == digests(jax.device_put(state, device.shardings(small()).state))
    same = host.synchronize(state)
    assert memories(same) == {"pinned_host"}
    chex.assert_trees_all_equal(same, state)


def test_half_of_the_bytes():
    opt = make("host:0.5")
    layout = opt.layout(small())
    held = layout.bytes_per_device
    assert abs(held["state on host"] - held["state"]) <= 2 * (128 // 8) * 4 + 4
    assert "on the host" in str(layout)
    assert memories(opt.init(small())) == {"device", "pinned_host"}


def test_rules():
    opt = make([("^0/nu/", "host")])
    state = opt.init(small())
    assert memories(state[0].nu) == {"pinned_host"}
    assert memories(state[0].mu) == {"device"}


def test_the_plan_counts_it():
    opts = [make(memory, strategy="zero3", mesh=jaxshard.make_mesh().abstract_mesh) for memory in ("host", "device")]
    shapes = jax.eval_shape(lambda: small())
    host, device = (jaxshard.plan.predict(jaxshard.train_step(small_loss, opt), shapes, ROWS) for opt in opts)
    moved = 2 * (64 * 128 + 128) * 4 // 8
    assert host.at_rest["state"] == 4
    assert device.at_rest["state"] - host.at_rest["state"] == moved == host.layout.host_bytes
    assert host.costs.host_bytes == 3 * moved  # read, to be judged; read again, and written
    assert host.wire_bytes == pytest.approx(device.wire_bytes, abs=1e-6)


def test_fit_takes_the_host_where_nothing_else_fits():
    shapes = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    build = jaxshard.plan.building(
        lambda p, x: jnp.mean((x @ p["w"]) ** 2), optax.adam(1e-3), shapes, jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    )
    chip = jaxshard.plan.chip("h100")
    names = [
        jaxshard.plan.fit(build, jaxshard.plan.side_by_side(target), target).best.candidate.name
        for target in (jaxshard.plan.Target(chip, 8, size) for size in (80e9, 5.7e6))
    ]
    assert "host" not in names[0]
    assert "state on host" in names[1]


WRONG = {
    "host:2": "state_memory='host:2' is unknown; give",
    "disk": "state_memory='disk' is unknown; give",
    0.5: "state_memory=0.5 is unknown; give",
    (("mu", "disk"),): "is unknown; give",
    (("(", "host"),): "is not a regular expression",
    (): "is unknown; give",
}


@pytest.mark.parametrize("given", list(WRONG), ids=str)
def test_wrong_options(given):
    with pytest.raises(ValueError, match="state_memory") as error:
        make(given)
    assert WRONG[given] in str(error.value)


def test_rules_that_match_nothing_and_state_that_is_none():
    with pytest.raises(ValueError, match="the rule 'velocity' matches no leaf of the state; the leaves are 0/count"):
        make([("velocity", "host")]).init(small())
    with pytest.raises(ValueError, match="has no array of 16 elements or more"):
        make(tx=optax.sgd(1e-2)).init(small())


def test_devices_without_such_memory(monkeypatch):
    monkeypatch.setattr(host_memory, "HOST", "another")
    with pytest.raises(ValueError, match=r"have no memory 'another', only \['device', 'pinned_host'"):
        make()


def test_the_local_view_has_none():
    opt = make()
    params, state = opt.place(small()), opt.init(small())
    specs = opt.shardings(small()).specs.state

    def update(grads, state, params):
        return opt.update(grads, state, params)

    mine = jax.shard_map(update, mesh=opt.mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs))
    with pytest.raises(ValueError, match="state_memory"):
        jax.jit(mine)(params, state, params)


def test_a_step_of_ones_own_whose_state_comes_from_a_jit():
    """Such a state lies on devices at first; the update could not write to it."""
    start = small()
    results = []
    for memory in ("host", "device"):
        opt = make(memory)
        params, state = jax.jit(lambda p, opt=opt: (opt.place(p), opt.init(p)))(start)

        @jax.jit
        def step(params, state, opt=opt):
            updates, state = opt.update(jax.tree.map(jnp.sin, params), state, params)
            return optax.apply_updates(params, updates), state

        for _ in range(3):
            params, state = step(params, state)
        assert ("pinned_host" in memories(state)) == (memory == "host")
        results.append(jax.device_get((params, state)))
    assert_close(*results, 1e-6)


def test_state_of_which_somebody_has_a_view():
    """A GPU's runtime does not write over it; here stands what it says (seen on an H100)."""
    opt = make(strategy="zero3")
    step, plain = (jaxshard.train_step(small_loss, opt) for _ in range(2))
    params, state, _ = step(opt.place(small()), opt.init(small()), ROWS)
    want = plain(*jax.tree.map(jnp.copy, (params, state)), ROWS)
    (program,) = step._programs.values()
    run, given = program.run, []

    def refusing(params, state, batch):
        given.append(state)
        if len(given) == 1:
            raise ValueError("INVALID_ARGUMENT: Donation requested for buffer with external reference")
        return run(params, state, batch)

    object.__setattr__(program, "run", refusing)
    got = step(params, state, ROWS)
    assert len(given) == 2
    assert not any(x.is_deleted() for x in jax.tree.leaves(state) if x.ndim)
    chex.assert_trees_all_equal(got[:2], want[:2])
    assert memories(got[1]) == {"pinned_host"}
