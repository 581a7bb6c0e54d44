"""`ShardedOptimizer` is an optax transformation like any other: same results, same state, wherever optax takes one."""

import copy
import pickle
from typing import NamedTuple

import chex
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp"]
LR = 0.05


def picklable_init(params):
    return jax.tree.map(jnp.zeros_like, params)


def picklable_update(updates, state, params=None):
    del params
    state = jax.tree.map(lambda s, g: 0.9 * s + g, state, updates)
    return jax.tree.map(lambda s: -LR * s, state), state


PICKLABLE = optax.GradientTransformation(picklable_init, picklable_update)


def mesh_of(strategy):
    return jaxshard.make_mesh(replica=2) if strategy == "hsdp" else jaxshard.make_mesh()


def make(strategy, inner, mesh=None, **options):
    mesh = mesh_of(strategy) if mesh is None else mesh
    return getattr(jaxshard, strategy)(inner, mesh, **{"min_shard_size": 2} | options)


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def some_params(dtype=np.float32):
    return {"w": normal(1, 16, 24, dtype=dtype), "b": normal(2, 24, dtype=dtype), "scale": normal(3, dtype=dtype)}


def gradients(step, dtype=np.float32):
    return jax.tree.map(lambda p: normal(100 + step, *p.shape, dtype=dtype), some_params())


def batches(num=4, rows=16):
    return [{"x": normal(200 + i, rows, 16), "y": normal(300 + i, rows, 24)} for i in range(num)]


def loss_fn(params, batch):
    out = jnp.tanh(batch["x"] @ params["w"] + params["b"]) * params["scale"]
    return jnp.mean((out - batch["y"]) ** 2)


def plain_run(tx, params, grads):
    """Jitted optax on one device: the oracle."""
    params = jax.tree.map(jnp.array, params)
    state = tx.init(params)

    @jax.jit
    def step(params, state, g):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    for g in grads:
        params, state = step(params, state, g)
    return params, state


def _plain(x):
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def assert_close(got, want, tolerance=1e-6):
    """Same structure, shapes and dtypes; values within `tolerance` of each leaf's largest."""

    def close(a, b):
        a, b = a.astype(np.float64), b.astype(np.float64)
        return np.max(np.abs(a - b), initial=0) <= tolerance * (1 + np.max(np.abs(b), initial=0))

    got, want = jax.tree.map(_plain, got), jax.tree.map(_plain, want)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_equal_comparator(close, lambda a, b: f"{a} is not {b}", got, want)


def assert_at(tree, shardings):
    at = jax.tree.map(lambda x: x.sharding, tree)
    chex.assert_trees_all_equal_comparator(lambda a, b: a == b, lambda a, b: f"{a} is not {b}", at, shardings)


def is_cut(tree):
    return any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(tree))


# The object.


@pytest.fixture(scope="module")
def opt():
    return make("zero2", PICKLABLE)


def test_it_is_a_gradient_transformation(opt):
    assert isinstance(opt, optax.GradientTransformationExtraArgs)
    assert isinstance(opt, optax.GradientTransformation)
    init, update = opt
    assert (init, update) == (opt.init, opt.update)
    assert len(opt) == 2
    assert opt.inner is PICKLABLE
    assert opt.mesh == jaxshard.make_mesh()
    assert (opt.config.strategy, opt.config.min_shard_size) == ("zero2", 2)


def test_world_size_and_rank(opt):
    assert (opt.world_size, opt.rank) == (8, 0)
    assert make("zero2", PICKLABLE, jaxshard.make_mesh(devices=jax.devices()[2:5])).world_size == 3


def _round_trip(opt):
    return pickle.loads(pickle.dumps(opt))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, _round_trip], ids=["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_are_equal_and_work(duplicate, strategy):
    options = {"specs": {"w": P("tensor"), "b": P(), "scale": P()}, "reduce_dtype": jnp.float32}
    mesh = jaxshard.make_mesh(data=2, tensor=2, replica=2)
    opt = make(strategy, PICKLABLE, mesh, **options)
    other = duplicate(opt)
    assert type(other) is type(opt)
    assert other == opt
    assert hash(other) == hash(opt)
    assert other.config == opt.config
    assert other.mesh == opt.mesh
    assert_at(other.init(some_params()), opt.shardings(some_params()).state)


def test_equality_is_by_value(opt):
    assert make("zero2", PICKLABLE) == opt
    assert hash(make("zero2", PICKLABLE)) == hash(opt)
    different = [
        make("zero1", PICKLABLE),
        make("zero2", optax.sgd(LR)),
        make("zero2", PICKLABLE, min_shard_size=1),
        make("zero2", PICKLABLE, specs={"w": P("tensor")}),
        make("zero2", PICKLABLE, jaxshard.make_mesh(data=4, tensor=2)),
        PICKLABLE,
        None,
    ]
    for other in different:
        assert opt != other


def test_repr_names_strategy_and_mesh(opt):
    assert "zero2" in repr(opt)
    assert "data 8" in repr(opt)


def test_tree_map_over_it_keeps_both_functions(opt):
    assert jax.tree.leaves(opt) == [opt.init, opt.update]
    mapped = jax.tree.map(lambda f: f, opt)
    assert mapped == opt


def test_it_can_be_made_under_a_trace():
    def one_step(rate, params, grads):
        opt = make("zero2", optax.sgd(rate))
        return opt.update(grads, opt.init(params), params)[0]

    updates = jax.jit(one_step)(0.5, some_params(), gradients(0))
    assert_close(updates, jax.tree.map(lambda g: -0.5 * g, gradients(0)))


# Inside other optax transformations.

MASK = {"w": True, "b": False, "scale": True}
LABELS = {"w": "sharded", "b": "plain", "scale": "sharded"}
WRAPPERS = {
    "alone": lambda wrap: wrap(optax.adamw(LR)),
    "chain": lambda wrap: optax.chain(optax.clip_by_global_norm(0.5), wrap(optax.adamw(LR)), optax.scale(0.5)),
    "masked": lambda wrap: optax.masked(wrap(optax.adamw(LR)), MASK),
    "partition": lambda wrap: optax.partition({"sharded": wrap(optax.adamw(LR)), "plain": optax.sgd(LR)}, LABELS),
    "multi_steps": lambda wrap: optax.MultiSteps(wrap(optax.adamw(LR)), 2).gradient_transformation(),
    "inject": lambda wrap: optax.inject_hyperparams(lambda rate: wrap(optax.adamw(rate)))(
        rate=optax.linear_schedule(LR, 0.0, 4)
    ),
    "masked inside": lambda wrap: wrap(optax.masked(optax.adamw(LR), MASK)),
    "partition inside": lambda wrap: wrap(optax.partition({"sharded": optax.adam(LR), "plain": optax.sgd(LR)}, LABELS)),
    "multi_steps inside": lambda wrap: wrap(optax.MultiSteps(optax.adamw(LR), 2).gradient_transformation()),
    "inject inside": lambda wrap: wrap(optax.inject_hyperparams(optax.adamw)(learning_rate=LR)),
}


CASES = [(name, True) for name in WRAPPERS] + [(name, False) for name in ("alone", "multi_steps", "inject")]


@pytest.mark.parametrize(("name", "jitted"), CASES)
def test_inside_other_transformations(name, jitted):
    """Different gradients at each step, and steps enough for MultiSteps to update twice."""
    strategy = "zero3" if name in ("chain", "masked") else "zero2"
    tx = WRAPPERS[name](lambda inner: make(strategy, inner))
    want = plain_run(WRAPPERS[name](lambda inner: inner), some_params(), map(gradients, range(4)))

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = make(strategy, optax.identity()).place(some_params())
    state = tx.init(params)
    run = jax.jit(step) if jitted else step
    for i in range(4):
        params, state = run(params, state, gradients(i))
    assert_close((params, state), want, 2e-6)


def test_inject_hyperparams_changed_from_outside():
    tx, plain = (optax.inject_hyperparams(lambda rate: wrap(optax.sgd(rate)))(rate=0.1) for wrap in (_zero2, _same))
    for run in (tx, plain):
        state = run.init(some_params())
        state.hyperparams["rate"] = jnp.float32(0.7)
        updates, _ = run.update(gradients(0), state, some_params())
        assert_close(updates, jax.tree.map(lambda g: -0.7 * g, gradients(0)))


def _zero2(inner):
    return make("zero2", inner)


def _same(inner):
    return inner


def test_inside_a_train_state():
    opt = make("zero3", optax.adamw(LR))
    plain = optax.adamw(LR)

    @jax.jit
    def step(train_state, batch):
        return train_state.apply_gradients(grads=jax.grad(loss_fn)(train_state.params, batch))

    got = TrainState.create(apply_fn=None, params=opt.place(some_params()), tx=opt)
    want = TrainState.create(apply_fn=None, params=jax.tree.map(jnp.array, some_params()), tx=plain)
    for batch in batches():
        got, want = step(got, batch), step(want, batch)
    assert_close((got.params, got.opt_state, got.step), (want.params, want.opt_state, want.step), 1e-5)


class Model(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(24, 24, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_inside_an_nnx_optimizer(strategy):
    @nnx.jit
    def step(model, optimizer, batch):
        grads = nnx.grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
        optimizer.update(model, grads)

    results = []
    for tx in (make(strategy, optax.adamw(LR)), optax.adamw(LR)):
        model = Model()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for batch in batches():
            step(model, optimizer, batch)
        results.append((nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(optimizer))))
    assert_close(results[0], results[1], 1e-5)


def test_nnx_params_in_a_train_step():
    graph, params = nnx.split(Model(), nnx.Param)
    plain = optax.adamw(LR)

    def loss(params, batch):
        return jnp.mean((nnx.merge(graph, jaxshard.unshard(params))(batch["x"]) - batch["y"]) ** 2)

    want, opt = jax.tree.map(jnp.array, params), make("zero2", plain, specs=[("first/kernel$", P())])
    got, want_state = opt.place(params), plain.init(want)
    got_state, step = opt.init(got), jaxshard.train_step(loss, opt)

    @jax.jit
    def oracle(params, state, batch):
        updates, state = plain.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches():
        got, got_state, _ = step(got, got_state, batch)
        want, want_state = oracle(want, want_state, batch)
    assert_close((got, got_state), (want, want_state), 1e-5)
    assert is_cut(got_state)


# Where things lie.


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shardings_are_where_things_lie(strategy, explicit):
    mesh = mesh_of(strategy)
    if explicit:
        mesh = jax.make_mesh(mesh.axis_sizes, mesh.axis_names)
        assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}
    opt = make(strategy, optax.adamw(LR), mesh)
    wanted = opt.shardings(some_params())
    placed = opt.place(some_params())
    state = opt.init(placed)
    loss, grads = jaxshard.value_and_grad(loss_fn, opt)(placed, batches()[0])
    updates, new_state = opt.update(grads, state, placed)
    jitted_updates, jitted_state = jax.jit(opt.update)(grads, state, placed)
    assert_at(placed, wanted.params)
    assert_at(state, wanted.state)
    for got, want in ((updates, wanted.params), (jitted_updates, wanted.params), (new_state, wanted.state),
                      (jitted_state, wanted.state), (grads, wanted.grads)):  # fmt: skip
        for x, sharding in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            # Under Explicit axes the types of results spell trailing Nones out.
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert loss.sharding.is_fully_replicated
    assert len(loss.sharding.device_set) == 8
    specs = wanted.specs
    assert specs.params["w"] == wanted.params["w"].spec
    assert jax.tree.structure(specs.state) == jax.tree.structure(state)
    # By the table of the design: what is cut 1/N, and what is whole.
    cut = {"ddp": (0, 0, 0), "zero1": (0, 1, 1), "zero2": (0, 1, 1), "zero3": (1, 1, 1), "hsdp": (1, 1, 1)}[strategy]
    assert (is_cut(placed), is_cut(grads), is_cut(state)) == tuple(map(bool, cut))
    ways = 4 if strategy == "hsdp" else 8
    mu = state[0].mu["w"]
    assert mu.addressable_shards[0].data.size * (ways if cut[2] else 1) == mu.size == 16 * 24


def _as_numpy(params, opt):
    del opt
    return params


def _on_one_device(params, opt):
    del opt
    return jax.tree.map(jnp.array, params)


def _placed(params, opt):
    return opt.place(params)


def _elsewhere(params, opt):
    """Under a sharding of the user's own."""
    where = {"w": NamedSharding(opt.mesh, P("data")), "b": jax.devices()[3], "scale": jax.devices()[0]}
    return jax.device_put(params, where)


@pytest.mark.parametrize("form", [_as_numpy, _on_one_device, _placed, _elsewhere])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_init_equals_plain_init_from_any_form_of_params(strategy, form):
    inner = optax.chain(optax.adamw(LR), optax.ema(0.9), optax.add_noise(0.1, 0.5, 0))
    opt = make(strategy, inner)
    state = opt.init(form(some_params(), opt))
    assert_close(state, inner.init(jax.tree.map(jnp.array, some_params())), 0)
    assert_at(state, opt.shardings(some_params()).state)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_init_from_abstract_params_compiles_nothing_and_says_where(strategy, count_compilations):
    opt = make(strategy, optax.adamw(LR))
    by_shape = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), some_params())
    by_eval = jax.eval_shape(lambda: some_params())
    for params in (by_shape, by_eval):
        count, state = count_compilations(opt.init, params)
        assert count == 0
        plain = jax.eval_shape(optax.adamw(LR).init, by_shape)
        assert jax.tree.structure(state) == jax.tree.structure(plain)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), plain)
        assert_at(state, opt.shardings(some_params()).state)


def test_init_whose_state_is_a_constant():
    """A transformation may return an array that it made before (optax.add_noise does, with a typed key)."""
    table, key = jnp.arange(3.0), jax.random.key(7)
    inner = optax.GradientTransformation(lambda p: (table, key), lambda g, s, p=None: (g, s))
    opt = make("zero2", inner)
    for init in (opt.init, jax.jit(opt.init)):
        state = init(some_params())
        np.testing.assert_array_equal(state[0], [0, 1, 2])
        np.testing.assert_array_equal(jax.random.key_data(state[1]), jax.random.key_data(key))
    for update in (opt.update, jax.jit(opt.update)):
        assert_close(update(gradients(0), state, some_params())[0], gradients(0), 0)


def test_abstract_arrays_lower_a_step():
    opt = make("zero3", optax.adamw(LR))
    by_shape = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), some_params())
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches()[0])
    lowered = jaxshard.train_step(loss_fn, opt).lower(by_shape, opt.init(by_shape), batch)
    assert "reduce_scatter" in lowered.as_text()


# Copies.


def aligned(x):
    """A copy at a multiple of 64 bytes: such NumPy arrays `jax.device_put` takes over without copying."""
    buffer = np.empty(x.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    copied = buffer[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copied[...] = x
    return copied


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_place_never_aliases_numpy(strategy):
    mine = jax.tree.map(aligned, some_params())
    placed = jax.block_until_ready(make(strategy, PICKLABLE).place(mine))
    for x in jax.tree.leaves(mine):
        x[...] = 7
    assert_close(placed, some_params(), 0)


def test_shard_batch_never_aliases_numpy():
    """Loaders fill one buffer again and again, while the step that reads it may still run."""
    batch = jax.tree.map(aligned, batches()[0])
    sharded = jax.block_until_ready(jaxshard.shard_batch(batch, make("zero2", PICKLABLE)))
    for x in jax.tree.leaves(batch):
        x[...] = 7
    assert_close(sharded, batches()[0], 0)


@pytest.mark.parametrize("form", [_on_one_device, _placed, _elsewhere])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_place_never_aliases(strategy, form):
    opt = make(strategy, PICKLABLE)
    mine = form(some_params() | {"b": np.ones(24, np.float32)}, opt)
    placed = opt.place(mine)
    jax.jit(lambda p: jax.tree.map(lambda x: 2 * x + 1, p), donate_argnums=0)(placed)
    assert all(x.is_deleted() for x in jax.tree.leaves(placed))
    np.testing.assert_array_equal(mine["w"], some_params()["w"])
    np.testing.assert_array_equal(mine["b"], np.ones(24))


@pytest.mark.parametrize("form", [_as_numpy, _on_one_device, _elsewhere])
def test_a_donating_step_takes_nothing_that_was_not_placed(form):
    opt = make("zero2", optax.adamw(LR))
    mine = form(some_params(), opt)
    step = jaxshard.train_step(loss_fn, opt)
    params, state, _ = step(mine, opt.init(mine), batches()[0])
    step(params, state, batches()[1])
    assert_close(jax.tree.map(np.asarray, mine), some_params(), 0)


# synchronize.


def _bits(x):
    return np.atleast_1d(np.asarray(x)).view(np.uint8)


PLANTED = {
    "negative zero": np.array([-0.0, 1.0, 0.0, -1.0], np.float32),
    "nan payload": np.array([0x7FC12345, 0xFFC00001, 0x7F800000, 1], np.uint32).view(np.float32),
    "float16": np.array([-0.0, 1.5, np.nan, np.inf], np.float16),
    "bfloat16": np.array([-0.0, 1.5, np.nan, 3.0], jnp.bfloat16),
    "int32": np.array([-1, 2, 2**31 - 1, -(2**31)], np.int32),
    "int8": np.array([-1, 2, 127, -128], np.int8),
    "uint32": np.array([1, 2, 2**32 - 1, 0], np.uint32),
    "bool": np.array([True, False, True, True]),
    "complex": np.array([-0.0 + 1j, 1.0 - 0.0j, 2, 3], np.complex64),
}


def _copies(first, mesh, spec, sharding_ways=1):
    """An array whose copies differ: the first has the bits of `first`, each other device's are turned around."""
    shards = []
    for i, device in enumerate(mesh.devices.flat):
        part = np.split(first, sharding_ways)[i % sharding_ways]
        shards.append(jax.device_put(part if i < sharding_ways else part[::-1].copy(), device))
    return jax.make_array_from_single_device_arrays(first.shape, NamedSharding(mesh, spec), shards)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_synchronize_makes_copies_equal_bit_for_bit(axis_type):
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    tree = {name: _copies(first, mesh, P()) for name, first in PLANTED.items()}
    assert any((_bits(s.data) != _bits(PLANTED["int32"])).any() for s in tree["int32"].addressable_shards)
    same = make("zero2", PICKLABLE, mesh).synchronize(tree)
    for name, first in PLANTED.items():
        assert same[name].dtype == first.dtype
        assert same[name].sharding == tree[name].sharding
        assert len(same[name].addressable_shards) == 8
        for shard in same[name].addressable_shards:
            np.testing.assert_array_equal(_bits(shard.data), _bits(first), err_msg=name)


def test_synchronize_keys():
    mesh = jax.make_mesh((8,), ("data",))
    data = np.arange(8, dtype=np.uint32).reshape(4, 2)
    keys = jax.random.wrap_key_data(_copies(data, mesh, P()))
    same = make("zero2", PICKLABLE, mesh).synchronize(keys)
    assert same.dtype == keys.dtype
    for shard in jax.random.key_data(same).addressable_shards:
        np.testing.assert_array_equal(shard.data, data)


def test_synchronize_shards_repeated_over_replica_and_tensor():
    """Each shard over data has copies along the other axes; shards themselves must stay different."""
    mesh = jaxshard.make_mesh(replica=2, tensor=2)
    whole, devices = np.arange(8, dtype=np.float32), mesh.devices
    shards = []
    for index in np.ndindex(devices.shape):
        _, replica, data, tensor = index
        shards.append(jax.device_put(whole.reshape(2, 4)[data] + 100 * replica + 1000 * tensor, devices[index]))
    sharding = NamedSharding(mesh, P("data"))
    planted = jax.make_array_from_single_device_arrays((8,), sharding, shards)
    same = make("hsdp", PICKLABLE, mesh).synchronize({"a": planted})["a"]
    assert same.sharding == sharding
    for shard in same.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


# Masters and reduce_dtype.


@pytest.mark.optimized
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_masters(strategy):
    """bf16 params are the masters' roundings, bit for bit; the inner state is plain optax's on float32 params."""
    opt = make(strategy, optax.adamw(1e-3), master_dtype=jnp.float32)
    params = opt.place(some_params(jnp.bfloat16))
    state = opt.init(params)
    assert isinstance(state, jaxshard.ShardedState)
    plain = jax.eval_shape(optax.adamw(1e-3).init, some_params())
    step = jaxshard.train_step(loss_fn, opt, microbatches=2)
    for batch in batches():
        params, state, _ = step(params, state, batch)
        for p, m in zip(jax.tree.leaves(params), jax.tree.leaves(state.extra["master"]), strict=True):
            assert (p.dtype, m.dtype) == (jnp.bfloat16, jnp.float32)
            np.testing.assert_array_equal(_bits(p), _bits(np.asarray(m).astype(jnp.bfloat16)))
    assert jax.tree.structure(state.inner) == jax.tree.structure(plain)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state.inner) == jax.tree.map(lambda x: (x.shape, x.dtype), plain)
    assert_at(state.extra["master"], opt.shardings(params).state.extra["master"])
    assert is_cut(state.extra["master"]) == (strategy != "ddp")


def test_masters_equal_an_oracle_that_keeps_them_by_hand():
    """Small steps that bf16 params alone would lose."""
    rate = 1e-4
    opt = make("zero2", optax.sgd(rate, momentum=0.9), master_dtype=jnp.float32)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), some_params())
    placed = opt.place(params)
    state = opt.init(placed)
    master = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    momentum = jax.tree.map(jnp.zeros_like, master)
    update = jax.jit(opt.update)
    for i in range(6):
        grads = gradients(i, jnp.bfloat16)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g.astype(jnp.float32), momentum, grads)
        master = jax.tree.map(lambda p, m: p - rate * m, master, momentum)
        updates, state = update(grads, state, placed)
        placed = optax.apply_updates(placed, updates)
    assert_close(state.extra["master"], master, 1e-6)
    assert_close(placed, jax.tree.map(lambda m: m.astype(jnp.bfloat16), state.extra["master"]), 0)


def _linear_loss(params, batch):
    """Its gradient is the mean of the rows, exactly."""
    return jnp.mean(jnp.sum(batch["g"] * params["w"], axis=-1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reduce_dtype_sums_in_that_dtype(strategy):
    """Microbatches of 256, 1, 1 and -256 times a power of two: bf16 sums lose the ones, float32 sums keep them."""
    factors = np.array([1, 2, 4, 1, 2, 4, 1, 2], np.float32)
    rows = (factors[:, None] * np.array([256, 1, 1, -256], np.float32)).reshape(32, 1) * np.ones(16, np.float32)
    params = {"w": np.zeros(16, jnp.bfloat16)}
    mean = 2 * factors.sum() / 32
    for dtype in (jnp.float32, None):
        opt = make(strategy, optax.sgd(1.0), reduce_dtype=dtype)
        fn = jaxshard.value_and_grad(_linear_loss, opt, microbatches=4)
        _, grads = fn(params, {"g": rows.astype(jnp.bfloat16)})
        assert grads["w"].dtype == jnp.bfloat16
        assert (np.asarray(grads["w"], np.float32) == mean).all() == (dtype is not None)


@pytest.mark.parametrize("option", ["reduce_dtype", "master_dtype"])
def test_complex_params_keep_their_imaginary_part(option):
    opt = make("zero2", optax.sgd(0.1), **{option: jnp.float32})
    params = {"w": normal(1, 16, 8) + 1j * normal(2, 16, 8)}
    params = {"w": params["w"].astype(np.complex64)}

    def loss(params, batch):
        return jnp.mean(jnp.abs(batch["x"] @ params["w"]) ** 2)

    batch = {"x": normal(3, 16, 16)}
    _, grads = jaxshard.value_and_grad(loss, opt)(params, batch)
    assert_close_complex(grads["w"], jax.grad(loss)(params, batch)["w"])
    step = jaxshard.train_step(loss, opt)
    got, _, _ = step(params, opt.init(params), batch)
    assert_close_complex(got["w"], params["w"] - 0.1 * jax.grad(loss)(params, batch)["w"])


def assert_close_complex(got, want):
    assert got.dtype == want.dtype
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-6)


# Tensor parallel leaves below each ZeRO level.

MLP_SPECS = {"up": P(None, "tensor"), "down": P("tensor"), "bias": P()}


def mlp_params():
    return {"up": normal(1, 16, 32) / 4, "down": normal(2, 32, 24) / 4, "bias": normal(3, 24)}


def megatron_loss(params, batch):
    """Column-parallel, then row-parallel with its sum over "tensor"."""
    hidden = jnp.tanh(batch["x"] @ params["up"])
    out = jax.lax.psum(hidden @ params["down"], "tensor") + params["bias"]
    return jnp.mean((out - batch["y"]) ** 2)


def whole_loss(params, batch):
    out = jnp.tanh(batch["x"] @ params["up"]) @ params["down"] + params["bias"]
    return jnp.mean((out - batch["y"]) ** 2)


@pytest.fixture(scope="module")
def mlp_oracle():
    """Five steps on one device, of an optimizer that sees the gradients' scale and needs their whole norm."""
    tx = optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(LR, momentum=0.9))
    params = jax.tree.map(jnp.array, mlp_params())
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(whole_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for batch in batches(5):
        params, state, loss = step(params, state, batch)
    return tx, params, state, loss


@pytest.mark.parametrize(
    ("strategy", "rules"), [*((strategy, False) for strategy in STRATEGIES), ("zero2", True), ("zero3", True)]
)
def test_specs_over_a_tensor_axis(strategy, rules, mlp_oracle):
    tx, want_params, want_state, want_loss = mlp_oracle
    specs = [(f"^{name}$", spec) for name, spec in MLP_SPECS.items()] if rules else MLP_SPECS
    mesh = jaxshard.make_mesh(replica=2, data=2, tensor=2) if strategy == "hsdp" else jaxshard.make_mesh(tensor=2)
    opt = make(strategy, tx, mesh, specs=specs)
    params = opt.place(mlp_params())
    state = opt.init(params)
    step = jaxshard.train_step(megatron_loss, opt, microbatches=2)
    for batch in batches(5):
        params, state, metrics = step(params, state, batch)
    assert_close((params, state, metrics["loss"]), (want_params, want_state, want_loss), 2e-6)
    assert "tensor" in params["up"].sharding.spec
    assert jaxshard.specs_of(params) == MLP_SPECS


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_specs_over_a_tensor_axis_with_unshard(strategy, mlp_oracle):
    tx, want_params, want_state, want_loss = mlp_oracle
    opt = make(strategy, tx, jaxshard.make_mesh(tensor=2), specs=MLP_SPECS)
    params = opt.place(mlp_params())
    state = opt.init(params)
    step = jaxshard.train_step(lambda p, b: megatron_loss(jaxshard.unshard(p), b), opt)
    for batch in batches(5):
        params, state, metrics = step(params, state, batch)
    assert_close((params, state, metrics["loss"]), (want_params, want_state, want_loss), 2e-6)


def test_specs_of_leaves_the_data_axes_out():
    opt = make("zero3", PICKLABLE, jaxshard.make_mesh(tensor=2), specs=MLP_SPECS)
    placed = opt.place(mlp_params())
    assert is_cut({"bias": placed["bias"]})
    assert jaxshard.specs_of(placed) == MLP_SPECS
    assert jaxshard.specs_of(mlp_params()) == dict.fromkeys(MLP_SPECS, P())
    again = make("zero1", PICKLABLE, jaxshard.make_mesh(tensor=2), specs=jaxshard.specs_of(placed))
    assert again.place(placed)["up"].sharding.spec == P(None, "tensor")


# Meshes of other kinds.


@pytest.mark.parametrize(
    ("strategy", "explicit", "in_context"),
    [("zero1", True, False), ("zero1", True, True), ("zero3", True, True), ("zero3", False, True)],
)
def test_auto_and_explicit_meshes(strategy, explicit, in_context):
    """Muon's matrix products raise on an Explicit mesh unless the update runs with its axes made Auto."""
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.contrib.muon(LR))
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = jax.make_mesh((2, 4), ("outer", "data")) if explicit else Mesh(devices, ("outer", "data"))
    opt = make(strategy, inner, mesh, data_axes=("outer", "data"))

    def train():
        params = opt.place(some_params())
        state = opt.init(params)
        step = jaxshard.train_step(loss_fn, opt)
        for batch in batches(3):
            params, state, _ = step(params, state, batch)
        return params, state

    if in_context:
        with jax.set_mesh(mesh):
            got = train()
    else:
        got = train()

    @jax.jit
    def oracle(params, state, batch):
        updates, state = inner.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.array, some_params())
    state = inner.init(params)
    for batch in batches(3):
        params, state = oracle(params, state, batch)
    assert_close(got, (params, state), 1e-5)


class Pair(NamedTuple):
    first: object
    second: object


def test_params_of_several_container_types():
    tree = Pair({"a": normal(1, 16, 24), "none": None}, [normal(2, 24), (normal(3),)])

    def loss(params, batch):
        out = jnp.tanh(batch["x"] @ params.first["a"] + params.second[0]) * params.second[1][0]
        return jnp.mean((out - batch["y"]) ** 2)

    opt = make("zero3", optax.sgd(LR))
    params, state, _ = jaxshard.train_step(loss, opt)(tree, opt.init(tree), batches()[0])
    grads = jax.jit(jax.grad(loss))(tree, batches()[0])
    assert_close(params, jax.tree.map(lambda p, g: p - LR * g, tree, grads))
    assert jax.tree.structure(state) == jax.tree.structure(optax.sgd(LR).init(tree))


# What users of `value_and_grad`, `evaluate` and `train_step` also do.


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_differentiating_through_evaluate_and_through_the_loss(strategy):
    """Gradients of a stand-in alone would be zero here, silently."""
    opt, batch = make(strategy, PICKLABLE), batches()[0]

    def loss(params, batch):
        return loss_fn(jaxshard.unshard(params), batch)

    want = jax.grad(loss_fn)(some_params(), batch)
    assert_close(jax.grad(lambda p: jaxshard.evaluate(loss, opt)(p, batch))(some_params()), want)
    assert_close(jax.grad(lambda p: jaxshard.value_and_grad(loss, opt)(p, batch)[0])(some_params()), want)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_python_numbers_in_aux(microbatches):
    def loss(params, batch):
        return loss_fn(params, batch), {"float": 2.5, "int": 3, "numpy": np.ones(2, np.float32), "none": None}

    fn = jaxshard.value_and_grad(loss, make("zero2", PICKLABLE), has_aux=True, microbatches=microbatches)
    (_, aux), _ = fn(some_params(), batches()[0])
    assert (float(aux["float"]), int(aux["int"]), aux["numpy"].tolist(), aux["none"]) == (2.5, 3, [1, 1], None)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_aux_keeps_its_dtype_and_is_summed_in_a_wider_one(weighted, dtype):
    """2048 on one device, 8 on the others: the bf16 sum of two loses the 8."""
    values = np.ones((8, 1), np.float32)
    values[0] = 257

    def loss(params, batch):
        value = jnp.sum(params["w"]) * jnp.mean(batch["x"])
        return ((value, 1.0) if weighted else value), batch["x"].mean().astype(jnp.bfloat16).astype(dtype)

    fn = jaxshard.value_and_grad(loss, make("zero2", PICKLABLE), has_aux=True, weighted=weighted)
    (_, aux), _ = fn({"w": np.ones(16, np.float32)}, {"x": values * 8})
    assert aux.dtype == dtype
    assert abs(float(aux) - 8 * (256 + 7) / 8) <= 1


def test_a_further_argument_that_lies_on_one_device():
    """Such as a table that was put on the first device, or a metric of another computation."""
    opt, factor = make("zero2", PICKLABLE), jax.device_put(jnp.float32(2.0), jax.devices()[3])

    def loss(params, batch, factor):
        return factor * loss_fn(params, batch)

    got, _ = jaxshard.value_and_grad(loss, opt)(some_params(), batches()[0], factor)
    assert_close(got, 2 * loss_fn(some_params(), batches()[0]))
    params, state = opt.place(some_params()), opt.init(some_params())
    _, _, metrics = jaxshard.train_step(loss, opt)(params, state, batches()[0], factor)
    assert_close(metrics["loss"], 2 * loss_fn(some_params(), batches()[0]))


def test_one_placed_array_as_two_leaves():
    """Tied by the user after `place`: donated twice, which jax 0.10.2 answers with a crash."""
    opt = make("zero2", optax.sgd(LR))
    w = opt.place({"w": normal(1, 16, 24)})["w"]

    def loss(params, batch):
        return jnp.mean((batch["x"] @ params["one"] - batch["x"] @ params["two"] * 2) ** 2)

    params = {"one": w, "two": w}
    grads = jax.grad(loss)(jax.tree.map(np.asarray, params), batches()[0])
    want = jax.tree.map(lambda p, g: np.asarray(p) - LR * g, params, grads)
    got, _, _ = jaxshard.train_step(loss, opt)(params, opt.init(params), batches()[0])
    assert_close(got, want)
