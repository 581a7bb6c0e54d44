"""What happens to each parameter is decided before the loss is evaluated, and said in the layout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxshard
from jaxshard.loss.arguments import LossOptions
from jaxshard.loss.gradients import LossFunction
from jaxshard.loss.params.leaf_plan import before_the_trace
from jaxshard.loss.per_device import DeviceLoss
from jaxshard.optimizer.optimizer import setup_of

SHAPES = {"base": (1024, 64), "bias": (64,), "blocks": (3, 64, 64), "table": (8192, 1024), "up": (1024, 64)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
BATCH = np.zeros((16, 4), np.int32)


def loss(params, batch):
    x = jaxshard.lookup(params["table"], batch)
    x = x @ (params["up"] + params["base"]) + params["bias"]
    x, _ = lax.scan(lambda x, block: (jnp.tanh(x @ jaxshard.unshard(block)), None), x, params["blocks"])
    return jnp.mean(x**2)


def plans_of(strategy, *, differentiate=True, microbatches=1, loss=loss, **options):
    opt = getattr(jaxshard, strategy)(optax.adam(1e-3), jaxshard.make_mesh(), frozen=["base"], **options)
    asked = LossOptions(loss, setup_of(opt, "test"), False, microbatches, False, True, differentiate)
    return LossFunction(asked).plan(PARAMS, BATCH).leaves


USED = "at its first use: used by add"
WANTED = {
    ("ddp", 1): {
        "base": ("never", "none", "not gathered"),
        "bias": ("never", "after", "not gathered; its gradient is reduced after the backward pass"),
        "blocks": ("never", "at use", "its gradient summed at unshard"),
        "table": ("never", "at use", "its gradient summed at unshard"),
        "up": ("never", "at use", f"its gradient summed {USED}"),
    },
    ("ddp", 2): dict.fromkeys(
        ("bias", "blocks", "table"), ("never", "after", "not gathered; its gradient is reduced after the backward pass")
    )
    | {
        "base": ("never", "none", "not gathered"),
        "up": ("never", "after", "not gathered; its gradient is reduced after the backward pass"),
    },
    ("zero2", 2): {
        "base": ("never", "none", "not gathered"),
        "bias": ("never", "after", "not gathered; its gradient is reduced after the backward pass"),
        "blocks": ("never", "at use", "its gradient scattered at unshard"),
        "table": ("never", "at use", "its rows' gradients exchanged"),
        "up": ("never", "at use", f"its gradient scattered {USED}"),
    },
    ("zero3", 2): {
        "base": ("use", "none", f"gathered {USED}"),
        "bias": ("never", "after", "not gathered; its gradient is reduced after the backward pass"),
        "blocks": ("use", "at use", "gathered at unshard"),
        "table": ("use", "at use", "its rows exchanged where the loss looks them up"),
        "up": ("use", "at use", f"gathered {USED}"),
    },
}


@pytest.mark.parametrize(("strategy", "microbatches"), WANTED)
def test_each_strategy(strategy, microbatches):
    found = plans_of(strategy, microbatches=microbatches)
    said = {plan.leaf.path: (plan.gather, plan.reduce, str(plan)) for plan in found}
    assert said == WANTED[strategy, microbatches]


def test_regathered_once_per_step():
    said = {plan.leaf.path: (plan.gather, plan.reduce, str(plan)) for plan in plans_of("zero3", regather="step")}
    assert said["up"] == ("start", "at use", "gathered once per step")
    assert said["base"] == ("start", "none", "gathered once per step")


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_where_no_gradient_is_asked_for_none_is_reduced(strategy):
    found = plans_of(strategy, differentiate=False)
    assert {plan.reduce for plan in found} == {"none"}
    assert {plan.leaf.path for plan in found if plan.gather == "use"} == (
        {"base", "blocks", "table", "up"} if strategy == "zero3" else set()
    )
    assert {str(plan) for plan in found if plan.gather == "never"} <= {"not gathered"}


def test_a_plan_is_made_before_anything_is_evaluated_and_the_layout_says_it(monkeypatch):
    monkeypatch.setattr(DeviceLoss, "run", None)
    opt = jaxshard.zero3(optax.adam(1e-3), jaxshard.make_mesh(), frozen=["base"])
    layout = jaxshard.train_step(loss, opt).layout(PARAMS, BATCH)
    plans = plans_of("zero3")
    assert layout.gathers == {plan.leaf.names: str(plan) for plan in plans}
    assert all(str(plan) in str(layout) for plan in plans)


def test_plans_are_frozen_and_the_same_each_time():
    first, second = plans_of("zero3"), plans_of("zero3")
    assert first == second
    with pytest.raises(dataclasses.FrozenInstanceError):
        first[0].gather = "start"


def test_before_the_trace_nothing_is_known_of_uses():
    opt = jaxshard.zero3(optax.adam(1e-3), jaxshard.make_mesh())
    options = LossOptions(loss, setup_of(opt, "test"), False, 1, False, True, True)
    plans = before_the_trace(opt.layout(PARAMS).params, options)
    assert [(plan.reason, plan.looks_up) for plan in plans] == [(None, False)] * len(PARAMS)


def test_a_loss_that_closes_over_a_traced_array_is_planned_and_evaluated_alike():
    """What is handed out of the plan's trace may not belong to that trace."""
    opt = jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh())

    @jax.jit
    def gradients(scale, params, batch):
        grads_fn = jaxshard.value_and_grad(lambda p, b: scale * jnp.mean(b.astype(float) @ p["w"]), opt)
        return grads_fn(params, batch)

    params, batch = {"w": np.ones((4, 512), np.float32)}, np.arange(64, dtype=np.int32).reshape(16, 4)
    value, grads = gradients(3.0, opt.place(params), jaxshard.shard_batch(batch, opt))
    want = 3 * np.broadcast_to(batch.mean(0)[:, None], (4, 512)) / 512
    np.testing.assert_allclose(value, 3 * batch.sum(1).mean(), rtol=1e-6)
    np.testing.assert_allclose(grads["w"], want, rtol=1e-6)
