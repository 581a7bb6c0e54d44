"""Gradients of each example: optax's own example of DP-SGD, with its optimizer sharded."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard

Tree = Any
SHAPES = {"w": (6, 24), "b": (24,), "v": (24, 3), "scale": ()}


def start(dtype: str = "float64") -> Tree:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) / 3 for name, shape in SHAPES.items()}


def loss_fn(params: Tree, batch: Tree) -> jax.Array:
    x, y = batch
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"] * params["scale"] - y) ** 2)


def batches(rows: int = 24) -> list[Tree]:
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(rows, 6)), rng.normal(size=(rows, 3))) for _ in range(4)]


def trained(opt: Any, params: Tree, *, with_params: bool = True) -> tuple[Tree, Tree]:
    state = opt.init(params)

    @jax.jit
    def step(params, state, batch):
        of_each = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))
        grads = of_each(params, jax.tree.map(lambda x: x[:, None], batch))
        updates, state = opt.update(grads, state, params if with_params else None)
        return optax.apply_updates(params, updates), state

    for batch in batches():
        params, state = step(params, state, batch)
    return params, state


def private(momentum: float | None = 0.9) -> optax.GradientTransformation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # optax's: its key has another name in the next version
        return optax.contrib.dpsgd(0.1, l2_norm_clip=0.5, noise_multiplier=1.1, seed=3, momentum=momentum)


CHAINS = {
    "momentum": private(),
    "plain": private(None),
    "adam": optax.chain(
        optax.contrib.differentially_private_aggregate(0.5, 1.1, key=3), optax.clip_by_global_norm(0.1), optax.adam(0.1)
    ),
    "muon": optax.chain(optax.contrib.differentially_private_aggregate(0.5, 1.1, key=3), optax.contrib.muon(0.1)),
}


@pytest.mark.parametrize("tx", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_equals_one_device(strategy: str, tx: Any) -> None:
    with jax.enable_x64(True):
        want = trained(tx, start())
        mesh = jaxshard.make_mesh(replica=2) if strategy == "hsdp" else jaxshard.make_mesh()
        opt = getattr(jaxshard, strategy)(tx, mesh, min_shard_size=1)
        params, state = trained(opt, opt.place(start()))
        for got, wanted in zip(jax.tree.leaves((params, state)), jax.tree.leaves(want), strict=True):
            if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
                got, wanted = map(jax.random.key_data, (got, wanted))
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)
        assert jax.tree.map(lambda x: x.sharding, params) == opt.shardings(params).params
        sizes = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(state) if x.shape == (6, 24)]
        assert strategy == "ddp" or sizes == [(6, 24 // mesh.shape["data"])] * len(sizes)


@pytest.mark.filterwarnings("ignore:.*cannot be sharded")
@pytest.mark.parametrize("devices", [1, 2, 3, 7])
def test_on_any_number_of_devices(devices: int) -> None:
    with jax.enable_x64(True):
        want, _ = trained(private(), start())
        opt = jaxshard.zero2(private(), jaxshard.make_mesh(devices=jax.devices()[:devices]), min_shard_size=1)
        got, _ = trained(opt, opt.place(start()))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13), got, want)


def test_without_params_and_with_explicit_axes() -> None:
    with jax.enable_x64(True):
        want, _ = trained(private(), start(), with_params=False)
        mesh = jax.make_mesh((8,), ("data",))
        for opt in (jaxshard.zero2(private(), mesh, min_shard_size=1), jaxshard.zero2(private(), min_shard_size=1)):
            got, _ = trained(opt, opt.place(start()), with_params=False)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13), got, want)


def test_masters_widen_the_gradients() -> None:
    opt = jaxshard.zero2(private(), min_shard_size=1, master_dtype="float32")
    params, state = trained(opt, opt.place(start("bfloat16")))
    wide = jax.tree.map(lambda x: x.astype("float32"), start("bfloat16"))
    want = wide
    plain = private().init(wide)
    of_each = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))
    for batch in batches():
        narrow = jax.tree.map(lambda x: x.astype("bfloat16"), want)
        grads = jax.jit(of_each)(narrow, jax.tree.map(lambda x: x[:, None], batch))
        updates, plain = private().update(jax.tree.map(lambda g: g.astype("float32"), grads), plain, want)
        want = optax.apply_updates(want, updates)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-2), state.extra["master"], want)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))


def test_other_shapes_are_refused_as_before() -> None:
    opt = jaxshard.zero2(optax.adamw(0.1), min_shard_size=1)
    params = opt.place(start("float32"))
    state = opt.init(params)
    of_each = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), params)
    with pytest.raises(ValueError, match=r"b has shape \(4, 24\), but that parameter has \(24,\)"):
        opt.update(of_each, state, params)
    opt = jaxshard.zero2(private(), min_shard_size=1)
    state = opt.init(params)
    uneven = of_each | {"v": jnp.ones((5, *params["v"].shape))}
    with pytest.raises(ValueError, match=r"b has shape \(4, 24\)"):
        opt.update(uneven, state, params)


def test_a_devices_own_examples_are_refused() -> None:
    opt = jaxshard.zero2(private(), min_shard_size=1)
    params = opt.place(start("float32"))
    state = opt.init(params)

    def body(params, state, x):
        grads = jax.tree.map(lambda p: jnp.ones((4, *p.shape)) * x[0, 0], params)
        return opt.update(grads, state, params)[0]

    P = jax.sharding.PartitionSpec
    specs = opt.shardings(params)
    in_specs = (P(), jax.tree.map(lambda s: s.spec, specs.state), P("data"))
    with pytest.raises(ValueError, match="gradients of each example inside a shard_map"):
        jax.shard_map(body, mesh=opt.mesh, in_specs=in_specs, out_specs=P())(params, state, jnp.ones((8, 1)))
