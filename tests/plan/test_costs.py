"""What a step costs is a contract: collectives and bytes from the compiled program, bytes at rest, compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard
from jaxshard import inspect

LAYERS, WIDTH, HIDDEN, VOCABULARY = 4, 64, 192, 256
BLOCK = LAYERS * 2 * WIDTH * HIDDEN  # elements of all stacked blocks
TABLES = 2 * VOCABULARY * WIDTH  # embedding and head
PARAMS = BLOCK + TABLES


def params():
    rng = np.random.default_rng(0)
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "blocks": {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)},
        "head": (WIDTH, VOCABULARY),
    }
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda s: np.float32(0.1 * rng.normal(size=s)), shapes, is_leaf=is_shape)


def loss(p, batch):
    x = jaxshard.unshard(p["embedding"])[batch["x"]]

    @jax.checkpoint
    def layer(x, block):
        block = jaxshard.unshard(block)
        return x + jnp.tanh(x @ block["up"]) @ block["down"], None

    x, _ = jax.lax.scan(layer, x, p["blocks"])
    logits = x @ jaxshard.unshard(p["head"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def batch(rows=32, length=4):
    rng = np.random.default_rng(0)
    shape = (rows, length)
    return {"x": rng.integers(0, VOCABULARY, shape), "y": rng.integers(0, VOCABULARY, shape)}


def optimizer(strategy, n=8, **options):
    mesh = jaxshard.make_mesh(devices=jax.devices()[:n], replica=2 if strategy == "hsdp" else 1)
    return getattr(jaxshard, strategy)(optax.adamw(1e-3), mesh, **options)


def compiled(strategy, m=1, n=8, loss=loss):
    opt = optimizer(strategy, n)
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, params()))
    state = opt.init(shapes)
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, opt.shardings(shapes).params
    )
    many = batch(length=16)  # too many ids for an exchange of rows in the place of the table
    return jaxshard.train_step(loss, opt, microbatches=m, donate=True).lower(placed, state, many).compile()


def formula(strategy, m, n=8):
    """Wire bytes per device and step: the design's table."""
    once = (n - 1) / n * 4 * PARAMS
    if strategy in ("ddp", "zero1"):
        return 2 * once
    if strategy == "zero2":
        return m * once + once
    # zero3, per microbatch: gather forward; gather the rematerialised blocks again; reduce-scatter.
    again = (n - 1) / n * 4 * BLOCK
    return m * (once + again + once)


@pytest.mark.parametrize("n", [8, 2])
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_wire_bytes_equal_the_formula(strategy, m, n):
    if n == 2 and m == 4:
        m = 2
    report = inspect.report(compiled(strategy, m, n))
    assert report.trips_known
    assert report.wire_bytes == pytest.approx(formula(strategy, m, n), rel=0.01)


def test_hsdp_all_reduces_shards_over_replica_once_per_step():
    for m in (1, 2):
        report = inspect.report(compiled("hsdp", m))
        over_replica = [c for c in report.collectives if c.group_size == 2]
        assert {c.kind for c in over_replica} == {"all-reduce"}
        assert sum(c.bytes * c.trips for c in over_replica) == pytest.approx(4 * PARAMS / 4, rel=0.01)
        inside = [c for c in report.collectives if c.group_size == 4]
        assert sum(c.wire_bytes for c in inside) == pytest.approx(formula("zero3", m, n=4), rel=0.01)


def test_gradients_are_reduce_scattered_layer_by_layer_and_never_all_reduced():
    collectives = inspect.report(compiled("zero2")).collectives
    scatters = [c for c in collectives if c.kind == "reduce-scatter"]
    assert sum(c.bytes * c.trips for c in scatters) == 4 * PARAMS
    assert sum(c.trips for c in scatters if c.trips == LAYERS) == 2 * LAYERS  # up and down, in the scan
    assert all(c.bytes < 1024 for c in collectives if c.kind == "all-reduce")


@pytest.mark.optimized
def test_whole_gradients_never_exist_under_zero2_and_zero3():
    """At 4 microbatches zero1 accumulates whole gradients; zero2 and zero3 only shards of them."""
    temp = {
        strategy: compiled(strategy, m=4).memory_analysis().temp_size_in_bytes
        for strategy in ("zero1", "zero2", "zero3")
    }
    whole = 4 * PARAMS
    assert temp["zero1"] > whole
    assert temp["zero1"] - temp["zero2"] > 0.75 * whole
    assert temp["zero1"] - temp["zero3"] > 0.5 * whole
    assert temp["zero2"] < whole

    def no_unshard(p, b):
        return loss(p, b) + 0.0 * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(p))  # every leaf used raw

    assert compiled("zero2", m=4, loss=no_unshard).memory_analysis().temp_size_in_bytes > temp["zero2"] + 0.5 * whole


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_bytes_at_rest(strategy):
    opt = optimizer(strategy)
    p = opt.place(params())
    state = opt.init(p)
    grads = jax.eval_shape(jaxshard.value_and_grad(loss, opt), p, batch())[1]
    n = {"ddp": 1, "hsdp": 4}.get(strategy, 8)
    share = {
        "params": 4 * PARAMS / (n if strategy in ("zero3", "hsdp") else 1),
        "grads": 4 * PARAMS / n,
        "state": 2 * 4 * PARAMS / n,
    }
    at_rest = opt.layout(p).bytes_per_device
    for kind, tree in (("params", p), ("state", state)):
        for device in jax.devices():
            held = sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == device)
            assert held == at_rest[kind]
            assert held == pytest.approx(share[kind], rel=0.01)
    assert at_rest["grads"] == pytest.approx(share["grads"], rel=0.01)
    assert jax.tree.structure(grads) == jax.tree.structure(p)


def test_grads_come_out_sharded():
    opt = optimizer("zero2")
    _, grads = jaxshard.value_and_grad(loss, opt)(params(), batch())
    assert jax.tree.map(lambda g: g.sharding, grads) == opt.shardings(params()).grads


@pytest.mark.filterwarnings("error:Some donated buffers")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_donated_buffers_are_reused(strategy):
    at_rest = optimizer(strategy).layout(params()).bytes_per_device
    assert compiled(strategy).memory_analysis().alias_size_in_bytes == at_rest["params"] + at_rest["state"]


@pytest.mark.parametrize("start", ["numpy", "placed", "one device", "abstract"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_one_compilation(strategy, start, count_compilations):
    """The first step is the only one that compiles, whatever params came from."""
    opt = optimizer(strategy)
    p = params()
    if start == "placed":
        p = opt.place(p)
    elif start == "one device":
        p = jax.tree.map(jnp.asarray, p)
    elif start == "abstract":
        shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, params()))
        assert jax.tree.map(lambda x: x.sharding, opt.init(shapes)) == opt.shardings(p).state
        p = jax.jit(lambda: jax.tree.map(jnp.asarray, params()), out_shardings=opt.shardings(shapes).params)()
    state = opt.init(p)
    step = jaxshard.train_step(loss, opt)
    counts = []
    for _ in range(3):
        count, (p, state, _) = count_compilations(step, p, state, batch())
        counts.append(count)
    assert counts[0] >= 1
    assert counts[1:] == [0, 0]


def test_one_compilation_of_a_users_own_jit(count_compilations):
    opt = optimizer("zero2")
    p = opt.place(params())
    state = opt.init(p)
    f = jaxshard.value_and_grad(loss, opt)

    @jax.jit
    def step(p, state, batch):
        _, grads = f(p, batch)
        updates, state = opt.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    counts = []
    for _ in range(3):
        count, (p, state) = count_compilations(step, p, state, batch())
        counts.append(count)
    assert counts[1:] == [0, 0]
    assert jax.tree.map(lambda x: x.sharding, (p, state)) == (opt.shardings(p).params, opt.shardings(p).state)


def test_import_is_light():
    """`import jaxshard` after `import jax, optax` reads nothing of flax, orbax, matplotlib or the trainer."""
    import subprocess
    import sys

    heavy = "flax orbax matplotlib tyro rich tensorboardX"
    code = "import sys, jax, optax; a = set(sys.modules); import jaxshard; b = set(sys.modules) - a; "
    code += f"print([m for m in b if m.split('.')[0] in '{heavy}'.split() or m.startswith('jaxshard.cli')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
