"""Products of activations and weights, each followed by an operation: which, and that nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxshard.programs.jaxprs import core, equations
from jaxshard.programs.questions import variables_that_depend
from jaxshard.programs.rerun import followed

ROWS = 6
RNG = np.random.default_rng(0)
X, W, V = RNG.normal(size=(ROWS, 4)), RNG.normal(size=(4, 4)), RNG.normal(size=(ROWS, 4))
IMAGES, KERNEL = RNG.normal(size=(ROWS, 5, 5, 4)), RNG.normal(size=(3, 3, 4, 4))


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def scanned(x, w):
    return lax.scan(lambda h, each: (jnp.tanh(h @ each), None), x, jnp.stack([w] * 3))[0]


CASES = {  # (x, w) -> result, and the dims of the batch's rows in the products that are followed
    "dense": (lambda x, w: x @ w, X, W, [0]),
    "dense from the left": (lambda x, w: w.T @ x.T, X, W, [1]),
    "conv": (conv, IMAGES, KERNEL, [0]),
    "layers": (scanned, X, W, [0]),
    "remat": (lambda x, w: jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w)(x), X, W, [0, 0]),
    "a call": (lambda x, w: jax.jit(lambda x: x @ w)(jax.jit(lambda x: x @ w)(x)), X, W, [0, 0]),
    "many heads": (lambda x, w: jnp.einsum("bd,dhe->bhe", x, w.reshape(4, 2, 2)), X, W, [0]),
    "attention": (lambda x, w: jax.nn.softmax((x @ w) @ (x @ w).T) @ x, X, W, [0, 0]),
    "weights alone": (lambda x, w: x * (w @ w).sum(), X, W, []),
    "weights as long as the batch": (lambda x, w: (x[0] * (w @ w.T).sum()).sum(), X, V, []),
    "statistics": (lambda x, w: x.T @ x + w, X, W, []),
    "merged with positions": (lambda x, w: x.reshape(-1, 4) @ w, IMAGES, W, []),
}


@pytest.mark.parametrize("name", CASES)
def test_products_are_followed(name):
    fn, x, w, wanted = CASES[name]
    seen = []

    def then(y, dim):
        seen.append(dim)
        assert y.shape[dim] == ROWS
        return 2.0 * y

    program = jax.make_jaxpr(fn)(x, w)
    new = followed(program, [True, False], ROWS, variables_that_depend, then)
    count = sum(eqn.primitive.name == "mul" for eqn in equations(new)) - sum(
        eqn.primitive.name == "mul" for eqn in equations(program)
    )
    assert count == len(wanted)
    assert seen == wanted[: len(seen)]
    assert len(seen) >= len(set(wanted))
    same = followed(program, [True, False], ROWS, variables_that_depend, lambda y, _: y + 0.0)
    np.testing.assert_allclose(core().jaxpr_as_fun(same)(x, w)[0], fn(x, w), rtol=1e-5, atol=1e-6)
    if name in ("dense", "conv"):
        np.testing.assert_allclose(core().jaxpr_as_fun(new)(x, w)[0], 2 * fn(x, w), rtol=1e-5, atol=1e-6)


def test_it_can_be_differentiated():
    program = jax.make_jaxpr(scanned)(X, W)
    new = core().jaxpr_as_fun(followed(program, [True, False], ROWS, variables_that_depend, lambda y, _: y + 0.0))
    grads = jax.grad(lambda w: new(X, w)[0].sum())(W)
    np.testing.assert_allclose(grads, jax.grad(lambda w: scanned(X, w).sum())(W), rtol=1e-5)
