"""Meshes and params of strangers: other names of axes, copies over one of them, axes that nothing uses, boxes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracle import assert_close, batches, hostile_params, model_loss, one_device, sharded

import jaxshard
from jaxshard.optimizer.optimizer import setup_of

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
quiet = pytest.mark.filterwarnings("ignore:.*cannot be sharded:UserWarning")


def mesh_of(kind=AxisType.Auto, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


@quiet
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_two_axes_of_ones_own_are_hsdp(kind, x64):
    params, steps = hostile_params(float), batches(3)
    mesh = mesh_of(kind, dp=2, fsdp=4)
    for make in (jaxshard.hsdp, jaxshard.zero3, jaxshard.zero2):
        opt = make(TX, mesh, data_axes="fsdp", replica_axes="dp", min_shard_size=1)
        for got, want in zip(
            sharded(model_loss, opt, params, steps), one_device(model_loss, TX, params, steps), strict=True
        ):
            assert_close(got, want, 1e-12)
    assert setup_of(opt, "test").batch_axes == ("dp", "fsdp")
    assert jaxshard.shard_batch(steps[0], opt)["x"].sharding.spec == P(("dp", "fsdp"))
    named = jaxshard.hsdp(TX, jaxshard.make_mesh(replica=2), min_shard_size=1)
    ours, theirs = (
        jaxshard.inspect.report(
            jaxshard.train_step(model_loss, each).lower(params, each.init(params), steps[0]).compile()
        )
        for each in (named, jaxshard.hsdp(TX, mesh, data_axes="fsdp", replica_axes="dp", min_shard_size=1))
    )
    flags = 0 if kind == AxisType.Auto else 7  # on Explicit axes replicas do not share the look at an update
    assert abs(ours.wire_bytes - theirs.wire_bytes) == flags


def test_replica_axes_that_make_no_sense():
    mesh = mesh_of(dp=2, fsdp=4)
    for options, says in (
        ({"data_axes": "fsdp", "replica_axes": "rep"}, "needs the mesh axis 'rep'.*replica_axes="),
        ({"data_axes": "fsdp", "replica_axes": "fsdp"}, "each axis only once"),
        ({"data_axes": "fsdp", "replica_axes": ()}, "is empty"),
        ({"data_axes": "fsdp"}, "needs the mesh axis 'replica'"),
    ):
        with pytest.raises(ValueError, match=says):
            jaxshard.hsdp(TX, mesh, **options)


def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


PARAMS, BATCH = {"w": np.ones((8, 64), "f")}, {"x": np.ones((16, 8), "f")}


def test_axes_that_nothing_uses_are_warned_of(recwarn):
    mesh = jaxshard.make_mesh(tensor=4)
    with pytest.warns(UserWarning, match=r"mesh axes {'tensor': 4} do the same work.*data_axes="):
        jaxshard.value_and_grad(loss, jaxshard.zero2(TX, mesh))(PARAMS, BATCH)
    recwarn.clear()
    for opt in (
        jaxshard.zero2(TX, mesh, data_axes=("data", "tensor")),
        jaxshard.zero2(TX, mesh, replica_axes="tensor"),
        jaxshard.zero2(TX, mesh, specs={"w": P(None, "tensor")}, auto_axes="tensor"),
    ):
        jaxshard.value_and_grad(loss, opt)(PARAMS, BATCH)

    def over_sequence(params, batch):
        return jax.lax.pmean(loss(params, batch), "tensor")

    jaxshard.value_and_grad(over_sequence, jaxshard.zero2(TX, mesh))(PARAMS, BATCH)
    assert not recwarn.list


def test_manual_axes_are_refused_by_name():
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(AxisType.Manual,))
    with pytest.raises(ValueError, match=r"the mesh's axes \['data'\] are Manual, as inside a shard_map"):
        jaxshard.zero2(TX, mesh)


def test_an_axis_that_is_not_there_names_what_is_near_or_nothing():
    mesh = jaxshard.make_mesh(tensor=2)
    for axis, hint in (("tp", ""), ("tensr", "; did you mean 'tensor'?")):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            jaxshard.zero2(TX, mesh, specs={"w": P(axis)}).layout(PARAMS)
        assert str(caught.value) == (
            f"specs: w names the axis {axis!r}; the mesh has ('pipeline', 'replica', 'data', 'tensor'){hint}"
        )


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_place_takes_shapes_as_init_does(strategy):
    opt = getattr(jaxshard, strategy)(TX, jaxshard.make_mesh(), min_shard_size=1)
    shapes = opt.place(jax.eval_shape(lambda: PARAMS))
    placed = opt.place(PARAMS)
    assert shapes["w"] == jax.ShapeDtypeStruct((8, 64), np.float32, sharding=placed["w"].sharding)
    lowered = jaxshard.train_step(loss, opt).lower(shapes, opt.init(shapes), BATCH)
    assert lowered.as_text() == jaxshard.train_step(loss, opt).lower(placed, opt.init(placed), BATCH).as_text()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_params_in_8_bits_are_refused(dtype):
    opt = jaxshard.zero2(TX, jaxshard.make_mesh())
    for ask in (opt.place, opt.init, opt.layout):
        with pytest.raises(TypeError, match=f"params: w has dtype {dtype}.*keep params in bfloat16 or float32"):
            ask({"w": jnp.ones((8, 8), dtype)})


class Boxed(nn.Module):
    constrained: bool = False

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(64, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tensor")))(x)
        if self.constrained:
            h = nn.with_logical_constraint(h, ("batch", "mlp"))
        return nn.Dense(8, kernel_init=nn.with_logical_partitioning(nn.initializers.ones, ("mlp", None)))(nn.tanh(h))


RULES = (("batch", "data"), ("mlp", "tensor"))


def of_model(model):
    params = model.init(jax.random.key(0), BATCH["x"])["params"]
    return params, lambda p, b: jnp.mean((model.apply({"params": p}, b["x"]) - b["y"]) ** 2)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_boxed_params_train_as_unboxed_ones(strategy, kind):
    params, loss = of_model(Boxed())
    rng = np.random.default_rng(0)
    steps = [{"x": rng.normal(size=(16, 8)).astype("f"), "y": rng.normal(size=(16, 8)).astype("f")} for _ in range(3)]
    plain = nn.meta.unbox(params)
    want, _, losses = one_device(loss, TX, plain, steps)
    opt = getattr(jaxshard, strategy)(TX, mesh_of(kind, data=8), min_shard_size=1)
    with nn.logical_axis_rules(RULES):
        got, _, got_losses = sharded(loss, opt, params, steps)
    assert jax.tree.structure(got) == jax.tree.structure(params)
    assert_close(nn.meta.unbox(got), want, 1e-4)
    np.testing.assert_allclose(got_losses, losses, rtol=1e-5)


def test_a_constraint_inside_the_loss_is_refused_in_the_local_view_with_a_cure_that_works():
    params, loss = of_model(Boxed(constrained=True))
    batch = {"x": BATCH["x"], "y": np.zeros((16, 8), "f")}
    opt = jaxshard.zero2(TX, jaxshard.make_mesh())
    f = jaxshard.value_and_grad(loss, opt, loss_view="local")
    with nn.logical_axis_rules(RULES), pytest.raises(ValueError, match=r"loss_fn: it constrains.*logical_axis_rules"):
        f(params, batch)
    f(params, batch)  # the cure

    def constrained(p, b):
        return jnp.mean(jax.lax.with_sharding_constraint(b["x"] @ p["w"], P("data")) ** 2)

    laid = jax.sharding.NamedSharding(opt.mesh, P("data"))

    def constrained_to(p, b):
        return jnp.mean(jax.lax.with_sharding_constraint(b["x"] @ p["w"], laid) ** 2)

    with pytest.raises(ValueError, match=r"constrains the layout of a value along the mesh axes .*test_own_meshes.py"):
        jaxshard.value_and_grad(constrained_to, opt, loss_view="local")(PARAMS, BATCH)
    value, _ = jaxshard.value_and_grad(constrained_to, opt, microbatches=2)(PARAMS, BATCH)
    assert float(value) == pytest.approx(float(jnp.mean((BATCH["x"] @ PARAMS["w"]) ** 2)))

    with pytest.raises(ValueError, match="Remove the constraint"), jax.set_mesh(opt.mesh):
        jaxshard.value_and_grad(constrained, opt, loss_view="local")(PARAMS, BATCH)
    with jax.set_mesh(opt.mesh):
        value, _ = jaxshard.value_and_grad(constrained, opt)(PARAMS, BATCH)  # all rows: XLA constrains them
    assert float(value) == pytest.approx(float(jnp.mean((BATCH["x"] @ PARAMS["w"]) ** 2)))

    def over_tensor(p, b):
        return jnp.mean(jax.lax.with_sharding_constraint(b["x"] @ p["w"], P(None, "tensor")) ** 2)

    mesh = jaxshard.make_mesh(tensor=2)
    left = jaxshard.zero2(TX, mesh, specs={"w": P(None, "tensor")}, auto_axes="tensor", min_shard_size=1)
    value, _ = jaxshard.value_and_grad(over_tensor, left)(PARAMS, BATCH)
    assert float(value) == 64
