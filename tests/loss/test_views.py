"""A loss that is not proved to be a mean over rows sees all rows, and XLA partitions it: its result is one device's."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chex import assert_trees_all_close
from losses import CASES, batch_of, weights

import jaxshard

pytestmark = pytest.mark.usefixtures("x64")
DEVICES, ROWS = 8, 32
STRATEGIES = {
    "ddp": lambda: jaxshard.ddp(optax.sgd(0.1), jaxshard.make_mesh()),
    "zero1": lambda: jaxshard.zero1(optax.sgd(0.1), jaxshard.make_mesh(), min_shard_size=1),
    "zero2": lambda: jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh(), min_shard_size=1),
    "zero3": lambda: jaxshard.zero3(optax.sgd(0.1), jaxshard.make_mesh(), min_shard_size=1),
    "zero3-explicit": lambda: jaxshard.zero3(optax.sgd(0.1), jax.make_mesh((8,), ("data",)), min_shard_size=1),
    "hsdp": lambda: jaxshard.hsdp(optax.sgd(0.1), jaxshard.make_mesh(replica=2), min_shard_size=1),
}
ANYBODYS = [name for name, case in CASES.items() if not case.own]  # they name no axis of a mesh
NO_MEANS = [name for name in ANYBODYS if not CASES[name].right]


def parts_of(batch, microbatches):
    """The microbatches: the i-th is made of the i-th part of each device's rows."""

    def split(x):
        x = x.reshape(DEVICES, microbatches, -1, *x.shape[1:])
        return np.swapaxes(x, 0, 1).reshape(microbatches, -1, *x.shape[3:])

    split_batch = jax.tree.map(split, batch)
    return [jax.tree.map(lambda x, i=i: x[i], split_batch) for i in range(microbatches)]


def on_one_device(case, params, batch, microbatches):
    """The loss and its gradients, by JAX alone."""

    def of_parts(params, parts):
        outs = [case.loss(params, part) for part in parts]
        if case.weighted:
            return sum(x[0] for x in outs) / jax.lax.stop_gradient(sum(x[1] for x in outs))
        return sum(outs) / microbatches

    return jax.jit(jax.value_and_grad(of_parts))(params, parts_of(batch, microbatches))


def check_equal(name, strategy, microbatches, view="auto"):
    case, opt, params, batch = CASES[name], STRATEGIES[strategy](), weights(), batch_of(ROWS)
    f = jaxshard.value_and_grad(case.loss, opt, weighted=case.weighted, microbatches=microbatches, loss_view=view)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, grads = f(params, jaxshard.shard_batch(batch, opt))
    expected = on_one_device(case, params, batch, microbatches)
    rtol = 1e-6 if name == "attention_of_jax" else 1e-10  # it computes in float32
    assert_trees_all_close((value, jax.device_get(grads)), jax.device_get(expected), rtol=rtol, atol=1e-3 * rtol)
    wanted = opt.shardings(params).grads
    assert jax.tree.all(jax.tree.map(lambda x, at: x.sharding.is_equivalent_to(at, x.ndim), grads, wanted))
    return f.layout(params, batch)


@pytest.mark.parametrize("name", NO_MEANS)
def test_any_loss_is_right(name):
    layout = check_equal(name, "zero3", 2)
    assert "rows: global view: the loss sees all rows of a microbatch, and XLA partitions it" in str(layout)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["batch_norm", "masked_mean", "squares"])
def test_any_strategy_is_right(name, strategy):
    check_equal(name, strategy, 1)
    check_equal(name, strategy, 2, view="global")


@pytest.mark.nightly
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ANYBODYS)
def test_any_loss_is_right_under_any_strategy(name, strategy, microbatches):
    case, layout = CASES[name], str(check_equal(name, strategy, microbatches))
    is_proved = case.right and case.proved and case.rows <= ROWS // DEVICES // microbatches  # whole groups of rows
    assert ("XLA partitions it" in layout) != is_proved


def with_batch_norm(p, b):
    z = b["x"] @ p["w"]
    z = jnp.tanh((z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-5))
    return jnp.mean(z**2 * b["y"][:, None]), {"logits": z, "first": z[:, 0]}


def with_pairs(p, b):
    z = b["x"] @ p["w"]
    losses = jax.nn.logsumexp(z @ z.T, 0) - (z * z).sum(-1)
    return losses.mean(), {"losses": losses}


def with_ranks(p, b):
    z = b["x"] @ p["w"]
    return jnp.mean(z**2), {"centred": z - z.mean(0)}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("view", ["auto", "global"])
@pytest.mark.parametrize("loss", [with_batch_norm, with_pairs, with_ranks])
def test_rows_in_aux_that_depend_on_others_come_back_in_their_order(loss, view, microbatches):
    opt, batch = STRATEGIES["zero2"](), batch_of(ROWS)
    f = jaxshard.value_and_grad(loss, opt, has_aux=True, microbatches=microbatches, loss_view=view)
    (value, aux), _ = f(weights(), batch)
    each = [loss(weights(), jax.tree.map(jnp.asarray, part)) for part in parts_of(batch, microbatches)]
    assert float(value) == pytest.approx(sum(float(x[0]) for x in each) / microbatches, rel=1e-12)

    def in_order(*parts):  # undoes `parts_of`
        x = np.stack(parts).reshape(microbatches, DEVICES, -1, *parts[0].shape[1:])
        return np.swapaxes(x, 0, 1).reshape(ROWS, *parts[0].shape[1:])

    assert_trees_all_close(jax.device_get(aux), jax.tree.map(in_order, *(x[1] for x in each)), rtol=1e-10)


def test_sorted_rows_of_microbatches_have_no_order():
    def loss(p, b):
        z = b["x"] @ p["w"]
        return jnp.mean(z**2), jnp.sort(z[:, 0])

    f = jaxshard.value_and_grad(loss, STRATEGIES["zero2"](), has_aux=True, microbatches=2, loss_view="global")
    with pytest.raises(ValueError, match=r"aux leaf .* has shape \(16,\), in which the batch's rows"):
        f(weights(), batch_of(ROWS))


@pytest.mark.parametrize("view", ["auto", "global"])
def test_dropout_has_the_masks_of_one_device(view):
    """Bit for bit in the global view: no key is folded."""

    def loss(p, b, key):
        z = b["x"] @ p["w"]
        kept = jax.random.bernoulli(key, 0.5, z.shape)
        z = jnp.where(kept, z - z.mean(0), 0)
        return jnp.mean(z**2), kept

    opt, key = STRATEGIES["zero2"](), jax.random.key(3)
    (value, kept), _ = jaxshard.value_and_grad(loss, opt, has_aux=True, loss_view=view)(weights(), batch_of(ROWS), key)
    wanted, masks = loss(weights(), jax.tree.map(jnp.asarray, batch_of(ROWS)), key)
    assert np.array_equal(kept, masks)
    assert float(value) == pytest.approx(float(wanted), rel=1e-12)


def test_the_layout_says_where_keys_are_folded():
    def loss(p, b, key):
        return jnp.mean((b["x"] @ p["w"] + jax.random.normal(key, (len(b["x"]), p["w"].shape[1]))) ** 2)

    for view, said in (("auto", True), ("global", False)):
        f = jaxshard.value_and_grad(loss, STRATEGIES["zero2"](), loss_view=view)
        last = str(f.layout(weights(), batch_of(ROWS), jax.random.key(3))).splitlines()[-1]
        assert ("each device uses its own keys" in last) == said

    def drawn(p, b, key):
        return loss(p, b, key), jax.random.normal(key, (len(b["x"]),))

    for m in (1, 2):  # docs/loss.md says which numbers these are
        f = jaxshard.value_and_grad(drawn, STRATEGIES["zero2"](), has_aux=True, microbatches=m)
        (_, got), _ = f(weights(), batch_of(ROWS), jax.random.key(3))
        keys = [jax.random.fold_in(jax.random.key(3), d * m + i) for d in range(DEVICES) for i in range(m)]
        wanted = np.concatenate([jax.random.normal(key, (ROWS // DEVICES // m,)) for key in keys])
        assert np.array_equal(got, wanted)


def test_several_microbatches_have_keys_of_their_own():
    def loss(p, b, key):
        return jnp.mean((b["x"] @ p["w"]) ** 2), jax.random.uniform(key, b["x"].shape)

    f = jaxshard.value_and_grad(loss, STRATEGIES["zero2"](), has_aux=True, microbatches=2, loss_view="global")
    (_, drawn), _ = f(weights(), batch_of(ROWS), jax.random.key(3))
    assert len(np.unique(drawn)) == drawn.size


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
@pytest.mark.parametrize("name", NO_MEANS[::8])
@pytest.mark.filterwarnings("ignore:.*do the same work")
def test_an_axis_that_nothing_uses_changes_nothing(name, axis):
    case, params, batch = CASES[name], weights(), batch_of(ROWS)
    opt = jaxshard.zero3(optax.sgd(0.1), jaxshard.make_mesh(**{axis: 2}), min_shard_size=1)
    f = jaxshard.value_and_grad(case.loss, opt, weighted=case.weighted)
    with warnings.catch_warnings():
        warnings.simplefilter("error", jaxshard.RowsWarning)
        value, grads = f(params, jaxshard.shard_batch(batch, opt))
    expected = on_one_device(case, params, batch, 1)
    rtol = 1e-6 if name == "attention_of_jax" else 1e-10  # it computes in float32
    assert_trees_all_close((value, jax.device_get(grads)), jax.device_get(expected), rtol=rtol, atol=1e-3 * rtol)


def test_a_loss_for_each_devices_rows_has_no_global_view():
    def named(p, b):
        return jax.lax.pmean(jnp.mean((b["x"] @ p["w"]) ** 2), "data")

    f = jaxshard.value_and_grad(named, STRATEGIES["zero2"](), loss_view="global")
    line = r"it names the mesh axes \['data'\] \(.*test_views.py:\d+\)"
    with pytest.raises(ValueError, match=line + ', which loss_view="global" does not support; pass loss_view="local"'):
        f(weights(), batch_of(ROWS))
    with pytest.raises(ValueError, match=r"loss_view .any. must be"):
        jaxshard.predict(named, STRATEGIES["zero2"](), loss_view="any")


def test_a_loss_that_cannot_be_traced_on_a_part_of_the_rows_sees_all():
    def of_all(p, b):
        return jnp.mean((b["x"].reshape(ROWS, 2, -1).sum(1) @ p["w"][:4]) ** 2)

    f = jaxshard.value_and_grad(of_all, STRATEGIES["zero3"]())
    value, _ = f(weights(), batch_of(ROWS))
    assert float(value) == pytest.approx(float(of_all(weights(), batch_of(ROWS))), rel=1e-12)
    assert "on one device's rows it raises TypeError: cannot reshape" in str(f.layout(weights(), batch_of(ROWS)))
    with pytest.raises(TypeError, match="reshape"):
        jaxshard.value_and_grad(of_all, STRATEGIES["zero3"](), loss_view="local")(weights(), batch_of(ROWS))


@pytest.mark.parametrize("name", [x for x in ANYBODYS if CASES[x].right and CASES[x].proved and CASES[x].rows == 1])
def test_a_mean_over_rows_is_known_by_one_row_on_each_device(name):
    step = jaxshard.train_step(CASES[name].loss, STRATEGIES["zero3"](), weighted=CASES[name].weighted)
    assert step.layout(weights(), batch_of(DEVICES)).loss_rows == "the loss is a mean over rows"


@pytest.mark.parametrize("act", [jax.nn.relu, jax.nn.silu, jax.nn.leaky_relu, jax.nn.relu6, lambda x: x])
def test_rules_of_derivatives_with_one_row_on_each_device(act):
    """The pick squeezes dims of one; the rule of relu has relu in it, and the proof did not end."""

    def loss(params, batch):
        logits = act(batch["h"] @ params["wide"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"]).mean()

    rng = np.random.default_rng(0)
    batch = {"h": rng.normal(size=(DEVICES, 3, 3, 8)), "tokens": rng.integers(0, 4, (DEVICES, 3, 3))}
    layout = jaxshard.train_step(loss, STRATEGIES["zero3"]()).layout({"wide": np.ones((8, 4))}, batch)
    assert layout.loss_rows == "the loss is a mean over rows"


@pytest.mark.parametrize("weighted", [False, True])
def test_masters_a_loss_scale_frozen_params_and_the_host_in_the_global_view(weighted):
    """The whole step, against the local view of the same mean."""

    def loss(p, b):
        losses = jnp.mean((b["x"] @ p["w"].astype("f") + p["q"].astype("f").sum()) ** 2, -1)
        return (losses.sum(), jnp.float32(len(losses))) if weighted else losses.mean()

    def trained(view):
        options = {"master_dtype": jnp.float32, "loss_scale": jaxshard.LossScale(initial=8.0), "frozen": ["q"]}
        opt = jaxshard.zero3(optax.adam(1e-2), jaxshard.make_mesh(), min_shard_size=1, **options)
        step = jaxshard.train_step(loss, opt, weighted=weighted, microbatches=2, loss_view=view)
        given = {name: weights()[name].astype(jnp.bfloat16) for name in ("w", "q")}
        params = opt.place(given)
        state = opt.init(params)
        for seed in range(3):
            params, state, metrics = step(params, state, jaxshard.shard_batch(batch_of(ROWS, seed), opt))
        return jax.device_get((params, metrics["loss"], metrics["loss_scale"]))

    assert_trees_all_close(trained("global"), trained("local"), rtol=1e-2)


def test_the_plan_counts_what_the_global_view_sends():
    opt = STRATEGIES["zero3"]()
    step = jaxshard.train_step(CASES["batch_norm"].loss, opt)
    params = opt.place({"w": weights()["w"], "q": weights()["q"]})
    compiled = step.lower(params, opt.init(params), jaxshard.shard_batch(batch_of(ROWS), opt)).compile()
    sent = jaxshard.inspect.report(compiled).wire_bytes
    assert jaxshard.plan.predict(step, params, batch_of(ROWS)).wire_bytes == pytest.approx(sent, rel=0.05)


def test_an_error_without_a_message_is_the_users_own():
    def wrong(p, b):
        raise KeyError

    with pytest.raises(KeyError):
        jaxshard.value_and_grad(wrong, STRATEGIES["zero2"]())(weights(), batch_of(ROWS))
