"""The reference for every strategy: jitted optax on one device, over the global batch."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard

WIDTH, VOCABULARY, LAYERS, ROWS, LENGTH = 16, 24, 3, 48, 4


def hostile_params(dtype):
    """Indivisible dims, primes, a scalar, a leaf of size 0, stacked layers; "table" is used twice (tied)."""
    rng = np.random.default_rng(7)
    shapes = {
        "table": (VOCABULARY, WIDTH),
        "blocks": {"up": (LAYERS, WIDTH, 2 * WIDTH), "down": (LAYERS, 2 * WIDTH, WIDTH), "gain": (LAYERS, WIDTH)},
        "prime": (17, 5),
        "odd": (WIDTH, 17),
        "vector": (WIDTH,),
        "scalar": (),
        "empty": (0, 3),
        "frozen": (WIDTH, 8),
    }
    return jax.tree.map(
        lambda s: np.asarray(0.15 * rng.normal(size=s), dtype), shapes, is_leaf=lambda x: type(x) is tuple
    )


def batches(count, rows=ROWS, seed=0):
    """Distinct rows, so that no two devices see the same data."""
    rng = np.random.default_rng(seed)
    shape = (rows, LENGTH)
    return [{"x": rng.integers(0, VOCABULARY, shape), "y": rng.integers(0, VOCABULARY, shape)} for _ in range(count)]


def model_loss(params, batch):
    """A small tied language model that calls `unshard` on most leaves, and uses others directly."""
    table = jaxshard.unshard(params["table"])
    x = table[batch["x"]].astype(params["odd"].dtype)

    @jax.checkpoint
    def layer(x, block):
        block = jaxshard.unshard(block)
        return x + jnp.tanh((x * block["gain"]) @ block["up"]) @ block["down"], None

    x, _ = jax.lax.scan(layer, x, params["blocks"])
    x = x + jnp.sum(x @ params["odd"], -1, keepdims=True) + jaxshard.unshard(params["vector"]) * params["scalar"]
    x = x + jnp.sum(x @ params["frozen"], -1, keepdims=True)
    logits = x @ table.T.astype(x.dtype)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss + 0.01 * jnp.sum(jnp.square(params["prime"])) + jnp.sum(params["empty"])


def one_device(loss_fn, tx, params, *runs):
    """(params, state, losses) of plain optax, jitted, on the global batch; for several runs, a list of these."""
    update = optax.with_extra_args_support(tx).update

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = update(grads, state, params, value=loss, grad=grads)
        return optax.apply_updates(params, updates), state, loss

    def train(params, steps):
        state, losses = jax.jit(tx.init)(params), []
        for batch in steps:
            params, state, loss = step(params, state, batch)
            losses.append(float(loss))
        assert np.all(np.isfinite(losses))
        assert losses[0] != losses[-1]
        return params, state, losses

    params = jax.tree.map(jnp.asarray, params)
    results = [train(params, steps) for steps in runs]
    return results if len(runs) > 1 else results[0]


def sharded(loss_fn, opt, params, steps, *args, **options):
    """The same with `train_step`."""
    params = opt.place(params)
    state = opt.init(params)
    step = jaxshard.train_step(loss_fn, opt, **options)
    losses = []
    for batch in steps:
        params, state, metrics = step(params, state, batch, *args)
        losses.append(float(metrics["loss"]))
    return params, state, losses


def distance(a, b):
    """|a - b| / |b| of one leaf."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def distances(a, b):
    """Path -> distance, over trees that must have the same structure and dtypes."""
    assert_same_dtypes(a, b)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(b)[0]]
    return dict(zip(paths, map(distance, jax.tree.leaves(a), jax.tree.leaves(b)), strict=True))


def assert_same_dtypes(a, b):
    """Asserts the same structure and dtypes."""

    def dtypes(x, y):
        return f"{jnp.result_type(x)} is not {jnp.result_type(y)}"

    chex.assert_trees_all_equal_comparator(lambda x, y: jnp.result_type(x) == jnp.result_type(y), dtypes, a, b)


def assert_close(a, b, tolerance):
    """Asserts the same structure, shapes and dtypes, and each leaf within the tolerance, by `distance`."""
    assert_same_dtypes(a, b)
    chex.assert_trees_all_equal_comparator(
        lambda x, y: distance(x, y) <= tolerance, lambda x, y: f"{distance(x, y)} apart, {tolerance} allowed", a, b
    )


def assert_same_bits(a, b):
    """Asserts the same structure, dtypes and bytes."""
    assert_same_dtypes(a, b)
    chex.assert_trees_all_equal_comparator(
        lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), lambda x, y: f"{x} is not {y}", a, b
    )
