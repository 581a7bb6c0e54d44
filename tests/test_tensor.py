"""Layers cut over the tensor axis: the same loss and gradients, each sum made once, and the bytes that these cost."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from oracle import assert_close
from parallel import Model

import jaxshard
from jaxshard import inspect, tensor

MODEL = Model(layers=2)
TENSOR_SPECS = [(pattern, spec) for pattern, spec in MODEL.specs if pattern != "blocks"]


def make(strategy, mesh, model=MODEL, tx=None, **options):
    tx = optax.sgd(0.1) if tx is None else tx
    return getattr(jaxshard, strategy)(tx, mesh, specs=model.specs, **{"min_shard_size": 1} | options)


@functools.cache
def truth(model):
    """(loss, gradients) of plain JAX on one device."""
    return jax.jit(jax.value_and_grad(model.plain().loss))(model.plain().params(), model.batch())


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [("tensor_parallel", {"tensor": 4}), ("zero1", {"tensor": 2}), ("zero2", {"tensor": 4}), ("zero3", {"tensor": 2})],
)
def test_loss_and_every_gradient(strategy, sizes, tied, sequence):
    with jax.enable_x64(True):
        model = dataclasses.replace(MODEL, sequence=sequence, tied=tied)
        opt = make(strategy, jaxshard.make_mesh(**sizes), model)
        loss, grads = jaxshard.value_and_grad(model.loss, opt)(opt.place(model.params()), model.batch())
        assert_close({"loss": loss, "grads": grads}, dict(zip(("loss", "grads"), truth(model), strict=True)), 1e-12)


def chunked(model, chunk):
    """A loss whose output layer, the transposed table where it is tied, goes over positions in chunks."""

    def loss(params, batch):
        table, kernel = params["table"], params["table"].T if model == "tied" else params["kernel"]
        x = jnp.tanh(tensor.vocab_parallel_embedding(batch["x"], jaxshard.unshard(table)) @ params["w"])
        losses = tensor.vocab_parallel_linear_cross_entropy(x, jaxshard.unshard(kernel), batch["y"], chunk=chunk)
        return jnp.mean(losses * batch["weights"])

    return loss


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize(
    ("zero", "sizes"),
    [(0, {}), (2, {}), (3, {}), (2, {"tensor": 2}), (3, {"tensor": 4}), (2, {"data": 1, "tensor": 8})],
)
def test_the_loss_in_chunks_is_exact(zero, sizes, model):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = {
            "table": rng.normal(size=(32, 16)),
            "w": rng.normal(size=(16, 16)),
            "kernel": rng.normal(size=(16, 32)),
        }
        params = {name: jnp.asarray(x) for name, x in params.items() if (model, name) != ("tied", "kernel")}
        batch = {name: rng.integers(0, 32, (16, 12)) for name in "xy"} | {"weights": rng.random((16, 12))}
        want = jax.jit(jax.value_and_grad(chunked(model, 0)))(params, batch)
        specs = [("table", P("tensor")), ("w", P())] + [("kernel", P(None, "tensor"))] * (model == "untied")
        opt = jaxshard.hybrid(optax.sgd(0.1), jaxshard.make_mesh(**sizes), specs, zero, min_shard_size=1)
        for chunk in (1, 4):
            found = jaxshard.value_and_grad(chunked(model, chunk), opt)(opt.place(params), batch)
            assert_close(dict(zip("ab", found, strict=True)), dict(zip("ab", want, strict=True)), 1e-12)


def test_the_gradient_of_chunks_is_summed_in_float32():
    """In bfloat16 a sum over 256 chunks would be off by 10%."""
    x, kernel = jnp.ones((256, 8), jnp.bfloat16), jnp.zeros((8, 4), jnp.bfloat16)
    targets = jnp.zeros(256, jnp.int32)

    def loss(kernel):
        return jnp.sum(tensor.vocab_parallel_linear_cross_entropy(x, kernel, targets, chunk=1))

    assert float(jax.jit(jax.grad(loss))(kernel)[0, 0]) == -192.0


def test_a_chunk_that_does_not_divide_the_positions_is_refused():
    x, kernel, targets = jnp.ones((10, 4)), jnp.ones((4, 8)), jnp.zeros(10, int)
    with pytest.raises(ValueError, match="chunk 3 does not divide the 10 positions"):
        tensor.vocab_parallel_linear_cross_entropy(x, kernel, targets, chunk=3)


def test_without_a_mesh_the_blocks_are_the_plain_operations():
    rng = np.random.default_rng(0)
    x, w, back, table = (jnp.asarray(rng.normal(size=shape), "f") for shape in ((3, 4), (4, 8), (8, 4), (6, 4)))
    tokens = jnp.array([5, 0, 2])
    np.testing.assert_array_equal(tensor.column_parallel(x, w), x @ w)
    np.testing.assert_array_equal(tensor.row_parallel(x @ w, back, sequence=0), x @ w @ back)
    np.testing.assert_array_equal(tensor.vocab_parallel_embedding(tokens, table), table[tokens])
    losses = tensor.vocab_parallel_cross_entropy(x, jnp.array([1, 3, 0]))
    want = optax.softmax_cross_entropy_with_integer_labels(x, jnp.array([1, 3, 0]))
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    np.testing.assert_array_equal(tensor.join_sequence(tensor.split_sequence(x, 0), 0), x)
    assert tensor.axis_size() == 1


WHOLE = P()


def on_tensor(body, *args, specs=None, out=WHOLE, **options):
    """`body` on 4 devices of the tensor axis."""
    mesh = jaxshard.make_mesh(tensor=4, devices=jax.devices()[:4])
    specs = (WHOLE,) * len(args) if specs is None else specs
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, **options))(*args)


def test_the_sequence_is_split_and_joined():
    x = jnp.arange(24.0).reshape(2, 12)

    def body(x):
        part = tensor.split_sequence(x, 1)
        assert part.shape == (2, 3)
        return tensor.join_sequence(2 * part, 1)

    np.testing.assert_array_equal(on_tensor(body, x), 2 * x)
    grad = on_tensor(lambda x: jax.grad(lambda x: jnp.sum(body(x) ** 2))(x), x)
    np.testing.assert_array_equal(grad, 8 * x)


def test_cross_entropy_of_large_logits_of_a_cut_vocabulary():
    rng = np.random.default_rng(0)
    logits, targets = (1000 * rng.normal(size=(5, 16))).astype("f"), rng.integers(0, 16, (5,))

    def body(logits, targets):
        return tensor.vocab_parallel_cross_entropy(logits, targets)

    got = on_tensor(body, logits, targets, specs=(P(None, "tensor"), P()))
    want = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), targets)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16"])
@pytest.mark.parametrize("size", [1, 2])
def test_tokens_of_every_type(dtype, size):
    """A vocabulary one above the largest token must not wrap around to none."""
    count = np.iinfo(dtype).max + 1
    table, tokens = np.arange(1.0, count + 1, dtype="f")[:, None], np.array([0, 1, count - 1], dtype)

    def body(table, tokens):
        x = tensor.vocab_parallel_embedding(tokens, table)
        logits = jnp.zeros((3, table.shape[0])) + 30 * (table[:, 0] == count)
        return x[:, 0], tensor.vocab_parallel_cross_entropy(logits, tokens)

    mesh = jaxshard.make_mesh(tensor=size, devices=jax.devices()[:size])
    found = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("tensor"), P()), out_specs=P()))(table, tokens)
    for x, losses in (body(jnp.asarray(table), jnp.asarray(tokens)), found):
        np.testing.assert_array_equal(x, [1, 2, count])
        assert losses[0] > 20
        assert losses[2] < 0.01


def test_the_sequence_counted_from_the_end():
    with jax.enable_x64(True):
        model = dataclasses.replace(MODEL, sequence=True, dim_of_sequence=-2)
        loss, grads = jaxshard.value_and_grad(model.loss, make("zero2", jaxshard.make_mesh(tensor=2), model))(
            model.params(), model.batch()
        )
        assert_close({"loss": loss, "grads": grads}, dict(zip(("loss", "grads"), truth(MODEL), strict=True)), 1e-12)


@pytest.mark.parametrize("sizes", [{"tensor": 4}, {"tensor": 2, "pipeline": 2}])
def test_a_norm_of_params_in_the_loss(sizes):
    """Shards are summed, and whole ones count once; unsummed, it is refused, and one sum for all is wrong."""
    axes = tuple(sizes)
    specs = [("blocks/(qkv|up)$", P("pipeline", None, "tensor")), ("blocks", P("pipeline")), ("embed$", P("tensor"))]

    def found(each, total):
        def loss(params, batch):
            return jnp.mean(batch) + 0.1 * total(sum(each(jnp.sum(w * w)) for w in jax.tree.leaves(params)))

        opt = jaxshard.hybrid(optax.sgd(0.1), jaxshard.make_mesh(**sizes), specs, 2, min_shard_size=1)
        return jaxshard.value_and_grad(loss, opt)(MODEL.params(), np.ones(8))

    with jax.enable_x64(True):
        loss, grads = found(lambda x: tensor.sum_shards(x, axis=axes), lambda x: x)
        params = MODEL.params()
        assert float(loss) == pytest.approx(1 + 0.1 * sum(np.sum(w * w) for w in jax.tree.leaves(params)), rel=1e-12)
        assert_close(grads, jax.tree.map(lambda w: 0.2 * w, params), 1e-12)
        with pytest.raises(TypeError, match=r"the loss differs over \['(pipeline', ')?tensor'\].*sum_shards"):
            found(lambda x: x, lambda x: x)
        by_hand, _ = found(lambda x: x, lambda x: jax.lax.psum(x, axes))
        assert abs(float(by_hand) / float(loss) - 1) > 0.1


# What others get wrong.


def test_a_sum_by_hand_of_a_replicated_leafs_gradient_doubles_it():
    """The types have summed it already; Megatron needs this all-reduce, and here it would be the bug."""
    with jax.enable_x64(True):
        model, mesh = dataclasses.replace(MODEL, sequence=True), jaxshard.make_mesh(tensor=2, devices=jax.devices()[:2])
        params, specs = model.params(), jaxshard.ddp(optax.sgd(1.0), mesh, specs=model.specs).shardings
        specs = specs(params).specs.params

        def grads(params, batch):
            found = jax.grad(model.loss)(params, batch)
            by_hand = jax.lax.psum(found["blocks"]["norm1"], "tensor")
            return found["blocks"]["norm1"], by_hand

        right, doubled = jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=(specs, P()), out_specs=P()))(
            params, model.batch()
        )
        want = truth(model)[1]["blocks"]["norm1"]
        np.testing.assert_allclose(right, want, rtol=1e-10)
        np.testing.assert_allclose(doubled, 2 * want, rtol=1e-10)


def test_untyped_transposes_double_gradients_and_are_refused():
    """Under check_vma=False the transpose of a psum is a psum: each row-parallel layer doubles what flows back."""

    def body(x, up, down):
        return jax.grad(lambda x: jnp.sum(tensor.row_parallel(tensor.column_parallel(x, up), down)))(x)

    args = jnp.ones((3, 4)), jnp.ones((4, 8)), jnp.ones((8, 4))
    with pytest.raises(TypeError, match="check_vma=True"):
        on_tensor(body, *args, specs=(P(), P(None, "tensor"), P("tensor")), check_vma=False)


def test_a_weight_that_is_whole_would_be_summed_t_times_and_is_refused():
    x, up, down = jnp.ones((3, 4)), jnp.ones((4, 8)), jnp.ones((8, 4))
    with pytest.raises(TypeError, match=r"column_parallel: the kernel of shape \(4, 8\) is replicated.*name 'tensor'"):
        on_tensor(tensor.column_parallel, x, up, out=P(None, "tensor"))
    with pytest.raises(TypeError, match="row_parallel: the kernel"):
        on_tensor(
            lambda x, up, down: tensor.row_parallel(tensor.column_parallel(x, up), down),
            x,
            up,
            down,
            specs=(P(), P(None, "tensor"), P()),
        )
    with pytest.raises(TypeError, match="row_parallel: x"):
        on_tensor(tensor.row_parallel, x, down, specs=(P(), P("tensor")))
    with pytest.raises(TypeError, match="the table"):
        on_tensor(tensor.vocab_parallel_embedding, jnp.zeros(3, int), down)
    with pytest.raises(TypeError, match="the logits"):
        on_tensor(tensor.vocab_parallel_cross_entropy, x, jnp.zeros(3, int))


def test_what_is_cut_where_it_should_be_whole_is_refused():
    x, up = jnp.ones((8, 4)), jnp.ones((4, 8))
    columns = P(None, "tensor")
    with pytest.raises(TypeError, match=r"x of shape .* differs over 'tensor', but must be replicated.*sequence=dim"):
        on_tensor(tensor.column_parallel, x, up, specs=(P("tensor"), columns), out=columns)
    with pytest.raises(TypeError, match=r"with sequence=0.*is replicated"):
        on_tensor(lambda x, up: tensor.column_parallel(x, up, sequence=0), x, up, specs=(P(), columns), out=columns)
    with pytest.raises(TypeError, match="split_sequence"):
        on_tensor(lambda x: tensor.split_sequence(x, 0), x, specs=(P("tensor"),), out=P("tensor"))


# Bad input.


def test_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match=r"heads 6 / tensor 4 = 1.5 is not an integer.*heads to 8"):
        on_tensor(lambda x: x * tensor.per_device("heads", 6), jnp.ones(4))
    with pytest.raises(ValueError, match=r"sequence length 6 / tensor 4"):
        on_tensor(lambda x: tensor.split_sequence(x, 1), jnp.ones((2, 6)), out=P(None, "tensor"))
    model = Model(vocabulary=13)
    opt = make("zero2", jaxshard.make_mesh(tensor=4), model)
    with pytest.raises(ValueError, match=r"embed has P\('tensor',\).*dim 0 of 13 is not divisible by 4.*pad it to 16"):
        opt.place(model.params())


@pytest.mark.parametrize("specs", [None, {"w": P()}, [("w", P(None))]])
@pytest.mark.parametrize("strategy", ["tensor_parallel", "pipeline_parallel"])
def test_specs_that_cut_nothing(strategy, specs):
    with pytest.raises(ValueError, match="name no axis, so nothing would be sharded"):
        getattr(jaxshard, strategy)(optax.sgd(0.1), jaxshard.make_mesh(tensor=2), specs)


@pytest.mark.parametrize("zero", [4, -1, True, "2", None])
def test_a_level_of_zero_that_there_is_not(zero):
    with pytest.raises(ValueError, match="not a ZeRO level; give 0"):
        jaxshard.hybrid(optax.sgd(0.1), jaxshard.make_mesh(), zero=zero)


def test_zero_is_an_option_of_hybrid_alone():
    with pytest.raises(TypeError, match="unknown option 'zero'"):
        jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh(), zero=1)


# What it costs.


def wire_bytes_over_tensor(model, rows=16):
    """Of a step of gradients alone: 2 devices, no data axis."""
    opt = make("tensor_parallel", jaxshard.make_mesh(tensor=2, devices=jax.devices()[:2]), model)
    params = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, model.params(np.float32)))
    step = jax.jit(jaxshard.value_and_grad(model.loss, opt))
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, opt.shardings(params).params
    )
    return inspect.report(step.lower(placed, model.batch(rows=rows)).compile()).wire_bytes


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_wire_bytes_of_a_layer(sequence):
    """4 all-reduces of rows x length x width, or as many bytes in reduce-scatters and all-gathers: the formula."""
    small, large = (Model(layers=n, width=64, heads=4, hidden=64, length=16, sequence=sequence) for n in (2, 6))
    per_layer = (wire_bytes_over_tensor(large) - wire_bytes_over_tensor(small)) / 4
    activation = 16 * 16 * 64 * 4  # bytes
    replicated = 2 * 64 * 4 if sequence else 0  # the norms' gradients, which are partial: an all-reduce each
    bias = 64 * 4 if sequence else 0
    all_reduce = 2 * (2 - 1) / 2
    assert per_layer == pytest.approx(all_reduce * (4 * activation + replicated + bias), rel=0.02)


# XLA's own partitioning.


def gspmd_params():
    rng = np.random.default_rng(0)
    return {"up": rng.normal(size=(8, 16)), "down": rng.normal(size=(16, 8)), "b": rng.normal(size=(8,))}


GSPMD_SPECS = {"up": P(None, "tensor"), "down": P("tensor"), "b": P()}


def gspmd_loss(params, x):
    """Whole arrays, no collectives: written for XLA's partitioner."""
    params = jaxshard.unshard(params)
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] + params["b"]) ** 2)


@pytest.mark.parametrize("strategy", ["tensor_parallel", "zero1", "zero2", "zero3"])
def test_a_model_that_is_left_to_xla(strategy):
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))
    rows = np.random.default_rng(1).normal(size=(3, 16, 8))
    with jax.enable_x64(True):
        mesh = jaxshard.make_mesh(tensor=2)
        opt = getattr(jaxshard, strategy)(tx, mesh, specs=GSPMD_SPECS, auto_axes="tensor", min_shard_size=1)
        step = jaxshard.train_step(gspmd_loss, opt, microbatches=2)
        p, state = opt.place(gspmd_params()), opt.init(gspmd_params())
        want, want_state = gspmd_params(), tx.init(gspmd_params())
        for x in rows:
            p, state, _ = step(p, state, x)
            grads = jax.jit(jax.grad(gspmd_loss))(want, x)
            updates, want_state = jax.jit(tx.update)(grads, want_state, want)
            want = optax.apply_updates(want, updates)
        assert_close((p, state), (want, want_state), 1e-12)
        assert p["up"].sharding == opt.shardings(p).params["up"]
        assert "tensor" in str(p["up"].sharding.spec)
        compiled = step.lower(p, state, rows[0]).compile()
        assert "tensor" in inspect.report(compiled).wire_bytes_by_axes(mesh)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_narrow_params_of_a_model_that_is_left_to_xla(strategy, dtype):
    """XLA for CPU ends the program at a sum of 2-byte floats over some axes, while others are left to it."""
    opt = getattr(jaxshard, strategy)(
        optax.adam(0.1), jaxshard.make_mesh(tensor=2), specs=GSPMD_SPECS, auto_axes="tensor", min_shard_size=1
    )
    params, rows = jax.tree.map(lambda x: jnp.asarray(x, dtype), gspmd_params()), jnp.ones((32, 8), dtype)
    for microbatches in (1, 2):
        step = jaxshard.train_step(gspmd_loss, opt, microbatches=microbatches)
        _, _, metrics = step(opt.place(params), opt.init(params), rows)
        assert jnp.allclose(metrics["loss"], gspmd_loss(params, rows), rtol=0.02)


def test_auto_axes_that_make_no_sense():
    with pytest.raises(ValueError, match="auto_axes"):
        jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh(), auto_axes="data")
    with pytest.raises(ValueError, match="auto_axes"):
        jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh(), auto_axes="tensr")
    explicit = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    with pytest.raises(ValueError, match="mesh of Auto axes"):
        jaxshard.zero2(optax.sgd(0.1), explicit, auto_axes="tensor")


# Specs from flax.


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        normal, hidden = nn.initializers.normal(1.0), tensor.per_device("hidden", 16)
        up = self.param("up", nn.with_partitioning(normal, (None, "tensor")), (8, hidden))
        down = self.param("down", nn.with_partitioning(normal, ("tensor", None)), (hidden, 8))
        return tensor.row_parallel(jnp.tanh(tensor.column_parallel(x, up)), down)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        normal = nnx.initializers.normal(1.0)
        self.up = nnx.Param(nnx.with_partitioning(normal, (None, "tensor"))(rngs.params(), (8, 16)))
        self.down = nnx.Param(nnx.with_partitioning(normal, ("tensor", None))(rngs.params(), (16, 8)))


def check_flax(params, specs, loss):
    mesh = jaxshard.make_mesh(tensor=2)
    opt = jaxshard.zero2(optax.sgd(0.1), mesh, specs=specs, min_shard_size=1)
    placed = opt.place(params)
    assert [x.sharding.spec for x in jax.tree.leaves(placed)] == [P("tensor"), P(None, "tensor")]
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("f")
    got, grads = jaxshard.value_and_grad(loss, opt)(placed, x)
    want, want_grads = jax.value_and_grad(loss)(params, x)
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    assert_close(grads, want_grads, 1e-5)


def test_specs_of_linen_metadata():
    boxed = Linen().init(jax.random.key(0), jnp.ones((2, 8)))
    params = nn.meta.unbox(boxed)
    check_flax(params, nn.get_partition_spec(boxed), lambda p, x: jnp.mean(Linen().apply(p, x) ** 2))


def test_specs_of_nnx_metadata():
    with nnx.use_eager_sharding(False):
        graphdef, params = nnx.split(Nnx(nnx.Rngs(0)))

    def loss(params, x):
        model = nnx.merge(graphdef, params)
        return jnp.mean(tensor.row_parallel(jnp.tanh(tensor.column_parallel(x, model.up[...])), model.down[...]) ** 2)

    check_flax(params, nnx.get_partition_spec(params), loss)


def test_a_mesh_of_ones_own_names():
    """The blocks take the axis's name; nothing assumes the four of make_mesh."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("batch", "model"))
    params = {"up": np.ones((4, 8), "f") / 4, "down": np.ones((8, 4), "f") / 8}

    def loss(p, x):
        h = jnp.tanh(tensor.column_parallel(x, p["up"], axis="model"))
        return jnp.mean(tensor.row_parallel(h, p["down"], axis="model") ** 2)

    specs = {"up": P(None, "model"), "down": P("model")}
    opt = jaxshard.hybrid(optax.sgd(0.1), mesh, specs, zero=3, data_axes="batch", min_shard_size=1)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("f")
    got, grads = jaxshard.value_and_grad(loss, opt)(opt.place(params), x)
    want, want_grads = jax.value_and_grad(loss)(params, x)
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    assert_close(grads, want_grads, 1e-5)
