"""Optimizers that update each matrix separately, written as users write them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon


def muon(rate=1e-2, **options):
    """Muon on all matrices, the last two dims of a leaf."""

    def numbers(params):
        return jax.tree.map(lambda p: MuonDimensionNumbers(p.ndim - 2, p.ndim - 1), params)

    return _chain(scale_by_muon(weight_dimension_numbers=numbers, **options), rate)


def shampoo(rate=1e-2):
    """Shampoo (Gupta et al. 2018) with momentum."""
    return _chain(_scale_by_shampoo(), rate)


def soap(rate=1e-2, frequency=2):
    """SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo's factors, updated by QR steps."""
    return _chain(_scale_by_soap(frequency), rate)


def _chain(matrices, rate):
    """Norms before and after, which couple all leaves; Adam for vectors."""

    def labels(params):
        return jax.tree.map(lambda p: "matrix" if p.ndim >= 2 else "other", params)

    inner = optax.partition({"matrix": matrices, "other": optax.scale_by_adam()}, labels)
    after = (optax.add_decayed_weights(0.1), optax.clip_by_global_norm(3.0), optax.scale(-rate))
    return optax.chain(optax.clip_by_global_norm(1.0), inner, *after)


def _transposed(x):
    return jnp.swapaxes(x, -1, -2)


def _eyes(params, dim, scale=1.0):
    return jax.tree.map(
        lambda p: jnp.broadcast_to(scale * jnp.eye(p.shape[dim], dtype=p.dtype), (*p.shape[:-2], *[p.shape[dim]] * 2)),
        params,
    )


class _Factors(NamedTuple):
    left: Any
    right: Any
    momentum: Any


def _scale_by_shampoo():
    def root(m):
        values, vectors = jnp.linalg.eigh(m)
        return (vectors * (jnp.maximum(values, 1e-6) ** -0.25)[..., None, :]) @ _transposed(vectors)

    def init(params):
        return _Factors(_eyes(params, -2, 0.1), _eyes(params, -1, 0.1), jax.tree.map(jnp.zeros_like, params))

    def update(grads, state, params=None):
        left = jax.tree.map(lambda g, m: 0.9 * m + g @ _transposed(g), grads, state.left)
        right = jax.tree.map(lambda g, m: 0.9 * m + _transposed(g) @ g, grads, state.right)
        updates = jax.tree.map(lambda g, a, b: root(a) @ g @ root(b), grads, left, right)
        momentum = jax.tree.map(lambda m, u: 0.9 * m + u, state.momentum, updates)
        return momentum, _Factors(left, right, momentum)

    return optax.GradientTransformation(init, update)


class _Soap(NamedTuple):
    count: Any
    leaves: Any  # by parameter: (mu, nu, left, right, left basis, right basis)


def _scale_by_soap(frequency):
    def init(params):
        zeros, spread = jax.tree.map(jnp.zeros_like, params), lambda d: jax.tree.map(_spread, _eyes(params, d))
        parts = (zeros, zeros, spread(-2), spread(-1), _eyes(params, -2), _eyes(params, -1))
        return _Soap(jnp.zeros((), jnp.int32), jax.tree.map(lambda *x: x, *parts))

    def _spread(eyes):
        return eyes * jnp.linspace(1, 3, eyes.shape[-1], dtype=eyes.dtype)

    def update(grads, state, params=None):
        count = state.count + 1

        def leaf(g, parts):
            mu, nu, left, right, a, b = parts
            mu = 0.9 * mu + 0.1 * g
            nu = 0.95 * nu + 0.05 * jnp.square(_transposed(a) @ g @ b)
            new = a @ ((_transposed(a) @ mu @ b) / (jnp.sqrt(nu) + 1e-8)) @ _transposed(b)
            left, right = 0.95 * left + 0.05 * g @ _transposed(g), 0.95 * right + 0.05 * _transposed(g) @ g
            a, b = jax.lax.cond(
                count % frequency == 1,
                lambda: (jnp.linalg.qr(left @ a)[0], jnp.linalg.qr(right @ b)[0]),
                lambda: (a, b),
            )
            return new, (mu, nu, left, right, a, b)

        found = jax.tree.map(leaf, grads, state.leaves)
        pick = lambda i: jax.tree.map(lambda _, x: x[i], grads, found)  # noqa: E731
        return pick(0), _Soap(count, pick(1))

    return optax.GradientTransformation(init, update)
