"""Fourier transforms and matrix kernels in an update, on leaves cut along any dim, against plain optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxshard

SHAPES = {"rows": (16, 24), "last": (3, 16), "first": (16, 3), "stack": (8, 8, 3), "middle": (3, 16, 5)}


def filtered(x):
    return jnp.fft.irfft(jnp.fft.rfft(x) * 0.5, x.shape[-1])


def in_a_loop(x):
    return lax.fori_loop(0, 2, lambda _, y: jnp.fft.ifft(jnp.fft.fft(y) * 0.5).real, x)


def in_a_branch(x):
    return lax.cond(x.sum() > 0, filtered, jnp.negative, x)


def in_a_scan(x):
    return lax.scan(lambda carry, row: (carry, jnp.fft.fft(row).real), 0.0, x)[1]


def positive(x):
    square = jnp.swapaxes(x, -1, -2) @ x / x.shape[-1]
    return square + jnp.eye(square.shape[-1])


def eigenvectors(x):
    """Without their signs, which differ from one device's in some draws; of eigenvalues that lie apart."""
    square = positive(x)
    return jnp.abs(x @ jnp.linalg.eigh(square + jnp.diag(3.0 * jnp.arange(square.shape[-1])))[1])


FFTS = {
    "last dim": filtered,
    "first dim": lambda x: jnp.fft.fft(x, axis=0).real,
    "all dims": lambda x: jnp.fft.irfftn(jnp.fft.rfftn(x), s=x.shape),
    "flat": lambda x: x + jnp.fft.rfft(x.reshape(-1)).real.sum(),
    "jit": lambda x: jax.jit(filtered)(x),
    "loop": in_a_loop,
    "branch": in_a_branch,
    "scan": in_a_scan,
}
KERNELS = {
    "sort": lambda x: jnp.sort(x, 0) + jnp.sort(x, -1),
    "cumsum": lambda x: jnp.cumsum(x, 0) + jnp.cumsum(x, -1),
    "cumsum and cummax": lambda x: jnp.cumsum(x, 0) + lax.cummax(x, 0),
    "cumsum and cumprod in a branch": lambda x: lax.cond(
        x.sum() > 0, lambda x: jnp.cumsum(x, 0) + jnp.cumprod(x, 0), lambda x: jnp.cumprod(x, 0) - jnp.cumsum(x, 0), x
    ),
    "qr": lambda x: jnp.matmul(*jnp.linalg.qr(x)),
    "svd": lambda x: x / jnp.linalg.svd(x, compute_uv=False).sum(),
    "eigh": lambda x: x + jnp.linalg.eigvalsh(positive(x)).sum(),
    "eigenvectors": eigenvectors,
    "cholesky": lambda x: x + jnp.linalg.cholesky(positive(x)).sum(),
    "lu": lambda x: x + jnp.linalg.inv(positive(x)).sum(),
    "solve": lambda x: jnp.swapaxes(jnp.linalg.solve(positive(x), jnp.swapaxes(x, -1, -2)), -1, -2),
    "windows": lambda x: lax.reduce_window(x, 0.0, lax.add, (3,) * x.ndim, (1,) * x.ndim, "SAME"),
    "callback": lambda x: jax.pure_callback(lambda y: np.asarray(y) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
}


def check(fn, strategy):
    tx = optax.stateless(lambda updates, params: jax.tree.map(fn, updates))
    rng = np.random.default_rng(0)
    grads = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    opt = getattr(jaxshard, strategy)(tx, jaxshard.make_mesh(), min_shard_size=2)
    assert all(leaf.dims for leaf in opt.layout(grads).params)
    got, _ = jax.jit(opt.update)(grads, opt.init(grads), opt.place(grads))
    want, _ = jax.jit(tx.update)(grads, tx.init(grads), grads)
    for name in grads:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("name", list(FFTS))
def test_transforms_of_cut_leaves(name, strategy):
    check(FFTS[name], strategy)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("name", list(KERNELS))
def test_kernels_that_take_no_cut_operands(name, strategy):
    check(KERNELS[name], strategy)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_transforms_in_an_init(strategy):
    """XLA 0.10.2's partitioner ends the process at a result cut into single elements, three ways."""
    tx = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.fft.fft, params),
        lambda grads, state, params=None: (jax.tree.map(lambda g, s: g * jnp.abs(s), grads, state), state),
    )
    params = {"last": np.random.default_rng(0).normal(size=(5, 7, 3)).astype(np.float32)}
    opt = getattr(jaxshard, strategy)(tx, jaxshard.make_mesh(devices=jax.devices()[:3]), min_shard_size=1)
    assert all(leaf.dims for leaf in opt.layout(params).params)
    np.testing.assert_allclose(opt.init(params)["last"], tx.init(params)["last"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.jit(opt.init)(params)["last"], tx.init(params)["last"], rtol=1e-4, atol=1e-5)
