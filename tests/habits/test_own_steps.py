"""Steps that users write: their carries keep the layout, they compile once, and errors have lines that work."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard
from jaxshard.checkpoint import from_bytes, to_bytes

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(6, 8)).astype("f"), "v": RNG.normal(size=(8,)).astype("f")}
BATCHES = RNG.normal(size=(3, 8, 6)).astype("f")
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp"]


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - 1) ** 2)


def one_device(tx, batches=BATCHES, **extra):
    params, state = PARAMS, tx.init(PARAMS)
    for x in batches:
        value, grads = jax.value_and_grad(loss_fn)(params, x)
        if extra:
            extra = {"value": value, "grad": grads, "value_fn": lambda params, x=x: loss_fn(params, x)}
        updates, state = tx.update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params


def wrapped(strategy, tx, **options):
    mesh = jaxshard.make_mesh(replica=2 if strategy == "hsdp" else 1, devices=jax.devices()[:4])
    return getattr(jaxshard, strategy)(tx, mesh, min_shard_size=1, **options)


def by_scan(one_step, params, state, batches):
    return jax.lax.scan(lambda carry, x: (one_step(*carry, x), None), (params, state), batches)[0]


def by_fori_loop(one_step, params, state, batches):
    return jax.lax.fori_loop(0, 3, lambda i, carry: one_step(*carry, batches[i]), (params, state))


def by_while_loop(one_step, params, state, batches):
    def body(carry):
        return (carry[0] + 1, *one_step(*carry[1:], batches[carry[0]]))

    return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, params, state))[1:]


def unrolled(one_step, params, state, batches):
    for x in batches:
        params, state = one_step(params, state, x)
    return params, state


@pytest.mark.parametrize("loop", [by_scan, by_fori_loop, by_while_loop, unrolled])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("gradients", ["ours", "jax"])
def test_a_carry_keeps_its_layout(strategy, loop, gradients):
    tx = optax.adamw(0.1)  # reads the params
    opt = wrapped(strategy, tx)

    def one_step(params, state, x):
        if gradients == "ours":
            grads = jaxshard.value_and_grad(loss_fn, opt)(params, x)[1]
        else:
            grads = jax.grad(loss_fn)(params, x)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(lambda *args: loop(one_step, *args), donate_argnums=(0, 1))
    params = opt.place(PARAMS)
    state = opt.init(params)
    placed = jax.tree.map(lambda x: x.sharding, (params, state))
    params, state = run(params, state, BATCHES)
    for sharding, x in zip(jax.tree.leaves(placed), jax.tree.leaves((params, state)), strict=True):
        assert sharding.is_equivalent_to(x.sharding, x.ndim), (sharding, x.sharding)
    close(params, one_device(tx))
    run(params, state, BATCHES)
    assert run._cache_size() == 1


def assert_at_rest(opt, params):
    for sharding, x in zip(jax.tree.leaves(opt.shardings(params).params), jax.tree.leaves(params), strict=True):
        assert sharding.is_equivalent_to(x.sharding, x.ndim), (sharding, x.sharding)


def by_gradients_of_jax(opt, params, state, x):
    updates, state = opt.update(jax.grad(loss_fn)(params, x), state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("read_back", [False, True])
def test_params_that_were_never_placed_come_back_at_rest(strategy, read_back):
    """And so do params that were read back from bytes into others that lie on one device."""
    opt = wrapped(strategy, optax.adamw(0.1))
    params = jax.tree.map(jnp.asarray, PARAMS)
    if read_back:
        params = from_bytes(params, to_bytes(params))
    params, _ = jax.jit(lambda *args: by_gradients_of_jax(opt, *args))(params, opt.init(params), BATCHES[0])
    assert_at_rest(opt, params)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_place_says_where_params_are_that_a_gradient_of_steps_changes(strategy):
    opt = wrapped(strategy, optax.adamw(0.1))

    def outer(params, x):
        def after_two(params):
            inner, state = by_gradients_of_jax(opt, params, opt.init(params), x)
            return loss_fn(by_gradients_of_jax(opt, inner, state, x)[0], x)

        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(after_two)(params))
        return opt.place(new)

    for params in (PARAMS, opt.place(PARAMS)):
        assert_at_rest(opt, jax.jit(outer)(params, BATCHES[0]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_new_params_that_another_loss_takes_whole_come_back_at_rest(strategy):
    """The two losses of a GAN in one program: the second takes what the first one's update made."""
    one, two = wrapped(strategy, optax.adam(0.1)), wrapped(strategy, optax.adam(0.1))

    def of_both(params, batch, other):
        return loss_fn(other, batch) * jnp.mean(params["w"]) + jnp.mean(params["v"] ** 2)

    def step(a, a_state, b, b_state, x):
        grads = jaxshard.value_and_grad(of_both, one)(a, x, jaxshard.whole(b))[1]
        updates, a_state = one.update(grads, a_state, a)
        a = optax.apply_updates(a, updates)
        grads = jaxshard.value_and_grad(of_both, two)(b, x, jaxshard.whole(a))[1]
        updates, b_state = two.update(grads, b_state, b)
        return a, a_state, optax.apply_updates(b, updates), b_state

    a, b = one.place(PARAMS), two.place(PARAMS)
    a, _, b, _ = jax.jit(step)(a, one.init(a), b, two.init(b), BATCHES[0])
    assert_at_rest(one, a)
    assert_at_rest(two, b)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("jit", [jax.jit, lambda run: run])
def test_steps_under_vmap_are_those_of_each_seed(strategy, jit, count_compilations):
    """Also without `jit`, where the step is one program, too."""
    opt = wrapped(strategy, optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)))
    step = jaxshard.train_step(loss_fn, opt)
    seeds = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)
    state = jax.jit(jax.vmap(opt.init))(seeds)
    run = jit(jax.vmap(lambda params, state, x: step(params, state, x)[:2], (0, 0, None)))
    got, after = run(seeds, state, BATCHES[0])
    for i in range(2):
        params = jax.tree.map(lambda x, i=i: x[i], seeds)
        close(jax.tree.map(lambda x, i=i: x[i], got), step(opt.place(params), opt.init(params), BATCHES[0])[0])
    got, after = run(got, after, BATCHES[1])
    assert count_compilations(run, got, after, BATCHES[2])[0] == 0


def test_gradients_under_vmap_alone_are_those_of_each_seed(count_compilations):
    grads_of = jaxshard.value_and_grad(loss_fn, wrapped("zero2", optax.adamw(0.1)))
    seeds = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)
    run = jax.vmap(grads_of, (0, None))
    run(seeds, BATCHES[1])
    count, got = count_compilations(run, seeds, BATCHES[0])
    assert count == 0
    close(got, jax.vmap(jax.value_and_grad(loss_fn), (0, None))(seeds, BATCHES[0]))


def to_target(params, x, target):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - jnp.tanh(x @ target["w"]) @ target["v"] - 1) ** 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_target_keeps_the_layout_of_the_params(strategy):
    """As a further argument and as a frozen part of the params: the same numbers."""
    tx, ema = optax.adamw(0.1), optax.ema(0.9)
    opt = wrapped(strategy, tx)
    follow = jax.jit(lambda params, target: optax.incremental_update(params, target, 0.5))
    params = opt.place(PARAMS)
    target, state, average = jax.tree.map(jnp.copy, params), opt.init(params), ema.init(params)
    step = jaxshard.train_step(to_target, opt)
    for x in BATCHES:
        params, state, _ = step(params, state, x, target)
        target, average = follow(params, target), jax.jit(ema.update)(params, average)[1]
    for tree in (target, average.ema):
        assert_at_rest(opt, tree)

    opt = wrapped(strategy, tx, frozen=["^target/"])
    both = opt.place({"net": PARAMS, "target": PARAMS})
    state, step = opt.init(both), jaxshard.train_step(lambda both, x: to_target(both["net"], x, both["target"]), opt)
    for x in BATCHES:
        both, state, _ = step(both, state, x)
        both["target"] = follow(both["net"], both["target"])
    assert_at_rest(opt, both)
    close(both, {"net": params, "target": target})


@pytest.mark.parametrize("offset", [0, 4])
def test_a_numpy_batch_compiles_nothing_at_a_later_step(offset, count_compilations):
    """XLA for CPU takes the memory of an array that begins at a multiple of 64 bytes, and then it is copied."""
    opt = wrapped("zero2", optax.adamw(0.1))
    step, params = jaxshard.train_step(loss_fn, opt), opt.place(PARAMS)
    state, x = opt.init(params), np.asarray(BATCHES[0], "f")
    memory = np.zeros(x.nbytes + 128, np.uint8)
    aligned = -memory.ctypes.data % 64
    for i, start in enumerate([aligned + 4 - offset, aligned + offset]):
        batch = memory[start : start + x.nbytes].view("f").reshape(x.shape)
        batch[:] = x
        count, (params, state, _) = count_compilations(step, params, state, batch)
        batch[:] = np.nan
        assert count == 0 or i == 0
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))


def trained(step, opt, batches=BATCHES):
    params = opt.place(PARAMS)
    state = opt.init(params)
    for x in batches:
        params, state, _ = step(params, state, x)
    return params


def close(got, want):
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def lines_with(error, start):
    return [line for line in str(error.value).splitlines() if line.startswith(start)]


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_the_error_of_a_line_search_has_the_line_that_works(strategy):
    tx = optax.lbfgs()
    opt = wrapped(strategy, tx)
    params = opt.place(PARAMS)
    with pytest.raises(TypeError, match="needs the argument 'value_fn'") as error:
        jaxshard.train_step(loss_fn, opt)(params, opt.init(params), BATCHES[0])
    names = {"train_step": jaxshard.train_step, "loss_fn": loss_fn, "opt": opt}
    (line,) = lines_with(error, "train_step(")
    close(trained(eval(line, names), opt), one_device(tx, value_fn=loss_fn))

    (line,) = lines_with(error, "opt.update(")

    @jax.jit
    def own(params, state, batch):
        loss, grads = jaxshard.value_and_grad(loss_fn, opt)(params, batch)
        updates, state = eval(
            line, names | {"grads": grads, "loss": loss, "params": params, "batch": batch, "state": state}
        )
        return optax.apply_updates(params, updates), state, None

    close(trained(own, opt), one_device(tx, value_fn=loss_fn))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_by_several_batches(strategy):
    """`MultiSteps` inside, as the error says, and around, with its state as plain optax's."""
    every_two = optax.MultiSteps(optax.adam(0.1), every_k_schedule=2)
    want = one_device(every_two.gradient_transformation(), [*BATCHES, *BATCHES])
    with pytest.raises(TypeError, match=r"give its \.gradient_transformation\(\)"):
        wrapped(strategy, every_two)
    opt = wrapped(strategy, every_two.gradient_transformation())
    close(trained(jaxshard.train_step(loss_fn, opt), opt, [*BATCHES, *BATCHES]), want)

    opt = wrapped(strategy, optax.adam(0.1))
    around = optax.MultiSteps(opt, every_k_schedule=2)
    with pytest.raises(
        TypeError, match=re.escape("jaxshard.zero2(optax.MultiSteps(...).gradient_transformation(), mesh)")
    ):
        jaxshard.train_step(loss_fn, around)

    @jax.jit
    def own(params, state, x):
        _, grads = jaxshard.value_and_grad(loss_fn, opt)(params, x)
        updates, state = around.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = opt.place(PARAMS)
    state = around.init(params)
    for x in [*BATCHES, *BATCHES]:
        params, state = own(params, state, x)
    close(params, want)
