"""What a loss is called with: leaves of the batch belong together, further arguments are meant whole, keys differ."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard

RNG = np.random.default_rng(0)
W, X, Y = (RNG.normal(size=shape).astype("f") for shape in ((8, 4), (16, 8), (16, 4)))


def opt_of(strategy="zero2", n=8):
    return getattr(jaxshard, strategy)(optax.sgd(0.1), jaxshard.make_mesh(devices=jax.devices()[:n]), min_shard_size=1)


def fit(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def test_an_argument_with_the_batchs_rows_is_refused():
    """With as many rows as devices it would broadcast, and train something else in silence."""
    x, y = X[:8], Y[:8]
    for make in (jaxshard.value_and_grad, jaxshard.evaluate):
        with pytest.raises(ValueError, match=r"argument 0 has shape \(8, 4\).*8 rows.*\(x, y\).*jaxshard.whole\(y\)"):
            make(fit, opt_of())(W, x, y)
    opt = opt_of()
    step = jaxshard.train_step(fit, opt)
    params = opt.place(W)
    for call in (step, step.lower, step.trace):
        with pytest.raises(ValueError, match="argument 0 has shape"):
            call(params, opt.init(params), x, y)
    with pytest.raises(ValueError, match="further argument 0: targets/1 has shape"):
        step(params, opt.init(params), x, {"targets": [np.zeros(3), y]})
    with pytest.raises(ValueError, match="argument 0 has shape"):
        jax.jit(jaxshard.value_and_grad(fit, opt))(W, x, y)
    step(params, opt.init(params), x, Y[:1])


def test_it_is_taken_where_it_is_meant_whole():
    def loss(w, x, tree):
        return jnp.mean((x @ w) ** 2) + jnp.mean(tree["y"] ** 2)

    f = jaxshard.value_and_grad(loss, opt_of())
    want = jax.value_and_grad(loss)(W, X, {"y": Y})
    for got in (f(W, X, jaxshard.whole({"y": Y})), jax.jit(f)(W, X, jaxshard.whole({"y": Y}))):
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-5)


@pytest.mark.parametrize("argument", ["text", {"activation": jnp.tanh}, object()])
def test_what_is_no_array_is_named(argument):
    opt = jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh())
    loss = jaxshard.evaluate(lambda p, b, _: jnp.mean(b @ p["w"]), opt)
    with pytest.raises(TypeError, match=r"further argument 0.* is a .*: let the loss close over it"):
        loss({"w": jnp.ones((4, 2))}, jnp.ones((8, 4)), argument)


def test_another_mesh_that_is_set_is_told():
    opt = jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh())
    loss = jaxshard.evaluate(lambda p, b: jnp.mean(b @ p["w"]), opt)
    with (
        jax.set_mesh(jax.make_mesh((2, 4), ("a", "b"))),
        pytest.raises(ValueError, match=r"jax.set_mesh has set, .*'a': 2"),
    ):
        loss({"w": np.ones((4, 2))}, np.ones((8, 4)))
    with jax.set_mesh(jaxshard.make_mesh()):
        loss({"w": np.ones((4, 2))}, np.ones((8, 4)))


def test_nothing_is_refused_where_nothing_is_split():
    opt = opt_of(n=1)
    np.testing.assert_allclose(jaxshard.evaluate(fit, opt)(W, X, Y), fit(W, X, Y), rtol=1e-6)
    with pytest.raises(ValueError, match="argument 0 has shape"):
        jaxshard.value_and_grad(fit, opt, microbatches=2)(W, X, Y)


def test_leaves_of_a_batch_with_other_numbers_of_rows_are_refused():
    def loss(w, batch):
        return fit(w, batch["x"], batch["y"])

    with pytest.raises(ValueError, match=r"batch: y has 8 rows and x has 16.*further argument"):
        jaxshard.value_and_grad(loss, opt_of())(W, {"x": X, "y": Y[:8]})


def noise(w, x, key):
    return jnp.mean((x @ w) ** 2), jax.random.uniform(key, x.shape)


def masks_of(key, strategy="zero2", **options):
    f = jaxshard.value_and_grad(noise, opt_of(strategy), has_aux=True, **options)
    (_, aux), _ = f(W, X, key)
    return np.asarray(aux)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_raw_keys_differ_between_devices_as_typed_ones_do(impl, microbatches):
    typed = jax.random.key(3, impl=impl)
    with jax.default_prng_impl(impl):
        raw = masks_of(jax.random.key_data(typed), microbatches=microbatches)
        np.testing.assert_array_equal(raw, masks_of(typed, microbatches=microbatches))
        assert raw.shape == X.shape
        assert len(np.unique(raw, axis=0)) == len(X)
        same = masks_of(jax.random.key_data(typed), fold_keys=False, microbatches=microbatches)
        assert len(np.unique(same, axis=0)) == 2 // microbatches


def test_keys_deep_in_a_loss_are_found():
    """Split outside of the loss, carried through a scan, taken from an array of keys."""

    def loss(w, x, keys):
        def body(total, key):
            return total + jax.random.uniform(key, x.shape), None

        drawn, _ = jax.lax.scan(body, jnp.zeros_like(x), keys["dropout"])
        return jnp.mean((x @ w) ** 2), jax.jit(lambda x: x * 1)(drawn)

    f = jaxshard.value_and_grad(loss, opt_of(), has_aux=True)
    (_, aux), _ = f(W, X, {"dropout": jax.random.split(jax.random.PRNGKey(0), 3)})
    assert len(np.unique(aux, axis=0)) == len(X)


def test_numbers_that_only_look_like_keys_stay():
    """uint32 pairs that no random function reads."""

    def loss(w, x, table):
        return jnp.mean((x @ w) ** 2), table.astype("f")

    table = np.arange(10, dtype=np.uint32).reshape(5, 2)
    f = jaxshard.value_and_grad(loss, opt_of(), has_aux=True)
    (_, aux), _ = f(W, X, table)
    np.testing.assert_array_equal(aux, table)


def test_keys_in_aux_are_the_first_devices():
    """State of dropout that is handed on: one key, on all devices; folded again, masks differ at the next step too."""

    def loss(w, x, key):
        use, keep = jax.random.split(key)
        return jnp.mean((x @ w) ** 2), {"key": keep, "noise": jax.random.uniform(use, x.shape)}

    f = jaxshard.value_and_grad(loss, opt_of(), has_aux=True)
    (_, first), _ = f(W, X, jax.random.key(0))
    (_, second), _ = f(W, X, first["key"])
    assert first["key"].shape == ()
    assert first["key"] == jax.random.split(jax.random.fold_in(jax.random.key(0), 0))[1]
    both = np.concatenate([first["noise"], second["noise"]])
    assert len(np.unique(both, axis=0)) == 2 * len(X)


@pytest.mark.parametrize("flag", [True, 2])
def test_a_flag_among_further_arguments_is_told_where_it_belongs(flag):
    opt = jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh())
    params = opt.place({"w": jnp.ones((8, 4))})

    def loss(p, b, times):
        return sum(jnp.mean((b @ p["w"]) ** 2) for _ in range(times)) if times else 0.0

    with pytest.raises(TypeError) as raised:
        jaxshard.train_step(loss, opt)(params, opt.init(params), jnp.ones((8, 8)), flag)
    assert "Let the loss close over those whose values it needs" in " ".join(raised.value.__notes__)
