"""Bad input gets a clear error, before anything is compiled, that names the leaf, the number and the cure."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxshard
from jaxshard.step.step import loss_of

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp"]


@pytest.fixture(scope="module")
def mesh():
    return jaxshard.make_mesh(data=8)


@pytest.fixture
def refused(count_compilations):
    """Calls a function, and asserts that it raises, says all the words, and compiles nothing on the way."""

    def check(error, fn, *words):
        def call():
            with pytest.raises(error) as caught:
                fn()
            message = str(caught.value)
            for word in words:
                assert word in message, f"{word!r} is not in: {message}"

        assert count_compilations(call)[0] == 0

    return check


def params_numpy():
    return {"w": np.ones((4, 16), np.float32), "inside": {"b": np.zeros(16, np.float32)}}


def batch_of(rows):
    return {"x": np.ones((rows, 4), np.float32), "y": np.ones((rows, 16), np.float32)}


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["inside"]["b"] - batch["y"]) ** 2)


def zero2(mesh, **options):
    return jaxshard.zero2(optax.adam(1e-3), mesh, **{"min_shard_size": 0} | options)


# Construction.


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "inner", [1e-3, optax.adam, (), None, {"init": 1}], ids=["number", "factory", "empty", "None", "dict"]
)
def test_an_inner_that_is_no_gradient_transformation(refused, mesh, strategy, inner):
    make = getattr(jaxshard, strategy)
    refused(TypeError, lambda: make(inner, mesh), strategy, "GradientTransformation", type(inner).__name__)


def test_a_mesh_that_is_none(refused):
    refused(TypeError, lambda: jaxshard.zero2(optax.adam(1e-3), 8), "zero2", "Mesh", "int", "make_mesh")


def test_a_mesh_without_the_data_axis(refused):
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("batch",))
    for strategy in STRATEGIES:
        make = getattr(jaxshard, strategy)
        refused(ValueError, lambda: make(optax.adam(1e-3), mesh), strategy, "'data'", "('batch',)", "data_axes=")


def test_hsdp_without_a_replica_axis(refused):
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("data",))
    refused(ValueError, lambda: jaxshard.hsdp(optax.adam(1e-3), mesh), "hsdp", "'replica'", "('data',)", "make_mesh")


def test_data_axes_that_the_mesh_lacks(refused, mesh):
    refused(ValueError, lambda: zero2(mesh, data_axes=("slice", "data")), "'slice'", "'data'", "data_axes")


@pytest.mark.parametrize("axes", [(), ("data", "data"), ("replica", "data")])
def test_data_axes_that_make_no_sense(refused, mesh, axes):
    refused(ValueError, lambda: zero2(mesh, data_axes=axes), "data_axes", repr(axes))


def test_an_unknown_option(refused, mesh):
    refused(TypeError, lambda: zero2(mesh, min_shard=0), "'min_shard'", "min_shard_size")


@pytest.mark.parametrize("size", [-1, 2.5, "large", None])
def test_a_min_shard_size_that_is_none(refused, mesh, size):
    refused(ValueError, lambda: zero2(mesh, min_shard_size=size), "min_shard_size", repr(size))


@pytest.mark.parametrize("option", ["reduce_dtype", "master_dtype"])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, "int8", "float33"])
def test_a_dtype_that_is_not_floating(refused, mesh, option, dtype):
    refused((TypeError, ValueError), lambda: zero2(mesh, **{option: dtype}), option, "float")


def test_a_multi_steps_that_is_no_transformation_yet(refused, mesh):
    words = ("zero2", "MultiSteps", ".gradient_transformation()")
    refused(TypeError, lambda: jaxshard.zero2(optax.MultiSteps(optax.sgd(1.0), 2), mesh), *words)


def test_a_strategy_around_a_strategy(refused, mesh):
    inner = jaxshard.zero1(optax.sgd(1.0), mesh)
    refused(TypeError, lambda: jaxshard.zero2(inner, mesh), "zero2", "zero1", "already sharded", ".inner")


def test_a_flag_that_is_text(refused, mesh):
    refused(TypeError, lambda: zero2(mesh, stochastic_rounding="False"), "stochastic_rounding", "'False'", "True or")
    opt = zero2(mesh)
    for make in (jaxshard.train_step, jaxshard.value_and_grad, jaxshard.evaluate):
        refused(TypeError, lambda make=make: make(loss_fn, opt, has_aux="no"), make.__name__, "has_aux", "'no'")
    refused(TypeError, lambda: jaxshard.train_step(loss_fn, opt, donate=1), "train_step", "donate=1", "True or False")


@pytest.mark.parametrize("axes", [3, None, ("data", 3)])
@pytest.mark.parametrize("option", ["data_axes", "auto_axes"])
def test_axes_that_are_no_names(refused, mesh, option, axes):
    refused(TypeError, lambda: zero2(mesh, **{option: axes}), "zero2", option, repr(axes), "mesh axis's name")


@pytest.mark.parametrize("name", ["initial", "growth_interval", "minimum"])
def test_a_loss_scale_that_is_no_number(refused, name):
    refused(TypeError, lambda: jaxshard.LossScale(**{name: "a"}), "LossScale", name, "'a'", "number")


def test_a_mesh_of_mixed_axis_types(refused):
    kinds = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"), axis_types=kinds)
    refused(ValueError, lambda: zero2(mesh), "Auto", "Explicit")


# Meshes.


@pytest.mark.parametrize("devices", [3, [0, 1], "cpu"])
def test_devices_that_are_none(refused, devices):
    refused(TypeError, lambda: jaxshard.make_mesh(devices=devices), "make_mesh", repr(devices), "jax.devices()[:4]")


def test_sizes_whose_product_is_not_the_device_count(refused):
    words = ("pipeline 1 x replica 1 x data 3 x tensor 2", "8 devices", "6", "devices=")
    refused(ValueError, lambda: jaxshard.make_mesh(data=3, tensor=2), *words)


def test_an_inferred_size_that_does_not_come_out_whole(refused):
    words = ("data (the rest)", "tensor 3", "8 devices", "multiply to 3")
    refused(ValueError, lambda: jaxshard.make_mesh(tensor=3), *words)


def test_two_sizes_to_infer(refused):
    words = ("replica", "data", "both -1", "pipeline 1 x replica (the rest) x data (the rest) x tensor 1", "8 devices")
    refused(ValueError, lambda: jaxshard.make_mesh(replica=-1), *words)


@pytest.mark.parametrize("size", [0, -2, 2.0, "4", None])
def test_a_size_that_is_none(refused, size):
    refused(ValueError, lambda: jaxshard.make_mesh(tensor=size), f"tensor={size!r}", "-1")


# Params and specs.


@pytest.mark.parametrize("what", ["place", "shardings", "layout", "init"])
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.uint8])
def test_params_that_are_not_floating(refused, mesh, what, dtype):
    params = params_numpy() | {"steps": np.zeros((8, 4), dtype)}
    words = ("steps", np.dtype(dtype).name, "floating")
    refused(TypeError, lambda: getattr(zero2(mesh), what)(params), *words)


def test_params_that_are_keys(refused, mesh):
    params = params_numpy() | {"key": jax.random.key(0)}
    refused(TypeError, lambda: zero2(mesh).place(params), "key", "floating")


@pytest.mark.parametrize("leaf", [1.5, "text", object()], ids=["number", "text", "object"])
@pytest.mark.parametrize("what", ["place", "shardings", "layout", "init"])
def test_params_that_are_no_arrays(refused, mesh, what, leaf):
    params = {"inside": {"rate": leaf}}
    refused(TypeError, lambda: getattr(zero2(mesh), what)(params), "inside/rate", type(leaf).__name__, "array")


def test_params_that_are_not_floating_in_a_step(refused, mesh):
    opt = zero2(mesh)
    params = params_numpy() | {"steps": np.zeros(8, np.int32)}
    refused(TypeError, lambda: jaxshard.value_and_grad(loss_fn, opt)(params, batch_of(8)), "steps", "int32")
    refused(TypeError, lambda: jaxshard.evaluate(loss_fn, opt)(params, batch_of(8)), "steps", "int32")
    refused(TypeError, lambda: jaxshard.train_step(loss_fn, opt)(params, (), batch_of(8)), "steps", "int32")


def test_a_rule_that_matches_no_leaf(refused):
    opt = zero2(jaxshard.make_mesh(tensor=2), specs=[("inside/w$", P("tensor"))])
    for what in (opt.place, opt.shardings, opt.layout):
        refused(ValueError, lambda: what(params_numpy()), "'inside/w$'", "matches no parameter", "inside/b")


def test_a_rule_that_is_no_regular_expression(refused):
    opt = zero2(jaxshard.make_mesh(tensor=2), specs=[("w(", P("tensor"))])
    refused(ValueError, lambda: opt.place(params_numpy()), "'w('")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (P("tensro"), ("w", "'tensro'", "did you mean 'tensor'")),
        (P("tensor", "tensor"), ("w", "twice")),
        (P(("tensor", "tensor")), ("w", "twice")),
        (P(None, None, "tensor"), ("w", "(4, 16)", "2 dims")),
    ],
)
def test_a_spec_that_cannot_be(refused, spec, words):
    opt = zero2(jaxshard.make_mesh(tensor=2), specs={"w": spec, "inside": P()})
    for what in (opt.place, opt.shardings, opt.init):
        refused(ValueError, lambda: what(params_numpy()), *words)


def test_a_rule_without_a_spec(refused, mesh):
    opt = zero2(mesh, specs=[("w", "tensor")])
    refused(TypeError, lambda: opt.init(params_numpy()), "specs", "the rule ('w', 'tensor')", "('w', P('tensor'))")


def test_a_spec_whose_dim_does_not_divide(refused):
    opt = zero2(jaxshard.make_mesh(tensor=8), specs={"w": P("tensor"), "inside": P()})
    refused(ValueError, lambda: opt.place(params_numpy()), "w", "dim 0 of 4", "divisible by 8", "pad it to 8")


def test_a_spec_for_no_parameter_and_a_parameter_without_spec(refused):
    mesh = jaxshard.make_mesh(tensor=2)
    opt = zero2(mesh, specs={"w": P(), "inside": P(), "head": P("tensor")})
    refused(ValueError, lambda: opt.place(params_numpy()), "head")
    opt = zero2(mesh, specs={"w": P("tensor")})
    refused(ValueError, lambda: opt.place(params_numpy()), "inside/b", "PartitionSpec")


@pytest.mark.parametrize("spec", ["tensor", 3, ("tensor", None)], ids=repr)
def test_a_spec_of_the_wrong_type(refused, spec):
    opt = zero2(jaxshard.make_mesh(tensor=2), specs={"w": spec, "inside": P()})
    refused(TypeError, lambda: opt.place(params_numpy()), "w", "PartitionSpec")


# Batches.


@pytest.mark.parametrize(("rows", "microbatches", "needed"), [(12, 1, "8"), (24, 2, "16"), (0, 1, "8"), (7, 1, "8")])
def test_a_batch_that_does_not_divide(refused, mesh, rows, microbatches, needed):
    opt = zero2(mesh)
    words = ("x", str((rows, 4)), f"divisible by {needed}", "8 data shards", f"{microbatches} microbatches")
    for make in (jaxshard.value_and_grad, jaxshard.train_step):
        fn = make(loss_fn, opt, microbatches=microbatches)
        args = (params_numpy(), ()) if make is jaxshard.train_step else (params_numpy(),)
        refused(ValueError, lambda: fn(*args, batch_of(rows)), *words)


def test_a_batch_that_does_not_divide_in_evaluate(refused, mesh):
    fn = jaxshard.evaluate(loss_fn, zero2(mesh))
    refused(ValueError, lambda: fn(params_numpy(), batch_of(12)), "x", "(12, 4)", "divisible by 8")


def test_a_replica_axis_counts_among_the_shards(refused):
    fn = jaxshard.value_and_grad(loss_fn, zero2(jaxshard.make_mesh(replica=2)))
    refused(ValueError, lambda: fn(params_numpy(), batch_of(12)), "(12, 4)", "divisible by 8")


def test_a_batch_leaf_without_rows(refused, mesh):
    fn = jaxshard.value_and_grad(loss_fn, zero2(mesh))
    refused(ValueError, lambda: fn(params_numpy(), batch_of(8) | {"scale": 2.0}), "scale", "()", "further argument")


def test_an_empty_batch(refused, mesh):
    fn = jaxshard.value_and_grad(lambda p, b: jnp.sum(p["w"]), zero2(mesh))
    refused(ValueError, lambda: fn(params_numpy(), {}), "batch", "no leaves")


def test_shard_batch_of_rows_that_do_not_divide(refused, mesh):
    opt = zero2(mesh)
    refused(ValueError, lambda: jaxshard.shard_batch(batch_of(12), opt), "x", "(12, 4)", "give 8 rows or 16")
    refused(ValueError, lambda: jaxshard.shard_batch(batch_of(3), opt), "by 8 (8 devices over data): give 8 rows; or")
    refused(ValueError, lambda: jaxshard.shard_batch({"x": 1.0}, opt), "x has shape ()", "give arrays of (rows, ...)")
    refused(TypeError, lambda: jaxshard.shard_batch(batch_of(8), optax.adam(1.0)), "ShardedOptimizer")


@pytest.mark.parametrize("microbatches", [0, -1, 1.5, "2", None])
def test_microbatches_that_are_none(refused, mesh, microbatches):
    for make in (jaxshard.value_and_grad, jaxshard.train_step):
        refused(ValueError, lambda: make(loss_fn, zero2(mesh), microbatches=microbatches), repr(microbatches))


# Gradients and states.


def test_gradients_of_another_structure(refused, mesh):
    opt = zero2(mesh)
    params = opt.place(params_numpy())
    state = opt.init(params)
    for grads, words in [
        ({"w": np.ones((4, 16), np.float32)}, ("inside/b", "missing")),
        (params_numpy() | {"more": np.ones(3, np.float32)}, ("more",)),
        (params_numpy() | {"w": np.ones((16, 4), np.float32)}, ("w", "(16, 4)", "(4, 16)")),
    ]:
        refused(ValueError, lambda: opt.update(grads, state, params), "gradients", *words)


def test_a_state_of_another_optimizer(refused, mesh):
    opt, other = zero2(mesh), jaxshard.zero2(optax.sgd(1e-3, momentum=0.9), mesh, min_shard_size=0)
    params = opt.place(params_numpy())
    state = other.init(params)
    step = jaxshard.train_step(loss_fn, opt)
    refused(ValueError, lambda: step(params, state, batch_of(8)), "state", "0/count")


def test_a_state_of_other_params(refused, mesh):
    opt = zero2(mesh)
    params = opt.place(params_numpy())
    state = opt.init({"w": np.ones((4, 32), np.float32), "inside": {"b": np.ones(32, np.float32)}})
    step = jaxshard.train_step(loss_fn, opt)
    refused(ValueError, lambda: step(params, state, batch_of(8)), "state", "mu/inside/b", "(32,)", "(16,)")
    refused(ValueError, lambda: opt.update(params, state, params), "state", "mu/inside/b", "(32,)", "(16,)")


def test_a_plain_optimizer_where_a_sharded_one_is_needed(refused, mesh):
    chain = optax.chain(optax.clip_by_global_norm(1.0), zero2(mesh))
    for make in (jaxshard.value_and_grad, jaxshard.train_step, jaxshard.evaluate):
        refused(TypeError, lambda: make(loss_fn, chain), make.__name__, "ShardedOptimizer", "put it inside")


def test_a_sharded_optimizer_in_a_wrapper_that_holds_the_model(refused, mesh):
    model = nnx.Linear(4, 16, rngs=nnx.Rngs(0))
    wrapped = nnx.Optimizer(model, zero2(mesh), wrt=nnx.Param)
    refused(TypeError, lambda: jaxshard.train_step(loss_fn, wrapped), "got Optimizer around one: pass its tx")


def test_a_whole_model_in_the_place_of_its_params(refused, mesh):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.drop = nnx.Linear(4, 16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    refused(TypeError, lambda: zero2(mesh).place(Model(nnx.Rngs(0))), "drop/rngs/", "nnx.split(model, nnx.Param, ...)")
    model, cure = eqx.nn.Dropout(0.1), "eqx.partition(model, eqx.is_inexact_array)"
    refused(TypeError, lambda: zero2(mesh).place(model), "p is a float", cure)
    state = zero2(mesh).init({})
    refused(TypeError, lambda: zero2(mesh).update(eqx.filter(model, eqx.is_array), state, model), "p is a float", cure)


def test_a_warning_is_of_the_line_that_called(mesh):
    """It was of a line of jaxshard's."""

    def mixing(params, batch):
        all_x = jax.lax.all_gather(batch["x"], "data", tiled=True)
        return jnp.mean((batch["x"] - batch["x"].mean(0)) ** 2) + 0 * params["w"].sum() * all_x.sum()

    with pytest.warns(jaxshard.RowsWarning) as caught:
        jax.eval_shape(jaxshard.value_and_grad(mixing, zero2(mesh)), params_numpy(), batch_of(16))
    assert [each.filename for each in caught] == [__file__]


def test_masters_without_params(refused, mesh):
    opt = zero2(mesh, master_dtype=jnp.float32)
    params = opt.place(params_numpy())
    state = opt.init(params)
    refused(ValueError, lambda: opt.update(params, state), "master_dtype", "params")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_arrays_used_after_they_were_donated(refused, strategy):
    opt = getattr(jaxshard, strategy)(optax.adam(1e-3), jaxshard.make_mesh(replica=2), min_shard_size=0)
    params = opt.place(params_numpy())
    state = opt.init(params)
    step = jaxshard.train_step(loss_fn, opt, donate=True)
    new_params, new_state, _ = step(params, state, batch_of(8))
    loss, evaluate = jaxshard.value_and_grad(loss_fn, opt), jaxshard.evaluate(loss_fn, opt)
    words = ("donated", "donate=False")
    refused(ValueError, lambda: step(params, new_state, batch_of(8)), "params", *words)
    refused(ValueError, lambda: step(new_params, state, batch_of(8)), "state", *words)
    refused(ValueError, lambda: loss(params, batch_of(8)), "params", *words)
    refused(ValueError, lambda: evaluate(params, batch_of(8)), "params", *words)
    refused(ValueError, lambda: opt.place(params), "params", *words)
    refused(ValueError, lambda: opt.init(params), "params", *words)
    refused(ValueError, lambda: opt.synchronize(params), "synchronize", *words)
    step(new_params, new_state, batch_of(8))  # what refuses everything would pass the above


def test_an_eager_update_of_arrays_that_were_donated(refused, mesh):
    """On jax 0.10.2 they crash the process."""
    opt = zero2(mesh)
    params = opt.place(params_numpy())
    state = opt.init(params)
    new_params, new_state, _ = jaxshard.train_step(loss_fn, opt, donate=True)(params, state, batch_of(8))
    refused(ValueError, lambda: opt.update(new_params, state, new_params), "update", "state", "donated")
    refused(ValueError, lambda: opt.update(params, new_state, new_params), "update", "gradients", "donated")
    refused(ValueError, lambda: opt.update(new_params, new_state, params), "update", "params", "donated")
    opt.update(new_params, new_state, new_params)


def test_a_deleted_batch(refused, mesh):
    opt = zero2(mesh)
    params, batch = opt.place(params_numpy()), jaxshard.shard_batch(batch_of(8), opt)
    state = opt.init(params)
    batch["y"].delete()
    refused(ValueError, lambda: jaxshard.train_step(loss_fn, opt)(params, state, batch), "batch", "y")


def test_a_deleted_further_argument(refused, mesh):
    """On jax 0.10.2 it crashes the process."""
    opt, scale = zero2(mesh), jnp.ones(3)

    def loss(params, batch, scale):
        return loss_fn(params, batch) * scale.mean()

    params = opt.place(params_numpy())
    state = opt.init(params)
    scale.delete()
    for fn in (jaxshard.value_and_grad(loss, opt), jaxshard.evaluate(loss, opt)):
        refused(ValueError, lambda: fn(params, batch_of(8), scale), "argument")
    refused(ValueError, lambda: jaxshard.train_step(loss, opt)(params, state, batch_of(8), scale), "argument")


def test_synchronize_of_what_lies_on_no_mesh(refused, mesh):
    opt = zero2(mesh)
    refused(ValueError, lambda: opt.synchronize({"a": {"b": np.ones(3)}}), "a/b", "place")


def test_init_and_place_inside_shard_map(refused, mesh):
    opt = zero2(mesh)
    inside = jax.shard_map(opt.init, mesh=mesh, in_specs=P(), out_specs=P())
    refused(ValueError, lambda: jax.eval_shape(inside, params_numpy()), "init", "outside")


# Loss functions.


def test_a_loss_that_is_no_function(refused, mesh):
    opt = zero2(mesh)
    for make in (jaxshard.train_step, jaxshard.value_and_grad, jaxshard.evaluate):
        refused(TypeError, lambda make=make: make(3, opt), make.__name__, "the loss 3", "(params, batch, *args)")


def test_a_line_search_without_its_function(refused, mesh):
    step = jaxshard.train_step(loss_fn, jaxshard.zero2(optax.lbfgs(), mesh))
    words = ("'value_fn'", 'extra=lambda params, batch: {"value_fn": lambda params: loss_fn(params, batch)}')
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, params_numpy()))
    state = loss_of(step).setup.abstract_state(shapes)
    refused(TypeError, lambda: step.lower(shapes, state, batch_of(8)), *words)


def test_a_loss_with_the_number_of_all_rows_in_it_is_told_how_many_it_gets(mesh):
    opt, params = zero2(mesh), params_numpy()
    rows = 8 * mesh.size
    with pytest.raises(TypeError, match="reshape") as error:
        jaxshard.evaluate(lambda p, b: b["x"].reshape(rows, -1).mean(), opt, loss_view="local")(params, batch_of(rows))
    assert any(f"loss_fn sees 8 of the batch's {rows} rows" in note for note in error.value.__notes__)


def test_a_loss_of_the_wrong_form(refused, mesh):
    opt, params, batch = zero2(mesh), params_numpy(), batch_of(8)

    def residual(params, batch):
        return batch["x"] @ params["w"] - batch["y"]

    for loss, options, words in [
        (residual, {}, ("scalar", "[8, 16]", "mean")),
        (lambda p, b: (loss_fn(p, b), {}), {}, ("tuple", "has_aux")),
        (loss_fn, {"has_aux": True}, ("has_aux", "(loss, aux)")),
        (lambda p, b: (loss_fn(p, b), 1, 2), {"has_aux": True}, ("(loss, aux)", "a tuple of 3")),
        (loss_fn, {"weighted": True}, ("weighted", "(loss_sum, weight)")),
        (lambda p, b: (loss_fn(p, b), b["x"]), {"weighted": True}, ("weight", "scalar", "(8, 4)")),
        (
            lambda p, b: (loss_fn(p, b), p["w"].sum()),
            {"weighted": True},
            ("stop_gradient(weight)", "loss_sum / weight"),
        ),
        (lambda p, b: jnp.int32(loss_fn(p, b)), {}, ("floating", "int32")),
        (lambda p, b: None, {}, ("loss_fn", "None")),
        (lambda p, b: jnp.sum(p["w"]) * 1j, {}, ("floating", "complex64")),
    ]:
        fn = jaxshard.value_and_grad(loss, opt, **options)
        refused(TypeError, lambda: jax.eval_shape(fn, params, batch), "loss_fn", *words)


def test_whole_number_aux_that_depends_on_the_batch(refused, mesh):
    def loss(params, batch):
        return loss_fn(params, batch), {"right": jnp.sum(batch["y"] > 0)}

    fn = jaxshard.value_and_grad(loss, zero2(mesh), has_aux=True, loss_view="local")
    refused(TypeError, lambda: jax.eval_shape(fn, params_numpy(), batch_of(8)), "right", "int32", "floating")


def test_a_scan_whose_carry_starts_as_a_constant_beside_a_tensor_axis(refused):
    """There types are checked; what JAX says of it names no cure."""
    opt = zero2(jaxshard.make_mesh(tensor=2), specs=[("^w$", P(None, "tensor"))])

    def loss(params, batch):
        carry, _ = jax.lax.scan(lambda c, x: (c + jnp.sum(x @ params["w"]), None), jnp.zeros(()), batch["x"])
        return carry

    fn = jaxshard.value_and_grad(loss, opt)
    refused(TypeError, lambda: jax.eval_shape(fn, params_numpy(), batch_of(8)), "loss_fn", "carry", "jax.lax.pcast")
