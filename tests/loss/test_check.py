"""`check` finds wrong losses by numbers, on any mesh; right ones stay right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from losses import CASES, batch_of, weights

import jaxshard

TX = optax.sgd(0.1)
ASKED = [
    *("cross_entropy", "with_l2", "advantages_within_pairs", "sum_and_weights", "batch_norm_over_devices"),
    *("contrastive_with_all_negatives", "a_sum", "sum_over_a_fixed_number", "masked_mean", "batch_norm", "contrastive"),
    *("sum_over_the_rows_of_all_devices", "weights_by_place", "mean_and_count"),
]


def singles(tree):
    return jax.tree.map(lambda x: x.astype("f") if x.dtype == float else x, tree)


def opt_of(strategy="zero3", n=8, **options):
    return getattr(jaxshard, strategy)(TX, jaxshard.make_mesh(devices=jax.devices()[:n]), min_shard_size=1, **options)


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("rows", [32, 16])
def test_right_and_wrong_losses(name, rows):
    case = CASES[name]
    found = jaxshard.check(case.loss, opt_of(), singles(weights()), singles(batch_of(rows)), weighted=case.weighted)
    assert found.ok == case.right, found
    assert "all rows on one device" in found.differences
    if not case.right:
        assert case.says in found.causes[0]


def test_one_row_on_each_device():
    """Then each row is its device's whole batch, so that other orders change nothing: two meet on each device."""
    for name in ("cross_entropy", "batch_norm", "contrastive"):
        case = CASES[name]
        found = jaxshard.check(case.loss, opt_of("zero2"), singles(weights()), singles(batch_of(8)))
        assert found.ok == case.right, found
        if not case.right:
            assert found.differences["each row twice, on two devices"].exceeds(found.tolerance)


def test_a_loss_that_takes_no_half_of_its_rows():
    """It is compared with twice as many; one that takes no other number at all is told so."""

    def by_halves(p, b):
        h = (b["x"] @ p["w"]).reshape(2, b["x"].shape[0] // 2, -1)
        return sum(jnp.sum(h[i] ** 2) for i in (0, 1)) / b["x"].shape[0]

    def of_two_rows(p, b):
        return jnp.mean((b["x"].reshape(2, weights()["w"].shape[0]) @ p["w"]) ** 2)

    params, batch = singles(weights()), singles(batch_of(16))
    found = jaxshard.check(by_halves, opt_of(), params, batch)
    assert found.ok, found
    assert "each row twice, on two devices" in found.differences
    found = jaxshard.check(of_two_rows, opt_of(), params, batch)
    assert found.ok, found
    assert [note.partition(":")[0] for note in found.notes] == [
        "not compared with other numbers of rows on each device",
        "not compared with one device",
    ]


def test_raises_if_asked_with_the_report_as_its_text():
    with pytest.raises(ValueError, match=r"NOT a mean over rows.*\n.*each device") as error:
        jaxshard.check(CASES["batch_norm"].loss, opt_of(), singles(weights()), singles(batch_of(32)), raises=True)
    report = error.value.report
    assert str(report) == str(error.value)
    assert "likely: `reduce_sum` at tests/programs/losses.py:" in str(report)
    path, far = report.differences["all rows on one device"].worst
    assert path == "w"
    assert far > 0.1


def test_causes_that_no_trace_shows():
    """A custom derivative, a callback: the trace says nothing of them, the numbers do."""

    @jax.custom_vjp
    def mean(x):
        return jnp.mean(x)

    mean.defvjp(lambda x: (jnp.mean(x), x), lambda x, g: (g * jnp.ones_like(x),))
    batch = singles(batch_of(32))
    found = jaxshard.check(lambda p, b: mean((b["x"] @ p["w"]) ** 2), opt_of(), singles(weights()), batch)
    assert not found.ok
    assert max(each.loss for each in found.differences.values()) < 1e-6
    assert any("gradients" in cause or "sum over rows" in cause for cause in found.causes)

    def foreign(p, b):
        sums = jax.pure_callback(lambda x: x - x.mean(), b["y"].astype("f"), b["y"].astype("f"))
        return jnp.mean(sums[:, None] * (b["x"] @ p["w"]) ** 2)

    found = jaxshard.check(foreign, opt_of(), singles(weights()), batch)
    assert not found.ok
    assert "depends on other rows" in found.causes[0]


def test_random_numbers_are_named():
    def loss(p, b, key):
        return jnp.mean((b["x"] * jax.random.bernoulli(key, 0.5, b["x"].shape) @ p["w"]) ** 2)

    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        found = jaxshard.check(loss, opt_of(), singles(weights()), singles(batch_of(32)), key)
        assert not found.ok
        assert "turn dropout off" in found.causes[0]


def test_a_loss_of_bfloat16_is_right_within_its_rounding():
    def loss(p, b):
        return jnp.mean(((b["x"].astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)) ** 2).astype("f"))

    assert jaxshard.check(loss, opt_of(), singles(weights()), singles(batch_of(64))).ok


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_params_of_any_dtype_on_explicit_meshes_too(dtype, explicit):
    """Gradients are rounded to the params' dtype."""
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    opt = jaxshard.zero2(TX, jax.make_mesh((8,), ("data",), axis_types=(kind,)))
    params = jax.tree.map(lambda x: x.astype(dtype), singles(weights()))
    for name in ("cross_entropy", "a_sum", "batch_norm"):
        found = jaxshard.check(CASES[name].loss, opt, opt.place(params), singles(batch_of(32)))
        assert found.ok == CASES[name].right, found


def test_with_tensor_axes():
    mesh = jaxshard.make_mesh(tensor=2)
    opt = jaxshard.hybrid(TX, mesh, [("^w$", P("tensor"))], zero=3, min_shard_size=1)

    def loss(p, b):
        mine = lax.dynamic_slice_in_dim(b["x"], lax.axis_index("tensor") * p["w"].shape[0], p["w"].shape[0], 1)
        return jnp.mean(jaxshard.tensor.row_parallel(mine, p["w"]) ** 2)

    params = {"w": singles(weights())["w"]}
    found = jaxshard.check(loss, opt, params, {"x": singles(batch_of(32))["x"]})
    assert found.ok, found
    assert "all rows on one device" in found.differences


def test_too_large_for_one_device(monkeypatch):
    monkeypatch.setattr("jaxshard.loss.check._UNKNOWN_BYTES", 1000)
    found = jaxshard.check(CASES["squares"].loss, opt_of(), singles(weights()), singles(batch_of(32)))
    assert found.ok
    assert "not compared with one device: it would need" in str(found)
    assert not jaxshard.check(CASES["batch_norm"].loss, opt_of(), singles(weights()), singles(batch_of(32))).ok


@pytest.mark.parametrize("n", [1, 2, 3])
def test_other_numbers_of_devices(n):
    opt = opt_of("zero2", n)
    batch = singles(batch_of(12))
    assert jaxshard.check(CASES["cross_entropy"].loss, opt, singles(weights()), batch).ok
    if n > 1:
        assert not jaxshard.check(CASES["contrastive"].loss, opt, singles(weights()), batch).ok


def test_the_callers_arrays_stay():
    params = jax.device_put(singles(weights()))
    batch = jax.device_put(singles(batch_of(32)))
    jaxshard.check(CASES["squares"].loss, opt_of(), params, batch)
    np.testing.assert_array_equal(params["w"], singles(weights())["w"])
    np.testing.assert_array_equal(batch["x"], singles(batch_of(32))["x"])
