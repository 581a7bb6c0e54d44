"""Muon and its kin: stacked layers are dealt out by whole matrices, as the compiled program's bytes show."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, muon
from oracle import assert_close, one_device, sharded

import jaxshard
from jaxshard import inspect
from jaxshard.optimizer import sharding
from jaxshard.optimizer.inner import whole_matrices

STACKED, SINGLE = MuonDimensionNumbers(1, 2), MuonDimensionNumbers(0, 1)
WIDTH, HIDDEN = 64, 128


def dims(params):
    return {"up": STACKED, "down": STACKED, "gain": None}


def make_params(layers):
    rng = np.random.default_rng(0)
    shapes = {"up": (layers, WIDTH, HIDDEN), "down": (layers, HIDDEN, WIDTH), "gain": (layers, WIDTH)}
    return {name: rng.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}


def loss(params, batch, axis=None):
    @jax.checkpoint
    def layer(x, block):
        block = jaxshard.unshard(block)
        y = jnp.tanh((x * block["gain"]) @ block["up"]) @ block["down"]
        return x + (jax.lax.psum(y, axis) if axis else y), None

    return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)


def tx_of(decay=0.1, **options):
    tx = muon(1e-2, weight_decay=decay, muon_weight_dimension_numbers=dims, **options)
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def cost(strategy, tx, layers, num_devices=8):
    """(wire bytes, bytes of scratch memory) of one compiled step."""
    opt = getattr(jaxshard, strategy)(tx, jaxshard.make_mesh(devices=jax.devices()[:num_devices]))
    params = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make_params(layers)))
    batch = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)
    compiled = jaxshard.train_step(loss, opt).lower(params, opt.init(params), batch).compile()
    return inspect.report(compiled).wire_bytes, compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("strategy", "num_devices", "decay", "ratio"),
    [("zero2", 8, 0.1, 17 / 16), ("zero2", 4, 0.1, 9 / 8), ("zero3", 8, 0.1, 9 / 8), ("zero3", 8, 0.0, 13 / 12)],
)
def test_wire_bytes_stay_near_those_of_adamw(strategy, num_devices, decay, ratio):
    """All-to-alls of 1/N: of gradients; under zero3 of updates, and of params where decay reads them.

    Distributed Muon (Liu et al. 2025, Moonlight, section 2.3) allows 1.25.
    """
    adamw, _ = cost(strategy, optax.adamw(1e-2), 8, num_devices)
    ours, _ = cost(strategy, tx_of(decay), 8, num_devices)
    assert ours / adamw == pytest.approx(ratio, rel=0.01)


@pytest.mark.optimized
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_plain_global_view_would_cost_several_times_more(strategy, monkeypatch):
    ours = cost(strategy, tx_of(), 8)
    monkeypatch.setattr(sharding, "deal_leaf", lambda leaf, *_: leaf)
    plain = cost(strategy, tx_of(), 8)
    assert plain[0] > 3 * ours[0]
    assert plain[1] > 1.5 * ours[1]


EXACT = [("zero1", False, 8), ("zero2", True, 8), ("zero2", True, 12), ("zero3", False, 8), ("zero3", True, 12)]


@pytest.mark.filterwarnings("ignore:.*along the mesh axes .* do the same work")  # with no specs
@pytest.mark.parametrize(("strategy", "specs", "layers"), EXACT)
def test_equals_one_device(x64, strategy, specs, layers):
    mesh = jaxshard.make_mesh(data=4, tensor=2)
    ours = functools.partial(loss, axis="tensor") if specs else loss
    specs = {"up": P(None, None, "tensor"), "down": P(None, "tensor"), "gain": P()} if specs else None
    opt = getattr(jaxshard, strategy)(tx_of(), mesh, specs=specs, min_shard_size=1)
    params = jax.tree.map(np.float64, make_params(layers))
    home = opt.shardings(params).specs.state[1][0]["muon"].inner_state[0].mu["up"]
    assert home[0] == "data"
    steps = [np.random.default_rng(i).normal(size=(16, WIDTH)) for i in range(3)]
    got = sharded(ours, opt, params, steps)
    for a, b in zip(got[:2], one_device(loss, tx_of(), params, steps)[:2], strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize("options", [{}, {"preconditioning": "aol"}, {"ns_coeffs": "dion"}, {"nesterov": False}])
def test_batch_dims_come_from_the_trace(options):
    shapes = {
        "stack": ((8, 32, 16), STACKED, (0,)),
        "experts": ((8, 4, 16, 32), MuonDimensionNumbers(2, 3), (0,)),  # reshaped to (32, 16, 32): the major dim stays
        "last": ((32, 16, 8), SINGLE, (2,)),
        "heads": ((32, 4, 8), MuonDimensionNumbers(0, (1, 2)), ()),
        "matrix": ((32, 16), SINGLE, ()),
        "vector": ((32,), None, None),
    }
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _, _) in shapes.items()}
    numbers = {name: number for name, (_, number, _) in shapes.items()}
    tx = optax.MultiSteps(muon(1e-2, muon_weight_dimension_numbers=numbers, **options), 2).gradient_transformation()
    assert whole_matrices.batch_dims(tx, params) == [shapes[name][2] for name in sorted(shapes)]


@pytest.mark.parametrize("tx", [optax.adamw(1e-2), optax.lamb(1e-2), optax.adafactor(1e-2), optax.lbfgs()])
def test_what_multiplies_no_matrices_stays_where_it_is(tx):
    params = make_params(8)
    assert whole_matrices.batch_dims(tx, params) == [None] * 3
    opt = jaxshard.zero2(tx, jaxshard.make_mesh())
    assert all(leaf.home is None for leaf in opt.layout(params).params)


def whitened(rate):
    """A user's own: each matrix of a stack, divided by the Cholesky factor of its Gram matrix."""

    def update(updates, state, params=None):
        def whiten(g):
            factors = jnp.linalg.cholesky(jnp.einsum("lij,lkj->lik", g, g) + jnp.eye(g.shape[1], dtype=g.dtype))
            return -rate * jax.lax.linalg.triangular_solve(factors, g, left_side=True, lower=True)

        return jax.tree.map(lambda g: whiten(g) if g.ndim == 3 else -rate * g, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def test_a_users_own_matrix_optimizer_is_dealt_out_too(x64):
    tx = optax.chain(optax.trace(0.9), whitened(0.1))
    assert whole_matrices.batch_dims(tx, make_params(8)) == [(0,), None, (0,)]
    params = jax.tree.map(np.float64, make_params(8))
    steps = [np.random.default_rng(i).normal(size=(16, WIDTH)) for i in range(3)]
    opt = jaxshard.zero2(tx, jaxshard.make_mesh(), min_shard_size=1)
    got = sharded(loss, opt, params, steps)
    for a, b in zip(got[:2], one_device(loss, tx, params, steps)[:2], strict=True):
        assert_close(a, b, 1e-12)


def test_the_table_says_so():
    params = make_params(8) | {"up": make_params(12)["up"]}
    table = str(jaxshard.zero2(tx_of(), jaxshard.make_mesh()).layout(params))
    assert "like down: dim 0 by data; full matrices distributed" in table
    assert "like up: dim 1 by data; its matrices are updated on owner devices" in table
