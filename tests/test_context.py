"""Batches that are cut along other dims than the rows: attention over parts of sequences, and images by height."""

import functools
import math
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled_once import fast_environment
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from oracle import assert_close, one_device

import jaxshard
from jaxshard import inspect, tensor

VOCABULARY, WIDTH, HEADS, KEYS, LENGTH, ROWS = 12, 16, 4, 2, 32, 4
FUNCTIONS = {"ring": tensor.ring_attention, "gathered": tensor.gathered_attention}
CUT = P("data", "context")
AXES = ("data", "context")


def mesh_of(*sizes, names=AXES):
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), names)


def make(sizes=(2, 2), zero=2, tx=None, **options):
    tx = optax.sgd(0.1) if tx is None else tx
    return jaxshard.hybrid(tx, mesh_of(*sizes), zero=zero, data_axes=AXES, min_shard_size=1, **options)


def plain_attention(q, k, v, *, causal=True, segment_ids=None, **_):
    """On one device, with all scores at once."""
    length, repeats = q.shape[1], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, repeats, 2), jnp.repeat(v, repeats, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    seen = jnp.tri(length, dtype=bool) if causal else jnp.ones((length, length), bool)
    if segment_ids is not None:
        seen = seen & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1), v)


def segments_of(rng, rows=ROWS, length=LENGTH):
    """Packed sequences of random lengths, other ones in each row."""
    return np.cumsum(rng.random((rows, length)) < 0.15, 1).astype(np.int32)


# The functions alone.


@pytest.mark.parametrize("name", ["ring", "gathered"])
@pytest.mark.parametrize("num", [2, 4, 8])
@pytest.mark.parametrize(
    ("causal", "order", "packed"),
    [(True, "contiguous", True), (True, "zigzag", False), (True, "zigzag", True), (False, "contiguous", True)],
)
def test_values_and_gradients_are_those_of_all_scores(x64, num, name, causal, order, packed):
    """Queries share keys (GQA), and values have another number of features than keys."""
    rng = np.random.default_rng(num)
    shapes = [(2, LENGTH, heads, dim) for heads, dim in ((HEADS, 8), (KEYS, 8), (KEYS, 6), (HEADS, 6))]
    q, k, v, weights = (rng.normal(size=shape) for shape in shapes)
    segments = segments_of(rng, 2) if packed else None
    how = {"causal": causal, "segment_ids": segments}
    want = jax.value_and_grad(lambda *x: jnp.sum(plain_attention(*x, **how) * weights), (0, 1, 2))(q, k, v)

    def of_device(q, k, v, weights, *segments):
        how = {"causal": causal, "order": order, "segment_ids": segments[0] if segments else None}
        return jax.lax.psum(jnp.sum(FUNCTIONS[name](q, k, v, **how) * weights), "context")

    mesh, spec = mesh_of(num, names=("context",)), P(None, "context")
    total = jax.shard_map(of_device, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=name == "ring")
    given = [q, k, v, weights] + [segments] * packed
    given = tensor.zigzag(given, num) if order == "zigzag" else given
    value, grads = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(*given)
    grads = jax.device_get(grads)
    grads = tensor.zigzag(grads, num, inverse=True) if order == "zigzag" else grads
    assert_close((value, *grads), (want[0], *want[1]), 1e-13)


@pytest.mark.parametrize("name", ["ring", "gathered"])
@pytest.mark.parametrize(("num", "order", "chunk"), [(1, "contiguous", 8), (4, "zigzag", 2), (4, "contiguous", 2)])
def test_queries_in_chunks(x64, num, order, chunk, name):
    rng = np.random.default_rng(0)
    given = [*rng.normal(size=(3, 2, LENGTH, 2, 8)), segments_of(rng, 2)]
    spec, mesh = P(None, "context"), mesh_of(num, names=("context",))

    def slopes(chunk):
        def of_device(q, k, v, segments):
            out = FUNCTIONS[name](q, k, v, segment_ids=segments, order=order, chunk=chunk)
            return jax.lax.psum(jnp.sum(jnp.sin(out)), "context")

        total = jax.shard_map(of_device, mesh=mesh, in_specs=spec, out_specs=P())
        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(*given)

    assert_close(slopes(chunk), slopes(0), 1e-13)
    with pytest.raises(ValueError, match=r"chunk 5 does not divide the \d+ neighbouring positions"):
        slopes(5)


@pytest.mark.parametrize("name", ["ring", "gathered"])
def test_a_second_derivative(x64, name):
    rng = np.random.default_rng(0)
    q, k, v, tangent = rng.normal(size=(4, 1, 16, 2, 4))

    def product(attention):
        def slope(k):
            return jnp.sum(jax.grad(lambda k: jnp.sum(jnp.sin(attention(q, k, v))))(k) * tangent)

        return jax.jit(jax.grad(slope))(k)

    cut = P(None, "context")
    attention = functools.partial(FUNCTIONS[name], order="contiguous")
    on_devices = jax.shard_map(attention, mesh=mesh_of(4, names=("context",)), in_specs=cut, out_specs=cut)
    assert_close(product(on_devices), product(plain_attention), 1e-12)


def test_sums_are_float32_for_bfloat16():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in rng.normal(size=(3, 2, 64, 2, 8)))
    cut = P(None, "context")
    on_devices = jax.shard_map(tensor.ring_attention, mesh=mesh_of(8, names=("context",)), in_specs=cut, out_specs=cut)
    found, want = jax.jit(on_devices)(q, k, v), plain_attention(*(x.astype("f") for x in (q, k, v)))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, "f"), want, atol=0.02)


def test_positions_and_order():
    tokens = np.arange(16)[None]
    assert tensor.zigzag(tokens, 4).tolist() == [[0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]]
    np.testing.assert_array_equal(tensor.zigzag(tensor.zigzag(tokens, 4), 4, inverse=True), tokens)
    np.testing.assert_array_equal(tensor.zigzag(tokens, 1), tokens)
    for order in ("contiguous", "zigzag"):
        places = jax.shard_map(
            lambda order=order: tensor.positions(4, order=order)[None],
            mesh=mesh_of(4, names=("context",)),
            in_specs=(),
            out_specs=P(None, "context"),
        )()
        np.testing.assert_array_equal(places, tensor.zigzag(tokens, 4) if order == "zigzag" else tokens)
    assert tensor.positions(3, order="zigzag").tolist() == [0, 1, 2]  # a device with complete sequences


# Training.


def params_of(dtype=np.float64):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.normal(size=shape) / math.sqrt(shape[-2])).astype(dtype)

    layers = {"q": normal(2, WIDTH, WIDTH), "kv": normal(2, WIDTH, WIDTH), "out": normal(2, WIDTH, WIDTH)}
    return {"table": normal(VOCABULARY, WIDTH), "layers": layers, "head": normal(WIDTH, VOCABULARY)}


def batch_of(seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, (rows, LENGTH + 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments_of(rng, rows)}
    return batch | {"mask": rng.random((rows, LENGTH)) < rng.random((rows, 1)), "scale": rng.random(rows)}


SPECS = dict.fromkeys(("tokens", "targets", "segments", "mask"), CUT) | {"scale": P("data")}


def losses_of(attention, params, batch, *, order="contiguous", causal=True, packed=True, tensor_axis=False):
    """(rows, positions here): each token's loss; "scale" is one number per row."""
    x = params["table"][batch["tokens"]]
    places = tensor.positions(x.shape[1], order=order)
    x = x + jnp.sin(places[:, None] / 9.0 ** (jnp.arange(WIDTH) / WIDTH)) * batch["scale"][:, None, None]

    @jax.checkpoint
    def layer(x, w):
        w = jaxshard.unshard(w)
        q, kv = tensor.column_parallel(x, (w["q"], w["kv"])) if tensor_axis else (x @ w["q"], x @ w["kv"])
        q, kv = q.reshape(*x.shape[:2], -1, 4), kv.reshape(*x.shape[:2], -1, 2, 4)
        how = {"causal": causal, "order": order, "segment_ids": batch["segments"] if packed else None}
        mixed = attention(q, kv[:, :, :, 0], kv[:, :, :, 1], **how).reshape(*x.shape[:2], -1)
        return x + jnp.tanh(tensor.row_parallel(mixed, w["out"]) if tensor_axis else mixed @ w["out"]), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["targets"])


def mean_loss(attention, **how):
    return lambda params, batch: losses_of(attention, params, batch, **how).mean()


def weighted_loss(attention, **how):
    """Devices have different numbers of tokens that count."""

    def loss(params, batch):
        return jnp.sum(losses_of(attention, params, batch, **how) * batch["mask"]), jnp.sum(batch["mask"])

    return loss


def ordered(batch, order, num):
    """The batch as its sequences lie on `num` devices."""
    cut = {name: x for name, x in batch.items() if name != "scale"}
    return batch | tensor.zigzag(cut, num) if order == "zigzag" else batch


SGD = optax.sgd(0.5, momentum=0.9)
ADAM = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2))


@pytest.mark.parametrize(
    ("sizes", "zero", "name", "order", "causal", "packed", "tx", "microbatches"),
    [
        ((1, 2), 0, "ring", "zigzag", True, True, SGD, 1),
        ((1, 2), 3, "gathered", "contiguous", False, True, ADAM, 2),
        ((1, 4), 1, "ring", "contiguous", True, False, ADAM, 1),
        ((1, 4), 2, "gathered", "zigzag", True, True, SGD, 2),
        ((1, 8), 2, "ring", "zigzag", True, True, ADAM, 1),
        ((1, 8), 3, "ring", "contiguous", False, False, SGD, 1),
        ((2, 2), 0, "gathered", "zigzag", True, False, ADAM, 2),
        ((2, 2), 1, "ring", "contiguous", True, True, SGD, 2),
        ((2, 4), 1, "gathered", "contiguous", True, True, ADAM, 1),
        ((2, 4), 2, "ring", "contiguous", False, True, SGD, 2),
        ((2, 4), 3, "ring", "zigzag", True, True, ADAM, 2),
    ],
)
def test_training_is_that_of_one_device(x64, sizes, zero, name, order, causal, packed, tx, microbatches):
    batches = [batch_of(seed) for seed in range(3)]
    want = one_device(mean_loss(plain_attention, causal=causal, packed=packed), tx, params_of(), batches)
    opt = make(sizes, zero, tx)
    loss = mean_loss(FUNCTIONS[name], order=order, causal=causal, packed=packed)
    step = jaxshard.train_step(loss, opt, batch_specs=SPECS, microbatches=microbatches)
    params = opt.place(params_of())
    state, losses = opt.init(params), []
    for batch in batches:
        batch = jaxshard.shard_batch(ordered(batch, order, sizes[1]), opt, SPECS)
        params, state, metrics = step(params, state, batch)
        losses.append(float(metrics["loss"]))
    assert_close((params, state, losses), want, 1e-12)


def test_a_mean_over_tokens_that_devices_share_unequally(x64):
    plain, batch = weighted_loss(plain_attention), batch_of()

    def mean(params):
        total, weight = plain(params, batch)
        return total / weight

    want = jax.value_and_grad(mean)(params_of())
    opt = make((2, 4), 3)
    given = jaxshard.shard_batch(ordered(batch, "zigzag", 4), opt, SPECS)
    loss = weighted_loss(tensor.ring_attention, order="zigzag")
    found = jaxshard.value_and_grad(loss, opt, weighted=True, microbatches=2, batch_specs=SPECS)(params_of(), given)
    assert_close(found, want, 1e-12)
    evaluated = jaxshard.evaluate(loss, opt, weighted=True, batch_specs=SPECS)(params_of(), given)
    assert_close(evaluated, want[0], 1e-12)


@pytest.mark.parametrize("zero", [2, 3])
def test_heads_over_a_tensor_axis_too(x64, zero):
    """Types are checked there."""
    want = jax.value_and_grad(mean_loss(plain_attention))(params_of(), batch_of())
    mesh = mesh_of(2, 2, 2, names=("data", "context", "tensor"))
    specs = [("layers/(q|kv)$", P(None, None, "tensor")), ("layers/out$", P(None, "tensor"))]
    specs += [("table|head", P())]
    opt = jaxshard.hybrid(optax.sgd(0.1), mesh, specs, zero, data_axes=AXES, min_shard_size=1)
    loss = mean_loss(tensor.ring_attention, order="zigzag", tensor_axis=True)
    batch = ordered(batch_of(), "zigzag", 2)
    found = jaxshard.value_and_grad(loss, opt, batch_specs=SPECS)(opt.place(params_of()), batch)
    assert_close(found, want, 1e-12)


@pytest.mark.parametrize(("schedule", "zero"), [("gpipe", 3), ("1f1b", 2)])
def test_stages_of_a_pipeline_too(x64, schedule, zero):
    def first(shared, rows, info):
        del info
        return jaxshard.lookup(shared["table"], rows["tokens"])

    def layer(x, w):
        q, kv = (x @ w["q"]).reshape(*x.shape[:2], -1, 4), (x @ w["kv"]).reshape(*x.shape[:2], 2, -1, 4)
        mixed = tensor.ring_attention(q, kv[:, :, 0], kv[:, :, 1], segment_ids=jnp.ones(x.shape[:2], jnp.int32))
        return x + mixed.reshape(x.shape) @ w["out"], None

    def last(shared, x, rows, info):
        del info
        return optax.softmax_cross_entropy_with_integer_labels(x @ shared["head"], rows["targets"]).mean()

    def stage(layers, x, info):
        del info
        return jax.lax.scan(layer, x, layers)[0]

    def plain(params, rows):
        return last(params["shared"], stage(params["blocks"], first(params["shared"], rows, None), None), rows, None)

    def loss(params, rows):
        return jaxshard.pipeline(stage, first, last, **params, batch=rows, num_microbatches=2, schedule=schedule)

    params, batch = params_of(), batch_of()
    params = {"blocks": params.pop("layers"), "shared": params}
    rows = {name: batch[name] for name in ("tokens", "targets")}
    mesh = mesh_of(2, 2, 2, names=("pipeline", "data", "context"))
    specs = [("blocks", P("pipeline"))]
    opt = jaxshard.hybrid(optax.sgd(0.1), mesh, specs, zero, data_axes=AXES, min_shard_size=1)
    found = jaxshard.value_and_grad(loss, opt, batch_specs=CUT)(opt.place(params), rows)
    assert_close(found, jax.value_and_grad(plain)(params, rows), 1e-12)


def test_replicas_too(x64):
    want = jax.value_and_grad(mean_loss(plain_attention))(params_of(), batch_of())
    mesh = mesh_of(2, 2, 2, names=("replica", "data", "context"))
    opt = jaxshard.hsdp(optax.sgd(0.1), mesh, data_axes=AXES, min_shard_size=1)
    rows = ("replica", "data")
    specs = {name: P(rows, "context") if len(spec) > 1 else P(rows) for name, spec in SPECS.items()}
    found = jaxshard.value_and_grad(mean_loss(tensor.gathered_attention), opt, batch_specs=specs)
    assert_close(found(opt.place(params_of()), jaxshard.shard_batch(batch_of(), opt, specs)), want, 1e-12)


def test_one_axis_cuts_the_sequences_of_all_rows(x64):
    """A mesh with no other axis, of Explicit type; one PartitionSpec for all leaves."""
    batch = {name: x for name, x in batch_of(rows=3).items() if name != "scale"}

    def loss(attention, params, batch):
        return losses_of(attention, params, batch | {"scale": jnp.ones(len(batch["tokens"]))}).mean()

    want = jax.value_and_grad(functools.partial(loss, plain_attention))(params_of(), batch)
    opt = jaxshard.zero2(optax.sgd(0.1), jax.make_mesh((8,), ("context",)), data_axes=("context",), min_shard_size=1)
    cut = P(None, "context")
    given = jaxshard.shard_batch(batch, opt, cut)
    assert given["tokens"].sharding.spec == cut
    found = jaxshard.value_and_grad(functools.partial(loss, tensor.ring_attention), opt, batch_specs=cut)
    assert_close(found(opt.place(params_of()), given), want, 1e-12)
    assert "each device has a part of all rows" in found.layout(params_of(), given).loss_rows


def test_images_that_are_cut_by_height(x64):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(4, 16, 8, 3)), "y": rng.normal(size=4)}
    params = {"w": rng.normal(size=(3, 3, 3, 8))}

    def convolved(x, w, padding):
        return jax.lax.conv_general_dilated(x, w, (1, 1), (padding, (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def of_image(params, batch):
        return jnp.mean((jnp.tanh(convolved(batch["x"], params["w"], (1, 1))).mean((1, 2, 3)) - batch["y"]) ** 2)

    def of_part(params, batch):
        num = jax.lax.axis_size("context")
        above = jax.lax.ppermute(batch["x"][:, -1:], "context", [(i, i + 1) for i in range(num - 1)])
        below = jax.lax.ppermute(batch["x"][:, :1], "context", [(i + 1, i) for i in range(num - 1)])
        x = jnp.tanh(convolved(jnp.concatenate([above, batch["x"], below], 1), params["w"], (0, 0)))
        return jnp.mean((jax.lax.pmean(x.mean((1, 2, 3)), "context") - batch["y"]) ** 2)

    opt = make((2, 4), 3)
    specs = {"x": CUT, "y": P("data")}
    found = jaxshard.value_and_grad(of_part, opt, batch_specs=specs)
    given = jaxshard.shard_batch(batch, opt, specs)
    assert_close(found(opt.place(params), given), jax.value_and_grad(of_image)(params, batch), 1e-12)


def test_a_device_has_keys_of_its_own():
    """Of different tokens, dropout must not draw the same numbers."""
    opt = make((2, 4))

    def drawn(params, batch, key):
        return jnp.mean(jax.random.uniform(key, batch.shape)) + 0 * jax.lax.axis_index("context")

    key = jax.random.key(0)
    found = jaxshard.evaluate(drawn, opt, batch_specs=CUT)({"w": jnp.ones((8, 8))}, np.ones((4, 16), "f"), key)
    want = [jax.random.uniform(jax.random.fold_in(key, i), (2, 4)).mean() for i in range(8)]
    np.testing.assert_allclose(found, np.mean(want), rtol=1e-6)


# Two processes, four devices each.


def one_of_two_processes():
    """What each process runs: the losses of two meshes, whose context axis lies in a process, and over both."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jaxshard.initialize(initialization_timeout=60)
    devices, batch, mine = np.array(jax.devices()).reshape(2, 4), batch_of(), jax.process_index()
    rows = {name: x[2 * mine :][:2] for name, x in batch.items()}
    parts = {name: x[:, 16 * mine :][:, :16] if x.ndim > 1 else x for name, x in batch.items()}
    for here, mesh in ((rows, Mesh(devices, AXES)), (parts, Mesh(devices.T, AXES))):
        opt = jaxshard.zero3(optax.sgd(0.5), mesh, data_axes=AXES, min_shard_size=1)
        params, state = opt.place(params_of("f")), opt.init(params_of("f"))
        step = jaxshard.train_step(mean_loss(tensor.ring_attention), opt, batch_specs=SPECS)
        given = jaxshard.shard_batch(here, opt, SPECS)
        assert given["tokens"].shape == (ROWS, LENGTH)
        for _ in range(2):
            params, state, metrics = step(params, state, given)
        print("loss", float(metrics["loss"]))
    opt, odd = make((2, 4)), {name: x[:, :30] if x.ndim > 1 else x for name, x in rows.items()}
    with pytest.raises(
        ValueError, match=r"dim 1 of each of 2 processes must be divisible by 4 \(4 devices over context"
    ):
        jaxshard.shard_batch(odd, opt, SPECS)


def test_each_process_gives_its_own_part():
    children = two_processes("import test_context; test_context.one_of_two_processes()")
    _, _, losses = one_device(mean_loss(plain_attention), optax.sgd(0.5), params_of("f"), [batch_of()] * 2)
    for text in children:
        found = [float(line.split()[1]) for line in text.splitlines() if line.startswith("loss")]
        np.testing.assert_allclose(found, [losses[1]] * 2, rtol=1e-5)


def two_processes(code):
    """What two processes print that run the code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    tests = pathlib.Path(__file__).parent
    environment = {"PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}", "JAX_NUM_PROCESSES": "2"}
    environment |= {"JAX_COORDINATOR_ADDRESS": address}
    command = [sys.executable, "-W", "ignore", "-c", code]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    children = [
        subprocess.Popen(command, env=fast_environment(**environment, JAX_PROCESS_ID=str(i)), **options) for i in (0, 1)
    ]
    try:
        texts = [child.communicate(timeout=240)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0, 0], "\n\n".join(text[-3000:] for text in texts)
    return texts


# Results per row, and the check.


def hidden(params, batch):
    return jax.lax.all_gather(params["table"][batch["tokens"]], "context", axis=1, tiled=True)


def test_outputs_per_row_are_returned_complete():
    opt, batch, params = make(), batch_of(), params_of("f")
    found = jaxshard.predict(hidden, opt, batch_specs=SPECS)(params, batch)
    np.testing.assert_array_equal(found, params["table"][batch["tokens"]])
    assert found.sharding.spec == P("data")

    def loss(params, batch):
        return mean_loss(tensor.ring_attention)(params, batch), hidden(params, batch)

    step = jaxshard.train_step(loss, opt, has_aux=True, batch_specs=SPECS, microbatches=2)
    _, _, metrics = step(opt.place(params), opt.init(params), batch)
    np.testing.assert_array_equal(metrics["aux"], params["table"][batch["tokens"]])


def test_check_compares_with_one_device():
    opt, batch, params = make(), batch_of(), params_of("f")
    report = jaxshard.check(mean_loss(tensor.ring_attention), opt, params, batch, batch_specs=SPECS)
    assert report.ok
    assert "all rows on one device" in report.differences

    def of_own_part(params, batch):
        return mean_loss(plain_attention)(params, batch) + 0 * jax.lax.axis_index("context")

    report = jaxshard.check(of_own_part, opt, params, batch, batch_specs=SPECS)
    assert not report.ok
    assert any("parts of rows" in cause for cause in report.causes)


# What it costs.


def compiled_layers(name, num, *, order="zigzag", differentiate=True, length=256, layers=3, **options):
    """A scan over layers of attention, forward or with its gradients; the bytes of a layer's keys and values."""
    mesh, rows, heads, keys, dim = mesh_of(num, names=("context",)), 2, 4, 2, 16

    def loss(params, x):
        def layer(x, w):
            q, kv = (x @ w["q"]).reshape(*x.shape[:2], heads, dim), (x @ w["kv"]).reshape(*x.shape[:2], 2, keys, dim)
            return x + FUNCTIONS[name](q, kv[:, :, 0], kv[:, :, 1], order=order, **options).reshape(x.shape), None

        return jax.lax.scan(layer, x, params)[0].sum()

    def of_device(params, x):
        return jax.tree.map(lambda x: x[None], (jax.grad(loss) if differentiate else loss)(params, x))

    cut = P(None, "context")
    run = jax.shard_map(of_device, mesh=mesh, in_specs=(P(), cut), out_specs=P("context"), check_vma=False)
    width = heads * dim
    params = {"q": (layers, width, width), "kv": (layers, width, 2 * keys * dim)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}
    x = jax.ShapeDtypeStruct((rows, length, width), jnp.float32, sharding=jax.NamedSharding(mesh, cut))
    in_order = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}  # as our steps have
    lowered = jax.jit(run, compiler_options=in_order).lower(params, x)
    return lowered.compile(), layers * 2 * rows * length * keys * dim * 4


def sent(compiled):
    """Bytes that a device sends, by kind."""
    found: dict[str, float] = {}
    for one in inspect.traffic.collectives(compiled):
        found[one.kind] = found.get(one.kind, 0) + one.wire_bytes
    return found


@pytest.mark.parametrize("num", [2, 4, 8])
def test_bytes_of_keys_and_values(num):
    """Forward: keys and values, once. Backward: once more, and their gradients."""
    for name, forward, backward in (
        ("gathered", {"all-gather": 1}, {"all-gather": 2, "reduce-scatter": 1}),
        ("ring", {"collective-permute": 1}, {"collective-permute": 3}),
    ):
        for differentiate, want in ((False, forward), (True, backward)):
            compiled, both = compiled_layers(name, num, differentiate=differentiate)
            assert sent(compiled) == {kind: times * both * (num - 1) / num for kind, times in want.items()}


@pytest.mark.optimized
def test_zigzag_halves_the_work_of_the_busiest_device():
    """Contiguous parts: the last device has C blocks; zigzag ones: each has (2C + 1) / 4."""
    flops = {}
    for order in ("contiguous", "zigzag"):
        compiled, _ = compiled_layers("ring", 4, order=order, differentiate=False, length=1024, layers=1)
        flops[order] = compiled.cost_analysis()["flops"]
    assert flops["zigzag"] / flops["contiguous"] == pytest.approx(9 / 16, abs=0.04)


@pytest.mark.optimized
@pytest.mark.parametrize("name", ["ring", "gathered"])
def test_scores_take_no_more_memory_with_more_devices(name):
    """Twice the devices and sequences of twice the length: twice as many scores per device, in as many bytes."""
    peaks = []
    for num, chunk in ((4, 0), (8, 0), (8, 64)):
        compiled, _ = compiled_layers(name, num, length=512 * num, layers=1, chunk=chunk)
        peaks.append(compiled.memory_analysis().temp_size_in_bytes)
    assert peaks[1] < 1.15 * peaks[0]
    assert peaks[2] < 0.7 * peaks[1]


# Bad input.


def local_mean(params, batch):
    return jnp.mean(params["table"][batch["tokens"]])


def refuses(match, error=ValueError, batch=None, **options):
    """Asserts an error of the loss, and of the step, before they run."""
    loss, opt, params = mean_loss(tensor.ring_attention), make(), params_of("f")
    batch = batch_of() if batch is None else batch
    with pytest.raises(error, match=match):
        jaxshard.value_and_grad(loss, opt, **options)(params, batch)
    with pytest.raises(error, match=match):
        jaxshard.train_step(loss, opt, **options)(params, opt.init(params), batch)


def test_a_loss_that_does_not_name_the_axis_is_refused_before_anything_is_compiled(count_compilations):
    opt, params, batch = make(), params_of("f"), batch_of()
    match = r"batch leaf mask of shape \(4, 32\) is cut along dim 1 over the mesh axes \['context'\].*ring_attention"
    placed, state = opt.place(params), opt.init(params)
    step = jaxshard.train_step(local_mean, opt, batch_specs=SPECS)

    def refused():
        with pytest.raises(ValueError, match=match):
            jaxshard.value_and_grad(local_mean, opt, batch_specs=SPECS)(params, batch)
        with pytest.raises(ValueError, match=match):
            step(placed, state, batch)
        with pytest.raises(ValueError, match=match):
            step.lower(placed, state, batch)
        return 0

    refused()
    assert count_compilations(refused)[0] == 0
    meant = jaxshard.value_and_grad(local_mean, opt, batch_specs=SPECS, loss_view="local")(params, batch)[0]
    np.testing.assert_allclose(meant, local_mean(params, batch), rtol=1e-5)


def test_attention_over_an_axis_that_cuts_rows_is_refused():
    with pytest.raises(ValueError, match=r"takes each row to be cut over 'context'.*batch_specs=P"):
        jaxshard.value_and_grad(mean_loss(tensor.ring_attention), make())(params_of("f"), batch_of())


@pytest.mark.parametrize(
    ("specs", "match", "error"),
    [
        (P("data"), r"no leaf is cut along \['context'\]", ValueError),
        (P("data", "contxt"), "'contxt' is not an axis that splits the batch.*did you mean 'context'", ValueError),
        (P("data", ("data", "context")), "uses an axis twice", ValueError),
        ("context", "is a str; give a PartitionSpec", TypeError),
        (SPECS | {"scale": P(AXES)}, "the first entries differ", ValueError),
        ({"tokens": CUT}, "is missing; add a PartitionSpec", ValueError),
        (SPECS | {"more": CUT}, "more is not a leaf of the batch", ValueError),
        (CUT, r"scale has shape \(4,\).*a spec of its own", ValueError),
    ],
)
def test_specs_that_do_not_fit(specs, match, error):
    refuses(match, error, batch_specs=specs)
    with pytest.raises(error, match=match):
        jaxshard.shard_batch(batch_of(), make(), specs)


def test_dims_that_do_not_divide():
    odd = {name: x[:, :31] if x.ndim > 1 else x for name, x in batch_of().items()}
    refuses(r"shape \(4, 31\); its dim 1 must be divisible by 2.*pad it to 32", batch=odd, batch_specs=SPECS)
    with pytest.raises(ValueError, match=r"its dim 1 must be divisible by 2 \(2 devices over context\): pad it to 32"):
        jaxshard.shard_batch(odd, make(), SPECS)
    refuses("its first dim must be divisible by 2 = 2 data shards", batch=batch_of(rows=3), batch_specs=SPECS)


def test_options_and_outputs_that_do_not_fit():
    refuses('loss_view="global" shows the loss complete rows', batch_specs=SPECS, loss_view="global")

    def of_part(params, batch):
        return params["table"][batch["tokens"]] + 0 * jax.lax.axis_index("context")

    with pytest.raises(ValueError, match=r"predict: output .*another part: return it complete.*all_gather"):
        jaxshard.predict(of_part, make(), batch_specs=SPECS)(params_of("f"), batch_of())


def test_arguments_of_attention_that_do_not_fit():
    x = jnp.ones((1, 6, 4, 8))
    with pytest.raises(ValueError, match=r"ring_attention: q .* must be \(B, L, H, D\)"):
        tensor.ring_attention(x, x[:, :, :3], x[:, :, :3])
    with pytest.raises(ValueError, match=r"segment_ids float32\[1,? 6\] must be integers of \(B, L\)"):
        tensor.gathered_attention(x, x, x, segment_ids=x[:, :, 0, 0])
    with pytest.raises(ValueError, match="order 'zig' must be"):
        tensor.positions(4, order="zig")
    with pytest.raises(ValueError, match="must be divisible by 8, two parts for each of 4 devices"):
        tensor.zigzag(np.ones((2, 12)), 4)
    with pytest.raises(TypeError, match=r"k of shape .* is the same on all devices"):
        jax.shard_map(
            lambda q, k: tensor.ring_attention(q, k, k),
            mesh=mesh_of(2, names=("context",)),
            in_specs=(P(None, "context"), P()),
            out_specs=P(None, "context"),
        )(x, x[:, :3])
    with pytest.raises(ValueError, match="two parts of equal length, and here 3 positions"):
        jax.shard_map(
            lambda q: tensor.ring_attention(q, q, q, order="zigzag"),
            mesh=mesh_of(2, names=("context",)),
            in_specs=P(None, "context"),
            out_specs=P(None, "context"),
        )(x)
