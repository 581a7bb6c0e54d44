"""Matrix optimizers over replicas: each matrix is updated once, not once in each replica."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard


def whitened():
    """Shampoo of one side: each matrix times the inverse root of its summed g^T g."""

    def init(params):
        return jax.tree.map(lambda p: jnp.zeros((*p.shape[:-2], p.shape[-1], p.shape[-1]), p.dtype), params)

    def update(updates, state, params=None):
        def root(factor):
            values, vectors = jnp.linalg.eigh(factor + 1e-3 * jnp.eye(factor.shape[-1]))
            return (vectors * values[..., None, :] ** -0.5) @ jnp.swapaxes(vectors, -1, -2)

        state = jax.tree.map(lambda f, g: f + (jnp.swapaxes(g, -1, -2) @ g if g.ndim > 1 else 0), state, updates)
        return jax.tree.map(lambda f, g: g @ root(f) if g.ndim > 1 else g, state, updates), state

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "muon": lambda: optax.contrib.muon(1e-2),
    "clip, whitened": lambda: optax.chain(optax.clip_by_global_norm(0.1), whitened(), optax.sgd(0.1, momentum=0.9)),
}


def params_of():
    draw = np.random.default_rng(0).normal
    shapes = {"in": (8, 12), "mid": (4, 12, 12), "out": (12, 6), "bias": (12,)}
    return {name: draw(size=shape) / 4 for name, shape in shapes.items()}


def loss_fn(params, batch):
    x = jnp.tanh(batch @ params["in"] + params["bias"])
    for layer in params["mid"]:
        x = x + jnp.tanh(x @ layer)
    return jnp.mean((x @ params["out"]) ** 2)


def mesh_of(replicas, shards):
    return jaxshard.make_mesh(replica=replicas, devices=jax.devices()[: replicas * shards])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("replicas", "shards"), [(2, 4), (4, 2), (2, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize("strategy", ["hsdp", "zero1", "zero2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:.*cannot be sharded over.*:UserWarning")
def test_steps_equal_those_on_one_device(name, strategy, replicas, shards):
    tx, params, batch = OPTIMIZERS[name](), params_of(), np.random.default_rng(1).normal(size=(24, 8))
    opt = getattr(jaxshard, strategy)(tx, mesh_of(replicas, shards), min_shard_size=1)
    placed, step = opt.place(params), jaxshard.train_step(loss_fn, opt)
    state, wanted = opt.init(placed), tx.init(params)
    for _ in range(3):
        placed, state, _ = step(placed, state, jaxshard.shard_batch(batch, opt))
        updates, wanted = tx.update(jax.grad(loss_fn)(params, batch), wanted, params)
        params = optax.apply_updates(params, updates)
    for found, expected in zip(jax.tree.leaves((placed, state)), jax.tree.leaves((params, wanted)), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-9, atol=1e-10)


def test_only_matrices_lie_over_replicas():
    opt = jaxshard.hsdp(optax.contrib.muon(1e-2), mesh_of(2, 4), min_shard_size=1)
    layout = opt.layout(params_of())
    reasons = {leaf.path: leaf.reason for leaf in layout.state}
    assert "replica" in reasons["inner_states/muon/inner_state/0/mu/in"]
    assert "replica" not in reasons["inner_states/adam/inner_state/0/mu/mid"]
    assert "its matrices are updated on owner devices" in str(layout)


@pytest.mark.optimized
@pytest.mark.parametrize("replicas", [2, 4])
def test_the_work_is_that_of_one_replica(replicas):
    shapes = {f"w{i}": jax.ShapeDtypeStruct((128, 128), jnp.float32) for i in range(8)}

    def loss(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def costs(strategy, mesh, **options):
        opt = getattr(jaxshard, strategy)(optax.contrib.muon(1e-3), mesh, **options)
        step = jaxshard.train_step(loss, opt, max_skips=None)
        compiled = step.lower(
            shapes, jax.eval_shape(opt.init, shapes), jax.ShapeDtypeStruct((8, 128), jnp.float32)
        ).compile()
        return (compiled.cost_analysis() or {})["flops"], jaxshard.inspect.report(compiled).wire_bytes

    flops, wire = costs("hsdp", mesh_of(replicas, 8 // replicas))
    least_flops, least_wire = costs("zero2", mesh_of(1, 8))
    repeated, _ = costs("hsdp", mesh_of(replicas, 8 // replicas), state_axes=("data",))
    assert flops <= 1.01 * least_flops
    assert wire <= 1.05 * least_wire
    assert repeated > 0.8 * replicas * least_flops
