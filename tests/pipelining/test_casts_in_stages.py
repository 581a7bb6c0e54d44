"""Stages that cast their params: those are gathered in that dtype, and results are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from oracle import distances, one_device, sharded

import jaxshard
from jaxshard import plan, unshard

LAYERS, WIDTH, ROWS, M = 8, 32, 96, 4
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be sharded:UserWarning")


def shapes_of(schedule, dtype):
    v = SCHEDULES[schedule]
    blocks = jax.ShapeDtypeStruct((*((v,) if v > 1 else ()), LAYERS // v, WIDTH, WIDTH), dtype)
    return {"blocks": {"w": blocks}, "shared": {"in": jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)}}


def values_of(shapes):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 6, x.dtype), shapes)


def loss_of(schedule, narrow, wide, of_weight, *, outside=False, head=None):
    """Tanh layers in `narrow`, the head in `head`; `of_weight` makes a weight whole and casts it.

    `outside`: all are cast before.
    """

    def first(shared, rows, info):
        return jnp.tanh(rows.astype(narrow) @ of_weight(shared["in"], narrow))

    def stage(blocks, x, info):
        @jax.checkpoint
        def layer(x, w):
            return jnp.tanh(x @ of_weight(w, narrow)), None

        return lax.scan(layer, x, blocks["w"])[0]

    def last(shared, x, rows, info):
        return jnp.mean((x @ of_weight(shared["in"], head or narrow)).astype(wide) ** 2)

    def loss(p, batch):
        p = jax.tree.map(lambda x: x.astype(narrow), p) if outside else p
        how = {"num_microbatches": M, "schedule": schedule, "virtual": SCHEDULES[schedule]}
        return jaxshard.pipeline(stage, first, last, p["blocks"], p["shared"], batch, **how)

    return loss


WAYS = {
    "marked, then cast": (lambda w, dtype: unshard(w).astype(dtype), False),
    "cast, then marked": (lambda w, dtype: unshard(w.astype(dtype)), False),
    "no marks": (lambda w, dtype: w.astype(dtype), False),
    "cast before the pipeline": (lambda w, dtype: unshard(w), True),
}


def opt_of(schedule, mesh, zero, tx):
    stage = P(None, "pipeline") if SCHEDULES[schedule] > 1 else P("pipeline")
    return jaxshard.hybrid(tx, mesh, [("blocks", stage)], zero=zero, min_shard_size=1)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_results_are_those_of_one_device(way, schedule):
    of_weight, outside = WAYS[way]
    loss = loss_of(schedule, jnp.float32, jnp.float64, of_weight, outside=outside)
    params, rng, tx = (
        values_of(shapes_of(schedule, jnp.float64)),
        np.random.default_rng(1),
        optax.sgd(0.3, momentum=0.9),
    )
    batches = [rng.normal(size=(ROWS, WIDTH)) for _ in range(3)]
    wanted = one_device(loss, tx, params, batches)
    for stages, devices, zero, m in [(4, 8, 3, 1), (2, 8, 2, 2), (1, 4, 3, 1), (2, 6, 3, 1)]:
        mesh = jaxshard.make_mesh(devices=jax.devices()[:devices], pipeline=stages)
        found = sharded(loss, opt_of(schedule, mesh, zero, tx), params, batches, microbatches=m)
        far = max(jax.tree.leaves(distances(found, wanted)))
        assert far < 1e-6, (stages, devices, zero, m, far)


def sent(schedule, way, narrow, head=None):
    """(the bytes that a step sends along data, how params are gathered)."""
    of_weight, outside = WAYS[way]
    loss = loss_of(schedule, narrow, jnp.float32, of_weight, outside=outside, head=head)
    mesh = plan.Candidate("zero3", data=4, pipeline=2).mesh(plan.Target(plan.chip("h100"), 8, 80e9))
    step = jaxshard.train_step(loss, opt_of(schedule, mesh, 3, optax.sgd(0.3)))
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    shapes = shapes_of(schedule, jnp.float32)
    along = plan.predict(step, shapes, batch).costs.wire_bytes_by_axes()
    return along["data"], step.layout(shapes, batch).gathers


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_sent_has_the_dtype_that_the_stages_compute_in(way, schedule):
    narrow, how = sent(schedule, way, jnp.bfloat16)
    wide, _ = sent(schedule, way, jnp.float32)
    assert narrow / wide == pytest.approx(1 / 2, rel=0.001)
    where = "at its first use: used by dot_general" if way == "no marks" else "at unshard"
    assert set(how.values()) == {f"gathered in bfloat16 {where}"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shared_params_that_the_head_takes_wide_are_gathered_wide(schedule):
    _, how = sent(schedule, "marked, then cast", jnp.bfloat16, head=jnp.float32)
    assert how["blocks", "w"] == "gathered in bfloat16 at unshard"
    assert how["shared", "in"] == "gathered at unshard"
