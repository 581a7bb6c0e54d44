"""A pipeline averages its microbatches' losses: judged on every mesh, and right for sums with weights."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from oracle import assert_close

import jaxshard

LAYERS, WIDTH, WORDS, ROWS = 8, 8, 8, 16
MESHES = {"4 stages": ({"pipeline": 4}, 8), "2 stages": ({"pipeline": 2}, 8), "1 device": ({}, 1), "8 data": ({}, 8)}
MESHES |= {"no data": ({"pipeline": 2}, 2), "tensor": ({"pipeline": 2, "tensor": 2}, 8)}


def params(virtual=1):
    rng = np.random.default_rng(0)
    w = rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 3
    shared = {"table": rng.normal(size=(WORDS, WIDTH)), "head": rng.normal(size=(WIDTH, WORDS))}
    return {"blocks": w.reshape(virtual, -1, WIDTH, WIDTH) if virtual > 1 else w, "shared": shared}


def batch():
    rng = np.random.default_rng(1)
    words = {name: rng.integers(0, WORDS, (ROWS, 3)) for name in ("x", "y")}
    mask = (rng.random((ROWS, 3)) < 0.6).astype(float)
    mask[:, 0] = 1
    return words | {"mask": mask}


def first(shared, b, info):
    return shared["table"][b["x"]]


def stage(blocks, x, info):
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, blocks)[0]


def normalized(blocks, x, info):
    return stage(blocks, (x - x.mean(0)) / (1 + x.std(0)), info)


def nll(shared, x, b):
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ shared["head"]), b["y"][..., None], -1)[..., 0]


def mean(shared, x, b, info):
    return nll(shared, x, b).mean()


def by_row(shared, x, b, info):
    return ((nll(shared, x, b) * b["mask"]).sum(1) / b["mask"].sum(1)).mean() + 0.01 * (shared["head"] ** 2).sum()


def weighted(shared, x, b, info):
    return (nll(shared, x, b) * b["mask"]).sum(), b["mask"].sum()


def masked(shared, x, b, info):
    total, weight = weighted(shared, x, b, info)
    return total / weight


def summed(shared, x, b, info):
    return nll(shared, x, b).sum()


def over_devices(shared, x, b, info):
    total, weight = weighted(shared, x, b, info)
    return jax.lax.pmean(total, "data") / jax.lax.pmean(weight, "data")


def one_mean(shared, x, b, info):
    return weighted(shared, x, b, info)[0], jnp.ones(())


def made(last, mesh, schedule="1f1b", stage=stage, num_microbatches=2, **options):
    sizes, devices = MESHES[mesh]
    virtual = 2 if schedule == "interleaved" else 1
    mesh = jaxshard.make_mesh(devices=jax.devices()[:devices], **sizes)
    spec = P(None, "pipeline") if virtual > 1 else P("pipeline")
    specs = [("blocks", spec)] if "pipeline" in sizes else []
    opt = jaxshard.hybrid(optax.sgd(0.1), mesh, specs, zero=2, min_shard_size=1)

    def loss_fn(p, b):
        return jaxshard.pipeline(
            stage,
            first,
            last,
            p["blocks"],
            p["shared"],
            b,
            num_microbatches=num_microbatches,
            schedule=schedule,
            virtual=virtual,
        )

    return jaxshard.value_and_grad(loss_fn, opt, **options), opt.place(params(virtual))


def on_one_device(last):
    def loss_fn(p, b):
        found = last(p["shared"], stage(p["blocks"], first(p["shared"], b, None), None), b, None)
        return found[0] / found[1] if isinstance(found, tuple) else found

    return jax.value_and_grad(loss_fn)(params(), batch())


def found(last, mesh, **options):
    """((loss, gradients), the warnings about rows, the layout's last line)."""
    grads_fn, placed = made(last, mesh, **options)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        results = grads_fn(placed, batch())
        line = grads_fn.layout(placed, batch()).loss_rows
    return results, [str(x.message) for x in heard if issubclass(x.category, jaxshard.RowsWarning)], line


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("last", [mean, by_row, weighted])
def test_means_and_weighted_sums_equal_one_device(x64, last, schedule, mesh):
    got, heard, line = found(last, mesh, schedule=schedule, weighted=last is weighted)
    assert_close(got, on_one_device(last), 1e-12)
    assert not heard
    assert line in ("the loss is a mean over rows", "all rows are on one device, so any loss is correct")


def test_virtual_stages_with_weights(x64):
    (loss, grads), heard, _ = found(weighted, "4 stages", schedule="interleaved", weighted=True, num_microbatches=4)
    grads["blocks"] = grads["blocks"].reshape(LAYERS, WIDTH, WIDTH)
    assert_close((loss, grads), on_one_device(weighted), 1e-12)
    assert not heard


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("last", [masked, summed])
def test_what_depends_on_the_number_of_microbatches_is_told(x64, last, schedule, mesh):
    got, heard, _ = found(last, mesh, schedule=schedule)
    assert not np.isclose(float(got[0]), float(on_one_device(last)[0]), rtol=1e-6), "this case should differ"
    assert len(heard) == 1
    assert "a pipeline averages the losses of its microbatches" in heard[0]
    assert "test_rows.py:" in heard[0]
    assert "weighted=True" in heard[0]
    assert not found(last, mesh, schedule=schedule, loss_view="local")[1]


@pytest.mark.parametrize("mesh", ["2 stages", "no data", "8 data"])
def test_a_statistic_of_a_microbatch_is_told(mesh):
    heard = found(mean, mesh, stage=normalized)[1]
    assert len(heard) == 1
    assert "a pipeline averages" in heard[0]


def test_sums_over_devices_are_still_sums_of_a_microbatch():
    assert "a pipeline averages" in found(over_devices, "2 stages")[1][0]


def test_a_sum_whose_weight_is_not_one_is_told():
    assert found(one_mean, "2 stages", weighted=True)[1]


def test_masks_by_microbatch_and_constants_of_the_loss(x64):
    """Keys folded with the microbatch draw rows apart; what functions close over is followed, too."""

    def dropped(blocks, x, info):
        key = jax.random.fold_in(jax.random.key(0), info.microbatch)
        return stage(blocks, x * jax.random.bernoulli(key, 0.9, x.shape), info)

    assert found(mean, "2 stages", stage=dropped)[2] == "the loss is a mean over rows"
    opt = jaxshard.hybrid(optax.sgd(0.1), jaxshard.make_mesh(pipeline=2), [("blocks", P("pipeline"))], zero=2)

    def scaled(scale_of):
        def loss_fn(p, b):
            scale = jax.lax.stop_gradient(scale_of(b))
            scaled_stage = lambda blocks, x, info: stage(blocks, x * scale, info)  # noqa: E731
            return jaxshard.pipeline(scaled_stage, first, mean, p["blocks"], p["shared"], b, num_microbatches=2)

        return jaxshard.value_and_grad(loss_fn, opt).layout(opt.place(params()), batch()).loss_rows

    assert scaled(lambda b: jnp.cos(jnp.arange(WIDTH) * 0.1)) == "the loss is a mean over rows"
    assert "not a mean over rows" in scaled(lambda b: b["mask"].mean())


@pytest.mark.parametrize(
    ("last", "text"),
    [
        (lambda s, x, b, i: (nll(s, x, b).sum(), b["mask"]), "the weight that last_fn returns must be a scalar"),
        (lambda s, x, b, i: [nll(s, x, b).sum(), b["mask"].sum()], "got a list"),
        (lambda s, x, b, i: (nll(s, x, b), b["mask"].sum()), "must return a floating scalar"),
    ],
)
@pytest.mark.parametrize("mesh", ["2 stages", "1 device"])
def test_what_is_no_pair_of_scalars_is_refused(mesh, last, text):
    grads_fn, placed = made(last, mesh, weighted=True)
    with pytest.raises(TypeError, match=text):
        grads_fn(placed, batch())


def test_a_pair_without_weighted_says_so():
    grads_fn, placed = made(weighted, "2 stages")
    with pytest.raises(TypeError, match="set has_aux or weighted"):
        grads_fn(placed, batch())
