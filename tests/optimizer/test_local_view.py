"""`update` inside a user's own `jax.shard_map`: right for what is element-wise, refused for what cannot be right."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxshard

LR = 0.05
AXES = ("replica", "data")


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def params_of(num_data):
    """A leaf that is cut N ways, one that is cut on another dim, one that no N divides, a scalar."""
    return {
        "w": normal(1, 16, 8 * num_data) / 4,
        "deep": [normal(2, 2, 8 * num_data, 8 * num_data - 1) / 4],
        "odd": normal(3, 17),
        "scale": normal(4),
    }


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["w"] * params["scale"])
    out = hidden @ params["deep"][0][0] + hidden @ params["deep"][0][1]
    return jnp.mean(out**2) + jnp.mean((x[:, :1] * params["odd"]) ** 2)


def rows(step, num):
    """Different on every device, of different size too, so that a lost device shows."""
    return normal(50 + step, num, 16) * np.linspace(0.5, 2, num, dtype=np.float32)[:, None]


def mesh_of(num_data, num_replicas=1):
    devices = jax.devices()[: num_data * num_replicas]
    return jaxshard.make_mesh(data=num_data, replica=num_replicas, devices=devices)


def local_step(opt, loss=loss_fn, *, pass_params=True):
    """The training step of a user's own loop: partial gradients, then update, inside one shard_map."""

    def step(params, state, x):
        grads = jax.grad(loss)(lax.pcast(params, AXES, to="varying"), x)
        updates, state = opt.update(grads, state, params if pass_params else None)
        return optax.apply_updates(params, updates), state

    return step


def mapped(step, opt, params, **options):
    state = opt.shardings(params).specs.state
    specs = {"in_specs": (P(), state, P(AXES)), "out_specs": (P(), state)}
    return jax.jit(jax.shard_map(step, mesh=opt.mesh, **specs, **options))


def oracle(inner, params, batches):
    params = jax.tree.map(jnp.array, params)
    state = inner.init(params)

    @jax.jit
    def step(params, state, x):
        updates, state = inner.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    for x in batches:
        params, state = step(params, state, x)
    return params, state


def assert_close(got, want, tolerance=1e-5):
    """Same structure, shapes and dtypes; values within `tolerance` of each leaf's largest."""

    def error(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return np.max(np.abs(a - b), initial=0) / max(np.max(np.abs(b), initial=0), 1e-3)

    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_equal_comparator(
        lambda a, b: error(a, b) <= tolerance, lambda a, b: f"{error(a, b)} apart", got, want
    )


INNERS = {"sgd": lambda: optax.sgd(LR, momentum=0.9), "adamw": lambda: optax.adamw(LR, weight_decay=0.1)}
CASES = [(strategy, *mesh, "sgd") for strategy in ("zero1", "zero2") for mesh in [(2, 1), (3, 1), (8, 1), (4, 2)]]
CASES += [("ddp", 3, 1, "sgd"), ("ddp", 4, 2, "sgd"), ("zero2", 1, 2, "sgd")]
CASES += [("ddp", 8, 1, "adamw"), ("zero1", 3, 1, "adamw"), ("zero2", 8, 1, "adamw"), ("zero2", 4, 2, "adamw")]


@functools.cache
def five_steps(name, num_data, num_rows):
    return oracle(INNERS[name](), params_of(num_data), [rows(i, num_rows) for i in range(5)])


@pytest.mark.parametrize(("strategy", "num_data", "num_replicas", "name"), CASES)
@pytest.mark.filterwarnings("ignore:.*cannot be sharded")  # "odd" is there for that
def test_five_steps_equal_the_oracle(strategy, num_data, num_replicas, name):
    num_rows = 2 * num_data * num_replicas
    opt = getattr(jaxshard, strategy)(INNERS[name](), mesh_of(num_data, num_replicas), min_shard_size=2)
    params = opt.place(params_of(num_data))
    state = opt.init(params)
    step = mapped(local_step(opt), opt, params)
    for i in range(5):
        params, state = step(params, state, rows(i, num_rows))
    assert_close((params, state), five_steps(name, num_data, num_rows))
    cut = num_data > 1 and strategy != "ddp"
    moment = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, dict))
    moment = next(m for m in moment if isinstance(m, dict))["w"]
    assert moment.addressable_shards[0].data.size * (num_data if cut else 1) == moment.size


def test_params_may_be_left_out():
    opt = jaxshard.zero2(INNERS["sgd"](), mesh_of(8), min_shard_size=32)
    params = opt.place(params_of(8))
    step = mapped(local_step(opt, pass_params=False), opt, params)
    got = step(params, opt.init(params), rows(0, 16))
    assert_close(got, oracle(INNERS["sgd"](), params_of(8), [rows(0, 16)]))


def test_masters_in_the_local_view():
    opt = jaxshard.zero2(INNERS["sgd"](), mesh_of(8), min_shard_size=32, master_dtype=jnp.float32)
    params = opt.place(params_of(8))
    state = opt.init(params)
    step = mapped(local_step(opt), opt, params)
    for i in range(3):
        params, state = step(params, state, rows(i, 16))
    want = oracle(INNERS["sgd"](), params_of(8), [rows(i, 16) for i in range(3)])
    assert_close((params, state.inner), want)
    assert_close(state.extra["master"], params, 1e-6)


# What is element-wise is accepted, and right.

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, LR, 2, 6)
MASK = {"w": True, "deep": False, "odd": True, "scale": True}
LABELS = {"w": "a", "deep": "b", "odd": "a", "scale": "b"}
ELEMENTWISE = {
    "sgd": lambda: optax.sgd(LR),
    "nesterov": lambda: optax.sgd(LR, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(LR),
    "adam bf16 moments": lambda: optax.adam(LR, mu_dtype=jnp.bfloat16),
    "adamw masked decay": lambda: optax.adamw(LR, weight_decay=0.1, mask=MASK),
    "adamw schedule": lambda: optax.adamw(SCHEDULE),
    "amsgrad": lambda: optax.amsgrad(LR),
    "nadam": lambda: optax.nadam(LR),
    "radam": lambda: optax.radam(LR),
    "adabelief": lambda: optax.adabelief(LR),
    "adagrad": lambda: optax.adagrad(LR),
    "adadelta": lambda: optax.adadelta(LR),
    "rmsprop": lambda: optax.rmsprop(LR, centered=True, momentum=0.9),
    "yogi": lambda: optax.yogi(LR),
    "lion": lambda: optax.lion(LR),
    "rprop": lambda: optax.rprop(LR),
    "adan": lambda: optax.adan(LR),
    "optimistic": lambda: optax.optimistic_gradient_descent(LR),
    "clip by value": lambda: optax.chain(optax.clip(0.01), optax.sgd(LR)),
    "zero nans": lambda: optax.chain(optax.keep_params_nonnegative(), optax.sgd(LR)),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(LR)),
    "chain of schedules": lambda: optax.chain(
        optax.scale_by_adam(), optax.scale_by_schedule(SCHEDULE), optax.scale(-1)
    ),
    "masked": lambda: optax.masked(optax.adam(LR), MASK),
    "partition": lambda: optax.partition({"a": optax.adam(LR), "b": optax.sgd(LR)}, LABELS),
    "frozen": lambda: optax.partition({"a": optax.adam(LR), "b": optax.set_to_zero()}, LABELS),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(LR), 2).gradient_transformation(),
}


def light_params():
    return {"w": normal(1, 8, 16), "deep": normal(2, 16), "odd": normal(3, 7), "scale": normal(4)}


def light_grads(i, device=None):
    """Gradients of each device, (8, ...), or those of one."""
    grads = jax.tree.map(lambda p: normal(70 + i, 8, *p.shape), light_params())
    return grads if device is None else jax.tree.map(lambda g: g[device], grads)


def update_locally(opt):
    def step(params, state, grads):
        updates, state = opt.update(jax.tree.map(lambda g: g[0], grads), state, params)
        return optax.apply_updates(params, updates), state

    return mapped(step, opt, light_params())


@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_elementwise_transformations_are_accepted_and_right(name):
    inner = ELEMENTWISE[name]()
    opt = jaxshard.zero2(inner, mesh_of(8), min_shard_size=8)
    want = params = light_params()
    want_state, state = inner.init(jax.tree.map(jnp.array, params)), opt.init(params)
    run, plain = update_locally(opt), jax.jit(inner.update)
    for i in range(3):
        params, state = run(params, state, light_grads(i))
        updates, want_state = plain(jax.tree.map(lambda g: g.mean(0), light_grads(i)), want_state, want)
        want = optax.apply_updates(want, updates)
    # bf16 moments and signs turn the last bit of a mean into a visible difference.
    assert_close(params, want, 1e-2 if "bf16" in name else 2e-5)


# What is not is refused, by the name of the operation.

NOT_ELEMENTWISE = {
    "clip_by_global_norm": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(LR)), "reduce_sum"),
    "lamb": (lambda: optax.lamb(LR), "reduce_sum"),
    "lars": (lambda: optax.lars(LR), "reduce_sum"),
    "fromage": (lambda: optax.fromage(LR), "reduce_sum"),
    "novograd": (lambda: optax.novograd(LR), "reduce_sum"),
    "adafactor": (lambda: optax.adafactor(LR, min_dim_size_to_factor=4), "reduce"),
    "sm3": (lambda: optax.masked(optax.sm3(LR), MASK | {"deep": True, "scale": False}), "cannot run"),
    "muon": (lambda: optax.contrib.muon(LR), ""),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.sgd(LR), 3), "reduce_and"),
    "add_noise": (lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(LR)), "random_bits"),
    "noisy_sgd": (lambda: optax.noisy_sgd(LR, key=0), "random_bits"),
    "centralize": (lambda: optax.chain(optax.centralize(), optax.sgd(LR)), "reduce_sum"),
    "adaptive_grad_clip": (lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(LR)), "adaptive_grad_clip"),
    "clip_by_block_rms": (lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(LR)), "reduce_sum"),
    "normalize": (lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(LR)), "reduce_sum"),
    "dog": (lambda: optax.contrib.dog(), "reduce"),
    "dowg": (lambda: optax.contrib.dowg(), "reduce"),
    "prodigy": (lambda: optax.contrib.prodigy(), "dot_general"),
    "dadapt": (lambda: optax.contrib.dadapt_adamw(), "dot_general"),
    "lbfgs": (lambda: optax.lbfgs(LR, linesearch=None), ""),
    "skip": (
        lambda: optax.MultiSteps(optax.sgd(LR), 2, True, optax.skip_not_finite).gradient_transformation(),
        "reduce_sum",
    ),
    "cumulative": (lambda: _stateless(lambda g: jnp.cumsum(g, axis=-1)), "cumsum"),
    "reversed": (lambda: _stateless(lambda g: g[..., ::-1]), "rev"),
    "sorted": (lambda: _stateless(lambda g: jnp.sort(g, axis=-1)), "sort"),
    "by position": (lambda: _stateless(lambda g: g * jnp.arange(g.size, dtype=g.dtype).reshape(g.shape)), "iota"),
    "by size": (lambda: _stateless(lambda g: g * jnp.sum(jnp.ones_like(g))), "reduce_sum"),
    "by shape": (lambda: _stateless(lambda g: g / g.size), "taken from the shape"),
}  # fmt: skip


def _stateless(fn):
    return optax.stateless(lambda updates, params: jax.tree.map(lambda g: fn(g) if g.ndim else g, updates))


@pytest.mark.parametrize("name", list(NOT_ELEMENTWISE))
def test_what_is_not_elementwise_is_refused_by_name(name):
    make, operation = NOT_ELEMENTWISE[name]
    for strategy in ("zero1", "zero2"):
        opt = getattr(jaxshard, strategy)(make(), mesh_of(8), min_shard_size=16)
        args = (light_params(), opt.init(light_params()), light_grads(0))
        with pytest.raises(ValueError, match="not element-wise") as caught:
            jax.eval_shape(update_locally(opt), *args)
        message = str(caught.value)
        assert operation in message
        for word in (strategy, "outside shard_map", "ddp"):
            assert word in message
        assert any(leaf in message for leaf in ("w", "deep", "shape"))


@pytest.mark.parametrize("name", ["clip_by_global_norm", "lamb", "adafactor", "muon", "novograd", "centralize", "skip"])
def test_ddp_accepts_all(name):
    inner = NOT_ELEMENTWISE[name][0]()
    opt = jaxshard.ddp(inner, mesh_of(8))
    params, state = update_locally(opt)(light_params(), opt.init(light_params()), light_grads(0))
    plain = inner.init(jax.tree.map(jnp.array, light_params()))
    grads = jax.tree.map(lambda g: g.mean(0), light_grads(0))
    updates, plain = jax.jit(inner.update)(grads, plain, light_params())
    assert_close((params, state), (optax.apply_updates(light_params(), updates), plain))


def test_leaves_kept_whole_do_not_count():
    opt = jaxshard.zero2(optax.lamb(LR), mesh_of(8), min_shard_size=1000)
    jax.eval_shape(update_locally(opt), light_params(), opt.init(light_params()), light_grads(0))


# Gradients that were reduced already: with SGD, for Adam would hide the factor.


def refused(opt, step, error, *words, params=None, **options):
    params = params_of(8) if params is None else params
    with pytest.raises(error) as caught:
        jax.eval_shape(mapped(step, opt, params, **options), params, opt.init(params), rows(0, 16))
    for word in words:
        assert word in str(caught.value)


@pytest.fixture(scope="module", params=["ddp", "zero1", "zero2"])
def opt(request):
    return getattr(jaxshard, request.param)(optax.sgd(LR, momentum=0.9), mesh_of(8), min_shard_size=32)


def test_gradients_of_replicated_params_are_refused(opt):
    """Autodiff has summed them: 8 times too large."""

    def step(params, state, x):
        updates, state = opt.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    refused(opt, step, TypeError, opt.config.strategy, "does not vary", "'data'", "pcast", "outside shard_map", "w")


def test_averaged_gradients_are_refused(opt):
    def step(params, state, x):
        grads = jax.grad(loss_fn)(lax.pcast(params, AXES, to="varying"), x)
        updates, state = opt.update(lax.pmean(grads, AXES), state, params)
        return optax.apply_updates(params, updates), state

    refused(opt, step, TypeError, "already reduced", "pcast")


def test_a_mean_in_the_loss_is_refused(opt):
    def step(params, state, x):
        grads = jax.grad(lambda p: lax.pmean(loss_fn(p, x), AXES))(params)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    refused(opt, step, TypeError, "already reduced", "pcast")


def test_one_reduced_leaf_among_others_is_refused(opt):
    def step(params, state, x):
        grads = jax.grad(loss_fn)(lax.pcast(params, AXES, to="varying"), x)
        grads["deep"] = lax.psum(grads["deep"], AXES)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    refused(opt, step, TypeError, "deep/0", "does not vary")


def test_gradients_that_vary_over_one_of_two_axes_are_refused():
    opt = jaxshard.zero2(optax.sgd(LR), mesh_of(4, 2), min_shard_size=32)

    def step(params, state, x):
        grads = jax.grad(loss_fn)(lax.pcast(params, AXES, to="varying"), x)
        updates, state = opt.update(lax.pmean(grads, "replica"), state, params)
        return optax.apply_updates(params, updates), state

    refused(opt, step, TypeError, "does not vary", "'replica'")


def test_unchecked_types_are_refused(opt):
    refused(opt, local_step_unchecked(opt), ValueError, opt.config.strategy, "check_vma", check_vma=False)


def local_step_unchecked(opt):
    def step(params, state, x):
        updates, state = opt.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.parametrize("strategy", ["zero3", "hsdp"])
def test_strategies_that_cut_the_params_are_refused(strategy):
    opt = getattr(jaxshard, strategy)(optax.sgd(LR), mesh_of(4, 2), min_shard_size=32)
    refused(opt, local_step(opt), ValueError, strategy, "value_and_grad", "outside shard_map")


def test_params_that_vary_are_refused(opt):
    def step(params, state, x):
        varied = lax.pcast(params, AXES, to="varying")
        updates, state = opt.update(jax.grad(loss_fn)(varied, x), state, varied)
        return optax.apply_updates(params, updates), state

    refused(opt, step, TypeError, "params", "varies", "pass the original params")


def test_extra_arguments_that_vary_are_refused():
    opt = jaxshard.zero2(optax.polyak_sgd(), mesh_of(8), min_shard_size=32)

    def step(params, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(lax.pcast(params, AXES, to="varying"), x)
        updates, state = opt.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    refused(opt, step, TypeError, "value", "pmean")


def test_a_shard_map_that_leaves_an_axis_out_is_refused():
    opt = jaxshard.zero2(optax.sgd(LR), mesh_of(4, 2), min_shard_size=32)

    def step(params, state, x):
        grads = jax.grad(loss_fn)(lax.pcast(params, "data", to="varying"), x)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = opt.shardings(params_of(8)).specs.state
    fn = jax.shard_map(
        step, mesh=opt.mesh, in_specs=(P(), state, P("data")), out_specs=(P(), state), axis_names={"data"}
    )
    with pytest.raises(ValueError, match="replica"):
        jax.eval_shape(jax.jit(fn), params_of(8), opt.init(params_of(8)), rows(0, 16))


def test_a_shard_map_may_leave_out_axes_of_size_1():
    opt = jaxshard.zero2(INNERS["adamw"](), mesh_of(8), min_shard_size=32)
    params, batch, specs = params_of(8), rows(0, 16), opt.shardings(params_of(8)).specs.state

    def step(params, state, x):
        grads = jax.grad(loss_fn)(lax.pcast(params, "data", to="varying"), x)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    given = {"in_specs": (P(), specs, P("data")), "out_specs": (P(), specs), "axis_names": {"data"}}
    got, _ = jax.jit(jax.shard_map(step, mesh=opt.mesh, **given))(params, opt.init(params), batch)
    want, _ = oracle(INNERS["adamw"](), params, [batch])
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_step_compiles_once(count_compilations):
    opt = jaxshard.zero2(INNERS["adamw"](), mesh_of(8), min_shard_size=32)
    params = opt.place(params_of(8))
    state = opt.init(params)
    step = mapped(local_step(opt), opt, params)
    batches = [jaxshard.shard_batch(rows(i, 16), opt) for i in range(3)]
    (first, (params, state)) = count_compilations(step, params, state, batches[0])
    counts = []
    for x in itertools.islice(batches, 1, None):
        count, (params, state) = count_compilations(step, params, state, x)
        counts.append(count)
    assert first >= 1
    assert counts == [0, 0]
