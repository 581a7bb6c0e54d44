"""Two traced programs side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxshard.programs.paired import Partners, Unlike, paired, same, same_program


def traced(f, *shapes):
    return jax.make_jaxpr(f)(*(jnp.zeros(shape) for shape in shapes))


def looped(number):
    return lambda x: lax.fori_loop(0, 3, lambda i, y: y * number + i, x)


def branching(one, two):
    return lambda x, y: lax.cond(y[0] > 0, one, two, x)


A, B = np.arange(3.0), np.arange(3.0) + 1
ALIKE = {
    "operations": (lambda x, y: jnp.sin(x) - y, lambda a, b: jnp.sin(a) - b),
    "constants": (lambda x, y: x + A, lambda x, y: x + A.copy()),
    "a loop": (lambda x, y: looped(2.0)(x), lambda x, y: looped(2.0)(x)),
    "a branch": (branching(jnp.sin, jnp.cos), branching(jnp.sin, jnp.cos)),
}  # fmt: skip
UNLIKE = {
    "another operand": (lambda x, y: x - y, lambda x, y: y - x),
    "another number": (lambda x, y: x * 2, lambda x, y: x * 3),
    "another constant": (lambda x, y: x + A, lambda x, y: x + B),
    "a constant for a number": (lambda x, y: x + A, lambda x, y: x + 1),
    "another operation": (lambda x, y: jnp.sin(x), lambda x, y: jnp.cos(x)),
    "another parameter": (lambda x, y: jnp.cumsum(x), lambda x, y: jnp.cumsum(x[::-1])[::-1]),
    "one operation more": (lambda x, y: x + y, lambda x, y: x + y + y),
    "another result": (lambda x, y: (x + y, x - y), lambda x, y: (x - y, x + y)),
    "in a loop": (lambda x, y: looped(2.0)(x), lambda x, y: looped(2.5)(x)),
    "in a branch": (branching(jnp.sin, jnp.cos), branching(jnp.cos, jnp.sin)),
    "zero with another sign": (lambda x, y: x * 0.0, lambda x, y: x * -0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_alike(name):
    one, two = (traced(f, 3, 3) for f in ALIKE[name])
    assert same_program(one, two)
    assert same(one, two)


@pytest.mark.parametrize("name", UNLIKE)
def test_unlike(name):
    one, two = (traced(f, 3, 3) for f in UNLIKE[name])
    assert not same_program(one, two)
    assert same_program(one, one)


def test_another_shape_is_another_program():
    assert not same_program(traced(jnp.sin, 3), traced(jnp.sin, 4))


def test_equations_come_in_pairs_until_they_differ():
    one = traced(lambda x: jnp.exp(jnp.cos(jnp.sin(x))), 3)
    two = traced(lambda x: jnp.exp(jnp.tanh(jnp.sin(x))), 4)
    partners, found = Partners(), []
    pairs = ((a.primitive.name, partners.all_are(a.invars, b.invars)) for a, b in paired(one, two, partners))
    with pytest.raises(Unlike) as parted:
        found.extend(pairs)
    assert found == [("sin", True)]
    assert (parted.value.one.primitive.name, parted.value.two.primitive.name) == ("cos", "tanh")
    assert partners.are(one.jaxpr.eqns[0].outvars[0], two.jaxpr.eqns[0].outvars[0])
    assert not partners.are(one.jaxpr.eqns[1].outvars[0], two.jaxpr.eqns[1].outvars[0])


def test_a_program_that_ends_first():
    one, two = traced(jnp.sin, 3), traced(lambda x: jnp.sin(jnp.sin(x)), 3)
    with pytest.raises(Unlike) as parted:
        list(paired(one, two, Partners()))
    assert parted.value.one is None
    assert parted.value.two.primitive.name == "sin"


def test_values_are_equal_bit_for_bit():
    assert same(np.float32(np.nan), np.float32(np.nan))
    assert not same(0.0, -0.0)
    assert not same(1, 1.0)
    assert not same(np.float32(1), np.float64(1))
    assert same((1, [2, "a"]), (1, [2, "a"]))
    assert not same((1, [2]), (1, (2,)))
