"""States that plain optax and `jit` go on with: of other dtypes, shapes or length after an update; made of values."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import assert_close
from test_once import counted

import jaxshard

STRATEGIES = ["ddp", "zero2", "zero3", "hsdp"]
NUM_STEPS = 4


def params():
    rng = np.random.default_rng(0)
    shapes = {"w": (16, 24), "b": (24,), "odd": (3,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def batches():
    rng = np.random.default_rng(1)
    return [rng.normal(size=(16, 16)).astype(np.float32) for _ in range(NUM_STEPS)]


def loss(p, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ p["w"]) + p["b"])) + jnp.mean(x**2) * jnp.mean(p["odd"] ** 2)


class State(NamedTuple):
    mean: Any
    count: Any = 0


def keeping(start, new_mean, use=lambda mean, g: mean):
    """`start(param)` is the mean's first value, `new_mean(mean, gradient)` the next."""

    def update(updates, state, p=None):
        mean = jax.tree.map(new_mean, state.mean, updates)
        return jax.tree.map(lambda m, g: -0.1 * use(m, g).astype(g.dtype), mean, updates), State(mean, state.count + 1)

    return optax.GradientTransformation(lambda p: State(jax.tree.map(start, p)), update)


def momentum(mean, g):
    return 0.9 * mean.astype(g.dtype) + g


def listing(append, used):
    def update(updates, state, p=None):
        kept = append(state.mean, updates)
        return jax.tree.map(lambda g: -0.1 * used(kept, g), updates), State(kept, state.count + 1)

    return update


def growing(start, append, used):
    return optax.GradientTransformation(lambda p: State(start()), listing(append, used))


def last_three():
    def update(updates, state, p=None):
        kept = [*state.mean, updates][-3:]
        return jax.tree.map(lambda *gs: -0.1 * sum(gs), *kept), State(kept, state.count + 1)

    return optax.GradientTransformation(lambda p: State([]), update)


def taking_turns():
    """Its state's two names come by turns."""

    def update(updates, state, p=None):
        ((name, mean),) = state.items()
        mean = jax.tree.map(momentum, mean, updates)
        return jax.tree.map(lambda m: -0.1 * m, mean), {"odd" if name == "even" else "even": mean}

    return optax.GradientTransformation(lambda p: {"even": jax.tree.map(jnp.zeros_like, p)}, update)


def bfloat16(x):
    return x.astype(jnp.bfloat16)


CHANGING = {
    "wider": keeping(lambda p: jnp.zeros_like(p, jnp.bfloat16), momentum),
    "narrower": keeping(jnp.zeros_like, lambda mean, g: bfloat16(momentum(mean, g))),
    "complex": keeping(jnp.zeros_like, lambda mean, g: 0.9j * mean + g, lambda mean, g: jnp.abs(mean)),
    "scalars": keeping(lambda p: jnp.zeros(()), momentum),
    "Python's numbers": keeping(lambda p: 0.0, lambda mean, g: 0.9 * mean + g),
    "a list that grows": growing(list, lambda kept, g: [*kept, optax.tree.norm(g)], lambda kept, g: g / len(kept)),
    "an array that grows": growing(
        lambda: jnp.zeros((0,)),
        lambda kept, g: jnp.append(kept, optax.tree.norm(g)),
        lambda kept, g: g / (1 + kept.sum()),
    ),
    "a window": last_three(),
    "names by turns": taking_turns(),
}


def plain(tx, steps=None):
    p = jax.tree.map(jnp.asarray, params())
    state = tx.init(p)

    @jax.jit
    def step(p, state, x):
        updates, state = tx.update(jax.grad(loss)(p, x), state, p)
        return optax.apply_updates(p, updates), state

    for x in steps or batches():
        p, state = step(p, state, x)
    return p, state


def make(strategy, tx, **options):
    mesh = jaxshard.make_mesh(data=4, replica=2) if strategy == "hsdp" else jaxshard.make_mesh()
    return getattr(jaxshard, strategy)(tx, mesh, min_shard_size=2, **options)


def by_train_step(opt, **options):
    p, state = opt.place(params()), opt.init(params())
    step = jaxshard.train_step(loss, opt, **options)
    for x in batches():
        p, state, _ = step(p, state, x)
    return p, state


def by_update(opt, jit):
    p, state, grad = opt.place(params()), opt.init(params()), jaxshard.value_and_grad(loss, opt)
    update = jax.jit(opt.update) if jit else opt.update
    for x in batches():
        updates, state = update(grad(p, x)[1], state, p)
        p = optax.apply_updates(p, updates)
    return p, state


def close(got, want, tolerance=1e-5):
    def of_reals(tree):
        return jax.tree.map(lambda x: np.stack([np.real(x), np.imag(x)]) if np.iscomplexobj(x) else np.asarray(x), tree)

    assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, want)
    assert_close(of_reals(got), of_reals(want), tolerance)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", list(CHANGING))
def test_a_state_that_changes_goes_on_in_a_training_step(name, strategy):
    close(by_train_step(make(strategy, CHANGING[name]), max_skips=None), plain(CHANGING[name]))


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("name", list(CHANGING))
def test_a_state_that_changes_goes_on_by_update(name, jit):
    close(by_update(make("zero2", CHANGING[name]), jit), plain(CHANGING[name]), 2e-2 if name == "narrower" else 1e-5)


def test_on_axes_that_are_explicit():
    opt = jaxshard.zero3(CHANGING["a window"], jax.make_mesh((8,), ("data",)), min_shard_size=2)
    close(by_update(opt, False), plain(CHANGING["a window"]))
    close(by_train_step(opt, max_skips=None), plain(CHANGING["a window"]))


@pytest.mark.parametrize("name", ["wider", "narrower"])
def test_a_change_of_dtype_may_be_skipped(name):
    close(by_train_step(make("zero2", CHANGING[name])), plain(CHANGING[name]))


@pytest.mark.parametrize("name", ["scalars", "an array that grows", "a window"])
def test_a_change_of_shape_cannot_be_skipped(name):
    with pytest.raises(ValueError, match=r"adds or drops mean\S* in the state, or changes its shape.*max_skips=None"):
        by_train_step(make("zero2", CHANGING[name]))


def test_a_moment_that_changes_is_kept_beside_masters_and_narrow_moments():
    adam = optax.chain(optax.scale_by_adam(), CHANGING["wider"])
    close(by_train_step(make("zero2", adam, master_dtype=jnp.float32))[1].inner, plain(adam)[1])
    narrow = by_train_step(make("zero2", adam, moment_dtype=jnp.bfloat16))[1].inner
    assert narrow[0].mu["w"].dtype == jnp.bfloat16
    assert narrow[1].mean["w"].dtype == jnp.float32


def test_a_state_of_another_dtype_or_shape_is_still_refused():
    adam, grads = optax.scale_by_adam(), params()
    opt = make("zero2", adam)
    half = opt.init(params())._replace(mu=jax.tree.map(bfloat16, params()))
    with pytest.raises(ValueError, match=r"mu/b is bfloat16, and opt.init\(params\) makes it float32, as updates do"):
        opt.update(grads, half, params())
    with pytest.raises(ValueError, match=r"mu/b has shape \(\), but that part of opt.init\(params\) has \(24,\)"):
        opt.update(grads, opt.init(params())._replace(mu=jax.tree.map(jnp.sum, params())), params())


# An init that reads values.


def by_norm():
    """Rates of its layers, from NumPy."""

    def update(updates, state, p=None):
        return jax.tree.map(lambda g, norm: -0.1 * g / norm, updates, state.mean), State(state.mean, state.count + 1)

    return optax.GradientTransformation(
        lambda p: State(jax.tree.map(lambda x: np.linalg.norm(np.asarray(x)), p)), update
    )


def by_sign():
    """A start that depends on an `if`."""
    tx = keeping(jnp.zeros_like, momentum)

    def init(p):
        return State(jax.tree.map(lambda x: -x if x.sum() > 0 else x * float(x.max()), p))

    return optax.GradientTransformation(init, tx.update)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tx", [by_norm(), by_sign()], ids=["numpy", "if"])
def test_an_init_that_reads_values_is_run_on_the_host(tx, strategy):
    opt, want = make(strategy, tx), tx.init(jax.tree.map(jnp.asarray, params()))
    for given in (params(), opt.place(params())):
        close(opt.init(given), want)
    close(jax.jit(lambda: opt.init(params()))(), want)
    close(by_train_step(opt), plain(tx))
    close(by_update(opt, jit=True), plain(tx))
    state = opt.init(params())
    assert jax.tree.map(lambda x: x.sharding, state) == opt.shardings(params()).state
    assert "state" in str(opt.layout(params()))


def test_where_there_are_no_values_the_error_says_why():
    opt = make("zero2", by_norm())
    shapes = jax.eval_shape(lambda: params())
    for call in (lambda: opt.init(shapes), lambda: opt.layout(shapes), lambda: jax.jit(opt.init)(params())):
        with pytest.raises(
            ValueError, match=r"init reads the values of its params.*b are not available.*JAX said: The numpy"
        ):
            call()


def test_a_wrong_init_fails_as_it_does_in_optax():
    def init(p):
        raise KeyError("mine")

    opt = make("zero2", optax.GradientTransformation(init, optax.sgd(0.1).update))
    with pytest.raises(KeyError, match="mine"):
        opt.init(params())


# Within a trace.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_concrete_params_within_a_trace(strategy):
    adam = optax.adam(0.1)
    opt, p = make(strategy, adam), params()
    for given in (p, opt.place(p)):
        made = jax.jit(lambda given=given: opt.init(given))()
        close(made, adam.init(p))
        assert jax.tree.map(lambda x: x.sharding, made) == opt.shardings(p).state
        close(jax.jit(lambda given=given: opt.place(given))(), p)
    want = adam.update(p, adam.init(p), p)
    close(jax.jit(lambda: opt.update(p, opt.init(p), p))(), want, 1e-4)
    mask = {"w": True, "b": False, "odd": True}
    for around in (lambda tx: optax.masked(tx, mask), lambda tx: optax.MultiSteps(tx, 2).gradient_transformation()):
        close(jax.jit(lambda around=around: around(opt).init(p))(), around(adam).init(p))


# How often a user's functions are called.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_users_functions_are_traced_once_on_shapes_and_once_for_the_program(strategy):
    inner, calls = counted(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)))
    opt = make(strategy, inner)
    by_train_step(opt)
    assert calls == {"init": 2, "update": 2}
    by_update(opt, jit=True)
    assert calls == {"init": 3, "update": 3}  # a new state, a new program


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_is_traced_once_or_twice(strategy, microbatches):
    def trained(most):
        chex.clear_trace_counter()
        opt = make(strategy, optax.adam(0.1))
        p, state = opt.place(params()), opt.init(params())
        step = jaxshard.train_step(chex.assert_max_traces(loss, most), opt, microbatches=microbatches)
        for x in batches():
            p, state, _ = step(p, state, x)

    trained(2)
    with pytest.raises(AssertionError, match="'loss' is traced > 0 times"):
        trained(0)


def test_an_init_of_values_runs_once():
    inner, calls = counted(by_norm())
    opt = make("zero2", inner)
    opt.init(params())
    assert calls["init"] == 2  # the trace that fails, and the run
