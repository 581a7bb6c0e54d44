"""A user's own step that sends far more than ZeRO has to is told of, with the line and the cure."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard

WIDTH, ROWS, LAYERS = 256, 4096, 3
PARAMS = {"up": jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), jnp.float32)}
PARAMS |= {"down": jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def report_of(step, *shapes):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        report = jaxshard.inspect.report(step.lower(*shapes).compile())
    return report, [str(one.message) for one in found if str(one.message).startswith("inspect.report: ")]


def parts(strategy):
    mesh = jaxshard.make_mesh()
    opt = getattr(jaxshard, strategy)(optax.sgd(0.1, momentum=0.9), mesh)
    params = opt.place(PARAMS)
    rows = jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype, sharding=NamedSharding(mesh, P("data")))
    return mesh, opt, params, opt.init(params), rows


def loss_with(at_block):
    def loss(params, x):
        def block(x, layer):
            return at_block(x) + jnp.tanh(at_block(x) @ layer["up"]) @ layer["down"], None

        return jnp.mean(jax.lax.scan(block, x, params)[0] ** 2)

    return loss


def own(opt, loss):
    @jax.jit
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def with_a_key(step):
    return jax.jit(lambda params, state, x, key: step(params, state, x + jax.random.normal(key, x.shape)))


@pytest.mark.parametrize("has_key", [False, True])
def test_activations_laid_out_by_features_are_told_of_with_line_and_cure(has_key):
    mesh, opt, *shapes = parts("zero3")
    by_features = loss_with(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "data"))))
    step = own(opt, by_features)
    if has_key:  # as a last argument, on all devices
        step, shapes = with_a_key(step), [*shapes, jax.random.key(0)]
    report, told = report_of(step, *shapes)
    assert len(told) == 1
    assert report.wire_bytes > 2 * 3 * 7 / 8 * 4 * LAYERS * 8 * WIDTH**2
    for words in (
        "test_unusual_traffic.py:",
        "with_sharding_constraint",
        "jaxshard.value_and_grad",
        "times what ZeRO-3 sends",
    ):
        assert words in told[0]


def test_the_cure_cures():
    mesh, opt, *shapes = parts("zero3")
    by_rows = loss_with(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data"))))
    assert report_of(own(opt, by_rows), *shapes)[1] == []


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_jaxshards_own_collectives_are_not_judged_however_many_microbatches(strategy):
    _, opt, *shapes = parts(strategy)
    step = jaxshard.train_step(loss_with(lambda x: x), opt, microbatches=8)
    assert report_of(step, *shapes)[1] == []


def test_programs_that_are_no_steps_are_not_judged():
    mesh = jaxshard.make_mesh()
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    moved = jax.jit(lambda scale, x: scale * x, out_shardings=whole)
    shapes = [
        jax.ShapeDtypeStruct((), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((ROWS, WIDTH), "f4", sharding=rows),
    ]
    report, told = report_of(moved, *shapes)
    assert report.wire_bytes > 2**20
    assert len(told) <= 1  # it has the arguments of a step
    one = jax.jit(lambda x: x, out_shardings=whole)
    assert report_of(one, shapes[1])[1] == []
