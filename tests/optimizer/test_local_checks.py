"""What the local view refuses, by name: values that vary, effects, states that do not fit; and what it need not refuse.

Each optimizer here was, or could be, silently wrong: each device got other params, and they came back as copies.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxshard

AXES = ("replica", "data")
STRATEGIES = ["ddp", "zero1", "zero2"]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def params():
    """All leaves are cut, so that no type of JAX's gives a difference away."""
    return {"w": normal(1, 8, 16), "b": normal(2, 16)}


def gradients():
    """(8, ...): those of each device."""
    return jax.tree.map(lambda p: normal(3, 8, *p.shape), params())


@functools.cache
def mesh():
    return jaxshard.make_mesh()


def run(strategy, inner_of, *, before=lambda state, x: state, start=None, **extra):
    """(updates, state) of one update in a shard_map, where `inner_of` and `before` get this device's number, 1 to 8."""
    make = functools.partial(getattr(jaxshard, strategy), mesh=mesh(), min_shard_size=8)
    opt = make(start or inner_of(jnp.float32(1)))
    specs = opt.shardings(params()).specs.state

    def step(p, state, grads, x):
        grads, x = jax.tree.map(lambda g: g[0], grads), x[0]
        return make(inner_of(x)).update(grads, before(state, x), p, **{name: of(x) for name, of in extra.items()})

    mapped = jax.shard_map(step, mesh=mesh(), in_specs=(P(), specs, P(AXES), P(AXES)), out_specs=(P(), specs))
    return jax.jit(mapped)(params(), opt.init(params()), gradients(), np.arange(1, 9, dtype=np.float32))


def each(fn):
    return optax.stateless(lambda updates, _: jax.tree.map(fn, updates))


def refused(strategy, inner_of, *words, error=ValueError, **how):
    with pytest.raises(error) as caught:
        run(strategy, inner_of, **how)
    for word in (strategy, *words):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def right(strategy, inner, **how):
    updates, state = run(strategy, lambda x: inner, **how)
    p = jax.tree.map(jnp.asarray, params())
    grads = jax.tree.map(lambda g: g.mean(0), gradients())
    want, want_state = jax.jit(inner.update)(grads, inner.init(p), p)
    chex.assert_trees_all_close((updates, state), (want, want_state), rtol=1e-5, atol=1e-6)
    for got in jax.tree.leaves((updates, state)):
        for shard in got.addressable_shards if got.sharding.is_fully_replicated else ():
            np.testing.assert_array_equal(shard.data, got.addressable_shards[0].data)


# 1. Optimizers that are built in the step, of this device's numbers.


class Scaled:
    """An optimizer of a user's own class."""

    def __init__(self, scale):
        self.scale = scale

    def init(self, p):
        return ()

    def update(self, updates, state, p=None):
        return jax.tree.map(lambda g: g * self.scale, updates), state


def of_class(x):
    return optax.GradientTransformation(Scaled(x).init, Scaled(x).update)


CLOSED_OVER = {
    "rate": lambda x: optax.sgd(0.1 * x),
    "moments": lambda x: optax.scale_by_adam(b1=x / 9),
    "decay": lambda x: optax.add_decayed_weights(x),
    "schedule": lambda x: optax.sgd(lambda count: 0.1 * x),
    "partial": lambda x: optax.sgd(functools.partial(lambda y, count: y, x)),
    "tree": lambda x: optax.sgd(jax.tree_util.Partial(lambda y, count: y, x)),
    "class": of_class,
    "jit": lambda x: each(jax.jit(lambda g: g * x)),
    "nested": lambda x: optax.chain(optax.scale(2.0), optax.masked(each(lambda g: g * x), True)),
    "remat": lambda x: each(jax.checkpoint(lambda g: g * jnp.sin(x))),
    "loop": lambda x: each(lambda g: lax.while_loop(lambda c: c[1] < x, lambda c: (c[0] * 2, c[1] + 1), (g, 0.0))[0]),
    "branch": lambda x: each(lambda g: lax.cond(x > 3, lambda g: g * 2, lambda g: g, g)),
    "array": lambda x: each(lambda g: g * (x * jnp.ones(3)).sum()),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", list(CLOSED_OVER))
def test_an_optimizer_made_of_what_varies(name, strategy):
    refused(strategy, CLOSED_OVER[name], "differ from device to device", "varies over ['data']", "pmean", "outside")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loop", ["scan", "cond"])
def test_where_jax_refuses_the_type_itself_the_cause_is_told(loop, strategy):
    def carried(x):
        return lambda g: lax.scan(lambda c, _: (c * x, None), g, None, length=2)[0]

    def chosen(x):
        return lambda g: lax.cond(g.sum() > 0, lambda g: g * x, lambda g: g, g)

    make = {"scan": carried, "cond": chosen}[loop]
    refused(strategy, lambda x: each(make(x)), "it uses a value that varies", "pmean", "JAX said", "{V:")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_reduced_first_is_right(strategy):
    scaled = lambda x: optax.sgd(0.1 * lax.pmean(x, AXES))  # noqa: E731
    got, _ = run(strategy, scaled, start=optax.sgd(0.1))
    want = jax.tree.map(lambda g: -0.45 * g.mean(0), gradients())
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_reduction_in_the_optimizer_is_right_where_nothing_is_cut():
    inner = each(lambda g: lax.pmean(g, AXES) * 2)
    got, _ = run("ddp", lambda x: inner)
    mean = jax.tree.map(lambda g: g.mean(0), gradients())
    chex.assert_trees_all_close(got, jax.tree.map(lambda g: 2 * g, mean), rtol=1e-5, atol=1e-6)
    scaled, _ = run("ddp", lambda x: each(lambda g: g * lax.pmean(x, AXES)), start=inner)
    chex.assert_trees_all_close(scaled, jax.tree.map(lambda g: 4.5 * g, mean), rtol=1e-5)
    refused("zero2", lambda x: inner, "`psum", "not known to be correct")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_value_fn_of_this_devices_rows(strategy):
    """A line search asks for the loss; only that of all rows is the same everywhere."""
    inner = optax.lbfgs(memory_size=2)

    def value_fn(x):
        return lambda p: x * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))

    extra = {"value": lambda x: jnp.float32(1), "grad": lambda x: jax.tree.map(jnp.asarray, params())}
    refused(strategy, lambda x: inner, "differ from device to device", value_fn=value_fn, **extra)


# 2. States that vary.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hyperparameter_overwritten_with_what_varies(strategy):
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)

    def overwrite(state, x):
        return state._replace(hyperparams={"learning_rate": 0.1 * x})

    refused(
        strategy, lambda x: inner, "hyperparams/learning_rate varies over ['data']", error=TypeError, before=overwrite
    )
    right(strategy, inner, before=lambda state, x: state._replace(hyperparams={"learning_rate": jnp.float32(0.1)}))


def test_a_state_that_is_another_part():
    """Whole where it should be cut, of another optimizer, of another dtype."""
    adam = optax.adam(0.1)

    def whole(state, x):
        return jax.tree.map(lambda leaf: jnp.zeros((8, 16)) if leaf.ndim == 2 else leaf, state)

    def halves(state, x):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim == 2 else leaf, state)

    words = ["opt.shardings(params).specs.state", "mu/w has shape (8, 16)", "device's part", "(1, 16)"]
    refused("zero2", lambda x: adam, *words, before=whole)
    refused("zero2", lambda x: adam, "mu/w is bfloat16", "float32", before=halves)
    refused("zero2", lambda x: optax.sgd(0.1, momentum=0.9), "0/trace/b is missing", start=adam)


# 3. Effects, and what is not known.


def acting(g):
    io_callback(lambda x: None, None, jnp.float32(1))
    return g


def mutable(g):
    ref = jax.new_ref(g)
    ref[...] = ref[...] * 2
    return ref[...]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_effects(strategy):
    words = ["does more than compute", "which has an effect", "each of 8 devices", "outside shard_map"]
    refused(strategy, lambda x: each(acting), "`io_callback`", *words)
    refused(strategy, lambda x: each(mutable), "`new_ref`", *words)


UNKNOWN = {
    "axis_index": lambda g: g * lax.axis_index("data"),
    "rng_uniform": lambda g: g * lax.rng_uniform(0.0, 1.0, ()),
    "all_gather": lambda g: lax.all_gather(g, "data").sum(0),
    "shard_map": lambda g: jax.shard_map(lambda h: h * 2, in_specs=P(), out_specs=P())(g),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", list(UNKNOWN))
def test_what_is_not_known_to_be_right(name, strategy):
    start = each(lambda g: g)
    refused(strategy, lambda x: each(UNKNOWN[name]), f"`{name}`", "not known to be correct", "outside", start=start)


def double(x):
    return np.float32(2) * x


HARMLESS = {
    "print": lambda g: (jax.debug.print("{}", g[0]), g)[1],
    "debug.callback": lambda g: (jax.debug.callback(double, g), g)[1],
    "pure_callback": lambda g: g * jax.pure_callback(double, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(1)),
    "random number": lambda g: g * jax.random.normal(jax.random.key(0)),
    "platform": lambda g: lax.platform_dependent(g, cpu=lambda g: g * 2, default=lambda g: g * 3),
    "dtypes": lambda g: g.astype(jnp.bfloat16).astype(jnp.float32),
    "bits": lambda g: lax.bitcast_convert_type(lax.bitcast_convert_type(g, jnp.int32), jnp.float32),
}


@pytest.mark.parametrize("name", list(HARMLESS))
def test_what_need_not_be_refused(name):
    right("zero2", each(HARMLESS[name]))


MIXED = {
    "random array": lambda g: g + jax.random.normal(jax.random.key(0), g.shape),
    "sort": jnp.sort,
    "cumsum": lambda g: jnp.cumsum(g, -1),
    "argmax": lambda g: g * jnp.argmax(g),
    "top_k": lambda g: g * lax.top_k(g, 1)[0],
    "fft": lambda g: jnp.fft.fft(g).real,
    "narrower": lambda g: lax.bitcast_convert_type(lax.bitcast_convert_type(g, jnp.uint8) + 1, jnp.float32),
    "callback": lambda g: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(g.shape, g.dtype), g),
}


@pytest.mark.parametrize("name", list(MIXED))
def test_what_mixes_elements(name):
    refused("zero2", lambda x: each(MIXED[name]), "not element-wise", "so the result would be wrong")
    right("ddp", each(MIXED[name]))


# Meshes: axes of size 1 need not be manual.


def loss(p, x):
    return jnp.mean((x @ p["w"] + p["b"]) ** 2)


def trained(opt, axes, names, x):
    specs = opt.shardings(params()).specs.state

    def step(p, state, x):
        grads = jax.grad(loss)(lax.pcast(p, axes, to="varying"), x)
        updates, state = opt.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    how = {"in_specs": (P(), specs, P(axes)), "out_specs": (P(), specs), "axis_names": names}
    mapped = jax.jit(jax.shard_map(step, mesh=opt.mesh, **how))
    p, state = opt.place(params()), opt.init(params())
    for _ in range(3):
        p, state = mapped(p, state, x)
    return p


def of_one_device(tx, x):
    p = jax.tree.map(jnp.asarray, params())
    state = tx.init(p)
    for _ in range(3):
        updates, state = jax.jit(tx.update)(jax.grad(loss)(p, x), state, p)
        p = optax.apply_updates(p, updates)
    return p


MESHES = {
    "make_mesh": (jaxshard.make_mesh, ("data",), {"data"}, {}),
    "an axis of XLA's": (lambda: jaxshard.make_mesh(data=4, tensor=2), ("data",), {"data"}, {}),
    "both": (lambda: jaxshard.make_mesh(data=4, replica=2), AXES, {*AXES}, {}),
    "explicit": (lambda: jax.make_mesh((8,), ("data",)), ("data",), {"data"}, {}),
    "two": (
        lambda: Mesh(np.array(jax.devices()).reshape(2, 4), ("slice", "data")),
        ("slice", "data"),
        {"slice", "data"},
        {"data_axes": ("slice", "data")},
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", list(MESHES))
def test_only_axes_larger_than_1_must_be_manual(name, strategy):
    make, axes, names, options = MESHES[name]
    opt = getattr(jaxshard, strategy)(optax.adamw(0.1), make(), min_shard_size=8, **options)
    x = normal(9, 16, 8)
    got = trained(opt, axes, names, jaxshard.shard_batch(x, opt))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, of_one_device(optax.adamw(0.1), x)
    )
