"""Names of JAX's primitives, in the groups that walks over traced programs tell apart. One list for each question."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Which programs an equation runs.

INLINED = _names("jit pjit closed_call core_call")
"""Calls that are what they call."""

REMAT = _names("remat remat2 checkpoint")
"""Calls that the backward pass computes again."""

CALLS = INLINED | REMAT | _names("custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr")
"""All calls, where nothing is differentiated."""

# What happens to a value.

CASTS = _names("pvary pcast")
"""Only the type changes."""

HANDING_ON = _names("convert_element_type copy copy_p reshape squeeze expand_dims optimization_barrier")
"""The same numbers come out, cast or in another shape."""

POINTWISE = _names(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2
    expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul
    name ne neg nextafter not or pcast polygamma population_count pow pvary real reduce_precision
    regularized_incomplete_beta rem reshard round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
    """
)
"""Each element of the result depends on the elements at its place alone."""

KEEPS_FILL = _names("broadcast_in_dim reshape rev slice squeeze transpose")
"""Of arrays that hold one number everywhere, such an array is made."""

FILL_IF_ANY = _names("reduce_and reduce_max reduce_min reduce_or")
"""Of equal numbers, that number."""

PER_DEVICE = (
    "axis_index", "all_", "pbroadcast", "pmax", "pmin", "ppermute", "psum", "reduce_scatter", "ragged_all"
)  # fmt: skip
"""How the names of collectives begin, and of what differs between devices."""

LINEAR_ALGEBRA = _names("cholesky eig eigh geqrf householder_product lu qr schur svd triangular_solve tridiagonal")
"""Operations on whole matrices, batched over the dims before the last two."""
