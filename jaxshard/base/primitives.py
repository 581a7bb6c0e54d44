"""Names of JAX's primitives: one list for each question that a walk over a traced program asks."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Equations that run an inner program.

INLINED = _names("jit pjit closed_call core_call")
"""Calls that only run their inner program."""

REMAT = _names("remat remat2 checkpoint")
"""Calls that the backward pass recomputes."""

CALLS = INLINED | REMAT | _names("composite custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr")
"""All calls. A custom_jvp or custom_vjp equals its inner program only where nothing is differentiated."""

LOOPS = _names("cond scan while")
"""Control flow, whose inner programs are followed."""

# Operations by what they do to a value.

CASTS = _names("pvary pcast")
"""Change only a value's type: the mesh axes over which it varies."""

SAME_NUMBERS = _names("convert_element_type copy copy_p reshape squeeze expand_dims optimization_barrier")
"""Return the same numbers, cast or in another shape."""

MOVES = SAME_NUMBERS | _names(
    """
    broadcast_in_dim clamp concatenate cummax cummin device_put dynamic_slice dynamic_update_slice freeze gather get max
    min name new_ref pad pcast pvary reduce_max reduce_min reduce_precision reshard rev scatter select_n
    sharding_constraint slice sort split stack stop_gradient swap tile top_k transpose unstack
    """
)
"""Return numbers of their operands: moved, chosen, or rounded."""

READS_REFS = _names("get freeze free_ref")
"""Take mutable arrays, and write to none."""

POINTWISE = _names(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2
    expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic
    lt lt_to max min mul mulhi name ne neg nextafter not one_minus_square or pcast polygamma population_count pow
    pvary real reduce_precision rem reshard round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
    """
)
"""Each element of the result depends only on the operands' elements at the same index."""

PURE = _names(
    """
    approx_top_k argmax argmin broadcast_in_dim cholesky cholesky_update concatenate conv_general_dilated cumlogsumexp
    cummax cummin cumprod cumsum custom_linear_solve dot_general dynamic_slice dynamic_update_slice eig eigh fft
    gather hessenberg householder_product iota lu lu_pivots_to_permutation ormqr pad platform_index pure_callback qr
    ragged_dot_general random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap
    random_wrap reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window
    reduce_window_max reduce_window_min reduce_window_sum reduce_xor regularized_incomplete_beta reshape rev
    rng_bit_generator scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub schur select_and_gather_add
    select_and_scatter_add slice sort split squeeze stack svd symmetric_product threefry2x32 tile top_k transpose
    triangular_solve tridiagonal tridiagonal_solve unstack
    """
)
"""Depend on their operands and parameters alone: equal ones give equal results on every device.

(`regularized_incomplete_beta` goes on until all elements converge, so that each depends on all, in its last digits.)
"""

KEEPS_FILL = _names("broadcast_in_dim reshape rev slice squeeze transpose")
"""Turn an array that holds one number in every element into another such array."""

FILL_IF_ANY = _names("reduce_and reduce_max reduce_min reduce_or")
"""Reduce equal numbers to that number."""

ADDS = _names(
    """
    add add_any sub neg real imag broadcast_in_dim transpose slice concatenate reduce_sum name stop_gradient
    sharding_constraint pad rev
    """
)
"""Are linear in all operands together."""

KEEPS_SIGN = _names(
    """
    add add_any mul div min sqrt rsqrt pow broadcast_in_dim transpose slice concatenate dot_general reduce_sum
    reduce_max reduce_min cumsum name stop_gradient sharding_constraint
    """
)
"""Make no number below 0 of numbers that are not."""

ALL_REDUCES = _names("psum psum_invariant pmax pmin")
"""Give all devices along their `axes` one result, whatever each of them had."""

DIFFERS = _names("axis_index ppermute reduce_scatter all_to_all ragged_all_to_all")
"""Give each device along a mesh axis another result, also where all operands are equal on all."""

NO_GRADIENT = _names("stop_gradient sign floor ceil round")
"""Have a gradient of zero, though their results are floating."""

READS_KEYS = _names("random_wrap threefry2x32 rng_bit_generator")
"""Take whole numbers for the state of a random generator."""

DRAWS = _names("random_bits random_gamma rng_bit_generator rng_uniform threefry2x32")
"""Make random numbers."""

DEBUGGING = _names("debug_callback debug_print")
"""Call the host for a look at values, on each device that computes them; nothing depends on that."""

LINEAR_ALGEBRA = _names("cholesky eig eigh geqrf householder_product lu qr schur svd triangular_solve tridiagonal")
"""Operations on whole matrices, batched over the dims before the last two."""

# What operations cost; `jaxshard.plan` asks.

FUSED = _names(
    """abs add add_any and and_ argmax ceil clamp convert_element_type copy eq floor ge gt imag integer_pow iota
    is_finite le lt max min mul ne neg nextafter not not_ or or_ real rem round select_n shift_left
    shift_right_arithmetic shift_right_logical sign square sub xor bitcast_convert_type axis_index broadcast_in_dim pad
    slice transpose rev concatenate stack dynamic_slice complex conj clip population_count reduce_precision
    exp exp2 expm1 log log1p tanh erf erf_inv erfc logistic pow sqrt rsqrt cbrt div sin cos tan atan2 sinh cosh asin
    acos atan lgamma digamma random_bits"""
)
"""Work element by element, or by index alone; the compiler fuses them into the operation that reads the result."""

ATTENTION_PRODUCTS = {
    ("fused_attention", "cudnn"): 2,
    ("fused_attention", "splash"): 2,
    ("fused_attention_backward", "cudnn"): 5,
    ("fused_attention_backward", "splash"): 7,
}
"""Matrix products that causal attention in one kernel makes, for each pair of positions of a head that it looks at, by
primitive and kernel. Its operands and results alone are in memory. The backward pass makes the weights again: splash
attention twice, once for the queries' gradient and once for that of keys and values.
"""

REDUCTIONS = _names(
    "reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin cumsum cumlogsumexp"
)

UPDATES = _names("dynamic_update_slice scatter scatter-add scatter_add")
"""Write into their first operand."""

MEMORYLESS = _names("broadcast_in_dim iota axis_index random_bits")
"""Read almost no memory, so they are fused into every reader, even where there are several."""

PRODUCTS = _names("dot_general conv_general_dilated")
"""Matrix products and convolutions. On TPU both take bfloat16 where their precision is the default."""

FUSED_INTO = {
    "dot_general": _names("transpose slice rev convert_element_type"),
    "conv_general_dilated": _names("rev"),
}
"""What every compiler makes part of a product that reads its result; a convolution can read its kernel backwards. Other
work is not done again at each place of a convolution's window.
"""

PASSED_TO_PRODUCTS = _names("transpose slice rev convert_element_type copy")
"""Pass a value on to a product; XLA for TPU may narrow its dtype on the way."""

VIEWS = _names("reshape squeeze expand_dims optimization_barrier pvary pcast name copy_p")
"""Return another view of the same memory; no bytes move."""

GATHERS = _names("all_gather all_gather_invariant")

COLLECTIVE_KINDS = dict.fromkeys(_names("psum psum_invariant psum2 pmax pmin pmean"), "all-reduce") | {
    **dict.fromkeys(GATHERS, "all-gather"),
    "reduce_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
}
"""The kind (`inspect.Collective.kind`) of each collective primitive of the local view."""
