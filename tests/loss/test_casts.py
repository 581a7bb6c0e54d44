"""A loss that casts its params, in whatever way: it gathers and reduces in that dtype, and results stay the same."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from oracle import distances, one_device, sharded

import jaxshard
from jaxshard import plan, unshard

LAYERS, WIDTH, ROWS = 3, 32, 48

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be sharded:UserWarning")


def shapes_of(stacked, dtype):
    w = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH) if stacked else (WIDTH, WIDTH), dtype)
    return {"w": w} if stacked else {f"w{i}": w for i in range(LAYERS)}


def values_of(shapes):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 6, x.dtype), shapes)


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


# Ways to cast: (a loss of (params, batch, dtype), whether params are stacked). All compute tanh layers.


def layer(x, w):
    return jnp.tanh(x @ w)


def scanned(of_layer, of_params=lambda p, _: p):
    def loss(p, batch, dtype):
        body = jax.checkpoint(lambda x, w: (layer(x, of_layer(w, dtype)), None))
        return lax.scan(body, batch.astype(dtype), of_params(p, dtype)["w"])[0]

    return loss


def in_a_list(of_layer, of_params=lambda p, _: p):
    def loss(p, batch, dtype):
        x, p = batch.astype(dtype), of_params(p, dtype)
        for i in range(LAYERS):
            x = jax.checkpoint(lambda x, w: layer(x, of_layer(w, dtype)))(x, p[f"w{i}"])
        return x

    return loss


def of_linen(p, batch, dtype):
    x = batch.astype(dtype)
    for i in range(LAYERS):
        x = jnp.tanh(nn.Dense(WIDTH, use_bias=False, dtype=dtype).apply({"params": {"kernel": p[f"w{i}"]}}, x))
    return x


def of_nnx(p, batch, dtype):
    x = batch.astype(dtype)
    dense = nnx.Linear(WIDTH, WIDTH, use_bias=False, dtype=dtype, rngs=nnx.Rngs(0))
    for i in range(LAYERS):
        dense.kernel = nnx.Param(p[f"w{i}"])
        x = jnp.tanh(dense(x))
    return x


def sliced(p, batch, dtype):
    x = batch.astype(dtype)
    for i in range(LAYERS):
        x = layer(x, p["w"][i].astype(dtype))
    return x


def turned(p, batch, dtype):
    x = batch.astype(dtype)
    for i in range(LAYERS):
        x = layer(x, p[f"w{i}"].reshape(4, -1, WIDTH).reshape(WIDTH, WIDTH).T.astype(dtype).T)
    return x


def marked_first(w, dtype):
    return unshard(w).astype(dtype)


def cast_first(w, dtype):
    return unshard(w.astype(dtype))


WAYS = {
    "marked, then cast, in a scan": (scanned(marked_first), True),
    "cast, then marked, in a scan": (scanned(cast_first), True),
    "all cast before a scan": (scanned(lambda w, _: unshard(w), cast), True),
    "marked, then cast, in a list": (in_a_list(marked_first), False),
    "all cast before a list": (in_a_list(lambda w, _: unshard(w), cast), False),
    "all cast, no marks": (in_a_list(lambda w, _: w, cast), False),
    "cast by a jitted function": (in_a_list(jax.jit(lambda w, dtype: w.astype(dtype), static_argnums=1)), False),
    "flax.linen": (of_linen, False),
    "flax.nnx": (of_nnx, False),
    "slices cast": (sliced, True),
    "transposes cast": (turned, False),
}


def loss_of(way, dtype, wide=jnp.float32):
    fn, _ = WAYS[way]
    return lambda p, batch: jnp.mean(fn(p, batch, dtype).astype(wide) ** 2)


def opt_of(strategy, mesh, **options):
    return getattr(jaxshard, strategy)(optax.sgd(0.3, momentum=0.9), mesh, min_shard_size=1, **options)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("view", ["local", "global"])
def test_results_are_those_of_one_device(way, view):
    params = values_of(shapes_of(WAYS[way][1], jnp.float64))
    rng = np.random.default_rng(1)
    batches = [rng.normal(size=(ROWS, WIDTH)) for _ in range(3)]
    loss = loss_of(way, jnp.float32, jnp.float64)
    wanted = one_device(loss, optax.sgd(0.3, momentum=0.9), params, batches)
    for strategy, devices, m in [("zero3", 4, 1), ("zero2", 8, 2), ("ddp", 2, 1), ("zero3", 8, 3), ("zero1", 4, 1)]:
        mesh = jaxshard.make_mesh(devices=jax.devices()[:devices])
        found = sharded(loss, opt_of(strategy, mesh), params, batches, microbatches=m, loss_view=view)
        far = max(jax.tree.leaves(distances(found, wanted)))
        assert far < 1e-6, (strategy, devices, m, far)


def sent(loss, shapes, strategy="zero3", step=None, **options):
    target = plan.Target(plan.chip("h100"), 8, 80e9)
    opt = opt_of(strategy, plan.Candidate(strategy, data=8).mesh(target), **options)
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return plan.predict(jaxshard.train_step(loss, opt, **(step or {})), shapes, batch).wire_bytes


def each_way(way, dtype, **options):
    """What a step sends, by how much it is of what it sends for params that are not cast."""
    shapes = shapes_of(WAYS[way][1], jnp.float32)
    return sent(loss_of(way, dtype), shapes, **options) / sent(loss_of(way, jnp.float32), shapes, **options)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_sent_has_the_dtype_that_the_loss_computes_in(way):
    assert each_way(way, jnp.bfloat16) == pytest.approx(1 / 2, rel=0.01)
    assert each_way(way, jnp.bfloat16, step={"microbatches": 2}) == pytest.approx(1 / 2, rel=0.01)
    assert each_way(way, jnp.bfloat16, strategy="ddp") == pytest.approx(1 / 2, rel=0.01)
    assert each_way(way, jnp.bfloat16, regather="step") == pytest.approx(1 / 2, rel=0.01)
    # zero2 gathers updates, too, in the params' dtype.
    assert each_way(way, jnp.bfloat16, strategy="zero2") == pytest.approx(3 / 4, rel=0.01)


@pytest.mark.parametrize("way", ["cast, then marked, in a scan", "flax.linen"])
def test_sums_stay_wide_where_that_is_asked_for_or_a_sum_could_overflow(way):
    gathers = 2 if "scan" in way else 1
    as_wide = (gathers / 2 + 1) / (gathers + 1)
    assert each_way(way, jnp.bfloat16, reduce_dtype=jnp.float32) == pytest.approx(as_wide, rel=0.01)
    assert each_way(way, jnp.float16) == pytest.approx(as_wide, rel=0.01)


@pytest.mark.parametrize(
    "also",
    [
        lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)),
        lambda p: sum(jnp.sum(x.astype(jnp.float16)) for x in jax.tree.leaves(p)),
        lambda p: sum(jnp.sum(lax.fori_loop(0, 2, lambda _, x: x * 2, x)) for x in jax.tree.leaves(p)),
    ],
)
def test_params_that_are_also_used_otherwise_are_sent_as_they_are(also):
    shapes = shapes_of(stacked=False, dtype=jnp.float32)
    of_cast = loss_of("all cast, no marks", jnp.bfloat16)
    plain = sent(lambda p, batch: also(p) + loss_of("all cast, no marks", jnp.float32)(p, batch), shapes)
    assert sent(lambda p, batch: also(p) + of_cast(p, batch), shapes) == plain


def test_the_layout_says_in_which_dtype_params_are_gathered_and_gradients_summed():
    opt = opt_of("zero3", jaxshard.make_mesh(devices=jax.devices()[:4]))
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    step = jaxshard.train_step(loss_of("cast, then marked, in a scan", jnp.bfloat16), opt)
    text = str(step.layout(shapes_of(stacked=True, dtype=jnp.float32), batch))
    assert "gathered in bfloat16 at unshard" in text
    assert "added up in bfloat16, as they are computed; reduce_dtype=jnp.float32" in text


# Marks that do nothing.


def penalized(p, batch):
    return loss_of("marked, then cast, in a scan", jnp.bfloat16)(p, batch) + jnp.sum(p["w"] ** 2)


def lower(loss, strategy, devices=4, width=512):
    opt = opt_of(strategy, jaxshard.make_mesh(devices=jax.devices()[:devices]))
    params = opt.place({"w": jax.ShapeDtypeStruct((LAYERS, width, width), jnp.float32)})
    batch = jax.ShapeDtypeStruct((ROWS, width), jnp.float32)
    jaxshard.train_step(loss, opt).lower(params, opt.init(params), batch)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_mark_that_moves_nothing_is_told_with_its_line_and_the_cure(strategy):
    told = r"unshard: w is marked at .*_casts.py:\d+, but not gathered or reduced there: .*integer_pow .*_casts.py:\d+"
    with pytest.warns(UserWarning, match=f"{told}.*w = jaxshard.unshard"):
        lower(penalized, strategy)


def test_layers_that_are_cut_have_a_cure_of_their_own():
    with pytest.warns(
        UserWarning, match="sharded on the dim that a scan iterates over.*make one divisible by the devices"
    ):
        lower(loss_of("cast, then marked, in a scan", jnp.bfloat16), "zero3", devices=3)


def test_marks_that_work_and_those_of_ddp_are_not_told():
    lower(penalized, "ddp")
    lower(loss_of("all cast before a scan", jnp.bfloat16), "zero3")


def test_marks_that_move_little_are_not_told():
    lower(penalized, "zero3", width=64)


@pytest.mark.parametrize(
    "of_layer",
    [
        lambda w, _: unshard(w * 2.0),
        lambda w, _: unshard(jnp.tanh(w.T)),
        lambda w, _: unshard(w.reshape(4, -1, 512).reshape(512, 512)),
    ],
)
def test_a_mark_that_comes_after_something_else_is_told(of_layer):
    loss = scanned(of_layer)
    with pytest.warns(UserWarning, match="unshard: w is marked at .*A mark counts only if unshard comes first"):
        lower(lambda p, batch: jnp.mean(loss(p, batch, jnp.float32) ** 2), "zero3")


def test_the_layout_has_no_sums_of_tables_whose_rows_are_exchanged():
    """Each device adds up its own rows' gradients in the param's dtype."""
    opt = opt_of("zero3", jaxshard.make_mesh(devices=jax.devices()[:4]))
    ids = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    step = jaxshard.train_step(lambda p, ids: jnp.mean(p["w"].astype(jnp.bfloat16)[ids].astype(jnp.float32) ** 2), opt)
    text = str(step.layout({"w": jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)}, ids))
    assert "its rows exchanged" in text
    assert "added up in bfloat16" not in text


@pytest.mark.parametrize("reduce_dtype", [None, jnp.float32])
def test_the_layout_says_that_xla_adds_up_in_the_computed_dtype_where_the_loss_sees_all_rows(reduce_dtype):
    opt = opt_of("zero3", jaxshard.make_mesh(devices=jax.devices()[:4]), reduce_dtype=reduce_dtype)
    step = jaxshard.train_step(loss_of("cast, then marked, in a scan", jnp.bfloat16), opt, loss_view="global")
    text = str(step.layout(shapes_of(stacked=True, dtype=jnp.float32), jax.ShapeDtypeStruct((ROWS, WIDTH), "f")))
    assert "over devices XLA adds gradients up in bfloat16, as the loss computes them" in text
