"""The traps: models that other libraries get silently wrong, or refuse. Each is named after its hazard.

All compare with one device over the whole batch, in double precision, under the strategies where the hazard bites.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from oracle import assert_close, distance, one_device, sharded

import jaxshard

pytestmark = [pytest.mark.filterwarnings("ignore:.*cannot be sharded:UserWarning"), pytest.mark.usefixtures("x64")]

SGD = optax.sgd(0.1, momentum=0.9)


def opt_of(strategy, tx=SGD, n=8, **options):
    mesh = jaxshard.make_mesh(devices=jax.devices()[:n])
    return getattr(jaxshard, strategy)(tx, mesh, min_shard_size=1, **options)


def rows(count=3, seed=0):
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=(16, 8)), "y": rng.normal(size=(16, 8))} for _ in range(count)]


def weights():
    rng = np.random.default_rng(1)
    return {"a": 0.3 * rng.normal(size=(8, 16)), "b": 0.3 * rng.normal(size=(16, 8)), "c": rng.normal(size=(8,))}


def fit(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ params["a"]) @ params["b"] + params["c"] - batch["y"]))


def check(loss, strategy, params=None, tx=SGD, **options):
    """Three steps equal one device's."""
    params = weights() if params is None else params
    want = one_device(loss, tx, params, rows())
    got = sharded(loss, opt_of(strategy, tx), params, rows(), **options)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


both = pytest.mark.parametrize("strategy", ["zero2", "zero3"])


@both
def test_l2_over_all_leaves_beside_unshard(strategy):
    """An L2 term that sees a shard would be 1/N of itself; a leaf used raw is no longer lazy."""

    def loss(params, batch):
        penalty = sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
        return fit(jaxshard.unshard(params), batch) + 0.1 * penalty

    check(loss, strategy)


@both
def test_l2_mean_over_sizes_is_not_fooled_by_shards(strategy):
    """What the loss reads of shapes and sizes must be the whole leaf's, though every use is through unshard."""

    def loss(params, batch):
        num_elements = sum(p.size for p in jax.tree.leaves(params))
        assert num_elements == 8 * 16 + 16 * 8 + 8
        return fit(jaxshard.unshard(params), batch) / num_elements

    check(loss, strategy)


@both
def test_penalty_mask_over_leaves(strategy):
    mask = {"a": True, "b": False, "c": True}

    def loss(params, batch):
        chosen = [p for p, m in zip(jax.tree.leaves(params), jax.tree.leaves(mask), strict=True) if m]
        return fit(jaxshard.unshard(params), batch) + 0.1 * sum(jnp.sum(p**2) for p in chosen)

    check(loss, strategy)


@both
def test_decay_mask(strategy):
    """adamw's mask decides by leaf; a layout that reorders or renames leaves would decay the wrong ones."""
    check(fit, strategy, tx=optax.adamw(1e-2, weight_decay=0.5, mask={"a": True, "b": False, "c": False}))


@both
def test_unshard_on_some_leaves_only(strategy):
    check(lambda p, b: fit({"a": jaxshard.unshard(p["a"]), "b": p["b"], "c": p["c"]}, b), strategy)


@both
def test_cast_before_unshard(strategy):
    """A leaf cast first arrives whole, and unshard of the cast is the identity."""

    def loss(params, batch):
        cast = jaxshard.unshard(jax.tree.map(lambda p: (2 * p).astype(p.dtype), params))
        return fit(cast, batch)

    check(loss, strategy)


@both
def test_index_before_unshard(strategy):
    params = {"layers": np.stack([weights()["a"][:, :8], weights()["b"][:8]])}

    def loss(p, b):
        x = b["x"]
        for i in range(2):
            x = jnp.tanh(x @ jaxshard.unshard(p["layers"][i]))
        return jnp.mean(jnp.square(x - b["y"]))

    check(loss, strategy, params)


@both
@pytest.mark.parametrize("how", ["raw", "both unsharded", "one raw"])
def test_tied_weights_add_their_gradients_once(strategy, how):
    def loss(params, batch):
        first = params["a"] if how == "raw" else jaxshard.unshard(params["a"])
        second = jaxshard.unshard(params["a"]) if how == "both unsharded" else params["a"]
        return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ first) @ second.T - batch["y"])) + jnp.sum(params["c"] ** 2)

    check(loss, strategy)


@both
def test_scan_whose_carry_starts_as_a_constant(strategy):
    """An RNN: refused by checked types, and so by most libraries built on shard_map."""

    def loss(params, batch):
        p = jaxshard.unshard(params)

        def cell(state, x):
            state = jnp.tanh(x @ p["a"] + state)
            return state, state @ p["b"]

        _, ys = jax.lax.scan(cell, jnp.zeros((batch["x"].shape[0], 16)), jnp.stack([batch["x"]] * 3))
        return jnp.mean(jnp.square(ys[-1] + p["c"] - batch["y"]))

    check(loss, strategy)


@both
def test_stacked_layers_in_nested_scans(strategy):
    rng = np.random.default_rng(2)
    params = {"w": 0.3 * rng.normal(size=(2, 3, 8, 8))}

    def loss(params, batch):
        def inner(x, w):
            return x + jnp.tanh(x @ jaxshard.unshard(w)), None

        def outer(x, ws):
            return jax.lax.scan(jax.checkpoint(inner), x, ws)[0], None

        return jnp.mean(jnp.square(jax.lax.scan(outer, batch["x"], params["w"])[0] - batch["y"]))

    check(loss, strategy, params)


@both
def test_unshard_inside_jit_cond_and_while(strategy):
    """jit is seen through; a leaf used in a branch or a while loop arrives whole."""

    @jax.jit
    def layer(w, x):
        return jnp.tanh(x @ jaxshard.unshard(w))

    def loss(params, batch):
        h = layer(params["a"], batch["x"])
        b = jax.lax.cond(
            jnp.sum(params["c"]) > 0, lambda w: jaxshard.unshard(w), lambda w: -jaxshard.unshard(w), params["b"]
        )
        y = jax.lax.fori_loop(0, 2, lambda _, y: y + jaxshard.unshard(params["c"]), h @ b)
        return jnp.mean(jnp.square(y - batch["y"]))

    check(loss, strategy)


@jax.custom_vjp
def third_party(x, w):
    return jnp.tanh(x @ w)


def _third_party_forward(x, w):
    y = third_party(x, w)
    return y, (x, w, y)


def _third_party_backward(saved, ct):
    x, w, y = saved
    inner = ct * (1 - y**2)
    return inner @ w.T, x.T @ inner


third_party.defvjp(_third_party_forward, _third_party_backward)


@both
def test_third_party_custom_vjp(strategy):
    def loss(params, batch):
        p = jaxshard.unshard(params)
        return jnp.mean(jnp.square(third_party(batch["x"], p["a"]) @ p["b"] + p["c"] - batch["y"]))

    check(loss, strategy)


def _scale_kernel(x_ref, out_ref):
    out_ref[...] = 3 * x_ref[...]


@jax.custom_vjp
def pallas_scale(x):
    return pl.pallas_call(_scale_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


pallas_scale.defvjp(lambda x: (pallas_scale(x), None), lambda _, ct: (pallas_scale(ct),))


@both
def test_pallas_kernel_interpreted(strategy):
    check(lambda p, b: fit(jaxshard.unshard(p), {"x": pallas_scale(b["x"]), "y": b["y"]}), strategy)
    check(lambda p, b: fit({**p, "a": pallas_scale(p["a"])}, b), strategy)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_a_loss_already_averaged_over_devices(strategy):
    """pmean in the loss, and a synchronised batch norm: their gradients are not N times too small or large."""

    def loss(params, batch):
        h = batch["x"] @ params["a"]
        h = h - jax.lax.pmean(jnp.mean(h, 0), "data")
        return jax.lax.pmean(jnp.mean(jnp.square(h @ params["b"] + params["c"] - batch["y"])), "data")

    def plain(params, batch):
        h = batch["x"] @ params["a"]
        return jnp.mean(jnp.square((h - jnp.mean(h, 0)) @ params["b"] + params["c"] - batch["y"]))

    want = one_device(plain, SGD, weights(), rows())
    got = sharded(loss, opt_of(strategy), weights(), rows())
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


# Keys.


def _noise(params, batch, key):
    noise = jax.random.normal(key, (batch["x"].shape[0], 8))
    return jnp.mean(jnp.sum(noise * params["c"], -1)), noise


@pytest.mark.parametrize("microbatches", [1, 2])
def test_keys_differ_by_data_shard_and_microbatch(microbatches):
    """One key on all devices would give all rows of a device's block the same masks as the next device's."""
    opt = opt_of("zero2")
    f = jaxshard.value_and_grad(lambda p, b, key: _noise(p, b, key)[0], opt, microbatches=microbatches)
    key, parts = jax.random.key(3), 8 * microbatches
    grads = f(weights(), rows(1)[0], key)[1]["c"]
    folded = [jax.random.normal(jax.random.fold_in(key, i), (16 // parts, 8)) for i in range(parts)]
    assert distance(grads, np.mean(np.concatenate(folded), 0)) < 1e-12


def test_keys_left_alone_on_request():
    f = jaxshard.value_and_grad(lambda p, b, key: _noise(p, b, key)[0], opt_of("zero2"), fold_keys=False)
    grads = f(weights(), rows(1)[0], jax.random.key(3))[1]["c"]
    assert distance(grads, np.mean(jax.random.normal(jax.random.key(3), (2, 8)), 0)) < 1e-12


@pytest.mark.parametrize("n", [1, 2, 8])
def test_one_key_per_example_does_not_depend_on_the_mesh(n):
    batch = rows(1)[0] | {"key": jax.random.split(jax.random.key(5), 16)}

    def loss(params, batch):
        masks = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (8,)))(batch["key"])
        return fit(params, {"x": batch["x"] * masks, "y": batch["y"]})

    grads = jaxshard.value_and_grad(loss, opt_of("zero2", n=n), microbatches=2)(weights(), batch)[1]
    assert_close(grads, jax.jit(jax.grad(loss))(weights(), batch), 1e-12)


# Aux.


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_aux_is_averaged_over_shards_and_microbatches(strategy, microbatches):
    def loss(params, batch):
        return fit(params, batch), {"mean": jnp.mean(batch["x"], 0), "first": params["c"][0], "steps": 3}

    step = jaxshard.train_step(loss, opt_of(strategy), has_aux=True, microbatches=microbatches)
    opt, (batch,) = opt_of(strategy), rows(1)
    _, _, metrics = step(opt.place(weights()), opt.init(weights()), batch)
    assert distance(metrics["aux"]["mean"], batch["x"].mean(0)) < 1e-12
    assert distance(metrics["aux"]["first"], weights()["c"][0]) < 1e-12
    assert metrics["aux"]["steps"] == 3


@pytest.mark.parametrize("microbatches", [1, 2])
def test_aux_that_varies_and_has_no_average_is_refused(microbatches):
    def loss(params, batch):
        return fit(params, batch), {"hits": jnp.sum(batch["x"] > 0)}

    f = jaxshard.value_and_grad(loss, opt_of("zero2"), has_aux=True, microbatches=microbatches, loss_view="local")
    with pytest.raises(TypeError, match=r"hits.*depends on the batch.*floating"):
        f(weights(), rows(1)[0])


# Weighted losses.


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_uneven_weights_give_the_exact_mean_not_the_mean_of_means(strategy, microbatches):
    weight = np.arange(16.0) ** 2
    weight[4:6] = 0  # one device without any

    def loss(params, batch):
        each = jnp.mean(jnp.square(jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]), -1)
        return jnp.sum(each * batch["w"]), jnp.sum(batch["w"])

    def whole(params, batch):
        total, weight = loss(params, batch)
        return total / weight

    (batch,) = rows(1)
    batch |= {"w": weight}
    f = jaxshard.value_and_grad(loss, opt_of(strategy), weighted=True, microbatches=microbatches)
    value, grads = f(weights(), batch)
    want_value, want = jax.jit(jax.value_and_grad(whole))(weights(), batch)
    assert distance(value, want_value) < 1e-12
    assert_close(grads, want, 1e-12)
    assert distance(jaxshard.evaluate(loss, opt_of(strategy), weighted=True)(weights(), batch), want_value) < 1e-12


# Arrays' lives.


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_target_network_that_is_the_params_is_an_error_not_a_crash(strategy):
    """At the first step and at a later one, as where a target follows every k steps; the runtime dies of it."""

    def follow(params, batch, target):
        return fit(params, batch) + 0.1 * sum(jnp.sum((params[k] - target[k]) ** 2) for k in params)

    opt = opt_of(strategy)
    params, state = opt.place(weights()), opt.init(weights())
    step, batch = jaxshard.train_step(follow, opt, donate=True), rows(1)[0]
    said = r"further argument 0/a is the array params/a itself.*jax.tree.map\(jnp.copy, params\).*donate=False"
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            step(params, state, batch, params)
        target = jax.tree.map(jnp.copy, params)
        params, state, _ = step(params, state, batch, target)
        params, state, _ = step(params, state, batch, target)
    with pytest.raises(ValueError, match="further argument 0 is the array state/"):
        step(params, state, batch, next(x for x in jax.tree.leaves(state) if x.ndim))
    kept = jaxshard.train_step(follow, opt, donate=False)
    kept(params, state, batch, params)


def test_params_used_after_donation_are_an_error_not_a_crash():
    opt = opt_of("zero2")
    params, state = opt.place(weights()), opt.init(weights())
    step = jaxshard.train_step(fit, opt, donate=True)
    step(params, state, rows(1)[0])
    with pytest.raises(ValueError, match=r"params: a was donated to an earlier step.*donate=False"):
        step(params, opt.init(weights()), rows(1)[0])
    with pytest.raises(ValueError, match=r"state: .* was donated"):
        step(opt.place(weights()), state, rows(1)[0])
    with pytest.raises(ValueError, match="donated"):
        jaxshard.value_and_grad(fit, opt)(params, rows(1)[0])
    with pytest.raises(ValueError, match="donated"):
        opt.place(params)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_the_callers_arrays_live_on(strategy):
    """device_put may share the first device's buffer, even when told not to; a donating step would then take it."""
    opt, step_of = opt_of(strategy), jaxshard.train_step
    mine = jax.tree.map(jnp.asarray, weights())
    placed = opt.place(mine)
    step_of(fit, opt)(placed, opt.init(placed), rows(1)[0])
    step_of(fit, opt)(mine, opt.init(mine), rows(1)[0])  # not placed: copied
    assert_close(mine, weights(), 0.0)
    numpy = weights()
    step_of(fit, opt)(opt.place(numpy), opt.init(numpy), rows(1)[0])
    assert_close(numpy, weights(), 0.0)


def test_state_that_keeps_the_params_is_no_alias_of_them():
    """schedule_free keeps the params themselves in its state; donating both must not donate one buffer twice."""
    tx = optax.contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9)
    for strategy in ("ddp", "zero3"):
        check(fit, strategy, tx=tx)


def test_step_without_donation_leaves_its_arguments():
    opt = opt_of("zero3")
    params, state = opt.place(weights()), opt.init(weights())
    step = jaxshard.train_step(fit, opt, donate=False)
    first = step(params, state, rows(1)[0])
    assert_close(step(params, state, rows(1)[0])[0], first[0], 0.0)
