"""`predict` and leaves of aux that keep the batch's rows: all rows, in the batch's order, on any mesh."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from oracle import ROWS, batches, hostile_params, model_loss

import jaxshard

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be sharded:UserWarning")
RNG = np.random.default_rng(0)
W, X = (RNG.normal(size=shape).astype("f") for shape in ((8, 4), (48, 8)))


def opt_of(strategy="zero3", n=8, **options):
    return getattr(jaxshard, strategy)(optax.sgd(0.1), jaxshard.make_mesh(devices=jax.devices()[:n]), **options)


def outputs(w, batch):
    logits = batch["x"] @ w
    return {"logits": logits, "class": jnp.argmax(logits, -1), "sure": jnp.max(logits, -1) > 1, "id": batch["id"]}


BATCH = {"x": X, "id": np.arange(48)}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_rows_come_in_order(strategy, n):
    f = jaxshard.predict(outputs, opt_of(strategy, n, min_shard_size=1))
    want = jax.jit(outputs)(W, BATCH)
    for got in (f(W, BATCH), jax.jit(f)(W, BATCH)):
        chex.assert_trees_all_close(got, want, rtol=1e-5)
        chex.assert_trees_all_equal_dtypes(got, want)
    assert got["logits"].sharding.spec == (P("data") if n > 1 else P())


def test_rows_are_cut_over_replicas_too():
    opt = jaxshard.hsdp(optax.sgd(0.1), jaxshard.make_mesh(replica=4, data=2), min_shard_size=1)
    got = jaxshard.predict(outputs, opt)(W, BATCH)
    np.testing.assert_array_equal(got["id"], np.arange(48))
    assert got["logits"].addressable_shards[0].data.shape == (6, 4)


def test_params_are_gathered_as_in_training():
    params = hostile_params("f")
    batch = batches(1)[0]

    def embedded(params, batch):
        return jaxshard.unshard(params["table"])[batch["x"]]

    opt = opt_of(min_shard_size=1)
    got = jaxshard.predict(embedded, opt)(opt.place(params), batch)
    np.testing.assert_array_equal(got, params["table"][batch["x"]])
    assert got.shape[0] == ROWS


def test_keys_differ_between_devices():
    got = jaxshard.predict(lambda w, b, key: jax.random.uniform(key, b["x"].shape), opt_of())(
        W, BATCH, jax.random.key(0)
    )
    assert len(np.unique(got, axis=0)) == 48


def test_bad_input():
    f = jaxshard.predict(lambda w, b: {"mean": jnp.mean(b["x"], 0)}, opt_of())
    with pytest.raises(ValueError, match=r"predict: output mean has shape \(8,\) and no dim with the rows"):
        f(W, BATCH)
    with pytest.raises(ValueError, match="no dim with the rows"):
        jaxshard.predict(lambda w, b: w, opt_of())(W, BATCH)
    with pytest.raises(TypeError, match="predict: the loss 3 is not a function"):
        jaxshard.predict(3, opt_of())
    with pytest.raises(TypeError, match="predict needs a ShardedOptimizer"):
        jaxshard.predict(outputs, optax.sgd(0.1))


def with_aux(w, batch):
    out = outputs(w, batch)
    aux = {"logits": out["logits"], "of_columns": out["logits"].T, "class": out["class"], "mean": jnp.mean(batch["x"])}
    return jnp.mean(out["logits"] ** 2), aux


@pytest.mark.parametrize("n", [1, 2, 8])
def test_leaves_of_aux_with_rows_come_whole_in_order(n):
    """They were averaged over rows that have nothing to do with each other: (4, 10) for (32, 10)."""
    opt = opt_of(n=n, min_shard_size=1)
    (loss, want) = with_aux(W, BATCH)
    found = [jaxshard.evaluate(with_aux, opt, has_aux=True)(W, BATCH)]
    for m in (1, 2, 3):
        found.append(jaxshard.value_and_grad(with_aux, opt, has_aux=True, microbatches=m)(W, BATCH)[0])
    params = opt.place(W)
    _, _, metrics = jaxshard.train_step(with_aux, opt, has_aux=True, microbatches=2)(params, opt.init(params), BATCH)
    found.append((metrics["loss"], metrics["aux"]))
    for got_loss, got in found:
        np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
        chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def test_one_row_on_each_device():
    batch = jax.tree.map(lambda x: x[:8], BATCH)
    loss, want = with_aux(W, batch)
    got_loss, got = jaxshard.evaluate(with_aux, opt_of(), has_aux=True)(W, batch)
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def with_aux_of(aux):
    def loss(w, batch):
        z = batch["x"] @ w
        return jnp.mean(z**2), {"z": aux(z)}

    return loss


IN_ORDER = [
    lambda z: z - z.mean(0),
    lambda z: jax.nn.softmax(z, 0),
    lambda z: (z - z.mean(0)) / z.std(0),
    lambda z: z @ z.T,
    lambda z: z[:, 0] * jnp.arange(len(z)),
    lambda z: jnp.arange(1.0 * len(z)),
    lambda z: z / len(z),
]
OUT_OF_ORDER = [
    lambda z: z.reshape(-1),
    lambda z: z[::-1],
    lambda z: jnp.sort(z[:, 0]),
    lambda z: z[:, 0].at[0].set(0),
    lambda z: z[: len(z) // 2, 0],
    lambda z: jnp.argsort(z[:, 0]),
]


@pytest.mark.parametrize("aux", IN_ORDER + OUT_OF_ORDER)
def test_rows_of_aux_that_depend_on_others_are_what_one_device_returns(aux):
    """They were averaged over unrelated rows."""
    loss = with_aux_of(aux)
    found = jaxshard.evaluate(loss, opt_of(), has_aux=True)(W, BATCH)
    chex.assert_trees_all_close(found, loss(W, jax.tree.map(jnp.asarray, BATCH)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aux", IN_ORDER)
def test_the_local_view_returns_what_each_device_makes_of_its_rows(aux):
    loss = with_aux_of(aux)
    _, found = jaxshard.evaluate(loss, opt_of(), has_aux=True, loss_view="local")(W, BATCH)
    each = [jax.tree.map(lambda x, d=d: jnp.split(jnp.asarray(x), 8)[d], BATCH) for d in range(8)]
    wanted = jnp.concatenate([loss(W, rows)[1]["z"] for rows in each])
    np.testing.assert_allclose(found["z"], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aux", IN_ORDER)
def test_predict_in_the_local_view_returns_what_each_device_makes_of_its_rows(aux):
    found = jaxshard.predict(lambda w, batch: aux(batch["x"] @ w), opt_of(), loss_view="local")(W, BATCH)
    each = [jnp.split(jnp.asarray(BATCH["x"]), 8)[d] @ W for d in range(8)]
    np.testing.assert_allclose(found, jnp.concatenate([aux(z) for z in each]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aux", OUT_OF_ORDER)
def test_the_local_view_refuses_rows_in_another_order(aux):
    with pytest.raises(ValueError, match=r"aux leaf z has shape .* return it as \(rows, ...\), or its mean"):
        jaxshard.evaluate(with_aux_of(aux), opt_of(), has_aux=True, loss_view="local")(W, BATCH)


@pytest.mark.parametrize(
    ("of_rows", "says"),
    [
        (lambda z: z - z.mean(0), "pmean"),
        (lambda z: z[:, 0].at[0].set(0), "positions in the batch"),
        (lambda z: z * jnp.cumsum(jnp.ones(len(z)))[:, None], "positions in the batch"),
        (lambda z: jax.lax.map(lambda each: each[0] * each[1], (z, jnp.arange(len(z)))), "positions in the batch"),
        (lambda z: z / len(z), "outputs depend on the number of rows"),
        (lambda z: z + np.log(len(z)), "outputs depend on the number of rows"),
    ],
)
def test_outputs_that_depend_on_more_than_their_row_are_those_of_one_device(of_rows, says, recwarn):
    found = jaxshard.predict(lambda w, batch: of_rows(batch["x"] @ w), opt_of())(W, BATCH)
    chex.assert_trees_all_close(found, of_rows(jnp.asarray(X @ W)), rtol=1e-4, atol=1e-5)
    assert not recwarn.list


def test_rows_in_another_order_are_refused():
    """They came back turned round on each device; the local view refuses them."""
    with pytest.raises(ValueError, match="no dim with the rows of the batch in order"):
        jaxshard.predict(lambda w, batch: (batch["x"] @ w)[::-1], opt_of(), loss_view="local")(W, BATCH)
    found = jaxshard.predict(lambda w, batch: (batch["x"] @ w)[::-1], opt_of())(W, BATCH)
    chex.assert_trees_all_close(found, (X @ W)[::-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "of_rows",
    [
        lambda z: z.at[:, 0].set(0),
        lambda z: z.at[jnp.arange(len(z)), jnp.argmax(z, 1)].set(0),
        lambda z: jnp.sort(z, 1),
        lambda z: jax.lax.map(lambda row: row / jnp.linalg.norm(row), z),
        lambda z: jnp.zeros(len(z)),
    ],
)
def test_rows_by_themselves_are_not(of_rows, recwarn):
    def loss(w, batch):
        return jnp.mean(batch["x"] @ w), of_rows(batch["x"] @ w)

    _, got = jaxshard.evaluate(loss, opt_of(), has_aux=True)(W, BATCH)
    np.testing.assert_allclose(got, of_rows(jnp.asarray(X @ W)), rtol=1e-4, atol=1e-5)
    assert not recwarn.list


def test_on_one_device_aux_may_be_anything(recwarn):
    def loss(w, batch):
        return jnp.mean(batch["x"] @ w), jnp.sort(batch["x"] @ w, 0)

    _, got = jaxshard.evaluate(loss, opt_of(n=1), has_aux=True)(W, BATCH)
    np.testing.assert_allclose(got, np.sort(X @ W, 0), rtol=1e-4, atol=1e-5)
    assert not recwarn.list


def test_whole_numbers_without_rows_still_have_no_average():
    def loss(w, batch):
        return jnp.mean((batch["x"] @ w) ** 2), jnp.sum(batch["id"])

    with pytest.raises(TypeError, match=r"aux leaf .* differs between devices and cannot be averaged; return it"):
        jaxshard.evaluate(loss, opt_of(), has_aux=True, loss_view="local")(W, BATCH)
    assert int(jaxshard.evaluate(loss, opt_of(), has_aux=True)(W, BATCH)[1]) == np.sum(BATCH["id"])
    with pytest.raises(TypeError, match=r"aux leaf .* differs between microbatches and cannot be averaged; return it"):
        jaxshard.value_and_grad(loss, opt_of(), has_aux=True, microbatches=2)(W, BATCH)


def test_a_model_with_layers(recwarn):
    params, batch = hostile_params("f"), batches(1)[0]

    def loss(params, batch):
        return model_loss(params, batch), params["table"][batch["y"]].sum((1, 2))

    opt = opt_of(min_shard_size=1)
    _, got = jaxshard.evaluate(loss, opt, has_aux=True)(opt.place(params), batch)
    np.testing.assert_allclose(got, params["table"][batch["y"]].sum((1, 2)), rtol=1e-5)
