"""Every strategy equals plain optax on one device: params and state, 10 steps, different data on each device.

Each reduction's bug was planted once, and the tests here seen to fail; test_mutations.py plants them again.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from oracle import (
    assert_close,
    assert_same_bits,
    batches,
    distances,
    hostile_params,
    model_loss,
    one_device,
    sharded,
)

import jaxshard

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be sharded:UserWarning")

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp"]
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "clipped lamb": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(1e-2)),
    "frozen": lambda: optax.chain(
        optax.masked(
            optax.set_to_zero(), lambda p: {k: jax.tree.map(lambda _, k=k: k == "frozen", v) for k, v in p.items()}
        ),
        optax.masked(
            optax.adam(1e-2), lambda p: {k: jax.tree.map(lambda _, k=k: k != "frozen", v) for k, v in p.items()}
        ),
    ),
}


@functools.cache
def expected(optimizer, dtype):
    return one_device(model_loss, OPTIMIZERS[optimizer](), hostile_params(dtype), batches(10))


def make(strategy, optimizer, n, **options):
    replica = 2 if strategy == "hsdp" and n in (4, 8) else 1
    mesh = jaxshard.make_mesh(replica=replica, devices=jax.devices()[:n])
    return getattr(jaxshard, strategy)(OPTIMIZERS[optimizer](), mesh, min_shard_size=1, **options)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_equals_one_device_in_double_precision(x64, optimizer, strategy, n):
    want = expected(optimizer, np.float64)
    got = sharded(model_loss, make(strategy, optimizer, n), hostile_params(np.float64), batches(10))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("n", "microbatches"), [(8, 2), (3, 4)])
def test_microbatches_equal_the_whole_batch(x64, strategy, n, microbatches):
    want = expected("sgd", np.float64)
    got = sharded(
        model_loss, make(strategy, "sgd", n), hostile_params(np.float64), batches(10), microbatches=microbatches
    )
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", ["clipped lamb", "frozen"])
def test_optimizers_that_look_across_leaves(x64, optimizer, strategy):
    want = expected(optimizer, np.float64)
    got = sharded(model_loss, make(strategy, optimizer, 8), hostile_params(np.float64), batches(10))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


@functools.cache
def control(optimizer):
    """How far rounding alone takes one device: the largest distance of each leaf over 64 orders of the rows.

    Twelve were too few to know the tail of a leaf with one element.
    """
    orders = [np.arange(48), *(np.random.default_rng(seed).permutation(48) for seed in range(64))]
    runs = [[{name: x[order] for name, x in batch.items()} for batch in batches(10)] for order in orders]
    want, *others = one_device(model_loss, OPTIMIZERS[optimizer](), hostile_params(np.float32), *runs)
    found = [distances(other[:2], want[:2]) for other in others]
    return {path: max(far[path] for far in found) for path in found[0]}


@pytest.mark.optimized
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_in_single_precision_no_further_than_another_order_of_rows(optimizer, strategy):
    want = expected(optimizer, np.float32)
    # The select of max_skips keeps LLVM from making one rounding of p + u (jax 0.12), which no order of rows does.
    got = sharded(model_loss, make(strategy, optimizer, 8), hostile_params(np.float32), batches(10), max_skips=None)
    allowed = control(optimizer)
    far = distances(got[:2], want[:2])
    ulp = float(np.finfo(np.float32).eps)
    wrong = {path: (far[path], allowed[path]) for path in far if far[path] > max(2 * allowed[path], ulp)}
    assert not wrong, wrong


@pytest.mark.optimized
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_device_gives_the_same_bits(strategy):
    """Nothing is reduced over one device, so nothing may differ."""
    want = expected("adamw", np.float32)
    got = sharded(model_loss, make(strategy, "adamw", 1), hostile_params(np.float32), batches(10), max_skips=None)
    assert_same_bits(got[:2], want[:2])


@pytest.mark.optimized
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_given_equal_gradients_the_update_has_the_same_bits(strategy):
    """The same as plain optax over arrays that lie as the state does, and one rounding from those on one device.

    XLA on CPU makes one rounding of b * m + c * g in some loops and two in others, as their lengths say (jax 0.12).
    """
    opt, params = make(strategy, "adamw", 8), hostile_params(np.float32)
    grads = [jax.tree.map(lambda x, i=i: np.float32(np.cos(i + x)), params) for i in range(3)]
    cuts = jax.tree.map(lambda x: x.sharding, opt.init(opt.place(params))[0].mu)

    def train(tx, params, put=lambda tree: tree):
        state, update = tx.init(params), jax.jit(tx.update)
        history = []
        for g in grads:
            updates, state = update(put(g), state, params)
            params = optax.apply_updates(params, updates)  # by itself: fused with the update it would round once less
            history.append(updates)
        return params, state, history

    plain = OPTIMIZERS["adamw"]()
    got = train(opt, opt.place(params))
    assert_same_bits(got, train(plain, jax.device_put(params, cuts), lambda g: jax.device_put(g, cuts)))
    on_one = train(plain, jax.tree.map(jnp.asarray, params))
    chex.assert_trees_all_close(got, on_one, rtol=1e-6, atol=np.finfo(np.float32).eps)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_beside_float32(strategy):
    """A bf16 leaf is rounded once per device, 2**-9 each; the float32 leaves beside it stay near."""
    params = hostile_params(np.float32) | {"table": hostile_params(np.float32)["table"].astype(jnp.bfloat16)}
    tx = optax.sgd(0.1, momentum=0.9)
    want = one_device(model_loss, tx, params, batches(3))
    opt = getattr(jaxshard, strategy)(tx, jaxshard.make_mesh(), min_shard_size=1)
    got = sharded(model_loss, opt, params, batches(3))
    assert got[0]["table"].dtype == jnp.bfloat16
    assert_close(got[0], want[0], 2**-8)
    wide = getattr(jaxshard, strategy)(tx, jaxshard.make_mesh(), min_shard_size=1, reduce_dtype=jnp.float32)
    assert_close(sharded(model_loss, wide, params, batches(3))[0], want[0], 2**-8)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_several_data_axes_each_cut_a_dim_of_their_own(x64, strategy):
    mesh = jax.make_mesh((2, 4), ("slice", "data"), axis_types=(AxisType.Auto,) * 2)
    opt = getattr(jaxshard, strategy)(OPTIMIZERS["adamw"](), mesh, min_shard_size=1, data_axes=("slice", "data"))
    if strategy != "ddp":
        spec = opt.shardings(hostile_params(np.float64)).specs.state[0].mu["blocks"]["up"]
        assert {"slice", "data"} == {
            axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)
        }
    got = sharded(model_loss, opt, hostile_params(np.float64), batches(10), microbatches=2)
    for a, b in zip(got, expected("adamw", np.float64), strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize("as_on_tpu", [False, True])
@pytest.mark.parametrize("axes", [("slice", "data"), ("data", "slice")])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_several_data_axes_on_one_dim_in_either_order(x64, strategy, axes, as_on_tpu, as_on):
    """All at once, or (as on a TPU) one axis after the other: every device must get its own part."""
    if as_on_tpu:
        as_on("tpu")
    mesh = jax.make_mesh((2, 4), ("slice", "data"), axis_types=(AxisType.Auto,) * 2)
    opt = getattr(jaxshard, strategy)(optax.sgd(0.1, momentum=0.9), mesh, data_axes=axes)
    rng = np.random.default_rng(0)
    params, rows = {"w": rng.normal(size=(16, 1024))}, rng.normal(size=(8, 16))
    (leaf,) = opt.layout(params).params
    assert leaf.dims == ((-1, axes),)

    def loss(p, x):
        return jnp.mean((x @ jaxshard.unshard(p["w"])) ** 2 * jnp.arange(1024))

    step, placed, state = jaxshard.train_step(loss, opt), opt.place(params), opt.init(params)
    alone, alone_state = params, optax.sgd(0.1, momentum=0.9).init(params)
    for _ in range(3):
        placed, state, _ = step(placed, state, rows)
        updates, alone_state = optax.sgd(0.1, momentum=0.9).update(jax.grad(loss)(alone, rows), alone_state)
        alone = optax.apply_updates(alone, updates)
    np.testing.assert_allclose(placed["w"], alone["w"], rtol=1e-9)


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_explicit_mesh_with_and_without_set_mesh(x64, strategy, context):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    opt = getattr(jaxshard, strategy)(OPTIMIZERS["clipped lamb"](), mesh, min_shard_size=1)
    if context:
        with jax.set_mesh(mesh):
            got = sharded(model_loss, opt, hostile_params(np.float64), batches(10))
    else:
        got = sharded(model_loss, opt, hostile_params(np.float64), batches(10))
    for a, b in zip(got, expected("clipped lamb", np.float64), strict=True):
        assert_close(a, b, 1e-12)


def test_every_data_shard_counts(x64):
    """Leaving out any device's rows changes the gradient: none is dropped, none counted twice."""
    opt, params, (batch,) = make("zero2", "sgd", 8), hostile_params(np.float64), batches(1)
    ours, plain = jaxshard.value_and_grad(model_loss, opt), jax.jit(jax.grad(model_loss))
    grads = ours(params, batch)[1]
    assert_close(grads, plain(params, batch), 1e-12)
    for device in range(8):
        other = jax.tree.map(lambda x, d=device: np.where((np.arange(48) // 6 == d)[:, None], (x + 1) % 24, x), batch)
        changed = ours(params, other)[1]
        assert_close(changed, plain(params, other), 1e-12)
        assert max(distances(changed, grads).values()) > 1e-3
