"""Each loss is measured, in shards and whole, and the verdict on its trace agrees with what was measured."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losses import CASES, batch_of, weights

import jaxshard

pytestmark = pytest.mark.usefixtures("x64")
DEVICES = 8


def opt_of(**options):
    return jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh(), min_shard_size=1, **options)


def told(case, num_rows, **options):
    """(the warnings of a trace of the loss over the mesh, its layout); nothing is compiled."""
    f = jaxshard.value_and_grad(case.loss, opt_of(**options), weighted=case.weighted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(f, weights(), batch_of(DEVICES * num_rows))
    texts = [str(each.message) for each in caught if each.category is jaxshard.RowsWarning]
    return texts, str(f.layout(weights(), batch_of(DEVICES * num_rows)))


@pytest.mark.parametrize("name", CASES)
def test_verdict(name):
    case = CASES[name]
    for num_rows in sorted({case.rows, 2, 4} - set(range(case.rows))):
        texts, layout = told(case, num_rows)
        assert len(texts) == (case.own and not case.right), (num_rows, texts)
        if case.right and not case.proved:
            assert "XLA partitions it: " in layout
            continue
        if case.right:
            assert layout.endswith("rows: the loss is a mean over rows")
            continue
        *_, text = layout.splitlines() if not case.own else texts
        assert case.says in text, (num_rows, text)
        assert "programs/losses.py:" in text
        assert 'loss_view="local"' in text or "does not support" in text
        if case.own:
            assert text.removeprefix("loss_fn: ") in layout
        else:
            assert text.startswith("rows: global view: the loss sees all rows of a microbatch, and XLA partitions it: ")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.own])
def test_what_the_cases_say_is_so(name):
    """The mean over shards of the loss (or of sums and weights) is that of the whole batch, or it is not."""
    case, p = CASES[name], weights()
    batch = batch_of(DEVICES * 4)
    batch["x"][0, 0] = np.nan if case.nan else batch["x"][0, 0]
    parts = [jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], batch) for i in range(DEVICES)]

    loss = jax.jit(case.loss)
    of_parts, whole = [loss(p, part) for part in parts], loss(p, batch)
    if case.weighted:
        of_parts = sum(np.array(x[0]) for x in of_parts) / sum(np.array(x[1]) for x in of_parts)
        whole = whole[0] / whole[1]
    off = abs(np.mean(np.array(of_parts)) / whole - 1)
    assert (off < 1e-12) == case.right, off


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.own and name != "dropout"])
def test_what_the_cases_with_collectives_say_is_so(name):
    case, p = CASES[name], weights()
    batch = batch_of(DEVICES * 4)
    one = jaxshard.ddp(optax.sgd(0.1), jaxshard.make_mesh(devices=jax.devices()[:1]))
    loss = jaxshard.evaluate(case.loss, opt_of(), loss_view="local")(p, batch)
    off = abs(float(loss) / float(jaxshard.evaluate(case.loss, one)(p, batch)) - 1)
    assert (off < 1e-12) == case.right, off


def test_meant_so():
    with pytest.warns(DeprecationWarning, match="pass .* loss_view=.local."):
        texts, layout = told(CASES["batch_norm"], 4, rows="mixed")
    assert not texts
    assert "not a mean over rows" in layout
    local = jaxshard.evaluate(CASES["batch_norm"].loss, opt_of(), loss_view="local")
    assert "not a mean over rows" in str(local.layout(weights(), batch_of(32)))
    with pytest.raises(ValueError, match="rows='mixd' is unknown"):
        opt_of(rows="mixd")


def test_one_device_needs_no_mean(recwarn):
    opt = jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh(devices=jax.devices()[:1]))
    jax.eval_shape(jaxshard.value_and_grad(CASES["a_sum"].loss, opt), weights(), batch_of(8))
    assert not recwarn.list
    layout = jaxshard.value_and_grad(CASES["a_sum"].loss, opt, microbatches=2).layout(weights(), batch_of(8))
    assert str(layout).endswith("rows: all rows are on one device, so any loss is correct")


def test_a_statistic_of_all_devices_is_that_of_a_microbatch_on_one_device(recwarn):
    """The loss of several microbatches is that of one device with the same microbatches."""
    loss, p, batch = CASES["batch_norm_over_devices"].loss, weights(), batch_of(32)
    value, _ = jaxshard.value_and_grad(loss, opt_of(), microbatches=2)(p, batch)
    assert not recwarn.list
    one = jaxshard.ddp(optax.sgd(0.1), jaxshard.make_mesh(devices=jax.devices()[:1]))
    mine = jax.tree.map(lambda x: np.swapaxes(x.reshape(DEVICES, 2, 2, *x.shape[1:]), 0, 1).reshape(x.shape), batch)
    wanted, _ = jaxshard.value_and_grad(loss, one, microbatches=2)(p, mine)
    assert float(value) == pytest.approx(float(wanted), rel=1e-12)


def test_what_cannot_be_looked_into_sees_all_rows(recwarn):
    def foreign(p, b):
        out = jax.ShapeDtypeStruct((b["x"].shape[0],), b["x"].dtype)
        return jax.pure_callback(lambda x: np.sum(x, -1), out, b["x"] @ p["w"]).mean()

    layout = jaxshard.evaluate(foreign, opt_of()).layout(weights(), batch_of(32))
    assert "partitions it: the analysis does not support `pure_callback` at tests/programs/test_verdict.py:" in str(
        layout
    )
    assert not recwarn.list


def test_a_gradient_by_a_rule_that_mixes_rows_is_seen(recwarn):

    @jax.custom_vjp
    def centred(x):
        return x

    centred.defvjp(lambda x: (x, None), lambda _, grad: (grad - grad.mean(0),))

    def loss(p, b):
        return (centred(b["x"] @ p["w"]) ** 2).mean()

    layout = str(jaxshard.value_and_grad(loss, opt_of()).layout(weights(), batch_of(32)))
    assert (
        "it: its gradient comes from the custom rule of `custom_vjp_call` at tests/programs/test_verdict.py:" in layout
    )
    assert not recwarn.list
    assert not jaxshard.check(loss, opt_of(), weights(), batch_of(32)).ok


def test_groups_that_change_their_number_are_not_known():
    def halves(p, b):
        scores = (b["x"] @ p["w"])[:, 0]
        while len(scores) % 2 == 0:
            scores = scores.reshape(-1, 2)
            scores = scores[:, 0] * scores[:, 1]
        return scores.mean()

    layout = str(jaxshard.value_and_grad(halves, opt_of()).layout(weights(), batch_of(32)))
    assert "zip" not in layout
    assert "the loss is a mean over rows" not in layout


def test_sums_for_each_rows_own_segments_see_all_rows(recwarn):
    """Each row has three places of its own among all."""

    def by_segment(p, b):
        losses = (b["h"] @ p["q"]).sum(-1)
        own = (b["tokens"][:, 1:] % 3 + 3 * jnp.arange(len(losses))[:, None]).reshape(-1)
        sums = jax.ops.segment_sum(losses.reshape(-1), own, 3 * len(losses))
        return jnp.mean(sums / jnp.maximum(jax.ops.segment_sum(jnp.ones_like(own), own, 3 * len(losses)), 1))

    layout = str(jaxshard.value_and_grad(by_segment, opt_of()).layout(weights(), batch_of(32)))
    assert "XLA partitions it" in layout
    assert not recwarn.list
    assert jaxshard.check(by_segment, opt_of(), weights(), batch_of(32)).ok


def test_a_gradient_of_a_mean_that_is_compared_with_a_number_depends_on_the_number_of_rows(recwarn):
    def large(p, b):
        grads = jax.grad(lambda x: jnp.mean((x @ p["w"]) ** 2))(b["x"])
        return jnp.mean(jnp.sum((b["x"] @ p["w"]) ** 2, -1)[:, None] * (jnp.abs(grads) > 0.02))

    layout = str(jaxshard.value_and_grad(large, opt_of()).layout(weights(), batch_of(32)))
    assert "XLA partitions it" in layout
    assert not recwarn.list


@pytest.mark.parametrize(
    "guarded",
    [
        lambda total, count: total / jnp.maximum(count, 1.0),
        lambda total, count: total / jnp.clip(count, 1.0),
        lambda total, count: total / jnp.where(count > 0, count, 1.0),
        lambda total, count: jnp.where(count > 0, total / count, 0.0),
        lambda total, count: total / (count + 1e-6),
    ],
)
def test_a_guarded_division_of_sums_has_the_cure_of_a_plain_one(guarded):
    """The cure was a psum of the count, which leaves the loss too small by the number of devices."""

    def loss(p, batch):
        terms = jnp.sum((batch["x"] @ p["w"]) ** 2, axis=-1)
        return guarded(jnp.sum(terms * batch["mask"]), jnp.sum(batch["mask"]))

    batch = batch_of(32)
    batch = {"x": batch["x"], "mask": (np.arange(32) % 3 > 0).astype(float)}
    layout = jaxshard.value_and_grad(loss, opt_of()).layout(weights(), batch)
    assert "set weighted=True, which divides the sums over all devices" in str(layout)


def aux_of(loss_fn, **options):
    """(aux of one call over the mesh, the warnings' words)"""
    f = jaxshard.value_and_grad(loss_fn, opt_of(), has_aux=True, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (_, aux), _ = f(weights(), batch_of(32))
    return aux, [str(each.message) for each in caught]


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_in_aux_are_told_and_means_are_not(weighted):
    """Of a loss that names the mesh's axis, as its sum over all devices does."""

    def loss(p, batch):
        terms = jnp.sum((batch["x"] @ p["w"]) ** 2, axis=-1)
        aux = {"sum": terms.sum(), "mean": terms.mean(), "of no row": jnp.sum(p["w"] ** 2), "rows": terms}
        aux["over all"] = jax.lax.psum(terms.sum(), "data")
        return ((terms.sum(), jnp.float32(len(terms))) if weighted else terms.mean()), aux

    aux, told = aux_of(loss, weighted=weighted)
    (text,) = told
    assert text.startswith("aux leaf sum is a sum over rows (`reduce_sum` at")
    assert "jax.lax.psum(x, 'data')" in text
    (_, whole), _ = jax.value_and_grad(lambda p, b: _plain(loss, p, b), has_aux=True)(weights(), batch_of(32))
    assert float(aux["mean"]) == pytest.approx(float(whole["mean"]))
    assert float(aux["sum"]) == pytest.approx(float(whole["sum"]) / DEVICES)
    assert float(aux["over all"]) == pytest.approx(float(whole["sum"]))


@pytest.mark.parametrize("weighted", [False, True])
def test_aux_of_a_loss_without_axes_is_what_one_device_returns(weighted):
    def loss(p, batch):
        terms = jnp.sum((batch["x"] @ p["w"]) ** 2, axis=-1)
        aux = {
            "sum": terms.sum(),
            "largest": terms.max(),
            "count": len(terms),
            "sorted": jnp.sort(terms),
            "rows": terms,
        }
        return ((terms.sum(), jnp.float32(len(terms))) if weighted else terms.mean()), aux

    aux, told = aux_of(loss, weighted=weighted)
    assert not told
    chex.assert_trees_all_close(jax.device_get(aux), loss(weights(), batch_of(32))[1], rtol=1e-12)


def _plain(loss, p, batch):
    """The same on one device, where there is no axis to sum over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "psum", lambda x, axis: x)
        value, aux = loss(p, batch)
    return (value[0] if isinstance(value, tuple) else value), aux


def test_an_aux_leaf_that_is_refused_comes_with_what_is_wrong_with_the_loss():
    """Of a BatchNorm without its axis the error named neither the operation nor the cure."""

    def loss(p, batch):
        hidden = batch["x"] @ p["w"]
        hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-5)
        return jnp.mean(hidden**4), hidden[::-1]

    f = jaxshard.value_and_grad(loss, opt_of(), has_aux=True, loss_view="local")
    with pytest.raises(ValueError, match=r"or its mean\. The loss may show the cause: `reduce_sum` at .*axis_name="):
        jax.eval_shape(f, weights(), batch_of(32))


def over_all(x):
    return jax.lax.psum(x, "data")


def aux_leaves(p, batch, together=lambda x: x):
    """By name, a leaf of aux and whether its average over devices is what one device returns."""
    terms = jnp.sum((batch["x"] @ p["w"]) ** 2, axis=-1)
    some = (terms > 1.0).astype(terms.dtype)
    return {
        "mean": (terms.mean(), True),
        "mean of some": ((terms * some).sum() / jnp.maximum(some.sum(), 1), False),
        "perplexity": (jnp.exp(terms.mean()), False),
        "largest": (terms.max(), False),
        "deviation": (terms.std(), False),
        "ratio over all": (together((terms * some).sum()) / together(some.sum()), True),
        "perplexity over all": (jnp.exp(together(terms.sum()) / together(jnp.ones_like(terms).sum())), True),
    }


def test_aux_whose_average_is_not_what_one_device_returns_is_told():
    def loss(p, batch):
        found = aux_leaves(p, batch, over_all)
        return found["mean"][0], {name: value for name, (value, _) in found.items()}

    aux, told = aux_of(loss)
    for name, (value, same) in aux_leaves(weights(), batch_of(32)).items():
        assert (float(aux[name]) == pytest.approx(float(value))) is same, name
        assert any(text.startswith(f"aux leaf {name} is not a mean over rows (`") for text in told) is not same, name
    (largest,) = [text for text in told if "largest" in text]
    assert "jax.lax.pmax(x, 'data')" in largest


def test_sums_over_all_devices_in_aux_are_averaged_over_microbatches():
    def loss(p, batch):
        terms = jnp.sum((batch["x"] @ p["w"]) ** 2, axis=-1)
        return terms.mean(), {"sum": over_all(terms.sum()), "mean": jax.lax.pmean(terms.mean(), "data")}

    aux, told = aux_of(loss, microbatches=2)
    assert not told
    terms = np.sum(np.square(batch_of(32)["x"] @ weights()["w"]), axis=-1)
    assert float(aux["sum"]) == pytest.approx(terms.sum() / 2)
    assert float(aux["mean"]) == pytest.approx(terms.mean())


def test_aux_of_a_weighted_loss_is_what_one_device_returns():
    def loss(p, batch):
        terms = jnp.sum((batch["x"] @ p["w"]) ** 2, axis=-1)
        some = (terms > 1.0).astype(terms.dtype)
        count = some.sum()
        total = (terms * some).sum()
        of_some = {
            "guarded": total / jnp.maximum(count, 1),
            "chosen": jnp.where(count > 0, total / count, 0),
            "divisor": total / jnp.where(count > 0, count, 1),
            "plain": total / count,
            "percent": 100 - 100 * (total / jnp.clip(count, 1)),
        }
        others = {"log": jnp.log(count), "perplexity": jnp.exp(total / jnp.maximum(count, 1)), "mean": terms.mean()}
        return (total, count), of_some | others

    aux, told = aux_of(loss, weighted=True)
    assert not told
    chex.assert_trees_all_close(jax.device_get(aux), jax.device_get(loss(weights(), batch_of(32))[1]), rtol=1e-12)


def test_a_sum_over_devices_that_is_laid_out_by_row_is_no_mixture():
    """It was told to grow with the rows otherwise than the rest."""

    def loss(p, batch, devices=over_all):
        terms = jnp.sum((batch["x"] @ p["w"]) ** 2, axis=-1)
        mean = devices(terms.mean()) / (jax.lax.axis_size("data") if devices is over_all else 1)
        return terms.mean() + jnp.broadcast_to(mean**2, terms.shape).mean()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, _ = jaxshard.value_and_grad(loss, opt_of())(weights(), batch_of(32))
    assert float(found) == pytest.approx(float(loss(weights(), batch_of(32), lambda x: x)))


def test_rows_in_another_order_are_to_be_so_in_the_batch():
    def loss(p, batch):
        mixed = 0.7 * batch["x"] + 0.3 * batch["x"][jnp.asarray(np.random.default_rng(0).permutation(32 // DEVICES))]
        return jnp.mean((mixed @ p["w"]) ** 2)

    with pytest.warns(jaxshard.RowsWarning, match=r"not known to be a mean .*cannot be traced with all rows at once"):
        jax.eval_shape(jaxshard.value_and_grad(loss, opt_of()), weights(), batch_of(32))
    text = str(jaxshard.value_and_grad(loss, opt_of(), loss_view="local").layout(weights(), batch_of(32)))
    assert text.endswith("rows: not known: it cannot be traced with the rows of all devices")
