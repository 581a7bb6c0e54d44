"""Names of JAX's primitives, by what they do: the lists that walks over a traced program go by."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Plan: what operations cost.

FUSED = _names(
    """abs add add_any and and_ argmax ceil clamp convert_element_type copy eq floor ge gt imag integer_pow iota
    is_finite le lt max min mul ne neg nextafter not not_ or or_ real rem round select_n shift_left
    shift_right_arithmetic shift_right_logical sign square sub xor bitcast_convert_type axis_index broadcast_in_dim pad
    slice transpose rev concatenate stack dynamic_slice complex conj clip population_count reduce_precision
    exp exp2 expm1 log log1p tanh erf erf_inv erfc logistic pow sqrt rsqrt cbrt div sin cos tan atan2 sinh cosh asin
    acos atan lgamma digamma"""
)
"""Element by element, or by index alone: done where the result is read."""

REDUCTIONS = _names(
    "reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin cumsum cumlogsumexp"
)

UPDATES = _names("dynamic_update_slice scatter scatter-add scatter_add")
"""Write into their first operand."""

FROM_NOTHING = _names("broadcast_in_dim iota axis_index")
"""Read no memory worth counting, however many read the result."""

BENT = _names("transpose slice rev convert_element_type")
"""What every compiler does to an operand of a matrix product as it reads it."""

BENT_ON_TPU = _names("transpose slice convert_element_type copy")
"""Hand a value on to a matrix product, so that the compiler may narrow it on the way."""

VIEWS = _names("reshape squeeze expand_dims optimization_barrier pvary pcast name copy_p")
"""Other views of the same memory."""

GATHERS = _names("all_gather all_gather_invariant")

COLLECTIVE_KINDS = dict.fromkeys(_names("psum psum_invariant psum2 pmax pmin pmean"), "all-reduce") | {
    **dict.fromkeys(GATHERS, "all-gather"),
    "reduce_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
}
"""The collective (`inspect.Collective.kind`) that each primitive of the local view is."""
