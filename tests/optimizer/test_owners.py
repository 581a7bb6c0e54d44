"""Matrix work by owners: each matrix is updated on one device, wherever its parts lie."""

import functools
import warnings

import jax
import jax.numpy as jnp
import matrix_optimizers
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from oracle import assert_close, one_device, sharded

import jaxshard
from jaxshard import inspect
from jaxshard.optimizer.owners import layers, owners

WIDTH = 24
SHAPES = {
    "a": (WIDTH, 48),  # three alike
    "b": (WIDTH, 48),
    "c": (WIDTH, 48),
    "turned": (48, WIDTH),  # as a turned one works by its transpose
    "square": (48, 48),
    "stack": (5, 48, WIDTH),
    "prime": (11, 13),
    "gain": (WIDTH,),
}


def make_params(shapes=SHAPES, dtype=np.float64):
    rng = np.random.default_rng(3)
    return {name: rng.normal(size=shape).astype(dtype) / 12 for name, shape in shapes.items()}


def loss(params, batch):
    x = batch * params["gain"]
    for name in ("a", "b", "c"):
        x = x + jnp.tanh(x @ params[name] @ params["square"]) @ params["turned"]
    for layer in params["stack"]:
        x = x + jnp.tanh(x @ layer.T) @ layer
    x = x.at[:, :11].add(jnp.sum(x[:, :11] @ params["prime"], -1, keepdims=True))
    return jnp.mean(x**2)


def rows(seed, count=24):
    return np.random.default_rng(seed).normal(size=(count, WIDTH))


def check(opt, tx, params, fn=loss, plain=loss, tolerance=1e-12):
    steps = [rows(seed) for seed in range(3)]
    got, want = sharded(fn, opt, params, steps), one_device(plain, tx, params, steps)
    state = got[1].inner if isinstance(got[1], jaxshard.ShardedState) else got[1]
    assert_close(got[0], want[0], tolerance)
    assert_close(state, want[1], tolerance)


TXS = {"muon": matrix_optimizers.muon, "shampoo": matrix_optimizers.shampoo, "soap": matrix_optimizers.soap}
ON = [("zero2", 2), ("zero3", 4), ("zero1", 3)]


@pytest.mark.filterwarnings("ignore:.*cannot be sharded", "ignore:.*may hang")
@pytest.mark.parametrize(("strategy", "num_devices"), ON)
@pytest.mark.parametrize("name", list(TXS))
def test_equals_one_device(x64, name, strategy, num_devices):
    tx, mesh = TXS[name](), jaxshard.make_mesh(devices=jax.devices()[:num_devices])
    check(getattr(jaxshard, strategy)(tx, mesh, min_shard_size=1), tx, make_params())


@pytest.mark.filterwarnings("ignore:.*cannot be sharded")
def test_more_devices_than_matrices(x64):
    tx = TXS["muon"]()
    check(jaxshard.zero2(tx, jaxshard.make_mesh(), min_shard_size=1), tx, make_params())


def test_cut_over_tensor_too(x64):
    """Each matrix is put together from the parts of data and tensor devices."""

    def ours(params, batch):
        x = batch
        for name in ("a", "b", "c"):
            x = x + jax.lax.psum(jnp.tanh(x @ params[name]) @ params["turned"], "tensor")
        for layer in params["stack"]:
            x = x + jax.lax.psum(jnp.tanh(x @ layer.T) @ layer, "tensor")
        return jnp.mean((x * params["gain"]) ** 2)

    def plain(params, batch):
        x = batch
        for name in ("a", "b", "c"):
            x = x + jnp.tanh(x @ params[name]) @ params["turned"]
        for layer in params["stack"]:
            x = x + jnp.tanh(x @ layer.T) @ layer
        return jnp.mean((x * params["gain"]) ** 2)

    wide = P(None, "tensor")
    specs = {"a": wide, "b": wide, "c": wide, "turned": P("tensor"), "stack": wide, "gain": P()}
    params = make_params({name: SHAPES[name] for name in specs})
    tx = TXS["shampoo"]()
    mesh = jaxshard.make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(jaxshard.hybrid(tx, mesh, specs, zero=2, min_shard_size=1), tx, params, ours, plain)


@pytest.mark.filterwarnings("ignore:.*cannot be sharded")
@pytest.mark.parametrize(
    "options",
    [{"master_dtype": jnp.float64}, {"state_axes": ("data", "replica")}],
    ids=["masters", "hfsdp"],
)
def test_with_other_options(x64, options):
    tx = TXS["muon"]()
    mesh = jaxshard.make_mesh(data=2, replica=2, devices=jax.devices()[:4])
    check(jaxshard.hsdp(tx, mesh, min_shard_size=1, **options), tx, make_params())


@pytest.mark.filterwarnings("ignore:.*cannot be sharded")
@pytest.mark.parametrize("num_devices", [3, 4])
def test_a_large_leaf_that_nothing_divides_has_an_owner(x64, monkeypatch, num_devices):
    """Over 4 devices it is the only one, so that nothing at all is sent to its owner."""
    monkeypatch.setattr(owners, "_WORTH_SENDING", 100)
    dealt, deal = [], owners._deal
    monkeypatch.setattr(owners, "_deal", lambda members, how: dealt.extend(members) or deal(members, how))
    tx, mesh = TXS["muon"](), jaxshard.make_mesh(devices=jax.devices()[:num_devices])
    check(jaxshard.zero2(tx, mesh, min_shard_size=1), tx, make_params())
    assert sorted(SHAPES).index("prime") in {member.unit.leaf for member in dealt}


# What may not be taken apart.


def per_matrix(fn):
    """An optimizer that multiplies each stack's Gram matrices into it, and then calls `fn` on the stack."""

    def update(updates, state, params=None):
        whiten = lambda g: jnp.linalg.solve(g @ jnp.swapaxes(g, -1, -2) + jnp.eye(g.shape[-2], dtype=g.dtype), g)  # noqa: E731
        return jax.tree.map(lambda g: -0.1 * (fn(whiten(g)) if g.ndim == 3 else g), updates), state

    return optax.chain(optax.trace(0.9), optax.GradientTransformation(lambda _: optax.EmptyState(), update))


COUPLED = {
    "by the layer's number": lambda g: (g * jnp.arange(1, 1 + g.shape[0])[:, None, None]) @ jnp.swapaxes(g, -1, -2) @ g,
    "by the number of layers": lambda g: (g / g.shape[0]) @ jnp.swapaxes(g, -1, -2) @ g,
    "by which operand comes first": lambda g: (
        g @ jnp.swapaxes(jnp.tanh(g), -1, -2) @ g if g.shape[0] == 5 else jnp.tanh(g) @ jnp.swapaxes(g, -1, -2) @ g
    ),
    "by the norm of the stack": lambda g: (g / jnp.linalg.norm(g)) @ jnp.swapaxes(g, -1, -2) @ g,
    "by the layer before": lambda g: g @ jnp.swapaxes(jnp.roll(g, 1, 0), -1, -2) @ g,
    "by a guard": lambda g: (
        lambda y: jnp.where(jnp.all(jnp.isfinite(jnp.log(1000 * y[:, :1, :1] % 1 - 0.5))), y, 0.1) @ g
    )(g @ jnp.swapaxes(g, -1, -2)),
    "by a power": lambda g: jax.lax.integer_pow(g @ jnp.swapaxes(g, -1, -2), g.shape[0]) @ g,
    "by how often": lambda g: jax.lax.fori_loop(0, g.shape[0], lambda _, y: y @ jnp.swapaxes(g, -1, -2) @ g, g),
    "by their running sum": lambda g: jnp.cumsum(g, 0) @ jnp.swapaxes(g, -1, -2) @ g,
}


@pytest.mark.filterwarnings("ignore:.*cannot be sharded", "ignore:.*may hang")
@pytest.mark.parametrize("name", ["by nothing", *COUPLED])
def test_layers_that_are_coupled_stay_together(x64, name, monkeypatch):
    taken_apart = []
    monkeypatch.setattr(
        owners, "one_layer", lambda *args: taken_apart.append(found := layers.one_layer(*args)) or found
    )
    fn = COUPLED.get(name, lambda g: g @ jnp.swapaxes(g, -1, -2) @ g)
    tx, mesh = per_matrix(fn), jaxshard.make_mesh(devices=jax.devices()[:2])
    check(jaxshard.zero2(tx, mesh, min_shard_size=1), tx, make_params())
    assert taken_apart
    assert all((found is None) == (name in COUPLED) for found in taken_apart)


@pytest.mark.filterwarnings("ignore:.*cannot be sharded", "ignore:.*may hang")
def test_leaves_that_are_coupled_stay_in_the_global_view(x64):
    def update(updates, state, params=None):
        gram = sum(g @ g.T for name, g in updates.items() if name in "abc")
        mixed = {name: gram @ g if name in "abc" else g for name, g in updates.items()}
        return jax.tree.map(lambda g: -0.01 * g, mixed), state

    tx = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    mesh = jaxshard.make_mesh(devices=jax.devices()[:2])
    check(jaxshard.zero2(tx, mesh, min_shard_size=1), tx, make_params())


# What it costs.


def cost(name, num_devices, stacked, strategy="zero2", layers=12):
    """(wire bytes, flops, scratch bytes) of a compiled step of a model with six matrices in each layer."""
    width = 32
    shapes = dict.fromkeys("qkvo", (width, width)) | {"up": (width, 4 * width), "down": (4 * width, width)}
    if stacked:
        params = {key: jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for key, shape in shapes.items()}
    else:
        one = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}
        params = {f"layer{i}": one for i in range(layers)}

    def loss(params, x):
        each = [jnp.mean(jnp.tanh(x[:, : w.shape[-2]] @ w) ** 2) for w in jax.tree.leaves(params)]
        return sum(each)

    tx = optax.adamw(1e-3) if name == "adamw" else TXS[name]()
    mesh = jaxshard.make_mesh(devices=jax.devices()[:num_devices])
    opt = getattr(jaxshard, strategy)(tx, mesh, min_shard_size=1)
    batch = jax.ShapeDtypeStruct((2 * num_devices, 4 * width), jnp.float32)
    compiled = jaxshard.train_step(loss, opt).lower(params, opt.init(params), batch).compile()
    found = inspect.report(compiled)
    return found.wire_bytes, found.flops, compiled.memory_analysis().temp_size_in_bytes


cost = functools.cache(cost)


@pytest.mark.parametrize("num_devices", [4, 8])
def test_wire_of_muon_on_separate_layers(num_devices):
    """Momentum goes to owners, updates come home: 1/N each, to AdamW's 2."""
    ratio = cost("muon", num_devices, False)[0] / cost("adamw", num_devices, False)[0]
    assert ratio == pytest.approx(1 + 1 / num_devices, rel=0.01)
    assert ratio <= 1.25 * 1.001


@pytest.mark.filterwarnings("ignore:.*may hang")
@pytest.mark.parametrize("name", list(TXS))
def test_wire_of_stacks_that_divide(name):
    """What follows from a matrix lies beside it, so that gradients alone move: 1/N, to AdamW's 2."""
    ratio = cost(name, 4, True)[0] / cost("adamw", 4, True)[0]
    assert ratio == pytest.approx(1 + 1 / 8, rel=0.01)


@pytest.mark.filterwarnings("ignore:.*may hang")
@pytest.mark.parametrize("name", ["muon", "soap"])
def test_each_layer_of_a_stack_has_an_owner(name):
    """12 layers over 8 devices cost what separate layers cost, 1/N of the work."""
    stacked, separate = cost(name, 8, True), cost(name, 8, False)
    assert stacked[0] == pytest.approx(separate[0], rel=0.01)
    assert stacked[1] == pytest.approx(separate[1], rel=0.1)
    assert stacked[1] < 1.3 * cost(name, 2, False)[1] / 4


# Layers under `vmap`.


def newton(g):
    """The polar factor of a matrix by Newton's iteration, until it converges."""

    def goes_on(carry):
        _, step, count = carry
        return (step > 1e-9) & (count < 40)

    def body(carry):
        x, _, count = carry
        new = 1.5 * x - 0.5 * x @ x.T @ x
        return new, jnp.max(jnp.abs(new - x)), count + 1

    return jax.lax.while_loop(goes_on, body, (g / jnp.linalg.norm(g), jnp.asarray(1.0, g.dtype), 0))[0]


def signed_qr(g):
    q, r = jnp.linalg.qr(g)
    return (q * jnp.sign(jnp.diagonal(r))) @ jnp.eye(g.shape[1], dtype=g.dtype)


@pytest.mark.filterwarnings("ignore:.*cannot be sharded", "ignore:.*may hang")
@pytest.mark.parametrize("fn", [newton, signed_qr])
def test_layers_under_vmap(x64, fn):
    """A loop whose predicate differs by layer; a branch that XLA chooses by platform."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda g: -0.01 * (jax.vmap(fn)(g) if g.ndim == 3 else g), updates), state

    tx = optax.chain(optax.trace(0.9), optax.GradientTransformation(lambda _: optax.EmptyState(), update))
    mesh = jaxshard.make_mesh(devices=jax.devices()[:4])
    check(jaxshard.zero2(tx, mesh, min_shard_size=1), tx, make_params())
