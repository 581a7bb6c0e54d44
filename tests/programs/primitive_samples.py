"""One use of each primitive that an update may contain in the local view: a function, and its operands' kinds.

Kinds: f, floats between 0 and 1; i, small integers; u, unsigned ones; b, booleans; c, complex numbers; n, floats of
both signs. Primitives that this JAX lacks are skipped.
"""

import jax
import jax.ad_checkpoint
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax import lax

KINDS = {
    "f": lambda rng, shape: rng.uniform(0.1, 0.9, shape).astype(np.float32),
    "n": lambda rng, shape: rng.normal(size=shape).astype(np.float32),
    "i": lambda rng, shape: rng.integers(1, 20, shape).astype(np.int32),
    "u": lambda rng, shape: rng.integers(1, 20, shape).astype(np.uint32),
    "b": lambda rng, shape: rng.integers(0, 2, shape).astype(bool),
    "c": lambda rng, shape: (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(np.complex64),
}


def operands(kinds, shape):
    rng = np.random.default_rng(5)
    return [KINDS[kind](rng, shape) for kind in kinds]


def of_lax(kinds, names):
    return {name: (getattr(lax, name.rstrip("_")), kinds) for name in names.split() if hasattr(lax, name.rstrip("_"))}


def bound(name, kinds, **params):
    """Binds a primitive that has no function."""
    primitive = next((p for p in map(vars(lax).get, [f"{name}_p"]) if p is not None), None)
    primitive = primitive or getattr(jax.extend.core.primitives, f"{name}_p", None)
    return {name: (lambda *args: primitive.bind(*args, **params), kinds)} if primitive else {}


UNARY = """abs asin asinh atan atanh acos bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2
expm1 floor is_finite lgamma log log1p log2 logistic neg round rsqrt sign sin sinh sqrt square tan tanh"""

POINTWISE = {
    **of_lax("f", UNARY),
    "acosh": (lambda x: lax.acosh(x + 1), "f"),
    **of_lax("nn", "add atan2 div eq ge gt le lt max min mul ne nextafter rem sub pow"),
    **of_lax("ff", "igamma igammac igamma_grad_a"),
    **of_lax("i", "population_count clz"),
    **of_lax("c", "conj imag real"),
    **of_lax("nn", "complex"),
    **of_lax("ii", "shift_left shift_right_arithmetic shift_right_logical mulhi"),
    "and": (lax.bitwise_and, "ii"),
    "or": (lax.bitwise_or, "ii"),
    "xor": (lax.bitwise_xor, "ii"),
    "not": (lax.bitwise_not, "i"),
    "add_any": (lambda x: jax.vjp(lambda x: (x * 2, x * 3), x)[1]((x, x))[0], "n"),
    "bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, jnp.int32), "n"),
    "clamp": (lambda x: lax.clamp(0.2, x, 0.5), "f"),
    "convert_element_type": (lambda x: x.astype(jnp.bfloat16), "n"),
    "copy": (jnp.copy, "n"),
    "eq_to": (lambda x, y: jax.extend.core.primitives.eq_to_p.bind(x, y), "nn"),
    "integer_pow": (lambda x: x**3, "n"),
    "le_to": (lambda x, y: jax.extend.core.primitives.le_to_p.bind(x, y), "nn"),
    "lt_to": (lambda x, y: jax.extend.core.primitives.lt_to_p.bind(x, y), "nn"),
    "name": (lambda x: jax.ad_checkpoint.checkpoint_name(x, "here"), "n"),
    "polygamma": (lambda x: jax.scipy.special.polygamma(1, x), "f"),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 3), "n"),
    "select_n": (lambda which, x, y: lax.select(which, x, y), "bnn"),
    "zeta": (lambda x: lax.zeta(x + 2, x + 1), "f"),
    **bound("one_minus_square", "n"),
}


# Operations on whole arrays.


def spd(x):
    return x @ x.T + 3 * jnp.eye(len(x))


def window(which, start):
    return lambda x: lax.reduce_window(x, start, which, (2, 2), (1, 1), "VALID")


def scattered(how):
    return lambda x: getattr(x.at[jnp.array([0, 2, 2])], how)(2.0)


def key():
    return jax.random.key(3)


def solved(x):
    return lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: b / 2)


def lu_back(x):
    return lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(x[:, :4])[1], 4)


def tridiagonal_solve(x):
    return lax.linalg.tridiagonal_solve(x[0], x[1] + 3, x[2], x.T)


def ragged(x):
    return lax.ragged_dot(x, jnp.ones((2, 6, 3)), jnp.array([1, 3]))


def householder(x):
    return lax.linalg.householder_product(x[:, :3], x[0, :3])


def by_name(x, name, *args, **params):
    found = getattr(jax.extend.core.primitives, f"{name}_p", None) or getattr(lax.linalg, f"{name}_p")
    return found.bind(x, *args, **params)


def adjacent(x):
    return jax.jvp(window(lax.max, -np.inf), (x,), (x,))[1]


def at_most(x):
    return jax.grad(lambda x: window(lax.max, -np.inf)(x).sum())(x)


PURE = {
    "approx_top_k": (lambda x: lax.approx_max_k(x, 2)[0], "n"),
    "argmax": (lambda x: jnp.argmax(x, 1), "n"),
    "argmin": (lambda x: jnp.argmin(x, 1), "n"),
    "broadcast_in_dim": (lambda x: jnp.broadcast_to(x, (2, *x.shape)), "n"),
    "cholesky": (lambda x: jnp.linalg.cholesky(spd(x)), "n"),
    "cholesky_update": (lambda x: lax.linalg.cholesky_update(jnp.linalg.cholesky(spd(x)).T, x[:, 0]), "n"),
    "concatenate": (lambda x: jnp.concatenate([x, x]), "n"),
    "conv_general_dilated": (lambda x: jnp.convolve(x[0], x[1, :3]), "n"),
    "cumlogsumexp": (lax.cumlogsumexp, "n"),
    "cummax": (lax.cummax, "n"),
    "cummin": (lax.cummin, "n"),
    "cumprod": (lax.cumprod, "n"),
    "cumsum": (lax.cumsum, "n"),
    "custom_linear_solve": (solved, "n"),
    "dot_general": (lambda x: x @ x.T, "n"),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (1, jnp.argmax(x[0])), (2, 2)), "n"),
    "dynamic_update_slice": (lambda x: lax.dynamic_update_slice(x, x[:1, :1], (1, jnp.argmax(x[0]))), "n"),
    "eig": (lambda x: lax.linalg.eig(x[:, :4], compute_left_eigenvectors=False)[0], "n"),
    "eigh": (lambda x: jnp.linalg.eigh(spd(x))[0], "n"),
    "fft": (jnp.fft.fft, "n"),
    "gather": (lambda x: x[jnp.array([0, 2, 1])], "n"),
    "hessenberg": (lambda x: lax.linalg.hessenberg(x[:, :4])[0], "n"),
    "householder_product": (householder, "n"),
    "iota": (lambda x: jnp.arange(3), "n"),
    "lu": (lambda x: lax.linalg.lu(x)[0], "n"),
    "lu_pivots_to_permutation": (lu_back, "n"),
    "ormqr": (lambda x: by_name(x, "ormqr", x[0, :4], x, left=True, transpose=False), "n"),
    "pad": (lambda x: jnp.pad(x, 1), "n"),
    "platform_index": (lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), "n"),
    "pure_callback": (lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x), "n"),
    "qr": (lambda x: lax.linalg.qr(x, full_matrices=False)[1], "n"),
    "ragged_dot_general": (ragged, "n"),
    "random_bits": (lambda x: jax.random.bits(key(), (3,)), "n"),
    "random_clone": (lambda x: jax.random.bits(jax.random.clone(key())), "n"),
    "random_fold_in": (lambda x: jax.random.bits(jax.random.fold_in(key(), 2)), "n"),
    "random_gamma": (lambda x: jax.random.gamma(key(), 2.0), "n"),
    "random_seed": (lambda x: jax.random.bits(jax.random.key(x[0, 0])), "i"),
    "random_split": (lambda x: jax.random.bits(jax.random.split(key())[1]), "n"),
    "random_unwrap": (lambda x: jax.random.key_data(key()), "n"),
    "random_wrap": (lambda x: jax.random.bits(jax.random.wrap_key_data(x[0, :2])), "u"),
    "reduce": (lambda x: lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,)), "n"),
    "reduce_and": (lambda x: jnp.all(x, 0), "b"),
    "reduce_max": (lambda x: jnp.max(x, 0), "n"),
    "reduce_min": (lambda x: jnp.min(x, 0), "n"),
    "reduce_or": (lambda x: jnp.any(x, 0), "b"),
    "reduce_prod": (lambda x: jnp.prod(x, 0), "n"),
    "reduce_sum": (lambda x: jnp.sum(x, 0), "n"),
    "reduce_window": (window(lambda a, b: a + 2 * b, 0.0), "n"),
    "reduce_window_max": (window(lax.max, -np.inf), "n"),
    "reduce_window_min": (window(lax.min, np.inf), "n"),
    "reduce_window_sum": (window(lax.add, 0.0), "n"),
    "reduce_xor": (lambda x: lax.reduce_xor(x, (0,)), "i"),
    "regularized_incomplete_beta": (lax.betainc, "fff"),
    "reshape": (lambda x: x.reshape(-1), "n"),
    "rev": (lambda x: x[::-1], "n"),
    "rng_bit_generator": (lambda x: lax.rng_bit_generator(x[0, :4], (3,))[1], "u"),
    "scatter": (scattered("set"), "n"),
    "scatter-add": (scattered("add"), "n"),
    "scatter-max": (scattered("max"), "n"),
    "scatter-min": (scattered("min"), "n"),
    "scatter-mul": (scattered("mul"), "n"),
    "scatter-sub": (scattered("subtract"), "n"),
    "schur": (lambda x: lax.linalg.schur(spd(x))[0], "n"),
    "select_and_gather_add": (adjacent, "n"),
    "select_and_scatter_add": (at_most, "n"),
    "slice": (lambda x: x[1:3], "n"),
    "sort": (jnp.sort, "n"),
    "split": (lambda x: jnp.split(x, 2)[1], "n"),
    "squeeze": (lambda x: jnp.squeeze(x[:1]), "n"),
    "stack": (lambda x: jnp.stack([x, x]), "n"),
    "svd": (lambda x: jnp.linalg.svd(x, compute_uv=False), "n"),
    "symmetric_product": (lambda x: lax.linalg.symmetric_product(x, spd(x)), "n"),
    "threefry2x32": (lambda x: jax.extend.random.threefry_2x32(x[0, :2], x[1]), "u"),
    "tile": (lambda x: jnp.tile(x, 2), "n"),
    "top_k": (lambda x: lax.top_k(x, 2)[0], "n"),
    "transpose": (jnp.transpose, "n"),
    "triangular_solve": (lambda x: lax.linalg.triangular_solve(spd(x), x, left_side=True), "n"),
    "tridiagonal": (lambda x: lax.linalg.tridiagonal(spd(x))[1], "n"),
    "tridiagonal_solve": (tridiagonal_solve, "n"),
    "unstack": (lambda x: jnp.unstack(x)[1], "n"),
}
