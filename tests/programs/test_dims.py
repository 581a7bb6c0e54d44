"""Where a dim goes in an operation: each claim is measured, by moving elements along the dim and changing one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxshard.programs import dims
from jaxshard.programs.jaxprs import open_jaxpr
from jaxshard.programs.primitives import LINEAR_ALGEBRA, POINTWISE
from jaxshard.programs.table import KINDS

SIZE = 5  # of the dim, which some other dims have too, so that a wrong place fits


def dot(contract, batch):
    return lambda x, y: lax.dot_general(x, y, (contract, batch))


def gather(x, i, numbers, sizes):
    return lax.gather(x, i, lax.GatherDimensionNumbers(**numbers), sizes, mode="clip")


def scatter_add(x, i, u, numbers):
    return lax.scatter_add(x, i, u, lax.ScatterDimensionNumbers(**numbers), mode="clip")


def whole_slices(x, i):
    return gather(x, i, {"offset_dims": (0,), "collapsed_slice_dims": (0,), "start_index_map": (0,)}, (1, SIZE))


def convolution(images):
    numbers = (images, "HWIO", images)
    return lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def reduce_window(x, by, sizes, padding):
    start = -jnp.inf if by is lax.max else 0.0
    return lax.reduce_window(x, start, by, sizes, (1,) * x.ndim, padding)


CASES = {  # a function whose last operation is meant, and shapes of floats; whole numbers where a shape has "i"
    "add": (jnp.add, [(2, 5, 5), (2, 5, 5)]),
    "add to each": (lambda x, y: lax.add_p.bind(x, y), [(5, 5), (1, 5)]),
    "add a number": (lambda x, y: lax.add(x, lax.broadcast_in_dim(y, (5, 3), ())), [(5, 3), ()]),
    "broadcast": (lambda y: lax.broadcast_in_dim(y, (5, 5), (1,)), [(5,)]),
    "broadcast 1": (lambda y: lax.broadcast_in_dim(y, (5, 3), (0, 1)), [(1, 3)]),
    "select": (lambda x, y: lax.select(x > 0, x, y), [(5, 5), (5, 5)]),
    "clamp": (lambda x: lax.clamp(0.1, x, 0.5), [(5, 3)]),
    "reduce_sum": (lambda x: lax.reduce_sum(x, (1,)), [(5, 3, 5)]),
    "reduce_max": (lambda x: lax.reduce_max(x, (0, 2)), [(3, 5, 5)]),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), [(5, 5, 2)]),
    "cumsum": (lambda x: lax.cumsum(x, 1), [(5, 5)]),
    "sort": (lambda x: lax.sort(x, dimension=0), [(5, 5)]),
    "sort with keys": (lambda x, y: lax.sort([x, y], dimension=0), [(5, 5), (5, 5)]),
    "top_k": (lambda x: lax.top_k(x, 5), [(5, 5)]),
    "iota": (lambda: lax.broadcasted_iota(jnp.float32, (5, 5), 1), []),
    "reshape apart": (lambda x: x.reshape(5, 2, 5), [(10, 5)]),
    "reshape together": (lambda x: x.reshape(10, 5), [(5, 2, 5)]),
    "reshape over": (lambda x: x.reshape(2, 25), [(2, 5, 5)]),
    "reshape in between": (lambda x: x.reshape(3, 5, 2), [(5, 3, 2)]),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), [(5, 3, 5)]),
    "squeeze": (lambda x: lax.squeeze(x, (0, 2)), [(1, 5, 1, 5)]),
    "rev": (lambda x: lax.rev(x, (1,)), [(5, 5)]),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), [(5, 5), (5, 5)]),
    "pad": (lambda x, y: lax.pad(x, y, [(0, 0, 0), (0, 0, 1)]), [(5, 3), ()]),
    "slice": (lambda x: lax.slice(x, (0, 1), (5, 5)), [(5, 5)]),
    "slice in steps": (lambda x: lax.slice(x, (0, 0), (5, 5), (1, 2)), [(5, 5)]),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, i), (5, 2)), [(5, 5), "i"]),
    "dynamic_update_slice": (lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)), [(5, 5), (5, 2), "i"]),
    "split": (lambda x: lax.split(x, (2, 3), 1), [(5, 5)]),
    "dot": (dot(((1,), (0,)), ((), ())), [(5, 5), (5, 5)]),
    "dot of many": (dot(((2,), (1,)), ((0,), (0,))), [(5, 5, 3), (5, 3, 5)]),
    "dot of many, last": (dot(((0,), (1,)), ((2,), (0,))), [(3, 5, 5), (5, 3, 2)]),
    "dot free": (dot(((0,), (1,)), ((), ())), [(3, 5, 2), (5, 3)]),
    "conv": (convolution("NHWC"), [(5, 6, 6, 5), (3, 3, 5, 5)]),
    "conv, channels first": (convolution("NCHW"), [(5, 5, 6, 6), (3, 3, 5, 5)]),
    "max_pool": (lambda x: reduce_window(x, lax.max, (1, 2, 1), "VALID"), [(5, 6, 5)]),
    "max_pool over all": (lambda x: reduce_window(x, lax.max, (2, 2, 1), "SAME"), [(5, 5, 5)]),
    "sums of windows": (lambda x: reduce_window(x, lax.add, (1, 2, 1), "SAME"), [(5, 6, 5)]),
    "gather rows": (whole_slices, [(3, 5), "i4,1"]),
    "gather of many": (jax.vmap(lambda x, i: x[i]), [(5, 4), "i5"]),
    "scatter rows": (lambda x, i, u: x.at[i].add(u), [(3, 5), "i2", (2, 5)]),
    "scatter that subtracts": (lambda x, i, u: x.at[i].subtract(u), [(3, 5), "i2", (2, 5)]),
    "scatter of many": (jax.vmap(lambda x, i, u: x.at[i].set(u)), [(5, 4), "i5,2", (5, 2)]),
    "cholesky": (lambda x: lax.linalg.cholesky(x @ x.mT + 5 * jnp.eye(3), symmetrize_input=False), [(5, 3, 3)]),
    "eigh": (lambda x: lax.linalg.eigh(x, symmetrize_input=False), [(5, 3, 3)]),
    "svd": (lambda x: lax.linalg.svd(x, full_matrices=False), [(2, 5, 5, 3)]),
    "triangular_solve": (lambda x, y: lax.linalg.triangular_solve(x, y, left_side=True), [(5, 3, 3), (5, 3, 5)]),
    "fft": (lambda x: lax.fft(x.astype(jnp.complex64), "FFT", (5,)), [(5, 5)]),
    "optimization_barrier": (lambda x, y: lax.optimization_barrier((x, y)), [(5, 3), (3, 5)]),
}


def operands_of(shapes):
    rng = np.random.default_rng(3)
    for shape in shapes:
        if isinstance(shape, str):
            yield rng.integers(0, 3, [int(n) for n in shape[1:].split(",") if n]).astype(np.int32)
        else:
            yield rng.normal(size=shape).astype(np.float32)


def last_equation(fn, shapes):
    """The last operation of a function, as one of its operands, and these."""
    values = [*operands_of(shapes)]
    jaxpr = jax.make_jaxpr(fn)(*values)
    while any("jaxpr" in eqn.params for eqn in jaxpr.eqns):
        jaxpr = jax.make_jaxpr(lambda *xs, j=jaxpr: _inlined(j, xs))(*values)
    jaxpr = open_jaxpr(jaxpr)
    (*before, eqn) = jaxpr.eqns
    env = dict(zip(jaxpr.invars, values, strict=True))
    for one in before:
        outs = one.primitive.bind(*(_read(env, v) for v in one.invars), **one.params)
        env |= dict(zip(one.outvars, outs if one.primitive.multiple_results else [outs], strict=True))

    def run(*operands):
        outs = eqn.primitive.bind(*map(jnp.asarray, operands), **eqn.params)
        return [np.asarray(x) for x in (outs if eqn.primitive.multiple_results else [outs])]

    return eqn, run, [np.asarray(_read(env, v)) for v in eqn.invars]


def _read(env, v):
    return v.val if hasattr(v, "val") else env[v]


def _inlined(jaxpr, values):
    opened = open_jaxpr(jaxpr)
    env = dict(zip(opened.invars, values, strict=True)) | dict(zip(opened.constvars, jaxpr.consts, strict=True))
    for one in opened.eqns:
        operands = [_read(env, v) for v in one.invars]
        if "jaxpr" in one.params:
            outs = _inlined(one.params["jaxpr"], operands)
        else:
            outs = one.primitive.bind(*operands, **one.params)
            outs = outs if one.primitive.multiple_results else [outs]
        env |= dict(zip(one.outvars, outs, strict=True))
    return [_read(env, v) for v in opened.outvars]


def places(x):
    return [None, *(d for d, size in enumerate(x.shape) if size % SIZE == 0 and size)]


def moved(x, d):
    """The elements along a dim, each in the place of the next."""
    return x if d is None else np.roll(x, x.shape[d] // SIZE, d)


def with_another(x, d, rng):
    """Element 2 along a dim is another one."""
    if d is None:
        return x
    size = x.shape[d] // SIZE
    place = (slice(None),) * d + (slice(2 * size, 3 * size),)
    x = x.copy()
    x[place] = rng.permutation(x[place].ravel()).reshape(x[place].shape) + (x.dtype.kind == "f")
    return x


def is_apart(run, operands, ins, outs):
    rng = np.random.default_rng(0)
    before = run(*operands)
    after = run(*(moved(x, d) for x, d in zip(operands, ins, strict=True)))
    alike = all(np.allclose(moved(x, d), y, equal_nan=True) for x, y, d in zip(before, after, outs, strict=True))
    changed = run(*(with_another(x, d, rng) for x, d in zip(operands, ins, strict=True)))
    others = [
        np.allclose(np.delete(_by_element(x, d), 2, 0), np.delete(_by_element(y, d), 2, 0), equal_nan=True)
        for x, y, d in zip(before, changed, outs, strict=True)
        if d is not None
    ]
    same = [np.array_equal(x, y) for x, y, d in zip(before, changed, outs, strict=True) if d is None]
    return alike and all(others) and all(same)


def _by_element(x, d):
    size = x.shape[d] // SIZE
    return np.moveaxis(x, d, 0).reshape(SIZE, size, *np.delete(x.shape, d))


@pytest.mark.parametrize("name", CASES)
def test_what_keeps_a_dim_apart_does(name):
    """All places that the dim could have, in all operands and results: no claim is wrong, and the right one is made."""
    eqn, run, operands = last_equation(*CASES[name])
    claimed = []
    for ins in itertools.product(*map(places, operands)):
        for outs in itertools.product(*map(places, run(*operands))):
            if all(d is None for d in outs) or not dims.keeps_apart(eqn, ins, outs):
                continue
            claimed.append((ins, outs))
            assert is_apart(run, operands, ins, outs), (ins, outs)
    assert claimed or name == "reshape in between"


def test_every_rule_is_measured():
    pointwise = POINTWISE | LINEAR_ALGEBRA  # of which two of each kind are
    names = {last_equation(*case)[0].primitive.name for case in CASES.values()}
    alike = {f"reduce_{name}" for name in ("min", "prod", "and", "or", "xor")} | {"argmin"}
    alike |= {"cumprod", "cummax", "cummin", "cumlogsumexp", "scatter-mul", "scatter-min", "scatter-max"}
    alike |= {"reduce_window_min"}
    known = {name for name, kind in KINDS.items() if kind in dims._RULES}
    assert known - pointwise - alike - names == {"lu_pivots_to_permutation"}


# Where the batch's rows lie.

ROWS = 6


W = np.random.default_rng(1).normal(size=(4, 4))
X = np.random.default_rng(2).normal(size=(ROWS, 4))
ORDER = np.array([3, 0, 5, 1, 4, 2])


def normed(x):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)


def with_layers(x, w):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum(-1)), x, jnp.stack([w, w]))


LIE = {  # a function of rows and weights, and the dims in which its result has the rows
    "batch norm": (lambda x, w: normed(x), {0}),
    "a network with batch norm": (lambda x, w: jax.nn.relu(normed(x)) @ w, {0}),
    "transposed": (lambda x, w: x.T, {1}),
    "all pairs": (lambda x, w: x @ w @ x.T, {0, 1}),
    "contrastive": (lambda x, w: jnp.diagonal(jax.nn.log_softmax(x @ x.T)), {0}),
    "over the other rows": (lambda x, w: jax.nn.logsumexp(x @ w @ x.T, 0), {0}),
    "centred apart": (lambda x, w: jax.vmap(lambda row: (row - x.mean(0)).sum())(x), {0}),
    "layers": (lambda x, w: with_layers(normed(x), w)[0], {0}),
    "each layer's": (lambda x, w: with_layers(normed(x), w)[1], {1}),
    "sorted": (lambda x, w: jnp.sort(x, 0), set()),
    "ordered": (lambda x, w: x[jnp.argsort(x[:, 0])], set()),
    "reversed": (lambda x, w: x[::-1], set()),
    "rolled": (lambda x, w: jnp.roll(x, 1, 0), set()),
    "halves": (lambda x, w: jnp.concatenate([x[3:], x[:3]]), set()),
    "sums so far": (lambda x, w: jnp.cumsum(x, 0), set()),
    "mixed up": (lambda x, w: x.T.reshape(ROWS, 4), set()),
    "a product with rows": (lambda x, w: x.T @ x, set()),
}


@pytest.mark.parametrize("name", LIE)
def test_where_rows_lie(name):
    """Rows in another order give a result in that order."""
    fn, wanted = LIE[name]
    (found,) = dims.dims_of_rows(jax.make_jaxpr(fn)(X, W), [True, False])
    assert found == wanted
    moved_rows, result = fn(X[ORDER], W), fn(X, W)
    for d in found if len(found) == 1 else ():
        np.testing.assert_allclose(moved_rows, jnp.take(result, ORDER, d), rtol=1e-4, atol=1e-5)
    if name == "all pairs":
        np.testing.assert_allclose(moved_rows, result[ORDER][:, ORDER], rtol=1e-4, atol=1e-5)


def test_places_and_draws_go_with_their_rows():
    def fn(x):
        return x[:, 0] + jnp.arange(ROWS), x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)

    places, draws = dims.dims_of_rows(jax.make_jaxpr(fn)(X), [True])
    assert places == draws == {0}
