"""What a loss is called with: leaves of the batch belong together, further arguments are meant whole, keys differ."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxshard

RNG = np.random.default_rng(0)
W, X, Y = (RNG.normal(size=shape).astype("f") for shape in ((8, 4), (16, 8), (16, 4)))


def opt_of(strategy="zero2", n=8):
    return getattr(jaxshard, strategy)(optax.sgd(0.1), jaxshard.make_mesh(devices=jax.devices()[:n]), min_shard_size=1)


def fit(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def test_an_argument_with_the_batchs_rows_meets_all_rows():
    """On one device's rows it would broadcast where there are as many rows as devices, and train something else."""
    for rows in (8, 16):
        x, y = X[:rows], Y[:rows]
        f = jaxshard.value_and_grad(fit, opt_of())
        value, grads = f(W, x, y)
        wanted = jax.value_and_grad(fit)(W, x, y)
        np.testing.assert_allclose(value, wanted[0], rtol=1e-6)
        np.testing.assert_allclose(grads, wanted[1], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(jaxshard.evaluate(fit, opt_of())(W, x, y), wanted[0], rtol=1e-6)
        assert "XLA partitions it" in str(f.layout(W, x, y))


def test_a_network_as_wide_as_the_batch_is_no_part_of_it():
    """The weights of another network, as of a target or a critic, may have any shape."""

    def follow(w, x, target):
        return jnp.mean((x @ w - x @ target) ** 2)

    target = np.random.default_rng(1).normal(size=W.shape).astype(np.float32)
    x = X[: len(target)]
    for n, microbatches in ((8, 1), (4, 1), (4, 2)):
        f = jaxshard.value_and_grad(follow, opt_of(n=n), microbatches=microbatches)
        wanted = jax.value_and_grad(follow)(W, x, target)
        value, grads = f(W, x, target)
        np.testing.assert_allclose(value, wanted[0], rtol=1e-6)
        np.testing.assert_allclose(grads, wanted[1], rtol=1e-5, atol=1e-7)
        assert "rows: the loss is a mean over rows" in str(f.layout(W, x, target))


def test_an_argument_with_the_batchs_rows_is_refused_in_the_local_view():
    x, y = X[:8], Y[:8]
    for make in (jaxshard.value_and_grad, jaxshard.evaluate):
        with pytest.raises(ValueError, match=r"argument 0 has shape \(8, 4\).*8 rows.*\(x, y\).*jaxshard.whole\(y\)"):
            make(fit, opt_of(), loss_view="local")(W, x, y)
    opt = opt_of()
    step = jaxshard.train_step(fit, opt, loss_view="local")
    params = opt.place(W)
    for call in (step, step.lower, step.trace):
        with pytest.raises(ValueError, match="argument 0 has shape"):
            call(params, opt.init(params), x, y)
    with pytest.raises(ValueError, match="further argument 0: targets/1 has shape"):
        step(params, opt.init(params), x, {"targets": [np.zeros(3), y]})
    with pytest.raises(ValueError, match="argument 0 has shape"):
        jax.jit(jaxshard.value_and_grad(fit, opt, loss_view="local"))(W, x, y)
    step(params, opt.init(params), x, Y[:1])


@pytest.mark.parametrize("rows", [8, 16])
def test_an_argument_with_the_batchs_rows_is_refused_where_axes_are_named(rows):
    def named(w, x, y):
        return jax.lax.pmean(jnp.mean((x @ w - y[: len(x)]) ** 2), "data")

    f = jaxshard.value_and_grad(named, opt_of())
    with pytest.raises(ValueError, match=rf"argument 0 has shape \({rows}, 4\).*jaxshard.whole\(y\)"):
        f(W, X[:rows], Y[:rows])
    f(W, X[:rows], jaxshard.whole(Y[:rows]))


def test_rows_in_an_argument_of_several_microbatches_are_refused():
    f = jaxshard.value_and_grad(fit, opt_of(), microbatches=2)
    with pytest.raises(ValueError, match=r"further argument 0 has shape \(16, 4\), and the batch has 16 rows"):
        f(W, X[:16], Y[:16])  # one row for each device and microbatch would broadcast
    f = jaxshard.value_and_grad(fit, opt_of(n=4), microbatches=2)
    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        f(W, X[:16], Y[:16])
    assert "further argument 0 has shape (16, 4), and the batch has 16 rows" in "".join(caught.value.__notes__)


def test_it_is_taken_where_it_is_meant_whole():
    def loss(w, x, tree):
        return jnp.mean((x @ w) ** 2) + jnp.mean(tree["y"] ** 2)

    with jax.enable_x64(True):  # in float32 an entry near zero differs by more than 1e-5 on some CPUs
        w, x, y = (a.astype("d") for a in (W, X, Y))
        f = jaxshard.value_and_grad(loss, opt_of())
        want = jax.value_and_grad(loss)(w, x, {"y": y})
        for got in (f(w, x, jaxshard.whole({"y": y})), jax.jit(f)(w, x, jaxshard.whole({"y": y}))):
            np.testing.assert_allclose(got[0], want[0], rtol=1e-12)
            np.testing.assert_allclose(got[1], want[1], rtol=1e-12)


@pytest.mark.parametrize("argument", ["text", {"activation": jnp.tanh}, object()])
def test_what_is_no_array_is_named(argument):
    opt = jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh())
    loss = jaxshard.evaluate(lambda p, b, _: jnp.mean(b @ p["w"]), opt)
    with pytest.raises(TypeError, match=r"further argument 0.* is a .*: let the loss close over it"):
        loss({"w": jnp.ones((4, 2))}, jnp.ones((8, 4)), argument)


def another(kind, mesh):
    if kind == "other axes":
        return jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    if kind == "explicit":
        return jax.make_mesh(tuple(mesh.shape.values()), mesh.axis_names, axis_types=(AxisType.Explicit,) * 4)
    return jaxshard.make_mesh(devices=jax.devices()[::-1] if kind == "other devices" else jax.devices()[:4])


@pytest.mark.parametrize(
    "call", ["init", "update", "synchronize", "evaluate", "value_and_grad", "train_step", "layout"]
)
@pytest.mark.parametrize("kind", ["other axes", "explicit", "other devices", "fewer devices"])
def test_another_mesh_that_is_set_is_told(kind, call):
    opt = jaxshard.zero2(optax.adam(0.1), jaxshard.make_mesh(), min_shard_size=1)
    params, batch = opt.place({"w": np.ones((8, 2))}), np.ones((8, 8))
    state, step = opt.init(params), jaxshard.train_step(by_rows, opt)
    calls = {
        "init": lambda: opt.init(params),
        "update": lambda: opt.update(params, state, params),
        "synchronize": lambda: opt.synchronize(params),
        "evaluate": lambda: jaxshard.evaluate(by_rows, opt)(params, batch),
        "value_and_grad": lambda: jaxshard.value_and_grad(by_rows, opt)(params, batch),
        "train_step": lambda: step(params, state, batch),
        "layout": lambda: step.layout(params, batch),
    }
    with (
        jax.set_mesh(another(kind, opt.mesh)),
        pytest.raises(
            ValueError, match=r"jax.set_mesh has set has the axes' .* and the optimizer's .* outside jax.set_mesh"
        ),
    ):
        calls[call]()
    with jax.set_mesh(opt.mesh):
        calls[call]()


def by_rows(params, batch):
    return jnp.mean(batch @ params["w"])


def test_nothing_is_refused_where_nothing_is_split():
    opt = opt_of(n=1)
    np.testing.assert_allclose(jaxshard.evaluate(fit, opt)(W, X, Y), fit(W, X, Y), rtol=1e-6)
    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        jaxshard.value_and_grad(fit, opt, microbatches=2)(W, X, Y)
    assert "argument 0 has shape" in "".join(caught.value.__notes__)


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


@jax.custom_vjp
def noisy(x, key):
    """x, whose gradient has noise."""
    return x


noisy.defvjp(
    lambda x, key: (x, key),
    lambda key, g: (g + jax.random.normal(jax.random.wrap_key_data(key), g.shape), np.zeros(2, jax.dtypes.float0)),
)


def test_a_raw_key_of_the_backward_pass_alone_differs_between_devices():
    def grad_of(**options):
        loss = lambda w, x, key: jnp.mean(noisy(x @ w, key))  # noqa: E731
        f = jaxshard.value_and_grad(loss, opt_of(n=2), loss_view="local", **options)
        return np.asarray(f(W, X, jax.random.key_data(jax.random.key(3)))[1])

    assert not np.allclose(grad_of(), grad_of(fold_keys=False))


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


COUNTS = {
    "len": lambda p, b: len(b),
    "shape": lambda p, b: b.shape[0],
    "a boolean": lambda p, b: b.shape[0] > 4,
    "a float": lambda p, b: float(len(b)),
    "a sum of ones": lambda p, b: jnp.ones(len(b), jnp.int32).sum(),
    "added to a count": lambda p, b: jnp.sum(p["w"] > 0) + len(b),
}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("count", COUNTS)
def test_a_number_of_rows_in_aux_is_refused(count, microbatches):
    """Each device's loss sees its own rows alone, so that this would be the number of these."""

    def loss(p, b):
        return jnp.mean(b @ p["w"]), {"rows": COUNTS[count](p, b)}

    f = jaxshard.value_and_grad(loss, opt_of(), has_aux=True, microbatches=microbatches, loss_view="local")
    with pytest.raises(TypeError, match=r"aux leaf rows .*number of rows that the loss sees.*outside the loss"):
        f({"w": jnp.ones((4, 2))}, jnp.ones((32, 4)))


@pytest.mark.parametrize("count", COUNTS)
def test_a_number_of_rows_in_aux_is_that_of_one_device(count):
    def loss(p, b):
        return jnp.mean(b @ p["w"]), {"rows": COUNTS[count](p, b)}

    given = {"w": jnp.ones((4, 2))}, jnp.ones((32, 4))
    (_, aux), _ = jaxshard.value_and_grad(loss, opt_of(), has_aux=True)(*given)
    assert float(aux["rows"]) == float(loss(*given)[1]["rows"])


def test_other_numbers_in_aux_stay_and_rows_are_counted_as_the_error_says():
    def loss(p, b, seen):
        aux = {"steps": 3, "first": True, "width": p["w"].shape[0], "seen": seen + 1, "zero": jnp.zeros(len(b)).sum()}
        return jnp.mean(jax.nn.relu(b @ p["w"])), aux | {"rows": jnp.ones(len(b))}

    f = jaxshard.value_and_grad(loss, opt_of(), has_aux=True)
    aux = f({"w": jnp.ones((4, 2))}, jnp.ones((32, 4)), 5)[0][1]
    assert jnp.sum(aux.pop("rows")) == 32
    assert aux == {"steps": 3, "first": True, "width": 4, "seen": 6, "zero": 0}
    one = jaxshard.value_and_grad(lambda p, b: (jnp.mean(b @ p["w"]), len(b)), opt_of(n=1), has_aux=True)
    assert one({"w": jnp.ones((4, 2))}, jnp.ones((32, 4)))[0][1] == 32
